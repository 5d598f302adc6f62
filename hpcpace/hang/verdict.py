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
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpcpace.core.files import Folder
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
from hpcpace.hang.views import Call, Doing, Hang, HangKind, JobView, RankView

_MAX_STACKS = 4
_MAX_FRAMES = 4
_MAX_LINKS = 6
_MAX_ALSO = 3
_MAX_NAME = 40
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

    headline: str
    why: tuple[str, ...]
    advice: str


def describe(hang: Hang, job: JobView) -> HangWords:
    """Return a hang in words.

    Args:
        hang: what `hpcpace.hang.rules.find_hang` found.
        job: in which it found it.
    """
    parts = [replace(hang, culprits=_here(hang)), *hang.also]
    also = [f"also: {_headline(part, job)}" for part in hang.also[:_MAX_ALSO]]
    if len(hang.also) > _MAX_ALSO:
        also.append(f"also: {plural(len(hang.also) - _MAX_ALSO, 'more operation')} like these")
    why = [*also, *_waiting(hang), *_chain(hang, job), *_states(parts, job), *_stacks(hang, job)]
    return HangWords(
        headline=f"hang: {_headline(parts[0], job)}{_since(hang, job)}",
        why=tuple(printable(line) for line in why),
        advice=printable(_advice(hang, job)),
    )


def call_name(call: Call, job: JobView) -> str:
    """Return a call in words: `all_reduce 123 of group dp (step 44)`, `send from rank 0 to rank 2 in group pp`."""
    group = shortened(job.groups[call.channel.group].name, max_letters=_MAX_NAME)
    step = f" (step {call.step})" if call.step >= 0 else ""
    if call.channel.source >= 0:  # their numbers are ours, and tell nobody anything
        way = f"from rank {call.channel.source} to rank {call.channel.destination}"
        return f"{_op(call)} {way} in group {group}{step}"
    return f"{_op(call)} {call.seq} of group {group}{step}"


def _headline(hang: Hang, job: JobView) -> str:
    what = call_name(hang.call, job) if hang.call is not None else "the job"
    who = named_ranks(hang.culprits or hang.could_be, _hosts(job))
    if hang.could_be:
        return _set_headline(hang, what, who)
    match hang.kind:
        case HangKind.NEVER_CALLED:
            return f"{what} waits for {who}, which never {_own_word(hang.call)} it"
        case HangKind.OWN_WORK:
            return f"{what} waits for {who}, which {_is(hang.culprits)} {_doing(hang, job)}"
        case HangKind.GONE:
            return f"{what} waits for {who}, which {_gone(hang, job)}"
        case HangKind.PEERS_LEFT:
            where = what if hang.call is not None else "operations"
            return f"{who} {_is(hang.culprits)} still in {where}, which others have finished"
        case HangKind.MISMATCH:
            return f"{who} called {_instead(hang, job)} where the others called {what}{_own_size(hang, job)}"
        case HangKind.DISORDER:
            return f"{who} called the operations of two groups in another order than the others, which are in {what}"
        case HangKind.NETWORK:
            return f"all members are in {what}, and nothing moves"
        case _:
            return f"{what} does not finish, and the records do not show why" + (
                f": {printable(hang.reason)}" if hang.reason else ""
            )


def _instead(hang: Hang, job: JobView) -> str:
    """Return what the culprits of a mismatch called, if that is one thing."""
    called = {_differing(hang, job.ranks[rank]).partition(" (")[0] for rank in _here(hang)} - {""}
    return called.pop() if len(called) == 1 else "other operations"


def _own_size(hang: Hang, job: JobView) -> str:
    """Return the size of the operation that most called, if only that tells it from what the culprits called."""
    if hang.call is None or not _instead(hang, job).startswith(f"{_op(hang.call)} "):
        return ""
    return f",{_size(hang.call)}{_root(hang.call)}" if hang.call.size_bytes >= 0 or hang.call.root >= 0 else ""


