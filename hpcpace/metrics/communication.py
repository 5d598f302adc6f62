"""Communication by kind: sums, durations, bandwidths and the share hidden behind work, also of a run read in parts.

Only communication that blocks its caller costs time. A histogram keeps durations of a run that is read in parts. Its
bins are at most a thousandth of their value wide, and so are the errors of median and 95th percentile. Bandwidths are
those of nccl-tests (doc/PERFORMANCE.md): of an operation's algorithm, and of the bus that carries it.

What is hidden behind work costs nothing, until it takes longer than the work beside it. So a job that grows needs to
know how much more could be hidden: the work of a phase from its first hidden operation on, since operations of a phase
are needed at its end at the latest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.pool import map_threads, run_threads
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S
from hpcpace.metrics import Bools, Bytes, Floats, Ints
from hpcpace.metrics.kernels import checked, library
from hpcpace.metrics.matching import Matching
from hpcpace.metrics.operations import MESSAGES, Operations, is_one_of, op_name
from hpcpace.metrics.pass_work import Passes
from hpcpace.metrics.phases import CoveredTime
from hpcpace.metrics.steps import columns_of
from hpcpace.metrics.waits import Waits
from hpcpace.trace.schema import Op, Phase

_BLOCK_ROWS = 1 << 18  # speed: rows that fit into the cache of a core
_MAX_TOTAL = 1 << 60  # format: sums of damaged times may not fit into int64; they are clipped
_OP_BITS = 8  # format: of an operation in a number that combines it with its kind, or with phase and place
_OP_MASK = (1 << _OP_BITS) - 1
_SHOWN_QUANTILES = (0.5, 0.95)  # display: of durations


@dataclass(frozen=True, kw_only=True)
class OperationKind:
    """All operations of one kind over groups of one size.

    Attributes:
        op: name of the operation.
        group_size: members of the group, 0 if unknown.
        num_rows: rows of all ranks.
        size_bytes: bytes of all rows.
        median_ns, p95_ns: duration of a row.
        mean_wait_ns: wait of a matched row; None without any.
        mean_transfer_ns: transfer of a matched operation, the largest of its ranks; None without any.
        num_unmatched: rows with a missing counterpart.
        ranks_unmatched: the ranks that recorded those rows.
    """

    op: str
    group_size: int
    num_rows: int
    size_bytes: int
    median_ns: float
    p95_ns: float
    mean_wait_ns: float | None
    mean_transfer_ns: float | None
    num_unmatched: int
    ranks_unmatched: tuple[int, ...]


def kind_numbers(operations: Operations, mask: Bools) -> tuple[Ints, NDArray[Any], Ints]:
    """Return the sizes of groups, ascending, the kind of each row, and how many rows under the mask each kind has.

    A kind is (index of the size) << 8 | operation.

    Args:
        operations: rows of all ranks.
        mask: the rows to count, bool, (num_operations,).
    """
    group_sizes, size_index = np.unique([0, *(len(group.ranks) for group in operations.groups)], return_inverse=True)
    # One small number for operation and size; the last of `group` is the unknown one, -1.
    of_group = np.append(size_index[1:], size_index[0])
    kind: NDArray[Any] = np.empty(len(operations), np.uint16 if len(group_sizes) <= _OP_MASK + 1 else np.uint32)

    def number_of(rows: slice) -> Ints:
        kind[rows] = of_group[operations.group[rows]] << _OP_BITS | operations.op[rows]
        return np.bincount(kind[rows][mask[rows]], minlength=len(group_sizes) << _OP_BITS)

    num_rows = np.zeros(len(group_sizes) << _OP_BITS, np.int64)
    for of_block in map_threads(number_of, blocks(len(operations))):
        num_rows += of_block
    return group_sizes, kind, num_rows


@dataclass(frozen=True, kw_only=True)
class RankTotals:
    """Sums over the operations of each rank, each (num_ranks,).

    Attributes:
        num_operations: completed operations.
        size_bytes: their bytes.
        wait_ns: wait, exposed or hidden.
        transfer_ns: transfer, exposed or hidden.
    """

    num_operations: Ints
    size_bytes: Ints
    wait_ns: Ints
    transfer_ns: Ints


def rank_totals(operations: Operations, waits: Waits, mask: Bools, ranks: Sequence[int]) -> RankTotals:
    """Return the sums of each of `ranks` over the rows where `mask` is true; rows are ordered by rank."""
    slot = {rank: index for index, rank in enumerate(ranks)}
    totals = np.zeros((len(ranks), len(fields(RankTotals))))

    def of_rank(rows: slice) -> None:
        used, own = mask[rows], slot.get(int(operations.rank[rows.start]))
        if own is None:
            return
        columns = (operations.size_bytes, waits.wait_ns, waits.transfer_ns)
        sums = ((values[rows] if used.all() else values[rows][used]).sum(dtype=np.float64) for values in columns)
        totals[own] += [np.count_nonzero(used), *sums]

    run_threads(of_rank, operations.slices or [])
    num_operations, size_bytes, wait_ns, transfer_ns = np.clip(totals, -_MAX_TOTAL, _MAX_TOTAL).astype(np.int64).T
    return RankTotals(num_operations=num_operations, size_bytes=size_bytes, wait_ns=wait_ns, transfer_ns=transfer_ns)


def blocks(num_rows: int) -> list[slice]:
    """Return slices of rows that fit into a core's cache."""
    return [slice(first, min(first + _BLOCK_ROWS, num_rows)) for first in range(0, num_rows, _BLOCK_ROWS)]


