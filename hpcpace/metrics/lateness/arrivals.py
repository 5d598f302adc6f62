"""Who is late at collectives, from arrivals and durations alone: for ranks whose own work is not known.

Host times of a rank with a device do not show its work, but its arrival at a collective on the device is real. Arrivals
blame whoever inherited a delay, and a wrong clock; so both estimates must agree, and in all groups of the rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from hpcpace.metrics.lateness.own_delay import arrival_lateness, beyond_median, compared_rows, duration_excess
from hpcpace.metrics.operations.dependence import MESSAGES, is_one_of
from hpcpace.metrics.operations.matching import Matching, Operations

FloatArray = NDArray[np.float64]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_LEAST_STEPS = 20
_BLOCKS = (4, 20)
_LEAST_LATE = 0.5
_LEAST_TOLD = 8
_NUM_ERRORS = 2.0
_ARRIVAL, _DURATION = 0, 1


@dataclass(frozen=True, kw_only=True)
class LateArrival:
    """A rank that is late at collectives step after step, by arrival and by duration alike.

    Attributes:
        rank: its number.
        arrival_ns: how long after the median rank it enters, mean over steps, at the collective of the step where
            that is longest.
        duration_ns: by how much shorter that collective is for it than for the median rank.
        interval_ns: 95 % interval of the lateness, which holds those of both estimates.
        late_share: share of the steps in which it is late by more than half of its mean.
        p_value: probability of as much by chance, over all ranks of its group.
    """

    rank: int
    arrival_ns: float
    duration_ns: float
    interval_ns: tuple[float, float]
    late_share: float
    p_value: float


def late_arrivals(
    operations: Operations,
    matching: Matching,
    is_on_device: BoolArray,
    *,
    ranks: Sequence[int],
    halfwidth_ns: FloatArray,
    node: Int64Array | None = None,
    level: float,
) -> tuple[LateArrival, ...]:
    """Return the ranks that are late at synchronising collectives, the latest first.

    A rank counts as late where its mean arrival, less the half-widths of the clocks, and its mean duration both show it
    beyond chance, they agree within the clocks' error, and it is late in at least half of the steps. Of eight ranks and
    more it must exceed what those that are not late differ by anyhow.

    A rank that belongs to several groups must be late in each: those that only inherit a delay are not late in the
    group where it began. Messages carry delays from stage to stage, so where ranks send to each other nobody is named.

    Args:
        operations: rows of all ranks.
        matching: which of them belong together.
        is_on_device: rows whose times are those of the device, or of a rank without one, bool, (num_operations,).
        ranks: ascending, (num_ranks,).
        halfwidth_ns: of each rank's clock, float64, (num_ranks,).
        node: node of each rank by its number, as for `duration_excess`.
        level: probability of naming somebody by chance, over all ranks of a group.
    """
    if is_one_of(operations.op, MESSAGES).any():
        return ()
    halfwidths = dict(zip(ranks, halfwidth_ns.tolist(), strict=True))
    found: dict[int, LateArrival] = {}
    cleared: set[int] = set()
    for members, panel in _panels(operations, matching, is_on_device, node):
        widths = np.array([halfwidths.get(rank, 0.0) for rank in members])
        late = {each.rank: each for each in _late(members, panel, widths, level)}
        cleared |= set(members) - set(late)
        for rank, each in late.items():
            found[rank] = max(found.get(rank, each), each, key=lambda one: one.duration_ns)
    named = [each for rank, each in found.items() if rank not in cleared]
    return tuple(sorted(named, key=lambda each: -each.duration_ns))


def _panels(
    operations: Operations, matching: Matching, is_on_device: BoolArray, node: Int64Array | None
) -> Iterator[tuple[tuple[int, ...], FloatArray]]:
    """Yield the members of each group and their lateness, (2, num_members, num_steps, num_positions), NaN for none."""
    rows = compared_rows(operations, matching)
    is_foreign = np.zeros(len(matching.num_rows), np.bool_)
    is_foreign[matching.instance[~is_on_device]] = True
    rows = rows[~is_foreign[matching.instance[rows]]]
    if not len(rows):
        return
    arrival = arrival_lateness(operations, matching)[rows]
    instance = np.unique(matching.instance[rows], return_inverse=True)[1].astype(np.int64)
    duration = beyond_median(instance, -duration_excess(operations, matching, node=node)[rows])
    # Groups with the same members are one: FSDP and DDP make several.
    numbers: dict[tuple[int, ...], int] = {}
    of_group = np.array([numbers.setdefault(group.ranks, len(numbers)) for group in operations.groups], np.int64)
    number = of_group[operations.group[rows]]
    for members, index in numbers.items():
        own = np.flatnonzero(number == index)
        if len(own):
            values = np.stack([arrival[own], duration[own]])
            yield members, _panel(operations, rows[own], instance[own], values, members)


def _panel(
    operations: Operations, rows: Int64Array, instance: Int64Array, values: FloatArray, members: tuple[int, ...]
) -> FloatArray:
    _, first, of = np.unique(instance, return_index=True, return_inverse=True)
    step = operations.step[rows[first]]
    order = np.lexsort((operations.enter_ns[rows[first]], step))
    _, starts, column = np.unique(step[order], return_index=True, return_inverse=True)
    columns, positions = np.empty((2, len(first)), np.int64)
    columns[order] = column
    positions[order] = np.arange(len(order)) - starts[column]
    panel = np.full((2, len(members), len(starts), int(positions.max()) + 1), np.nan)
    member = np.searchsorted(members, operations.rank[rows])
    panel[:, member, columns[of], positions[of]] = values
    return panel


def _late(members: tuple[int, ...], panel: FloatArray, widths: FloatArray, level: float) -> Iterator[LateArrival]:
    num_steps = panel.shape[2]
    if num_steps < _LEAST_STEPS:
        return
    in_step = np.nanmean(panel, axis=3)
    mean, error, freedom = _means(in_step)
    # Against the clocks of the others, too; a wrong clock shows in the arrival alone.
    width = widths + np.median(widths)
    over = np.stack([mean[_ARRIVAL] - width, mean[_DURATION]])
    chance = len(members) * (1 - stdtr(freedom, over / np.maximum(error, 1.0))).max(axis=0)
    differs = mean[_ARRIVAL] - mean[_DURATION]
    agrees = np.abs(differs - np.median(differs)) <= width + _NUM_ERRORS * np.hypot(*error)
    late_share = (in_step > mean[:, :, None] / 2).mean(axis=2).min(axis=0)
    is_late = (chance < level) & agrees & (late_share >= _LEAST_LATE)
    of_position = np.nanmean(panel, axis=2)
    for row in np.flatnonzero(is_late).tolist():
        latest = int(of_position[:, row].min(axis=0).argmax())
        if of_position[_DURATION, row, latest] <= _usual_spread(of_position[_DURATION, ~is_late, latest], level):
            continue
        there = panel[:, row, :, latest]
        there = there[:, np.isfinite(there[0])]
        centre, spread, degrees = _means(there)
        reach = spread * float(stdtrit(degrees, 0.975))
        yield LateArrival(
            rank=members[row],
            arrival_ns=float(centre[_ARRIVAL]),
            duration_ns=float(centre[_DURATION]),
            interval_ns=(float((centre - reach).min()), float((centre + reach).max())),
            late_share=float(late_share[row]),
            p_value=float(chance[row]),
        )


def _means(series: FloatArray) -> tuple[FloatArray, FloatArray, int]:
    """Return mean and standard error over the last axis, from means of consecutive blocks, and degrees of freedom."""
    num_blocks = int(np.clip(series.shape[-1] // 4, *_BLOCKS))
    blocks = np.stack([part.mean(axis=-1) for part in np.array_split(series, num_blocks, axis=-1)], axis=-1)
    return series.mean(axis=-1), blocks.std(axis=-1, ddof=1) / np.sqrt(num_blocks), num_blocks - 1


def _usual_spread(others: FloatArray, level: float) -> float:
    """Return what the latest of ranks that are not late exceeds their mean by anyhow; 0 where too few tell it."""
    if len(others) < _LEAST_TOLD:
        return 0.0
    return float(others.std(ddof=1) * stdtrit(len(others) - 1, 1 - level / len(others)))
