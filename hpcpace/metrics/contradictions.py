"""Rows of a rank that contradict each other on its own clock and so cannot have been recorded.

A few such rows are damage: whatever uses the table skips them. With more of them, nothing of the rank is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.encoding import DEVICE_BEGIN_COLUMN, DEVICE_END_COLUMN
from hpcpace.trace.schema import ExitKind, Op, Phase

Columns = Mapping[str, NDArray[Any]]

# Steps do not overlap; a writer rounds by less than this share of a step.
_OVERLAP_SHARE = 0.01
_MOST_SHARE, _MOST_ROWS = 0.05, 4


class Contradiction(NamedTuple):
    """Impossible rows of one table.

    Attributes:
        table: its name.
        what: what is wrong with them, worded to follow their number.
        num_bad: how many there are.
        num_rows: rows of the table.
    """

    table: str
    what: str
    num_bad: int
    num_rows: int

    @property
    def is_grave(self) -> bool:
        """Whether there are too many to believe anything of the rank."""
        return self.num_bad > max(_MOST_ROWS, _MOST_SHARE * self.num_rows)

    def __str__(self) -> str:
        return f"{self.num_bad} of {self.num_rows} rows of {self.table} {self.what}"


def contradictions(tables: Mapping[str, Columns]) -> list[Contradiction]:
    """Return what contradicts itself in the tables of a rank.

    Args:
        tables: `steps`, `phases` and `collectives` by name.
    """
    found = [
        Contradiction(name, what, int(bad(tables[name]).sum()), len(tables[name]["step"]))
        for name, checks in _CHECKS.items()
        for what, bad in checks
    ]
    return [one for one in found if one.num_bad]


def collectives_contradict(collectives: Columns) -> tuple[tuple[str, NDArray[np.bool_]], ...]:
    """Return how rows of a table of collectives can contradict themselves, and which do, bool, (num_rows,) each."""
    return tuple((what, bad(collectives)) for what, bad in _CHECKS["collectives"])


def _takes_no_time(steps: Columns) -> NDArray[np.bool_]:
    bad: NDArray[np.bool_] = steps["end_ns"] <= steps["begin_ns"]
    return bad


def _overlaps(steps: Columns) -> NDArray[np.bool_]:
    """Return which steps end after the next one begins, bool, (num_rows,)."""
    begin_ns, end_ns = steps["begin_ns"], steps["end_ns"]
    overlaps = np.zeros(len(begin_ns), np.bool_)
    # The first row of a repeated number counts, as in common_steps.
    _, rows = np.unique(steps["step"], return_index=True)
    rows = rows[end_ns[rows] > begin_ns[rows]]
    if len(rows) > 1:
        tolerance_ns = _OVERLAP_SHARE * np.median(end_ns[rows] - begin_ns[rows])
        overlaps[rows[:-1]] = end_ns[rows[:-1]] - begin_ns[rows[1:]] > tolerance_ns
    return overlaps


def _ends_before_it_begins(phases: Columns) -> NDArray[np.bool_]:
    bad: NDArray[np.bool_] = phases["end_ns"] < phases["begin_ns"]
    return bad


def _ends_before_it_begins_there(rows: Columns) -> NDArray[np.bool_]:
    """Return which rows end on the device before they begin there, bool, (num_rows,); 0 is an unknown time."""
    if DEVICE_BEGIN_COLUMN not in rows:
        return np.zeros(len(rows["begin_ns"]), np.bool_)
    begin_ns, end_ns = rows[DEVICE_BEGIN_COLUMN], rows[DEVICE_END_COLUMN]
    bad: NDArray[np.bool_] = (end_ns < begin_ns) & (end_ns != 0)
    return bad


def _exits_before_it_enters(collectives: Columns) -> NDArray[np.bool_]:
    bad: NDArray[np.bool_] = collectives["exit_ns"] < collectives["enter_ns"]
    bad &= collectives["exit_kind"] != ExitKind.NEVER
    return bad


def _unknown(column: str, largest: int) -> Callable[[Columns], NDArray[np.bool_]]:
    def bad(table: Columns) -> NDArray[np.bool_]:
        unknown: NDArray[np.bool_] = table[column] > largest
        return unknown

    return bad


_CHECKS: Mapping[str, tuple[tuple[str, Callable[[Columns], NDArray[np.bool_]]], ...]] = {
    "steps": (
        ("take no time", _takes_no_time),
        ("end after the next one has begun", _overlaps),
        ("end on the device before they begin there", _ends_before_it_begins_there),
    ),
    "phases": (
        ("end before they begin", _ends_before_it_begins),
        ("end on the device before they begin there", _ends_before_it_begins_there),
        ("are of phases that this version does not know", _unknown("phase", max(Phase))),
    ),
    "collectives": (
        ("exit before they enter", _exits_before_it_enters),
        ("are of operations that this version does not know", _unknown("op", max(Op))),
        ("have ends that this version does not know", _unknown("exit_kind", max(ExitKind))),
    ),
}
