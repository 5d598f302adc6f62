"""What the traces of a run show of a job that may hang, and whether it does.

Traces are read once, with their last operations only, and looked at as of a time: what a rank entered or finished later
does not count then. That matters after the end of a hang, when ranks run out of time, are woken up or killed. How long
an operation must last is the same for the report, `hpcpace hang` and `watch`.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence, Set
from dataclasses import field, replace

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.detail import Detail
from hpcpace.core.errors import TraceError
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import NS_PER_S, own_frame, short_frame
from hpcpace.hang.activity import Finished, UnderWay, finished, under_way
from hpcpace.hang.notices import MAX_ASKED, Notice, ask_ranks, read_notices
from hpcpace.hang.rules import find_hang
from hpcpace.hang.views import Call, Channel, Doing, FoundHang, GroupView, Hang, HangKind, JobView, RankView
from hpcpace.metrics.common_clock import CommonClock, rank_clocks, reference_times
from hpcpace.metrics.operations import ProcessGroup, groups_of, op_name
from hpcpace.trace.attempt_reader import read_attempt, world_size_of
from hpcpace.trace.reader import DEFAULT_MEMORY_BYTES, is_torn
from hpcpace.trace.schema import EventKind, ExitKind, Op, Phase, StepFlag
from hpcpace.trace.stream import StoredTable
from hpcpace.trace.tables import (
    MAX_NS,
    NO_ERROR_TEXT,
    ErrorText,
    RankTrace,
    Table,
    end_name,
    error_text,
    join_tables,
    last_word,
)

Int64s = NDArray[np.int64]

_COLUMNS = ("step", "group", "seq", "op", "bytes", "peer", "enter_ns", "exit_ns", "exit_kind")
_MIN_ROWS = 2048
_UNKNOWN = -1


class LastOperations:
    """The last operations of a rank, finished and open ones, read from the end of its trace without the rest.

    Args:
        trace: of the rank.
        group_of: index of each of its groups among those of the job, by its number in the trace.

    Attributes:
        rows: columns of the table `collectives`.
        channels: what `channel` indexes.
        channel: of each row, int64, (num_rows,); -1 where the trace does not name its group or its peer.
        is_damaged: whether rows before them cannot be read.
    """

    rows: Table
    channels: tuple[Channel, ...]
    channel: Int64s

    def __init__(self, trace: RankTrace, group_of: Mapping[int, int]) -> None:
        self.trace, self.rank, self.is_damaged = trace, trace.header.rank, False
        self._group_of = group_of
        table = trace.tables["collectives"]
        self._stream = table.stream if isinstance(table, StoredTable) else None
        self._first_block = 0 if self._stream is None else self._stream.num_blocks
        parts = [] if self._stream is not None else [_columns(table)]
        while sum(map(len, parts)) < _MIN_ROWS and (rows := self._block_before()) is not None:
            parts.insert(0, rows)
        self._take([*parts, _columns(trace.open_collectives)])

    @property
    def unfinished(self) -> set[Channel]:
        """The channels of operations that never finished, or that failed."""
        never = np.isin(self.rows["exit_kind"], (ExitKind.NEVER, ExitKind.FAILED)) & (self.channel != _UNKNOWN)
        return {self.channels[channel] for channel in np.unique(self.channel[never]).tolist()}

    def reach_back(self, missing: set[Channel]) -> None:
        """Add the last earlier operations of some channels that have none among them."""
        parts = [self.rows]
        while missing and (rows := self._block_before()) is not None:
            channels, channel = _channels(rows, self.rank, self._group_of)
            wanted = [index for index, one in enumerate(channels) if one in missing]
            parts.insert(0, rows.select(np.isin(channel, wanted)))
            missing = missing - set(channels)
        self._take(parts)

    def _block_before(self) -> Table | None:
        """Return the rows of the block before those that were read; None if there is none, or it is damaged."""
        if self._stream is None or not self._first_block or self.is_damaged:
            return None
        try:
            rows = self._stream.blocks(self._first_block - 1, self._first_block, _COLUMNS)
        except TraceError:
            self.is_damaged = True
            return None
        self._first_block -= 1
        return rows

    def _take(self, parts: Sequence[Table]) -> None:
        self.rows = join_tables(parts)
        self.channels, self.channel = _channels(self.rows, self.rank, self._group_of)


def add_missing_channels(found: Sequence[LastOperations], groups: Sequence[ProcessGroup]) -> None:
    """Add to the last operations of all ranks earlier ones of channels in which others have not finished.

    Of an operation that is rarely called, such as a barrier, the last one may be long ago; without it, it would not be
    known how many a rank has entered.
    """
    unfinished = {channel for one in found for channel in one.unfinished}
    for one in found:
        own = {
            channel
            for channel in unfinished
            if one.rank in (channel.source, channel.destination)
            or (channel.source == _UNKNOWN and one.rank in groups[channel.group].ranks)
        }
        if missing := own - set(one.channels):
            one.reach_back(missing)


def _columns(table: Table) -> Table:
    return Table({name: table[name] for name in _COLUMNS})


def _channels(rows: Table, rank: int, group_of: Mapping[int, int]) -> tuple[tuple[Channel, ...], Int64s]:
    """Return the channels of a rank's operations, and which one each row is of, -1 for none."""
    op, peer = np.asarray(rows["op"], np.int64), np.asarray(rows["peer"], np.int64)
    is_message = (op == Op.SEND) | (op == Op.RECV)
    keys = np.stack(
        [np.asarray(rows["group"], np.int64), np.where(is_message, op, _UNKNOWN), np.where(is_message, peer, _UNKNOWN)]
    )
    kinds, which = np.unique(keys, axis=1, return_inverse=True)
    channels: dict[Channel, int] = {}
    number = np.full(kinds.shape[1], _UNKNOWN, np.int64)
    for index, (own_group, kind, other) in enumerate(kinds.T.tolist()):
        group = group_of.get(own_group)
        if group is None or (kind != _UNKNOWN and other < 0):
            continue
        ends = {Op.SEND: (rank, other), Op.RECV: (other, rank)}.get(kind, (_UNKNOWN, _UNKNOWN))
        number[index] = channels.setdefault(Channel(group, *ends), len(channels))
    return tuple(channels), number[which.reshape(-1)]


