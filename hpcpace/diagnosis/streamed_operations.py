"""The figures that rest on operations, of a run whose operations do not fit into memory.

They are read and measured one range of steps after the other; what is kept of a range does not grow with its
operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.evidence import Evidence
from hpcpace.diagnosis.figures.clocks import Causality, causality_of, join_causality
from hpcpace.diagnosis.group_transfers import TransferSums, transfer_series, transfer_sums
from hpcpace.diagnosis.incomplete import Completed, completed_of, never_completed
from hpcpace.diagnosis.streamed_evidence import MARGIN_STEPS, divide_steps, iter_share
from hpcpace.errors import TraceError
from hpcpace.metrics.contradictions import num_contradictory
from hpcpace.metrics.network.transfers import GroupTransfers
from hpcpace.metrics.operations.communication import Kind, RankTotals, rank_totals
from hpcpace.metrics.operations.dependence import MESSAGES, is_one_of, synchronises
from hpcpace.metrics.operations.lost_records import join_records
from hpcpace.metrics.operations.overlap import communication_ns
from hpcpace.metrics.operations.totals_by_kind import KindTotals, add_kinds, join_kinds, totals_by_kind
from hpcpace.metrics.phases import Part, parts_of_steps
from hpcpace.metrics.steps import StepPanel, columns_of, common_steps
from hpcpace.parallel import map_threads, num_threads, run_threads, shared_zeros, watch_processes
from hpcpace.trace.plausible import plausible_rows
from hpcpace.trace.schema import Op
from hpcpace.trace.stream import StoredTable, TooLarge, TraceStream
from hpcpace.trace.tables import RankTrace, Table, join_tables

MAX_ROWS = 2_500_000
"""Rows that are in memory at once, about."""
_LEAST_ROWS = 1024
_CHECKED_COLUMNS = ("op", "enter_ns", "exit_ns", "exit_kind")
_PARTS_COLUMNS = ("step", "enter_ns", "exit_ns", "blocked_ns")


@dataclass(frozen=True, kw_only=True)
class OperationFigures:
    """The figures of the operations of the used steps.

    Attributes:
        has_messages: whether ranks send to each other.
        parts_ns: nanoseconds of each part of each step, float64, (num_ranks, num_steps, num_parts).
        blocked_ns: time in which ranks were blocked on synchronising collectives, float64, (num_ranks, num_steps).
        sent_ns: time in which they were blocked on sends, the same shape.
        transfers: the transfers of each process group.
        totals: sums over the operations of each rank.
        kinds: the operations by their kind.
        causality: what they say against the clocks, of all steps.
        completed: what they tell of what is missing, of all steps.
        under_way_ns: time in which any operation of a rank was under way, float64, (num_ranks,).
        num_read, num_contradictory: rows of each rank that were read, and those that cannot be, int64, (num_ranks,).
        problems: what of them could not be read.
    """

    has_messages: bool
    parts_ns: NDArray[np.float64]
    blocked_ns: NDArray[np.float64]
    sent_ns: NDArray[np.float64]
    transfers: tuple[GroupTransfers, ...]
    totals: RankTotals
    kinds: tuple[Kind, ...]
    causality: Causality
    completed: Completed
    under_way_ns: NDArray[np.float64]
    num_read: NDArray[np.int64]
    num_contradictory: NDArray[np.int64]
    problems: tuple[str, ...]


def is_on_disk(traces: Sequence[RankTrace]) -> bool:
    """Return whether the collectives of some traces are not in memory."""
    return any(isinstance(trace.tables["collectives"], StoredTable) for trace in traces)


def stream_operations(
    traces: Sequence[RankTrace],
    chosen: StepPanel | None,
    *,
    max_rows: int = MAX_ROWS,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[OperationFigures, list[RankTrace]]:
    """Measure the operations range by range, and return their figures and the traces without them.

    Args:
        traces: ascending by rank; at least one.
        chosen: the steps to use, on each rank's own clock; none when not given.
        max_rows: rows that are in memory at once, about.
        progress: called with the number of ranges measured and their number, in this process.
    """
    streams = [_stream_of(trace) for trace in traces]
    if chosen is None:
        panel = common_steps([trace.tables["steps"] for trace in traces])
        chosen = panel.select(np.zeros(len(panel), np.bool_))
    # Of each rank enough rows that what is done once per rank and range does not outweigh them.
    max_rows = max(max_rows // num_threads(), _LEAST_ROWS * len(traces))
    shares = divide_steps(streams, max_rows=max_rows, num_shares=num_threads())
    panel_shape = (len(traces), len(chosen))
    parts_ns = shared_zeros(*panel_shape, len(Part))
    blocked_ns, sent_ns = (shared_zeros(len(shares), *panel_shape) for _ in range(2))
    num_done = shared_zeros(len(shares))

    def show_progress() -> None:
        if progress is not None:
            progress(int(num_done.sum()), sum(len(share.stops) for share in shares))

    def measure_share(number: int) -> _ShareFigures:
        share = shares[number]
        sums = _ShareSums(chosen, parts_ns, blocked_ns[number], sent_ns[number])
        for stop, evidence in iter_share(streams, share):
            if stop is not None and stop == share.first:
                sums.begin(stop, evidence)
            else:
                sums.add(stop, evidence)
                num_done[number] += 1
                if len(shares) == 1:  # else the parent process shows the progress of all
                    show_progress()
            del evidence  # the next range takes its place in memory
        return sums.figures(streams)

    parts = watch_processes(measure_share, range(len(shares)), show_progress)
    kept = [replace(stream.trace, tables={**stream.trace.tables, "collectives": stream.nothing}) for stream in streams]
    return _joined(parts, parts_ns, blocked_ns.sum(axis=0), sent_ns.sum(axis=0)), kept


@dataclass(frozen=True, kw_only=True)
class _SoundStream(TraceStream):
    """A stream without implausible rows, and without those of damaged chunks.

    Attributes:
        problems: what was left out.
        counts: rows that were read, and those of them that cannot be.
    """

    problems: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def nothing(self) -> Table:
        """The table without rows."""
        return self.trace.tables["collectives"].select(slice(0))

    def blocks(self, first: int, stop: int, columns: Sequence[str] | None = None, lead: Table | None = None) -> Table:
        try:
            rows = super().blocks(first, stop, columns, lead)
        except TraceError as error:
            if stop - first > 1 and not isinstance(error, TooLarge):
                blocks = [self.blocks(number, number + 1, columns) for number in range(first, stop)]
                return join_tables([*([] if lead is None else [lead]), *blocks])
            self.problems.append(f"{error}; its rows are left out")
            return self.nothing if lead is None else lead
        problems: list[str] = []
        sound = plausible_rows(rows, "collectives", str(self.trace.path), problems)
        if not self.problems:
            self.problems.extend(problems)
        if columns is None or set(_CHECKED_COLUMNS) <= set(columns):
            self.counts[0] += len(rows)
            self.counts[1] += num_contradictory(rows)
        return sound


def _stream_of(trace: RankTrace) -> _SoundStream:
    table = trace.tables["collectives"]
    if isinstance(table, StoredTable):
        stream = table.stream
        return _SoundStream(
            trace=stream.trace, chunks=stream.chunks, identity=stream.identity, most_bytes=stream.most_bytes
        )
    return _SoundStream(trace=trace, chunks=None)


@dataclass(frozen=True, kw_only=True)
class _ShareFigures:
    """The figures of one share of the steps, without those of single steps, which go into arrays of the caller."""

    has_messages: bool
    transfers: list[TransferSums]
    totals: RankTotals
    kinds: dict[tuple[int, int], KindTotals]
    causality: Causality
    completed: list[Completed]
    under_way_ns: NDArray[np.float64]
    counts: NDArray[np.int64]
    problems: list[str]


class _ShareSums:
    """Sums over the ranges of steps of one share, range by range; times of steps go into arrays of the caller."""

    def __init__(
        self,
        chosen: StepPanel,
        parts_ns: NDArray[np.float64],
        blocked_ns: NDArray[np.float64],
        sent_ns: NDArray[np.float64],
    ) -> None:
        self._chosen, self._parts_ns, self._blocked_ns, self._sent_ns = chosen, parts_ns, blocked_ns, sent_ns
        num_ranks = len(parts_ns)
        self._num_done = 0
        self._tails: list[Table | None] = [None] * num_ranks
        self._has_messages = False
        self._transfers: list[TransferSums] = []
        self._totals: list[RankTotals] = []
        self._kinds: dict[tuple[int, int], KindTotals] = {}
        self._causality: list[Causality] = []
        self._completed: list[Completed] = []
        self._under_way_ns = np.zeros(num_ranks)

    def begin(self, stop: int, evidence: Evidence) -> None:
        """Take from the steps just before the first range what goes on in it."""
        self._num_done = self._num_divided(stop)
        self._keep_tails(stop, [self._rows(evidence, index) for index in range(len(evidence.traces))])

    def add(self, stop: int | None, evidence: Evidence) -> None:
        """Add a range of steps that ends before `stop`."""
        done, steps = evidence.operations, self._chosen.step
        column = columns_of(steps, done.step)
        mask = column >= 0
        self._has_messages = self._has_messages or has_messages(evidence)
        blocked_ns, sent_ns = blocked_of(evidence, column, len(steps))
        self._blocked_ns += blocked_ns
        self._sent_ns += sent_ns
        self._transfers.append(transfer_sums(evidence, steps))
        self._totals.append(rank_totals(done, evidence.waits, mask, evidence.ranks))
        add_kinds(self._kinds, totals_by_kind(done, evidence.matching, evidence.waits, mask))
        self._causality = [join_causality([*self._causality, causality_of(evidence)])]
        self._completed.append(replace(completed_of(evidence), opened=never_completed(evidence)))
        self._under_way_ns += under_way_of(evidence, mask)
        self._add_parts(stop, evidence)

    def _num_divided(self, stop: int | None) -> int:
        """Return how many steps are divided once all before `stop` are there.

        Not the last ones: operations of the next range may belong to them.
        """
        if stop is None:
            return len(self._chosen)
        return max(int(np.searchsorted(self._chosen.step, stop - MARGIN_STEPS)), self._num_done)

    def _add_parts(self, stop: int | None, evidence: Evidence) -> None:
        columns = slice(self._num_done, self._num_divided(stop))

        def of_rank(index: int) -> Table:
            rows, tail = self._rows(evidence, index), self._tails[index]
            if tail is not None:
                rows = Table({name: np.concatenate([tail[name], rows[name]]) for name in rows})
            begin_ns, end_ns = self._chosen.begin_ns[index, columns], self._chosen.end_ns[index, columns]
            if len(begin_ns):
                phases = evidence.traces[index].tables["phases"]
                near = np.flatnonzero((phases["end_ns"] > begin_ns.min()) & (phases["begin_ns"] < end_ns.max()))
                self._parts_ns[index, columns] = parts_of_steps(
                    (begin_ns, end_ns),
                    (phases["phase"][near], phases["begin_ns"][near], phases["end_ns"][near]),
                    (rows["enter_ns"], rows["exit_ns"], rows["blocked_ns"], rows["wait_ns"]),
                )
            return rows

        rows = list(map_threads(of_rank, range(len(evidence.traces))))
        self._num_done = columns.stop
        if stop is not None:
            self._keep_tails(stop, rows)

    def _rows(self, evidence: Evidence, index: int) -> Table:
        """Return what of a rank's operations steps are divided by."""
        table, end = evidence.collectives[index], evidence.ends[index]
        wait_ns = evidence.waits.wait_ns[end - len(table) : end]
        return Table({**{name: table[name] for name in _PARTS_COLUMNS}, "wait_ns": wait_ns})

    def _keep_tails(self, stop: int, rows: Sequence[Table]) -> None:
        self._tails = [table.select(table["step"] >= stop - 2 * MARGIN_STEPS) for table in rows]

    def figures(self, streams: Sequence[_SoundStream]) -> _ShareFigures:
        """Return what was found in all ranges of some streams."""
        return _ShareFigures(
            has_messages=self._has_messages,
            transfers=self._transfers,
            totals=_summed(self._totals),
            kinds=self._kinds,
            causality=self._causality[0],
            completed=self._completed,
            under_way_ns=self._under_way_ns,
            counts=np.array([stream.counts for stream in streams], np.int64),
            problems=[problem for stream in streams for problem in stream.problems],
        )


