"""Tests of recurrence: a lasting shift, an interval of steps, a period, a rotation over units.

Each returns p-values over all ranks together. Blocks of steps allow for noise that neighbouring steps share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import betainc, stdtr, stdtrit

from hpcpace.metrics.lateness.excess import BoolArray, FloatArray, Int64Array, Lateness, block_effects, inflation

_NUM_DRAWS = 999
_MOST_FIXED_BLOCKS, _LEAST_FIXED_BLOCKS = 20, 12
_LATE_RATE = 0.5  # of the steps of an interval in which a rank is slow: not all of them exceed the noise
_LEAST_EVENTS = 4
_REGULAR_SHARE = 0.6
_MOST_RATE = 0.55  # no period can be found of a unit that is late more often
_ROTATION_UNITS = 3
_ROTATION_SHARE, _ROTATION_GAIN = 0.2, 0.1
_MOST_PER_STEP = 4


@dataclass(frozen=True, kw_only=True)
class FixedShift:
    """The lasting shift of each rank, as a share of its role's median work; each float64, (num_ranks,).

    Attributes:
        means: shift of the mean in each block of steps, which gives its size, float64, (num_ranks, num_blocks).
        effect: shift of the trimmed mean over blocks, which is tested.
        error: its standard error.
        p_value: probability of as large a shift by chance, over all ranks: the larger of a t test with Bonferroni's
            correction and a test of the largest t over ranks under random signs of whole blocks (Westfall and Young
            1993).
        critical_error: how many standard errors a shift must have to be found at the level asked for.
    """

    means: FloatArray
    effect: FloatArray
    error: FloatArray
    p_value: FloatArray
    critical_error: float

    def interval(self, ranks: Int64Array) -> tuple[float, float, float]:
        """Return the mean shift of some ranks and its 95 % confidence interval."""
        return mean_interval(self.means[ranks].mean(axis=0), inflation(self.means))


def mean_interval(values: FloatArray, widened: float = 1.0) -> tuple[float, float, float]:
    """Return the mean of values, (num_values,), and its 95 % confidence interval (t): the mean for one value."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, mean, mean
    half = float(stdtrit(len(values) - 1, 0.975) * values.std(ddof=1) / np.sqrt(len(values))) * widened
    return mean, mean - half, mean + half


def fixed_shifts(late: Lateness, *, level: float, random: np.random.Generator) -> FixedShift:
    """Return the lasting shift of each rank against the others of its role, from at least 20 steps."""
    num_steps = late.deviation.shape[1]
    length = num_steps // int(np.clip(num_steps // 5, _LEAST_FIXED_BLOCKS, _MOST_FIXED_BLOCKS))
    effects = block_effects(late, length, trim=0.2)
    num_blocks, num_compared = effects.shape[1], max(int(late.is_compared.sum()), 1)
    widened = inflation(effects[late.is_compared])
    error = effects.std(axis=1, ddof=1) / np.sqrt(num_blocks)
    effect = effects.mean(axis=1)
    tiny = 1e-12
    t = effect / np.maximum(error * widened, tiny)

    signs = random.integers(0, 2, (_NUM_DRAWS, num_blocks)) * 2.0 - 1.0
    # The measured signs are counted separately. For two ranks compared with each other, their mirror image is the same.
    signs = signs[np.abs(signs.sum(axis=1)) < num_blocks]
    mean = signs @ effects.T / num_blocks
    square = (effects**2).mean(axis=1)
    drawn = mean / np.maximum(np.sqrt(np.maximum(square - mean**2, 0) / (num_blocks - 1)), tiny)
    largest = np.sort(drawn.max(axis=1))
    by_signs = (1 + len(largest) - np.searchsorted(largest, t, side="left")) / (1 + len(largest))
    by_t = np.minimum(stdtr(num_blocks - 1, -t) * num_compared, 1.0)
    return FixedShift(
        means=block_effects(late, length, trim=0.0),
        effect=effect,
        error=error * widened,
        p_value=np.maximum(by_signs, by_t),
        critical_error=float(stdtrit(num_blocks - 1, 1 - level / num_compared)),
    )


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """The interval of steps in which each rank's late steps cluster most; columns of length num_ranks.

    Attributes:
        first, stop: columns of the steps, int64.
        inside: mean excess inside, a share of the role's median work, float64.
        outside: the same outside; 0 if the interval covers all steps.
        p_value: probability of late steps as clustered by chance, over all intervals and ranks, float64.
    """

    first: Int64Array
    stop: Int64Array
    inside: FloatArray
    outside: FloatArray
    p_value: FloatArray


