"""How jitter grows with the number of ranks: as measured, by a null model, and on more nodes than were measured.

The expected maximum of k of the P measured units is exact, over all choices of k. How it grows distinguishes bounded
noise, heavy tails and rare events.

The null model removes shared and lasting parts from the work and shuffles the rest over the steps, independently for
each unit. A measured loss below the null means that some ranks share a cause; a loss above it means that their events
avoid each other.

Where more nodes are predicted, the measured ones stay as they are. New ones are drawn from the population of measured
nodes, whose tail is modelled as a generalised Pareto distribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats, Ints
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


_TAIL_SHARE = 0.05  # statistics: of the values, which are fitted as a tail
_MAX_EXCEEDANCES = 2000  # statistics: per segment; more would reach into the body of the distribution
_NUM_RESAMPLED = 100  # statistics: resamples of the steps
_NUM_BODY_POINTS, _NUM_TAIL_POINTS = 256, 128  # speed: points of the integral
_MAX_SURVIVAL = 1.0 - 1e-15  # statistics: its logarithm is finite
_MIN_SHAPE, _MAX_SHAPE = -5.0, 0.95  # statistics: of a tail; that of a mean that is finite is below 1
_PLOTTING = 0.15  # statistics: moves plotting positions from (j - 0.5) / n to (j - 0.35) / n
_MIN_GAP = 1e-6  # statistics: of moments, relative; and the shape of a tail that counts as exponential


@dataclass(frozen=True, kw_only=True)
class PredictionThresholds(Thresholds, topic="jitter"):
    """When jitter on more nodes is predicted."""

    min_exceedances: int = number(30, "events", at_least=2)
    """Values in the tail of a segment; fewer do not show its shape, and nothing is predicted."""
    speculative_ratio: float = number(16.0, "times")
    """Nodes over the measured ones from which a prediction is marked as speculative."""


class Algorithm(StrEnum):
    """How the transfer of a collective grows with nodes."""

    RING = "ring"
    TREE = "tree"


@dataclass(frozen=True, kw_only=True)
class TransferTerm:
    """The transfer of a step, to extrapolate together with the waiting.

    Attributes:
        algorithm: ring, B (n - 1) / n + latency (n - 1) with n nodes; or tree, in proportion to log2 n.
        transfer_ns: exposed transfer per step on the measured nodes.
        latency_ns: of one hop of the ring, times the number of operations per step.
    """

    algorithm: Algorithm
    transfer_ns: float
    latency_ns: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Pareto:
    """Generalised Pareto distribution of excesses, survival (1 + shape x / scale)^(-1 / shape).

    Attributes:
        shape: 0 for exponential, above 0 for heavier tails, below 0 for bounded ones; float64, (num_fits,).
        scale: float64, (num_fits,).
    """

    shape: Floats
    scale: Floats


@dataclass(frozen=True, kw_only=True)
class Extrapolation:
    """Predicted loss per step.

    Attributes:
        loss_ns: E[max] - E[mean] on that many nodes, plus the growth of the transfer; float64, (num_points,).
        low_ns, high_ns: its 95 % interval over resampled steps, float64, (num_points,). It does not include that other
            nodes may differ from the measured ones.
        is_speculative: whether it is for more than 16 times the measured nodes, bool, (num_points,).
        label: "waiting only" without a transfer term, else "waiting and transfer".
    """

    loss_ns: Floats
    low_ns: Floats
    high_ns: Floats
    is_speculative: Bools
    label: str


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why nothing is predicted.

    Attributes:
        reason: a sentence without its full stop.
    """

    reason: str


@dataclass(frozen=True, kw_only=True)
class _Tail:
    """The largest pooled values of one segment, ascending."""

    body_ns: Floats
    body_survival: Floats
    threshold_ns: float
    excess_ns: Floats
    step: Ints


