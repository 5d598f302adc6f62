"""Records of another tool as a run directory, with a run.json that names the source.

Nothing is made up: what a tool did not record is listed as unknown, and reports show that list.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace import __version__
from hpcpace.core.errors import TraceError, UsageError
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.runs.measured import DAY_NS, is_to_come
from hpcpace.trace.schema import TABLES, TraceHeader, round_times, row_dtype
from hpcpace.trace.writer import TraceWriter

Rows = NDArray[np.void]
SCHEMA = "hpcpace-run/1"
_FIRST_DATE_NS = 40 * 365 * DAY_NS  # 2009, before any of these tools
UNKNOWN_HOST = "unknown"
UNKNOWN_GROUP = 65_535
"""The group of operations whose process group is not known: a number that the table `groups` does not have."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the traces of a run come from.

    Attributes:
        tool: the tool that recorded them, and its version where it says one.
        files: what was read: name and size in bytes.
        unknown: what it did not record, a phrase each.
        notes: how the rest was taken, a sentence each.
        begun_unix_ns: when the first event was; 0 where the tool does not say.
    """

    tool: str
    files: Sequence[tuple[str, int]]
    unknown: Sequence[str] = ()
    notes: Sequence[str] = ()
    begun_unix_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class ImportedRank:
    """What is known of a rank: header without what is the same for all, and rows by table, of the types of a trace."""

    header: TraceHeader
    tables: Mapping[str, Rows]
    device_tables: frozenset[str] = field(default=frozenset())


@dataclass(frozen=True, kw_only=True)
class Import:
    """What was read of another tool.

    Attributes:
        source: where it comes from.
        ranks: the ranks, ascending.
        problems: a sentence for each file that was left out, or cannot be used as it should.
    """

    source: Source
    ranks: Sequence[ImportedRank]
    problems: Sequence[str] = ()

    @property
    def num_rows(self) -> int:
        """Rows of all tables of all ranks."""
        return sum(len(rows) for rank in self.ranks for rows in rank.tables.values())

    @property
    def num_steps(self) -> int:
        """The most steps that a rank has."""
        return max((len(rank.tables.get("steps", ())) for rank in self.ranks), default=0)


def rows_of(table: str, *, has_device: bool = False, **columns: object) -> Rows:
    """Return rows of a table of a trace from its columns; a column that is not given is 0.

    Args:
        table: its name.
        has_device: whether it has the columns of ranks with a device.
        columns: arrays, (num_rows,), or one value for all rows; at least one is an array.

    Raises:
        TraceError: a number is not one that the column can hold.
    """
    length = max(len(values) for values in columns.values() if isinstance(values, (np.ndarray, list)))
    rows = np.zeros(length, row_dtype(TABLES[table], has_device=has_device))
    for name, values in columns.items():
        _check_numbers(f"{table}.{name}", np.asarray(values), rows.dtype[name])
        rows[name] = values
    return rows


def group_rows(groups: Sequence[tuple[str, Sequence[int] | NDArray[np.int64]]], backend: str) -> Rows:
    """Return the table `groups` of process groups with a name and members, whose number is their place."""
    rows = [
        rows_of("groups", id=number, rank=np.array(members), name=name.encode(), backend=backend.encode()[:16])
        for number, (name, members) in enumerate(groups)
    ]
    return np.concatenate([rows_of("groups", id=np.zeros(0)), *rows])


def headers_of(hosts: Mapping[int, tuple[str, str]], world_size: int) -> list[TraceHeader]:
    """Return the headers of ranks, ascending, without the name of their run.

    Args:
        hosts: by rank, the host, and a key that is the same for ranks with one clock.
        world_size: of the job.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, (host, _) in hosts.items():
        ranks_of.setdefault(host, []).append(rank)
    found = [
        TraceHeader(
            run_id="",
            attempt=0,
            rank=rank,
            world_size=world_size,
            local_rank=place,
            local_size=len(ranks),
            node=node,
            host=host,
            host_key=hosts[rank][1],
        )
        for node, (host, ranks) in enumerate(ranks_of.items())
        for place, rank in enumerate(ranks)
    ]
    return sorted(found, key=lambda header: header.rank)


def _check_numbers(column: str, values: NDArray[Any], dtype: np.dtype) -> None:
    """Refuse integers that a column cannot hold: NumPy cuts those of arrays to size."""
    if values.dtype.kind not in "iu" or not values.size or np.can_cast(values.dtype, dtype):
        return
    limits = np.iinfo(dtype)
    for value in (int(values.min()), int(values.max())):
        if not limits.min <= value <= limits.max:
            raise TraceError(f"a trace cannot hold {value} in {column}: {limits.min} to {limits.max}; is it damaged?")


def date_of(unix_ns: int) -> int:
    """Return a time that may be a date, or 0 where it is none: clocks of tools may count from anywhere."""
    return unix_ns if unix_ns >= _FIRST_DATE_NS and not is_to_come(unix_ns) else 0


def check_target(path: Path) -> None:
    """Refuse a run directory that exists.

    Raises:
        UsageError: something is there.
    """
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} exists, and nothing is overwritten: choose another folder with --run-dir")


def write_run(path: Path, found: Import) -> Attempt:
    """Write a run directory with one attempt.

    Args:
        path: the new folder.
        found: what was read.

    Raises:
        UsageError: the folder exists.
        OSError: it cannot be written.
    """
    check_target(path)
    attempt = RunDirectory(path).new_attempt()
    hosts = []
    for one in found.ranks:
        header = replace(one.header, run_id=path.name, attempt=attempt.number, hpcpace_version=__version__)
        _write_trace(attempt.trace_file(header.rank), header, one)
        hosts.append({"rank": header.rank, "host": header.host, "node": header.node, "pid": 0})
    attempt.write_json(attempt.run_json, _record(path.name, found.source, hosts))
    return attempt


def _write_trace(path: Path, header: TraceHeader, one: ImportedRank) -> None:
    writer = TraceWriter(path, header, device_tables=one.device_tables)
    num_rows = sum(map(len, one.tables.values()))
    writer.add("account", rows_of("account", time_ns=[_last_ns(one)], events=num_rows))
    for table, rows in one.tables.items():
        round_times(table, rows)
        writer.add(table, rows)
    writer.close()


def _last_ns(one: ImportedRank) -> int:
    ends = [one.tables[table]["end_ns"] for table in ("steps", "phases") if len(one.tables.get(table, ()))]
    return int(max((end.max() for end in ends), default=0))


def _record(name: str, source: Source, hosts: list[dict[str, object]]) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "name": name,
        "created_unix_ns": source.begun_unix_ns or time.time_ns(),
        "ranks": hosts,
        "versions": {"hpcpace": __version__, "python": platform.python_version()},
        "imported": {
            "tool": source.tool,
            "files": [{"name": name, "bytes": size} for name, size in source.files],
            "unknown": list(source.unknown),
            "notes": list(source.notes),
        },
    }
