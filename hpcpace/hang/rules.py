"""Who holds up whom, from what ranks have entered and finished, and where their calls cease to agree.

Every rank of a job that no longer moves waits in an operation, is stuck in its own work, or has gone. From each that
waits, the rules follow the operations to the members that have not come, to those for which these wait themselves, and
so on, to ranks that nobody else explains. Only these are named. What rests on ranks without a record is a set.

A rank that calls one collective more than the others is one place ahead from then on: its next call meets an earlier
one of theirs. Nothing may fail for a while: two barriers match, whatever lines they are on. So the records of members
are laid side by side. Where two differ, one is shifted against the other by each number of calls, and the number that
explains the rest best counts, if no other one does as well.

Calls are alike if operation and call site are, or, where the site is unknown, operation and size. A call site that only
one of two ranks has, such as that of its own pipeline stage, may stand for any call of the same operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.text import rank_list
from hpcpace.hang.graph import Graph, Meeting, Place, WaitGraph, call_order, is_silent
from hpcpace.hang.views import Call, Channel, Doing, Hang, HangKind, JobView, RankView

_OWN_WORK = frozenset({Doing.STARTING, Doing.COMPUTING, Doing.LOADING, Doing.SAVING, Doing.EVALUATING})
_NO_CALLS = frozenset({Doing.LOADING, Doing.SAVING, Doing.EVALUATING})

_MAX_PARTS = 16
"""Operations that are distinguished where ranks hold up others in several; nobody reads more."""
_MAX_CHANNELS = 64
"""Groups in which a rank is at a time, of which each two are compared."""


def find_hang(job: JobView, *, least_ns: int = 0) -> Hang | None:
    """Return what holds a job up; None if no operation has been open for long enough.

    Args:
        job: what is known of its ranks.
        least_ns: how long an operation must be open for the job to hang; 0 for records that were written because of a
            hang. Operations of which it is not known when they were entered count.
    """
    waits = WaitGraph(job)
    if not waits.open_calls and job.unplaced:
        reason = "which operations its ranks are in is not known"
        return Hang(kind=HangKind.UNKNOWN, waiting=job.unplaced, reason=reason)
    entered_ns = [call.entered_ns for opened in waits.open_calls.values() for call in opened]
    known_ns = [at for at in entered_ns if at is not None]
    are_known = len(known_ns) == len(entered_ns)
    if not entered_ns or (are_known and job.now_ns - min(known_ns) < least_ns):
        return None
    graph = Graph(waits)
    for rule in (_shifted, _mismatch, _roots, _unrecorded, _crossed, _circle, _silent, _behind, _all_inside):
        if hang := rule(graph):
            return hang
    return _hang(graph, HangKind.UNKNOWN, call=graph.oldest, reason="those that waited in it have ended, too")


def _shifted(graph: Graph) -> Hang | None:
    """Ranks that called an operation which the other members of a group did not call, or the other way round."""
    inside: dict[Channel, Call] = {}
    for meeting in graph.waits.meetings.values():
        if meeting.channel.source < 0:
            call = min(meeting.inside.values(), key=call_order)
            inside[meeting.channel] = min(inside.get(meeting.channel, call), call, key=call_order)
    order = sorted(inside, key=lambda channel: call_order(inside[channel]))
    shifts = (shift for shift in find_shifts(graph.waits.job, order) if shift.is_located)
    shift = next(shifts, None)
    return None if shift is None else _of_shift(graph, shift, inside[shift.channel])


def _of_shift(graph: Graph, shift: Shift, call: Call) -> Hang:
    """Return a hang whose cause are calls that only some members made: what most of them did counts as right."""
    num_members = len(graph.waits.job.groups[shift.channel.group].members)
    callers, others = shift.callers, shift.others
    if 2 * len(callers) > num_members:
        return replace(_hang(graph, HangKind.TOO_FEW, culprits=others, call=call), extra=shift.calls)
    # What all have called before may be missing from the others as well.
    if 2 * len(others) > num_members and not shift.is_usual:
        return replace(_hang(graph, HangKind.TOO_MANY, culprits=callers, call=call), extra=shift.calls)
    sides = callers, others
    could_be = tuple(sorted({*callers, *others}))
    reason = (
        "all have made such calls before" if shift.is_usual else "neither did what most members are known to have done"
    )
    hang = _hang(graph, HangKind.TOO_MANY, could_be=could_be, call=call, reason=reason)
    return replace(hang, extra=shift.calls, sides=sides)


def _mismatch(graph: Graph) -> Hang | None:
    """Ranks that stand in one place of an order, in different operations."""
    split = [meeting for meeting in graph.waits.meetings.values() if meeting.factions]
    if not split:
        return None
    first = min(split, key=lambda meeting: (_entered_ns(meeting.inside.values()), meeting.channel, meeting.seq))
    largest, *others = first.factions
    minority = tuple(sorted(rank for faction in others for rank in faction))
    call = first.inside[next((rank for rank in largest if rank in first.inside), min(first.inside))]
    if 2 * len(largest) > len(first.members):
        return _hang(graph, HangKind.MISMATCH, culprits=minority, call=call)
    return _hang(
        graph,
        HangKind.MISMATCH,
        could_be=tuple(sorted((*largest, *minority))),
        call=call,
        reason="no more than half of the group are known to have called the same",
    )


def _roots(graph: Graph) -> Hang | None:
    """Ranks that others wait for and that wait for nobody, and ranks left behind in what their peers have finished."""
    awaited = graph.awaited()
    # What a rank without a sign of life was in is only what it was in then.
    stale = {rank for rank in awaited - graph.edges.keys() - graph.odd.keys() if graph.are_silent([rank])}
    busy = graph.waits.open_calls.keys() - graph.gone - stale
    never = {rank for rank in awaited - busy if graph.known(rank)}
    left = {rank for rank in graph.odd if 2 * len(_of(graph, rank).inside) <= len(_of(graph, rank).members)}
    if not never | left:
        return None
    parts = [*_never_called(graph, never), *_left_behind(graph, left)]
    first, *others = sorted(parts, key=lambda part: (bool(part.could_be), part.call is None, -len(part.waiting)))
    # Whoever waits for one of them waits for all: each is named.
    culprits = {rank for part in parts for rank in part.culprits}
    return replace(
        first,
        culprits=tuple(sorted(culprits)),
        could_be=() if culprits else tuple(sorted({rank for part in parts for rank in part.could_be})),
        waiting=tuple(sorted({rank for part in parts for rank in part.waiting} - culprits)),
        also=tuple(others),
    )


def _never_called(graph: Graph, ranks: set[int]) -> list[Hang]:
    """Return hangs for each operation that some of these ranks have not entered; each rank is in one.

    Operations in which most of them are missing come first.
    """
    missed: dict[Place, set[int]] = {}
    for edges, _ in graph.alike:
        for peer in ranks & edges.keys():
            missed.setdefault(edges[peer], set()).add(peer)
    meetings = graph.waits.meetings
    firsts = {place: min(meetings[place].inside.values(), key=call_order) for place in missed}
    order = {place: (call.entered_ns or 0, -len(meetings[place].inside)) for place, call in firsts.items()}
    widest = [(-len(peers), *order[place], place) for place, peers in missed.items()]
    heapify(widest)
    found: list[Hang] = []
    left = set(ranks)
    while left and len(found) < _MAX_PARTS:
        num_before, *_, place = heappop(widest)
        here = missed[place] & left
        if len(here) == -num_before:
            found += _by_reason(graph, here, firsts[place])
            left -= here
        elif here:
            heappush(widest, (-len(here), *order[place], place))
    if left:
        found += _by_reason(graph, left, None)
    return found


def _by_reason(graph: Graph, ranks: Iterable[int], call: Call | None) -> list[Hang]:
    """Return a hang for each reason why some of these ranks have not entered an operation."""
    found: dict[tuple[HangKind, bool], list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault((_never_kind(graph, rank), rank in graph.gone), []).append(rank)
    return [_not_entered(graph, kind, tuple(some), call) for (kind, _), some in found.items()]


def _not_entered(graph: Graph, kind: HangKind, ranks: tuple[int, ...], call: Call | None) -> Hang:
    """Return a hang in an operation that some ranks have not entered.

    Where they may be most of its members, those that have entered it may have called one too many.
    """
    is_known = kind is HangKind.GONE or any(not graph.waits.job.ranks[rank].is_guess for rank in ranks)
    if (kind is HangKind.NEVER_CALLED or not is_known) and call is not None and call.channel.source < 0:
        meeting = graph.waits.meeting(call)
        if 2 * (len(ranks) + len(meeting.unknown)) > len(meeting.members):
            ahead = tuple(rank for rank in meeting.members if rank in meeting.inside or rank in meeting.finished)
            return _apart(graph, kind, call, (tuple(sorted(ahead)), ranks))
    return _hang(graph, kind, culprits=ranks, call=call)


def _apart(graph: Graph, kind: HangKind, call: Call, sides: tuple[tuple[int, ...], tuple[int, ...]]) -> Hang:
    """Return a hang of which it is known that two sets of ranks differ, and not which one is at fault."""
    many = sides[0] if kind is HangKind.PEERS_LEFT else ()
    could_be = tuple(sorted({*sides[0], *sides[1]} - set(many)))
    reason = "more than half of the members are behind the others"
    return replace(_hang(graph, kind, could_be=could_be, call=call, reason=reason), sides=sides)


def _left_behind(graph: Graph, ranks: set[int]) -> list[Hang]:
    """Return a hang for each operation in which some of these ranks are still, and their peers no longer."""
    by_place: dict[Place, list[int]] = {}
    for rank in sorted(ranks):
        by_place.setdefault((graph.odd[rank].channel, graph.odd[rank].seq), []).append(rank)
    parts = sorted(by_place.values(), key=lambda here: -len(here))
    found = [(here, graph.odd[here[0]]) for here in parts[:_MAX_PARTS]]
    rest = sorted(rank for here in parts[_MAX_PARTS:] for rank in here)
    return [
        _hang(graph, HangKind.GONE if graph.are_silent(here) else HangKind.PEERS_LEFT, culprits=tuple(here), call=call)
        for here, call in [*found, *([(rest, None)] if rest else [])]
    ]


def _unrecorded(graph: Graph) -> Hang | None:
    """Ranks of which it is not known what they have entered, where others may wait for them."""
    unknown = {rank for rank in graph.awaited() if not graph.known(rank)}
    if not unknown:
        return None
    job = graph.waits.job
    # A rank without a record may itself wait for any other that nothing else explains.
    suspects = {rank for rank in _ranks(job) if not graph.known(rank) and rank not in graph.waits.open_calls}
    suspects |= {rank for rank in _ranks(job) if rank not in graph.waits.open_calls and job.ranks[rank].is_recorded}
    suspects |= unknown | set(graph.odd) | graph.circles | _alone(graph)
    recorded = sum(view.is_recorded for view in job.ranks.values())
    reason = f"of {len(_ranks(job))} ranks, {recorded} {'is' if recorded == 1 else 'are'} recorded"
    if recorded == len(_ranks(job)):
        reason = f"the records of {rank_list(sorted(unknown))} do not show all that they called"
    return _hang(
        graph,
        HangKind.UNKNOWN,
        could_be=tuple(sorted(suspects)) if len(suspects) < len(_ranks(job)) else (),
        call=graph.call_for(unknown),
        reason=reason,
    )


def _alone(graph: Graph) -> set[int]:
    """Return the ranks inside an operation with nobody who shows that it was the right one and is not over."""
    meetings = [meeting for meeting in graph.waits.meetings.values() if meeting.unknown]
    return {rank for meeting in meetings if len(meeting.inside) == 1 for rank in meeting.inside}


def _circle(graph: Graph) -> Hang | None:
    """Ranks that wait for each other in a circle."""
    circle = graph.circles
    # Ranks that wait for nobody may be held up by the network, and by that all that wait for them.
    inside = graph.awaited() - graph.edges.keys()
    if not circle or circle & graph.waiting_for(inside).keys():
        return None
    if not all(graph.waits.open_calls[rank][0].is_aligned for rank in circle):
        reason = "the records begin too late to count the messages between ranks"
        return _hang(graph, HangKind.UNKNOWN, call=graph.oldest, reason=reason)
    silent = tuple(sorted(rank for rank in circle if graph.are_silent([rank])))
    if silent and 2 * len(silent) <= len(circle):
        return _hang(graph, HangKind.GONE, culprits=silent, call=graph.call_for(silent))
    own = tuple(sorted(rank for rank in circle if graph.waits.job.ranks[rank].doing in _NO_CALLS))
    if own:
        return _hang(graph, HangKind.OWN_WORK, culprits=own, call=graph.call_for(own))
    places: dict[Place, list[int]] = {}
    for edges, ranks in graph.alike:
        if here := circle.intersection(ranks):
            place = next(place for peer, place in edges.items() if peer in circle)
            places[place] = sorted([*places.get(place, ()), *here])
    (place, most), *rest = sorted(places.items(), key=lambda item: (-len(item[1]), item[1]))
    meeting = graph.waits.meetings[place]
    are_in_calls_alone = all(len(graph.waits.open_calls[rank]) == 1 for rank in circle)
    if len(rest) == 1 and are_in_calls_alone and 2 * len(most) > len(meeting.members):
        return _hang(graph, HangKind.DISORDER, culprits=tuple(rest[0][1]), call=meeting.inside[most[0]])
    return _hang(
        graph,
        HangKind.DISORDER,
        could_be=tuple(sorted(circle)),
        call=meeting.inside[most[0]],
        reason="they wait for each other, and no order is that of most of them",
    )


def _crossed(graph: Graph) -> Hang | None:
    """Ranks that are inside the same two collectives, of which they called the other one first."""
    orders: dict[tuple[Channel, Channel], dict[bool, list[int]]] = {}
    for rank, calls in graph.waits.open_calls.items():
        firsts = list(dict.fromkeys(call.channel for call in calls if call.channel.source < 0))[:_MAX_CHANNELS]
        for one, other in combinations(firsts, 2):
            pair = (min(one, other), max(one, other))
            orders.setdefault(pair, {True: [], False: []})[pair[0] == one].append(rank)
    crossed = {pair: ranks for pair, ranks in orders.items() if ranks[True] and ranks[False]}
    if not crossed:
        return None
    pair, ranks = max(crossed.items(), key=lambda item: len(item[1][True]) + len(item[1][False]))
    few, many = sorted(ranks.values(), key=len)
    call = next(call for call in graph.waits.open_calls[many[0]] if call.channel in pair)
    if len(few) < len(many):
        return _hang(graph, HangKind.DISORDER, culprits=tuple(few), call=call)
    return _hang(
        graph,
        HangKind.DISORDER,
        could_be=tuple(sorted(few + many)),
        call=call,
        reason="half of them called the one first, half the other",
    )


def _silent(graph: Graph) -> Hang | None:
    """Ranks inside an operation that all have entered, without a sign of life for half of its time."""
    job, call = graph.waits.job, graph.oldest
    if call is None:
        return None
    meeting = graph.waits.meeting(call)
    entered = [other.entered_ns for other in meeting.inside.values()]
    if None in entered:
        return None
    age_ns = job.now_ns - max(at for at in entered if at is not None)
    gone = [rank for rank in meeting.inside if is_silent(job.ranks[rank], job.now_ns, age_ns)]
    if not gone or 2 * len(gone) > len(meeting.members):
        return None
    return _hang(graph, HangKind.GONE, culprits=tuple(sorted(gone)), call=call)


def _behind(graph: Graph) -> Hang | None:
    """Ranks that are still inside what others have finished, and that are most of its members."""
    # What a rank has called behind another one that does not move may only be queued.
    firsts = {rank: opened[0] for rank, opened in graph.waits.open_calls.items()}
    left = [
        meeting
        for meeting in graph.waits.meetings.values()
        if meeting.finished
        and not meeting.needed
        and any(call is firsts[rank] for rank, call in meeting.inside.items())
    ]
    if not left:
        return None
    first = min(left, key=lambda meeting: (_entered_ns(meeting.inside.values()), meeting.channel, meeting.seq))
    sides = tuple(sorted(first.finished)), tuple(sorted(first.inside))
    return _apart(graph, HangKind.PEERS_LEFT, min(first.inside.values(), key=call_order), sides)


def _all_inside(graph: Graph) -> Hang | None:
    """Nobody: all members of an operation are in it."""
    full = [meeting for meeting in graph.waits.meetings.values() if len(meeting.inside) == len(meeting.members)]
    calls = [min(meeting.inside.values(), key=call_order) for meeting in full]
    # What is queued behind another operation on one of its members does not move because of that.
    moving = [call for call in calls if graph.are_first(graph.waits.meeting(call))]
    return _hang(graph, HangKind.NETWORK, call=min(moving or calls, key=call_order)) if calls else None


def _hang(
    graph: Graph,
    kind: HangKind,
    *,
    call: Call | None,
    culprits: tuple[int, ...] = (),
    could_be: tuple[int, ...] = (),
    reason: str = "",
) -> Hang:
    """Return a hang, with those that wait for its ranks and the longest way to them."""
    targets = culprits or could_be
    found = graph.waiting_for(targets)
    inside = set(graph.waits.meeting(call).inside) if call is not None else set()
    waiting = set(found) | inside if targets else set(graph.waits.open_calls)
    chain: list[Call] = []
    rank = next(reversed(found), None)
    while rank in found:
        rank, step = found[rank]
        chain.append(step)
    return Hang(
        kind=kind,
        culprits=culprits,
        could_be=could_be,
        call=call,
        waiting=tuple(sorted(waiting - set(culprits))),
        since_ns=graph.since_ns(call),
        chain=tuple(chain),
        reason=reason,
    )


def _never_kind(graph: Graph, rank: int) -> HangKind:
    view = graph.waits.job.ranks[rank]
    if view.is_gone or graph.are_silent([rank]):
        return HangKind.GONE
    is_at_work = view.doing in _OWN_WORK and not _has_skipped(graph, view)
    return HangKind.OWN_WORK if is_at_work else HangKind.NEVER_CALLED


def _has_skipped(graph: Graph, view: RankView) -> bool:
    """Return whether a rank called collectives in other steps than those that wait: it left one out before."""
    tied = (call for call in view.calls if call.channel.source < 0 and call.step >= 0)
    return any(graph.steps_of_waiting.get((call.channel, call.seq), {call.step}) != {call.step} for call in tied)


def _of(graph: Graph, rank: int) -> Meeting:
    return graph.waits.meeting(graph.odd[rank])


def _entered_ns(calls: Iterable[Call]) -> int:
    return min(call.entered_ns or 0 for call in calls)


def _ranks(job: JobView) -> list[int]:
    return sorted(set(job.ranks) | {rank for group in job.groups for rank in group.members})


_MAX_SHIFT = 64
"""Calls that ranks may be apart: an evaluation or a checkpoint of one rank alone has fewer."""
_MAX_DIFFERENCES = 16
"""Places at which two records may differ before what follows is left alone."""
_MAX_TRIES = 256
"""Places of all records of a job in which shifts are tried; some 5 ms each."""
_MIN_ALIKE = 3
"""Calls that are alike after a shift, if there are so many before the last one, in which ranks may be held up."""

# What a difference costs. A rank that is late is common, so calls that one has not made yet cost less than calls that
# it made in another order; many calls left out at once are one cause, and so are two lines that meet again and again:
# those of an `if` on the rank.
_GAP, _GAP_CALL, _MISMATCH, _LATE = 1.0, 0.1, 1.0, 0.5
_SAME = 0.05

_Key = tuple[str, int, tuple[str, ...]]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Shift:
    """Calls that some members of a group made and others did not, so that these match the wrong ones since.

    Attributes:
        channel: the collectives of the group.
        callers, others: the members that made them, and those that did not, ascending.
        calls: them, as the first of the callers made them.
        is_usual: whether the others have made such calls before.
        is_located: whether the records go back to where ranks began to differ; the callers are only ahead of the others
            otherwise, or behind them.
    """

    channel: Channel
    callers: tuple[int, ...]
    others: tuple[int, ...]
    calls: tuple[Call, ...]
    is_usual: bool
    is_located: bool


@dataclass(frozen=True, kw_only=True)
class _Record:
    """The collectives of one rank in one group, without gaps: `keys[i]` is that of number `first + i`."""

    first: int
    keys: tuple[_Key, ...]

    @property
    def end(self) -> int:
        """The number after that of its last call."""
        return self.first + len(self.keys)

    @property
    def has_sites(self) -> bool:
        """Whether any call site is known."""
        return any(site for _, _, site in self.keys)


class _Gap(NamedTuple):
    """The first place in which one of two records has calls that the other one has not.

    Attributes:
        seq: number of the first such call.
        num: how many the first of the two records has in addition; below 0 for the other one, 0 where that is not sure.
        is_located: whether both records agree before it.
    """

    seq: int
    num: int
    is_located: bool


def find_shifts(job: JobView, channels: Sequence[Channel]) -> Iterator[Shift]:
    """Yield, for each of some groups, the first calls that only some of its members made, as far as that is proven."""
    calls: dict[Channel, dict[int, dict[int, Call]]] = {channel: {} for channel in channels}
    for rank, view in job.ranks.items():
        for call in view.calls:
            if (of_channel := calls.get(call.channel)) is not None:
                of_channel.setdefault(rank, {})[call.seq] = call
    tries = iter(range(_MAX_TRIES))
    for channel in channels:
        if (shift := _find_shift(channel, calls[channel], tries)) is not None:
            yield shift


def _find_shift(channel: Channel, called: Mapping[int, Mapping[int, Call]], tries: Iterator[int]) -> Shift | None:
    records = _records(called)
    ranks_of: dict[_Record, list[int]] = {}
    for rank, record in records.items():
        ranks_of.setdefault(record, []).append(rank)
    if len(ranks_of) < 2:
        return None
    order = {record: (not record.has_sites, -len(ranks), ranks[0]) for record, ranks in ranks_of.items()}
    usual, *classes = sorted(order, key=lambda record: order[record])
    gaps = {record: _first_gap(usual, record, tries) for record in classes} | {usual: None}
    first = min((gap for gap in gaps.values() if gap is not None and gap.num), default=None)
    if first is None:
        return None
    apart = [record for record, gap in gaps.items() if gap == first]
    # Those whose records end before say nothing; nor do those of which it is not sure how they differ.
    rest = [record for record, gap in gaps.items() if (gap is None or gap.seq > first.seq) and record.end > first.seq]
    callers, others = (
        tuple(sorted(rank for record in side for rank in ranks_of[record]))
        for side in ((rest, apart) if first.num > 0 else (apart, rest))
    )
    calls = tuple(called[callers[0]][seq] for seq in range(first.seq, first.seq + abs(first.num)))
    before = {
        _without_size(key) for rank in others for key in records[rank].keys[: max(0, first.seq - records[rank].first)]
    }
    return Shift(
        channel=channel,
        callers=callers,
        others=others,
        calls=calls,
        is_usual=_without_size((calls[0].op, calls[0].size_bytes, calls[0].site)) in before,
        is_located=first.is_located,
    )


def _records(called: Mapping[int, Mapping[int, Call]]) -> dict[int, _Record]:
    """Return the record of each rank that has one without gaps, from its calls by number."""
    found = {}
    for rank, calls in called.items():
        if max(calls) - min(calls) == len(calls) - 1:
            keys = ((calls[seq].op, calls[seq].size_bytes, calls[seq].site) for seq in sorted(calls))
            found[rank] = _Record(first=min(calls), keys=tuple(keys))
    return found


def _without_size(key: _Key) -> _Key:
    """Return what calls from one place have in common, whose sizes may differ from step to step."""
    op, size_bytes, site = key
    return op, -1 if site else size_bytes, site


def _first_gap(one: _Record, other: _Record, tries: Iterator[int]) -> _Gap | None:
    """Return the first place in which one of two records has calls that the other one has not; None for none."""
    pair = _Pair(one, other)
    begin = max(one.first, other.first)
    found, at, shift = None, begin, 0  # a call of number n is alike number n + shift of the other record
    for _ in range(_MAX_DIFFERENCES):
        place = pair.next_difference(at, shift)
        if place is None:
            return found if found or pair.has_sites else _Gap(seq=begin, num=0, is_located=False)
        step = None if next(tries, None) is None else pair.best_step(place, shift)
        if step is None:
            return found or _Gap(seq=place, num=0, is_located=False)
        if found is None and step:
            found = _Gap(seq=place if step > 0 else place + shift, num=step, is_located=place > begin or place <= 1)
        at, shift = (place + max(step, 0), shift - step) if step else (place + 1, shift)
    return found


class _Pair:
    """Two records as numbers: `_kinds` are equal where calls are alike, `_keys` where they are the same.

    Attributes:
        has_sites: whether call sites of both are known; else sizes take their place.
    """

    def __init__(self, one: _Record, other: _Record) -> None:
        self.has_sites = one.has_sites and other.has_sites
        self._first = one.first, other.first
        keys = [
            [_without_size(key) if self.has_sites else (*key[:2], ()) for key in record.keys] for record in (one, other)
        ]
        shared = set(keys[0]) & set(keys[1])
        # A line that the other rank never reaches may stand for any line with the same operation.
        kinds = [[key if key in shared or not key[2] else (key[0], -1, ()) for key in some] for some in keys]
        number: dict[_Key, int] = {}
        self._keys, self._kinds = (
            tuple(np.array([number.setdefault(key, len(number)) for key in some], np.int64) for some in both)
            for both in (keys, kinds)
        )
        self._is_shared = np.array([key in shared for key in number], np.bool_)

    def next_difference(self, at: int, shift: int) -> int | None:
        """Return the first place of the first record, from one on, whose call is not that of the other one."""
        one, other = _side_by_side(self._kinds, at - self._first[0], at + shift - self._first[1])
        places = np.flatnonzero(one != other)
        return at + int(places[0]) if len(places) else None

    def best_step(self, place: int, shift: int) -> int | None:
        """Return how many calls of the first record the other one lacks at a place; below 0 the other way round.

        0: they differ in this place alone. None: several numbers explain the rest equally well.
        """
        costs = {0: self._cost(place, place + shift, 0)}
        for num in range(1, _MAX_SHIFT + 1):
            costs[num] = self._cost(place + num, place + shift, num)
            costs[-num] = self._cost(place, place + shift + num, num)
        best = min(costs.values())
        steps = [step for step, cost in costs.items() if cost < best + _SAME]
        return 0 if 0 in steps else steps[0] if len(steps) == 1 else None

    def _cost(self, at: int, other_at: int, num: int) -> float:
        """Return the cost of what differs if `num` calls are passed over before two places."""
        begins = at - self._first[0], other_at - self._first[1]
        one, other = _side_by_side(self._kinds, *begins)
        is_alike = one == other
        first = min(_MIN_ALIKE, max(1, len(one) - 1))
        if num and not (is_alike[:first].all() and self._is_shared[one[is_alike]].any()):
            return math.inf
        unlike = np.sort(np.stack(_side_by_side(self._keys, *begins))[:, ~is_alike], axis=0)
        num_pairs = len(np.unique(unlike[0] * len(self._is_shared) + unlike[1]))
        is_late = len(self._kinds[0]) - begins[0] != len(self._kinds[1]) - begins[1]
        passed = _GAP + _GAP_CALL * (num - 1) if num else 0.0
        return passed + _MISMATCH * num_pairs + (_LATE if is_late else 0.0)


def _side_by_side(records: tuple[Int64s, ...], begin: int, other_begin: int) -> tuple[Int64s, Int64s]:
    """Return two records from a place of each, as far as the shorter one goes."""
    one, other = records[0][begin:], records[1][other_begin:]
    length = min(len(one), len(other))
    return one[:length], other[:length]
