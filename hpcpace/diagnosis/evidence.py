"""What traces hold, on one clock and matched across ranks: of some steps at a time, every figure rests on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hpcpace.metrics.clocks.common_clock import CommonClock
from hpcpace.metrics.clocks.rank_clocks import rank_clocks, reference_times
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

TABLES_USED = frozenset(
    (
        "steps",
        "phases",
        "collectives",
        "groups",
        "clock",
        "account",
        "events",
        "host",
        "network",
        "connections",
        "flows",
    )
)
"""The tables of a trace that a report reads."""


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


def _completed(trace: RankTrace) -> Table:
    table = trace.tables["collectives"]
    is_completed = completed(table)
    return table if is_completed.all() else table.select(is_completed)
