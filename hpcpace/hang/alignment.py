"""Where the calls of ranks cease to agree: an operation that only some of them called, found by call sites.

A rank that calls one collective more than the others is one place ahead from then on: its next call meets an earlier
one of theirs. Nothing may fail for a while: two barriers match, whatever lines they are on. So the records of members
are laid side by side. Where two differ, one is shifted against the other by each number of calls, and the number that
explains the rest best counts, if no other one does as well.

Calls are alike if operation and call site are, or, where the site is unknown, operation and size. A call site that only
one of two ranks has, such as that of its own pipeline stage, may stand for any call of the same operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.hang.views import Call, Channel, JobView

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
