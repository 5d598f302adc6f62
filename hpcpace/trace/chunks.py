"""Read columns of a trace file without HDF5: threads decompress what its index names.

h5py holds one lock for all files while HDF5 decompresses, each of its calls on a column costs more than reading a small
table, and its decompression is unbounded. Here nothing decompresses to more than the index says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray
from zlib_ng import zlib_ng

from hpcpace.core.records import dataclass
from hpcpace.trace.hdf5_files import FOREIGN_ERRORS, filters_of, open_column, open_group, stored_dtype
from hpcpace.trace.schema import TableSchema, row_dtype
from hpcpace.trace.tables import Table

_SHUFFLE, _DEFLATE = h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE
_FLETCHER32, _CHECKSUM_BYTES = h5py.h5z.FILTER_FLETCHER32, 4
_BOTH = (_SHUFFLE, _DEFLATE)
# Deflate makes nothing smaller than this, and adds at most a few bytes per 16 KiB.
_MAX_COMPRESSED, _MAX_LONGER_BYTES = 1032, 1024
# Eight times the size of our own chunks, so that no single chunk takes much memory.
_MAX_CHUNK_BYTES = 1 << 26
# A billion rows of a rank in our chunks; each chunk costs a call in Python.
_MAX_CHUNKS = 1 << 17
# Group names, step numbers, kinds of operations and the like compress to a few bytes that are equal on most ranks.
_MAX_SHARED, _MAX_SHARED_BYTES = 128, 8192


class DamagedColumn(Exception):
    """A column, or a chunk of it, is not what its file says, or not allowed in a trace."""


@dataclass(frozen=True)
class ColumnChunks:
    """Where the chunks of one column are in the file.

    Attributes:
        dtype: of the rows as the schema has them.
        stored: dtype of the values in the file.
        chunk_rows: rows of a chunk, or all rows of a contiguous column.
        places: offset and size in bytes by ascending row; a size of 0 if a chunk was never written.
        filters: the filters applied to each chunk, in order; one entry if all chunks have the same.
    """

    dtype: np.dtype
    stored: np.dtype
    chunk_rows: int = 0
    places: tuple[tuple[int, int], ...] = ()
    filters: tuple[tuple[int, ...], ...] = ((),)


@dataclass(frozen=True, kw_only=True)
class TableChunks:
    """Where the chunks of a table are in the file.

    Attributes:
        num_rows: rows of the table.
        columns: by name.
        longest: rows of the longest column: more than `num_rows` if the file is still being written, or damaged.
    """

    num_rows: int
    columns: Mapping[str, ColumnChunks]
    longest: int

    @property
    def size_bytes(self) -> int:
        """The memory that the rows take."""
        return self.num_rows * sum(column.dtype.itemsize for column in self.columns.values())

    @property
    def is_even(self) -> bool:
        """Whether the chunks of all columns hold the same rows, so that the table can be read chunk by chunk."""
        return len({(column.chunk_rows, len(column.places)) for column in self.columns.values()}) == 1


def open_tables(
    root: h5py.h5g.GroupID, schemas: Mapping[str, TableSchema], path: Path, problems: list[str]
) -> dict[str, h5py.h5g.GroupID]:
    """Return the groups of the tables that a file has, by name; add a problem for each that is damaged or missing."""
    groups = {}
    for name, schema in schemas.items():
        try:
            group = open_group(root, name)
        except FOREIGN_ERRORS as error:
            problems.append(left_out(path, name, error))
            continue
        if group is not None:
            groups[name] = group
        elif schema.required:
            problems.append(f"{path}: table {name} is missing")
    return groups


def left_out(path: Path, table: str, reason: object) -> str:
    """Return the sentence on a table that cannot be read."""
    return f"{path}: table {table} is damaged and left out ({reason})"


def index_table(
    group: h5py.h5g.GroupID, table: TableSchema, *, file_bytes: int, is_growing: bool = False
) -> TableChunks:
    """Return where the rows of a table are in the file.

    Args:
        group: of the table, in the open trace file.
        table: its schema.
        file_bytes: size of the file, which bounds what a column can hold.
        is_growing: whether a rank may still write it: chunks may have come since the length of their column was read.

    Raises:
        DamagedColumn: a column is missing, damaged, or not allowed in a trace.
    """
    columns_of_device = table.device.names or ()
    # One without the other is a column that this version does not know.
    has_device = bool(columns_of_device) and all(group.links.exists(name.encode()) for name in columns_of_device)
    dtype = row_dtype(table, has_device=has_device)
    assert dtype.names
    known = _ends(group, dtype, file_bytes, is_growing=is_growing)
    if set(known) == set(dtype.names[:1] + dtype.names[-1:]) and not any(num_rows for num_rows, _ in known.values()):
        return no_rows(table, dtype)
    found = {}
    for name in dtype.names:
        if name in known:
            found[name] = known[name]
            continue
        if name in table.optional and not group.links.exists(name.encode()):
            continue
        try:
            found[name] = _index_column(group, name, dtype[name], file_bytes, is_growing=is_growing)
        # h5py raises these for damaged files.
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError, OverflowError) as error:
            raise DamagedColumn(f"column {name}: {error}") from error
    lengths = [num_rows for num_rows, _ in found.values()]
    columns = {name: column for name, (_, column) in found.items()}
    if len(columns) < len(dtype.names):
        # A column that the file lacks reads as zeros: its chunks, like those of another one, were never written.
        _, like = next(iter(found.values()))
        unwritten = ((0, 0),) * len(like.places)
        columns = {
            name: columns.get(name, ColumnChunks(dtype[name], dtype[name], like.chunk_rows, unwritten))
            for name in dtype.names
        }
    return TableChunks(num_rows=min(lengths), columns=columns, longest=max(lengths))


def no_rows(table: TableSchema, dtype: np.dtype | None = None) -> TableChunks:
    """Return the place of a table without rows: by default of one that a file does not have."""
    dtype = table.dtype if dtype is None else dtype
    columns = {name: ColumnChunks(dtype[name], dtype[name]) for name in dtype.names or ()}
    return TableChunks(num_rows=0, columns=columns, longest=0)


def _ends(
    group: h5py.h5g.GroupID, dtype: np.dtype, file_bytes: int, *, is_growing: bool
) -> dict[str, tuple[int, ColumnChunks]]:
    """Return what `_index_column` does of a table's first column, and of its last one if the first has no rows.

    Columns grow one after the other: if neither has rows, none has, and the others need not be opened. In a run of one
    host without counters, 82 of 116 columns are in such tables. Columns that are missing or damaged are left out.
    """
    names = dtype.names or ()
    found: dict[str, tuple[int, ColumnChunks]] = {}
    try:
        if group.get_num_objs() < len(names):
            return found
        for name in names[:1] + names[-1:]:
            found[name] = _index_column(group, name, dtype[name], file_bytes, is_growing=is_growing)
            if found[name][0]:
                break
    except FOREIGN_ERRORS:  # named, with its column, by whoever opens all of them
        pass
    return found


def _index_column(
    group: h5py.h5g.GroupID, name: str, dtype: np.dtype, file_bytes: int, *, is_growing: bool
) -> tuple[int, ColumnChunks]:
    """Return the number of rows that are really there, and where they are.

    A rank may be killed between writing a column's length and its chunk.
    """
    found = open_column(group, name)
    if found is None:
        raise ValueError("it is missing")
    # With thousands of files, each property of a dataset takes noticeable time: read each once.
    column, properties = found
    shape = column.get_space().get_simple_extent_dims()
    if len(shape) != 1:
        raise ValueError(f"it has {len(shape)} dimensions")
    stored = stored_dtype(column.get_type().encode())
    if stored.kind not in ("S" if dtype.kind == "S" else "iu"):
        raise ValueError(f"it is of type {stored}, not {dtype}")
    (num_rows,) = shape
    if not num_rows:
        return 0, ColumnChunks(dtype, stored)
    size_bytes = num_rows * stored.itemsize
    if size_bytes > _MAX_COMPRESSED * file_bytes:
        raise ValueError(f"it claims {num_rows} rows in a file of {file_bytes} bytes")
    if properties.get_layout() == h5py.h5d.CHUNKED:
        return _index_chunks(column, properties, dtype, stored, num_rows, is_growing=is_growing)
    offset = column.get_offset()
    if offset is None or column.get_storage_size() < size_bytes:
        raise ValueError(f"it claims {num_rows} rows in {column.get_storage_size()} bytes")
    return num_rows, ColumnChunks(dtype, stored, num_rows, ((offset, size_bytes),))


def _index_chunks(
    column: h5py.h5d.DatasetID,
    properties: h5py.h5p.PropDCID,
    dtype: np.dtype,
    stored: np.dtype,
    num_rows: int,
    *,
    is_growing: bool,
) -> tuple[int, ColumnChunks]:
    filters = filters_of(properties)
    (chunk_rows,) = properties.get_chunk()
    chunk_bytes = chunk_rows * stored.itemsize
    if not 0 < chunk_bytes <= _MAX_CHUNK_BYTES:
        raise ValueError(f"it has chunks of {chunk_rows} rows")
    found: dict[int, tuple[int, int, int]] = {}
    for chunk in _stored_chunks(column, min(-(-num_rows // chunk_rows), _MAX_CHUNKS), num_rows if is_growing else None):
        least, most = _sizes(chunk_bytes, _unmasked(filters, chunk.filter_mask))
        if chunk.byte_offset is None or not least <= chunk.size <= most:
            raise ValueError(f"it has a chunk of {chunk.size} bytes for {chunk_bytes}")
        found[chunk.chunk_offset[0]] = chunk.byte_offset, chunk.size, chunk.filter_mask
    num_rows = min(num_rows, len(found) * chunk_rows)
    chosen = [found.get(start, (0, 0, 0)) for start in range(0, num_rows, chunk_rows)]
    places, masks = tuple((offset, size) for offset, size, _ in chosen), [mask for _, _, mask in chosen]
    applied = tuple(_unmasked(filters, mask) for mask in (masks if any(masks) else [0]))
    return num_rows, ColumnChunks(dtype, stored, chunk_rows, places, applied)


def _sizes(chunk_bytes: int, filters: tuple[int, ...]) -> tuple[float, float]:
    """Return the least and the most bytes that a chunk takes after its filters."""
    extra = _CHECKSUM_BYTES if _FLETCHER32 in filters else 0
    if _DEFLATE in filters:
        return chunk_bytes / _MAX_COMPRESSED + extra, chunk_bytes + _MAX_LONGER_BYTES + extra
    return chunk_bytes + extra, chunk_bytes + extra


def _unmasked(filters: tuple[int, ...], mask: int) -> tuple[int, ...]:
    """Return the filters that were applied to a chunk: its mask has a bit set for each filter that was skipped."""
    return tuple(one for index, one in enumerate(filters) if not mask >> index & 1) if mask else filters


def _stored_chunks(column: h5py.h5d.DatasetID, most: int, num_rows: int | None) -> Sequence[Any]:
    """Return offset, size, first row and filter mask of each chunk that the file holds, as h5py's StoreInfo.

    Args:
        column: the dataset.
        most: how many chunks its rows have.
        num_rows: of a column that grows, how many rows it had: later chunks are left out. None of another one.

    Raises:
        ValueError: there are more than `most`.
    """
    found: list[Any] = []
    num_later = 0

    def visit(chunk: Any) -> bool | None:
        nonlocal num_later
        if num_rows is not None and chunk.chunk_offset[0] >= num_rows and num_later < _MAX_CHUNKS:
            num_later += 1
            return None
        found.append(chunk)
        return True if len(found) > most else None  # any value but None ends the iteration

    if hasattr(column, "chunk_iter"):
        column.chunk_iter(visit)
    else:  # h5py over a HDF5 before 1.12.3
        for index in range(min(column.get_num_chunks(), most + (_MAX_CHUNKS if num_rows is not None else 1))):
            if visit(column.get_chunk_info(index)):
                break
    if len(found) > most:
        raise ValueError(f"it has more than {most} chunks")
    return found


def read_chunks(descriptor: int, chunks: TableChunks, lead: Table | None = None) -> Table:
    """Return the rows of a table; other threads can run while it reads and decompresses.

    Args:
        descriptor: the trace file.
        chunks: where the rows are.
        lead: rows to put first, with the same columns.

    Raises:
        DamagedColumn: a chunk cannot be read, or is not what the index says.
    """
    columns = chunks.columns.items()
    if lead is None or not len(lead):
        return Table({name: _read_column(descriptor, column, chunks.num_rows) for name, column in columns})
    found = {}
    for name, column in columns:
        values = found[name] = np.zeros(len(lead) + chunks.num_rows, column.dtype)
        values[: len(lead)] = lead[name]
        _fill(descriptor, column, values[len(lead) :])
    return Table(found)


def _read_column(descriptor: int, column: ColumnChunks, num_rows: int) -> NDArray[np.generic]:
    if len(column.places) == 1 and _is_shared(column, 0):
        return _shared_column(_stored(descriptor, *column.places[0]), column.dtype.str, column.chunk_rows, num_rows)
    values: NDArray[np.generic] = np.zeros(num_rows, column.dtype)
    _fill(descriptor, column, values)
    return values


def _fill(descriptor: int, column: ColumnChunks, values: NDArray[np.generic]) -> None:
    """Write the rows of a column into an array of zeros."""
    for number in range(len(column.places)):
        fill_chunk(descriptor, column, number, values[number * column.chunk_rows : (number + 1) * column.chunk_rows])


def fill_chunk(descriptor: int, column: ColumnChunks, number: int, rows: NDArray[np.generic]) -> None:
    """Write the first rows of one chunk of a column into an array of zeros.

    Raises:
        DamagedColumn: the chunk cannot be read, or is not what the index says.
    """
    offset, stored_bytes = column.places[number]
    if not stored_bytes or not len(rows):
        return
    content = _stored(descriptor, offset, stored_bytes)
    if _is_shared(column, number):
        rows[:] = _shared_column(content, column.dtype.str, column.chunk_rows, len(rows))
    elif column.stored == column.dtype and _filters_of(column, number) == _BOTH:
        _inflate(content, column.chunk_rows, rows)
    else:
        rows[:] = _foreign(content, column, number, len(rows))


def _filters_of(column: ColumnChunks, number: int) -> tuple[int, ...]:
    return column.filters[number if len(column.filters) > 1 else 0]


def _is_shared(column: ColumnChunks, number: int) -> bool:
    return (
        0 < column.places[number][1] <= _MAX_SHARED_BYTES
        and column.stored == column.dtype
        and _filters_of(column, number) == _BOTH
    )


@lru_cache(maxsize=_MAX_SHARED)
def _shared_column(content: bytes, dtype: str, chunk_rows: int, num_rows: int) -> NDArray[np.generic]:
    """Return the rows of a chunk, read-only because thousands of ranks may share them."""
    values: NDArray[np.generic] = np.zeros(num_rows, dtype)
    _inflate(content, chunk_rows, values)
    values.flags.writeable = False
    return values


def _stored(descriptor: int, offset: int, size_bytes: int) -> bytes:
    try:
        content = os.pread(descriptor, size_bytes, offset)
    except (OSError, OverflowError, MemoryError) as error:
        if isinstance(error, MemoryError) and size_bytes <= _MAX_CHUNK_BYTES:
            raise
        raise DamagedColumn(str(error)) from error
    if len(content) < size_bytes:
        raise DamagedColumn(f"a chunk of {size_bytes} bytes at {offset} ends after {len(content)}")
    return content


def _foreign(content: bytes, column: ColumnChunks, number: int, num_rows: int) -> NDArray[np.generic]:
    """Return the first rows of a chunk that has another layout than this version's writer uses."""
    filters, size_bytes = _filters_of(column, number), column.chunk_rows * column.stored.itemsize
    if _FLETCHER32 in filters:
        content = _without_checksum(content)
    if _DEFLATE in filters:
        content = _inflated(content, size_bytes)
    if _SHUFFLE in filters:
        planes = np.frombuffer(content, np.uint8).reshape(column.stored.itemsize, column.chunk_rows)
        content = planes[:, :num_rows].T.tobytes()
    values: NDArray[np.generic] = np.frombuffer(content, column.stored, count=num_rows)
    return values.astype(column.dtype)


