"""The parts of a step: phases, waits and transfers of one rank.

Phases nest and overlap (garbage collection or gradient synchronisation inside backward). The innermost phase, the one
that began last, gets the time, but everything done during an evaluation or a checkpoint counts as part of it. Blocked
communication is taken out of the phase around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Bytes, Floats, Ints
from hpcpace.metrics.kernels import checked, library
from hpcpace.trace.schema import Phase


class Part(IntEnum):
    """What a nanosecond of a step was spent on, in the order in which tables show it.

    SYNC_* is time in the phase grad_sync; WAIT and TRANSFER are blocked communication everywhere else. Waiting ends
    when the last partner arrives. OTHER is time that no phase covers, and the phase of that name. HOST is time in which
    a device waited for its host to issue work.
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
    HOST = 13


BUSY = (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER)
OWN_WORK = (Part.DATA, Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER, Part.GC, Part.OTHER, Part.HOST)
"""What a rank does by itself, whatever others do; a device that waits for its host is as late as one that works."""
EXPOSED_WAIT = (Part.SYNC_WAIT, Part.WAIT)
EXPOSED_TRANSFER = (Part.SYNC_TRANSFER, Part.TRANSFER)

_NO_PHASE = 255  # format: a code that no writer has; what a later version writes is no phase
_STATES = _FREE, _WAITS, _TRANSFERS = (0, 1, 2)
_OVERLAPS = 2  # what the kernel says of calls that it does not take apart


def _parts() -> Ints:
    """Return the part for each (phase or none, state of communication)."""
    table = np.full((_NO_PHASE + 1, len(_STATES)), Part.OTHER, np.int64)
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.GC):
        table[phase, _FREE] = Part[phase.name]
    table[Phase.IDLE, _FREE] = Part.HOST
    table[:, _WAITS] = Part.WAIT
    table[:, _TRANSFERS] = Part.TRANSFER
    # Checkpoint, evaluation and pacing have their own rows in the loss table, which include their communication.
    for phase in (Phase.PACE, Phase.CHECKPOINT, Phase.EVAL):
        table[phase] = Part[phase.name]
    table[Phase.GRAD_SYNC] = (Part.SYNC_TRANSFER, Part.SYNC_WAIT, Part.SYNC_TRANSFER)
    return table


_PARTS = _parts()


def share_of(parts_ns: Floats, of: Sequence[Part]) -> float:
    """Return the share of all time that some parts take, mean over ranks and steps; `parts_ns` is (..., num_parts)."""
    return float(parts_ns[..., list(of)].sum()) / max(float(parts_ns.sum()), 1.0)


def without_waits(parts_ns: Floats) -> Floats:
    """Return parts with the waits that are known, of some operations only, in the transfers, and NaN in their place.

    Args:
        parts_ns: nanoseconds, or shares, of each part, (..., num_parts).
    """
    moved = parts_ns.copy()
    moved[..., list(EXPOSED_TRANSFER)] += parts_ns[..., list(EXPOSED_WAIT)]
    moved[..., list(EXPOSED_WAIT)] = np.nan
    return moved


def innermost(begin_ns: Ints, end_ns: Ints, edges_ns: Ints) -> Ints:
    """Return for each segment between two edges the latest-begun interval that covers it, or -1.

    Each interval is the union of two blocks of 2^k segments. Maxima over blocks are handed down from long to short
    blocks, so the work is O(edges * log(longest)) without a loop over intervals.

    Args:
        begin_ns: begins, (num_intervals,).
        end_ns: ends, (num_intervals,).
        edges_ns: ascending and unique, (num_segments + 1,), with every begin and end among them.

    Returns:
        Indices of intervals, (num_segments,).
    """
    cover = np.full(max(len(edges_ns) - 1, 0), -1, np.int64)
    order = np.argsort(begin_ns, kind="stable")
    if (np.diff(begin_ns[order]) == 0).any():
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


def parts_of_steps(
    steps: tuple[Ints, Ints], phases: tuple[Bytes, Ints, Ints], operations: tuple[Ints, Ints, Ints, Ints]
) -> Floats:
    """Return the nanoseconds of each part of each step of one rank, float64, (num_steps, num_parts).

    All times are on the rank's own clock, so that clock synchronisation errors move no time between phases. An
    operation blocks its caller during the last `blocked` nanoseconds before its exit; the part before enter + wait is
    wait. In grad_sync, where the caller waits inside torch, time counts as wait while any operation waits for its
    partners.

    Args:
        steps: begin and end of the steps, which do not overlap, each (num_steps,).
        phases: phase, begin and end of the rank's phase records, each (num_phases,).
        operations: enter, exit, blocked and wait of its communication operations, each (num_operations,).
    """
    step_begin, step_end = steps
    phase, phase_begin, phase_end = phases
    num_steps = len(step_begin)
    if not num_steps:
        return np.zeros((0, len(Part)))
    # Records without a length cover nothing.
    whole = _inside_a_whole(phase, phase_begin, phase_end)
    covers_until = np.where(whole, phase_begin, phase_end)
    total = _compiled_parts(steps, (phase, phase_begin, covers_until), operations)
    if total is not None:
        return total
    edges = _edges(step_begin, step_end, phase_begin, phase_end)
    step = _steps_of_segments(step_begin, step_end, edges)
    known = np.append(np.where(phase < _NO_PHASE, phase, _NO_PHASE).astype(np.int64), _NO_PHASE)
    segment_phase = known[innermost(phase_begin, covers_until, edges)]

    state_ns = _states(operations, edges, segment_phase == Phase.GRAD_SYNC)
    part = _PARTS[segment_phase]
    total = np.zeros((num_steps + 1) * len(Part))
    for state in _STATES:
        total += np.bincount(step * len(Part) + part[:, state], weights=state_ns[state], minlength=len(total))
    return total.reshape(num_steps + 1, len(Part))[:num_steps]


