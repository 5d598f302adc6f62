"""Local work between communication: what a rank did on its own before each operation and between synchronisations.

Only differences of one rank's own times are used, so that clock errors do not matter. Operations with the same position
in their step are compared across steps and across the ranks of a role.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Bytes, Floats, Ints
from hpcpace.metrics.kernels import numbered, ordinals, stable_order
from hpcpace.metrics.operations import MESSAGES, UNKNOWN_GROUP, Operations, is_one_of, synchronises
from hpcpace.metrics.steps import StepPanel
from hpcpace.metrics.waits import NO_BLOCKS, Blocks, blocked_before, blocks_of, rows_of_ranks

DEVICE_ERROR_NS = 10_000
"""Format: marks in the stream of a device may be wrong by that."""
ROUNDING_NS = 512
"""Format: enter and exit are stored to 256 ns, so a call that follows at once may seem to overlap the previous one."""
_NEVER_NS = np.iinfo(np.int64).min


@dataclass(frozen=True, kw_only=True)
class BlockingThresholds(Thresholds, topic="waits"):
    """When a caller that was blocked for a small part of an operation waited for it."""

    launch_ns: int = number(100_000, "ns")
    """Time for which launching an operation on gloo blocks its caller, longer on busy cores: that is not a wait."""
    waited_share: float = number(0.1, "share")
    """Share of the operation for which its caller must be blocked beyond that."""


@dataclass(frozen=True, kw_only=True)
class Blocking:
    """Which operations block their callers; columns of length num_operations.

    Attributes:
        is_known: whether the row belongs to a step of the panel, bool.
        is_blocking: whether callers block until the exit, bool.
    """

    is_known: Bools
    is_blocking: Bools


@dataclass(frozen=True, kw_only=True)
class LocalWork(Blocking):
    """The local work before each operation, and which operations line up; columns of length num_operations.

    Whether an operation blocks is decided for all rows at its position.

    Attributes:
        work_ns: enter minus end of the rank's last blocking wait, or minus begin of the step; no less than 0, int64.
        position: number of the row's position in its step, from 0; rows with the same number correspond, int64.
        role: role of the row's rank, int64.
        num_positions: number of positions.
    """

    work_ns: Ints
    position: Ints
    role: Ints
    num_positions: int


def local_work(
    operations: Operations,
    steps: StepPanel,
    *,
    ranks: Sequence[int],
    role: Ints,
    blocks: Blocks = NO_BLOCKS,
    limits: BlockingThresholds = BlockingThresholds(),
) -> LocalWork:
    """Return the local work before each operation.

    work = enter - end of the rank's last blocking wait (the exit of an operation at a blocking position, or the end of
    one of `blocks`), or - begin of the step if there was none since the step before it began (since its own begin, if
    `steps` lacks that one); pauses in between do not count. A position blocks if most of its rows do: the last rank
    hardly waits, but its operation still ends a wait. A row blocks as of `blocks_caller`.

    Args:
        operations: rows of all ranks.
        steps: the steps that all ranks have, on the clock of the operations.
        ranks: what the rows of `steps` are, ascending, (num_ranks,).
        role: role of each of `ranks`, int64, (num_ranks,); ranks of one role do the same work.
        blocks: further stretches in which ranks were blocked.
        limits: when callers waited.
    """
    slot, column, is_known = _places(operations, steps, ranks)
    of_row = np.asarray(role, np.int64)[slot] if len(slot) else np.zeros(0, np.int64)
    position, num_positions = _positions(operations, np.asarray(ranks, np.int64), np.asarray(role, np.int64), slot)
    is_blocking = _blocking(blocks_caller(operations, limits), position, num_positions)
    last = _last_end(operations, is_blocking, blocks.select(pauses=False), ranks, slot)
    begin = np.zeros(len(operations), np.int64)
    before = begin.copy()
    if len(steps) and len(operations):
        begin = steps.begin_ns[slot, column]
        follows = np.append(False, np.diff(steps.step) == 1)
        before = steps.begin_ns[slot, column - follows[column]]
    start = np.where(last >= before, last, np.minimum(begin, operations.enter_ns))
    paused = _paused(operations.enter_ns, start, blocks.select(pauses=True), ranks, slot)
    return LocalWork(
        work_ns=np.where(is_known, np.maximum(operations.enter_ns - start - paused, 0), 0),
        is_known=is_known,
        is_blocking=is_blocking,
        position=position,
        role=of_row,
        num_positions=num_positions,
    )


def _places(operations: Operations, steps: StepPanel, ranks: Sequence[int]) -> tuple[Ints, Ints, Bools]:
    """Return for each row the index of its rank and of its step in the panel, and whether the panel has both."""
    names = np.asarray(ranks, np.int64)
    if not len(names) or not len(operations):
        nothing = np.zeros(len(operations), np.int64)
        return nothing, nothing, np.zeros(len(operations), np.bool_)
    slot = np.minimum(np.searchsorted(names, operations.rank), len(names) - 1)
    if not len(steps):
        return slot, np.zeros(len(slot), np.int64), np.zeros(len(slot), np.bool_)
    column = np.minimum(np.searchsorted(steps.step, operations.step), len(steps) - 1)
    return slot, column, (names[slot] == operations.rank) & (steps.step[column] == operations.step)


def _positions(operations: Operations, ranks: Ints, role: Ints, slot: Ints) -> tuple[Ints, int]:
    """Return the position of each row: n-th by enter of (op, role of the group, role of a message's peer) in its step.

    Groups have the same role if they have as many members, with the same roles: other ranks of a role are in other
    groups of the same role.
    """
    if not len(operations):
        return np.zeros(0, np.int64), 0
    role_of = dict(zip(ranks.tolist(), role.tolist(), strict=True))
    kinds = [
        (len(group.ranks), tuple(sorted({role_of.get(rank, -1) for rank in group.ranks})))
        for group in operations.groups
    ]
    number = {kind: index for index, kind in enumerate(dict.fromkeys(kinds))}
    group_role = np.array([*(number[kind] for kind in kinds), len(number)], np.int64)[operations.group]
    is_message = is_one_of(operations.op, MESSAGES)
    peer = np.minimum(np.searchsorted(ranks, operations.peer), len(ranks) - 1)
    is_named = is_message & (ranks[peer] == operations.peer)
    peer_role = np.where(is_named, role[peer] - role.min() + 1, 0)
    key = (operations.op.astype(np.int64) * (len(number) + 1) + group_role) * (int(np.ptp(role)) + 2) + peer_role
    _, key = numbered(key)
    span = operations.step - operations.step.min()
    place = (slot * (int(span.max()) + 1) + span) * (int(key.max()) + 1) + key
    order = _in_order(place, operations.enter_ns, slot)
    ordinal = np.empty(len(order), np.int64)
    ordinal[order] = ordinals(np.diff(place[order], prepend=-1) != 0)
    names, position = numbered(key * (int(ordinal.max()) + 1) + ordinal)
    return position, len(names)


def _in_order(place: Ints, enter_ns: Ints, slot: Ints) -> Ints:
    """Return the order of rows by place and enter; rows are ordered by rank, and mostly nearly by enter."""
    order = np.arange(len(place))
    for rows in rows_of_ranks(slot, int(slot[-1]) + 1 if len(slot) else 0):
        own_ns = enter_ns[rows]
        if (own_ns[1:] < own_ns[:-1]).any():
            order[rows] = rows.start + np.argsort(own_ns, kind="stable")
    return order[stable_order(place[order])]


def blocks_caller(operations: Operations, limits: BlockingThresholds = BlockingThresholds()) -> Bools:
    """Return which operations blocked their callers for half of their duration or a long time, bool, (num_operations,).

    A long time is more than launching takes and a tenth of the duration. Launching on a device blocks nobody, so every
    wait counts there: an operation that was issued long before, as FSDP does, is waited for at its end.
    """
    duration = operations.exit_ns - operations.enter_ns
    blocked = operations.blocked_ns
    waits = (blocked > limits.launch_ns) & (blocked >= limits.waited_share * duration)
    waits |= (blocked > 0) & (2 * blocked >= duration)
    is_on_device = np.array([*(group.is_on_device for group in operations.groups), False])
    if is_on_device.any():
        waits |= is_on_device[operations.group] & (blocked > DEVICE_ERROR_NS)
    return waits


def _blocking(waits: Bools, position: Ints, num_positions: int) -> Bools:
    count = np.bincount(position, minlength=num_positions)
    blocks: Bools = 2 * np.bincount(position, weights=waits, minlength=num_positions) >= np.maximum(count, 1)
    return blocks[position]


def left_early_ns(operations: Operations) -> Ints:
    """Return how long before the exit of each row its rank may already do what comes next, int64, (num_operations,).

    Marks of a device may be wrong by that, so that an operation which follows a wait seems to be entered before it
    ends. One that is entered before the wait is earlier by all that this blocked.
    """
    is_on_device = np.array([*(group.is_on_device for group in operations.groups), False])
    error_ns = np.where(is_on_device[operations.group], DEVICE_ERROR_NS, 0)
    return np.minimum(operations.blocked_ns // 2, error_ns)


def _last_end(operations: Operations, is_blocking: Bools, blocks: Blocks, ranks: Sequence[int], slot: Ints) -> Ints:
    """Return when the last blocking wait before each row's enter ended; a loop over ranks keeps each search short."""
    last = np.full(len(slot), _NEVER_NS)
    bounds = rows_of_ranks(slot, len(ranks))
    own = blocks_of(blocks, ranks)
    left_ns = operations.exit_ns - left_early_ns(operations)
    for index, rows in enumerate(bounds):
        left, ends = (
            np.concatenate([of[rows][is_blocking[rows]], own[index][1]]) for of in (left_ns, operations.exit_ns)
        )
        order = np.argsort(left, kind="stable")
        found = np.searchsorted(left[order], operations.enter_ns[rows] + ROUNDING_NS, side="right")
        last[rows] = np.append(_NEVER_NS, np.maximum.accumulate(ends[order]))[found]
    return last


def _paused(enter: Ints, start: Ints, pauses: Blocks, ranks: Sequence[int], slot: Ints) -> Ints:
    """Return the pauses between each row's start and its enter, nanoseconds; pauses of a rank do not overlap."""
    total = np.zeros(len(slot), np.int64)
    if not len(pauses.rank):
        return total
    own = blocks_of(pauses, ranks)
    for index, rows in enumerate(rows_of_ranks(slot, len(ranks))):
        begin, end = (np.sort(times) for times in own[index])
        sums = np.append(0, np.cumsum(end - begin))
        first = np.searchsorted(begin, start[rows], side="left")
        stop = np.searchsorted(end, enter[rows] + ROUNDING_NS, side="right")
        total[rows] = np.maximum(sums[stop] - sums[np.minimum(first, stop)], 0)
    return total


@dataclass(frozen=True, kw_only=True)
class SegmentPanel:
    """Local work between synchronisations of one set of ranks, c_irj.

    Attributes:
        members: the ranks, ascending.
        step: step numbers, int64, (num_steps,).
        work_ns: float64, (num_members, num_steps, num_segments); a step's segments sum to its local work.
        op: the operation that ends each segment, uint8, (num_segments,).
        num_left_out: steps whose operations differ from those of most steps or are missing on some member.
    """

    members: tuple[int, ...]
    step: Ints
    work_ns: Floats
    op: Bytes
    num_left_out: int


def segment_panels(
    operations: Operations, steps: StepPanel, work: LocalWork, *, ranks: Sequence[int], blocks: Blocks = NO_BLOCKS
) -> tuple[SegmentPanel, ...]:
    """Return the local work between synchronisations for each set of ranks that synchronise, largest set first.

    Local time is the rank's own time without the stretches in which it was blocked. A segment is the local time between
    the enters of two synchronising operations. The first segment begins at the last one of the previous step, or at the
    begin of the step if that is missing or nothing has blocked since. Operations that are under way at once, with no
    wait between them, are one synchronisation, that of the last.

    Args:
        operations: rows of all ranks.
        steps: the steps that all ranks have, on the clock of the operations.
        work: from `local_work` with the same arguments.
        ranks: what the rows of `steps` are, ascending, (num_ranks,).
        blocks: further stretches in which ranks were blocked.
    """
    slot, column, _ = _places(operations, steps, ranks)
    blocked = blocked_before(operations, steps, work.is_blocking, blocks, ranks, slot)
    known = set(ranks)
    chosen = np.flatnonzero(synchronises(operations.op) & work.is_known & (operations.group != UNKNOWN_GROUP))
    members = [group.ranks for group in operations.groups]
    number = {of: index for index, of in enumerate(dict.fromkeys(members))}
    of_row = np.array([*(number[of] for of in members), 0], np.int64)[operations.group[chosen]]
    place = (of_row * len(ranks) + slot[chosen]) * len(steps) + column[chosen]
    order = chosen[_in_order(place, operations.enter_ns[chosen], slot[chosen])]
    edges = np.append(0, np.cumsum(np.bincount(of_row, minlength=len(number))))
    found = []
    for of, index in number.items():
        rows = order[edges[index] : edges[index + 1]]
        places = np.searchsorted(np.asarray(ranks, np.int64), of)
        is_whole = len(places) > 1 and set(of) <= known
        rows = rows[np.isin(slot[rows], places)]  # a damaged trace may have operations of foreign groups
        if len(rows) and is_whole:
            panel = _panel(operations, steps, rows, of, places, slot[rows], column[rows], blocked)
            found += [panel] if panel is not None else []
    return tuple(sorted(found, key=lambda panel: (-len(panel.members), panel.members)))


def _panel(
    operations: Operations,
    steps: StepPanel,
    rows: Ints,
    members: tuple[int, ...],
    places: Ints,
    slot: Ints,
    column: Ints,
    blocked: tuple[Ints, Ints, Ints],
) -> SegmentPanel | None:
    """Return the panel of one set of ranks, whose rows are in order of member, step and enter."""
    num_steps, at_enter = len(steps), blocked[0]
    member = np.searchsorted(places, slot)
    count = np.bincount(member * num_steps + column, minlength=len(members) * num_steps).reshape(
        len(members), num_steps
    )
    usual = np.bincount(count[0][count[0] > 0]).argmax() if count[0].any() else 0
    kept = (count == usual).all(axis=0)
    if not usual or not kept.any():
        return None
    table = rows[kept[column]].reshape(len(members), int(kept.sum()), usual)
    op = operations.op[table]
    patterns = op[0][(op == op[0]).all(axis=(0, 2))]
    if not len(patterns):
        return None
    unique, counts = np.unique(patterns, axis=0, return_counts=True)
    same = (op == unique[counts.argmax()]).all(axis=(0, 2))
    table, op = table[:, same], op[:, same][0, 0]
    used = np.flatnonzero(kept)[same]
    if 2 * len(used) < num_steps:  # ranks that meet only now and then, as for a checkpoint
        return None

    waited = np.diff(at_enter[table], axis=2)
    closes = np.append((np.median(waited, axis=(0, 1)) > 0) if usual > 1 else np.zeros(0, np.bool_), True)
    table, op = table[:, :, closes], op[closes]
    begin_ns, at_begin = steps.begin_ns[places][:, used], blocked[1][places][:, used]
    local = operations.enter_ns[table] - at_enter[table]
    start = begin_ns - at_begin
    follows = np.flatnonzero(np.diff(steps.step[used]) == 1) + 1
    last = table[:, follows - 1, -1]
    has_blocked = at_enter[table[:, follows, 0]] > at_enter[last]
    start[:, follows] = np.where(has_blocked, local[:, follows - 1, -1], start[:, follows])
    work = np.diff(local, axis=2, prepend=start[:, :, None])
    return SegmentPanel(
        members=members,
        step=steps.step[used],
        work_ns=np.maximum(work, 0).astype(np.float64),
        op=op,
        num_left_out=num_steps - len(used),
    )