def _without_checksum(content: bytes) -> bytes:
    """Return a chunk without its checksum of two sums of 16-bit words modulo 65535 (Fletcher 1982).

    Raises:
        DamagedColumn: the checksum does not match.
    """
    content, stored = content[:-_CHECKSUM_BYTES], int.from_bytes(content[-_CHECKSUM_BYTES:], "little")
    words = np.frombuffer(content + b"\0" * (len(content) % 2), ">u2").astype(np.int64)
    second = (words % 65535 * (np.arange(len(words), 0, -1) % 65535) % 65535).sum()
    if (int(words.sum()) % 65535, int(second) % 65535) != ((stored & 0xFFFF) % 65535, (stored >> 16) % 65535):
        raise DamagedColumn("the checksum of a chunk is wrong")
    return content


def _inflated(content: bytes, size_bytes: int) -> bytes:
    """Decompress a chunk, no further than its expected size.

    Raises:
        DamagedColumn: the content is longer, shorter, or damaged.
    """
    try:
        # Two to four times as fast as zlib, and decompression is the slowest part of loading a trace.
        inflated: bytes = zlib_ng.decompressobj().decompress(content, size_bytes + 1)
    except zlib_ng.error as error:  # type: ignore[misc]  # its stub takes the class for an instance
        raise DamagedColumn(str(error)) from error
    if len(inflated) != size_bytes:
        held = f"{len(inflated)}" if len(inflated) < size_bytes else "more"
        raise DamagedColumn(f"a chunk should decompress to {size_bytes} bytes, but holds {held}")
    return inflated


