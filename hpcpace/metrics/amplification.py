"""Amplification of jitter: what synchronising costs, and which parts of the work cause it.

All functions take the local work between synchronisations, c_irj for rank r in step i and segment j. Maxima over ranks
are taken per segment and then summed: the maximum of sums over a whole step understates the loss. Work is split into
what all ranks share in a step, what a rank has in every step, and the rest, which belongs to units that are hit
independently: nodes if the ranks of a node share their noise, else ranks.
"""

from __future__ import annotations

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.resampling import MIN_STEPS, block_length, chance_above_zero, lag_one, moving_block_bootstrap
from hpcpace.metrics.special import ROUNDING, TINY


@dataclass(frozen=True, kw_only=True)
class NoiseThresholds(Thresholds, topic="jitter"):
    """When noise is shared, amplified, or large enough to say anything of."""

    bound_margin: float = number(0.05, "share")
    """Part by which computation must exceed communication, or the reverse, for a step to change sides."""
    min_operations: int = number(10, "operations")
    """Collectives with a known skew; fewer give no slope of transfers."""
    min_skew_errors: float = number(3.0, "times")
    """Skew over the clocks' error; the error of smaller ones alone gives a negative slope."""
    shared_level: float = number(0.01, "probability")
    """Chance below which ranks of a node count as sharing noise."""
    min_shared_correlation: float = number(0.05, "correlation")
    """Correlation within nodes up to which shared noise is too little to matter."""
    min_noise: float = number(1e-4, "share")
    """Noise relative to the work, up to which its amplification is not known."""


@dataclass(frozen=True, kw_only=True)
class BoundSwitches:
    """What the steps are bound by.

    Attributes:
        compute_share: share of steps in the compute-bound regime, the others being communication-bound; 0 if no step is
            decided.
        num_switches: how often one regime follows the other.
    """

    compute_share: float
    num_switches: int


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """How the transfer of collectives depends on the skew of their ranks.

    Attributes:
        slope: b, nanoseconds of transfer per nanosecond of skew; below 0 means contention when all arrive together.
        standard_error: of the slope, allowing for serial correlation and unequal variances.
        num_operations: collectives used, those with a skew of at least 3 clock errors.
    """

    slope: float
    standard_error: float
    num_operations: int


def bound_switches(
    compute_ns: Floats, communication_ns: Floats, *, margin: float = NoiseThresholds.bound_margin
) -> BoundSwitches | None:
    """Return how many steps are compute-bound or communication-bound, and how often that changes; None without steps.

    A step is decided if one of the two exceeds the other by more than `margin`. Other steps keep the regime of the
    previous step, the first ones that of the first decided step, so that noise around a balance causes no switches.

    Args:
        compute_ns, communication_ns: of each step, float64, (num_steps,).
        margin: share by which the larger must exceed the smaller.
    """
    num_steps = len(compute_ns)
    if not num_steps:
        return None
    is_compute = compute_ns > (1 + margin) * communication_ns
    is_communication = communication_ns > (1 + margin) * compute_ns
    decided = np.flatnonzero(is_compute | is_communication)
    if not len(decided):
        return BoundSwitches(compute_share=0.0, num_switches=0)
    last = np.maximum(np.searchsorted(decided, np.arange(num_steps), side="right") - 1, 0)
    compute = is_compute[decided[last]]
    num_switches = int((compute[1:] != compute[:-1]).sum())
    return BoundSwitches(compute_share=float(compute.mean()), num_switches=num_switches)


