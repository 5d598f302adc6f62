"""Operations of all ranks on one clock and matched, read range by range of steps.

Every figure rests on them. Rows are in a file in the order in which operations completed, so those of a range are read
with a margin; an operation that ranks count to different ranges moves to the later one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from hpcpace.core.pool import map_threads
from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Ints
from hpcpace.metrics.common_clock import CommonClock, rank_clocks, reference_times
from hpcpace.metrics.matching import Matching, match
from hpcpace.metrics.operations import MESSAGES, Operations, RankOperations, completed, gather_operations, is_one_of
from hpcpace.metrics.steps import StepPanel
from hpcpace.metrics.waits import Waits, waits
from hpcpace.trace.reader import RankTrace, Table, TraceStream
from hpcpace.trace.schema import TABLES
from hpcpace.trace.tables import join_tables

TABLES_USED = frozenset(TABLES) - {"pacing"}
"""The tables of a trace that a report reads."""
MAX_ROWS = 3_000_000
"""Memory: rows of one range: about 300 bytes of memory each."""
MARGIN_STEPS = 2
"""By how many steps an operation may run on behind its own, or ranks disagree about it."""
_WARM_UP_STEPS = 4 * MARGIN_STEPS  # speed: a range much shorter than the margin would pass the same rows on and on
_MIN_BLOCKS = 4  # speed: with fewer, to look for those of a share takes longer than to read all


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

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks with a trace."""
        return tuple(trace.header.rank for trace in self.traces)

    @property
    def known(self) -> list[int]:
        """The indices of the ranks whose clock is known; of the first one where none is."""
        return [index for index, rank in enumerate(self.ranks) if rank not in self.unknown_clocks] or [0]

    def on_common_clock(self, steps: StepPanel) -> StepPanel:
        """Return steps of these ranks on the common clock, or on a rank's own where its clock is unknown."""
        begin_ns, end_ns = (
            np.array([reference_times(clock, own_ns) for clock, own_ns in zip(self.clocks, times_ns, strict=True)])
            for times_ns in (steps.begin_ns, steps.end_ns)
        )
        return replace(steps, begin_ns=begin_ns, end_ns=end_ns)


@dataclass(frozen=True, kw_only=True)
class StepOperations(TimedTraces):
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
        return list(itertools.accumulate(len(table) for table in self.collectives))


def timed_traces(traces: Sequence[RankTrace]) -> TimedTraces:
    """Return traces, ascending by rank, with their clocks."""
    clocks, unknown_clocks = rank_clocks(traces)
    return TimedTraces(traces=traces, clocks=clocks, unknown_clocks=unknown_clocks)


def evidence_of(
    traces: Sequence[RankTrace], clocks: Sequence[CommonClock], unknown_clocks: tuple[int, ...]
) -> StepOperations:
    """Return the evidence of traces, ascending by rank, whose clocks are known from `rank_clocks`."""
    collectives = list(map_threads(_completed, traces))
    parts = map_threads(lambda of_rank: rank_operations(*of_rank), zip(traces, clocks, collectives, strict=True))
    operations = gather_operations(list(parts))
    matching = match(operations, unknown_clocks=unknown_clocks)
    return StepOperations(
        traces=traces,
        clocks=clocks,
        unknown_clocks=unknown_clocks,
        collectives=collectives,
        operations=operations,
        matching=matching,
        waits=waits(operations, matching),
    )


def by_clocks(evidence: StepOperations, clocks: Sequence[CommonClock]) -> StepOperations:
    """Return evidence by other clocks of the same ranks; which operations belong together does not depend on them."""
    parts = map(rank_operations, evidence.traces, clocks, evidence.collectives)
    operations = gather_operations(list(parts))
    return replace(evidence, clocks=clocks, operations=operations, waits=waits(operations, evidence.matching))


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


@dataclass(frozen=True, kw_only=True)
class StepShare:
    """Consecutive ranges of steps that can be read without those before them.

    Attributes:
        first: the first step; None for the share that begins with the run.
        stops: the first step behind each of its ranges; None behind the last one of the run.
        begins: the first block of each rank with its rows, or with rows of the steps just before, (num_ranks,).
    """

    first: int | None
    stops: tuple[int | None, ...]
    begins: tuple[int, ...]


