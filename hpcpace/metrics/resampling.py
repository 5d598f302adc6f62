"""Intervals of figures over the steps of one run, by resampling.

Only steps are resampled, in blocks. Ranks and nodes never are: drawing them with replacement biases a maximum over
them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.metrics import Floats
from hpcpace.metrics.special import TINY, UPPER_95, ndtri, stdtr, stdtrit

_MAX_ELEMENTS = 4_000_000  # memory: of block sums at once
MAX_BLOCKS = 20  # statistics: of steps: enough for a standard error, and long enough not to depend on each other
MIN_STEPS = 8  # statistics: fewer have too few blocks for an interval
MAX_SHORT_RHO = 0.9  # statistics: of short series, whose correlation is known badly: a factor 4.4 at most
_MAX_RHO = 0.99  # statistics: of neighbouring steps; of more correlated ones no length is enough
_PER_BLOCK = 6  # statistics: blocks to choose from
_NUM_DRAWS, _NUM_LOG_DRAWS = 500, 200  # statistics: resamples for the ends of an interval, and for a standard error
_THIRD = 1 / 3  # statistics: blocks grow with the cube root of the steps


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its interval, of 95 % unless said otherwise.

    The ends are infinite, or the value itself, if a single value says nothing about the spread.
    """

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, half_width: float) -> Estimate:
        """Return a value with an interval of the same width on both sides."""
        return cls(value=value, low=value - half_width, high=value + half_width)

    @classmethod
    def of_mean(cls, values: Floats, *, widened: float = 1.0) -> Estimate:
        """Return the mean of values with Student's interval, wider by a factor; without width for a single value."""
        mean, num_values = float(values.mean()), len(values)
        if num_values < 2:
            return cls.around(mean, 0.0)
        half = float(stdtrit(num_values - 1, UPPER_95) * values.std(ddof=1) / np.sqrt(num_values)) * widened
        return cls.around(mean, half)

    @property
    def interval(self) -> tuple[float, float]:
        """Both ends of the interval."""
        return self.low, self.high

    def through(self, function: Callable[[float], float]) -> Estimate:
        """Return the estimate of a rising function of the value, such as a change of units."""
        value, low, high = (float(function(part)) for part in (self.value, self.low, self.high))
        return Estimate(value=value, low=low, high=high)

    def as_percent(self, digits: int = 1, *, is_change: bool = True) -> str:
        """Return shares in percent: a change as `+3.1 % [+2.0, +4.2]`, a part of a whole without signs."""
        sign = "+" if is_change else ""
        value, low, high = (f"{100 * part:{sign}.{digits}f}" for part in (self.value, self.low, self.high))
        return f"{value} % [{low}, {high}]"


def lag_one(values: Floats) -> float:
    """Return the correlation of neighbouring steps, pooled over columns; 0 for constant or too short data.

    Args:
        values: any quantity, float64, (num_steps,) or (num_steps, num_columns).
    """
    centred = values - values.mean(axis=0) if len(values) > 1 else np.zeros_like(values)
    power = float(np.vdot(centred, centred))
    return float(np.vdot(centred[1:], centred[:-1])) / power if power > 0.0 else 0.0


