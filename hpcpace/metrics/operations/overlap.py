"""How much communication is hidden behind other work: only communication that blocks its caller costs time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.kernels import checked, library


def under_way_ns(
    enter_ns: NDArray[np.int64], exit_ns: NDArray[np.int64], begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return how long any operation of a rank was under way in each step, nanoseconds, float64, (num_steps,).

    Args:
        enter_ns, exit_ns: of its completed operations, each int64, (num_operations,).
        begin_ns, end_ns: of the steps, on the same clock, each int64, (num_steps,).
    """
    if not len(enter_ns):
        return np.zeros(len(begin_ns))
    if (enter_ns[1:] < enter_ns[:-1]).any():
        order = np.argsort(enter_ns, kind="stable")
        enter_ns, exit_ns = enter_ns[order], exit_ns[order]
    kernels = library()
    if kernels is not None:
        total_ns = np.empty(len(begin_ns))
        checked(kernels.under_way(len(enter_ns), enter_ns, exit_ns, len(begin_ns), begin_ns, end_ns, total_ns))
        return total_ns
    # The union of all operations, as stretches that do not overlap.
    until = np.maximum.accumulate(exit_ns)
    begin = np.maximum(enter_ns, np.concatenate([enter_ns[:1], until[:-1]]))
    total = np.append(0, np.cumsum(np.maximum(until - begin, 0)))
    before = []
    for times_ns in (begin_ns, end_ns):
        count = np.searchsorted(enter_ns, times_ns, side="right")
        last = np.maximum(count - 1, 0)
        # What has begun and lasts longest covers all time until its end.
        before.append(total[count] - np.where(count > 0, np.maximum(until[last] - times_ns, 0), 0))
    return np.asarray(np.maximum(before[1] - before[0], 0), np.float64)


def overlap_share(under_way_ns: NDArray[np.float64], exposed_ns: NDArray[np.float64]) -> float | None:
    """Return hidden communication over all communication, mean over ranks; None without any.

    Args:
        under_way_ns: time in which operations were under way, (num_ranks,).
        exposed_ns: time in which operations blocked their callers, wait and transfer, (num_ranks,).
    """
    some = under_way_ns > 0
    if not some.any():
        return None
    return float(np.clip(1 - exposed_ns[some] / under_way_ns[some], 0.0, 1.0).mean())
