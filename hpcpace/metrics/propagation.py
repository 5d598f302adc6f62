"""Trace delays back to their origin: who caused the waiting, directly or through ranks that had to wait themselves.

After the delay costs of Scalasca (Boehme, Geimer, Wolf, Arnold, "Identifying the root causes of wait states in
large-scale parallel applications", ICPP 2010, section III): the last rank to arrive is to blame, except for its own
waiting since it last met the rank that waits for it. Each step is taken by itself, and everything is counted in whole
nanoseconds, so that steps may be measured in any portions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.kernels import bytes_of, checked, library
from hpcpace.metrics.matching import Matching
from hpcpace.metrics.operations import (
    Operations,
    awaited,
    depends_on_others,
    operation_roles,
    sides,
    synchronises,
)

MAX_ROUNDS = 64  # speed: what is passed on more often is less than is lost to rounding
_NONE = -1
_NEVER_NS = np.iinfo(np.int64).min
_MIN_PASSED_NS = 1000  # speed: less counts for the rank that it has reached
_RATE_BITS = 30  # format: rates in parts of 2^-30, because sums of whole numbers do not depend on their order
_MAX_RATE = 1 << 56  # format: sums of rates fit into int64
_MAX_COMPILED = 1 << 31  # format: rows that the kernel numbers with 32 bits
_MAX_GROUPS = 32  # memory: of a rank; a damaged trace may name thousands


@dataclass(frozen=True, kw_only=True)
class Origins:
    """The waiting that each rank caused, nanoseconds, each float64, (num_ranks,).

    Attributes:
        direct_ns: waiting of ranks that waited for this one, which was itself late.
        propagated_ns: waiting that reached others through ranks that had waited for this one.
        waited_ns: how long the rank itself waited. The sum over ranks is that of direct_ns and propagated_ns, but for
            rounding to nanoseconds.
    """

    direct_ns: Floats
    propagated_ns: Floats
    waited_ns: Floats

    @property
    def caused_ns(self) -> Floats:
        """All waiting that each rank caused, float64, (num_ranks,)."""
        return self.direct_ns + self.propagated_ns


def join_origins(parts: Sequence[Origins]) -> Origins:
    """Return the origins of several portions of a run together; at least one, all of the same ranks."""
    return Origins(
        **{field.name: np.sum([getattr(part, field.name) for part in parts], axis=0) for field in fields(Origins)}
    )


def last_partner(operations: Operations, matching: Matching) -> Ints:
    """Return for each row the row of the last partner to enter that it depends on, int64, (num_operations,).

    -1 if it depends on nobody else, entered last itself, or is not matched. Of partners that enter at the same time,
    the one of the highest rank.
    """
    kernels = library()
    if kernels is not None:
        return _last_partner_compiled(kernels, operations, matching)
    op, is_root = operations.op, operations.rank == operations.peer
    enter_ns, is_matched = operations.enter_ns, matching.is_matched
    side = 2 * matching.instance + sides(op, is_root)[0]
    last_ns, last = (np.full(2 * len(matching.num_rows), nothing) for nothing in (_NEVER_NS, _NONE))
    np.maximum.at(last_ns, side[is_matched], enter_ns[is_matched])
    rows = np.flatnonzero(is_matched & (enter_ns == last_ns[side]))
    last[side[rows]] = rows  # the highest one of each side stays
    other = awaited(operations, slice(None), matching.instance, last_ns)
    waits = is_matched & depends_on_others(op, is_root) & (last_ns[other] > enter_ns)
    return np.where(waits, last[other], _NONE)


def _last_partner_compiled(kernels: Any, operations: Operations, matching: Matching) -> Ints:
    partner = np.empty(len(operations), np.int64)
    checked(
        kernels.last_partner(
            *(len(operations), len(matching.num_rows), operations.op, operations.rank, operations.peer),
            *(matching.instance, operations.enter_ns, operations.exit_ns, operations.blocked_ns),
            *(bytes_of(matching.is_matched), operation_roles(), partner),
        )
    )
    return partner


def delay_origins(
    operations: Operations,
    matching: Matching,
    wait_ns: Ints,
    *,
    ranks: Sequence[int],
    mask: Bools | None = None,
    partner: Ints | None = None,
) -> Origins:
    """Return how much waiting each rank caused.

    A wait is attributed to the last partner to arrive. If that partner has itself waited longer than the waiting rank
    since both last met in a synchronising operation, or since their step began, the difference is passed on: to the
    partner's own waits in that time, in proportion to their length, and so to the ranks it waited for. The rest was
    caused by the partner. What is still being passed on after `MAX_ROUNDS`, and less
    than a microsecond, counts for the rank that it has reached.

    Args:
        operations: rows of all ranks, ordered by rank.
        matching: which of them belong together.
        wait_ns: how long each row waited, or the part of it that counts, int64, (num_operations,).
        ranks: ascending, (num_ranks,).
        mask: the rows whose waits are attributed, bool, (num_operations,); all if not given.
        partner: from `last_partner`, if it is known already.
    """
    names, wait_ns = np.asarray(ranks, np.int64), np.asarray(wait_ns, np.int64)
    partner = last_partner(operations, matching) if partner is None else partner
    kernels = library()
    if kernels is not None and operations.slices and len(operations) < _MAX_COMPILED:
        return _delay_origins_compiled(kernels, operations, matching, wait_ns, names, mask, partner)
    length = np.where(partner >= 0, wait_ns, 0)
    timeline = _Timeline(operations)
    total = np.append(0, np.cumsum(length[timeline.order]))

    rows = np.flatnonzero(length > 0)
    place, partner_place = timeline.place[rows], timeline.place[partner[rows]]
    first_own, first_other = _since_common(operations, matching, timeline, rows, partner[rows])
    own = total[place] - total[first_own]
    other = total[partner_place] - total[first_other]
    wait = length[rows]
    share = np.clip(other - own, 0, wait) / wait

    cause = _slots(operations.rank[partner[rows]], names)
    mass = wait if mask is None else np.where(mask[rows], wait, 0)
    waited = _by_slot(_slots(operations.rank[rows], names), mass, len(names))
    found = np.zeros((2, len(names)))
    count, active = 0, np.flatnonzero(mass)
    while len(active) and count < MAX_ROUNDS:
        passed = np.rint(mass[active] * share[active]).astype(np.int64)
        passed[passed < _MIN_PASSED_NS] = 0
        found[min(count, 1)] += _by_slot(cause[active], mass[active] - passed, len(names))
        passing = np.flatnonzero(passed)
        giver, passed = active[passing], passed[passing]
        rate = passed / np.maximum(other[giver], 1) * (1 << _RATE_BITS)
        rate = np.minimum(np.rint(rate), _MAX_RATE).astype(np.int64)
        covered = _covering(rate, first_other[giver], partner_place[giver], len(timeline.order))
        mass = np.rint(covered[place] * (wait / (1 << _RATE_BITS))).astype(np.int64)
        active, count = np.flatnonzero(mass), count + 1
    found[1] += _by_slot(cause[active], mass[active], len(names))
    return Origins(direct_ns=found[0], propagated_ns=found[1], waited_ns=waited)


def _delay_origins_compiled(
    kernels: Any,
    operations: Operations,
    matching: Matching,
    wait_ns: Ints,
    names: Ints,
    mask: Bools | None,
    partner: Ints,
) -> Origins:
    num_rows, bounds = len(operations), operations.bounds
    of_slices = operations.rank[bounds[:-1]]
    # The group in which each row meets all of its group, -1 for none, and those that occur.
    met, is_used = np.empty(num_rows, np.int32), np.zeros(len(operations.groups), np.uint8)
    kernels.met_groups(
        *(num_rows, operations.op, bytes_of(matching.is_matched), operations.group),
        *(operation_roles(), operations.group_sizes, met, is_used),
    )
    used, of_each = np.flatnonzero(is_used), np.zeros((0, len(of_slices)), np.int32)
    if len(used):
        of_each = np.stack(_groups_of_ranks(operations, used))[:, of_slices]
    found, waited = np.empty((2, len(names) + 1)), np.empty(len(names) + 1)
    num_rounds = kernels.delay_origins(
        *(num_rows, len(of_slices), bounds, _order(operations), operations.step, _slots(of_slices, names)),
        *(len(of_each), of_each, met, partner, wait_ns),
        bytes_of(np.ones(num_rows, np.bool_) if mask is None else mask),
        *(len(names), MAX_ROUNDS, _MIN_PASSED_NS, float(1 << _RATE_BITS), float(_MAX_RATE), found, waited),
    )
    checked(num_rounds < 0)
    return Origins(direct_ns=found[0, :-1], propagated_ns=found[1, :-1], waited_ns=waited[:-1])


class _Timeline:
    """The rows in order of rank and enter.

    Attributes:
        order: rows, int64, (num_operations,).
        place: where each row is in `order`, int64, (num_operations,).
        begin: where in `order` the step begins that each place belongs to, int64, (num_operations,).
    """

    def __init__(self, operations: Operations) -> None:
        self.order = _order(operations)
        self.place = np.empty(len(self.order), np.int64)
        self.place[self.order] = np.arange(len(self.order))
        rank, step = operations.rank[self.order], operations.step[self.order]
        is_first = np.ones(len(rank), np.bool_)
        is_first[1:] = (rank[1:] != rank[:-1]) | (step[1:] != step[:-1])
        self.begin = np.maximum.accumulate(np.where(is_first, np.arange(len(rank)), 0))


def _order(operations: Operations) -> Ints:
    """Return the rows in order of rank and enter, int64, (num_operations,)."""
    if operations.slices is None:
        return np.lexsort((operations.enter_ns, operations.rank))
    order = np.arange(len(operations))
    for rows in operations.slices:
        enter_ns = operations.enter_ns[rows]
        if (enter_ns[1:] < enter_ns[:-1]).any():
            order[rows] = np.argsort(enter_ns, kind="stable") + rows.start
    return order


def _covering(rate: Ints, first: Ints, stop: Ints, num_places: int) -> Ints:
    """Return the sum of the rates of all ranges `first <= place < stop` at each place, int64, (num_places + 1,)."""
    change = np.zeros(num_places + 1, np.int64)
    np.add.at(change, first, rate)
    np.subtract.at(change, stop, rate)
    return np.cumsum(change)


def _slots(rank: Ints, names: Ints) -> Ints:
    """Return the position of each rank among `names`, or their number for one that is not among them."""
    if not len(names):
        return np.zeros(len(rank), np.int64)
    slot = np.minimum(np.searchsorted(names, rank), len(names) - 1)
    return np.where(names[slot] == rank, slot, len(names))


def _by_slot(slot: Ints, value: Ints, num_slots: int) -> Floats:
    # Whole numbers below 2^53: their sums in floating point are exact.
    return np.bincount(slot, weights=value, minlength=num_slots + 1)[:num_slots].astype(np.float64)


def _since_common(
    operations: Operations, matching: Matching, timeline: _Timeline, rows: Ints, partners: Ints
) -> tuple[Ints, Ints]:
    """Return where, in the timeline, the time since the last common synchronisation begins, for each row and partner.

    It begins with the first operation after the last synchronising one of a group that both belong to, or with the
    first one of the step.
    """
    found = [timeline.begin[timeline.place[rows]], timeline.begin[timeline.place[partners]]]
    meets = synchronises(operations.op) & matching.is_matched & (operations.group_size > 1)
    if not len(rows) or not meets.any():
        return found[0], found[1]
    met = operations.group[timeline.order]
    met = np.where(meets[timeline.order], met, _NONE)
    groups = _groups_of_ranks(operations, np.flatnonzero(np.bincount(met[met >= 0])))
    places = timeline.place[rows], timeline.place[partners]
    of_own, of_other = ([of[operations.rank[of_rows]] for of in groups] for of_rows in (rows, partners))
    # The place behind the last meeting in each group of a rank, before each place.
    behind = [_behind_last(of_rank, met, operations.rank[timeline.order]) for of_rank in groups]
    for index, number in itertools.product(range(len(groups)), repeat=2):
        both = np.flatnonzero((of_own[index] == of_other[number]) & (of_own[index] >= 0))
        for side, since in ((0, behind[index]), (1, behind[number])):
            found[side][both] = np.maximum(found[side][both], since[places[side][both]])
    return found[0], found[1]


def _groups_of_ranks(operations: Operations, groups: Ints) -> list[NDArray[np.int32]]:
    """Return the first group of each rank, the second one, ..., -1 for none, each int32, (num_ranks,).

    Args:
        operations: rows of all ranks.
        groups: the groups to tell of, ascending.
    """
    size = int(operations.rank.max()) + 1
    members = [np.asarray(operations.groups[group].ranks, np.int64) for group in groups.tolist()]
    group = np.repeat(groups, [len(ranks) for ranks in members])
    rank = np.concatenate(members)
    group, rank = group[rank < size], rank[rank < size]
    order = np.argsort(rank, kind="stable")
    group, rank = group[order], rank[order]
    count = np.bincount(rank, minlength=size)
    number = np.arange(len(rank)) - (np.cumsum(count) - count)[rank]
    found = np.full((min(int(count.max()), _MAX_GROUPS), size), _NONE, np.int32)
    kept = number < len(found)
    found[number[kept], rank[kept]] = group[kept]
    return list(found)


def _behind_last(of_rank: NDArray[np.int32], met: Ints, rank: Ints) -> Ints:
    """Return the place behind the last meeting in one group of each rank, for each place, int64, (num_places,).

    Args:
        of_rank: the group of each rank, (num_ranks,).
        met: the group that ranks meet in at each place, -1 for none, (num_places,).
        rank: the rank at each place.
    """
    behind = np.zeros(len(met), np.int64)
    is_met = (of_rank[rank[:-1]] == met[:-1]) & (met[:-1] >= 0)
    np.multiply(np.arange(1, len(met)), is_met, out=behind[1:])
    return np.maximum.accumulate(behind, out=behind)
