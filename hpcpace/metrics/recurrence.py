"""Tests of recurrence: ranks that are late for good, in an interval of steps, at a period or in turns.

Lateness is relative to the usual work of a rank's role. P-values are over all ranks together. Blocks of steps allow for
noise that neighbouring steps share. Periods are also searched in the times of events, such as those of a daemon.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.kernels import others_median
from hpcpace.metrics.resampling import MAX_BLOCKS, MAX_SHORT_RHO, Estimate
from hpcpace.metrics.special import TINY, betainc, gammaincc, stdtr, stdtrit

_EARLY, _DISTANCE = (5, 25), 0.97  # statistics: percentiles below the late steps, in standard deviations apart


@dataclass(frozen=True, kw_only=True)
class LatenessThresholds(Thresholds, topic="straggler"):
    """When lateness has a pattern, and when a search would have found it."""

    max_smallest_share: float = number(0.2, "share")
    """Excess over the usual work; if only larger ones would be found, finding none means nothing."""
    alike_part: float = number(0.5, "share")
    """Part of the largest excess that all ranks of a node or slot must have to be one straggler."""
    passing_part: float = number(0.8, "share")
    """Part of the steps from which on a slow stretch is no longer passing."""
    passing_ratio: float = number(3.0, "times", at_least=1)
    """Excess in a slow stretch over that outside of it; below it, the rank is slow all the time."""
    apart_part: float = number(0.8, "share")
    """Part of the late steps of several ranks that must not coincide for these to take turns."""
    min_turns: int = number(3, "ranks")
    """Ranks with the same period that may take turns; fewer are late by themselves."""
    late_deviations: float = number(4.0, "standard errors")
    """Standard deviations of a rank's noise beyond which it is late in a step: chance exceeds them in few."""
    min_late_events: int = number(4, "events", at_least=2)
    """Late steps, or runs of them, fewer of which have no period."""
    min_successor_share: float = number(0.6, "share")
    """Share of the late steps that must be followed by another one at the distance of a period."""
    max_late_share: float = number(0.55, "share")
    """Share of the steps beyond which those in which a rank is late have no period, and it takes no turns."""
    min_rotating: int = number(3, "ranks", at_least=2)
    """Ranks or nodes that may take turns by avoiding each other; two do so where each compares with the other."""
    max_late_at_once: float = number(4.0, "ranks")
    """Ranks or nodes that are late in the mean step beyond which nobody takes turns."""
    min_turn_share: float = number(0.2, "share")
    """Share of the steps in which somebody must be late for ranks to take turns."""
    min_turn_gain: float = number(0.1, "share")
    """Share of the steps by which these must exceed what chance gives."""
    min_turn_part: float = number(0.25, "share")
    """Part of an equal share of these steps from which a rank or node takes part."""


@dataclass(frozen=True, kw_only=True)
class Lateness:
    """Local work relative to the role, as shares of the role's median work.

    Attributes:
        deviation: work minus the median of the role in that step, float64, (num_ranks, num_steps).
        excess: work minus the median of the others of the role in that step, float64, (num_ranks, num_steps).
        is_outlier: whether the excess is beyond some standard deviations of the rank's noise and beyond the floor,
            bool, (num_ranks, num_steps). The noise is taken from steps in which the rank is early: lateness is
            one-sided.
        is_latest: whether an outlier is also the largest of its role, bool, (num_ranks, num_steps).
        is_compared: which ranks have others of their role with work, bool, (num_ranks,).
        role: role of each rank, int64, (num_ranks,).
    """

    deviation: Floats
    excess: Floats
    is_outlier: Bools
    is_latest: Bools
    is_compared: Bools
    role: Ints