def block_length(num_steps: int, correlation: float, *, shortest: int | None = None) -> int:
    """Return how many steps a block has: ceil(n^(1/3)), more if neighbouring steps are correlated.

    The longer value is (3 n / 2)^(1/3) (2 rho / (1 - rho^2))^(2/3), the optimum for the variance of the mean of a
    first-order autoregression (Lahiri 2003, Resampling Methods for Dependent Data, section 7.4; Politis & White 2004,
    section 3), at most a sixth of the steps, so that there are blocks to choose from.

    Args:
        num_steps: steps, n.
        correlation: of neighbouring steps, rho.
        shortest: the least length instead of ceil(n^(1/3)).
    """
    rho = min(max(correlation, 0.0), _MAX_RHO)
    optimum = (num_steps + num_steps / 2) ** _THIRD * (2 * rho / (1 - rho**2)) ** (2 * _THIRD)
    least = int(np.ceil(num_steps**_THIRD)) if shortest is None else shortest
    return max(min(max(least, int(np.ceil(optimum))), num_steps // _PER_BLOCK), 1)


def moving_block_bootstrap(
    values: Floats,
    statistic: Callable[[Floats], Floats] | None = None,
    *,
    num_draws: int = _NUM_DRAWS,
    seed: int = 0,
) -> tuple[Floats, Floats] | None:
    """Return the 95 % interval of a statistic of means over steps, or None for fewer than 8 steps.

    Moving-block bootstrap (Künsch 1989; Liu & Singh 1992), centred on the mean of the data (Lahiri 1992). The interval
    holds the quantiles of the draws, moved away from the estimate by t / z with as many degrees of freedom as there
    are blocks less one, and by the variance that B blocks lack, B / (B - 1): quantiles alone cover too little.

    Args:
        values: what is averaged, float64, (num_steps,) or (num_steps, num_columns).
        statistic: function of means, (num_draws, num_columns), along its last axis: (num_draws,) or (num_draws,
            num_statistics); the means themselves if None. May return NaN for a draw, which then does not count.
        num_draws: resamples.
        seed: of the generator.

    Returns:
        `low, high`, float64, each of the shape of one statistic: () or (num_statistics,). A statistic that is NaN in
        all draws has NaN.
    """
    num_steps = len(values)
    if num_steps < MIN_STEPS:
        return None
    table = values.reshape(num_steps, -1 if values.size else 0).astype(np.float64)
    # Columns of equal variance, so that the block length does not depend on units of measurement.
    spread = table.std(axis=0)
    scaled = np.divide(table, spread, out=np.zeros_like(table), where=spread > 0.0)
    length = block_length(num_steps, lag_one(scaled))
    num_blocks = -(-num_steps // length)
    mean = table.mean(axis=0)
    block_means = _block_means(table - mean, length)
    draws = _draw_means(block_means, num_blocks, num_draws, np.random.default_rng(seed)) - block_means.mean(axis=0)
    freedom = max(num_blocks - 1, 1)
    # The draws average num_blocks * length values instead of num_steps.
    variance_factor = num_blocks * length / num_steps * num_blocks / freedom
    factor = float(np.sqrt(variance_factor) * stdtrit(freedom, UPPER_95) / ndtri(UPPER_95))
    take = statistic or (lambda means: means[..., 0] if values.ndim == 1 else means)
    estimate, drawn = take(mean[np.newaxis])[0], take(mean + draws)
    low, high = _quantiles(drawn, (1 - UPPER_95, UPPER_95))
    return estimate + (low - estimate) * factor, estimate + (high - estimate) * factor


def log_error(
    values: Floats, statistic: Callable[..., Floats], *, num_draws: int = _NUM_LOG_DRAWS, seed: int = 0
) -> float | None:
    """Return the standard error of the logarithm of a statistic over steps, or None for fewer than 8 steps.

    Moving-block bootstrap, as of `moving_block_bootstrap`; the error is the standard deviation of the draws, with the
    same correction for few blocks.

    Args:
        values: float64, positive, (num_steps,).
        statistic: `np.median`, `np.mean` or another one of values and an axis.
        num_draws: resamples.
        seed: of the generator.
    """
    num_steps = len(values)
    if num_steps < MIN_STEPS:
        return None
    length = block_length(num_steps, lag_one(values))
    num_blocks = -(-num_steps // length)
    starts = np.random.default_rng(seed).integers(num_steps - length + 1, size=(num_draws, num_blocks))
    at_once, drawn = max(_MAX_ELEMENTS // (num_blocks * length), 1), np.zeros(0)
    for first in range(0, num_draws, at_once):
        rows = starts[first : first + at_once, :, np.newaxis] + np.arange(length)
        drawn = np.append(drawn, statistic(values[rows].reshape(-1, num_blocks * length), 1))
    factor = num_blocks * length / num_steps * num_blocks / max(num_blocks - 1, 1)
    return float(np.log(drawn).std(ddof=1) * factor**0.5)


def chance_above_zero(values: Floats) -> float | None:
    """Return the probability of a mean over steps this far above 0 by chance; None for constant data or under 8 steps.

    Method of batch means: t-test of the means of blocks that do not overlap (Alexopoulos & Goldsman 2004, section 2).

    Args:
        values: float64, (num_steps,).
    """
    num_steps = len(values)
    if num_steps < MIN_STEPS:
        return None
    num_batches = num_steps // block_length(num_steps, lag_one(values), shortest=1)
    edges = np.arange(num_batches + 1) * num_steps // num_batches
    means = np.add.reduceat(values, edges[:-1]) / np.diff(edges)
    error, mean = float(means.std(ddof=1)) / num_batches**0.5, float(values.mean())
    return None if error <= TINY * abs(mean) else float(stdtr(num_batches - 1, -mean / error))


def _block_means(table: Floats, length: int) -> Floats:
    """Return the mean of every run of `length` steps, (num_steps - length + 1, num_columns)."""
    sums = np.concatenate([np.zeros((1, table.shape[1])), np.cumsum(table, axis=0)])
    return np.asarray((sums[length:] - sums[:-length]) / length)


def _draw_means(block_means: Floats, num_blocks: int, num_draws: int, generator: np.random.Generator) -> Floats:
    start = generator.integers(len(block_means), size=(num_draws, num_blocks))
    at_once = max(_MAX_ELEMENTS // max(num_blocks * block_means.shape[1], 1), 1)
    parts = [block_means[start[i : i + at_once]].mean(axis=1) for i in range(0, num_draws, at_once)]
    return np.asarray(np.concatenate([np.empty((0, block_means.shape[1])), *parts]))


def _quantiles(drawn: Floats, levels: tuple[float, float]) -> Floats:
    """Return quantiles over draws without NaN; NaN if all draws are NaN."""
    columns = drawn.reshape(len(drawn), -1)
    found = np.full((len(levels), columns.shape[1]), np.nan)
    whole = ~np.isnan(columns).any(axis=0)
    if len(columns):
        found[:, whole] = np.quantile(columns[:, whole], levels, axis=0)
        for column in np.flatnonzero(~whole & ~np.isnan(columns).all(axis=0)):
            found[:, column] = np.nanquantile(columns[:, column], levels)
    return np.asarray(found.reshape(len(levels), *drawn.shape[1:]))


def trimmed_mean(values: Floats, share: float) -> Floats:
    """Return the mean over the first axis without the smallest and the largest values of each column.

    This is `scipy.stats.trim_mean`, whose module takes longer to import than most reports take to compute.

    Args:
        values: (num_values, ...).
        share: of the values that is left out at each end, below 0.5.
    """
    first = int(share * len(values))
    stop = len(values) - first
    ordered = np.partition(values, (first, stop - 1), axis=0)
    return np.asarray(ordered[first:stop].mean(axis=0))


def block_means(values: Floats) -> Floats:
    """Return means over `MAX_BLOCKS` blocks of steps or fewer, (num_rows, num_blocks), of (num_rows, num_steps).

    Two steps or more make two blocks or more.
    """
    num_steps = values.shape[1]
    num_blocks = min(MAX_BLOCKS, max(num_steps // 2, 2), num_steps)
    length = max(num_steps // num_blocks, 1)
    return np.asarray(values[:, : num_blocks * length].reshape(len(values), num_blocks, length).mean(axis=2))


def half_width(error: float, num_blocks: int) -> float:
    """Return half of the 95 % interval of a mean over blocks of steps, from its standard error (Student's t)."""
    return float(stdtrit(num_blocks - 1, UPPER_95) * error)