def collective_sensitivity(
    transfer_ns: Floats,
    skew_ns: Floats,
    clock_error_ns: float | Floats,
    place: Ints | None = None,
    limits: NoiseThresholds = NoiseThresholds(),
) -> Sensitivity | None:
    """Return how the transfer of collectives of one kind and size depends on the skew of their ranks.

    Least squares of transfer on skew, each less its mean over the operations of the same place, over operations with a
    skew of at least 3 clock errors: below that, the clock error enters both with opposite signs, which alone gives a
    negative slope. Standard error by Newey & West 1987 with Bartlett weights and 4 (n / 100)^(2/9) lags, times
    n / (n - 1 - places).

    Args:
        transfer_ns: of each operation, in order of time, float64, (num_operations,).
        skew_ns: largest own delay less the smallest one, float64, (num_operations,).
        clock_error_ns: half-width of the common clock, one or float64, (num_operations,).
        place: number of its process group and place in the step, between which transfers differ, int64,
            (num_operations,); one for all by default.
        limits: which skews count, and how many of them are enough.

    Returns:
        None for fewer than 10 such operations, 9 more than places, or if the standard deviation of their skew does not
        exceed the clock error.
    """
    error_ns = np.broadcast_to(np.asarray(clock_error_ns, np.float64), skew_ns.shape)
    is_used = (skew_ns >= limits.min_skew_errors * error_ns) & np.isfinite(error_ns)
    num_used = int(is_used.sum())
    of_place = np.zeros(num_used, np.int64)
    if place is not None:
        _, of_place = np.unique(place[is_used], return_inverse=True)
    num_places = int(of_place.max(initial=0)) + 1
    if num_used - num_places < limits.min_operations - 1:
        return None
    most = float(np.abs(skew_ns[is_used]).max())
    skew, transfer = (_less_means(values[is_used], of_place) for values in (skew_ns, transfer_ns))
    spread = float(skew.std())
    if spread <= max(float(error_ns[is_used].mean()), ROUNDING * most):
        return None
    skew /= spread
    slope = float(skew @ transfer) / num_used
    variance = _long_run_variance(skew * (transfer - slope * skew)) / (num_used * (num_used - 1 - num_places))
    return Sensitivity(slope=slope / spread, standard_error=variance**0.5 / spread, num_operations=num_used)


def _less_means(values: Floats, place: Ints) -> Floats:
    """Return values less the mean of those of the same place, float64, (num_values,)."""
    return np.asarray(values - (np.bincount(place, values) / np.bincount(place))[place])


def _long_run_variance(score: Floats) -> float:
    """Return the variance of a sum of serially correlated scores, (num_scores,), with Bartlett weights."""
    num_lags = min(int(_LAGS_OF_100 * (len(score) / 100) ** _LAG_POWER), len(score) - 1)
    variance = float(score @ score)
    for lag in range(1, num_lags + 1):
        variance += 2 * (1 - lag / (num_lags + 1)) * float(score[lag:] @ score[:-lag])
    return max(variance, 0.0)


_MAX_BLOCKS = 64  # statistics: for the null of the persistent part: more blocks make it slower, not better
_NUM_DRAWS = 99  # statistics: of that null, whose mean is used alone
_QUIET = 0.05  # statistics: quantile of a rank's steps that counts as work without noise
_LAGS_OF_100, _LAG_POWER = 4, 2 / 9  # statistics: lags of Newey and West, for 100 scores and their growth
_BY_CHANCE = 4.0  # statistics: standard errors of the logarithm of a variance, up to which nothing is shared


@dataclass(frozen=True, kw_only=True)
class Amplification:
    """What synchronising costs, as factors of the mean work and in nanoseconds per step.

    Attributes:
        amplification: A = E[max] / E[mean]; 1 means none.
        interval: its 95 % interval, moving-block bootstrap over steps; None for fewer than 8 steps.
        persistent: A_p = max E[c] / mean E[c], a slow rank.
        transient: A_t = E[max] / max E[c] >= 1, jitter proper; amplification = persistent * transient.
        loss_ns: E[max] - E[mean].
        persistent_null: A_p expected from noise alone, without any slow rank; None for fewer than 8 steps.
    """

    amplification: float
    interval: tuple[float, float] | None
    persistent: float
    transient: float
    loss_ns: float
    persistent_null: float | None


@dataclass(frozen=True, kw_only=True)
class NoiseShares:
    """Shares of the variance of step sums; they add up to 1.

    Attributes:
        common: what all ranks share in a step: a shared cause.
        rank: what a rank has in every step: hardware, or how the work is split.
        residual: the rest: noise of single ranks.
    """

    common: float
    rank: float
    residual: float


