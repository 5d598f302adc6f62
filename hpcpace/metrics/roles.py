"""Compare ranks with others that do the same work: a role is one pipeline stage and tensor slot.

This measures a rank's excess over its role, with its noise, not the cause of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from hpcpace.metrics.kernels import checked, has_order, library

EXCESS_FLOOR = 0.05
NOISE_LEVEL = 0.001
_LEAST_STEPS = 10
_MOST_BLOCKS = 20


@dataclass(frozen=True, kw_only=True)
class Excess:
    """By how much one rank exceeds the others of its role.

    Attributes:
        share: mean excess over the median of the others, relative to that median; 0.3 is 30 percent more.
        noise: the largest share that chance explains, at level NOISE_LEVEL over all ranks of the run.
        is_marked: whether the share exceeds both noise and EXCESS_FLOOR.
    """

    share: float
    noise: float
    is_marked: bool


def others_median(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each rank and step the median over the other ranks.

    With two ranks it is the other one's value: a median that includes the rank itself would halve its excess.

    Args:
        values: (num_ranks, num_steps), at least two ranks.
    """
    num_ranks = len(values)
    kernels = library()
    if kernels is not None and has_order(values):
        medians = np.empty(values.shape)
        checked(kernels.others_median(num_ranks, values.size // num_ranks, values, medians))
        return medians
    low, high = (num_ranks - 2) // 2, (num_ranks - 1) // 2
    # A few places of the sorted values suffice: a rank below one of them moves it up by one.
    ascending = np.partition(values, (low, low + 1, high, high + 1), axis=0)
    below = np.where(values <= ascending[low], ascending[low + 1], ascending[low])
    above = np.where(values <= ascending[high], ascending[high + 1], ascending[high])
    middle: NDArray[np.float64] = (below + above) / 2
    return middle


def excess_over_role(values: NDArray[np.float64], *, num_compared: int) -> list[Excess | None]:
    """Return the excess of each rank of one role; None without another rank, or with too few steps.

    The standard error is that of means of blocks of consecutive steps, because neighbouring steps share their noise.

    Args:
        values: nanoseconds, (num_ranks, num_steps).
        num_compared: ranks of the whole run that are compared, for the level of noise (Bonferroni).
    """
    num_ranks, num_steps = values.shape
    if num_ranks < 2 or num_steps < _LEAST_STEPS:
        return [None] * num_ranks
    reference = others_median(values)
    base = reference.mean(axis=1)
    num_blocks = min(_MOST_BLOCKS, num_steps // 2)
    length = num_steps // num_blocks
    difference = values - reference
    blocks = difference[:, : num_blocks * length].reshape(num_ranks, num_blocks, length).mean(axis=2)
    error = blocks.std(axis=1, ddof=1) / np.sqrt(num_blocks)
    factor = float(stdtrit(num_blocks - 1, 1 - NOISE_LEVEL / max(num_compared, 1)))
    found: list[Excess | None] = []
    for rank in range(num_ranks):
        if base[rank] <= 0:
            found.append(None)
            continue
        share, noise = difference[rank].mean() / base[rank], factor * error[rank] / base[rank]
        found.append(Excess(share=float(share), noise=float(noise), is_marked=bool(share > max(EXCESS_FLOOR, noise))))
    return found