def fit_pareto(excess: Floats, weight: Floats) -> Pareto:
    """Fit generalised Pareto distributions by probability-weighted moments.

    scale = 2 a0 a1 / (a0 - 2 a1), shape = 2 - a0 / (a0 - 2 a1), a0 = E[x], a1 = E[x (1 - F(x))] (Hosking & Wallis 1987,
    section 3, with plotting positions (j - 0.35) / n). The shape is always below 1, and is clipped to -5 and 0.95.

    Args:
        excess: above the threshold, ascending, float64, (num_exceedances,).
        weight: how often each counts, float64, (num_fits, num_exceedances), not all 0.
    """
    total = weight.sum(axis=1, keepdims=True)
    position = np.clip((np.cumsum(weight, axis=1) - 0.5 * weight + _PLOTTING) / total, 0.0, 1.0)
    first = (weight * excess).sum(axis=1) / total[:, 0]
    second = (weight * (1 - position) * excess).sum(axis=1) / total[:, 0]
    gap = np.maximum(first - 2 * second, _MIN_GAP * first)
    ratio = np.divide(first, gap, out=np.full_like(first, 2.0), where=gap > 0.0)
    shape = np.clip(2 - ratio, _MIN_SHAPE, _MAX_SHAPE)
    # The scale that keeps the mean, scale / (1 - shape), where the shape was clipped.
    return Pareto(shape=shape, scale=np.maximum(first * (1 - shape), np.finfo(np.float64).tiny))


def extrapolate(
    work_ns: Floats,
    node: Ints,
    num_nodes: Ints,
    *,
    parts: WorkParts | None,
    transfer: TransferTerm | None = None,
    seed: int = 0,
    limits: PredictionThresholds = PredictionThresholds(),
) -> Extrapolation | Refusal:
    """Return the loss to waiting on more nodes, or the reason why it cannot be predicted.

    The step median is removed and counted once, as on any number of nodes. M_i is the largest remainder of the measured
    nodes, Y that of N - U new ones. Each new node has the distribution F of all node maxima, whose upper 5 % (2,000
    values at most) are fitted by a generalised Pareto tail. Then E[max(M_i, Y)] = M_i + integral from M_i of
    1 - F^(N - U). So the prediction for the measured nodes is the measured loss, and a slow node among them hides the
    new ones. With few nodes that have much in common it is up to about 5 % too large (8 nodes, normal noise); see
    `split_work`.

    Args:
        work_ns: c_irj, float64, (num_ranks, num_steps, num_segments).
        node: index of the host, int64, (num_ranks,).
        num_nodes: numbers of nodes, none below the measured number, int64, (num_points,).
        parts: the parts of the work; None for fewer than 2 ranks or 2 steps.
        transfer: how the transfer grows; waiting only if None.
        seed: of the bootstrap over blocks of steps.
        limits: what a prediction needs.
    """
    unit = np.unique(node, return_inverse=True)[1]
    num_units = int(unit.max(initial=-1)) + 1
    num_nodes = np.asarray(num_nodes, np.int64)
    reason = _obstacle(work_ns, num_units, num_nodes)
    if reason is not None or parts is None:
        return Refusal(reason=reason or "there is nothing to separate")
    highest_ns = unit_maxima(work_ns - parts.location_ns, unit, num_units).max(axis=0)
    # Of each unit its largest work in a step, without what all ranks share.
    pooled_ns = unit_maxima(parts.residual_ns + parts.rank_effect_ns[:, np.newaxis], unit, num_units)
    tails = [_tail(pooled_ns[:, :, segment]) for segment in range(pooled_ns.shape[2])]
    fewest = min(len(tail.excess_ns) for tail in tails)
    if fewest < limits.min_exceedances:
        return Refusal(reason=f"{fewest} values of a segment are in the tail, {limits.min_exceedances} are needed")
    base_ns = (parts.location_ns + highest_ns - work_ns.mean(axis=0)).sum(axis=1)
    counts = _resampled_counts(base_ns, _NUM_RESAMPLED, seed)
    loss_ns = np.repeat((counts @ base_ns / len(base_ns))[:, np.newaxis], len(num_nodes), axis=1)
    for tail, own_ns in zip(tails, highest_ns.T, strict=True):
        loss_ns += _added(tail, own_ns, counts, num_units, num_nodes - num_units)
    if transfer is not None:
        loss_ns += extrapolated_transfer(transfer, num_units, num_nodes) - transfer.transfer_ns
    low_ns, high_ns = np.quantile(loss_ns[1:], ENDS_95, axis=0)
    return Extrapolation(
        loss_ns=loss_ns[0],
        low_ns=np.minimum(low_ns, loss_ns[0]),
        high_ns=np.maximum(high_ns, loss_ns[0]),
        is_speculative=num_nodes > limits.speculative_ratio * num_units,
        label="waiting only" if transfer is None else "waiting and transfer",
    )


