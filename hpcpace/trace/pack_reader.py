"""Read the traces of ranks from packs: the same rows as from their own files.

A pack is opened once for all its ranks. A packed rank keeps the path of its own file, which no longer exists.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.codec import json_object
from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder, closing_descriptor
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import is_pack
from hpcpace.core.text import rank_list
from hpcpace.trace.chunks import DamagedColumn
from hpcpace.trace.pack_index import OF_RANKS, OPEN, PackedGroups, PackIndex, collectives_of, groups_of, index_pack
from hpcpace.trace.schema import DEVICE_TABLES, TABLES, TraceHeader, has_device_columns, parse_header, row_dtypes
from hpcpace.trace.stream import (
    ChunkCache,
    PackedCollectives,
    PackedRows,
    TooLarge,
    TraceStream,
    check_size,
    open_again,
    read_rows,
)
from hpcpace.trace.tables import CHECKED, GroupTable, RankTrace, Table, plausible_rows, without_implausible


@dataclass(frozen=True, kw_only=True)
class PackedTraces:
    """What was read from a pack.

    Attributes:
        streams: the trace of each rank that can be read, without its collectives.
        damaged: ranks of which parts are damaged.
        problems: what was left out and why.
        size_bytes: the memory that it takes.
    """

    streams: dict[int, TraceStream]
    damaged: frozenset[int]
    problems: tuple[str, ...]
    size_bytes: float


def open_pack(name: str, folder: Folder) -> tuple[int, PackIndex]:
    """Return a descriptor of a pack, which the caller closes, and what is in it.

    Raises:
        TraceError: it cannot be read.
    """
    path = folder.path / name
    try:
        descriptor = folder.open_file(name)
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror}); leave it out") from error
    try:
        return descriptor, index_pack(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise


def has_own_file(pack: PackIndex, place: int, folder: Folder) -> bool:
    """Return whether the rank at a place of a pack has a file of its own that is not the one that was packed.

    A rank can have both if packing was interrupted, or keeps the files. While neither size differs, they are the same.
    """
    return any(size not in (0, before) for size, before in _sizes_now_and_before(pack, place, folder))


def _is_left_over(pack: PackIndex, place: int, folder: Folder) -> bool:
    """Return whether an interrupted packing removed the journal of the rank at a place, and not its file."""
    sizes = _sizes_now_and_before(pack, place, folder)
    return any(before and not size for size, before in sizes) and not has_own_file(pack, place, folder)


def _sizes_now_and_before(pack: PackIndex, place: int, folder: Folder) -> list[tuple[int, int]]:
    """Return the sizes of a rank's file and journal, 0 where there is none: as they are, and when they were packed."""
    name = own_name(pack.numbers[place])
    now = folder.size_bytes(name), folder.size_bytes(Path(name).with_suffix(".journal").name)
    before = pack.ranks["trace_bytes"][place], pack.ranks["journal_bytes"][place]
    return list(zip(now, map(int, before), strict=True))


def own_name(rank: int) -> str:
    """Return the name of a rank's own file."""
    return f"rank-{rank:05d}.h5"


def read_pack(
    pack: PackIndex,
    descriptor: int,
    places: Collection[int],
    *,
    tables: Collection[str] = TABLES,
    most_bytes: float,
    cache: ChunkCache,
    as_stored: bool = False,
) -> PackedTraces:
    """Read the traces of some ranks of a pack, except their collectives, which streams read on demand.

    Args:
        pack: what is in it.
        descriptor: the open pack.
        places: places of the ranks in the pack.
        tables: names of the tables to read; the others get no rows.
        most_bytes: memory for them; ranks beyond it are left out.
        cache: keeps decoded chunks.
        as_stored: whether rows with impossible values stay, and groups have all columns.
    """
    reading = _Reading(pack, descriptor, frozenset(tables), cache, as_stored=as_stored)
    wanted = np.array(sorted(places), np.int64)
    sizes = np.cumsum(reading.size_bytes()[wanted])
    num_fitting = int(np.searchsorted(sizes, most_bytes, "right"))
    streams = {}
    for first, stop in _runs(wanted[:num_fitting].tolist()):
        for trace, rows in reading.traces(first, stop):
            streams[trace.header.rank] = TraceStream(trace=trace, chunks=rows)
    problems = [*reading.problems]
    if num_fitting < len(wanted):
        left_out = rank_list([pack.numbers[place] for place in wanted[num_fitting:]])
        try:
            check_size(f"{pack.path}: the tables of {left_out}", float(sizes[-1]), most_bytes)
        except TooLarge as error:
            problems.append(str(error))
    return PackedTraces(
        streams=streams,
        damaged=frozenset(reading.damaged),
        problems=tuple(problems),
        size_bytes=float(sizes[num_fitting - 1]) if num_fitting else 0,
    )


