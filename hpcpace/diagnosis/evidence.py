"""What traces hold, on one clock and matched across ranks: of some steps at a time, every figure rests on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpcpace.errors import TraceError
from hpcpace.metrics.clocks.common_clock import CommonClock, whole_ns
from hpcpace.metrics.operations.matching import (
    Matching,
    Operations,
    RankOperations,
    completed,
    gather_operations,
    match,
)
from hpcpace.metrics.operations.waits import Waits, waits
from hpcpace.parallel import map_threads
from hpcpace.trace.reader import RankTrace, Table

TABLES_USED = frozenset(("steps", "phases", "collectives", "groups", "clock", "account", "events", "host"))
"""The tables of a trace that a report reads."""

# To compare with so many bounds is faster than to search among them.
_MOST_COMPARED = 16
_BLOCK_ROWS = 1 << 13


@dataclass(frozen=True, kw_only=True)
class TimedTraces:
    """The traces of one attempt, ascending by rank, and their clocks.

    Attributes:
        clocks: each rank's clock.
        unknown_clocks: ranks whose times cannot be compared with those of the others.
    """

    traces: Sequence[RankTrace]
    clocks: Sequence[CommonClock]
    unknown_clocks: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks with a trace."""
        return tuple(trace.header.rank for trace in self.traces)


@dataclass(frozen=True, kw_only=True)
class Evidence(TimedTraces):
    """The operations of some steps, or of all.

    Attributes:
        collectives: each rank's completed operations, on its own clock.
        operations: the same on the common clock, of all ranks.
    """

    collectives: Sequence[Table]
    operations: Operations
    matching: Matching
    waits: Waits

    @cached_property
    def ends(self) -> list[int]:
        """The row of `operations` behind those of each rank."""
        ends: list[int] = np.cumsum([len(table) for table in self.collectives], dtype=np.int64).tolist()
        return ends


def timed_traces(traces: Sequence[RankTrace]) -> TimedTraces:
    """Return traces, ascending by rank, with their clocks."""
    clocks, unknown_clocks = rank_clocks(traces)
    return TimedTraces(traces=traces, clocks=clocks, unknown_clocks=unknown_clocks)


def gather_evidence(traces: Sequence[RankTrace]) -> Evidence:
    """Return the evidence of all operations of traces in memory, ascending by rank."""
    return evidence_of(traces, *rank_clocks(traces))


def evidence_of(
    traces: Sequence[RankTrace], clocks: Sequence[CommonClock], unknown_clocks: tuple[int, ...]
) -> Evidence:
    """Return the evidence of traces, ascending by rank, whose clocks are known from `rank_clocks`."""
    collectives = list(map_threads(_completed, traces))
    parts = map_threads(lambda of_rank: rank_operations(*of_rank), zip(traces, clocks, collectives, strict=True))
    operations = gather_operations(list(parts))
    matching = match(operations, unknown_clocks=unknown_clocks)
    return Evidence(
        traces=traces,
        clocks=clocks,
        unknown_clocks=unknown_clocks,
        collectives=collectives,
        operations=operations,
        matching=matching,
        waits=waits(operations, matching),
    )


def rank_operations(trace: RankTrace, clock: CommonClock, table: Table) -> RankOperations:
    """Return rows of a rank's table of collectives on the common clock."""
    return RankOperations(
        rank=trace.header.rank,
        collectives=table,
        groups=trace.tables["groups"],
        enter_ns=reference_times(clock, table["enter_ns"]),
        exit_ns=reference_times(clock, table["exit_ns"]),
    )


def reference_times(clock: CommonClock, local_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `clock.to_reference(local_ns).time_ns`, without the half-widths that cost several times as much.

    Args:
        clock: the clock of a rank.
        local_ns: times of that clock, (num_times,).
    """
    if clock.num_samples < 2 or clock.is_reference:
        return clock.to_reference(local_ns).time_ns
    rates = np.diff(clock.offset_ns) / np.diff(clock.local_ns)
    times_ns = np.empty(len(local_ns), np.int64)
    # Times are nearly in order: most blocks lie between two samples, and are mapped without a lookup for each row.
    for first in range(0, len(local_ns), _BLOCK_ROWS):
        own_ns = local_ns[first : first + _BLOCK_ROWS]
        segment = _segments(clock.local_ns[1:-1], own_ns)
        offset_ns = whole_ns((own_ns - clock.local_ns[segment]) * rates[segment])
        offset_ns += clock.offset_ns[segment]
        np.subtract(own_ns, offset_ns, out=times_ns[first : first + _BLOCK_ROWS])
    return times_ns


def _segments(bounds_ns: NDArray[np.int64], times_ns: NDArray[np.int64]) -> NDArray[np.int64] | int:
    """Return how many bounds, ascending, are no later than each time, (num_times,); one number where all have one."""
    if not len(times_ns):
        return np.zeros(0, np.int64)
    first, last = np.searchsorted(bounds_ns, (times_ns.min(), times_ns.max()), side="right").tolist()
    if first == last:
        return int(first)
    if last - first > _MOST_COMPARED:
        return np.searchsorted(bounds_ns, times_ns, side="right").astype(np.int64)
    segment = np.full(len(times_ns), first)
    for bound_ns in bounds_ns[first:last]:
        segment += times_ns >= bound_ns
    return segment


def _completed(trace: RankTrace) -> Table:
    table = trace.tables["collectives"]
    is_completed = completed(table)
    return table if is_completed.all() else table.select(is_completed)


def rank_clocks(traces: Sequence[RankTrace]) -> tuple[list[CommonClock], tuple[int, ...]]:
    """Return each rank's clock, and the ranks whose clock cannot be compared with that of the others.

    A rank without samples has the clock of a rank on its own host, where one has some. Without any sample at all, the
    ranks on the host of the first one are compared with each other.
    """
    own = [_own_clock(trace) for trace in traces]
    of_host = {t.header.host_key: clock for t, clock in zip(traces, own, strict=True) if clock.num_samples}
    if not of_host:
        zero = np.zeros(1, np.int64)
        of_host = {traces[0].header.host_key: CommonClock(local_ns=zero, offset_ns=zero, halfwidth_ns=zero)}
    clocks, unknown = [], []
    for index, (trace, clock) in enumerate(zip(traces, own, strict=True)):
        if not clock.num_samples and (trace.header.host_key or index == 0):
            clock = of_host.get(trace.header.host_key, clock)
        if not clock.num_samples:
            unknown.append(trace.header.rank)
        clocks.append(clock)
    return clocks, tuple(unknown)


def _own_clock(trace: RankTrace) -> CommonClock:
    try:
        return CommonClock.from_table(trace.tables["clock"])
    except TraceError:  # a contradictory table is as good as none, and the report says that it has none
        none = np.zeros(0, np.int64)
        return CommonClock(local_ns=none, offset_ns=none, halfwidth_ns=none)