def amplification(work_ns: Floats, *, seed: int = 0, num_draws: int = _NUM_DRAWS) -> Amplification | None:
    """Return the amplification of jitter, or None without work, ranks, steps or segments.

    A = E_i[max_r c] / E_i[mean_r c], A_p = max_r E_i[c] / mean_r E_i[c], A_t = E_i[max_r c] / max_r E_i[c], numerators
    and denominators summed over segments, so that A = A_p A_t.

    Noise biases A_p upwards, because the largest of P means exceeds their mean. Its null comes from permutations: step
    means and rank effects are removed, steps joined into blocks (which keeps serial correlation), and the ranks of each
    block permuted, in the same way for all segments.

    Args:
        work_ns: c_irj, float64, (num_ranks, num_steps, num_segments).
        seed: of the generator.
        num_draws: draws of the null of A_p.
    """
    if work_ns.size == 0:
        return None
    largest_ns, mean_ns = work_ns.max(axis=0), work_ns.mean(axis=0)
    of_rank_ns = work_ns.mean(axis=1)
    mean = float(mean_ns.mean(axis=0).sum())
    if mean <= 0.0:
        return None
    # Work that never changes must give 0, not rounding.
    worst = max(float(of_rank_ns.max(axis=0).sum()), mean)
    largest = max(float(largest_ns.mean(axis=0).sum()), worst)
    interval = moving_block_bootstrap(np.column_stack([largest_ns.sum(axis=1), mean_ns.sum(axis=1)]), _ratio, seed=seed)
    null_ns = _persistent_null(work_ns - mean_ns, num_draws, np.random.default_rng(seed))
    return Amplification(
        amplification=largest / mean,
        interval=None if interval is None else (max(float(interval[0]), 1.0), float(interval[1])),
        persistent=worst / mean,
        transient=largest / worst,
        loss_ns=largest - mean,
        persistent_null=None if null_ns is None else 1 + float(null_ns.mean()) / mean,
    )


def noise_shares(work_ns: Floats) -> NoiseShares | None:
    """Return which shares of the variance of step sums are common to all ranks, due to single ranks, and noise.

    Two-way analysis of variance without replication, c = mu + a_i + s_r + e_ir, with components from expected mean
    squares: var e = MSE, var a = (MSA - MSE) / P, var s = (MSS - MSE) / n, with negative ones set to 0 (Searle,
    Casella & McCulloch 1992, Variance Components, section 4.3).

    Args:
        work_ns: c_irj, float64, (num_ranks, num_steps, num_segments).

    Returns:
        None for fewer than 2 ranks or 2 steps, and for constant work.
    """
    num_ranks, num_steps = work_ns.shape[:2]
    if num_ranks < 2 or num_steps < 2:
        return None
    work = work_ns.sum(axis=2)
    size = float(np.abs(work).max())
    rest = work - work.mean()
    of_step, of_rank = rest.mean(axis=0), rest.mean(axis=1)
    rest = rest - of_step - of_rank[:, np.newaxis]
    noise = float(np.vdot(rest, rest)) / ((num_ranks - 1) * (num_steps - 1))
    common = max(float(of_step @ of_step) / (num_steps - 1) - noise / num_ranks, 0.0)
    rank = max(float(of_rank @ of_rank) / (num_ranks - 1) - noise / num_steps, 0.0)
    total = common + rank + noise
    if total <= (TINY * size) ** 2:
        return None
    return NoiseShares(common=common / total, rank=rank / total, residual=noise / total)


def noise_intensity(work_ns: Floats) -> float | None:
    """Return the noise of single ranks, nu = mean(c) / q05(c) - 1 of a rank's step sums, averaged over ranks.

    Args:
        work_ns: c_irj, float64, (num_ranks, num_steps, num_segments).

    Returns:
        None if no rank has a positive 5 % quantile.
    """
    if work_ns.size == 0:
        return None
    work = work_ns.sum(axis=2)
    quiet = np.quantile(work, _QUIET, axis=1)
    is_usable = quiet > 0.0
    if not is_usable.any():
        return None
    return float(np.mean(work[is_usable].mean(axis=1) / quiet[is_usable] - 1.0))


