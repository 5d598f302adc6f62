"""Which operations of a job are unfinished, and which members each of them lacks, as far as records show it.

A collective that keeps its members together finishes nowhere before all have entered it: where one member finished it,
all have entered, those without a record included. Of a rank whose record has gaps, or that has none, it is not known
what it never entered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product, takewhile

from hpcpace.hang.views import Call, Channel, JobView, RankView

# Of these, members may finish while others have not come.
_UNTIED = frozenset({"broadcast", "scatter", "reduce", "gather", "send", "recv"})
# Only of these does every member give or get the same number of bytes.
_EQUAL_SIZES = frozenset({"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"})
_FROM_ROOT = frozenset({"broadcast", "scatter"})
MAX_MEMBERS = 1 << 21
"""Of all unfinished operations that are looked at, a hundred of a group of 16,384 ranks; the oldest ones come first."""

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


class Waits:
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
        called: dict[tuple[str, int, int], list[int]] = {}
        for rank in members:
            if call := self._calls.get((rank, channel, seq)):
                size = call.size_bytes if call.op in _EQUAL_SIZES else -1
                called.setdefault((call.op, call.root, size), []).append(rank)
        parts = _joined(called)
        return tuple(sorted(map(tuple, parts), key=lambda part: (-len(part), part))) if len(parts) > 1 else ()


def _joined(called: dict[tuple[str, int, int], list[int]]) -> list[list[int]]:
    """Join parts that differ only in what is not known of one of them."""
    parts: list[list[int]] = []
    # The first part for each operation, root and size, and for what fits any root or size.
    first: dict[tuple[str, int, int], int] = {}
    for (op, root, size), ranks in sorted(called.items(), reverse=True):  # what is known comes before -1
        if (place := first.get((op, root, size))) is not None:
            parts[place].extend(ranks)
            continue
        for key in product((-1, root), (-1, size)):
            first.setdefault((op, *key), len(parts))
        parts.append(list(ranks))
    return [sorted(ranks) for ranks in parts]