ALWAYS_NS = np.iinfo(np.int64).max - 1
"""A time after all others."""

TOGETHER_NS = 2_000_000_000
"""Flushes of ranks that live are at most this far apart."""

_MAX_CALLS = 16
_USUAL_SILENCES = 3
# Times of operations are rounded, those of phases are not.
_ROUNDING_NS = 1000
_NEVER_NS = ALWAYS_NS + 1
_INTERRUPTS = ("KeyboardInterrupt", "SIGINT")
_SIGNALS = ("SIGTERM", "SIGABRT")
# What a rank does wrong itself, such as a tensor of the wrong size, fails sooner, and was never under way.
_MIN_WAIT_NS = 50_000_000


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """The record of one rank; times on the common clock, rows of operations in the order in which they were entered.

    Attributes:
        channels: what `channel` indexes.
        channel, seq, op, size_bytes, peer, step, enter_ns: of each operation, int64, (num_rows,).
        exit_ns: when it finished or failed; the largest number where it never did.
        has_failed: whether it failed then, bool, (num_rows,).
        flushes_ns: its signs of life, ascending.
        done: its steps and phases.
        is_timed: whether its times can be compared with those of others. All of its record counts at any time if not.
        end_ns: when it ended or closed its trace; None where it did neither.
        end: how it ended; empty where unknown.
        error: where the exception that ended it was raised, and its message; empty where unknown.
        ended_at: the line of its own code at which an exception or an abort met it; empty where unknown.
        interrupted_at: the frames in which an interrupt, SIGTERM or an abort met it, the innermost last; empty where
            none did.
        switched_ns, levels: when detail was switched, ascending, and to which level, int64, (num_switches,).
        is_complete: whether no operation of steps with detail is missing up to the last flush.
    """

    rank: int
    host: str
    host_key: str
    clock: CommonClock
    channels: tuple[Channel, ...]
    channel: Int64s
    seq: Int64s
    op: Int64s
    size_bytes: Int64s
    peer: Int64s
    step: Int64s
    enter_ns: Int64s
    exit_ns: Int64s
    has_failed: NDArray[np.bool_]
    flushes_ns: Int64s
    done: Finished
    is_timed: bool
    end_ns: int | None
    end: str
    error: str
    ended_at: str
    interrupted_at: tuple[str, ...]
    switched_ns: Int64s
    levels: Int64s
    is_complete: bool

    @property
    def is_interrupted(self) -> bool:
        """Whether a user ended it with Ctrl-C."""
        return self.is_timed and self.end in _INTERRUPTS

    @property
    def last_ns(self) -> int | None:
        """Its last sign of life; None without one that can be compared."""
        return int(self.flushes_ns[-1]) if len(self.flushes_ns) and self.is_timed else None

    @property
    def most_silent_ns(self) -> int:
        """How long it may be silent while it lives."""
        usual_ns = int(np.median(np.diff(self.flushes_ns))) if len(self.flushes_ns) > 1 else 0
        return max(TOGETHER_NS, _USUAL_SILENCES * usual_ns)

    def stirred_ns(self, at_ns: int, end: str) -> int | None:
        """Return when the rank woke up or ended because its job was being ended; None if it did neither.

        Args:
            at_ns: when others were in an operation for the last time.
            end: how these ended; what ends a job reaches all of its ranks, in any order.
        """
        if not self.is_timed:
            return None
        is_late = np.diff(self.flushes_ns, prepend=ALWAYS_NS) > self.most_silent_ns
        found = [*self.flushes_ns[is_late].tolist()]
        if end and self.end == end and self.end_ns is not None:
            found.append(self.end_ns)
        return min((ns for ns in found if at_ns - TOGETHER_NS <= ns <= at_ns), default=None)

    def observes(self, at_ns: int) -> bool:
        """Return whether it records its operations at a time, and not only its steps."""
        switched = np.flatnonzero(self.switched_ns <= at_ns)
        if len(switched):
            return int(self.levels[switched[-1]]) >= Detail.COLLECTIVES
        flags = self.done.step_flags[self.done.step_end_ns <= at_ns]
        return not (len(flags) and int(flags[-1]) & StepFlag.PLAIN)

    def is_entered(self, at_ns: int) -> NDArray[np.bool_]:
        """Return which operations were entered by a time, bool, (num_rows,): not those that failed at once before."""
        was_issued = ~self.has_failed | (self.exit_ns - self.enter_ns >= _MIN_WAIT_NS) | (self.exit_ns > at_ns)
        return was_issued & (self.enter_ns <= at_ns)

    def is_open(self, at_ns: int) -> NDArray[np.bool_]:
        """Return which operations had not finished by a time, bool, (num_rows,).

        One that failed counts as open, for it never did its work. A rank that completed a later step was not held up:
        it caught the failure, or never waited for a message that it sent.
        """
        is_unfinished = self.has_failed | (self.exit_ns > at_ns)
        return self.is_entered(at_ns) & is_unfinished & (self.step >= self.done.last_step(at_ns))

    def calls_of(self, rows: NDArray[np.bool_]) -> set[tuple[Channel, int]]:
        """Return channel and number of the operations of some rows."""
        pairs = zip(self.channel[rows].tolist(), self.seq[rows].tolist(), strict=True)
        return {(self.channels[channel], seq) for channel, seq in pairs}


