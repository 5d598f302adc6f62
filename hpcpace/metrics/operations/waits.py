"""How long each rank waited in each operation, and how long the transfer itself took.

The wait states are those of Scalasca (wait at NxN, late broadcast, early reduce, late sender, late receiver).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.kernels import bytes_of, checked, library
from hpcpace.metrics.operations.dependence import FROM_ROOT, TO_ROOT, is_one_of, operation_roles, synchronises
from hpcpace.metrics.operations.matching import Matching, Operations, failed_operations, shares
from hpcpace.parallel import map_threads, run_threads
from hpcpace.trace.schema import ExitKind, Op

Times = NDArray[np.int64]

_NEVER_NS = np.iinfo(np.int64).min
_MOST_COMPARED = 1 << 8


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Wait and transfer of each row of `Operations`; both 0 if the row has no match and the operation did not fail.

    Attributes:
        wait_ns: time until the last partner that the rank depends on arrived, int64, (num_operations,).
        transfer_ns: time after that, and after the rank's previous operation in the group, int64, (num_operations,).
        negative_ns: for synchronising operations, by how much the exit comes before the last enter, a clock error; 0
            elsewhere, int64, (num_operations,).
        may_contradict: whether some rank other than the sender of a message left an operation before another had
            entered it: only such operations can contradict causality, bool, (num_instances,).
    """

    wait_ns: NDArray[np.int64]
    transfer_ns: NDArray[np.int64]
    negative_ns: NDArray[np.int64]
    may_contradict: NDArray[np.bool_]


def waits(operations: Operations, matching: Matching) -> Waits:
    """Return wait and transfer of each operation on each rank.

    wait = clip(release - enter, 0, exit - enter), where release is the last enter of those that the rank depends on:
    all members of an NxN operation, the root of a broadcast, the others of a reduce (for its root only), the partner of
    a message. A sender waits only if its completion was observed and shows a rendezvous: no earlier than the receiver's
    enter. If only a wait showed its end (gloo), nothing is known about when the message left.
    transfer = exit - max(enter, release, exit of the rank's previous operation in the group).
    Of an operation that ended with an error on some member, all the time is wait.
    """
    kernels = library()
    if kernels is not None and operations.slices:
        return _waits_compiled(kernels, operations, matching)
    slices = operations.slices or [slice(0, len(operations))]
    lasts = map_threads(partial(_last_enters, operations, matching), shares(slices))
    last_ns = np.maximum.reduce([np.full(len(matching.num_rows), _NEVER_NS), *lasts])
    wait_ns, transfer_ns = (np.empty(len(operations), np.int64) for _ in range(2))
    negative_ns = np.zeros(len(operations), np.int64)
    may_contradict = np.zeros(len(matching.num_rows), np.bool_)
    has_failed = failed_operations(operations, matching.instance, len(matching.num_rows))

    def fill(share: Sequence[slice]) -> None:
        for rows in share:
            last_of_rows_ns, is_matched = last_ns[matching.instance[rows]], matching.is_matched[rows]
            is_over_ns = np.where(has_failed[matching.instance[rows]], operations.exit_ns[rows], _NEVER_NS)
            wait_ns[rows], transfer_ns[rows] = _waits_of(operations, rows, is_matched, last_of_rows_ns, is_over_ns)
            is_early = operations.exit_ns[rows] < last_of_rows_ns
            early = np.flatnonzero(is_early & (operations.exit_kind[rows] != ExitKind.FAILED))
            op = operations.op[rows][early]
            may_contradict[matching.instance[rows][early[op != Op.SEND]]] = True
            early = early[synchronises(op) & is_matched[early]]
            negative_ns[rows][early] = last_of_rows_ns[early] - operations.exit_ns[rows][early]

    run_threads(fill, shares(slices))
    return Waits(wait_ns=wait_ns, transfer_ns=transfer_ns, negative_ns=negative_ns, may_contradict=may_contradict)


