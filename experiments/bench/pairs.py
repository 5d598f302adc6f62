"""Compares two ways of doing the same thing, alternating within one run: medians of pairs, with intervals.

Absolute times drift with the machine; the ratio of two measurements taken one after the other does so much less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Measure = Callable[[], float]


@dataclass(frozen=True)
class Pairs:
    """Times of A and B, pair by pair, in seconds or any other unit, float64, (num_pairs,)."""

    a: np.ndarray
    b: np.ndarray

    def ratio(self) -> tuple[float, float, float]:
        """Return the median of A / B and its 95 % bootstrap interval."""
        return median_interval(self.a / self.b)

    def difference(self) -> tuple[float, float, float]:
        """Return the median of A - B and its 95 % bootstrap interval."""
        return median_interval(self.a - self.b)


def alternate(a: Measure, b: Measure, *, num_pairs: int, num_warmups: int = 1) -> Pairs:
    """Measure A and B in turn, in changing order."""
    times: list[tuple[float, float]] = []
    for pair in range(num_pairs + num_warmups):
        if pair % 2:
            first = a()
            times.append((first, b()))
        else:
            second = b()
            times.append((a(), second))
    kept = np.array(times[num_warmups:])
    return Pairs(kept[:, 0], kept[:, 1])


def take_turns(measures: Mapping[str, Measure], *, num_rounds: int, num_warmups: int = 1) -> dict[str, np.ndarray]:
    """Measure several things in turn, in changing order; return the values of each by name, (num_rounds,)."""
    names = list(measures)
    values: dict[str, list[float]] = {name: [] for name in names}
    for index in range(num_rounds + num_warmups):
        first = index % len(names)
        for name in (*names[first:], *names[:first]):
            values[name].append(measures[name]())
    return {name: np.array(values[name][num_warmups:]) for name in names}


def median_interval(values: np.ndarray, *, seed: int = 0) -> tuple[float, float, float]:
    """Return the median of values, and the 95 % bootstrap interval of it."""
    draws = np.random.default_rng(seed).choice(values, size=(10_000, values.size))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)
