"""Reading of traces: HDF5 file and journal merged, also of a rank that still runs or was killed.

Needs neither torch nor MPI. What is damaged is left out and said so; the rest is read.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcpace.errors import TraceError
from hpcpace.rundir import Attempt
from hpcpace.trace import journal
from hpcpace.trace.chunks import ForeignChunks, TableChunks, index_chunks, read_chunks, split_all, split_last
from hpcpace.trace.container import is_marked_open, open_for_reading
from hpcpace.trace.encoding import ENQUEUE_COLUMN, row_dtype
from hpcpace.trace.header import OtherVersion, parse_header
from hpcpace.trace.plausible import without_implausible
from hpcpace.trace.schema import TABLES, TableSchema, TraceHeader
from hpcpace.trace.stream import MOST_ROWS, StoredTable, TraceStream
from hpcpace.trace.tables import RankTrace, Table
from hpcpace.trace.threads import map_processes, map_threads

# What h5py and HDF5 raise on files that are damaged or not theirs.
_FOREIGN_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, MemoryError, OverflowError)
# Deflate makes nothing smaller than this; a length beyond it is damage, and reading it would fill the memory.
_MOST_COMPRESSED = 1032
_MOST_NAMED = 16
_LEAST_FOR_PROCESSES = 32
# A writer keeps a million rows in memory at most, and the journal holds no others.
_MOST_JOURNAL_BYTES = 1 << 28
_HEADER_NAMES = frozenset(item.name for item in fields(TraceHeader))
_OPERATION = ["group", "seq", "op", "peer", "enter_ns"]
# HDF5 is not made for threads, and h5py's own lock does not cover what `open_for_reading` sets past it.
_HDF5 = threading.Lock()


@dataclass(frozen=True)
class AttemptTraces:
    """The traces of one attempt, by rank, and what is missing or was left out of it."""

    traces: list[RankTrace]
    problems: tuple[str, ...]


def read_trace(path: str | os.PathLike[str]) -> RankTrace:
    """Read the trace file of a rank together with its journal.

    Args:
        path: the HDF5 file; it may be missing where a journal stands beside it. The journal's name does as well.

    Raises:
        TraceError: neither can be read, or they have another major version of the format.
    """
    return _read(_container_path(path), most_rows=math.inf).trace


def stream_trace(path: str | os.PathLike[str]) -> TraceStream:
    """Read the trace file of a rank but for its collectives, which the stream reads on demand.

    Args:
        path: as of `read_trace`.

    Raises:
        TraceError: as of `read_trace`.
    """
    return _read(_container_path(path), most_rows=-1)


def _read(path: Path, *, most_rows: float, names: Collection[str] = TABLES) -> TraceStream:
    problems: list[str] = []
    # The journal first: rows only move from it into the file, so what is gone from the one is in the other.
    journal_path = path.with_suffix(".journal")
    content = _read_journal(journal_path, problems)
    try:
        header, stored, is_open, left = _read_container(
            path, problems, most_rows=most_rows, names=names, has_journal=content is not None
        )
    except OtherVersion:
        raise
    except TraceError as error:
        if content is None:
            raise
        problems.append(f"{error} (only its journal is read)")
        header, stored, is_open, left = content.header, {}, True, None
    is_closed = not is_open and not os.path.exists(journal_path)
    if stored and content is None and not is_closed:
        problems.append(f"{path} was not closed and its journal cannot be read: its last rows are missing")
    if content is not None and _identity(content.header) != _identity(header):
        problems.append(f"{journal_path} belongs to another run, attempt or rank; it is left out")
        content = None
    tables = {}
    for name, table in TABLES.items():
        numbers, journalled = (None, None) if content is None else content.rows.get(name, (None, None))
        rows = stored.get(name)
        if rows is None:
            has_enqueue = journalled is not None and ENQUEUE_COLUMN in (journalled.dtype.names or ())
            rows = Table.from_rows(np.zeros(0, dtype=row_dtype(table, has_enqueue=has_enqueue)))
        if numbers is not None and journalled is not None:
            num_left = left.num_rows if left is not None and name == "collectives" else 0
            rows = _merge(rows, numbers - num_left, journalled, f"{path}: table {name}", problems)
        tables[name] = rows
    trace = RankTrace(
        path=path,
        header=header,
        tables=tables,
        problems=tuple(problems),
        closed_cleanly=is_closed,
        open_collectives=_still_open(content, tables["collectives"]),
    )
    return TraceStream(trace=trace, chunks=left)


def read_attempt(
    attempt: Attempt,
    *,
    progress: Callable[[int, int], None] | None = None,
    most_rows: int = MOST_ROWS,
    tables: Collection[str] = TABLES,
) -> AttemptTraces:
    """Read the traces of all ranks of an attempt.

    Args:
        attempt: names the files.
        progress: called with the number of files read and the number of files, after each.
        most_rows: with more collectives than this, they stay on disk (`hpcpace.trace.stream.StoredTable`).
        tables: the ones to read, by name; the others then have no rows.

    Raises:
        TraceError: no trace can be read.
    """
    files = attempt.trace_files()
    traces: dict[int, RankTrace] = {}
    problems: list[str] = []
    misnamed: list[RankTrace] = []
    read = partial(_trace_or_error, most_rows=most_rows // max(len(files), 1), names=tables)
    # Of many small files most time goes into opening them, which HDF5 does on one core for all threads of a process.
    found_of = map_processes if len(files) >= _LEAST_FOR_PROCESSES else map_threads
    for number, (rank, trace) in enumerate(zip(files, found_of(read, list(files.values())), strict=True), start=1):
        if isinstance(trace, TraceError):
            problems.append(str(trace))
        elif trace.header.rank != rank:
            misnamed.append(trace)
        else:
            traces[rank] = trace
            problems += trace.problems
        if progress is not None:
            progress(number, len(files))
    for trace in misnamed:
        says = f"{trace.path} says that it is rank {trace.header.rank}"
        if trace.header.rank in traces:
            problems.append(f"{says}, and so does {traces[trace.header.rank].path}; it is left out")
        else:
            problems += [says, *trace.problems]
            traces[trace.header.rank] = trace
    if not traces:
        raise TraceError("; ".join([f"no trace can be read in {attempt.trace_dir}", *problems]))
    problems += _world_problems(traces)
    found = [traces[rank] for rank in sorted(traces)]
    if sum(len(trace.tables["collectives"]) for trace in found) <= most_rows:
        found = [_in_memory(trace) for trace in found]
    return AttemptTraces(found, tuple(problems))


def _trace_or_error(path: Path, most_rows: int, names: Collection[str]) -> RankTrace | TraceError:
    try:
        stream = _read(path, most_rows=most_rows, names=names)
        trace = without_implausible(stream.trace)
    except TraceError as error:
        return error
    if stream.chunks is None or not stream.chunks.num_rows:
        return trace
    stored = StoredTable(TraceStream(trace=trace, chunks=stream.chunks))
    return replace(trace, tables={**trace.tables, "collectives": stored})


def _in_memory(trace: RankTrace) -> RankTrace:
    """Return a trace with all rows; some ranks have more collectives than others."""
    table = trace.tables["collectives"]
    if not isinstance(table, StoredTable):
        return trace
    rows = Table({name: table[name] for name in table})
    return without_implausible(replace(trace, tables={**trace.tables, "collectives": rows}))


def world_size_of(traces: Iterable[RankTrace]) -> int:
    """Return the number of ranks that most traces say, of equals the larger.

    One damaged size must not make a million ranks missing.
    """
    sizes = Counter(trace.header.world_size for trace in traces)
    return max(sizes, key=lambda size: (sizes[size], size))


def _world_problems(traces: dict[int, RankTrace]) -> list[str]:
    """Return what the ranks that were read say about the others: sizes that disagree, ranks that are missing."""
    problems = []
    world_size = world_size_of(traces.values())
    for trace in traces.values():
        if trace.header.world_size != world_size:
            problems.append(f"{trace.path} says {trace.header.world_size} ranks, and most others say {world_size}")
    num_missing = world_size - sum(rank < world_size for rank in traces)
    if num_missing:
        missing = (rank for rank in range(world_size) if rank not in traces)
        names = ", ".join(map(str, itertools.islice(missing, _MOST_NAMED)))
        more = f", ... and {num_missing - _MOST_NAMED} more" if num_missing > _MOST_NAMED else ""
        problems.append(f"{num_missing} of {world_size} ranks have no readable trace: {names}{more}")
    return problems


def _container_path(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    if not path.name:
        raise TraceError(f"{path} is a folder: name a rank-NNNNN.h5 of a run")
    return path.with_suffix(".h5") if path.suffix == ".journal" else path


def _read_journal(path: Path, problems: list[str]) -> journal.JournalContent | None:
    try:
        if not path.is_file():
            if os.path.lexists(path):
                problems.append(f"{path} is no plain file; its rows are left out")
            return None
        if path.stat().st_size > _MOST_JOURNAL_BYTES:
            problems.append(f"{path} has {path.stat().st_size} bytes, more than any journal; its rows are left out")
            return None
        content = journal.decode(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}; its rows are left out")
        return None
    except TraceError as error:
        problems.append(str(error))
        return None
    if content.num_left_bytes:
        problems.append(f"{path}: the last {content.num_left_bytes} bytes are a torn or damaged record; left out")
    return content


def _read_container(
    path: Path, problems: list[str], *, most_rows: float, names: Collection[str], has_journal: bool
) -> tuple[TraceHeader, dict[str, Table], bool, TableChunks | None]:
    """Return the header, the sound tables, whether the writer has not closed the file, and the chunks left unread.

    Of more collectives than `most_rows` only the last chunk is read, with which a journal may overlap, if there is one.
    """
    stored: dict[str, Table] = {}
    chunks: dict[str, TableChunks] = {}
    try:
        if not path.is_file():
            raise TraceError(f"no trace file at {path}: name a rank-NNNNN.h5 of a run")
        with _HDF5, open_for_reading(path) as file:
            attributes = file.attrs  # each access to it opens the root group
            values = {name: attributes[name] for name in attributes if name in _HEADER_NAMES}
            header = parse_header({**values, **_group_values(file)}, str(path))
            is_open = is_marked_open(path)
            for name, table in TABLES.items():
                if name not in names:
                    continue
                found = index_chunks(file, table)
                if found is not None:
                    chunks[name] = found
                elif (rows := _read_table(file, table, path, problems, is_open=is_open)) is not None:
                    stored[name] = rows
            descriptor = os.dup(file.id.get_vfd_handle())
        left = None
        if "collectives" in chunks and chunks["collectives"].num_rows > most_rows:
            split = split_last if has_journal else split_all
            left, chunks["collectives"] = split(chunks["collectives"])
        try:
            damaged = _read_chunked(descriptor, chunks, stored)
        finally:
            os.close(descriptor)
        if damaged:
            with _HDF5, open_for_reading(path) as file:
                for name in damaged:
                    left = left if name != "collectives" else None
                    if (rows := _read_table(file, TABLES[name], path, problems, is_open=is_open)) is not None:
                        stored[name] = rows
    except _FOREIGN_ERRORS as error:
        raise TraceError(f"{path} cannot be read as HDF5 ({error}); it is damaged or foreign, leave it out") from error
    return header, stored, is_open, left


def _read_chunked(descriptor: int, chunks: Mapping[str, TableChunks], stored: dict[str, Table]) -> Sequence[str]:
    """Read tables past HDF5 into `stored`; return those that it has to look at."""
    damaged = []
    for name, places in chunks.items():
        try:
            stored[name] = read_chunks(descriptor, places)
        except ForeignChunks:
            damaged.append(name)
    return damaged


def _group_values(file: h5py.File) -> dict[str, Any]:
    values = {}
    for group, name in (("steps", "samples_unit"), ("network", "interfaces")):
        found = file.get(group)
        if isinstance(found, h5py.Group) and name in (attributes := found.attrs):
            values[name] = attributes[name]
    return values


def _read_table(file: h5py.File, table: TableSchema, path: Path, problems: list[str], *, is_open: bool) -> Table | None:
    if table.name not in file:
        if table.required:
            problems.append(f"{path}: table {table.name} is missing")
        return None
    try:
        group = file[table.name]
        dtype = row_dtype(table, has_enqueue=ENQUEUE_COLUMN in group)
        columns = {column: group[column] for column in dtype.names or ()}
        lengths = [_num_rows(column) for column in columns.values()]
        num_rows = min(lengths)
        # In a file that is written, the columns grow one after the other.
        if num_rows < max(lengths) and not is_open:
            problems.append(
                f"{path}: columns of {table.name} hold {num_rows} to {max(lengths)} rows; {num_rows} are read"
            )
        for name, column in columns.items():
            if num_rows * column.dtype.itemsize > _MOST_COMPRESSED * column.id.get_storage_size():
                raise ValueError(f"column {name} claims {num_rows} rows in {column.id.get_storage_size()} bytes")
            if column.dtype.kind not in ("S" if dtype[name].kind == "S" else "iu"):
                raise ValueError(f"column {name} is of type {column.dtype}, not {dtype[name]}")
        rows = np.zeros(num_rows, dtype=dtype)
        for name, column in columns.items():
            rows[name] = column[:num_rows]
    except (*_FOREIGN_ERRORS, zlib.error) as error:
        problems.append(f"{path}: table {table.name} is damaged and left out ({error})")
        return None
    return Table.from_rows(rows)


def _num_rows(column: h5py.Dataset) -> int:
    """Return the number of rows that are really there: a kill may come between a column's length and its chunk."""
    if column.ndim != 1:
        raise ValueError(f"column {column.name} has {column.ndim} dimensions")
    if column.chunks is None:
        return int(column.shape[0])
    return int(min(column.shape[0], column.id.get_num_chunks() * column.chunks[0]))


