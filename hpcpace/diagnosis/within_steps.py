"""Where waiting began, and what the steps hang on: walked within each step, for a range of steps at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.evidence import Evidence, TimedTraces
from hpcpace.diagnosis.step_ranges import MARGIN_STEPS
from hpcpace.metrics.causes.critical_path import WORK, critical_path
from hpcpace.metrics.causes.propagation import Origins, delay_origins, join_origins, last_partner
from hpcpace.metrics.clocks.rank_clocks import reference_times
from hpcpace.metrics.lateness.segments import Blocking, blocks_caller
from hpcpace.metrics.operations.blocked_time import Blocks
from hpcpace.metrics.operations.exposed_waits import HeldUp, Stretches, exposed_waits_ns
from hpcpace.metrics.operations.matching import Matching, Operations, join_rows, rank_slices, select_rows
from hpcpace.metrics.steps import StepPanel, columns_of
from hpcpace.trace.schema import Phase

Int64Array = NDArray[np.int64]
_BLOCKS = (Phase.GRAD_SYNC, Phase.PACE)
_AWAY = (Phase.CHECKPOINT, Phase.EVAL, Phase.PACE)


@dataclass(frozen=True, kw_only=True)
class PathSums:
    """The critical paths of some steps, summed up.

    Attributes:
        work_ns: each rank's own work on them, int64, (num_ranks,).
        transfer_ns: transfers on them, by `hpcpace.trace.schema.Op`.
    """

    work_ns: Int64Array
    transfer_ns: Mapping[int, int]

    @property
    def length_ns(self) -> int:
        """The length of all paths together."""
        return int(self.work_ns.sum()) + sum(self.transfer_ns.values())


def join_paths(parts: Sequence[PathSums]) -> PathSums:
    """Return the sums of several portions of a run together; at least one, all of the same ranks."""
    transfer_ns: Counter[int] = Counter()
    for part in parts:
        transfer_ns.update(part.transfer_ns)
    return PathSums(work_ns=np.sum([part.work_ns for part in parts], axis=0), transfer_ns=dict(transfer_ns))


@dataclass(frozen=True, kw_only=True)
class _Portion:
    """Operations of some steps that are complete in them, ordered by rank.

    Attributes:
        wait_ns: how long each row waited, int64, (num_operations,).
    """

    operations: Operations
    matching: Matching
    wait_ns: Int64Array

    def select(self, mask: NDArray[np.bool_]) -> _Portion:
        """Return the rows under a mask, which has whole operations only."""
        rows = np.flatnonzero(mask)
        return _portion(
            select_rows(self.operations, rows),
            self.matching.instance[rows],
            self.matching.is_matched[rows],
            self.wait_ns[rows],
        )


def _portion(
    operations: Operations, instance: Int64Array, is_matched: NDArray[np.bool_], wait_ns: Int64Array
) -> _Portion:
    instance = np.unique(instance, return_inverse=True)[1].astype(np.int64)
    matching = Matching(
        instance=instance,
        num_rows=np.bincount(instance).astype(np.int64),
        is_matched=is_matched,
        slices=rank_slices(operations.rank) or (),
    )
    return _Portion(operations=operations, matching=matching, wait_ns=wait_ns)


def _joined(first: _Portion, second: _Portion) -> _Portion:
    """Return the rows of two portions that have no operation in common."""
    operations = join_rows([first.operations, second.operations])
    order = np.argsort(operations.rank, kind="stable")
    instance = np.concatenate([first.matching.instance, second.matching.instance + len(first.matching.num_rows)])
    return _portion(
        select_rows(operations, order),
        instance[order],
        np.concatenate([first.matching.is_matched, second.matching.is_matched])[order],
        np.concatenate([first.wait_ns, second.wait_ns])[order],
    )


class WithinSteps:
    """Sums over the steps of a share, range by range.

    The last steps of a range are complete only with the next one: they are walked then. Operations that ranks count to
    different steps belong to neither; nobody waits in them here.

    Args:
        timed: the traces and their clocks.
        steps: the used steps, on the common clock.
    """

    def __init__(self, timed: TimedTraces, steps: StepPanel) -> None:
        self._steps, self._ranks = steps, timed.ranks
        self._blocks = _intervals_by_rank(timed, _BLOCKS)
        self._held_up = _held_up_by_rank(timed)
        self._tail: _Portion | None = None
        self._stop: int | None = None
        num_ranks = len(self._ranks)
        none = np.zeros(num_ranks)
        self.origins = Origins(direct_ns=none, propagated_ns=none, waited_ns=none, num_rounds=0)
        self.path = PathSums(work_ns=np.zeros(num_ranks, np.int64), transfer_ns={})

    def begin(self, stop: int, evidence: Evidence) -> None:
        """Take the steps just before the first range."""
        self._keep_tail(stop, _portion_of(evidence))

    def add(self, stop: int | None, evidence: Evidence, columns: slice) -> None:
        """Add a range.

        Args:
            stop: the first step behind it; None for the last one.
            evidence: its operations.
            columns: the steps that are complete now, those that were not complete before among them.
        """
        portion, first = _portion_of(evidence), columns.start
        if self._tail is not None and self._stop is not None:
            border = min(int(np.searchsorted(self._steps.step, self._stop)), columns.stop)
            if border > first:
                before = portion.select(portion.operations.step < self._stop)
                self._walk(_joined(self._tail, before), slice(first, border))
                first = border
        self._walk(portion, slice(first, columns.stop))
        if stop is not None:
            self._keep_tail(stop, portion)

    def _keep_tail(self, stop: int, portion: _Portion) -> None:
        self._tail, self._stop = portion.select(portion.operations.step >= stop - MARGIN_STEPS), stop

    def _walk(self, portion: _Portion, columns: slice) -> None:
        done = portion.operations
        if columns.stop <= columns.start or not len(done):
            return
        steps = self._steps.select(columns)
        is_known = columns_of(steps.step, done.step) >= 0
        partner = last_partner(done, portion.matching)
        held_up = [self._held_up[rank] for rank in np.unique(done.rank).tolist()]
        exposed_ns = exposed_waits_ns(done, portion.wait_ns, held_up)
        origins = delay_origins(done, portion.matching, exposed_ns, ranks=self._ranks, mask=is_known, partner=partner)
        self.origins = join_origins([self.origins, origins])
        path = critical_path(
            done,
            portion.matching,
            Blocking(is_known=is_known, is_blocking=blocks_caller(done)),
            steps,
            ranks=self._ranks,
            blocks=self._blocks_during(steps),
            partner=partner,
        )
        length_ns = path.end_ns - path.begin_ns
        work_ns, transfer_ns = np.zeros(len(self._ranks), np.int64), Counter[int]()
        is_work = path.kind == WORK
        np.add.at(work_ns, path.rank[is_work], length_ns[is_work])
        for kind in np.unique(path.kind[~is_work]).tolist():
            transfer_ns[kind] = int(length_ns[path.kind == kind].sum())
        self.path = join_paths([self.path, PathSums(work_ns=work_ns, transfer_ns=transfer_ns)])

    def _blocks_during(self, steps: StepPanel) -> Blocks:
        """Return the blocks that begin between the first and the last of some steps."""
        found = []
        for index, (begin_ns, end_ns) in enumerate(self._blocks):
            first, stop = np.searchsorted(begin_ns, (steps.begin_ns[index, 0], steps.end_ns[index, -1])).tolist()
            rank = np.full(stop - first, self._ranks[index], np.int64)
            found.append((rank, begin_ns[first:stop], end_ns[first:stop]))
        rank, begin_ns, end_ns = (np.concatenate(column) for column in zip(*found, strict=True))
        return Blocks(rank=rank, begin_ns=begin_ns, end_ns=end_ns)


def _portion_of(evidence: Evidence) -> _Portion:
    done, matching = evidence.operations, evidence.matching
    is_whole = matching.is_matched
    is_apart = done.step[matching.first][matching.instance] != done.step
    if is_apart.any():
        apart = np.zeros(len(matching.num_rows), np.bool_)
        apart[matching.instance[is_apart]] = True
        is_whole = is_whole & ~apart[matching.instance]
    return _Portion(
        operations=done,
        matching=Matching(
            instance=matching.instance, num_rows=matching.num_rows, is_matched=is_whole, slices=matching.slices
        ),
        wait_ns=evidence.waits.wait_ns,
    )


def _intervals_by_rank(timed: TimedTraces, of: tuple[Phase, ...]) -> list[tuple[Int64Array, Int64Array]]:
    """Return begin and end of some phases of each rank, on the common clock."""
    found = []
    for trace, clock in zip(timed.traces, timed.clocks, strict=True):
        phases = trace.tables["phases"]
        rows = np.flatnonzero(np.isin(phases["phase"], of) & (phases["end_ns"] > phases["begin_ns"]))
        begin_ns, end_ns = (reference_times(clock, phases[name][rows]) for name in ("begin_ns", "end_ns"))
        order = np.argsort(begin_ns, kind="stable")
        found.append((begin_ns[order], end_ns[order]))
    return found


def _held_up_by_rank(timed: TimedTraces) -> dict[int, HeldUp | None]:
    """Return for each rank when it was away or waited inside torch; None for one that never was."""
    away, inside = (_intervals_by_rank(timed, of) for of in (_AWAY, (*_AWAY, Phase.GRAD_SYNC)))
    return {
        rank: HeldUp(away=Stretches.of(*of_away), inside=Stretches.of(*of_both)) if len(of_both[0]) else None
        for rank, of_away, of_both in zip(timed.ranks, away, inside, strict=True)
    }
