"""Whether runs differ, two groups of them or a series, by intervals that know how much runs of the same thing differ.

A run's steps say how well its own median is known. They say nothing about the next run of the same job, which gets
other placements, temperatures and neighbours. That spread comes from repeats, or from a stated prior.

In a series the level changes for good, drifts, or single runs are off. Penalised least squares on logarithms with a
bounded loss, so that a run that is off costs the same however far it is off, and does not pull the level (Fearnhead &
Rigaill 2019, "Changepoint detection in the presence of outliers"). The optimum over a grid of levels is found by
dynamic programming (as of Potts' functional: Winkler & Liebscher 2002).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import pairwise
from math import inf, sqrt

import numpy as np

from hpcpace.core.change import TimeChange
from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.special import NORMAL_MAD, bdtrc, ndtri, stdtr, stdtrit

MIN_REPEATS = 3  # statistics: runs a side that say by themselves how much runs differ
MIN_PLACES = 8  # statistics: places that say it, and as many as the prior weighs
PRIOR_CV = 0.01  # statistics: the prior of `hpcpace compare --run-cv`
MIN_CV = 0.001
"""Statistics: repeats that agree better than this agree by chance, or because their figures are rounded."""
_PRIOR_WEIGHT = 3  # statistics: of the prior, in differences between runs
_MAX_DEVIATIONS = 3  # statistics: standard deviations beyond which a place really changed
_CONFIDENCE = 0.95  # statistics: of an interval
# statistics: freedom of the standard deviation without outliers, per place: 0.56 of 8, 0.66 of 16, 0.79 of 64
_OF_KEPT = 0.6


@dataclass(frozen=True, kw_only=True)
class LogDifference(TimeChange):
    """The difference of two groups of runs in a time, ln(B / A), with its interval.

    Attributes:
        from_repeats: whether the spread between runs was measured, and not the prior.
        spread: standard deviation between runs of one group, pooled over both.
    """

    from_repeats: bool
    spread: float


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
    if len(changes) < MIN_PLACES:
        return RunSpread(value=prior_cv, freedom=inf)
    deviations = np.abs(np.asarray(changes, np.float64) - np.median(changes))
    kept = np.asarray(changes, np.float64)[deviations <= _MAX_DEVIATIONS * NORMAL_MAD * np.median(deviations)]
    of_run = float(kept.std(ddof=1)) / sqrt(2)  # a change is that of two runs
    if of_run > prior_cv:
        return spread_beyond_prior(RunSpread(value=of_run, freedom=_OF_KEPT * (len(changes) - 1)), prior_cv)
    variance = (MIN_PLACES * prior_cv**2 + len(changes) * of_run**2) / (MIN_PLACES + len(changes))
    return RunSpread(value=sqrt(variance), freedom=MIN_PLACES + len(changes))


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
    confidence: float = _CONFIDENCE,
) -> LogDifference:
    """Return by how much a group of runs differs from another one.

    With `MIN_REPEATS` runs or more a side, Welch's interval (Welch 1947) of the runs' values; the variance of a side
    is at least that of its runs' own errors, which the spread of few runs may miss by chance, and `MIN_CV`. With
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
    values = [np.asarray(side, np.float64) for side in (before, after)]
    own = [float((np.asarray(errors, np.float64) ** 2).mean()) for errors in (before_errors, after_errors)]
    upper = 1 - (1 - confidence) / (2 * num_compared)
    value = float(values[1].mean() - values[0].mean())
    has_repeats = min(len(before), len(after)) >= MIN_REPEATS
    if spread is None and not has_repeats:
        spread = spread_beyond_prior(spread_of_repeats([[before], [after]]), prior_cv)
    if spread is not None:
        pooled = spread.value
        variances = [(pooled**2 + of_steps) / len(side) for side, of_steps in zip(values, own, strict=True)]
        quantile = ndtri(upper) if spread.freedom == inf else stdtrit(spread.freedom, upper)
        half = float(quantile) * sqrt(sum(variances))
    else:
        of_runs = [float(side.var(ddof=1)) for side in values]
        spreads = [max(*both, MIN_CV**2) for both in zip(of_runs, own, strict=True)]
        freedoms = [len(side) - 1 for side in values]
        half = welch_half_width([s / len(side) for s, side in zip(spreads, values, strict=True)], freedoms, upper)
        pooled = sqrt(sum(s * f for s, f in zip(spreads, freedoms, strict=True)) / sum(freedoms))
    return LogDifference(value=value, low=value - half, high=value + half, from_repeats=has_repeats, spread=pooled)