def rank_record(last: LastOperations, clock: CommonClock, *, is_timed: bool) -> RankRecord:
    """Return the record of a rank.

    Args:
        last: its last operations.
        clock: its clock.
        is_timed: whether that can be compared with those of others.
    """
    trace, rows = last.trace, last.rows
    order = np.argsort(rows["enter_ns"], kind="stable")
    order = order[last.channel[order] >= 0]
    exit_kind = rows["exit_kind"][order]
    exit_ns = reference_times(clock, rows["exit_ns"][order])
    tables = trace.tables
    step_ns, phase_ns = (
        (reference_times(clock, tables[name]["begin_ns"]), reference_times(clock, tables[name]["end_ns"]))
        for name in ("steps", "phases")
    )
    flushes_ns = np.sort(reference_times(clock, tables["account"]["time_ns"]))
    end_ns, end, error = _end(trace, clock, flushes_ns)
    events = tables["events"]
    is_switch = events["kind"] == EventKind.SWITCH
    has_lost = bool(tables["account"]["dropped"].any()) or not all(map(is_torn, trace.problems))
    return RankRecord(
        rank=trace.header.rank,
        host=trace.header.host,
        host_key=trace.header.host_key,
        clock=clock,
        channels=last.channels,
        channel=last.channel[order],
        seq=np.asarray(rows["seq"][order], np.int64),
        op=np.asarray(rows["op"][order], np.int64),
        size_bytes=np.asarray(rows["bytes"][order], np.int64),
        peer=np.asarray(rows["peer"][order], np.int64),
        step=np.asarray(rows["step"][order], np.int64),
        enter_ns=reference_times(clock, rows["enter_ns"][order]),
        exit_ns=np.where(exit_kind == ExitKind.NEVER, _NEVER_NS, exit_ns),
        has_failed=exit_kind == ExitKind.FAILED,
        flushes_ns=flushes_ns,
        done=finished(tables["steps"], tables["phases"], step_ns, phase_ns),
        is_timed=is_timed,
        end_ns=end_ns,
        end=end,
        error=error.sentence,
        ended_at=short_frame(error.place),
        interrupted_at=error.frames if end in (*_INTERRUPTS, *_SIGNALS) else (),
        switched_ns=reference_times(clock, events["time_ns"][is_switch]),
        levels=np.asarray(events["code"][is_switch], np.int64),
        is_complete=not (has_lost or last.is_damaged or len(order) < len(rows)),
    )