def intervals(late: Lateness) -> Intervals:
    """Find the interval of steps in which the late steps of each rank cluster most.

    This is the interval with the largest sum of log-likelihood ratios of two models: steps are late half of the time,
    or at the usual rate, that of all ranks. For one first step, chance makes the sum reach x with a probability of at
    most exp(-x) (Ville 1939), which is multiplied by the numbers of first steps and of ranks. The p-value uses the
    rank's own rate outside the interval if that is larger.
    """
    num_ranks, num_steps = late.is_outlier.shape
    num_compared = max(int(late.is_compared.sum()), 1)
    count = np.concatenate([np.zeros((num_ranks, 1), np.int64), np.cumsum(late.is_outlier, axis=1)], axis=1)
    usual = min((float(count[late.is_compared, -1].sum()) + 1) / (num_compared * num_steps + 1), _LATE_RATE)
    index = np.arange(num_steps + 1)
    total = _log_ratio(count, index, np.full(1, usual))
    stop = (total[:, 1:] - np.minimum.accumulate(total, axis=1)[:, :-1]).argmax(axis=1) + 1
    first = np.where(index < stop[:, None], total, np.inf).argmin(axis=1)
    rows = np.arange(num_ranks)
    length, inside = stop - first, count[rows, stop] - count[rows, first]
    own = np.minimum((count[:, -1] - inside + 1) / (num_steps - length + 2), _LATE_RATE)
    best = _log_ratio(inside, length, np.maximum(own, usual))
    excess = np.concatenate([np.zeros((num_ranks, 1)), np.cumsum(late.excess, axis=1)], axis=1)
    excess_inside = excess[rows, stop] - excess[rows, first]
    return Intervals(
        first=first,
        stop=stop,
        inside=excess_inside / length,
        outside=(excess[:, -1] - excess_inside) / np.maximum(num_steps - length, 1),
        p_value=np.minimum(np.exp(-best) * num_steps * num_compared, 1.0),
    )


def _log_ratio(num_late: Int64Array, num_steps: Int64Array, usual: FloatArray) -> FloatArray:
    """Return the logarithm of how much likelier this many late steps are at `_LATE_RATE` than at the usual rate."""
    early = np.log((1 - _LATE_RATE) / (1 - usual))
    return np.asarray(num_late * np.log(_LATE_RATE / usual) + (num_steps - num_late) * early, np.float64)


