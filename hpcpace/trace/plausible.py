"""Remove rows with impossible values from a trace before figures are computed, and report them.

A damaged value close to the limits of int64 would overflow in every difference and sum that uses it. Values within
bounds can also be wrong, but that only harms the figures of their own rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.encoding import DEVICE_BEGIN_COLUMN, DEVICE_END_COLUMN
from hpcpace.trace.header import MOST_RANKS
from hpcpace.trace.schema import ExitKind
from hpcpace.trace.tables import RankTrace, Table

MOST_NS = 1 << 60
"""36 years: clocks of hosts count from boot, and differences between clocks are no larger."""
MOST_SIZE = 1 << 42
"""4 TiB in one operation, or as many samples in one step."""
_TIME, _DURATION, _COUNT = (-MOST_NS, MOST_NS), (0, MOST_NS), (0, MOST_NS)
_DEVICE_INTERVAL = {DEVICE_BEGIN_COLUMN: _TIME, DEVICE_END_COLUMN: _TIME}
_BOUNDS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "steps": {"step": (0, 2**31 - 2), "begin_ns": _TIME, "end_ns": _TIME, "samples": (0, MOST_SIZE)} | _DEVICE_INTERVAL,
    "phases": {"begin_ns": _TIME, "end_ns": _TIME} | _DEVICE_INTERVAL,
    "collectives": {
        "bytes": (0, MOST_SIZE),
        "seq": (-1, 2**62),
        "enter_ns": _TIME,
        "exit_ns": _TIME,
        "blocked_ns": _DURATION,
        "enqueue_ns": _TIME,
    },
    "groups": {"rank": (0, MOST_RANKS - 1)},
    "clock": {
        "local_ns": _TIME,
        "offset_ns": _TIME,
        "rtt_ns": _DURATION,
        "halfwidth_ns": _DURATION,
    },
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