def noise_amplification(
    step_ns: Floats, work_ns: Floats, transfer_ns: Floats, min_noise: float = NoiseThresholds.min_noise
) -> float | None:
    """Return how much of local noise reaches the step time: alpha > 1 means amplified, < 1 absorbed.

    alpha = (E[T] / T_ideal - 1) / nu, T_ideal = max_r q05(c_r) + median exposed transfer, c_r the rank's step sums.

    Args:
        step_ns: step times T, float64, (num_steps,).
        work_ns: c_irj, float64, (num_ranks, num_steps, num_segments).
        transfer_ns: exposed transfer of each step, float64, (num_steps,).
        min_noise: nu, up to which nothing is known.

    Returns:
        None without steps, if nu is `min_noise` or less, or if T_ideal is not above 0. None above the number of ranks
        as well: all noise of all ranks in a row is less, so that T_ideal lacks something.
    """
    noise = noise_intensity(work_ns)
    if noise is None or noise <= min_noise or not len(step_ns):
        return None
    transfer = float(np.median(transfer_ns)) if len(transfer_ns) else 0.0
    ideal_ns = float(np.quantile(work_ns.sum(axis=2), _QUIET, axis=1).max()) + transfer
    if ideal_ns <= 0.0:
        return None
    reaches = (float(step_ns.mean()) / ideal_ns - 1.0) / noise
    return reaches if reaches <= len(work_ns) else None


def _ratio(means: Floats) -> Floats:
    """Return the ratio of two means of positive quantities; NaN if the denominator of a resample is close to 0."""
    top, bottom = means[..., 0], means[..., 1]
    return np.asarray(np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > ROUNDING * np.abs(top)))