def _joined(
    shares: Sequence[_ShareFigures],
    parts_ns: NDArray[np.float64],
    blocked_ns: NDArray[np.float64],
    sent_ns: NDArray[np.float64],
) -> OperationFigures:
    kinds: dict[tuple[int, int], KindTotals] = {}
    for share in shares:
        add_kinds(kinds, list(share.kinds.values()))
    completed = [part for share in shares for part in share.completed]
    counts = np.sum([share.counts for share in shares], axis=0)
    return OperationFigures(
        has_messages=any(share.has_messages for share in shares),
        parts_ns=parts_ns,
        blocked_ns=blocked_ns,
        sent_ns=sent_ns,
        transfers=tuple(transfer_series([part for share in shares for part in share.transfers], parts_ns.shape[1])),
        totals=_summed([share.totals for share in shares]),
        kinds=tuple(join_kinds(kinds.values())),
        causality=join_causality([share.causality for share in shares]),
        completed=Completed(
            records=join_records([part.records for part in completed]),
            end_ns=max(part.end_ns for part in completed),
            opened=[rows for part in completed for rows in part.opened],
        ),
        under_way_ns=np.sum([share.under_way_ns for share in shares], axis=0),
        num_read=counts[:, 0],
        num_contradictory=counts[:, 1],
        problems=tuple(dict.fromkeys(problem for share in shares for problem in share.problems)),
    )


