"""Figures that rest on operations, measured one range of steps after the other.

What is kept of a range does not grow with its operations, and does not depend on where ranges begin: times are summed
as whole nanoseconds, and what operations of one range do in the steps of another is measured with that range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field, fields, replace

import numpy as np

from hpcpace.core.pool import Team, map_threads, num_threads, shared_zeros, watch_processes
from hpcpace.core.records import dataclass
from hpcpace.diagnosis.clocks import Causality, causality_of, join_causality
from hpcpace.diagnosis.evidence import (
    MARGIN_STEPS,
    StepOperations,
    StepShare,
    TimedTraces,
    by_clocks,
    divide_steps,
    iter_share,
)
from hpcpace.diagnosis.incomplete import (
    BlockFaults,
    Completed,
    SoundStream,
    completed_of,
    never_completed,
    sound_stream,
)
from hpcpace.diagnosis.within_steps import PathSums, StepPanels, WithinSteps, divide_operations, join_paths
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.common_clock import CommonClock
from hpcpace.metrics.communication import (
    KindTotals,
    OperationKind,
    RankTotals,
    add_kinds,
    join_kinds,
    rank_totals,
    totals_by_kind,
)
from hpcpace.metrics.links import GroupTransfers
from hpcpace.metrics.lost_operations import join_records
from hpcpace.metrics.operations import MESSAGES, ProcessGroup, is_one_of, op_name, shares
from hpcpace.metrics.propagation import Origins, join_origins
from hpcpace.metrics.segments import BlockingThresholds
from hpcpace.metrics.steps import StepPanel, columns_of
from hpcpace.trace.schema import ExitKind, Op
from hpcpace.trace.tables import Table

_MAX_CELLS = 40_000_000  # memory: of the matrix of series and steps
_MAX_NUMBERS = 1 << 22  # memory: of a table that numbers combinations without sorting them
MAX_ROWS = 2_000_000
"""Memory: rows that are in memory at once, about."""
_MIN_ROWS = 1024  # memory: rows of a range at least
_MIN_SHARED = 100_000  # speed: with fewer rows, another process takes longer to start than to do its share
_OP_BITS, _RANK_BITS = 8, 32  # format: of numbers that combine group, operation and ranks
_NUM_KEYS = 5  # format: columns of keys


@dataclass(frozen=True, kw_only=True)
class TransferSums:
    """Sums of transfers of some steps.

    Attributes:
        groups: what the first key indexes.
        keys: group, operation, size, and both ranks of a message or -1, ascending, int64, (num_series, 5).
        first: position of the first of the steps among the used ones.
        total_ns: sum of the transfers, float64, (num_series, num_steps).
        count: how many there are, int64, (num_series, num_steps).
        is_whole: whether all fitted into memory.
    """

    groups: tuple[ProcessGroup, ...]
    keys: Ints
    first: int
    total_ns: Floats
    count: Ints
    is_whole: bool = True


def transfer_sums(evidence: StepOperations, step: Ints) -> TransferSums:
    """Return the sums of a part of a run: of each group, operation and size, the transfers of each step.

    The transfer of an operation is the largest of its ranks. Messages count as operations of the pair.

    Args:
        evidence: the operations.
        step: numbers of the steps to use, ascending, (num_steps,).
    """
    done, matching = evidence.operations, evidence.matching
    transfer_ns, is_seen = operation_transfers(evidence)
    first = matching.first
    op, column = done.op[first], columns_of(step, done.step[first])
    is_message = (op == Op.SEND) | (op == Op.RECV)
    usable = np.flatnonzero((column >= 0) & matching.is_matched[first] & (op != Op.BARRIER) & (~is_message | is_seen))
    first, transfer_ns, column = first[usable], transfer_ns[usable], column[usable]
    keys, kind = _kinds(evidence, first) if len(usable) else (np.zeros((0, _NUM_KEYS), np.int64), first)
    begin = int(column.min(initial=len(step)))
    num_steps = int(column.max(initial=begin - 1)) + 1 - begin
    is_whole = len(keys) * num_steps <= _MAX_CELLS
    if not is_whole:
        keys, kind, column, transfer_ns, num_steps = keys[:0], kind[:0], column[:0], transfer_ns[:0], 0
    shape, cell = (len(keys), num_steps), kind * num_steps + (column - begin)
    return TransferSums(
        groups=done.groups,
        keys=keys,
        first=begin,
        total_ns=np.bincount(cell, transfer_ns, math.prod(shape)).astype(np.float64).reshape(shape),
        count=np.bincount(cell, minlength=math.prod(shape)).reshape(shape),
        is_whole=is_whole,
    )


def transfer_series(parts: Sequence[TransferSums], num_steps: int) -> list[GroupTransfers]:
    """Return a series for each group, operation and size: the mean transfer of its operations in each step.

    NaN in steps without an operation; no series where they would not fit into memory.

    Args:
        parts: sums, all with the same groups.
        num_steps: number of the used steps.
    """
    keys = np.unique(np.concatenate([np.zeros((0, _NUM_KEYS), np.int64), *(part.keys for part in parts)]), axis=0)
    if len(keys) * num_steps > _MAX_CELLS or not all(part.is_whole for part in parts):
        return []
    total_ns, count = np.zeros((len(keys), num_steps)), np.zeros((len(keys), num_steps), np.int64)
    row = {tuple(key): index for index, key in enumerate(keys.tolist())}
    for part in parts:
        rows = np.array([row[tuple(key)] for key in part.keys.tolist()], np.int64)
        columns = slice(part.first, part.first + part.count.shape[1])
        total_ns[rows, columns] += part.total_ns
        count[rows, columns] += part.count
    mean_ns = np.where(count > 0, total_ns / np.maximum(count, 1), np.nan)
    return [
        GroupTransfers(
            members=(low, high) if low >= 0 else parts[0].groups[group].ranks,
            op=op_name(op),
            size_bytes=size_bytes,
            transfer_ns=series,
        )
        for (group, op, size_bytes, low, high), series in zip(keys.tolist(), mean_ns, strict=True)
    ]


def operation_transfers(evidence: StepOperations) -> tuple[Ints, Bools]:
    """Return the transfer of each operation, the longest of its ranks, and whether its receiver saw all of it.

    Only a receiver that waits sees how long a message takes: for a late one it has arrived before. And of a message
    beside another one of its group, as both ways of a pipeline at once, its transfer is what is left after that one.

    Returns:
        int64 and bool, (num_instances,).
    """
    done, matching, waits = evidence.operations, evidence.matching, evidence.waits
    num_instances = len(matching.num_rows)

    def of_share(share: Sequence[slice]) -> tuple[Ints, Bools]:
        largest_ns, is_seen = np.zeros(num_instances, np.int64), np.zeros(num_instances, np.bool_)
        for rows in share:
            op, instance = done.op[rows], matching.instance[rows]
            np.maximum.at(largest_ns, instance, np.where(op == Op.SEND, 0, waits.transfer_ns[rows]))
            wait_ns, passed_ns = waits.wait_ns[rows], done.exit_ns[rows] - done.enter_ns[rows]
            is_whole = wait_ns + waits.transfer_ns[rows] == passed_ns
            is_seen[instance[(op == Op.RECV) & (wait_ns > 0) & is_whole]] = True
        return largest_ns, is_seen

    found = list(map_threads(of_share, shares(done.slices or [slice(0, len(done))])))
    return np.maximum.reduce([ns for ns, _ in found]), np.logical_or.reduce([seen for _, seen in found])


def _kinds(evidence: StepOperations, first: Ints) -> tuple[Ints, Ints]:
    """Return the keys of series, ascending, and the number of the series of each operation.

    Args:
        evidence: the traces.
        first: a row of each operation, (num_operations,).
    """
    done = evidence.operations
    op, size_bytes, group = done.op[first].astype(np.int64), done.size_bytes[first], done.group[first]
    is_message = (op == Op.SEND) | (op == Op.RECV)
    op[is_message] = int(Op.SEND)
    sizes = np.unique(size_bytes)
    ranks, peers = done.rank[first[is_message]], done.peer[first[is_message]]
    ends, of_message = np.unique(np.minimum(ranks, peers) << _RANK_BITS | np.maximum(ranks, peers), return_inverse=True)
    pair = np.zeros(len(first), np.int64)
    pair[is_message] = of_message + 1
    kind = _numbered(group << _OP_BITS | op, len(done.groups) << _OP_BITS)
    for values, most in ((np.searchsorted(sizes, size_bytes), len(sizes)), (pair, len(ends) + 1)):
        kind = _numbered(kind * most + values, (int(kind.max()) + 1) * most)
    one = np.empty(int(kind.max()) + 1, np.int64)
    one[kind] = np.arange(len(kind))
    low, high = np.append(-1, ends >> _RANK_BITS)[pair[one]], np.append(-1, ends & ((1 << _RANK_BITS) - 1))[pair[one]]
    return np.stack([group[one], op[one], size_bytes[one], low, high], axis=1), kind


def _numbered(codes: Ints, most: int) -> Ints:
    """Return the rank of each code, from 0 to below `most`, among those that occur."""
    if most > _MAX_NUMBERS:
        return np.unique(codes, return_inverse=True)[1]
    occurs = np.zeros(most, np.int64)
    occurs[codes] = 1
    numbers: Ints = (np.cumsum(occurs) - 1)[codes]
    return numbers


@dataclass(frozen=True, kw_only=True)
class OperationFigures:
    """The figures of the operations of the used steps.

    Attributes:
        panels: times of each rank in each step.
        has_messages: whether ranks send to each other.
        transfers: the transfers of each process group.
        totals: sums over the operations of each rank.
        kinds: the operations by their kind.
        origins: where waiting began.
        path: what the steps hang on.
        causality: what they say against the clocks, of all steps.
        of_samples: what they say against the samples of the clocks alone, where these have been corrected, else None.
        completed: what they reveal about what is missing, of all steps.
        streams: the operations that were read, with what is wrong with them.
    """

    panels: StepPanels
    has_messages: bool
    transfers: tuple[GroupTransfers, ...]
    totals: RankTotals
    kinds: tuple[OperationKind, ...]
    origins: Origins
    path: PathSums
    causality: Causality
    of_samples: Causality | None
    completed: Completed
    streams: Sequence[SoundStream]


def measure_operations(
    timed: TimedTraces,
    chosen: StepPanel,
    common: StepPanel,
    *,
    max_rows: int = MAX_ROWS,
    progress: Callable[[int, int], None] | None = None,
    team: Team | None = None,
    limits: BlockingThresholds | None = None,
    samples: Sequence[CommonClock] | None = None,
) -> OperationFigures:
    """Measure the operations of a run range by range.

    Args:
        timed: the traces, at least one, and their clocks.
        chosen: the steps to use, on each rank's own clock.
        common: the same on the common clock.
        max_rows: rows that are in memory at once, about; of each process of a team.
        progress: called with the number of ranges measured and their number, in this process.
        team: the processes that share the ranges. All but the first get figures without panels and transfers.
        limits: when callers waited for operations; the defaults if None.
        samples: the clock of each rank by its samples alone, if those of `timed` have been corrected.
    """
    limits = limits or BlockingThresholds()
    return _Shares(timed, chosen, common, max_rows, progress, limits, samples).measured(team)


_Faults = list[tuple[dict[int, str], dict[int, BlockFaults]]]
"""Of each rank, which blocks are damaged, and what is wrong with rows of others."""


class _Shares:
    """The ranges of steps of a run, shared out to processes."""

    def __init__(
        self,
        timed: TimedTraces,
        chosen: StepPanel,
        common: StepPanel,
        max_rows: int,
        progress: Callable[[int, int], None] | None,
        limits: BlockingThresholds,
        samples: Sequence[CommonClock] | None,
    ) -> None:
        self._limits, self._samples = limits, samples
        self._timed, self._chosen, self._common = timed, chosen, common
        self._max_rows, self._progress = max_rows, progress
        self._streams = [sound_stream(trace) for trace in timed.traces]

    def measured(self, team: Team | None) -> OperationFigures:
        """Measure all shares, by the processes of a team or by those of this machine."""
        if team is None:
            return self._by_this_machine()
        # The same shares in every process; with fewer of them than processes, some have none.
        shares = self._divided(team.size, self._max_rows)
        panels = self._panels(np.zeros)

        def work(tell: Callable[[], None]) -> tuple[_ShareFigures, StepPanels] | None:
            if team.rank >= len(shares):
                return None
            share = shares[team.rank]
            return self._measure(share, panels, tell), panels.select(self._columns(share))

        def finish(
            parts: Sequence[tuple[_ShareFigures, StepPanels] | None],
        ) -> tuple[tuple[OperationFigures, _Faults], tuple[OperationFigures, _Faults]]:
            found = [part for part in parts if part is not None]
            for share, (_, of_share) in zip(shares[1:], found[1:], strict=True):
                panels.put(self._columns(share), of_share)
            whole = self._joined([figures for figures, _ in found], panels)
            light = replace(whole, panels=panels.select(slice(0)), transfers=(), streams=())
            return (whole, []), (light, [(stream.damaged, stream.faults) for stream in self._streams])

        figures, faults = team.together(work, finish, lambda num_done: self._show(num_done, shares))
        self._note(faults)
        return replace(figures, streams=self._streams)

    def _note(self, of_ranks: _Faults) -> None:
        for stream, (damaged, faults) in zip(self._streams, of_ranks, strict=False):
            stream.damaged.update(damaged)
            stream.faults.update(faults)

    def _by_this_machine(self) -> OperationFigures:
        num_rows = sum(stream.num_collectives for stream in self._streams)
        num_workers = num_threads() if num_rows > _MIN_SHARED else 1
        shares = self._divided(num_workers, self._max_rows // num_workers)
        panels, num_done = self._panels(shared_zeros), shared_zeros(len(shares))

        def show() -> None:
            self._show(int(num_done.sum()), shares)

        def measure_share(number: int) -> _ShareFigures:
            def tell() -> None:
                num_done[number] += 1
                if len(shares) == 1:  # else the parent process shows the progress of all
                    show()

            return self._measure(shares[number], panels, tell)

        return self._joined(watch_processes(measure_share, range(len(shares)), show), panels)

    def _divided(self, num_shares: int, max_rows: int) -> list[StepShare]:
        # Of each rank enough rows that what is done once per rank and range does not outweigh them.
        max_rows = max(max_rows, _MIN_ROWS * len(self._streams))
        return divide_steps(self._streams, max_rows=max_rows, num_shares=num_shares)

    def _panels(self, zeros: Callable[[tuple[int, ...]], Floats]) -> StepPanels:
        return StepPanels.empty((len(self._streams), len(self._chosen)), zeros)

    def _show(self, num_done: int, shares: Sequence[StepShare]) -> None:
        if self._progress is not None:
            self._progress(num_done, sum(len(share.stops) for share in shares))

    def _measure(self, share: StepShare, panels: StepPanels, tell: Callable[[], None]) -> _ShareFigures:
        sums = _ShareSums(self._timed, self._chosen, self._common, panels, self._limits, self._samples)
        for stop, evidence in iter_share(self._streams, self._timed, share):
            if stop is not None and stop == share.first:
                sums.begin(stop, evidence)
            else:
                sums.add(stop, evidence)
                tell()
            del evidence  # the next range takes its place in memory
        return sums.figures(self._streams)

    def _columns(self, share: StepShare) -> slice:
        """Return the steps that are complete with the ranges of a share, and not before."""
        first = 0 if share.first is None else num_complete(self._chosen, share.first)
        return slice(first, num_complete(self._chosen, share.stops[-1]))

    def _joined(self, shares: Sequence[_ShareFigures], panels: StepPanels) -> OperationFigures:
        kinds: dict[tuple[int, int], KindTotals] = {}
        for share in shares:
            self._note(share.faults)
            add_kinds(kinds, list(share.kinds.values()))
        completed = [part for share in shares for part in share.completed]
        transfers = [part for share in shares for part in share.transfers]
        return OperationFigures(
            panels=panels,
            has_messages=any(share.has_messages for share in shares),
            transfers=tuple(transfer_series(transfers, panels.num_steps)),
            totals=_summed([part for share in shares for part in share.totals]),
            kinds=tuple(join_kinds(kinds.values())),
            origins=join_origins([part for share in shares for part in share.origins]),
            path=join_paths([part for share in shares for part in share.path]),
            causality=join_causality([part for share in shares for part in share.causality]),
            of_samples=join_causality([part for share in shares for part in share.of_samples])
            if self._samples is not None
            else None,
            completed=Completed(
                records=join_records([part.records for part in completed]),
                end_ns=max(part.end_ns for part in completed),
                opened=[rows for part in completed for rows in part.opened],
            ),
            streams=self._streams,
        )


def num_complete(chosen: StepPanel, stop: int | None) -> int:
    """Return how many steps have all their operations once all ranges before `stop` are there.

    Not the last ones: operations of the next range may belong to them.
    """
    return len(chosen) if stop is None else int(np.searchsorted(chosen.step, stop - MARGIN_STEPS))


@dataclass(kw_only=True)
class _ShareFigures:
    """The figures of one share of the steps, without those of single steps, which go into panels of the caller."""

    has_messages: bool = False
    transfers: list[TransferSums] = field(default_factory=list)
    totals: list[RankTotals] = field(default_factory=list)
    kinds: dict[tuple[int, int], KindTotals] = field(default_factory=dict)
    origins: list[Origins] = field(default_factory=list)
    path: list[PathSums] = field(default_factory=list)
    causality: list[Causality] = field(default_factory=list)
    of_samples: list[Causality] = field(default_factory=list)
    completed: list[Completed] = field(default_factory=list)
    faults: _Faults = field(default_factory=list)


class _ShareSums:
    """Sums over the ranges of steps of one share, range by range; times of steps go into panels of the caller."""

    def __init__(
        self,
        timed: TimedTraces,
        chosen: StepPanel,
        common: StepPanel,
        panels: StepPanels,
        limits: BlockingThresholds,
        samples: Sequence[CommonClock] | None,
    ) -> None:
        self._chosen, self._panels, self._samples = chosen, panels, samples
        self._within = WithinSteps(timed, common, limits)
        self._num_done = 0
        self._tails: list[Table | None] = [None] * len(timed.traces)
        self._found = _ShareFigures()

    def begin(self, stop: int, evidence: StepOperations) -> None:
        """Take from the steps just before the first range what goes on in it."""
        self._num_done = num_complete(self._chosen, stop)
        self._within.begin(stop, evidence)
        self._keep_tails(stop, [divide_operations(evidence, index) for index in range(len(evidence.traces))])

    def add(self, stop: int | None, evidence: StepOperations) -> None:
        """Add a range of steps that ends before `stop`."""
        done, steps = evidence.operations, self._chosen.step
        mask = columns_of(steps, done.step) >= 0
        found = self._found
        found.has_messages |= bool(is_one_of(done.op, MESSAGES).any())
        found.transfers.append(transfer_sums(evidence, steps))
        mask &= done.exit_kind != ExitKind.FAILED  # which says nothing about how long operations take
        found.totals.append(rank_totals(done, evidence.waits, mask, evidence.ranks))
        add_kinds(found.kinds, totals_by_kind(done, evidence.matching, evidence.waits, mask))
        found.causality = [join_causality([*found.causality, causality_of(evidence)])]
        if self._samples is not None:
            of_samples = causality_of(by_clocks(evidence, self._samples))
            found.of_samples = [join_causality([*found.of_samples, of_samples])]
        found.completed.append(replace(completed_of(evidence), opened=never_completed(evidence)))
        columns = slice(self._num_done, max(num_complete(self._chosen, stop), self._num_done))
        self._within.add(stop, evidence, columns)
        self._add_to_panels(stop, evidence, columns)
        self._num_done = columns.stop

    def _add_to_panels(self, stop: int | None, evidence: StepOperations, columns: slice) -> None:
        def of_rank(index: int) -> Table:
            rows, tail = divide_operations(evidence, index), self._tails[index]
            if tail is not None:
                rows = Table({name: np.concatenate([tail[name], rows[name]]) for name in rows})
            self._panels.fill(index, columns, self._chosen, rows, evidence.traces[index].tables["phases"])
            return rows

        rows = list(map_threads(of_rank, range(len(evidence.traces))))
        if stop is not None:
            self._keep_tails(stop, rows)

    def _keep_tails(self, stop: int, rows: Sequence[Table]) -> None:
        self._tails = [table.select(table["step"] >= stop - 2 * MARGIN_STEPS) for table in rows]

    def figures(self, streams: Sequence[SoundStream]) -> _ShareFigures:
        """Return what was found in all ranges of some streams."""
        found, within = self._found, self._within
        return replace(
            found,
            totals=[_summed(found.totals)],
            origins=[within.origins],
            path=[within.path],
            faults=[(stream.damaged, stream.faults) for stream in streams],
        )


def _summed(parts: Sequence[RankTotals]) -> RankTotals:
    names = (item.name for item in fields(RankTotals))
    return RankTotals(**{name: np.sum([getattr(part, name) for part in parts], axis=0) for name in names})
