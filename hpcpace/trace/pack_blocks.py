"""Lay out the collectives of ranks in the blocks of a pack, in memory for a block of each rank's file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.pool import map_threads
from hpcpace.trace.pack_schema import BLOCK_ROWS
from hpcpace.trace.schema import NO_STEP
from hpcpace.trace.stream import TraceStream
from hpcpace.trace.tables import Table, join_tables

_LEAST_ROWS = 256
"""Rows of a rank in a block that may always be there: fewer cost more to hand out than to decode."""
_MOST_TIMES = 4
"""A block of a rank has at most as many times the rows as if the steps of all ranks had equally many."""


@dataclass(frozen=True)
class Block:
    """Rows of about the same steps.

    Attributes:
        rows: for rank after rank.
        num_rows: how many of each rank.
        last_steps: the step of each rank's last row up to here.
    """

    rows: Table
    num_rows: NDArray[np.int32]
    last_steps: NDArray[np.int32]


def blocks_of(streams: Sequence[TraceStream], first_step: int, last_step: int) -> Iterator[Block]:
    """Yield the collectives of some ranks, block by block.

    Each rank's rows stay in their order: those of a block end where a row of a later step comes first.

    Args:
        streams: the ranks.
        first_step: the least step of all rows.
        last_step: the largest one.

    Raises:
        TraceError: a file is damaged.
    """
    num_rows = sum(stream.num_collectives for stream in streams)
    rows_of_block = max(BLOCK_ROWS, _LEAST_ROWS * len(streams))
    num_blocks = max(-(-num_rows // rows_of_block), 1)
    most_rows = _MOST_TIMES * max(rows_of_block // len(streams), 1)
    # Up to the last step, what is left of all ranks.
    bounds = np.unique(np.linspace(first_step, last_step + 1, num_blocks + 1)[1:-1].astype(np.int64))
    takers = [_Taker(stream) for stream in streams]
    for bound in (*bounds.tolist(), None):
        while True:
            taken = list(map_threads(partial(_Taker.take, bound=bound, most_rows=most_rows), takers))
            counts = np.array([len(rows) for rows in taken], np.int32)
            if not counts.any():
                break
            yield Block(join_tables(taken), counts, np.array([taker.last_step for taker in takers], np.int32))
            if (counts < most_rows).all():
                break


class _Taker:
    """Hands out the rows of a rank one after the other."""

    def __init__(self, stream: TraceStream) -> None:
        self._blocks = stream.collectives()
        self._waiting = stream.trace.tables["collectives"].select(slice(0))
        self._largest = NO_STEP
        self.last_step = NO_STEP

    def take(self, bound: int | None, most_rows: int) -> Table:
        """Return the next rows before the first one of a step that is not below some bound, at most `most_rows`."""
        while True:
            steps = np.maximum(np.maximum.accumulate(self._waiting["step"]), self._largest)
            num_before = len(steps) if bound is None else int(np.searchsorted(steps, bound))
            if num_before < len(steps) or num_before >= most_rows:
                break
            more = next(self._blocks, None)
            if more is None:
                break
            self._waiting = join_tables([self._waiting, more])
        num_taken = min(num_before, most_rows)
        if not num_taken:
            return self._waiting.select(slice(0))
        taken = self._waiting.select(slice(num_taken))
        # A copy, or all that was read would stay as long as one row of it waits.
        self._waiting = self._waiting.select(np.arange(num_taken, len(self._waiting)))
        self._largest, self.last_step = int(steps[num_taken - 1]), int(taken["step"][-1])
        return taken
