"""A run that hangs, or that ends before its time, from the events, operations and flushes of its ranks.

When one rank ends, operations of the others fail, and a launcher ends the rest: the first event on the common clock is
the cause, and the rest follows from it. A rank that was killed leaves no event, only its last sign of life.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, format_duration, named_ranks, plural, printable, shortened
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.evidence import TimedTraces
from hpcpace.diagnosis.finding import (
    MAX_NAMED,
    MAX_RANKS,
    Case,
    DiagnosisFinding,
    Evidence,
    FindingWords,
    Said,
    rank_culprit,
)
from hpcpace.diagnosis.stops import unix_ns
from hpcpace.diagnosis.summary import EndKind, Incomplete, Mode, RankEnd, RunEnd
from hpcpace.metrics.common_clock import reference_times
from hpcpace.metrics.lost_operations import OpenOperation
from hpcpace.metrics.operations import RankOperations, op_name
from hpcpace.trace.schema import ErrorCode, EventKind, ExitKind
from hpcpace.trace.tables import (
    NO_ERROR_TEXT,
    STOPPED_FOR_HANG,
    ErrorText,
    end_name,
    error_text,
    last_word,
    stderr_file,
)

if TYPE_CHECKING:
    from hpcpace.hang.views import Call, FoundHang, JobView


@dataclass(frozen=True, kw_only=True)
class HangEvidence(Evidence):
    """An operation that does not end.

    Attributes:
        found: the ranks that hold up others, and what was known of the job then.
        op: name of the operation; empty where nobody waits in one.
        age_ns: from the first enter to the time for which the hang was found: the last sign of life of the ranks
            inside, or just before the operation failed on the first one.
        step: in which it was entered; -1 where unknown.
        inside: how many ranks wait inside then.
        absent: how many members have not entered it by then.
        completed: how many ranks have completed it by then.
        failed: on how many of those inside it failed in the end, such as by a timeout.
        late: how many ranks entered it after it had failed on others.
        late_ranks: which ones.
    """

    mode: ClassVar[str] = Mode.HANG
    precedence: ClassVar[int] = 1
    needs_no_others: ClassVar[bool] = True
    found: FoundHang
    op: str
    age_ns: int
    step: int
    inside: int
    absent: int
    completed: int
    failed: int = 0
    late: int = 0
    late_ranks: tuple[int, ...] = ()

    @property
    def variety(self) -> str:
        """The operation."""
        return self.op

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        from hpcpace.hang.verdict import describe

        words = describe(self.found.hang, self.found.job)
        late = named_ranks(self.late_ranks[:MAX_RANKS], said.hosts)
        came = [f"{late} entered it only when it had failed on the others"] if self.late_ranks else []
        first, *more = (*came, *words.why) or ("no rank is known to wait",)
        return FindingWords(headline=words.headline, why=first, next=words.advice, more=tuple(more))


def find_hanging(case: Case) -> list[DiagnosisFinding]:
    """Return the finding on a hang; nothing without one."""
    if case.hang is None:
        return []
    ranks = case.hang.hang.culprits
    return [
        DiagnosisFinding(
            evidence=_evidence(case.hang, case.opened),
            loss_share=1.0,
            confidence=0.99,
            culprits=tuple(rank_culprit(rank, 1.0, (1.0, 1.0), case.panels) for rank in ranks),
        )
    ]


def members_of(call: Call, job: JobView) -> tuple[int, ...]:
    """Return the ranks that an operation has: those of its group, or the two of a message."""
    channel = call.channel
    return job.groups[channel.group].members if channel.source < 0 else (channel.source, channel.destination)


def _evidence(found: FoundHang, opened: Sequence[OpenOperation]) -> HangEvidence:
    hang, job, call = found.hang, found.job, found.hang.call
    age_ns = 0 if hang.since_ns is None else job.now_ns - hang.since_ns
    if call is None:
        return HangEvidence(found=found, op="", age_ns=age_ns, step=-1, inside=0, absent=0, completed=0)
    place = (call.channel, call.seq)
    members = members_of(call, job)
    calls = {rank: one for rank in members for one in job.ranks[rank].calls if (one.channel, one.seq) == place}
    inside = {rank for rank, one in calls.items() if one.is_open}
    entered = {rank for rank in members if job.ranks[rank].entered.get(call.channel, 0) > call.seq}
    of_same = [one for one in opened if (one.op, one.seq) == (call.op, call.seq) and inside & set(one.inside)]
    late = max((one.late for one in of_same), key=len, default=())
    return HangEvidence(
        found=found,
        op=call.op,
        age_ns=age_ns,
        step=call.step,
        inside=len(inside),
        absent=len(members) - len(entered | inside),
        completed=len(entered - inside),
        failed=max((len(one.failed) for one in of_same), default=0),
        late=len(late),
        late_ranks=late,
    )


_KINDS = {EventKind.EXCEPTION: EndKind.EXCEPTION, EventKind.EXIT: EndKind.EXIT, EventKind.SIGNAL: EndKind.SIGNAL}
_EXPLAINED = (EndKind.EXCEPTION, EndKind.EXIT, EndKind.HANG)
_OF_SIGINT = b"KeyboardInterrupt"  # format: what Python makes of the signal, which therefore no rank raises by itself
_OF_USERS = frozenset({signal.SIGINT, signal.SIGTERM})  # format: launchers pass Ctrl-C on as SIGTERM
_ROUNDING_NS = 1000  # format: times of operations are rounded, those of events are not
_FOREVER_NS = 1 << 62  # format: later than any time
_MAX_SAID = 160  # display: two lines of a terminal
_MAX_PLACES = 4  # display: the ones nearest to the error
_MAX_STDERR = 3  # display: last lines of stderr


@dataclass(frozen=True, kw_only=True)
class RunEndThresholds(Thresholds, topic="run_end"):
    """Which ends of ranks belong together."""

    flush_ns: int = number(1_500_000_000, "ns")
    """Time that a rank may live on after its trace ends: rows reach the disk once a second."""
    together_ns: int = number(2_000_000_000, "ns")
    """Time within which a signal to a whole job reaches all of its ranks."""
    least_wait_ns: int = number(50_000_000, "ns")
    """Duration from which a failed operation waited for others: a rank's own error, such as a tensor of the wrong size,
    fails sooner."""


@dataclass(frozen=True, kw_only=True)
class EndEvidence(Evidence):
    """A run that ended before its time.

    Attributes:
        end: what ended it.
        step: the step that was running.
        waiting: how many other ranks stood in an operation then.
    """

    mode: ClassVar[str] = Mode.ENDED
    precedence: ClassVar[int] = 0
    needs_no_others: ClassVar[bool] = True
    end: RunEnd
    step: int
    waiting: int

    @property
    def variety(self) -> str:
        """How it ended."""
        return str(self.end.kind)

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        who = named_ranks(self.end.ranks[:MAX_RANKS], said.hosts)
        advice = {
            EndKind.EXCEPTION: f"read the traceback of {who} in its log; errors of other ranks may follow from it",
            EndKind.EXIT: f"find what made {who} exit, in its log; errors of other ranks may follow from it",
            EndKind.HANG: f"see what {who} wrote into the folder hang of the attempt",
            EndKind.SIGNAL: f"find who sent the signal to {who}: a launcher, a memory limit, or a user",
            EndKind.SILENT: f"look for a crash in the log of {who}, and for the out-of-memory killer on its host "
            "(dmesg)",
            EndKind.FAILURE: f"find what kept {who} from it, or give the process group a longer timeout",
        }
        if not self.end.ranks:
            advice[EndKind.FAILURE] = "read the logs of all ranks: the traces do not show who left the operation"
        lines = [rank_end_line(one, said.hosts) for one in self.end.ends[:MAX_NAMED]]
        more = len(self.end.ends) - MAX_NAMED
        return FindingWords(
            headline=run_end_line(self.end, said.hosts),
            why="; ".join([*lines, *([f"{plural(more, 'more rank')} after that"] if more > 0 else [])]),
            next=advice[self.end.kind],
            more=tuple(last_words(self.end, said.hosts)),
        )


def find(case: Case) -> list[DiagnosisFinding]:
    """Return the finding on the end of a run; nothing where it is no fault of the run, or where a hang explains it.

    A signal to all ranks comes from outside: the time limit, scancel, a launcher, or a user who presses Ctrl-C.
    """
    end = case.end
    if end is None or (end.kind is EndKind.SIGNAL and end.is_everywhere):
        return []
    is_hanging = any(finding.mode == Mode.HANG for finding in case.findings)
    if is_hanging and end.kind not in (EndKind.EXCEPTION, EndKind.EXIT):
        return []
    culprits = tuple(rank_culprit(rank, 1.0, (1.0, 1.0), case.panels) for rank in end.ranks)
    evidence = EndEvidence(end=end, step=end.step, waiting=len(end.waiting))
    return [DiagnosisFinding(evidence=evidence, loss_share=0.0, confidence=0.99, culprits=culprits)]


def run_end_line(end: RunEnd, hosts: Mapping[int, str]) -> str:
    """Return one sentence on the end of a run before its time, and on the ranks that waited then."""
    when = f"in step {end.step}" if end.step >= 0 else "before the first step"
    who = f"all {len(end.ranks)} ranks" if end.is_everywhere and end.ranks[1:] else named_ranks(end.ranks, hosts)
    waiting, what = named_ranks(end.waiting, hosts), printable(end.what)
    if end.kind is EndKind.FAILURE:
        missing = f"; {who} had not entered it" if end.ranks else ""
        on = f" on {waiting}" if end.waiting else ""
        return f"{what} failed {when}{on} after {format_duration(end.waited_ns)}{missing}"
    were = "were" if end.ranks[1:] else "was"
    said = next((shortened(one.error.sentence, max_letters=_MAX_SAID) for one in end.ends if one.rank in end.ranks), "")
    line = {
        EndKind.EXCEPTION: f"{who} raised {what} {when}{said}",
        EndKind.EXIT: f"{who} exited with code {what} {when}{said}",
        EndKind.HANG: f"{who} {were} ended by hpcpace {when}, because the job hung",
        EndKind.SIGNAL: f"{who} {were} ended by {what} {when}",
        EndKind.SILENT: f"{who} ended without a word {when}: killed, crashed, or os._exit",
    }[end.kind]
    return f"{line}; {waiting} then waited in {end.waited_in}" if end.waiting else line


def last_words(end: RunEnd, hosts: Mapping[int, str]) -> Iterator[str]:
    """Yield how the message of the rank that ended first ends, where its error passed, and what it wrote last."""
    first = next((one for one in end.ends if one.rank in end.ranks), None)
    if first is None:
        return
    who, lines = named_ranks((first.rank,), hosts), [line for line in first.error.message.splitlines() if line.strip()]
    if lines[1:]:
        yield f"the message of {who} ends: {shortened(lines[-1].strip(), max_letters=_MAX_SAID)}"
    if first.error.frames:
        places = [printable(frame.rpartition("/")[2]) for frame in first.error.frames[-_MAX_PLACES:]]
        came = f"{who} was in" if first.kind is EndKind.SIGNAL else f"the error of {who} came through"
        yield f"{came} {', '.join(places)}"
    shared = f", in a file of {first.error.num_sharing_stderr} ranks" if first.error.num_sharing_stderr > 1 else ""
    for place, line in enumerate(first.error.stderr[-_MAX_STDERR:]):
        before = "then" if place else f"last on stderr of {who}{shared}"
        yield f"{before}: {shortened(printable(line.strip()), max_letters=_MAX_SAID)}"


def rank_end_line(end: RankEnd, hosts: Mapping[int, str]) -> str:
    """Return how one rank ended and when, relative to the first one."""
    did = {
        EndKind.EXCEPTION: f"raised {printable(end.what)}",
        EndKind.EXIT: f"exited with code {end.what}",
        EndKind.HANG: "was ended by hpcpace, because the job hung,",
        EndKind.SIGNAL: f"was ended by {end.what}",
    }.get(end.kind, "left no word, its last sign of life was")
    after = f", {format_duration(end.after_ns)} after the first" if end.after_ns else ""
    return f"{named_ranks((end.rank,), hosts)} {did} in step {end.step}{after}"


@dataclass(frozen=True, kw_only=True)
class _End:
    """The end of one rank; `time_ns` is on the common clock, `unix_ns` 0 where unknown, `code` that of its event."""

    rank: int
    kind: EndKind
    what: str
    code: int
    step: int
    time_ns: int
    unix_ns: int = 0
    error: ErrorText = NO_ERROR_TEXT

    @property
    def is_in_order(self) -> bool:
        """Whether it is the exit code of success, with which every rank of a training may end."""
        return self.kind is EndKind.EXIT and self.code == 0


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """An operation that failed on a rank, which then completed no further step; times on the common clock."""

    rank: int
    op: str
    seq: int
    step: int
    enter_ns: int
    exit_ns: int


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What is known of the end of a run.

    Attributes:
        ends: of the ranks that did not end in silence and order, by rank.
        failures: by rank.
        num_ranks: ranks with a trace.
        open: operations that did not complete.
        limits: which ends belong together.
    """

    ends: Mapping[int, _End]
    failures: Mapping[int, _Failure]
    num_ranks: int
    open: Sequence[OpenOperation]
    limits: RunEndThresholds

    def is_consequence(self, end: _End) -> bool:
        """Return whether an operation had failed on the rank before, and the end follows from that."""
        failure = self.failures.get(end.rank)
        if failure is None or failure.exit_ns > end.time_ns + _ROUNDING_NS:
            return False
        if end.kind is not EndKind.EXCEPTION or end.code != ErrorCode.OTHER or failure != self.first_failure:
            return True
        return failure.exit_ns - failure.enter_ns >= self.limits.least_wait_ns

    @property
    def first_failure(self) -> _Failure | None:
        """The failure that came first, if any."""
        return min(self.failures.values(), key=lambda failure: failure.exit_ns, default=None)


