"""Which ranks are late at collectives, by arrival and by duration of the collective, and whose clocks are wrong.

Arrival order alone blames ranks that merely inherited a delay, and a wrong clock can make any rank look late. Host
times of a rank with a device do not show its work, but its arrival at a collective on the device is real: there,
arrival and duration must agree, in all groups of the rank.

Operations of devices show more of the clocks of hosts than samples between hosts do: a collective ends on all members
at about one time, and messages take as long there as back. Samples of a clock are wrong by microseconds, or by more if
something held them up. A step of some milliseconds has dozens of operations, and that error is in the transfer of each
for which the same rank is last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.kernels import grouped_medians, numbered, stable_order
from hpcpace.metrics.matching import Matching
from hpcpace.metrics.operations import MESSAGES, Operations, is_one_of, synchronises
from hpcpace.metrics.resampling import MAX_BLOCKS
from hpcpace.metrics.segments import DEVICE_ERROR_NS, LocalWork
from hpcpace.metrics.special import NORMAL_MAD, UPPER_95, stdtr, stdtrit
from hpcpace.trace.schema import ExitKind, Op

_MIN_BLOCKS = 4  # statistics: of steps, for a standard error; and the fewest steps of a block
_ARRIVAL, _DURATION = 0, 1


@dataclass(frozen=True, kw_only=True)
class ArrivalThresholds(Thresholds, topic="arrivals"):
    """When arrival at collectives shows who is late, or whose clock is wrong."""

    min_steps: int = number(20, "steps", at_least=4)
    """Steps, fewer of which name nobody: their blocks are too few or too short."""
    min_late_share: float = number(0.5, "share")
    """Share of the steps in which a rank must be late by half of its mean: else a few long delays make the mean."""
    min_alike: int = number(8, "ranks", at_least=2)
    """Ranks that are not late, fewer of which do not show how much such ranks differ."""
    max_errors: float = number(2.0, "standard errors")
    """Difference of arrival and duration beyond the clocks' error, up to which they agree."""
    min_compared: int = number(3, "ranks", at_least=1)
    """Ranks whose clocks are compared with the median one; of two, either may be wrong."""
    exit_deviations: float = number(3.0, "standard errors")
    """Robust standard deviations over ranks by which exits may spread without a wrong clock."""


def _numbered(first: Ints, second: Ints) -> Ints:
    """Return one number per pair, without large gaps."""
    first, second = first - first.min(), second - second.min()
    return numbered(first * (int(second.max()) + 1) + second)[1]


def beyond_median(cell: Ints, value: Floats) -> Floats:
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


def arrival_lateness(operations: Operations, matching: Matching) -> Floats:
    """Return enter minus the median enter of the operation's ranks, on the common clock, nanoseconds.

    Of two ranks, each is compared with the other. 0 for operations that are not matched or do not synchronise; float64,
    (num_operations,).
    """
    late, rows = np.zeros(len(operations)), compared_rows(operations, matching)
    if len(rows):
        instance = matching.instance[rows]
        enter = (operations.enter_ns[rows] - operations.enter_ns[rows].min()).astype(np.float64)
        late[rows] = beyond_median(numbered(instance)[1], enter)
    return late


def duration_excess(operations: Operations, matching: Matching, *, node: Ints | None = None) -> Floats:
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


def _exit_bias(operations: Operations, matching: Matching, rows: Ints, node: Ints) -> Floats:
    rank = operations.rank[rows]
    cell = _numbered(matching.instance[rows], node[rank])
    exit_ns = (operations.exit_ns[rows] - operations.exit_ns[rows].min()).astype(np.float64)
    difference = exit_ns - (np.bincount(cell, weights=exit_ns) / np.bincount(cell))[cell]
    return grouped_medians(rank, difference, len(node))


def compared_rows(operations: Operations, matching: Matching) -> Ints:
    """Return the rows of matched synchronising operations of two ranks and more, int64."""
    return np.flatnonzero(synchronises(operations.op) & matching.is_matched & (operations.group_size > 1))


