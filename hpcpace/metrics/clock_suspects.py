"""Violations of causality, the clocks that cause them, and clocks from collectives alone.

If an exit depends on an enter on another host but is recorded earlier, beyond half-widths and rounding, one clock is
ahead of the other by at least that much. Only further hosts can show which of the two is wrong.

No rank leaves a synchronising operation before all have entered. That orders times on different hosts, whatever their
clocks say, and bounds the offset o of two ranks a and b (local time of b minus that of a): it is between enter_b -
exit_a and exit_b - enter_a of every operation of both. These bounds are certain while clocks do not drift by more
within a stretch of time, but one-sided: where b always comes last, the upper bound and the middle half contain its
peer's wait. Ranks leave such an operation nearly together, so the estimate is the median of exit_b - exit_a within the
bounds, over the half of operations with the shortest transfers. Its half-width is the longest of these transfers plus
twice the median deviation of their differences: a rank that waited is woken later than one that came last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.kernels import numbered
from hpcpace.metrics.matching import Matching
from hpcpace.metrics.operations import (
    UNKNOWN_GROUP,
    Operations,
    releases_others,
    select_rows,
    shows_all_members,
    shows_peer,
)
from hpcpace.metrics.waits import Waits
from hpcpace.trace.schema import ExitKind, Op


@dataclass(frozen=True, kw_only=True)
class PairViolations:
    """Ranks of one node that left a collective before a rank of another node had entered it.

    Attributes:
        exit_node: node of the ranks that left too early.
        enter_node: node of the rank that entered last.
        num_violations: number of exits before the last enter.
        median_ns: their median size.
        max_ns: their largest size.
        num_unexplained: violations larger than both half-widths and rounding together: a clock is wrong.
    """

    exit_node: int
    enter_node: int
    num_violations: int
    median_ns: int
    max_ns: int
    num_unexplained: int


def pair_violations(exit_node: Ints, enter_node: Ints, size_ns: Ints, allowed_ns: Floats) -> tuple[PairViolations, ...]:
    """Return the violations by node pair, the pair with most unexplained ones first.

    Args:
        exit_node: node of each rank that left too early, (num_violations,).
        enter_node: node of the rank that entered last.
        size_ns: by how much the exit comes before the enter.
        allowed_ns: how much of that half-widths and rounding explain.
    """
    pairs = []
    for a, b in np.unique(np.stack([exit_node, enter_node], axis=1), axis=0).tolist():
        chosen = (exit_node == a) & (enter_node == b)
        sizes_ns = size_ns[chosen]
        pairs.append(
            PairViolations(
                exit_node=a,
                enter_node=b,
                num_violations=len(sizes_ns),
                median_ns=int(np.median(sizes_ns)),
                max_ns=int(sizes_ns.max()),
                num_unexplained=int((sizes_ns > allowed_ns[chosen]).sum()),
            )
        )
    pairs.sort(key=lambda pair: (-pair.num_unexplained, -pair.num_violations, pair.exit_node, pair.enter_node))
    return tuple(pairs)


_MAX_STRETCHES, _MIN_OPERATIONS = 64, 16  # statistics: of a clock; operations of a stretch that give its median
_LONGEST_NS = 3.2e18  # format: a century, which fits into int64


@dataclass(frozen=True, kw_only=True)
class ClockBounds:
    """The clock of one rank against that of another, one row a stretch of time.

    Attributes:
        local_ns: middle of the stretch on the rank's own clock, int64, (num_stretches,), ascending.
        offset_ns: local time less reference time, int64, (num_stretches,).
        halfwidth_ns: the true offset is within `offset_ns` +- `halfwidth_ns`, if ranks leave operations within the time
            of a transfer, int64, (num_stretches,).
        contradiction_ns: by how much bounds contradict each other at most; 0 where they do not.
        num_operations: operations used, int64, (num_stretches,).
    """

    local_ns: Ints
    offset_ns: Ints
    halfwidth_ns: Ints
    contradiction_ns: int
    num_operations: Ints


def collective_bounds(
    enter_ns: Ints, exit_ns: Ints, reference_enter_ns: Ints, reference_exit_ns: Ints, transfer_ns: Ints | None = None
) -> ClockBounds | None:
    """Return the clock of a rank by operations that it and the reference took part in; None without any.

    Args:
        enter_ns, exit_ns: the rank's own times, int64, (num_operations,).
        reference_enter_ns, reference_exit_ns: those of the reference, of the same operations in the same order.
        transfer_ns: at most how long each of them transferred: the shortest time that a member was in it, int64,
            (num_operations,). Without it, the shorter one of the two ranks.
    """
    if not len(enter_ns):
        return None
    order = np.argsort(enter_ns, kind="stable")
    low = (enter_ns - reference_exit_ns)[order]
    high = (exit_ns - reference_enter_ns)[order]
    apart = (exit_ns - reference_exit_ns)[order]
    shortest = np.minimum(exit_ns - enter_ns, reference_exit_ns - reference_enter_ns)
    transfer = np.maximum(shortest if transfer_ns is None else np.minimum(shortest, transfer_ns), 0)[order]
    local = enter_ns[order]
    num_stretches = int(np.clip(len(local) // _MIN_OPERATIONS, 1, _MAX_STRETCHES))
    starts = np.linspace(0, len(local), num_stretches, endpoint=False).astype(np.int64)
    lowest, highest = np.maximum.reduceat(low, starts), np.minimum.reduceat(high, starts)
    usual = np.empty((2, num_stretches), np.int64)
    for stretch, rows in enumerate(np.split(np.arange(len(local)), starts[1:])):
        is_short = transfer[rows] <= np.median(transfer[rows])
        middle = np.median(apart[rows][is_short])
        scatter = 2 * np.median(np.abs(apart[rows][is_short] - middle))
        usual[:, stretch] = middle, transfer[rows][is_short].max() + scatter
    least, most = np.minimum(lowest, highest), np.maximum(lowest, highest)
    offset = np.clip(usual[0], least, most)
    certain = np.maximum(offset - least, most - offset)
    count = np.diff(np.append(starts, len(local)))
    return ClockBounds(
        local_ns=local[starts + count // 2],
        offset_ns=offset,
        halfwidth_ns=np.minimum(certain, usual[1]),
        contradiction_ns=max(int((lowest - highest).max()), 0),
        num_operations=count,
    )


MAX_WRONG = 3
"""Speed: if more clocks than this are wrong, the search stops: everybody in a contradiction is a suspect."""
_MAX_PAIRS = 2_000_000  # memory: of rows that are compared with each other


@dataclass(frozen=True, kw_only=True)
class Contradictions:
    """Rows of operations in which an exit comes before an enter that it depends on, before half-widths are allowed for.

    Attributes:
        rows: row numbers of `Operations`, int64, (num_rows,).
        instance: the operation of each, 0, 1, ..., int64, (num_rows,).
        is_cause: whether others depend on its enter, bool, (num_rows,).
        is_effect: whether its exit depends on the enters of the causes, bool, (num_rows,).
        num_messages: messages received before they were sent.
    """

    rows: Ints
    instance: Ints
    is_cause: Bools
    is_effect: Bools
    num_messages: int


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """One clock that may be wrong.

    Attributes:
        node: its host's index.
        ahead_ns: how far it is ahead of another clock, at least; 0 if that is not proven.
        behind_ns: how far it is behind another clock, likewise.
        against: the nodes whose clocks it contradicts, ascending; only sound ones if the wrong clocks are known.
    """

    node: int
    ahead_ns: int
    behind_ns: int
    against: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ClockVerdict:
    """Which clocks may be wrong.

    Attributes:
        num_wrong: the fewest wrong clocks that explain everything: 0 for none, `MAX_WRONG` + 1 for too many to find.
        suspects: all clocks of all smallest sets; with only one such set they are as many as `num_wrong`.
    """

    num_wrong: int
    suspects: tuple[Suspect, ...]


def contradictions(operations: Operations, matching: Matching, waits: Waits) -> Contradictions:
    """Return the operations whose times contradict causality before any uncertainty is allowed for.

    In a synchronising operation all members depend on all, in a broadcast or scatter the others on the root, in a
    reduce or gather the root on the others, and a receiver depends on its sender. What these prove holds even if some
    members have no record.
    """
    rows = (
        np.flatnonzero(waits.may_contradict[matching.instance]) if waits.may_contradict.any() else np.zeros(0, np.int64)
    )
    own = select_rows(operations, rows)
    usable = own.group != UNKNOWN_GROUP
    if len(rows) and not matching.slices:
        usable &= _is_usable(operations, matching)[rows]
    causes, effects = _roles(own, usable)
    names, instance = numbered(matching.instance[rows])
    last_ns, first_ns = _extremes(instance, len(names), own.enter_ns, own.exit_ns, causes, effects)
    chosen = np.flatnonzero((last_ns > first_ns)[instance] & (causes | effects))
    return Contradictions(
        rows=rows[chosen],
        instance=numbered(instance[chosen])[1],
        is_cause=causes[chosen],
        is_effect=effects[chosen],
        num_messages=int((own.op[chosen] == Op.RECV).sum()),
    )


def _roles(own: Operations, usable: Bools) -> tuple[Bools, Bools]:
    """Return which rows' enters others depend on, and which rows' exits depend on others, each bool, (num_rows,)."""
    is_root = own.rank == own.peer
    effects = usable & (own.exit_kind != ExitKind.FAILED) & (shows_all_members(own) | shows_peer(own))
    causes = releases_others(own.op, is_root) & (own.op != Op.RECV) & usable
    return causes, effects


def proven_leads(
    operations: Operations, found: Contradictions, *, node: Ints, enter_error_ns: Floats, exit_error_ns: Floats
) -> dict[tuple[int, int], int]:
    """Return by how many nanoseconds, at least, the clock of node b is ahead of that of a, by (a, b).

    The largest contradictions of each group are used first, as far as memory and time allow. Each one is a proof.

    Args:
        operations: rows of all ranks.
        found: those that contradict causality.
        node: index of the host of each row of `found`, int64, (num_rows,).
        enter_error_ns, exit_error_ns: how wrong the times of causes and of effects may be: half-width and rounding,
            float64, (num_rows,).
    """
    enter_ns = operations.enter_ns[found.rows] - _whole(enter_error_ns)
    exit_ns = operations.exit_ns[found.rows] + _whole(exit_error_ns)
    num_instances = int(found.instance.max(initial=-1)) + 1
    last_ns, first_ns = _extremes(found.instance, num_instances, enter_ns, exit_ns, found.is_cause, found.is_effect)
    late = np.flatnonzero(found.is_cause & (enter_ns > first_ns[found.instance]))
    early = np.flatnonzero(found.is_effect & (exit_ns < last_ns[found.instance]))
    num_pairs = np.bincount(found.instance[late], minlength=num_instances) * np.bincount(
        found.instance[early], minlength=num_instances
    )
    group = np.zeros(num_instances, np.int64)
    group[found.instance] = operations.group[found.rows]
    is_used = _largest_of_each(group, last_ns, first_ns, num_pairs)
    late, early = late[is_used[found.instance[late]]], early[is_used[found.instance[early]]]
    of_late, of_early = _pairs(found.instance[late], found.instance[early])
    late, early = late[of_late], early[of_early]
    lead_ns = enter_ns[late] - exit_ns[early]
    is_proof = (lead_ns > 0) & (node[late] != node[early])
    return _largest_by_pair(node[early][is_proof], node[late][is_proof], lead_ns[is_proof])


def judge(leads_ns: Mapping[tuple[int, int], int]) -> ClockVerdict:
    """Return the fewest clocks that explain all proven leads, as in the smallest vertex covers of their graph.

    Blaming the one clock that all others contradict, and not all the others, is parsimony and no proof. If only two
    hosts contradict each other, either may be wrong.

    Args:
        leads_ns: by (a, b), how far the clock of node b is ahead of that of node a, at least.
    """
    edges = {(min(pair), max(pair)) for pair in leads_ns}
    if not edges:
        return ClockVerdict(num_wrong=0, suspects=())
    for num_wrong in range(1, MAX_WRONG + 1):
        nodes = {node for cover in _covers(edges, num_wrong) for node in cover}
        if nodes:
            break
    else:
        num_wrong, nodes = MAX_WRONG + 1, {node for edge in edges for node in edge}
    # Two wrong clocks contradict each other by more than either is wrong, so a wrong one is compared with sound ones.
    sound = {pair: lead for pair, lead in leads_ns.items() if not nodes.issuperset(pair)}
    proven = sound if len(nodes) == num_wrong else leads_ns
    suspects = tuple(
        Suspect(
            node=node,
            ahead_ns=max((lead for (_, ahead), lead in proven.items() if ahead == node), default=0),
            behind_ns=max((lead for (behind, _), lead in proven.items() if behind == node), default=0),
            against=tuple(sorted({sum(pair) - node for pair in proven if node in pair})),
        )
        for node in sorted(nodes)
    )
    return ClockVerdict(num_wrong=num_wrong, suspects=suspects)


def _covers(edges: Iterable[tuple[int, int]], size: int) -> set[frozenset[int]]:
    """Return the sets of at most `size` nodes that hold at least one end of every edge."""
    edge = next(iter(edges), None)
    if edge is None:
        return {frozenset()}
    if size == 0:
        return set()
    return {
        rest | {node} for node in edge for rest in _covers([other for other in edges if node not in other], size - 1)
    }


def _is_usable(operations: Operations, matching: Matching) -> Bools:
    """Return which rows are of an operation that no rank has twice, bool, (num_operations,)."""
    instance, rank = matching.instance[matching.order], operations.rank[matching.order]
    is_again = (np.diff(instance, prepend=-1) == 0) & (np.diff(rank, prepend=-1) == 0)
    num_again = np.bincount(instance[is_again], minlength=len(matching.starts))
    return np.asarray(num_again[matching.instance] == 0)


def _extremes(
    instance: Ints, num_instances: int, enter_ns: Ints, exit_ns: Ints, causes: Bools, effects: Bools
) -> tuple[Ints, Ints]:
    """Return the last enter of the causes and the first exit of the effects, each int64, (num_instances,)."""
    last_ns = np.full(num_instances, np.iinfo(np.int64).min)
    first_ns = np.full(num_instances, np.iinfo(np.int64).max)
    np.maximum.at(last_ns, instance[causes], enter_ns[causes])
    np.minimum.at(first_ns, instance[effects], exit_ns[effects])
    return last_ns, first_ns


def _whole(error_ns: Floats) -> Ints:
    # The half-width of an unknown clock is infinite.
    return np.minimum(np.ceil(error_ns), _LONGEST_NS).astype(np.int64)


def _largest_of_each(group: Ints, last_ns: Ints, first_ns: Ints, num_pairs: Ints) -> Bools:
    """Return which operations to use: the largest of each group, then the second of each, up to `_MAX_PAIRS`."""
    if num_pairs.sum() <= _MAX_PAIRS:
        return num_pairs > 0
    size_ns = np.where(num_pairs > 0, last_ns - first_ns, 0)
    order = np.lexsort((-size_ns, group))
    begins = np.flatnonzero(np.diff(group[order], prepend=-2))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
    order = np.lexsort((-size_ns, place))
    is_used = np.zeros(len(order), np.bool_)
    total = np.cumsum(num_pairs[order])
    is_used[order] = (total <= _MAX_PAIRS) | (total == num_pairs[order])
    return is_used & (num_pairs > 0)


def _pairs(left: Ints, right: Ints) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return all pairs of positions in `left` and `right` with the same value."""
    order = np.argsort(right, kind="stable")
    begin = np.searchsorted(right[order], left, side="left")
    count = np.searchsorted(right[order], left, side="right") - begin
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(np.arange(len(left)), count), order[np.repeat(begin, count) + within]


def _largest_by_pair(first: Ints, second: Ints, value: Ints) -> dict[tuple[int, int], int]:
    order = np.lexsort((value, second, first))
    first, second, value = first[order], second[order], value[order]
    is_last = np.append((np.diff(first) != 0) | (np.diff(second) != 0), True)[: len(order)]
    kept = zip(first[is_last].tolist(), second[is_last].tolist(), value[is_last].tolist(), strict=True)
    return {(a, b): lead for a, b, lead in kept}
