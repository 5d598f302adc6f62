"""Reading of traces: HDF5 file and journal merged, also of a rank that still runs or was killed.

Needs neither torch nor MPI. What is damaged is left out and said so; the rest is read.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcpace.errors import TraceError
from hpcpace.rundir import Attempt
from hpcpace.trace import journal
from hpcpace.trace.encoding import ENQUEUE_COLUMN, row_dtype
from hpcpace.trace.header import OtherVersion, parse_header
from hpcpace.trace.schema import TABLES, TableSchema, TraceHeader
from hpcpace.trace.tables import RankTrace, Table

# What h5py and HDF5 raise on files that are damaged or not theirs.
_FOREIGN_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, MemoryError, OverflowError)
_OPERATION = ["group", "seq", "op", "peer", "enter_ns"]


@dataclass(frozen=True)
class AttemptTraces:
    """The traces of one attempt, by rank, and what is missing or was left out of it."""

    traces: list[RankTrace]
    problems: tuple[str, ...]


def read_trace(path: str | os.PathLike[str]) -> RankTrace:
    """Read the trace file of a rank together with its journal.

    Args:
        path: the HDF5 file; it may be missing where a journal stands beside it.

    Raises:
        TraceError: neither can be read, or they have another major version of the format.
    """
    path = Path(path)
    problems: list[str] = []
    # The journal first: rows only move from it into the file, so what is gone from the one is in the other.
    journal_path = path.with_suffix(".journal")
    content = _read_journal(journal_path, problems)
    try:
        header, stored = _read_container(path, problems)
    except OtherVersion:
        raise
    except TraceError as error:
        if content is None:
            raise
        problems.append(f"{error} (only its journal is read)")
        header, stored = content.header, {}
    if content is not None and _identity(content.header) != _identity(header):
        problems.append(f"{journal_path} belongs to another run, attempt or rank; it is left out")
        content = None
    tables = {}
    for name, table in TABLES.items():
        rows = stored.get(name, np.zeros(0, dtype=table.dtype))
        if content is not None and name in content.rows:
            rows = _merge(rows, *content.rows[name], f"{path}: table {name}", problems)
        tables[name] = Table.from_rows(rows)
    return RankTrace(
        path=path,
        header=header,
        tables=tables,
        problems=tuple(problems),
        closed_cleanly=bool(stored) and not journal_path.exists(),
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
    world_size = max(trace.header.world_size for trace in traces.values())
    missing = sorted(set(range(world_size)) - set(traces))
    if missing:
        problems.append(f"{len(missing)} of {world_size} ranks have no readable trace: {_ranks(missing)}")
    return AttemptTraces([traces[rank] for rank in sorted(traces)], tuple(problems))


def _read_journal(path: Path, problems: list[str]) -> journal.JournalContent | None:
    try:
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


def _read_container(path: Path, problems: list[str]) -> tuple[TraceHeader, dict[str, NDArray[np.void]]]:
    if not path.is_file():
        raise TraceError(f"no trace file at {path}: name a rank-NNNNN.h5 of a run")
    try:
        with h5py.File(path, "r", swmr=True, locking=False) as file:
            values = dict(file.attrs)
            header = parse_header({**values, **_group_values(file)}, str(path))
            stored = {}
            for name, table in TABLES.items():
                rows = _read_table(file, table, path, problems)
                if rows is not None:
                    stored[name] = rows
            return header, stored
    except _FOREIGN_ERRORS as error:
        raise TraceError(f"{path} cannot be read as HDF5 ({error}); it is damaged or foreign, leave it out") from error


def _group_values(file: h5py.File) -> dict[str, Any]:
    values = {}
    for group, name in (("steps", "samples_unit"), ("network", "interfaces")):
        if isinstance(file.get(group), h5py.Group) and name in file[group].attrs:
            values[name] = file[group].attrs[name]
    return values


def _read_table(file: h5py.File, table: TableSchema, path: Path, problems: list[str]) -> NDArray[np.void] | None:
    if table.name not in file:
        if table.required:
            problems.append(f"{path}: table {table.name} is missing")
        return None
    try:
        group = file[table.name]
        dtype = row_dtype(table, has_enqueue=ENQUEUE_COLUMN in group)
        columns = {column: group[column] for column in dtype.names or ()}
        num_rows = min(_num_rows(column) for column in columns.values())
        rows = np.zeros(num_rows, dtype=dtype)
        for name, column in columns.items():
            if column.dtype.kind not in ("S" if dtype[name].kind == "S" else "iu"):
                raise ValueError(f"column {name} is of type {column.dtype}, not {dtype[name]}")
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
    """Return the stored rows with the journal's behind them; where both have a row, the journal's is taken."""
    if not len(numbers):
        return stored
    if set(stored.dtype.names or ()) - set(journalled.dtype.names or ()) and len(stored):
        problems.append(f"{place}: the journal lacks columns of the file; its rows are left out")
        return stored
    known = {*(stored.dtype.names or ()), ENQUEUE_COLUMN}
    names = [name for name in journalled.dtype.names or () if name in known]
    dtype = np.dtype([(name, journalled.dtype[name]) for name in names])
    first = int(numbers[0])
    if first > len(stored):
        problems.append(f"{place}: rows {len(stored)} to {first - 1} are in neither file nor journal")
    merged = np.zeros(min(first, len(stored)) + len(numbers), dtype=dtype)
    begin = len(merged) - len(numbers)
    for name in names:
        if name in (stored.dtype.names or ()):
            merged[name][:begin] = stored[name][:begin]
        merged[name][begin:] = journalled[name]
    return merged


def _still_open(content: journal.JournalContent | None, collectives: Table) -> Table:
    """Return the journalled open operations that no later row completes."""
    if content is None or content.open_rows is None or not len(content.open_rows):
        return Table({name: np.zeros(0, dtype=column.dtype) for name, column in collectives.items()})
    rows = content.open_rows
    near = np.isin(collectives["enter_ns"], rows["enter_ns"])
    completed = set(zip(*(collectives[name][near].tolist() for name in _OPERATION), strict=True))
    keys = list(zip(*(rows[name].tolist() for name in _OPERATION), strict=True))
    last = {key: index for index, key in enumerate(keys) if key not in completed}
    return Table.from_rows(rows[sorted(last.values())])


def _identity(header: TraceHeader) -> tuple[Any, ...]:
    return header.run_id, header.attempt, header.rank


def _ranks(ranks: list[int], most: int = 16) -> str:
    names = ", ".join(map(str, ranks[:most]))
    return names if len(ranks) <= most else f"{names}, ... and {len(ranks) - most} more"


__all__ = ["AttemptTraces", "RankTrace", "Table", "read_attempt", "read_trace"]
