"""Build the graph of a step from recurring operations: what each rank works, transfers and waits for.

One operation that two ranks block on::

    rank 0   START -> WORK -+-----------> WORK -----------> WAIT -> WORK -> ...
                            |                                ^
                     enters +--------> TRANSFER -------------+
                            |           ^   |
                            +-> GATE ---+   + - - > next TRANSFER of the rank's group
                            |           |
                            |           v
                     enters +--------> TRANSFER -------------+
                            |                                v
    rank 1   START -> WORK -+-----------> WORK -----------> WAIT -> WORK -> ...
                                     begins to wait     stops waiting

- A GATE opens with the last enter that others wait for: of a message, that of its sender. Where the sender's completion
  shows that it was held until its receiver came (rendezvous), both sides go through the gate, and the last of both
  opens it. The gate of a message that travels while its receiver works takes as long as the message travels, and counts
  as a TRANSFER of the receiver. Members of a broadcast that are held until all have come go through a further gate.
- A TRANSFER begins once its rank has entered, the gate is open, and the group's previous transfer has ended.
- A WAIT ends with one transfer. The last block of a step ends with all transfers that are under way by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Bytes, Floats, Ints
from hpcpace.metrics.kernels import library, numbered
from hpcpace.metrics.matching import Matching
from hpcpace.metrics.operations import (
    FROM_ROOT,
    MESSAGES,
    Operations,
    depends_on_others,
    held_until,
    is_one_of,
    releases_others,
)
from hpcpace.metrics.segments import DEVICE_ERROR_NS, LocalWork, left_early_ns
from hpcpace.metrics.steps import StepPanel
from hpcpace.metrics.waits import NO_BLOCKS, OVERTAKING_SHARE, Blocks, Waits, blocks_of, following
from hpcpace.metrics.what_if import GATE, START, TRANSFER, WAIT, WORK, StepGraph
from hpcpace.trace.schema import RESOLUTION_NS, ExitKind, Op


def messages_in_flight(operations: Operations, table: Ints, gate_of: Ints) -> tuple[Ints, Ints]:
    """Return the slots that receive messages which travel while their receiver works, and how long these travel.

    The time is measured if the receiver was waiting before the message was sent. Otherwise it is the usual time for the
    size, but no more than until the receiver has it. If late receivers still have to wait as long for messages of some
    size, these do not travel while the receiver works: both sides must be there, as for large messages on gloo.

    Args:
        operations: rows of all ranks.
        table: the row of each slot in each step, int64, (num_slots, num_steps).
        gate_of: number of the operation of each slot, the same for both sides of a message, int64, (num_slots,).

    Returns:
        slots, int64, (num_messages,), and nanoseconds, int64, (num_messages, num_steps).
    """
    slots, senders = _received(operations.op[table[:, 0]], gate_of)
    size_bytes = operations.size_bytes[table[:, 0]]
    enter, exit_ = operations.enter_ns[table[slots]], operations.exit_ns[table[slots]]
    way_ns = np.maximum(exit_ - operations.enter_ns[table[senders]], 0)
    is_measured = enter <= exit_ - way_ns
    travels = np.zeros(len(slots), np.bool_)
    for size in np.unique(size_bytes[slots]):
        rows = np.flatnonzero(size_bytes[slots] == size)
        measured, since_ns = is_measured[rows], (exit_ - enter)[rows]
        if not measured.any():
            continue
        usual_ns = int(np.median(way_ns[rows][measured]))
        is_late = way_ns[rows] - since_ns >= usual_ns
        travels[rows] = not is_late.any() or 2 * np.median(since_ns[is_late]) < usual_ns
        way_ns[rows] = np.where(measured, way_ns[rows], np.minimum(way_ns[rows], usual_ns))
    return slots[travels], way_ns[travels]


def _received(op: Bytes, gate_of: Ints) -> tuple[Ints, Ints]:
    """Return the slots that receive a message, and the slots that send it, each int64, (num_messages,)."""
    sender = np.full(int(gate_of.max(initial=-1)) + 1, -1)
    sender[gate_of[op == Op.SEND]] = np.flatnonzero(op == Op.SEND)
    slots = np.flatnonzero((op == Op.RECV) & (sender[gate_of] >= 0))
    return slots, sender[gate_of[slots]]


@dataclass(frozen=True)
class Slots:
    """The operations that recur in each step. A slot is an operation of one rank, the same in all steps.

    Attributes:
        table: rows, int64, (num_slots, num_steps).
        column: which steps of the panel those are, int64, (num_steps,).
        rank: index of the rank, int64, (num_slots,).
        position: position as in `LocalWork`, int64, (num_slots,).
        partner: the first slot of the same operation, int64, (num_slots,).
    """

    table: Ints
    column: Ints
    rank: Ints
    position: Ints
    partner: Ints


def recurring_slots(
    operations: Operations, matching: Matching, work: LocalWork, steps: StepPanel, ranks: Sequence[int]
) -> Slots | None:
    """Return the operations that recur in most steps, for the steps that have exactly these; None without any.

    Args:
        operations: rows of all ranks.
        matching: which of them belong together.
        work: from `local_work`.
        steps: the steps that all ranks have.
        ranks: what the rows of `steps` are, ascending, (num_ranks,).
    """
    rows = np.flatnonzero(work.is_known & matching.is_matched)
    if not len(rows) or not work.num_positions:
        return None
    column = np.searchsorted(steps.step, operations.step[rows])
    key = np.searchsorted(np.asarray(ranks), operations.rank[rows]) * work.num_positions + work.position[rows]
    names, slot = numbered(key)
    present = np.full((len(names), len(steps)), -1, np.int64)
    present[slot, column] = rows
    usual = 2 * (present >= 0).sum(axis=1) > len(steps)
    kept = ((present >= 0) == usual[:, None]).all(axis=0)
    table = present[usual][:, kept]
    if not table.size or len(np.unique(names[usual] // work.num_positions)) < len(ranks):
        return None
    partner = _first_slots(matching, table)
    same = (partner == partner[:, :1]).all(axis=0)
    return Slots(
        # Selecting columns lays them out one after the other, and all figures of slots would be.
        np.ascontiguousarray(table[:, same]),
        np.flatnonzero(kept)[same],
        names[usual] // work.num_positions,
        names[usual] % work.num_positions,
        partner[:, 0],
    )


def _first_slots(matching: Matching, table: Ints) -> Ints:
    """Return the first slot with a row of the same operation, like `table`, (num_slots, num_steps)."""
    first = np.full(len(matching.starts), len(table), np.int64)
    instance = matching.instance[table]
    np.minimum.at(first, instance.ravel(), np.repeat(np.arange(len(table)), table.shape[1]))
    return first[instance]


_NONE = -1
_MAX_PLACES = 8  # speed: ranks, and steps of each, that show where a wait comes: all have it at the same place
_ROUNDING_NS = RESOLUTION_NS["collectives"]["enter_ns"]
_SEEN_NS = 2_048  # format: a shorter wait may be rounding alone
_APART_SHARE = 0.01  # statistics: of a step; what passes between steps of an importer may be the cost of its marks


@dataclass(frozen=True, kw_only=True)
class GraphThresholds(Thresholds, topic="waits"):
    """When steps can be rebuilt."""

    max_several_share: float = number(0.1, "share")
    """Share of the steps of all ranks with several blocks besides pauses, up to which steps can be rebuilt."""
    min_block_share: float = number(0.001, "share")
    """Share of the step from which a block counts for that: shorter ones cost nothing even if taken for work."""
    least_held_share: float = number(0.05, "share")
    """Share of the rows of an operation of a device in which the host must wait for it, to count as waiting for it
    always: marks of fewer may be errors."""


def step_graph(
    operations: Operations,
    matching: Matching,
    waits: Waits,
    work: LocalWork,
    steps: StepPanel,
    *,
    ranks: Sequence[int],
    role: Ints,
    blocks: Blocks = NO_BLOCKS,
    limits: GraphThresholds = GraphThresholds(),
) -> StepGraph | None:
    """Return the graph of the steps that have the operations of most steps; None if no steps or no order of them do.

    There is none either if steps have several blocks, as those with several backward passes of DDP have: the graph has
    one wait for all that is under way, so waiting in the others would count as work.

    Args:
        operations: rows of all ranks.
        matching, waits: which of them belong together, and their waits and transfers.
        work: from `local_work` with the same arguments.
        steps: the steps that all ranks have, on the clock of the operations.
        ranks: what the rows of `steps` are, ascending, (num_ranks,).
        role: role of each of `ranks`, int64, (num_ranks,).
        blocks: further stretches in which ranks were blocked; the last one of a step waits for all transfers under way.
        limits: when steps can be rebuilt.
    """
    if _has_several_blocks(blocks, steps, ranks, limits):
        return None
    slots = recurring_slots(operations, matching, work, steps, ranks)
    if slots is None or not len(slots.column):
        return None
    begins = _block_begins(blocks, steps, ranks, slots.column)
    events = _events(operations, work, slots, role, begins, limits.least_held_share)
    start_ns = _starts(steps, slots.column, events.released_ns[events.last])
    return _Builder(operations, waits, slots, events, start_ns).graph(steps, role)


@dataclass(frozen=True, kw_only=True)
class _Events:
    """The events up to which ranks work: enters of all slots, then waits for one slot, then waits for all under way.

    Attributes:
        time_ns: when each happens, int64, (num_events, num_steps).
        released_ns: when the rank can work again, int64, (num_events, num_steps).
        rank: index of the rank, int64, (num_events,).
        slot: slot of the operation, -1 for a wait for all under way, int64, (num_events,).
        previous: the rank's event before it, -1 for its first, int64, (num_events,).
        last: the last event of each rank, int64, (num_ranks,).
        queue: pairs of slots of a rank and group that follow each other, int64, (2, num_pairs).
        blocking: slots that are waited for one by one, int64, (num_blocking,).
        under_way: slots that a wait for all waits for, int64, (num_under_way,).
        placing_ns: how wrong the places of waits that blocked nobody are together, nanoseconds of a step.
    """

    time_ns: Ints
    released_ns: Ints
    rank: Ints
    slot: Ints
    previous: Ints
    last: Ints
    queue: Ints
    blocking: Ints
    under_way: Ints
    placing_ns: float


def _events(
    operations: Operations,
    work: LocalWork,
    slots: Slots,
    role: Ints,
    block_begin_ns: Ints | None,
    least_held_share: float,
) -> _Events:
    """Return the events of all ranks in all steps, `block_begin_ns` as from `_block_begins`."""
    table, num_slots, num_ranks = slots.table, len(slots.table), int(slots.rank.max()) + 1
    enter, exit_ = operations.enter_ns[table], operations.exit_ns[table]
    blocking = np.flatnonzero(work.is_blocking[table[:, 0]] | _holds_now_and_then(operations, slots, least_held_share))
    block_ns = _wait_for_all_begins(slots, np.maximum(enter, exit_), block_begin_ns)
    wait_ns = _wait_begins(operations, table, slots.rank, blocking)
    placing_ns = _place_unseen_waits(wait_ns, operations, slots, role, blocking)
    time_ns = np.concatenate([enter, wait_ns, block_ns])
    usual_ns = np.median(time_ns - enter.min(axis=0), axis=1)
    under_way, all_done_ns = np.zeros(0, np.int64), np.full(block_ns.shape, _NONE)
    if len(block_ns):
        usual_ns[-num_ranks:] += _ROUNDING_NS  # what is entered as a wait begins comes before it
        under_way = np.flatnonzero(usual_ns[:num_slots] <= usual_ns[-num_ranks:][slots.rank])
        np.maximum.at(all_done_ns, slots.rank[under_way], exit_[under_way])
    rank = np.concatenate([slots.rank, slots.rank[blocking], np.arange(len(block_ns))])
    is_wait = np.arange(len(rank)) >= num_slots
    order = np.lexsort((is_wait, usual_ns, rank))
    is_same = rank[order][1:] == rank[order][:-1]
    previous = np.full(len(order), _NONE)
    previous[order[1:][is_same]] = order[:-1][is_same]
    released_ns = np.maximum(np.concatenate([enter, exit_[blocking], all_done_ns]), time_ns)
    # A wait that blocked nobody can seem to lie inside another one; the rank works again when it has left both.
    for own in np.split(order, np.flatnonzero(~is_same) + 1):
        released_ns[own] = np.maximum.accumulate(released_ns[own], axis=0)
    return _Events(
        time_ns=time_ns,
        released_ns=released_ns,
        rank=rank,
        slot=np.concatenate([np.arange(num_slots), blocking, np.full(len(block_ns), _NONE)]),
        previous=previous,
        last=order[np.append(np.flatnonzero(~is_same), len(order) - 1)],
        queue=_queue(operations, table, slots.rank, usual_ns[:num_slots]),
        blocking=blocking,
        under_way=under_way,
        placing_ns=placing_ns,
    )


def _holds_now_and_then(operations: Operations, slots: Slots, least_share: float) -> Bools:
    """Return which slots hold the stream of a device in some steps on some ranks, bool, (num_slots,).

    The program waits there always, however rarely the operation is not complete by then.
    """
    found = _is_on_device(operations, slots.table)
    if not found.any():
        return found
    held_share = (operations.blocked_ns[slots.table] > DEVICE_ERROR_NS).mean(axis=1)
    count, total = (np.bincount(slots.position, weights=of) for of in (None, held_share))
    return found & (total >= least_share * count)[slots.position]


@dataclass(frozen=True)
class _Arrival:
    """What slots wait for, besides their own enter.

    Attributes:
        is_free: the senders, and members of broadcasts, that receivers do not hold back, bool, (num_slots,).
        gate_of: number of the operation of each slot, int64, (num_slots,).
        batch: from `_batches`, int64, (num_slots,).
        travelling, way_ns: messages that travel while their receiver works, as from `messages_in_flight`.
    """

    is_free: Bools
    gate_of: Ints
    batch: Ints
    travelling: Ints
    way_ns: Ints


class _Builder:
    """A graph under construction: its nodes, then its edges by kind of target."""

    def __init__(self, operations: Operations, waits: Waits, slots: Slots, events: _Events, start_ns: Ints) -> None:
        """Add all nodes and edges.

        Args:
            operations, waits: rows of all ranks.
            slots: the operations that recur.
            events: up to which ranks work.
            start_ns: when each rank starts each step, int64, (num_ranks, num_steps).
        """
        self._slots, self._events, self._start_ns = slots, events, start_ns
        self._nodes: list[tuple[Ints, Ints, Ints, NDArray[Any]]] = []
        self._edges: list[tuple[Ints, Ints]] = []
        self._num_nodes = 0
        op, num_slots, previous = operations.op[slots.table[:, 0]], len(slots.table), events.previous
        _, gate_of = np.unique(slots.partner, return_inverse=True)
        batch = _batches(operations, slots.table, events.queue)
        meets = _meets(operations, slots.table, gate_of, batch)
        held = _held(operations, slots.table, gate_of)
        travelling, way_ns = messages_in_flight(operations, slots.table, gate_of)
        travelling, way_ns = (found[~meets[travelling]] for found in (travelling, way_ns))

        ranks, position = np.arange(len(start_ns)), np.append(slots.position, _NONE)[events.slot]
        start = self._add(START, ranks, np.full(len(ranks), _NONE), start_ns - start_ns.min(axis=0))
        # The work up to an event begins when the rank's previous event released it.
        begin_ns = np.where((previous >= 0)[:, None], events.released_ns[previous], start_ns[events.rank])
        self._work_begin_ns = np.asarray(begin_ns, np.int64)
        work = self._add(WORK, events.rank, position, np.maximum(events.time_ns - begin_ns, 0))
        is_free = (op == Op.SEND) & ~meets
        self._has_free_senders = bool(is_free.any())
        is_free |= is_one_of(op, FROM_ROOT) & ~held
        gate = self._add_gates(gate_of, travelling, way_ns)[gate_of]
        arrival = _Arrival(is_free=is_free, gate_of=gate_of, batch=batch, travelling=travelling, way_ns=way_ns)
        transfer = self._add_transfers(operations, waits, arrival)
        self._batch_of = transfer, transfer[batch]
        nothing_ns = np.zeros(events.time_ns[num_slots:].shape, np.int64)
        wait = self._add(WAIT, events.rank[num_slots:], position[num_slots:], nothing_ns)

        # Work follows the rank's previous event, or its start: an enter at once, a wait when it ends.
        follows = np.append(work[:num_slots], wait)
        self._connect(np.where(previous >= 0, follows[previous], start[events.rank]), work)
        # A gate opens when all have entered that others wait for, and that of a message by its sender, or by both.
        is_root = operations.rank[slots.table[:, 0]] == operations.peer[slots.table[:, 0]]
        releases = np.flatnonzero(releases_others(op, is_root) & ((op != Op.RECV) | meets))
        self._connect(work[releases], gate[releases])
        # A transfer follows the rank's enter, the gate if it waits for others, and the previous one in its queue.
        self._connect(work[:num_slots], transfer)
        depends = np.flatnonzero(depends_on_others(op, is_root) & ((op != Op.SEND) | meets))
        self._connect(gate[depends], transfer[depends])
        self._connect_held(np.flatnonzero(held), gate_of, work, transfer)
        self._connect(*(transfer[ends] for ends in events.queue))
        # A wait ends no earlier than it begins, and with its transfer, or with all that are under way.
        num_blocking = len(events.blocking)
        self._connect(work[num_slots:], wait)
        self._connect(transfer[events.blocking], wait[:num_blocking])
        self._connect(transfer[events.under_way], wait[num_blocking:][slots.rank[events.under_way]])
        self._end = follows[events.last]

    def graph(self, steps: StepPanel, role: Ints) -> StepGraph | None:
        """Return the graph with edges ordered by level; None if edges form a circle."""
        source, target = (np.concatenate(side) for side in zip(*self._edges, strict=True))
        levels = _levels(source, target, self._num_nodes)
        if levels is None:
            return None
        kind, rank, position, weight_ns = zip(*self._nodes, strict=True)
        events, order = self._events, np.lexsort((target, levels[target]))
        batch, (transfers, last) = np.arange(self._num_nodes), self._batch_of
        batch[transfers] = last
        measured_ns = events.released_ns[events.last].max(axis=0) - self._start_ns.max(axis=0)
        return StepGraph(
            step=steps.step[self._slots.column],
            kind=np.concatenate(kind),
            rank=np.concatenate(rank),
            position=np.concatenate(position),
            weight_ns=np.concatenate(weight_ns, dtype=np.float64),
            source=source[order],
            target=target[order],
            bounds=np.searchsorted(levels[target][order], np.arange(1, int(levels.max()) + 2)),
            end=self._end,
            role=np.asarray(role, np.int64),
            measured_ns=measured_ns.astype(np.float64),
            num_left_out=len(steps) - len(self._slots.column),
            work_begin_ns=self._work_begin_ns,
            has_free_senders=self._has_free_senders,
            batch=batch,
            placing_ns=events.placing_ns,
            are_steps_apart=_between_ns(steps, self._slots.column) > _APART_SHARE * float(measured_ns.mean()),
        )

    def _connect_held(self, held: Ints, gate_of: Ints, work: Ints, transfer: Ints) -> None:
        """Let the transfers of slots that are held until all have come follow the enters of all."""
        names, of_held = np.unique(gate_of[held], return_inverse=True)
        nothing = np.full(len(names), _NONE)
        gate = self._add(GATE, nothing, nothing, np.zeros((len(names), self._start_ns.shape[1])))
        members = np.flatnonzero(np.isin(gate_of, names))
        self._connect(work[members], gate[np.searchsorted(names, gate_of[members])])
        self._connect(gate[of_held], transfer[held])

    def _add_gates(self, gate_of: Ints, travelling: Ints, way_ns: Ints) -> Ints:
        """Add a gate for each operation, int64, (num_gates,); a message that travels takes time at its gate."""
        num_gates, of_travelling = int(gate_of.max()) + 1, gate_of[travelling]
        kind, rank, position = np.full(num_gates, GATE), np.full(num_gates, _NONE), np.full(num_gates, _NONE)
        kind[of_travelling] = TRANSFER
        rank[of_travelling], position[of_travelling] = self._slots.rank[travelling], self._slots.position[travelling]
        weight_ns = np.zeros((num_gates, self._start_ns.shape[1]))
        weight_ns[of_travelling] = way_ns
        return self._add(kind, rank, position, weight_ns)

    def _add_transfers(self, operations: Operations, waits: Waits, arrival: _Arrival) -> Ints:
        """Add the transfers; of a message, what is left once both its sides are there, or it has arrived if it travels.

        Where no gate holds a sender back, it takes all the time since it entered. A batch takes what is left once that
        is so of all its messages: the transfer of its last one, which follows the others in their queue. Members of a
        broadcast that are held in some steps alone take until then, too.
        """
        table, (first, second) = self._slots.table, self._events.queue
        gate_of, batch, travelling = arrival.gate_of, arrival.batch, arrival.travelling
        enter, exit_ = operations.enter_ns[table], operations.exit_ns[table]
        op = operations.op[table[:, 0]]
        sent_ns, met_ns = np.zeros((2, int(gate_of.max()) + 1, table.shape[1]), np.int64)
        is_from_root = is_one_of(op, FROM_ROOT)
        sends = (op == Op.SEND) | (is_from_root & (operations.rank[table[:, 0]] == operations.peer[table[:, 0]]))
        sent_ns[gate_of[sends]] = enter[sends]
        np.maximum.at(met_ns, gate_of, enter)
        ready_ns = np.where(arrival.is_free[:, None], np.maximum(enter, sent_ns[gate_of]), met_ns[gate_of])
        is_since_ready = is_from_root[:, None] & (enter + waits.wait_ns[table] > ready_ns)
        ready_ns[travelling] = np.maximum(enter[travelling], sent_ns[gate_of[travelling]] + arrival.way_ns)
        is_outside = batch[first] != batch[second]
        ready_ns[second[is_outside]] = np.maximum(ready_ns[second[is_outside]], exit_[first[is_outside]])
        all_ready_ns = np.zeros(table.shape, np.int64)
        np.maximum.at(all_ready_ns, batch, ready_ns)
        is_message = is_one_of(op, MESSAGES)
        is_since_ready |= is_message[:, None]
        weight_ns = np.where(is_since_ready, np.maximum(exit_ - all_ready_ns, 0), waits.transfer_ns[table])
        late = is_message[:, None] & (operations.exit_kind[table] == ExitKind.WAIT)
        _shorten(weight_ns, late & (operations.blocked_ns[table] <= _SEEN_NS), op, operations.size_bytes[table[:, 0]])
        weight_ns[batch != np.arange(len(batch))] = 0
        return self._add(TRANSFER, self._slots.rank, self._slots.position, weight_ns)

    def _add(self, kind: int | Ints, rank: Ints, position: Ints, weight_ns: NDArray[Any]) -> Ints:
        """Add nodes and return their numbers, int64, (num_added,)."""
        first, self._num_nodes = self._num_nodes, self._num_nodes + len(rank)
        self._nodes.append((np.broadcast_to(np.asarray(kind, np.int64), rank.shape), rank, position, weight_ns))
        return np.arange(first, self._num_nodes)

    def _connect(self, source: Ints, target: Ints) -> None:
        self._edges.append((source, target))


def _shorten(weight_ns: Ints, is_late: Bools, op: Bytes, size_bytes: Ints) -> None:
    """Shorten transfers whose end only a late wait shows, in place, to what others of their size take.

    Args:
        weight_ns: until the end of the wait, int64, (num_slots, num_steps).
        is_late: where the wait came when the message was there, bool, (num_slots, num_steps).
        op, size_bytes: of each slot.
    """
    for kind in np.unique(np.stack([op.astype(np.int64), size_bytes])[:, is_late.any(axis=1)], axis=1).T:
        slots = np.flatnonzero((op == kind[0]) & (size_bytes == kind[1]))
        is_seen = ~is_late[slots]
        if is_seen.any():
            usual_ns = int(np.median(weight_ns[slots][is_seen]))
            weight_ns[slots] = np.where(is_seen, weight_ns[slots], np.minimum(weight_ns[slots], usual_ns))


def _batches(operations: Operations, table: Ints, queue: Ints) -> Ints:
    """Return the last slot of the batch of each slot, which is itself where it was issued alone, int64, (num_slots,).

    Messages that a device was given together end together: they have one exit, and what is known of it is the wait.

    Args:
        operations: rows of all ranks.
        table: the row of each slot in each step, int64, (num_slots, num_steps).
        queue: pairs of slots of a rank and group that follow each other, int64, (2, num_pairs).
    """
    last, (first, second) = np.arange(len(table)), queue
    is_message = is_one_of(operations.op[table[:, 0]], MESSAGES) & _is_on_device(operations, table)
    exit_ = operations.exit_ns[table]
    is_joined = is_message[first] & is_message[second] & (exit_[first] == exit_[second]).all(axis=1)
    is_joined &= (operations.exit_kind[table[first]] == ExitKind.WAIT).all(axis=1)
    for before, after in zip(first[is_joined][::-1].tolist(), second[is_joined][::-1].tolist(), strict=True):
        last[before] = last[after]
    return last


def _is_on_device(operations: Operations, table: Ints) -> Bools:
    """Return which slots are operations of a device, bool, (num_slots,)."""
    is_on_device = np.array([*(group.is_on_device for group in operations.groups), False])
    return np.asarray(is_on_device[operations.group[table[:, 0]]], np.bool_)


def _meets(operations: Operations, table: Ints, gate_of: Ints, batch: Ints) -> Bools:
    """Return which slots are a side of a message whose sender completed after its receiver had entered, in each step.

    A batch completes where it blocked its rank until its end; a wait that came later says nothing.

    Args:
        operations: rows of all ranks.
        table: the row of each slot in each step, int64, (num_slots, num_steps).
        gate_of: number of the operation of each slot, int64, (num_slots,).
        batch: from `_batches`, int64, (num_slots,).
    """
    op, num_gates = operations.op[table[:, 0]], int(gate_of.max(initial=-1)) + 1
    received_ns = np.full((num_gates, table.shape[1]), np.iinfo(np.int64).max)
    receives, sends = np.flatnonzero(op == Op.RECV), np.flatnonzero(op == Op.SEND)
    received_ns[gate_of[receives]] = operations.enter_ns[table[receives]]
    rows = table[sends]
    is_held = operations.exit_ns[rows] >= received_ns[gate_of[sends]]
    ends_blocked = 2 * (operations.blocked_ns[table[batch[sends]]] > 0).sum(axis=1) > table.shape[1]
    is_seen = operations.exit_kind[rows] == ExitKind.COMPLETION
    is_held &= is_seen | (ends_blocked & _is_on_device(operations, table)[sends])[:, None]
    meets = np.zeros(num_gates, np.bool_)
    meets[gate_of[sends]] = is_held.all(axis=1)
    return meets[gate_of]


def _held(operations: Operations, table: Ints, gate_of: Ints) -> Bools:
    """Return which slots of broadcasts and scatters are held until all have come, bool, (num_slots,).

    That is in each step in which somebody comes later than the rank and the root; without such steps none is.

    Args:
        operations: rows of all ranks.
        table: the row of each slot in each step, int64, (num_slots, num_steps).
        gate_of: number of the operation of each slot, int64, (num_slots,).
    """
    found = is_one_of(operations.op[table[:, 0]], FROM_ROOT)
    rows, gate = table[found], gate_of[found]
    enter, is_root = operations.enter_ns[rows], operations.rank[rows[:, 0]] == operations.peer[rows[:, 0]]
    sent_ns, last_ns = np.full((2, int(gate_of.max(initial=-1)) + 1, table.shape[1]), np.iinfo(np.int64).min)
    sent_ns[gate[is_root]] = enter[is_root]
    np.maximum.at(last_ns, gate, enter)
    is_later = last_ns[gate] > np.maximum(enter, sent_ns[gate])
    is_held = held_until(operations.exit_ns[rows], operations.blocked_ns[rows], last_ns[gate])
    found[found] = (is_held | ~is_later).all(axis=1) & is_later.any(axis=1)
    return found


def _has_several_blocks(blocks: Blocks, steps: StepPanel, ranks: Sequence[int], limits: GraphThresholds) -> bool:
    """Return whether more than a tenth of the steps of all ranks have several blocks, besides pauses and short ones.

    A backward pass of a pipeline during which a message is under way ends in a block of microseconds.
    """
    if not steps.begin_ns.size:
        return False
    num_several = 0
    for index, (begin, end) in enumerate(blocks_of(blocks.select(pauses=False), ranks)):
        least_ns = limits.min_block_share * (steps.end_ns[index] - steps.begin_ns[index]).mean()
        at, _ = _in_steps(begin[end - begin > least_ns], steps, index)
        num_several += int((np.bincount(at, minlength=1) > 1).sum())
    return num_several > limits.max_several_share * steps.begin_ns.size


def _in_steps(time_ns: Ints, steps: StepPanel, index: int) -> tuple[Ints, Ints]:
    """Return the columns of the steps of a rank in which some times are, and these times."""
    at = np.searchsorted(steps.begin_ns[index], time_ns, side="right") - 1
    inside = (at >= 0) & (time_ns < steps.end_ns[index][np.maximum(at, 0)])
    return at[inside], time_ns[inside]


def _block_begins(blocks: Blocks, steps: StepPanel, ranks: Sequence[int], column: Ints) -> Ints | None:
    """Return when the last block of each step begins, (num_ranks, num_steps), -1 without one; None if few have one.

    A rank for which the others wait may find all transfers done, and is not blocked in that step.
    """
    begins = np.full(steps.begin_ns.shape, _NONE, np.int64)
    for index, (begin, _) in enumerate(blocks_of(blocks, ranks)):
        at, inside_ns = _in_steps(np.sort(begin), steps, index)
        begins[index, at] = inside_ns
    begins = begins[:, column]
    return begins if begins.size and 2 * (begins >= 0).sum() > begins.size else None


def _wait_for_all_begins(slots: Slots, done_ns: Ints, block_begin_ns: Ints | None) -> Ints:
    """Return when each rank begins to wait for all under way, (num_ranks, num_steps), (0, num_steps) if none does.

    In a step in which it is not blocked, that is when all its operations are done.

    Args:
        slots: the operations that recur.
        done_ns: when each is done, int64, (num_slots, num_steps).
        block_begin_ns: from `_block_begins`.
    """
    if block_begin_ns is None:
        return np.zeros((0, done_ns.shape[1]), np.int64)
    all_done_ns = np.zeros(block_begin_ns.shape, np.int64)
    np.maximum.at(all_done_ns, slots.rank, done_ns)
    return np.where(block_begin_ns >= 0, block_begin_ns, all_done_ns)


def _wait_begins(operations: Operations, table: Ints, rank: Ints, blocking: Ints) -> Ints:
    """Return when each rank began to wait for each blocking slot, int64, (num_blocking, num_steps).

    That is `blocked` before the exit, but no earlier than the rank's last enter before it left: the launch may have
    blocked, too.
    """
    enter, exit_ = operations.enter_ns[table], operations.exit_ns[table[blocking]]
    begin: Ints = np.maximum(exit_ - operations.blocked_ns[table[blocking]], enter[blocking])
    left_ns = exit_ - np.asarray(left_early_ns(operations))[table[blocking]]
    edges = np.searchsorted(rank, np.arange(int(rank.max()) + 2))
    kernels = library()
    if kernels is not None:
        first, stop = edges[rank[blocking]], edges[rank[blocking] + 1]
        kernels.wait_begins(*begin.shape, first, stop, enter, left_ns, begin)
        return begin
    for index, slot in enumerate(blocking.tolist()):
        own = enter[edges[rank[slot]] : edges[rank[slot] + 1]]
        begin[index] = np.maximum(begin[index], np.where(own < left_ns[index], own, begin[index]).max(axis=0))
    return np.asarray(begin, np.int64)


def _place_unseen_waits(begin_ns: Ints, operations: Operations, slots: Slots, role: Ints, blocking: Ints) -> float:
    """Move the waits that blocked nobody, in place, to where the ranks of the role that were blocked have them.

    A rank that comes to its wait after the operation is complete is not blocked, so its trace does not say when it came
    there. Ranks of a role run the same program: the wait comes as many enters after that of its operation, and after
    the same part of the work up to the next enter. Of a position where nobody was blocked, this is as at the others of
    the same kind of operation. Without this, the wait of a slow rank seems to come when the operation is complete, and
    a rank that got faster would be held up there.

    Args:
        begin_ns: from `_wait_begins`, int64, (num_blocking, num_steps).
        operations: rows of all ranks.
        slots: the operations that recur.
        role: role of each rank, int64, (num_ranks,).
        blocking: slots that are waited for one by one, int64, (num_blocking,).

    Returns:
        How wrong these places are, nanoseconds of a step, on the rank where they are most wrong together: by what one
        half of the waits that are seen says of the other half.
    """
    rows = slots.table[blocking]
    is_seen = (operations.blocked_ns[rows] > _SEEN_NS) | (operations.exit_kind[rows] == ExitKind.WAIT)
    if is_seen.all() or not is_seen.any():
        return 0.0
    enter, ordinal = _in_program_order(operations.enter_ns[slots.table], slots.rank, len(role))
    of_rank, own = slots.rank[blocking], ordinal[blocking]
    kind = role[of_rank] * (int(operations.op.max()) + 1) + operations.op[rows[:, 0]]
    seen: dict[tuple[int, int], list[_SeenWaits]] = {}
    for index in np.flatnonzero(is_seen.any(axis=1)).tolist():
        places = seen.setdefault((int(kind[index]), int(slots.position[blocking[index]])), [])
        if len(places) == _MAX_PLACES:
            continue
        columns = np.flatnonzero(is_seen[index])[:_MAX_PLACES]
        found = _SeenWaits(begin_ns[index, columns], enter[of_rank[index]][:, columns], int(own[index]))
        places.append(found)
        seen.setdefault((int(kind[index]), _NONE), []).append(found)
    usual = {key: _usual_place(places) for key, places in seen.items()}
    errors = {key: _error_of_places(places) for key, places in seen.items()}
    error_ns = np.zeros(len(role))
    for index in np.flatnonzero(~is_seen.all(axis=1)).tolist():
        key = (int(kind[index]), int(slots.position[blocking[index]]))
        key = key if key in usual else (key[0], _NONE)
        if key not in usual:
            continue
        placed = _placed(enter[of_rank[index]], int(own[index]), usual[key])
        placed = np.maximum(placed, operations.exit_ns[rows[index]])
        begin_ns[index] = np.where(is_seen[index], begin_ns[index], placed)
        error_ns[of_rank[index]] += errors[key] * (1 - is_seen[index].mean())
    return float(error_ns.max())


@dataclass(frozen=True)
class _SeenWaits:
    """Waits of one slot that blocked its rank.

    Attributes:
        begin_ns: when they began, int64, (num_seen,).
        times_ns: all enters of the rank, in the order of its program, int64, (num_slots, num_seen).
        own: place of the operation's own enter in it.
    """

    begin_ns: Ints
    times_ns: Ints
    own: int

    @cached_property
    def place(self) -> Floats:
        """How many enters after its operation each comes, and the part of the way to the next, (2, num_seen)."""
        return _place_of(self.begin_ns, self.times_ns, self.own)


def _usual_place(places: Sequence[_SeenWaits]) -> Floats:
    return np.asarray(np.median(np.concatenate([each.place for each in places], axis=1), axis=1), np.float64)


def _placed(times_ns: Ints, own: int, place: Floats) -> Ints:
    """Return when waits at some place come, int64, (num_steps,), by all enters of the rank, (num_slots, num_steps)."""
    before = min(own + round(float(place[0])), len(times_ns) - 1)
    after = times_ns[min(before + 1, len(times_ns) - 1)]
    return np.asarray(times_ns[before] + (place[1] * (after - times_ns[before])).astype(np.int64), np.int64)


def _error_of_places(places: Sequence[_SeenWaits]) -> float:
    """Return how wrong the usual place of one half of some waits is for the other half, nanoseconds; 0 for a single."""
    if len(places) < 2:
        return 0.0
    usual = _usual_place(places[1::2])
    wrong_ns = [np.abs(_placed(each.times_ns, each.own, usual) - each.begin_ns) for each in places[::2]]
    return float(np.median(np.concatenate(wrong_ns)))


def _in_program_order(enter_ns: Ints, rank: Ints, num_ranks: int) -> tuple[list[Ints], Ints]:
    """Return the enters of each rank in the order of its program, (num_slots, num_steps), and each slot's place."""
    ordinal, times = np.zeros(len(enter_ns), np.int64), []
    for index in range(num_ranks):
        own = np.flatnonzero(rank == index)
        order = own[np.median(enter_ns[own] - enter_ns[own].min(axis=0), axis=1).argsort(kind="stable")]
        ordinal[order] = np.arange(len(order))
        times.append(enter_ns[order])
    return times, ordinal


