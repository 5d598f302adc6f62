"""Split local work into what all ranks share in a step, what a rank has in every step, and the rest.

The rest belongs to units that are hit independently: nodes if the ranks of a node share their noise, else ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.resampling import MeanTest, mean_above_zero

_SHARED_P_VALUE = 0.01
_SHARED_CORRELATION = 0.05
_NUM_FIRST_STEPS = 250


@dataclass(frozen=True, kw_only=True)
class SharedNoise:
    """Whether the ranks of a node share their noise.

    Attributes:
        is_shared: the p-value is below 0.01 and the correlation above 0.05.
        correlation: intraclass correlation of the residuals within nodes; None if no node has two ranks, or with only
            one node.
        p_value: one-sided, that the correlation is above 0 by chance; None if it is, or for fewer than 8 steps.
    """

    is_shared: bool
    correlation: float | None
    p_value: float | None


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
        shared: how the units were chosen.
    """

    location_ns: NDArray[np.float64]
    weight: NDArray[np.float64]
    rank_effect_ns: NDArray[np.float64]
    residual_ns: NDArray[np.float64]
    unit: NDArray[np.int64]
    num_units: int
    shared: SharedNoise


def shared_noise(deviation_ns: NDArray[np.float64], node: NDArray[np.int64]) -> SharedNoise:
    """Return whether the ranks of a node share their noise.

    Each step gives mean squares between nodes and within them (one-way analysis of variance). The correlation is
    (MSB - MSW) / (MSB + (k0 - 1) MSW), ICC(1) of Shrout & Fleiss 1979 with k0 of Donner 1986 for unequal nodes. The
    test is on the mean over steps of MSB - MSW and allows for serial correlation. What all ranks share cancels out.

    Args:
        deviation_ns: work per step less the rank's mean, float64, (num_ranks, num_steps).
        node: index of the host, int64, (num_ranks,).
    """
    _, unit, size = np.unique(node, return_inverse=True, return_counts=True)
    num_ranks, num_nodes = len(node), len(size)
    if num_nodes < 2 or num_nodes == num_ranks or deviation_ns.shape[1] == 0:
        return SharedNoise(is_shared=False, correlation=None, p_value=None)
    node_mean = unit_means(deviation_ns, unit, num_nodes)
    grand = deviation_ns.mean(axis=0)
    within = np.einsum("ri,ri->i", deviation_ns, deviation_ns) - size @ node_mean**2
    between = (size @ (node_mean - grand) ** 2) / (num_nodes - 1)
    within = np.maximum(within, 0.0) / (num_ranks - num_nodes)
    typical = (num_ranks - (size**2).sum() / num_ranks) / (num_nodes - 1)
    total = float(between.mean() + (typical - 1) * within.mean())
    tested: MeanTest | None = mean_above_zero(between - within)
    if total <= 0.0 or tested is None:
        return SharedNoise(is_shared=False, correlation=None, p_value=None)
    correlation = float(between.mean() - within.mean()) / total
    is_shared = tested.p_value < _SHARED_P_VALUE and correlation > _SHARED_CORRELATION
    return SharedNoise(is_shared=is_shared, correlation=correlation, p_value=tested.p_value)


def split_work(work_ns: NDArray[np.float64], node: NDArray[np.int64], *, seed: int = 0) -> WorkParts | None:
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
    """
    num_ranks, num_steps = work_ns.shape[:2]
    if num_ranks < 2 or num_steps < 2 or work_ns.shape[2] == 0:
        return None
    per_step = work_ns.sum(axis=2)
    shared = shared_noise(per_step - per_step.mean(axis=1, keepdims=True), node)
    unit = np.unique(node, return_inverse=True)[1] if shared.is_shared else np.arange(num_ranks)
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
        shared=shared,
    )


def deal(num_units: int, num_steps: int, length: int, generator: np.random.Generator) -> NDArray[np.int64]:
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


def dealt(values: NDArray[np.float64], order: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return values, (num_ranks, num_steps, num_segments), with the steps of each rank in its own `order`."""
    num_ranks, num_steps = order.shape
    rows = order + np.arange(num_ranks)[:, np.newaxis] * num_steps
    return np.asarray(np.take(values.reshape(num_ranks * num_steps, -1), rows, axis=0))


def unit_means(values: NDArray[np.float64], unit: NDArray[np.int64], num_units: int) -> NDArray[np.float64]:
    """Return the mean over the ranks of each unit, (num_units, ...), of values with ranks first."""
    if num_units == len(unit):
        return values[np.argsort(unit)]
    by_unit = np.argsort(unit, kind="stable")
    starts = np.searchsorted(unit[by_unit], np.arange(num_units))
    size = np.diff(np.append(starts, len(unit))).reshape(-1, *[1] * (values.ndim - 1))
    return np.asarray(np.add.reduceat(values[by_unit], starts, axis=0) / size)


def unit_maxima(values: NDArray[np.float64], unit: NDArray[np.int64], num_units: int) -> NDArray[np.float64]:
    """Return the maximum over the ranks of each unit, (num_units, ...), of values with ranks first."""
    if num_units == len(unit):
        return values[np.argsort(unit)]
    by_unit = np.argsort(unit, kind="stable")
    starts = np.searchsorted(unit[by_unit], np.arange(num_units))
    return np.asarray(np.maximum.reduceat(values[by_unit], starts, axis=0))


def _weight(
    work_ns: NDArray[np.float64],
    shared_ns: NDArray[np.float64],
    unit: NDArray[np.int64],
    weight: NDArray[np.float64],
    generator: np.random.Generator,
) -> NDArray[np.float64]:
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
    return np.where(kept > np.exp(-4.0 / num_steps**0.5), 0.0, 1.0 - kept)


def _rescale(
    residual_ns: NDArray[np.float64], work_ns: NDArray[np.float64], unit: NDArray[np.int64], num_units: int
) -> None:
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
