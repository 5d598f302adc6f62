"""Match communication operations across ranks by name and number, never by time.

A collective is identified by (members and name of its group, seq, op), a message by (group, source, destination, seq).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.pool import map_threads, run_threads
from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Bytes, Ints
from hpcpace.metrics.operations import UNKNOWN_GROUP, Operations, shares
from hpcpace.trace.schema import ExitKind, Op

_NO_MEMBERS = -1
_NUM_ENDS = 3  # format: group, sender and receiver of a message
_MAX_SLOTS_PER_ROW = 4  # memory: numbers with gaps may need more slots than there are rows
_MAX_INT = np.iinfo(np.int64).max
_PEER_BITS = 32  # format: of a peer in a trace
_PEER_MASK = (1 << _PEER_BITS) - 1


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Which rows belong together.

    Operations are numbered 0, 1, ...: collectives by group and ascending number, then messages.

    Attributes:
        instance: the operation of each row, int64, (num_operations,).
        num_rows: rows of each operation, int64, (num_instances,).
        is_matched: whether every member recorded the row's operation once, with a known clock and without an error,
            bool, (num_operations,).
        slices: the rows of each rank, if none has an operation twice; else empty.
    """

    instance: Ints
    num_rows: Ints
    is_matched: Bools
    slices: Sequence[slice] = ()

    @cached_property
    def starts(self) -> Ints:
        """Where each operation begins in `order`, int64, (num_instances,)."""
        return np.asarray(np.cumsum(self.num_rows) - self.num_rows)

    @cached_property
    def first(self) -> Ints:
        """The first row of each operation, int64, (num_instances,)."""
        if not self.slices:
            return self.order[self.starts]
        first = np.empty(len(self.num_rows), np.int64)
        for rows in reversed(self.slices):
            first[self.instance[rows]] = np.arange(rows.start, rows.stop)
        return first

    @cached_property
    def order(self) -> Ints:
        """Row numbers, those of one operation next to each other and ascending, int64, (num_operations,)."""
        if not self.slices:
            return np.argsort(self.instance, kind="stable")
        order, place = np.empty(len(self.instance), np.int64), self.starts.copy()
        for rows in self.slices:
            own = place[self.instance[rows]]
            order[own] = np.arange(rows.start, rows.stop)
            place[self.instance[rows]] = own + 1
        return order


def match(operations: Operations, *, unknown_clocks: Sequence[int] = ()) -> Matching:
    """Return which rows of all ranks are the same operation.

    Intact traces number the operations of a group, and the messages from one rank to another, without large gaps. So
    most rows find their operation by that number, without a sort. The others are sorted: rows of channels with large
    gaps, and of numbers under which ranks recorded different operations.

    Args:
        operations: rows of all ranks.
        unknown_clocks: ranks whose times cannot be compared; none of their operations count as matched.
    """
    slices = operations.slices
    if slices is None:
        return _match_sorted(operations, np.arange(len(operations)), unknown_clocks)
    slots = _slots(operations, slices)
    counts = list(map_threads(partial(_count, operations, slots, frozenset(unknown_clocks)), shares(slices)))
    num_rows = np.add.reduce([count.num_rows for count in counts], dtype=np.int64)
    is_unusable = np.logical_or.reduce([slots.num_members == _NO_MEMBERS, *(count.is_unusable for count in counts)])
    op = np.maximum.reduce([np.zeros(len(num_rows), np.uint8), *(count.op for count in counts)])
    is_mixed = np.zeros(len(num_rows), np.bool_)
    is_mixed[-1] = num_rows[-1] > 0
    for mixed in map_threads(partial(_mixed, operations, slots, op), shares(slices)):
        is_mixed[mixed] = True
    num_rows[is_mixed] = 0
    is_complete = (num_rows == slots.num_members) & ~is_unusable
    if is_complete[:-1].all() and not is_mixed[-1]:
        everywhere = np.ones(len(operations), np.bool_)
        return Matching(instance=slots.slot, num_rows=num_rows[:-1], is_matched=everywhere, slices=slices)
    number = np.cumsum(num_rows > 0) - 1
    instance, is_matched = np.empty(len(operations), np.int64), np.empty(len(operations), np.bool_)

    def assign(share: Sequence[slice]) -> None:
        for rows in share:
            instance[rows], is_matched[rows] = number[slots.slot[rows]], is_complete[slots.slot[rows]]

    run_threads(assign, shares(slices))
    num_rows = num_rows[num_rows > 0].astype(np.int64)
    if not is_mixed.any():
        is_once = not any(count.has_repeated for count in counts)
        return Matching(instance=instance, num_rows=num_rows, is_matched=is_matched, slices=slices if is_once else ())
    left = np.flatnonzero(is_mixed[slots.slot])
    of_left = _match_sorted(operations, left, unknown_clocks)
    instance[left], is_matched[left] = of_left.instance + len(num_rows), of_left.is_matched
    return Matching(instance=instance, num_rows=np.append(num_rows, of_left.num_rows), is_matched=is_matched)


