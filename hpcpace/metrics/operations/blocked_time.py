"""When ranks were blocked: in operations, and in stretches that no operation accounts for, such as waits inside torch.

Local time is a rank's own time without these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.operations.matching import Operations
from hpcpace.metrics.steps import StepPanel

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
_NEVER_NS = np.iinfo(np.int64).min


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Stretches in which ranks were blocked that no operation accounts for: phases grad_sync and pace.

    Attributes:
        rank: rank that was blocked, int64, (num_blocks,).
        begin_ns, end_ns: on the clock of the operations, int64, (num_blocks,).
        is_pause: whether the rank paused itself (pace), which ends no wait, bool, (num_blocks,); None if none is.
    """

    rank: Int64Array
    begin_ns: Int64Array
    end_ns: Int64Array
    is_pause: BoolArray | None = None

    def select(self, *, pauses: bool) -> Blocks:
        """Return the pauses, or all other blocks."""
        is_pause = np.zeros(len(self.rank), np.bool_) if self.is_pause is None else self.is_pause
        chosen = is_pause if pauses else ~is_pause
        return Blocks(rank=self.rank[chosen], begin_ns=self.begin_ns[chosen], end_ns=self.end_ns[chosen])


NO_BLOCKS = Blocks(rank=np.zeros(0, np.int64), begin_ns=np.zeros(0, np.int64), end_ns=np.zeros(0, np.int64))


def rows_of_ranks(slot: Int64Array, num_ranks: int) -> list[slice]:
    """Return the rows of each rank, (num_ranks,) slices; `slot`, the index of each row's rank, ascends."""
    edges = np.searchsorted(slot, np.arange(num_ranks + 1))
    return [slice(low, high) for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]


def blocks_of(blocks: Blocks, ranks: Sequence[int]) -> list[tuple[Int64Array, Int64Array]]:
    """Return begin and end of the blocks of each rank, (num_ranks,) pairs, each (num_blocks_of_rank,)."""
    order = np.argsort(blocks.rank, kind="stable")
    low = np.searchsorted(blocks.rank[order], ranks, side="left")
    high = np.searchsorted(blocks.rank[order], ranks, side="right")
    rows = [order[first:stop] for first, stop in zip(low.tolist(), high.tolist(), strict=True)]
    return [(blocks.begin_ns[of_rank], blocks.end_ns[of_rank]) for of_rank in rows]


def blocked_before(
    operations: Operations,
    steps: StepPanel,
    is_blocking: BoolArray,
    blocks: Blocks,
    ranks: Sequence[int],
    slot: Int64Array,
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return how long ranks were blocked before each row's enter, and before begin and end of each step.

    Overlapping stretches count once. An operation blocks during the last `blocked` nanoseconds before its exit.

    Args:
        operations: rows of all ranks.
        steps: the steps, on the clock of the operations.
        is_blocking: the rows that block, bool, (num_operations,).
        blocks: further stretches in which ranks were blocked.
        ranks: what the rows of `steps` are, ascending, (num_ranks,).
        slot: index of each row's rank in `ranks`, int64, (num_operations,).

    Returns:
        int64, (num_operations,), and twice (num_ranks, num_steps).
    """
    at_enter = np.zeros(len(slot), np.int64)
    at_begin, at_end = np.zeros(steps.begin_ns.shape, np.int64), np.zeros(steps.end_ns.shape, np.int64)
    own = blocks_of(blocks, ranks)
    for index, rows in enumerate(rows_of_ranks(slot, len(ranks))):
        waits = is_blocking[rows]
        end = operations.exit_ns[rows][waits]
        begin = np.maximum(end - operations.blocked_ns[rows][waits], operations.enter_ns[rows][waits])
        begin, end = np.concatenate([begin, own[index][0]]), np.concatenate([end, own[index][1]])
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], end[order]
        covered = np.maximum.accumulate(np.append(_NEVER_NS, end))[:-1]
        length = np.maximum(end - np.maximum(begin, covered), 0) if len(end) else end
        total = np.append(0, np.cumsum(length))
        reach = np.maximum.accumulate(np.append(_NEVER_NS, end))
        for times, into in (
            (operations.enter_ns[rows], at_enter[rows]),
            (steps.begin_ns[index], at_begin[index]),
            (steps.end_ns[index], at_end[index]),
        ):
            count = np.searchsorted(begin, times, side="right")
            into[:] = total[count] - np.maximum(np.where(count > 0, reach[count], times) - times, 0)
    return at_enter, at_begin, at_end