def _place_of(begin_ns: Ints, times_ns: Ints, own: int) -> Floats:
    """Return how many enters after that of its operation waits come, and the part of the way to the next enter.

    Args:
        begin_ns: of the waits, int64, (num_seen,).
        times_ns: all enters of the rank, in the order of its program, int64, (num_slots, num_seen).
        own: place of the operation's own enter in it.

    Returns:
        float64, (2, num_seen).
    """
    columns, last = np.arange(len(begin_ns)), len(times_ns) - 1
    before = np.maximum((times_ns <= begin_ns).sum(axis=0) - 1, 0)
    passed_ns = times_ns[before, columns]
    way_ns = np.maximum(times_ns[np.minimum(before + 1, last), columns] - passed_ns, 1)
    return np.stack([before - own, np.clip((begin_ns - passed_ns) / way_ns, 0.0, 1.0)]).astype(np.float64)


def _starts(steps: StepPanel, column: Ints, released: Ints) -> Ints:
    """Return when each rank starts a step: when its last wait of the previous step ended, else when the step begins."""
    start = steps.begin_ns[:, column].copy()
    follows = np.flatnonzero((np.diff(column) == 1) & (np.diff(steps.step[column]) == 1)) + 1
    start[:, follows] = released[:, follows - 1]
    return start


