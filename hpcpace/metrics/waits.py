"""Waits in operations: how long, for whom, and the part that held its rank up.

The wait states are those of Scalasca (wait at NxN, late broadcast, early reduce, late sender, late receiver).

Ranks are blocked in operations, and in stretches that no operation accounts for, such as waits inside torch; local time
is a rank's own time without both. A wait that is hidden behind work costs nothing: the exposed part follows the rules
by which a step is divided into parts (`hpcpace.metrics.phases`), so that exposed waits add up to that of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.pool import map_threads, run_threads
from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Ints
from hpcpace.metrics.kernels import bytes_of, checked, library
from hpcpace.metrics.matching import Matching
from hpcpace.metrics.operations import (
    Operations,
    awaited,
    depends_on_others,
    failed_operations,
    operation_roles,
    rank_slices,
    shares,
    sides,
    synchronises,
)
from hpcpace.metrics.phases import CoveredTime
from hpcpace.metrics.steps import StepPanel
from hpcpace.trace.schema import ExitKind, Op

_NEVER_NS = np.iinfo(np.int64).min
OVERTAKING_SHARE = 0.05  # statistics: of pairs that follow each other in a queue; less may be errors of single times


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Stretches in which ranks were blocked that no operation accounts for: phases grad_sync and pace.

    Attributes:
        rank: rank that was blocked, int64, (num_blocks,).
        begin_ns, end_ns: on the clock of the operations, int64, (num_blocks,).
        is_pause: whether the rank paused itself (pace), which ends no wait, bool, (num_blocks,); None if none is.
    """

    rank: Ints
    begin_ns: Ints
    end_ns: Ints
    is_pause: Bools | None = None

    def select(self, *, pauses: bool) -> Blocks:
        """Return the pauses, or all other blocks."""
        is_pause = np.zeros(len(self.rank), np.bool_) if self.is_pause is None else self.is_pause
        chosen = is_pause if pauses else ~is_pause
        return Blocks(rank=self.rank[chosen], begin_ns=self.begin_ns[chosen], end_ns=self.end_ns[chosen])


NO_BLOCKS = Blocks(rank=np.zeros(0, np.int64), begin_ns=np.zeros(0, np.int64), end_ns=np.zeros(0, np.int64))


def rows_of_ranks(slot: Ints, num_ranks: int) -> list[slice]:
    """Return the rows of each rank, (num_ranks,) slices; `slot`, the index of each row's rank, ascends."""
    edges = np.searchsorted(slot, np.arange(num_ranks + 1))
    return [slice(low, high) for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]


def blocks_of(blocks: Blocks, ranks: Sequence[int]) -> list[tuple[Ints, Ints]]:
    """Return begin and end of the blocks of each rank, (num_ranks,) pairs, each (num_blocks_of_rank,)."""
    order = np.argsort(blocks.rank, kind="stable")
    low = np.searchsorted(blocks.rank[order], ranks, side="left")
    high = np.searchsorted(blocks.rank[order], ranks, side="right")
    rows = [order[first:stop] for first, stop in zip(low.tolist(), high.tolist(), strict=True)]
    return [(blocks.begin_ns[of_rank], blocks.end_ns[of_rank]) for of_rank in rows]


