"""Trace delays back to their origin: who caused the waiting, directly or through ranks that had to wait themselves.

After the delay costs of Scalasca (Boehme, Geimer, Wolf, Arnold, "Identifying the root causes of wait states in
large-scale parallel applications", ICPP 2010, section III): the last rank to arrive is to blame, except for its own
waiting since it last met the rank that waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.operations.dependence import MESSAGES, depends_on_others, is_one_of, releases_others, synchronises
from hpcpace.metrics.operations.matching import Matching, Operations
from hpcpace.metrics.operations.waits import Waits

FloatArray = NDArray[np.float64]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

MOST_ROUNDS = 64
_NONE = -1


@dataclass(frozen=True, kw_only=True)
class Origins:
    """The waiting that each rank caused, nanoseconds, each float64, (num_ranks,).

    Attributes:
        direct_ns: waiting of ranks that waited for this one, which was itself late.
        propagated_ns: waiting that reached others through ranks that had waited for this one.
        waited_ns: how long the rank itself waited. The sum over ranks equals that of direct_ns and propagated_ns.
        num_rounds: how often delays were passed on.
    """

    direct_ns: FloatArray
    propagated_ns: FloatArray
    waited_ns: FloatArray
    num_rounds: int

    @property
    def caused_ns(self) -> FloatArray:
        """All waiting that each rank caused, float64, (num_ranks,)."""
        return self.direct_ns + self.propagated_ns


def last_partner(operations: Operations, matching: Matching) -> Int64Array:
    """Return for each row the row of the last partner to enter that it depends on, int64, (num_operations,).

    -1 if it depends on nobody else, entered last itself, or is not matched.
    """
    op, is_root = operations.op, operations.rank == operations.peer
    releases = releases_others(op, is_root)
    depends = matching.is_matched & depends_on_others(op, is_root)
    partner = np.full(len(operations), _NONE)
    is_message = is_one_of(op, MESSAGES)
    rows = np.flatnonzero(matching.is_matched & releases & ~is_message)
    order = rows[np.lexsort((operations.enter_ns[rows], matching.instance[rows]))]
    if len(order):
        last = np.full(len(matching.starts), _NONE)
        last[matching.instance[order]] = order  # the last one of each instance stays
        partner = np.where(depends & ~is_message, last[matching.instance], _NONE)
    pairs = np.flatnonzero(matching.is_matched & is_message)
    both = pairs[np.argsort(matching.instance[pairs], kind="stable")]
    partner[both[0::2]], partner[both[1::2]] = both[1::2], both[0::2]
    is_later = operations.enter_ns[np.maximum(partner, 0)] > operations.enter_ns
    return np.where((partner >= 0) & is_later, partner, _NONE)


def delay_origins(
    operations: Operations,
    matching: Matching,
    waits: Waits,
    *,
    ranks: Sequence[int],
    mask: BoolArray | None = None,
    wait_ns: FloatArray | None = None,
) -> Origins:
    """Return how much waiting each rank caused.

    A wait is attributed to the last partner to arrive. If that partner has itself waited longer than the waiting rank
    since both last met in a synchronising operation, the difference is passed on: to the partner's own waits in that
    time, in proportion to their length, and so to the ranks it waited for. The rest was caused by the partner. What is
    still being passed on after `MOST_ROUNDS` counts for the rank that it has reached.

    Args:
        operations: rows of all ranks.
        matching: which of them belong together.
        waits: their waits.
        ranks: ascending, (num_ranks,).
        mask: the rows whose waits are attributed, bool, (num_operations,); all if not given.
        wait_ns: what counts as waiting instead of `waits.wait_ns`, such as its exposed part, (num_operations,).
    """
    names = np.asarray(ranks, np.int64)
    length = np.asarray(waits.wait_ns if wait_ns is None else wait_ns, np.float64)
    partner = last_partner(operations, matching)
    length = np.where(partner >= 0, length, 0.0)
    order = np.lexsort((operations.enter_ns, operations.rank))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    total = np.append(0.0, np.cumsum(length[order]))

    rows = np.flatnonzero(length > 0)
    first_own, first_other = _since_common(operations, matching, rows, partner[rows], order, place)
    own = total[place[rows]] - total[first_own]
    other = total[place[partner[rows]]] - total[first_other]
    passed = np.clip(other - own, 0.0, length[rows])
    share = np.where(other > 0, passed / length[rows], 0.0)

    rank = operations.rank[partner[rows]]
    mass = np.where(mask[rows], length[rows], 0.0) if mask is not None else length[rows].copy()
    waited = _by_rank(operations.rank[rows], mass, names)
    found = np.zeros((2, len(names)))
    count = 0
    while mass.any() and count < MOST_ROUNDS:
        handed = mass * share
        found[min(count, 1)] += _by_rank(rank, mass - handed, names)
        rate = np.where(handed > 0, handed / np.maximum(other, 1e-9), 0.0)
        change = np.bincount(first_other, weights=rate, minlength=len(order) + 1)
        change -= np.bincount(place[partner[rows]], weights=rate, minlength=len(order) + 1)
        mass = np.maximum(np.cumsum(change)[place[rows]], 0.0) * length[rows]
        mass[mass < 1e-3] = 0.0  # rounding of the sums leaves tiny remainders
        count += 1
    found[1] += _by_rank(rank, mass, names)
    missing = waited.sum() - found.sum()
    if found.sum() > 0:
        found *= 1 + missing / found.sum()
    return Origins(direct_ns=found[0], propagated_ns=found[1], waited_ns=waited, num_rounds=count)


def _by_rank(rank: Int64Array, value: FloatArray, names: Int64Array) -> FloatArray:
    if not len(names):
        return np.zeros(0)
    slot = np.minimum(np.searchsorted(names, rank), len(names) - 1)
    known = names[slot] == rank
    return np.bincount(slot[known], weights=value[known], minlength=len(names)).astype(np.float64)


def _since_common(
    operations: Operations,
    matching: Matching,
    rows: Int64Array,
    partners: Int64Array,
    order: Int64Array,
    place: Int64Array,
) -> tuple[Int64Array, Int64Array]:
    """Return where, in `order`, the time since the last common synchronisation begins, for each row and its partner.

    It begins with the first operation after the last synchronising one of a group that both belong to, or with the
    rank's first operation.
    """
    names = operations.rank[order]
    own_first = np.searchsorted(names, operations.rank[rows])
    other_first = np.searchsorted(names, operations.rank[partners])
    found = [own_first.copy(), other_first.copy()]
    meets = synchronises(operations.op) & matching.is_matched & (operations.group_size > 1)
    size = int(operations.rank.max()) + 1 if len(operations) else 0
    for number in np.unique(operations.group[meets]).tolist():
        is_member = np.zeros(size, np.bool_)
        members = np.asarray(operations.groups[number].ranks)
        is_member[members[members < size]] = True
        both = np.flatnonzero(is_member[operations.rank[rows]] & is_member[operations.rank[partners]])
        at = np.sort(place[meets & (operations.group == number)])
        for side, of, least in ((0, rows, own_first), (1, partners, other_first)):
            before = np.append(-1, at)[np.searchsorted(at, place[of[both]])]
            found[side][both] = np.maximum(found[side][both], np.maximum(before + 1, least[both]))
    return found[0], found[1]
