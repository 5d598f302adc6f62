"""A trace that keeps only its last steps: bounded on disk, and whole in these steps, whatever kills the rank."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import each_case
from rows import header

from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder
from hpcpace.core.rundir import RunDirectory
from hpcpace.trace.hdf5_files import Container
from hpcpace.trace.packing import PackPlan, pack_attempt
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import CHUNK_ROWS, ExitKind, Op, StepFlag, row_dtypes
from hpcpace.trace.tables import RankTrace
from hpcpace.trace.writer import TraceWriter

KEPT = 1000
PER_STEP = 30
STEP_NS = 1_000_000
DTYPES = row_dtypes()


def _rows(name: str, values: list[tuple[object, ...]]) -> np.ndarray:
    return np.array(values, dtype=DTYPES[name])


def _add_steps(writer: TraceWriter, first: int, stop: int) -> None:
    """Record steps; operations get their numbers in order."""
    for step in range(first, stop):
        begin_ns = step * STEP_NS
        writer.add("steps", _rows("steps", [(step, begin_ns, begin_ns + STEP_NS, 1, 0)]))
        operations = [
            (step, 0, step * PER_STEP + i, Op.ALL_REDUCE, 8, -1, begin_ns + i * 256, begin_ns + i * 512, 0, 0)
            for i in range(PER_STEP)
        ]
        writer.add("collectives", _rows("collectives", operations))
        writer.add("phases", _rows("phases", [(step, 1, begin_ns, begin_ns + 5, -1)] * 9))
    writer.add("account", _rows("account", [(stop * STEP_NS, stop - first, 0, 0)]))


def _assert_whole(trace: RankTrace, stop: int) -> int:
    """Check that all rows of all steps from the first kept one on are there once; return that step."""
    assert trace.problems == ()
    first = trace.first_step
    steps, collectives = trace.tables["steps"], trace.tables["collectives"]
    is_whole = (steps["flags"] & StepFlag.PLAIN) == 0
    assert steps["step"][is_whole].tolist() == list(range(first, stop))
    assert ((steps["flags"][~is_whole] & StepFlag.WARMUP) != 0).all()
    kept = collectives["seq"][collectives["step"] >= first]
    assert np.array_equal(kept, np.arange(first * PER_STEP, stop * PER_STEP))
    assert np.count_nonzero(trace.tables["phases"]["step"] >= first) == 9 * (stop - first)
    return first


def _new_writer(path: Path) -> TraceWriter:
    return TraceWriter(path, header(), keep_last=KEPT)


def test_the_files_stay_bounded_and_have_the_last_steps_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank-00003.h5"
    writer = _new_writer(path)
    writer.add("groups", _rows("groups", [(0, 0, b"world", b"gloo")]))
    sizes, rows = [], []
    for stop in range(500, 15_001, 500):
        _add_steps(writer, stop - 500, stop)
        writer.flush()
        sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
        if stop % 2500 == 0:
            trace = read_trace(path)
            first = _assert_whole(trace, stop)
            assert KEPT <= stop - first < 2 * KEPT + 500
            rows.append(len(trace.tables["collectives"]))
    writer.close()
    whole = 2 * KEPT * PER_STEP + 3 * CHUNK_ROWS
    assert max(rows) <= whole
    assert max(sizes[10:]) < 1.5 * max(sizes[4:10])
    trace = read_trace(path)
    assert trace.closed_cleanly and _assert_whole(trace, 15_000) == 14_000
    assert trace.tables["groups"]["name"].tolist() == [b"world"]
    assert sorted(os.listdir(tmp_path)) == [path.name]


def test_without_the_setting_all_steps_are_kept(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "rank-00003.h5", header())
    _add_steps(writer, 0, 3000)
    writer.flush()
    writer.close()
    assert _assert_whole(read_trace(tmp_path / "rank-00003.h5"), 3000) == 0


@each_case("at", ["before", "copying", "renamed"])
def test_a_rank_that_dies_while_it_drops_steps_loses_none_that_it_keeps(
    tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child is ended without any cleaning up at a moment of the change, as by SIGKILL."""
    path = tmp_path / "rank-00003.h5"
    child = os.fork()
    if child == 0:
        writer = _new_writer(path)
        _add_steps(writer, 0, 1900)
        writer.flush()
        _add_steps(writer, 1900, 2300)
        if at == "before":
            monkeypatch.setattr(TraceWriter, "_drop_old", lambda self: os._exit(0))
        elif at == "copying":
            monkeypatch.setattr(Container, "mark_steps", lambda self, step: os._exit(0))
        else:
            monkeypatch.setattr(Container, "close", lambda self: os._exit(0))
        writer.flush()
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    trace = read_trace(path)
    assert not trace.closed_cleanly
    steps = trace.tables["steps"]
    is_whole = (steps["flags"] & StepFlag.PLAIN) == 0
    # Steps that are no longer kept may be marked before they go.
    assert steps["step"][is_whole].tolist() == list(range(1000 if at != "before" else 0, 2300))
    kept = trace.tables["collectives"]
    kept = kept["seq"][kept["step"] >= 1000]
    assert np.array_equal(kept, np.arange(1000 * PER_STEP, 2300 * PER_STEP))
    assert trace.problems == () and trace.first_step == (1000 if at == "renamed" else 0)


def test_a_disk_without_room_for_the_new_file_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank-00003.h5"
    writer = _new_writer(path)
    _add_steps(writer, 0, 1900)
    writer.flush()
    _add_steps(writer, 1900, 2300)

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Container, "copy_chunks", no_room)
        with pytest.raises(OSError, match="No space"):
            writer.flush()
    assert np.array_equal(read_trace(path).tables["collectives"]["seq"], np.arange(2300 * PER_STEP))
    writer.flush()
    assert _assert_whole(read_trace(path), 2300) == 1000
    writer.close()
    assert sorted(os.listdir(tmp_path)) == [path.name]


def test_operations_in_flight_stay_open_across_the_change(tmp_path: Path) -> None:
    path = tmp_path / "rank-00003.h5"
    writer = _new_writer(path)
    _add_steps(writer, 0, 1900)
    opened = _rows("collectives", [(1800, 0, 99, Op.ALL_REDUCE, 8, -1, 7, 0, 0, ExitKind.NEVER)])
    writer.set_open(opened)
    writer.flush()
    _add_steps(writer, 1900, 2300)
    writer.flush()
    assert read_trace(path).open_collectives["seq"].tolist() == [99]
    writer.abandon()


@each_case(("place", "value"), [("first_row", -1), ("first_row", "x"), ("first_step", 1 << 62)])
def test_a_damaged_number_of_dropped_rows_is_refused(tmp_path: Path, place: str, value: object) -> None:
    path = tmp_path / "rank-00003.h5"
    writer = _new_writer(path)
    _add_steps(writer, 0, 10)
    writer.close()
    with h5py.File(path, "r+") as file:
        file["steps"].attrs[place] = value
    with pytest.raises(TraceError, match=place):
        read_trace(path)
    with Folder.open(tmp_path) as folder:
        assert folder.has(path.name)


def test_a_trace_that_has_dropped_steps_stays_in_its_file_when_a_run_is_packed(tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path / "run").new_attempt()
    writer = TraceWriter(attempt.trace_file(0), header(), keep_last=KEPT)
    _add_steps(writer, 0, 2300)
    writer.flush()
    writer.close()
    packed = pack_attempt(attempt, PackPlan(has_ended=True), begin_stage=lambda name: lambda done, total: None)
    assert list(packed.kept) != [] and "attributes" in str(packed.kept)
    assert attempt.trace_file(0).exists() and attempt.packs() == []