NO_SPREAD = RunSpread(value=0.0, freedom=0.0)
"""Nothing is known of the spread but what a series says itself."""
_MAX_APART = 5  # statistics: places between runs whose difference counts for the spread
_RUNS_PER_PLACE = 8  # statistics: so that a change of level is between few pairs of them
_LEVELS_PER_SPREAD = 2
_MAX_LEVELS = 400  # speed: levels that are tried
_LINE_TURNS = 5  # speed: of a line, which hardly moves after the second one
_CHANGE_COST, _LONG_COST = 1.05, 3  # statistics: of a change in runs that are off, and in long series per log of runs


@dataclass(frozen=True, kw_only=True)
class SeriesThresholds(Thresholds, topic="history"):
    """When a series of runs has changed."""

    min_runs: int = number(3, "runs", at_least=2)
    """Runs at a level: fewer may be off for once."""
    min_deviations: float = number(3.0, "standard errors")
    """Standard deviations of a run, which a change must exceed, and within which runs are of one level."""
    min_spread: float = number(0.005, "share", at_least=1e-6)
    """Standard deviation of a run at least: runs differ by half a percent, however alike a few of them are."""
    off_level: float = number(0.05, "probability")
    """Chance that any run of a series is named as off though it is not."""
    level_chance: float = number(0.01, "probability")
    """Chance that two levels differ as much though nothing changed, over all runs and series."""
    row_chance: float = number(0.02, "probability")
    """Expected number of places where runs that are off follow each other by chance, up to which they are a level."""
    drift_level: float = number(0.01, "probability")
    """Chance that each half of a series rises or falls as much though it does not drift, over all series."""
    min_drift_runs: int = number(12, "runs", at_least=4)
    """Runs, fewer of which do not show a drift."""


class Duration(StrEnum):
    """For how long a series has changed."""

    LASTING = "lasting"
    RECENT = "recent"
    ONE_OFF = "one-off"
    DRIFT = "drift"


@dataclass(frozen=True, kw_only=True)
class LevelChange:
    """A change of level.

    Attributes:
        first, last: positions of the first and the last run at the new level.
        before, after: medians of the logarithms at the level before and at the new one.
        duration: lasting with enough on both sides; recent with fewer at the end of the series, which may turn
            out to be either; one-off if the series went back. Where runs were at the new level for once before, more
            of them are needed. A drift goes from `before` at the first run to `after` at the last one.
        deviations: size of the change in standard deviations of a run.
        num_alike: runs of the level before that were off for once and at the new level.
    """

    first: int
    last: int
    before: float
    after: float
    duration: Duration
    deviations: float
    num_alike: int = 0

    @property
    def size(self) -> float:
        """The change of the logarithm."""
        return self.after - self.before

    @property
    def num_runs(self) -> int:
        """Runs at the new level, until the next lasting change."""
        return self.last - self.first + 1


def level_changes(
    values: Floats, num_series: int = 1, common: RunSpread = NO_SPREAD, limits: SeriesThresholds = SeriesThresholds()
) -> list[LevelChange]:
    """Return the changes of a series, in order; none of fewer than 4 runs.

    Nothing is said of a few runs at the begin that differ from all later ones: there is no level
    before them to which they could be compared.

    Args:
        values: logarithms, in the order of the runs, float64, (num_runs,).
        num_series: how many are looked at together, each of which may differ by chance.
        common: spread of a run in these, which few runs of one of them know badly.
        limits: when it changed.
    """
    if len(values) <= limits.min_runs:
        return []
    spread = run_spread(values, limits)
    stretches = _stretches(values, spread, limits)
    steps = _steps(values, stretches, spread, num_series, common, limits)
    line = _line(values, spread, limits)
    if line is None or not _is_drift(values, line, stretches, spread, num_series, limits):
        return steps
    rest = _steps(values - line, _stretches(values - line, spread, limits), spread, num_series, common, limits)
    if any(change.duration is Duration.LASTING for change in steps) and any(
        change.duration is Duration.LASTING for change in rest
    ):
        return steps  # a line does not explain them either
    drift = _change(0, len(values) - 1, float(line[0]), float(line[-1]), Duration.DRIFT, spread)
    off = (
        replace(
            change, before=change.before + float(line[change.first]), after=change.after + float(line[change.first])
        )
        for change in rest
        if change.duration is not Duration.LASTING
    )
    return [drift, *off]