# Bins are cut from the bits of a positive float64: with 10 of the 52 fraction bits, each power of two has 1,024 bins.
_KEPT_BITS, _DROPPED_BITS, _BIAS, _NUM_POWERS = 10, 42, 1023, 62  # format: float64, and powers of two in int64
_FIRST_BIN, _NUM_BINS = _BIAS << _KEPT_BITS, _NUM_POWERS << _KEPT_BITS
_RANK_BITS = 32  # format: of a rank in a trace
_RANK_MASK = (1 << _RANK_BITS) - 1


@dataclass(frozen=True, kw_only=True)
class KindTotals:
    """Sums over operations of one kind.

    Attributes:
        op, group_size: the kind.
        num_rows, num_matched, num_operations: rows, rows with a match, and the number of operations these are.
        size_bytes, duration_ns, wait_ns, transfer_ns: sums; each operation counts with its largest transfer.
        durations: number of rows by duration, int64, (num_bins,).
        ranks_unmatched: ranks with rows without a match.
    """

    op: int
    group_size: int
    num_rows: int
    num_matched: int
    num_operations: int
    size_bytes: int
    duration_ns: float
    wait_ns: float
    transfer_ns: float
    durations: Ints
    ranks_unmatched: frozenset[int]


def totals_by_kind(operations: Operations, matching: Matching, waits: Waits, mask: Bools) -> list[KindTotals]:
    """Return the sums of each kind in a part of a run.

    Args:
        operations: rows of all ranks.
        matching: which of them belong together.
        waits: their waits and transfers.
        mask: the rows to use, bool, (num_operations,).
    """
    group_sizes, kind, num_rows = kind_numbers(operations, mask)
    numbers = np.flatnonzero(num_rows)
    # Rows that are masked out or without a match go to one place after the others.
    nowhere, num_instances = len(numbers), len(matching.num_rows)
    place = np.full(len(num_rows), nowhere)
    place[numbers] = np.arange(nowhere)
    matched_rows, (duration_sum, wait_sum) = np.zeros(nowhere + 1), np.zeros((2, nowhere + 1))
    size_bytes, durations = np.zeros(nowhere + 1, np.int64), np.zeros((nowhere + 1) * _NUM_BINS, np.int64)
    # Of each operation the largest transfer counts; a message has two, because its two sides are different kinds.
    largest_ns, kind_of_side = np.full(2 * num_instances, -1), np.full(2 * num_instances, nowhere)
    ranks_unmatched: list[set[int]] = [set() for _ in range(nowhere + 1)]
    for rows in blocks(len(operations)):
        own = np.where(mask[rows], place[kind[rows]], nowhere)
        matched = np.where(matching.is_matched[rows], own, nowhere)
        duration_ns = operations.exit_ns[rows] - operations.enter_ns[rows]
        np.add.at(size_bytes, own, operations.size_bytes[rows])
        duration_sum += np.bincount(own, duration_ns, nowhere + 1)
        wait_sum += np.bincount(matched, waits.wait_ns[rows], nowhere + 1)
        matched_rows += np.bincount(matched, minlength=nowhere + 1)
        np.add.at(durations, own * _NUM_BINS + np.minimum(_bins(duration_ns), _NUM_BINS - 1), 1)
        used = np.flatnonzero(matched != nowhere)
        side = (matching.instance[rows] + np.where(operations.op[rows] == Op.RECV, num_instances, 0))[used]
        kind_of_side[side] = matched[used]
        np.maximum.at(largest_ns, side, waits.transfer_ns[rows][used])
        lacking = np.flatnonzero(own != matched)
        if len(lacking):
            for code in np.unique(own[lacking] << _RANK_BITS | operations.rank[rows][lacking]).tolist():
                ranks_unmatched[code >> _RANK_BITS].add(code & _RANK_MASK)
    num_operations = np.bincount(kind_of_side, minlength=nowhere + 1)
    transfer_ns = np.bincount(kind_of_side, np.maximum(largest_ns, 0), nowhere + 1)
    histograms = durations.reshape(nowhere + 1, _NUM_BINS)
    return [
        KindTotals(
            op=number & _OP_MASK,
            group_size=int(group_sizes[number >> _OP_BITS]),
            num_rows=int(num_rows[number]),
            num_matched=int(matched_rows[index]),
            num_operations=int(num_operations[index]),
            size_bytes=int(size_bytes[index]),
            duration_ns=float(duration_sum[index]),
            wait_ns=float(wait_sum[index]),
            transfer_ns=float(transfer_ns[index]),
            durations=histograms[index],
            ranks_unmatched=frozenset(ranks_unmatched[index]),
        )
        for index, number in enumerate(numbers.tolist())
    ]


