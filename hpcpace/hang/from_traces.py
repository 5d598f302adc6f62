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

from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import NS_PER_S, own_frame, short_frame
from hpcpace.hang.notices import MAX_ASKED, Notice, ask_ranks, read_notices
from hpcpace.hang.rank_record import (
    ALWAYS_NS,
    TOGETHER_NS,
    LastOperations,
    RankRecord,
    add_missing_channels,
    rank_record,
    rank_view,
)
from hpcpace.hang.rules import find_hang
from hpcpace.hang.views import Call, Channel, Doing, FoundHang, GroupView, Hang, HangKind, JobView, RankView
from hpcpace.metrics.common_clock import CommonClock, rank_clocks, reference_times
from hpcpace.metrics.operations import ProcessGroup, groups_of
from hpcpace.trace.attempt_reader import read_attempt, world_size_of
from hpcpace.trace.reader import DEFAULT_MEMORY_BYTES, is_torn
from hpcpace.trace.schema import Phase
from hpcpace.trace.tables import MAX_NS, RankTrace


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
