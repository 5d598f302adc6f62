"""Write rows to disk: whole chunks to HDF5, the rest to the journal; also to a full disk.

One thread owns a writer. Rows that could not be written stay in memory, and every flush tries again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.files import Folder, write_all
from hpcpace.trace.hdf5_files import Container, container_image, mark_steps
from hpcpace.trace.journal import JournalFile, RecordKind, Run, encode_header
from hpcpace.trace.schema import TABLES, TraceHeader, row_dtypes

_BY_STEP = ("steps", "phases", "collectives", "pacing")
_BY_TIME = {"clock": "local_ns", **dict.fromkeys(("network", "host", "account", "flows"), "time_ns")}
# `groups` and `connections` are needed by all later rows, and `events` are few.


class KeptSteps:
    """Follows which rows are in the file, and says from which chunk on they are kept.

    With N steps to keep, all rows of steps before k x N go once step (k + 1) x N has ended, for k = 1, 2, ... So a
    trace holds N to 2 N whole steps, and those of all ranks begin with the same one. Whole chunks go, some thousand
    steps at a time.

    Args:
        num_steps: how many to keep at least; 0 keeps all.

    Attributes:
        first_step: the first step whose rows are all kept; 0 while nothing was dropped.
    """

    def __init__(self, num_steps: int) -> None:
        self.first_step = 0
        self._num_steps = num_steps
        self._last: dict[str, list[int]] = {}  # of each chunk in the file, its last step or time
        self._begins_ns: dict[int, int] = {}  # of the steps from which rows may be kept
        self._ended = -1

    def note_step_rows(self, rows: NDArray[np.void]) -> None:
        """Note rows of `steps` that have been recorded."""
        if not self._num_steps or not len(rows):
            return
        self._ended = max(self._ended, int(rows["step"].max()))
        firsts = rows[rows["step"] % self._num_steps == 0]
        self._begins_ns |= zip(firsts["step"].tolist(), firsts["begin_ns"].tolist(), strict=True)

    def note_chunk(self, table: str, rows: NDArray[np.void]) -> None:
        """Note a chunk that is in the file now."""
        if not self._num_steps:
            return
        if table in _BY_STEP:
            self._last.setdefault(table, []).append(int(rows["step"].max()))
        elif table in _BY_TIME:
            self._last.setdefault(table, []).append(int(rows[_BY_TIME[table]].max()))

    @property
    def next_first_step(self) -> int | None:
        """The step before which all is to be dropped now; None if nothing is."""
        if not self._num_steps:
            return None
        first = (self._ended + 1) // self._num_steps * self._num_steps - self._num_steps
        return first if first > self.first_step else None

    def num_dropped_chunks(self, first_step: int) -> dict[str, int]:
        """Return how many of the first chunks of each table have no row of a step, or a time, that is to be kept."""
        begins_ns = self._begins_ns.get(first_step)
        bounds = dict.fromkeys(_BY_STEP, first_step)
        if begins_ns is not None:
            bounds |= dict.fromkeys(_BY_TIME, begins_ns)
        found = {}
        for table, last in self._last.items():
            kept = np.flatnonzero(np.array(last) >= bounds.get(table, -1))
            num_dropped = int(kept[0]) if len(kept) else len(last)
            if table == "clock":  # a time between two comparisons needs both
                num_dropped = max(num_dropped - 1, 0)
            found[table] = num_dropped
        return {table: num_dropped for table, num_dropped in found.items() if num_dropped}

    def drop(self, first_step: int, num_chunks: Mapping[str, int]) -> None:
        """Note that rows before a step, and chunks with them, have been dropped."""
        self.first_step = first_step
        for table, num_dropped in num_chunks.items():
            del self._last[table][:num_dropped]
        self._begins_ns = {step: begin_ns for step, begin_ns in self._begins_ns.items() if step >= first_step}


# A full disk gets these tables first: they are small, and the others are worth little without them. The journal begins
# with account, whose last row there says what is missing. HDF5 ends with it, because its rows cannot be changed.
_SMALL = ("steps", "clock", "groups", "connections", "network", "host", "pacing", "events", "flows")
_SMALL_FIRST = tuple(dict.fromkeys((*_SMALL, *TABLES)))
_STORED_ORDER = (*(name for name in _SMALL_FIRST if name != "account"), "account")
_JOURNALLED_ORDER = ("account", *(name for name in _SMALL_FIRST if name != "account"))
# Rows that the journal keeps although they would fill a chunk.
_MIN_JOURNALLED = {"account": 1}


class TraceWriter:
    """Writes the trace file and journal of one rank.

    The folder is held open and files are opened relative to it: a run that is moved while in use keeps all its rows.
    A full disk gets as many rows as it takes: steps, clock and other small tables before phases, and collectives last,
    the oldest rows of each table first. The last row of `account` in the journal counts the rows that did not fit.

    Args:
        path: the HDF5 file; the journal is next to it.
        device_tables: the tables that have the columns of ranks with a device.
        open_folder: opens the folder of both and makes it if necessary.
        keep_last: how many of the last steps to keep at least, see `KeptSteps`; 0 keeps all.

    Attributes:
        num_removed: rows by table in an HDF5 file that somebody removed and that could never be recreated.
    """

    def __init__(
        self,
        path: Path,
        header: TraceHeader,
        *,
        device_tables: Collection[str] = (),
        open_folder: Callable[[], Folder] | None = None,
        keep_last: int = 0,
    ) -> None:
        self.path = path
        self.journal_path = path.with_suffix(".journal")
        self._header = header
        self._dtypes = row_dtypes(device_tables)
        self._open = open_folder or partial(Folder.open, path.parent, make=True)
        self._folder: Folder | None = None
        self._container: Container | None = None
        self._journal: JournalFile | None = None
        self._is_begun = self._is_journal_stale = False
        self._num_stored = dict.fromkeys(self._dtypes, 0)
        self._kept = KeptSteps(keep_last)
        self._first_rows = dict.fromkeys(self._dtypes, 0)  # rows that were dropped
        self._tails = {name: np.zeros(0, dtype=dtype) for name, dtype in self._dtypes.items()}
        self._open_rows = self._tails["collectives"]
        # For each table, the number after that of the journal's last row, even once it is closed.
        self._next_rows: Mapping[str, int] = {}
        self.num_removed: dict[str, int] = {}
        self._journalled_open: set[bytes] = set()

    @property
    def num_kept(self) -> int:
        """Rows in memory, whether the journal has them or not."""
        return sum(map(len, self._tails.values()))

    def missing(self) -> dict[str, NDArray[np.void]]:
        """Return the rows that are in neither file nor journal, by table; not `account`, which counts them."""
        found = {name: tail[self._num_journalled(name) :] for name, tail in self._tails.items() if name != "account"}
        found["collectives"] = np.concatenate([found["collectives"], self._still_open(is_journalled=False)])
        return found

    def add(self, name: str, rows: NDArray[np.void]) -> None:
        """Accept rows of a table; nothing is written yet."""
        if name == "steps":
            self._kept.note_step_rows(rows)
        if len(rows):
            # As bytes: NumPy copies structured rows field by field.
            parts = [part.view(np.uint8) for part in (self._tails[name], rows)]
            self._tails[name] = np.concatenate(parts).view(rows.dtype)

    def set_open(self, rows: NDArray[np.void]) -> None:
        """Accept the operations that are now entered but not completed."""
        self._open_rows = rows

    def flush(self) -> bool:
        """Write all rows; return whether the files had been removed and were recreated.

        Raises:
            OSError: a file cannot be made or written. What the disk took is kept, the other rows stay in memory, and
                the next flush tries again.
        """
        was_removed = self._write(self._store_chunks)
        self._drop_old()
        return was_removed

    def close(self) -> None:
        """Write everything into the HDF5 file, close it and remove the journal.

        Raises:
            OSError: something could not be written; the journal is kept, with the rows that it took.
        """
        try:
            self._write(self._store_all)
            assert self._container is not None and self._folder is not None
            container, self._container = self._container, None
            container.close()
            self._folder.remove(self.journal_path.name)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files as they are; a journal is kept, so that a reader misses nothing that is in it."""
        self._close_journal()
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        if self._container is not None:
            container, self._container = self._container, None
            stored = {name: count - self._first_rows[name] for name, count in self._num_stored.items()}
            self.num_removed = stored if container.is_removed else {}
            container.close()

    def _write(self, store: Callable[[], None]) -> bool:
        self._open_folder()
        was_removed = self._container is not None and self._container.is_removed
        if self._journal is not None and self._journal.is_removed:
            self._close_journal()
            self._next_rows, self._journalled_open = {}, set()
            was_removed = True
        if self._journal is None:
            self._start_journal()
        try:
            self._open_container()
            store()
        finally:
            # Rows that HDF5 did not take; none, if it was to take everything and did.
            if self.num_kept:
                self._write_journal()
        return was_removed

    def _store_chunks(self) -> None:
        """Write whole chunks to the HDF5 file."""
        free = {name: max(len(tail) - _MIN_JOURNALLED.get(name, 0), 0) for name, tail in self._tails.items()}
        self._store({name: num_rows - num_rows % TABLES[name].chunk_rows for name, num_rows in free.items()})

    def _store_all(self) -> None:
        """Write all rows to the HDF5 file; operations that are still open become rows like the others."""
        num_open = len(self._open_rows)
        self.add("collectives", self._open_rows)
        self._open_rows = self._open_rows[:0]
        try:
            self._store({name: len(tail) for name, tail in self._tails.items()}, is_last=True)
        finally:
            tail = self._tails["collectives"]
            num_done = max(len(tail) - num_open, 0)
            self._tails["collectives"], self._open_rows = tail[:num_done], tail[num_done:]

    def _store(self, num_rows: Mapping[str, int], *, is_last: bool = False) -> None:
        """Write the first rows of each table's tail to the HDF5 file, chunk by chunk, until one does not fit."""
        assert self._container is not None
        if not any(num_rows.values()):
            return
        num_taken = dict.fromkeys(num_rows, 0)
        try:
            for name in _STORED_ORDER:
                rows, chunk_rows = self._tails[name][: num_rows[name]], TABLES[name].chunk_rows
                for start in range(0, len(rows), chunk_rows):
                    chunk = rows[start : start + chunk_rows]
                    self._container.append(name, self._num_stored[name] - self._first_rows[name] + start, chunk)
                    self._kept.note_chunk(name, chunk)
                    num_taken[name] += len(chunk)
        finally:
            if any(num_taken.values()):
                self._container.flush(is_last=is_last)
                self._is_journal_stale = True
            for name, count in num_taken.items():
                self._num_stored[name] += count
                self._tails[name] = self._tails[name][count:].copy() if count else self._tails[name]
            # The journal needs the space reserved for a chunk that did not fit.
            self._container.release()

    def _drop_old(self) -> None:
        """Replace the HDF5 file by one without the steps that are not kept; what is in the journal does not change.

        Row numbers go on, so file and journal fit together whichever file a kill leaves.

        Raises:
            OSError: there is no room for the new file beside the old one, which stays; the next flush tries again.
        """
        first_step = self._kept.next_first_step
        if first_step is None:
            return
        assert self._container is not None and self._folder is not None
        num_chunks = self._kept.num_dropped_chunks(first_step)
        if not num_chunks:
            return
        self._mark_waiting_steps(first_step)
        num_rows = {name: count * TABLES[name].chunk_rows for name, count in num_chunks.items()}
        first_rows = {name: self._first_rows[name] + num_rows.get(name, 0) for name in self._dtypes}
        dropped = {name: count for name, count in first_rows.items() if count}
        with self._folder.replacing(self.path.name) as descriptor:
            image = container_image(self._header, self._dtypes, first_rows=dropped, first_step=first_step)
            write_all(descriptor, image, 0)
            shorter = Container(descriptor)
            try:
                for name in self._dtypes:
                    shorter.copy_chunks(self._container, name, num_chunks.get(name, 0))
                shorter.mark_steps(first_step)
                shorter.flush()
                shorter.release()
            except BaseException:
                shorter.close()
                raise
        longer, self._container = self._container, shorter
        self._first_rows = first_rows
        self._kept.drop(first_step, num_chunks)
        longer.close()

    def _mark_waiting_steps(self, first_step: int) -> None:
        """Mark the steps that are not in the HDF5 file yet, and before the first one that is kept."""
        steps = self._tails["steps"]
        if len(steps) and steps["step"].min() < first_step:
            steps = steps.copy()
            steps["flags"] = mark_steps(steps["flags"], steps["step"], first_step)
            self._tails["steps"] = steps
            self._start_journal()

    def _write_journal(self) -> None:
        """Write the rows that the HDF5 file lacks to the journal, as far as the disk takes them."""
        try:
            if self._is_journal_stale:
                self._start_journal()
        finally:
            self._append_to_journal()

    def _start_journal(self) -> None:
        """Replace the journal atomically by a new one without the rows that the HDF5 file has.

        It begins with a row of account and the rows of the old one, so that no row is lost that the disk has taken.
        """
        assert self._folder is not None
        if not self._is_begun:
            self._refuse_existing(self._folder)
        runs = [
            Run(name, RecordKind.ROW, self._num_stored[name], self._tails[name][:num_rows])
            for name in _JOURNALLED_ORDER
            for num_rows in (max(self._num_journalled(name), _MIN_JOURNALLED.get(name, 0)),)
        ]
        runs.append(Run("collectives", RecordKind.OPEN, 0, self._still_open(is_journalled=True)))
        with self._folder.replacing(self.journal_path.name) as descriptor:
            journal = JournalFile(descriptor)
            journal.begin(encode_header(self._header, self._dtypes))
            journal.append(runs)
        self._close_journal()
        self._journal, self._is_journal_stale, self._is_begun = journal, False, True
        self._next_rows, self._journalled_open = journal.next_rows, journal.open_rows

    def _append_to_journal(self) -> None:
        assert self._journal is not None
        nothing = self._tails["account"][:0]
        self._journal.amend_account(nothing, 0)
        runs = [
            Run(name, RecordKind.ROW, self._num_stored[name] + num_rows, self._tails[name][num_rows:])
            for name in _JOURNALLED_ORDER
            for num_rows in (self._num_journalled(name),)
        ]
        try:
            self._journal.append([*runs, Run("collectives", RecordKind.OPEN, 0, self._still_open(is_journalled=False))])
        except OSError:
            waiting = self._tails["account"][self._num_journalled("account") :]
            self._journal.amend_account(waiting, sum(map(len, self.missing().values())))
            raise

    def _num_journalled(self, name: str) -> int:
        """Return how many rows of a table's tail the journal has."""
        return max(self._next_rows.get(name, 0) - self._num_stored[name], 0)

    def _still_open(self, *, is_journalled: bool) -> NDArray[np.void]:
        """Return the open operations that the journal has, or the ones it lacks."""
        rows = [row for row in self._open_rows if (row.tobytes() in self._journalled_open) == is_journalled]
        return np.array(rows, dtype=self._open_rows.dtype)

    def _open_container(self) -> None:
        """Make the HDF5 file; if somebody removed it, with what the open one still holds."""
        removed = self._container
        if removed is not None and not removed.is_removed:
            return
        assert self._folder is not None
        with self._folder.replacing(self.path.name) as descriptor:
            if removed is None:
                write_all(descriptor, container_image(self._header, self._dtypes), 0)
            else:
                removed.copy_to(descriptor)
            container = Container(descriptor)
        self._container = container
        if removed is not None:
            removed.close()

    def _open_folder(self) -> None:
        """Open the folder if it is not open yet, or was removed."""
        if self._folder is not None:
            if os.fstat(self._folder.descriptor).st_nlink:
                return
            self._folder.close()
            self._folder = None
        with self._open() as folder:
            self._folder = folder.aside()

    def _refuse_existing(self, folder: Folder) -> None:
        for path in (self.journal_path, self.path):
            if folder.has(path.name):
                raise FileExistsError(f"{path} already exists: a run never overwrites another run's trace")

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