def _match_sorted(operations: Operations, rows: Ints, unknown_clocks: Sequence[int]) -> Matching:
    """Match some rows by sorting them, whatever their numbers are."""
    rank, peer, group = operations.rank[rows], operations.peer[rows], operations.group[rows]
    op = operations.op[rows].astype(np.int64)
    is_message = (op == Op.SEND) | (op == Op.RECV)
    source = np.where(op == Op.SEND, rank, np.where(op == Op.RECV, peer, -1))
    target = np.where(op == Op.SEND, peer, np.where(op == Op.RECV, rank, -1))
    keys = (np.where(is_message, Op.SEND, op), source, target, operations.seq[rows], group)
    order = np.lexsort((rank, *keys))
    differs = np.arange(len(order)) == 0
    for key in keys:
        differs[1:] |= np.diff(key[order]) != 0
    is_again = np.zeros(len(order), np.bool_)
    is_again[1:] = (np.diff(rank[order]) == 0) & ~differs[1:]
    unusable = is_again | np.isin(rank[order], np.asarray(unknown_clocks, np.int64))
    unusable |= operations.exit_kind[rows][order] == ExitKind.FAILED
    instance = np.empty(len(order), np.int64)
    instance[order] = np.cumsum(differs) - 1
    starts = np.flatnonzero(differs)
    num_rows = np.diff(np.append(starts, len(order)))
    expected = np.where(is_message, 2, operations.group_size[rows])[order[starts]]
    is_usable = np.bincount(instance[order], weights=unusable, minlength=len(starts)) == 0
    is_complete = (num_rows == expected) & is_usable & (group[order[starts]] != UNKNOWN_GROUP)
    return Matching(instance=instance, num_rows=num_rows, is_matched=is_complete[instance])


@dataclass(frozen=True, kw_only=True)
class _Slots:
    """Slots in which rows of the same channel and number meet.

    Attributes:
        slot: slot of each row, int64, (num_operations,); the last slot is for rows without one.
        num_members: how many rows make a slot complete, int64, (num_slots + 1,); `_NO_MEMBERS` if it never is.
    """

    slot: Ints
    num_members: Ints


def _slots(operations: Operations, slices: Sequence[slice]) -> _Slots:
    slot, num_members = _channels(operations, slices)
    num_channels = len(num_members)

    def extremes(share: Sequence[slice]) -> tuple[Ints, Ints, Ints]:
        lowest, highest = np.full(num_channels, _MAX_INT), np.full(num_channels, -_MAX_INT)
        num_rows = np.zeros(num_channels, np.int64)
        for rows in share:
            np.minimum.at(lowest, slot[rows], operations.seq[rows])
            np.maximum.at(highest, slot[rows], operations.seq[rows])
            np.add.at(num_rows, slot[rows], 1)
        return lowest, highest, num_rows

    found = [np.array(values) for values in zip(*map_threads(extremes, shares(slices)), strict=True)]
    lowest, highest, num_rows = found[0].min(axis=0), found[1].max(axis=0), found[2].sum(axis=0)
    # In floating point, because the difference of damaged numbers may overflow int64.
    is_dense = highest.astype(np.float64) - lowest < _MAX_SLOTS_PER_ROW * num_rows + 1
    length = np.where(is_dense & (num_rows > 0), highest - lowest + 1, 0)
    base = np.cumsum(length) - length - lowest
    num_slots = int(length.sum())

    def place(share: Sequence[slice]) -> None:
        for rows in share:
            channel = slot[rows]
            own = base[channel] + operations.seq[rows]
            slot[rows] = own if is_dense.all() else np.where(is_dense[channel], own, num_slots)

    run_threads(place, shares(slices))
    return _Slots(slot=slot, num_members=np.append(np.repeat(num_members, length), _NO_MEMBERS))