def _own_word(call: Call | None) -> str:
    """Return what the other side does to an operation: a message that was sent is received."""
    return {"send": "received", "recv": "sent"}.get(call.op if call is not None else "", "called")


def _set_headline(hang: Hang, what: str, who: str) -> str:
    match hang.kind:
        case HangKind.MISMATCH:
            return f"{who} called different operations, sizes or roots in the place of {what}"
        case HangKind.DISORDER:
            return f"{who} wait for each other, in {what} and in another operation"
        case _:
            reason = f": {printable(hang.reason)}" if hang.reason else ""
            if len(hang.could_be) == 1:
                return f"{what} may wait for {who}, but that is not sure{reason}"
            return f"{what} waits for one or more of {who}{reason}"


def _here(hang: Hang) -> tuple[int, ...]:
    """Return the culprits of a hang without those that hold up others in another operation."""
    elsewhere = {rank for part in hang.also for rank in part.culprits}
    return tuple(rank for rank in hang.culprits if rank not in elsewhere)


def _since(hang: Hang, job: JobView) -> str:
    if hang.since_ns is None:
        return ""
    if job.is_dated:
        began = datetime.fromtimestamp(hang.since_ns / NS_PER_S, UTC)
        return f"; since {began:%Y-%m-%d %H:%M:%S} UTC"
    return f"; {format_duration(job.now_ns - hang.since_ns)} so far"


def _waiting(hang: Hang) -> Iterable[str]:
    if hang.waiting:
        yield f"{rank_list(hang.waiting)} {'waits' if len(hang.waiting) == 1 else 'wait'}"


