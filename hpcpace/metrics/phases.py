"""Where one rank's step went: every nanosecond of a step goes to exactly one part, so that parts add up to the step.

Phases nest and overlap (garbage collection inside backward, gradient synchronisation inside backward): the innermost
one, which is the one that began last, gets the time. Blocked communication is taken out of the phase around it.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.schema import Phase

Times = NDArray[np.int64]


class Part(IntEnum):
    """What a nanosecond of a step was spent on, in the order in which tables show it.

    SYNC_* is the time inside the phase grad_sync; WAIT and TRANSFER are blocked communication everywhere else. Wait is
    time before the last partner arrived. OTHER is what no phase covers, and the phase of that name.
    """

    DATA = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    GC = 4
    PACE = 5
    CHECKPOINT = 6
    EVAL = 7
    SYNC_WAIT = 8
    SYNC_TRANSFER = 9
    WAIT = 10
    TRANSFER = 11
    OTHER = 12


BUSY = (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER)
EXPOSED_WAIT = (Part.SYNC_WAIT, Part.WAIT)
EXPOSED_TRANSFER = (Part.SYNC_TRANSFER, Part.TRANSFER)

_NO_PHASE = len(Phase)
_FREE, _WAITS, _TRANSFERS = range(3)


def _parts() -> NDArray[np.int64]:
    """Return the part for each (phase or none, state of communication)."""
    table = np.full((_NO_PHASE + 1, 3), Part.OTHER, np.int64)
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.GC):
        table[phase, _FREE] = Part[phase.name]
    table[:, _WAITS] = Part.WAIT
    table[:, _TRANSFERS] = Part.TRANSFER
    # Checkpoint, evaluation and pacing are rows of the loss of their own, with their communication.
    for phase in (Phase.PACE, Phase.CHECKPOINT, Phase.EVAL):
        table[phase] = Part[phase.name]
    table[Phase.GRAD_SYNC] = (Part.SYNC_TRANSFER, Part.SYNC_WAIT, Part.SYNC_TRANSFER)
    return table


def innermost(begin_ns: Times, end_ns: Times, edges_ns: Times) -> NDArray[np.int64]:
    """Return for each segment between two edges the interval that began last of those that cover it, or -1.

    Each interval is the union of two blocks of 2^k segments; maxima over blocks are handed down from long to short
    blocks, so the work is O(edges * log(longest)) with no loop over intervals.

    Args:
        begin_ns: begins, (num_intervals,).
        end_ns: ends, (num_intervals,).
        edges_ns: ascending and unique, (num_segments + 1,), with every begin and end among them.

    Returns:
        Indices of intervals, (num_segments,).
    """
    cover = np.full(max(len(edges_ns) - 1, 0), -1, np.int64)
    order = np.lexsort((-end_ns, begin_ns))
    order = order[end_ns[order] > begin_ns[order]]
    if not len(order):
        return cover
    first = np.searchsorted(edges_ns, begin_ns[order])
    stop = np.searchsorted(edges_ns, end_ns[order])
    level = np.frexp((stop - first).astype(np.float64))[1] - 1
    position = np.arange(len(order))
    for k in range(int(level.max()), -1, -1):
        at = level == k
        np.maximum.at(cover, first[at], position[at])
        np.maximum.at(cover, stop[at] - (1 << k), position[at])
        if k:
            half = 1 << (k - 1)
            cover[half:] = np.maximum(cover[half:], cover[:-half])
    return np.where(cover >= 0, order[cover], -1)


def covered(begin_ns: Times, end_ns: Times, edges_ns: Times) -> NDArray[np.bool_]:
    """Return for each segment between two edges whether any interval covers it; arguments as for `innermost`."""
    valid = end_ns > begin_ns
    opened = np.bincount(np.searchsorted(edges_ns, begin_ns[valid]), minlength=len(edges_ns))
    closed = np.bincount(np.searchsorted(edges_ns, end_ns[valid]), minlength=len(edges_ns))
    depth: NDArray[np.int64] = np.cumsum(opened - closed)[:-1]
    return depth > 0


def parts_of_steps(
    steps: tuple[Times, Times],
    phases: tuple[NDArray[np.uint8], Times, Times],
    operations: tuple[Times, Times, Times, Times],
) -> NDArray[np.float64]:
    """Return the nanoseconds of each part of each step of one rank, float64, (num_steps, num_parts).

    All times are of the rank's own clock, so that no error of the clock synchronisation moves time between phases.
    An operation blocks its caller during the last `blocked` nanoseconds before its exit; of these, what lies before
    enter + wait is wait. In grad_sync, where the caller waits inside torch, time counts as wait while any
    operation waits for its partners.

    Args:
        steps: begin and end of the steps, which do not overlap, each (num_steps,).
        phases: phase, begin and end of the rank's phase records, each (num_phases,).
        operations: enter, exit, blocked and wait of its communication operations, each (num_operations,).
    """
    step_begin, step_end = steps
    phase, phase_begin, phase_end = phases
    enter, exit_, blocked, wait = operations
    block_begin = np.maximum(enter, exit_ - blocked)
    wait_end = np.clip(enter + wait, block_begin, np.maximum(exit_, block_begin))
    comm_begin, comm_end = np.concatenate([block_begin, wait_end]), np.concatenate([wait_end, exit_])
    all_wait_end = np.maximum(enter + wait, enter)
    edges = _edges(step_begin, step_end, phase_begin, phase_end, comm_begin, comm_end, enter, all_wait_end)
    length = np.diff(edges).astype(np.float64)

    num_steps = len(step_begin)
    order = np.argsort(step_begin, kind="stable")
    slot = np.searchsorted(step_begin[order], edges[:-1], side="right") - 1
    step = order[np.maximum(slot, 0)] if num_steps else np.zeros(len(length), np.int64)
    inside = (slot >= 0) & (edges[:-1] < step_end[step]) if num_steps else np.zeros(len(length), np.bool_)

    of_phase = innermost(phase_begin, phase_end, edges)
    known = np.append(np.where(phase < _NO_PHASE, phase, _NO_PHASE).astype(np.int64), _NO_PHASE)
    segment_phase = known[of_phase]
    of_comm = innermost(comm_begin, comm_end, edges)
    state = np.where(of_comm < 0, _FREE, np.where(of_comm < len(enter), _WAITS, _TRANSFERS))
    in_torch = (state == _FREE) & (segment_phase == Phase.GRAD_SYNC)
    state[in_torch & covered(enter, all_wait_end, edges)] = _WAITS

    cell = step * len(Part) + _parts()[segment_phase, state]
    total = np.zeros(num_steps * len(Part))
    total += np.bincount(cell[inside], weights=length[inside], minlength=len(total))
    return total.reshape(num_steps, len(Part))


def _edges(*times_ns: Times) -> Times:
    # Times are nearly in order already, where sorting is several times faster than the hashing of np.unique.
    edges = np.sort(np.concatenate(times_ns), kind="stable")
    return edges[np.append(True, np.diff(edges) > 0)] if len(edges) else edges
