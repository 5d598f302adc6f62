"""What ranks write of a step that lasts too long, and how it is read back from a run that may be anybody's."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from hpcpace.core.detail import MAX_RANKS
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.hang.notices import (
    MAX_BYTES,
    Notice,
    NoticedCall,
    NoticedCount,
    NoticedGroup,
    ThreadStack,
    rank_ranges,
    read_notices,
    write,
)
from hpcpace.hang.views import Doing

NOTICE = Notice(
    rank=3,
    host="n1",
    pid=4711,
    host_key="0123456789abcdef",
    time_ns=90_000_000_000,
    unix_ns=1_700_000_000_000_000_000,
    first_time_ns=60_000_000_000,
    num_looks=2,
    step=17,
    step_age_ns=61_000_000_000,
    limit_ns=60_000_000_000,
    usual_step_ns=250_000_000,
    is_first_step=False,
    doing=Doing.SAVING,
    doing_since_ns=30_000_000_000,
    excuse="it saves a checkpoint",
    groups=(NoticedGroup(name="0", members=(0, 1, 2, 3)), NoticedGroup(name="dp", members=(3, 1))),
    calls=(NoticedCall(group="0", op="all_reduce", seq=34, size_bytes=4096, peer=-1, entered_ns=29_000, step=17),),
    entered=(NoticedCount(group="0", source=-1, destination=-1, num_entered=35),),
    is_complete=True,
    stacks=(
        ThreadStack(name="MainThread", is_training=True, frames=("train.py:9 in <module>", "train.py:4 in save")),
        ThreadStack(name="pin", is_training=False, frames=("pin.py:3 in run",)),
    ),
    earlier_stack=("train.py:9 in <module>", "train.py:3 in load"),
)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return RunDirectory(tmp_path / "run").new_attempt()


def test_a_notice_is_read_as_it_was_written(attempt: Attempt) -> None:
    write(attempt, NOTICE)
    assert read_notices(attempt) == {3: replace(NOTICE, groups=())}
    assert json.loads(attempt.hang_file(3).read_text())["groups"] == [
        {"name": "0", "members": "0-3"},
        {"name": "dp", "members": "3,1"},
    ]


def test_a_later_notice_of_a_rank_takes_the_place_of_the_first(attempt: Attempt) -> None:
    write(attempt, NOTICE)
    write(attempt, replace(NOTICE, ended="resumed", ended_ns=95_000_000_000))
    assert read_notices(attempt)[3].ended == "resumed"


def test_an_attempt_without_notices_has_none(attempt: Attempt) -> None:
    assert read_notices(attempt) == {}


def test_whether_the_training_thread_has_moved_is_known_from_the_second_look_on() -> None:
    assert NOTICE.has_moved is True
    assert replace(NOTICE, earlier_stack=NOTICE.stack).has_moved is False
    assert replace(NOTICE, num_looks=1).has_moved is None


def test_a_notice_stays_small_whatever_the_stacks_are(attempt: Attempt) -> None:
    deep = tuple(f"{'x' * 200}.py:{line} in recursive" for line in range(5000))
    threads = tuple(ThreadStack(name=f"t{i}", is_training=i == 0, frames=deep) for i in range(500))
    write(attempt, replace(NOTICE, stacks=threads))
    assert attempt.hang_file(3).stat().st_size <= MAX_BYTES
    stack = read_notices(attempt)[3].stack
    assert 0 < len(stack) < 5000
    assert stack[-1] == deep[-1]


def test_secrets_in_names_of_files_are_left_out(attempt: Attempt) -> None:
    frames = ("/home/a/hf_abcdefghijklmnop0123/train.py:1 in main",)
    write(attempt, replace(NOTICE, stacks=(ThreadStack(name="MainThread", is_training=True, frames=frames),)))
    assert "hf_abcdefghijklmnop" not in attempt.hang_file(3).read_text()


def _changed(**changes: Any) -> str:
    """Return the text of a notice with other values."""
    content: dict[str, Any] = {**json.loads(_text()), **changes}
    return json.dumps(content)


def _text() -> str:
    from hpcpace.hang.notices import notice_text as text

    return text(NOTICE)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "JSONDecodeError"),
        ("{", "JSONDecodeError"),
        ("[]", "it is no object of JSON"),
        ("{}", "KeyError: 'schema'"),
        (_changed(schema=2), "its schema is 2"),
        (_changed(rank=4), "it is of rank 4"),
        (_changed(host=7), "host is 7: expected a text"),
        (_changed(step=1.5), "step is 1.5: expected an integer"),
        (_changed(step=True), "step is True: expected an integer"),
        (_changed(step=1 << 70), "step is 1180591620717411303424: expected an integer <= 9223372036854775807"),
        (_changed(is_first_step="yes"), "is_first_step is 'yes': expected true or false"),
        (_changed(doing="sleeping"), "doing is 'sleeping': Invalid enum value 'sleeping'"),
        (_changed(calls=[{}]), "calls[0] has no 'group'"),
        (
            _changed(stacks=[{"name": "a", "is_training": True, "frames": [3]}]),
            "stacks[0].frames[0] is 3: expected a text",
        ),
        (
            _changed(stacks=[{"name": "a", "is_training": True, "frames": []}] * 200),
            "stacks is ",
        ),
        (_changed(stacks=["a"]), "stacks[0] is 'a': expected an object"),
        ("[" * 20_000, "Error"),  # of recursion before Python 3.14, of syntax from then on
        ("[" + "0," * 40_000, "values, more than"),
        (" " * (4 * MAX_BYTES + 1), "it has more than"),
    ],
)
def test_a_notice_that_is_not_one_is_named_and_the_others_are_read(attempt: Attempt, content: str, reason: str) -> None:
    write(attempt, replace(NOTICE, rank=5))
    attempt.hang_file(3).write_text(content)
    problems: list[str] = []
    assert list(read_notices(attempt, problems)) == [5]
    assert len(problems) == 1
    assert "rank-00003.json is left out" in problems[0]
    assert reason in problems[0]


def test_other_names_and_links_are_no_notices(attempt: Attempt, tmp_path: Path) -> None:
    write(attempt, NOTICE)
    for name in ("rank-3.json", "rank-00004.json.tmp", "verdict.json", "rank-99999999.json"):
        (attempt.hang_dir / name).write_text("{}")
    (tmp_path / "elsewhere").write_text(_text())
    (attempt.hang_dir / "rank-00007.json").symlink_to(tmp_path / "elsewhere")
    assert list(read_notices(attempt)) == [3]


@each_case(
    ("ranks", "text"),
    [
        ((), ""),
        ((5,), "5"),
        ((0, 1), "0,1"),
        ((0, 1, 2, 3), "0-3"),
        ((0, 4, 8, 12), "0-12:4"),
        ((3, 1, 2), "3,1,2"),
        ((0, 1, 2, 8, 9, 10, 4), "0-2,8-10,4"),
        ((0, 8, 1, 2, 3), "0,8,1-3"),
    ],
)
def test_ranks_are_short_texts_in_their_order(ranks: tuple[int, ...], text: str) -> None:
    assert rank_ranges(ranks) == text


def test_notices_of_too_many_bytes_together_are_named_and_not_read(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(5):
        write(attempt, replace(NOTICE, rank=rank))
    monkeypatch.setattr("hpcpace.hang.notices.MAX_BYTES_OF_ALL", 3 * attempt.hang_file(0).stat().st_size)
    problems: list[str] = []
    assert list(read_notices(attempt, problems)) == [0, 1, 2]
    assert len(problems) == 1 and "rank-00003.json and those of higher ranks are left out" in problems[0]


def test_groups_of_a_million_ranks_in_a_few_bytes_take_no_memory(attempt: Attempt) -> None:
    groups = [{"name": str(number), "members": f"0-{MAX_RANKS - 1}"} for number in range(4)]
    write(attempt, NOTICE)
    tracemalloc.start()
    try:
        for rank in range(20):
            attempt.hang_file(rank).write_text(_changed(rank=rank, groups=groups))
        assert len(read_notices(attempt)) == 20
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
