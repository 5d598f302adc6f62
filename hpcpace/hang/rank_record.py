"""What the trace of one rank shows, on the common clock, and what is known of the rank from it as of any time."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.detail import Detail
from hpcpace.hang.last_operations import LastOperations
from hpcpace.hang.under_way import Finished, UnderWay, finished, under_way
from hpcpace.hang.views import Call, Channel, Doing, RankView
from hpcpace.metrics.common_clock import CommonClock, reference_times
from hpcpace.metrics.operations import op_name
from hpcpace.trace.ends import end_name, last_word
from hpcpace.trace.reader import is_torn
from hpcpace.trace.schema import EventKind, ExitKind, StepFlag
from hpcpace.trace.tables import RankTrace

ALWAYS_NS = np.iinfo(np.int64).max - 1
"""A time after all others."""

TOGETHER_NS = 2_000_000_000
"""Flushes of ranks that live are at most this far apart."""

_MOST_CALLS = 16
_USUAL_SILENCES = 3
# Times of operations are rounded, those of phases are not.
_ROUNDING_NS = 1000
_NEVER_NS = ALWAYS_NS + 1
# What a rank does wrong itself, such as a tensor of the wrong size, fails sooner, and was never under way.
_LEAST_WAIT_NS = 50_000_000

Int64s = NDArray[np.int64]


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
    switched_ns: Int64s
    levels: Int64s
    is_complete: bool

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
        """Return which operations were entered by a time, bool, (num_rows,)."""
        was_issued = ~self.has_failed | (self.exit_ns - self.enter_ns >= _LEAST_WAIT_NS)
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
    end_ns, end = _end(trace, clock, flushes_ns)
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
        switched_ns=reference_times(clock, events["time_ns"][is_switch]),
        levels=np.asarray(events["code"][is_switch], np.int64),
        is_complete=not (has_lost or last.is_damaged or len(order) < len(rows)),
    )


def _end(trace: RankTrace, clock: CommonClock, flushes_ns: Int64s) -> tuple[int | None, str]:
    """Return when and how a rank ended; None for one that did not, as far as is known."""
    row = last_word(trace)
    if row is not None:
        events = trace.tables["events"]
        end_ns = int(reference_times(clock, events["time_ns"][row : row + 1])[0])
        kind, code = EventKind(events["kind"][row]), int(events["code"][row])
        name = end_name(kind, code, bytes(events["text"][row]))
        return end_ns, f"exit code {name}" if kind is EventKind.EXIT else name
    if trace.closed_cleanly and len(flushes_ns):
        return int(flushes_ns[-1]), ""
    return None, ""


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
        doing=Doing.ENDED if has_ended else now.doing,
        doing_since_ns=(rank.end_ns if has_ended else now.since_ns) if rank.is_timed else None,
    )


def _calls(
    rank: RankRecord, is_entered: NDArray[np.bool_], is_open: NDArray[np.bool_], unfinished: Set[tuple[Channel, int]]
) -> tuple[Call, ...]:
    """Return the open operations of a rank, its own of those that others had not finished, and its last ones."""
    rows = np.flatnonzero(is_entered)
    is_shown = is_open.copy()
    is_shown[rows[-_MOST_CALLS:]] = True
    numbers = {number for _, number in unfinished}
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
        )
        for row in np.flatnonzero(is_shown).tolist()
    )
