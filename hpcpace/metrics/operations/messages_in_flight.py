"""Messages that travel while their receiver works, told apart from those that are handed over in person."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.operations.matching import Operations
from hpcpace.trace.schema import Op

Int64Array = NDArray[np.int64]


def messages_in_flight(operations: Operations, table: Int64Array, gate_of: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the slots that receive messages which travel while their receiver works, and how long those travel.

    How long is seen where the receiver waits from before the sending on; elsewhere it is what is usual for the size,
    and no more than until the receiver has it. Messages of a size that late receivers have to wait for as long are
    handed over in person, as by gloo where they are large: they do not travel by themselves.

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
    is_told = enter <= exit_ - way_ns
    travels = np.zeros(len(slots), np.bool_)
    for size in np.unique(size_bytes[slots]):
        rows = np.flatnonzero(size_bytes[slots] == size)
        told, since_ns = is_told[rows], (exit_ - enter)[rows]
        if not told.any():
            continue
        usual_ns = int(np.median(way_ns[rows][told]))
        is_late = way_ns[rows] - since_ns >= usual_ns
        travels[rows] = not is_late.any() or 2 * np.median(since_ns[is_late]) < usual_ns
        way_ns[rows] = np.where(told, way_ns[rows], np.minimum(way_ns[rows], usual_ns))
    return slots[travels], way_ns[travels]