def find_end(
    timed: TimedTraces, incomplete: Incomplete, opened: Sequence[RankOperations], limits: RunEndThresholds | None = None
) -> RunEnd | None:
    """Return what ended a run before its time; None where it ended in order, still runs, or was killed as a whole.

    Ranks that ended without a word count only if another one said more, or an operation failed.

    Args:
        timed: the traces and their clocks.
        incomplete: what is missing from the run.
        opened: the rows of operations that never completed, or that failed.
        limits: which ends belong together; the defaults if None.
    """
    failures = {failure.rank: failure for failure in _failures(timed, opened)}
    ends = {end.rank: end for end in _ends(timed, incomplete)}
    found = _Found(
        ends=ends,
        failures=failures,
        num_ranks=len(timed.traces),
        open=incomplete.open,
        limits=limits or RunEndThresholds(),
    )
    if not failures and all(end.kind is EndKind.SILENT for end in ends.values()):
        return None
    causes = [end for end in ends.values() if not end.is_in_order and not found.is_consequence(end)]
    first, failure = _first(causes, found), found.first_failure
    is_own = first is not None and failure is not None and first.rank == failure.rank
    if failure is not None and not is_own and (first is None or _is_earlier(failure, first, ends.get(failure.rank))):
        return _failed(failure, found)
    return None if first is None else _ended(first, causes, found)


