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
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpcpace.core.codec import Text, convert, parse_json
from hpcpace.core.files import Folder
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.core.text import (
    NS_PER_S,
    format_bytes,
    format_duration,
    listed,
    named_ranks,
    plural,
    printable,
    rank_list,
    shortened,
)
from hpcpace.hang.views import Call, Doing, FoundHang, Hang, HangKind, JobView, ProcessState, RankView

_NEXT = frozenset({Doing.LOADING, Doing.SAVING, Doing.EVALUATING, Doing.COMMUNICATING})
_OUTSIDE = frozenset({HangKind.NEVER_CALLED, HangKind.OWN_WORK, HangKind.GONE})
_COUNTED = frozenset({HangKind.NEVER_CALLED, HangKind.TOO_MANY, HangKind.TOO_FEW})
_MIN_AGE_NS = NS_PER_S
"""display: what ended a job at once did not last."""
_MAX_STATES = 4
_MAX_STACKS = 4
_MAX_FRAMES = 4
_LIBRARIES = ("/site-packages/", "/lib/python3.")
"""display: of their frames, the innermost one alone says where a rank is."""
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
            yield f"rank {rank} used {activity.cores:.2f} cores {when}: it is {activity}"


def _stacks(hang: Hang, job: JobView) -> Iterable[str]:
    for rank in (hang.culprits or hang.could_be)[:_MAX_STACKS]:
        view = job.ranks.get(rank)
        if view is not None and view.stack:
            own = [frame for frame in view.stack[:-1] if not any(folder in frame for folder in _LIBRARIES)]
            shown = [*own[1 - _MAX_FRAMES :], view.stack[-1]] if own else view.stack[-_MAX_FRAMES:]
            yield f"stack of rank {rank}: " + " <- ".join(reversed(shown))


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
            return f"{look}, and find out what that line waits for or why it goes on"
        case HangKind.OWN_WORK:
            return f"{look}, and check the storage and host on which it works"
        case HangKind.GONE:
            if any(job.ranks[rank].is_gone for rank in hang.culprits):
                host = "its host" if len(named) == 1 else "their hosts"
                return f"read the log of {hosts}, and look for the out-of-memory killer on {host} (dmesg)"
            views = [job.ranks[rank] for rank in named]
            if _are_here(views) and not any(str(view.activity) == ProcessState.STOPPED for view in views):
                return f"{look}: its process is there, but no thread of its Python runs"
            return f"see whether the host of {hosts} answers, and whether its process was stopped or killed (ps, dmesg)"
        case HangKind.PEERS_LEFT if hang.could_be:
            return f"check the devices and hosts of {hosts} (nvidia-smi, dmesg), and the links between them"
        case HangKind.PEERS_LEFT:
            return f"check the device and host of {hosts} (nvidia-smi, dmesg), and whether its process is stopped"
        case HangKind.MISMATCH:
            alike = "the same operations with the same sizes, types and roots, in one order"
            return f"make all ranks of the group call {alike}"
        case HangKind.DISORDER:
            return "call the operations of all groups in the same order on all ranks"
        case HangKind.NETWORK:
            return "check the links, devices and NCCL or gloo logs of the members: no rank is late"
        case _:
            return f"get the missing records, or {look}"


def _is_open(view: RankView) -> bool:
    """Return whether it is not known what a rank does, and nothing points to its storage."""
    is_blocked = view.activity is not None and view.activity.state is ProcessState.BLOCKED
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


_MAX_CLAUSES = 4
_MAX_NAME, _MAX_ERROR = 40, 100
_WAITS = frozenset({HangKind.NEVER_CALLED, HangKind.OWN_WORK, HangKind.GONE})


