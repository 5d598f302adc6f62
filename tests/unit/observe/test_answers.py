"""A rank says where it is when its user asks on its host; nobody else is answered, and nobody else is believed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.hang import notices
from hpcpace.hang.notices import Notice, NoticedCall, ThreadStack, address, ask_ranks
from hpcpace.observe import watchdog
from hpcpace.observe.watchdog import Answers

NOTICE = Notice(
    rank=3,
    host="n1",
    pid=17,
    host_key="k",
    time_ns=50,
    unix_ns=60,
    first_time_ns=50,
    num_looks=1,
    step=9,
    step_age_ns=20,
    limit_ns=100,
    usual_step_ns=10,
    is_first_step=False,
    calls=(NoticedCall(group="0", op="barrier", seq=7, size_bytes=0, peer=-1, entered_ns=40, step=9),),
    stacks=(ThreadStack(name="MainThread", is_training=True, frames=("/home/me/train.py:12 in validate",)),),
)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return RunDirectory(tmp_path / "run").new_attempt()


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest.fixture
def answers(attempt: Attempt, warned: list[str]) -> Iterator[Answers]:
    answering = Answers(attempt, 3, notice=lambda: NOTICE, warn=warned.append)
    answering.start()
    yield answering
    answering.stop()


def test_a_rank_says_where_it_is_as_often_as_it_is_asked(answers: Answers, attempt: Attempt) -> None:
    for _ in range(3):
        assert ask_ranks(attempt, [2, 3], timeout_s=60) == {3: NOTICE}


def test_a_session_that_is_over_answers_nobody(answers: Answers, attempt: Attempt) -> None:
    answers.stop()
    assert ask_ranks(attempt, [3]) == {}


@each_case("side", [notices, watchdog])
def test_only_processes_of_one_user_talk(
    answers: Answers, attempt: Attempt, side: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side, "is_own_user", lambda connection: False)
    assert ask_ranks(attempt, [3]) == {}


def test_the_kernel_says_whose_process_is_at_the_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    with one, other:
        assert notices.is_own_user(one)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert not notices.is_own_user(one)


def test_what_fails_here_costs_the_answer_alone(attempt: Attempt, warned: list[str]) -> None:
    def fails() -> Notice:
        raise ZeroDivisionError("no steps")

    answering = Answers(attempt, 3, notice=fails, warn=warned.append)
    answering.start()
    assert ask_ranks(attempt, [3]) == {}
    answering.stop()
    assert warned == ["`hpcpace hang` is not answered: ZeroDivisionError: no steps"]


def test_a_name_that_is_taken_is_a_warning(answers: Answers, attempt: Attempt, warned: list[str]) -> None:
    Answers(attempt, 3, notice=lambda: NOTICE, warn=warned.append).start()
    assert warned == ["`hpcpace hang` cannot ask this rank for its stack: Address already in use"]


@each_case("content", [b"", b"{", b'{"rank": 3}', b"x" * (notices.MAX_BYTES + 1)])
def test_an_answer_that_is_none_is_left_out(attempt: Attempt, content: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(attempt, 3))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):  # nobody reads the rest of a long one
                connection.sendall(content)

        thread = threading.Thread(target=answer)
        thread.start()
        assert ask_ranks(attempt, [3]) == {}
        thread.join()


def test_a_rank_that_does_not_answer_is_not_waited_for(attempt: Attempt) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(attempt, 3))
        listener.listen()
        assert ask_ranks(attempt, [3], timeout_s=0.05) == {}