def _failures(timed: TimedTraces, opened: Sequence[RankOperations]) -> Iterator[_Failure]:
    last_steps = {trace.header.rank: int(trace.tables["steps"]["step"].max(initial=-1)) for trace in timed.traces}
    for part in opened:
        rows = part.collectives
        is_fatal = (rows["exit_kind"] == ExitKind.FAILED) & (rows["step"] > last_steps.get(part.rank, -1))
        if part.rank in timed.unknown_clocks or not is_fatal.any():
            continue
        row = int(np.flatnonzero(is_fatal)[part.exit_ns[is_fatal].argmin()])
        yield _Failure(
            rank=part.rank,
            op=op_name(int(rows["op"][row])),
            seq=int(rows["seq"][row]),
            step=int(rows["step"][row]),
            enter_ns=int(part.enter_ns[row]),
            exit_ns=int(part.exit_ns[row]),
        )


def _ends(timed: TimedTraces, incomplete: Incomplete) -> Iterator[_End]:
    lost = {rank.rank: rank.num_lost_steps for rank in incomplete.ranks}
    files = Counter(name for trace in timed.traces if (name := stderr_file(trace)))
    for trace, clock in zip(timed.traces, timed.clocks, strict=True):
        rank, account, events = trace.header.rank, trace.tables["account"], trace.tables["events"]
        last_step = int(trace.tables["steps"]["step"].max(initial=-1))
        row = last_word(trace)
        if row is None:
            if trace.closed_cleanly or not len(account):
                continue
            own_ns, kind, what, code = account["time_ns"].max(), EndKind.SILENT, "", 0
            stood_in = [operation.step for operation in incomplete.open if rank in operation.absent]
            step = max(last_step + 1 + lost.get(rank, 0), *stood_in, 0)
        else:
            own_ns, step, text = events["time_ns"][row], int(events["step"][row]), bytes(events["text"][row])
            event, code = EventKind(events["kind"][row]), int(events["code"][row])
            if event is EventKind.EXCEPTION and text.rstrip(b"\0") == _OF_SIGINT:
                event, code = EventKind.SIGNAL, signal.SIGINT
            is_stopped = event is EventKind.EXIT and text.rstrip(b"\0") == STOPPED_FOR_HANG
            kind, what = EndKind.HANG if is_stopped else _KINDS[event], end_name(event, code, text)
        is_known = rank not in timed.unknown_clocks
        time_ns = int(reference_times(clock, np.array([own_ns], np.int64))[0]) if is_known else _FOREVER_NS
        error = NO_ERROR_TEXT if row is None else error_text(trace, row)
        if error.stderr:
            error = replace(error, num_sharing_stderr=max(files[stderr_file(trace)], 1))
        since_start_ns = int(own_ns) - int(account["time_ns"][0]) if len(account) else 0
        at_unix_ns = unix_ns(trace, since_start_ns)
        yield _End(
            rank=rank, kind=kind, what=what, code=code, step=step, time_ns=time_ns, unix_ns=at_unix_ns, error=error
        )