def _merge(
    stored: Table, numbers: NDArray[np.int64], journalled: NDArray[np.void], place: str, problems: list[str]
) -> Table:
    """Return the stored rows with those behind them that only the journal has.

    The file may be ahead of the journal (killed before the journal was restarted), never behind it in a sound trace.
    """
    is_new = numbers >= len(stored)
    if not is_new.any():
        return stored
    kinds = _kinds(journalled.dtype)
    lacking = [name for name, column in stored.items() if kinds.get(name) != column.dtype]
    if lacking:
        problems.append(f"{place}: the journal lacks {', '.join(lacking)}; its {is_new.sum()} rows are left out")
        return stored
    num_lost = int(numbers[-1]) + 1 - len(stored) - int(is_new.sum())
    if num_lost:
        problems.append(f"{place}: {num_lost} rows behind row {len(stored) - 1} are in neither file nor journal")
    return Table({name: np.concatenate([column, journalled[name][is_new]]) for name, column in stored.items()})


def _kinds(dtype: np.dtype) -> dict[str, np.dtype]:
    return {name: dtype[name] for name in dtype.names or ()}


def _still_open(content: journal.JournalContent | None, collectives: Table) -> Table:
    """Return the journalled open operations that no later row completes."""
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


__all__ = ["AttemptTraces", "RankTrace", "Table", "TraceStream", "read_attempt", "read_trace", "stream_trace"]
