"""Read traces that are to be packed, write them into a pack, and check what it holds.

Only what reads without a problem is packed. A pack is read back in bounded memory before it gets its name.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray
from zlib_ng import zlib_ng

from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder, write_all
from hpcpace.core.pool import map_threads
from hpcpace.core.records import dataclass
from hpcpace.trace.chunks import DamagedColumn
from hpcpace.trace.hdf5_files import (
    FOREIGN_ERRORS,
    HDF5_LOCK,
    INDEX_BYTES,
    LIBRARY_VERSIONS,
    METADATA_BYTES,
    attribute_values,
    file_image,
    open_column,
    open_group,
    open_trace,
    reserve,
)
from hpcpace.trace.pack_index import (
    BLOCK_ROWS,
    OF_RANKS,
    OPEN,
    PACK_CHUNK_ROWS,
    PACK_FORMAT,
    PACK_VERSION,
    GroupPart,
    PackIndex,
    RankDigest,
    collectives_of,
    groups_of,
    pack_dtypes,
    split_parts,
    table_schema,
)
from hpcpace.trace.reader import read_rank
from hpcpace.trace.schema import (
    DEVICE_TABLES,
    FORMAT_VERSION,
    NO_STEP,
    RESOLUTION_NS,
    TABLES,
    TableSchema,
    TraceHeader,
    compress_chunk,
    has_device_columns,
    header_values,
)
from hpcpace.trace.stream import ChunkCache, FileRows, TraceStream, read_rows
from hpcpace.trace.tables import Table, join_tables

_MIN_ROWS = 256
"""Rows of a rank in a block that may always be there: fewer cost more to hand out than to decode."""
_MAX_TIMES = 4
"""A block of a rank has at most as many times the rows as if the steps of all ranks had equally many."""


def blocks_of(
    streams: Sequence[TraceStream], first_step: int, last_step: int
) -> Iterator[tuple[Table, NDArray[np.int32], NDArray[np.int32]]]:
    """Yield the collectives of some ranks in blocks of about the same steps, with one block of each rank in memory.

    A block is its rows, rank after rank, how many of them each rank has, and the step of each rank's last row up to
    there.

    Each rank's rows stay in their order: those of a block end where a row of a later step comes first.

    Args:
        streams: the ranks.
        first_step: the least step of all rows.
        last_step: the largest one.

    Raises:
        TraceError: a file is damaged.
    """
    num_rows = sum(stream.num_collectives for stream in streams)
    rows_of_block = max(BLOCK_ROWS, _MIN_ROWS * len(streams))
    num_blocks = max(-(-num_rows // rows_of_block), 1)
    most_rows = _MAX_TIMES * max(rows_of_block // len(streams), 1)
    # Up to the last step, what is left of all ranks.
    bounds = np.unique(np.linspace(first_step, last_step + 1, num_blocks + 1)[1:-1].astype(np.int64))
    takers = [_Taker(stream) for stream in streams]
    for bound in (*bounds.tolist(), None):
        while True:
            taken = list(map_threads(partial(_Taker.take, bound=bound, most_rows=most_rows), takers))
            counts = np.array([len(rows) for rows in taken], np.int32)
            if not counts.any():
                break
            yield join_tables(taken), counts, np.array([taker.last_step for taker in takers], np.int32)
            if (counts < most_rows).all():
                break


class _Taker:
    """Hands out the rows of a rank one after the other."""

    def __init__(self, stream: TraceStream) -> None:
        self._blocks = stream.collectives()
        self._waiting = stream.trace.tables["collectives"].select(slice(0))
        self._largest = NO_STEP
        self.last_step = NO_STEP

    def take(self, bound: int | None, most_rows: int) -> Table:
        """Return the next rows before the first one of a step that is not below some bound, at most `most_rows`."""
        while True:
            steps = np.maximum(np.maximum.accumulate(self._waiting["step"]), self._largest)
            num_before = len(steps) if bound is None else int(np.searchsorted(steps, bound))
            if num_before < len(steps) or num_before >= most_rows:
                break
            more = next(self._blocks, None)
            if more is None:
                break
            self._waiting = join_tables([self._waiting, more])
        num_taken = min(num_before, most_rows)
        if not num_taken:
            return self._waiting.select(slice(0))
        taken = self._waiting.select(slice(num_taken))
        # A copy, or all that was read would stay as long as one row of it waits.
        self._waiting = self._waiting.select(np.arange(num_taken, len(self._waiting)))
        self._largest, self.last_step = int(steps[num_taken - 1]), int(taken["step"][-1])
        return taken


FileState = tuple[int, int, int] | None
"""Inode, size and time of change of a file, None if it is not there."""
_GROUP_ATTRIBUTES = {"steps": 1, "network": 1}
# The columns of collectives take some ten times the bytes of their file. Deflate packs zeros to a thousandth: a few
# megabytes of them would be copied for hours.
_MAX_EXPANSION = 256
_HEADER_ATTRIBUTES = frozenset(TraceHeader.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class Original:
    """A trace that can be packed.

    Attributes:
        rank: the rank.
        stream: its trace, without groups and the collectives that stay on disk.
        groups: its groups.
        states: the state of its file and of its journal.
        digest: of all that is packed of it.
        first_step, last_step: the least and the largest step of its collectives; -1 if it has none.
    """

    rank: int
    stream: TraceStream
    groups: tuple[GroupPart, ...]
    states: tuple[FileState, FileState]
    digest: bytes
    first_step: int
    last_step: int

    @property
    def trace_bytes(self) -> int:
        """The size of its file; 0 if only the journal is there."""
        return self.states[0][1] if self.states[0] else 0

    @property
    def journal_bytes(self) -> int:
        """The size of its journal; 0 if it was closed."""
        return self.states[1][1] if self.states[1] else 0

    @property
    def header(self) -> bytes:
        """Its header as it is stored in a pack."""
        return header_text(self.stream.trace.header)

    @property
    def kind(self) -> tuple[str, int, tuple[str, ...]]:
        """What ranks of one pack have in common: the run, the attempt, and which tables have columns of a device."""
        header, tables = self.stream.trace.header, self.stream.trace.tables
        of_device = tuple(name for name in DEVICE_TABLES if has_device_columns(TABLES[name], tables[name]))
        return header.run_id, header.attempt, of_device

    @property
    def block_bytes(self) -> int:
        """The memory that a block of its collectives takes."""
        chunks, rows = self.stream.chunks, self.stream.trace.tables["collectives"]
        row_bytes = sum(rows[name].itemsize for name in rows)
        return chunks.chunk_rows * row_bytes if isinstance(chunks, FileRows) else 0


def names_of(rank_file: str) -> tuple[str, str]:
    """Return the names of a rank's file and of its journal."""
    return rank_file, Path(rank_file).with_suffix(".journal").name