def end_lines(
    timed: TimedTraces, incomplete: Incomplete, hosts: Mapping[int, str], limits: RunEndThresholds
) -> list[str]:
    """Return how and when ranks ended, the first ones first, a sentence for all that ended alike at about one time.

    Of a run without steps nothing else can be said. What left no word may also run on, if it is among the last.

    Args:
        timed: the traces and their clocks.
        incomplete: what is missing from the run.
        hosts: host names by rank, as far as they are known.
        limits: the thresholds of the topic; what comes within a flush is at about one time.
    """
    groups: list[list[_End]] = []
    for end in sorted(_ends(timed, incomplete), key=lambda end: (end.time_ns, end.rank)):
        first = groups[-1][0] if groups else end
        is_alike = (end.kind, end.what) == (first.kind, first.what) and end.time_ns - first.time_ns <= limits.flush_ns
        if groups and is_alike:
            groups[-1].append(end)
        else:
            groups.append([end])
    last_ns = max((end.time_ns for group in groups for end in group), default=0)
    return [_end_line(group, last_ns, hosts) for group in groups]


def _end_line(group: Sequence[_End], last_ns: int, hosts: Mapping[int, str]) -> str:
    first, were = group[0], "was" if len(group) == 1 else "were"
    who = named_ranks(tuple(sorted(end.rank for end in group))[:MAX_RANKS], hosts)
    known = [end.unix_ns for end in group if end.unix_ns]
    before_ns = last_ns - max(end.time_ns for end in group)
    at = f" at {datetime.fromtimestamp(min(known) / NS_PER_S, UTC):%Y-%m-%d %H:%M:%S} UTC" if known else ""
    before = f", {format_duration(before_ns)} before the last one" if before_ns else ""
    if first.kind is EndKind.SILENT:
        cause = "killed, crashed, or os._exit" if before_ns else "killed, or still running"
        seen = f", last seen{at}{before}" if at else before
        return f"{who} left no word{seen}: {cause}"
    did = {
        EndKind.EXCEPTION: f"raised {printable(first.what)}",
        EndKind.EXIT: f"exited with code {first.what}",
        EndKind.HANG: f"{were} ended by hpcpace, because the job hung,",
        EndKind.SIGNAL: f"{were} ended by {first.what}",
    }[first.kind]
    return f"{who} {did}{at}{before}"


