"""Compare ranks with others that do the same work: a role is one pipeline stage and tensor slot.

This measures a rank's excess over its role, with its noise, not the cause of it. The verdict, the tables and the
scripts of analysis/ all take it from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from hpcpace.metrics.kernels import checked, has_order, library
from hpcpace.metrics.resampling import block_means, half_width, trimmed_mean

EXCESS_FLOOR = 0.05
NOISE_LEVEL = 0.001
_LEAST_STEPS = 10
_TRIMMED = 0.1


@dataclass(frozen=True, kw_only=True)
class Excess:
    """By how much one rank exceeds the others of its role.

    Attributes:
        share: mean excess over the usual work of its role, relative to that; 0.3 is 30 percent more.
        interval: its 95 % interval.
        noise: the largest share that chance explains, at level NOISE_LEVEL over all ranks of the run.
        is_marked: whether the share exceeds both noise and EXCESS_FLOOR.
    """

    share: float
    interval: tuple[float, float]
    noise: float
    is_marked: bool


@dataclass(frozen=True, kw_only=True)
class WorkExcess:
    """The excess of all ranks over their roles, block of steps by block of steps.

    The usual work of a role is the trimmed mean over its other ranks, those left out that are known to be slow. The
    standard error is that of means of blocks of consecutive steps, because neighbouring steps share their noise.

    Attributes:
        of_block: relative to the usual work of the role, NaN for ranks that are compared with nobody, float64,
            (num_ranks, num_blocks).
        num_compared: ranks that are compared.
    """

    of_block: NDArray[np.float64]
    num_compared: int

    def of(self, ranks: Sequence[int]) -> tuple[float, tuple[float, float]] | None:
        """Return the mean excess of some ranks, by index, and its 95 % interval; None if none of them is compared."""
        found = self.of_block[list(ranks)]
        found = found[np.isfinite(found).all(axis=1)]
        if not len(found):
            return None
        blocks = found.mean(axis=0)
        share, half = float(blocks.mean()), half_width(_error(blocks), len(blocks))
        return share, (share - half, share + half)

    def of_rank(self, rank: int) -> Excess | None:
        """Return the excess of one rank, by index; None if it is not compared."""
        found = self.of([rank])
        if found is None:
            return None
        share, interval = found
        blocks = self.of_block[rank]
        noise = float(stdtrit(len(blocks) - 1, 1 - NOISE_LEVEL / max(self.num_compared, 1))) * _error(blocks)
        return Excess(share=share, interval=interval, noise=noise, is_marked=share > max(EXCESS_FLOOR, noise))


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


def excess_over_role(
    work_ns: NDArray[np.float64], role: NDArray[np.int64], is_slow: NDArray[np.bool_] | None = None
) -> WorkExcess:
    """Return the excess of each rank; nobody is compared without another rank of the role, or with too few steps.

    Args:
        work_ns: (num_ranks, num_steps).
        role: of each rank, (num_ranks,).
        is_slow: ranks that are not usual, (num_ranks,); none if not given. Where all others of a role are slow, they
            are usual.
    """
    num_ranks, num_steps = work_ns.shape
    if num_steps < _LEAST_STEPS:
        return WorkExcess(of_block=np.full((num_ranks, 1), np.nan), num_compared=0)
    is_slow = np.zeros(num_ranks, np.bool_) if is_slow is None else is_slow
    blocks = block_means(work_ns)
    of_block = np.full(blocks.shape, np.nan)
    for value in np.unique(role):
        members = np.flatnonzero(role == value)
        if len(members) < 2:
            continue
        usual_ns = _usual_ns(blocks[members], is_slow[members])
        is_known = usual_ns.mean(axis=1) > 0
        of_block[members[is_known]] = blocks[members[is_known]] / np.maximum(usual_ns[is_known], 1.0) - 1
    return WorkExcess(of_block=of_block, num_compared=int(np.isfinite(of_block).all(axis=1).sum()))


def _usual_ns(blocks: NDArray[np.float64], is_slow: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the usual work of the others for each rank of one role, (num_ranks, num_blocks)."""
    is_usual = ~is_slow if (~is_slow).any() else np.ones(len(blocks), np.bool_)
    usual, alone = blocks[is_usual], is_usual & (is_usual.sum() == 1)
    usual_ns = np.empty(blocks.shape)
    usual_ns[~is_usual] = trimmed_mean(usual, _TRIMMED)
    if len(usual) > 1:
        usual_ns[is_usual] = _trimmed_mean_of_others(usual, _TRIMMED)
    elif alone.any():  # the only one that is not slow can be compared with slow ones alone
        usual_ns[alone] = trimmed_mean(blocks[~alone], _TRIMMED)
    return usual_ns


def _trimmed_mean_of_others(values: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Return for each row the trimmed mean of the other rows, (num_rows, num_columns); at least two rows."""
    num_others = len(values) - 1
    first, place = int(share * num_others), values.argsort(axis=0).argsort(axis=0)
    stop = num_others - first
    sums = np.cumsum(np.pad(np.sort(values, axis=0), ((1, 0), (0, 0))), axis=0)
    # The row itself is missing among those that are kept, so that one more of the larger ones is.
    kept = np.where(place >= stop, sums[stop] - sums[first], sums[stop + 1] - sums[first] - values)
    kept = np.where(place < first, sums[stop + 1] - sums[first + 1], kept)
    return np.asarray(kept / (stop - first))


def _error(blocks: NDArray[np.float64]) -> float:
    return float(blocks.std(ddof=1)) / float(np.sqrt(len(blocks)))
