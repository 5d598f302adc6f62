"""How much communication is hidden behind other work: only communication that blocks its caller costs time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def communication_ns(enter_ns: NDArray[np.int64], exit_ns: NDArray[np.int64]) -> float:
    """Return how long any operation of a rank was under way: the length of the union of its operations.

    Args:
        enter_ns, exit_ns: of one rank's completed operations, on one clock, each int64, (num_operations,).
    """
    if not len(enter_ns):
        return 0.0
    if (exit_ns[1:] >= exit_ns[:-1]).all():  # as recorded: with time reversed, begins ascend
        enter_ns, exit_ns = -exit_ns[::-1], -enter_ns[::-1]
    elif (enter_ns[1:] < enter_ns[:-1]).any():
        order = np.argsort(enter_ns, kind="stable")
        enter_ns, exit_ns = enter_ns[order], exit_ns[order]
    begin, end = enter_ns, np.maximum.accumulate(exit_ns)
    covered = np.concatenate([begin[:1], end[:-1]])
    return float(np.maximum(end - np.maximum(begin, covered), 0).sum())


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
