"""What each rank waited in each operation, and what the transfer itself took.

The states are those of Scalasca (wait at NxN, late broadcast, early reduce, late sender, late receiver).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.collectives import Matching, Operations
from hpcpace.trace.schema import ExitKind, Op

_FROM_ROOT = (Op.BROADCAST, Op.SCATTER)
_TO_ROOT = (Op.REDUCE, Op.GATHER)
_MESSAGES = (Op.SEND, Op.RECV)
_NEVER_NS = np.iinfo(np.int64).min


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Wait and transfer of each row of `Operations`; both 0 where the row has no match.

    Attributes:
        wait_ns: time before the last partner that the rank depends on arrived, int64, (num_operations,).
        transfer_ns: time after that, and after the rank's previous operation in the group, int64, (num_operations,).
        negative_ns: for synchronising operations, by how much the exit lies before the last enter: an error of the
            clocks; 0 elsewhere, int64, (num_operations,).
    """

    wait_ns: NDArray[np.int64]
    transfer_ns: NDArray[np.int64]
    negative_ns: NDArray[np.int64]


def is_synchronising(operations: Operations) -> NDArray[np.bool_]:
    """Return which rows are operations that no rank leaves before all have entered, bool, (num_operations,)."""
    return ~np.isin(operations.op, (*_FROM_ROOT, *_TO_ROOT, *_MESSAGES))


def waits(operations: Operations, matching: Matching) -> Waits:
    """Return wait and transfer of each operation on each rank.

    wait = clip(release - enter, 0, exit - enter), where release is the last enter of those on whom the rank depends:
    all members of an NxN operation, the root of a broadcast, the others of a reduce (for its root only), the partner of
    a message. A sender waits only where its completion was seen and shows a rendezvous, no earlier than the receiver's
    enter; where its end was seen by a wait only (gloo), nothing is known of when the message left.
    transfer = exit - max(enter, release, exit of the rank's previous operation in the group).
    """
    op, enter, exit_ = operations.op, operations.enter_ns, operations.exit_ns
    is_root = operations.rank == operations.peer
    to_root = np.isin(op, _TO_ROOT)
    releases = np.where(np.isin(op, _FROM_ROOT), is_root, ~(to_root & is_root))
    depends = matching.is_matched & (~to_root | is_root)

    release = np.full(len(enter), _NEVER_NS)
    if len(enter):
        last = np.maximum.reduceat(np.where(releases, enter, _NEVER_NS)[matching.order], matching.starts)
        release = np.where(depends, last[matching.instance], _NEVER_NS)
    is_rendezvous = (exit_ >= release) & (operations.exit_kind == ExitKind.COMPLETION)
    release = np.where((op == Op.SEND) & ~is_rendezvous, _NEVER_NS, release)

    wait_ns = np.minimum(np.maximum(release, enter), exit_) - enter
    start = np.maximum(np.maximum(release, enter), _previous_exit(operations))
    synchronises = is_synchronising(operations) & matching.is_matched
    return Waits(
        wait_ns=wait_ns,
        transfer_ns=np.where(matching.is_matched, np.maximum(exit_ - start, 0), 0),
        negative_ns=np.where(synchronises, np.maximum(np.where(synchronises, release, exit_) - exit_, 0), 0),
    )


def _previous_exit(operations: Operations) -> NDArray[np.int64]:
    """Return when the previous operation of the same rank and group ended: one group's operations share a queue."""
    order = np.lexsort((operations.enter_ns, operations.group, operations.rank))
    previous = np.full(len(order), _NEVER_NS)
    if len(order) > 1:
        before, after = order[:-1], order[1:]
        same = (operations.rank[before] == operations.rank[after]) & (
            operations.group[before] == operations.group[after]
        )
        previous[after[same]] = operations.exit_ns[before[same]]
    return previous
