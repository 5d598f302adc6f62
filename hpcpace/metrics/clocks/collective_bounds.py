"""Clocks of ranks from collectives alone, where nobody exchanged messages to compare them.

No rank leaves an all-to-all operation before all have entered it. So of two ranks a and b the offset o (local time of b
less that of a) lies between enter_b - exit_a and exit_b - enter_a, of every operation that both take part in. Bounds of
some operations, one stretch of time after the other, leave an interval whose middle is the estimate and whose half is
the half-width. The bounds are certain as long as clocks do not drift by more than that within a stretch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]

_MOST_STRETCHES = 64
_LEAST_OPERATIONS = 16


@dataclass(frozen=True, kw_only=True)
class ClockBounds:
    """The clock of one rank against that of another, one row a stretch of time.

    Attributes:
        local_ns: middle of the stretch on the rank's own clock, int64, (num_stretches,), ascending.
        offset_ns: local time less reference time, int64, (num_stretches,).
        halfwidth_ns: the true offset is within `offset_ns` +- `halfwidth_ns`, int64, (num_stretches,).
        contradiction_ns: by how much bounds contradict each other at most; 0 where they do not.
        num_operations: operations used, int64, (num_stretches,).
    """

    local_ns: Int64Array
    offset_ns: Int64Array
    halfwidth_ns: Int64Array
    contradiction_ns: int
    num_operations: Int64Array


def collective_bounds(
    enter_ns: Int64Array, exit_ns: Int64Array, reference_enter_ns: Int64Array, reference_exit_ns: Int64Array
) -> ClockBounds | None:
    """Return the clock of a rank by operations that it and the reference took part in; None without any.

    Args:
        enter_ns, exit_ns: the rank's own times, int64, (num_operations,).
        reference_enter_ns, reference_exit_ns: those of the reference, of the same operations in the same order.
    """
    if not len(enter_ns):
        return None
    order = np.argsort(enter_ns, kind="stable")
    low = (enter_ns - reference_exit_ns)[order]
    high = (exit_ns - reference_enter_ns)[order]
    local = enter_ns[order]
    num_stretches = int(np.clip(len(local) // _LEAST_OPERATIONS, 1, _MOST_STRETCHES))
    starts = np.linspace(0, len(local), num_stretches, endpoint=False).astype(np.int64)
    lowest, highest = np.maximum.reduceat(low, starts), np.minimum.reduceat(high, starts)
    width = highest - lowest
    count = np.diff(np.append(starts, len(local)))
    return ClockBounds(
        local_ns=local[starts + count // 2],
        offset_ns=lowest + width // 2,
        halfwidth_ns=(np.abs(width) + 1) // 2,
        contradiction_ns=max(int(-width.min()), 0),
        num_operations=count,
    )
