"""How sure a share over steps is: neighbouring steps share their noise, so errors come from blocks of them."""

from __future__ import annotations

import numpy as np
from scipy.special import stdtr, stdtrit

from hpcpace.diagnosis.modes.finding import Floats, Panels
from hpcpace.metrics.resampling import block_means, half_width


def block_error(share: Floats, level: float) -> tuple[Floats, Floats, float]:
    """Return means over steps, their standard errors from blocks of steps, and the quantile of Student's t."""
    blocks = block_means(share)
    error = blocks.std(axis=1, ddof=1) / np.sqrt(blocks.shape[1])
    return share.mean(axis=1), error, float(stdtrit(blocks.shape[1] - 1, 1 - level))


def p_value_of(mean: float, error: float, num_steps: int) -> float:
    """Return the probability of a mean as large by chance, one-sided, from its standard error by `block_error`."""
    num_blocks = min(20, max(num_steps // 2, 2))
    return float(stdtr(num_blocks - 1, -mean / error)) if error > 0 else 0.0


def mean_share_interval(panels: Panels, part_ns: Floats) -> tuple[float, float]:
    """Return the 95 % interval of a part's share of the mean step time; `part_ns` is (num_ranks, num_steps)."""
    share = (part_ns.mean(axis=0) / panels.mean_time_ns)[None, :]
    mean, error, _ = block_error(share, 0.5)
    half = half_width(float(error[0]), block_means(share).shape[1])
    return float(mean[0]) - half, float(mean[0]) + half


def confidence_of(p_value: float) -> float:
    """Return the probability that a finding with this p-value is right, by docs/results/diagnosis-score.md."""
    return float(min(max(1.0 - 10 * p_value, 0.5), 0.99))