def join_kinds(parts: Iterable[KindTotals]) -> list[OperationKind]:
    """Return the kinds of operations of all parts of a run together, the one with most time first."""
    sums: dict[tuple[int, int], KindTotals] = {}
    add_kinds(sums, parts)
    longest = sorted((sums[key] for key in sorted(sums)), key=lambda total: -total.duration_ns)
    return [_kind(total) for total in longest]


def add_kinds(sums: dict[tuple[int, int], KindTotals], parts: Iterable[KindTotals]) -> None:
    """Add the totals of one more part to `sums`, by (group_size, op), in place."""
    for part in parts:
        key = (part.group_size, part.op)
        if key in sums:
            before, names = sums[key], [field.name for field in fields(part) if field.name not in ("op", "group_size")]
            added = {name: getattr(before, name) + getattr(part, name) for name in names if name != "ranks_unmatched"}
            part = replace(before, **added, ranks_unmatched=before.ranks_unmatched | part.ranks_unmatched)
        sums[key] = part


def _kind(total: KindTotals) -> OperationKind:
    median_ns, p95_ns = (_quantile_ns(total.durations, share) for share in _SHOWN_QUANTILES)
    return OperationKind(
        op=op_name(total.op),
        group_size=total.group_size,
        num_rows=total.num_rows,
        size_bytes=total.size_bytes,
        median_ns=median_ns,
        p95_ns=p95_ns,
        mean_wait_ns=total.wait_ns / total.num_matched if total.num_matched else None,
        mean_transfer_ns=total.transfer_ns / total.num_operations if total.num_operations else None,
        num_unmatched=total.num_rows - total.num_matched,
        ranks_unmatched=tuple(sorted(total.ranks_unmatched)),
    )


def _bins(duration_ns: Ints) -> Ints:
    bins = np.maximum(duration_ns, 1).astype(np.float64).view(np.int64)
    bins >>= _DROPPED_BITS
    bins -= _FIRST_BIN
    return bins


def _quantile_ns(durations: Ints, share: float) -> float:
    """Return a quantile, interpolated between the middles of the bins of the two values around it."""
    until = np.cumsum(durations)
    place = share * (int(until[-1]) - 1)
    below, above = (_middle_ns(int(np.searchsorted(until, int(at), side="right"))) for at in (place, np.ceil(place)))
    return below + (above - below) * (place - int(place))


def _middle_ns(number: int) -> float:
    edges = np.array([number + _FIRST_BIN, number + 1 + _FIRST_BIN], np.int64) << _DROPPED_BITS
    return float(edges.view(np.float64).mean())


def under_way_ns(enter_ns: Ints, exit_ns: Ints, begin_ns: Ints, end_ns: Ints) -> Floats:
    """Return how long any operation of a rank was under way in each step, nanoseconds, float64, (num_steps,).

    Args:
        enter_ns, exit_ns: of its completed operations, each int64, (num_operations,).
        begin_ns, end_ns: of the steps, on the same clock, each int64, (num_steps,).
    """
    if not len(enter_ns):
        return np.zeros(len(begin_ns))
    if (enter_ns[1:] < enter_ns[:-1]).any():
        order = np.argsort(enter_ns, kind="stable")
        enter_ns, exit_ns = enter_ns[order], exit_ns[order]
    kernels = library()
    if kernels is not None:
        total_ns = np.empty(len(begin_ns))
        checked(kernels.under_way(len(enter_ns), enter_ns, exit_ns, len(begin_ns), begin_ns, end_ns, total_ns))
        return total_ns
    return CoveredTime.of(enter_ns, exit_ns).inside_ns(begin_ns, end_ns).astype(np.float64)


