"""What is in a pack and where: its ranks, their headers, and how many rows of each table belong to each.

A pack is trusted no more than a rank's own file: every number is checked against what the file can hold before anything
is read by it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import TraceError
from hpcpace.core.text import rank_list
from hpcpace.trace.chunks import DamagedColumn, TableChunks, index_table, no_rows
from hpcpace.trace.header import MOST_RANKS, OtherVersion
from hpcpace.trace.opening import (
    FOREIGN_ERRORS,
    HDF5_LOCK,
    attribute_values,
    check_object,
    is_marked_open,
    open_group,
    open_trace,
)
from hpcpace.trace.pack_groups import MOST_GROUP_ROWS, PackedGroups
from hpcpace.trace.pack_schema import (
    COUNTED,
    INDEX,
    LACKING,
    MOST_PACKED_RANKS,
    OF_RANKS,
    OPEN,
    PACK_FORMAT,
    PACK_VERSION,
    table_schema,
)
from hpcpace.trace.packed_rows import ChunkCache, PackedCollectives, Range, read_rows
from hpcpace.trace.schema import TableSchema
from hpcpace.trace.stream import identity_of
from hpcpace.trace.tables import Table

_MOST_HEADER_BYTES, _MOST_HEADERS_BYTES = 1 << 16, 1 << 25
_MOST_BLOCKS = 1 << 26
"""The most entries of `blocks`, a gigabyte of memory: as many as ranks times blocks."""

_MOST_MEMBERSHIPS = 1 << 24


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
        ranks = _with_counts(_read(descriptor, chunks, "ranks", MOST_PACKED_RANKS))
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
        for name in (*INDEX, *OF_RANKS, "groups", "collectives", OPEN):
            if name in lacking:
                chunks[name] = no_rows(table_schema(name))
                continue
            try:
                found = _chunks_of(root, name, table_schema(name, lacking), file_bytes)
            except (DamagedColumn, *FOREIGN_ERRORS) as error:
                problems.append(f"{path}: table {name} is damaged and left out ({error})")
                continue
            if found is None:
                problems.append(f"{path}: table {name} is missing")
            else:
                chunks[name] = found
    return chunks


def _chunks_of(root: h5py.h5g.GroupID, name: str, schema: TableSchema, file_bytes: int) -> TableChunks | None:
    group = open_group(root, name)
    if group is None:
        return None
    found = index_table(group, schema, file_bytes=file_bytes)
    if found.longest != found.num_rows or not found.is_even:
        raise ValueError(f"its columns have {found.num_rows} to {found.longest} rows or chunks of different sizes")
    return found


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
    if len(sizes) and (sizes.min() < 0 or sizes.max() > _MOST_HEADER_BYTES):
        raise DamagedColumn(f"a header has {sizes.min()} or {sizes.max()} bytes")
    text = _read(descriptor, chunks, "headers", _MOST_HEADERS_BYTES)["text"].tobytes()
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    if len(text) != (ends[-1] if ends else 0):
        raise DamagedColumn(f"its headers have {len(text)} bytes")
    return tuple(text[begin:end] for begin, end in zip([0, *ends], ends, strict=False))


def _check_ranks(ranks: Table) -> None:
    numbers = ranks["rank"]
    if not len(numbers) or numbers.min() < 0 or numbers.max() >= MOST_RANKS:
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
    blocks = _read(descriptor, pack.chunks, "blocks", _MOST_BLOCKS)
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
    rows = _read(descriptor, pack.chunks, "groups", MOST_GROUP_ROWS)
    num_rows = _read(descriptor, pack.chunks, "group_parts", MOST_GROUP_ROWS)["num_rows"]
    members = _read(descriptor, pack.chunks, "memberships", _MOST_MEMBERSHIPS)["part"]
    try:
        return PackedGroups(rows, num_rows.astype(np.int64), members, pack.ranks["num_memberships"])
    except ValueError as error:
        raise DamagedColumn(str(error)) from error