def lateness(work_ns: Floats, role: Ints, *, floor_share: float, limits: LatenessThresholds) -> Lateness:
    """Return how late each rank is in each step.

    Args:
        work_ns: local work, float64, (num_ranks, num_steps).
        role: int64, (num_ranks,).
        floor_share: smaller excesses do not count as late.
        limits: when a rank is late.
    """
    deviation, excess = np.zeros(work_ns.shape), np.zeros(work_ns.shape)
    is_outlier, is_latest = np.zeros(work_ns.shape, np.bool_), np.zeros(work_ns.shape, np.bool_)
    is_compared = np.zeros(len(work_ns), np.bool_)
    for of in np.unique(role):
        members = np.flatnonzero(role == of)
        values = work_ns[members]
        base = float(np.median(np.median(values, axis=1))) if values.size else 0.0
        if len(members) < 2 or base <= 0:
            continue
        is_compared[members] = True
        deviation[members] = (values - np.median(values, axis=0)) / base
        over = excess[members] = (values - others_median(values)) / base
        low, high = np.percentile(over, _EARLY, axis=1)
        late = over > np.maximum(floor_share, limits.late_deviations / _DISTANCE * (high - low))[:, None]
        is_outlier[members] = late
        is_latest[members] = late & (over == over.max(axis=0))
    return Lateness(
        deviation=deviation,
        excess=excess,
        is_outlier=is_outlier,
        is_latest=is_latest,
        is_compared=is_compared,
        role=role,
    )


def block_effects(late: Lateness, length: int, *, trim: float) -> Floats:
    """Return for each rank and block of steps its trimmed mean minus the median of the others' of its role.

    Skewed noise shifts all trimmed means alike, so that comparing with those of the others cancels it.

    Args:
        late: lateness of each rank and step.
        length: steps of a block; steps beyond the last whole block are not used.
        trim: share of a block's steps that is left out at each end.

    Returns:
        float64, (num_ranks, num_blocks); 0 for ranks without others of their role.
    """
    num_blocks = late.deviation.shape[1] // length
    shaped = late.deviation[:, : num_blocks * length].reshape(-1, num_blocks, length)
    cut = int(trim * length)
    if cut:
        shaped = np.partition(shaped, (cut, length - 1 - cut), axis=2)[:, :, cut : length - cut]
    location = shaped.mean(axis=2)
    effects = np.zeros(location.shape)
    for of in np.unique(late.role[late.is_compared]):
        members = np.flatnonzero(late.role == of)
        effects[members] = location[members] - others_median(location[members])
    return effects


def inflation(effects: Floats) -> float:
    """Return the factor, at least 1, by which correlated neighbouring blocks make a standard error too small.

    sqrt((1 + rho) / (1 - rho)) with the lag-1 autocorrelation rho of the blocks, pooled over ranks.

    Args:
        effects: float64, (num_ranks, num_blocks).
    """
    centred = effects - effects.mean(axis=1, keepdims=True)
    total = (centred**2).sum(axis=1)
    used = total > 0
    if not used.any() or effects.shape[1] <= 2:
        return 1.0
    each = (centred[used, 1:] * centred[used, :-1]).sum(axis=1) / total[used]
    rho = float(np.clip(np.median(each) + 1 / effects.shape[1], 0.0, MAX_SHORT_RHO))
    return float(np.sqrt((1 + rho) / (1 - rho)))


_NUM_DRAWS = 999  # statistics: random signs, shifts or events
_MIN_BLOCKS, _MIN_LENGTH = 12, 5  # statistics: blocks that a test of signs needs, and steps of more of them
_TRIMMED = 0.2  # statistics: of the steps of a block at each end
_LATE_RATE = 0.5  # statistics: of the steps of an interval in which a rank is slow: not all exceed the noise
_NUM_CYCLES = 3  # statistics: periods that must fit into the steps, or the time
_WIDTHS = ((1, 2), (3, 10))  # statistics: neighbouring lags that hold a successor, from which lag on
_NEARLY = 0.8  # statistics: of the successors at the best lag; it may be a multiple of the first one with as many
_BETTER = 10  # statistics: so much less likely by chance must successors at neighbouring lags be


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

    means: Floats
    effect: Floats
    error: Floats
    p_value: Floats
    critical_error: float

    def effect_of(self, ranks: Ints) -> Estimate:
        """Return the mean shift of some ranks."""
        return Estimate.of_mean(self.means[ranks].mean(axis=0), widened=inflation(self.means))


