"""Communication in figures: by kind of operation, by rank, and what had no counterpart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.collectives import Matching, Operations
from hpcpace.metrics.waits import Waits
from hpcpace.trace.schema import Op


@dataclass(frozen=True, kw_only=True)
class Kind:
    """All operations of one kind over groups of one size.

    Attributes:
        op: name of the operation.
        group_size: members of the group, 0 where unknown.
        num_rows: rows of all ranks.
        size_bytes: bytes of all rows.
        median_ns, p95_ns: duration of a row.
        mean_wait_ns: wait of a matched row.
        mean_transfer_ns: transfer of a matched operation, the largest of its ranks.
        num_unmatched: rows whose counterparts are not all there.
        ranks_unmatched: the ranks that recorded those rows.
    """

    op: str
    group_size: int
    num_rows: int
    size_bytes: int
    median_ns: float
    p95_ns: float
    mean_wait_ns: float
    mean_transfer_ns: float
    num_unmatched: int
    ranks_unmatched: tuple[int, ...]


def kinds(operations: Operations, matching: Matching, waits: Waits, mask: NDArray[np.bool_]) -> list[Kind]:
    """Return the kinds of operations, most time first.

    Args:
        operations: rows of all ranks.
        matching: which of them belong together.
        waits: their waits and transfers.
        mask: the rows to use, bool, (num_operations,).
    """
    kind = operations.op.astype(np.int64) << 32 | operations.group_size
    duration = operations.exit_ns - operations.enter_ns
    rows = np.flatnonzero(mask)
    rows = rows[np.argsort(kind[rows], kind="stable")]
    found = []
    for of_kind in np.split(rows, np.flatnonzero(np.diff(kind[rows])) + 1) if len(rows) else []:
        matched = of_kind[matching.is_matched[of_kind]]
        median_ns, p95_ns = np.percentile(duration[of_kind], (50, 95))
        result = Kind(
            op=op_name(int(operations.op[of_kind[0]])),
            group_size=int(kind[of_kind[0]] & 0xFFFFFFFF),
            num_rows=len(of_kind),
            size_bytes=int(operations.size_bytes[of_kind].sum()),
            median_ns=float(median_ns),
            p95_ns=float(p95_ns),
            mean_wait_ns=float(waits.wait_ns[matched].mean()) if len(matched) else 0.0,
            mean_transfer_ns=_mean_transfer_ns(matching.instance[matched], waits.transfer_ns[matched]),
            num_unmatched=len(of_kind) - len(matched),
            ranks_unmatched=tuple(np.unique(operations.rank[of_kind[~matching.is_matched[of_kind]]]).tolist()),
        )
        found.append((float(duration[of_kind].sum()), result))
    return [result for _, result in sorted(found, key=lambda pair: -pair[0])]


def op_name(op: int) -> str:
    """Return the name of an operation, and its number where a newer hpcpace wrote one that this one does not know."""
    return Op(op).name.lower() if op in Op._value2member_map_ else f"op {op}"


def _mean_transfer_ns(instance: NDArray[np.int64], transfer_ns: NDArray[np.int64]) -> float:
    if not len(instance):
        return 0.0
    order = np.argsort(instance, kind="stable")
    starts = np.flatnonzero(np.diff(instance[order], prepend=-1))
    return float(np.maximum.reduceat(transfer_ns[order], starts).mean())


@dataclass(frozen=True, kw_only=True)
class RankTotals:
    """Sums over the operations of each rank, each (num_ranks,).

    Attributes:
        num_operations: completed operations.
        size_bytes: their bytes.
        wait_ns: wait, exposed or hidden.
        transfer_ns: transfer, exposed or hidden.
    """

    num_operations: NDArray[np.int64]
    size_bytes: NDArray[np.int64]
    wait_ns: NDArray[np.int64]
    transfer_ns: NDArray[np.int64]


def rank_totals(operations: Operations, waits: Waits, mask: NDArray[np.bool_], ranks: Sequence[int]) -> RankTotals:
    """Return the sums of each of `ranks`, ascending, over the rows where `mask` is true."""
    slot = np.searchsorted(np.asarray(ranks, np.int64), operations.rank[mask])

    def total(values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(slot, weights=values[mask], minlength=len(ranks)).astype(np.int64)

    return RankTotals(
        num_operations=np.bincount(slot, minlength=len(ranks)),
        size_bytes=total(operations.size_bytes),
        wait_ns=total(waits.wait_ns),
        transfer_ns=total(waits.transfer_ns),
    )
