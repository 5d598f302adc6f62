"""Trace files made to do harm lead to no other file and fill no memory, and what of them is sound is read.

Each attack is on a table that a report reads, or on the header; the secret lies beside the run.
"""

from __future__ import annotations

import os
import shutil
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from rows import ADDERS, header, random_rows

from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import Attempt
from hpcpace.diagnosis.evidence import timed_traces
from hpcpace.diagnosis.incomplete import problems_of
from hpcpace.diagnosis.operation_figures import measure_operations
from hpcpace.metrics.steps import common_steps
from hpcpace.trace import journal
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.journal import RecordKind, encode_header, encode_records
from hpcpace.trace.reader import TooLarge, read_trace
from hpcpace.trace.schema import TABLES, row_dtypes
from hpcpace.trace.stream import StoredTable
from hpcpace.trace.writer import TraceWriter

SECRET = b"-----BEGIN PRIVATE KEY-----" * 100
NUM_ROWS = 50
Attack = Callable[[h5py.File, Path], None]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "rank-00000.h5"
    writer = TraceWriter(path, header())
    for table in ADDERS:
        writer.add(table, random_rows(table, NUM_ROWS))
    writer.close()
    return path


@pytest.fixture
def path(written: Path, tmp_path: Path) -> Path:
    (tmp_path / "trace").mkdir()
    return Path(shutil.copy(written, tmp_path / "trace"))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["steps/begin_ns"] = np.frombuffer(SECRET[: 8 * NUM_ROWS], "<i8")
        file.attrs["host"] = "secret-host"
    return secret


def external_storage(file: h5py.File, secret: Path) -> None:
    del file["steps/begin_ns"]
    storage = [(str(secret), 0, h5py.h5f.UNLIMITED)]
    file["steps"].create_dataset("begin_ns", shape=(NUM_ROWS,), dtype="<i8", external=storage)


def external_storage_of_a_pipe(file: h5py.File, secret: Path) -> None:
    os.mkfifo(secret.with_name("pipe"))
    external_storage(file, secret.with_name("pipe"))


def external_link_of_a_column(file: h5py.File, secret: Path) -> None:
    del file["steps/begin_ns"]
    file["steps/begin_ns"] = h5py.ExternalLink(str(secret.with_name("secret.h5")), "/steps/begin_ns")


def external_link_of_a_group(file: h5py.File, secret: Path) -> None:
    del file["steps"]
    file["steps"] = h5py.ExternalLink(str(secret.with_name("secret.h5")), "/steps")


def external_link_to_a_pipe(file: h5py.File, secret: Path) -> None:
    os.mkfifo(secret.with_name("pipe"))
    del file["steps"]
    file["steps"] = h5py.ExternalLink(str(secret.with_name("pipe")), "/steps")


def soft_link(file: h5py.File, secret: Path) -> None:
    del file["steps/begin_ns"]
    file["steps/begin_ns"] = h5py.SoftLink("/steps/end_ns")


def circular_soft_link(file: h5py.File, secret: Path) -> None:
    del file["steps"]
    file["steps"] = h5py.SoftLink("/steps")


def virtual_layout(file: h5py.File, secret: Path) -> None:
    del file["steps/begin_ns"]
    layout = h5py.VirtualLayout(shape=(NUM_ROWS,), dtype="<i8")
    source = h5py.VirtualSource(str(secret.with_name("secret.h5")), "steps/begin_ns", shape=(NUM_ROWS,))
    layout[:] = source
    file["steps"].create_virtual_dataset("begin_ns", layout)


def virtual_layout_without_end(file: h5py.File, secret: Path) -> None:
    """Take an extent that HDF5 finds out by opening the files that the layout names, a pipe here."""
    os.mkfifo(secret.with_name("pipe"))
    del file["steps/begin_ns"]
    layout = h5py.VirtualLayout(shape=(NUM_ROWS,), maxshape=(None,), dtype="<i8")
    source = h5py.VirtualSource(str(secret.with_name("pipe")), "x", shape=(NUM_ROWS,), maxshape=(None,))
    layout[: h5py.h5s.UNLIMITED] = source[: h5py.h5s.UNLIMITED]
    file["steps"].create_virtual_dataset("begin_ns", layout)


