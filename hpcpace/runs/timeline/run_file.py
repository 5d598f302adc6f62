"""The timeline of a run for Perfetto: a process for each rank and each host's network.

A rank has its steps, phases, operations with their waits, pacing, and the error of its clock; a host has the counters
of its interfaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.files import target_folder, write_all
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.core.text import NS_PER_US, plural
from hpcpace.diagnosis.devices import is_on_device
from hpcpace.metrics.common_clock import reference_times
from hpcpace.metrics.flows import Flows, InterfaceUse, flows_of, interface_use
from hpcpace.metrics.operations import UNKNOWN_GROUP, completed, op_name
from hpcpace.metrics.topology import Topology, topology_of
from hpcpace.runs.timeline.tracks import (
    Argument,
    Counter,
    Process,
    Progress,
    ShownSteps,
    Slice,
    Track,
    Wanted,
    Written,
    check_perfetto,
    read_steps,
    shown_name,
    write_processes,
)
from hpcpace.trace.schema import PaceArm, PacePolicy, Phase, StepFlag
from hpcpace.trace.tables import RankTrace, Table

_MAX_CONNECTIONS = 8  # of a rank, those that carried most
_BITS = 8
_EVENTS = ("errors", "drops", "pauses", "marks")
_RATES = {"sent": "sent_bytes", "received": "received_bytes"}
Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Network:
    """The network counters of the steps, read once a second, so that each may cover several steps."""

    shown: ShownSteps

    @cached_property
    def _topology(self) -> Topology:
        headers = [trace.header for trace in self.shown.recorded]
        return topology_of(
            ranks=[header.rank for header in headers],
            nodes=[header.node for header in headers],
            hosts=[header.host for header in headers],
            addresses=[header.topology_addr for header in headers],
        )

    @cached_property
    def _use(self) -> InterfaceUse:
        return interface_use(self.shown.recorded, self.shown.timed.clocks, self._topology)

    @cached_property
    def _flows(self) -> Flows:
        return flows_of(self.shown.recorded, self.shown.timed.clocks, self._topology)

    def _near(self, begin_ns: Int64Array, end_ns: Int64Array) -> NDArray[np.bool_]:
        first_ns, last_ns = self.shown.span_ns
        return np.asarray((end_ns > first_ns) & (begin_ns < last_ns))

    def hosts(self, first_number: int) -> Iterator[Process]:
        """Yield a process for each host with interfaces, numbered from `first_number` on."""
        use = self._use
        near = self._near(use.begin_ns, use.end_ns)
        by_host: dict[str, list[Counter]] = {}
        for number, (host, name) in enumerate(use.names):
            rows = np.flatnonzero(near & (use.interface == number))
            if len(rows):
                by_host.setdefault(host, []).extend(_of_interface(use, rows, shown_name(name)))
        for number, (host, counters) in enumerate(by_host.items(), start=first_number):
            yield Process(name=f"network of {shown_name(host)}", number=number, counters=counters)

    def flows(self, rank: int) -> Iterator[Counter]:
        """Yield the counters of the connections of a rank to other hosts that carried most."""
        flows, ends = self._flows, self._flows.connections
        mine = np.flatnonzero(ends.rank == rank)
        if not len(mine):
            return
        near = self._near(flows.begin_ns, flows.end_ns) & np.isin(flows.connection, mine)
        carried = np.bincount(
            flows.connection[near], weights=(flows.acked_bytes + flows.received_bytes)[near], minlength=len(ends.rank)
        )
        for connection in sorted(mine.tolist(), key=lambda row: -carried[row])[:_MAX_CONNECTIONS]:
            rows = np.flatnonzero(near & (flows.connection == connection))
            if len(rows):
                peer = int(ends.peer_rank[connection])
                to = f"rank {peer}" if peer >= 0 else shown_name(ends.remote[connection])
                yield from _of_flow(flows, rows, f"to {to}")


def _of_interface(use: InterfaceUse, rows: Int64Array, name: str) -> Iterator[Counter]:
    times = use.begin_ns[rows], use.end_ns[rows]
    for what, column in _RATES.items():
        yield _counter(f"{name} {what}", "Gbit/s", *times, _gbps(getattr(use, column)[rows], *times))
    for event in _EVENTS:
        counts = getattr(use, event)[rows]
        if counts.any():
            yield _counter(f"{name} {event}", "count", *times, counts.astype(np.float64))


def _of_flow(flows: Flows, rows: Int64Array, name: str) -> Iterator[Counter]:
    times = flows.begin_ns[rows], flows.end_ns[rows]
    columns: Mapping[tuple[str, str], NDArray[np.float64]] = {
        ("acknowledged", "Gbit/s"): _gbps(flows.acked_bytes[rows], *times),
        ("round trip", "us"): flows.rtt_ns[rows] / NS_PER_US,
        ("sent again", "Gbit/s"): _gbps(flows.retransmitted_bytes[rows], *times),
        ("not yet sent", "bytes"): flows.unsent_bytes[rows].astype(np.float64),
    }
    for (what, unit), values in columns.items():
        if values.any():
            yield _counter(f"{name} {what}", unit, *times, values)


def _gbps(size_bytes: Int64Array, begin_ns: Int64Array, end_ns: Int64Array) -> NDArray[np.float64]:
    return np.asarray(_BITS * size_bytes / np.maximum(end_ns - begin_ns, 1))


def _counter(name: str, unit: str, begin_ns: Int64Array, end_ns: Int64Array, values: NDArray[np.float64]) -> Counter:
    """Return a counter that has each value over its interval, and 0 where there is none."""
    is_last = np.append(begin_ns[1:] > end_ns[:-1], True)
    times_ns = np.concatenate([begin_ns, end_ns[is_last]])
    order = np.argsort(times_ns, kind="stable")
    return Counter(
        name=name, unit=unit, time_ns=times_ns[order], values=np.append(values, np.zeros(int(is_last.sum())))[order]
    )


_MIN_ARROW_NS = 1_000


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
        least_ns = np.maximum(error_ns[ranks] + error_ns[ranks[of_partner]], _MIN_ARROW_NS)
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


class _RankProcess:
    """One rank of the steps.

    Attributes:
        row: of its trace.
        trace: its trace, on its device where that is known.
        recorded: the same with times of the host.
        name: its number and host.
    """

    def __init__(self, shown: ShownSteps, arrows: _Arrows, network: Network, row: int) -> None:
        self.shown, self.arrows, self.network, self.row = shown, arrows, network, row
        self.trace, self.recorded, self.clock = shown.timed.traces[row], shown.recorded[row], shown.timed.clocks[row]
        header = self.trace.header
        self.name = f"rank {header.rank} on {shown_name(header.host)}"
        self._shift_ns = shown.shift_ns.get(header.rank, 0)

    def common_ns(self, own_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return times of its clock on the common one."""
        return reference_times(self.clock, own_ns) + self._shift_ns

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

    def _values(self, rows: Table, times: Sequence[str], columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Yield for each row its times on the common clock, and its values in other columns."""
        values = [self.common_ns(rows[name]).tolist() for name in times] + [rows[name].tolist() for name in columns]
        return zip(*values, strict=True)

    def _steps(self) -> Iterator[Slice]:
        rows = self._rows(self.trace.tables["steps"])
        values = self._values(rows, ("begin_ns", "end_ns"), ("step", "samples", "flags"))
        for begin_ns, end_ns, step, samples, flags in values:
            names = [flag.name.lower() for flag in StepFlag if flag & flags and flag.name]
            arguments: list[Argument] = [(self.trace.header.samples_unit or "samples", samples)]
            yield Slice(begin_ns, end_ns, " ".join([f"step {step}", *names]), tuple(arguments))

    def _phases(self, trace: RankTrace) -> Iterator[Slice]:
        rows = self._rows(trace.tables["phases"])
        if not is_on_device(trace):
            rows = rows.select(rows["phase"] != Phase.IDLE)  # of its device
        values = self._values(rows, ("begin_ns", "end_ns"), ("phase", "step", "microbatch"))
        for begin_ns, end_ns, phase, step, batch in values:
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
            values = self._values(self._rows(rows), ("enter_ns",), ("op", "bytes", "step"))
            for begin_ns, op, size, step in values:
                yield Slice(begin_ns, None, f"{op_name(op)}, never completed", (("bytes", size), ("step", step)))

    def _pacing(self) -> Iterator[Slice]:
        rows = self._rows(self.trace.tables["pacing"])
        values = self._values(rows, ("ready_ns",), ("policy", "arm", "delay_ns", "slack_ns", "harm_ns"))
        for begin_ns, policy, arm, delay_ns, slack_ns, harm_ns in values:
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


@dataclass(frozen=True, kw_only=True)
class WrittenTimeline:
    """A timeline on disk, and what it shows."""

    path: Path
    shown: ShownSteps
    written: Written


def write_timeline(
    run: RunDirectory,
    attempt: Attempt,
    wanted: Wanted,
    *,
    target: Path | None,
    memory_bytes: int,
    begin_stage: Callable[[str], Progress],
) -> WrittenTimeline:
    """Write the timeline of some steps of an attempt.

    Args:
        run: the run, which gets the file where `target` names no other place.
        attempt: of the run.
        wanted: which steps of which ranks.
        target: the file; it is replaced.
        memory_bytes: memory for the tables of the run.
        begin_stage: takes the name of a stage that begins, and returns what is called as it advances.

    Raises:
        UsageError: the package perfetto is not installed, or there are no such steps or ranks.
        TraceError, CannotTell: as of `read_steps`.
        OSError: the file cannot be written.
    """
    check_perfetto()
    shown = read_steps(attempt, wanted, memory_bytes=memory_bytes, begin_stage=begin_stage)
    path = target or run.timeline_pftrace
    tell = begin_stage("writing")
    with run.open() if target is None else target_folder(path) as folder, folder.replacing(path.name) as descriptor:
        written = write_processes(
            processes_of(shown),
            lambda content, offset: write_all(descriptor, content, offset),
            progress=lambda done: tell(done, len(shown.ranks)),
        )
    return WrittenTimeline(path=path, shown=shown, written=written)