def _first(causes: Sequence[_End], found: _Found) -> _End | None:
    """Return the end that came first of those that follow from none of the others."""
    explained = [end for end in causes if end.kind in _EXPLAINED]
    until_ns = min((end.time_ns for end in explained), default=_FOREVER_NS)
    # Where a rank says why it ended, a launcher may have killed the silent ones for that.
    kept = [end for end in causes if end.kind is not EndKind.SILENT or end.time_ns + found.limits.flush_ns < until_ns]
    return min(kept if explained else causes, key=lambda end: (end.time_ns, end not in explained), default=None)


def _is_earlier(failure: _Failure, first: _End, own: _End | None) -> bool:
    """Return whether an operation failed before the first rank ended; `own` is the end of the rank on which it did."""
    if first.kind is not EndKind.SILENT:
        return failure.exit_ns < first.time_ns
    # One that was killed lived a little longer than its trace shows, and the operation failed at its death. What ran
    # out of time while it lived did not wait for the dead.
    is_timeout = own is not None and own.kind is EndKind.EXCEPTION and own.code == ErrorCode.TIMEOUT
    return failure.exit_ns < first.time_ns or (is_timeout and first.time_ns >= failure.enter_ns)


def _failed(failure: _Failure, found: _Found) -> RunEnd:
    """Return an operation that failed as the end of a run, or the rank that left the others in it."""
    place = (failure.op, failure.seq)
    operation = next((one for one in found.open if (one.op, one.seq) == place and failure.rank in one.failed), None)
    blamed = () if operation is None else operation.absent or operation.late
    left = [found.ends[rank] for rank in blamed if rank in found.ends and found.ends[rank].is_in_order]
    if left:
        return _ended(min(left, key=lambda end: end.time_ns), left, found)
    return RunEnd(
        kind=EndKind.FAILURE,
        what=failure.op,
        ranks=blamed,
        step=failure.step,
        waiting=_waiting(operation, blamed),
        waited_in=failure.op,
        waited_ns=failure.exit_ns - failure.enter_ns,
        is_everywhere=False,
        ends=_rank_ends(found),
    )


