"""Each step from within: its parts, where waiting began, and its critical path.

Measured for a range of steps at a time. An operation without a counterpart does not say when its last member came, so
the waits of some ranks are not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.evidence import MARGIN_STEPS, StepOperations, TimedTraces
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.common_clock import reference_times
from hpcpace.metrics.communication import under_way_ns
from hpcpace.metrics.critical_path import WORK, covered_by_waits, critical_path
from hpcpace.metrics.matching import Matching
from hpcpace.metrics.operations import (
    MESSAGES,
    Operations,
    is_one_of,
    join_rows,
    rank_slices,
    select_rows,
    synchronises,
)
from hpcpace.metrics.phases import EXPOSED_TRANSFER, EXPOSED_WAIT, CoveredTime, Part, parts_of_steps
from hpcpace.metrics.propagation import Origins, delay_origins, join_origins, last_partner
from hpcpace.metrics.segments import Blocking, BlockingThresholds, blocks_caller
from hpcpace.metrics.steps import StepPanel, columns_of
from hpcpace.metrics.waits import Blocks, HeldUp, exposed_waits_ns
from hpcpace.trace.schema import Op, Phase
from hpcpace.trace.tables import Table

_BLOCKS = (Phase.GRAD_SYNC, Phase.PACE)
_AWAY = (Phase.CHECKPOINT, Phase.EVAL, Phase.PACE)
_COLUMNS = ("step", "op", "enter_ns", "exit_ns", "blocked_ns")


@dataclass(frozen=True, kw_only=True)
class WaitThresholds(Thresholds, topic="waits"):
    """When waits are known well enough to be judged."""

    max_unmatched_share: float = number(0.1, "share")
    """Share of blocked communication without a counterpart up to which waits are known nevertheless."""
    least_unmatched_step_share: float = number(0.001, "share")
    """Share of the step that communication without a counterpart must take to matter."""
    max_held_share: float = number(0.02, "share")
    """Share of the step for which senders are held up to which steps are rebuilt: replay keeps that time whatever their
    receivers do, so that predicted gains would be wrong."""
    max_rebuild_error: float = number(0.2, "share")
    """Error of rebuilt steps, relative to measured ones, up to which they tell what a change would gain, the interval
    of which has that error; usual are less than 0.02."""


@dataclass(frozen=True, kw_only=True)
class PathSums:
    """The critical paths of some steps, summed up.

    Attributes:
        work_ns: each rank's own work on them, int64, (num_ranks,).
        transfer_ns: transfers on them, by `hpcpace.trace.schema.Op`.
    """

    work_ns: Ints
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
    wait_ns: Ints

    def select(self, mask: Bools) -> _Portion:
        """Return the rows under a mask, which has whole operations only."""
        rows = np.flatnonzero(mask)
        return _portion(
            select_rows(self.operations, rows),
            self.matching.instance[rows],
            self.matching.is_matched[rows],
            self.wait_ns[rows],
        )


def _portion(operations: Operations, instance: Ints, is_matched: Bools, wait_ns: Ints) -> _Portion:
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
        limits: when callers waited.
    """

    def __init__(self, timed: TimedTraces, steps: StepPanel, limits: BlockingThresholds) -> None:
        self._steps, self._ranks, self._limits = steps, timed.ranks, limits
        self._blocks = _intervals_by_rank(timed, _BLOCKS)
        self._held_up = held_up_by_rank(timed)
        self._tail: _Portion | None = None
        self._stop: int | None = None
        num_ranks = len(self._ranks)
        none = np.zeros(num_ranks)
        self.origins = Origins(direct_ns=none, propagated_ns=none, waited_ns=none)
        self.path = PathSums(work_ns=np.zeros(num_ranks, np.int64), transfer_ns={})

    def begin(self, stop: int, evidence: StepOperations) -> None:
        """Take the steps just before the first range."""
        self._keep_tail(stop, _portion_of(evidence))

    def add(self, stop: int | None, evidence: StepOperations, columns: slice) -> None:
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
            Blocking(is_known=is_known, is_blocking=blocks_caller(done, self._limits)),
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


