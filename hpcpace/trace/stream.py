"""Read the collectives of a long trace some rows at a time, while they are used, if they do not fit into memory."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder
from hpcpace.core.text import format_bytes
from hpcpace.trace.chunks import DamagedColumn, TableChunks, read_chunks, select_chunks
from hpcpace.trace.packed_rows import PackedRows
from hpcpace.trace.schema import NO_STEP
from hpcpace.trace.tables import RankTrace, Table, join_tables

MOST_ROWS = 4_000_000
"""The most collectives of all ranks that are read into memory; with more, they stay on disk."""

_BLOCKS_AT_ONCE, _BYTES_AT_ONCE = 64, 1 << 24


class TooLarge(TraceError):
    """The content of a file takes more memory than allowed.

    Attributes:
        size_bytes: the memory it takes.
    """

    def __init__(self, message: str, size_bytes: float) -> None:
        super().__init__(message, size_bytes)
        self.size_bytes = size_bytes

    def __str__(self) -> str:
        return str(self.args[0])


def check_size(what: str, size_bytes: float, most_bytes: float) -> None:
    """Check that something fits into the memory that is left for it.

    Raises:
        TooLarge: it does not.
    """
    if size_bytes > most_bytes:
        message = (
            f"{what} take {format_bytes(size_bytes)} in memory, more than the {format_bytes(max(most_bytes, 0))} left "
            "for it: --memory allows more"
        )
        raise TooLarge(message, size_bytes)


@dataclass(frozen=True, kw_only=True)
class TraceStream:
    """The trace of one rank whose collectives are not in memory.

    They come in blocks: each chunk of the file, or each block of the pack, is one, and the rows of the table that are
    in memory are the last one.

    Attributes:
        trace: everything else; its table `collectives` has only the last rows.
        chunks: where the rows before those are, in a file or in a pack; None if all are in `trace`.
        identity: identity of the file that they are in, from `identity_of`; a pack knows its own.
        most_bytes: memory for the blocks that are read at once.
    """

    trace: RankTrace
    chunks: TableChunks | PackedRows | None
    identity: tuple[int, int] | None = None
    most_bytes: float = math.inf

    @property
    def num_collectives(self) -> int:
        """Rows of the table `collectives`."""
        return len(self.trace.tables["collectives"]) + (self.chunks.num_rows if self.chunks else 0)

    @property
    def num_blocks(self) -> int:
        """Blocks of the table `collectives`, at least one."""
        if isinstance(self.chunks, PackedRows):
            return 1 + self.chunks.num_blocks
        return 1 + (len(next(iter(self.chunks.columns.values())).places) if self.chunks else 0)

    @cached_property
    def last_steps(self) -> NDArray[np.int64]:
        """The step of the last row of each block before the last, int64, (num_blocks - 1,); -1 if that is damaged."""
        if self.chunks is None:
            return np.zeros(0, np.int64)
        if isinstance(self.chunks, PackedRows):
            return self.chunks.last_steps
        step = self.chunks.columns["step"]
        at_once = min(_BYTES_AT_ONCE // (step.chunk_rows * step.dtype.itemsize) + 1, _BLOCKS_AT_ONCE)
        bounds = [*range(0, self.num_blocks - 1, at_once), self.num_blocks - 1]
        parts = [self._last_steps(first, stop) for first, stop in itertools.pairwise(bounds)]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def _last_steps(self, first: int, stop: int) -> NDArray[np.int64]:
        try:
            step = TraceStream.blocks(self, first, stop, ["step"])["step"]
        except TraceError:
            if stop - first == 1:
                return np.array([NO_STEP], np.int64)
            return np.concatenate([self._last_steps(number, number + 1) for number in range(first, stop)])
        assert isinstance(self.chunks, TableChunks)
        ends = np.arange(1, stop - first + 1) * self.chunks.columns["step"].chunk_rows
        return np.asarray(step[np.minimum(ends, len(step)) - 1], np.int64)

    def blocks(self, first: int, stop: int, columns: Sequence[str] | None = None, lead: Table | None = None) -> Table:
        """Return the rows of the blocks `first <= number < stop`.

        Args:
            first: from 0 to below `num_blocks`.
            stop: above `first`, at most `num_blocks`.
            columns: the columns to read; all if not given.
            lead: rows to put first, with these columns.

        Raises:
            TooLarge: they take more memory than allowed.
            TraceError: a chunk of the file is damaged; `read_trace` reads the rest of the file.
        """
        last = self.trace.tables["collectives"]
        names = list(last if columns is None else columns)
        num_chunks = self.num_blocks - 1
        if self.chunks is None or first >= num_chunks:
            in_memory = Table({name: last[name] for name in names})
            return in_memory if lead is None else join_tables([lead, in_memory])
        try:
            rows = self._read(first, min(stop, num_chunks), names, lead)
        except (DamagedColumn, OSError) as error:
            kind = "block" if isinstance(self.chunks, PackedRows) else "chunk"
            which = f"{kind} {first} of" if stop - first == 1 else f"a {kind} from {first} to {stop - 1} of"
            raise TraceError(
                f"{self.trace.path}: {which} table collectives is damaged ({error}); read the file whole"
            ) from error
        return rows if stop <= num_chunks else join_tables([rows, Table({name: last[name] for name in names})])

    def _read(self, first: int, stop: int, names: Sequence[str], lead: Table | None) -> Table:
        """Return the rows of some chunks, or of some blocks of a pack."""
        what = f"{self.trace.path}: collectives that belong together"
        if isinstance(self.chunks, PackedRows):
            check_size(what, self.chunks.size_bytes(first, stop, names), self.most_bytes)
            return self.chunks.blocks(first, stop, names, lead)
        assert self.chunks is not None
        chunks = replace(self.chunks, columns={name: self.chunks.columns[name] for name in names})
        chunks = select_chunks(chunks, first, stop)
        check_size(what, chunks.size_bytes, self.most_bytes)
        try:
            descriptor = self._open()
        except FileNotFoundError:
            packed = self._packed_meanwhile()
            if packed is None:
                raise
            first_row = first * max(column.chunk_rows for column in chunks.columns.values())
            return packed.rows(first_row, first_row + chunks.num_rows, names, lead)
        try:
            return read_chunks(descriptor, chunks, lead)
        finally:
            os.close(descriptor)

    def _packed_meanwhile(self) -> PackedRows | None:
        """Return the rows in the pack that has since taken the place of the file, None if there is none."""
        # A pack is read with the streams of its ranks, so this module cannot need that one before.
        from hpcpace.trace.pack_reader import packed_rows

        return packed_rows(self.trace.path.parent, self.trace.header)

    def _open(self) -> int:
        """Open the file again, because thousands cannot all stay open, and make sure that it is the same file."""
        with Folder.open(self.trace.path.parent) as folder:
            descriptor = folder.open_file(self.trace.path.name)
        if identity_of(descriptor) != self.identity:
            os.close(descriptor)
            raise OSError("it was replaced by another file")
        return descriptor

    def blocks_of_rows(self, first: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the block of each row.

        Args:
            first: a block.
            rows: numbers of rows, counted from the first one of that block.
        """
        if self.chunks is None:
            return np.full(len(rows), first)
        if isinstance(self.chunks, PackedRows):
            return self.chunks.blocks_of_rows(first, rows)
        length = next(iter(self.chunks.columns.values())).chunk_rows
        return np.minimum(first + rows // length, self.num_blocks - 1)

    def collectives(self, columns: Sequence[str] | None = None) -> Iterator[Table]:
        """Yield the rows of the table `collectives` in order, block by block; otherwise like `blocks`."""
        return (self.blocks(number, number + 1, columns) for number in range(self.num_blocks))


def read_blocks(stream: TraceStream) -> tuple[Table, list[str]]:
    """Return all collectives of a stream but those of damaged blocks, and a sentence for each of these.

    Raises:
        TooLarge: they take more memory than allowed.
    """
    try:
        return stream.blocks(0, stream.num_blocks), []
    except TooLarge:
        raise
    except TraceError:
        pass
    problems: list[str] = []
    rows = [stream.trace.tables["collectives"].select(slice(0))]
    for number in range(stream.num_blocks):
        try:
            rows.append(stream.blocks(number, number + 1))
        except TraceError as error:
            problems.append(f"{error}; its rows are left out")
    return join_tables(rows), problems


def identity_of(descriptor: int) -> tuple[int, int]:
    """Return the identity of an open file: its device and inode number."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


class StoredTable(Table):
    """The collectives of a stream as a table that reads a column whenever it is accessed, and does not keep it."""

    def __init__(self, stream: TraceStream) -> None:
        super().__init__({name: column[:0] for name, column in stream.trace.tables["collectives"].items()})
        self.stream = stream
        self._num_rows = stream.num_collectives

    def __getitem__(self, column: str) -> NDArray[Any]:
        if column not in self:
            raise KeyError(column)
        size_bytes = self._num_rows * self.stream.trace.tables["collectives"][column].itemsize
        check_size(f"{self.stream.trace.path}: collectives", size_bytes, self.stream.most_bytes)
        return np.concatenate([rows[column] for rows in self.stream.collectives([column])])

    def select(self, mask: NDArray[np.bool_] | NDArray[np.integer[Any]] | slice) -> Table:
        """Return the rows of a mask, row numbers or a slice, in memory."""
        return Table({name: self[name][mask] for name in self})
