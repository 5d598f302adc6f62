"""Read one rank's trace, file and journal merged, even if the rank still runs or was killed.

Needs neither torch nor MPI. Damaged parts are left out and reported; the rest is read. Files are not trusted: each is
opened once, must be a regular file, and takes no more memory than allowed.
"""

from __future__ import annotations

import errno
import math
import operator
import os
from collections.abc import Collection
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import is_pack, rank_of
from hpcpace.trace import journal
from hpcpace.trace.chunks import (
    DamagedColumn,
    TableChunks,
    index_table,
    left_out,
    open_tables,
    read_chunks,
    split_chunks,
)
from hpcpace.trace.hdf5_files import (
    FOREIGN_ERRORS,
    HDF5_LOCK,
    attribute_values,
    check_object,
    is_marked_open,
    open_trace,
)
from hpcpace.trace.pack_index import GROUP_ROW_BYTES, MAX_GROUP_ROWS
from hpcpace.trace.pack_reader import packed_rows, read_packed_rank
from hpcpace.trace.schema import (
    FIRST_ROW,
    FIRST_STEP,
    TABLES,
    OtherVersion,
    TableSchema,
    TraceHeader,
    has_device_columns,
    parse_header,
    row_dtype,
)
from hpcpace.trace.stream import FileRows, TooLarge, TraceStream, check_size, identity_of, read_blocks
from hpcpace.trace.tables import RankTrace, Table

DEFAULT_MEMORY_BYTES = 2 << 30
"""Memory that the tables of a run may take, unless more is allowed."""

# A writer keeps at most a million rows in memory, and the journal holds no others.
_MAX_JOURNAL_BYTES = 1 << 27
# Its bytes, its rows, and their copies while they are sorted.
_JOURNAL_COPIES = 3
_HEADER_NAMES = frozenset(item.name for item in fields(TraceHeader))
_MAX_ROWS = 1 << 62
_OPERATION = ["group", "seq", "op", "peer", "enter_ns"]
_TORN = "are a torn or damaged record; left out"


def read_trace(path: str | os.PathLike[str], *, memory_bytes: float = DEFAULT_MEMORY_BYTES) -> RankTrace:
    """Read the trace file of a rank together with its journal.

    Args:
        path: the HDF5 file, which may be missing if there is a journal next to it; or the journal.
        memory_bytes: memory that the tables may take.

    Raises:
        TooLarge: they take more.
        TraceError: neither can be read, or they have another major version of the format.
    """
    return _read_path(path, most_rows=math.inf, most_bytes=memory_bytes).trace


def is_torn(problem: str) -> bool:
    """Return whether a problem of a trace is that its journal ended within a record, as one that is written may."""
    return problem.endswith(_TORN)


def stream_trace(path: str | os.PathLike[str]) -> TraceStream:
    """Read the trace file of a rank except its collectives, which the stream reads on demand.

    Args:
        path: as of `read_trace`.

    Raises:
        TraceError: as of `read_trace`.
    """
    return _read_path(path, most_rows=-1, most_bytes=DEFAULT_MEMORY_BYTES)


def _read_path(path: str | os.PathLike[str], *, most_rows: float, most_bytes: float) -> TraceStream:
    path = Path(path)
    if not path.name:
        raise TraceError(f"{path} is a folder: name a rank-NNNNN.h5 of a run")
    try:
        folder = Folder.open(path.parent)
    except OSError as error:
        raise TraceError(f"no trace file at {path} ({error.strerror}): name a rank-NNNNN.h5 of a run") from error
    name = path.with_suffix(".h5").name if path.suffix == ".journal" else path.name
    if is_pack(name):
        raise TraceError(f"{path} holds several ranks: name the file that one of them had, like rank-00000.h5")
    with folder:
        packed = _read_packed(name, folder, most_bytes)
        if packed is not None:
            return packed if most_rows < 0 else replace(packed, trace=_whole(packed), chunks=None)
        return read_rank(name, folder, most_rows=most_rows, most_bytes=most_bytes)