def read_packed_rank(
    rank: int, folder: Folder, *, most_bytes: float, only_left_over: bool = False
) -> TraceStream | None:
    """Return the trace of a rank from the first pack in a folder that has it whole; None if there is none.

    If no pack has it whole, it is from the first that has parts of it.

    Args:
        rank: its number.
        folder: of the packs.
        most_bytes: memory that its tables may take.
        only_left_over: take it only if its own file is what an interrupted packing left.

    Raises:
        TraceError: it is damaged, or takes more memory; or it is in no pack, and some packs cannot be read.
    """
    errors: list[TraceError] = []
    damaged: TraceStream | None = None
    for name in filter(is_pack, folder.names()):
        try:
            stream, is_damaged = _read_from(name, rank, folder, most_bytes, only_left_over=only_left_over)
        except TraceError as error:  # another pack may have the rank
            errors.append(error)
            continue
        if stream is not None and not is_damaged:
            return stream
        damaged = damaged or stream
    if damaged is None and errors:
        raise errors[0] if len(errors) == 1 else TraceError("; ".join(map(str, errors)))
    return damaged


def _read_from(
    name: str, rank: int, folder: Folder, most_bytes: float, *, only_left_over: bool
) -> tuple[TraceStream | None, bool]:
    """Return the trace of a rank from a pack, None if it is not in it; and whether parts of it are damaged.

    Raises:
        TraceError: the pack or the rank cannot be read.
    """
    descriptor, pack = open_pack(name, folder)
    with closing_descriptor(descriptor):
        if rank not in pack.numbers:
            return None, False
        place = pack.numbers.index(rank)
        if only_left_over and not _is_left_over(pack, place, folder):
            return None, False
        found = read_pack(pack, descriptor, [place], most_bytes=most_bytes, cache=ChunkCache(), as_stored=True)
    if rank not in found.streams:
        raise TraceError("; ".join(found.problems) or f"{pack.path}: rank {rank} cannot be read")
    stream = found.streams[rank]
    trace = replace(stream.trace, problems=(*found.problems, *stream.trace.problems))
    return replace(stream, trace=trace, most_bytes=most_bytes), rank in found.damaged


def packed_rows(folder_path: Path, header: TraceHeader) -> PackedRows | None:
    """Return the collectives of a rank from the packs of a folder, None if they are in none.

    For a stream whose file was packed after it was opened.
    """
    with Folder.open(folder_path) as folder:
        for name in filter(is_pack, folder.names()):
            places, collectives = _collectives(folder_path, name, folder.status(name).st_ino)
            if collectives is not None and header in places:
                return collectives.of_rank(places[header])
    return None


@lru_cache(maxsize=8)
def _collectives(folder_path: Path, name: str, _inode: int) -> tuple[dict[TraceHeader, int], PackedCollectives | None]:
    """Return the place of each rank in a pack by its header, and their collectives, None if they cannot be read."""
    places: dict[TraceHeader, int] = {}
    with Folder.open(folder_path) as folder:
        try:
            descriptor, pack = open_pack(name, folder)
        except TraceError:
            return places, None
        try:
            for place in range(pack.num_ranks):
                with suppress(TraceError):
                    places[_header(pack, place)] = place
            return places, collectives_of(pack, descriptor, partial(open_again, pack.path, pack.identity), ChunkCache())
        except DamagedColumn:
            return places, None
        finally:
            os.close(descriptor)


def _header(pack: PackIndex, place: int) -> TraceHeader:
    """Return the header of the rank at a place.

    Raises:
        TraceError: it cannot be read, or is that of another rank.
    """
    try:
        values = json_object(json.loads(pack.headers[place]))
    except (ValueError, RecursionError, TypeError) as error:
        raise TraceError(f"a header is not JSON ({error})") from error
    header = parse_header(values, str(pack.path))
    if header.rank != pack.numbers[place]:
        raise TraceError(f"{pack.path}: the header of a rank says {header.rank}")
    return header


def _runs(places: list[int]) -> Iterator[tuple[int, int]]:
    """Yield first and stop of consecutive places."""
    # In a run of neighbours, place and position grow alike.
    for _, run in itertools.groupby(enumerate(places), key=lambda item: item[1] - item[0]):
        (_, first), *others = run
        yield first, first + len(others) + 1


