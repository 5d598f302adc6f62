"""Clocks of ranks from collectives alone, where nobody exchanged messages to compare them.

No rank leaves an all-to-all operation before all have entered it. So of two ranks a and b the offset o (local time of b
less that of a) lies between enter_b - exit_a and exit_b - enter_a, of every operation that both take part in. These
bounds are certain as long as clocks do not drift by more than that within a stretch of time, but one-sided: where b
always comes last, the upper one has its peer's wait in it, and the middle half of that.

Ranks leave such an operation nearly together: its last bytes reach them all within the time of the transfer, which is
at most the time that its last member was in it. So the estimate is the median of exit_b - exit_a within the bounds, of
the half of operations with the shortest transfers. Its half-width is the longest transfer of these and twice the median
deviation of their differences: a rank that waited is woken up later than one that came last.
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
        halfwidth_ns: the true offset is within `offset_ns` +- `halfwidth_ns`, if ranks leave operations within the time
            of a transfer, int64, (num_stretches,).
        contradiction_ns: by how much bounds contradict each other at most; 0 where they do not.
        num_operations: operations used, int64, (num_stretches,).
    """

    local_ns: Int64Array
    offset_ns: Int64Array
    halfwidth_ns: Int64Array
    contradiction_ns: int
    num_operations: Int64Array


def collective_bounds(
    enter_ns: Int64Array,
    exit_ns: Int64Array,
    reference_enter_ns: Int64Array,
    reference_exit_ns: Int64Array,
    transfer_ns: Int64Array | None = None,
) -> ClockBounds | None:
    """Return the clock of a rank by operations that it and the reference took part in; None without any.

    Args:
        enter_ns, exit_ns: the rank's own times, int64, (num_operations,).
        reference_enter_ns, reference_exit_ns: those of the reference, of the same operations in the same order.
        transfer_ns: at most how long each of them transferred: the shortest time that a member was in it, int64,
            (num_operations,). Without it, the shorter one of the two ranks.
    """
    if not len(enter_ns):
        return None
    order = np.argsort(enter_ns, kind="stable")
    low = (enter_ns - reference_exit_ns)[order]
    high = (exit_ns - reference_enter_ns)[order]
    apart = (exit_ns - reference_exit_ns)[order]
    shortest = np.minimum(exit_ns - enter_ns, reference_exit_ns - reference_enter_ns)
    transfer = np.maximum(shortest if transfer_ns is None else np.minimum(shortest, transfer_ns), 0)[order]
    local = enter_ns[order]
    num_stretches = int(np.clip(len(local) // _LEAST_OPERATIONS, 1, _MOST_STRETCHES))
    starts = np.linspace(0, len(local), num_stretches, endpoint=False).astype(np.int64)
    lowest, highest = np.maximum.reduceat(low, starts), np.minimum.reduceat(high, starts)
    usual = np.empty((2, num_stretches), np.int64)
    for stretch, rows in enumerate(np.split(np.arange(len(local)), starts[1:])):
        is_short = transfer[rows] <= np.median(transfer[rows])
        middle = np.median(apart[rows][is_short])
        scatter = 2 * np.median(np.abs(apart[rows][is_short] - middle))
        usual[:, stretch] = middle, transfer[rows][is_short].max() + scatter
    least, most = np.minimum(lowest, highest), np.maximum(lowest, highest)
    offset = np.clip(usual[0], least, most)
    certain = np.maximum(offset - least, most - offset)
    count = np.diff(np.append(starts, len(local)))
    return ClockBounds(
        local_ns=local[starts + count // 2],
        offset_ns=offset,
        halfwidth_ns=np.minimum(certain, usual[1]),
        contradiction_ns=max(int((lowest - highest).max()), 0),
        num_operations=count,
    )
