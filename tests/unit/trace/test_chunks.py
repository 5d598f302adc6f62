"""What is read past HDF5 is what HDF5 reads, whatever way of storing it a trace may have."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from rows import ADDERS, header, random_rows

from hpcpace.trace.chunks import DamagedColumn, index_table, read_chunks, select_chunks, split_chunks
from hpcpace.trace.hdf5_files import open_column
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import CHUNK_ROWS, DEVICE_TABLES, TABLES
from hpcpace.trace.writer import TraceWriter

_NUM_ROWS = dict.fromkeys(ADDERS, 50) | {"phases": 2 * CHUNK_ROWS + 50}


@pytest.fixture(scope="module", params=[(), ("collectives",), DEVICE_TABLES], ids=["", "enqueue", "device"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chunks") / "rank-00000.h5"
    writer = TraceWriter(path, header(), device_tables=request.param)
    for table, num_rows in _NUM_ROWS.items():
        writer.add(table, random_rows(table, num_rows, device_tables=request.param))
    writer.close()
    return path


@pytest.fixture
def closed(written: Path, path: Path) -> Path:
    path.parent.mkdir()
    return Path(shutil.copy(written, path))


def index(file: h5py.File, table: str):
    return index_table(file[table].id, TABLES[table], file_bytes=1 << 30)


def read_table(path: Path, table: str, select=lambda chunks: chunks):
    with h5py.File(path, "r") as file:
        chunks = index(file, table)
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


def test_of_a_table_without_rows_only_the_first_and_the_last_column_are_opened(path, monkeypatch):
    path.parent.mkdir()
    TraceWriter(path, header()).close()
    opened = []
    monkeypatch.setattr(
        "hpcpace.trace.chunks.open_column", lambda group, name: opened.append(name) or open_column(group, name)
    )
    names = TABLES["flows"].dtype.names
    with h5py.File(path, "r") as file:
        found = index(file, "flows")
    assert (opened, found.num_rows, tuple(found.columns)) == ([names[0], names[-1]], 0, names)
    with h5py.File(path, "r+") as file:
        del file["flows"][names[3]]
        with pytest.raises(DamagedColumn, match=f"column {names[3]}: it is missing"):
            index(file, "flows")


class Earlier:
    """A column as it was when a reader asked for its length, before its rank wrote on."""

    def __init__(self, column: h5py.h5d.DatasetID, num_rows: int) -> None:
        self._column, self._num_rows = column, num_rows

    def get_space(self) -> SimpleNamespace:
        return SimpleNamespace(get_simple_extent_dims=lambda: (self._num_rows,))

    def __getattr__(self, name: str) -> object:
        return getattr(self._column, name)


def test_chunks_that_come_while_a_column_is_read_are_left_out(closed, monkeypatch):
    whole = read_table(closed, "phases")

    def earlier(group, name):
        column, properties = open_column(group, name)
        return Earlier(column, CHUNK_ROWS + 5), properties

    monkeypatch.setattr("hpcpace.trace.chunks.open_column", earlier)
    with h5py.File(closed, "r") as file:
        growing = index_table(file["phases"].id, TABLES["phases"], file_bytes=1 << 30, is_growing=True)
        with pytest.raises(DamagedColumn, match="more than 2 chunks"):
            index_table(file["phases"].id, TABLES["phases"], file_bytes=1 << 30)
    with closed.open("rb") as content:
        found = read_chunks(content.fileno(), growing)
    assert len(found) == CHUNK_ROWS + 5
    assert found["begin_ns"].tolist() == whole["begin_ns"][: CHUNK_ROWS + 5].tolist()


@pytest.mark.parametrize(("first", "stop", "num_rows"), [(0, 1, CHUNK_ROWS), (1, 3, CHUNK_ROWS + 50), (3, 3, 0)])
def test_some_chunks_are_read_without_the_others(closed, first, stop, num_rows):
    whole = read_table(closed, "phases")
    found = read_table(closed, "phases", lambda chunks: select_chunks(chunks, first, stop))
    begin = first * CHUNK_ROWS
    assert len(found) == num_rows
    assert found["begin_ns"].tolist() == whole["begin_ns"][begin : begin + num_rows].tolist()


@pytest.mark.parametrize(("table", "num_last"), [("phases", 50), ("steps", 50), ("pacing", 50), ("clock", 50)])
def test_the_last_chunk_is_parted_from_those_before_it(closed, table, num_last):
    before, last = (
        read_table(closed, table, lambda chunks, part=part: split_chunks(chunks, 1)[part]) for part in (0, 1)
    )
    assert (len(before), len(last)) == (_NUM_ROWS[table] - num_last, num_last)


@pytest.mark.parametrize(
    "dataset",
    [
        {"chunks": (8,)},
        {"chunks": (8,), "compression": "gzip"},
        {"chunks": (8,), "shuffle": True},
        {"chunks": (8,), "fletcher32": True},
        {"chunks": (7,), "compression": "gzip", "shuffle": True, "fletcher32": True},
        {"chunks": (8,), "compression": "gzip", "shuffle": True, "dtype": ">i8"},
        {"chunks": (8,), "compression": "gzip", "shuffle": True, "dtype": "i4"},
        {},
    ],
)
def test_another_way_of_storing_a_column_reads_the_same(closed, dataset):
    expected = read_trace(closed).tables["phases"]["end_ns"].astype(np.dtype(dataset.get("dtype", "i8")))
    with h5py.File(closed, "r+") as file:
        del file["phases/end_ns"]
        file["phases"].create_dataset("end_ns", data=expected, **dataset)
    trace = read_trace(closed)
    assert trace.problems == ()
    assert trace.tables["phases"]["end_ns"].tolist() == expected.tolist()


def test_a_chunk_that_skipped_its_filters_is_read_as_it_is(closed):
    values = np.arange(16, dtype="<i8")
    with h5py.File(closed, "r+") as file:
        del file["phases/end_ns"]
        made = {"shape": (16,), "maxshape": (None,), "chunks": (8,), "compression": "gzip", "shuffle": True}
        column = file["phases"].create_dataset("end_ns", dtype="i8", **made)
        column[:8] = values[:8]
        column.id.write_direct_chunk((8,), values[8:].tobytes(), filter_mask=3)
    assert read_trace(closed).tables["phases"]["end_ns"].tolist() == values.tolist()


@pytest.mark.parametrize("num_skipped", [0, 1])
def test_a_wrong_checksum_is_damage(closed, num_skipped):
    with h5py.File(closed, "r+") as file:
        del file["phases/end_ns"]
        file["phases"].create_dataset("end_ns", data=np.arange(8), chunks=(8,), fletcher32=True)
        place = file["phases/end_ns"].id.get_chunk_info(0)
    with open(closed, "r+b") as file:
        file.seek(place.byte_offset + num_skipped)
        file.write(b"\x7f")
    assert any("checksum" in problem for problem in read_trace(closed).problems)


def _shorten(file: h5py.File) -> None:
    file["phases/end_ns"].resize((40,))


def _lengthen(file: h5py.File) -> None:
    for column in file["phases"].values():
        column.resize((5 * CHUNK_ROWS,))


@pytest.mark.parametrize(("change", "num_rows"), [(_shorten, 40), (_lengthen, 3 * CHUNK_ROWS)])
def test_only_rows_that_all_columns_really_have_are_read(closed, change, num_rows):
    with h5py.File(closed, "r+") as file:
        change(file)
        assert index(file, "phases").num_rows == num_rows


def test_a_column_that_is_missing_is_damage(closed):
    with h5py.File(closed, "r+") as file:
        del file["phases/end_ns"]
        with pytest.raises(DamagedColumn, match="end_ns: it is missing"):
            index(file, "phases")


@pytest.mark.parametrize("size_bytes", [1, 40])
def test_a_chunk_that_was_overwritten_is_damage(closed, size_bytes):
    with h5py.File(closed, "r") as file:
        place = file["phases/end_ns"].id.get_chunk_info(1)
    with open(closed, "r+b") as file:
        file.seek(place.byte_offset + place.size // 2)
        content = file.read(size_bytes)
        file.seek(place.byte_offset + place.size // 2)
        file.write(bytes(byte ^ 0xFF for byte in content))
    with pytest.raises(DamagedColumn):
        read_table(closed, "phases")
    assert any("table phases is damaged" in problem for problem in read_trace(closed).problems)


def test_ranks_share_columns_that_are_equal_on_all_of_them(closed, tmp_path):
    other = Path(shutil.copy(closed, tmp_path / "rank-00001.h5"))
    one, same = (read_table(path, "groups")["backend"] for path in (closed, other))
    assert one is same and not one.flags.writeable
