"""Whether what was recorded can have happened: rows of a rank that contradict each other, and counted steps.

Contradictions are found on a rank's own clock. A few such rows are damage: whatever uses the table skips them. With
more of them, nothing of the rank is believed.

Optimizers that step one after the other, or the two halves of a GAN, may have been counted as a step each. Then steps
alternate between lengths on all ranks, or some are far shorter than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats
from hpcpace.metrics.phases import BUSY, OWN_WORK
from hpcpace.metrics.special import lower_median
from hpcpace.trace.schema import DEVICE_BEGIN_COLUMN, DEVICE_END_COLUMN, ExitKind, Op, Phase

Columns = Mapping[str, NDArray[Any]]

_OVERLAP_SHARE = 0.01  # format: of a step, by less of which a writer rounds; steps do not overlap
_ENDS = (0.1, 0.9)  # statistics: quantiles that single steps do not move
_UPPER_QUARTILE = 0.75  # statistics: length of steps, of which most may be short


@dataclass(frozen=True, kw_only=True)
class DamageThresholds(Thresholds, topic="credible"):
    """When so many rows contradict each other that nothing of a rank is believed."""

    max_damaged_rows: int = number(4, "events")
    """Rows of a table that may be damaged: they are skipped."""
    max_damaged_share: float = number(0.05, "share")
    """Share of the rows of a large table that may be damaged, likewise."""


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

    def is_grave(self, limits: DamageThresholds) -> bool:
        """Return whether there are too many to believe anything of the rank."""
        return self.num_bad > max(limits.max_damaged_rows, limits.max_damaged_share * self.num_rows)

    def __str__(self) -> str:
        return f"{self.num_bad} of {self.num_rows} rows of {self.table} {self.what}"


def contradictions(tables: Mapping[str, Columns]) -> list[Contradiction]:
    """Return what contradicts itself in the tables of a rank.

    Args:
        tables: `steps`, `phases` and `collectives` by name.
    """
    found = [
        Contradiction(name, what, int(np.count_nonzero(bad(tables[name]))), len(tables[name]["step"]))
        for name, checks in _CHECKS.items()
        for what, bad in checks
    ]
    return [one for one in found if one.num_bad]


def collectives_contradict(collectives: Columns) -> tuple[tuple[str, Bools], ...]:
    """Return how rows of a table of collectives can contradict themselves, and which do, bool, (num_rows,) each."""
    return tuple((what, bad(collectives)) for what, bad in _CHECKS["collectives"])


def _overlaps(steps: Columns) -> Bools:
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


def _ends_before_it_begins_there(rows: Columns) -> Bools:
    """Return which rows end on the device before they begin there, bool, (num_rows,); 0 is an unknown time."""
    if DEVICE_BEGIN_COLUMN not in rows:
        return np.zeros(len(rows["begin_ns"]), np.bool_)
    begin_ns, end_ns = rows[DEVICE_BEGIN_COLUMN], rows[DEVICE_END_COLUMN]
    return np.asarray((end_ns < begin_ns) & (end_ns != 0))


_CHECKS: Mapping[str, tuple[tuple[str, Callable[[Columns], Bools]], ...]] = {
    "steps": (
        ("take no time", lambda steps: steps["end_ns"] <= steps["begin_ns"]),
        ("end after the next one has begun", _overlaps),
        ("end on the device before they begin there", _ends_before_it_begins_there),
    ),
    "phases": (
        ("end before they begin", lambda phases: phases["end_ns"] < phases["begin_ns"]),
        ("end on the device before they begin there", _ends_before_it_begins_there),
        ("are of phases that this version does not know", lambda phases: phases["phase"] > max(Phase)),
    ),
    "collectives": (
        (
            "exit before they enter",
            lambda rows: (rows["exit_ns"] < rows["enter_ns"]) & (rows["exit_kind"] != ExitKind.NEVER),
        ),
        ("are of operations that this version does not know", lambda rows: rows["op"] > max(Op)),
        ("have ends that this version does not know", lambda rows: rows["exit_kind"] > max(ExitKind)),
    ),
}


@dataclass(frozen=True, kw_only=True)
class CountThresholds(Thresholds, topic="steps"):
    """When what was counted as steps may be parts of steps."""

    max_period: int = number(8, "steps")
    """Steps after which lengths may repeat: longer patterns are those of evaluations."""
    min_cycles: int = number(6, "events", at_least=1)
    """Repetitions, fewer of which may be chance."""
    min_length_ratio: float = number(1.5, "times", at_least=1.01)
    """Computation of long steps over that of short ones: work varies by less."""
    min_agreement: float = number(0.95, "share")
    """Share of the steps that must be as long as those a period before."""
    min_busy_share: float = number(0.2, "share")
    """Share of own work in phases of computation from which these alone are compared."""
    short_share: float = number(0.2, "share")
    """Part of the usual time that short steps take at most."""
    min_short: int = number(3, "steps")
    """Short steps, fewer of which do not matter."""
    min_short_share: float = number(0.02, "share")
    """Share of the steps that must be short to matter."""


@dataclass(frozen=True, kw_only=True)
class Alternation:
    """Steps that alternate between two lengths on all ranks.

    Attributes:
        period: steps after which the pattern repeats, from 2.
        short_ns, long_ns: median length of short and of long steps.
        num_short: short steps in a period.
    """

    period: int
    short_ns: float
    long_ns: float
    num_short: int


def alternation(parts_ns: Floats, length_ns: Floats, limits: CountThresholds = CountThresholds()) -> Alternation | None:
    """Return how steps alternate on all ranks; None if they do not.

    What is compared is the computation of a step where phases show it, own work otherwise, as the lower median over
    ranks: so neither an evaluation every few steps nor a single rank counts as a pattern, not even one of two.

    Args:
        parts_ns: the parts of each step, (num_ranks, num_steps, num_parts).
        length_ns: length of the steps, (num_ranks, num_steps).
        limits: when a pattern is one.
    """
    num_steps = length_ns.shape[1]
    if num_steps < 2 * limits.min_cycles:
        return None
    work_ns, busy_ns = (lower_median(parts_ns[:, :, list(parts)].sum(axis=2)) for parts in (OWN_WORK, BUSY))
    core_ns = busy_ns if busy_ns.sum() >= limits.min_busy_share * work_ns.sum() else work_ns
    low_ns, high_ns = np.quantile(core_ns, _ENDS)
    if high_ns < limits.min_length_ratio * max(low_ns, 1.0):
        return None
    is_long = core_ns > np.sqrt(max(low_ns, 1.0) * high_ns)
    for period in range(2, min(limits.max_period, num_steps // limits.min_cycles) + 1):
        if (is_long[period:] == is_long[:-period]).mean() >= limits.min_agreement:
            typical_ns = np.median(length_ns, axis=0)
            short_ns, long_ns = float(np.median(typical_ns[~is_long])), float(np.median(typical_ns[is_long]))
            num_short = round(period * float((~is_long).mean()))
            return Alternation(period=period, short_ns=short_ns, long_ns=long_ns, num_short=num_short)
    return None


def num_far_shorter(length_ns: Floats, limits: CountThresholds) -> int:
    """Return how many steps take far less than the usual time on all ranks; 0 if they are too few to matter.

    Args:
        length_ns: length of the steps, (num_ranks, num_steps).
        limits: which are far shorter, and how many matter.
    """
    usual_ns = np.quantile(length_ns, _UPPER_QUARTILE, axis=1, keepdims=True)
    num_short = int((length_ns < limits.short_share * usual_ns).all(axis=0).sum())
    return num_short if num_short >= max(limits.min_short, limits.min_short_share * length_ns.shape[1]) else 0