def _read_packed(name: str, folder: Folder, most_bytes: float) -> TraceStream | None:
    """Return the trace of a rank whose own file is not there, or not whole, from a pack; None if it is in none."""
    rank = rank_of(name)
    if rank is None:
        return None
    has_own = folder.has(name) or folder.has(Path(name).with_suffix(".journal").name)
    try:
        return read_packed_rank(rank, folder, most_bytes=most_bytes, only_left_over=has_own)
    except TraceError:
        if has_own:  # a damaged pack says nothing about it
            return None
        raise


def _whole(stream: TraceStream) -> RankTrace:
    """Return a packed trace with its collectives; those of damaged blocks are left out.

    Raises:
        TooLarge: they take more memory than allowed.
    """
    rows, problems = read_blocks(stream)
    trace = stream.trace
    return replace(trace, tables={**trace.tables, "collectives": rows}, problems=(*trace.problems, *problems))


def read_rank(
    name: str,
    folder: Folder,
    *,
    most_rows: float,
    tables: Collection[str] = TABLES,
    most_bytes: float = DEFAULT_MEMORY_BYTES,
) -> TraceStream:
    """Read the trace file of a rank together with its journal.

    Args:
        name: name of the HDF5 file.
        folder: the folder that it is in.
        most_rows: collectives stay on disk if there are more than this.
        tables: names of the tables to read; the others get no rows.
        most_bytes: memory for everything that does not stay on disk.

    Raises:
        TooLarge: it takes more.
        TraceError: as of `read_trace`.
    """
    problems: list[str] = []
    path, journal_name = folder.path / name, Path(name).with_suffix(".journal").name
    # Read the journal first: rows only move from it into the file, so none can be missed in between.
    journal_bytes = _JOURNAL_COPIES * min(folder.size_bytes(journal_name), _MAX_JOURNAL_BYTES)
    check_size(f"{path}: its tables", journal_bytes, most_bytes)
    content = _read_journal(folder, journal_name, problems)
    try:
        found = _read_container(
            name,
            folder,
            tables=tables,
            most_rows=most_rows,
            most_bytes=most_bytes - journal_bytes,
            has_journal=content is not None,
        )
    except (OtherVersion, TooLarge):
        raise
    except TraceError as error:
        if content is None:
            raise
        problems.append(f"{error} (only its journal is read)")
        found = _Container(content.header, is_open=True)
    problems += found.problems
    is_closed = not found.is_open and not folder.has(journal_name)
    if found.tables and content is None and not is_closed:
        problems.append(f"{path} was not closed and its journal cannot be read: its last rows are missing")
    if content is not None and _identity(content.header) != _identity(found.header):
        problems.append(f"{path.with_suffix('.journal')} belongs to another run, attempt or rank; it is left out")
        content = None
    merged = {schema.name: _merged(schema, found, content, path, problems) for schema in TABLES.values()}
    trace = RankTrace(
        path=path,
        header=found.header,
        tables=merged,
        problems=tuple(problems),
        closed_cleanly=is_closed,
        open_collectives=_still_open(content, merged["collectives"]),
        first_step=found.first_step,
    )
    return TraceStream(trace=trace, chunks=found.left)


def _size_bytes(table_name: str, chunks: TableChunks) -> float:
    """Return the memory that a table takes, without the texts of groups, which are kept only once."""
    if table_name != "groups":
        return chunks.size_bytes
    return chunks.num_rows * GROUP_ROW_BYTES if chunks.num_rows <= MAX_GROUP_ROWS else math.inf


