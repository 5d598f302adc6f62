"""Whether runs differ: intervals that know how much runs of the same thing differ, not only how much their steps do.

A run's steps say how well its own median is known. They say nothing about the next run of the same job, which gets
other placements, temperatures and neighbours. That spread comes from repeats, or from a stated prior.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from scipy.special import ndtri, stdtrit

LEAST_REPEATS = 3
LEAST_PLACES = 8
PRIOR_CV = 0.01
LEAST_CV = 0.001
"""Repeats that agree better than this agree by chance, or because their figures are rounded."""
_PRIOR_WEIGHT = 3
_MOST_DEVIATIONS = 3
# Degrees of freedom of the standard deviation without outliers, per place: 0.56 of 8, 0.66 of 16, 0.79 of 64.
_OF_KEPT = 0.6
_OF_NORMAL = 1.4826  # standard deviation of a normal distribution over the median of its deviations


@dataclass(frozen=True, kw_only=True)
class LogDifference:
    """The difference of two groups of runs in the logarithm of a time, which is ln(B / A).

    Attributes:
        value: mean of B less mean of A.
        low, high: its interval.
        from_repeats: whether the spread between runs was measured, and not the prior.
        spread: standard deviation between runs of one group, pooled over both.
    """

    value: float
    low: float
    high: float
    from_repeats: bool
    spread: float

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    @property
    def half_width(self) -> float:
        """Half of the interval: about the smallest difference that would have been seen."""
        return (self.high - self.low) / 2


@dataclass(frozen=True, kw_only=True)
class RunSpread:
    """How much the same thing differs between runs: a standard deviation of logarithms, and its degrees of freedom."""

    value: float
    freedom: float


def spread_of_places(changes: Sequence[float], prior_cv: float) -> RunSpread:
    """Return how much a place differs between runs, from how much the changes of all places scatter.

    Most places change alike from one run to the next, so that their scatter says how much one changes by itself. The
    few that really changed do not count: those beyond three standard deviations, as the median of the deviations has
    it. The prior weighs as much as 8 places; with fewer than those it stands alone. If they scatter by more than the
    prior, it is `spread_beyond_prior`.

    Args:
        changes: ln(B / A) of each place, single runs.
        prior_cv: standard deviation of one run, taken in advance.
    """
    if len(changes) < LEAST_PLACES:
        return RunSpread(value=prior_cv, freedom=inf)
    deviations = np.abs(np.asarray(changes, np.float64) - np.median(changes))
    kept = np.asarray(changes, np.float64)[deviations <= _MOST_DEVIATIONS * _OF_NORMAL * np.median(deviations)]
    of_run = float(kept.std(ddof=1)) / sqrt(2)  # a change is that of two runs
    if of_run > prior_cv:
        return spread_beyond_prior(RunSpread(value=of_run, freedom=_OF_KEPT * (len(changes) - 1)), prior_cv)
    variance = (LEAST_PLACES * prior_cv**2 + len(changes) * of_run**2) / (LEAST_PLACES + len(changes))
    return RunSpread(value=sqrt(variance), freedom=LEAST_PLACES + len(changes))


def spread_of_repeats(groups: Sequence[Sequence[Sequence[float]]]) -> RunSpread:
    """Return how much a place differs between repeats, pooled over places and groups: three repeats of one say little.

    Args:
        groups: of A and of B, the values of each place, one for each run. Without repeats there is no degree of
            freedom.
    """
    values = [np.asarray(place, np.float64) for group in groups for place in group if len(place) > 1]
    freedom = sum(len(place) - 1 for place in values)
    squares = sum(float(((place - place.mean()) ** 2).sum()) for place in values)
    return RunSpread(value=sqrt(squares / freedom) if freedom else 0.0, freedom=freedom)


def spread_beyond_prior(seen: RunSpread, prior_cv: float) -> RunSpread:
    """Return the spread between runs where there are too few repeats: the prior, unless those that there are exceed it.

    Then both count, the prior as much as three differences between runs.

    Args:
        seen: spread of the repeats, with no degree of freedom where there are none.
        prior_cv: standard deviation between runs, taken in advance.
    """
    if not seen.freedom or seen.value <= prior_cv:
        return RunSpread(value=prior_cv, freedom=inf)
    freedom = _PRIOR_WEIGHT + seen.freedom
    variance = (_PRIOR_WEIGHT * prior_cv**2 + seen.freedom * seen.value**2) / freedom
    return RunSpread(value=sqrt(variance), freedom=freedom)


def welch_half_width(variances: Sequence[float], freedoms: Sequence[float], upper: float) -> float:
    """Return half of the interval of a difference of means (Welch 1947).

    Args:
        variances: of the means.
        freedoms: degrees of freedom of each variance; infinite where it is known in advance.
        upper: share of the distribution below the upper end.
    """
    total = sum(variances)
    squares = sum(variance**2 / freedom for variance, freedom in zip(variances, freedoms, strict=True))
    return float(stdtrit(total**2 / squares, upper) if squares else ndtri(upper)) * sqrt(total)


def log_difference(
    before: Sequence[float],
    after: Sequence[float],
    *,
    before_errors: Sequence[float],
    after_errors: Sequence[float],
    prior_cv: float = PRIOR_CV,
    spread: RunSpread | None = None,
    num_compared: int = 1,
    confidence: float = 0.95,
) -> LogDifference:
    """Return by how much a group of runs differs from another one.

    With `LEAST_REPEATS` runs or more a side, Welch's interval (Welch 1947) of the runs' values; the variance of a side
    is at least that of its runs' own errors, which the spread of few runs may miss by chance, and `LEAST_CV`. With
    fewer, both sides have the variance of the prior and of their own errors, and the interval is normal; if the repeats
    that there are differ by more than the prior, it is that of `spread_beyond_prior`, and the interval is Student's.

    Args:
        before, after: logarithms of the runs' times, at least one each.
        before_errors, after_errors: standard errors of them within each run.
        prior_cv: standard deviation between runs, where repeats do not say.
        spread: between runs, where more is known of it than these runs say; it takes the place of both.
        num_compared: how many such differences are looked at; the interval is wider by Bonferroni's rule.
        confidence: of the interval, of all of them together.
    """
    sides = [
        (np.asarray(before, np.float64), np.asarray(before_errors, np.float64)),
        (np.asarray(after, np.float64), np.asarray(after_errors, np.float64)),
    ]
    upper = 1 - (1 - confidence) / (2 * num_compared)
    value = float(sides[1][0].mean() - sides[0][0].mean())
    own = [float((errors**2).mean()) for _, errors in sides]
    has_repeats = min(len(before), len(after)) >= LEAST_REPEATS
    if spread is None and not has_repeats:
        spread = spread_beyond_prior(spread_of_repeats([[before], [after]]), prior_cv)
    if spread is not None:
        variances = [
            (spread.value**2 + of_steps) / len(values) for (values, _), of_steps in zip(sides, own, strict=True)
        ]
        quantile = ndtri(upper) if spread.freedom == inf else stdtrit(spread.freedom, upper)
        half = float(quantile) * sqrt(sum(variances))
        return LogDifference(
            value=value, low=value - half, high=value + half, from_repeats=has_repeats, spread=spread.value
        )
    spreads = [
        max(float(values.var(ddof=1)), of_steps, LEAST_CV**2) for (values, _), of_steps in zip(sides, own, strict=True)
    ]
    variances = [spread / len(values) for spread, (values, _) in zip(spreads, sides, strict=True)]
    freedoms = [len(values) - 1 for values, _ in sides]
    half = welch_half_width(variances, freedoms, upper)
    pooled = sqrt(sum(s * f for s, f in zip(spreads, freedoms, strict=True)) / sum(freedoms))
    return LogDifference(value=value, low=value - half, high=value + half, from_repeats=True, spread=pooled)
