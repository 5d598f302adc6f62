"""The headline of a hang: who holds up whom, in which operation and for which reason, all in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hpcpace.core.text import (
    format_bytes,
    format_duration,
    listed,
    named_ranks,
    plural,
    printable,
    rank_list,
    shortened,
)
from hpcpace.hang.views import Call, Doing, Hang, HangKind, JobView, RankView, State

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
            return f"{who} called different operations, sizes or roots in the place of {what}"
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
    """Return the size of the operation that most called, if it differs from what the culprits called only in that."""
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
    """Return a call with its size, in bytes where that of another call would read the same."""
    size = f" of {plural(call.num_elements, 'element')}" if call.num_elements >= 0 else ""
    if call.size_bytes > 0:
        size = format_bytes(call.size_bytes)
        has_other_size = call.size_bytes != beside.size_bytes and size == format_bytes(max(beside.size_bytes, 0))
        size = f" of {call.size_bytes:,} B" if has_other_size else f" of {size}"
        if call.part_bytes != beside.part_bytes and min(call.part_bytes, beside.part_bytes) >= 0:
            size += f" in parts of {call.part_bytes:,} B"
    return op_word(call) + size + (f" with root {call.root}" if call.root >= 0 else "")


def doing_words(view: RankView, *, is_many: bool = False) -> str:
    """Return what a rank does as far as it is known, and not guessed; empty where nothing is known."""
    is_asleep = view.activity is not None and view.activity.state is not State.RUNNING
    if view.is_guess or (view.doing is Doing.COMPUTING and is_asleep):
        after = f" after {view.after}" if view.after else ""
        return f"in {'their' if is_many else 'its'} own code{after}"
    return "" if view.doing is Doing.UNKNOWN else str(view.doing)


def _with_state(view: RankView, *, is_many: bool) -> str:
    """Return what a rank does, and whether it sleeps meanwhile."""
    doing, state = doing_words(view, is_many=is_many), "" if view.activity is None else str(view.activity.state)
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
    is_stopped = all(view.activity is not None and view.activity.state is State.STOPPED for view in views)
    stopped = f"{is_or_are(hang.culprits)} stopped, and " if is_stopped else ""
    return f"{stopped}{'has' if len(views) == 1 else 'have'} shown no sign of life{silent}"


def ranks_on_hosts(ranks: Sequence[int], job: JobView) -> str:
    """Return ranks with the host of each, as far as it is known."""
    return named_ranks(ranks, {rank: view.host for rank, view in job.ranks.items()})
