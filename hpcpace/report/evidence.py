"""What the traces of an attempt hold, on one clock and matched across ranks: the ground for every figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcpace.errors import TraceError
from hpcpace.metrics.clock import CommonClock
from hpcpace.metrics.collectives import Matching, Operations, RankOperations, completed, gather_operations, match
from hpcpace.metrics.waits import Waits, waits
from hpcpace.trace.reader import RankTrace, Table


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The traces of one attempt, ascending by rank.

    Attributes:
        clocks: each rank's clock.
        unknown_clocks: ranks whose times cannot be compared with those of the others.
        collectives: each rank's completed operations, on its own clock.
        operations: the same on the common clock, of all ranks.
    """

    traces: Sequence[RankTrace]
    clocks: Sequence[CommonClock]
    unknown_clocks: tuple[int, ...]
    collectives: Sequence[Table]
    operations: Operations
    matching: Matching
    waits: Waits

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks with a trace."""
        return tuple(trace.header.rank for trace in self.traces)


def gather_evidence(traces: Sequence[RankTrace]) -> Evidence:
    """Return the evidence of traces, ascending by rank."""
    clocks, unknown_clocks = rank_clocks(traces)
    collectives = [table.select(completed(table)) for table in (trace.tables["collectives"] for trace in traces)]
    operations = gather_operations(
        [rank_operations(*of_rank) for of_rank in zip(traces, clocks, collectives, strict=True)]
    )
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
        enter_ns=clock.to_reference(table["enter_ns"]).time_ns,
        exit_ns=clock.to_reference(table["exit_ns"]).time_ns,
    )


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
