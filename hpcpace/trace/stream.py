"""The collectives of a long trace, some rows at a time: what does not fit into memory is read while it is used."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.errors import TraceError
from hpcpace.trace.chunks import ForeignChunks, TableChunks, read_chunks, select_chunks
from hpcpace.trace.schema import NO_STEP
from hpcpace.trace.tables import RankTrace, Table, join_tables

MOST_ROWS = 4_000_000
"""Collectives of all ranks that are read into memory together; with more, they stay on disk."""

_BLOCKS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class TraceStream:
    """The trace of one rank whose collectives are not in memory.

    They come in blocks: each chunk of the file is one, and what of the table is in memory is the last one.

    Attributes:
        trace: everything else; of its table `collectives` only the last rows.
        chunks: where the rows before those lie, None where all are in `trace`.
    """

    trace: RankTrace
    chunks: TableChunks | None

    @property
    def num_collectives(self) -> int:
        """Rows of the table `collectives`."""
        return len(self.trace.tables["collectives"]) + (self.chunks.num_rows if self.chunks else 0)

    @property
    def num_blocks(self) -> int:
        """Blocks of the table `collectives`, at least one."""
        return 1 + (len(next(iter(self.chunks.columns.values())).places) if self.chunks else 0)

    @cached_property
    def last_steps(self) -> NDArray[np.int64]:
        """The step of the last row of each chunk of the file, int64, (num_blocks - 1,); -1 where that is damaged."""
        bounds = [*range(0, self.num_blocks - 1, _BLOCKS_AT_ONCE), self.num_blocks - 1]
        parts = [self._last_steps(first, stop) for first, stop in itertools.pairwise(bounds)]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def _last_steps(self, first: int, stop: int) -> NDArray[np.int64]:
        try:
            step = TraceStream.blocks(self, first, stop, ["step"])["step"]
        except TraceError:
            if stop - first == 1:
                return np.array([NO_STEP], np.int64)
            return np.concatenate([self._last_steps(number, number + 1) for number in range(first, stop)])
        assert self.chunks is not None
        ends = np.arange(1, stop - first + 1) * self.chunks.columns["step"].chunk_rows
        return np.asarray(step[np.minimum(ends, len(step)) - 1], np.int64)

    def blocks(self, first: int, stop: int, columns: Sequence[str] | None = None, lead: Table | None = None) -> Table:
        """Return the rows of the blocks `first <= number < stop`.

        Args:
            first: from 0 to below `num_blocks`.
            stop: more than that, and `num_blocks` at most.
            columns: the ones to read; all when not given.
            lead: rows to put before them, with these columns.

        Raises:
            TraceError: a chunk of the file is damaged; `read_trace` says what of the file can be read.
        """
        last = self.trace.tables["collectives"]
        names = last if columns is None else columns
        in_memory = Table({name: last[name] for name in names})
        num_chunks = self.num_blocks - 1
        if self.chunks is None or first >= num_chunks:
            return in_memory if lead is None else join_tables([lead, in_memory])
        chunks = replace(self.chunks, columns={name: self.chunks.columns[name] for name in names})
        try:
            descriptor = os.open(self.trace.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                rows = read_chunks(descriptor, select_chunks(chunks, first, min(stop, num_chunks)), lead)
            finally:
                os.close(descriptor)
        except (ForeignChunks, OSError) as error:
            which = f"chunk {first} of" if stop - first == 1 else f"a chunk from {first} to {stop - 1} of"
            raise TraceError(
                f"{self.trace.path}: {which} table collectives is damaged ({error}); read the file whole"
            ) from error
        return rows if stop <= num_chunks else join_tables([rows, in_memory])

    def collectives(self, columns: Sequence[str] | None = None) -> Iterator[Table]:
        """Yield the rows of the table `collectives` in order, block by block; else as `blocks`."""
        return (self.blocks(number, number + 1, columns) for number in range(self.num_blocks))


class StoredTable(Table):
    """The collectives of a stream as a table: a column is read whenever it is asked for, and not kept."""

    def __init__(self, stream: TraceStream) -> None:
        super().__init__({name: column[:0] for name, column in stream.trace.tables["collectives"].items()})
        self.stream = stream
        self._num_rows = stream.num_collectives

    def __getitem__(self, column: str) -> NDArray[Any]:
        if column not in self:
            raise KeyError(column)
        return np.concatenate([rows[column] for rows in self.stream.collectives([column])])

    def select(self, mask: NDArray[np.bool_] | NDArray[np.integer[Any]] | slice) -> Table:
        """Return the rows under a mask, of these numbers, or of a slice, in memory."""
        return Table({name: self[name][mask] for name in self})