def _channels(operations: Operations, slices: Sequence[slice]) -> tuple[Ints, Ints]:
    """Return the channel of each row, and how many rows an operation of each channel has.

    The first channels are for collectives, one for unknown groups and one per group. The others are for a group's
    messages from one rank to another.
    """
    channel = np.empty(len(operations), np.int64)

    def collect(rows: slice) -> tuple[Ints, Ints, Ints]:
        op, group = operations.op[rows], operations.group[rows]
        channel[rows] = group + 1
        of_messages = np.flatnonzero((op == Op.SEND) | (op == Op.RECV))
        is_send, own = op[of_messages] == Op.SEND, int(operations.rank[rows.start])
        peer = operations.peer[rows][of_messages]
        packed = ((group[of_messages] + 1) * 2 + is_send << _PEER_BITS) + (peer & _PEER_MASK)
        kinds, which = np.unique(packed, return_inverse=True)
        peers = (kinds & _PEER_MASK).astype(np.uint32).astype(np.int32).astype(np.int64)
        kinds >>= _PEER_BITS
        sends = kinds & 1 == 1
        ends = np.stack([(kinds >> 1) - 1, np.where(sends, own, peers), np.where(sends, peers, own)], axis=1)
        return of_messages + rows.start, which, ends

    found = list(map_threads(collect, slices))
    ends = np.concatenate([np.zeros((0, _NUM_ENDS), np.int64), *(ends for _, _, ends in found)])
    pairs, numbers = np.unique(ends, axis=0, return_inverse=True)
    first = 0
    for of_messages, which, ends in found:
        own = numbers[first : first + len(ends)].reshape(-1)
        channel[of_messages] = len(operations.groups) + 1 + own[which]
        first += len(ends)
    sizes = [len(group.ranks) for group in operations.groups]
    of_pairs = np.where(pairs[:, 0] == UNKNOWN_GROUP, _NO_MEMBERS, 2)
    return channel, np.concatenate([[_NO_MEMBERS], np.array(sizes, np.int64), of_pairs])


@dataclass(frozen=True, kw_only=True)
class _Count:
    """The content of each slot, each (num_slots + 1,): number of rows, an operation, whether it cannot be compared."""

    num_rows: NDArray[np.int32]
    op: Bytes
    is_unusable: Bools
    has_repeated: bool


def _count(operations: Operations, slots: _Slots, unknown_clocks: frozenset[int], share: Sequence[slice]) -> _Count:
    num_slots = len(slots.num_members)
    num_rows, mark = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32)
    op, is_unusable, has_repeated = np.zeros(num_slots, np.uint8), np.zeros(num_slots, np.bool_), False
    for rows in share:
        own = slots.slot[rows]
        np.add.at(num_rows, own, np.int32(1))
        op[own] = _without_side(operations.op[rows])
        numbers = np.arange(len(own), dtype=np.int32)
        mark[own] = numbers
        is_again = mark[own] != numbers
        if is_again.any():
            is_unusable[own[is_again]] = has_repeated = True
        if int(operations.rank[rows.start]) in unknown_clocks:
            is_unusable[own] = True
        is_unusable[own[operations.exit_kind[rows] == ExitKind.FAILED]] = True
    return _Count(num_rows=num_rows, op=op, is_unusable=is_unusable, has_repeated=has_repeated)


def _mixed(operations: Operations, slots: _Slots, op: Bytes, share: Sequence[slice]) -> Ints:
    """Return the slots in which a row's operation is not the one in `op`, int64, (num_mixed,)."""
    found = [np.zeros(0, np.int64)]
    for rows in share:
        own = slots.slot[rows]
        differs = op[own] != _without_side(operations.op[rows])
        if differs.any():
            found.append(own[differs])
    return np.concatenate(found)


def _without_side(op: Bytes) -> Bytes:
    """Return operations with the same number for both sides of a message."""
    return np.where(op == Op.RECV, np.uint8(Op.SEND), op)
