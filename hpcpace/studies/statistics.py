"""Statistics over the runs of a study: scaling, traffic over time, growth with size, and spread over repetitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A quantity over the repetitions of a set-up; the raw values stay with the runs."""

    median: float
    low: float
    high: float
    num: int


def spread(values: Sequence[float | None]) -> Spread | None:
    """Return median, minimum and maximum of the repetitions that have a value; None if none has one."""
    known = np.array([value for value in values if value is not None and np.isfinite(value)])
    if not len(known):
        return None
    return Spread(median=float(np.median(known)), low=float(known.min()), high=float(known.max()), num=len(known))


def scaling_factor(samples_per_s: float, num_ranks: int, samples_per_s_of_one: float) -> float:
    """Return throughput relative to as many single ranks without communication, R_n / (n R_1); 1 is ideal."""
    return samples_per_s / (num_ranks * samples_per_s_of_one)


def counted_between(
    time_ns: NDArray[np.int64], count: NDArray[np.int64], begin_ns: int, end_ns: int
) -> tuple[float, float] | None:
    """Return how much a counter grew within a period and in how many seconds, or None.

    Between two readings the counter is taken to grow evenly. Where the readings cover less than the time, the part
    that they cover counts, and its length is returned; where they cover less than half of it there is no answer.

    Args:
        time_ns: times of the readings, ascending, int64, (num_readings,).
        count: what they read, int64, (num_readings,).
        begin_ns: begin of the time, on the same clock.
        end_ns: its end.
    """
    if len(time_ns) < 2 or end_ns <= begin_ns:
        return None
    first, last = max(begin_ns, int(time_ns[0])), min(end_ns, int(time_ns[-1]))
    if 2 * (last - first) < end_ns - begin_ns:
        return None
    # Relative to the first reading: differences of counters are small compared with what float64 holds exactly.
    grown = np.interp([first - time_ns[0], last - time_ns[0]], time_ns - time_ns[0], count - count[0])
    return float(grown[1] - grown[0]), (last - first) / 1e9


@dataclass(frozen=True, kw_only=True)
class Line:
    """A straight line by least squares: `slope` per unit of x, `r_squared` 1 if all points are on it."""

    slope: float
    intercept: float
    r_squared: float


def straight_line(x: Sequence[float], y: Sequence[float]) -> Line | None:
    """Return the line through points with its coefficient of determination; None for fewer than three points."""
    if len(x) < 3 or len(set(x)) < 2:
        return None
    across, up = np.asarray(x, np.float64), np.asarray(y, np.float64)
    slope, intercept = np.polyfit(across, up, 1)
    total = float(((up - up.mean()) ** 2).sum())
    rest = float(((up - slope * across - intercept) ** 2).sum())
    return Line(slope=float(slope), intercept=float(intercept), r_squared=1 - rest / total if total else 1.0)
