"""Rows as bytes: how a row is packed, how times are rounded, how a column's chunk is compressed.

Chunks are made here and not by HDF5, because zlib gives up Python's global lock while it works and HDF5 does not.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.schema import CHUNK_ROWS, TABLES, TableSchema

DEFLATE_LEVEL = 4
# Recording an operation from Python takes microseconds and a device event counts in half microseconds, so the low ten
# bits of a collective's times are noise; at full resolution they would be a third of the file.
RESOLUTION_NS = {"collectives": 1024}
ENQUEUE_COLUMN = "enqueue_ns"

_STRUCT_CODES = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "i1": "b", "i2": "h", "i4": "i", "i8": "q"}


def row_dtype(table: TableSchema, *, has_enqueue: bool = False) -> np.dtype:
    """Return the packed dtype of a table's rows, with `enqueue_ns` at the end of collectives where asked for."""
    if table.name == "collectives" and has_enqueue:
        return np.dtype([*_fields(table.dtype), (ENQUEUE_COLUMN, "<i8")])
    return table.dtype


def row_dtypes(*, has_enqueue: bool = False) -> dict[str, np.dtype]:
    """Return the dtype of every table's rows, by table, in the order of the tables' numbers."""
    return {name: row_dtype(table, has_enqueue=has_enqueue) for name, table in TABLES.items()}


def row_struct(dtype: np.dtype) -> struct.Struct:
    """Return the struct that packs one row into the bytes that `dtype` reads."""
    codes = (f"{kind.itemsize}s" if kind.kind == "S" else _STRUCT_CODES[kind.str[1:]] for _, kind in _kinds(dtype))
    return struct.Struct("<" + "".join(codes))


def round_times(table_name: str, rows: NDArray[np.void]) -> None:
    """Round the times of rows down to the table's resolution, in place."""
    resolution_ns = RESOLUTION_NS.get(table_name)
    if resolution_ns is None:
        return
    for column in rows.dtype.names or ():
        if column.endswith("_ns"):
            rows[column] &= -resolution_ns


def compress_chunk(column: str, values: NDArray[np.generic]) -> bytes:
    """Return one chunk of a column after HDF5's shuffle and deflate filters.

    Args:
        column: its name, from which the kind of its values follows.
        values: at most CHUNK_ROWS values; the rest of the chunk is zeros.
    """
    chunk = np.zeros(CHUNK_ROWS, dtype=values.dtype)
    chunk[: len(values)] = values
    planes = np.ascontiguousarray(chunk.view(np.uint8).reshape(CHUNK_ROWS, -1).T)
    # In shuffled times there is nothing to match but runs: searching for more is slow and finds false friends.
    strategy = zlib.Z_RLE if column.endswith("_ns") else zlib.Z_DEFAULT_STRATEGY
    deflate = zlib.compressobj(DEFLATE_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS, 9, strategy)
    return deflate.compress(planes.tobytes()) + deflate.flush()


def _fields(dtype: np.dtype) -> list[tuple[str, str]]:
    return [(name, kind.str) for name, kind in _kinds(dtype)]


def _kinds(dtype: np.dtype) -> list[tuple[str, np.dtype]]:
    return [(name, dtype[name]) for name in dtype.names or ()]
