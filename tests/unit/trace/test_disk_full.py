"""A disk that fills in the middle of a flush and is freed again costs one warning and no row.

One that stays full costs what it has no room for.

Without root the limit on file sizes stands in for the disk: it cuts a write in the middle in the same way.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from rows import assert_table, random_rows, record

from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import CHUNK_ROWS

_MIB = 1 << 20
# Rows recorded while the disk is full, and the bytes that it still takes: nothing, a part of the journal's records, a
# part of a chunk, of the journal that replaces the old one.
_CASES = list(itertools.product((10, 3000, CHUNK_ROWS + 500), (0, 5_000, 40_000, 120_000, 300_000)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_MIB}", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@contextlib.contextmanager
def _filled(disk: Path, num_free_bytes: int) -> Iterator[None]:
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as stream:
        with contextlib.suppress(OSError):
            while stream.write(bytes(4096)):
                pass
        os.truncate(filler, max(stream.tell() - num_free_bytes, 0))
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def _limited(folder: Path, num_free_bytes: int) -> Iterator[None]:
    sizes = [item.stat().st_size for item in folder.iterdir()]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (min(sizes) + num_free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _check(start: Callable, path: Path, num_rows: int, full: Callable[[], AbstractContextManager[None]]) -> None:
    recorder = start(path)
    rows = random_rows("collectives", 500 + num_rows + 7)
    before, during, after = np.split(rows, [500, 500 + num_rows])
    expected = [record(recorder, "collectives", before)]
    assert recorder.flush()
    with full():
        expected.append(record(recorder, "collectives", during))
        assert recorder.flush()
        assert_table(read_trace(path).tables["collectives"].select(slice(500)), expected[0])
        assert recorder.flush()
    expected.append(record(recorder, "collectives", after))
    assert recorder.flush()
    trace = read_trace(path)
    assert trace.problems == ()
    assert_table(trace.tables["collectives"], np.concatenate(expected))
    recorder.close()
    trace = read_trace(path)
    assert trace.closed_cleanly and trace.problems == ()
    assert_table(trace.tables["collectives"], np.concatenate(expected))
    assert trace.tables["account"]["dropped"].sum() == 0


@pytest.mark.root
@pytest.mark.parametrize(("num_rows", "num_free_bytes"), _CASES)
def test_recording_goes_on_after_a_full_disk_was_freed(start, small_disk, warnings, num_rows, num_free_bytes):
    path = small_disk / "trace" / "rank-00000.h5"
    _check(start, path, num_rows, lambda: _filled(small_disk, num_free_bytes))
    # A record takes 64 bytes, and the last page of the journal has room for some.
    assert len(warnings) == (num_rows * 64 > num_free_bytes + 4096)
    assert all("No space left on device" in warning for warning in warnings)


@pytest.mark.parametrize(("num_rows", "num_free_bytes"), _CASES)
def test_recording_goes_on_after_a_write_was_cut_in_the_middle(start, path, warnings, num_rows, num_free_bytes):
    _check(start, path, num_rows, lambda: _limited(path.parent, num_free_bytes))
    assert len(warnings) <= 1


@pytest.mark.root
@pytest.mark.parametrize("num_free_bytes", [0, 5_000, 40_000, 100_000, 200_000])
def test_closing_on_a_full_disk_keeps_what_fits_and_counts_the_rest(start, small_disk, warnings, num_free_bytes):
    path = small_disk / "trace" / "rank-00000.h5"
    recorder = start(path)
    rows = random_rows("phases", 7000)
    expected = record(recorder, "phases", rows[:900])
    assert recorder.flush()
    with _filled(small_disk, num_free_bytes):
        expected = np.concatenate([expected, record(recorder, "phases", rows[900:])])
        recorder.close()
        trace = read_trace(path)
    num_read = len(trace.tables["phases"])
    assert num_read >= 900 + num_free_bytes // 48
    assert_table(trace.tables["phases"], expected[:num_read])
    assert trace.tables["account"]["dropped"].sum() == recorder.num_dropped == 7000 - num_read
    assert trace.closed_cleanly == (num_read == 7000)
    assert len(warnings) == (num_read < 7000)
    if warnings:
        assert warnings[0].startswith(f"{7000 - num_read} rows of {path} are lost ({7000 - num_read} of phases; steps ")
        assert "No space left on device" in warnings[0]


@pytest.mark.root
def test_a_disk_that_is_full_from_the_start_is_used_once_it_is_freed(start, small_disk, warnings):
    path = small_disk / "trace" / "rank-00000.h5"
    rows = random_rows("phases", 1000)
    with _filled(small_disk, 0):
        recorder = start(path)
        expected = record(recorder, "phases", rows)
        assert recorder.flush() and recorder.flush()
    assert recorder.flush()
    assert len(warnings) == 1
    assert_table(read_trace(path).tables["phases"], expected)


@pytest.mark.parametrize("num_free_bytes", [0, 5_000, 120_000])
def test_closing_after_writes_were_cut_keeps_what_was_written_and_counts_the_rest(
    start, path, warnings, num_free_bytes
):
    recorder = start()
    expected = record(recorder, "phases", random_rows("phases", 9000))
    recorder.flush()
    with _limited(path.parent, num_free_bytes):
        expected = np.concatenate([expected, record(recorder, "phases", random_rows("phases", 9001))])
        recorder.close()
    trace = read_trace(path)
    num_read = len(trace.tables["phases"])
    assert 9000 <= num_read <= 18_001
    assert_table(trace.tables["phases"], expected[:num_read])
    assert trace.tables["account"]["dropped"].sum() == recorder.num_dropped == 18_001 - num_read
    assert len(warnings) == 1


@pytest.mark.root
@pytest.mark.parametrize("num_free_bytes", range(0, 400_000, 23_000))
def test_hdf5_never_meets_a_full_disk(start, small_disk, num_free_bytes):
    path = small_disk / "trace" / "rank-00000.h5"
    recorder = start(path)
    recorder.flush()
    rows = np.zeros(3 * CHUNK_ROWS, dtype=random_rows("phases", 2).dtype)
    rows["begin_ns"] = np.arange(len(rows))
    expected = record(recorder, "phases", rows)
    with _filled(small_disk, num_free_bytes):
        recorder.flush()
    recorder.flush()
    assert_table(read_trace(path).tables["phases"], expected)
