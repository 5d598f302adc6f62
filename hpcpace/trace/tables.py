"""A table of a trace as arrays, and one rank's trace in memory, with no impossible values.

A damaged value close to the limits of int64 would overflow in every difference and sum that uses it. Values within
bounds can also be wrong, but that only harms the figures of their own rank.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.detail import MAX_RANKS
from hpcpace.core.records import dataclass
from hpcpace.trace.schema import (
    DEVICE_BEGIN_COLUMN,
    DEVICE_END_COLUMN,
    OTHER_WITHOUT_GRADIENTS,
    ErrorPart,
    EventKind,
    ExitKind,
    TraceHeader,
)

_NUM_FOUND = re.compile(r"^\d+ steps? ")
"""At the beginning of how steps were found: how many there were when the way was found."""


class Table(Mapping[str, NDArray[Any]]):
    """Columns of equal length, by name; `len()` is the number of rows.

    Args:
        columns: 1-D arrays of one length.
    """

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        self._columns = dict(columns)
        lengths = set(map(len, self._columns.values()))
        if len(lengths) > 1:
            raise ValueError(f"the columns of a table differ in length: {sorted(lengths)}")
        self._num_rows = lengths.pop() if lengths else 0

    @classmethod
    def from_rows(cls, rows: NDArray[np.void]) -> Table:
        """Return the table of a structured array."""
        return cls({column: np.ascontiguousarray(rows[column]) for column in rows.dtype.names or ()})

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self._columns[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return self._num_rows

    def __contains__(self, column: object) -> bool:
        return column in self._columns

    def __repr__(self) -> str:
        return f"Table({self._num_rows} rows: {', '.join(self._columns)})"

    @property
    def size_bytes(self) -> int:
        """The memory that the columns take."""
        return sum(column.nbytes for column in self._columns.values())

    def select(self, mask: NDArray[np.bool_] | NDArray[np.integer[Any]] | slice) -> Table:
        """Return the rows under a mask, of these numbers, or of a slice."""
        return Table({name: column[mask] for name, column in self._columns.items()})

    def different(self, column: str) -> list[Any]:
        """Return the values of a column, each once."""
        return list(np.unique(self[column]).tolist())


class GroupTable(Table):
    """The table `groups` with the texts of each group only once, because thousands of ranks name thousands of members.

    Args:
        table: the table of the file.
    """

    def __init__(self, table: Table) -> None:
        super().__init__({name: table[name] for name in ("id", "rank")})
        numbers = self["id"]
        self._numbers, last = np.unique(numbers[::-1], return_index=True)
        self._texts = {name: table[name][len(numbers) - 1 - last] for name in ("name", "backend")}

    @classmethod
    def of_parts(
        cls, columns: Mapping[str, NDArray[Any]], numbers: NDArray[Any], texts: Mapping[str, NDArray[Any]]
    ) -> GroupTable:
        """Return a table whose groups are known.

        Args:
            columns: `id` and `rank`.
            numbers: the numbers of the groups, ascending.
            texts: `name` and `backend` of each.
        """
        table = cls.__new__(cls)
        Table.__init__(table, columns)
        table._numbers, table._texts = numbers, dict(texts)
        return table

    def __getitem__(self, column: str) -> NDArray[Any]:
        texts = self._texts.get(column) if column not in self._columns else None
        return self._columns[column] if texts is None else texts[np.searchsorted(self._numbers, self["id"])]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._columns, *self._texts))

    def __contains__(self, column: object) -> bool:
        return column in self._columns or column in self._texts

    def select(self, mask: NDArray[np.bool_] | NDArray[np.integer[Any]] | slice) -> Table:
        """Return the rows under a mask, of these numbers, or of a slice."""
        return Table({name: self[name][mask] for name in self})

    def different(self, column: str) -> list[Any]:
        """Return the values of a column, each once."""
        texts = self._texts.get(column)
        return super().different(column) if texts is None else sorted(set(texts.tolist()))

    def share(self, known: dict[bytes, NDArray[Any]]) -> int:
        """Replace columns by equal ones of other ranks, and return the bytes of the columns that are new.

        Args:
            known: columns by their digest; new ones are added.
        """
        num_new = 0
        for name, column in self._columns.items():
            digest = blake2b(column.data, digest_size=16).digest()
            if digest not in known:
                known[digest] = column
                num_new += column.nbytes
            self._columns[name] = known[digest]
        return num_new


def join_tables(tables: Sequence[Table]) -> Table:
    """Return the rows of all tables, at least one and all with the same columns."""
    tables = [table for table in tables if len(table)] or tables[:1]
    if len(tables) == 1:
        return tables[0]
    return Table({name: np.concatenate([table[name] for table in tables]) for name in tables[0]})


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank.

    Attributes:
        tables: every table of the schema; those that the file lacks have no rows.
        problems: what was left out and why, one sentence each; empty for an intact file.
        closed_cleanly: whether the rank ended its recording; otherwise it was killed, or is still running.
        open_collectives: operations that were entered but not completed at the last flush, with `exit_kind` 2.
        first_step: the first step of which rows were kept, where the rank keeps only the last ones; else 0.
    """

    path: Path
    header: TraceHeader
    tables: dict[str, Table]
    problems: tuple[str, ...]
    closed_cleanly: bool
    open_collectives: Table
    first_step: int = 0

    @property
    def start(self) -> tuple[str, int]:
        """The run and the attempt that it is of."""
        return self.header.run_id, self.header.attempt

    @property
    def step_source(self) -> tuple[int, str]:
        """How many updates were out of order, and how steps were found, in words; empty where nothing says it."""
        code, text = self._last_event(EventKind.STEP_SOURCE)
        return code, _NUM_FOUND.sub("", text)

    @property
    def other_is_without_gradients(self) -> bool:
        """Whether rows of phase `other` are calls of modules without gradients, as hpcpace says when a trace ends."""
        return OTHER_WITHOUT_GRADIENTS in self._last_event(EventKind.PHASE_SOURCE)[1]

    def _last_event(self, kind: EventKind) -> tuple[int, str]:
        """Return code and text of the last event of a kind; 0 and nothing without one."""
        events = self.tables.get("events")
        rows = np.flatnonzero(events["kind"] == kind) if events is not None else np.zeros(0, np.int64)
        if events is None or not len(rows):
            return 0, ""
        text = bytes(events["text"][rows[-1]]).decode(errors="replace").rstrip("\0")
        return int(events["code"][rows[-1]]), text

    @property
    def has_no_steps(self) -> bool:
        """Whether hpcpace recorded it to its end, and saw no step; files of other tools name no version."""
        return self.closed_cleanly and bool(self.header.hpcpace_version) and not len(self.tables["steps"])

    @property
    def size_bytes(self) -> int:
        """The memory that its tables take."""
        return sum(table.size_bytes for table in self.tables.values())