def _end(trace: RankTrace, clock: CommonClock, flushes_ns: Int64s) -> tuple[int | None, str, ErrorText]:
    """Return when and how a rank ended, None for one that did not, as far as is known, and what its error says."""
    row = last_word(trace)
    if row is not None:
        events = trace.tables["events"]
        end_ns = int(reference_times(clock, events["time_ns"][row : row + 1])[0])
        kind, code = EventKind(events["kind"][row]), int(events["code"][row])
        name = end_name(kind, code, bytes(events["text"][row]))
        return end_ns, f"exit code {name}" if kind is EventKind.EXIT else name, error_text(trace, row)
    if trace.closed_cleanly and len(flushes_ns):
        return int(flushes_ns[-1]), "", NO_ERROR_TEXT
    return None, "", NO_ERROR_TEXT


def rank_view(rank: RankRecord, at_ns: int, unfinished: Set[tuple[Channel, int]]) -> RankView:
    """Return what is known of a rank as of a time; `unfinished` are operations that some ranks had not finished."""
    until_ns = at_ns if rank.is_timed else ALWAYS_NS
    is_entered, is_open = rank.is_entered(until_ns), rank.is_open(until_ns)
    counts = np.full(len(rank.channels), -1, np.int64)
    np.maximum.at(counts, rank.channel[is_entered], rank.seq[is_entered] + 1)
    left_ns = rank.exit_ns[is_entered & ~is_open]
    now = under_way(rank.done, until_ns, last_exit_ns=int(left_ns.max()) if len(left_ns) else None)
    inside_ns = int(rank.enter_ns[is_open].max(initial=-ALWAYS_NS))
    if is_open.any() and (now.since_ns is None or inside_ns + _ROUNDING_NS >= now.since_ns):
        now = UnderWay(Doing.COMMUNICATING, inside_ns)
    seen_ns = rank.flushes_ns[rank.flushes_ns <= until_ns]
    has_ended = rank.end_ns is not None and rank.end_ns <= until_ns
    is_alive = rank.is_timed and len(seen_ns) > 0 and int(seen_ns[-1]) >= at_ns - rank.most_silent_ns
    return RankView(
        rank=rank.rank,
        host=rank.host,
        entered={channel: count for channel, count in zip(rank.channels, counts.tolist(), strict=True) if count >= 0},
        calls=_calls(rank, is_entered, is_open, unfinished),
        is_complete=rank.is_complete and rank.observes(until_ns),
        seen_ns=int(seen_ns[-1]) if len(seen_ns) and rank.is_timed else None,
        is_gone=True if has_ended else False if is_alive else None,
        end=rank.end if has_ended else "",
        error=rank.error if has_ended else "",
        doing=Doing.ENDED if has_ended else now.doing,
        is_guess=now.is_guess and not has_ended,
        after=now.after,
        doing_since_ns=(rank.end_ns if has_ended else now.since_ns) if rank.is_timed else None,
        stack=() if has_ended or is_open.any() else rank.interrupted_at,
    )