def _waiting(operation: OpenOperation | None, blamed: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks inside an operation that are not to blame for it."""
    return () if operation is None else tuple(sorted(set(operation.inside) - set(blamed)))


def _ended(first: _End, causes: Sequence[_End], found: _Found) -> RunEnd:
    alike = [end for end in causes if _is_alike(end, first, found.limits)]
    codes = _OF_USERS if first.code in _OF_USERS else {first.code}
    signalled = {end.rank for end in found.ends.values() if end.kind is EndKind.SIGNAL and end.code in codes}
    is_everywhere = len(alike) == found.num_ranks
    if first.kind is EndKind.SIGNAL:
        is_everywhere = len(signalled) == found.num_ranks
        failure = found.first_failure
        before_ns = failure.exit_ns if failure is not None and not is_everywhere else _FOREVER_NS
        alike = [end for end in alike if end.time_ns <= max(before_ns, first.time_ns)]
        if is_everywhere:  # those in an operation noticed it when that failed
            alike = [end for end in found.ends.values() if end.rank in signalled]
    ranks = tuple(sorted(end.rank for end in alike))
    waits = [one for one in found.open if one.step >= first.step - 1 and set(one.inside) - set(ranks)]
    held = max(waits, key=lambda one: len(set(one.inside) - set(ranks)), default=None)
    return RunEnd(
        kind=first.kind,
        what=first.what,
        ranks=ranks,
        step=first.step,
        waiting=_waiting(held, ranks),
        waited_in="" if held is None else held.op,
        waited_ns=0 if held is None else held.age_ns,
        is_everywhere=is_everywhere,
        ends=_rank_ends(found),
    )


def _is_alike(end: _End, first: _End, limits: RunEndThresholds) -> bool:
    if (end.kind, end.what) != (first.kind, first.what):
        return False
    if first.kind in _EXPLAINED:
        return end.step == first.step
    return end.time_ns - first.time_ns <= (limits.together_ns if first.kind is EndKind.SIGNAL else limits.flush_ns)


def _rank_ends(found: _Found) -> tuple[RankEnd, ...]:
    ends = sorted(found.ends.values(), key=lambda end: (end.time_ns, end.rank))
    first_ns = ends[0].time_ns if ends else 0
    return tuple(
        RankEnd(
            rank=end.rank,
            kind=end.kind,
            what=end.what,
            step=end.step,
            after_ns=None if end.time_ns == _FOREVER_NS else end.time_ns - first_ns,
            error=end.error,
        )
        for end in ends
    )
