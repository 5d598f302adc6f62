"""Chunks of a trace file read past HDF5: found through its index, then inflated by threads.

h5py holds one lock for all files while HDF5 inflates, and each of its calls on a column costs more than a small table's
rows. What is not exactly as the writer lays it out is left to h5py, which then says what is wrong with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import h5py
import numpy as np
from numpy.typing import NDArray
from zlib_ng import zlib_ng

from hpcpace.trace.encoding import ENQUEUE_COLUMN, row_dtype
from hpcpace.trace.schema import TableSchema
from hpcpace.trace.tables import Table

_FILTERS = [h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE]
# Deflate makes nothing smaller than this, and nothing longer than by a few bytes in each 16 KiB.
_MOST_COMPRESSED, _MOST_LONGER_BYTES = 1032, 1024
_MOST_CHUNK_ROWS = 1 << 20
# Names of groups, numbers of steps, kinds of operations and the like compress to few bytes, equal on most ranks.
_MOST_SHARED, _MOST_SHARED_BYTES = 128, 8192


class ForeignChunks(Exception):
    """A chunk is not what its index says; h5py has to read the table."""


@dataclass(frozen=True, kw_only=True)
class ColumnChunks:
    """Where the chunks of one column lie in the file: offset and size in bytes, by ascending row."""

    dtype: np.dtype
    chunk_rows: int
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class TableChunks:
    """Where the chunks of a table lie, all columns in the same number of rows."""

    num_rows: int
    columns: Mapping[str, ColumnChunks]


def index_chunks(file: h5py.File, table: TableSchema) -> TableChunks | None:
    """Return where the rows of a table lie; None where anything is not as this version's writer leaves it.

    Args:
        file: the open trace file.
        table: schema of the table.
    """
    try:
        group = h5py.h5g.open(file.id, table.name.encode())
        has_enqueue = table.name == "collectives" and ENQUEUE_COLUMN.encode() in group
        dtype = row_dtype(table, has_enqueue=has_enqueue)
        columns: dict[str, ColumnChunks] = {}
        lengths = set()
        for name in dtype.names or ():
            dataset = h5py.h5d.open(group, name.encode())
            found = _index_column(dataset, dtype[name])
            if found is None:
                return None
            num_rows, columns[name] = found
            lengths.add(num_rows)
    # What h5py raises on damage, and AttributeError where an old one has no chunk_iter.
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, MemoryError, OverflowError):
        return None
    return TableChunks(num_rows=lengths.pop(), columns=columns) if len(lengths) == 1 else None


def _index_column(dataset: h5py.h5d.DatasetID, dtype: np.dtype) -> tuple[int, ColumnChunks] | None:
    """Return the number of rows and where they lie; None where something is unusual."""
    # Of thousands of files each property of a dataset takes its share of the time: each is asked for once.
    shape = dataset.get_space().get_simple_extent_dims()
    if len(shape) != 1 or _stored_dtype(dataset.get_type().encode()) != dtype:
        return None
    (num_rows,) = shape
    if not num_rows:
        return 0, ColumnChunks(dtype=dtype, chunk_rows=0, places=())
    properties = dataset.get_create_plist()
    filters = [properties.get_filter(index)[0] for index in range(properties.get_nfilters())]
    if properties.get_layout() != h5py.h5d.CHUNKED or filters != _FILTERS:
        return None
    (chunk_rows,) = properties.get_chunk()
    if not 0 < chunk_rows <= _MOST_CHUNK_ROWS:
        return None
    size_bytes = chunk_rows * dtype.itemsize
    places: dict[int, tuple[int, int]] = {}

    num_visited = 0

    def visit(chunk: h5py.h5d.StoreInfo) -> None:
        nonlocal num_visited
        num_visited += 1
        is_sound = not chunk.filter_mask and chunk.byte_offset is not None
        if is_sound and size_bytes / _MOST_COMPRESSED <= chunk.size <= size_bytes + _MOST_LONGER_BYTES:
            places[chunk.chunk_offset[0]] = (chunk.byte_offset, chunk.size)

    dataset.chunk_iter(visit)
    starts = range(0, num_rows, chunk_rows)
    if num_visited != len(starts) or places.keys() != set(starts):
        return None
    found = tuple(places[start] for start in starts)
    return num_rows, ColumnChunks(dtype=dtype, chunk_rows=chunk_rows, places=found)


@lru_cache(maxsize=_MOST_SHARED)
def _stored_dtype(encoded: bytes) -> np.dtype:
    """Return the dtype of a type of HDF5, of which a trace has few: to describe one to numpy takes long."""
    dtype: np.dtype = h5py.h5t.decode(encoded).dtype
    return dtype


def read_chunks(descriptor: int, chunks: TableChunks, lead: Table | None = None) -> Table:
    """Return the rows of a table; other threads run while it reads and inflates.

    Args:
        descriptor: the trace file.
        chunks: where the rows are.
        lead: rows to put before them, with the same columns.

    Raises:
        ForeignChunks: a chunk cannot be read, or is not what the index says.
    """
    columns = chunks.columns.items()
    if lead is None or not len(lead):
        return Table({name: _read_column(descriptor, column, chunks.num_rows) for name, column in columns})
    found = {name: np.zeros(len(lead) + chunks.num_rows, column.dtype) for name, column in columns}
    for name, column in columns:
        found[name][: len(lead)] = lead[name]
        _fill(descriptor, column, found[name][len(lead) :])
    return Table(found)


def _read_column(descriptor: int, column: ColumnChunks, num_rows: int) -> NDArray[np.generic]:
    if len(column.places) == 1 and column.places[0][1] <= _MOST_SHARED_BYTES:
        (offset, stored_bytes) = column.places[0]
        return _shared_column(_stored(descriptor, offset, stored_bytes), column.dtype.str, column.chunk_rows, num_rows)
    values: NDArray[np.generic] = np.zeros(num_rows, column.dtype)
    _fill(descriptor, column, values)
    return values


def _fill(descriptor: int, column: ColumnChunks, values: NDArray[np.generic]) -> None:
    """Write the rows of a column into zeros."""
    for number, (offset, stored_bytes) in enumerate(column.places):
        rows = values[number * column.chunk_rows : (number + 1) * column.chunk_rows]
        content = _stored(descriptor, offset, stored_bytes)
        if stored_bytes <= _MOST_SHARED_BYTES:
            rows[:] = _shared_column(content, column.dtype.str, column.chunk_rows, len(rows))
        else:
            _inflate(content, column.chunk_rows, rows)


@lru_cache(maxsize=_MOST_SHARED)
def _shared_column(content: bytes, dtype: str, chunk_rows: int, num_rows: int) -> NDArray[np.generic]:
    """Return the rows of a chunk: read-only, because thousands of ranks share those that are equal on all of them."""
    values: NDArray[np.generic] = np.zeros(num_rows, dtype)
    _inflate(content, chunk_rows, values)
    values.flags.writeable = False
    return values


def _stored(descriptor: int, offset: int, size_bytes: int) -> bytes:
    try:
        return os.pread(descriptor, size_bytes, offset)
    except (OSError, OverflowError, MemoryError) as error:
        raise ForeignChunks(str(error)) from error


def _inflate(content: bytes, chunk_rows: int, values: NDArray[np.generic]) -> None:
    """Write the first rows of a chunk into zeros."""
    size = values.dtype.itemsize
    try:
        # Two to four times as fast as zlib, and at loading a trace inflating is what takes longest.
        inflated = zlib_ng.decompress(content, bufsize=chunk_rows * size)
    except (zlib_ng.error, MemoryError) as error:  # type: ignore[misc]  # its stub takes the class for an instance
        raise ForeignChunks(str(error)) from error
    if len(inflated) != chunk_rows * size:
        raise ForeignChunks(f"a chunk of {chunk_rows} rows of {size} bytes holds {len(inflated)}")
    # The shuffle filter lays the first bytes of all values side by side, then the second ones, and so on. Most are
    # zero, and to compare is faster than to scatter.
    planes, zeros = values.view(np.uint8).reshape(len(values), size), bytes(len(values))
    for index in range(size):
        plane = inflated[index * chunk_rows : index * chunk_rows + len(values)]
        if plane != zeros:
            planes[:, index] = np.frombuffer(plane, np.uint8)


def split_last(chunks: TableChunks) -> tuple[TableChunks, TableChunks]:
    """Return all chunks of a table but the last one of each column, and the last ones."""
    num_chunks = {len(column.places) for column in chunks.columns.values()}
    rows = {column.chunk_rows for column in chunks.columns.values()}
    if len(num_chunks) != 1 or len(rows) != 1 or not chunks.num_rows:
        return select_chunks(chunks, 0, 0), chunks
    last = num_chunks.pop() - 1
    return select_chunks(chunks, 0, last), select_chunks(chunks, last, last + 1)


def split_all(chunks: TableChunks) -> tuple[TableChunks, TableChunks]:
    """Return all chunks of a table, and none of it."""
    return chunks, select_chunks(chunks, 0, 0)


def select_chunks(chunks: TableChunks, first: int, stop: int) -> TableChunks:
    """Return the chunks `first <= number < stop` of a table whose columns have chunks of one length."""
    columns = {name: replace(column, places=column.places[first:stop]) for name, column in chunks.columns.items()}
    chunk_rows = max(column.chunk_rows for column in columns.values())
    num_rows = max(min(chunks.num_rows, stop * chunk_rows) - first * chunk_rows, 0)
    return TableChunks(num_rows=num_rows, columns=columns)
