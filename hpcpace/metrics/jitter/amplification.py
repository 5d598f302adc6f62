"""Amplification of jitter, and whether steps are bound by work or by communication.

All functions take the local work between synchronisations, c_irj for rank r in step i and segment j. Maxima over ranks
are taken per segment and then summed: the maximum of sums over a whole step understates the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.resampling import block_length, lag_one, moving_block_bootstrap

_FEWEST_OPERATIONS = 10


@dataclass(frozen=True, kw_only=True)
class BoundSwitches:
    """What the steps are bound by.

    Attributes:
        compute_share: share of steps in the compute-bound regime.
        communication_share: share in the communication-bound regime; both 0 if no step is decided.
        num_switches: how often one regime follows the other.
    """

    compute_share: float
    communication_share: float
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
    compute_ns: NDArray[np.float64], communication_ns: NDArray[np.float64], *, hysteresis: float = 0.05
) -> BoundSwitches | None:
    """Return how many steps are compute-bound or communication-bound, and how often that changes; None without steps.

    A step is decided if one of the two exceeds the other by more than `hysteresis`. Other steps keep the regime of the
    previous step, the first ones that of the first decided step, so that noise around a balance causes no switches.

    Args:
        compute_ns, communication_ns: of each step, float64, (num_steps,).
        hysteresis: share by which the larger must exceed the smaller.
    """
    num_steps = len(compute_ns)
    if not num_steps:
        return None
    is_compute = compute_ns > (1 + hysteresis) * communication_ns
    is_communication = communication_ns > (1 + hysteresis) * compute_ns
    decided = np.flatnonzero(is_compute | is_communication)
    if not len(decided):
        return BoundSwitches(compute_share=0.0, communication_share=0.0, num_switches=0)
    last = np.maximum(np.searchsorted(decided, np.arange(num_steps), side="right") - 1, 0)
    compute = is_compute[decided[last]]
    share = float(compute.mean())
    return BoundSwitches(
        compute_share=share,
        communication_share=1.0 - share,
        num_switches=int((compute[1:] != compute[:-1]).sum()),
    )


def collective_sensitivity(
    transfer_ns: NDArray[np.float64],
    skew_ns: NDArray[np.float64],
    clock_error_ns: float | NDArray[np.float64],
    place: NDArray[np.int64] | None = None,
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

    Returns:
        None for fewer than 10 such operations, 9 more than places, or if the standard deviation of their skew does not
        exceed the clock error.
    """
    error_ns = np.broadcast_to(np.asarray(clock_error_ns, np.float64), skew_ns.shape)
    is_used = (skew_ns >= 3 * error_ns) & np.isfinite(error_ns)
    num_used = int(is_used.sum())
    of_place = np.zeros(num_used, np.int64)
    if place is not None:
        _, of_place = np.unique(place[is_used], return_inverse=True)
    num_places = int(of_place.max(initial=0)) + 1
    if num_used - num_places < _FEWEST_OPERATIONS - 1:
        return None
    most = float(np.abs(skew_ns[is_used]).max())
    skew, transfer = (_less_means(values[is_used], of_place) for values in (skew_ns, transfer_ns))
    spread = float(skew.std())
    if spread <= max(float(error_ns[is_used].mean()), 1e-9 * most):
        return None
    skew /= spread
    slope = float(skew @ transfer) / num_used
    variance = _long_run_variance(skew * (transfer - slope * skew)) / (num_used * (num_used - 1 - num_places))
    return Sensitivity(slope=slope / spread, standard_error=variance**0.5 / spread, num_operations=num_used)


