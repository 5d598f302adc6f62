"""A run's folder that is removed, moved, read-only or impossible costs one warning, and no row that memory can hold."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from rows import assert_table, random_rows, record

from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import CHUNK_ROWS

_ROWS = random_rows("phases", CHUNK_ROWS + 300)
_SHARES = [CHUNK_ROWS - 100, CHUNK_ROWS + 100]


def _record_around(start: Callable, path: Path, happens: Callable[[], object]) -> np.ndarray:
    """Record three parts, one of them over the end of a chunk, with something happening between them."""
    recorder = start(path)
    expected = []
    for part in np.split(_ROWS, _SHARES):
        if expected:
            happens()
        expected.append(record(recorder, "phases", part))
        assert recorder.flush()
    return np.concatenate(expected)


@pytest.mark.parametrize("removed", ["the folder", "both files", "the file", "the journal"])
def test_what_was_removed_is_made_again_with_all_rows(start, path, warnings, removed):
    def remove() -> None:
        if removed == "the folder":
            shutil.rmtree(path.parent)
        if removed in ("both files", "the file"):
            path.unlink()
        if removed in ("both files", "the journal"):
            path.with_suffix(".journal").unlink()

    expected = _record_around(start, path, remove)
    trace = read_trace(path)
    assert trace.problems == ()
    assert_table(trace.tables["phases"], expected)
    assert len(warnings) == 1 and "removed" in warnings[0]


def test_a_run_that_is_moved_takes_all_rows_with_it(start, path, warnings, tmp_path):
    places = [tmp_path / "trace", tmp_path / "moved", tmp_path / "moved-again"]
    moves = iter(itertools.pairwise(places))
    expected = _record_around(start, path, lambda: Path.rename(*next(moves)))
    trace = read_trace(places[-1] / path.name)
    assert trace.problems == ()
    assert_table(trace.tables["phases"], expected)
    assert not path.exists()
    assert warnings == []


def test_another_run_in_the_place_of_a_moved_one_is_left_alone(start, path, tmp_path):
    def move() -> None:
        if not (tmp_path / "moved").exists():
            path.parent.rename(tmp_path / "moved")
            path.parent.mkdir()
            path.write_bytes(b"of another run")

    _record_around(start, path, move)
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == b"of another run"


def test_a_path_that_becomes_possible_gets_every_row(start, path, warnings):
    path.parent.write_text("a file in the folder's place")
    happened = []

    def replace_second_time() -> None:
        happened.append(path.parent.is_file())
        if len(happened) == 2:
            path.parent.unlink()

    expected = _record_around(start, path, replace_second_time)
    assert happened == [True, True]
    assert_table(read_trace(path).tables["phases"], expected)
    assert len(warnings) == 1 and str(path) in warnings[0]


def test_a_path_that_stays_impossible_is_one_warning(start, path, warnings):
    path.parent.write_text("a file in the folder's place")
    _record_around(start, path, lambda: None)
    assert len(warnings) == 1


def test_the_trace_of_an_earlier_run_is_not_touched(start, path, warnings):
    path.parent.mkdir()
    path.write_bytes(b"earlier")
    start().flush()
    assert path.read_bytes() == b"earlier"
    assert len(warnings) == 1 and "already exists" in warnings[0]


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=4m", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.root
def test_a_read_only_disk_that_becomes_writable_gets_every_row(start, read_only_disk, warnings):
    happened = []

    def remount_second_time() -> None:
        happened.append(True)
        if len(happened) == 2:
            subprocess.run(["mount", "-o", "remount,rw", read_only_disk], check=True)

    path = read_only_disk / "trace" / "rank-00000.h5"
    expected = _record_around(start, path, remount_second_time)
    assert_table(read_trace(path).tables["phases"], expected)
    assert len(warnings) == 1 and "Read-only file system" in warnings[0]
