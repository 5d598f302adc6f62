"""Estimates over repeated runs, and of the throughput and variation of one, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, sqrt

import numpy as np

from hpcpace.core.text import NS_PER_S
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.resampling import Estimate, moving_block_bootstrap
from hpcpace.metrics.special import UPPER_95, ndtri


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean over independent runs with Student's interval.

    Args:
        values: one per run, at least one.
    """
    found = Estimate.of_mean(np.asarray(values, np.float64))
    return found if len(values) > 1 else replace(found, low=-inf, high=inf)


def share_of(count: int, total: int) -> Estimate:
    """Return a share of runs with the interval of Wilson (1927), which is valid near 0 and 1, too.

    Args:
        count: runs that count.
        total: all runs, at least one.
    """
    z = float(ndtri(UPPER_95))
    share = count / total
    center = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * sqrt(share * (1 - share) / total + z**2 / (2 * total) ** 2)
    return Estimate(value=share, low=max(center - half, 0.0), high=min(center + half, 1.0))


def throughput_of_steps(step_ns: Floats, samples: Ints) -> Estimate:
    """Return the samples per second of one run, with the interval of a moving-block bootstrap over its steps.

    Args:
        step_ns: step times, float64, (num_steps,).
        samples: of the global batch, int64, (num_steps,).
    """
    value = float(samples.sum() / step_ns.sum() * NS_PER_S)
    columns = np.column_stack([samples, step_ns]).astype(np.float64)
    found = moving_block_bootstrap(columns, lambda means: np.asarray(means[..., 0] / means[..., 1] * NS_PER_S))
    return _with_interval(value, found)


def variation_of_steps(step_ns: Floats) -> Estimate:
    """Return the coefficient of variation of one run's step time, with an interval as for `throughput_of_steps`.

    Args:
        step_ns: step times, float64, (num_steps,), at least 2.
    """
    mean = float(step_ns.mean())
    value = float(step_ns.std(ddof=1)) / mean
    relative = step_ns / mean

    def statistic(means: Floats) -> Floats:
        variance = np.maximum(means[..., 1] - means[..., 0] ** 2, 0.0)
        return np.asarray(np.sqrt(variance) / means[..., 0])

    found = moving_block_bootstrap(np.column_stack([relative, relative**2]), statistic)
    return _with_interval(value, found)


def _with_interval(value: float, found: tuple[Floats, Floats] | None) -> Estimate:
    if found is None:
        return Estimate(value=value, low=-inf, high=inf)
    return Estimate(value=value, low=min(float(found[0]), value), high=max(float(found[1]), value))