def _portion_of(evidence: StepOperations) -> _Portion:
    done, matching = evidence.operations, evidence.matching
    is_whole = matching.is_matched
    is_apart = done.step[matching.first][matching.instance] != done.step
    if is_apart.any():
        apart = np.zeros(len(matching.num_rows), np.bool_)
        apart[matching.instance[is_apart]] = True
        is_whole = is_whole & ~apart[matching.instance]
    return _Portion(operations=done, matching=replace(matching, is_matched=is_whole), wait_ns=evidence.waits.wait_ns)


def _intervals_by_rank(timed: TimedTraces, of: tuple[Phase, ...]) -> list[tuple[Ints, Ints]]:
    """Return begin and end of some phases of each rank, on the common clock."""
    found = []
    for trace, clock in zip(timed.traces, timed.clocks, strict=True):
        phases = trace.tables["phases"]
        rows = np.flatnonzero(is_one_of(phases["phase"], of) & (phases["end_ns"] > phases["begin_ns"]))
        begin_ns, end_ns = (reference_times(clock, phases[name][rows]) for name in ("begin_ns", "end_ns"))
        order = np.argsort(begin_ns, kind="stable")
        found.append((begin_ns[order], end_ns[order]))
    return found


def held_up_by_rank(timed: TimedTraces) -> dict[int, HeldUp | None]:
    """Return for each rank when it was away or waited inside torch; None for one that never was."""
    away, inside = (_intervals_by_rank(timed, of) for of in (_AWAY, (*_AWAY, Phase.GRAD_SYNC)))
    return {
        rank: HeldUp(away=CoveredTime.of(*of_away), inside=CoveredTime.of(*of_both)) if len(of_both[0]) else None
        for rank, of_away, of_both in zip(timed.ranks, away, inside, strict=True)
    }


@dataclass(frozen=True, kw_only=True)
class StepPanels:
    """Nanoseconds of each rank in each step, each float64, (num_ranks, num_steps), or with a further axis.

    Attributes:
        parts_ns: the parts of the step, (num_ranks, num_steps, num_parts).
        blocked_ns: time blocked on synchronising collectives of the step.
        sent_ns: time blocked on sends of the step.
        message_wait_ns: time in which the rank was blocked waiting for messages.
        under_way_ns: time in which any of its operations was under way.
        unmatched_ns: likewise, of those without a counterpart on every member.
    """

    parts_ns: Floats
    blocked_ns: Floats
    sent_ns: Floats
    message_wait_ns: Floats
    under_way_ns: Floats
    unmatched_ns: Floats

    @classmethod
    def empty(cls, shape: tuple[int, int], zeros: Callable[[tuple[int, ...]], Floats]) -> StepPanels:
        """Return panels to fill, made by `zeros` such as `np.zeros`; `shape` is (num_ranks, num_steps)."""
        others = {item.name: zeros(shape) for item in fields(cls) if item.name != "parts_ns"}
        return cls(parts_ns=zeros((*shape, len(Part))), **others)

    @property
    def num_steps(self) -> int:
        """Number of the steps."""
        return int(self.parts_ns.shape[1])

    def select(self, columns: slice) -> StepPanels:
        """Return some of the steps, without copying them."""
        return StepPanels(**{item.name: getattr(self, item.name)[:, columns] for item in fields(StepPanels)})

    def put(self, columns: slice, panels: StepPanels) -> None:
        """Set some of the steps."""
        for item in fields(StepPanels):
            getattr(self, item.name)[:, columns] = getattr(panels, item.name)

    def fill(self, index: int, columns: slice, chosen: StepPanel, rows: Table, phases: Table) -> None:
        """Measure some steps of a rank.

        Args:
            index: of the rank.
            columns: the steps.
            chosen: all steps, on each rank's own clock.
            rows: from `divide_operations`, all that are under way in these steps.
            phases: the rank's table.
        """
        begin_ns, end_ns = chosen.begin_ns[index, columns], chosen.end_ns[index, columns]
        if not len(begin_ns):
            return
        near = np.flatnonzero((phases["end_ns"] > begin_ns.min()) & (phases["begin_ns"] < end_ns.max()))
        enter_ns, exit_ns, blocked_ns, wait_ns = (
            rows[name] for name in ("enter_ns", "exit_ns", "blocked_ns", "wait_ns")
        )
        self.parts_ns[index, columns] = parts_of_steps(
            (begin_ns, end_ns),
            (phases["phase"][near], phases["begin_ns"][near], phases["end_ns"][near]),
            (enter_ns, exit_ns, blocked_ns, wait_ns),
        )
        self.under_way_ns[index, columns] = under_way_ns(enter_ns, exit_ns, begin_ns, end_ns)
        alone = np.flatnonzero(~rows["is_matched"])
        self.unmatched_ns[index, columns] = under_way_ns(enter_ns[alone], exit_ns[alone], begin_ns, end_ns)
        column, op = columns_of(chosen.step[columns], rows["step"]), rows["op"]
        is_blocked = (blocked_ns > 0) & (column >= 0)
        for panel, of_op in ((self.blocked_ns, synchronises(op)), (self.sent_ns, op == Op.SEND)):
            used = np.flatnonzero(of_op & is_blocked)
            panel[index, columns] = np.bincount(column[used], weights=blocked_ns[used], minlength=len(begin_ns))
        messages = np.flatnonzero(is_one_of(op, MESSAGES) & is_blocked & (wait_ns > 0))
        if len(messages):
            enter_ns, exit_ns, blocked_ns, wait_ns = (
                times[messages] for times in (enter_ns, exit_ns, blocked_ns, wait_ns)
            )
            waited_ns = covered_by_waits((enter_ns, exit_ns, blocked_ns, wait_ns), (begin_ns, end_ns))
            self.message_wait_ns[index, columns] = waited_ns


