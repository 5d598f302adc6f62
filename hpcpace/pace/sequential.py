"""Confidence bounds for a mean that is checked after each pair, with one error probability for all checks together.

With n values the t statistic is brought to the scale of a normal one (Wallace 1959, "Bounds on normal approximations
to Student's and the chi-square distributions") and compared with one constant for all looks (Pocock 1977, "Group
sequential methods in the design and analysis of clinical trials"), which follows from simulated sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

_NUM_SEQUENCES = 20_000
_SEED = 20260101
# Power with which the smallest detectable effect is detected.
POWER = 0.8


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with an interval that holds at all looks simultaneously.

    Attributes:
        mean: of the values so far.
        low, high: the interval.
        detectable: the smallest true mean that such an interval distinguishes from 0 with a power of 80 %.
        num_values: number of values.
    """

    mean: float
    low: float
    high: float
    detectable: float
    num_values: int

    @property
    def halfwidth(self) -> float:
        """Half of the interval's length."""
        return (self.high - self.low) / 2


def interval(values: Sequence[float], *, first: int, last: int, level: float) -> Interval:
    """Return the mean of some values with the interval of this look.

    Args:
        values: float, (num_values,), at least 2 of them.
        first: number of values at the first look.
        last: number of values at the last one; looks come after each value.
        level: probability that any of the intervals misses the true mean.
    """
    num_values = len(values)
    mean = float(np.mean(values))
    error = float(np.std(values, ddof=1)) / math.sqrt(num_values)
    bound = _t_bound(looks_constant(first, last, level), num_values - 1)
    seen = (bound + NormalDist().inv_cdf(POWER)) * error
    return Interval(
        mean=mean, low=mean - bound * error, high=mean + bound * error, detectable=seen, num_values=num_values
    )


@cache
def looks_constant(first: int, last: int, level: float) -> float:
    """Return the normal deviate that the largest look exceeds with this probability if there is no effect.

    Args:
        first, last: number of values at the first and last look.
        level: that probability, two-sided.
    """
    values = np.random.default_rng(_SEED).standard_normal((_NUM_SEQUENCES, last))
    counts = np.arange(1, last + 1)
    means = np.cumsum(values, axis=1) / counts
    squares = np.cumsum(values**2, axis=1) - counts * means**2
    seen = slice(first - 1, last)
    freedom = counts[seen] - 1
    t_squared = means[:, seen] ** 2 * counts[seen] * freedom / squares[:, seen]
    deviates = (8 * freedom + 1) / (8 * freedom + 3) * np.sqrt(freedom * np.log1p(t_squared / freedom))
    return float(np.quantile(deviates.max(axis=1), 1 - level))


def _t_bound(deviate: float, freedom: int) -> float:
    """Return the t of so many degrees of freedom that corresponds to a normal deviate."""
    scaled = deviate * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(scaled**2 / freedom))