def headline(hang: Hang, job: JobView) -> str:
    """Return one sentence that has every culprit of a hang, each with the reason why it is one."""
    clauses = list(_clauses(parts_of(hang), job))
    if len(clauses) > _MAX_CLAUSES:
        rest = sorted({rank for _, ranks in clauses[_MAX_CLAUSES - 1 :] for rank in ranks})
        more = f"{plural(len(clauses) - _MAX_CLAUSES + 1, 'more operation')} wait for {rank_list(rest)}"
        clauses[_MAX_CLAUSES - 1 :] = [(more, tuple(rest))]
    texts = [text for text, _ in clauses]
    return "; ".join([*texts[:-1], *([f"and {texts[-1]}"] if texts[1:] else texts)])


def parts_of(hang: Hang) -> list[Hang]:
    """Return a hang as one for each operation and reason, each with the culprits of that alone."""
    elsewhere = {rank for part in hang.also for rank in part.culprits}
    here = tuple(rank for rank in hang.culprits if rank not in elsewhere)
    return [replace(hang, culprits=here, also=()), *hang.also]


def call_name(call: Call, job: JobView) -> str:
    """Return a call in words: `all_reduce 123 of group dp (step 44)`, `send from rank 0 to rank 2 in group pp`."""
    group = shortened(job.groups[call.channel.group].name, max_letters=_MAX_NAME)
    step = f" (step {call.step})" if call.step >= 0 else ""
    if call.channel.source >= 0:  # their numbers are ours, and tell nobody anything
        way = f"from rank {call.channel.source} to rank {call.channel.destination}"
        return f"{op_word(call)} {way} in group {group}{step}"
    number = f" {call.seq}" if call.is_numbered else ""
    return f"{op_word(call)}{number} of group {group}{step}"


def op_word(call: Call) -> str:
    """Return the kind of an operation as others named it, but short."""
    return shortened(call.op, max_letters=_MAX_NAME)


def called_instead(hang: Hang, view: RankView) -> str:
    """Return what a rank called where others called the operation of a mismatch, with the line that called it."""
    if hang.kind is not HangKind.MISMATCH or hang.call is None:
        return ""
    same = [call for call in view.calls if (call.channel, call.seq) == (hang.call.channel, hang.call.seq)]
    return listed([f"{_with_size(call, hang.call)}{f' ({call.where})' if call.where else ''}" for call in same])


def count_words(number: int | None) -> str:
    """Return by how many operations ranks differ, as a word before `too many`."""
    return "more than one" if number is None else "one" if number == 1 else str(number)


def num_apart(hang: Hang, job: JobView) -> int | None:
    """Return how many more operations one side of a hang has called than the other; None where ranks of one differ."""
    if hang.sides is None or hang.call is None:
        return None
    channel = hang.call.channel
    more, fewer = ({job.ranks[rank].entered.get(channel, 0) for rank in side} for side in hang.sides)
    return max(more) - max(fewer) if len(more) == len(fewer) == 1 and max(more) > max(fewer) else None


def is_or_are(ranks: Sequence[int]) -> str:
    """Return the verb for some ranks."""
    return "is" if len(ranks) == 1 else "are"


