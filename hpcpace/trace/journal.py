"""The journal next to a trace file: rows that do not fill a chunk, as records of fixed size, written and followed.

It begins with a self-describing header, so that it can be read even if the HDF5 file cannot. A kill at any moment tears
at most the last record, and its checksum shows that. The writer can overwrite the last row of `account` at any time
without needing space: it counts what a full disk costs.

The writer is never disturbed: the file is opened for reading, looked at and closed. It may be replaced at any time by a
new one that begins with rows of the old one.
"""

from __future__ import annotations

import json
import os
import re
import struct
import weakref
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from enum import IntEnum
from functools import cache, lru_cache
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hpcpace.core.codec import convert, parse_json
from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder, close_own, closing_descriptor, set_aside, write_all, write_some
from hpcpace.core.records import dataclass
from hpcpace.trace.schema import TABLES, TraceHeader, header_values, parse_header

MAGIC = b"HPCPJNL1"
_PREAMBLE = struct.Struct("<8sII")
_COLUMN_KIND = re.compile(r"<[iu][248]|\|[iu]1|\|S\d{1,4}")
_PREFIX = [("check", "<u4"), ("table", "u1"), ("kind", "u1"), ("size", "<u2"), ("row", "<u8")]
# Records checked at once; for a table with few consecutive rows, more would mostly be wasted.
_MAX_RECORDS = 1024
# Each flush appends at most one run of records per table, and a new journal is begun after some thousand flushes.
_MAX_RUNS = 1 << 16
_MAX_HEADER_BYTES = 1 << 20
MAX_START_BYTES = _PREAMBLE.size + _MAX_HEADER_BYTES
"""The most bytes before the first record of a journal."""
_PREFIX_BYTES = 16
_CHECK_SEED = 0xCBF29CE484222325
_CHECK_FACTOR = 0x9E3779B97F4A7C15


class RecordKind(IntEnum):
    """What a record holds: a row of a table, or an operation that was entered but not completed."""

    ROW = 0
    OPEN = 1


@dataclass
class JournalContent:
    """What a journal holds.

    Attributes:
        rows: row numbers (int64, ascending, unique) and rows of each table.
        open_rows: operations entered but not completed when they were journalled, as rows of collectives.
        num_left_bytes: bytes at the end that are not a complete, intact record.
    """

    header: TraceHeader
    rows: dict[str, tuple[NDArray[np.int64], NDArray[np.void]]] = field(default_factory=dict)
    open_rows: NDArray[np.void] | None = None
    num_left_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class JournalStart:
    """What is before the first record of a journal.

    Attributes:
        tables: dtypes of the rows of its tables, by name, in the order of their numbers.
        size_bytes: where the first record begins.
    """

    header: TraceHeader
    tables: dict[str, np.dtype]
    size_bytes: int


@dataclass(frozen=True)
class RecordRun:
    """Consecutive records of one table and kind.

    Attributes:
        numbers, rows: row numbers, int64, and rows, each (num_records,).
        end: where the records end in the bytes that they were read from.
    """

    table: str
    kind: RecordKind
    numbers: NDArray[np.int64]
    rows: NDArray[np.void]
    end: int