def overlap_share(under_way_ns: Floats, exposed_ns: Floats) -> float | None:
    """Return hidden communication over all communication, mean over ranks; None without any.

    Args:
        under_way_ns: time in which operations were under way, (num_ranks,).
        exposed_ns: time in which operations blocked their callers, wait and transfer, (num_ranks,).
    """
    some = under_way_ns > 0
    if not some.any():
        return None
    return float(np.clip(1 - exposed_ns[some] / under_way_ns[some], 0.0, 1.0).mean())


_ROUNDS = {
    **dict.fromkeys((Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER), 1.0),
    Op.ALL_REDUCE: 2.0,
}
"""How often a rank passes on the parts of all others."""
_NUM_CODES = 256  # format: codes of operations, a byte
_WHOLE = (Op.BROADCAST, Op.REDUCE, Op.SEND, Op.RECV)
"""Operations that pass the whole content over each link once."""


def bus_factors(op: Bytes, num_ranks: Ints) -> Floats:
    """Return bus over algorithm bandwidth, float64, (num_operations,); NaN where there is none, as of a barrier.

    Args:
        op: operations, uint8, (num_operations,).
        num_ranks: members of the group of each, int64, (num_operations,).
    """
    rounds, whole = np.full(_NUM_CODES, np.nan), np.full(_NUM_CODES, np.nan)
    for one, count in _ROUNDS.items():
        rounds[one] = count
    whole[list(_WHOLE)] = 1.0
    parts = (num_ranks - 1) / np.maximum(num_ranks, 1)
    return np.where(np.isfinite(rounds[op]), rounds[op] * parts, whole[op])


def bytes_per_s(size_bytes: Ints, transfer_ns: Floats) -> Floats:
    """Return algorithm bandwidths, float64, (num_operations,); NaN where nothing was sent or the time is not known.

    Args:
        size_bytes: content of each operation, (num_operations,).
        transfer_ns: how long it took once all that it needs had entered, (num_operations,).
    """
    is_known = (size_bytes > 0) & (transfer_ns > 0)
    return np.where(is_known, size_bytes * float(NS_PER_S) / np.where(is_known, transfer_ns, 1.0), np.nan)


NO_PHASE = -1
"""Of operations that begin in none of the passes."""
LEAST_HIDDEN = 0.1
"""Statistics: share of a transfer from which it counts as hidden, as times are kept to 256 ns."""


