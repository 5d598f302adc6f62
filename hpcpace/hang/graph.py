"""Who waits for whom: the ranks of a job as a graph, from the operations in which they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hpcpace.hang.views import Call, Channel, RankView
from hpcpace.hang.waits import Place, Waits

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

    waits: Waits
    edges: dict[int, Mapping[int, Place]] = field(default_factory=dict)
    odd: dict[int, Call] = field(default_factory=dict)
    _held_up: dict[Place, list[int]] = field(default_factory=dict)
    _behind: dict[int, set[Place]] = field(default_factory=dict)
    _shared: dict[tuple[Place, ...], dict[int, Place]] = field(default_factory=dict)
    _num_edges: int = 0

    def __post_init__(self) -> None:
        for rank in self.waits.open_calls.keys() - self.gone:
            places: list[Place] = []
            for call, meeting in self.waits.steps(rank):
                if meeting.is_left and not places:
                    self.odd[rank] = call
                    break
                if meeting.needed:
                    places.append((call.channel, call.seq))
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
        """Return the peers of a rank's operations that all have entered, but that are held up before them."""
        return {
            peer: (call.channel, call.seq)
            for call, _ in self.waits.steps(rank)
            for peer in self._held_up_inside(call.channel, call.seq)
            if peer != rank
        }

    def _held_up_inside(self, channel: Channel, seq: int) -> list[int]:
        """Return the ranks that have entered an operation, but are held up before it."""
        if (channel, seq) not in self._held_up:
            self._held_up[channel, seq] = [
                rank
                for rank, call in self.waits.meetings[channel, seq].inside.items()
                if rank in self.odd or rank in self.gone or self._is_held_up_before(rank, call)
            ]
        return self._held_up[channel, seq]

    def _is_held_up_before(self, rank: int, call: Call) -> bool:
        """Return whether a rank waits for others in an operation that it has called before this one."""
        if rank not in self._behind:
            steps = list(self.waits.steps(rank))
            first = next((index for index, (_, meeting) in enumerate(steps) if meeting.needed), len(steps))
            self._behind[rank] = {(later.channel, later.seq) for later, _ in steps[first + 1 :]}
        return (call.channel, call.seq) in self._behind[rank]

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
        num_vertices = len(ranks) + len(self.alike)
        from scipy.sparse import coo_array  # slow to load, and rarely needed
        from scipy.sparse.csgraph import connected_components

        matrix = coo_array((np.ones(len(pairs), np.int8), tuple(np.array(pairs).T)), shape=(num_vertices, num_vertices))
        _, part = connected_components(matrix, connection="strong")
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
