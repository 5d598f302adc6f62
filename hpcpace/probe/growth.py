"""How the transfer of a step grows with nodes, by the laws of a probe over several numbers of hosts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import listed
from hpcpace.metrics.jitter.extrapolation import Algorithm, TransferTerm
from hpcpace.probe.record import LatencyLaw

_MAX_NAMED = 16

FloatArray = NDArray[np.float64]


def transfer_term(
    laws: Sequence[LatencyLaw], calls: Sequence[tuple[str, float, float]], *, num_nodes: int, transfer_ns: float
) -> TransferTerm | None:
    """Return how the transfer of a step grows with nodes, for `hpcpace.metrics.jitter.extrapolation.extrapolate`.

    The operation with the most transfer decides between ring and tree: of both forms, the one that fits its laws over
    numbers of hosts with the smaller squared relative error; a ring where it has laws of fewer than three.

    Args:
        laws: of one probe.
        calls: of a step: operation, size in bytes, and how often.
        num_nodes: of the run.
        transfer_ns: exposed transfer per step on these nodes.

    Returns:
        None without a law of these operations on as many hosts.
    """
    of_op = {(law.op, law.num_nodes): law for law in laws if law.num_nodes > 1}
    known = [(of_op[op, num_nodes], size, count) for op, size, count in calls if (op, num_nodes) in of_op]
    if num_nodes < 2 or not known:
        return None
    largest, size_bytes, _ = max(known, key=lambda one: one[0].time_ns(one[1]) * one[2])
    points = sorted((num, law.time_ns(size_bytes)) for (op, num), law in of_op.items() if op == largest.op)
    counts, times_ns = np.array(points, np.float64).T
    if len(counts) >= 3 and _misfit([np.log2(counts)], times_ns) < _misfit(
        [(counts - 1) / counts, counts - 1], times_ns
    ):
        return TransferTerm(algorithm=Algorithm.TREE, transfer_ns=transfer_ns)
    latency_ns = sum(count * max(law.pieces[0].latency_ns, 0.0) for law, _, count in known) / (num_nodes - 1)
    return TransferTerm(algorithm=Algorithm.RING, transfer_ns=transfer_ns, latency_ns=latency_ns)


def no_law_of(laws: Sequence[LatencyLaw], operations: Sequence[str], num_nodes: int) -> str:
    """Return why `transfer_term` has no law of some operations on a number of nodes, in words."""
    names = listed(sorted(set(operations)))
    if not names:
        return "the operations of a step are not known"
    counts = sorted({law.num_nodes for law in laws if law.num_nodes > 1 and law.op in operations})
    if not counts:
        return f"it has no law of {names} between nodes"
    shown = [str(count) for count in counts[:_MAX_NAMED]]
    more = [f"{len(counts) - _MAX_NAMED} more numbers of"] if len(counts) > _MAX_NAMED else []
    return f"its laws of {names} are of {listed([*shown, *more])} nodes, and none of {num_nodes}"


def _misfit(terms: Sequence[FloatArray], times_ns: FloatArray) -> float:
    """Return the squared relative error of the best sum of terms with coefficients of at least 0, per free point."""
    from scipy.optimize import nnls

    matrix = np.stack(terms, axis=1) / times_ns[:, np.newaxis]
    _, residual = nnls(matrix, np.ones(len(times_ns)))
    return float(residual**2 / (len(times_ns) - len(terms)))
