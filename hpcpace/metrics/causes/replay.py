"""Steps rebuilt from their operations: local work, transfers and who waits for whom, as longest paths through a graph.

What a change of some local work or transfer would do to the step is read off the same graph. Steps are rebuilt each by
itself and all at once; every rank starts a step when its last wait of the step before ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.lateness.segments import LocalWork
from hpcpace.metrics.operations.blocked_time import NO_BLOCKS, Blocks, blocks_of
from hpcpace.metrics.operations.matching import Matching, Operations
from hpcpace.metrics.operations.messages_in_flight import messages_in_flight
from hpcpace.metrics.operations.recurring import Slots, recurring_slots
from hpcpace.metrics.operations.waits import Waits
from hpcpace.metrics.steps import StepPanel
from hpcpace.trace.schema import Op

FloatArray = NDArray[np.float64]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_FROM_ROOT, _TO_ROOT = (Op.BROADCAST, Op.SCATTER), (Op.REDUCE, Op.GATHER)
START, WORK, GATE, TRANSFER, WAIT = range(5)


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """The graph of a step, of the same shape in all steps: value(node) = max of its predecessors' values + weight.

    Attributes:
        step: step numbers, int64, (num_steps,).
        kind: START of a rank, WORK of a rank up to an event, GATE (last enter that others depend on), TRANSFER of a
            rank's operation or of a message on its way to it, or WAIT (end of a wait), int64, (num_nodes,).
        rank: index of the rank, -1 for a gate, int64, (num_nodes,).
        position: position of the operation as in `LocalWork`, -1 where there is none, int64, (num_nodes,).
        weight_ns: float64, (num_nodes, num_steps); of a start its time.
        source, target: edges, ordered by the target's level and the target, int64, (num_edges,).
        bounds: where each level begins in the edges, int64, (num_levels + 1,).
        end: last node of each rank, int64, (num_ranks,).
        role: role of each rank, int64, (num_ranks,).
        measured_ns: time from the last rank's start to the last rank's end, float64, (num_steps,).
        num_left_out: steps of the panel whose operations are not those of most steps.
    """

    step: Int64Array
    kind: Int64Array
    rank: Int64Array
    position: Int64Array
    weight_ns: FloatArray
    source: Int64Array
    target: Int64Array
    bounds: Int64Array
    end: Int64Array
    role: Int64Array
    measured_ns: FloatArray
    num_left_out: int


def step_graph(
    operations: Operations,
    matching: Matching,
    waits: Waits,
    work: LocalWork,
    steps: StepPanel,
    *,
    ranks: Sequence[int],
    role: Int64Array,
    blocks: Blocks = NO_BLOCKS,
) -> StepGraph | None:
    """Return the graph of the steps whose operations are those of most steps; None where there is none.

    Args:
        operations: rows of all ranks.
        matching: which of them belong together.
        waits: their waits and transfers.
        work: from `local_work` with the same arguments.
        steps: the steps that all ranks have, on the clock of the operations.
        ranks: what the rows of `steps` are, ascending, (num_ranks,).
        role: role of each of `ranks`, int64, (num_ranks,).
        blocks: further stretches in which ranks were blocked; the last one of a step waits for all that is under way.
    """
    slots = recurring_slots(operations, matching, work, steps, ranks)
    if slots is None:
        return None
    begin_ns = _block_begins(blocks, steps, ranks, slots.column)
    shaped = _nodes(operations, waits, work, slots, begin_ns, steps)
    if shaped is None:
        return None
    kind, rank, position, weight, source, target, end, measured = shaped
    levels = _levels(source, target, len(kind))
    if levels is None:
        return None
    order = np.lexsort((target, levels[target]))
    bounds = np.searchsorted(levels[target][order], np.arange(1, int(levels.max()) + 2))
    return StepGraph(
        step=steps.step[slots.column],
        kind=kind,
        rank=rank,
        position=position,
        weight_ns=weight,
        source=source[order],
        target=target[order],
        bounds=bounds,
        end=end,
        role=np.asarray(role, np.int64),
        measured_ns=measured,
        num_left_out=len(steps) - len(slots.column),
    )


def replay(graph: StepGraph, weight_ns: FloatArray | None = None) -> FloatArray:
    """Return the value of each node, float64, (num_nodes, num_steps), with other weights where given."""
    weight = graph.weight_ns if weight_ns is None else weight_ns
    value = weight.copy()
    for first, stop in zip(graph.bounds[:-1].tolist(), graph.bounds[1:].tolist(), strict=True):
        target = graph.target[first:stop]
        starts = np.flatnonzero(np.diff(target, prepend=-1))
        value[target[starts]] += np.maximum.reduceat(value[graph.source[first:stop]], starts, axis=0)
    return value


def rebuilt_ns(graph: StepGraph, value_ns: FloatArray) -> FloatArray:
    """Return the step times of a replay: from the last rank's start to the last rank's end, float64, (num_steps,)."""
    starts = graph.weight_ns[graph.kind == START]
    return np.asarray(value_ns[graph.end].max(axis=0) - starts.max(axis=0), np.float64)


def _block_begins(blocks: Blocks, steps: StepPanel, ranks: Sequence[int], column: Int64Array) -> Int64Array | None:
    """Return when the last block of each step begins, (num_ranks, num_steps), -1 without one; None where few have one.

    A rank for which the others wait may find all transfers done, and is not blocked in that step.
    """
    begins = np.full(steps.begin_ns.shape, -1, np.int64)
    for index, (begin, _) in enumerate(blocks_of(blocks, ranks)):
        begin = np.sort(begin)
        at = np.searchsorted(steps.begin_ns[index], begin, side="right") - 1
        inside = (at >= 0) & (begin < steps.end_ns[index][np.maximum(at, 0)])
        begins[index, at[inside]] = begin[inside]
    begins = begins[:, column]
    return begins if begins.size and 2 * (begins >= 0).sum() > begins.size else None


def _nodes(
    operations: Operations,
    waits: Waits,
    work: LocalWork,
    slots: Slots,
    block_begin: Int64Array | None,
    steps: StepPanel,
) -> tuple[Int64Array, Int64Array, Int64Array, FloatArray, Int64Array, Int64Array, Int64Array, FloatArray] | None:
    """Return kind, rank, position and weight of the nodes, source and target of the edges, ends, measured times."""
    table, num_ranks = slots.table, int(slots.rank.max()) + 1
    num_slots, num_steps = table.shape
    if not num_steps:
        return None
    enter, exit_ = operations.enter_ns[table], operations.exit_ns[table]
    blocking = np.flatnonzero(work.is_blocking[table[:, 0]])
    begin = _wait_begins(operations, table, slots.rank, blocking)
    num_blocks = num_ranks if block_begin is not None else 0
    if block_begin is not None:
        all_done = np.zeros(block_begin.shape, np.int64)
        np.maximum.at(all_done, slots.rank, np.maximum(enter, exit_))
        block_begin = np.where(block_begin >= 0, block_begin, all_done)
    # Events of a rank in order of time: enters, waits for one operation, and the wait for all that is under way.
    event_time = np.concatenate([enter, begin, *([] if block_begin is None else [block_begin])])
    event_rank = np.concatenate([slots.rank, slots.rank[blocking], np.arange(num_blocks)])
    event_slot = np.concatenate([np.arange(num_slots), blocking, np.full(num_blocks, -1)])
    is_wait = np.arange(len(event_time)) >= num_slots
    origin = enter.min(axis=0)
    usual = np.median(event_time - origin, axis=1)
    under_way = np.zeros(num_slots, np.bool_)
    own_exit = np.full((num_ranks, num_steps), -1, np.int64)
    if block_begin is not None:
        under_way = usual[:num_slots] <= usual[len(usual) - num_blocks :][slots.rank]
        np.maximum.at(own_exit, slots.rank[under_way], exit_[under_way])
    released = np.concatenate([enter, exit_[blocking], own_exit[:num_blocks]])
    released = np.maximum(released, event_time)
    order = np.lexsort((is_wait, usual, event_rank))
    previous = np.full(len(order), -1)
    same = event_rank[order][1:] == event_rank[order][:-1]
    previous[order[1:][same]] = order[:-1][same]

    last = order[np.append(np.flatnonzero(~same), len(order) - 1)]
    start = _starts(steps, slots.column, released[last])
    before = np.where((previous >= 0)[:, None], released[previous], start[event_rank])
    local = np.maximum(event_time - before, 0)
    # Numbers of the nodes: starts, work up to each event, gates, transfers, ends of waits.
    gates, gate_of = np.unique(slots.partner, return_inverse=True)
    first_work = num_ranks
    first_gate = first_work + len(order)
    first_transfer = first_gate + len(gates)
    first_wait = first_transfer + num_slots
    waiting = np.flatnonzero(is_wait)
    node_of_event = first_work + np.arange(len(order))
    node_of_event[waiting] = first_wait + np.arange(len(waiting))
    from_event = np.where(previous >= 0, node_of_event[previous], event_rank)

    op, is_root = operations.op[table[:, 0]], _are_root(operations, table[:, 0])
    from_root, to_root = np.isin(op, _FROM_ROOT), np.isin(op, _TO_ROOT)
    releases = np.where(from_root, is_root, np.where(to_root, ~is_root, op != Op.RECV))
    depends = np.where(from_root, ~is_root, np.where(to_root, is_root, op != Op.SEND))
    slot = np.arange(num_slots)
    queue_source, queue_target = _queues(operations.group[table[:, 0]], slots.rank, usual[:num_slots])
    edges = [
        (from_event, first_work + np.arange(len(order))),
        (first_work + slot[releases], first_gate + gate_of[releases]),
        (first_work + slot, first_transfer + slot),
        (first_gate + gate_of[depends], first_transfer + slot[depends]),
        (first_transfer + queue_source, first_transfer + queue_target),
        (first_work + waiting, node_of_event[waiting]),
        (first_transfer + blocking, node_of_event[num_slots : num_slots + len(blocking)]),
        (first_transfer + slot[under_way], node_of_event[len(order) - num_blocks + slots.rank[under_way]]),
    ]
    source, target = (np.concatenate([edge[side] for edge in edges]) for side in (0, 1))
    transfer = np.where((op == Op.SEND)[:, None], (waits.wait_ns + waits.transfer_ns)[table], waits.transfer_ns[table])
    on_the_way, way_ns = messages_in_flight(operations, table, gate_of)
    before_ns = np.zeros((num_slots, num_steps), np.int64)
    before_ns[queue_target] = exit_[queue_source]
    sent_ns = np.zeros((len(gates), num_steps), np.int64)
    sent_ns[gate_of[op == Op.SEND]] = enter[op == Op.SEND]
    arrived_ns = np.maximum(np.maximum(enter, before_ns)[on_the_way], sent_ns[gate_of[on_the_way]] + way_ns)
    transfer[on_the_way] = np.maximum(exit_[on_the_way] - arrived_ns, 0)
    gate_ns = np.zeros((len(gates), num_steps))
    gate_ns[gate_of[on_the_way]] = way_ns
    start_time = (start - start.min(axis=0)).astype(np.float64)
    unwaited = np.zeros((len(waiting), num_steps))
    weight = np.concatenate([start_time, local, gate_ns, transfer, unwaited]).astype(np.float64)
    counts = (num_ranks, len(order), len(gates), num_slots, len(waiting))
    kind = np.repeat(np.array([START, WORK, GATE, TRANSFER, WAIT]), counts)
    none = np.full(num_ranks, -1)
    of_event = np.where(event_slot >= 0, slots.position[event_slot], -1)
    gate_rank, gate_position = np.full((2, len(gates)), -1)
    gate_rank[gate_of[on_the_way]], gate_position[gate_of[on_the_way]] = (
        slots.rank[on_the_way],
        slots.position[on_the_way],
    )
    kind[first_gate + gate_of[on_the_way]] = TRANSFER
    position = np.concatenate([none, of_event, gate_position, slots.position, of_event[waiting]])
    rank = np.concatenate([np.arange(num_ranks), event_rank, gate_rank, slots.rank, event_rank[waiting]])
    measured = (released[last].max(axis=0) - start.max(axis=0)).astype(np.float64)
    return kind, rank, position, weight, source, target, node_of_event[last], measured


def _wait_begins(operations: Operations, table: Int64Array, rank: Int64Array, blocking: Int64Array) -> Int64Array:
    """Return when each rank began to wait for each blocking slot, (num_blocking, num_steps).

    That is `blocked` before the exit, and no earlier than the rank's last enter before the exit: part of what blocked
    may have been the launch.
    """
    enter, exit_ = operations.enter_ns[table], operations.exit_ns[table[blocking]]
    begin = np.maximum(exit_ - operations.blocked_ns[table[blocking]], enter[blocking])
    edges = np.searchsorted(rank, np.arange(int(rank.max()) + 2))
    for index, slot in enumerate(blocking.tolist()):
        own = enter[edges[rank[slot]] : edges[rank[slot] + 1]]
        last = np.where(own < exit_[index], own, 0).max(axis=0)
        begin[index] = np.maximum(begin[index], np.minimum(last, exit_[index]))
    return np.asarray(begin, np.int64)


def _are_root(operations: Operations, rows: Int64Array) -> BoolArray:
    """Return which rows are those of their operation's root, bool, (num_rows,)."""
    return np.asarray(operations.rank[rows] == operations.peer[rows], np.bool_)


def _starts(steps: StepPanel, column: Int64Array, released: Int64Array) -> Int64Array:
    """Return when each rank starts a step: at the end of its last wait of the step before, or else at its begin."""
    start = steps.begin_ns[:, column].copy()
    follows = np.flatnonzero((np.diff(column) == 1) & (np.diff(steps.step[column]) == 1)) + 1
    start[:, follows] = released[:, follows - 1]
    return start


def _queues(group: Int64Array, rank: Int64Array, time: FloatArray) -> tuple[Int64Array, Int64Array]:
    """Return which slot follows which on the queue of a rank's group."""
    order = np.lexsort((time, group, rank))
    same = (group[order][1:] == group[order][:-1]) & (rank[order][1:] == rank[order][:-1])
    return order[:-1][same], order[1:][same]


def _levels(source: Int64Array, target: Int64Array, num_nodes: int) -> Int64Array | None:
    """Return the length in edges of the longest path to each node; None where edges form a circle."""
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
