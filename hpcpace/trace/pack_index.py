"""The format of a pack: its tables, and which rows of each table belong to which rank.

A pack is trusted no more than a rank's own file: every number is checked against what the file can hold before anything
is read by it.

docs/trace-format.md describes it. The tables of a trace have the columns that they have in a rank's own file, with the
rows of one rank after those of another; `ranks` says how many belong to each, so that no offsets are stored. What many
ranks have alike of their groups is stored once.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcpace.core.detail import MAX_RANKS
from hpcpace.core.errors import TraceError
from hpcpace.core.records import dataclass
from hpcpace.core.text import rank_list
from hpcpace.trace.chunks import DamagedColumn, TableChunks, index_table, left_out, no_rows, open_tables
from hpcpace.trace.hdf5_files import (
    FOREIGN_ERRORS,
    HDF5_LOCK,
    attribute_values,
    check_object,
    is_marked_open,
    open_trace,
)
from hpcpace.trace.schema import TABLES, OtherVersion, TableSchema, row_dtype, table_of
from hpcpace.trace.stream import ChunkCache, PackedCollectives, Range, identity_of, read_rows
from hpcpace.trace.tables import GroupTable, Table, join_tables

PACK_FORMAT = "hpcpace-pack"
PACK_VERSION = "1.2"
PACK_CHUNK_ROWS = 1 << 15
BLOCK_ROWS = 1 << 17
"""Rows of a block of collectives, about: enough of each rank for one read, few enough for a short range of steps."""
MAX_PACKED_RANKS = 1 << 14

LACKING = {"1.0": ("events", "connections", "flows"), "1.1": ("connections", "flows")}
"""The tables that packs of earlier versions lack."""

OPEN = "open_collectives"
OF_RANKS = tuple(name for name in TABLES if name not in ("groups", "collectives"))
"""The tables in which the rows of a rank are one after the other."""
COUNTED = (*OF_RANKS, "collectives", OPEN, "memberships")
"""The tables of whose rows `ranks` has a count for each rank."""

_TEMPORARY = re.compile(r"\.pack-\d{5,7}-[0-9a-f]{8}\.h5\.[0-9a-f]{16}")


INDEX = {
    table.name: table
    for table in (
        table_of(
            "ranks",
            "rank:i4 closed:u1 header_bytes:i4 trace_bytes:i8 journal_bytes:i8 digest:S32 "
            + " ".join(f"num_{name}:i8" for name in COUNTED),
        ),
        table_of("headers", "text:u1"),
        table_of("blocks", "num_rows:i4 last_step:i4"),
        table_of("group_parts", "num_rows:i4"),
        table_of("memberships", "part:i4"),
    )
}
"""The tables that a pack has and a trace does not."""


def table_schema(name: str, lacking: Collection[str] = ()) -> TableSchema:
    """Return the schema of a table of a pack, without the counts of tables that the pack lacks."""
    schema = INDEX[name] if name in INDEX else TABLES["collectives" if name == OPEN else name]
    counts = {f"num_{table}" for table in (lacking if name == "ranks" else ())}
    fields = [(column, schema.dtype[column]) for column in schema.dtype.names or () if column not in counts]
    return replace(schema, dtype=np.dtype(fields), chunk_rows=PACK_CHUNK_ROWS, required=True)


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


_TEXTS = ("name", "backend")
_ALIKE = ("id", *_TEXTS)
GROUP_ROW_BYTES = 6
"""Memory that a row of `groups` takes, without the texts, which are kept once."""
MAX_GROUP_ROWS = 1 << 21
"""Members of all groups of a rank: several times the ranks of the run."""


class GroupPart(NamedTuple):
    """Consecutive rows of `groups` with one id, name and backend.

    Attributes:
        ranks: the members as they are in memory.
        texts: the bytes of `id`, `name` and `backend`.
    """

    ranks: bytes
    texts: tuple[bytes, ...]

    def rows(self) -> Table:
        """Return the rows."""
        dtype = TABLES["groups"].dtype
        ranks = np.frombuffer(self.ranks, dtype["rank"])
        alike = {
            name: np.repeat(np.frombuffer(text, dtype[name]), len(ranks))
            for name, text in zip(_ALIKE, self.texts, strict=True)
        }
        return Table({"rank": ranks, **alike})


def split_parts(groups: Table) -> tuple[GroupPart, ...]:
    """Return the parts of a rank's table."""
    if not len(groups):
        return ()
    is_first = np.logical_or.reduce([groups[name][1:] != groups[name][:-1] for name in _ALIKE])
    bounds = [0, *(np.flatnonzero(is_first) + 1).tolist(), len(groups)]
    return tuple(
        GroupPart(
            groups["rank"][begin:end].tobytes(), tuple(groups[name][begin : begin + 1].tobytes() for name in _ALIKE)
        )
        for begin, end in itertools.pairwise(bounds)
    )


