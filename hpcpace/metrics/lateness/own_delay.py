"""Who is late because of its own work, measured without a common clock, and whether the common clock agrees.

Blame follows own delay. Arrival order alone blames ranks that merely inherited a delay, and a wrong clock can make any
rank look late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from hpcpace.metrics.grouped import grouped_medians, stable_order
from hpcpace.metrics.lateness.segments import LocalWork
from hpcpace.metrics.operations.dependence import synchronises
from hpcpace.metrics.operations.matching import Matching, Operations
from hpcpace.metrics.roles import others_median

FloatArray = NDArray[np.float64]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_LEAST_RANKS = 3
_LEAST_BLOCKS = 4
_MOST_BLOCKS = 20
LATE_LEVEL = 0.005
_NUM_ERRORS = 2.0
"""How many standard errors a difference must exceed, beyond the half-widths, to count."""


def own_delay(operations: Operations, work: LocalWork) -> FloatArray:
    """Return by how much each operation's local work exceeds what is usual, nanoseconds, float64, (num_operations,).

    own_delay = work - median of the others of the same role at the same position of the same step. If fewer than three
    ranks have that position in that step, the median is over all steps: of the other rank if there are two, of the rank
    itself if it is alone in its role. 0 if the work is not known.
    """
    delay = np.zeros(len(operations))
    rows = np.flatnonzero(work.is_known)
    if not len(rows):
        return delay
    value = work.work_ns[rows].astype(np.float64)
    cell = _numbered(work.role[rows], work.position[rows])
    in_step = _numbered(cell, operations.step[rows])
    reference = _median_of_others(in_step, value)
    few = np.bincount(in_step)[in_step] < _LEAST_RANKS
    if few.any():
        reference[few] = _over_steps(cell[few], operations.rank[rows][few], value[few])
    delay[rows] = value - reference
    return delay


def _numbered(first: Int64Array, second: Int64Array) -> Int64Array:
    """Return one number per pair, without large gaps."""
    first, second = first - first.min(), second - second.min()
    key = first * (int(second.max()) + 1) + second
    if int(key.max()) > 4 * len(key) + 4096:
        key = np.unique(key, return_inverse=True)[1].astype(np.int64)
    return np.asarray((np.cumsum(np.bincount(key) > 0) - 1)[key], np.int64)


def _median_of_others(cell: Int64Array, value: FloatArray) -> FloatArray:
    """Return for each value the median of the other values of its cell; the value itself if it is alone."""
    order = stable_order(cell)
    count = np.bincount(cell)
    first = np.cumsum(count) - count
    median = value.copy()
    for size in np.unique(count[count > 1]).tolist():
        rows = order[first[count == size] + np.arange(size)[:, None]]
        median[rows] = others_median(value[rows])
    return median


def beyond_median(cell: Int64Array, value: FloatArray) -> FloatArray:
    """Return by how much each value exceeds the median of its cell, or the other one of two values.

    The median of three or more includes the value itself, so that a wrong value does not make the others look wrong.
    """
    count = np.bincount(cell)
    beyond = value - grouped_medians(cell, value, len(count))[cell]
    pairs = np.flatnonzero(count[cell] == 2)
    if len(pairs):
        both = np.zeros(len(count), np.int64)
        np.add.at(both, cell[pairs], pairs)
        beyond[pairs] = value[pairs] - value[both[cell[pairs]] - pairs]
    return beyond


def _over_steps(cell: Int64Array, rank: Int64Array, value: FloatArray) -> FloatArray:
    """Return the median over steps: of the other rank of the cell, or of the rank itself if it is alone."""
    pair = _numbered(cell, rank)
    num_pairs = int(pair.max()) + 1
    median = grouped_medians(pair, value, num_pairs)
    of_pair = np.zeros(num_pairs, np.int64)
    of_pair[pair] = cell
    pairs_of_cell = np.bincount(of_pair)
    total = np.bincount(of_pair, weights=median)
    others = pairs_of_cell[of_pair] - 1
    reference = np.where(others > 0, (total[of_pair] - median) / np.maximum(others, 1), median)
    return np.asarray(reference[pair], np.float64)


def arrival_lateness(operations: Operations, matching: Matching) -> FloatArray:
    """Return enter minus the median enter of the operation's ranks, on the common clock, nanoseconds.

    Of two ranks, each is compared with the other. 0 for operations that are not matched or do not synchronise; float64,
    (num_operations,).
    """
    late, rows = np.zeros(len(operations)), compared_rows(operations, matching)
    if len(rows):
        instance = matching.instance[rows]
        enter = (operations.enter_ns[rows] - operations.enter_ns[rows].min()).astype(np.float64)
        late[rows] = beyond_median(_numbered(instance, np.zeros_like(instance)), enter)
    return late


def duration_excess(operations: Operations, matching: Matching, *, node: Int64Array | None = None) -> FloatArray:
    """Return how much longer each rank was in a synchronising operation than the rank with the shortest time in it.

    duration_excess_r = (exit - enter)_r - min_k (exit - enter)_k, nanoseconds, float64, (num_operations,); 0 where not
    matched or not synchronising. The late rank has the shortest collective, whatever the clocks say. A rank that learns
    of the end later than others on its node seems less late than it is. This exit bias, the median over operations of
    its exit minus the mean exit on the node, is subtracted. Between nodes it cannot be separated from a clock error.

    Args:
        operations: rows of all ranks.
        matching: which of them belong together.
        node: node of each rank by its number, int64, (world_size,); without it no exit bias is subtracted.
    """
    excess, rows = np.zeros(len(operations)), compared_rows(operations, matching)
    if not len(rows):
        return excess
    order = rows[stable_order(matching.instance[rows])]
    starts = np.flatnonzero(np.diff(matching.instance[order], prepend=-1))
    duration = (operations.exit_ns[order] - operations.enter_ns[order]).astype(np.float64)
    if node is not None:
        duration -= _exit_bias(operations, matching, order, node)[operations.rank[order]]
    excess[order] = duration - np.repeat(np.minimum.reduceat(duration, starts), np.diff(np.append(starts, len(order))))
    return excess


def _exit_bias(operations: Operations, matching: Matching, rows: Int64Array, node: Int64Array) -> FloatArray:
    rank = operations.rank[rows]
    cell = _numbered(matching.instance[rows], node[rank])
    exit_ns = (operations.exit_ns[rows] - operations.exit_ns[rows].min()).astype(np.float64)
    difference = exit_ns - (np.bincount(cell, weights=exit_ns) / np.bincount(cell))[cell]
    return grouped_medians(rank, difference, len(node))


def compared_rows(operations: Operations, matching: Matching) -> Int64Array:
    """Return the rows of matched synchronising operations of two ranks and more, int64."""
    return np.flatnonzero(synchronises(operations.op) & matching.is_matched & (operations.group_size > 1))


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Three estimates of how late each rank is in synchronising operations, and whether they contradict each other.

    All per operation, relative to the median rank, float64, (num_ranks,), NaN for a rank without such operations.

    Attributes:
        rank: int64, (num_ranks,).
        arrival_ns: lateness of the enter on the common clock.
        own_delay_ns: lateness that the rank's own work explains; needs no common clock.
        duration_ns: lateness that follows from how short the operation was for the rank; needs no common clock.
        allowed_ns: by how much arrival_ns and duration_ns may differ: half-widths, the spread of exits and two standard
            errors together.
        is_suspected: whether the two differ by more, compared with the median rank: its clock is suspected, bool.
        is_late: whether own delay and duration both show the rank late beyond chance (t test of both, LATE_LEVEL over
            all ranks together), bool.
    """

    rank: Int64Array
    arrival_ns: FloatArray
    own_delay_ns: FloatArray
    duration_ns: FloatArray
    allowed_ns: FloatArray
    is_suspected: BoolArray
    is_late: BoolArray


