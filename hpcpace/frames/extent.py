"""A part of a run: some of the steps that its report uses, and some of its ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hpcpace.core.errors import UsageError
from hpcpace.core.text import rank_list
from hpcpace.diagnosis.judged import JudgedAttempt
from hpcpace.diagnosis.measure import Measured
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.common_clock import CommonClock, reference_times
from hpcpace.metrics.steps import StepPanel
from hpcpace.trace.tables import RankTrace


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Some steps and ranks of a run.

    Attributes:
        judged: the run, measured.
        columns: positions of the steps among the used ones, ascending, int64, (num_steps,).
        rows: positions of the ranks among the measured ones, ascending, int64, (num_ranks,).
    """

    judged: JudgedAttempt
    columns: Ints
    rows: Ints

    @classmethod
    def whole(cls, judged: JudgedAttempt) -> Extent:
        """Return all of a run."""
        measured = judged.measured
        return cls(judged=judged, columns=np.arange(len(measured.chosen)), rows=np.arange(len(measured.timed.ranks)))

    def narrowed(self, first: int | None, stop: int | None, ranks: Collection[int] | None) -> Extent:
        """Return what of it is in the steps `first <= step < stop` and on some ranks; None does not narrow.

        Raises:
            UsageError: it lacks one of these ranks.
        """
        step, rank = self.step, self.ranks
        if ranks is not None and (missing := sorted(set(ranks) - set(rank.tolist()))):
            there = rank_list(rank.tolist())
            raise UsageError(f"the selection names {rank_list(missing)}, and the figures of this run have {there}")
        is_kept = np.ones(len(step), np.bool_)
        if first is not None:
            is_kept &= step >= first
        if stop is not None:
            is_kept &= step < stop
        rows = self.rows if ranks is None else self.rows[np.isin(rank, list(ranks))]
        return replace(self, columns=self.columns[is_kept], rows=rows)

    def blocks(self, num_steps: int) -> Iterator[Extent]:
        """Yield it in blocks of at most so many steps, at least one block."""
        for begin in range(0, max(len(self.columns), 1), num_steps):
            yield replace(self, columns=self.columns[begin : begin + num_steps])

    @property
    def measured(self) -> Measured:
        """What was measured of the whole run."""
        return self.judged.measured

    @property
    def step(self) -> Ints:
        """Numbers of the steps, ascending, int64, (num_steps,)."""
        return self.measured.chosen.step[self.columns]

    @property
    def ranks(self) -> Ints:
        """Numbers of the ranks, ascending, int64, (num_ranks,)."""
        return np.array(self.measured.timed.ranks, np.int64)[self.rows]

    @property
    def common(self) -> StepPanel:
        """The steps of all ranks on the common clock."""
        return self.measured.common.select(self.columns)

    @cached_property
    def origin_ns(self) -> int:
        """Time 0 of all frames on the common clock: the first begin of the first used step."""
        return int(self.measured.common.begin_ns[self.measured.timed.known, 0].min())

    @property
    def window_ns(self) -> tuple[int, int]:
        """Begin of the first and end of the last step on ranks with a known clock; both 0 without steps."""
        if not len(self.columns):
            return 0, 0
        known, common = self.measured.timed.known, self.common
        return int(common.begin_ns[known, 0].min()), int(common.end_ns[known, -1].max())

    @property
    def is_clock_known(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether times of each rank can be compared with those of others, bool, (num_ranks,)."""
        return ~np.isin(self.ranks, list(self.measured.timed.unknown_clocks))

    def traces(self) -> Iterator[tuple[RankTrace, CommonClock]]:
        """Yield the trace and the clock of each rank."""
        timed = self.measured.timed
        for row in self.rows.tolist():
            yield timed.traces[row], timed.clocks[row]

    def times_ns(self, trace: RankTrace, clock: CommonClock, local_ns: Ints) -> Floats:
        """Return times of a rank since `origin_ns`, float64, (num_times,); NaN where its clock is unknown."""
        if trace.header.rank in self.measured.timed.unknown_clocks:
            return np.full(len(local_ns), np.nan)
        return (reference_times(clock, local_ns) - self.origin_ns).astype(np.float64)
