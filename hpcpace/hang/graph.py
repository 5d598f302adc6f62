"""Who waits for whom: unfinished operations, and the ranks as a graph of those in them.

A collective that keeps its members together finishes nowhere before all have entered it: where one member finished it,
all have entered, those without a record included. Of a rank whose record has gaps, or that has none, it is not known
what it never entered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from itertools import product, takewhile
from operator import eq

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.hang.views import Call, Channel, JobView, RankView
from hpcpace.metrics.topology import strong_components

# Of these, members may finish while others have not come.
_UNTIED = frozenset({"broadcast", "scatter", "reduce", "gather", "send", "recv"})
# Only of these does every member give or get the same number of bytes.
_EQUAL_SIZES = frozenset({"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"})
_FROM_ROOT = frozenset({"broadcast", "scatter"})
MAX_MEMBERS = 1 << 21
"""Of all unfinished operations that are looked at, a hundred of a group of 16,384 ranks; the oldest ones come first."""

# What all members call alike: operation, root, size, part of it, and type of elements.
_Called = tuple[str, int, int, int, str]
_UNKNOWN = (-1, -1, -1, "")
Place = tuple[Channel, int]
"""An operation: its channel, and its number there."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """An unfinished operation: the calls of its members that belong together.

    Attributes:
        channel, seq: which operation it is.
        members: the ranks of its group, or the two of a message.
        inside: the calls that have not finished, by rank.
        missing: members that have not entered it.
        unknown: members of which it is not known whether they have.
        finished: members that entered and finished it.
        factions: where members called different operations in this place, the ranks of each, the largest first.
    """

    channel: Channel
    seq: int
    members: tuple[int, ...]
    inside: dict[int, Call]
    missing: frozenset[int]
    unknown: frozenset[int]
    finished: frozenset[int]
    factions: tuple[tuple[int, ...], ...] = ()

    @property
    def is_left(self) -> bool:
        """Whether all have entered it, and some have finished it while others are still inside."""
        return bool(self.finished) and not self.needed and self.channel.source < 0

    @cached_property
    def needed(self) -> frozenset[int]:
        """The members for which those inside wait: a root that sends first of all, and then all that are missing."""
        call = next(iter(self.inside.values()))
        if call.op in _FROM_ROOT and call.root in self.missing | self.unknown:
            return frozenset({call.root})
        return self.missing | self.unknown


class WaitGraph:
    """The unfinished operations of a job.

    Attributes:
        job: what is known of it.
        meetings: by channel and place in its order.
        open_calls: of each rank that has some, in the order in which it called them.
    """

    def __init__(self, job: JobView) -> None:
        """Find the operations that somebody has entered and not finished."""
        self.job = job
        self._calls = {(rank, call.channel, call.seq): call for rank, view in job.ranks.items() for call in view.calls}
        self._unrecorded = {rank for rank, view in job.ranks.items() if not view.is_recorded}
        self.open_calls = {
            rank: opened
            for rank, view in sorted(job.ranks.items())
            if (opened := tuple(call for call in view.calls if call.is_open and not self._has_arrived(call)))
        }
        self._last_finished = self._find_last_finished()
        self.meetings = {place: self._meeting(*place) for place in self._oldest_places()}
        self.open_calls = {
            rank: kept
            for rank, opened in self.open_calls.items()
            if (kept := tuple(call for call in opened if (call.channel, call.seq) in self.meetings))
        }

    def _oldest_places(self) -> list[Place]:
        """Return the places of open calls in their order; of very many those that are open longest."""
        begins: dict[Place, int] = {}
        for call in (call for opened in self.open_calls.values() for call in opened):
            place, begin_ns = (call.channel, call.seq), call.entered_ns or 0
            begins[place] = min(begins.get(place, begin_ns), begin_ns)
        found: list[Place] = []
        num_members = 0
        for place in sorted(begins, key=lambda place: (begins[place], place)):
            num_members += len(self._members(place[0]))
            if found and num_members > MAX_MEMBERS:
                break
            found.append(place)
        return sorted(found)

    def _members(self, channel: Channel) -> tuple[int, ...]:
        if channel.source >= 0:
            return channel.source, channel.destination
        return self.job.groups[channel.group].members

    def meeting(self, call: Call) -> Meeting:
        """Return the operation to which an open call belongs."""
        return self.meetings[call.channel, call.seq]

    def steps(self, rank: int) -> Iterator[tuple[Call, Meeting]]:
        """Yield the open calls of a rank in its order, each with its operation."""
        for call in self.open_calls.get(rank, ()):
            yield call, self.meeting(call)

    def _has_arrived(self, call: Call) -> bool:
        """Return whether a message has been received, so that it holds up nobody, waited for or not."""
        peer = self.job.ranks.get(call.channel.destination)
        return call.op == "send" and peer is not None and self._has_finished(peer, call.channel, call.seq)

    def _find_last_finished(self) -> dict[Channel, int]:
        """Return the last place of each channel at which a member finished an operation that ties its members."""
        tied: dict[Channel, set[int]] = {}
        for _, channel, seq in (place for place, call in self._calls.items() if call.op not in _UNTIED):
            tied.setdefault(channel, set()).add(seq)
        last: dict[Channel, int] = {}
        for channel, places in tied.items():
            views = [view for view in self.job.ranks.values() if channel in view.entered]
            views.sort(key=lambda view: -view.entered[channel])
            for seq in sorted(places, reverse=True):
                if self._has_one_finished(views, channel, seq):
                    last[channel] = seq
                    break
        return last

    def _has_one_finished(self, views: Sequence[RankView], channel: Channel, seq: int) -> bool:
        """Return whether one of some ranks, those that entered most operations first, has finished an operation."""
        entered = takewhile(lambda view: view.entered[channel] > seq, views)
        return any(self._has_finished(view, channel, seq) for view in entered)

    def _has_finished(self, view: RankView, channel: Channel, seq: int) -> bool:
        call = self._calls.get((view.rank, channel, seq))
        if seq >= view.completed.get(channel, seq + 1):
            return False
        return view.entered.get(channel, 0) > seq and not (call and call.is_open)

    def _meeting(self, channel: Channel, seq: int) -> Meeting:
        members = self._members(channel)
        # Of most ranks of a large job there may be no record, and nothing to look at.
        absent = frozenset(members) & self._unrecorded
        recorded = [rank for rank in members if rank not in absent] if absent else members
        inside = {
            rank: call
            for rank in recorded
            if (call := self._calls.get((rank, channel, seq))) is not None and call.is_open
        }
        entered = {rank: self._has_entered(rank, channel, seq) for rank in recorded if rank not in inside}
        unknown = frozenset(rank for rank, has in entered.items() if has is None)
        views = {rank: self.job.ranks.get(rank) for rank in entered}
        return Meeting(
            channel=channel,
            seq=seq,
            members=members,
            inside=inside,
            missing=frozenset(rank for rank, has in entered.items() if has is False),
            unknown=unknown if self._last_finished.get(channel, -1) >= seq else unknown | absent,
            finished=frozenset(rank for rank, view in views.items() if view and self._has_finished(view, channel, seq)),
            factions=self._factions(channel, seq, recorded),
        )

    def _has_entered(self, rank: int, channel: Channel, seq: int) -> bool | None:
        if self._last_finished.get(channel, -1) >= seq:
            return True
        view = self.job.ranks.get(rank)
        if view is None or not view.is_recorded:
            return None
        if view.entered.get(channel, 0) > seq:
            return True
        return False if view.is_complete else None

    def _factions(self, channel: Channel, seq: int, members: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the members by what they called in one place, the largest part first; nothing where all agree."""
        if channel.source >= 0:
            return ()
        called: dict[_Called, list[int]] = {}
        for rank in members:
            if call := self._calls.get((rank, channel, seq)):
                size = max(call.size_bytes, call.num_elements) if call.op in _EQUAL_SIZES else -1
                # A barrier has a tensor of torch's own, whose type depends on the release.
                dtype = call.dtype if call.op != "barrier" else ""
                called.setdefault((call.op, call.root, size, call.part_bytes, dtype), []).append(rank)
        parts = _joined(called)
        return tuple(sorted(map(tuple, parts), key=lambda part: (-len(part), part))) if len(parts) > 1 else ()


