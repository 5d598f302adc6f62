"""When a live view asks who holds up whom, and how long it believes the answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from live_run import DTYPES, LiveRun
from test_watch_view import HANG

from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import Attempt
from hpcpace.watch.state import HangState
from hpcpace.watch.watcher import HangSearch, find_hang_state


def search(run: LiveRun, asked: list[Attempt], *, is_damaged: bool = False) -> HangSearch:
    def find(attempt: Attempt, hang_s: float) -> HangState | None:
        asked.append(attempt)
        if is_damaged:
            raise TraceError("no trace can be read")
        return HANG

    return HangSearch(hang_s=5.0, find=find, clock=lambda: run.now_s)


def ask(run: LiveRun, one: HangSearch) -> HangState | None:
    run.look()
    assert run.tail.followed is not None
    return one.ask(run.tail.followed, wait_s=10.0)


def test_nobody_is_asked_while_steps_end(run: LiveRun) -> None:
    asked: list[Attempt] = []
    assert ask(run, search(run, asked)) is None and asked == []


def test_a_step_that_lasts_too_long_is_asked_about_once_in_a_while(run: LiveRun) -> None:
    asked: list[Attempt] = []
    one = search(run, asked)
    for second in range(1, 26):
        run.now_s += 1
        run.flush()
        found = ask(run, one)
        assert (found is None) == (second < 5)
    assert len(asked) == 3 and found is not None and found.headline == HANG.headline


def test_an_answer_counts_until_a_step_ends(run: LiveRun) -> None:
    asked: list[Attempt] = []
    one = search(run, asked)
    run.now_s += 6
    run.flush()
    assert ask(run, one) is not None
    run.steps(1)
    run.flush()
    assert ask(run, one) is None


def test_traces_that_cannot_be_read_are_no_hang(run: LiveRun) -> None:
    asked: list[Attempt] = []
    run.now_s += 6
    run.flush()
    assert ask(run, search(run, asked, is_damaged=True)) is None and len(asked) == 1


def test_a_rank_that_never_called_is_named(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, host_key="one clock", host="n1")
    run.begin()
    run.steps(30)
    members = [(0, rank, b"dp", b"gloo") for rank in range(4)]
    for rank, writer in run.writers.items():
        writer.add("groups", np.array(members, DTYPES["groups"]))
        if rank != 2:
            run.open_call(rank)
    run.flush()
    run.now_s += 30
    run.flush()
    found = find_hang_state(run.attempt, 5.0)
    run.close()
    assert found is not None and (found.ranks, found.is_sure) == ((2,), True)
