"""How certain a figure is that was measured in several runs, or over the steps of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from hpcpace.metrics.resampling import moving_block_bootstrap


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its 95 % interval, whose ends are infinite if a single value says nothing about the spread."""

    value: float
    low: float
    high: float

    def as_percent(self, digits: int = 1, *, is_change: bool = True) -> str:
        """Return shares in percent: a change as `+3.1 % [+2.0, +4.2]`, a part of a whole without signs."""
        sign = "+" if is_change else ""
        value, low, high = (f"{100 * part:{sign}.{digits}f}" for part in (self.value, self.low, self.high))
        return f"{value} % [{low}, {high}]"


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean over independent runs with Student's interval.

    Args:
        values: one per run, at least one.
    """
    found = np.asarray(values, np.float64)
    mean = float(found.mean())
    if len(found) < 2:
        return Estimate(value=mean, low=-inf, high=inf)
    half = float(stdtrit(len(found) - 1, 0.975)) * float(found.std(ddof=1)) / sqrt(len(found))
    return Estimate(value=mean, low=mean - half, high=mean + half)


def share_of(count: int, total: int) -> Estimate:
    """Return a share of runs with the interval of Wilson (1927), which is valid near 0 and 1, too.

    Args:
        count: runs that count.
        total: all runs, at least one.
    """
    z = float(ndtri(0.975))
    share = count / total
    center = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    return Estimate(value=share, low=max(center - half, 0.0), high=min(center + half, 1.0))


def throughput_of_steps(step_ns: NDArray[np.float64], samples: NDArray[np.int64]) -> Estimate:
    """Return the samples per second of one run, with the interval of a moving-block bootstrap over its steps.

    Args:
        step_ns: step times, float64, (num_steps,).
        samples: of the global batch, int64, (num_steps,).
    """
    value = float(samples.sum() / step_ns.sum() * 1e9)
    columns = np.column_stack([samples, step_ns]).astype(np.float64)
    found = moving_block_bootstrap(columns, lambda means: np.asarray(means[..., 0] / means[..., 1] * 1e9))
    return _with_interval(value, found)


def variation_of_steps(step_ns: NDArray[np.float64]) -> Estimate:
    """Return the coefficient of variation of one run's step time, with an interval as for `throughput_of_steps`.

    Args:
        step_ns: step times, float64, (num_steps,), at least 2.
    """
    mean = float(step_ns.mean())
    value = float(step_ns.std(ddof=1)) / mean
    relative = step_ns / mean

    def statistic(means: NDArray[np.float64]) -> NDArray[np.float64]:
        variance = np.maximum(means[..., 1] - means[..., 0] ** 2, 0.0)
        return np.asarray(np.sqrt(variance) / means[..., 0])

    found = moving_block_bootstrap(np.column_stack([relative, relative**2]), statistic)
    return _with_interval(value, found)


def _with_interval(value: float, found: tuple[NDArray[np.float64], NDArray[np.float64]] | None) -> Estimate:
    if found is None:
        return Estimate(value=value, low=-inf, high=inf)
    return Estimate(value=value, low=min(float(found[0]), value), high=max(float(found[1]), value))