def divide_operations(evidence: StepOperations, index: int) -> Table:
    """Return what of a rank's operations its steps are divided by, on its own clock."""
    table, end = evidence.collectives[index], evidence.ends[index]
    own = slice(end - len(table), end)
    wait_ns, is_matched = evidence.waits.wait_ns[own], evidence.matching.is_matched[own]
    return Table({**{name: table[name] for name in _COLUMNS}, "wait_ns": wait_ns, "is_matched": is_matched})


def unmatched_share(panels: StepPanels) -> Floats:
    """Return the share of communication that has no counterpart on every member, float64, (num_ranks, num_steps).

    What seems to be its transfer may be waits for others.
    """
    return np.asarray(panels.unmatched_ns / np.maximum(panels.under_way_ns, 1.0))


def unknown_waits(panels: StepPanels, limits: WaitThresholds) -> Bools:
    """Return the ranks whose waits cannot be distinguished from transfers, bool, (num_ranks,).

    What blocks them without a counterpart is more than a tenth of all that blocks them, and a thousandth of the step.
    """
    return _are_unknown(panels, limits, 1)


def are_waits_known(panels: StepPanels, limits: WaitThresholds) -> bool:
    """Return whether waits can be distinguished from transfers in the means over ranks; see `unknown_waits`."""
    return not _are_unknown(panels, limits, None)


def _are_unknown(panels: StepPanels, limits: WaitThresholds, axis: int | None) -> Bools:
    """Return whether operations without a counterpart blocked ranks for too long, in sums over an axis or over all."""
    parts_ns = panels.parts_ns
    wait_ns, transfer_ns = (parts_ns[:, :, list(of)].sum(axis=2) for of in (EXPOSED_WAIT, EXPOSED_TRANSFER))
    unmatched_ns = (transfer_ns * unmatched_share(panels)).sum(axis=axis)
    is_much = unmatched_ns > limits.max_unmatched_share * (wait_ns + transfer_ns).sum(axis=axis)
    return np.asarray(
        is_much & (unmatched_ns > limits.least_unmatched_step_share * parts_ns.sum(axis=2).sum(axis=axis))
    )
