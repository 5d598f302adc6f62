"""What is read past HDF5 is what HDF5 reads; whatever else a file may be is left to HDF5."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from rows import ADDERS, header, random_rows

from hpcpace.trace import reader
from hpcpace.trace.chunks import ForeignChunks, index_chunks, read_chunks, select_chunks, split_last
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import CHUNK_ROWS, TABLES
from hpcpace.trace.writer import TraceWriter

_NUM_ROWS = dict.fromkeys(ADDERS, 50) | {"phases": 2 * CHUNK_ROWS + 50}
_PHASES = TABLES["phases"]


@pytest.fixture(scope="module", params=[False, True], ids=["", "enqueue"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chunks") / "rank-00000.h5"
    writer = TraceWriter(path, header(), has_enqueue=request.param)
    for table, num_rows in _NUM_ROWS.items():
        writer.add(table, random_rows(table, num_rows, has_enqueue=request.param))
    writer.close()
    return path


@pytest.fixture
def closed(written: Path, path: Path) -> Path:
    path.parent.mkdir()
    return Path(shutil.copy(written, path))


def read_table(path: Path, table: str, select=lambda chunks: chunks):
    with h5py.File(path, "r") as file:
        chunks = index_chunks(file, TABLES[table])
    assert chunks is not None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_chunks(descriptor, select(chunks))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("table", TABLES)
def test_every_column_is_what_h5py_reads(closed, table):
    found = read_table(closed, table)
    with h5py.File(closed, "r") as file:
        assert set(found) == set(file[table])
        for name, column in found.items():
            expected = file[table][name][:]
            assert column.dtype == expected.dtype
            assert column.tolist() == expected.tolist()


def test_a_trace_is_the_same_with_and_without_hdf5(closed, monkeypatch):
    past = read_trace(closed)
    monkeypatch.setattr(reader, "index_chunks", lambda file, table: None)
    through = read_trace(closed)
    assert past.problems == through.problems == ()
    for name, table in through.tables.items():
        assert {key: (column.dtype, column.tolist()) for key, column in table.items()} == {
            key: (column.dtype, column.tolist()) for key, column in past.tables[name].items()
        }


@pytest.mark.parametrize(("first", "stop", "num_rows"), [(0, 1, CHUNK_ROWS), (1, 3, CHUNK_ROWS + 50), (3, 3, 0)])
def test_some_chunks_are_read_without_the_others(closed, first, stop, num_rows):
    whole = read_table(closed, "phases")
    found = read_table(closed, "phases", lambda chunks: select_chunks(chunks, first, stop))
    begin = first * CHUNK_ROWS
    assert len(found) == num_rows
    assert found["begin_ns"].tolist() == whole["begin_ns"][begin : begin + num_rows].tolist()


@pytest.mark.parametrize(("table", "num_last"), [("phases", 50), ("steps", 50), ("pacing", 50), ("clock", 50)])
def test_the_last_chunk_is_parted_from_those_before_it(closed, table, num_last):
    before, last = (read_table(closed, table, lambda chunks, part=part: split_last(chunks)[part]) for part in (0, 1))
    assert (len(before), len(last)) == (_NUM_ROWS[table] - num_last, num_last)


@pytest.mark.parametrize(
    "dataset",
    [
        {"chunks": (8,)},
        {"chunks": (8,), "compression": "gzip"},
        {"chunks": (8,), "shuffle": True},
        {"chunks": (8,), "compression": "gzip", "shuffle": True, "fletcher32": True},
        {"chunks": (8,), "compression": "lzf", "shuffle": True},
        {"chunks": (8,), "compression": "gzip", "shuffle": True, "dtype": ">i8"},
        {"chunks": (8,), "compression": "gzip", "shuffle": True, "dtype": "i4"},
        {},
    ],
)
def test_another_layout_of_a_column_is_left_to_hdf5_and_reads_the_same(closed, dataset):
    expected = read_trace(closed).tables["phases"]["end_ns"].astype(np.dtype(dataset.get("dtype", "i8")))
    with h5py.File(closed, "r+") as file:
        del file["phases/end_ns"]
        file["phases"].create_dataset("end_ns", data=expected, **dataset)
        assert index_chunks(file, _PHASES) is None
    trace = read_trace(closed)
    assert trace.problems == ()
    assert trace.tables["phases"]["end_ns"].tolist() == expected.tolist()


def _shorten(file: h5py.File) -> None:
    file["phases/end_ns"].resize((40,))


def _lengthen(file: h5py.File) -> None:
    for column in file["phases"].values():
        column.resize((5 * CHUNK_ROWS,))


def _remove_column(file: h5py.File) -> None:
    del file["phases/end_ns"]


def _remove_table(file: h5py.File) -> None:
    del file["phases"]


@pytest.mark.parametrize("change", [_shorten, _lengthen, _remove_column, _remove_table])
def test_what_is_not_whole_is_left_to_hdf5(closed, change):
    with h5py.File(closed, "r+") as file:
        change(file)
        assert index_chunks(file, _PHASES) is None


@pytest.mark.parametrize("size_bytes", [1, 40])
def test_a_chunk_that_was_overwritten_is_foreign(closed, size_bytes):
    with h5py.File(closed, "r") as file:
        place = file["phases/end_ns"].id.get_chunk_info(1)
    with open(closed, "r+b") as file:
        file.seek(place.byte_offset + place.size // 2)
        content = file.read(size_bytes)
        file.seek(place.byte_offset + place.size // 2)
        file.write(bytes(byte ^ 0xFF for byte in content))
    with pytest.raises(ForeignChunks):
        read_table(closed, "phases")
    assert any("table phases is damaged" in problem for problem in read_trace(closed).problems)


def test_ranks_share_columns_that_are_equal_on_all_of_them(closed, tmp_path):
    other = Path(shutil.copy(closed, tmp_path / "rank-00001.h5"))
    one, same = (read_table(path, "groups")["backend"] for path in (closed, other))
    assert one is same and not one.flags.writeable
