"""How jitter grows with the number of ranks, measured and by a null model of independent ranks.

The expected maximum of k of the P measured units is exact, over all choices of k. How it grows distinguishes bounded
noise, heavy tails and rare events.

The null model removes shared and lasting parts from the work and shuffles the rest over the steps, independently for
each unit. A measured loss below the null means that some ranks share a cause; a loss above it means that their events
avoid each other.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.amplification import WorkParts, deal, dealt, unit_maxima
from hpcpace.metrics.resampling import MIN_STEPS, Estimate, block_length, lag_one, moving_block_bootstrap
from hpcpace.metrics.special import ENDS_95, ROUNDING, TINY, gammaln

MAX_ELEMENTS = 160_000_000
"""Memory: the most values that all draws of a null model may shuffle together; beyond it, fewer draws are made."""
FEWEST_DRAWS = 39
"""Statistics: draws that are always made: the two outermost of them bound 95 %."""
_NUM_DRAWS = 199  # statistics: enough for both ends of a 95 % interval
_NOT_SERIAL = 0.1  # statistics: correlation of neighbours up to which steps are shuffled one by one


class Comparison(StrEnum):
    """How a measured loss compares with that of independent units."""

    BELOW = "below"
    WITHIN = "within"
    ABOVE = "above"


@dataclass(frozen=True, kw_only=True)
class NullModel:
    """The measured loss against that of independent units.

    Attributes:
        amplification: that of independent units: the mean over draws with 95 % of them.
        comparison: where the measured loss is: outside the interval by more than the tolerance, or within it. The
            tolerance is weight / num_units of the expected loss, because few units cannot separate what they share
            from their own noise.
        is_node_unit: whether nodes, not ranks, were taken as independent units.
    """

    amplification: Estimate
    comparison: Comparison
    is_node_unit: bool


def null_model(work_ns: Floats, parts: WorkParts, *, seed: int = 0, num_draws: int = _NUM_DRAWS) -> NullModel | None:
    """Return the loss that independent units would have, and how the measured loss compares.

    Each unit's residuals are shuffled over the steps independently, in the same way for all its segments and ranks, and
    in blocks if they are serially correlated. Rank effects are added back.

    Args:
        work_ns: c_irj, float64, (num_ranks, num_steps, num_segments).
        parts: the parts of the work.
        seed: of the generator.
        num_draws: draws asked for; at least 39 are made, and no more than fit into 160 million values.

    Returns:
        None for fewer than 2 units, fewer than 8 steps, or no work.
    """
    mean_ns = float(work_ns.mean(axis=(0, 1)).sum()) if work_ns.size else 0.0
    if parts.num_units < 2 or work_ns.shape[1] < MIN_STEPS or mean_ns <= 0.0:
        return None
    num_draws = min(num_draws, max(FEWEST_DRAWS, MAX_ELEMENTS // work_ns.size))
    generator = np.random.default_rng([seed, 1])
    length = serial_length(parts.residual_ns)
    values = parts.residual_ns + parts.rank_effect_ns[:, np.newaxis]
    losses_ns = np.empty(num_draws)
    for draw in range(num_draws):
        order = deal(parts.num_units, work_ns.shape[1], length, generator)[parts.unit]
        losses_ns[draw] = dealt(values, order).max(axis=0).mean(axis=0).sum() - mean_ns
    losses_ns += float(parts.location_ns.mean(axis=0).sum())
    observed_ns = float(work_ns.max(axis=0).mean(axis=0).sum()) - mean_ns
    low_ns, high_ns = np.quantile(losses_ns, ENDS_95)
    expected = Estimate(value=float(losses_ns.mean()), low=float(low_ns), high=float(high_ns))
    # Allow for rounding: with constant work all losses are equal.
    allowed_ns = float(parts.weight.max()) / parts.num_units * abs(expected.value) + ROUNDING * mean_ns
    comparison = Comparison.WITHIN
    if observed_ns > expected.high + allowed_ns:
        comparison = Comparison.ABOVE
    elif observed_ns < expected.low - allowed_ns:
        comparison = Comparison.BELOW
    amplification = expected.through(lambda loss_ns: 1 + loss_ns / mean_ns)
    return NullModel(amplification=amplification, comparison=comparison, is_node_unit=parts.is_node_unit)


def serial_length(residual_ns: Floats) -> int:
    """Return how many steps stay together when residuals are shuffled: 1 unless neighbours correlate above 0.1.

    Args:
        residual_ns: float64, (num_ranks, num_steps, num_segments).
    """
    correlation = lag_one(residual_ns.sum(axis=2).T)
    return block_length(residual_ns.shape[1], correlation, shortest=1) if correlation > _NOT_SERIAL else 1


MAX_POINTS = 32
"""Display: the most points of a growth curve that `default_points` chooses."""
_NUM_NULL_DRAWS = 4  # speed: of the null of a curve, which is smooth
_MAX_DEALT = 4_000_000  # speed: values in all draws of the null together, except the first


@dataclass(frozen=True, kw_only=True)
class GrowthCurve:
    """Amplification among k of the measured units.

    Attributes:
        k: numbers of units, ascending, int64, (num_points,).
        amplification: A(k) = E[max of k] / E[mean] of the work, float64, (num_points,).
        interval: both ends of its 95 % interval, each float64, (num_points,); None for fewer than 8 steps.
        null: the same of independent units, float64, (num_points,).
        exponent: gamma, slope of ln(A(k) - 1) of residuals over ln k in the upper half; None if A(k) - 1 is not above
            0 there, or for fewer than 2 points. Near 0 for bounded noise, about 1 / index for heavy tails, 1 for rare
            events; light tails of few units are still above their limit (normal 0.12 up to 1,024 units).
        exponent_interval: its 95 % interval; None if the exponent is.
    """

    k: Ints
    amplification: Floats
    interval: tuple[Floats, Floats] | None
    null: Floats
    exponent: float | None
    exponent_interval: tuple[float, float] | None


def default_points(num_units: int) -> Ints:
    """Return at most 32 numbers of units, evenly spaced in the logarithm, with 1, 2 and all; int64, ascending."""
    if num_units <= MAX_POINTS:
        return np.arange(1, num_units + 1)
    between = np.rint(np.geomspace(2, num_units, MAX_POINTS - 1)).astype(np.int64)
    return np.unique(np.concatenate([[1], between]))


def maximum_weights(num_units: int, k: Ints) -> Floats:
    """Return the weight of each order statistic in the expected maximum of k of P, float64, (num_points, P).

    C(j-1, k-1) / C(P, k) for the j-th smallest, j >= k, else 0 (a U-statistic, Hoeffding 1948), computed in logarithms.

    Args:
        num_units: P.
        k: numbers of units, 1 to P, int64, (num_points,).
    """
    rank, size = np.arange(1, num_units + 1, dtype=np.float64), k[:, np.newaxis].astype(np.float64)
    above = np.maximum(rank - size, 0.0)
    logarithm = (
        gammaln(rank) - gammaln(above + 1) - gammaln(num_units + 1) + gammaln(num_units - size + 1) + np.log(size)
    )
    weights = np.where(rank >= size, np.exp(logarithm), 0.0)
    # The sum is 1: correct for the rounding of large logarithms.
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def expected_maxima(residual_ns: Floats, k: Ints) -> Floats:
    """Return the expected maximum of k units in each step, summed over segments, float64, (num_steps, num_points).

    Args:
        residual_ns: float64, (num_units, num_steps, num_segments).
        k: numbers of units, int64, (num_points,).
    """
    num_units, num_steps = residual_ns.shape[:2]
    ascending = np.sort(residual_ns.reshape(num_units, -1).T, axis=1)
    maxima = ascending @ maximum_weights(num_units, k).T
    return np.asarray(maxima.reshape(num_steps, -1, len(k)).sum(axis=1))


def growth_exponent(excess: Floats, k: Ints, *, seed: int = 0) -> tuple[float | None, tuple[float, float] | None]:
    """Return the exponent by which the excess of the largest of k units grows, and its 95 % interval.

    Args:
        excess: in each step, relative to E[mean] of the work, float64, (num_steps, num_points).
        k: numbers of units, int64, (num_points,).
        seed: of the bootstrap over steps.
    """
    exponent = float(_slopes(k, excess.mean(axis=0)[np.newaxis])[0])
    if np.isnan(exponent):
        return None, None
    found = moving_block_bootstrap(excess, lambda means: _slopes(k, means), seed=seed)
    interval = None if found is None or np.isnan(found).any() else (float(found[0]), float(found[1]))
    return exponent, interval


def independent_maxima(parts: WorkParts, k: Ints, *, seed: int = 0) -> Floats:
    """Return the expected maximum of k independent units in nanoseconds, summed over segments, (num_points,).

    Each unit's residuals are shuffled over the steps independently, as in the null model. Few draws suffice, because
    each is a mean over all steps: four, or as many, at least one, as hold 4 million values together.

    Args:
        parts: the parts of the work.
        k: numbers of units, int64, (num_points,).
        seed: of the generator.
    """
    generator = np.random.default_rng([seed, 2])
    residual_ns = unit_maxima(parts.residual_ns, parts.unit, parts.num_units)
    length = serial_length(parts.residual_ns)
    num_draws = max(min(_NUM_NULL_DRAWS, _MAX_DEALT // max(residual_ns.size, 1)), 1)
    total = np.zeros(len(k))
    for _ in range(num_draws):
        order = deal(parts.num_units, residual_ns.shape[1], length, generator)
        total += expected_maxima(dealt(residual_ns, order), k).mean(axis=0)
    return total / num_draws


def work_growth(work_ns: Floats, parts: WorkParts, *, seed: int = 0) -> GrowthCurve | None:
    """Return how amplification grows with the number of units, or None without units, steps, or work.

    Lasting differences are included: with all units it is that of `amplification`.

    A(k) = E[max of k of P] / E[mean] of the work itself, per step and segment. The null deals the residuals out anew
    and adds the rank effects back, as the null model does. The exponent is that of the residuals, without lasting
    differences, which grow by their own law. Units are nodes if ranks of a node share noise: then A(1) - 1 is above 0,
    which is what the ranks of one node cost each other.

    Args:
        work_ns: c_irj, float64, (num_ranks, num_steps, num_segments).
        parts: of this work.
        seed: of the bootstrap and the null.
    """
    of_step_ns = work_ns.mean(axis=0).sum(axis=1)
    mean_ns, residual_ns = float(of_step_ns.mean()), unit_maxima(parts.residual_ns, parts.unit, parts.num_units)
    if residual_ns.size == 0 or mean_ns <= 0.0:
        return None
    k = default_points(parts.num_units)
    exponent, exponent_interval = growth_exponent(expected_maxima(residual_ns, k) / mean_ns, k, seed=seed)
    maxima_ns = expected_maxima(unit_maxima(work_ns, parts.unit, parts.num_units), k)
    interval = moving_block_bootstrap(np.column_stack([maxima_ns, of_step_ns]), _over_last, seed=seed)
    lasting = replace(parts, residual_ns=parts.residual_ns + parts.rank_effect_ns[:, np.newaxis])
    null_ns = independent_maxima(lasting, k, seed=seed) + float(parts.location_ns.mean(axis=0).sum())
    return GrowthCurve(
        k=k,
        amplification=maxima_ns.mean(axis=0) / mean_ns,
        interval=None if interval is None else (np.maximum(interval[0], 1.0), interval[1]),
        null=null_ns / mean_ns,
        exponent=exponent,
        exponent_interval=exponent_interval,
    )


def _over_last(means: Floats) -> Floats:
    """Return all columns over the last one; NaN where that is 0, in a resample of steps without work."""
    top, bottom = means[..., :-1], means[..., -1:]
    return np.asarray(np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0))


def _slopes(k: Ints, excess: Floats) -> Floats:
    """Return the slope of ln(excess) over ln k in the upper half of the points, (num_draws,); NaN where undefined."""
    begin = len(k) // 2
    upper, values = np.log(k[begin:].astype(np.float64)), excess[:, begin:]
    if len(upper) < 2:
        return np.full(len(excess), np.nan)
    upper = upper - upper.mean()
    # Rounding of equal residuals is no growth.
    is_growing = (values > TINY).all(axis=1)
    logarithm = np.log(np.where(values > TINY, values, 1.0))
    return np.where(is_growing, logarithm @ upper / (upper @ upper), np.nan)