def compact_layout(file: h5py.File, secret: Path) -> None:
    del file["steps/begin_ns"]
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple((NUM_ROWS,))
    h5py.h5d.create(file["steps"].id, b"begin_ns", h5py.h5t.STD_I64LE, space, properties)


def unknown_filter(file: h5py.File, secret: Path) -> None:
    del file["steps/begin_ns"]
    file["steps"].create_dataset("begin_ns", data=np.arange(NUM_ROWS), chunks=(8,), compression="lzf")


def other_order_of_filters(file: h5py.File, secret: Path) -> None:
    del file["steps/begin_ns"]
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((8,))
    properties.set_deflate(6)
    properties.set_shuffle()
    space = h5py.h5s.create_simple((NUM_ROWS,), (h5py.h5s.UNLIMITED,))
    h5py.h5d.create(file["steps"].id, b"begin_ns", h5py.h5t.STD_I64LE, space, properties)


def references(file: h5py.File, secret: Path) -> None:
    del file["steps/begin_ns"]
    file["steps"].create_dataset("begin_ns", data=[file["groups"].ref] * NUM_ROWS, dtype=h5py.ref_dtype)


def column_that_is_a_group(file: h5py.File, secret: Path) -> None:
    del file["steps/begin_ns"]
    file["steps"].create_group("begin_ns")


def column_that_is_a_type(file: h5py.File, secret: Path) -> None:
    del file["steps/begin_ns"]
    file["steps/begin_ns"] = np.dtype("<i8")


def _column(file: h5py.File, chunk: bytes, *, num_rows: int, chunk_rows: int) -> None:
    """Put one stored chunk in the place of a column."""
    del file["steps/begin_ns"]
    made = {"shape": (num_rows,), "maxshape": (None,), "chunks": (chunk_rows,), "compression": "gzip", "shuffle": True}
    file["steps"].create_dataset("begin_ns", dtype="<i8", **made).id.write_direct_chunk((0,), chunk)


def chunk_that_inflates_to_more(file: h5py.File, secret: Path) -> None:
    _column(file, zlib.compress(bytes(60_000_000)), num_rows=NUM_ROWS, chunk_rows=8192)


def chunk_that_is_never_at_its_end(file: h5py.File, secret: Path) -> None:
    _column(file, zlib.compress(bytes(65536))[:-10], num_rows=NUM_ROWS, chunk_rows=8192)


def chunk_of_two_gigabytes(file: h5py.File, secret: Path) -> None:
    _column(file, zlib.compress(bytes(8)), num_rows=NUM_ROWS, chunk_rows=1 << 28)


def rows_beyond_the_files_bytes(file: h5py.File, secret: Path) -> None:
    file["steps/begin_ns"].resize((1 << 62,))


def chunks_without_number(file: h5py.File, secret: Path) -> None:
    """Claim a chunk for each row, which an index without entries does not have to hold."""
    del file["steps/begin_ns"]
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((1,))
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple((200_000,))
    h5py.h5d.create(file["steps"].id, b"begin_ns", h5py.h5t.STD_I64LE, space, properties)


