"""Gaps and damage of traces, found and in words: operations that never completed, lost and impossible rows.

A trace may have been cut off at any time, and its rows may be damaged: both are found while operations are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace

import numpy as np

from hpcpace.core.errors import TraceError
from hpcpace.core.records import dataclass
from hpcpace.core.text import format_duration, listed, named_ranks, plural, printable
from hpcpace.diagnosis.evidence import StepOperations, TimedTraces, rank_operations
from hpcpace.diagnosis.summary import ClockJump, Clocks, ClockSuspect, Incomplete, IncompleteRank
from hpcpace.metrics import Ints
from hpcpace.metrics.lost_operations import (
    LostOperations,
    OpenOperation,
    Records,
    lost_operations,
    open_operations,
    records_of,
)
from hpcpace.metrics.operations import RankOperations, gather_operations, select_rows
from hpcpace.metrics.plausibility import Contradiction, collectives_contradict
from hpcpace.trace.schema import NUMBER_BITS, ExitKind
from hpcpace.trace.stream import StoredTable, TooLarge, TraceStream
from hpcpace.trace.tables import RankTrace, Table, implausible, implausible_line, join_tables

HOST_TIMES = "not known: phases are host times of ranks with a device"
"""Why figures that rest on phases are left out where nobody recorded what the device did when."""
NO_PHASES = "not known: phases were not recorded (trace.detail)"
"""Why they are left out where collectives were recorded, and phases were not."""
MARK_STEPS = "call session.step() where a step ends (hpcpace help attach)"
"""What to do where a rank trained and no step was seen."""
_MAX_AGAINST = 4  # display: hosts that a sentence on a wrong clock names


def operation_number(seq: int) -> str:
    """Return the number of an operation in words: counted from a step, where its group was observed from there on."""
    first_step, number = divmod(seq, 1 << NUMBER_BITS)
    return f"{number} since step {first_step}" if first_step > 0 else str(seq)


def open_line(operation: OpenOperation, hosts: Mapping[int, str]) -> str:
    """Return one sentence on an operation that never completed or that failed."""
    number = operation_number(operation.seq)
    where = f"{operation.op} {number} of group '{printable(operation.group)}' in step {operation.step}"
    parts = [f"{named_ranks(operation.inside, hosts)} inside for {format_duration(operation.age_ns)}"]
    parts += [f"{named_ranks(operation.completed, hosts)} completed it"] if operation.completed else []
    parts += [f"no record of it from {named_ranks(operation.absent, hosts)}"] if operation.absent else []
    if operation.late:
        parts.append(f"{named_ranks(operation.late, hosts)} entered it when it had failed")
    if not operation.failed:
        return f"{where} never completed: {', '.join(parts)}"
    on = "" if operation.failed == operation.inside else f" on {named_ranks(operation.failed, hosts)}"
    return f"{where} failed{on}: {', '.join(parts)}"


def incomplete_rank_line(rank: IncompleteRank, hosts: Mapping[int, str]) -> str:
    """Return one sentence on a rank whose trace is missing, was not closed, or lacks records."""
    who = named_ranks((rank.rank,), hosts)
    count, steps = plural(rank.num_lost_operations, "operation"), plural(rank.num_lost_steps, "step")
    if not rank.has_trace:
        ended = f" and ended {steps}" if rank.num_lost_steps else ""
        entered = f"; it entered at least {count}{ended}, as other ranks show" if rank.num_lost_operations else ""
        return f"{who}: no trace{entered}"
    parts = ["no step recorded" if rank.last_step is None else f"last step recorded {rank.last_step}"]
    parts[0] += f", {format_duration(rank.gap_ns)} before the last trace ends" if rank.gap_ns else ""
    if rank.num_lost_operations:
        ended = f" and {steps} that it had ended" if rank.num_lost_steps else ""
        parts.append(f"lost at least {count} that it had entered{ended}, as other ranks show")
    parts += [f"its recorder dropped {plural(rank.num_dropped, 'record')}"] if rank.num_dropped else []
    return f"{who}: {'; '.join(parts)}"


def jump_line(jump: ClockJump) -> str:
    """Return one sentence on a clock that jumped."""
    host = " or ".join(printable(host) for host in jump.hosts)
    way = "forward" if jump.size_ns > 0 else "back"
    if len(jump.hosts) > 1:
        way = f"({printable(jump.hosts[0])} {way}, or the other one the other way)"
    when = f" in step {jump.step}" if jump.step >= 0 else ""
    size = format_duration(abs(jump.size_ns))
    return (
        f"the clock of {host} jumped {way} by {size}{when}: from the comparison of clocks before to the one after it, "
        "times of that host are wrong by up to as much; CLOCK_MONOTONIC jumps where a virtual machine is stopped or "
        "moved (dmesg, the hypervisor's log)"
    )


def suspect_line(clocks: Clocks) -> str:
    """Return one sentence on clocks that are proven wrong; empty if none is."""
    if not clocks.num_wrong:
        return ""
    num_more = clocks.num_suspects - len(clocks.suspects)
    names = [printable(suspect.host) for suspect in clocks.suspects] + ([f"{num_more} more"] if num_more else [])
    bounds_ns = [max(suspect.ahead_ns, suspect.behind_ns) for suspect in clocks.suspects]
    if clocks.num_wrong != clocks.num_suspects:
        return _undecided(clocks, names, f"by at least {format_duration(max(bounds_ns))}")
    bound = f"wrong by at least {format_duration(min(bounds_ns))}"
    if len(names) > 1:
        return (
            f"the clocks of {listed(names)} are {bound}: no smaller set explains what violates causality; times "
            "between them and others cannot be trusted"
        )
    suspect = clocks.suspects[0]
    is_short = suspect.num_against <= _MAX_AGAINST
    against = listed([printable(host) for host in suspect.against]) if is_short else f"{suspect.num_against} others"
    return (
        f"the clock of {names[0]} is {bound} against {against} ({_direction(suspect)}); times between {names[0]} and "
        "others cannot be trusted"
    )


def _undecided(clocks: Clocks, names: Sequence[str], bound: str) -> str:
    which = f"at least {clocks.num_wrong} of them are wrong; the traces do not show which"
    if clocks.num_suspects == 2:
        bound += f" ({names[0]} {_direction(clocks.suspects[0])})"
        which = "the traces do not show which one is wrong"
    return f"the clocks of {listed(names)} contradict each other {bound}; {which}; times between them cannot be trusted"


def _direction(suspect: ClockSuspect) -> str:
    if suspect.ahead_ns and suspect.behind_ns:
        return "sometimes ahead, sometimes behind"
    return "ahead" if suspect.ahead_ns else "behind"


_MAX_OPEN_SHOWN, _MAX_RANKS = 20, 10_000  # display: of operations and ranks in summary.json
_NOTHING = LostOperations(num_operations=0, step=-1)
_CHECKED_COLUMNS = {"op", "enter_ns", "exit_ns", "exit_kind"}


@dataclass(frozen=True, kw_only=True)
class Completed:
    """What completed operations reveal about what is missing; for a long run, it is joined from parts.

    Attributes:
        records: operations that ranks must have entered, as other ranks prove.
        end_ns: the last exit, on the common clock; 0 without any.
        opened: rows that never completed and are not in the traces at hand.
    """

    records: Records
    end_ns: int
    opened: Sequence[RankOperations] = ()


def find_incomplete(
    timed: TimedTraces, problems: Sequence[str], *, missing: Sequence[int], hosts: Mapping[int, str], done: Completed
) -> Incomplete:
    """Return what was missing or cut off.

    Args:
        timed: the readable traces and their clocks.
        problems: what could not be read.
        missing: the ranks without a readable trace.
        hosts: host names by rank, as far as they are known.
        done: what completed operations reveal.
    """
    missing = missing[:_MAX_RANKS]
    pairs = list(zip(timed.traces, timed.clocks, strict=True))
    # Those that were under way when a journal was last written, and those that never completed.
    inside = [rank_operations(trace, clock, trace.open_collectives) for trace, clock in pairs]
    opened = gather_operations(sorted([*inside, *done.opened], key=lambda part: part.rank))
    # When each rank's recording ended, at its last flush, on the common clock; none where it never flushed.
    ends_ns = {
        trace.header.rank: int(clock.to_reference(trace.tables["account"]["time_ns"]).time_ns.max())
        for trace, clock in pairs
        if len(trace.tables["account"])
    }
    end_ns = max([*ends_ns.values(), done.end_ns])
    closed = {trace.header.rank: trace.closed_cleanly for trace in timed.traces}
    first_step = max((trace.first_step for trace in timed.traces), default=0)
    first_steps = {
        trace.header.rank: int(trace.tables["steps"]["step"].min())
        for trace in timed.traces
        if len(trace.tables["steps"])
    }
    examined = closed | dict.fromkeys(missing, False)
    records = done.records
    if first_step:  # the first step that all ranks have kept: they drop their first ones chunk by chunk
        rows = select_rows(records.rows, np.flatnonzero(records.rows.step >= first_step))
        records = replace(records, rows=rows)
    lost = lost_operations(records, opened, examined, first_steps)
    last_ns = max((ns for rank, ns in ends_ns.items() if rank not in timed.unknown_clocks), default=0)
    gaps_ns = {rank: last_ns - ns for rank, ns in ends_ns.items() if rank not in timed.unknown_clocks}
    cut = [
        _incomplete_rank(rank, trace.header.host, trace, lost.get(rank, _NOTHING), gaps_ns.get(rank))
        for rank, trace in zip(timed.ranks, timed.traces, strict=True)
    ]
    cut = [rank for rank in cut if rank.num_lost_operations or rank.num_dropped or not closed[rank.rank]]
    cut += [_incomplete_rank(rank, hosts.get(rank, ""), None, lost.get(rank, _NOTHING), None) for rank in missing]
    cut.sort(key=lambda rank: (-rank.num_lost_operations, rank.rank))
    return Incomplete(
        problems=tuple(problems),
        not_closed=tuple(rank for rank, is_closed in closed.items() if not is_closed),
        num_open=len(opened),
        open=tuple(open_operations(opened, done.records.rows, end_ns=end_ns, ends_ns=ends_ns, limit=_MAX_OPEN_SHOWN)),
        ranks=tuple(cut[:_MAX_RANKS]),
    )


def completed_of(evidence: StepOperations) -> Completed:
    """Return what completed operations reveal about what is missing."""
    return Completed(
        records=records_of(evidence.operations, evidence.matching),
        end_ns=int(evidence.operations.exit_ns.max(initial=0)),
    )


def never_completed(evidence: StepOperations) -> list[RankOperations]:
    """Return the rows of operations that never completed or that failed, of each rank that has some."""
    parts = []
    for trace, clock in zip(evidence.traces, evidence.clocks, strict=True):
        table = trace.tables["collectives"]
        never = np.isin(table["exit_kind"], (ExitKind.NEVER, ExitKind.FAILED))
        if never.any():
            parts.append(rank_operations(trace, clock, table.select(never)))
    return parts


def held_up(operations: Sequence[OpenOperation], traces: Sequence[RankTrace]) -> list[OpenOperation]:
    """Return the operations that a rank may still have been in, or failed in, at its end.

    A rank that completed a later step was not held up: it caught the failure, or never waited for a message that it
    sent.

    Args:
        operations: that never completed or that failed.
        traces: of the ranks inside, and maybe others.
    """
    last_steps = {trace.header.rank: int(trace.tables["steps"]["step"].max(initial=-1)) for trace in traces}
    return [one for one in operations if any(last_steps.get(rank, -1) <= one.step for rank in one.inside)]


def _incomplete_rank(
    rank: int, host: str, trace: RankTrace | None, lost: LostOperations, gap_ns: int | None
) -> IncompleteRank:
    steps = np.asarray(trace.tables["steps"]["step"] if trace is not None else [], np.int64)
    num_steps = lost.step - 1 - int(steps.max(initial=-1))
    return IncompleteRank(
        rank=rank,
        host=host,
        has_trace=trace is not None,
        last_step=int(steps.max()) if len(steps) else None,
        gap_ns=gap_ns,
        num_lost_operations=lost.num_operations,
        num_lost_steps=max(num_steps if trace is not None else lost.step, 0),
        num_dropped=int(trace.tables["account"]["dropped"].sum()) if trace is not None else 0,
    )


@dataclass(kw_only=True)
class BlockFaults:
    """What is wrong with the rows of one block.

    Attributes:
        num_implausible: rows with impossible values.
        example: one of those.
        contradict: rows that contradict themselves, by how they do.
    """

    num_implausible: int = 0
    example: str = ""
    contradict: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True)
class SoundStream(TraceStream):
    """A stream without implausible rows, and without those of damaged chunks.

    Attributes:
        original: the trace that it streams.
        damaged: why blocks could not be read, by their number.
        faults: what is wrong with rows that were read, by the number of their block: some are read twice.
    """

    original: RankTrace
    damaged: dict[int, str] = field(default_factory=dict)
    faults: dict[int, BlockFaults] = field(default_factory=dict)

    @property
    def nothing(self) -> Table:
        """The table without rows."""
        return self.trace.tables["collectives"].select(slice(0))

    def blocks(self, first: int, stop: int, columns: Sequence[str] | None = None, lead: Table | None = None) -> Table:
        """Return the rows of some blocks as of `TraceStream`, without those that cannot be believed."""
        try:
            rows = super().blocks(first, stop, columns, lead)
        except TraceError as error:
            if stop - first > 1 and not isinstance(error, TooLarge):
                blocks = [self.blocks(number, number + 1, columns) for number in range(first, stop)]
                return join_tables([*([] if lead is None else [lead]), *blocks])
            self.damaged[first] = f"{error}; its rows are left out"
            return self.nothing if lead is None else lead
        if columns is not None and not set(columns) >= _CHECKED_COLUMNS:
            return rows
        return self._without_faults(rows, 0 if lead is None else len(lead), first)

    def _without_faults(self, rows: Table, num_lead: int, first: int) -> Table:
        """Return rows without the implausible ones, and note what is wrong with them and with others.

        Args:
            rows: rows of blocks behind some that were checked before.
            num_lead: number of those.
            first: the block of the first one behind those.
        """
        bad, example = implausible(rows, "collectives")
        for what, is_so in collectives_contradict(rows):
            if is_so.any():
                for faults in self._faults_of(np.flatnonzero(is_so), num_lead, first):
                    faults.contradict[what] += 1
        if not len(bad):
            return rows
        for faults in self._faults_of(np.flatnonzero(bad), num_lead, first):
            faults.num_implausible += 1
            faults.example = faults.example or example
        return rows.select(~bad)

    def _faults_of(self, rows: Ints, num_lead: int, first: int) -> list[BlockFaults]:
        """Return the faults of the block of each row behind the first `num_lead`."""
        numbers = self.blocks_of_rows(first, rows[rows >= num_lead] - num_lead).tolist()
        return [self.faults.setdefault(number, BlockFaults()) for number in numbers]


def sound_stream(trace: RankTrace) -> SoundStream:
    """Return the operations of a trace, be they in memory or on disk, as a stream."""
    table = trace.tables["collectives"]
    if isinstance(table, StoredTable):
        stream = table.stream
        return SoundStream(
            original=trace,
            trace=replace(trace, tables={**trace.tables, "collectives": stream.trace.tables["collectives"]}),
            chunks=stream.chunks,
            most_bytes=stream.most_bytes,
        )
    return SoundStream(original=trace, trace=trace, chunks=None)


def problems_of(stream: SoundStream) -> list[str]:
    """Return a sentence for each damaged block of a stream, and one on its implausible rows."""
    said = [stream.damaged[number] for number in sorted(stream.damaged)]
    num_implausible = sum(found.num_implausible for found in stream.faults.values())
    if num_implausible:
        examples = [stream.faults[number].example for number in sorted(stream.faults)]
        example = next(example for example in examples if example)
        path, num_rows = str(stream.trace.path), stream.num_collectives
        said.append(implausible_line(path, "collectives", num_implausible, num_rows, example))
    return said


def contradictions_of(stream: SoundStream) -> list[Contradiction]:
    """Return how rows of a stream contradict themselves."""
    total = sum((found.contradict for found in stream.faults.values()), Counter[str]())
    return [Contradiction("collectives", what, count, stream.num_collectives) for what, count in total.items()]
