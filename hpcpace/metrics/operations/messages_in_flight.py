"""Find messages that travel while their receiver works, unlike those that wait for the receiver (rendezvous)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.operations.matching import Operations
from hpcpace.trace.schema import Op

Int64Array = NDArray[np.int64]


def messages_in_flight(operations: Operations, table: Int64Array, gate_of: Int64Array) -> tuple[Int64Array, Int64Array]:
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
    op, size_bytes = operations.op[table[:, 0]], operations.size_bytes[table[:, 0]]
    sender = np.full(int(gate_of.max(initial=-1)) + 1, -1)
    sender[gate_of[op == Op.SEND]] = np.flatnonzero(op == Op.SEND)
    slots = np.flatnonzero((op == Op.RECV) & (sender[gate_of] >= 0))
    enter, exit_ = operations.enter_ns[table[slots]], operations.exit_ns[table[slots]]
    way_ns = np.maximum(exit_ - operations.enter_ns[table[sender[gate_of[slots]]]], 0)
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