REFUSED_TABLES: dict[Attack, str] = {
    external_storage: "other files",
    external_storage_of_a_pipe: "other files",
    external_link_of_a_column: "link to another place",
    external_link_of_a_group: "link to another place",
    external_link_to_a_pipe: "link to another place",
    soft_link: "link to another place",
    circular_soft_link: "link to another place",
    virtual_layout: "layout other than",
    virtual_layout_without_end: "layout other than",
    compact_layout: "layout other than",
    unknown_filter: "filters",
    other_order_of_filters: "filters",
    references: "of type object",
    column_that_is_a_group: "no dataset",
    column_that_is_a_type: "no dataset",
    chunk_that_inflates_to_more: "damaged",
    chunk_that_is_never_at_its_end: "damaged",
    chunk_of_two_gigabytes: "chunks of",
    rows_beyond_the_files_bytes: "claims",
    chunks_without_number: "more than 131072 chunks",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("attack", "reason"), REFUSED_TABLES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_hostile_table_is_left_out_and_the_others_are_read(path, secret, attack, reason):
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        attack(file, secret)
    tracemalloc.start()
    trace = read_trace(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trace.tables["steps"]) == 0
    assert [len(trace.tables[table]) for table in ADDERS if table != "steps"] == [NUM_ROWS] * (len(ADDERS) - 1)
    (problem,) = trace.problems
    assert "table steps is damaged and left out" in problem and reason in problem
    assert SECRET[:20] not in b"".join(column.tobytes() for table in trace.tables.values() for column in table.values())
    assert peak_bytes < 64 << 20


def _large_text(file: h5py.File) -> None:
    file.attrs["host"] = "x" * (100 << 20)


def _large_fixed_text(file: h5py.File) -> None:
    file.attrs["host"] = np.bytes_(b"x" * (100 << 20))


def _large_array(file: h5py.File) -> None:
    file.attrs["mesh"] = np.zeros(10 << 20)


def _large_unknown_attribute(file: h5py.File) -> None:
    file.attrs["nobody-reads-it"] = np.zeros(10 << 20)


def _large_unit(file: h5py.File) -> None:
    file["steps"].attrs["samples_unit"] = "x" * (10 << 20)


def _many_interfaces(file: h5py.File) -> None:
    file["network"].attrs["interfaces"] = ["eth0"] * 100_000


def _many_attributes(file: h5py.File) -> None:
    for number in range(3000):
        file.attrs[f"attribute-{number}"] = np.zeros(64)


def _many_links(file: h5py.File) -> None:
    for number in range(40_000):
        file[f"a-link-to-the-same-group-{number:020d}"] = h5py.SoftLink("/steps")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "attack", [_large_text, _large_fixed_text, _large_array, _large_unknown_attribute, _many_attributes, _many_links]
)
def test_a_header_that_would_fill_the_memory_is_refused(path, attack):
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        attack(file)
    tracemalloc.start()
    with pytest.raises(TraceError, match=str(path)):
        read_trace(path)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(("attack", "table"), [(_large_unit, "steps"), (_many_interfaces, "network")])
def test_a_large_attribute_of_a_table_refuses_it_or_the_file(path, attack, table):
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        attack(file)
    try:
        trace = read_trace(path)
    except TraceError as error:
        assert str(path) in str(error)
    else:
        assert len(trace.tables[table]) == 0 and trace.problems


def test_a_text_far_behind_the_head_of_the_file_is_found(path):
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        file.create_dataset("filling", data=np.random.default_rng(1).integers(0, 255, 5 << 20, np.uint8))
        file.attrs["host"] = "x" * (2 << 20)
    with pytest.raises(TraceError, match=r"claims|text"):
        read_trace(path)


def test_a_billion_rows_in_a_few_megabytes_are_refused_by_what_they_take(path):
    num_rows, chunk_rows = 1 << 30, 1 << 20
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        del file["phases"]
        for column in TABLES["phases"].dtype.names:
            dtype = TABLES["phases"].dtype[column]
            chunk = zlib.compress(bytes(chunk_rows * dtype.itemsize), 9)
            made = {"shape": (num_rows,), "maxshape": (None,), "chunks": (chunk_rows,), "dtype": dtype}
            stored = file.create_dataset(f"phases/{column}", compression="gzip", shuffle=True, **made)
            for start in range(0, num_rows, chunk_rows):
                stored.id.write_direct_chunk((start,), chunk)
    tracemalloc.start()
    with pytest.raises(TooLarge, match=r"24\.\d GB in memory") as raised:
        read_trace(path)
    assert raised.value.size_bytes > num_rows * TABLES["phases"].dtype.itemsize
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()


def test_the_file_that_was_opened_is_the_one_that_is_read(path, tmp_path, monkeypatch):
    """Exchange the file for a link behind the check: HDF5 must not open what has the name by then."""
    from hpcpace.trace import reader

    opened, other = reader.open_trace, tmp_path / "other.h5"
    writer = TraceWriter(other, header(world_size=1, host="another"))
    writer.close()

    def exchange(descriptor):
        path.unlink()
        path.symlink_to(other)
        return opened(descriptor)

    monkeypatch.setattr(reader, "open_trace", exchange)
    with pytest.raises(TraceError, match=str(path)):  # HDF5 asks for the name of the open file, which has none now
        read_trace(path)


def test_a_journal_of_tiny_runs_of_records_is_read_no_further_than_any_writer_goes(monkeypatch):
    monkeypatch.setattr(journal, "_MAX_RUNS", 10)
    dtypes = row_dtypes()
    one = encode_records(0, RecordKind.ROW, 0, np.zeros(1, dtypes["steps"]))
    other = encode_records(1, RecordKind.ROW, 0, np.zeros(1, dtypes["phases"]))
    found = journal.decode(encode_header(header(), dtypes) + (one + other) * 20, "a journal")
    assert found.num_left_bytes == 15 * len(one + other)