def suspected_clocks(
    operations: Operations,
    matching: Matching,
    work: LocalWork,
    *,
    ranks: Sequence[int],
    halfwidth_ns: Floats,
    node: Ints | None = None,
    limits: ArrivalThresholds = ArrivalThresholds(),
) -> Bools:
    """Return the ranks whose arrival on the common clock contradicts how long their operations last, (num_ranks,).

    All ranks leave a synchronising operation together, up to the spread of their exits, so lateness by arrival and by
    duration differ by the clock error. That error is systematic: more steps do not shrink the half-widths. The spread
    is three robust standard deviations over the ranks, but no more than the shortest duration. The difference of a
    rank from the median one may be as large as half-widths, the spread of exits and two standard errors together.

    Args:
        operations: rows of all ranks.
        matching: which of them belong together.
        work: from `local_work`.
        ranks: ascending, (num_ranks,).
        halfwidth_ns: of each rank's clock, drift between its samples included, float64, (num_ranks,).
        node: node of each rank by its number, as for `duration_excess`.
        limits: how much they may differ.
    """
    names = np.asarray(ranks, np.int64)
    rows = compared_rows(operations, matching)
    rows = rows[work.is_known[rows] & np.isin(operations.rank[rows], names)]
    if not len(rows):
        return np.zeros(len(names), np.bool_)
    _, instance = numbered(matching.instance[rows])
    late = beyond_median(instance, -duration_excess(operations, matching, node=node)[rows])
    slot = np.searchsorted(names, operations.rank[rows])
    values = np.stack([arrival_lateness(operations, matching)[rows], late])
    arrival, duration = _means_and_errors(values, slot, len(names))
    shortest = np.full(int(instance.max()) + 1, np.inf)
    np.minimum.at(shortest, instance, (operations.exit_ns[rows] - operations.enter_ns[rows]).astype(np.float64))
    spread = float(np.median(shortest))
    disagreement = arrival[0] - duration[0]
    known = disagreement[np.isfinite(disagreement)]
    if len(known) >= limits.min_compared:
        disagreement = disagreement - np.median(known)  # the two medians are of different ranks
    if len(known) > limits.min_compared:
        deviation = NORMAL_MAD * float(np.median(np.abs(known - np.median(known))))
        spread = min(spread, limits.exit_deviations * deviation)
    widths = halfwidth_ns + float(np.median(halfwidth_ns))
    return np.asarray(np.abs(disagreement) > widths + spread + limits.max_errors * np.hypot(arrival[1], duration[1]))