def fixed_shifts(late: Lateness, *, level: float, random: np.random.Generator) -> FixedShift:
    """Return the lasting shift of each rank against the others of its role, from at least 20 steps."""
    num_steps = late.deviation.shape[1]
    length = num_steps // int(np.clip(num_steps // _MIN_LENGTH, _MIN_BLOCKS, MAX_BLOCKS))
    effects = block_effects(late, length, trim=_TRIMMED)
    num_blocks, num_compared = effects.shape[1], max(int(late.is_compared.sum()), 1)
    widened = inflation(effects[late.is_compared])
    error = effects.std(axis=1, ddof=1) / np.sqrt(num_blocks)
    effect = effects.mean(axis=1)
    t = effect / np.maximum(error * widened, TINY)

    signs = random.integers(0, 2, (_NUM_DRAWS, num_blocks)) * 2.0 - 1.0
    # The measured signs are counted separately. For two ranks compared with each other, their mirror image is the same.
    signs = signs[np.abs(signs.sum(axis=1)) < num_blocks]
    mean = signs @ effects.T / num_blocks
    square = (effects**2).mean(axis=1)
    drawn = mean / np.maximum(np.sqrt(np.maximum(square - mean**2, 0) / (num_blocks - 1)), TINY)
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

    first: Ints
    stop: Ints
    inside: Floats
    outside: Floats
    p_value: Floats


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


def _log_ratio(num_late: Ints, num_steps: Ints, usual: Floats) -> Floats:
    """Return the logarithm of how much likelier this many late steps are at `_LATE_RATE` than at the usual rate."""
    early = np.log((1 - _LATE_RATE) / (1 - usual))
    return np.asarray(num_late * np.log(_LATE_RATE / usual) + (num_steps - num_late) * early, np.float64)


def periods(events: Bools, *, num_compared: int, limits: LatenessThresholds) -> tuple[Ints, Floats]:
    """Return the period of each unit's late steps, and its p-value over all lags and units.

    A period is the smallest lag at which most events (first steps of a run of late ones) have a successor, and at which
    they have one twice as often as at the lags around it. From a lag of 10 on, the successor may be one step early or
    late. The p-value is the probability of as many successors by chance, binomial with the unit's rate of events, times
    the lags and units tried.

    Args:
        events: late steps, bool, (num_units, num_steps).
        num_compared: units of the whole search.
        limits: when a period is one.

    Returns:
        period, int64, (num_units,), 0 for none, and p-value, float64, (num_units,).
    """
    num_units, num_steps = events.shape
    starts = events.copy()
    starts[:, 1:] &= ~events[:, :-1]
    num_lags = num_steps // _NUM_CYCLES
    count = starts.sum(axis=1)
    tested = np.flatnonzero((count >= limits.min_late_events) & (events.mean(axis=1) <= limits.max_late_share))
    period, p_value = np.zeros(num_units, np.int64), np.ones(num_units)
    if not len(tested) or num_lags <= 2:
        return period, p_value
    spectrum = np.fft.rfft(starts[tested].astype(np.float64), 2 * num_steps, axis=1)
    pairs = np.rint(np.fft.irfft(np.abs(spectrum) ** 2, axis=1))[:, : num_lags + 1]
    total = np.cumsum(starts[tested], axis=1)
    room = total[:, ::-1][:, : num_lags + 1].astype(np.float64)  # events that have a step `lag` later
    rate = (count[tested] / num_steps)[:, None]
    for width, least in _WIDTHS:
        near = pairs if width == 1 else _three(pairs)
        near = np.minimum(near, room)
        share = near / np.maximum(room, 1)
        chance = np.ones(near.shape)
        good = (share >= limits.min_successor_share) & (near >= limits.min_late_events - 1)
        good[:, :least] = False
        usual = np.broadcast_to(np.minimum(rate * width, 1.0), near.shape)
        chance[good] = betainc(near[good], room[good] - near[good] + 1, usual[good])  # P(at least so many)
        p = np.minimum(chance.min(axis=1) * num_lags * 2 * num_compared, 1.0)
        is_best = good & (share >= _NEARLY * np.where(good, share, 0).max(axis=1, keepdims=True))
        lag = np.where(is_best.any(axis=1), is_best.argmax(axis=1), 0)
        if width > 1:  # of three neighbouring lags that see the same successors, the one at which most of them are
            close = np.minimum(lag[:, None] + np.arange(width), num_lags)
            best = np.take_along_axis(pairs, close, axis=1).argmax(axis=1)
            lag = np.where(lag > 0, np.take_along_axis(close, best[:, None], axis=1)[:, 0], 0)
        better = (p < p_value[tested] / _BETTER) & (lag > 0)
        better[better] = [_stands_out(share[row], int(lag[row])) for row in np.flatnonzero(better)]
        period[tested[better]], p_value[tested[better]] = lag[better], p[better]
    return period, p_value