def _joined(called: dict[_Called, list[int]]) -> list[list[int]]:
    """Join parts that differ only in what is not known of one of them; ranks that fit several parts are in none."""
    parts: list[list[int]] = []
    # The parts for each way of calling it, and for what fits any root, size or type.
    fitting: dict[_Called, list[int]] = {}
    known_first = sorted(called.items(), key=lambda item: (sum(map(eq, item[0][1:], _UNKNOWN)), item[0]))
    for key, ranks in known_first:
        if places := fitting.get(key):
            if len(places) == 1:
                parts[places[0]].extend(ranks)
            continue
        op, root, size, part, dtype = key
        for wider in dict.fromkeys(product((op,), (-1, root), (-1, size), (-1, part), ("", dtype))):
            fitting.setdefault(wider, []).append(len(parts))
        parts.append(list(ranks))
    return [sorted(ranks) for ranks in parts]


_SILENT = 0.5
_MAX_EDGES = 1 << 21
"""Between ranks, each once for all ranks in the same operations; beyond, only the first operation of each counts."""


@dataclass
class Graph:
    """Who waits for whom.

    Attributes:
        waits: the unfinished operations.
        edges: for each rank that waits, the ranks for which it does, with the operation in which it does; one table for
            all ranks that wait in the same operations.
        odd: ranks whose first operation that does not move is finished at a peer, with that call.
    """

    waits: WaitGraph
    edges: dict[int, Mapping[int, Place]] = field(default_factory=dict)
    odd: dict[int, Call] = field(default_factory=dict)
    _shared: dict[tuple[Place, ...], dict[int, Place]] = field(default_factory=dict)
    _behind: dict[Place, dict[int, Place]] = field(default_factory=dict)
    _num_edges: int = 0

    def __post_init__(self) -> None:
        for rank in self.waits.open_calls.keys() - self.gone:
            places: list[Place] = []
            for call, meeting in self.waits.steps(rank):
                if meeting.needed and (not places or call.is_aligned):
                    places.append((call.channel, call.seq))
                if not places:
                    # All have entered it, and what the rank has called behind it may only be queued.
                    self.odd |= {rank: call} if meeting.is_left else {}
                    break
            if places:
                self.edges[rank] = self._needed(tuple(places))
        for rank in self.waits.open_calls.keys() - self.edges.keys() - self.odd.keys() - self.gone:
            if queued := self._queued(rank):
                self.edges[rank] = queued

    def _needed(self, places: tuple[Place, ...]) -> dict[int, Place]:
        """Return the ranks for which those inside some operations wait, each with the first operation that lacks it."""
        if places not in self._shared:
            if len(places) > 1 and self._num_edges > _MAX_EDGES:
                return self._needed(places[:1])
            edges: dict[int, Place] = {}
            for place in places:
                for peer in self.waits.meetings[place].needed:
                    edges.setdefault(peer, place)
            self._shared[places] = edges
            self._num_edges += len(edges)
        return self._shared[places]

    def _queued(self, rank: int) -> dict[int, Place]:
        """Return the peers that have entered the first open call of a rank behind another one that does not move."""
        call, meeting = next(self.waits.steps(rank))
        place = call.channel, call.seq
        if place not in self._behind:
            opened = self.waits.open_calls
            self._behind[place] = {peer: place for peer, one in meeting.inside.items() if opened[peer][0] is not one}
        return self._behind[place]

    def are_first(self, meeting: Meeting) -> bool:
        """Return whether no member has another open call before its own: behind that, it may only be queued."""
        return all(self.waits.open_calls[rank][0] is call for rank, call in meeting.inside.items())

    @cached_property
    def gone(self) -> set[int]:
        """The ranks that are known to have ended."""
        return {rank for rank, view in self.waits.job.ranks.items() if view.is_gone}

    def known(self, rank: int) -> bool:
        """Return whether it is known what a rank has never entered."""
        view = self.waits.job.ranks.get(rank)
        return view is not None and view.is_recorded and (view.is_complete or view.is_gone is True)

    def awaited(self) -> set[int]:
        """Return the ranks for which others wait."""
        return set().union(*(edges for edges, _ in self.alike))

    @cached_property
    def alike(self) -> list[tuple[Mapping[int, Place], list[int]]]:
        """The tables of `edges`, each once, with the ranks that have it."""
        found: dict[int, tuple[Mapping[int, Place], list[int]]] = {}
        for rank, edges in self.edges.items():
            found.setdefault(id(edges), (edges, []))[1].append(rank)
        return list(found.values())

    @cached_property
    def _callers(self) -> dict[int, list[int]]:
        """The indices in `alike` of those that wait for each rank."""
        found: dict[int, list[int]] = {}
        for index, (edges, _) in enumerate(self.alike):
            for peer in edges:
                found.setdefault(peer, []).append(index)
        return found

    def waiting_for(self, targets: Iterable[int]) -> dict[int, tuple[int, Call]]:
        """Return the ranks that wait for some ranks, directly or not, each with the next rank on its way and its call.

        The order is that of their distance.
        """
        reached = list(dict.fromkeys(targets))
        seen, found = set(reached), {}
        walked: set[int] = set()
        for target in reached:  # grows while it is walked
            for index in self._callers.get(target, ()):
                if index in walked:
                    continue
                walked.add(index)
                edges, ranks = self.alike[index]
                for rank in ranks:
                    if rank not in seen:
                        seen.add(rank)
                        reached.append(rank)
                        found[rank] = (target, self.waits.meetings[edges[target]].inside[rank])
        return found

    @cached_property
    def steps_of_waiting(self) -> dict[Place, set[int]]:
        """The steps in which ranks that wait have called each of their last collectives."""
        found: dict[Place, set[int]] = {}
        for rank in self.edges:
            for call in self.waits.job.ranks[rank].calls:
                if call.channel.source < 0 and call.step >= 0:
                    found.setdefault((call.channel, call.seq), set()).add(call.step)
        return found

    @cached_property
    def circles(self) -> frozenset[int]:
        """The ranks that wait for each other, directly or not."""
        # Ranks that wait for the same others do so by way of one vertex, behind those of all ranks.
        ranks = sorted(self.edges)
        place = {rank: index for index, rank in enumerate(ranks)}
        pairs = []
        for vertex, (edges, alike) in enumerate(self.alike, start=len(ranks)):
            pairs += [(place[rank], vertex) for rank in alike]
            pairs += [(vertex, place[peer]) for peer in edges if peer in place]
        if not pairs:
            return frozenset()
        part = np.array(strong_components(len(ranks) + len(self.alike), pairs))
        has_others = np.bincount(part)[part[: len(ranks)]] > 1
        return frozenset(rank for rank, is_in in zip(ranks, has_others.tolist(), strict=True) if is_in)

    @cached_property
    def oldest(self) -> Call | None:
        """The open call that was entered first."""
        calls = (call for opened in self.waits.open_calls.values() for call in opened)
        return min(calls, key=call_order, default=None)

    def since_ns(self, call: Call | None) -> int | None:
        """Return when the operation of an open call was first entered; None where that is unknown."""
        if call is None:
            return None
        entered = [one.entered_ns for one in self.waits.meeting(call).inside.values() if one.entered_ns is not None]
        return min(entered, default=None)

    @cached_property
    def _oldest_ns(self) -> int | None:
        return self.since_ns(self.oldest)

    def are_silent(self, ranks: Iterable[int]) -> bool:
        """Return whether ranks show no sign of life since others began to wait."""
        job, since_ns = self.waits.job, self._oldest_ns
        return since_ns is not None and all(
            is_silent(job.ranks[rank], job.now_ns, job.now_ns - since_ns) for rank in ranks
        )

    def call_for(self, ranks: Iterable[int]) -> Call | None:
        """Return the operation in which others began to wait for some ranks; unless known, that of most others."""
        wanted = set(ranks)
        places = {place for edges, _ in self.alike for peer, place in edges.items() if peer in wanted}
        entered = [min(self.waits.meetings[place].inside.values(), key=call_order) for place in sorted(places)]
        return self.first(entered) if entered else None

    def first(self, calls: Iterable[Call]) -> Call:
        """Return the call that was entered first; where that is unknown, the one of most others."""
        most_first = sorted(calls, key=lambda call: -len(self.waits.meeting(call).inside))
        return min(most_first, key=lambda call: call.entered_ns or 0)


def is_silent(view: RankView, now_ns: int, age_ns: int) -> bool:
    """Return whether a rank that may have gone has shown no sign of life for half of a time."""
    if view.is_gone is False or view.seen_ns is None:
        return False
    return now_ns - view.seen_ns > _SILENT * age_ns > 0


def call_order(call: Call) -> tuple[int, Channel, int]:
    """Return the sort key of calls by the time at which they were entered."""
    return call.entered_ns or 0, call.channel, call.seq
