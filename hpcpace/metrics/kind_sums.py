"""Communication by kind of a run that comes in parts: sums that add up, and durations as a histogram.

Its bins are a thousandth of their value wide at most, and median and 95th percentile as close to the exact ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.collectives import Matching, Operations
from hpcpace.metrics.communication import Kind, kind_numbers, op_name
from hpcpace.metrics.waits import Waits
from hpcpace.trace.threads import map_threads

# A positive float64 by its bits: 10 of the 52 of the fraction are kept, so each power of two has 1,024 bins.
_DROPPED_BITS, _FIRST_BIN = 42, 1023 << 10
_NUM_BINS = 62 << 10


@dataclass(frozen=True, kw_only=True)
class KindSums:
    """Sums over operations of one kind.

    Attributes:
        op, group_size: the kind.
        num_rows, num_matched, num_operations: rows, those with a match, and how many operations those are.
        size_bytes, duration_ns, wait_ns, transfer_ns: sums; of each operation its largest transfer.
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
    durations: NDArray[np.int64]
    ranks_unmatched: frozenset[int]


def kind_sums(operations: Operations, matching: Matching, waits: Waits, mask: NDArray[np.bool_]) -> list[KindSums]:
    """Return the sums of each kind in a part of a run.

    Args:
        operations: rows of all ranks.
        matching: which of them belong together.
        waits: their waits and transfers.
        mask: the rows to use, bool, (num_operations,).
    """
    group_sizes, kind, num_rows = kind_numbers(operations, mask)
    is_used, is_whole = mask.all(), matching.is_matched.all()

    def of_kind(number: int) -> KindSums:
        rows = np.flatnonzero(kind == number if is_used else (kind == number) & mask)
        duration_ns = operations.exit_ns[rows] - operations.enter_ns[rows]
        matched, unmatched = rows, rows[:0]
        if not is_whole:
            matched, unmatched = rows[matching.is_matched[rows]], rows[~matching.is_matched[rows]]
        largest_ns = np.full(len(matching.num_rows), -1)
        np.maximum.at(largest_ns, matching.instance[matched], waits.transfer_ns[matched])
        largest_ns = largest_ns[largest_ns >= 0]
        return KindSums(
            op=number & 0xFF,
            group_size=int(group_sizes[number >> 8]),
            num_rows=len(rows),
            num_matched=len(matched),
            num_operations=len(largest_ns),
            size_bytes=int(operations.size_bytes[rows].sum()),
            duration_ns=float(duration_ns.sum(dtype=np.float64)),
            wait_ns=float(waits.wait_ns[matched].sum(dtype=np.float64)),
            transfer_ns=float(largest_ns.sum(dtype=np.float64)),
            durations=_histogram(duration_ns),
            ranks_unmatched=frozenset(np.unique(operations.rank[unmatched]).tolist()),
        )

    return list(map_threads(of_kind, np.flatnonzero(num_rows).tolist()))


def join_kinds(parts: Iterable[KindSums]) -> list[Kind]:
    """Return the kinds of operations that parts of a run have together, most time first."""
    of_kind: dict[tuple[int, int], list[KindSums]] = {}
    for part in parts:
        of_kind.setdefault((part.group_size, part.op), []).append(part)
    joined = [_joined(of_kind[key]) for key in sorted(of_kind)]
    return [kind for _, kind in sorted(joined, key=lambda pair: -pair[0])]


def add_kinds(sums: dict[tuple[int, int], KindSums], parts: Sequence[KindSums]) -> None:
    """Add those of one more part to the sums so far, by (group_size, op), in place."""
    for part in parts:
        key = (part.group_size, part.op)
        sums[key] = _added([sums[key], part]) if key in sums else part


def _added(parts: Sequence[KindSums]) -> KindSums:
    return KindSums(
        op=parts[0].op,
        group_size=parts[0].group_size,
        num_rows=sum(part.num_rows for part in parts),
        num_matched=sum(part.num_matched for part in parts),
        num_operations=sum(part.num_operations for part in parts),
        size_bytes=sum(part.size_bytes for part in parts),
        duration_ns=sum(part.duration_ns for part in parts),
        wait_ns=sum(part.wait_ns for part in parts),
        transfer_ns=sum(part.transfer_ns for part in parts),
        durations=np.add.reduce([part.durations for part in parts]),
        ranks_unmatched=frozenset().union(*(part.ranks_unmatched for part in parts)),
    )


def _joined(parts: Sequence[KindSums]) -> tuple[float, Kind]:
    found = _added(parts)
    median_ns, p95_ns = (_quantile_ns(found.durations, share) for share in (0.5, 0.95))
    kind = Kind(
        op=op_name(found.op),
        group_size=found.group_size,
        num_rows=found.num_rows,
        size_bytes=found.size_bytes,
        median_ns=median_ns,
        p95_ns=p95_ns,
        mean_wait_ns=found.wait_ns / max(found.num_matched, 1),
        mean_transfer_ns=found.transfer_ns / max(found.num_operations, 1),
        num_unmatched=found.num_rows - found.num_matched,
        ranks_unmatched=tuple(sorted(found.ranks_unmatched)),
    )
    return found.duration_ns, kind


def _histogram(duration_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    bins = np.maximum(duration_ns, 1).astype(np.float64).view(np.int64)
    bins >>= _DROPPED_BITS
    bins -= _FIRST_BIN
    return np.bincount(bins, minlength=_NUM_BINS)[:_NUM_BINS]


def _quantile_ns(durations: NDArray[np.int64], share: float) -> float:
    """Return a quantile, between the middles of the bins of the two values next to it."""
    until = np.cumsum(durations)
    place = share * (int(until[-1]) - 1)
    below, above = (_middle_ns(int(np.searchsorted(until, int(at), side="right"))) for at in (place, np.ceil(place)))
    return below + (above - below) * (place - int(place))


def _middle_ns(number: int) -> float:
    edges = np.array([number + _FIRST_BIN, number + 1 + _FIRST_BIN], np.int64) << _DROPPED_BITS
    return float(edges.view(np.float64).mean())