def _read_journal(folder: Folder, name: str, problems: list[str]) -> journal.JournalContent | None:
    path = folder.path / name
    try:
        content = journal.decode(folder.read(name, most_bytes=_MAX_JOURNAL_BYTES), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        is_large = error.errno == errno.EFBIG
        size = f"has {folder.size_bytes(name)} bytes, more than any journal"
        problems.append(f"{path} {size if is_large else f'cannot be read: {error.strerror}'}; its rows are left out")
        return None
    except TraceError as error:
        problems.append(str(error))
        return None
    if content.num_left_bytes:
        problems.append(f"{path}: the last {content.num_left_bytes} bytes {_TORN}")
    return content


@dataclass
class _Container:
    """What was read from an HDF5 file.

    Attributes:
        tables: the intact tables; for one that partly stays on disk, the rows after that part.
        is_open: whether the writer has not closed the file.
        left: the collectives that stay on disk.
        first_rows: of tables whose first rows were dropped, how many.
        first_step: the first step of which none was.
    """

    header: TraceHeader
    is_open: bool
    tables: dict[str, Table] = field(default_factory=dict)
    left: FileRows | None = None
    first_rows: dict[str, int] = field(default_factory=dict)
    first_step: int = 0
    problems: list[str] = field(default_factory=list)


def _read_container(
    name: str, folder: Folder, *, tables: Collection[str], most_rows: float, most_bytes: float, has_journal: bool
) -> _Container:
    """Return the content of the HDF5 file.

    If there are more collectives than `most_rows`, only the last chunk is read, and only if a journal may overlap it.
    """
    path = folder.path / name
    try:
        descriptor = folder.open_file(name)
    except OSError as error:
        reason = "" if isinstance(error, FileNotFoundError) else f" ({error.strerror})"
        raise TraceError(f"no trace file at {path}{reason}: name a rank-NNNNN.h5 of a run") from error
    try:
        found, chunks = _index(descriptor, path, tables)
        collectives = chunks.get("collectives")
        if collectives is not None and collectives.num_rows > most_rows and collectives.is_even:
            left, chunks["collectives"] = split_chunks(collectives, 1 if has_journal else 0)
            found.left = FileRows(
                path=path, identity=identity_of(descriptor), header=found.header, chunks=left, find_packed=packed_rows
            )
        check_size(f"{path}: its tables", sum(map(_size_bytes, chunks, chunks.values())), most_bytes)
        for table_name, places in chunks.items():
            try:
                found.tables[table_name] = read_chunks(descriptor, places)
            except DamagedColumn as error:
                found.left = None if table_name == "collectives" else found.left
                found.problems.append(left_out(path, table_name, error))
    except FOREIGN_ERRORS as error:
        reason = str(error).replace(f"/proc/self/fd/{descriptor}", name)
        raise TraceError(f"{path} cannot be read as HDF5 ({reason}); it is damaged or foreign, leave it out") from error
    finally:
        os.close(descriptor)
    return found


def _index(descriptor: int, path: Path, tables: Collection[str]) -> tuple[_Container, dict[str, TableChunks]]:
    """Return header and state of a trace file, and where its tables are."""
    file_bytes = os.fstat(descriptor).st_size
    chunks: dict[str, TableChunks] = {}
    with HDF5_LOCK, open_trace(descriptor) as file:
        root = h5py.h5g.open(file.id, b"/")
        check_object(root)
        problems: list[str] = []
        groups = open_tables(root, TABLES, path, problems)
        header = parse_header({**attribute_values(root, _HEADER_NAMES), **_group_values(groups)}, str(path))
        is_open = is_marked_open(descriptor)
        for table_name in (table_name for table_name in groups if table_name in tables):
            try:
                found = index_table(groups[table_name], TABLES[table_name], file_bytes=file_bytes, is_growing=is_open)
            except DamagedColumn as error:
                problems.append(left_out(path, table_name, error))
                continue
            chunks[table_name] = found
            # While a file is being written, its columns grow one after the other.
            if found.num_rows < found.longest and not is_open:
                held = f"{found.num_rows} to {found.longest} rows; {found.num_rows} are read"
                problems.append(f"{path}: columns of {table_name} hold {held}")
        first_rows = {name: row for name, group in groups.items() if (row := _number(group, FIRST_ROW))}
        first_step = _number(groups["steps"], FIRST_STEP) if "steps" in groups else 0
    return _Container(header, is_open, first_rows=first_rows, first_step=first_step, problems=problems), chunks


def _number(group: h5py.h5g.GroupID, name: str) -> int:
    """Return an attribute that a table may have; 0 without it.

    Raises:
        ValueError: it is no number, or one that no writer writes.
    """
    value = attribute_values(group, (name,)).get(name, 0)
    if isinstance(value, (str, bytes, tuple, list)) or not 0 <= operator.index(value) < _MAX_ROWS:
        raise ValueError(f"attribute {name} is {value!r}")
    return operator.index(value)


def _group_values(groups: dict[str, h5py.h5g.GroupID]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for table_name, name in (("steps", "samples_unit"), ("network", "interfaces")):
        if table_name in groups:
            values |= attribute_values(groups[table_name], (name,))
    return values


def _merged(
    schema: TableSchema, found: _Container, content: journal.JournalContent | None, path: Path, problems: list[str]
) -> Table:
    """Return the rows of a table in the file, followed by those that only the journal has.

    The file may be ahead of the journal (if killed before the journal was restarted), but never behind it in an intact
    trace.
    """
    numbers, journalled = (None, None) if content is None else content.rows.get(schema.name, (None, None))
    names = () if journalled is None else journalled.dtype.names or ()
    stored = found.tables.get(schema.name)
    if stored is None:
        dtype = row_dtype(schema, has_device=has_device_columns(schema, names))
        stored = Table.from_rows(np.zeros(0, dtype))
    if numbers is None or journalled is None:
        return stored
    numbers = numbers - found.first_rows.get(schema.name, 0)
    if found.left is not None and schema.name == "collectives":
        numbers = numbers - found.left.num_rows
    is_new = numbers >= len(stored)
    if not is_new.any():
        return stored
    new = {name: journalled[name][is_new] for name in names}
    new |= {name: np.zeros(is_new.sum(), schema.dtype[name]) for name in schema.optional - set(names)}
    lacking = [name for name, rows in stored.items() if name not in new or new[name].dtype != rows.dtype]
    place = f"{path}: table {schema.name}"
    if lacking:
        problems.append(f"{place}: the journal lacks {', '.join(lacking)}; its {is_new.sum()} rows are left out")
        return stored
    num_lost = int(numbers[-1]) + 1 - len(stored) - int(is_new.sum())
    if num_lost:
        problems.append(f"{place}: {num_lost} rows after row {len(stored) - 1} are in neither file nor journal")
    return Table({name: np.concatenate([column, new[name]]) for name, column in stored.items()})


def _still_open(content: journal.JournalContent | None, collectives: Table) -> Table:
    """Return the open operations of the journal that no later row completes."""
    if content is None or content.open_rows is None or not len(content.open_rows):
        return collectives.select(slice(0))
    rows = content.open_rows
    if not set(_OPERATION) <= set(rows.dtype.names or ()):
        return collectives.select(slice(0))
    near = np.isin(collectives["enter_ns"], rows["enter_ns"])
    completed = set(zip(*(collectives[name][near].tolist() for name in _OPERATION), strict=True))
    keys = list(zip(*(rows[name].tolist() for name in _OPERATION), strict=True))
    last = {key: index for index, key in enumerate(keys) if key not in completed}
    return Table.from_rows(rows[sorted(last.values())])


def _identity(header: TraceHeader) -> tuple[Any, ...]:
    return header.run_id, header.attempt, header.rank


__all__ = ["RankTrace", "Table", "TooLarge", "TraceStream", "is_torn", "read_rank", "read_trace", "stream_trace"]