def extrapolated_transfer(transfer: TransferTerm, num_measured: int, num_nodes: Ints) -> Floats:
    """Return the transfer per step on more nodes in nanoseconds, float64, (num_points,).

    Ring: B (n - 1) / n + latency (n - 1); tree: in proportion to log2 n (Thakur, Rabenseifner & Gropp 2005, section 4).

    Args:
        transfer: on the measured nodes.
        num_measured: how many those are, at least 2.
        num_nodes: int64, (num_points,).
    """
    if transfer.algorithm is Algorithm.TREE:
        return np.asarray(transfer.transfer_ns * np.log2(num_nodes) / np.log2(num_measured))
    latency_ns = min(transfer.latency_ns, transfer.transfer_ns / (num_measured - 1))
    volume_ns = (transfer.transfer_ns - latency_ns * (num_measured - 1)) * num_measured / (num_measured - 1)
    return np.asarray(volume_ns * (num_nodes - 1) / num_nodes + latency_ns * (num_nodes - 1))


def _obstacle(work_ns: Floats, num_units: int, num_nodes: Ints) -> str | None:
    """Return why nothing can be predicted, or None."""
    if num_units < 2:
        return "one node cannot separate its own noise from what all nodes share"
    if work_ns.shape[1] < MIN_STEPS or work_ns.shape[2] == 0:
        return f"{work_ns.shape[1]} steps were measured, at least {MIN_STEPS} are needed"
    if len(num_nodes) and int(num_nodes.min()) < num_units:
        return f"{int(num_nodes.min())} nodes are fewer than the {num_units} measured: see the growth curve"
    return None


def _tail(pooled_ns: Floats) -> _Tail:
    """Return the tail and the thinned body of all units' values in one segment, (num_units, num_steps)."""
    num_steps = pooled_ns.shape[1]
    flat = pooled_ns.ravel()
    num_tail = max(min(int(_TAIL_SHARE * flat.size), _MAX_EXCEEDANCES), 1)
    threshold = float(np.partition(flat, flat.size - num_tail - 1)[flat.size - num_tail - 1])
    # A value that differs from the threshold only by rounding does not exceed it.
    above = np.flatnonzero(flat > threshold + ROUNDING * max(abs(threshold), float(np.abs(flat).max())))
    above = above[np.argsort(flat[above])]
    levels = np.linspace(0.0, 1.0 - len(above) / flat.size, _NUM_BODY_POINTS)
    return _Tail(
        body_ns=np.append(np.quantile(flat, levels)[:-1], threshold),
        body_survival=1.0 - levels,
        threshold_ns=threshold,
        excess_ns=flat[above] - threshold,
        step=above % num_steps,
    )