def blocked_before(
    operations: Operations, steps: StepPanel, is_blocking: Bools, blocks: Blocks, ranks: Sequence[int], slot: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return how long ranks were blocked before each row's enter, and before begin and end of each step.

    Overlapping stretches count once. An operation blocks during the last `blocked` nanoseconds before its exit.

    Args:
        operations: rows of all ranks.
        steps: the steps, on the clock of the operations.
        is_blocking: the rows that block, bool, (num_operations,).
        blocks: further stretches in which ranks were blocked.
        ranks: what the rows of `steps` are, ascending, (num_ranks,).
        slot: index of each row's rank in `ranks`, int64, (num_operations,).

    Returns:
        int64, (num_operations,), and twice (num_ranks, num_steps).
    """
    at_enter = np.zeros(len(slot), np.int64)
    at_begin, at_end = np.zeros(steps.begin_ns.shape, np.int64), np.zeros(steps.end_ns.shape, np.int64)
    own = blocks_of(blocks, ranks)
    for index, rows in enumerate(rows_of_ranks(slot, len(ranks))):
        waits = is_blocking[rows]
        end = operations.exit_ns[rows][waits]
        begin = np.maximum(end - operations.blocked_ns[rows][waits], operations.enter_ns[rows][waits])
        blocked = CoveredTime.of(np.concatenate([begin, own[index][0]]), np.concatenate([end, own[index][1]]))
        at_enter[rows] = blocked.until_ns(operations.enter_ns[rows])
        at_begin[index], at_end[index] = blocked.until_ns(steps.begin_ns[index]), blocked.until_ns(steps.end_ns[index])
    return at_enter, at_begin, at_end


_MAX_NS = 1 << 62  # format: beyond all times, and twice it fits into int64


@dataclass(frozen=True, kw_only=True)
class HeldUp:
    """When one rank was held up, or away, in ways that no row of an operation says.

    Attributes:
        away: checkpoints, evaluations and pauses, whose communication is a part of theirs.
        inside: these, and waits inside torch for gradients (phase grad_sync).
    """

    away: CoveredTime
    inside: CoveredTime


def exposed_waits_ns(operations: Operations, wait_ns: Ints, held_up: Sequence[HeldUp | None]) -> Ints:
    """Return the exposed part of each row's wait, int64, (num_operations,).

    An operation blocks its caller for the last `blocked` nanoseconds before its exit. In grad_sync, all time counts in
    which any operation waits; where several do, it is the first one's that was entered in that step.

    Args:
        operations: rows of all ranks, ordered by rank.
        wait_ns: how long each row waited, (num_operations,).
        held_up: of each rank that has rows, ascending; None for nothing.
    """
    enter_ns, until_ns = operations.enter_ns, operations.enter_ns + wait_ns
    begin_ns = np.maximum(enter_ns, operations.exit_ns - operations.blocked_ns)
    end_ns = np.maximum(np.minimum(until_ns, operations.exit_ns), begin_ns)
    exposed_ns: Ints = end_ns - begin_ns
    for rows, held in zip(rank_slices(operations.rank) or (), held_up, strict=True):
        if held is None:
            continue
        exposed_ns[rows] -= held.inside.inside_ns(begin_ns[rows], end_ns[rows])
        own = rows.start + np.flatnonzero(held.inside.inside_ns(enter_ns[rows], until_ns[rows]))
        own = own[np.lexsort((enter_ns[own], operations.step[own]))]
        # What an earlier wait of the step has taken is not counted again.
        taken_ns = _latest_before(until_ns[own], operations.step[own])
        first_ns = np.minimum(np.maximum(enter_ns[own], taken_ns), until_ns[own])
        in_torch_ns = held.inside.inside_ns(first_ns, until_ns[own]) - held.away.inside_ns(first_ns, until_ns[own])
        exposed_ns[own] += in_torch_ns
    return exposed_ns


def _latest_before(times_ns: Ints, step: Ints) -> Ints:
    """Return the latest of the times before each one in its step, or a time before all; `step` ascends."""
    if not len(times_ns):
        return times_ns
    is_first = np.append(True, step[1:] != step[:-1])
    number = np.cumsum(is_first)
    span_ns = int(times_ns.max()) - int(times_ns.min()) + 1
    if span_ns * (int(number[-1]) + 1) > _MAX_NS:  # damaged times
        number[:] = 0
    # Each step's times are moved behind those of the step before, so that one pass over all keeps steps apart.
    shift_ns = number * span_ns - int(times_ns.min())
    latest_ns = np.maximum.accumulate(times_ns + shift_ns) - shift_ns
    return np.where(is_first, -_MAX_NS, np.append(0, latest_ns[:-1]))


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Wait and transfer of each row of `Operations`; both 0 if the row has no match and the operation did not fail.

    Attributes:
        wait_ns: time until the last partner that the rank depends on arrived, int64, (num_operations,).
        transfer_ns: time after that, and after the rank's previous operation in its queue, int64, (num_operations,).
        negative_ns: for synchronising operations, by how much the exit comes before the last enter, a clock error; 0
            elsewhere, int64, (num_operations,).
        may_contradict: whether some rank other than the sender of a message left an operation before another had
            entered it: only such operations can contradict causality, bool, (num_instances,).
    """

    wait_ns: Ints
    transfer_ns: Ints
    negative_ns: Ints
    may_contradict: Bools


def waits(operations: Operations, matching: Matching) -> Waits:
    """Return wait and transfer of each operation on each rank.

    wait = clip(release - enter, 0, exit - enter), where release is the last enter of those that the rank depends on:
    all members of an NxN operation, the root of a broadcast, the others of a reduce (for its root only), the partner of
    a message. A sender waits only if its completion was observed and shows a rendezvous: no earlier than the receiver's
    enter. If only a wait showed its end (gloo), nothing is known about when the message left. A member of a broadcast,
    be it the root, waits for all if it was blocked across the last enter (`held_until`).
    transfer = exit - max(enter, release, exit of the rank's previous operation in its queue).
    Of an operation that ended with an error on some member, all the time is wait.
    """
    kernels = library()
    if kernels is not None and operations.slices:
        return _waits_compiled(kernels, operations, matching)
    slices = operations.slices or [slice(0, len(operations))]
    lasts = map_threads(partial(_last_enters, operations, matching), shares(slices))
    last_ns = np.maximum.reduce([np.full(2 * len(matching.num_rows), _NEVER_NS), *lasts])
    wait_ns, transfer_ns = (np.empty(len(operations), np.int64) for _ in range(2))
    negative_ns = np.zeros(len(operations), np.int64)
    may_contradict = np.zeros(len(matching.num_rows), np.bool_)
    has_failed = failed_operations(operations, matching.instance, len(matching.num_rows))

    def fill(share: Sequence[slice]) -> None:
        for rows in share:
            instance, is_matched = matching.instance[rows], matching.is_matched[rows]
            last_of_rows_ns = last_ns[awaited(operations, rows, instance, last_ns)]
            is_over_ns = np.where(has_failed[instance], operations.exit_ns[rows], _NEVER_NS)
            wait_ns[rows], transfer_ns[rows] = _waits_of(operations, rows, is_matched, last_of_rows_ns, is_over_ns)
            is_early = operations.exit_ns[rows] < last_of_rows_ns
            early = np.flatnonzero(is_early & (operations.exit_kind[rows] != ExitKind.FAILED))
            op = operations.op[rows][early]
            may_contradict[instance[early[op != Op.SEND]]] = True
            early = early[synchronises(op) & is_matched[early]]
            negative_ns[rows][early] = last_of_rows_ns[early] - operations.exit_ns[rows][early]

    run_threads(fill, shares(slices))
    return Waits(wait_ns=wait_ns, transfer_ns=transfer_ns, negative_ns=negative_ns, may_contradict=may_contradict)


def _waits_compiled(kernels: Any, operations: Operations, matching: Matching) -> Waits:
    bounds = operations.bounds
    wait_ns, transfer_ns = (np.empty(len(operations), np.int64) for _ in range(2))
    negative_ns = np.empty_like(wait_ns)
    may_contradict = np.zeros(len(matching.num_rows), np.uint8)
    checked(
        kernels.waits(
            *(len(bounds) - 1, bounds, len(operations.groups), len(may_contradict), operations.op, operations.rank),
            *(operations.peer, operations.group, matching.instance, operations.enter_ns, operations.exit_ns),
            *(operations.blocked_ns, operations.exit_kind, bytes_of(matching.is_matched), operation_roles()),
            *(ExitKind.COMPLETION, ExitKind.FAILED, OVERTAKING_SHARE),
            *(wait_ns, transfer_ns, negative_ns, may_contradict),
        )
    )
    return Waits(
        wait_ns=wait_ns, transfer_ns=transfer_ns, negative_ns=negative_ns, may_contradict=may_contradict.view(np.bool_)
    )


def _last_enters(operations: Operations, matching: Matching, share: Sequence[slice]) -> Ints:
    """Return the last enter of each of the `sides` of each operation, int64, (2 num_instances,)."""
    last_ns = np.full(2 * len(matching.num_rows), _NEVER_NS)
    for rows in share:
        own, _ = sides(operations.op[rows], operations.rank[rows] == operations.peer[rows])
        np.maximum.at(last_ns, 2 * matching.instance[rows] + own, operations.enter_ns[rows])
    return last_ns


def _waits_of(
    operations: Operations, rows: slice, is_matched: Bools, last_ns: Ints, failed_ns: Ints
) -> tuple[Ints, Ints]:
    """Return wait and transfer of some rows, as in `waits`; `failed_ns` are the exits of those that only waited."""
    op, enter, exit_ = operations.op[rows], operations.enter_ns[rows], operations.exit_ns[rows]
    is_root = operations.rank[rows] == operations.peer[rows]
    depends = is_matched & depends_on_others(op, is_root)
    depends &= (op != Op.SEND) | ((exit_ >= last_ns) & (operations.exit_kind[rows] == ExitKind.COMPLETION))
    release = last_ns if depends.all() else np.where(depends, last_ns, _NEVER_NS)
    released = np.maximum(np.maximum(release, enter), failed_ns)
    wait_ns = np.minimum(released, exit_) - enter
    transfer_ns = np.maximum(exit_ - np.maximum(released, _previous_exit(operations, rows)), 0)
    if not is_matched.all():
        transfer_ns[~is_matched] = 0
    return wait_ns, transfer_ns


def _previous_exit(operations: Operations, rows: slice) -> Ints:
    """Return when the previous operation of the same rank and queue ended.

    One group's operations share a queue. Where those of one kind often end before another one that was entered earlier,
    as those that FSDP issues from streams of its own, each kind has a queue.
    """
    enter, exit_, op = operations.enter_ns[rows], operations.exit_ns[rows], operations.op[rows].astype(np.int64)
    group, rank = operations.group[rows], operations.rank[rows]
    before, after = following(enter, group, rank)
    differs = op[before] != op[after]
    before, after = before[differs], after[differs]
    member = np.unique(np.stack([rank, group]), axis=1, return_inverse=True)[1].ravel()
    num_pairs = np.bincount(member[after], minlength=int(member.max(initial=0)) + 1)
    overtaking = np.bincount(member[after], weights=exit_[after] < exit_[before], minlength=len(num_pairs))
    is_apart = overtaking > OVERTAKING_SHARE * num_pairs
    before, after = following(enter, np.where(is_apart[member], op, -1), group, rank)
    previous = np.full(len(enter), _NEVER_NS)
    previous[after] = exit_[before]
    return previous


def following(enter_ns: NDArray[Any], *queues: NDArray[Any]) -> tuple[Ints, Ints]:
    """Return pairs of rows that follow each other in one queue, by when they enter, twice int64, (num_pairs,)."""
    order = np.lexsort((enter_ns, *queues))
    follows = np.logical_and.reduce([np.diff(queue[order]) == 0 for queue in queues])
    return order[:-1][follows], order[1:][follows]
