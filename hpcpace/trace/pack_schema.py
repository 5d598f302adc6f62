"""The groups and columns of a pack, a file with the traces of several ranks, that its writer and its reader follow.

docs/trace-format.md describes it. The tables of a trace have the columns that they have in a rank's own file, with the
rows of one rank after those of another; `ranks` says how many belong to each, so that no offsets are stored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.encoding import row_dtype
from hpcpace.trace.schema import TABLES, TableSchema
from hpcpace.trace.tables import Table

PACK_FORMAT = "hpcpace-pack"
PACK_VERSION = "1.2"
PACK_CHUNK_ROWS = 1 << 15
BLOCK_ROWS = 1 << 17
"""Rows of a block of collectives, about: enough of each rank for one read, few enough for a short range of steps."""
MOST_PACKED_RANKS = 1 << 14

LACKING = {"1.0": ("events", "connections", "flows"), "1.1": ("connections", "flows")}
"""The tables that packs of earlier versions lack."""

OPEN = "open_collectives"
OF_RANKS = tuple(name for name in TABLES if name not in ("groups", "collectives"))
"""The tables in which the rows of a rank are one after the other."""
COUNTED = (*OF_RANKS, "collectives", OPEN, "memberships")
"""The tables of whose rows `ranks` has a count for each rank."""

_TEMPORARY = re.compile(r"\.pack-\d{5,7}-[0-9a-f]{8}\.h5\.[0-9a-f]{16}")


def _index(name: str, *columns: tuple[str, str]) -> TableSchema:
    return TableSchema(name=name, dtype=np.dtype(list(columns)), required=True, chunk_rows=PACK_CHUNK_ROWS)


INDEX = {
    table.name: table
    for table in (
        _index(
            "ranks", ("rank", "<i4"), ("closed", "u1"), ("header_bytes", "<i4"), ("trace_bytes", "<i8"),
            ("journal_bytes", "<i8"), ("digest", "S32"), *((f"num_{name}", "<i8") for name in COUNTED),
        ),
        _index("headers", ("text", "u1")),
        _index("blocks", ("num_rows", "<i4"), ("last_step", "<i4")),
        _index("group_parts", ("num_rows", "<i4")),
        _index("memberships", ("part", "<i4")),
    )
}  # fmt: skip
"""The tables that a pack has and a trace does not."""


def table_schema(name: str, lacking: Collection[str] = ()) -> TableSchema:
    """Return the schema of a table of a pack, without the counts of tables that the pack lacks."""
    schema = INDEX[name] if name in INDEX else TABLES["collectives" if name == OPEN else name]
    if name != "ranks" or not lacking:
        return schema
    counts = {f"num_{table}" for table in lacking}
    fields = [(column, schema.dtype[column]) for column in schema.dtype.names or () if column not in counts]
    return replace(schema, dtype=np.dtype(fields))


def pack_dtypes(device_tables: Collection[str]) -> dict[str, np.dtype]:
    """Return the dtype of every table's rows, by table.

    Args:
        device_tables: the tables of traces that have the columns of ranks with a device.
    """
    schemas = {name: table_schema(name) for name in (*INDEX, "groups", *OF_RANKS, OPEN, "collectives")}
    return {name: row_dtype(schema, has_device=schema.name in device_tables) for name, schema in schemas.items()}


def pack_name(first_rank: int, token: str) -> str:
    """Return the name of a pack; the token makes it unique, so that two programs never write the same one."""
    return f"pack-{first_rank:05d}-{token}.h5"


def is_unfinished_pack(name: str) -> bool:
    """Return whether a file has the temporary name of a pack."""
    return _TEMPORARY.fullmatch(name) is not None


class RankDigest:
    """A digest of all that a pack keeps of one rank, whatever the pieces in which rows are added.

    Args:
        header: the rank's header as it is stored.
        closed: whether its trace was closed.
    """

    def __init__(self, header: bytes, *, closed: bool) -> None:
        self._start = blake2b(header + bytes([closed]), digest_size=16)
        self._columns: dict[str, blake2b] = {}

    def add(self, table: str, rows: Table, names: Iterable[str] | None = None) -> None:
        """Add the next rows of a table."""
        if not len(rows):
            return
        for name in rows if names is None else names:
            key = f"{table}/{name}"
            if key not in self._columns:
                self._columns[key] = blake2b(f"{key} {rows[name].dtype.str}".encode(), digest_size=16)
            self._columns[key].update(_bytes(rows[name]))

    def hex(self) -> bytes:
        """Return the digest as 32 letters."""
        found = self._start.copy()
        for key in sorted(self._columns):
            found.update(self._columns[key].digest())
        return found.hexdigest().encode()


def _bytes(values: NDArray[np.generic]) -> memoryview:
    return np.ascontiguousarray(values).view(np.uint8).data