def _resampled_counts(values: Floats, num_draws: int, seed: int) -> Floats:
    """Return how often each step is drawn, (1 + num_draws, num_steps): once in the first row, then in blocks.

    Blocks wrap around the end, so that every step is equally likely (Politis & Romano 1992).
    """
    num_steps = len(values)
    length = block_length(num_steps, lag_one(values))
    num_blocks = -(-num_steps // length)
    start = np.random.default_rng(seed).integers(num_steps, size=(num_draws, num_blocks))
    step = (start[:, :, np.newaxis] + np.arange(length)).reshape(num_draws, num_blocks * length)[
        :, :num_steps
    ] % num_steps
    row = np.arange(num_draws)[:, np.newaxis] * num_steps
    drawn = np.bincount((step + row).ravel(), minlength=num_draws * num_steps).reshape(num_draws, num_steps)
    return np.concatenate([np.ones((1, num_steps)), drawn])


def _added(tail: _Tail, highest_ns: Floats, counts: Floats, num_units: int, num_new: Ints) -> Floats:
    """Return E[max(M, Y)] - E[M] of one segment, (1 + num_draws, num_points).

    Args:
        tail: of the segment.
        highest_ns: M_i, (num_steps,).
        counts: how often each step is drawn, (1 + num_draws, num_steps).
        num_units: measured nodes.
        num_new: numbers of new nodes, (num_points,).
    """
    num_steps = len(highest_ns)
    weight = counts[:, tail.step]
    # A resample without any exceedance gets the measured tail.
    weight[weight.sum(axis=1) == 0] = 1.0
    fit = fit_pareto(tail.excess_ns, weight)
    share = weight.sum(axis=1) / (num_units * num_steps)
    added_ns = np.empty((len(counts), len(num_new)))
    for draw, (count, *pareto) in enumerate(zip(counts, fit.shape.tolist(), fit.scale.tolist(), strict=True)):
        beyond_ns = _mean_beyond(tail, pareto, float(share[draw]), highest_ns, num_new)
        added_ns[draw] = [count @ of_steps / num_steps for of_steps in beyond_ns]
    return added_ns


def _mean_beyond(
    tail: _Tail, pareto: Sequence[float], share: float, highest_ns: Floats, num_new: Ints
) -> Iterator[Floats]:
    """Yield, for each number of new nodes, the integral of 1 - F^num_new from M_i on, float64, (num_steps,).

    Args:
        tail: of the segment.
        pareto: shape and scale fitted to it.
        share: probability of exceeding the threshold.
        highest_ns: M_i, (num_steps,).
        num_new: (num_points,).
    """
    (shape, scale), (grid, survival) = pareto, _survival(tail, pareto, share)
    beaten = -np.expm1(num_new[:, np.newaxis] * np.log1p(-np.minimum(survival, _MAX_SURVIVAL)))
    # The part beyond the grid: K times the mean excess over its end.
    over_end = max(scale + shape * (grid[-1] - tail.threshold_ns), 0.0)
    end = num_new * survival[-1] * over_end / (1 - shape)
    pieces = 0.5 * (beaten[:, 1:] + beaten[:, :-1]) * np.diff(grid)
    integral = np.zeros((len(num_new), len(grid)))
    integral[:, :-1] = np.cumsum(pieces[:, ::-1], axis=1)[:, ::-1]
    for above, beyond in zip(integral, end.tolist(), strict=True):
        yield np.interp(highest_ns, grid, above + beyond, right=beyond)


def _survival(tail: _Tail, pareto: Sequence[float], share: float) -> tuple[Floats, Floats]:
    """Return ascending values, and the probability of exceeding each: empirical body, generalised Pareto tail."""
    shape, scale = pareto
    relative = np.geomspace(1.0, TINY, _NUM_TAIL_POINTS)[1:]
    is_exponential = abs(shape) < _MIN_GAP
    excess = -scale * np.log(relative) if is_exponential else scale / shape * np.expm1(-shape * np.log(relative))
    body_survival = share + (tail.body_survival - tail.body_survival[-1]) * (1 - share) / (1 - tail.body_survival[-1])
    return (
        np.concatenate([tail.body_ns, tail.threshold_ns + excess]),
        np.concatenate([body_survival, share * relative]),
    )