def _inflate(content: bytes, chunk_rows: int, values: NDArray[np.generic]) -> None:
    """Write the first rows of a chunk into an array of zeros."""
    size = values.dtype.itemsize
    inflated = _inflated(content, chunk_rows * size)
    # The shuffle filter stores the first bytes of all values next to each other, then the second bytes, and so on. Most
    # are zero, and comparing is faster than scattering.
    planes, zeros = values.view(np.uint8).reshape(len(values), size), bytes(len(values))
    for index in range(size):
        plane = inflated[index * chunk_rows : index * chunk_rows + len(values)]
        if plane != zeros:
            planes[:, index] = np.frombuffer(plane, np.uint8)


def split_chunks(chunks: TableChunks, num_last: int) -> tuple[TableChunks, TableChunks]:
    """Return all chunks of an even table except the last ones of each column, and the last ones."""
    num_chunks = len(next(iter(chunks.columns.values())).places)
    first = max(num_chunks - num_last, 0)
    return select_chunks(chunks, 0, first), select_chunks(chunks, first, num_chunks)


def select_chunks(chunks: TableChunks, first: int, stop: int, names: Iterable[str] | None = None) -> TableChunks:
    """Return the chunks `first <= number < stop` of some columns of an even table; of all if not given."""
    columns = {name: chunks.columns[name] for name in (chunks.columns if names is None else names)}
    chunk_rows = max(column.chunk_rows for column in columns.values())
    num_rows = max(min(chunks.num_rows, stop * chunk_rows) - first * chunk_rows, 0)
    for name, column in columns.items():
        filters = column.filters if len(column.filters) == 1 else column.filters[first:stop]
        columns[name] = replace(column, places=column.places[first:stop], filters=filters)
    return TableChunks(num_rows=num_rows, columns=columns, longest=num_rows)