def header_text(header: TraceHeader) -> bytes:
    """Return a header as it is stored in a pack."""
    return json.dumps(header_values(header)).encode()


def state_of(folder: Folder, name: str) -> FileState:
    """Return the state of a file."""
    try:
        found = folder.status(name)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_original(rank_file: str, *, rank: int, folder: Folder, most_bytes: float) -> Original | str:
    """Return a trace that can be packed, or why it stays as it is."""
    path = folder.path / rank_file
    states = _states(folder, rank_file)
    try:
        stream = read_rank(rank_file, folder, most_rows=-1, most_bytes=most_bytes)
        trace = stream.trace
        reason = trace.problems[0] if trace.problems else _reason(folder, rank_file, trace.header, rank)
        reason = reason or _expansion(path, stream, states)
        if reason:
            return f"{reason}; it is not packed"
        digest, first, last = digest_of(stream)
    except TraceError as error:
        return f"{error}; it is not packed"
    if states != _states(folder, rank_file):
        return f"{path} changed while it was read; it is not packed"
    # Thousands of members with their names are kept as a few parts.
    groups = split_parts(trace.tables["groups"])
    trace = replace(trace, tables={**trace.tables, "groups": trace.tables["groups"].select(np.arange(0))})
    stream = replace(stream, trace=trace)
    return Original(
        rank=rank, stream=stream, groups=groups, states=states, digest=digest, first_step=first, last_step=last
    )


def digest_of(stream: TraceStream) -> tuple[bytes, int, int]:
    """Return the digest of a trace, and the least and the largest step of its collectives, -1 if it has none.

    Raises:
        TraceError: a part is damaged.
    """
    trace = stream.trace
    digest = RankDigest(header_text(trace.header), closed=trace.closed_cleanly)
    for name in (*OF_RANKS, "groups"):
        digest.add(name, trace.tables[name])
    digest.add(OPEN, trace.open_collectives)
    steps: list[int] = []
    for rows in stream.collectives():
        digest.add("collectives", rows)
        steps += [int(rows["step"].min()), int(rows["step"].max())] if len(rows) else []
    return digest.hex(), min(steps, default=NO_STEP), max(steps, default=NO_STEP)


def _expansion(path: Path, stream: TraceStream, states: tuple[FileState, FileState]) -> str:
    """Return that a file inflates to more than any trace does; empty if it does not."""
    file_bytes = states[0][1] if states[0] else 0
    rows = stream.chunks
    if not isinstance(rows, FileRows) or rows.chunks.size_bytes <= _MAX_EXPANSION * file_bytes:
        return ""
    return f"{path} has {rows.num_rows} collectives, {rows.chunks.size_bytes // max(file_bytes, 1)} times its own size"


