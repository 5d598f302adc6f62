"""Every row that was recorded is read, or counted as lost: in the file itself and in the one warning at the end."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cases import chosen
from fake_disk import FakeDisk
from rows import ADDERS, assert_table, random_rows, record

from hpcpace.core.errors import TraceError
from hpcpace.trace.reader import RankTrace, read_trace
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import CHUNK_ROWS, TABLES
from hpcpace.trace.tables import Table

_FULL = "No space left on device"
# Small tables come more often than bulky ones; a chunk and more of some tables is among the sizes.
_SIZES = (1, 7, 60, 400, 3000, CHUNK_ROWS + 30)


def _lost(warnings: list[str]) -> dict[str, int]:
    """Return what the one warning at the end counts, by table."""
    (line,) = [warning for warning in warnings if " lost (" in warning] or [""]
    found = {table: int(count) for count, table in re.findall(r"(\d+) of ([a-z]+)[,;)]", line)}
    assert not line or int(line.split()[0]) == sum(found.values())
    return found


def _record_some(recorder: Recorder, choose: np.random.Generator, recorded: dict[str, list[np.ndarray]]) -> None:
    for table in choose.choice(list(ADDERS), size=choose.integers(1, 6)).tolist():
        num_rows = int(choose.choice(_SIZES, p=(0.2, 0.2, 0.2, 0.2, 0.15, 0.05)))
        recorded[table].append(record(recorder, table, random_rows(table, num_rows + 2)[2:]))


def _assert_each_row_is_read_or_lost(path: Path, recorded: dict[str, list[np.ndarray]], warnings: list[str]) -> int:
    """Rows are lost at the end of each table only; return how many."""
    lost = _lost(warnings)
    try:
        trace: RankTrace | None = read_trace(path)
    except TraceError:
        trace = None  # not even the first bytes fitted
    for table in ADDERS:
        rows = np.concatenate([np.zeros(0, TABLES[table].dtype), *recorded[table]])
        found = Table.from_rows(rows[:0]) if trace is None else trace.tables[table]
        assert len(found) + lost.get(table, 0) == len(rows), table
        assert_table(found, rows[: len(found)])
    if trace is not None:
        assert not [problem for problem in trace.problems if "torn" in problem or "damaged" in problem]
        assert trace.tables["account"]["dropped"].sum() == sum(lost.values())
        assert trace.closed_cleanly <= (not lost)
    return sum(lost.values())


@pytest.mark.parametrize("seed", chosen(range(80), 20))
def test_rows_read_and_rows_lost_are_the_rows_recorded(start, path, warnings, monkeypatch, seed):
    choose = np.random.default_rng(seed)
    path.parent.mkdir()
    disk = FakeDisk(path.parent, int(choose.integers(0, choose.choice((5_000, 60_000, 600_000)))), monkeypatch)
    recorder = start()
    recorded: dict[str, list[np.ndarray]] = {table: [] for table in ADDERS}
    for _ in range(choose.integers(1, 8)):
        _record_some(recorder, choose, recorded)
        assert recorder.flush()
        assert disk.used_bytes <= disk.size_bytes  # also by what HDF5 writes past the fake
        if choose.random() < 0.4:
            disk.size_bytes = disk.used_bytes + int(choose.choice((0, 30, 1000, 80_000, 1_000_000)))
    assert recorder.close()
    assert disk.used_bytes <= disk.size_bytes
    num_lost = _assert_each_row_is_read_or_lost(path, recorded, warnings)
    assert recorder.num_dropped == num_lost
    assert not [name for name in path.parent.iterdir() if name.name.startswith(".")]


def test_rows_that_memory_did_not_hold_are_counted_with_those_that_the_disk_did_not(start, path, warnings, monkeypatch):
    path.parent.mkdir()
    FakeDisk(path.parent, 100_000, monkeypatch)
    recorder = start(max_rows=50_000)
    for step in range(120_000):
        recorder.step = step
        recorder.add_phase(step, 1, step, step + 1, -1)
        if step % 40_000 == 0:
            recorder.flush()
    recorder.close()
    trace = read_trace(path)
    lost = _lost(warnings)
    assert len(trace.tables["phases"]) + lost["phases"] == 120_000
    assert trace.tables["account"]["dropped"].sum() == lost["phases"] == recorder.num_dropped
    assert "; steps " in warnings[-1] and "to 119999)" in warnings[-1]


def _fill(start: Callable, path: Path, patch: pytest.MonkeyPatch, free_bytes: int) -> tuple[Recorder, FakeDisk]:
    path.parent.mkdir()
    disk = FakeDisk(path.parent, 10_000_000, patch)
    recorder = start()
    recorder.add_step(0, 1, 2, 3, 0)
    recorder.flush()
    disk.size_bytes = disk.used_bytes + free_bytes
    return recorder, disk


def test_the_end_names_the_loss_though_a_full_disk_was_warned_of_before(start, path, warnings, monkeypatch):
    recorder, _ = _fill(start, path, monkeypatch, 0)
    for step in range(5, 9):
        recorder.add_step(step, 1, 2, 3, 0)
        recorder.flush()
    recorder.close()
    first, last = warnings
    assert first == f"cannot write {path}: {_FULL}; training goes on, up to 1000000 rows wait in memory for a retry"
    assert last == (
        f"4 rows of {path} are lost (4 of steps; steps 5 to 8): {_FULL}; "
        "make room there, or name another disk in trace.trace_dir"
    )


def test_small_tables_are_kept_before_bulky_ones_and_older_rows_before_newer_ones(start, path, warnings, monkeypatch):
    recorder, _ = _fill(start, path, monkeypatch, 20_000)
    rows = {table: record(recorder, table, random_rows(table, 300)) for table in ("collectives", "phases", "clock")}
    recorder.close()
    tables = read_trace(path).tables
    assert_table(tables["clock"], rows["clock"])
    num_phases = len(tables["phases"])
    assert 0 < num_phases < 300
    assert_table(tables["phases"], rows["phases"][:num_phases])
    assert len(tables["collectives"]) == 0
    assert _lost(warnings) == {"phases": 300 - num_phases, "collectives": 300}


def test_a_flush_on_a_full_disk_is_counted_at_once_and_taken_back_when_there_is_room(start, path, monkeypatch):
    recorder, disk = _fill(start, path, monkeypatch, 4000)
    rows = record(recorder, "phases", random_rows("phases", 500))
    recorder.flush()
    trace = read_trace(path)
    assert 0 < len(trace.tables["phases"]) == 500 - trace.tables["account"]["dropped"].sum()
    assert trace.tables["account"]["events"].sum() == recorder.num_events
    disk.size_bytes = 10_000_000
    recorder.flush()
    trace = read_trace(path)
    assert trace.tables["account"]["dropped"].sum() == 0
    assert trace.tables["account"]["events"].sum() == recorder.num_events
    assert_table(trace.tables["phases"], rows)


def test_chunks_are_stored_as_far_as_they_fit(start, path, warnings, monkeypatch):
    """Five chunks of 8,192 rows are waiting and there is room for two and some rows more."""
    recorder, disk = _fill(start, path, monkeypatch, 0)
    rows = record(recorder, "phases", random_rows("phases", 5 * CHUNK_ROWS))
    recorder.flush()
    disk.size_bytes += 64_000 + 2 * 24 * CHUNK_ROWS + 10_000
    recorder.close()
    phases = read_trace(path).tables["phases"]
    num_read = len(phases)
    assert 2 * CHUNK_ROWS < num_read < 3 * CHUNK_ROWS
    assert_table(phases, rows[:num_read])
    assert _lost(warnings) == {"phases": 5 * CHUNK_ROWS - num_read}


def test_a_disk_with_room_for_the_end_only_as_compressed_rows_loses_nothing(start, path, warnings, monkeypatch):
    recorder, _ = _fill(start, path, monkeypatch, 120_000)
    for step in range(CHUNK_ROWS - 100):
        recorder.add_phase(step, 1, step * 1000, step * 1000 + 10, -1)
    recorder.close()
    trace = read_trace(path)
    assert trace.closed_cleanly and len(trace.tables["phases"]) == CHUNK_ROWS - 100
    assert warnings == []


def test_a_disk_that_never_takes_anything_loses_all_rows_and_says_so(start, path, warnings, monkeypatch):
    path.parent.mkdir()
    FakeDisk(path.parent, 0, monkeypatch)
    recorder = start()
    record(recorder, "phases", random_rows("phases", 10))
    recorder.close()
    assert _lost(warnings) == {"phases": 10}
    assert list(path.parent.iterdir()) == []


def test_open_operations_that_do_not_fit_are_counted(start, path, warnings, monkeypatch):
    recorder, _ = _fill(start, path, monkeypatch, 0)
    recorder.open_collectives = lambda: [(1, 0, 0, 0, 8, -1, 10, 0, 0, 2)]
    recorder.close()
    assert _lost(warnings) == {"collectives": 1}


def test_an_open_operation_in_the_journal_is_read_though_the_end_does_not_fit(start, path, warnings, monkeypatch):
    recorder, disk = _fill(start, path, monkeypatch, 10_000)
    recorder.open_collectives = lambda: [(1, 0, 0, 0, 8, -1, 10, 0, 0, 2)]
    recorder.flush()
    disk.size_bytes = disk.used_bytes
    record(recorder, "phases", random_rows("phases", 10))
    recorder.close()
    trace = read_trace(path)
    assert len(trace.open_collectives) == 1
    assert _lost(warnings) == {"phases": 10}


def test_rows_of_a_removed_file_that_cannot_be_made_again_are_counted(start, path, warnings, monkeypatch):
    recorder, disk = _fill(start, path, monkeypatch, 10_000_000)
    record(recorder, "phases", random_rows("phases", CHUNK_ROWS + 10))
    recorder.flush()
    path.unlink()
    disk.size_bytes = disk.used_bytes
    recorder.close()
    assert _lost(warnings) == {"phases": CHUNK_ROWS}
    trace = read_trace(path)
    assert len(trace.tables["phases"]) == 10
    assert any(f"{CHUNK_ROWS} rows after row -1 are in neither file nor journal" in text for text in trace.problems)


def test_a_disk_that_is_found_full_only_when_synced_loses_what_the_journal_does_not_take(
    start, path, warnings, monkeypatch
):
    def fail(_: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    recorder, _ = _fill(start, path, monkeypatch, 1_000_000)
    rows = record(recorder, "phases", random_rows("phases", 10))
    monkeypatch.setattr(os, "fsync", fail)
    recorder.close()
    assert warnings == [f"cannot close {path}: Disk quota exceeded; all rows are in it and in its journal"]
    assert_table(read_trace(path).tables["phases"], rows)


def test_an_end_by_a_signal_says_what_may_be_lost(start, path, warnings, monkeypatch):
    recorder, disk = _fill(start, path, monkeypatch, 0)
    recorder.tell_losses()
    assert warnings == []
    recorder.add_step(7, 1, 2, 3, 0)
    recorder.flush()
    recorder.tell_losses()
    assert warnings[1].startswith(f"1 row of {path} may be lost (1 of steps; steps 7 to 7): {_FULL}; ")
    disk.size_bytes = 10_000_000
    recorder.flush()
    recorder.tell_losses()
    assert len(warnings) == 2


def test_files_that_are_held_are_not_written_to(start, path):
    recorder = start()
    recorder.flush()
    with recorder.held(10.0) as is_held:
        assert is_held
        recorder.add_step(7, 1, 2, 3, 0)
        assert not recorder.flush(timeout_s=0.05)
        assert len(read_trace(path).tables["steps"]) == 0
    assert recorder.flush()
    assert len(read_trace(path).tables["steps"]) == 1
