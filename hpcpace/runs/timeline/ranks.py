"""The process of each rank in a timeline: steps, phases, operations with their waits, pacing, and the clock's error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import NS_PER_US, plural
from hpcpace.diagnosis.devices import is_on_device
from hpcpace.metrics.common_clock import CommonClock, reference_times
from hpcpace.metrics.operations import UNKNOWN_GROUP, completed, op_name
from hpcpace.runs.timeline.network import Network
from hpcpace.runs.timeline.steps import ShownSteps
from hpcpace.runs.timeline.tracks import Argument, Counter, Process, Slice, Track, shown_name
from hpcpace.trace.schema import PaceArm, PacePolicy, Phase, StepFlag
from hpcpace.trace.tables import RankTrace, Table

_LEAST_ARROW_NS = 1_000


def processes_of(shown: ShownSteps) -> Iterator[Process]:
    """Yield who waits for whom, the process of each shown rank, ascending, and then those of the hosts' networks.

    Perfetto shows processes with many slices first. The group of waits, whose name is the first one, has the order of
    ranks.
    """
    arrows, network = _Arrows(shown), Network(shown)
    rows = [row for row, trace in enumerate(shown.timed.traces) if trace.header.rank in shown.ranks]
    ranks = [_RankProcess(shown, arrows, network, row) for row in rows]
    waits = [rank.waits() for rank in ranks]
    if any(track.slices for track in waits):
        yield Process(name="All ranks: who waits for whom", number=None, tracks=waits)
    for rank in ranks:
        yield rank.process()
    yield from network.hosts(max(shown.timed.ranks) + 2)


@dataclass(frozen=True)
class _Arrows:
    """Arrows from the rank that was last at an operation to those that waited for it, numbered by the waiting row."""

    shown: ShownSteps

    @cached_property
    def arrives(self) -> NDArray[np.bool_]:
        """Which rows an arrow ends at, bool, (num_operations,).

        They waited longer than both clocks may be wrong, and their transfer begins after the last partner came: where
        that seems to come after their end, a clock is wrong by more than it says.
        """
        timed, partner = self.shown.timed, self.shown.partner
        done = timed.operations
        error_ns = np.zeros(max(timed.ranks) + 1)
        for trace, clock in zip(timed.traces, timed.clocks, strict=True):
            own = trace.tables["collectives"]["enter_ns"]
            if len(own):
                error_ns[trace.header.rank] = float(np.median(clock.to_reference(own).halfwidth_ns))
        ranks = done.rank
        is_shown = np.isin(ranks, self.shown.ranks)
        of_partner = np.maximum(partner, 0)
        least_ns = np.maximum(error_ns[ranks] + error_ns[ranks[of_partner]], _LEAST_ARROW_NS)
        found: NDArray[np.bool_] = (partner >= 0) & is_shown & is_shown[of_partner]
        return found & (timed.waits.wait_ns > least_ns) & (done.enter_ns[of_partner] < self.transfer_ns)

    @cached_property
    def transfer_ns(self) -> NDArray[np.int64]:
        """When the transfer of each row begins, int64, (num_operations,): just after its wait.

        Events at the same time have no order, and an arrow needs one.
        """
        done = self.shown.timed.operations
        return np.asarray(np.minimum(done.enter_ns + self.shown.timed.waits.wait_ns + 1, done.exit_ns))

    @cached_property
    def leaving(self) -> Mapping[int, tuple[int, ...]]:
        """The arrows that leave each row, those to the ranks that waited longest first."""
        rows = np.flatnonzero(self.arrives)
        order = np.lexsort((-self.shown.timed.waits.wait_ns[rows], self.shown.partner[rows]))
        rows = rows[order]
        sources, first = np.unique(self.shown.partner[rows], return_index=True)
        parts = np.split(rows + 1, first[1:]) if len(rows) else []
        return {int(source): tuple(part.tolist()) for source, part in zip(sources, parts, strict=True)}


@dataclass(frozen=True)
class _RankProcess:
    """One rank of the steps.

    Attributes:
        row: of its trace.
    """

    shown: ShownSteps
    arrows: _Arrows
    network: Network
    row: int

    @property
    def trace(self) -> RankTrace:
        """Its trace, on its device where that is known."""
        return self.shown.timed.traces[self.row]

    @property
    def recorded(self) -> RankTrace:
        """Its trace with times of the host."""
        return self.shown.recorded[self.row]

    @property
    def clock(self) -> CommonClock:
        """Its clock."""
        return self.shown.timed.clocks[self.row]

    def common_ns(self, own_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return times of its clock on the common one."""
        return reference_times(self.clock, own_ns) + self._shift_ns

    @property
    def _shift_ns(self) -> int:
        return self.shown.shift_ns.get(self.trace.header.rank, 0)

    @property
    def name(self) -> str:
        """Its number and host."""
        return f"rank {self.trace.header.rank} on {shown_name(self.trace.header.host)}"

    def waits(self) -> Track:
        """Return whom it waits for, and when."""
        return Track(name=self.name, slices=list(self._waits()))

    def process(self) -> Process:
        """Return all of it."""
        header, on_device = self.trace.header, is_on_device(self.trace)
        tracks = [Track(name="phases, device" if on_device else "phases", slices=list(self._phases(self.trace)))]
        if on_device:
            tracks.append(Track(name="phases, host", slices=list(self._phases(self.recorded))))
        tracks += self._operations()
        tracks.append(Track(name="pacing", slices=list(self._pacing())))
        return Process(
            name=f"{self.name}, process",
            number=header.rank + 1,
            outer=Track(name="steps", slices=list(self._steps())),
            tracks=[track for track in tracks if track.slices],
            counters=[*self._clock_error(), *self._pacing_delay(), *self.network.flows(header.rank)],
        )

    def _rows(self, table: Table) -> Table:
        """Return the rows of a table in the steps."""
        return table.select(np.isin(table["step"], self.shown.step))

    def _steps(self) -> Iterator[Slice]:
        rows = self._rows(self.trace.tables["steps"])
        times = (self.common_ns(rows[name]).tolist() for name in ("begin_ns", "end_ns"))
        columns = (rows[name].tolist() for name in ("step", "samples", "flags"))
        for begin_ns, end_ns, step, samples, flags in zip(*times, *columns, strict=True):
            names = [flag.name.lower() for flag in StepFlag if flag & flags and flag.name]
            arguments: list[Argument] = [(self.trace.header.samples_unit or "samples", samples)]
            yield Slice(begin_ns, end_ns, " ".join([f"step {step}", *names]), tuple(arguments))

    def _phases(self, trace: RankTrace) -> Iterator[Slice]:
        rows = self._rows(trace.tables["phases"])
        if not is_on_device(trace):
            rows = rows.select(rows["phase"] != Phase.IDLE)  # of its device
        times = (self.common_ns(rows[name]).tolist() for name in ("begin_ns", "end_ns"))
        for begin_ns, end_ns, phase, step, batch in zip(
            *times, rows["phase"].tolist(), rows["step"].tolist(), rows["microbatch"].tolist(), strict=True
        ):
            batches: tuple[Argument, ...] = (("microbatch", batch),) if batch >= 0 else ()
            yield Slice(begin_ns, max(end_ns, begin_ns), phase_name(phase), (("step", step), *batches))

    @cached_property
    def _operation_rows(self) -> NDArray[np.int64]:
        """Rows of its operations in the steps, int64."""
        end = self.shown.timed.ends[self.row]
        rows = np.arange(end - len(self.shown.timed.collectives[self.row]), end)
        return rows[np.isin(self.shown.timed.operations.step[rows], self.shown.step)]

    def _operations(self) -> Iterator[Track]:
        """Yield a track for each group whose operations the rank took part in, and one for those that never ended."""
        rows = self._operation_rows
        of_group = self.shown.timed.operations.group[rows]
        for group in np.unique(of_group).tolist():
            slices = [one for row in rows[of_group == group].tolist() for one in self._operation(row)]
            yield Track(name=f"collectives, {self._group_name(group)}", slices=slices)
        yield Track(name="never completed", slices=list(self._unfinished()))

    def _group_name(self, group: int) -> str:
        if group == UNKNOWN_GROUP:
            return "unknown group"
        found = self.shown.timed.operations.groups[group]
        return f"{f'group {shown_name(found.name)}' if found.name else 'a group'} of {plural(len(found.ranks), 'rank')}"

    def _waits(self) -> Iterator[Slice]:
        done = self.shown.timed.operations
        for row in self._operation_rows.tolist():
            begin_ns, end_ns, late_rank = self._wait(row)
            if late_rank >= 0:
                arguments = (("operation", op_name(int(done.op[row]))), ("step", int(done.step[row])))
                yield Slice(begin_ns, end_ns, f"for rank {late_rank}", arguments)

    def _wait(self, row: int) -> tuple[int, int, int]:
        """Return begin and end of the wait in an operation, and the last rank that came; -1 if it waited for none."""
        done, partner = self.shown.timed.operations, int(self.shown.partner[row])
        wait_ns = int(self.shown.timed.waits.wait_ns[row])
        begin_ns = int(done.enter_ns[row]) + self._shift_ns
        return begin_ns, begin_ns + wait_ns, int(done.rank[partner]) if wait_ns > 0 and partner >= 0 else -1

    def _operation(self, row: int) -> Iterator[Slice]:
        """Yield an operation and, inside it, its wait and its transfer."""
        done, shift_ns = self.shown.timed.operations, self._shift_ns
        begin_ns, end_ns = int(done.enter_ns[row]) + shift_ns, int(done.exit_ns[row]) + shift_ns
        arguments: list[Argument] = [
            ("bytes", int(done.size_bytes[row])),
            ("number", int(done.seq[row])),
            ("step", int(done.step[row])),
            ("blocked us", int(done.blocked_ns[row]) / NS_PER_US),
        ]
        if done.peer[row] >= 0:
            arguments.append(("peer or root", int(done.peer[row])))
        name = op_name(int(done.op[row]))
        yield Slice(begin_ns, end_ns, name, tuple(arguments), from_here=self.arrows.leaving.get(row, ()))
        _, waited_ns, late_rank = self._wait(row)
        if late_rank >= 0:
            wait: tuple[Argument, ...] = (
                ("waits for", f"rank {late_rank}"),
                ("us", (waited_ns - begin_ns) / NS_PER_US),
            )
            yield Slice(begin_ns, waited_ns, "wait", wait)
            until_ns = int(self.arrows.transfer_ns[row]) + shift_ns
            arrow = (row + 1,) if self.arrows.arrives[row] else ()
            yield Slice(until_ns, end_ns, "transfer", (("us", (end_ns - until_ns) / NS_PER_US),), to_here=arrow)

    def _unfinished(self) -> Iterator[Slice]:
        """Yield operations that never ended."""
        table = self.trace.tables["collectives"]
        for rows in (table.select(~completed(table)), self.recorded.open_collectives):
            rows = self._rows(rows)
            begins = self.common_ns(rows["enter_ns"]).tolist()
            for begin_ns, op, size, step in zip(
                begins, rows["op"].tolist(), rows["bytes"].tolist(), rows["step"].tolist(), strict=True
            ):
                yield Slice(begin_ns, None, f"{op_name(op)}, never completed", (("bytes", size), ("step", step)))

    def _pacing(self) -> Iterator[Slice]:
        rows = self._rows(self.trace.tables["pacing"])
        begins = self.common_ns(rows["ready_ns"]).tolist()
        names = ("policy", "arm", "delay_ns", "slack_ns", "harm_ns")
        for begin_ns, policy, arm, delay_ns, slack_ns, harm_ns in zip(
            begins, *(rows[name].tolist() for name in names), strict=True
        ):
            arguments: tuple[Argument, ...] = (
                ("policy", _member(PacePolicy, policy)),
                ("arm", _member(PaceArm, arm)),
                ("slack us", slack_ns / NS_PER_US),
                ("harm us", harm_ns / NS_PER_US),
            )
            yield Slice(begin_ns, begin_ns + max(delay_ns, 0), "delay", arguments)

    def _pacing_delay(self) -> Iterator[Counter]:
        rows = self._rows(self.trace.tables["pacing"])
        if len(rows):
            times_ns = self.common_ns(rows["ready_ns"])
            order = np.argsort(times_ns, kind="stable")
            values = rows["delay_ns"][order] / NS_PER_US
            yield Counter(name="pacing delay", unit="us", time_ns=times_ns[order], values=values)

    def _clock_error(self) -> Iterator[Counter]:
        if self.trace.header.rank in self.shown.timed.unknown_clocks:
            return
        rows = self._rows(self.trace.tables["steps"])
        own_ns = np.sort(np.concatenate([rows["begin_ns"], rows["end_ns"]]))
        if len(own_ns):
            times = self.clock.to_reference(own_ns)
            yield Counter(name="clock error", unit="us", time_ns=times.time_ns, values=times.halfwidth_ns / NS_PER_US)


def phase_name(phase: int) -> str:
    """Return the name of a phase, or its number if it comes from a newer hpcpace."""
    if phase == Phase.IDLE:
        return "idle, waits for the host"
    return Phase(phase).name.lower() if phase in Phase._value2member_map_ else f"phase {phase}"


def _member(kind: type[PacePolicy] | type[PaceArm], value: int) -> str:
    return kind(value).name.lower() if value in kind._value2member_map_ else str(value)
