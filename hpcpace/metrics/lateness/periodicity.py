"""Events that recur at regular intervals: a daemon, a health check, a checkpoint that nobody marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincc

LEAST_EVENTS = 3
_LEAST_CYCLES = 3
_EQUAL_SHARE = 0.9
_MOST_TRIED = 4096
_NUM_DRAWS = 999
_MOST_EVENLY = 64  # this many events are judged by their phases alone

Times = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Period:
    """How regularly events recur.

    Attributes:
        length: distance between events, in the unit of the times given.
        p_value: that independent events are as regular, corrected for everything that was tried.
    """

    length: float
    p_value: float


def run_begins(is_late: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the first steps of runs of late ones, ascending: a run is one event; `is_late` is (num_steps,)."""
    return np.flatnonzero(is_late & ~np.append(False, is_late[:-1]))


def steps_between(events: NDArray[np.int64]) -> int | None:
    """Return after how many steps events recur, if that is always the same number or a multiple of it; else None.

    What recurs in time, such as a cron job, slips through the steps: now one step more lies between two of its events,
    now one less.

    Args:
        events: indices of the steps in which events begin, ascending.
    """
    if len(events) < LEAST_EVENTS:
        return None
    distances = np.diff(events)
    shortest = int(np.median(distances))
    is_multiple = (distances % max(shortest, 1) == 0).mean() >= _EQUAL_SHARE
    return shortest if shortest >= 2 and is_multiple else None


def find_period(events: Sequence[Times], *, span: float, least: float) -> Period | None:
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

    Returns:
        None for fewer than three events.
    """
    units = [times for times in events if len(times) >= 2]
    if sum(map(len, units)) < LEAST_EVENTS or span / _LEAST_CYCLES <= least:
        return None
    found = [_by_phases(units, span=span, least=least)]
    if len(units) == 1 and LEAST_EVENTS <= len(units[0]) <= _MOST_EVENLY:
        found.append(_by_distances(units[0], span=span))
    best = min(found, key=lambda period: period.p_value)
    return Period(length=best.length, p_value=min(1.0, len(found) * best.p_value))


def _by_phases(units: Sequence[Times], *, span: float, least: float) -> Period:
    # Between two frequencies tried, phases must not slip by more than an eighth of a turn over the whole span.
    num_tried = int(min(max(8 * (span / least - _LEAST_CYCLES), 16), _MOST_TRIED))
    frequency = np.linspace(_LEAST_CYCLES / span, 1 / least, num_tried)
    power = np.zeros(num_tried)
    for times in units:
        power += np.abs(np.exp(2j * np.pi * frequency[:, None] * times[None, :]).sum(axis=1)) ** 2 / len(times)
    best = float(power.max())
    # Fractions of the period fit as well as the period, multiples do not: the lowest frequency is right.
    at = int(np.flatnonzero(power >= 0.9 * best)[0])
    independent = max(span / least, 1.0)
    return Period(length=float(1 / frequency[at]), p_value=min(1.0, independent * float(gammaincc(len(units), best))))


def _by_distances(times: Times, *, span: float) -> Period:
    distances = np.diff(np.sort(times))
    seen = float(distances.std() / max(float(distances.mean()), 1e-12))
    random = np.random.default_rng(0)
    drawn = np.diff(np.sort(random.uniform(0.0, span, (_NUM_DRAWS, len(times))), axis=1), axis=1)
    variation = drawn.std(axis=1) / drawn.mean(axis=1)
    # Events must fill the span: a few close together are a burst.
    is_spread = float(times.max() - times.min()) + 2 * float(distances.mean()) >= span
    p_value = (1 + int((variation <= seen).sum())) / (1 + _NUM_DRAWS) if is_spread else 1.0
    return Period(length=float(distances.mean()), p_value=p_value)
