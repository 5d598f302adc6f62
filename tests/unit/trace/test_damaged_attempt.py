"""Files of an attempt that claim to be another rank's, that are too large, or whose rows cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import pytest
from rows import header

from hpcpace.core.rundir import Attempt
from hpcpace.trace.attempt_reader import read_attempt, world_size_of
from hpcpace.trace.recorder import Recorder


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """Three ranks, each with as many steps as its number and one more."""
    attempt = Attempt(tmp_path / "attempt-0")
    for rank in range(3):
        with Recorder(attempt.trace_file(rank), header(rank, world_size=3), warn=pytest.fail) as recorder:
            for step in range(rank + 1):
                recorder.add_step(step, 0, 1, 1, 0)
    return attempt


def _num_steps(attempt: Attempt) -> dict[int, int]:
    return {trace.header.rank: len(trace.tables["steps"]) for trace in read_attempt(attempt).traces}


@pytest.mark.parametrize(("source", "target"), [(1, 0), (0, 1), (2, 0), (0, 2)])
def test_of_two_files_of_one_rank_the_one_that_has_its_name_counts(attempt, source, target):
    shutil.copyfile(attempt.trace_file(source), attempt.trace_file(target))
    num_steps = {rank: rank + 1 for rank in range(3) if rank != target}
    assert _num_steps(attempt) == num_steps
    said = read_attempt(attempt).problems[0]
    assert f"{attempt.trace_file(target)} says that it is rank {source}, and so does" in said


def test_a_file_of_another_name_is_read_and_said(attempt):
    attempt.trace_file(1).rename(attempt.trace_file(7))
    assert _num_steps(attempt) == {0: 1, 1: 2, 2: 3}
    assert read_attempt(attempt).problems == (f"{attempt.trace_file(7)} says that it is rank 1",)


def test_a_journal_larger_than_any_is_left_out(attempt):
    path = attempt.trace_file(1).with_suffix(".journal")
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    found = read_attempt(attempt)
    assert f"{path} has 1099511627776 bytes, more than any journal; its rows are left out" in found.problems
    assert len(found.traces) == 3


def test_rows_that_cannot_be_are_left_out_of_an_attempt(attempt):
    with h5py.File(attempt.trace_file(2), "r+") as file:
        file["steps"]["end_ns"][1] = -(2**63)
    assert _num_steps(attempt) == {0: 1, 1: 2, 2: 2}
    assert "1 of 3 rows of steps have impossible values" in read_attempt(attempt).problems[0]


@pytest.mark.parametrize("size", [1, 2, 2**31])
def test_the_world_is_as_large_as_most_ranks_say(attempt, size):
    with h5py.File(attempt.trace_file(0), "r+") as file:
        file.attrs["world_size"] = size
    assert world_size_of(read_attempt(attempt).traces) == 3