def _calls(
    rank: RankRecord, is_entered: NDArray[np.bool_], is_open: NDArray[np.bool_], unfinished: Set[tuple[Channel, int]]
) -> tuple[Call, ...]:
    """Return the open operations of a rank, its own of those that others had not finished, and its last ones."""
    rows = np.flatnonzero(is_entered)
    is_shown = is_open.copy()
    is_shown[rows[-_MAX_CALLS:]] = True
    numbers = {number for _, number in unfinished}
    # Of several, it is not known in which one it was.
    where = rank.ended_at if is_open.sum() == 1 else ""
    for row in rows[np.isin(rank.seq[rows], list(numbers))].tolist():
        is_shown[row] |= (rank.channels[rank.channel[row]], int(rank.seq[row])) in unfinished
    return tuple(
        Call(
            channel=rank.channels[rank.channel[row]],
            seq=int(rank.seq[row]),
            op=op_name(int(rank.op[row])),
            size_bytes=int(rank.size_bytes[row]),
            root=int(rank.peer[row]),
            entered_ns=int(rank.enter_ns[row]) if rank.is_timed else None,
            is_open=bool(is_open[row]),
            step=int(rank.step[row]),
            where=where if is_open[row] else "",
        )
        for row in np.flatnonzero(is_shown).tolist()
    )


def with_notice(view: RankView, notice: Notice, clock: CommonClock, at_ns: int) -> RankView:
    """Return what is known of a rank with the stack of its training thread, and what it does.

    Args:
        view: from its trace, as of `at_ns`.
        notice: what it wrote; it counts from its first look until its step has ended.
        clock: that of the rank, with which the notice was written, too.
        at_ns: time of the look at the job.
    """
    times_ns = (notice.first_time_ns, notice.ended_ns, notice.doing_since_ns)
    if view.is_gone or max(map(abs, times_ns)) > MAX_NS:
        return view
    first_ns, ended_ns, since_ns = reference_times(clock, np.array(times_ns, np.int64)).tolist()
    if first_ns > at_ns or (notice.ended and ended_ns <= at_ns):
        return view
    view = replace(view, stack=notice.stack, calls=_located(view.calls, notice.stack))
    if notice.doing is Doing.UNKNOWN:
        return view
    if notice.doing_since_ns <= 0 or since_ns > at_ns:
        # In no phase that is observed: it computes, or sleeps, in code of its own.
        return replace(view, doing=notice.doing, is_guess=notice.doing is Doing.COMPUTING)
    return replace(view, doing=notice.doing, doing_since_ns=since_ns, is_guess=False)


def _located(calls: tuple[Call, ...], stack: tuple[str, ...]) -> tuple[Call, ...]:
    """Return the calls of a rank; where a single one is open, with the line at which the rank is in it."""
    if not stack or sum(call.is_open for call in calls) != 1:
        return calls
    where = short_frame(own_frame(stack))
    return tuple(replace(call, where=where) if call.is_open else call for call in calls)


TABLES_USED = frozenset(("steps", "phases", "collectives", "groups", "clock", "account", "events"))
"""The tables of a trace that this needs."""

_MAX_RANKS = 1 << 17