def divide_steps(streams: Sequence[TraceStream], *, max_rows: int = MAX_ROWS, num_shares: int = 1) -> list[StepShare]:
    """Return about equal shares of the steps of a run, at least one.

    Args:
        streams: the traces, ascending by rank; at least one.
        max_rows: rows of a range, about, if steps are about alike.
        num_shares: how many, at most.
    """
    stops = _range_ends(streams, max_rows, num_shares)
    num_shares = min(num_shares, len(stops))
    bounds = [len(stops) * number // num_shares for number in range(num_shares + 1)]
    shares: list[StepShare] = []
    for begin, end in itertools.pairwise(bounds):
        first = stops[begin - 1] if begin else None
        begins = tuple(
            0 if first is None else _num_blocks_before(stream, first - _WARM_UP_STEPS - MARGIN_STEPS)
            for stream in streams
        )
        shares.append(StepShare(first=first, stops=tuple(stops[begin:end]), begins=begins))
    return shares


def share_of_steps(streams: Sequence[TraceStream], step: Ints, num_seen: int, *, max_rows: int = MAX_ROWS) -> StepShare:
    """Return ranges that have all rows of some steps, and some of others: those before, between and behind them.

    Args:
        streams: the traces, ascending by rank; at least one.
        step: numbers of the steps, ascending, int64, at least one.
        num_seen: steps of the run.
        max_rows: rows of a range, about, if steps are about alike.
    """
    num_rows = sum(stream.num_collectives for stream in streams) * len(step) / max(num_seen, 1)
    num_ranges = max(min(math.ceil(num_rows / max(max_rows, 1)), len(step) // _WARM_UP_STEPS), 1)
    begins = [int(part[0]) for part in np.array_split(step, num_ranges)]
    # Operations that are matched with those of later steps come with the range behind the last one.
    stops = (*begins[1:], int(step[-1]) + 1, int(step[-1]) + 1 + _WARM_UP_STEPS)
    before = begins[0] - _WARM_UP_STEPS - MARGIN_STEPS
    first_blocks = tuple(_num_blocks_before(stream, before) for stream in streams)
    return StepShare(first=begins[0] if any(first_blocks) else None, stops=stops, begins=first_blocks)


def iter_share(
    streams: Sequence[TraceStream], timed: TimedTraces, share: StepShare
) -> Iterator[tuple[int | None, StepOperations]]:
    """Yield the first step behind each range of a share, None behind the last one of a run, and its evidence.

    Each row of a collective is in exactly one range. The collectives of the traces in it are those of the range. An
    operation that queues behind one of the range before counts from its enter. Where others go before the share, the
    steps just before it come first: they are those of another share, and tell how operations under way at that time go
    on.

    Args:
        streams: the traces, ascending by rank; at least one.
        timed: the same with their clocks.
        share: the ranges.

    Raises:
        TraceError: a chunk of a file is damaged.
    """
    clocks, unknown_clocks = timed.clocks, timed.unknown_clocks
    readers = [StepReader(stream, begin) for stream, begin in zip(streams, share.begins, strict=True)]
    if share.first is not None:
        for reader in readers:
            reader.skip(share.first)
    for stop in (*(() if share.first is None else (share.first,)), *share.stops):
        traces = list(map_threads(partial(StepReader.take, stop=stop), readers))
        evidence = evidence_of(traces, clocks, unknown_clocks)
        if stop is not None and _has_unmatched(evidence, stop - MARGIN_STEPS):
            carried = _carried(traces, clocks, stop)
            traces = [
                reader.give_back(trace, is_carried) if is_carried.any() else trace
                for reader, trace, is_carried in zip(readers, traces, carried, strict=True)
            ]
            evidence = evidence_of(traces, clocks, unknown_clocks)
        yield stop, evidence
        del traces, evidence  # before the next range is read: two of them need not fit into memory


def _range_ends(streams: Sequence[TraceStream], max_rows: int, num_shares: int) -> list[int | None]:
    """Return the first step behind each range; None behind the last one."""
    num_ranges = -(-sum(stream.num_collectives for stream in streams) // max(max_rows, 1))
    num_ranges = -(-num_ranges // num_shares) * num_shares
    steps = np.unique(np.concatenate([np.asarray(stream.trace.tables["steps"]["step"]) for stream in streams]))
    num_ranges = max(min(num_ranges, len(steps) // _WARM_UP_STEPS), 1)
    return [*(int(part[0]) for part in np.array_split(steps, num_ranges)[1:]), None]


def blocks_of_steps(stream: TraceStream, stretches: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return where blocks begin and end, apart from each other, that hold all rows of some steps.

    Args:
        stream: the trace.
        stretches: the first step of each stretch and the first one behind it, ascending.
    """
    found: list[tuple[int, int]] = []
    for first, stop in stretches:
        begin = _num_blocks_before(stream, first - _WARM_UP_STEPS - MARGIN_STEPS)
        until = _num_blocks_until(stream, stop)
        if found and begin <= found[-1][1]:
            begin, until = found[-1][0], max(found.pop()[1], until)
        if until > begin:
            found.append((begin, until))
    return found


def _num_blocks_before(stream: TraceStream, step: int) -> int:
    """Return how many blocks at the begin of a stream hold only rows of steps before some step, about; of few, none."""
    if stream.num_blocks < _MIN_BLOCKS:
        return 0
    return _first_later(stream, step)


def _num_blocks_until(stream: TraceStream, stop: int | None) -> int:
    """Return how many blocks at the begin of a stream hold all rows of steps before `stop`."""
    if stop is None or stream.num_blocks <= 2:  # of one chunk it need not be known where its steps end
        return stream.num_blocks
    return _first_later(stream, stop + MARGIN_STEPS) + 1


def _first_later(stream: TraceStream, step: int) -> int:
    """Return the first block whose last row is of some step or a later one, or else the last block."""
    later = np.flatnonzero(stream.last_steps >= step)
    return int(later[0]) if len(later) else stream.num_blocks - 1


def _has_unmatched(evidence: StepOperations, step: int) -> bool:
    """Return whether operations of some step or later ones lack a row, not only a known clock."""
    done, matching = evidence.operations, evidence.matching
    if matching.is_matched.all():
        return False
    rows = np.flatnonzero(~matching.is_matched & (done.step >= step))
    if evidence.unknown_clocks:
        num_rows = np.where(is_one_of(done.op[rows], MESSAGES), 2, done.group_size[rows])
        rows = rows[matching.num_rows[matching.instance[rows]] != num_rows]
    return bool(len(rows))


def _carried(traces: Sequence[RankTrace], clocks: Sequence[CommonClock], stop: int) -> list[Bools]:
    """Return which rows of each rank are to be matched with the next range, bool, (num_rows,) each.

    They are of the last steps before `stop`, and are not matched with others of the last steps, whatever their clocks.
    """
    tables = [trace.tables["collectives"] for trace in traces]
    near = [np.flatnonzero((table["step"] >= stop - _WARM_UP_STEPS) & completed(table)) for table in tables]
    parts = [
        rank_operations(trace, clock, table.select(rows))
        for trace, clock, table, rows in zip(traces, clocks, tables, near, strict=True)
    ]
    last = gather_operations(parts)
    is_carried = ~match(last).is_matched & (last.step >= stop - MARGIN_STEPS)
    found = [np.zeros(len(table), np.bool_) for table in tables]
    of_ranks = np.split(is_carried, np.cumsum([len(rows) for rows in near])[:-1])
    for of_rank, rows, own in zip(found, near, of_ranks, strict=True):
        of_rank[rows] = own
    return found


class StepReader:
    """Hands out the collectives of a stream by ranges of steps, which ascend.

    Args:
        stream: the trace.
        begin: the first block to read.
    """

    def __init__(self, stream: TraceStream, begin: int = 0) -> None:
        self._stream, self._next = stream, begin
        self._waiting = stream.trace.tables["collectives"].select(slice(0))

    def skip(self, step: int) -> None:
        """Leave out what is so far before some step that nothing of it matters there."""
        self._next = max(self._next, _num_blocks_before(self._stream, step - _WARM_UP_STEPS - MARGIN_STEPS))
        self._waiting = self._read_until(step)
        self._waiting = self._waiting.select(self._waiting["step"] >= step - _WARM_UP_STEPS - MARGIN_STEPS)

    def take(self, stop: int | None) -> RankTrace:
        """Return the trace with the rows of steps before `stop` that were not handed out yet."""
        rows = self._read_until(stop)
        is_taken = np.ones(len(rows), np.bool_) if stop is None else rows["step"] < stop
        num_taken = int(np.count_nonzero(is_taken))
        # Mostly a slice, which copies nothing; what is left is copied, or all that was read would stay with it.
        taken = rows.select(slice(num_taken) if is_taken[:num_taken].all() else is_taken)
        self._waiting = rows.select(~is_taken)
        return self._with(taken)

    def give_back(self, trace: RankTrace, is_carried: Bools) -> RankTrace:
        """Return a trace without some of its rows, which come first in the next range."""
        rows = trace.tables["collectives"]
        self._waiting = join_tables([rows.select(is_carried), self._waiting])
        return self._with(rows.select(~is_carried))

    def _read_until(self, stop: int | None) -> Table:
        until = _num_blocks_until(self._stream, stop)
        if until <= self._next:
            return self._waiting
        rows = self._stream.blocks(self._next, until, lead=self._waiting)
        self._next = until
        return rows

    def _with(self, rows: Table) -> RankTrace:
        trace = self._stream.trace
        return replace(trace, tables={**trace.tables, "collectives": rows})