def _num_blocks(num_rows: int, num_ranks: int) -> int:
    return int(np.clip(num_rows // max(num_ranks, 1) // _MIN_BLOCKS, _MIN_BLOCKS, MAX_BLOCKS))


def _means_and_errors(values: Floats, slot: Ints, num_ranks: int) -> Floats:
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
    is_on_device: Bools,
    *,
    ranks: Sequence[int],
    halfwidth_ns: Floats,
    node: Ints | None = None,
    level: float,
    limits: ArrivalThresholds = ArrivalThresholds(),
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
        limits: the other thresholds.
    """
    if is_one_of(operations.op, MESSAGES).any():
        return ()
    halfwidths = dict(zip(ranks, halfwidth_ns.tolist(), strict=True))
    found: dict[int, LateArrival] = {}
    cleared: set[int] = set()
    for members, panel in _panels(operations, matching, is_on_device, node):
        widths = np.array([halfwidths.get(rank, 0.0) for rank in members])
        late = {each.rank: each for each in _late(members, panel, widths, level, limits)}
        cleared |= set(members) - set(late)
        for rank, each in late.items():
            found[rank] = max(found.get(rank, each), each, key=lambda one: one.duration_ns)
    named = [each for rank, each in found.items() if rank not in cleared]
    return tuple(sorted(named, key=lambda each: -each.duration_ns))


def _panels(
    operations: Operations, matching: Matching, is_on_device: Bools, node: Ints | None
) -> Iterator[tuple[tuple[int, ...], Floats]]:
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


def _panel(operations: Operations, rows: Ints, instance: Ints, values: Floats, members: tuple[int, ...]) -> Floats:
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


def _late(
    members: tuple[int, ...], panel: Floats, widths: Floats, level: float, limits: ArrivalThresholds
) -> Iterator[LateArrival]:
    num_steps = panel.shape[2]
    if num_steps < limits.min_steps:
        return
    in_step = np.nanmean(panel, axis=-1)
    mean, error, freedom = _means(in_step)
    # Against the clocks of the others, too; a wrong clock shows in the arrival alone.
    width = widths + np.median(widths)
    over = np.stack([mean[_ARRIVAL] - width, mean[_DURATION]])
    chance = len(members) * (1 - stdtr(freedom, over / np.maximum(error, 1.0))).max(axis=0)
    differs = mean[_ARRIVAL] - mean[_DURATION]
    agrees = np.abs(differs - np.median(differs)) <= width + limits.max_errors * np.hypot(*error)
    late_share = (in_step > mean[:, :, None] / 2).mean(axis=2).min(axis=0)
    is_late = (chance < level) & agrees & (late_share >= limits.min_late_share)
    of_position = np.nanmean(panel, axis=2)
    for row in np.flatnonzero(is_late).tolist():
        latest = int(of_position[:, row].min(axis=0).argmax())
        usual = _usual_spread(of_position[_DURATION, ~is_late, latest], level, limits.min_alike)
        if of_position[_DURATION, row, latest] <= usual:
            continue
        there = panel[:, row, :, latest]
        there = there[:, np.isfinite(there[0])]
        centre, spread, degrees = _means(there)
        reach = spread * float(stdtrit(degrees, UPPER_95))
        yield LateArrival(
            rank=members[row],
            arrival_ns=float(centre[_ARRIVAL]),
            duration_ns=float(centre[_DURATION]),
            interval_ns=(float((centre - reach).min()), float((centre + reach).max())),
            late_share=float(late_share[row]),
            p_value=float(chance[row]),
        )


def _means(series: Floats) -> tuple[Floats, Floats, int]:
    """Return mean and standard error over the last axis, from means of consecutive blocks, and degrees of freedom."""
    num_blocks = int(np.clip(series.shape[-1] // _MIN_BLOCKS, _MIN_BLOCKS, MAX_BLOCKS))
    blocks = np.stack([part.mean(axis=-1) for part in np.array_split(series, num_blocks, axis=-1)], axis=-1)
    return series.mean(axis=-1), blocks.std(axis=-1, ddof=1) / np.sqrt(num_blocks), num_blocks - 1


def _usual_spread(others: Floats, level: float, least: int) -> float:
    """Return what the latest of ranks that are not late exceeds their mean by anyhow; 0 of fewer than `least`."""
    if len(others) < least:
        return 0.0
    return float(others.std(ddof=1) * stdtrit(len(others) - 1, 1 - level / len(others)))


_TOGETHER = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER)
"""Format: the operations that no member leaves long before another; parts of an all_to_all may be uneven."""
_MIN_SEEN = 20
"""Statistics: operations of two hosts that show how their clocks differ."""
_SHORT, _WAITED = 0.1, 1.5
"""Statistics: the share of messages that last no longer than a transfer, and how many times as long those last whose
receivers were waiting."""


def clock_offsets_ns(operations: Operations, matching: Matching, host: Ints) -> Ints:
    """Return by how much the clock of each host is ahead of that of the first one, int64, (num_hosts,).

    The offset of two hosts is the median difference of the mean exits of their collectives; where they have none, half
    of what messages take longer one way than the other (as NTP has it). One that meets the first host only through
    others is compared with these. 0 where too few operations show it.

    Args:
        operations: rows of all ranks.
        matching: which of them belong together.
        host: index of the host of each row's rank, int64, (num_operations,).
    """
    num_hosts = int(host.max(initial=-1)) + 1
    offset_ns, is_known = np.zeros(num_hosts, np.int64), np.zeros(num_hosts, np.bool_)
    is_on_device = np.array([*(group.is_on_device for group in operations.groups), False])
    chosen = is_on_device[operations.group] & matching.is_matched
    if num_hosts < 2 or not chosen.any():
        return offset_ns
    exits = _Exits.of(operations, matching, host, chosen)
    by_messages = _message_offsets_ns(operations, matching, host, chosen)
    waiting, is_known[0] = [0], True
    while waiting:
        hub = waiting.pop(0)
        ahead_ns = {other: ns for (of, other), ns in by_messages.items() if of == hub} | exits.ahead_ns(hub)
        for other, ns in sorted(ahead_ns.items()):
            if not is_known[other]:
                offset_ns[other], is_known[other] = offset_ns[hub] + round(ns), True
                waiting.append(other)
    return offset_ns


@dataclass(frozen=True)
class _Exits:
    """The mean exits of collectives on each host, float64, (num_means,), with the number of each, and of its host."""

    mean_ns: Floats
    instance: Ints
    host: Ints
    num_instances: int

    @classmethod
    def of(cls, operations: Operations, matching: Matching, host: Ints, chosen: Bools) -> _Exits:
        is_seen = is_one_of(operations.op, _TOGETHER) & (operations.exit_kind == ExitKind.COMPLETION)
        rows, num_hosts = np.flatnonzero(chosen & is_seen), int(host.max()) + 1
        exit_ns = (operations.exit_ns[rows] - operations.exit_ns.min()).astype(np.float64)
        cell, index = np.unique(matching.instance[rows] * num_hosts + host[rows], return_inverse=True)
        mean_ns = np.asarray(np.bincount(index, exit_ns) / np.maximum(np.bincount(index), 1), np.float64)
        return cls(mean_ns, cell // num_hosts, cell % num_hosts, len(matching.num_rows))

    def ahead_ns(self, hub: int) -> dict[int, float]:
        """Return by how much others are ahead of one host, of those that enough collectives show."""
        of_hub_ns = np.full(self.num_instances, np.nan)
        is_hub = self.host == hub
        of_hub_ns[self.instance[is_hub]] = self.mean_ns[is_hub]
        ahead_ns = self.mean_ns - of_hub_ns[self.instance]
        met = np.flatnonzero(~np.isnan(ahead_ns) & ~is_hub)
        order = met[np.argsort(self.host[met], kind="stable")]
        names, first = np.unique(self.host[order], return_index=True)
        parts = zip(names.tolist(), np.split(ahead_ns[order], first[1:]), strict=False)
        return {other: float(np.median(seen_ns)) for other, seen_ns in parts if len(seen_ns) >= _MIN_SEEN}


def _message_offsets_ns(
    operations: Operations, matching: Matching, host: Ints, chosen: Bools
) -> dict[tuple[int, int], float]:
    """Return by how much the clock of the second of two hosts is ahead, where messages go both ways between them.

    Only those whose receiver was waiting show how long they take: these last longer for it than the shortest ones.
    """
    sender = np.full(len(matching.num_rows), -1)
    sends = np.flatnonzero(chosen & (operations.op == Op.SEND))
    sender[matching.instance[sends]] = sends
    rows = np.flatnonzero(chosen & (operations.op == Op.RECV) & (sender[matching.instance] >= 0))
    rows = rows[host[rows] != host[sender[matching.instance[rows]]]]
    if not len(rows):
        return {}
    sends = sender[matching.instance[rows]]
    way_ns = operations.exit_ns[rows] - operations.enter_ns[sends]
    lasted_ns = operations.exit_ns[rows] - operations.enter_ns[rows]
    keys = np.stack([host[sends], host[rows], operations.size_bytes[rows]])
    names, index = np.unique(keys, axis=1, return_inverse=True)
    parts = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])
    usual_ns: dict[tuple[int, ...], float] = {}
    for name, part in zip(names.T.tolist(), parts, strict=True):
        waited = part[lasted_ns[part] > _WAITED * np.quantile(lasted_ns[part], _SHORT) + DEVICE_ERROR_NS]
        if len(waited) >= _MIN_SEEN:
            usual_ns[tuple(name)] = float(np.median(way_ns[waited]))
    found: dict[tuple[int, int], list[float]] = {}
    for (source, target, size), there_ns in usual_ns.items():
        if (target, source, size) in usual_ns:
            found.setdefault((source, target), []).append((there_ns - usual_ns[target, source, size]) / 2)
    return {pair: float(np.median(ahead_ns)) for pair, ahead_ns in found.items()}