def _steps(
    values: Floats,
    stretches: list[tuple[int, int]],
    spread: float,
    num_series: int,
    common: RunSpread,
    limits: SeriesThresholds,
) -> list[LevelChange]:
    """Return the changes between levels, and the runs that are off from theirs, in order."""
    whole = [stretch for stretch in stretches if stretch[1] - stretch[0] >= limits.min_runs]
    if not whole:
        return []
    levels = {stretch: float(np.median(values[slice(*stretch)])) for stretch in stretches}
    whole = _without_chance(values, whole, levels, spread, limits)
    found: list[LevelChange] = []
    own = np.full(len(values), np.nan)
    for before, (first, stop) in zip([None, *whole[:-1]], whole, strict=True):
        level = levels[first, stop]
        if (
            before is not None
            and abs(level - levels[before]) >= limits.min_deviations * spread
            and _levels_differ(values, before, (first, stop), spread, num_series, common, limits)
        ):
            found.append(_change(first, stop - 1, levels[before], level, Duration.LASTING, spread))
        own[first:] = level  # the next whole stretch begins behind short ones, which are off from this one
    sides = _off_sides(values - own, spread, num_series, limits)
    for (first, stop), after in zip(whole, [*whole[1:], (len(values), len(values))], strict=True):
        found += _off(values, sides, first, after[0], levels[first, stop], spread, limits)
    return sorted(found, key=lambda change: change.first)


def _levels_differ(
    values: Floats,
    before: tuple[int, int],
    after: tuple[int, int],
    spread: float,
    num_series: int,
    common: RunSpread,
    limits: SeriesThresholds,
) -> bool:
    """Return whether two stretches differ by more than their own runs, few as they may be, explain (Student's t)."""
    stretches = [values[slice(*stretch)] for stretch in (before, after)]
    levels = [float(np.median(stretch)) for stretch in stretches]
    most = limits.min_deviations * spread
    apart = np.concatenate([stretch - level for stretch, level in zip(stretches, levels, strict=True)]).clip(
        -most, most
    )
    freedom = len(apart) - 2
    own_spread = max(float(np.sqrt(np.sum(apart**2) / freedom)), limits.min_spread, common.value)
    error = own_spread * sum(1 / len(stretch) for stretch in stretches) ** 0.5
    chance = 2 * float(stdtr(freedom + common.freedom, -abs(levels[1] - levels[0]) / error))
    return chance * len(values) * num_series <= limits.level_chance


def _line(values: Floats, spread: float, limits: SeriesThresholds) -> Floats | None:
    """Return the line of a series, to which runs that are off from it add nothing; None if most are, or of few runs.

    It starts from the median slope between runs half a series apart (Theil's incomplete method).
    """
    num_runs = len(values)
    if num_runs < limits.min_drift_runs:
        return None
    at, half = np.arange(num_runs, dtype=np.float64), num_runs // 2
    line = at * float(np.median(values[half:] - values[: num_runs - half])) / half
    line += float(np.median(values - line))
    for _ in range(_LINE_TURNS):
        near = np.abs(values - line) <= limits.min_deviations * spread
        if np.count_nonzero(near) <= half:
            return None
        slope, at_0 = np.polyfit(at[near], values[near], 1)
        line = float(at_0) + float(slope) * at
    return line


