"""Logs of torch's watchdog as the state of a job: which rank is in which operation, and which is behind.

A rank of which a log says nothing may be the culprit, for what hangs in its own code reports nothing. Nor does a log
say how many ranks a job has, or who is in a group: where nobody is behind, that is not proof that all have come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path

from hpcpace.core.errors import TraceError
from hpcpace.core.log_text import lines_with, pieces
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_MS, first_few, format_duration, listed, plural, rank_list, shortened
from hpcpace.hang.views import Call, Channel, GroupView, Hang, HangKind, JobView, RankView, undecided
from hpcpace.runs.imports.flight_recorder import MAX_RANKS
from hpcpace.runs.imports.input_files import InputFile, json_bytes
from hpcpace.runs.imports.ras import RAS_WORD
from hpcpace.runs.imports.watchdog_lines import (
    BEHIND,
    IN_WORDS,
    REPORTS,
    START,
    WORDS,
    Label,
    Line,
    LineReader,
    TimedOut,
    goes_on,
)
from hpcpace.runs.imports.watchdog_ranks import (
    DEFAULT,
    OF_ALL,
    UNNAMED,
    Attempt,
    GroupState,
    LogFile,
    Source,
    last_attempts,
)

_SOURCE = "logs"
_OPS = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce",
    "ALLGATHER": "all_gather",
    "ALLGATHER_COALESCED": "all_gather",
    "_ALLGATHER_BASE": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}
# Messages have numbers of their own, which differ between ranks that are all well; COALESCED may be a batch of them.
_MESSAGES = frozenset({"SEND", "RECV", "RECVANYSOURCE", "COALESCED"})
_MAX_AHEAD = 64  # format: operations that a root may send before others call them; NCCL holds some of its data
_MAX_NOTED = 6
_MAX_WHERE = 3  # display: lines of code
_NOW_NS = 0
"""The time of the last message of each rank."""


@dataclass(frozen=True, kw_only=True)
class LogJob:
    """What logs show of a job.

    Attributes:
        job: its ranks and groups.
        ranks: those of which the logs say something.
        notes: what was left out, guessed or is odd, a sentence each.
        doubt: why the logs do not show who holds up whom, where no rule finds it.
        has_all_ranks: whether it is known how many ranks the job has.
        whole: the groups of which every member is known, by their names.
        guesses: members of groups that reported nothing, and which ranks these may be.
        num_repeated: messages of other ranks that Ray has left out.
        heard: ranks of which the logs say anything, be it of another group.
        stuck: ranks on which torch's watchdog itself stands still.
    """

    job: JobView
    ranks: tuple[int, ...]
    notes: tuple[str, ...]
    doubt: str
    has_all_ranks: bool
    whole: frozenset[str]
    guesses: tuple[str, ...]
    num_repeated: int
    heard: frozenset[int]
    stuck: tuple[int, ...]


def read_log(path: Path, progress: Callable[[int, int], None] = lambda *_: None) -> LogFile:
    """Read what a log says of operations that ran out of time, in constant memory.

    Args:
        path: the log, plain or packed by gzip.
        progress: takes how many bytes of the file are read, of how many.

    Raises:
        TraceError: it cannot be read.
    """
    found, reader, was_report = LogFile(path=path), LineReader(), False
    for piece in pieces(json_bytes(InputFile.at(path), progress)):
        found.has_report = found.has_report or RAS_WORD in piece
        is_report = any(word in piece for word in REPORTS)
        words = WORDS + BEHIND if is_report or was_report else WORDS
        was_report = is_report
        if is_report or any(word in piece for word in words):
            for line in lines_with(piece, words, goes_on):
                found.take(reader.facts(line))
    return found


@dataclass(kw_only=True)
class _Group:
    """A group over all logs: its members by their rank within it, and what is known of each process."""

    name: str
    members: dict[int, int] = field(default_factory=dict)
    states: dict[int, GroupState] = field(default_factory=dict)
    ops: dict[tuple[int, int], str] = field(default_factory=dict)
    is_whole: bool = False

    @cached_property
    def firsts(self) -> frozenset[int]:
        """The numbers of the operations in which members are by their own words."""
        return frozenset(one.first.number or 0 for one in self.states.values() if one.first is not None)

    @cached_property
    def ranks(self) -> frozenset[int]:
        """The global ranks of its members, as far as they are known."""
        return frozenset(self.members.values())


def log_job(logs: Sequence[LogFile]) -> LogJob:
    """Return what logs of one job show, of its last attempt.

    Raises:
        TraceError: they contradict each other as logs of several jobs do.
    """
    notes: list[str] = []
    attempts = last_attempts(logs, notes)
    notes += _source_notes(logs)
    groups = _groups(attempts)
    torn = next(filter(None, map(_is_torn, groups.values())), "")
    known_size = max((log.world_size for log in logs), default=0)
    _add_desyncs(logs, groups, attempts)
    late = _add_start(logs, groups, notes)
    named = {rank for group in groups.values() for rank in (*group.states, *group.members.values())}
    stuck = sorted({rank for log in logs for rank in log.stuck})
    ended = {rank: how for log in logs for rank, how in log.all_ended().items()}
    others = (*attempts, *named, *stuck, *ended)
    size = max([known_size, *(log.min_ranks for log in logs), *(rank + 1 for rank in others)])
    default = groups.get(DEFAULT) or groups.get(UNNAMED)
    has_all = known_size >= size or (default is not None and default.is_whole)
    job, unsure = _job(groups, attempts, size, notes)
    job = _with_ends(job, ended, heard=attempts)
    unsure = unsure or late
    if stuck and not unsure and not any(group.firsts for group in groups.values()):
        unsure = f"{_stuck_words(stuck)}, and the log does not say in which operation"
    unsure = unsure or torn
    if any(log.has_two_ranks for log in logs):
        unsure = "Slurm's labels and the messages give processes different ranks: those of a smaller group, perhaps"
    if mixed := [shortened(log.path.name) for log in logs if log.is_mixed]:
        unsure = f"{listed(first_few(mixed, 3, noun='file'))} mixes messages of several jobs: name the log of one"
    actors = sorted({actor for log in logs for actor in log.actors})
    if len(actors) > 1:
        names = listed(first_few(actors, 4, noun="other"))
        unsure = f"these are messages of Ray's actors {names}, each with ranks from 0"
    return LogJob(
        job=job,
        ranks=tuple(rank for rank, view in job.ranks.items() if view.is_recorded),
        notes=tuple(notes),
        doubt=unsure,
        has_all_ranks=has_all,
        whole=frozenset(group.name for group in groups.values() if group.is_whole),
        guesses=tuple(guess for group in groups.values() if (guess := _guess(group))),
        num_repeated=sum(log.num_repeated for log in logs),
        heard=frozenset(attempts) | frozenset(stuck),
        stuck=tuple(stuck),
    )


def _is_torn(group: _Group) -> str:
    """Return why the counters of a group cannot be those of one group; empty where they can.

    No rank finishes what another one has not called, but for messages and for operations whose root only sends.
    """
    called = {rank: state.enqueued for rank, state in group.states.items() if state.enqueued is not None}
    finished = {rank: state.completed for rank, state in group.states.items() if state.completed is not None}
    if not called or not finished:
        return ""
    fewest, most = min(called, key=lambda rank: called[rank]), max(finished, key=lambda rank: finished[rank])
    if finished[most] - called[fewest] <= _MAX_AHEAD:
        return ""
    return (
        f"rank {most} has finished {finished[most]} operations and rank {fewest} called only {called[fewest]} of one"
        " group: these are messages of several jobs, or between two ranks"
    )


def _with_ends(job: JobView, ended: Mapping[int, str], heard: Mapping[int, Attempt]) -> JobView:
    """Return a job with those ranks gone that ended and otherwise said nothing."""
    words = {rank: f"{shortened(how)}, by the log" for rank, how in ended.items()}
    gone = {
        rank: replace(view, is_recorded=True, is_complete=False, is_gone=True, end=words[rank])
        for rank, view in job.ranks.items()
        if rank in ended and not view.is_recorded and (rank not in heard or heard[rank].is_silent)
    }
    return replace(job, ranks={**job.ranks, **gone})


def _stuck_words(ranks: Sequence[int]) -> str:
    return (
        f"torch's watchdog itself stands still on {rank_list(ranks)}: a call to CUDA or NCCL does not return, or"
        " Python's lock is held"
    )


def _add_start(logs: Sequence[LogFile], groups: dict[str, _Group], notes: list[str]) -> str:
    """Add who has not come to a start of the job or of a group, where as many are silent as have not come.

    Returns:
        why it is not known who has not come, where the log says no more than that.
    """
    joined: dict[int, tuple[int, int]] = {}
    for key, found in (item for log in logs for item in log.joined.items()):
        joined[key] = max(joined.get(key, found), found)
    start = groups.pop(START, None)
    if any(group.firsts for group in groups.values()) or not joined:
        return ""  # the job is past it
    last = max(joined)
    come, num_ranks = joined[last]
    if come > num_ranks:
        notes.append(
            f"{come} processes came to a start of {plural(num_ranks, 'rank')}: another job or an earlier attempt uses"
            " the same store (MASTER_PORT)"
        )
    if start is None:
        return f"{come} of {num_ranks} processes came to init_process_group in time, and the log does not say which"
    # Whoever waits for the last one is past those before it.
    states = {
        rank: replace(state, timed_out={last: state.timed_out[last]})
        for rank, state in start.states.items()
        if last in state.timed_out
    }
    silent = [rank for rank in range(num_ranks) if rank not in states]
    if len(silent) == num_ranks - come:
        states |= {rank: GroupState(enqueued=-1, completed=-1) for rank in silent}
    groups[START] = replace(start, states=states)
    return ""


def _guess(group: _Group) -> str:
    """Return who in a group may be silent, by the ranks of its other members."""
    silent = [(member, rank) for member, rank in sorted(group.members.items()) if rank not in group.states]
    if group.name in OF_ALL or not silent:
        return ""
    members = rank_list([member for member, _ in silent]).replace("rank", "member")
    ranks = rank_list([rank for _, rank in silent])
    return (
        f"{members} of group {shortened(group.name)} reported nothing; by the distance of the others that"
        f" {'is' if len(silent) == 1 else 'are'} {ranks}, which is a guess"
    )


def settled(hang: Hang | None, found: LogJob) -> Hang | None:
    """Return a verdict without what logs cannot show: that all have come, or the order of groups without names."""
    if hang is None:
        return None
    if found.doubt:
        return undecided(hang, found.doubt)
    if hang.kind is HangKind.NETWORK and hang.call is not None:
        group = found.job.groups[hang.call.channel.group]
        is_of_all = len(group.members) == len(found.job.ranks)
        if not (found.has_all_ranks if is_of_all else group.name in found.whole):
            reason = (
                f"the logs name {plural(len(group.members), 'rank')}, all in it, and do not say whether the"
                f" {'job' if is_of_all else 'group'} has more: one of which they say nothing may not have come"
            )
            return undecided(hang, reason)
    if hang.kind is HangKind.UNKNOWN:
        hang = replace(hang, could_be=tuple(rank for rank in hang.could_be if not _is_waiting(found, rank)))
        lacking = [rank for rank in hang.could_be or found.job.ranks if rank not in found.ranks]
        silent = [rank for rank in lacking if rank not in found.heard]
        reason = f"the logs say nothing of {rank_list(silent)}" if silent else "the logs do not say how far they came"
        if lacking and not silent:
            reason = f"the logs do not say how far {rank_list(lacking)} came in it"
        if found.num_repeated:
            reason += f", and Ray left out {plural(found.num_repeated, 'message')} of other ranks (RAY_DEDUP_LOGS=0)"
            hang = replace(hang, could_be=())
        return replace(hang, reason=reason)
    return hang


def _is_waiting(found: LogJob, rank: int) -> bool:
    """Return whether a rank waits in a group of which not all members are known."""
    groups = (found.job.groups[call.channel.group] for call in found.job.ranks[rank].calls if call.is_open)
    return any(len(group.members) < len(found.job.ranks) and group.name not in found.whole for group in groups)


def _source_notes(logs: Sequence[LogFile]) -> list[str]:
    notes = []
    for source in (Source.TASK, Source.FILE, Source.LOCAL):
        files = [shortened(log.path.name) for log in logs if source in log.sources]
        if files:
            notes.append(f"ranks in {listed(first_few(files, 3, noun='file'))} are those of {source}")
    if sum(Source.LOCAL in log.sources for log in logs) > 1:
        raise TraceError(
            "ranks in several logs have only torchrun's labels, which count on each node: put the rank into the name"
            " of each file, as rank_3.log"
        )
    nameless = sum(log.num_nameless for log in logs)
    if nameless:
        notes.append(f"{plural(nameless, 'message')} left out: nothing says of which rank")
    return notes


def _groups(attempts: Mapping[int, Attempt]) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    for rank, attempt in sorted(attempts.items()):
        for name, state in attempt.groups.items():
            group = groups.setdefault(name, _Group(name=name))
            group.states[rank] = state
            member = rank if name in OF_ALL else state.member
            if member is not None:
                group.members.setdefault(member, rank)
    for group in groups.values():
        _add_failed(group)
        if group.name not in OF_ALL:
            _fill(group)
    return groups


def _add_failed(group: _Group) -> None:
    """Add operations that ran out of time by the counters of a rank alone, of the kind on which all others agree."""
    kinds: dict[int, set[str]] = {}
    for number, fact in (item for state in group.states.values() for item in state.timed_out.items()):
        kinds.setdefault(number, set()).add(fact.op)
    for state in group.states.values():
        if (failed := state.failed) is None or state.timed_out:
            continue
        op, *others = kinds.get(failed, {"COLLECTIVE"})
        if not others:
            state.timed_out[failed] = TimedOut(
                line=Line(label=Label()), number=failed, op=op, num_elements=-1, timeout_ms=0, ran_ms=None
            )


def _fill(group: _Group) -> None:
    """Add the members between those that are known, if these are equally far apart: 1, 9, 17, or 4, 5, 6."""
    known = sorted(group.members.items())
    if len(known) < 2:
        return
    (first, base), (last, top) = known[0], known[-1]
    stride = (top - base) // (last - first)
    if stride < 1 or any(rank != base + stride * (member - first) for member, rank in known):
        return
    for member in range(last + 1):
        if (rank := base + stride * (member - first)) >= 0:
            group.members.setdefault(member, rank)


def _add_desyncs(logs: Sequence[LogFile], groups: dict[str, _Group], attempts: Mapping[int, Attempt]) -> None:
    """Add what reports say of other ranks, where these say nothing themselves."""
    said: dict[tuple[str, int], tuple[int, bool]] = {}
    for log in logs:
        for (name, *_), (reporter, desync) in log.desyncs.items():
            if reporter not in attempts:
                continue
            group = groups.get(name) or groups.get(DEFAULT) or groups.get(UNNAMED)
            if group is None or (name == UNNAMED and UNNAMED not in groups and DEFAULT not in groups):
                continue
            for member in desync.members:
                rank = group.members.get(member, member if group.name in OF_ALL else None)
                if rank is None or rank >= MAX_RANKS:
                    continue
                if desync.op:
                    group.ops[rank, desync.number] = desync.op
                before = said.get((group.name, rank))
                if before is None or desync.number >= before[0]:
                    said[group.name, rank] = (desync.number, desync.has_finished)
    for (name, rank), (number, has_finished) in said.items():
        group = groups[name]
        group.members.setdefault(rank, rank) if name in OF_ALL else None
        group.is_whole = True  # a report looks at every member
        state = group.states.setdefault(rank, GroupState())
        if state.enqueued is None and state.first is None:
            state.enqueued = number
            # A rank that has started an operation need not have finished all before it.
            state.completed = number if has_finished else min([number, *group.firsts]) - 1


def _job(
    groups: Mapping[str, _Group], attempts: Mapping[int, Attempt], size: int, notes: list[str]
) -> tuple[JobView, str]:
    waiting = [group for group in groups.values() if group.firsts]
    ordered = waiting or list(groups.values())
    doubts = [doubt for group in ordered if (doubt := _doubt(group))]
    ordered = [group for group in ordered if not _is_of_messages(group)] if not doubts else ordered
    views = {rank: RankView(rank=rank, is_recorded=False) for rank in range(size)}
    everyone = tuple(range(size))
    shown: list[GroupView] = []
    for place, group in enumerate(ordered):
        is_default = group.name in OF_ALL
        members = everyone if is_default else tuple(dict.fromkeys(group.members[key] for key in sorted(group.members)))
        shown.append(GroupView(name=IN_WORDS.get(group.name, group.name) or "(not named)", members=members))
        for rank in members:
            if rank in group.states and rank in views:
                views[rank] = _with_state(views[rank], group, rank, Channel(place), attempts.get(rank))
    for rank, view in views.items():
        if view.is_recorded:
            views[rank] = replace(view, is_complete=_is_complete(rank, ordered))
    if not waiting:
        _add_gloo(views, attempts, shown, everyone)
    job = JobView(groups=tuple(shown), ranks=views, now_ns=_NOW_NS, source=_SOURCE)
    return job, doubts[0] if doubts else ""


def _doubt(group: _Group) -> str:
    """Return why the numbers of a group do not show who is behind; empty where they do."""
    firsts = {rank: state.first for rank, state in group.states.items() if state.first is not None}
    numbers = {fact.number for fact in firsts.values()}
    if _is_of_messages(group):
        return "what ran out of time are messages between two ranks, or a batch of them, and torch does not say which"
    if None in numbers and group.name not in IN_WORDS:
        return (
            "this release of torch does not number operations"
            if len(firsts) < len(group.states) or len({fact.op for fact in firsts.values()}) > 1
            else ""
        )
    is_other = any(state.member not in (None, rank) for rank, state in group.states.items())
    if group.name == UNNAMED and (len(numbers) > 1 or is_other):
        return "the log names no groups, and these numbers may be of different ones"
    if group.name not in OF_ALL and any(rank not in group.ranks for rank in group.states):
        return f"several groups are called {shortened(group.name)}, and the log does not say who is in which"
    return ""


def _is_of_messages(group: _Group) -> bool:
    firsts = [state.first for state in group.states.values() if state.first is not None]
    return any(fact.op in _MESSAGES for fact in firsts)


def _with_state(view: RankView, group: _Group, rank: int, channel: Channel, attempt: Attempt | None) -> RankView:
    """Return a rank with what is known of it in a group."""
    state = group.states[rank]
    first = state.first
    calls = list(view.calls)
    numbers = list(state.timed_out) + ([state.enqueued] if state.enqueued is not None else [])
    last = max(numbers, default=-1)
    completed = state.completed if state.completed is not None else (min(state.timed_out) - 1 if first else last)
    for number, fact in sorted(state.timed_out.items()):
        if number <= completed:
            continue
        # Relative to the last message of the rank, because hosts may have clocks of different time zones.
        entered_ns = None if fact.ran_ms is None else _NOW_NS - fact.ran_ms * NS_PER_MS
        if entered_ns is not None and fact.line.at_ns is not None and attempt is not None:
            entered_ns -= (attempt.reported_ns or 0) - fact.line.at_ns
        calls.append(
            Call(
                channel=channel,
                seq=number,
                op=_op(fact.op),
                num_elements=fact.num_elements,
                entered_ns=entered_ns,
                is_open=True,
                is_numbered=fact.number is not None,
                where=attempt.where if attempt is not None and fact is first else "",
            )
        )
    if first is None and last in group.firsts and (op := group.ops.get((rank, last))):
        calls.append(Call(channel=channel, seq=last, op=_op(op), is_open=completed < last))
    return replace(
        view,
        is_recorded=True,
        entered={**view.entered, channel: last + 1},
        completed={**view.completed, channel: completed + 1},
        calls=tuple(calls),
    )


def _is_complete(rank: int, groups: Sequence[_Group]) -> bool:
    """Return whether it is known of each group that waits how many operations a rank has called in it.

    A rank that others told of their timeout reports the default group alone, and may itself wait in a smaller one.
    """
    smaller = [group for group in groups if group.name not in OF_ALL]
    if smaller and not any(rank in group.states for group in smaller):
        return False
    for group in groups:
        if group not in smaller or rank in group.ranks:
            state = group.states.get(rank)
            if state is None or state.enqueued is None:
                return False
    return True


def _op(name: str) -> str:
    return _OPS.get(name, name.lower().strip("_"))


def _add_gloo(
    views: dict[int, RankView], attempts: Mapping[int, Attempt], shown: list[GroupView], everyone: tuple[int, ...]
) -> None:
    """Add ranks that waited for messages of gloo, which say neither what for nor for whom."""
    waiting = {rank: attempt.gloo for rank, attempt in attempts.items() if attempt.gloo is not None}
    if not waiting:
        return
    ops = {gloo.op for gloo in waiting.values() if gloo.op}
    shown.append(GroupView(name="gloo", members=everyone))
    channel = Channel(len(shown) - 1)
    for rank in waiting:
        call = Call(
            channel=channel,
            seq=0,
            op=ops.copy().pop() if len(ops) == 1 else "an operation",
            entered_ns=None,
            is_open=True,
            is_numbered=False,
        )
        views[rank] = replace(
            views[rank],
            is_recorded=True,
            is_complete=False,
            entered={channel: 1},
            completed={channel: 0},
            calls=(call,),
        )


def told_of(logs: Sequence[LogFile], found: LogJob) -> list[str]:
    """Return what the logs say beside a verdict: how long ranks waited, what is a guess, and what is not known."""
    told = list(found.guesses)
    last = [several[-1] for log in logs for several in log.attempts.values()]
    told += [_stuck_words(found.stuck)] if found.stuck and not found.doubt else []
    waits = [fact for one in last for state in one.groups.values() for fact in state.timed_out.values() if fact.ran_ms]
    if waits:
        longest = max(waits, key=lambda fact: fact.ran_ms or 0)
        waited, limit = ((ms or 0) * NS_PER_MS for ms in (longest.ran_ms, longest.timeout_ms))
        told.append(f"the watchdog gave up after {format_duration(waited)}; its limit is {format_duration(limit)}")
    wheres = sorted({one.where for one in last if one.where})
    if wheres:
        told.append(f"what ran out of time was called at {listed([shortened(where) for where in wheres[:_MAX_WHERE]])}")
    gloo = {rank: log.attempts[rank][-1].gloo for log in logs for rank in log.attempts}
    timed_out = sorted(rank for rank, fact in gloo.items() if fact is not None and fact.waited_ms is not None)
    closed = sorted(rank for rank, fact in gloo.items() if fact is not None and fact.waited_ms is None)
    if timed_out:
        told.append(f"gloo on {rank_list(timed_out)} waited for a message that did not come; it does not say from whom")
    if closed:
        told.append(f"a peer closed the connection of {rank_list(closed)}: it ended before them")
    if not found.has_all_ranks:
        highest = len(found.job.ranks) - 1
        told.append(f"the logs do not say how many ranks the job has; the last one that they name is {highest}")
    return told[:_MAX_NOTED]