def _between_ns(steps: StepPanel, column: Ints) -> float:
    """Return the mean time between steps that follow each other, nanoseconds."""
    follows = column[:-1][(np.diff(column) == 1) & (np.diff(steps.step[column]) == 1)]
    return float((steps.begin_ns[:, follows + 1] - steps.end_ns[:, follows]).mean()) if len(follows) else 0.0


def _queue(operations: Operations, table: Ints, rank: Ints, time: Floats) -> Ints:
    """Return pairs of slots of one rank and queue that follow each other, int64, (2, num_pairs).

    The operations of a group share a queue, but collectives of kinds that overtake each other, as those that FSDP
    issues from streams of its own, have one for each kind.

    A message that ends before the one in front of it, in some step, does not wait for it: they are in different queues.
    So are all of their kind where that is not rare: behind a message over a slow link it may never be seen. Those to
    different peers, if these are apart, have a queue for each peer.
    """
    first_rows = table[:, 0]
    op, group = operations.op[first_rows].astype(np.int64), operations.group[first_rows]
    is_message, exit_ns = is_one_of(op.astype(np.uint8), MESSAGES), operations.exit_ns[table]
    peer = np.where(is_message, operations.peer[first_rows], _NONE)
    nothing = np.full(len(op), _NONE)
    first, second = following(time, is_message, group, rank)
    differs = ~is_message[second] & (op[first] != op[second])
    overtakes = (exit_ns[second] < exit_ns[first])[differs].mean(axis=1)
    names, member = numbered(group)
    share, number = (np.bincount(member[second][differs], of, len(names)) for of in (overtakes, None))
    kind = np.where(~is_message & (share > OVERTAKING_SHARE * number)[member], op, _NONE)
    for queue in (nothing, peer):
        first, second = following(time, kind, queue, group, rank)
        overtakes = is_message[second, None] & (exit_ns[second] < exit_ns[first])
        others = peer[first] != peer[second]
        if not others.any() or overtakes[others].mean() < OVERTAKING_SHARE:
            break
    pair = numbered(op[first] * (int(op.max(initial=0)) + 1) + op[second])[1]
    share, number = (np.bincount(pair, weights=of) for of in (overtakes.mean(axis=1), None))
    is_apart = overtakes.any(axis=1) | (is_message[second] & (share >= OVERTAKING_SHARE * number)[pair])
    return np.stack([first[~is_apart], second[~is_apart]])


def _levels(source: Ints, target: Ints, num_nodes: int) -> Ints | None:
    """Return the length in edges of the longest path to each node; None if edges form a circle."""
    level = np.zeros(num_nodes, np.int64)
    waiting = np.bincount(target, minlength=num_nodes)
    order = np.argsort(source, kind="stable")
    first = np.searchsorted(source[order], np.arange(num_nodes + 1))
    ready, depth, seen = np.flatnonzero(waiting == 0), 0, 0
    while len(ready):
        level[ready], seen, depth = depth, seen + len(ready), depth + 1
        count = first[ready + 1] - first[ready]
        offset = np.repeat(first[ready] - (np.cumsum(count) - count), count)
        reached = target[order[offset + np.arange(int(count.sum()))]]
        np.subtract.at(waiting, reached, 1)
        ready = np.unique(reached[waiting[reached] == 0])
    return level if seen == num_nodes else None
