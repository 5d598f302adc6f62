"""Whether what was counted as steps are steps: all alike in what they do, and as many on every rank.

Optimizers that step one after the other, or the two halves of a GAN, may have been counted as a step each. Then steps
alternate between lengths on all ranks, or some are far shorter than the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.phases import BUSY, OWN_WORK

_MOST_PERIOD = 8
_LEAST_CYCLES = 6
_LEAST_RATIO = 1.5
_LEAST_AGREEMENT = 0.95
_LEAST_BUSY = 0.2
_SHORT = 0.2  # of the upper quartile
_LEAST_SHORT, _LEAST_SHORT_SHARE = 3, 0.02

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Alternation:
    """Steps that alternate between two lengths on all ranks.

    Attributes:
        period: steps after which the pattern repeats, from 2.
        short_ns, long_ns: median length of short and of long steps.
        num_short: short steps in a period.
    """

    period: int
    short_ns: float
    long_ns: float
    num_short: int


def alternation(parts_ns: Floats, length_ns: Floats) -> Alternation | None:
    """Return how steps alternate on all ranks; None if they do not.

    What is compared is the computation of a step where phases show it, own work otherwise, as the median over ranks: so
    neither an evaluation every few steps nor a single rank counts as a pattern.

    Args:
        parts_ns: the parts of each step, (num_ranks, num_steps, num_parts).
        length_ns: length of the steps, (num_ranks, num_steps).
    """
    num_steps = length_ns.shape[1]
    if num_steps < 2 * _LEAST_CYCLES:
        return None
    work_ns = np.median(parts_ns[:, :, list(OWN_WORK)].sum(axis=2), axis=0)
    busy_ns = np.median(parts_ns[:, :, list(BUSY)].sum(axis=2), axis=0)
    core_ns = busy_ns if busy_ns.sum() >= _LEAST_BUSY * work_ns.sum() else work_ns
    low_ns, high_ns = np.quantile(core_ns, (0.1, 0.9))
    if high_ns < _LEAST_RATIO * max(low_ns, 1.0):
        return None
    is_long = core_ns > np.sqrt(max(low_ns, 1.0) * high_ns)
    for period in range(2, min(_MOST_PERIOD, num_steps // _LEAST_CYCLES) + 1):
        if (is_long[period:] == is_long[:-period]).mean() >= _LEAST_AGREEMENT:
            typical_ns = np.median(length_ns, axis=0)
            short_ns, long_ns = float(np.median(typical_ns[~is_long])), float(np.median(typical_ns[is_long]))
            num_short = round(period * float((~is_long).mean()))
            return Alternation(period=period, short_ns=short_ns, long_ns=long_ns, num_short=num_short)
    return None


def num_far_shorter(length_ns: Floats) -> int:
    """Return how many steps take less than a fifth of the usual time on all ranks; 0 if they are too few to matter.

    Args:
        length_ns: length of the steps, (num_ranks, num_steps).
    """
    usual_ns = np.quantile(length_ns, 0.75, axis=1, keepdims=True)
    num_short = int((length_ns < _SHORT * usual_ns).all(axis=0).sum())
    return num_short if num_short >= max(_LEAST_SHORT, _LEAST_SHORT_SHARE * length_ns.shape[1]) else 0