def _compiled_parts(
    steps: tuple[Ints, Ints], phases: tuple[Bytes, Ints, Ints], operations: tuple[Ints, Ints, Ints, Ints]
) -> Floats | None:
    """Return what `parts_of_steps` does, by a kernel; None without one, and where calls overlap."""
    kernels = library()
    if kernels is None:
        return None
    begin, end = steps
    total = np.zeros((len(begin), len(Part)))
    status = kernels.parts_of_steps(
        *(len(begin), begin, end, np.argsort(begin, kind="stable"), len(phases[0]), *phases),
        *(len(operations[0]), *operations),
        *(_NO_PHASE, int(Phase.GRAD_SYNC), len(Part), _PARTS, total),
    )
    if status == _OVERLAPS:
        return None
    checked(status)
    return total


def _steps_of_segments(step_begin: Ints, step_end: Ints, edges: Ints) -> Ints:
    """Return the step of each segment between two edges, num_steps outside all steps, int64, (num_segments,)."""
    order = np.argsort(step_begin, kind="stable")
    slot = np.cumsum(np.bincount(np.searchsorted(edges, step_begin), minlength=len(edges)))[:-1] - 1
    step = order[np.maximum(slot, 0)]
    step[(slot < 0) | (edges[:-1] >= step_end[step])] = len(step_begin)
    return step


def _inside_a_whole(phase: Bytes, begin_ns: Ints, end_ns: Ints) -> Bools:
    """Return which phase records are inside an evaluation or a checkpoint, bool, (num_phases,)."""
    is_whole = np.isin(phase, (Phase.EVAL, Phase.CHECKPOINT))
    if not is_whole.any():
        return is_whole
    order = np.flatnonzero(is_whole)[np.argsort(begin_ns[is_whole], kind="stable")]
    last = np.searchsorted(begin_ns[order], begin_ns, side="right") - 1
    return np.asarray(~is_whole & (last >= 0) & (end_ns <= end_ns[order[np.maximum(last, 0)]]))


def _states(operations: tuple[Ints, Ints, Ints, Ints], edges_ns: Ints, in_torch: Bools) -> tuple[Ints, Ints, Ints]:
    """Return how long each segment between two edges was free, waiting and transferring, each (num_segments,).

    Args:
        operations: as of `parts_of_steps`.
        edges_ns: ascending and unique, (num_segments + 1,).
        in_torch: the segments in which every wait counts, even if it does not block the caller, (num_segments,).
    """
    enter, exit_, blocked, wait = operations
    rows = np.flatnonzero((blocked > 0) & (exit_ > enter))
    end = exit_[rows]
    begin = np.maximum(enter[rows], end - blocked[rows])
    middle = np.minimum(np.maximum(enter[rows] + wait[rows], begin), end)
    if (begin[1:] < end[:-1]).any():
        begin, middle, end = _disjoint(begin, middle, end)
    wait_ns, transfer_ns = (np.diff(until_ns) for until_ns in _measures_until(begin, middle, end, edges_ns))
    if in_torch.any():
        low, high = edges_ns[:-1][in_torch], edges_ns[1:][in_torch]
        near = _may_touch(enter, np.maximum(enter + wait, exit_), low, high)
        enter, exit_, blocked, wait = (times[near] for times in operations)
        # Time in which something waits and nothing blocks: the union of both, less the blocks.
        block_begin = np.maximum(enter, exit_ - blocked)
        both = CoveredTime.of(np.concatenate([enter, block_begin]), np.concatenate([enter + wait, exit_]))
        wait_ns[in_torch] = both.inside_ns(low, high) - transfer_ns[in_torch]
    return np.diff(edges_ns) - wait_ns - transfer_ns, wait_ns, transfer_ns


