"""What the end of an operation proves about the enters of others, and how often the common clock contradicts it.

No rank leaves a synchronising operation before all have entered. That orders times on different hosts, whatever their
clocks say. A violation beyond both half-widths is an unknown clock error; `suspects` finds whose it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.operations.dependence import FROM_ROOT, TO_ROOT, is_one_of, synchronises
from hpcpace.metrics.operations.matching import Operations
from hpcpace.trace.schema import Op

Int64Array = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


def shows_all_members(operations: Operations) -> BoolArray:
    """Return whose completion shows that all members of the group have entered, bool, (num_operations,).

    These are synchronising operations on every rank, and reduce and gather on their root. An all_to_all does not show
    it, because with uneven parts a rank need not hear from all. Nor does an empty operation, which may send nothing.
    """
    to_root = is_one_of(operations.op, TO_ROOT) & (operations.rank == operations.peer)
    return np.asarray(meets_all(operations.op, operations.size_bytes) | (to_root & (operations.size_bytes > 0)))


def meets_all(op: NDArray[np.uint8], size_bytes: Int64Array) -> BoolArray:
    """Return which operations show on every rank that all members have entered, bool, (num_operations,).

    Args:
        op: operations, (num_operations,).
        size_bytes: their content.
    """
    return np.asarray(synchronises(op) & (op != Op.ALL_TO_ALL) & ((op == Op.BARRIER) | (size_bytes > 0)))


def shows_peer(operations: Operations) -> BoolArray:
    """Return whose completion shows that the rank `peer` has entered, bool, (num_operations,).

    These are broadcast and scatter on all ranks but the root, and recv. A completed send shows nothing, because small
    messages are buffered.
    """
    op, is_root = operations.op, operations.rank == operations.peer
    from_peer = (is_one_of(op, FROM_ROOT) & ~is_root) | (op == Op.RECV)
    return np.asarray((operations.size_bytes > 0) & (operations.peer >= 0) & from_peer)


@dataclass(frozen=True, kw_only=True)
class PairViolations:
    """Ranks of one node that left a collective before a rank of another node had entered it.

    Attributes:
        exit_node: node of the ranks that left too early.
        enter_node: node of the rank that entered last.
        num_violations: number of exits before the last enter.
        median_ns: their median size.
        max_ns: their largest size.
        num_unexplained: violations larger than both half-widths and rounding together: a clock is wrong.
    """

    exit_node: int
    enter_node: int
    num_violations: int
    median_ns: int
    max_ns: int
    num_unexplained: int


def pair_violations(
    exit_node: Int64Array, enter_node: Int64Array, size_ns: Int64Array, allowed_ns: FloatArray
) -> tuple[PairViolations, ...]:
    """Return the violations by node pair, the pair with most unexplained ones first.

    Args:
        exit_node: node of each rank that left too early, (num_violations,).
        enter_node: node of the rank that entered last.
        size_ns: by how much the exit comes before the enter.
        allowed_ns: how much of that half-widths and rounding explain.
    """
    pairs = [
        _pair(int(a), int(b), size_ns[chosen], allowed_ns[chosen])
        for a, b in np.unique(np.stack([exit_node, enter_node], axis=1), axis=0)
        for chosen in [(exit_node == a) & (enter_node == b)]
    ]
    pairs.sort(key=lambda pair: (-pair.num_unexplained, -pair.num_violations, pair.exit_node, pair.enter_node))
    return tuple(pairs)


def _pair(exit_node: int, enter_node: int, sizes_ns: Int64Array, allowed_ns: FloatArray) -> PairViolations:
    return PairViolations(
        exit_node=exit_node,
        enter_node=enter_node,
        num_violations=len(sizes_ns),
        median_ns=int(np.median(sizes_ns)),
        max_ns=int(sizes_ns.max()),
        num_unexplained=int((sizes_ns > allowed_ns).sum()),
    )