def agreement(
    operations: Operations,
    matching: Matching,
    work: LocalWork,
    *,
    ranks: Sequence[int],
    halfwidth_ns: FloatArray,
    node: Int64Array | None = None,
) -> Agreement:
    """Compare arrival order on the common clock, own delay and duration excess of each rank.

    All ranks leave a synchronising operation together, up to the spread of their exits, so lateness by arrival and by
    duration differ by the clock error. That error is systematic: more steps do not shrink the half-widths. The spread
    is three robust standard deviations over the ranks, but no more than the shortest duration.

    Args:
        operations: rows of all ranks.
        matching: which of them belong together.
        work: from `local_work`.
        ranks: ascending, (num_ranks,).
        halfwidth_ns: of each rank's clock, drift between its samples included, float64, (num_ranks,).
        node: node of each rank by its number, as for `duration_excess`.
    """
    names = np.asarray(ranks, np.int64)
    rows = compared_rows(operations, matching)
    rows = rows[work.is_known[rows] & np.isin(operations.rank[rows], names)]
    arrival, own, duration = np.full((3, 2, len(names)), np.nan)
    spread, halfwidth = 0.0, np.asarray(halfwidth_ns, np.float64)
    if len(rows):
        late = -duration_excess(operations, matching, node=node)
        instance = _numbered(matching.instance[rows], np.zeros(len(rows), np.int64))
        late[rows] = beyond_median(instance, late[rows])
        slot = np.searchsorted(names, operations.rank[rows])
        values = np.stack([arrival_lateness(operations, matching), own_delay(operations, work), late])[:, rows]
        arrival, own, duration = _means_and_errors(values, slot, len(names))
        shortest = np.full(int(instance.max()) + 1, np.inf)
        np.minimum.at(shortest, instance, (operations.exit_ns[rows] - operations.enter_ns[rows]).astype(np.float64))
        spread = float(np.median(shortest))
    disagreement = arrival[0] - duration[0]
    known = disagreement[np.isfinite(disagreement)]
    if len(known) >= _LEAST_RANKS:
        disagreement = disagreement - np.median(known)  # the two medians are of different ranks
    if len(known) > _LEAST_RANKS:
        spread = min(spread, 3 * 1.4826 * float(np.median(np.abs(known - np.median(known)))))
    critical = float(stdtrit(_num_blocks(len(rows), len(names)) - 1, 1 - LATE_LEVEL / max(len(names), 1)))
    other = float(np.median(halfwidth)) if len(halfwidth) else 0.0
    allowed = halfwidth + other + spread + _NUM_ERRORS * np.hypot(arrival[1], duration[1])
    return Agreement(
        rank=names,
        arrival_ns=arrival[0],
        own_delay_ns=own[0],
        duration_ns=duration[0],
        allowed_ns=allowed,
        is_suspected=np.abs(disagreement) > allowed,
        is_late=(own[0] > critical * own[1]) & (duration[0] > critical * duration[1]),
    )


