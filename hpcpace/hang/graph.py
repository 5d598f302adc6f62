"""Who waits for whom: the ranks of a job as a graph, from the operations in which they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hpcpace.hang.views import Call, Channel, RankView
from hpcpace.hang.waits import Waits

_SILENT = 0.5


@dataclass(frozen=True)
class Graph:
    """Who waits for whom.

    Attributes:
        waits: the unfinished operations.
        edges: for each rank that waits, the ranks for which it does, with the call in which it does.
        odd: ranks whose first operation that does not move is finished at a peer, with that call.
    """

    waits: Waits
    edges: dict[int, dict[int, Call]] = field(default_factory=dict)
    odd: dict[int, Call] = field(default_factory=dict)
    _held_up: dict[tuple[Channel, int], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank in self.waits.open_calls.keys() - self.gone:
            edges: dict[int, Call] = {}
            for call, meeting in self.waits.steps(rank):
                if meeting.is_left and not edges:
                    self.odd[rank] = call
                    break
                for peer in meeting.needed - {rank}:
                    edges.setdefault(peer, call)
            if edges:
                self.edges[rank] = edges
        for rank in self.waits.open_calls.keys() - self.edges.keys() - self.odd.keys() - self.gone:
            if queued := self._queued(rank):
                self.edges[rank] = queued

    def _queued(self, rank: int) -> dict[int, Call]:
        """Return the peers of a rank's operations that all have entered, but that are held up before them."""
        return {
            peer: call
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
        for earlier, meeting in self.waits.steps(rank):
            if earlier is call:
                return False
            if meeting.needed - {rank}:
                return True
        return False

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
        return {peer for edges in self.edges.values() for peer in edges}

    def waiting_for(self, targets: Iterable[int]) -> dict[int, tuple[int, Call]]:
        """Return the ranks that wait for some ranks, directly or not, each with the next rank on its way and its call.

        The order is that of their distance.
        """
        callers: dict[int, list[int]] = {}
        for rank, edges in self.edges.items():
            for peer in edges:
                callers.setdefault(peer, []).append(rank)
        reached = list(dict.fromkeys(targets))
        seen, found = set(reached), {}
        for target in reached:  # grows while it is walked
            for rank in callers.get(target, ()):
                if rank not in seen:
                    seen.add(rank)
                    reached.append(rank)
                    found[rank] = (target, self.edges[rank][target])
        return found

    @cached_property
    def circles(self) -> frozenset[int]:
        """The ranks that wait for each other, directly or not."""
        ranks = sorted(self.edges.keys() | self.awaited())
        place = {rank: index for index, rank in enumerate(ranks)}
        pairs = [(place[rank], place[peer]) for rank, edges in self.edges.items() for peer in edges]
        if not pairs:
            return frozenset()
        from scipy.sparse import coo_array  # slow to load, and rarely needed
        from scipy.sparse.csgraph import connected_components

        matrix = coo_array((np.ones(len(pairs), np.int8), tuple(np.array(pairs).T)), shape=(len(ranks), len(ranks)))
        _, part = connected_components(matrix, connection="strong")
        has_others = np.bincount(part)[part] > 1
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
        calls = {call for edges in self.edges.values() for peer, call in edges.items() if peer in wanted}
        firsts = {(call.channel, call.seq): self.waits.meeting(call) for call in calls}
        entered = [min(meeting.inside.values(), key=call_order) for meeting in firsts.values()]
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
