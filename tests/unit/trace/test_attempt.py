"""An attempt is read as far as it can be, and what is missing from it is said."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest
from rows import header

from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import Attempt, open_run
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.recorder import Recorder


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """Four ranks, each with as many steps as its number."""
    attempt = Attempt(tmp_path / "attempt-0")
    for rank in range(4):
        with Recorder(attempt.trace_file(rank), header(rank, world_size=4), warn=pytest.fail) as recorder:
            for step in range(rank):
                recorder.add_step(step, 0, 1, 1, 0)
    return attempt


def _change(attempt: Attempt, rank: int, name: str, value: int) -> None:
    with h5py.File(attempt.trace_file(rank), "r+") as file:
        file.attrs[name] = value


def test_all_ranks_are_read_in_order_and_progress_is_told(attempt):
    told = []
    found = read_attempt(attempt, progress=lambda *counts: told.append(counts))
    assert [trace.header.rank for trace in found.traces] == [0, 1, 2, 3]
    assert [len(trace.tables["steps"]) for trace in found.traces] == [0, 1, 2, 3]
    assert found.problems == ()
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_missing_ranks_are_named(attempt):
    attempt.trace_file(1).unlink()
    attempt.trace_file(3).unlink()
    assert read_attempt(attempt).problems == ("2 of 4 ranks have no readable trace: 1, 3",)


def test_a_broken_file_does_not_stop_the_others(attempt):
    attempt.trace_file(1).write_bytes(b"broken")
    found = read_attempt(attempt)
    assert [trace.header.rank for trace in found.traces] == [0, 2, 3]
    broken, missing = found.problems
    assert str(attempt.trace_file(1)) in broken
    assert missing == "1 of 4 ranks have no readable trace: 1"


def test_two_files_of_one_rank_are_said(attempt):
    _change(attempt, 2, "rank", 1)
    found = read_attempt(attempt)
    assert [trace.header.rank for trace in found.traces] == [0, 1, 3]
    duplicate, missing = found.problems
    assert str(attempt.trace_file(1)) in duplicate and str(attempt.trace_file(2)) in duplicate
    assert missing == "1 of 4 ranks have no readable trace: 2"


@pytest.mark.parametrize("world_size", [5, 1 << 20])
def test_one_damaged_world_size_is_named_and_outvoted(attempt, world_size):
    _change(attempt, 2, "world_size", world_size)
    (problem,) = read_attempt(attempt).problems
    assert problem == f"{attempt.trace_file(2)} says {world_size} ranks, but most others say 4"


def test_a_huge_world_size_names_the_first_missing_ranks_only(attempt):
    for rank in range(4):
        _change(attempt, rank, "world_size", 1 << 20)
    (problem,) = read_attempt(attempt).problems
    assert problem.startswith(f"{(1 << 20) - 4} of {1 << 20} ranks have no readable trace: 4, 5, 6, ")
    assert problem.endswith(f"19, ... and {(1 << 20) - 20} more")


@pytest.mark.parametrize(("rank", "world_size"), [(2, 1 << 21), (2, 1 << 62), (1 << 31, 1 << 32), (-1, 4), (4, 4)])
def test_a_file_of_a_rank_that_cannot_be_is_left_out_and_the_others_are_read(attempt, rank, world_size):
    _change(attempt, 2, "rank", rank)
    _change(attempt, 2, "world_size", world_size)
    found = read_attempt(attempt)
    assert [trace.header.rank for trace in found.traces] == [0, 1, 3]
    damaged, missing = found.problems
    assert str(attempt.trace_file(2)) in damaged and "is impossible" in damaged
    assert missing == "1 of 4 ranks have no readable trace: 2"


def test_a_rank_of_a_larger_world_is_left_out(attempt):
    _change(attempt, 2, "rank", 99)
    _change(attempt, 2, "world_size", 100)
    found = read_attempt(attempt)
    assert [trace.header.rank for trace in found.traces] == [0, 1, 3]
    assert any("says 100 ranks, but most others say 4; it is left out" in problem for problem in found.problems)


@pytest.mark.parametrize(("name", "value"), [("run_id", "another"), ("attempt", 1)])
def test_a_file_of_another_run_or_attempt_is_left_out(attempt, name, value):
    _change(attempt, 2, name, value)
    found = read_attempt(attempt)
    assert [trace.header.rank for trace in found.traces] == [0, 1, 3]
    assert found.problems[0].startswith(f"{attempt.trace_file(2)} is of run ")
    assert found.problems[1:] == ("1 of 4 ranks have no readable trace: 2",)


def test_of_two_runs_with_equally_many_files_that_of_the_folder_counts(attempt):
    for rank in (0, 1):
        _change(attempt, rank, "attempt", 1)
    assert [trace.header.rank for trace in read_attempt(attempt).traces] == [2, 3]


def test_files_of_two_runs_that_nothing_tells_apart_are_refused(attempt):
    for rank in (0, 1):
        _change(attempt, rank, "run_id", "another")
    with pytest.raises(TraceError, match=r"as many traces are of run .* and run .*: move those of one of them away"):
        read_attempt(attempt)


def test_the_largest_files_are_left_out_where_memory_is_short(attempt):
    with Recorder(attempt.trace_file(9), header(9, world_size=10), warn=pytest.fail) as recorder:
        for step in range(2000):
            recorder.add_step(step, 0, 1, 1, 0)
    found = read_attempt(attempt, memory_bytes=30_000)
    assert [trace.header.rank for trace in found.traces] == [0, 1, 2, 3]
    assert any(f"{attempt.trace_file(9)}: its tables take " in problem for problem in found.problems)
    assert any("--memory" in problem for problem in found.problems)


def test_a_file_larger_than_an_equal_share_is_read_where_memory_is_left(attempt):
    sizes = [trace.size_bytes for trace in read_attempt(attempt).traces]
    found = read_attempt(attempt, memory_bytes=sum(sizes))
    assert max(sizes) > sum(sizes) / 4
    assert [trace.header.rank for trace in found.traces] == [0, 1, 2, 3]


@pytest.mark.parametrize("link", ["trace", "attempt"])
def test_a_folder_that_is_a_link_is_not_followed(attempt, tmp_path, link):
    run = tmp_path / "run"
    (run / "attempt-0").mkdir(parents=True)
    if link == "trace":
        (run / "attempt-0" / "trace").symlink_to(attempt.trace_dir)
    else:
        (run / "attempt-0").rmdir()
        (run / "attempt-0").symlink_to(attempt.path)
    with pytest.raises(TraceError, match="link" if link == "trace" else "holds no attempt"):
        read_attempt(open_run(run).attempts()[0])


def test_a_file_that_is_a_link_is_not_followed(attempt, tmp_path):
    attempt.trace_file(1).rename(tmp_path / "elsewhere.h5")
    attempt.trace_file(1).symlink_to(tmp_path / "elsewhere.h5")
    found = read_attempt(attempt)
    assert [trace.header.rank for trace in found.traces] == [0, 2, 3]
    assert any("symbolic link" in problem for problem in found.problems)


def test_a_rank_that_left_only_its_journal_counts(attempt, tmp_path):
    path = attempt.trace_file(3)
    path.unlink()
    recorder = Recorder(path, header(3, world_size=4), warn=pytest.fail, flush_interval_s=3600.0)
    recorder.start()
    recorder.add_step(0, 0, 1, 1, 0)
    recorder.flush()
    content = path.with_suffix(".journal").read_bytes()
    recorder.close()
    path.unlink()
    path.with_suffix(".journal").write_bytes(content)
    found = read_attempt(attempt)
    assert len(found.traces[3].tables["steps"]) == 1
    assert len(found.problems) == 1 and "only its journal is read" in found.problems[0]


@pytest.mark.parametrize("content", [None, b"broken"])
def test_an_attempt_without_a_readable_trace_is_refused(tmp_path, content):
    attempt = Attempt(tmp_path / "attempt-0")
    if content is not None:
        attempt.trace_dir.mkdir(parents=True)
        attempt.trace_file(0).write_bytes(content)
    with pytest.raises(TraceError, match=f"no trace can be read in {attempt.trace_dir}"):
        read_attempt(attempt)