@cache
def record_dtype(row: np.dtype) -> np.dtype:
    """Return the dtype of the record around a row, padded to whole 8-byte words."""
    prefix = np.dtype(_PREFIX)
    return np.dtype(
        {
            "names": [*(prefix.names or ()), "data"],
            "formats": [*(prefix[name] for name in prefix.names or ()), row],
            "offsets": [0, 4, 5, 6, 8, prefix.itemsize],
            "itemsize": -(-(prefix.itemsize + row.itemsize) // 8) * 8,
        }
    )


def encode_header(header: TraceHeader, dtypes: Mapping[str, np.dtype]) -> bytes:
    """Return the start of a journal: magic, length and CRC-32 of a JSON text, that text, padding to 8 bytes."""
    tables = [
        {"name": name, "columns": [[column, dtype[column].str] for column in dtype.names or ()]}
        for name, dtype in dtypes.items()
    ]
    text = json.dumps({"header": header_values(header), "tables": tables}).encode()
    text += b" " * (-len(text) % 8)
    return _PREAMBLE.pack(MAGIC, len(text), zlib.crc32(text)) + text


def encode_records(table: int, kind: RecordKind, first_row: int, rows: NDArray[np.void]) -> bytes:
    """Return records of consecutive rows of the table with that number."""
    records = np.zeros(len(rows), dtype=record_dtype(rows.dtype))
    records["table"], records["kind"], records["size"] = table, kind, records.dtype.itemsize
    records["row"] = np.arange(first_row, first_row + len(rows))
    records["data"] = rows
    records["check"] = _checks(records)
    return records.tobytes()


def decode(content: bytes, place: str) -> JournalContent:
    """Return what a journal holds, up to its first torn or damaged record.

    Raises:
        TraceError: not an hpcpace journal, a damaged header, or another major version.
    """
    start = decode_start(content, place)
    runs, end = records_after(content, start.size_bytes, start.tables, start.tables)
    journal = JournalContent(start.header, num_left_bytes=len(content) - end)
    for name, dtype in start.tables.items():
        own = [run for run in runs if run.table == name]
        stored = [run for run in own if run.kind == RecordKind.ROW]
        numbers = np.concatenate([np.zeros(0, np.int64), *(run.numbers for run in stored)])
        numbers, first = np.unique(numbers, return_index=True)
        journal.rows[name] = numbers, np.concatenate([np.zeros(0, dtype), *(run.rows for run in stored)])[first]
        if name == "collectives":
            opened = [run.rows for run in own if run.kind == RecordKind.OPEN]
            journal.open_rows = np.concatenate([np.zeros(0, dtype), *opened])
    return journal


class _Table(Struct):
    name: str
    columns: tuple[tuple[str, str], ...]


class _Description(Struct):
    """The JSON text at the start of a journal."""

    header: dict[str, Any]
    tables: Any  # converted once the version in the header is known


def decode_start(content: bytes, place: str) -> JournalStart:
    """Return what is before the first record of a journal.

    Args:
        content: its first bytes, `MAX_START_BYTES` or all that there are.
        place: the file, for error messages.

    Raises:
        TraceError: not an hpcpace journal, a damaged header, or another major version.
    """
    if len(content) < _PREAMBLE.size or not content.startswith(MAGIC):
        raise TraceError(f"{place} is not an hpcpace journal: it begins with {content[:8]!r}; leave it out")
    _, size, check = _PREAMBLE.unpack_from(content)
    text = content[_PREAMBLE.size : _PREAMBLE.size + size]
    if size > _MAX_HEADER_BYTES or len(text) < size or zlib.crc32(text) != check:
        raise TraceError(f"{place}: the journal's header is damaged or ends after {len(content)} bytes; leave it out")
    try:
        found = convert(parse_json(text), _Description)
        header = parse_header(found.header, place)
        listed = convert(found.tables, list[_Table])
        tables = {table.name: _row_dtype(*table.columns) for table in listed}
    except ValueError as error:
        raise TraceError(f"{place}: the journal's header does not describe a trace ({error}); leave it out") from error
    if len(tables) != len(listed):
        raise TraceError(f"{place}: the journal names a table twice; leave the file out")
    return JournalStart(header=header, tables=tables, size_bytes=_PREAMBLE.size + size)


def records_after(
    content: bytes, offset: int, tables: Mapping[str, np.dtype], wanted: Collection[str]
) -> tuple[list[RecordRun], int]:
    """Return the records of some tables in a part of a journal, and where the first record begins that is not whole.

    Records of other tables are stepped over, and not checked.

    Args:
        content: bytes of the journal.
        offset: where a record begins in them.
        tables: dtypes of the rows, see `JournalStart`.
        wanted: names of the tables.
    """
    names, dtypes = list(tables), [record_dtype(row) for row in tables.values()]
    octets = np.frombuffer(content, np.uint8)
    found: list[RecordRun] = []
    for _ in range(_MAX_RUNS):
        if len(content) - offset < _PREFIX_BYTES or content[offset + 4] >= len(dtypes):
            break
        table = content[offset + 4]
        dtype = dtypes[table]
        count = min((len(content) - offset) // dtype.itemsize, _MAX_RECORDS)
        if not count or int.from_bytes(content[offset + 6 : offset + 8], "little") != dtype.itemsize:
            break
        count = _num_leading(octets[offset + 4 :: dtype.itemsize][:count] == table)
        if names[table] in wanted:
            records = np.frombuffer(content, dtype, count=count, offset=offset)
            num_sound = _num_leading(records["check"] == _checks(records))
            found += _runs(names[table], records[:num_sound], offset)
            if num_sound < count:
                return found, offset + num_sound * dtype.itemsize
        offset += count * dtype.itemsize
    return found, offset


def first_record(content: bytes, tables: Mapping[str, np.dtype]) -> int | None:
    """Return where the first whole record begins in bytes from the middle of a journal; None without one.

    Args:
        content: bytes from a place on that is a multiple of 8 bytes away from the first record.
        tables: dtypes of the rows, see `JournalStart`.
    """
    dtypes = [record_dtype(row) for row in tables.values()]
    for offset in range(0, len(content) - _PREFIX_BYTES + 1, 8):
        if content[offset + 4] >= len(dtypes):
            continue
        dtype = dtypes[content[offset + 4]]
        has_size = int.from_bytes(content[offset + 6 : offset + 8], "little") == dtype.itemsize
        if has_size and len(content) - offset >= dtype.itemsize:
            record = np.frombuffer(content, dtype, count=1, offset=offset)
            if record["check"][0] == _checks(record)[0]:
                return offset
    return None


def _runs(table: str, records: NDArray[np.void], offset: int) -> list[RecordRun]:
    """Return rows and open operations of consecutive records of one table apart."""
    end = offset + records.nbytes
    kinds = records["kind"]
    parts = ((kind, records if (kinds == kind).all() else records[kinds == kind]) for kind in RecordKind)
    return [
        RecordRun(table, kind, part["row"].astype(np.int64), part["data"], end) for kind, part in parts if len(part)
    ]


@lru_cache(maxsize=256)
def _row_dtype(*columns: tuple[str, str]) -> np.dtype:
    """Return the dtype of some columns; cached because the tables of all ranks of a run have few."""
    for _, kind in columns:
        if not _COLUMN_KIND.fullmatch(kind):
            raise ValueError(f"column type {kind!r}")
    return np.dtype(list(columns))


@cache
def _check_powers(num_words: int) -> tuple[NDArray[np.uint64], np.uint64]:
    """Return factor^n to factor^1, uint64, (num_words,), and the seed times factor^n, modulo 2^64."""
    powers = [pow(_CHECK_FACTOR, num_words - index, 1 << 64) for index in range(num_words)]
    return np.array(powers, dtype=np.uint64), np.uint64(_CHECK_SEED * powers[0] % (1 << 64))


def _num_leading(mask: NDArray[np.bool_]) -> int:
    return len(mask) if mask.all() else int(mask.argmin())


def _checks(records: NDArray[np.void]) -> NDArray[np.uint32]:
    """Return the checksum of each record: the upper half of h = (h + word) * factor over its words, modulo 2^64.

    Multiplied out, that is the seed times factor^n plus the sum of word k times factor^(n-k), k from 0.
    """
    words = np.ascontiguousarray(records).view("<u8").reshape(len(records), records.dtype.itemsize // 8)
    powers, seed = _check_powers(words.shape[1])
    # The lower half of the first word is the checksum itself.
    check: NDArray[np.uint64] = (words[:, 0] >> np.uint64(32)) * powers[0] + words[:, 1:] @ powers[1:] + seed
    return (check >> np.uint64(32)).astype(np.uint32)


_NUMBERS = {name: number for number, name in enumerate(TABLES)}


@dataclass(frozen=True)
class Run:
    """Consecutive rows of a table on their way into the journal, or any open operations, which have no row numbers."""

    table: str
    kind: RecordKind
    first_row: int
    rows: NDArray[np.void]


class JournalFile:
    """An open journal.

    Args:
        descriptor: of an empty file; the caller keeps it.

    Attributes:
        next_rows: for each table, the number after that of its last row in the journal.
        open_rows: the open operations in it, as bytes.
    """

    def __init__(self, descriptor: int) -> None:
        self.next_rows: dict[str, int] = {}
        self.open_rows: set[bytes] = set()
        self._descriptor = set_aside(os.dup(descriptor))
        self._finalizer = weakref.finalize(self, close_own, self._descriptor)
        self._end = 0
        # Place, number and content of the last row of `account` in the journal.
        self._account: tuple[int, int, NDArray[np.void]] | None = None
        self._is_amended = False

    @property
    def is_removed(self) -> bool:
        """Whether the file was removed: it has no name left."""
        return os.fstat(self._descriptor).st_nlink == 0

    def begin(self, header: bytes) -> None:
        """Write the header.

        Raises:
            OSError: the disk did not take all of it.
        """
        write_all(self._descriptor, header, 0)
        self._end = len(header)

    def append(self, runs: Sequence[Run]) -> None:
        """Append rows as records, in order; what a full disk takes of them is kept.

        Raises:
            OSError: it did not take all; `next_rows` and `open_rows` say which complete records it took.
        """
        runs = [run for run in runs if len(run.rows)]
        content = b"".join(encode_records(_NUMBERS[run.table], run.kind, run.first_row, run.rows) for run in runs)
        num_left, problem = write_some(self._descriptor, content, self._end)
        for run in runs:
            record_bytes = record_dtype(run.rows.dtype).itemsize
            num_taken = min(num_left // record_bytes, len(run.rows))
            self._note(run, num_taken, record_bytes)
            num_left -= num_taken * record_bytes
            self._end += num_taken * record_bytes
            if num_taken < len(run.rows):
                break
        if problem is not None:
            os.ftruncate(self._descriptor, self._end)
            raise problem

    def amend_account(self, waiting: NDArray[np.void], num_missing: int) -> None:
        """Update the last row of `account` in the journal with what is missing after it.

        Args:
            waiting: later rows of `account`, which are not in the journal.
            num_missing: rows of other tables that are in no file; they are added to `dropped`.

        Raises:
            OSError: it cannot be written.
        """
        if self._account is None or not (self._is_amended or len(waiting) or num_missing):
            return
        offset, number, row = self._account
        row = row.copy()
        row["time_ns"] = max(int(row["time_ns"][0]), int(waiting["time_ns"].max(initial=0)))
        for column in ("events", "dropped", "cost_ns"):
            row[column] += waiting[column].sum()
        row["dropped"] += num_missing
        write_all(self._descriptor, encode_records(_NUMBERS["account"], RecordKind.ROW, number, row), offset)
        self._is_amended = bool(len(waiting) or num_missing)

    def close(self) -> None:
        """Close the file."""
        self._finalizer()

    def _note(self, run: Run, num_taken: int, record_bytes: int) -> None:
        if not num_taken:
            return
        if run.kind == RecordKind.OPEN:
            self.open_rows.update(row.tobytes() for row in run.rows[:num_taken])
            return
        self.next_rows[run.table] = run.first_row + num_taken
        if run.table == "account":
            last = num_taken - 1
            self._account = self._end + last * record_bytes, run.first_row + last, run.rows[last:num_taken].copy()


_START_BYTES = 1 << 14
MAX_BYTES = 1 << 16
"""The most bytes of records that one look reads; of what is older, nothing is read."""
# A record that stays torn for so many looks is damage.
_MAX_TORN_LOOKS = 3
_OPEN = "open"


@dataclass(frozen=True, kw_only=True)
class Tail:
    """What one look at a journal found.

    Attributes:
        has_changed: whether it was written since the last look.
        written_ns: when it was last written, by the clock of its file system, Unix time.
        rows: new rows of the tables that were asked for, by table.
        open_rows: operations entered and not completed at a flush since the last look, as rows of `collectives`.
        amended_account: the row of `account` that the last look returned last, as it is now, if it may have changed.
        num_skipped_bytes: bytes of records that were left out, because there were too many or they are damaged.
    """

    header: TraceHeader
    has_changed: bool
    written_ns: int
    rows: dict[str, NDArray[np.void]] = field(default_factory=dict)
    open_rows: NDArray[np.void] | None = None
    amended_account: NDArray[np.void] | None = None
    num_skipped_bytes: int = 0


class JournalTail:
    """Reads the journal of one rank look by look.

    Args:
        name: of the journal, in the folder of the traces.
        most_bytes: see `MAX_BYTES`.
    """

    def __init__(self, name: str, *, most_bytes: int = MAX_BYTES) -> None:
        self.name = name
        self._most_bytes = most_bytes
        self._start: JournalStart | None = None
        self._start_content = b""
        self._file: tuple[int, int] | None = None
        self._written = 0, 0
        self._offset = 0
        self._account_end = 0
        self._was_amended = False
        self._next_rows: dict[str, int] = {}
        self._num_torn_looks = 0

    def look(self, folder: Folder, wanted: Collection[str]) -> Tail:
        """Return what is new in the journal.

        Args:
            folder: of the traces.
            wanted: names of the tables whose rows are returned; those of others are passed over for good.

        Raises:
            OSError: there is no such file, or it cannot be read.
            TraceError: it is no journal, or damaged.
        """
        with closing_descriptor(folder.open_file(self.name)) as descriptor:
            status = os.fstat(descriptor)
            is_other = (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset
            has_changed = is_other or (status.st_mtime_ns, status.st_size) != self._written
            if is_other:
                self._begin(descriptor, folder)
                self._file = status.st_dev, status.st_ino
            assert self._start is not None
            self._written = status.st_mtime_ns, status.st_size
            tail = Tail(header=self._start.header, has_changed=has_changed, written_ns=status.st_mtime_ns)
            if has_changed:
                return self._new(descriptor, status.st_size, wanted, tail)
            return tail

    def _begin(self, descriptor: int, folder: Folder) -> None:
        """Read the header of a journal that was not looked at before."""
        size_bytes = len(self._start_content)
        if self._start is None or os.pread(descriptor, size_bytes, 0) != self._start_content:
            place = str(folder.path / self.name)
            content = os.pread(descriptor, _START_BYTES, 0)
            try:
                start = decode_start(content, place)
            except TraceError:
                if len(content) < _START_BYTES:
                    raise
                start = decode_start(os.pread(descriptor, MAX_START_BYTES, 0), place)
            if self._start is None or start.header != self._start.header:
                self._next_rows = {}
            self._start, self._start_content = start, content[: start.size_bytes]
        self._offset, self._num_torn_looks = self._start.size_bytes, 0
        self._account_end, self._was_amended = 0, False

    def _new(self, descriptor: int, size_bytes: int, wanted: Collection[str], tail: Tail) -> Tail:
        """Return the tail with what was appended."""
        assert self._start is not None
        amended = self._amended_account(descriptor, may_be_new=size_bytes == self._offset)
        begin = max(self._offset, size_bytes - self._most_bytes)
        begin -= (begin - self._start.size_bytes) % 8
        content = os.pread(descriptor, size_bytes - begin, begin)
        first: int | None = 0
        if begin > self._offset or self._num_torn_looks >= _MAX_TORN_LOOKS:
            first = first_record(content, self._start.tables)
            self._num_torn_looks = 0
        if first is None:
            return replace(tail, amended_account=amended)
        num_skipped = max(begin + first - self._offset, 0)
        runs, end = records_after(content, first, self._start.tables, {*wanted, "account"})
        self._num_torn_looks = self._num_torn_looks + 1 if end < len(content) else 0
        self._offset = max(begin + end, self._offset)
        rows, open_rows = self._rows(runs, begin)
        return replace(tail, rows=rows, open_rows=open_rows, amended_account=amended, num_skipped_bytes=num_skipped)

    def _rows(
        self, runs: Sequence[RecordRun], begin: int
    ) -> tuple[dict[str, NDArray[np.void]], NDArray[np.void] | None]:
        """Return rows that no earlier look has returned, by table, and open operations."""
        rows: dict[str, list[NDArray[np.void]]] = {}
        for run in runs:
            if run.kind == RecordKind.OPEN:
                rows.setdefault(_OPEN, []).append(run.rows)
                continue
            next_row = self._next_rows.get(run.table, 0)
            if run.table == "account":
                self._account_end = begin + run.end
            if run.numbers[0] >= next_row:  # nearly always
                rows.setdefault(run.table, []).append(run.rows)
            elif (is_new := run.numbers >= next_row).any():
                rows.setdefault(run.table, []).append(run.rows[is_new])
            else:
                continue
            self._next_rows[run.table] = int(run.numbers[-1]) + 1
        joined = {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in rows.items()}
        open_rows = joined.pop(_OPEN, None)
        return joined, open_rows

    def _amended_account(self, descriptor: int, *, may_be_new: bool) -> NDArray[np.void] | None:
        """Return the last row of `account` that was read, if it was written over since: the disk is, or was, full."""
        assert self._start is not None
        if not self._account_end or not (may_be_new or self._was_amended):
            return None
        record_bytes = record_dtype(self._start.tables["account"]).itemsize
        content = os.pread(descriptor, record_bytes, self._account_end - record_bytes)
        runs, _ = records_after(content, 0, self._start.tables, ("account",))
        self._was_amended = may_be_new
        return runs[0].rows if runs else None