def _clauses(parts: Sequence[Hang], job: JobView) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Yield a clause for each operation, with the ranks that it names; culprits of one operation share one."""
    waiting: dict[Call | None, list[Hang]] = {}
    for part in parts:
        key = part.call if part.kind in _WAITS and not part.could_be else None
        waiting.setdefault(key, []).append(part)
    for part in parts:
        if part.kind not in _WAITS or part.could_be or part.call is None:
            yield _alone(part, job), part.culprits or part.could_be
        elif (same := waiting.pop(part.call, None)) is not None:
            held = ", and for ".join(_culprits(one, job) for one in same)
            yield f"{call_name(part.call, job)} waits for {held}", tuple(rank for one in same for rank in one.culprits)


def _culprits(hang: Hang, job: JobView) -> str:
    """Return the culprits of an operation that others wait in, with what is known of them."""
    who = ranks_on_hosts(hang.culprits, job)
    match hang.kind:
        case HangKind.OWN_WORK:
            return f"{who}, which {is_or_are(hang.culprits)} {_doing(hang, job)}"
        case HangKind.GONE:
            return f"{who}, which {_gone(hang, job)}"
        case _:
            return f"{who}, which never {_own_word(hang.call)} it"


def _alone(hang: Hang, job: JobView) -> str:
    what = call_name(hang.call, job) if hang.call is not None else "the job"
    who = ranks_on_hosts(hang.culprits or hang.could_be, job)
    if hang.sides is not None:
        return _sides(hang, job)
    if hang.could_be:
        return _set(hang, what, who)
    match hang.kind:
        case HangKind.PEERS_LEFT:
            where = what if hang.call is not None else "operations"
            return f"{who} {is_or_are(hang.culprits)} still in {where}, which others have finished"
        case HangKind.MISMATCH:
            return f"{who} called {_instead(hang, job)} where the others called {what}{_own_size(hang, job)}"
        case HangKind.DISORDER:
            return f"{who} called the operations of two groups in another order than the others, which are in {what}"
        case HangKind.TOO_MANY:
            return f"{who} called {_too(hang, 'many')}: {_extra(hang, job)}, which the others did not call"
        case HangKind.TOO_FEW:
            return f"{who} called {_too(hang, 'few')}: {_extra(hang, job)}, which the others called"
        case HangKind.NETWORK:
            return f"all members are in {what}, and nothing moves"
        case HangKind.UNKNOWN:
            reason = f": {printable(hang.reason)}" if hang.reason else ""
            return f"{what} does not finish, and the records do not show why{reason}"
        case _:
            return f"{what} waits for {_culprits(hang, job)}"


def _sides(hang: Hang, job: JobView) -> str:
    """Return what sets two sets of ranks apart, of which it is not known which one is at fault."""
    assert hang.sides is not None
    first, second = (ranks_on_hosts(side, job) for side in hang.sides)
    what = call_name(hang.call, job) if hang.call is not None else "an operation"
    if hang.extra:
        return f"{first} called {_extra(hang, job)}, and {second} did not: either may be wrong"
    if hang.kind is HangKind.PEERS_LEFT:
        has = "has" if len(hang.sides[0]) == 1 else "have"
        cause = "one or more of them" if len(hang.sides[1]) > 1 else "it"
        return (
            f"{second} {is_or_are(hang.sides[1])} still in {what}, which {first} {has} finished: {cause}, or the"
            " network between them, holds it up"
        )
    count = count_words(num_apart(hang, job))
    return f"only {first} called {what}: {second} called {count} too few, or {first} {count} too many"


def _too(hang: Hang, word: str) -> str:
    return f"{'one' if len(hang.extra) == 1 else len(hang.extra)} operation{'s' if hang.extra[1:] else ''} too {word}"


def _extra(hang: Hang, job: JobView) -> str:
    """Return the calls that some ranks made and others did not, with the line of the first one."""
    first = hang.extra[0]
    at = f" at {first.where}" if first.where else ""
    more = f" and {plural(len(hang.extra) - 1, 'more operation')} from there" if hang.extra[1:] else ""
    return f"{call_name(first, job)}{at}{more}"


def _set(hang: Hang, what: str, who: str) -> str:
    match hang.kind:
        case HangKind.MISMATCH:
            return f"{who} called different operations, sizes, types or roots in the place of {what}"
        case HangKind.DISORDER:
            return f"{who} wait for each other, in {what} and in another operation"
        case _:
            reason = f": {printable(hang.reason)}" if hang.reason else ""
            if len(hang.could_be) == 1:
                return f"{what} may wait for {who}, but that is not sure{reason}"
            return f"{what} waits for one or more of {who}{reason}"


def _instead(hang: Hang, job: JobView) -> str:
    """Return what the culprits of a mismatch called, if that is one thing."""
    called = {called_instead(hang, job.ranks[rank]).partition(" (")[0] for rank in hang.culprits} - {""}
    return called.pop() if len(called) == 1 else "other operations"


def _own_size(hang: Hang, job: JobView) -> str:
    """Return size and type of the operation that most called, if what the culprits called differs only in them."""
    if hang.call is None or not _instead(hang, job).startswith(f"{op_word(hang.call)} "):
        return ""
    place = hang.call.channel, hang.call.seq
    theirs = (call for rank in hang.culprits for call in job.ranks[rank].calls if (call.channel, call.seq) == place)
    own = _with_size(hang.call, next(theirs)).removeprefix(op_word(hang.call))
    return f",{own}" if own else ""


def _own_word(call: Call | None) -> str:
    """Return what the other side does to an operation: a message that was sent is received."""
    return {"send": "received", "recv": "sent"}.get(call.op if call is not None else "", "called")


def _with_size(call: Call, beside: Call) -> str:
    """Return a call with its size, in bytes where another one would read the same, and its type if that differs."""
    size = f" of {plural(call.num_elements, 'element')}" if call.num_elements >= 0 else ""
    if call.size_bytes > 0:
        size = format_bytes(call.size_bytes)
        has_other_size = call.size_bytes != beside.size_bytes and size == format_bytes(max(beside.size_bytes, 0))
        size = f" of {call.size_bytes:,} B" if has_other_size else f" of {size}"
        if call.part_bytes != beside.part_bytes and min(call.part_bytes, beside.part_bytes) >= 0:
            size += f" in parts of {call.part_bytes:,} B"
    if call.dtype != beside.dtype and call.dtype and beside.dtype:
        size += f" in {call.dtype}"
    return op_word(call) + size + (f" with root {call.root}" if call.root >= 0 else "")


def doing_words(view: RankView, *, is_many: bool = False) -> str:
    """Return what a rank does as far as it is known, and not guessed; empty where nothing is known."""
    is_asleep = view.activity is not None and view.activity.state is not ProcessState.RUNNING
    if view.is_guess or (view.doing is Doing.COMPUTING and is_asleep):
        after = f" after {view.after}" if view.after else ""
        return f"in {'their' if is_many else 'its'} own code{after}"
    return "" if view.doing is Doing.UNKNOWN else str(view.doing)


def _with_state(view: RankView, *, is_many: bool) -> str:
    """Return what a rank does, and whether it sleeps meanwhile."""
    doing, state = doing_words(view, is_many=is_many), "" if view.activity is None else str(view.activity)
    return ", ".join(dict.fromkeys(filter(None, (doing, state))))


def _doing(hang: Hang, job: JobView) -> str:
    is_many = len(hang.culprits) > 1
    said = sorted({_with_state(job.ranks[rank], is_many=is_many) for rank in hang.culprits} - {""})
    return listed(said) or "busy with its own work"


def _gone(hang: Hang, job: JobView) -> str:
    views = [job.ranks[rank] for rank in hang.culprits]
    ends = list(
        dict.fromkeys(f"{view.end}{shortened(view.error, max_letters=_MAX_ERROR)}" for view in views if view.end)
    )
    if any(view.is_gone for view in views):
        return "ended" + (f" ({printable(listed(ends))})" if ends else "")
    seen = [view.seen_ns for view in views if view.seen_ns is not None]
    silent = f" for {format_duration(job.now_ns - max(seen))}" if seen else ""
    said = sorted({str(view.activity) for view in views}) if _are_here(views) else []
    now = f"{is_or_are(hang.culprits)} {listed(said)}, and " if said else ""
    return f"{now}{'has' if len(views) == 1 else 'have'} shown no sign of life{silent}"


def _are_here(views: Sequence[RankView]) -> bool:
    """Return whether the processes of all ranks were seen just now."""
    return all(view.activity is not None and view.activity.is_now for view in views)


def ranks_on_hosts(ranks: Sequence[int], job: JobView) -> str:
    """Return ranks with the host of each, as far as it is known."""
    return named_ranks(ranks, {rank: view.host for rank, view in job.ranks.items()})


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
