"""What is recorded is what is read, whichever of the two files it stands in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from rows import ADDERS, assert_table, header, random_rows, record

from hpcpace.trace.reader import read_trace
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import CHUNK_ROWS, DEVICE_TABLES

# Some rows for the journal, and of one table more than a chunk.
_NUM_ROWS = dict.fromkeys(ADDERS, 100) | {"phases": CHUNK_ROWS + 100}


@pytest.fixture(params=[(), ("collectives",), DEVICE_TABLES], ids=["", "enqueue", "device"])
def recorded(request: pytest.FixtureRequest, start: Callable[..., Recorder]) -> tuple[Recorder, dict[str, np.ndarray]]:
    recorder = start(device_tables=request.param)
    rows = {
        table: record(recorder, table, random_rows(table, num_rows, device_tables=request.param))
        for table, num_rows in _NUM_ROWS.items()
    }
    assert recorder.flush()
    return recorder, rows


def _assert_whole(path: Path, rows: dict[str, np.ndarray], *, first: int = 0) -> None:
    trace = read_trace(path)
    assert trace.header == header()
    for table, expected in rows.items():
        assert_table(trace.tables[table], expected if table != "phases" else expected[first:])
    assert trace.tables["account"]["events"].sum() == sum(map(len, rows.values()))


def test_every_column_of_every_table_is_read_from_a_closed_file(recorded, path, warnings):
    recorder, rows = recorded
    recorder.close()
    _assert_whole(path, rows)
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    assert read_trace(path).closed_cleanly and not read_trace(path).problems
    assert warnings == []


def test_every_column_of_every_table_is_read_while_the_rank_runs(recorded, path):
    _, rows = recorded
    _assert_whole(path, rows)
    assert not read_trace(path).closed_cleanly and not read_trace(path).problems


def test_the_journal_alone_gives_every_row_that_fills_no_chunk(recorded, path, tmp_path):
    _, rows = recorded
    copy = Path(shutil.copytree(path.parent, tmp_path / "copy"), path.name)
    copy.unlink()
    _assert_whole(copy, rows, first=CHUNK_ROWS)
    file_missing, rows_missing = read_trace(copy).problems
    assert "no trace file" in file_missing
    assert f"{CHUNK_ROWS} rows" in rows_missing


def test_a_killed_ranks_file_without_its_journal_says_what_is_missing(recorded, path, tmp_path):
    _, rows = recorded
    copy = Path(shutil.copytree(path.parent, tmp_path / "copy"), path.name)
    copy.with_suffix(".journal").unlink()
    trace = read_trace(copy)
    assert_table(trace.tables["phases"], rows["phases"][:CHUNK_ROWS])
    assert not trace.closed_cleanly
    assert [problem for problem in trace.problems if "its last rows are missing" in problem]


def test_the_name_of_the_journal_names_the_trace_as_well(recorded, path):
    _, rows = recorded
    _assert_whole(path.with_suffix(".journal"), rows)


def test_a_closed_file_is_no_longer_than_its_content(recorded, path):
    recorder, _ = recorded
    recorder.close()
    with h5py.File(path, "r") as file:
        assert file.id.get_filesize() == path.stat().st_size


def test_a_trace_without_rows_is_sound(start, path):
    start().close()
    trace = read_trace(path)
    assert trace.closed_cleanly and not trace.problems
    assert {len(trace.tables[table]) for table in ADDERS} == {0}


def test_operations_open_at_the_end_are_rows_that_never_completed(start, path):
    recorder = start()
    recorder.open_collectives = lambda: [(3, 0, 7, 0, 64, -1, 1 << 20, 0, 0, 2)]
    recorder.flush()
    assert read_trace(path).open_collectives["seq"].tolist() == [7]
    recorder.close()
    assert read_trace(path).tables["collectives"]["exit_kind"].tolist() == [2]


def test_an_operation_that_completed_is_open_no_more(start, path):
    recorder = start()
    recorder.open_collectives = lambda: [(3, 0, 7, 0, 64, -1, 1 << 20, 0, 0, 2)]
    recorder.flush()
    recorder.open_collectives = None
    recorder.add_collective(3, 0, 7, 0, 64, -1, 1 << 20, 1 << 21, 0, 0)
    recorder.flush()
    trace = read_trace(path)
    assert len(trace.open_collectives) == 0
    assert trace.tables["collectives"]["seq"].tolist() == [7]