def _is_drift(
    values: Floats,
    line: Floats,
    stretches: list[tuple[int, int]],
    spread: float,
    num_series: int,
    limits: SeriesThresholds,
) -> bool:
    """Return whether a line explains a series better than levels do, and each half of the series goes along it."""
    total = float(line[-1] - line[0])
    if abs(total) < limits.min_deviations * spread:
        return False
    off, penalty = _costs(len(values), spread, limits)
    levels = np.concatenate([np.full(stop - first, np.median(values[first:stop])) for first, stop in stretches])
    of_levels = float(np.minimum((values - levels) ** 2, off).sum()) + penalty * (len(stretches) - 1)
    if float(np.minimum((values - line) ** 2, off).sum()) + penalty > of_levels:
        return False
    at = np.flatnonzero(np.abs(values - line) <= limits.min_deviations * spread)
    halves = (at[at < len(values) // 2], at[at >= len(values) // 2])
    return all(
        _slope_chance(half, values[half] * np.sign(total), limits.min_spread) * num_series <= limits.drift_level
        for half in halves
    )


def _slope_chance(at: Ints, values: Floats, min_spread: float) -> float:
    """Return how likely runs rise like this by chance (Student's t of the slope)."""
    freedom = len(at) - 2
    if freedom < 1:
        return 1.0
    x = at - at.mean()
    slope = float(x @ values / (x @ x))
    apart = values - values.mean() - slope * x
    own_spread = max(float(np.sqrt(apart @ apart / freedom)), min_spread)
    return float(stdtr(freedom, -slope * float(x @ x) ** 0.5 / own_spread))


def _without_chance(
    values: Floats,
    whole: list[tuple[int, int]],
    levels: dict[tuple[int, int], float],
    spread: float,
    limits: SeriesThresholds,
) -> list[tuple[int, int]]:
    """Return the stretches that are not just some runs in a row that are off.

    Where many runs are off for once and all to one level, as those of a job that sometimes gets a slow host, some of
    them follow each other by chance: the expected number of such places in the series is a binomial tail per run.
    """
    own = np.full(len(values), np.nan)  # runs without a level are off
    for stretch in whole:
        own[slice(*stretch)] = levels[stretch]
    kept = list(whole)
    for first, stop in sorted(whole, key=lambda stretch: stretch[1] - stretch[0])[:-1]:
        is_there = np.abs(values - levels[first, stop]) <= limits.min_deviations * spread
        inside, num_inside = np.count_nonzero(is_there[first:stop]), stop - first
        elsewhere = is_there & ~(np.abs(values - own) <= limits.min_deviations * spread)
        elsewhere[first:stop] = False
        share = np.count_nonzero(elsewhere) / (len(values) - num_inside)
        if len(values) * float(bdtrc(inside - 1, num_inside, share)) > limits.row_chance:
            kept.remove((first, stop))
            own[first:stop] = np.nan
    return kept


def _num_alike(values: Floats, before: float, after: float, spread: float, limits: SeriesThresholds) -> int:
    """Return how many runs of a level are off it and at another one."""
    is_off = np.abs(values - before) > limits.min_deviations * spread
    return int(np.count_nonzero(is_off & (np.abs(values - after) <= limits.min_deviations * spread)))


def run_spread(values: Floats, limits: SeriesThresholds = SeriesThresholds()) -> float:
    """Return the standard deviation of a run from the differences of runs near each other.

    Changes of level hardly move it. In series of 16 runs or more it is the larger one of that of neighbours and that of
    runs up to five places apart: where speed drifts, or goes with the load of the week, neighbours are more alike than
    runs are, and each swing would be taken for a change.
    """
    if len(values) < 2:
        return limits.min_spread
    median = float(np.median(np.abs(np.diff(values))))
    places = range(2, min(_MAX_APART, len(values) // _RUNS_PER_PLACE) + 1)
    if places:
        apart = np.concatenate([np.abs(values[place:] - values[:-place]) for place in places])
        median = max(median, float(np.median(apart)))
    return max(NORMAL_MAD * median / 2**0.5, limits.min_spread)


def _change(first: int, last: int, before: float, after: float, duration: Duration, spread: float) -> LevelChange:
    deviations = abs(after - before) / spread
    return LevelChange(first=first, last=last, before=before, after=after, duration=duration, deviations=deviations)


def _stretches(values: Floats, spread: float, limits: SeriesThresholds) -> list[tuple[int, int]]:
    """Return begin and end of each stretch of one level.

    A change costs slightly more than a run that is off, so that two runs that are off for once are no stretch, and
    three are one where the series stays there; more in long series, which have more chances of one.
    """
    num_runs = len(values)
    off, penalty = _costs(num_runs, spread, limits)
    levels = _levels(values, spread)
    previous = np.zeros((num_runs, len(levels)), np.int16)
    stay = np.arange(len(levels))
    cost = np.zeros(len(levels))
    for at, value in enumerate(values):
        if at:
            cheapest = int(np.argmin(cost))
            changes = cost > cost[cheapest] + penalty
            previous[at] = np.where(changes, cheapest, stay)
            cost = np.where(changes, cost[cheapest] + penalty, cost)
        cost = cost + np.minimum((value - levels) ** 2, off)
    path = np.zeros(num_runs, np.int64)
    path[-1] = int(np.argmin(cost))
    for at in range(num_runs - 1, 0, -1):
        path[at - 1] = previous[at, path[at]]
    edges = [0, *(np.flatnonzero(np.diff(path)) + 1).tolist(), num_runs]
    return list(pairwise(edges))


def _costs(num_runs: int, spread: float, limits: SeriesThresholds) -> tuple[float, float]:
    """Return what a run costs that is off, and what a change does."""
    off = (limits.min_deviations * spread) ** 2
    return off, max(_CHANGE_COST * off, _LONG_COST * spread**2 * float(np.log(num_runs)))


def _levels(values: Floats, spread: float) -> Floats:
    """Return the levels that are tried: those of a grid that values are near."""
    step = spread / _LEVELS_PER_SPREAD
    levels = np.unique(np.round(values / step)) * step
    return levels if len(levels) <= _MAX_LEVELS else np.quantile(values, np.linspace(0, 1, _MAX_LEVELS))


def _off_sides(away: Floats, spread: float, num_series: int, limits: SeriesThresholds) -> Floats:
    """Return 1 or -1 for each run that is off its level, else 0.

    Among many runs some are far off by chance: 5 % of series may have one that is named. The spread is that of the runs
    near each other, and that of the other runs about their levels, which few runs know with an error (Student's t).

    Args:
        away: distance of each run from its level, float64, (num_runs,); NaN where it has none.
        spread: of a run.
        num_series: looked at together.
    """
    num_runs, size = len(away), np.abs(away)
    deviations = max(limits.min_deviations, float(ndtri(1 - limits.off_level / 2 / num_runs)))
    is_off = size > deviations * spread
    while is_off.any():
        others = away[~is_off & ~np.isnan(away)]
        # What is left out may be no more than the tails.
        freedom = max(len(others) - int(is_off.sum()), limits.min_runs) - 1
        own_spread = max(float(np.sqrt(np.sum(others**2) / freedom)), limits.min_spread)
        deviations = -float(stdtrit(freedom, limits.off_level / 2 / num_runs / num_series))
        still = is_off & (size > deviations * own_spread)
        if still.sum() == is_off.sum():
            break
        is_off = still
    return np.where(is_off, np.sign(away), 0.0)


def _off(
    values: Floats, sides: Floats, first: int, stop: int, level: float, spread: float, limits: SeriesThresholds
) -> Iterator[LevelChange]:
    """Yield the groups of neighbouring runs in a stretch that are off its level to the same side."""
    inside = sides[first:stop]
    edges = [0, *(np.flatnonzero(np.diff(inside)) + 1).tolist(), len(inside)]
    for begin, end in pairwise(edges):
        if inside[begin] and (first or begin):
            duration = Duration.RECENT if first + end == len(values) else Duration.ONE_OFF
            after = float(np.median(values[first + begin : first + end]))
            change = _change(first + begin, first + end - 1, level, after, duration, spread)
            yield replace(change, num_alike=_num_alike(values[first : first + begin], level, after, spread, limits))