MAX_NS = 1 << 60
"""36 years: clocks of hosts count from boot, and differences between clocks are no larger."""
MAX_SIZE = 1 << 42
"""4 TiB in one operation, or as many samples in one step."""
_TIME, _DURATION, _COUNT = (-MAX_NS, MAX_NS), (0, MAX_NS), (0, MAX_NS)
_DEVICE_INTERVAL = {DEVICE_BEGIN_COLUMN: _TIME, DEVICE_END_COLUMN: _TIME}
_BOUNDS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "steps": {"step": (0, 2**31 - 2), "begin_ns": _TIME, "end_ns": _TIME, "samples": (0, MAX_SIZE)} | _DEVICE_INTERVAL,
    "phases": {"begin_ns": _TIME, "end_ns": _TIME} | _DEVICE_INTERVAL,
    "collectives": {
        "bytes": (0, MAX_SIZE),
        "seq": (-1, 2**62),
        "enter_ns": _TIME,
        "exit_ns": _TIME,
        "blocked_ns": _DURATION,
        "enqueue_ns": _TIME,
    },
    "groups": {"rank": (0, MAX_RANKS - 1)},
    "clock": {"local_ns": _TIME, "offset_ns": _TIME, "rtt_ns": _DURATION, "halfwidth_ns": _DURATION},
    "account": {"time_ns": _TIME, "events": _COUNT, "dropped": _COUNT, "cost_ns": _DURATION},
}

CHECKED = frozenset(_BOUNDS)
"""The tables whose rows are checked."""


def without_implausible(trace: RankTrace) -> RankTrace:
    """Return a trace without rows that have impossible values, and with a problem for each table that had any.

    Values without meaning, like the end of an operation that never completed, may be anything.
    """
    tables, problems = dict(trace.tables), list(trace.problems)
    for name in _BOUNDS:
        tables[name] = plausible_rows(tables[name], name, str(trace.path), problems)
    opened = plausible_rows(trace.open_collectives, "collectives", str(trace.path), problems)
    if len(problems) == len(trace.problems):
        return trace
    return dataclasses.replace(trace, tables=tables, problems=tuple(problems), open_collectives=opened)


def plausible_rows(table: Table, name: str, place: str, problems: list[str]) -> Table:
    """Return the rows of a table without those that have impossible values; add a problem if there are any.

    Args:
        table: the rows.
        name: name of the table.
        place: what the problem calls the file.
        problems: list to which the problem is added.
    """
    bad, example = implausible(table, name)
    if not len(bad):
        return table
    problems.append(implausible_line(place, name, int(bad.sum()), len(table), example))
    return table.select(~bad)


def implausible(table: Table, name: str) -> tuple[NDArray[np.bool_], str]:
    """Return which rows of a table have impossible values, bool, (num_rows,), and the first such value with its column.

    Without such rows, an empty array and an empty text.

    Args:
        table: the rows.
        name: name of the table.
    """
    found = {column: _outside(table, column, bounds) for column, bounds in _BOUNDS[name].items()}
    outside = {column: rows for column, rows in found.items() if rows.any()}
    if not outside:
        return np.zeros(0, np.bool_), ""
    bad = np.logical_or.reduce(list(outside.values()))
    first = int(np.flatnonzero(bad)[0])
    column = next(column for column, rows in outside.items() if rows[first])
    return bad, f"{column} {table[column][first]}"