class PackedGroups:
    """The groups of the ranks of a pack; thousands of ranks name thousands of members each.

    A part is a run of rows of the table `groups` with one id, name and backend; a rank's table is some parts, one after
    the other.

    Args:
        rows: the rows of all parts, one part after the other.
        num_rows: rows of each part, int64, (num_parts,).
        members: the numbers of the parts of each rank, one rank after the other.
        num_members: how many parts each rank has, int64, (num_ranks,).

    Raises:
        ValueError: these do not fit together.
    """

    def __init__(
        self, rows: Table, num_rows: NDArray[np.int64], members: NDArray[np.int64], num_members: NDArray[np.int64]
    ) -> None:
        if num_rows.sum() != len(rows) or (len(num_rows) and not 1 <= num_rows.min() <= num_rows.max() <= len(rows)):
            raise ValueError("its parts have other rows than the table")
        if len(members) and not 0 <= members.min() <= members.max() < len(num_rows):
            raise ValueError("ranks have parts that are not there")
        self.rows = rows
        self._num_rows, self._ends = num_rows, np.cumsum(num_rows)
        self._members = np.split(members, np.cumsum(num_members)[:-1])
        first = self._ends - num_rows
        self._ids = rows["id"][first]
        self._texts = {name: rows[name][first] for name in _TEXTS}
        self._known: dict[bytes, GroupTable] = {}
        self._last_parts: dict[bytes, tuple[NDArray[Any], NDArray[Any]]] = {}
        self._id_columns: dict[bytes, NDArray[Any]] = {}

    @property
    def sizes_bytes(self) -> NDArray[np.float64]:
        """The memory that the table of each rank takes, float64, (num_ranks,); infinity for more than any rank has."""
        num_rows = np.array([self._num_rows[parts].sum() for parts in self._members], np.float64)
        return np.where(num_rows <= MAX_GROUP_ROWS, num_rows * GROUP_ROW_BYTES, math.inf)

    def table(self, place: int) -> Table:
        """Return the table of the rank at a place with all its columns."""
        parts = self._members[place].tolist()
        return join_tables([self.rows.select(slice(0)), *(self.rows.select(self._rows_of(part)) for part in parts)])

    def group_table(self, place: int) -> GroupTable:
        """Return the table of the rank at a place, the same object for ranks with the same groups."""
        parts = self._members[place]
        key = parts.tobytes()
        if key not in self._known:
            ids, num_rows = self._ids[parts], self._num_rows[parts]
            shape = ids.tobytes() + num_rows.tobytes()
            if shape not in self._id_columns:
                self._id_columns[shape] = np.repeat(ids, num_rows)
            ranks = [self.rows["rank"][self._rows_of(part)] for part in parts.tolist()]
            columns = {"id": self._id_columns[shape], "rank": np.concatenate([self.rows["rank"][:0], *ranks])}
            numbers, last = self._last(ids)
            texts = {name: texts[parts[last]] for name, texts in self._texts.items()}
            self._known[key] = GroupTable.of_parts(columns, numbers, texts)
        return self._known[key]

    def _last(self, ids: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the numbers of groups, ascending, and the last part of each: it counts, as in a rank's own file."""
        key = ids.tobytes()
        if key not in self._last_parts:
            numbers, last = np.unique(ids[::-1], return_index=True)
            self._last_parts[key] = numbers, len(ids) - 1 - last
        return self._last_parts[key]

    def _rows_of(self, part: int) -> slice:
        return slice(int(self._ends[part] - self._num_rows[part]), int(self._ends[part]))


_MAX_HEADER_BYTES, _MAX_HEADERS_BYTES = 1 << 16, 1 << 25
_MAX_BLOCKS = 1 << 26
"""The most entries of `blocks`, a gigabyte of memory: as many as ranks times blocks."""

_MAX_MEMBERSHIPS = 1 << 24


@dataclass(frozen=True, kw_only=True, eq=False)
class PackIndex:
    """What is in a pack.

    Attributes:
        path: the file.
        identity: its identity, to recognise it.
        chunks: where each table is; a damaged one is missing.
        ranks: the rows of `ranks`, one for each rank.
        headers: the header of each rank, as JSON.
        problems: what is damaged, one sentence each.
    """

    path: Path
    identity: tuple[int, int]
    chunks: dict[str, TableChunks]
    ranks: Table
    headers: tuple[bytes, ...]
    problems: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks in the pack."""
        return len(self.ranks)

    @property
    def numbers(self) -> list[int]:
        """The ranks in the pack."""
        numbers: list[int] = self.ranks["rank"].tolist()
        return numbers

    def rows_of(self, table: str, first: int, stop: int) -> Range:
        """Return where the rows of the ranks at the places `first <= place < stop` are in a table."""
        counts = self.ranks[f"num_{table}"]
        begin = int(counts[:first].sum())
        return Range(begin, begin + int(counts[first:stop].sum()))

    def size_bytes(self, tables: Collection[str]) -> NDArray[np.int64]:
        """Return the memory that some tables of each rank take, without groups, int64, (num_ranks,)."""
        sizes = np.zeros(self.num_ranks, np.int64)
        for name in tables:
            if name in self.chunks:
                row_bytes = sum(column.dtype.itemsize for column in self.chunks[name].columns.values())
                sizes += self.ranks[f"num_{name}"] * row_bytes
        return sizes


def index_pack(descriptor: int, path: Path) -> PackIndex:
    """Return what is in an open pack.

    Raises:
        OtherVersion: it has another major version of the format.
        TraceError: it is no pack, or its list of ranks is damaged.
    """
    problems: list[str] = []
    try:
        chunks = _chunks(descriptor, path, problems)
        ranks = _with_counts(_read(descriptor, chunks, "ranks", MAX_PACKED_RANKS))
        headers = _headers(descriptor, chunks, ranks)
        _check_ranks(ranks)
    except DamagedColumn as error:
        raise TraceError(f"{path}: the list of its ranks is damaged ({error}); leave it out") from error
    except FOREIGN_ERRORS as error:
        reason = str(error).replace(f"/proc/self/fd/{descriptor}", path.name)
        raise TraceError(f"{path} cannot be read as HDF5 ({reason}); it is damaged or foreign, leave it out") from error
    for name in COUNTED:
        if name in chunks and not _adds_up(ranks[f"num_{name}"], chunks[name]):
            problems.append(f"{path}: {name} has other rows than its ranks; it is damaged and left out")
            del chunks[name]
    return PackIndex(
        path=path,
        identity=identity_of(descriptor),
        chunks=chunks,
        ranks=ranks,
        headers=headers,
        problems=tuple(problems),
    )


def _chunks(descriptor: int, path: Path, problems: list[str]) -> dict[str, TableChunks]:
    """Return where each table is that can be read; add a problem for each of the others."""
    file_bytes = os.fstat(descriptor).st_size
    chunks: dict[str, TableChunks] = {}
    with HDF5_LOCK, open_trace(descriptor) as file:
        root = h5py.h5g.open(file.id, b"/")
        check_object(root)
        version = _checked_version(attribute_values(root, ("format", "format_version")), path)
        lacking = LACKING.get(version, ())
        if is_marked_open(descriptor):
            raise TraceError(f"{path} was never finished; leave it out")
        names = (*INDEX, *OF_RANKS, "groups", "collectives", OPEN)
        schemas = {name: table_schema(name, lacking) for name in names if name not in lacking}
        for name, group in open_tables(root, schemas, path, problems).items():
            try:
                found = index_table(group, schemas[name], file_bytes=file_bytes)
            except DamagedColumn as error:
                problems.append(left_out(path, name, error))
                continue
            if found.longest == found.num_rows and found.is_even:
                chunks[name] = found
            else:
                held = f"its columns have {found.num_rows} to {found.longest} rows or chunks of different sizes"
                problems.append(left_out(path, name, held))
    return chunks | {name: no_rows(table_schema(name)) for name in lacking}


def _with_counts(ranks: Table) -> Table:
    """Return the rows of `ranks` with the counts of tables that came later."""
    lacking = [name for name in COUNTED if f"num_{name}" not in ranks]
    return Table({**ranks, **{f"num_{name}": np.zeros(len(ranks), np.int64) for name in lacking}})


def _checked_version(values: dict[str, object], path: Path) -> str:
    names = {
        name: value.decode(errors="replace") if isinstance(value, bytes) else value for name, value in values.items()
    }
    if names.get("format") != PACK_FORMAT:
        raise TraceError(f"{path} is no pack: its format is {names.get('format')!r}, not {PACK_FORMAT!r}")
    version = str(names.get("format_version", ""))
    if version.partition(".")[0] != PACK_VERSION.partition(".")[0]:
        raise OtherVersion(
            f"{path} has pack format {version}; this hpcpace reads {PACK_VERSION} and later minor versions: "
            "read it with the hpcpace that wrote it"
        )
    return version


def _read(descriptor: int, chunks: dict[str, TableChunks], name: str, most_rows: int) -> Table:
    """Return the rows of one of the small tables.

    Raises:
        DamagedColumn: it is missing, has more rows than allowed, or some are damaged.
    """
    if name not in chunks:
        raise DamagedColumn(f"{name} cannot be read")
    num_rows = chunks[name].num_rows
    if num_rows > most_rows:
        raise DamagedColumn(f"{name} has {num_rows} rows, more than {most_rows}")
    rows, damaged = read_rows(descriptor, chunks[name], 0, num_rows)
    if damaged:
        raise DamagedColumn(f"chunks of {name} cannot be decompressed")
    return rows


def _headers(descriptor: int, chunks: dict[str, TableChunks], ranks: Table) -> tuple[bytes, ...]:
    sizes = ranks["header_bytes"]
    if len(sizes) and (sizes.min() < 0 or sizes.max() > _MAX_HEADER_BYTES):
        raise DamagedColumn(f"a header has {sizes.min()} or {sizes.max()} bytes")
    text = _read(descriptor, chunks, "headers", _MAX_HEADERS_BYTES)["text"].tobytes()
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    if len(text) != (ends[-1] if ends else 0):
        raise DamagedColumn(f"its headers have {len(text)} bytes")
    return tuple(text[begin:end] for begin, end in zip([0, *ends], ends, strict=False))


def _check_ranks(ranks: Table) -> None:
    numbers = ranks["rank"]
    if not len(numbers) or numbers.min() < 0 or numbers.max() >= MAX_RANKS:
        raise DamagedColumn(f"it has {len(numbers)} ranks, some impossible")
    values, times = np.unique(numbers, return_counts=True)
    if times.max() > 1:
        raise DamagedColumn(f"it has {rank_list(values[times > 1][:8].tolist())} more than once")


def _adds_up(counts: NDArray[np.int64], chunks: TableChunks) -> bool:
    return bool(counts.min() >= 0 and counts.max() <= chunks.num_rows and counts.sum() == chunks.num_rows)


def collectives_of(
    pack: PackIndex, descriptor: int, open_again: Callable[[], int], cache: ChunkCache
) -> PackedCollectives:
    """Return the collectives of a pack.

    Raises:
        DamagedColumn: it is not known which rows belong to whom.
    """
    if "collectives" not in pack.chunks:
        raise DamagedColumn("its index cannot be read")
    blocks = _read(descriptor, pack.chunks, "blocks", _MAX_BLOCKS)
    num_blocks, rest = divmod(len(blocks), pack.num_ranks)
    counts = blocks["num_rows"].astype(np.int64).reshape(-1, pack.num_ranks) if not rest else None
    own = pack.ranks["num_collectives"]
    if counts is None or (num_blocks and counts.min() < 0) or (counts.sum(axis=0) != own).any():
        raise DamagedColumn("its blocks have other rows than its ranks")
    return PackedCollectives(
        open=open_again,
        chunks=pack.chunks["collectives"],
        counts=counts,
        last_steps=blocks["last_step"].astype(np.int64).reshape(-1, pack.num_ranks),
        cache=cache,
    )


def groups_of(pack: PackIndex, descriptor: int) -> PackedGroups:
    """Return the groups of the ranks of a pack.

    Raises:
        DamagedColumn: it is not known which rows belong to whom.
    """
    rows = _read(descriptor, pack.chunks, "groups", MAX_GROUP_ROWS)
    num_rows = _read(descriptor, pack.chunks, "group_parts", MAX_GROUP_ROWS)["num_rows"]
    members = _read(descriptor, pack.chunks, "memberships", _MAX_MEMBERSHIPS)["part"]
    try:
        return PackedGroups(rows, num_rows.astype(np.int64), members, pack.ranks["num_memberships"])
    except ValueError as error:
        raise DamagedColumn(str(error)) from error