def periods(events: BoolArray, *, num_compared: int) -> tuple[Int64Array, FloatArray]:
    """Return the period of each unit's late steps, and its p-value over all lags and units.

    A period is the smallest lag at which most events (first steps of a run of late ones) have a successor, and at which
    they have one twice as often as at the lags around it. From a lag of 10 on, the successor may be one step early or
    late. The p-value is the probability of as many successors by chance, binomial with the unit's rate of events, times
    the lags and units tried.

    Args:
        events: late steps, bool, (num_units, num_steps).
        num_compared: units of the whole search.

    Returns:
        period, int64, (num_units,), 0 for none, and p-value, float64, (num_units,).
    """
    num_units, num_steps = events.shape
    starts = events.copy()
    starts[:, 1:] &= ~events[:, :-1]
    num_lags = num_steps // 3
    count = starts.sum(axis=1)
    tested = np.flatnonzero((count >= _LEAST_EVENTS) & (events.mean(axis=1) <= _MOST_RATE))
    period, p_value = np.zeros(num_units, np.int64), np.ones(num_units)
    if not len(tested) or num_lags < 3:
        return period, p_value
    spectrum = np.fft.rfft(starts[tested].astype(np.float64), 2 * num_steps, axis=1)
    pairs = np.rint(np.fft.irfft(np.abs(spectrum) ** 2, axis=1))[:, : num_lags + 1]
    total = np.cumsum(starts[tested], axis=1)
    room = total[:, ::-1][:, : num_lags + 1].astype(np.float64)  # events that have a step `lag` later
    rate = (count[tested] / num_steps)[:, None]
    for width, least in ((1, 2), (3, 10)):
        near = pairs if width == 1 else _three(pairs)
        near = np.minimum(near, room)
        share = near / np.maximum(room, 1)
        chance = np.ones(near.shape)
        good = (share >= _REGULAR_SHARE) & (near >= _LEAST_EVENTS - 1)
        good[:, :least] = False
        usual = np.broadcast_to(np.minimum(rate * width, 1.0), near.shape)
        chance[good] = betainc(near[good], room[good] - near[good] + 1, usual[good])  # P(at least so many)
        p = np.minimum(chance.min(axis=1) * num_lags * 2 * num_compared, 1.0)
        is_best = good & (share >= 0.8 * np.where(good, share, 0).max(axis=1, keepdims=True))
        lag = np.where(is_best.any(axis=1), is_best.argmax(axis=1), 0)
        if width > 1:  # of three neighbouring lags that see the same successors, the one at which most of them are
            close = np.minimum(lag[:, None] + np.arange(width), num_lags)
            best = np.take_along_axis(pairs, close, axis=1).argmax(axis=1)
            lag = np.where(lag > 0, np.take_along_axis(close, best[:, None], axis=1)[:, 0], 0)
        better = (p < p_value[tested] / 10) & (lag > 0)
        better[better] = [_stands_out(share[row], int(lag[row])) for row in np.flatnonzero(better)]
        period[tested[better]], p_value[tested[better]] = lag[better], p[better]
    return period, p_value


def _stands_out(share: FloatArray, lag: int) -> bool:
    """Return whether events have a successor at a lag twice as often as at lags around it: late steps may cluster."""
    return bool(share[lag] >= 2 * np.median(share[-(-lag // 2) : 3 * lag // 2 + 1]))


def _three(pairs: FloatArray) -> FloatArray:
    wide = pairs.copy()
    wide[:, 1:] += pairs[:, :-1]
    wide[:, :-1] += pairs[:, 1:]
    return wide


def rotation(events: BoolArray, *, random: np.random.Generator) -> tuple[Int64Array, float]:
    """Return the units that take turns in being late, and the p-value; no units if none do.

    Late steps that avoid each other cover more steps than late steps of independent units. So the number of steps with
    an event is compared with the number after a random circular shift of each unit's events, which keeps runs and
    periods. It must be a fifth of all steps, and exceed what chance gives by a tenth of all steps.

    Args:
        events: late steps, bool, (num_units, num_steps).
        random: for the shifts.
    """
    none = np.zeros(0, np.int64)
    units = np.flatnonzero(events.any(axis=1) & (events.mean(axis=1) <= _MOST_RATE))
    num_steps = events.shape[1]
    unit, step = np.nonzero(events[units])
    if len(units) < _ROTATION_UNITS or len(step) > _MOST_PER_STEP * num_steps:
        return none, 1.0
    covered = int(np.count_nonzero(events[units].any(axis=0)))
    if covered < _ROTATION_SHARE * num_steps:
        return none, 1.0
    shifts = random.integers(0, num_steps, (_NUM_DRAWS, len(units)))
    moved = (step + shifts[:, unit]) % num_steps + np.arange(_NUM_DRAWS)[:, None] * num_steps
    hit = np.zeros(_NUM_DRAWS * num_steps, np.bool_)
    hit[moved.ravel()] = True
    drawn = hit.reshape(_NUM_DRAWS, num_steps).sum(axis=1)
    p_value = float((1 + (drawn >= covered).sum()) / (1 + _NUM_DRAWS))
    if covered - drawn.mean() < _ROTATION_GAIN * num_steps:
        return none, p_value
    share = np.bincount(unit, minlength=len(units)) / covered
    taking_part = units[share >= 0.25 / len(units)]
    return (taking_part, p_value) if len(taking_part) >= _ROTATION_UNITS else (none, p_value)
