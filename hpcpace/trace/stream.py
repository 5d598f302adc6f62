"""Read the collectives of a long trace while they are used, some rows at a time.

They are in the chunks of the rank's own file, or in a pack with those of other ranks. The ranks of a pack share its
chunks, so each is decoded once, kept while memory for it lasts, and handed to all.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder, closing_descriptor
from hpcpace.core.pool import run_threads
from hpcpace.core.records import dataclass
from hpcpace.core.text import format_bytes
from hpcpace.trace.chunks import DamagedColumn, TableChunks, fill_chunk, read_chunks, select_chunks
from hpcpace.trace.schema import NO_STEP, TraceHeader
from hpcpace.trace.tables import RankTrace, Table, join_tables

MAX_ROWS = 4_000_000
"""The collectives of all ranks that are read into memory; with more, they stay on disk."""
CACHE_BYTES = 1 << 27
"""Memory for the chunks that all packs of a run keep decoded: those of a range of steps are used rank after rank."""
# The step columns that are read at once to find the last step of each chunk.
_BLOCKS_AT_ONCE, _BYTES_AT_ONCE = 64, 1 << 24

Values = NDArray[np.generic]


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
        chunks: the rows before those, in the rank's file or in a pack; None if all are in `trace`.
        most_bytes: memory for the blocks that are read at once.
    """

    trace: RankTrace
    chunks: FileRows | PackedRows | None
    most_bytes: float = math.inf

    @property
    def num_collectives(self) -> int:
        """Rows of the table `collectives`."""
        return len(self.trace.tables["collectives"]) + (self.chunks.num_rows if self.chunks else 0)

    @property
    def num_blocks(self) -> int:
        """Blocks of the table `collectives`, at least one."""
        return 1 + (self.chunks.num_blocks if self.chunks else 0)

    @property
    def last_steps(self) -> NDArray[np.int64]:
        """The step of the last row of each block before the last, int64, (num_blocks - 1,); -1 if that is damaged."""
        return self.chunks.last_steps if self.chunks else np.zeros(0, np.int64)

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
        stop_stored = min(stop, self.num_blocks - 1)
        if self.chunks is None or first >= stop_stored:
            in_memory = Table({name: last[name] for name in names})
            return in_memory if lead is None else join_tables([lead, in_memory])
        what = f"{self.trace.path}: collectives that belong together"
        check_size(what, self.chunks.size_bytes(first, stop_stored, names), self.most_bytes)
        try:
            rows = self.chunks.blocks(first, stop_stored, names, lead)
        except (DamagedColumn, OSError) as error:
            unit = self.chunks.unit
            which = f"{unit} {first} of" if stop - first == 1 else f"a {unit} from {first} to {stop - 1} of"
            raise TraceError(
                f"{self.trace.path}: {which} table collectives is damaged ({error}); read the file whole"
            ) from error
        return rows if stop == stop_stored else join_tables([rows, Table({name: last[name] for name in names})])

    def blocks_of_rows(self, first: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the block of each row.

        Args:
            first: a block.
            rows: numbers of rows, counted from the first one of that block.
        """
        return np.full(len(rows), first) if self.chunks is None else self.chunks.blocks_of_rows(first, rows)

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


@dataclass(frozen=True, kw_only=True, eq=False)
class FileRows:
    """The collectives of one rank in its own file, which is opened for each read: thousands cannot all stay open.

    Attributes:
        path, identity: the file, and its identity from `identity_of`, by which it is recognised.
        header: the header of the rank.
        chunks: where the rows are.
        find_packed: returns the rows of the rank with a header from the packs in a folder, None if they are in none;
            for a file that has been packed, and removed, since.
    """

    unit: ClassVar[str] = "chunk"

    path: Path
    identity: tuple[int, int]
    header: TraceHeader
    chunks: TableChunks
    find_packed: Callable[[Path, TraceHeader], PackedRows | None]

    @property
    def num_rows(self) -> int:
        """Rows of the rank."""
        return self.chunks.num_rows

    @cached_property
    def chunk_rows(self) -> int:
        """Rows of a chunk, which are those of a block."""
        return max(column.chunk_rows for column in self.chunks.columns.values())

    @property
    def num_blocks(self) -> int:
        """Chunks of each column."""
        return len(next(iter(self.chunks.columns.values())).places)

    @cached_property
    def last_steps(self) -> NDArray[np.int64]:
        """The step of the last row of each chunk, int64, (num_blocks,); -1 if that is damaged."""
        row_bytes = self.chunks.columns["step"].dtype.itemsize
        at_once = min(_BYTES_AT_ONCE // (max(self.chunk_rows, 1) * row_bytes) + 1, _BLOCKS_AT_ONCE)
        bounds = [*range(0, self.num_blocks, at_once), self.num_blocks]
        parts = [self._last_steps(first, stop) for first, stop in itertools.pairwise(bounds)]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def _last_steps(self, first: int, stop: int) -> NDArray[np.int64]:
        try:
            step = self.blocks(first, stop, ["step"])["step"]
        except (DamagedColumn, OSError):
            if stop - first == 1:
                return np.array([NO_STEP], np.int64)
            return np.concatenate([self._last_steps(number, number + 1) for number in range(first, stop)])
        ends = np.arange(1, stop - first + 1) * self.chunk_rows
        return np.asarray(step[np.minimum(ends, len(step)) - 1], np.int64)

    def size_bytes(self, first: int, stop: int, names: Sequence[str]) -> int:
        """Return the memory that the rows of the blocks `first <= number < stop` take."""
        num_rows = min(self.num_rows, stop * self.chunk_rows) - first * self.chunk_rows
        return max(num_rows, 0) * sum(self.chunks.columns[name].dtype.itemsize for name in names)

    def blocks_of_rows(self, first: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the block of each of some rows, counted from the first row of the block `first`."""
        return np.minimum(first + rows // self.chunk_rows, self.num_blocks)

    def blocks(self, first: int, stop: int, names: Sequence[str], lead: Table | None = None) -> Table:
        """Return the rows of the blocks `first <= number < stop`, behind some other rows.

        Raises:
            DamagedColumn: a chunk cannot be read.
            OSError: the file is gone, and no pack has its rows, or another file is in its place.
        """
        chunks = select_chunks(self.chunks, first, stop, names)
        try:
            descriptor = open_again(self.path, self.identity)
        except FileNotFoundError:
            packed = self.find_packed(self.path.parent, self.header)
            if packed is None:
                raise
            first_row = first * self.chunk_rows
            return packed.rows(first_row, first_row + chunks.num_rows, names, lead)
        with closing_descriptor(descriptor):
            return read_chunks(descriptor, chunks, lead)


def open_again(path: Path, identity: tuple[int, int]) -> int:
    """Open a file that was read before, and return its descriptor.

    Raises:
        OSError: it cannot be opened, or another file is in its place.
    """
    with Folder.open(path.parent) as folder:
        descriptor = folder.open_file(path.name)
    if identity_of(descriptor) != identity:
        os.close(descriptor)
        raise OSError("it was replaced by another file")
    return descriptor


def identity_of(descriptor: int) -> tuple[int, int]:
    """Return the identity of an open file: its device and inode number."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """The collectives of one rank of a pack, in the order of its own file.

    Attributes:
        pack: those of all ranks.
        index: the place of the rank in the pack.
    """

    unit: ClassVar[str] = "block"

    pack: PackedCollectives
    index: int

    @property
    def num_rows(self) -> int:
        """Rows of the rank."""
        return int(self._before[-1])

    @cached_property
    def _before(self) -> NDArray[np.int64]:
        return np.ascontiguousarray(self.pack.rows_before[:, self.index])

    @property
    def num_blocks(self) -> int:
        """Blocks of the pack."""
        return self.pack.num_blocks

    @property
    def last_steps(self) -> NDArray[np.int64]:
        """The step of the last row up to each block, int64, (num_blocks,)."""
        return self.pack.last_steps[:, self.index]

    def size_bytes(self, first: int, stop: int, names: Sequence[str]) -> int:
        """Return the memory that the rows of the blocks `first <= number < stop` take."""
        columns = self.pack.chunks.columns
        return int(self._before[stop] - self._before[first]) * sum(columns[name].dtype.itemsize for name in names)

    def blocks_of_rows(self, first: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the block of each of some rows, counted from the first row of the block `first`."""
        blocks: NDArray[np.int64] = np.searchsorted(self._before, self._before[first] + rows, "right") - 1
        return blocks

    def blocks(self, first: int, stop: int, names: Sequence[str], lead: Table | None = None) -> Table:
        """Return the rows of the blocks `first <= number < stop`, behind some other rows.

        Raises:
            DamagedColumn: a chunk cannot be read.
        """
        return self.rows(int(self._before[first]), int(self._before[stop]), names, lead)

    def rows(self, first: int, stop: int, names: Sequence[str], lead: Table | None = None) -> Table:
        """Return the rows `first <= number < stop`, behind some other rows.

        Raises:
            DamagedColumn: a chunk cannot be read.
        """
        pieces = self._pieces(first, stop)
        parts = [(self.pack.cache.get(self.pack, number, names), begin, end) for number, begin, end in pieces]
        has_lead = lead is not None and len(lead) > 0
        if len(parts) == 1 and not has_lead:
            ((chunk, begin, end),) = parts
            return Table({name: chunk[name][begin:end] for name in names})
        found = {}
        for name in names:
            values = [chunk[name][begin:end] for chunk, begin, end in parts]
            if has_lead:
                assert lead is not None
                values.insert(0, lead[name])
            found[name] = np.concatenate(values) if values else np.zeros(0, self.pack.chunks.columns[name].dtype)
        return Table(found)

    def _pieces(self, first: int, stop: int) -> list[tuple[int, int, int]]:
        """Return in which chunks rows of the rank are: number of the chunk, first row in it, and the row behind."""
        num_ranks, chunk_rows = self.pack.counts.shape[1], self.pack.chunk_rows
        begin_block, end_block = np.searchsorted(self._before, (first + 1, stop)).tolist()
        before = self._before[begin_block - 1 : end_block + 1].tolist()
        places = self.pack.first_rows[(begin_block - 1) * num_ranks + self.index : end_block * num_ranks : num_ranks]
        pieces = []
        for place, own, behind in zip((places - before[:-1]).tolist(), before, before[1:], strict=False):
            begin, end = place + max(first, own), place + min(stop, behind)
            while begin < end:
                number = begin // chunk_rows
                limit = min(end, (number + 1) * chunk_rows)
                pieces.append((number, begin - number * chunk_rows, limit - number * chunk_rows))
                begin = limit
        return pieces


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedCollectives:
    """The collectives of all ranks of a pack, in blocks: each has the rows of about the same steps, rank by rank.

    Attributes:
        open: opens the pack again, and makes sure that it is the same file; for each read, because a run may have more
            packs than a process can keep open.
        chunks: where the rows are.
        counts: rows of each rank in each block, int64, (num_blocks, num_ranks).
        last_steps: the step of the last row that each rank has up to each block, -1 before its first row, int64,
            (num_blocks, num_ranks).
        cache: keeps decoded chunks.
    """

    open: Callable[[], int]
    chunks: TableChunks
    counts: NDArray[np.int64]
    last_steps: NDArray[np.int64]
    cache: ChunkCache

    @cached_property
    def chunk_rows(self) -> int:
        """Rows of a chunk."""
        return next((column.chunk_rows for column in self.chunks.columns.values()), 0) or 1

    @property
    def num_blocks(self) -> int:
        """Blocks of the table."""
        return len(self.counts)

    @cached_property
    def first_rows(self) -> NDArray[np.int64]:
        """The first row of each rank in each block, and the number of all rows, int64, (num_blocks * ranks + 1,)."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts.ravel())])

    @cached_property
    def rows_before(self) -> NDArray[np.int64]:
        """How many rows each rank has before each block, and in all, int64, (num_blocks + 1, num_ranks)."""
        before = np.zeros((self.num_blocks + 1, self.counts.shape[1]), np.int64)
        np.cumsum(self.counts, axis=0, out=before[1:])
        return before

    def read_blocks(self, first: int, stop: int, names: Sequence[str] | None = None) -> tuple[Table, list[Range]]:
        """Return the rows of all ranks in the blocks `first <= number < stop`, block by block as they are stored.

        Also which of them are damaged and so zeros. Nothing of it is kept.

        Raises:
            OSError: the pack is not there any more.
        """
        num_ranks = self.counts.shape[1]
        rows = Range(int(self.first_rows[first * num_ranks]), int(self.first_rows[stop * num_ranks]))
        with closing_descriptor(self.open()) as descriptor:
            table, damaged = read_rows(descriptor, self.chunks, *rows, names)
        return table, [Range(max(one.first, rows.first) - rows.first, one.stop - rows.first) for one in damaged]

    def of_rank(self, index: int) -> PackedRows:
        """Return the rows of one rank."""
        return PackedRows(pack=self, index=index)

    def decode(self, name: str, number: int) -> Values:
        """Return one chunk of a column.

        Raises:
            DamagedColumn: it cannot be read.
        """
        column = self.chunks.columns[name]
        num_rows = min(self.chunks.num_rows - number * column.chunk_rows, column.chunk_rows)
        values: Values = np.zeros(num_rows, column.dtype)
        try:
            descriptor = self.open()
        except OSError as error:
            raise DamagedColumn(str(error)) from error
        with closing_descriptor(descriptor):
            fill_chunk(descriptor, column, number, values)
        values.flags.writeable = False  # all ranks share it
        return values


class _Chunks:
    """The columns of one chunk number of a pack: as far as they are decoded, and the tasks that decode them.

    The task of a damaged column keeps its error, so that it is not decoded again for each rank.
    """

    def __init__(self) -> None:
        self.values: dict[str, Values] = {}
        self.tasks: dict[str, Future[None]] = {}
        self.size_bytes = 0


class ChunkCache:
    """Decoded chunks, the last ones used; several threads share the work of decoding.

    Args:
        most_bytes: memory for them; the ones just returned may take more.
    """

    def __init__(self, most_bytes: float = CACHE_BYTES) -> None:
        self._left_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[PackedCollectives, int], _Chunks] = OrderedDict()

    def get(self, pack: PackedCollectives, number: int, names: Sequence[str]) -> dict[str, Values]:
        """Return at least some columns of a chunk number of a pack, by name.

        Raises:
            DamagedColumn: one cannot be read.
        """
        key = pack, number
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._kept[key] = _Chunks()
            else:
                self._kept.move_to_end(key)
            missing = [name for name in names if name not in found.values]
        if missing:
            self._decode(key, found, missing)
        return found.values

    def _decode(self, key: tuple[PackedCollectives, int], chunks: _Chunks, names: Sequence[str]) -> None:
        tasks = []
        for name in names:
            with self._lock:
                is_own = name not in chunks.tasks
                task = chunks.tasks.setdefault(name, Future())
            if is_own:  # else another thread decodes it: do others meanwhile
                self._decode_one(key, chunks, name, task)
            tasks.append(task)
        for error in filter(None, (task.exception() for task in tasks)):
            raise DamagedColumn(str(error))

    def _decode_one(self, key: tuple[PackedCollectives, int], chunks: _Chunks, name: str, task: Future[None]) -> None:
        pack, number = key
        try:
            values = pack.decode(name, number)
        except DamagedColumn as error:
            task.set_exception(error)
            return
        except BaseException:
            del chunks.tasks[name]
            task.set_exception(DamagedColumn("another thread could not read it"))
            raise
        with self._lock:
            chunks.values[name] = values
            if self._kept.get(key) is chunks:
                chunks.size_bytes += values.nbytes
                self._left_bytes -= values.nbytes
            while self._left_bytes < 0 and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._left_bytes += oldest.size_bytes
        task.set_result(None)


class Range(NamedTuple):
    """Consecutive rows of a table."""

    first: int
    stop: int


def read_rows(
    descriptor: int, chunks: TableChunks, first: int, stop: int, names: Sequence[str] | None = None
) -> tuple[Table, list[Range]]:
    """Return the rows `first <= number < stop` of an even table, and which rows of it are damaged and so zeros.

    Several threads decode chunks at the same time.
    """
    columns = {name: chunks.columns[name] for name in (chunks.columns if names is None else names)}
    if stop <= first:
        return Table({name: np.zeros(0, column.dtype) for name, column in columns.items()}), []
    chunk_rows = next(iter(columns.values())).chunk_rows
    numbers = range(first // chunk_rows, -(-stop // chunk_rows))
    begin, end = numbers.start * chunk_rows, min(numbers.stop * chunk_rows, chunks.num_rows)
    found = {name: np.zeros(end - begin, column.dtype) for name, column in columns.items()}
    damaged: list[Range] = []

    def fill(number: int) -> None:
        place = Range(number * chunk_rows, min((number + 1) * chunk_rows, end))
        try:
            for name, column in columns.items():
                fill_chunk(descriptor, column, number, found[name][place.first - begin : place.stop - begin])
        except DamagedColumn:
            damaged.append(place)

    run_threads(fill, numbers)
    return Table({name: values[first - begin : stop - begin] for name, values in found.items()}), damaged