@dataclass(frozen=True, kw_only=True)
class JobRecords:
    """The records of all ranks of a job, to be looked at as of any time.

    Attributes:
        groups: its process groups.
        ranks: the ranks with a record, ascending.
        world_size: number of ranks.
        hosts: host names by rank, as far as they are known.
        notices: what ranks wrote of a step that lasts too long.
        problems: what could not be read.
    """

    groups: tuple[ProcessGroup, ...]
    ranks: Sequence[RankRecord]
    world_size: int
    hosts: Mapping[int, str]
    notices: Mapping[int, Notice] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks without a record, ascending."""
        known = {rank.rank for rank in self.ranks}
        return tuple(rank for rank in range(min(self.world_size, _MAX_RANKS)) if rank not in known)

    @property
    def last_ns(self) -> int:
        """The last sign of life of any rank, on the common clock; 0 without any."""
        return max((rank.last_ns for rank in self.ranks if rank.last_ns is not None), default=0)

    def usual_step_ns(self, at_ns: int) -> int | None:
        """Return the median time of the steps that had ended by a time; None without one."""
        times_ns = [rank.done.step_times_ns[rank.done.step_end_ns <= at_ns] for rank in self.ranks]
        joined = np.concatenate([np.zeros(0, np.int64), *times_ns])
        return int(np.median(joined)) if len(joined) else None

    def usual_ns(self, at_ns: int) -> dict[Doing, int]:
        """Return the median length of the checkpoints and evaluations that had ended by a time."""
        lengths = {
            doing: np.concatenate(
                [np.zeros(0, np.int64), *(rank.done.times_of_ns(phase, at_ns) for rank in self.ranks)]
            )
            for phase, doing in ((Phase.CHECKPOINT, Doing.SAVING), (Phase.EVAL, Doing.EVALUATING))
        }
        return {doing: int(np.median(times_ns)) for doing, times_ns in lengths.items() if len(times_ns)}

    def moments_ns(self) -> list[int]:
        """Return the times at which a hang may have lasted longest, ascending: before what ended it could hide it.

        That is the last sign of life of each rank that is in an operation to the end, before the rank ends by itself,
        and the time of its first failure. When a job is ended, ranks that were stopped may wake up, and finish what the
        others were killed in; where they woke up or ended a little before the others, the time before that comes first.
        A user's interrupt ends a rank that waits in an operation only when that fails, because another one has gone:
        what a rank does that it ends first is what it did before.
        """
        found = []
        ends = [(rank.end_ns, rank.is_interrupted) for rank in self.ranks if rank.end_ns is not None and rank.is_timed]
        first_end_ns, is_interrupted = min(ends, default=(0, False))
        if is_interrupted:
            found.append((first_end_ns - 1, ""))
        for rank in self.ranks:
            failed_ns = rank.exit_ns[rank.is_open(ALWAYS_NS) & rank.has_failed]
            if rank.last_ns is None:
                continue
            if len(failed_ns):
                found.append((int(failed_ns.min()) - 1, rank.end))
            elif rank.is_open(rank.last_ns).any():
                found.append((rank.last_ns if rank.end_ns is None else min(rank.end_ns - 1, rank.last_ns), rank.end))
        moments: list[int] = []
        for at_ns, end in sorted(found):
            if not moments or at_ns > moments[-1] + TOGETHER_NS:
                stirred_ns = [ns for rank in self.ranks if (ns := rank.stirred_ns(at_ns, end)) is not None]
                moments += [*([min(stirred_ns) - 1] if stirred_ns else []), at_ns]
        return moments

    def view(self, at_ns: int | None = None, *, later_ns: Mapping[int, int] | None = None) -> JobView:
        """Return what is known of the job as of a time on the common clock, by default that of the last record.

        Args:
            at_ns: that time.
            later_ns: by rank, a later time at which to look at that rank.
        """
        at_ns = self.last_ns if at_ns is None else at_ns
        later_ns = later_ns or {}
        unfinished: set[tuple[Channel, int]] = set()
        for rank in self.ranks:
            unfinished |= rank.calls_of(rank.is_open(at_ns if rank.is_timed else ALWAYS_NS))
        ranks = {
            number: RankView(rank=number, host=self.hosts.get(number, ""), is_recorded=False)
            for number in range(min(self.world_size, _MAX_RANKS))
        }
        return JobView(
            groups=tuple(GroupView(name=group.name, members=group.ranks) for group in self.groups),
            ranks=ranks
            | {rank.rank: self._rank_view(rank, later_ns.get(rank.rank, at_ns), unfinished) for rank in self.ranks},
            now_ns=at_ns,
            usual_step_ns=self.usual_step_ns(at_ns),
            usual_ns=self.usual_ns(at_ns),
        )

    def calls_after(self, at_ns: int, channel: Channel, seq: int) -> dict[int, int]:
        """Return when ranks called an operation that they call only after a time, on the common clock, by rank."""
        found: dict[int, int] = {}
        for rank in self.ranks:
            if rank.is_timed and channel in rank.channels:
                is_it = (rank.channel == rank.channels.index(channel)) & (rank.seq == seq) & (rank.enter_ns > at_ns)
                if is_it.any():
                    found[rank.rank] = int(rank.enter_ns[is_it][0])
        return found

    def _rank_view(self, rank: RankRecord, at_ns: int, unfinished: Set[tuple[Channel, int]]) -> RankView:
        view, notice = rank_view(rank, at_ns, unfinished), self.notices.get(rank.rank)
        if notice is None or notice.host_key != rank.host_key or not rank.is_timed:
            return view
        return with_notice(view, notice, rank.clock, at_ns)


def read_records(
    attempt: Attempt, *, hosts: Mapping[int, str] | None = None, memory_bytes: int = DEFAULT_MEMORY_BYTES
) -> JobRecords:
    """Read what the traces and notices of an attempt show of its ranks.

    Args:
        attempt: names the files.
        hosts: host names of ranks without a trace, as far as they are known.
        memory_bytes: memory for the tables.

    Raises:
        TraceError: no trace can be read.
    """
    found = read_attempt(attempt, most_rows=0, tables=TABLES_USED, memory_bytes=memory_bytes)
    world_size = world_size_of(found.traces)
    problems = [problem for problem in found.problems if not is_torn(problem)]
    notices = read_notices(attempt, problems)
    return replace(
        records_of(found.traces, world_size=world_size, hosts=hosts, notices=notices), problems=tuple(problems)
    )


def records_of(
    traces: Sequence[RankTrace],
    *,
    world_size: int,
    hosts: Mapping[int, str] | None = None,
    notices: Mapping[int, Notice] | None = None,
) -> JobRecords:
    """Return what traces of one attempt show.

    Args:
        traces: ascending by rank, at least one; their operations may be on disk.
        world_size: number of ranks of the job.
        hosts: host names of ranks without a trace, as far as they are known.
        notices: what ranks wrote of a step that lasts too long.
    """
    clocks, unknown = rank_clocks(traces)
    named = [groups_of(trace.tables["groups"]) for trace in traces]
    num_ranks = min(world_size, _MAX_RANKS)
    found = {group for table in named for group in table.values()}
    groups = tuple(sorted(group for group in found if group.ranks[-1] < num_ranks))  # members are ascending
    number = {group: index for index, group in enumerate(groups)}
    last = [
        LastOperations(trace, {own: number[group] for own, group in table.items() if group in number})
        for trace, table in zip(traces, named, strict=True)
    ]
    add_missing_channels(last, groups)
    ranks = [
        rank_record(of_rank, clock, is_timed=of_rank.rank not in unknown)
        for of_rank, clock in zip(last, clocks, strict=True)
    ]
    known = {**(hosts or {}), **{trace.header.rank: trace.header.host for trace in traces}}
    return JobRecords(groups=groups, ranks=ranks, world_size=world_size, hosts=known, notices=notices or {})


def with_answers(found: FoundHang, records: JobRecords, attempt: Attempt) -> FoundHang:
    """Return a hang with the stacks of the ranks that it names, and of one that waits, as far as they answer."""
    named = found.hang.culprits or found.hang.could_be
    asked = [*named[: MAX_ASKED - 1], *[rank for rank in found.hang.waiting if rank not in named][:1]]
    clocks = {rank.rank: rank.clock for rank in records.ranks if rank.is_timed}
    views = dict(found.job.ranks)
    for rank, notice in ask_ranks(attempt, [rank for rank in asked if rank in clocks]).items():
        if _is_where_it_was(views[rank], notice, found.job):
            # It speaks of the step in which it is, and not from when it was asked.
            answer = replace(notice, first_time_ns=notice.time_ns - notice.step_age_ns)
            views[rank] = with_notice(views[rank], answer, clocks[rank], found.job.now_ns)
    job = replace(found.job, ranks=views)
    return FoundHang(hang=find_hang(job) or found.hang, job=job)


def _is_where_it_was(view: RankView, notice: Notice, job: JobView) -> bool:
    """Return whether a rank has called no collective since its record ended."""
    entered: Mapping[str, int] = {
        job.groups[channel.group].name: count for channel, count in view.entered.items() if channel.source < 0
    }
    return all(
        entered.get(count.group, count.num_entered) == count.num_entered for count in notice.entered if count.source < 0
    )


USUAL_STEPS = 20
"""Usual steps that an operation must last before the job hangs."""

FIRST_STEP_S = 120.0
"""Seconds that it must last before the first step has ended, or in the first checkpoint or evaluation of a rank."""

USUAL_LENGTHS = 5
"""Usual lengths of a checkpoint or an evaluation that one may last."""

_WRONG_CALLS = frozenset((HangKind.MISMATCH, HangKind.TOO_MANY, HangKind.TOO_FEW))
_ABORTED = signal.Signals.SIGABRT.name
_LONG = frozenset((Doing.SAVING, Doing.EVALUATING))
_ALL_INSIDE = frozenset((HangKind.NETWORK, HangKind.PEERS_LEFT))


def hang_in(records: JobRecords, *, hang_s: float) -> FoundHang | None:
    """Return the hang that traces show, with what was known of the job then; None where it did not hang.

    Args:
        records: of all ranks.
        hang_s: seconds that an operation must last.
    """
    for at_ns in records.moments_ns():
        job = records.view(at_ns)
        if (hang := hang_now(job, hang_s=hang_s)) is not None:
            return FoundHang(hang=hang, job=job)
        if (broken_off := _broken_off(job, records)) is not None:
            return broken_off
    return None


def _broken_off(job: JobView, records: JobRecords) -> FoundHang | None:
    """Return wrong calls for which a rank ended at once, as gloo aborts it; they are wrong however short it lasted.

    Where ranks called the same operation only after that, what they called tells as well which call is the odd one.
    """
    hang = find_hang(job)
    if hang is None or hang.kind not in _WRONG_CALLS or hang.call is None:
        return None
    aborted = [job.ranks[rank.rank] for rank in records.ranks if rank.end == _ABORTED]
    if not any(call.channel == hang.call.channel and call.is_open for view in aborted for call in view.calls):
        return None
    if not hang.culprits:
        job = records.view(job.now_ns, later_ns=records.calls_after(job.now_ns, hang.call.channel, hang.call.seq))
        hang = find_hang(job) or hang
    return FoundHang(hang=hang, job=job)


def hang_now(job: JobView, *, hang_s: float) -> Hang | None:
    """Return what holds a job up at the time of a view; None if nothing does, or not for long enough."""
    most_ns = hang_limit_ns(job.usual_step_ns, hang_s=hang_s)
    hang = find_hang(job, least_ns=most_ns)
    return None if hang is None or _may_have_moved(hang, job, most_ns) or _may_last(hang, job) else hang


def hang_limit_ns(usual_step_ns: float | None, *, hang_s: float) -> int:
    """Return how long an operation must be open for a job to hang; None stands for no usual step yet."""
    if usual_step_ns is None:
        return round(max(hang_s, FIRST_STEP_S) * NS_PER_S)
    return round(max(hang_s * NS_PER_S, USUAL_STEPS * usual_step_ns))


def _may_have_moved(hang: Hang, job: JobView, most_ns: int) -> bool:
    """Return whether a rank that lives was last seen too soon after the hang began.

    Where all are inside an operation, that is when the last one came, until when the others waited for that one.
    """
    views = [job.ranks[rank] for rank in hang.culprits or hang.could_be or hang.waiting]
    since_ns = hang.since_ns
    if hang.kind in _ALL_INSIDE and hang.call is not None:
        place = (hang.call.channel, hang.call.seq)
        calls = (call for view in job.ranks.values() for call in view.calls if (call.channel, call.seq) == place)
        since_ns = max((call.entered_ns for call in calls if call.entered_ns is not None), default=None)
    if since_ns is None:
        return False
    return any(
        view.is_gone is False and view.seen_ns is not None and view.seen_ns - since_ns < most_ns for view in views
    )


def _may_last(hang: Hang, job: JobView) -> bool:
    """Return whether a rank that others wait for saves or evaluates, and not for much longer than it usually does."""
    for rank in hang.culprits or hang.could_be:
        view = job.ranks[rank]
        if view.doing in _LONG and view.doing_since_ns is not None:
            usual_ns = job.usual_ns.get(view.doing)
            most_ns = FIRST_STEP_S * NS_PER_S if usual_ns is None else USUAL_LENGTHS * usual_ns
            if job.now_ns - view.doing_since_ns < most_ns:
                return True
    return False