def test_a_journal_whose_description_is_endless_is_refused(path):
    text = b"[" * (2 << 20)
    path.with_suffix(".journal").write_bytes(
        b"HPCPJNL1" + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text
    )
    assert any("header is damaged" in problem for problem in read_trace(path).problems)


def _many_heaps(path: Path) -> None:
    """Append what looks like a million global heaps of a megabyte, each within the one before."""
    heap = b"GCOL\x01\0\0\0" + struct.pack("<Q", 1 << 20) + struct.pack("<HHIQ", 0, 0, 0, 1 << 20)
    with open(path, "ab") as file:
        file.write(heap * (1 << 20))


def _many_small_heaps(path: Path) -> None:
    with open(path, "ab") as file:
        file.write((b"GCOL\x01\0\0\0" + bytes(8)) * (1 << 20))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("append", [_many_heaps, _many_small_heaps])
def test_heaps_are_looked_into_as_far_as_those_of_a_trace_go(path, append):
    append(path)
    with pytest.raises(TraceError, match="global heap"):
        read_trace(path)


def test_of_a_file_of_holes_no_more_is_read_than_its_data(path, monkeypatch):
    """Leave a page of data at every second place: a block that is read from each must end where the hole begins."""
    with open(path, "ab") as file:
        begin = file.tell()
        for number in range(1, 65):
            file.seek(begin + number * (1 << 20))
            file.write(bytes(range(1, 256)) * 16)
    sizes, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *given: sizes.append(len(found := pread(*given))) or found)
    assert len(read_trace(path).tables["steps"]) == NUM_ROWS
    assert sum(sizes) < 4 << 20


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """One rank whose collectives, all of one step, are some megabytes in memory and some kilobytes in the file."""
    attempt = Attempt(tmp_path / "attempt-0")
    writer = TraceWriter(attempt.trace_file(0), header(world_size=1))
    writer.add("steps", random_rows("steps", NUM_ROWS))
    writer.close()
    num_rows, chunk_rows = 1 << 20, 1 << 14
    with h5py.File(attempt.trace_file(0), "r+", libver=("v110", "v110")) as file:
        table = file["collectives"]
        for name in TABLES["collectives"].dtype.names:
            dtype = table[name].dtype
            del table[name]
            made = {"shape": (num_rows,), "maxshape": (None,), "chunks": (chunk_rows,), "dtype": dtype}
            column = table.create_dataset(name, compression="gzip", shuffle=True, **made)
            for start in range(0, num_rows, chunk_rows):
                column.id.write_direct_chunk((start,), zlib.compress(bytes(chunk_rows * dtype.itemsize)))
    return attempt


def _stored(attempt: Attempt, memory_bytes: int) -> StoredTable:
    (trace,) = read_attempt(attempt, most_rows=1000, memory_bytes=memory_bytes).traces
    table = trace.tables["collectives"]
    assert isinstance(table, StoredTable)
    return table


def test_collectives_on_disk_are_not_read_where_they_take_more_memory_than_is_left(attempt):
    stored = _stored(attempt, 8 << 20)
    with pytest.raises(TooLarge, match=r"collectives take 8\.39 MB in memory, more than the 2\.1\d? MB left"):
        stored["enter_ns"]
    with pytest.raises(TooLarge, match="collectives that belong together"):
        stored.stream.blocks(0, stored.stream.num_blocks)
    assert len(stored.stream.blocks(0, 1)) == 1 << 14


def test_collectives_on_disk_are_read_with_enough_memory(attempt):
    stored = _stored(attempt, 1 << 30)
    assert len(stored["enter_ns"]) == len(stored.stream.blocks(0, stored.stream.num_blocks)) == 1 << 20


def test_collectives_that_take_too_much_are_left_out_of_the_figures_and_said(attempt):
    traces = read_attempt(attempt, most_rows=1000, memory_bytes=8 << 20).traces
    steps = common_steps([trace.tables["steps"] for trace in traces]).select(slice(0))
    figures = measure_operations(timed_traces(traces), steps, steps)
    problems = [problem for stream in figures.streams for problem in problems_of(stream)]
    assert any("--memory allows more" in problem for problem in problems)