def _disjoint(begin_ns: Ints, wait_end_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints, Ints]:
    """Return blocked calls without overlaps, ascending: begin, end of the wait and begin of the transfer, end.

    Where calls of several threads overlap, the wait or transfer that began last counts, as with phases.

    Args:
        begin_ns: begins of the calls, (num_calls,).
        wait_end_ns: ends of their waits and begins of their transfers.
        end_ns: ends of the calls.
    """
    # Where a wait and a transfer coincide, the transfer counts, because it comes later in the list.
    begin, end = np.concatenate([begin_ns, wait_end_ns]), np.concatenate([wait_end_ns, end_ns])
    edges = _edges(begin, end)
    of_piece = innermost(begin, end, edges)
    taken = of_piece >= 0
    low, high = edges[:-1][taken], edges[1:][taken]
    return low, np.where(of_piece[taken] < len(begin_ns), high, low), high


def _may_touch(begin_ns: Ints, end_ns: Ints, low_ns: Ints, high_ns: Ints) -> Ints:
    """Return the numbers of all intervals that touch a stretch, and of some others between them.

    Args:
        begin_ns: begins, nearly in order, (num_intervals,).
        end_ns: ends.
        low_ns: begins of the stretches, (num_stretches,).
        high_ns: their ends.
    """
    if (end_ns[1:] < end_ns[:-1]).any():
        end_ns = np.maximum.accumulate(end_ns)
    first = np.searchsorted(end_ns, low_ns, side="right")
    stop = np.searchsorted(np.minimum.accumulate(begin_ns[::-1])[::-1], high_ns, side="left")
    some = stop > first
    opened = np.bincount(first[some], minlength=len(begin_ns) + 1)
    closed = np.bincount(stop[some], minlength=len(begin_ns) + 1)
    return np.flatnonzero(np.cumsum(opened - closed)[:-1] > 0)


@dataclass(frozen=True, kw_only=True)
class CoveredTime:
    """The time that some intervals of one clock cover, ascending and disjoint; each int64, (num_stretches,)."""

    begin_ns: Ints
    end_ns: Ints

    @classmethod
    def of(cls, begin_ns: Ints, end_ns: Ints) -> CoveredTime:
        """Return the time that any of some intervals covers, which may overlap and be in any order."""
        order = np.argsort(begin_ns, kind="stable")
        begin, end = begin_ns[order], np.maximum.accumulate(np.maximum(begin_ns, end_ns)[order])
        begin[1:] = np.maximum(begin[1:], end[:-1])
        return cls(begin_ns=begin, end_ns=end)

    def until_ns(self, times_ns: Ints) -> Ints:
        """Return how much of it lies before each of some times, int64, (num_times,)."""
        kernels = library()
        if kernels is not None:
            covered_ns = np.empty(len(times_ns), np.int64)
            stretches = len(self.begin_ns), self.begin_ns, self.end_ns
            checked(kernels.covered_until(*stretches, len(times_ns), times_ns, covered_ns))
            return covered_ns
        total = np.append(0, np.cumsum(self.end_ns - self.begin_ns))
        begun = np.searchsorted(self.begin_ns, times_ns, side="right")
        last_ns = np.append(self.end_ns, 0)[begun - 1]
        return np.asarray(total[begun] - np.where(begun > 0, np.maximum(last_ns - times_ns, 0), 0), np.int64)

    def inside_ns(self, begin_ns: Ints, end_ns: Ints) -> Ints:
        """Return how much of each of some intervals it covers, int64, (num_intervals,)."""
        return self.until_ns(end_ns) - self.until_ns(begin_ns)


def _measures_until(begin_ns: Ints, middle_ns: Ints, end_ns: Ints, edges_ns: Ints) -> tuple[Ints, Ints]:
    """Return how much of the first and of the second part of all intervals comes before each edge, each (num_edges,).

    Args:
        begin_ns: begins of the intervals, disjoint and ascending, (num_intervals,).
        middle_ns: where their second parts begin.
        end_ns: their ends.
        edges_ns: ascending, (num_edges,).
    """
    if not len(begin_ns):
        return np.zeros(len(edges_ns), np.int64), np.zeros(len(edges_ns), np.int64)
    begun = np.searchsorted(begin_ns, edges_ns, side="right")
    last = np.maximum(begun - 1, 0)
    is_begun = begun > 0
    first, second = (np.append(0, np.cumsum(length)) for length in (middle_ns - begin_ns, end_ns - middle_ns))
    middle, end = middle_ns[last], end_ns[last]
    first_ns = first[begun] - np.where(is_begun, np.maximum(middle - edges_ns, 0), 0)
    second_ns = second[begun] - np.where(is_begun, np.maximum(end - np.maximum(edges_ns, middle), 0), 0)
    return first_ns, second_ns


def _edges(*times_ns: Ints) -> Ints:
    # Ints are nearly sorted, and sorting them is several times faster than the hashing of np.unique.
    edges = np.sort(np.concatenate(times_ns), kind="stable")
    return edges[np.append(True, np.diff(edges) > 0)] if len(edges) else edges