def _chain(hang: Hang, job: JobView) -> Iterable[str]:
    """Yield the way from those that wait to the root, where it has more than one link."""
    if len(hang.chain) > 1:
        links = [call_name(call, job) for call in hang.chain]
        if len(links) > _MAX_LINKS:
            skipped = plural(len(links) - _MAX_LINKS, "more operation")
            links[_MAX_LINKS // 2 : len(links) - _MAX_LINKS // 2] = [skipped]
        yield "one waits for the next: " + ", then ".join(links)


def _states(parts: Sequence[Hang], job: JobView) -> Iterable[str]:
    """Yield what each culprit called instead, does, or did last."""
    of_rank = {rank: part for part in parts for rank in part.culprits}
    for rank in sorted(of_rank)[:_MAX_STACKS]:
        view = job.ranks[rank]
        if called := _differing(of_rank[rank], view):
            yield f"rank {rank} called {called}"
        elif of_rank[rank].kind is HangKind.DISORDER:
            if opened := [call_name(call, job) for call in view.calls if call.is_open][:_MAX_LINKS]:
                yield f"rank {rank} is in {listed(opened)}"
        elif of_rank[rank].kind is HangKind.GONE:
            if view.doing not in (Doing.UNKNOWN, Doing.ENDED):
                yield f"rank {rank} was last seen {view.doing}"
        elif view.doing is not Doing.UNKNOWN:
            since = ""
            if view.doing_since_ns is not None:
                since = f" for {format_duration(job.now_ns - view.doing_since_ns)}"
            yield f"rank {rank} has been {view.doing}{since}" if since else f"rank {rank}: {view.doing}"
        elif view.calls and of_rank[rank].kind is HangKind.NEVER_CALLED:
            where = f", at {view.calls[-1].where}" if view.calls[-1].where else ""
            yield f"rank {rank} last called {call_name(view.calls[-1], job)}{where}"


def _differing(hang: Hang, view: RankView) -> str:
    if hang.kind is not HangKind.MISMATCH or hang.call is None:
        return ""
    same = [call for call in view.calls if (call.channel, call.seq) == (hang.call.channel, hang.call.seq)]
    return listed([f"{_op(call)}{_size(call)}{_root(call)}{f' ({call.where})' if call.where else ''}" for call in same])


def _op(call: Call) -> str:
    return shortened(call.op, max_letters=_MAX_NAME)


def _size(call: Call) -> str:
    return f" of {format_bytes(call.size_bytes)}" if call.size_bytes >= 0 else ""


def _root(call: Call) -> str:
    return f" with root {call.root}" if call.root >= 0 else ""


def _stacks(hang: Hang, job: JobView) -> Iterable[str]:
    for rank in (hang.culprits or hang.could_be)[:_MAX_STACKS]:
        view = job.ranks.get(rank)
        if view is not None and view.stack:
            yield f"stack of rank {rank}: " + " <- ".join(reversed(view.stack[-_MAX_FRAMES:]))


def _doing(hang: Hang, job: JobView) -> str:
    doing = sorted({job.ranks[rank].doing for rank in hang.culprits} - {Doing.UNKNOWN})
    return listed(doing) or "busy with its own work"


def _gone(hang: Hang, job: JobView) -> str:
    views = [job.ranks[rank] for rank in hang.culprits]
    ends = list(dict.fromkeys(view.end for view in views if view.end))
    if any(view.is_gone for view in views):
        return "ended" + (f" ({printable(listed(ends))})" if ends else "")
    seen = [view.seen_ns for view in views if view.seen_ns is not None]
    silent = f" for {format_duration(job.now_ns - max(seen))}" if seen else ""
    return f"{'has' if len(views) == 1 else 'have'} shown no sign of life{silent}"


def _advice(hang: Hang, job: JobView) -> str:
    who = rank_list(hang.culprits or hang.could_be) if hang.culprits or hang.could_be else "all ranks"
    has_stacks = all(rank in job.ranks and job.ranks[rank].stack for rank in hang.culprits or hang.could_be or [-1])
    look = f"see where the stack of {who} ends" if has_stacks else f"look at the stack of {who} (py-spy dump --pid)"
    hosts = named_ranks(hang.culprits or hang.could_be, _hosts(job)) or who
    match hang.kind:
        case HangKind.NEVER_CALLED:
            return f"{look}: find the branch that leaves out the operation, or what it does instead"
        case HangKind.OWN_WORK:
            return f"{look}, and check the storage and host on which it works"
        case HangKind.GONE:
            if any(job.ranks[rank].is_gone for rank in hang.culprits):
                return f"read the log of {hosts}, and look for the out-of-memory killer on its host (dmesg)"
            return f"see whether the host of {hosts} answers, and whether its process was stopped or killed (ps, dmesg)"
        case HangKind.PEERS_LEFT:
            return f"check the device and host of {hosts} (nvidia-smi, dmesg), and whether its process is stopped"
        case HangKind.MISMATCH:
            return "make all ranks of the group call the same operations with the same sizes and roots, in one order"
        case HangKind.DISORDER:
            return "call the operations of all groups in the same order on all ranks"
        case HangKind.NETWORK:
            return "check the links, devices and NCCL or gloo logs of the members: no rank is late"
        case _:
            return f"bring the records of the ranks that have none, or {look}"


def _hosts(job: JobView) -> dict[int, str]:
    return {rank: view.host for rank, view in job.ranks.items()}


def _is(ranks: tuple[int, ...]) -> str:
    return "is" if len(ranks) == 1 else "are"


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
        content = json.loads(done.stdout)
        words = HangWords(
            headline=str(content["headline"])[:_MAX_TEXT],
            why=tuple(str(line)[:_MAX_TEXT] for line in content["why"]),
            advice=str(content["advice"])[:_MAX_TEXT],
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the records could not be read within {timeout_s:g} s") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"the records cannot be read: {error or type(error).__name__}") from error
    return words if words.headline else None


def find_verdict(attempt: Attempt) -> HangWords | None:
    """Return who holds up whom in an attempt, in words; None if no rank waits for another.

    Raises:
        TraceError: no trace can be read.
    """
    from hpcpace.hang.from_traces import read_records
    from hpcpace.hang.rules import find_hang

    job = read_records(attempt).view()
    hang = find_hang(job)
    return None if hang is None else describe(hang, job)


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
