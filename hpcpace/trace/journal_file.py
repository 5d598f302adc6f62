"""The journal of one rank for its writer: records are appended as far as the disk takes them.

The last row of `account` can be overwritten at any time without needing space: it counts what a full disk costs.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.files import write_all, write_some
from hpcpace.trace.journal import RecordKind, encode_records, record_dtype
from hpcpace.trace.schema import TABLES

_NUMBERS = {name: number for number, name in enumerate(TABLES)}


@dataclass(frozen=True)
class Run:
    """Consecutive rows of a table on their way into the journal, or any open operations, which have no row numbers."""

    table: str
    kind: RecordKind
    first_row: int
    rows: NDArray[np.void]


@dataclass(frozen=True)
class _AccountRecord:
    offset: int
    number: int
    row: NDArray[np.void]


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
        self._descriptor = os.dup(descriptor)
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)
        self._end = 0
        self._account: _AccountRecord | None = None
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
            OSError: it did not take all; `next_rows` and `open_rows` tell which complete records it took.
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
        row = self._account.row.copy()
        row["time_ns"] = max(int(row["time_ns"][0]), int(waiting["time_ns"].max(initial=0)))
        for column in ("events", "dropped", "cost_ns"):
            row[column] += waiting[column].sum()
        row["dropped"] += num_missing
        record = encode_records(_NUMBERS["account"], RecordKind.ROW, self._account.number, row)
        write_all(self._descriptor, record, self._account.offset)
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
            place = self._end + last * record_bytes
            self._account = _AccountRecord(place, run.first_row + last, run.rows[last : last + 1].copy())