def _states(folder: Folder, rank_file: str) -> tuple[FileState, FileState]:
    trace, journal = names_of(rank_file)
    return state_of(folder, trace), state_of(folder, journal)


def _reason(folder: Folder, rank_file: str, header: TraceHeader, rank: int) -> str:
    """Return why a trace that reads without a problem cannot be packed without losing anything; empty if it can."""
    path = folder.path / rank_file
    if header.rank != rank:
        return f"{path} says that it is rank {header.rank}"
    if _version(header.format_version) > _version(FORMAT_VERSION):
        return f"{path} has trace format {header.format_version}, newer than {FORMAT_VERSION}: a newer hpcpace packs it"
    if not folder.has(rank_file):
        return ""
    try:
        descriptor = folder.open_file(rank_file)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    try:
        unknown = _unknown_part(descriptor)
    except FOREIGN_ERRORS as error:
        return f"{path} cannot be read ({error})"
    finally:
        os.close(descriptor)
    return f"{path} has {unknown} that this hpcpace does not know" if unknown else ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _unknown_part(descriptor: int) -> str:
    """Return what a file has that a pack would lose; empty if there is nothing."""
    with HDF5_LOCK, open_trace(descriptor) as file:
        root = h5py.h5g.open(file.id, b"/")
        tables = {name: group for name in TABLES if (group := open_group(root, name)) is not None}
        if _num_attributes(root) != sum(h5py.h5a.exists(root, name.encode()) for name in _HEADER_ATTRIBUTES):
            return "attributes"
        if root.get_num_objs() != len(tables):
            return "tables"
        for name, group in tables.items():
            if group.get_num_objs() != _num_known(group, TABLES[name]):
                return f"columns of {name}"
            if _num_attributes(group) > _GROUP_ATTRIBUTES.get(name, 0):
                return f"attributes of {name}"
        return _other_resolution(tables)


def _num_known(group: h5py.h5g.GroupID, table: TableSchema) -> int:
    """Return how many columns of a table are read."""
    columns, of_device = (
        [column for column in dtype.names or () if group.links.exists(column.encode())]
        for dtype in (table.dtype, table.device)
    )
    return len(columns) + (len(of_device) if has_device_columns(table, of_device) else 0)


def _other_resolution(tables: dict[str, h5py.h5g.GroupID]) -> str:
    for name, resolutions in RESOLUTION_NS.items():
        for column, resolution_ns in resolutions.items():
            found = open_column(tables[name], column) if name in tables else None
            if found is None:
                continue
            values = attribute_values(found[0], ["resolution_ns"])
            if np.any(values.get("resolution_ns", resolution_ns) != resolution_ns):
                return f"a resolution of {column}"
    return ""


def _num_attributes(place: h5py.h5g.GroupID) -> int:
    count: int = h5py.h5a.get_num_attrs(place)
    return count


_ROWS_AT_ONCE = 1 << 20


def check_pack(pack: PackIndex, descriptor: int, expected: Mapping[int, bytes]) -> None:
    """Check that a pack reads without a problem and holds exactly what the ranks' own files held.

    Args:
        pack: what is in it.
        descriptor: the open pack.
        expected: the digest of each rank's own file.

    Raises:
        TraceError: it does not.
    """
    if pack.problems:
        raise TraceError(pack.problems[0])
    found = digests_of(pack, descriptor)
    if found != dict(expected):
        wrong = [rank for rank in expected if found.get(rank) != expected[rank]]
        raise TraceError(f"{pack.path} does not hold what the file of rank {wrong[0] if wrong else '?'} held")


def digests_of(pack: PackIndex, descriptor: int) -> dict[int, bytes]:
    """Return the digest of each rank of a pack.

    Raises:
        TraceError: a part is damaged.
    """
    digests = [
        RankDigest(header, closed=bool(closed))
        for header, closed in zip(pack.headers, pack.ranks["closed"].tolist(), strict=True)
    ]
    try:
        for name in (*OF_RANKS, OPEN):
            _add_table(pack, descriptor, name, digests)
        groups = groups_of(pack, descriptor)
        for place, digest in enumerate(digests):
            digest.add("groups", groups.table(place))
        _add_collectives(pack, descriptor, digests)
    except DamagedColumn as error:
        raise TraceError(f"{pack.path} is damaged: {error}") from error
    return {rank: digest.hex() for rank, digest in zip(pack.numbers, digests, strict=True)}


def _add_table(pack: PackIndex, descriptor: int, name: str, digests: list[RankDigest]) -> None:
    if name not in pack.chunks:
        raise DamagedColumn(f"table {name}")
    ends = np.cumsum(pack.ranks[f"num_{name}"]).tolist()
    for first, rows in _rows(pack, descriptor, name):
        for digest, begin, end in zip(digests, [0, *ends], ends, strict=False):
            own = slice(max(begin - first, 0), max(min(end - first, len(rows)), 0))
            if own.start < own.stop:
                digest.add(name, rows.select(own))