def union_ns(begins_ns: NDArray[Any], ends_ns: NDArray[Any]) -> float:
    """Return the length of the union of intervals, (num_intervals,) each."""
    order = np.argsort(begins_ns, kind="stable")
    begins_ns, ends_ns = begins_ns[order], np.maximum.accumulate(ends_ns[order])
    free_from_ns = np.concatenate([begins_ns[:1], ends_ns[:-1]])
    return float(np.maximum(ends_ns - np.maximum(begins_ns, free_from_ns), 0).sum())


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Transfers of one kind that begin in one phase; times are means of a rank's step in nanoseconds.

    Attributes:
        phase: name of the phase, lower case; empty for what begins in none.
        op: name of the operation.
        is_across: whether the members of its groups are on several nodes.
        transfer_ns: all transfers.
        exposed_ns: of these, what blocked its rank.
        window_ns: own work of the phase from its first operation on of which something was hidden, the same for all
            operations of a phase; 0 where nothing was.
    """

    phase: str
    op: str
    is_across: bool
    transfer_ns: float
    exposed_ns: float
    window_ns: float


def overlap_of(
    operations: Operations,
    transfer_ns: Ints,
    passes: Sequence[Passes],
    held_up: Sequence[tuple[Ints, Ints]],
    *,
    ranks: Sequence[int],
    step: Ints,
    node: Ints,
) -> list[Overlap]:
    """Return how much of the transfers of each phase and kind was hidden, the longest first.

    A transfer is the end of its operation: transfer_ns before its exit. It blocks its rank in the last `blocked`
    nanoseconds before the exit, and in `held_up`; the rest is hidden. Messages of pipelines are left out.

    Args:
        operations: rows of all ranks, ordered by rank.
        transfer_ns: of each row, int64, (num_operations,).
        passes: of each of `ranks`, on the clock of the operations.
        held_up: begin and end of the waits of each rank that no operation has, as inside torch, on the same clock.
        ranks: ascending; others are left out.
        step: numbers of the steps, ascending, int64, (num_steps,).
        node: of each of `ranks`, int64, (num_ranks,).
    """
    is_used = (columns_of(step, operations.step) >= 0) & ~is_one_of(operations.op, MESSAGES)
    node_of = dict(zip(ranks, node.tolist(), strict=True))
    across = np.array([len({node_of.get(rank, -1) for rank in group.ranks}) > 1 for group in operations.groups], bool)
    across = np.append(across, False)  # of an unknown group, -1
    sums: dict[int, Floats] = defaultdict(lambda: np.zeros(2))
    windows: dict[int, float] = defaultdict(float)
    edges = np.searchsorted(operations.rank, ranks, side="left"), np.searchsorted(operations.rank, ranks, side="right")
    for index, (low, high) in enumerate(zip(*(edge.tolist() for edge in edges), strict=True)):
        rows = low + np.flatnonzero(is_used[low:high])
        if not len(rows):
            continue
        one = _RankRows.of(operations, transfer_ns, rows, passes[index], held_up[index])
        code = (one.phase + 1) << (_OP_BITS + 1) | across[operations.group[rows]] << _OP_BITS | operations.op[rows]
        for number in np.unique(code).tolist():
            own = code == number
            sums[number] += [float(transfer_ns[rows[own]].sum()), float(one.exposed_ns[own].sum())]
        for kind, window_ns in one.windows(passes[index], operations.enter_ns[rows], transfer_ns[rows]):
            windows[kind] += window_ns
    num_cells = max(len(ranks) * len(step), 1)
    found = [
        Overlap(
            phase=Phase(kind).name.lower() if (kind := (number >> (_OP_BITS + 1)) - 1) >= 0 else "",
            op=op_name(number & ((1 << _OP_BITS) - 1)),
            is_across=bool(number >> _OP_BITS & 1),
            transfer_ns=float(total) / num_cells,
            exposed_ns=float(exposed) / num_cells,
            window_ns=windows[kind] / num_cells,
        )
        for number, (total, exposed) in sums.items()
    ]
    return sorted(found, key=lambda one: -one.transfer_ns)


def _outermost(passes: Passes) -> Ints:
    """Return the passes that lie in no other one, ascending: a forward pass may be computed again in backward."""
    order = np.lexsort((-passes.end_ns, passes.begin_ns))
    until_ns = np.maximum.accumulate(np.append(np.iinfo(np.int64).min, passes.end_ns[order]))[:-1]
    return np.asarray(order[passes.end_ns[order] > until_ns], np.int64)


@dataclass(frozen=True, kw_only=True)
class _RankRows:
    """Rows of one rank: the pass that each begins in or -1, the kind of that pass, and what of it blocked the rank."""

    number: Ints
    phase: Ints
    exposed_ns: Ints
    blocked: CoveredTime

    @classmethod
    def of(
        cls, operations: Operations, transfer_ns: Ints, rows: Ints, passes: Passes, held_up: tuple[Ints, Ints]
    ) -> _RankRows:
        enter_ns, exit_ns = operations.enter_ns[rows], operations.exit_ns[rows]
        blocked_ns = np.maximum(exit_ns - operations.blocked_ns[rows], enter_ns)
        blocked = CoveredTime.of(np.append(blocked_ns, held_up[0]), np.append(exit_ns, held_up[1]))
        exposed_ns = blocked.inside_ns(exit_ns - transfer_ns[rows], exit_ns)
        order = _outermost(passes)
        place = np.searchsorted(passes.begin_ns[order], enter_ns, side="right") - 1
        number = np.append(order, -1)[place] if len(order) else np.full(len(rows), -1)
        number = np.where((place >= 0) & (enter_ns <= np.append(passes.end_ns, 0)[number]), number, -1)
        phase = np.append(passes.kind, NO_PHASE)[number]
        return cls(number=number, phase=phase, exposed_ns=exposed_ns, blocked=blocked)

    def windows(self, passes: Passes, enter_ns: Ints, transfer_ns: Ints) -> list[tuple[int, float]]:
        """Return the kind of each pass that hides something, and its own work from there on."""
        is_hidden: Bools = (self.exposed_ns < (1 - LEAST_HIDDEN) * transfer_ns) & (self.number >= 0)
        if not is_hidden.any():
            return []
        first_ns = np.full(len(passes.kind), np.iinfo(np.int64).max)
        np.minimum.at(first_ns, self.number[is_hidden], enter_ns[is_hidden])
        used = np.unique(self.number[is_hidden])
        begin_ns, end_ns = first_ns[used], passes.end_ns[used]
        window_ns = np.maximum(end_ns - begin_ns - self.blocked.inside_ns(begin_ns, end_ns), 0)
        return list(zip(passes.kind[used].tolist(), window_ns.tolist(), strict=True))
