"""The record of one rank from its trace, and what is known of the rank as of any time.

The last operations are read from the end of a trace, without the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.detail import Detail
from hpcpace.core.errors import TraceError
from hpcpace.core.records import dataclass
from hpcpace.core.text import short_frame
from hpcpace.hang.activity import Finished, UnderWay, finished, under_way
from hpcpace.hang.views import Call, Channel, Doing, RankView
from hpcpace.metrics.common_clock import CommonClock, reference_times
from hpcpace.metrics.operations import ProcessGroup, op_name
from hpcpace.trace.reader import is_torn
from hpcpace.trace.schema import EventKind, ExitKind, Op, StepFlag
from hpcpace.trace.stream import StoredTable
from hpcpace.trace.tables import (
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
