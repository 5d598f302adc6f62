"""The verdict on a job that hangs in words, also from a process of its own.

    python -m hpcpace.hang.verdict RUN/attempt-0

prints one object of JSON: `headline`, `why`, `advice`; `headline` is empty where no rank waits for another. A rank that
asks for it is delayed no longer than its timeout by a file system that does not answer. The verdict may end the job, so
it rests on files of the job's own user alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpcpace.core.codec import Text, convert, parse_json
from hpcpace.core.files import Folder
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.core.text import NS_PER_S, format_duration, listed, plural, printable, rank_list
from hpcpace.hang.headline import call_name, called_instead, doing_words, headline, op_word, parts_of, ranks_on_hosts
from hpcpace.hang.views import Call, Doing, FoundHang, Hang, HangKind, JobView, RankView, State

_NEXT = frozenset({Doing.LOADING, Doing.SAVING, Doing.EVALUATING, Doing.COMMUNICATING})
_OUTSIDE = frozenset({HangKind.NEVER_CALLED, HangKind.OWN_WORK, HangKind.GONE})
_COUNTED = frozenset({HangKind.NEVER_CALLED, HangKind.TOO_MANY, HangKind.TOO_FEW})
_MIN_AGE_NS = NS_PER_S
"""display: what ended a job at once did not last."""
_MAX_STATES = 4
_MAX_STACKS = 4
_MAX_FRAMES = 4
_MAX_LINKS = 6
_MAX_ADVICE = 3
# Of a text that another process prints.
_MAX_TEXT = 2000


@dataclass(frozen=True, kw_only=True)
class HangWords:
    """A hang in words.

    Attributes:
        headline: one line: which operation waits for whom, and since when.
        why: what it rests on, a sentence each.
        advice: what to do.
    """

    headline: Text
    why: tuple[Text, ...]
    advice: Text


def describe(hang: Hang, job: JobView) -> HangWords:
    """Return a hang in words.

    Args:
        hang: what `hpcpace.hang.rules.find_hang` found.
        job: in which it found it.
    """
    parts = parts_of(hang)
    why = [*_difference(hang, job), *_waiting(hang), *_place(hang), *_chain(hang, job), *_states(parts, job)]
    why += [*_activities(hang, job), *_stacks(hang, job)]
    advice = dict.fromkeys(_advice(part, job) for part in parts)
    return HangWords(
        headline=f"hang: {headline(hang, job)}{_since(hang, job)}",
        why=tuple(printable(line) for line in why),
        advice=printable("; ".join(list(advice)[:_MAX_ADVICE])),
    )


def _since(hang: Hang, job: JobView) -> str:
    if hang.since_ns is None or (not job.is_dated and job.now_ns - hang.since_ns < _MIN_AGE_NS):
        return ""
    if job.is_dated:
        began = datetime.fromtimestamp(hang.since_ns / NS_PER_S, UTC)
        return f"; since {began:%Y-%m-%d %H:%M:%S} UTC"
    return f"; {format_duration(job.now_ns - hang.since_ns)} so far"


def _waiting(hang: Hang) -> Iterable[str]:
    if hang.waiting:
        yield f"{rank_list(hang.waiting)} {'waits' if len(hang.waiting) == 1 else 'wait'}"


def _place(hang: Hang) -> Iterable[str]:
    """Yield the line at which most ranks called an operation in whose place others called another one."""
    if hang.kind is HangKind.MISMATCH and hang.culprits and hang.call is not None and hang.call.where:
        yield f"the others called {op_word(hang.call)} at {hang.call.where}"


def _chain(hang: Hang, job: JobView) -> Iterable[str]:
    """Yield the way from those that wait to the root, where it has more than one link."""
    if len(hang.chain) > 1:
        links = [call_name(call, job) for call in hang.chain]
        if len(links) > _MAX_LINKS:
            skipped = plural(len(links) - _MAX_LINKS, "more operation")
            links[_MAX_LINKS // 2 : len(links) - _MAX_LINKS // 2] = [skipped]
        yield "one waits for the next: " + ", then ".join(links)


def _difference(hang: Hang, job: JobView) -> Iterable[str]:
    """Yield what ranks called in the place where the records of others have calls that theirs lack."""
    if not hang.extra:
        return
    first = hang.extra[0]
    members = job.groups[first.channel.group].members
    others = tuple(rank for rank in members if rank not in hang.culprits)
    callers, lacking = (others, hang.culprits) if hang.kind is HangKind.TOO_FEW else (hang.culprits, others)
    if hang.sides is not None:
        callers, lacking = hang.sides
    instead: dict[str, list[int]] = {}
    for rank in lacking:
        for call in job.ranks[rank].calls:
            if (call.channel, call.seq) == (first.channel, first.seq) and _is_elsewhere(call, first):
                at = f" at {call.where}" if call.where else ""
                instead.setdefault(f"{op_word(call)} {call.seq}{at}", []).append(rank)
    later = plural(len(hang.extra), "operation")
    for what, ranks in list(instead.items())[:_MAX_STATES]:
        yield f"{rank_list(ranks)} called {what} instead, which {rank_list(callers)} called {later} later"


def _is_elsewhere(call: Call, first: Call) -> bool:
    """Return whether a call is known to be another one than the first of those that a rank lacks."""
    return call.site != first.site if call.site and first.site else call.op != first.op


def _states(parts: Sequence[Hang], job: JobView) -> Iterable[str]:
    """Yield what each culprit called instead, does, or did last; those of which that is the same together."""
    said: dict[tuple[str, str], list[int]] = {}
    of_rank = {rank: part for part in parts for rank in part.culprits or _apart(part)}
    for rank in sorted(of_rank):
        if (words := _state(of_rank[rank], job, job.ranks[rank])) is not None:
            said.setdefault(words, []).append(rank)
    for (of_one, of_many), ranks in list(said.items())[:_MAX_STATES]:
        yield f"{rank_list(ranks)} {of_many if ranks[1:] else of_one}"


def _apart(part: Hang) -> tuple[int, ...]:
    """Return the ranks that differ where no side is known to be wrong."""
    return part.could_be if part.sides or part.kind is HangKind.MISMATCH else ()


def _state(part: Hang, job: JobView, view: RankView) -> tuple[str, str] | None:
    """Return what a culprit does or did, as said of one rank and of several; None where that is not known."""
    if called := called_instead(part, view):
        return _same(f"called {called}")
    if part.kind is HangKind.DISORDER:
        opened = [call_name(call, job) for call in view.calls if call.is_open][:_MAX_LINKS]
        return (f"is in {listed(opened)}", f"are in {listed(opened)}") if opened else None
    if part.kind is HangKind.GONE:
        if view.doing in (Doing.UNKNOWN, Doing.ENDED):
            return None
        return f"was last seen {doing_words(view)}", f"were last seen {doing_words(view, is_many=True)}"
    if part.kind in (HangKind.TOO_MANY, HangKind.TOO_FEW) or part.sides is not None:
        opened = [call_name(call, job) + _at(call) for call in view.calls if call.is_open][:1]
        if opened:
            return f"is in {opened[0]}", f"are in {opened[0]}"
    if view.doing is not Doing.UNKNOWN:
        doing, of_many = doing_words(view), doing_words(view, is_many=True)
        guess = f"; {view.doing} usually comes next, which is a guess" if view.is_guess and view.doing in _NEXT else ""
        if view.doing_since_ns is None:
            return f"is {doing}{guess}", f"are {of_many}{guess}"
        since = f" for {format_duration(job.now_ns - view.doing_since_ns)}{guess}"
        return f"has been {doing}{since}", f"have been {of_many}{since}"
    if view.calls and part.kind in _COUNTED:
        return _same(f"last called {call_name(view.calls[-1], job)}{_at(view.calls[-1])}")
    return None


def _same(text: str) -> tuple[str, str]:
    return text, text


def _at(call: Call) -> str:
    return f", at {call.where}" if call.where else ""


def _activities(hang: Hang, job: JobView) -> Iterable[str]:
    """Yield how much processor time named ranks used of late."""
    for rank in (hang.culprits or hang.could_be)[:_MAX_STATES] if hang.kind in _OUTSIDE else ():
        if (activity := job.ranks[rank].activity) is not None:
            over = format_duration(activity.over_ns)
            when = f"for {over} just now" if activity.is_now else f"in the last {over} that it recorded"
            yield f"rank {rank} used {activity.cores:.2f} cores {when}: it is {activity.state}"


def _stacks(hang: Hang, job: JobView) -> Iterable[str]:
    for rank in (hang.culprits or hang.could_be)[:_MAX_STACKS]:
        view = job.ranks.get(rank)
        if view is not None and view.stack:
            yield f"stack of rank {rank}: " + " <- ".join(reversed(view.stack[-_MAX_FRAMES:]))


def _advice(hang: Hang, job: JobView) -> str:
    named = hang.culprits or hang.could_be
    who = rank_list(named) if named else "all ranks"
    has_stacks = all(rank in job.ranks and job.ranks[rank].stack for rank in named or (-1,))
    activities = [job.ranks[rank].activity for rank in named if rank in job.ranks]
    pids = {activity.pid for activity in activities if activity is not None and activity.pid is not None}
    dump = f"py-spy dump --pid {pids.pop()}" if len(named) == len(pids) == 1 else "py-spy dump --pid"
    look = f"see where the stack of {who} ends" if has_stacks else f"look at the stack of {who} ({dump})"
    hosts = ranks_on_hosts(named, job) or who
    if hang.extra or (hang.sides is not None and hang.kind is not HangKind.PEERS_LEFT):
        return _advice_on_branches(hang)
    match hang.kind:
        case HangKind.NEVER_CALLED:
            return f"{look}: find the branch that leaves out the operation, or what it does instead"
        case HangKind.OWN_WORK if any(_is_open(job.ranks[rank]) for rank in hang.culprits):
            return f"{look}: it shows where it is"
        case HangKind.OWN_WORK:
            return f"{look}, and check the storage and host on which it works"
        case HangKind.GONE:
            if any(job.ranks[rank].is_gone for rank in hang.culprits):
                host = "its host" if len(named) == 1 else "their hosts"
                return f"read the log of {hosts}, and look for the out-of-memory killer on {host} (dmesg)"
            return f"see whether the host of {hosts} answers, and whether its process was stopped or killed (ps, dmesg)"
        case HangKind.PEERS_LEFT if hang.could_be:
            return f"check the devices and hosts of {hosts} (nvidia-smi, dmesg), and the links between them"
        case HangKind.PEERS_LEFT:
            return f"check the device and host of {hosts} (nvidia-smi, dmesg), and whether its process is stopped"
        case HangKind.MISMATCH:
            return "make all ranks of the group call the same operations with the same sizes and roots, in one order"
        case HangKind.DISORDER:
            return "call the operations of all groups in the same order on all ranks"
        case HangKind.NETWORK:
            return "check the links, devices and NCCL or gloo logs of the members: no rank is late"
        case _:
            return f"get the missing records, or {look}"


def _is_open(view: RankView) -> bool:
    """Return whether it is not known what a rank does, and nothing points to its storage."""
    is_blocked = view.activity is not None and view.activity.state is State.BLOCKED
    return not is_blocked and (view.is_guess or view.doing is Doing.COMPUTING)


def _advice_on_branches(hang: Hang) -> str:
    """Return where to look where some ranks called more than others."""
    where = hang.extra[0].where if hang.extra else ""
    if where:
        return f"see who reaches {where}: every rank of the group must call it, or none (`if rank == 0:`?)"
    few = min(hang.sides or ((),), key=len) if hang.sides else hang.culprits
    return (
        f"look for code that only {rank_list(few)} run{'s' if len(few) == 1 else ''} and that communicates (saves,"
        " logs, validates), and at the stacks of all (py-spy dump --pid)"
    )


def ask_verdict(attempt: Attempt, timeout_s: float) -> HangWords | None:
    """Return what a child process finds in the records of an attempt; None if no rank waits for another.

    Raises:
        RuntimeError: it found nothing, for a reason of its own, or not in time.
    """
    command = [sys.executable, "-P", "-m", "hpcpace.hang.verdict", str(attempt.path)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise ValueError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:_MAX_TEXT])
        words = convert(parse_json(done.stdout), HangWords)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the records could not be read within {timeout_s:g} s") from error
    except (OSError, ValueError) as error:
        raise RuntimeError(f"the records cannot be read: {error}") from error
    return words if words.headline else None


def find_verdict(attempt: Attempt) -> HangWords | None:
    """Return who holds up whom in an attempt, in words; None if no rank waits for another.

    Raises:
        TraceError: no trace can be read.
    """
    from hpcpace.hang.activity import with_activity
    from hpcpace.hang.from_traces import read_records
    from hpcpace.hang.rules import find_hang

    job = read_records(attempt).view()
    hang = find_hang(job)
    return None if hang is None else describe(hang, with_activity(FoundHang(hang=hang, job=job), attempt).job)


def main() -> None:
    """Print the verdict on the attempt whose folder is the only argument."""
    path = Path(sys.argv[1])
    with Folder.open(path.parent) as run:
        run.owner = os.geteuid()
        words = find_verdict(RunDirectory(path.parent, run).attempt(Attempt(path).number))
    content: dict[str, Any] = asdict(words or HangWords(headline="", why=(), advice=""))
    print(json.dumps(content))


if __name__ == "__main__":
    main()
