"""Whom the ranks of a job believe that hangs: somebody else may be able to write into the run."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcpace.core.files import Folder
from hpcpace.core.rundir import Attempt
from hpcpace.hang.notices import HangFolder, read_notices, write
from hpcpace.observe.alarm import Waiting, watched_start
from tests.unit.observe.test_watchdog import Rank, attempt, exits

__all__ = ["attempt", "exits"]  # fixtures
NOBODY = 65534


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Let files seem to be nobody's, which only root can really do."""
    fstat, given = os.fstat, set[int]()

    def of_nobody(descriptor: int) -> os.stat_result:
        facts = fstat(descriptor)
        return os.stat_result((*facts[:4], NOBODY, *facts[5:])) if facts.st_ino in given else facts

    monkeypatch.setattr(os, "fstat", of_nobody)
    return lambda path: given.add(path.stat().st_ino)


@pytest.fixture
def umask() -> Iterator[None]:
    """Let files be as open as programs make them."""
    before = os.umask(0)
    yield
    os.umask(before)


def verdict(attempt: Attempt, *, age_s: float = 0.0, **changes: Any) -> Path:
    """Leave a verdict that ends the job in its step 30, and return its file."""
    unix_ns = time.time_ns() - int(age_s * 1e9)
    content = {"step": 30, "rank": 0, "unix_ns": unix_ns, "line": "it hangs", "stops": True, **changes}
    with HangFolder(attempt).open(make=True) as folder:
        folder.write("verdict.json", json.dumps(content))
    return attempt.hang_dir / "verdict.json"


def test_a_verdict_of_the_same_user_ends_a_rank(attempt: Attempt, exits: list[int]) -> None:
    rank = Rank(attempt, 1, num_ranks=2, on_hang="stop")
    rank.train(30)
    verdict(attempt)
    with pytest.raises(SystemExit):
        rank.stay(70)


@pytest.mark.parametrize("age_s", [0.0, -1e9])
def test_a_verdict_of_somebody_else_ends_nobody(
    attempt: Attempt, exits: list[int], give_away: Callable[[Path], None], age_s: float
) -> None:
    rank = Rank(attempt, 1, num_ranks=2, on_hang="stop", verdict=None)
    rank.train(30)
    give_away(verdict(attempt, age_s=age_s))
    rank.stay(100)
    rank.now_s += 130  # as one that was suspended
    rank.stay(1)
    rank.watchdog.stop(by_error=True)
    assert exits == []


@pytest.mark.parametrize("age_s", [61, 1e9])
def test_a_verdict_of_long_ago_that_is_put_here_ends_nobody(attempt: Attempt, exits: list[int], age_s: float) -> None:
    rank = Rank(attempt, 1, num_ranks=2, on_hang="stop", verdict=None)
    rank.train(30)
    verdict(attempt, age_s=age_s)
    rank.stay(100)
    assert exits == []


def test_a_notice_of_somebody_else_is_no_reason_to_be_silent(
    attempt: Attempt, exits: list[int], give_away: Callable[[Path], None]
) -> None:
    rank = Rank(attempt, 1, num_ranks=2, on_hang="stop")
    rank.train(30)
    rank.stay(61)
    planted = replace(read_notices(attempt)[1], rank=0, excuse="it saves a checkpoint", limit_ns=(1 << 63) - 1)
    write(attempt, planted)
    give_away(attempt.hang_file(0))
    with pytest.raises(SystemExit):
        rank.stay(200)
    assert len(rank.told) > 0


def test_notices_of_ranks_that_the_job_does_not_have_are_not_opened(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    open_file = Folder.open_file

    def noted(folder: Folder, name: str) -> int:
        opened.append(name)
        return open_file(folder, name)

    monkeypatch.setattr(Folder, "open_file", noted)
    attempt.hang_dir.mkdir()
    for number in range(100):
        (attempt.hang_dir / f"rank-{number:05d}.json").write_text("[" * 1000)
    rank = Rank(attempt, 0, num_ranks=2)
    rank.train(30)
    rank.stay(70)
    assert set(opened) == {"rank-00000.json", "rank-00001.json", "verdict.json"}
    assert len(rank.told) == 1


def test_nobody_else_can_write_to_what_ranks_believe(attempt: Attempt, umask: None) -> None:
    rank = Rank(attempt)
    rank.train(30)
    rank.stay(70)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in attempt.hang_dir.iterdir()}
    assert modes == {"rank-00000.json": 0o644, "verdict.json": 0o644}


def test_a_notice_of_somebody_else_is_no_rank_that_has_come(tmp_path: Path, give_away: Callable[[Path], None]) -> None:
    lines: list[str] = []
    is_told = threading.Event()

    def tell(line: str) -> None:
        lines.append(line)
        is_told.set()

    waiting = Waiting(run=tmp_path / "run", rank=1, world_size=3, timeout_s=0.01, tell=tell)
    with watched_start(waiting, pause_s=0.01):
        assert is_told.wait(30)
    place = Attempt(waiting.run)
    write(place, replace(read_notices(place)[1], rank=0, ended=""))
    give_away(place.hang_file(0))
    is_told.clear()
    with watched_start(waiting, pause_s=0.01):
        assert is_told.wait(30)
    assert "rank 1 of 3 waits for it, but not ranks 0, 2" in lines[1]