def _rows(pack: PackIndex, descriptor: int, name: str) -> Iterator[tuple[int, Table]]:
    """Yield pieces of a table, each with the number of its first row."""
    chunks = pack.chunks[name]
    bounds = [*range(0, chunks.num_rows, _ROWS_AT_ONCE), chunks.num_rows]
    for first, stop in itertools.pairwise(bounds):
        rows, damaged = read_rows(descriptor, chunks, first, stop)
        if damaged:
            raise DamagedColumn(f"rows of {name}")
        yield first, rows


def _add_collectives(pack: PackIndex, descriptor: int, digests: list[RankDigest]) -> None:
    collectives = collectives_of(pack, descriptor, partial(os.dup, descriptor), ChunkCache())
    for block in range(collectives.num_blocks):
        rows, damaged = collectives.read_blocks(block, block + 1)
        if damaged:
            raise DamagedColumn("rows of collectives")
        ends = np.cumsum(collectives.counts[block]).tolist()
        for digest, begin, end in zip(digests, [0, *ends], ends, strict=False):
            digest.add("collectives", rows.select(slice(begin, end)))


# Where superblock version 3 says where the content of the file ends (HDF5 file format 3.0, section II.A).
_END_OFFSET = 28


class PackWriter:
    """The HDF5 file of a pack while it is written; nobody reads it before it has its name.

    Args:
        descriptor: of a new file that reads and writes; the caller keeps it.
        device_tables: the tables that have the columns of ranks with a device.

    Raises:
        OSError: the disk is full or broken.
    """

    def __init__(self, descriptor: int, *, device_tables: Collection[str]) -> None:
        self._descriptor = descriptor
        self._dtypes = pack_dtypes(device_tables)
        tables = {name: (table_schema(name), dtype) for name, dtype in self._dtypes.items()}
        with HDF5_LOCK:
            # Made in memory, so that a plain write meets a full disk, and never HDF5.
            image = file_image({"format": PACK_FORMAT, "format_version": PACK_VERSION}, tables)
            write_all(descriptor, image, 0)
            self._file = h5py.File(f"/proc/self/fd/{descriptor}", "r+", libver=LIBRARY_VERSIONS, locking=False)
        self._waiting: dict[str, list[Table]] = {name: [] for name in self._dtypes}
        self._num_written = dict.fromkeys(self._dtypes, 0)

    def append(self, name: str, rows: Table | Mapping[str, NDArray[np.generic]]) -> None:
        """Append rows to a table.

        Raises:
            OSError: the disk is full or broken; the file is to be thrown away.
        """
        table = Table({column: rows[column] for column in self._dtypes[name].names or ()})
        waiting = self._waiting[name]
        if len(table):
            waiting.append(table)
        num_rows = sum(map(len, waiting))
        num_whole = num_rows - num_rows % PACK_CHUNK_ROWS
        if num_whole:
            joined = join_tables(waiting)
            self._write(name, joined.select(slice(num_whole)))
            self._waiting[name] = [joined.select(np.arange(num_whole, num_rows))]

    def close(self) -> None:
        """Write what waits, and close the file.

        Raises:
            OSError: the disk is full or broken; the file is to be thrown away.
        """
        for name, waiting in self._waiting.items():
            if waiting:
                self._write(name, join_tables(waiting))
        with HDF5_LOCK:
            reserve(self._descriptor, self._file.id.get_filesize() + METADATA_BYTES)
            self._file.close()
        # Give back what was reserved and not needed.
        os.ftruncate(self._descriptor, int.from_bytes(os.pread(self._descriptor, 8, _END_OFFSET), "little"))

    def abandon(self) -> None:
        """Close the file after an error; it is to be thrown away."""
        with HDF5_LOCK:
            self._file.close()

    def _write(self, name: str, rows: Table) -> None:
        if not len(rows):
            return
        begins = range(0, len(rows), PACK_CHUNK_ROWS)
        tasks = [(column, begin) for column in rows for begin in begins]

        def compressed(task: tuple[str, int]) -> bytes:
            column, begin = task
            return compress_chunk(rows[column][begin : begin + PACK_CHUNK_ROWS], PACK_CHUNK_ROWS, library=zlib_ng)

        chunks = list(map_threads(compressed, tasks))
        first = self._num_written[name]
        with HDF5_LOCK:
            size_bytes = sum(INDEX_BYTES + len(chunk) for chunk in chunks)
            reserve(self._descriptor, self._file.id.get_filesize() + size_bytes + METADATA_BYTES)
            for column in rows:
                self._file[name][column].resize((first + len(rows),))
            for (column, begin), chunk in zip(tasks, chunks, strict=True):
                self._file[name][column].id.write_direct_chunk((first + begin,), chunk)
        self._num_written[name] = first + len(rows)
