"""How late its own work makes each rank in each step, relative to the usual work of its role, and when beyond noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.roles import others_median

FloatArray = NDArray[np.float64]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_NUM_DEVIATIONS = 4.0
_EARLY, _DISTANCE = (5, 25), 0.97  # percentiles below the late steps, and the standard deviations between them


@dataclass(frozen=True, kw_only=True)
class Lateness:
    """Local work relative to the role, as shares of the role's median work.

    Attributes:
        deviation: work minus the median of the role in that step, float64, (num_ranks, num_steps).
        excess: work minus the median of the others of the role in that step, float64, (num_ranks, num_steps).
        is_outlier: whether the excess is beyond four standard deviations of the rank's noise and beyond the floor,
            bool, (num_ranks, num_steps). The noise is taken from steps in which the rank is early: lateness is
            one-sided.
        is_latest: whether an outlier is also the largest of its role, bool, (num_ranks, num_steps).
        is_compared: which ranks have others of their role with work, bool, (num_ranks,).
        role: role of each rank, int64, (num_ranks,).
    """

    deviation: FloatArray
    excess: FloatArray
    is_outlier: BoolArray
    is_latest: BoolArray
    is_compared: BoolArray
    role: Int64Array


def lateness(work_ns: FloatArray, role: Int64Array, *, floor_share: float) -> Lateness:
    """Return how late each rank is in each step.

    Args:
        work_ns: local work, float64, (num_ranks, num_steps).
        role: int64, (num_ranks,).
        floor_share: smaller excesses do not count as late.
    """
    deviation, excess = np.zeros(work_ns.shape), np.zeros(work_ns.shape)
    is_outlier, is_latest = np.zeros(work_ns.shape, np.bool_), np.zeros(work_ns.shape, np.bool_)
    is_compared = np.zeros(len(work_ns), np.bool_)
    for of in np.unique(role):
        members = np.flatnonzero(role == of)
        values = work_ns[members]
        base = float(np.median(np.median(values, axis=1))) if values.size else 0.0
        if len(members) < 2 or base <= 0:
            continue
        is_compared[members] = True
        deviation[members] = (values - np.median(values, axis=0)) / base
        over = excess[members] = (values - others_median(values)) / base
        low, high = np.percentile(over, _EARLY, axis=1)
        late = over > np.maximum(floor_share, _NUM_DEVIATIONS / _DISTANCE * (high - low))[:, None]
        is_outlier[members] = late
        is_latest[members] = late & (over == over.max(axis=0))
    return Lateness(
        deviation=deviation,
        excess=excess,
        is_outlier=is_outlier,
        is_latest=is_latest,
        is_compared=is_compared,
        role=role,
    )


def block_effects(late: Lateness, length: int, *, trim: float) -> FloatArray:
    """Return for each rank and block of steps its trimmed mean minus the median of the others' of its role.

    Skewed noise shifts all trimmed means alike, so that comparing with those of the others cancels it.

    Args:
        late: lateness of each rank and step.
        length: steps of a block; steps beyond the last whole block are not used.
        trim: share of a block's steps that is left out at each end.

    Returns:
        float64, (num_ranks, num_blocks); 0 for ranks without others of their role.
    """
    num_blocks = late.deviation.shape[1] // length
    shaped = late.deviation[:, : num_blocks * length].reshape(-1, num_blocks, length)
    cut = int(trim * length)
    if cut:
        shaped = np.partition(shaped, (cut, length - 1 - cut), axis=2)[:, :, cut : length - cut]
    location = shaped.mean(axis=2)
    effects = np.zeros(location.shape)
    for of in np.unique(late.role[late.is_compared]):
        members = np.flatnonzero(late.role == of)
        effects[members] = location[members] - others_median(location[members])
    return effects


def inflation(effects: FloatArray) -> float:
    """Return the factor, at least 1, by which correlated neighbouring blocks make a standard error too small.

    sqrt((1 + rho) / (1 - rho)) with the lag-1 autocorrelation rho of the blocks, pooled over ranks.

    Args:
        effects: float64, (num_ranks, num_blocks).
    """
    centred = effects - effects.mean(axis=1, keepdims=True)
    total = (centred**2).sum(axis=1)
    used = total > 0
    if not used.any() or effects.shape[1] < 3:
        return 1.0
    each = (centred[used, 1:] * centred[used, :-1]).sum(axis=1) / total[used]
    rho = float(np.clip(np.median(each) + 1 / effects.shape[1], 0.0, 0.9))
    return float(np.sqrt((1 + rho) / (1 - rho)))
