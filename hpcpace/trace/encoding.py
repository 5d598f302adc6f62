"""Rows as bytes: how rows are packed, times rounded, and a column's chunk compressed.

Chunks are made here and not by HDF5, because zlib gives up Python's global lock while it works and HDF5 does not.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.schema import TABLES, TableSchema

DEFLATE_LEVEL = 6
# Reading the clock in Python and recording an operation take some hundreds of nanoseconds, and device events have a
# resolution of half a microsecond: finer digits are noise, which does not compress (experiments/bench/trace_size.py).
RESOLUTION_NS = {
    "steps": {"device_begin_ns": 256, "device_end_ns": 256},
    "phases": {"device_begin_ns": 256, "device_end_ns": 256},
    "collectives": {"enter_ns": 256, "exit_ns": 256, "blocked_ns": 1024, "enqueue_ns": 256},
}
ENQUEUE_COLUMN = "enqueue_ns"
DEVICE_BEGIN_COLUMN, DEVICE_END_COLUMN = "device_begin_ns", "device_end_ns"

_STRUCT_CODES = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "i1": "b", "i2": "h", "i4": "i", "i8": "q"}


def row_dtype(table: TableSchema, *, has_device: bool = False) -> np.dtype:
    """Return the packed dtype of a table's rows, with the columns of ranks with a device at the end if asked for."""
    if has_device and table.device.names:
        return np.dtype(table.dtype.descr + table.device.descr)
    return table.dtype


def row_dtypes(device_tables: Collection[str] = ()) -> dict[str, np.dtype]:
    """Return the dtype of every table's rows, by table, in the order of the tables' numbers.

    Args:
        device_tables: the tables that have the columns of ranks with a device.
    """
    return {name: row_dtype(table, has_device=name in device_tables) for name, table in TABLES.items()}


def has_device_columns(table: TableSchema, names: Collection[str]) -> bool:
    """Return whether columns with these names hold all that only ranks with a device have; False if there are none."""
    columns = table.device.names or ()
    return bool(columns) and all(name in names for name in columns)


def row_struct(dtype: np.dtype, whole: np.dtype | None = None) -> struct.Struct:
    """Return the struct that packs one row into the bytes that `dtype` reads.

    Args:
        dtype: the columns that are packed.
        whole: the row's dtype, if it has more columns after these; they are zeros.
    """
    kinds = (dtype[name] for name in dtype.names or ())
    codes = (f"{kind.itemsize}s" if kind.kind == "S" else _STRUCT_CODES[kind.str[1:]] for kind in kinds)
    num_zeros = 0 if whole is None else whole.itemsize - dtype.itemsize
    return struct.Struct("<" + "".join(codes) + f"{num_zeros}x")


def round_times(table_name: str, rows: NDArray[np.void]) -> None:
    """Round the times of rows to the nearest multiple of their columns' resolution, a power of two, in place."""
    for column, resolution_ns in RESOLUTION_NS.get(table_name, {}).items():
        if column in (rows.dtype.names or ()):
            rows[column] = (rows[column] + resolution_ns // 2) & -resolution_ns


def compress_chunk(values: NDArray[np.generic], chunk_rows: int, *, library: Any = zlib) -> bytes:
    """Return one chunk of a column after HDF5's shuffle and deflate filters.

    Args:
        values: at most `chunk_rows` values; the rest of the chunk is zeros.
        chunk_rows: rows of a chunk.
        library: compresses; with `zlib_ng` a chunk is 1 % larger and takes a third of the time, for files that are
            rewritten after the job.
    """
    deflate = library.compressobj(DEFLATE_LEVEL, library.DEFLATED, library.MAX_WBITS, 9)
    chunk = np.zeros(chunk_rows, dtype=values.dtype)
    chunk[: len(values)] = values
    planes = np.ascontiguousarray(chunk.view(np.uint8).reshape(chunk_rows, -1).T)
    # The lowest bytes of times are nearly noise and the highest nearly constant: a block with a Huffman code of its own
    # for each plane of bytes makes times a tenth smaller than zlib's own division does.
    blocks = (deflate.compress(plane.data) + deflate.flush(library.Z_BLOCK) for plane in planes)
    content: bytes = b"".join(blocks) + deflate.flush()
    return content
