"""Reading of traces: HDF5 file and journal merged, also of a rank that still runs or was killed.

Needs neither torch nor MPI. What is damaged is left out and said so; the rest is read.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcpace.errors import TraceError
from hpcpace.rundir import Attempt
from hpcpace.trace import journal
from hpcpace.trace.container import is_marked_open, open_for_reading
from hpcpace.trace.encoding import ENQUEUE_COLUMN, row_dtype
from hpcpace.trace.header import OtherVersion, parse_header
from hpcpace.trace.schema import TABLES, TableSchema, TraceHeader
from hpcpace.trace.tables import RankTrace, Table

# What h5py and HDF5 raise on files that are damaged or not theirs.
_FOREIGN_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, MemoryError, OverflowError)
# Deflate makes nothing smaller than this; a length beyond it is damage, and reading it would fill the memory.
_MOST_COMPRESSED = 1032
_MOST_NAMED = 16
_OPERATION = ["group", "seq", "op", "peer", "enter_ns"]


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
    path = _container_path(path)
    problems: list[str] = []
    # The journal first: rows only move from it into the file, so what is gone from the one is in the other.
    journal_path = path.with_suffix(".journal")
    content = _read_journal(journal_path, problems)
    try:
        header, stored, is_open = _read_container(path, problems)
    except OtherVersion:
        raise
    except TraceError as error:
        if content is None:
            raise
        problems.append(f"{error} (only its journal is read)")
        header, stored, is_open = content.header, {}, True
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
            rows = np.zeros(0, dtype=row_dtype(table, has_enqueue=has_enqueue))
        if numbers is not None and journalled is not None:
            rows = _merge(rows, numbers, journalled, f"{path}: table {name}", problems)
        tables[name] = Table.from_rows(rows)
    return RankTrace(
        path=path,
        header=header,
        tables=tables,
        problems=tuple(problems),
        closed_cleanly=is_closed,
        open_collectives=_still_open(content, tables["collectives"]),
    )


def read_attempt(attempt: Attempt, *, progress: Callable[[int, int], None] | None = None) -> AttemptTraces:
    """Read the traces of all ranks of an attempt.

    Args:
        attempt: names the files.
        progress: called with the number of files read and the number of files, after each.

    Raises:
        TraceError: no trace can be read.
    """
    files = attempt.trace_files()
    traces: dict[int, RankTrace] = {}
    problems: list[str] = []
    for number, path in enumerate(files.values(), start=1):
        try:
            trace = read_trace(path)
        except TraceError as error:
            problems.append(str(error))
        else:
            rank = trace.header.rank
            if rank in traces:
                problems.append(f"{path} says that it is rank {rank}, and so does {traces[rank].path}; it is left out")
            else:
                traces[rank] = trace
                problems += trace.problems
        if progress is not None:
            progress(number, len(files))
    if not traces:
        raise TraceError("; ".join([f"no trace can be read in {attempt.trace_dir}", *problems]))
    problems += _world_problems(traces)
    return AttemptTraces([traces[rank] for rank in sorted(traces)], tuple(problems))


def _world_problems(traces: dict[int, RankTrace]) -> list[str]:
    """Return what the ranks that were read say about the others: sizes that disagree, ranks that are missing."""
    problems = []
    # One damaged size must not make a million ranks missing: the most frequent counts, and of equals the larger.
    sizes = Counter(trace.header.world_size for trace in traces.values())
    world_size = max(sizes, key=lambda size: (sizes[size], size))
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


def _read_container(path: Path, problems: list[str]) -> tuple[TraceHeader, dict[str, NDArray[np.void]], bool]:
    """Return the header, the tables that are sound, and whether the writer has not closed the file."""
    try:
        if not path.is_file():
            raise TraceError(f"no trace file at {path}: name a rank-NNNNN.h5 of a run")
        with open_for_reading(path) as file:
            values = {item.name: file.attrs[item.name] for item in fields(TraceHeader) if item.name in file.attrs}
            header = parse_header({**values, **_group_values(file)}, str(path))
            is_open = is_marked_open(path)
            stored = {}
            for name, table in TABLES.items():
                rows = _read_table(file, table, path, problems, is_open=is_open)
                if rows is not None:
                    stored[name] = rows
            return header, stored, is_open
    except _FOREIGN_ERRORS as error:
        raise TraceError(f"{path} cannot be read as HDF5 ({error}); it is damaged or foreign, leave it out") from error


def _group_values(file: h5py.File) -> dict[str, Any]:
    values = {}
    for group, name in (("steps", "samples_unit"), ("network", "interfaces")):
        if isinstance(file.get(group), h5py.Group) and name in file[group].attrs:
            values[name] = file[group].attrs[name]
    return values


def _read_table(
    file: h5py.File, table: TableSchema, path: Path, problems: list[str], *, is_open: bool
) -> NDArray[np.void] | None:
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
    return rows


def _num_rows(column: h5py.Dataset) -> int:
    """Return the number of rows that are really there: a kill may come between a column's length and its chunk."""
    if column.ndim != 1:
        raise ValueError(f"column {column.name} has {column.ndim} dimensions")
    if column.chunks is None:
        return int(column.shape[0])
    return int(min(column.shape[0], column.id.get_num_chunks() * column.chunks[0]))


def _merge(
    stored: NDArray[np.void], numbers: NDArray[np.int64], journalled: NDArray[np.void], place: str, problems: list[str]
) -> NDArray[np.void]:
    """Return the stored rows with those behind them that only the journal has.

    The file may be ahead of the journal (killed before the journal was restarted), never behind it in a sound trace.
    """
    is_new = numbers >= len(stored)
    if not is_new.any():
        return stored
    lacking = [name for name, kind in _kinds(stored.dtype).items() if _kinds(journalled.dtype).get(name) != kind]
    if lacking:
        problems.append(f"{place}: the journal lacks {', '.join(lacking)}; its {is_new.sum()} rows are left out")
        return stored
    num_lost = int(numbers[-1]) + 1 - len(stored) - int(is_new.sum())
    if num_lost:
        problems.append(f"{place}: {num_lost} rows behind row {len(stored) - 1} are in neither file nor journal")
    merged = np.zeros(len(stored) + int(is_new.sum()), dtype=stored.dtype)
    merged[: len(stored)] = stored
    for name in stored.dtype.names or ():
        merged[name][len(stored) :] = journalled[name][is_new]
    return merged


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


__all__ = ["AttemptTraces", "RankTrace", "Table", "read_attempt", "read_trace"]
