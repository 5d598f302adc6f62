"""Follow the journal of a rank that runs: read what was appended since the last look.

The writer is never disturbed: the file is opened for reading, looked at and closed. It may be replaced at any time by a
new one that begins with rows of the old one.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder, closing_descriptor
from hpcpace.trace.journal import (
    MAX_START_BYTES,
    JournalStart,
    RecordKind,
    RecordRun,
    decode_start,
    first_record,
    record_dtype,
    records_after,
)
from hpcpace.trace.schema import TraceHeader

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
