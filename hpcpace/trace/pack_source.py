"""Read the traces that are to be packed, each as a whole: only what reads without a problem is packed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np

from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder
from hpcpace.trace.chunks import TableChunks
from hpcpace.trace.encoding import RESOLUTION_NS, has_device_columns
from hpcpace.trace.header import header_values
from hpcpace.trace.opening import FOREIGN_ERRORS, HDF5_LOCK, attribute_values, open_column, open_group, open_trace
from hpcpace.trace.pack_groups import GroupPart, split_parts
from hpcpace.trace.pack_schema import OF_RANKS, OPEN, RankDigest
from hpcpace.trace.reader import read_rank
from hpcpace.trace.schema import DEVICE_TABLES, FORMAT_VERSION, NO_STEP, TABLES, TableSchema, TraceHeader
from hpcpace.trace.stream import TraceStream

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
        if not isinstance(chunks, TableChunks) or not chunks.num_rows:
            return 0
        return max(column.chunk_rows for column in chunks.columns.values()) * row_bytes


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
    chunks = stream.chunks
    if not isinstance(chunks, TableChunks) or chunks.size_bytes <= _MAX_EXPANSION * file_bytes:
        return ""
    return f"{path} has {chunks.num_rows} collectives, {chunks.size_bytes // max(file_bytes, 1)} times its own size"


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