def _persistent_null(deviation_ns: Floats, num_draws: int, generator: np.random.Generator) -> Floats | None:
    """Return draws of max_r E_i[c] - mean_r E_i[c] under noise alone, (num_draws,); `deviation_ns` has step mean 0."""
    num_ranks, num_steps = deviation_ns.shape[:2]
    if num_steps < MIN_STEPS or num_ranks < 2:
        return None
    rest = deviation_ns - deviation_ns.mean(axis=1, keepdims=True)
    length = block_length(num_steps, lag_one(rest.sum(axis=2).T), shortest=1)
    num_blocks = min(num_steps // length, _MAX_BLOCKS)
    edges = np.arange(num_blocks) * num_steps // num_blocks
    # Subtracting their mean leaves the blocks of a rank (B - 1) / B of the variance.
    part = np.add.reduceat(rest, edges, axis=1) * (num_blocks / (num_blocks - 1)) ** 0.5 / num_steps
    rows = np.broadcast_to(np.arange(num_ranks)[:, np.newaxis], (num_ranks, num_blocks))
    draws = np.empty(num_draws)
    for draw in range(num_draws):
        order = generator.permuted(rows, axis=0)
        mixed = part[order, np.arange(num_blocks)].sum(axis=1)
        draws[draw] = mixed.max(axis=0).sum()
    return draws


_NUM_FIRST_STEPS = 250  # speed: of the first pass


@dataclass(frozen=True, kw_only=True)
class WorkParts:
    """The parts of work: work = location + rank effect + residual, up to the small-number correction of the residual.

    Attributes:
        location_ns: what all ranks share in a step, float64, (num_steps, num_segments).
        weight: share of the step median's variation that is taken as shared, 0 to 1, float64, (num_segments,).
        rank_effect_ns: what a rank has in every step, mean over steps, float64, (num_ranks, num_segments).
        residual_ns: the rest, mean 0 for each rank, float64, (num_ranks, num_steps, num_segments).
        unit: the unit that each rank belongs to, 0, 1, ...: its node if ranks of a node share noise, else the rank
            itself, int64, (num_ranks,).
        num_units: number of units.
        is_node_unit: whether nodes are the units.
    """

    location_ns: Floats
    weight: Floats
    rank_effect_ns: Floats
    residual_ns: Floats
    unit: Ints
    num_units: int
    is_node_unit: bool


def shared_noise(deviation_ns: Floats, node: Ints) -> tuple[float, float] | None:
    """Return how the noise of ranks within nodes correlates, and the probability of such a correlation by chance.

    Each step gives mean squares between nodes and within them (one-way analysis of variance). The correlation is
    (MSB - MSW) / (MSB + (k0 - 1) MSW), ICC(1) of Shrout & Fleiss 1979 with k0 of Donner 1986 for unequal nodes. The
    test is on the mean over steps of MSB - MSW and allows for serial correlation. What all ranks share cancels out.

    Args:
        deviation_ns: work per step less the rank's mean, float64, (num_ranks, num_steps).
        node: index of the host, int64, (num_ranks,).

    Returns:
        None if no node has two ranks, with only one node, and for fewer than 8 steps or constant work.
    """
    _, unit, size = np.unique(node, return_inverse=True, return_counts=True)
    num_ranks, num_nodes = len(node), len(size)
    if num_nodes < 2 or num_nodes == num_ranks or deviation_ns.shape[1] == 0:
        return None
    node_mean = unit_means(deviation_ns, unit, num_nodes)
    grand = deviation_ns.mean(axis=0)
    within = np.einsum("ri,ri->i", deviation_ns, deviation_ns) - size @ node_mean**2
    between = (size @ (node_mean - grand) ** 2) / (num_nodes - 1)
    within = np.maximum(within, 0.0) / (num_ranks - num_nodes)
    typical = (num_ranks - (size**2).sum() / num_ranks) / (num_nodes - 1)
    total = float(between.mean() + (typical - 1) * within.mean())
    chance = chance_above_zero(between - within)
    return None if total <= 0.0 or chance is None else (float(between.mean() - within.mean()) / total, chance)


def split_work(
    work_ns: Floats, node: Ints, *, seed: int = 0, limits: NoiseThresholds = NoiseThresholds()
) -> WorkParts | None:
    """Split work into location, rank effects and residuals, or return None for fewer than 2 ranks or 2 steps.

    The location is the step median m_i, shrunk towards its mean with weight w = 1 - V0 / V1: V1 is its variance, V0 the
    variance that a median of independent units would have (positive-part shrinkage, Efron & Morris 1973; w = 0 if
    ln(V1 / V0) is below two standard errors, 4 / sqrt(n)). V0 comes from shuffled work first, then from shuffled
    residuals. Without shrinkage, the median of few units would take part of their own noise with it and leave residuals
    that avoid each other. What the location still takes is put back by scaling the residuals of units to the unbiased
    residual variance, at most by sqrt(U / (U - 1)). Both corrections vanish as 1 / U.

    If much is shared, the expected maximum is then right to 2 % for normal noise of 4 and more units, and to 5 % for
    exponential noise; for 2 or 3 units with rare events it is no better than 1 / U. If 2 or 3 units share a little,
    that goes unnoticed, and the null is up to 15 % too high.

    Args:
        work_ns: c_irj, float64, (num_ranks, num_steps, num_segments).
        node: index of the host, int64, (num_ranks,).
        seed: of the draws that V0 is taken from.
        limits: when ranks of a node share noise.
    """
    num_ranks, num_steps = work_ns.shape[:2]
    if num_ranks < 2 or num_steps < 2 or work_ns.shape[2] == 0:
        return None
    per_step = work_ns.sum(axis=2)
    shared = shared_noise(per_step - per_step.mean(axis=1, keepdims=True), node)
    correlation, chance = shared or (0.0, 1.0)
    is_node_unit = correlation > limits.min_shared_correlation and chance < limits.shared_level
    unit = np.unique(node, return_inverse=True)[1] if is_node_unit else np.arange(num_ranks)
    num_units = int(unit.max()) + 1
    median_ns = np.median(work_ns, axis=0)
    shared_ns = median_ns - median_ns.mean(axis=0)
    generator = np.random.default_rng(seed)
    # The first pass only has to be close: some of the steps suffice.
    some = slice(None, None, max(num_steps // _NUM_FIRST_STEPS, 1))
    weight = _weight(work_ns[:, some], shared_ns[some], unit, np.zeros(work_ns.shape[2]), generator)
    if weight.any():
        weight = _weight(work_ns, shared_ns, unit, weight, generator)
    location_ns = median_ns.mean(axis=0) + weight * shared_ns
    residual = work_ns - location_ns
    rank_effect_ns = residual.mean(axis=1)
    residual -= rank_effect_ns[:, np.newaxis]
    _rescale(residual, work_ns, unit, num_units)
    return WorkParts(
        location_ns=location_ns,
        weight=weight,
        rank_effect_ns=rank_effect_ns,
        residual_ns=residual,
        unit=unit,
        num_units=num_units,
        is_node_unit=is_node_unit,
    )


def deal(num_units: int, num_steps: int, length: int, generator: np.random.Generator) -> Ints:
    """Return a random order of the steps for each unit that keeps blocks together, int64, (num_units, num_steps).

    Args:
        num_units, num_steps: shape of the result.
        length: steps of a block.
        generator: source of randomness.
    """
    num_blocks = -(-num_steps // length)
    blocks = generator.permuted(np.broadcast_to(np.arange(num_blocks), (num_units, num_blocks)), axis=1)
    if length == 1:
        return blocks
    order = (blocks[:, :, np.newaxis] * length + np.arange(length)).reshape(num_units, -1)
    return order[order < num_steps].reshape(num_units, num_steps)


def dealt(values: Floats, order: Ints) -> Floats:
    """Return values, (num_ranks, num_steps, num_segments), with the steps of each rank in its own `order`."""
    num_ranks, num_steps = order.shape
    rows = order + np.arange(num_ranks)[:, np.newaxis] * num_steps
    return np.asarray(np.take(values.reshape(num_ranks * num_steps, -1), rows, axis=0))


def unit_means(values: Floats, unit: Ints, num_units: int) -> Floats:
    """Return the mean over the ranks of each unit, (num_units, ...), of values with ranks first."""
    if num_units == len(unit):
        return values[np.argsort(unit)]
    size = np.bincount(unit, minlength=num_units).reshape(-1, *[1] * (values.ndim - 1))
    return np.asarray(_over_units(np.add, values, unit, num_units) / size)


def unit_maxima(values: Floats, unit: Ints, num_units: int) -> Floats:
    """Return the maximum over the ranks of each unit, (num_units, ...), of values with ranks first."""
    return values[np.argsort(unit)] if num_units == len(unit) else _over_units(np.maximum, values, unit, num_units)


def _over_units(function: np.ufunc, values: Floats, unit: Ints, num_units: int) -> Floats:
    by_unit = np.argsort(unit, kind="stable")
    starts = np.searchsorted(unit[by_unit], np.arange(num_units))
    return np.asarray(function.reduceat(values[by_unit], starts, axis=0))


def _weight(work_ns: Floats, shared_ns: Floats, unit: Ints, weight: Floats, generator: np.random.Generator) -> Floats:
    """Return the share of the medians' variation that independent units would not have, given a first guess of it."""
    num_units, num_steps = int(unit.max()) + 1, work_ns.shape[1]
    rest = work_ns - weight * shared_ns
    rest -= rest.mean(axis=1, keepdims=True)
    order = deal(num_units, num_steps, 1, generator)[unit]
    # Residuals of few units have less variance than their noise.
    lost = 1.0 - weight / num_units if num_units > 1 else 1.0
    by_chance = np.median(dealt(rest, order), axis=0).var(axis=0) / lost
    variance = shared_ns.var(axis=0)
    kept = np.divide(by_chance, variance, out=np.ones_like(variance), where=variance > 0.0)
    return np.where(kept > np.exp(-_BY_CHANCE / num_steps**0.5), 0.0, 1.0 - kept)


def _rescale(residual_ns: Floats, work_ns: Floats, unit: Ints, num_units: int) -> None:
    """Scale residuals in place so that their unit means have the variance of independent units, per segment."""
    if num_units < 2:
        return
    of_unit = unit_means(residual_ns, unit, num_units)
    work = unit_means(work_ns, unit, num_units)
    work = work - work.mean(axis=1, keepdims=True)
    num_steps = work.shape[1]
    marginal = np.einsum("uij,uij->j", work, work) / (num_units * (num_steps - 1))
    work -= work.mean(axis=0)
    unbiased = np.einsum("uij,uij->j", work, work) / ((num_units - 1) * (num_steps - 1))
    present = np.einsum("uij,uij->j", of_unit, of_unit) / (num_units * (num_steps - 1))
    # The analysis of variance overstates the variance of units that avoid each other.
    wanted = np.minimum(unbiased, marginal)
    ratio = np.divide(wanted, present, out=np.ones_like(present), where=present > 0.0)
    scale = np.sqrt(np.clip(ratio, 1.0, num_units / (num_units - 1)))
    residual_ns += ((scale - 1.0) * of_unit)[unit]