def _stands_out(share: Floats, lag: int) -> bool:
    """Return whether events have a successor at a lag twice as often as at lags around it: late steps may cluster."""
    return bool(share[lag] >= 2 * np.median(share[-(-lag // 2) : lag + lag // 2 + 1]))


def _three(pairs: Floats) -> Floats:
    wide = pairs.copy()
    wide[:, 1:] += pairs[:, :-1]
    wide[:, :-1] += pairs[:, 1:]
    return wide


def rotation(events: Bools, *, random: np.random.Generator, limits: LatenessThresholds) -> tuple[Ints, float]:
    """Return the units that take turns in being late, and the p-value; no units if none do.

    Late steps that avoid each other cover more steps than late steps of independent units. So the number of steps with
    an event is compared with the number after a random circular shift of each unit's events, which keeps runs and
    periods. It must be a fifth of all steps, and exceed what chance gives by a tenth of all steps.

    Args:
        events: late steps, bool, (num_units, num_steps).
        random: for the shifts.
        limits: when units take turns.
    """
    none = np.zeros(0, np.int64)
    units = np.flatnonzero(events.any(axis=1) & (events.mean(axis=1) <= limits.max_late_share))
    num_steps = events.shape[1]
    unit, step = np.nonzero(events[units])
    if len(units) < limits.min_rotating or len(step) > limits.max_late_at_once * num_steps:
        return none, 1.0
    covered = int(np.count_nonzero(events[units].any(axis=0)))
    if covered < limits.min_turn_share * num_steps:
        return none, 1.0
    shifts = random.integers(0, num_steps, (_NUM_DRAWS, len(units)))
    moved = (step + shifts[:, unit]) % num_steps + np.arange(_NUM_DRAWS)[:, None] * num_steps
    hit = np.zeros(_NUM_DRAWS * num_steps, np.bool_)
    hit[moved.ravel()] = True
    drawn = hit.reshape(_NUM_DRAWS, num_steps).sum(axis=1)
    p_value = float((1 + (drawn >= covered).sum()) / (1 + _NUM_DRAWS))
    if covered - drawn.mean() < limits.min_turn_gain * num_steps:
        return none, p_value
    share = np.bincount(unit, minlength=len(units)) / covered
    taking_part = units[share >= limits.min_turn_part / len(units)]
    return (taking_part, p_value) if len(taking_part) >= limits.min_rotating else (none, p_value)


_PER_TURN, _MIN_TRIED, _MAX_TRIED = 8, 16, 4096  # speed: frequencies, between two of which phases hardly slip
_MAX_EVENLY = 64  # speed: more events are judged by their phases alone
_FULL_POWER = 0.9  # statistics: of the best frequency; fractions of the period fit as well


@dataclass(frozen=True, kw_only=True)
class PeriodThresholds(Thresholds, topic="events"):
    """When events have a period."""

    min_events: int = number(3, "events", at_least=2)
    """Events of all units together, fewer of which are as regular by chance; and those that name a unit."""
    equal_share: float = number(0.9, "share")
    """Share of the distances that must be multiples of the usual one for events to come by number of steps."""


@dataclass(frozen=True, kw_only=True)
class Period:
    """How regularly events recur.

    Attributes:
        length: distance between events, in the unit of the times given.
        p_value: that independent events are as regular, corrected for everything that was tried.
    """

    length: float
    p_value: float


def run_begins(is_late: Bools) -> Ints:
    """Return the first steps of runs of late ones, ascending: a run is one event; `is_late` is (num_steps,)."""
    return np.flatnonzero(is_late & ~np.append(False, is_late[:-1]))


def steps_between(events: Ints, limits: PeriodThresholds) -> int | None:
    """Return after how many steps events recur, if that is always the same number or a multiple of it; else None.

    What recurs in time, such as a cron job, slips through the steps: now one step more lies between two of its events,
    now one less.

    Args:
        events: indices of the steps in which events begin, ascending.
        limits: how many must agree.
    """
    if len(events) < limits.min_events:
        return None
    distances = np.diff(events)
    shortest = int(np.median(distances))
    is_multiple = (distances % max(shortest, 1) == 0).mean() >= limits.equal_share
    return shortest if shortest >= 2 and is_multiple else None


def find_period(
    events: Sequence[Floats], *, span: float, least: float, min_events: int = PeriodThresholds.min_events
) -> Period | None:
    """Return the period that the events of one or more units share, each unit with its own phase.

    Of two tests the better one counts, with a correction for trying two. The test of phases puts the events of a unit
    on a circle for each length. For random events n R^2, with R the length of their mean vector, is exponentially
    distributed (Rayleigh; Mardia and Jupp, Directional Statistics, section 6.3.1), so its sum over units has a gamma
    distribution; it is corrected for the lengths tried. The test of distances, for one unit, simulates how often random
    events have distances as equal as these (coefficient of variation).

    Args:
        events: times of each unit's events; units with fewer than two do not count.
        span: time in which events could have been observed; at least three periods must fit.
        least: shortest length that can be resolved, twice the distance between two observations.
        min_events: fewer have none.

    Returns:
        None for too few events.
    """
    units = [times for times in events if len(times) >= 2]
    if sum(map(len, units)) < min_events or span / _NUM_CYCLES <= least:
        return None
    found = [_by_phases(units, span=span, least=least)]
    if len(units) == 1 and min_events <= len(units[0]) <= _MAX_EVENLY:
        found.append(_by_distances(units[0], span=span))
    best = min(found, key=lambda period: period.p_value)
    return Period(length=best.length, p_value=min(1.0, len(found) * best.p_value))


def _by_phases(units: Sequence[Floats], *, span: float, least: float) -> Period:
    # Between two frequencies tried, phases must not slip by more than an eighth of a turn over the whole span.
    num_tried = int(min(max(_PER_TURN * (span / least - _NUM_CYCLES), _MIN_TRIED), _MAX_TRIED))
    frequency = np.linspace(_NUM_CYCLES / span, 1 / least, num_tried)
    power = np.zeros(num_tried)
    for times in units:
        power += np.abs(np.exp(2j * np.pi * frequency[:, None] * times[None, :]).sum(axis=1)) ** 2 / len(times)
    best = float(power.max())
    # Fractions of the period fit as well as the period, multiples do not: the lowest frequency is right.
    at = int(np.flatnonzero(power >= _FULL_POWER * best)[0])
    independent = max(span / least, 1.0)
    return Period(length=float(1 / frequency[at]), p_value=min(1.0, independent * float(gammaincc(len(units), best))))


def _by_distances(times: Floats, *, span: float) -> Period:
    distances = np.diff(np.sort(times))
    seen = float(distances.std() / max(float(distances.mean()), TINY))
    random = np.random.default_rng(0)
    drawn = np.diff(np.sort(random.uniform(0.0, span, (_NUM_DRAWS, len(times))), axis=1), axis=1)
    variation = drawn.std(axis=1) / drawn.mean(axis=1)
    # Events must fill the span: a few close together are a burst.
    is_spread = float(times.max() - times.min()) + 2 * float(distances.mean()) >= span
    p_value = (1 + int((variation <= seen).sum())) / (1 + _NUM_DRAWS) if is_spread else 1.0
    return Period(length=float(distances.mean()), p_value=p_value)