def implausible_line(place: str, name: str, num_bad: int, num_rows: int, example: str) -> str:
    """Return the sentence on rows of a table with impossible values."""
    return (
        f"{place}: {num_bad} of {num_rows} rows of {name} have impossible values, such as {example}; they are left out"
    )


def _outside(table: Table, column: str, bounds: tuple[int, int]) -> NDArray[np.bool_]:
    """Return which rows are out of bounds, bool, (num_rows,), or an empty array if none is."""
    values = table[column] if column in table else np.zeros(0, np.int64)
    # An intact table costs only two reductions.
    if not len(values) or (values.min() >= bounds[0] and values.max() <= bounds[1]):
        return np.zeros(0, np.bool_)
    outside: NDArray[np.bool_] = (values < bounds[0]) | (values > bounds[1])
    if column == "exit_ns":
        outside &= table["exit_kind"] != ExitKind.NEVER
    return outside


_ENDS = (EventKind.EXCEPTION, EventKind.EXIT, EventKind.SIGNAL)
_FOREVER_NS = 1 << 62
_MAX_PIECES = 64  # more than any rank records

STOPPED_FOR_HANG = b"stopped because of a hang"
"""The text of the event of an exit with which hpcpace ends a rank of a job that hangs."""


def last_word(trace: RankTrace) -> int | None:
    """Return the row of the event with which a rank ended; None without one, and of a signal that it survived."""
    events = trace.tables["events"]
    last_ns = trace.tables["steps"]["end_ns"].max(initial=-_FOREVER_NS)
    is_end = np.isin(events["kind"], _ENDS) & (events["time_ns"] >= last_ns)
    if trace.closed_cleanly:
        is_end &= events["kind"] != EventKind.SIGNAL
    rows = np.flatnonzero(is_end)
    return int(rows[events["time_ns"][rows].argmin()]) if len(rows) else None


def end_name(kind: EventKind, code: int, text: bytes) -> str:
    """Return what `RankEnd.what` says of the event with which a rank ended."""
    if kind is EventKind.EXCEPTION:
        return text.rstrip(b"\0").decode(errors="replace") or "an exception"
    return signal_name(code) if kind is EventKind.SIGNAL else str(code)


@dataclass(frozen=True, kw_only=True)
class ErrorText:
    """What is recorded of the error that ended a rank; empty where nothing is.

    Attributes:
        message: the ends of its message.
        place: the innermost line of the job's own code, `FILE:LINE in FUNCTION`.
        frames: the last places that it passed, the innermost last.
        stderr: the last lines that the rank wrote to stderr, where that is a file.
        num_sharing_stderr: how many ranks write to that file, as far as is known; any of them may have written them.
    """

    message: str = ""
    place: str = ""
    frames: tuple[str, ...] = ()
    stderr: tuple[str, ...] = ()
    num_sharing_stderr: int = 0

    @property
    def sentence(self) -> str:
        """Where it was raised and the first line of its message, for the end of a sentence."""
        file, _, line = self.place.partition(" in ")[0].rpartition(":")
        where = f" at {file.rpartition('/')[2]}:{line}" if file else ""
        first = next(iter(self.message.splitlines()), "")
        return f"{where}: {first}" if first else where


NO_ERROR_TEXT = ErrorText()


def error_text(trace: RankTrace, row: int) -> ErrorText:
    """Return what the event with which a rank ended says of the exception, `row` as of `last_word`."""
    events = trace.tables["events"]
    is_own = (events["kind"] == EventKind.ERROR_TEXT) & (events["time_ns"] == events["time_ns"][row])
    rows = np.flatnonzero(is_own)[:_MAX_PIECES]
    texts = {
        part: b"".join(events["text"][rows[events["code"][rows] == part]].tolist()).decode(errors="replace")
        for part in ErrorPart
    }
    return ErrorText(
        message=texts[ErrorPart.MESSAGE],
        place=texts[ErrorPart.PLACE],
        frames=tuple(texts[ErrorPart.FRAMES].splitlines()),
        stderr=tuple(texts[ErrorPart.STDERR].split("\n")) if texts[ErrorPart.STDERR] else (),
    )


def stderr_file(trace: RankTrace) -> bytes:
    """Return the name of the file that stderr of a rank is, the same for all that share it; empty where it is none."""
    events = trace.tables["events"]
    is_name = (events["kind"] == EventKind.ERROR_TEXT) & (events["code"] == ErrorPart.STDERR_FILE)
    return bytes(next(iter(events["text"][is_name]), b"")).rstrip(b"\0")


def signal_name(number: int) -> str:
    """Return the name of a signal, or `signal N` for one that this system does not know."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
