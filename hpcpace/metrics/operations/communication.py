"""Communication by kind of operation and by rank, and operations without a counterpart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.operations.matching import Operations
from hpcpace.metrics.operations.waits import Waits
from hpcpace.parallel import map_threads, run_threads
from hpcpace.trace.schema import Op

_BLOCK_ROWS = 1 << 18

_MOST_TOTAL = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Kind:
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


def kind_numbers(
    operations: Operations, mask: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]:
    """Return the sizes of groups, ascending, the kind of each row, and how many rows under the mask each kind has.

    A kind is (index of the size) << 8 | operation.

    Args:
        operations: rows of all ranks.
        mask: the rows to count, bool, (num_operations,).
    """
    group_sizes, size_index = np.unique([0, *(len(group.ranks) for group in operations.groups)], return_inverse=True)
    # One small number for operation and size; the last of `group` is the unknown one, -1.
    of_group = np.append(size_index[1:], size_index[0])
    kind: NDArray[Any] = np.empty(len(operations), np.uint16 if len(group_sizes) <= 1 << 8 else np.uint32)

    def number_of(rows: slice) -> NDArray[np.int64]:
        kind[rows] = of_group[operations.group[rows]] << 8 | operations.op[rows]
        return np.bincount(kind[rows][mask[rows]], minlength=len(group_sizes) << 8)

    num_rows = np.zeros(len(group_sizes) << 8, np.int64)
    for of_block in map_threads(number_of, blocks(len(operations))):
        num_rows += of_block
    return group_sizes, kind, num_rows


def op_name(op: int) -> str:
    """Return the name of an operation, or its number if it comes from a newer hpcpace and is unknown to this one."""
    return Op(op).name.lower() if op in Op._value2member_map_ else f"op {op}"


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
    """Return the sums of each of `ranks` over the rows where `mask` is true; rows are ordered by rank."""
    slot = {rank: index for index, rank in enumerate(ranks)}
    totals = np.zeros((len(ranks), 4))

    def of_rank(rows: slice) -> None:
        used, own = mask[rows], slot.get(int(operations.rank[rows.start]))
        if own is None:
            return
        columns = (operations.size_bytes, waits.wait_ns, waits.transfer_ns)
        sums = ((values[rows] if used.all() else values[rows][used]).sum(dtype=np.float64) for values in columns)
        totals[own] += [np.count_nonzero(used), *sums]

    run_threads(of_rank, operations.slices or [])
    # Sums of damaged times may not fit into int64; they are clipped.
    whole = np.clip(totals, -_MOST_TOTAL, _MOST_TOTAL).astype(np.int64)
    return RankTotals(num_operations=whole[:, 0], size_bytes=whole[:, 1], wait_ns=whole[:, 2], transfer_ns=whole[:, 3])


def blocks(num_rows: int) -> list[slice]:
    """Return slices of rows that fit into a core's cache."""
    return [slice(first, min(first + _BLOCK_ROWS, num_rows)) for first in range(0, num_rows, _BLOCK_ROWS)]