class _Reading:
    """Reads consecutive ranks of a pack."""

    def __init__(
        self, pack: PackIndex, descriptor: int, tables: frozenset[str], cache: ChunkCache, *, as_stored: bool
    ) -> None:
        self.problems, self.damaged = list(pack.problems), set[int]()
        self._pack, self._descriptor, self._as_stored = pack, descriptor, as_stored
        self._tables = [name for name in (*OF_RANKS, OPEN) if name in tables or name == OPEN]
        of_device = [
            name
            for name in DEVICE_TABLES
            if name in pack.chunks and has_device_columns(TABLES[name], pack.chunks[name].columns)
        ]
        dtypes = row_dtypes(of_device)
        self._empty = {name: Table.from_rows(np.zeros(0, dtypes[name])) for name in TABLES}
        self._collectives: PackedCollectives | None = None
        self._groups: PackedGroups | None = None
        if "collectives" in tables:
            with self._losing("collectives"):
                again = partial(open_again, pack.path, pack.identity)
                self._collectives = collectives_of(pack, descriptor, again, cache)
        if "groups" in tables:
            with self._losing("groups"):
                self._groups = groups_of(pack, descriptor)
        self._is_suspicious = self._groups is not None and _is_suspicious(self._groups.rows, "groups")

    @contextmanager
    def _losing(self, table: str) -> Iterator[None]:
        """Leave a table of all ranks out if it is damaged."""
        try:
            yield
        except DamagedColumn as error:
            self._lose(table, self._pack.numbers, str(error))

    def _lose(self, table: str, ranks: Sequence[int], reason: str = "") -> None:
        why = f" ({reason})" if reason else ""
        self.problems.append(
            f"{self._pack.path}: table {table} of {rank_list(sorted(ranks))} is damaged and left out{why}"
        )
        self.damaged.update(ranks)

    def size_bytes(self) -> NDArray[np.float64]:
        """Return the memory that the tables of each rank take, float64, (num_ranks,)."""
        sizes = self._pack.size_bytes(self._tables).astype(np.float64)
        return sizes if self._groups is None else sizes + self._groups.sizes_bytes

    def traces(self, first: int, stop: int) -> Iterator[tuple[RankTrace, PackedRows | None]]:
        """Yield the traces of the ranks at the places `first <= place < stop`, and their collectives."""
        found = {name: self._read(name, first, stop) for name in self._tables}
        for place in range(first, stop):
            try:
                header = _header(self._pack, place)
            except TraceError as error:
                self._lose("headers", [self._pack.numbers[place]], str(error))
                continue
            tables = {name: found[name][place - first] for name in self._tables}
            rows = None if self._collectives is None else self._collectives.of_rank(place)
            yield self._trace(place, header, tables), rows

    def _trace(self, place: int, header: TraceHeader, tables: dict[str, Table]) -> RankTrace:
        opened = tables.pop(OPEN)
        trace = RankTrace(
            path=self._pack.path.with_name(own_name(header.rank)),
            header=header,
            tables={**self._empty, **tables, "groups": self._groups_of(place)},
            problems=(),
            closed_cleanly=bool(self._pack.ranks["closed"][place]),
            open_collectives=opened,
        )
        if self._as_stored or not self._is_suspicious:
            return trace
        trace = without_implausible(trace)
        groups = trace.tables["groups"]
        groups = groups if isinstance(groups, GroupTable) else GroupTable(groups)
        return replace(trace, tables={**trace.tables, "groups": groups})

    def _groups_of(self, place: int) -> Table:
        if self._groups is None:
            return self._empty["groups"] if self._as_stored else GroupTable(self._empty["groups"])
        return self._groups.table(place) if self._as_stored else self._groups.group_table(place)

    def _read(self, name: str, first: int, stop: int) -> list[Table]:
        """Return the rows of a table of each rank; where they are damaged, none."""
        empty = self._empty["collectives" if name == OPEN else name]
        if name not in self._pack.chunks:  # the index has said so
            self.damaged.update(self._pack.numbers[first:stop])
            return [empty] * (stop - first)
        whole = self._pack.rows_of(name, first, stop)
        rows, damaged = read_rows(self._descriptor, self._pack.chunks[name], *whole)
        ends = np.cumsum(self._pack.ranks[f"num_{name}"][first:stop]).tolist()
        found, lost = [], []
        for rank, begin, end in zip(self._pack.numbers[first:stop], [0, *ends], ends, strict=False):
            is_lost = any(one.first - whole.first < end and begin < one.stop - whole.first for one in damaged)
            lost += [rank] if is_lost else []
            found.append(rows.select(slice(begin, end)) if end > begin and not is_lost else empty)
        if lost:
            self._lose(name, lost)
        self._is_suspicious |= _is_suspicious(rows, "collectives" if name == OPEN else name)
        return found


def _is_suspicious(rows: Table, name: str) -> bool:
    """Return whether any rows have impossible values: to ask for all ranks at once takes a fraction of the time."""
    return name in CHECKED and plausible_rows(rows, name, "", []) is not rows