def _num_blocks(num_rows: int, num_ranks: int) -> int:
    return int(np.clip(num_rows // max(num_ranks, 1) // 4, _LEAST_BLOCKS, _MOST_BLOCKS))


def _means_and_errors(values: FloatArray, slot: Int64Array, num_ranks: int) -> FloatArray:
    """Return mean and standard error by rank, (num_figures, 2, num_ranks), errors from means of consecutive blocks."""
    count = np.bincount(slot, minlength=num_ranks)
    order = stable_order(slot)
    place = np.arange(len(slot)) - (np.cumsum(count) - count)[slot[order]]
    num_blocks = _num_blocks(len(slot), num_ranks)
    cell = slot[order] * num_blocks + place * num_blocks // np.maximum(count[slot[order]], 1)
    size = np.bincount(cell, minlength=num_ranks * num_blocks).reshape(num_ranks, num_blocks)
    used = (size > 0).sum(axis=1)
    found = np.full((len(values), 2, num_ranks), np.nan)
    for index, value in enumerate(values):
        total = np.bincount(cell, weights=value[order], minlength=size.size).reshape(size.shape)
        mean = np.where(count > 0, total.sum(axis=1) / np.maximum(count, 1), np.nan)
        deviation = np.where(size > 0, total / np.maximum(size, 1) - mean[:, None], 0.0)
        error = np.sqrt((deviation**2).sum(axis=1) / np.maximum(used - 1, 1) / np.maximum(used, 1))
        found[index] = mean, np.where(used > 1, error, np.inf)
    return found
