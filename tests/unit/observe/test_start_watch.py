"""What is said where torch's process group is not made: who waits for it, and who has not come."""

from __future__ import annotations

import threading
from pathlib import Path

from cases import each_case

from hpcpace.core.rundir import Attempt
from hpcpace.hang.notices import read_notices
from hpcpace.hang.views import Doing
from hpcpace.observe.alarm import Waiting, start_words, watched_start


class Told:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_told = threading.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self.is_told.set()


def _waiting(run: Path, rank: int, world_size: int, told: Told, *, timeout_s: float = 0.01) -> Waiting:
    return Waiting(run=run, rank=rank, world_size=world_size, timeout_s=timeout_s, tell=told)


def test_a_rank_that_has_not_come_is_named(tmp_path: Path) -> None:
    told = Told()
    with watched_start(_waiting(tmp_path / "run", 0, 2, told), pause_s=0.01):
        assert told.is_told.wait(30)
    assert "rank 0 of 2 waits for it, but not rank 1; rank 0 is in " in told.lines[0]
    notice = read_notices(Attempt(tmp_path / "run"))[0]
    assert notice.doing == Doing.STARTING
    assert any("test_a_rank_that_has_not_come_is_named" in frame for frame in notice.stack)


def test_a_group_that_is_made_in_time_is_nobodys_business(tmp_path: Path) -> None:
    told = Told()
    with watched_start(_waiting(tmp_path / "run", 0, 2, told, timeout_s=60)):
        pass
    assert told.lines == []
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_be_written_costs_only_who_is_missing(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    told = Told()
    with watched_start(_waiting(tmp_path / "run", 0, 2, told), pause_s=0.01):
        assert told.is_told.wait(30)
    assert "which ranks wait is unknown" in told.lines[0]


@each_case(
    ("come", "world_size", "words"),
    [
        ([0, 1, 3], 4, "ranks 0-1, 3 of 4 wait for it, but not rank 2"),
        ([0], 4, "rank 0 of 4 waits for it, but not ranks 1-3"),
        ([0, 1], 2, "all 2 ranks wait for it"),
        ([], 2, "which ranks wait is unknown"),
    ],
)
def test_says_who_waits(tmp_path: Path, come: list[int], world_size: int, words: str) -> None:
    told = Told()
    with watched_start(_waiting(tmp_path / "run", 0, 2, told), pause_s=0.01):
        assert told.is_told.wait(30)
    notice = read_notices(Attempt(tmp_path / "run"))[0]
    assert words in start_words(notice, come, world_size)