def _waits_compiled(kernels: Any, operations: Operations, matching: Matching) -> Waits:
    bounds = operations.bounds
    wait_ns, transfer_ns, negative_ns = (np.empty(len(operations), np.int64) for _ in range(3))
    may_contradict = np.zeros(len(matching.num_rows), np.uint8)
    checked(
        kernels.waits(
            *(len(bounds) - 1, bounds, len(operations.groups), len(may_contradict), operations.op, operations.rank),
            *(operations.peer, operations.group, matching.instance, operations.enter_ns, operations.exit_ns),
            *(operations.exit_kind, bytes_of(matching.is_matched), operation_roles(), Op.SEND, ExitKind.COMPLETION),
            *(ExitKind.FAILED, wait_ns, transfer_ns, negative_ns, may_contradict),
        )
    )
    return Waits(
        wait_ns=wait_ns,
        transfer_ns=transfer_ns,
        negative_ns=negative_ns,
        may_contradict=may_contradict.view(np.bool_),
    )


def _last_enters(operations: Operations, matching: Matching, share: Sequence[slice]) -> Times:
    """Return the last enter of those that others depend on, int64, (num_instances,)."""
    last_ns = np.full(len(matching.num_rows), _NEVER_NS)
    for rows in share:
        op, enter, instance = operations.op[rows], operations.enter_ns[rows], matching.instance[rows]
        from_root, to_root = is_one_of(op, FROM_ROOT), is_one_of(op, TO_ROOT)
        if from_root.any() or to_root.any():
            # As in `releases_others`, which would compare the same bytes again.
            is_root = operations.rank[rows] == operations.peer[rows]
            enter = np.where(np.where(from_root, is_root, ~(to_root & is_root)), enter, _NEVER_NS)
        np.maximum.at(last_ns, instance, enter)
    return last_ns


def _waits_of(
    operations: Operations, rows: slice, is_matched: NDArray[np.bool_], last_ns: Times, failed_ns: Times
) -> tuple[Times, Times]:
    """Return wait and transfer of some rows, as in `waits`; `failed_ns` are the exits of those that only waited."""
    op, enter, exit_ = operations.op[rows], operations.enter_ns[rows], operations.exit_ns[rows]
    to_root, is_send = is_one_of(op, TO_ROOT), op == Op.SEND
    depends = is_matched
    if to_root.any():
        depends = is_matched & (~to_root | (operations.rank[rows] == operations.peer[rows]))
    release = last_ns if depends.all() else np.where(depends, last_ns, _NEVER_NS)
    if is_send.any():
        is_rendezvous = (exit_ >= release) & (operations.exit_kind[rows] == ExitKind.COMPLETION)
        release = np.where(is_send & ~is_rendezvous, _NEVER_NS, release)
    released = np.maximum(np.maximum(release, enter), failed_ns)
    wait_ns = np.minimum(released, exit_) - enter
    transfer_ns = np.maximum(exit_ - np.maximum(released, _previous_exit(operations, rows)), 0)
    if not is_matched.all():
        transfer_ns[~is_matched] = 0
    return wait_ns, transfer_ns


def _previous_exit(operations: Operations, rows: slice) -> Times:
    """Return when the previous operation of the same rank and group ended: one group's operations share a queue."""
    rank, queue = operations.rank[rows], operations.group[rows] + 1
    enter, exit_ = operations.enter_ns[rows], operations.exit_ns[rows]
    previous = np.full(len(enter), _NEVER_NS)
    if (rank[1:] != rank[:-1]).any():
        queue = np.unique(np.stack([rank, queue]), axis=1, return_inverse=True)[1].reshape(-1)
    for own in _rows_of_each(queue):
        ordered = enter[own]
        if (ordered[1:] < ordered[:-1]).any():
            own = own[np.argsort(ordered, kind="stable")]
        previous[own[1:]] = exit_[own[:-1]]
    return previous


def _rows_of_each(number: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the positions of each number that occurs, all at least 0; ascending, (num_positions,)."""
    count = np.bincount(number)
    found = np.flatnonzero(count)
    if len(count) > _MOST_COMPARED:
        yield from np.split(np.argsort(number, kind="stable"), np.cumsum(count[found])[:-1])
        return
    # For few numbers, comparing bytes is several times faster than sorting.
    narrow = number.astype(np.uint8)
    for value in found.tolist():
        yield np.flatnonzero(narrow == value)
