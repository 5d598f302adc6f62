"""The part of each operation's wait that held its rank up: what is hidden behind work costs nothing.

The rules are those by which a step is divided into parts (`hpcpace.metrics.phases`), so that these waits add up to the
exposed wait of the steps, and what is said of single waits can be held against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.operations.matching import Operations, rank_slices
from hpcpace.metrics.phases import union

Int64Array = NDArray[np.int64]
_MOST_NS = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Stretches:
    """Some time of one rank, on the clock of its operations, ascending and disjoint; each int64, (num_stretches,)."""

    begin_ns: Int64Array
    end_ns: Int64Array

    @classmethod
    def of(cls, begin_ns: Int64Array, end_ns: Int64Array) -> Stretches:
        """Return the time that any of some intervals covers."""
        begin, end = union(begin_ns, end_ns)
        return cls(begin_ns=begin, end_ns=end)

    def inside_ns(self, begin_ns: Int64Array, end_ns: Int64Array) -> Int64Array:
        """Return how much of each of some intervals it covers, int64, (num_intervals,)."""
        return self._until_ns(end_ns) - self._until_ns(begin_ns)

    def _until_ns(self, time_ns: Int64Array) -> Int64Array:
        total = np.append(0, np.cumsum(self.end_ns - self.begin_ns))
        begun = np.searchsorted(self.begin_ns, time_ns, side="right")
        last_ns = self.end_ns[np.maximum(begun - 1, 0)] if len(self.end_ns) else time_ns
        return np.asarray(total[begun] - np.where(begun > 0, np.maximum(last_ns - time_ns, 0), 0), np.int64)


@dataclass(frozen=True, kw_only=True)
class HeldUp:
    """When one rank was held up, or away, in ways that no row of an operation says.

    Attributes:
        away: checkpoints, evaluations and pauses, whose communication is a part of theirs.
        inside: these, and waits inside torch for gradients (phase grad_sync).
    """

    away: Stretches
    inside: Stretches


def exposed_waits_ns(operations: Operations, wait_ns: Int64Array, held_up: Sequence[HeldUp | None]) -> Int64Array:
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
    exposed_ns: Int64Array = end_ns - begin_ns
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


def _latest_before(times_ns: Int64Array, step: Int64Array) -> Int64Array:
    """Return the latest of the times before each one in its step, or a time before all; `step` ascends."""
    if not len(times_ns):
        return times_ns
    is_first = np.append(True, step[1:] != step[:-1])
    number = np.cumsum(is_first)
    span_ns = int(times_ns.max()) - int(times_ns.min()) + 1
    if span_ns * (int(number[-1]) + 1) > _MOST_NS:  # damaged times
        number[:] = 0
    # Each step's times are moved behind those of the step before, so that one pass over all keeps steps apart.
    shift_ns = number * span_ns - int(times_ns.min())
    latest_ns = np.maximum.accumulate(times_ns + shift_ns) - shift_ns
    return np.where(is_first, -_MOST_NS, np.append(0, latest_ns[:-1]))