def _summed(parts: Sequence[RankTotals]) -> RankTotals:
    names = (item.name for item in fields(RankTotals))
    return RankTotals(**{name: np.sum([getattr(part, name) for part in parts], axis=0) for name in names})


def has_messages(evidence: Evidence) -> bool:
    """Return whether ranks send to each other."""
    return bool(is_one_of(evidence.operations.op, MESSAGES).any())


def blocked_of(
    evidence: Evidence, column: NDArray[np.int64], num_steps: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how long each rank was blocked on synchronising collectives, and on sends.

    Args:
        evidence: the traces.
        column: position of the step of each operation among the used ones, -1 for none, (num_operations,).
        num_steps: number of the used steps.

    Returns:
        Nanoseconds, each float64, (num_ranks, num_steps).
    """
    done = evidence.operations
    blocked_ns, sent_ns = (np.zeros((len(evidence.ranks), num_steps)) for _ in range(2))

    def of_rank(index: int) -> None:
        rows = slice(evidence.ends[index] - len(evidence.collectives[index]), evidence.ends[index])
        op, is_used = done.op[rows], (done.blocked_ns[rows] > 0) & (column[rows] >= 0)
        for sums, of_op in ((blocked_ns, synchronises(op)), (sent_ns, op == Op.SEND)):
            chosen = np.flatnonzero(of_op & is_used) + rows.start
            sums[index] = np.bincount(column[chosen], weights=done.blocked_ns[chosen], minlength=num_steps)

    run_threads(of_rank, range(len(evidence.ranks)))
    return blocked_ns, sent_ns


def under_way_of(evidence: Evidence, mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return how long any operation of each rank was under way, float64, (num_ranks,).

    Args:
        evidence: the traces.
        mask: the rows to use, bool, (num_operations,).
    """
    done = evidence.operations
    under_way_ns = np.zeros(len(evidence.ranks))

    def of_rank(index: int) -> None:
        rows = slice(evidence.ends[index] - len(evidence.collectives[index]), evidence.ends[index])
        used, enter_ns, exit_ns = mask[rows], done.enter_ns[rows], done.exit_ns[rows]
        if not used.all():
            enter_ns, exit_ns = enter_ns[used], exit_ns[used]
        under_way_ns[index] = communication_ns(enter_ns, exit_ns)

    run_threads(of_rank, range(len(evidence.ranks)))
    return under_way_ns