def _less_means(values: NDArray[np.float64], place: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return values less the mean of those of the same place, float64, (num_values,)."""
    less: NDArray[np.float64] = values - (np.bincount(place, values) / np.bincount(place))[place]
    return less


def _long_run_variance(score: NDArray[np.float64]) -> float:
    """Return the variance of a sum of serially correlated scores, (num_scores,), with Bartlett weights."""
    num_lags = min(int(4 * (len(score) / 100) ** (2 / 9)), len(score) - 1)
    variance = float(score @ score)
    for lag in range(1, num_lags + 1):
        variance += 2 * (1 - lag / (num_lags + 1)) * float(score[lag:] @ score[:-lag])
    return max(variance, 0.0)


_MOST_BLOCKS = 64  # for the null of the persistent part: more blocks make it slower, not better
_LEAST_NOISE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Amplification:
    """What synchronising costs, as factors of the mean work and in nanoseconds per step.

    Attributes:
        amplification: A = E[max] / E[mean]; 1 means none.
        low, high: its 95 % interval, moving-block bootstrap over steps; None for fewer than 8 steps.
        persistent: A_p = max E[c] / mean E[c], a slow rank.
        transient: A_t = E[max] / max E[c] >= 1, jitter proper; amplification = persistent * transient.
        mean_ns: E[mean].
        loss_ns: E[max] - E[mean], the sum of the two below.
        persistent_ns: max E[c] - mean E[c].
        transient_ns: E[max] - max E[c].
        persistent_null: A_p expected from noise alone, without any slow rank; None for fewer than 8 steps.
        persistent_p_value: probability that noise alone gives as large an A_p; None if the null is.
        slowest: the rank with the largest mean in each segment, int64, (num_segments,).
    """

    amplification: float
    low: float | None
    high: float | None
    persistent: float
    transient: float
    mean_ns: float
    loss_ns: float
    persistent_ns: float
    transient_ns: float
    persistent_null: float | None
    persistent_p_value: float | None
    slowest: NDArray[np.int64]


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


def amplification(work_ns: NDArray[np.float64], *, seed: int = 0, num_draws: int = 99) -> Amplification | None:
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
    interval = moving_block_bootstrap(
        np.column_stack([largest_ns.sum(axis=1), mean_ns.sum(axis=1)]),
        _ratio,
        seed=seed,
    )
    null_ns = _persistent_null(work_ns - mean_ns, num_draws, np.random.default_rng(seed))
    p_value = None
    if null_ns is not None:
        p_value = float((1 + (null_ns >= worst - mean - 1e-12 * mean).sum()) / (1 + len(null_ns)))
    return Amplification(
        amplification=largest / mean,
        low=None if interval is None else max(float(interval[0]), 1.0),
        high=None if interval is None else float(interval[1]),
        persistent=worst / mean,
        transient=largest / worst,
        mean_ns=mean,
        loss_ns=largest - mean,
        persistent_ns=worst - mean,
        transient_ns=largest - worst,
        persistent_null=None if null_ns is None else 1 + float(null_ns.mean()) / mean,
        persistent_p_value=p_value,
        slowest=of_rank_ns.argmax(axis=0),
    )


def noise_shares(work_ns: NDArray[np.float64]) -> NoiseShares | None:
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
    if total <= (1e-12 * size) ** 2:
        return None
    return NoiseShares(common=common / total, rank=rank / total, residual=noise / total)


def noise_intensity(work_ns: NDArray[np.float64]) -> float | None:
    """Return the noise of single ranks, nu = mean(c) / q05(c) - 1 of a rank's step sums, averaged over ranks.

    Args:
        work_ns: c_irj, float64, (num_ranks, num_steps, num_segments).

    Returns:
        None if no rank has a positive 5 % quantile.
    """
    if work_ns.size == 0:
        return None
    work = work_ns.sum(axis=2)
    quiet = np.quantile(work, 0.05, axis=1)
    is_usable = quiet > 0.0
    if not is_usable.any():
        return None
    return float(np.mean(work[is_usable].mean(axis=1) / quiet[is_usable] - 1.0))


def noise_amplification(
    step_ns: NDArray[np.float64], work_ns: NDArray[np.float64], transfer_ns: NDArray[np.float64]
) -> float | None:
    """Return how much of local noise reaches the step time: alpha > 1 means amplified, < 1 absorbed.

    alpha = (E[T] / T_ideal - 1) / nu, T_ideal = max_r q05(c_r) + median exposed transfer, c_r the rank's step sums.

    Args:
        step_ns: step times T, float64, (num_steps,).
        work_ns: c_irj, float64, (num_ranks, num_steps, num_segments).
        transfer_ns: exposed transfer of each step, float64, (num_steps,).

    Returns:
        None without steps, if nu is 0.01 % or less, of which no part can be told, or if T_ideal is not above 0. None
        above the number of ranks as well: all noise of all ranks in a row is less, so that T_ideal lacks something.
    """
    noise = noise_intensity(work_ns)
    if noise is None or noise <= _LEAST_NOISE or not len(step_ns):
        return None
    transfer = float(np.median(transfer_ns)) if len(transfer_ns) else 0.0
    ideal_ns = float(np.quantile(work_ns.sum(axis=2), 0.05, axis=1).max()) + transfer
    if ideal_ns <= 0.0:
        return None
    reaches = (float(step_ns.mean()) / ideal_ns - 1.0) / noise
    return reaches if reaches <= len(work_ns) else None


def _ratio(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ratio of two means of positive quantities; NaN if the denominator of a resample is close to 0."""
    top, bottom = means[..., 0], means[..., 1]
    return np.asarray(np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 1e-9 * np.abs(top)))


def _persistent_null(
    deviation_ns: NDArray[np.float64], num_draws: int, generator: np.random.Generator
) -> NDArray[np.float64] | None:
    """Return draws of max_r E_i[c] - mean_r E_i[c] under noise alone, (num_draws,); `deviation_ns` has step mean 0."""
    num_ranks, num_steps = deviation_ns.shape[:2]
    if num_steps < 8 or num_ranks < 2:
        return None
    rest = deviation_ns - deviation_ns.mean(axis=1, keepdims=True)
    length = block_length(num_steps, lag_one(rest.sum(axis=2).T), shortest=1)
    num_blocks = min(num_steps // length, _MOST_BLOCKS)
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
