"""Where rows go: whole chunks to HDF5, the rest to the journal, and what happens when the disk does not take them.

One thread owns a writer. Rows that could not be written stay in memory, and every flush tries again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.container import Container, container_image
from hpcpace.trace.encoding import row_dtypes
from hpcpace.trace.journal import RecordKind, encode_header, encode_records
from hpcpace.trace.schema import TABLES, TraceHeader


class TraceWriter:
    """Writes the trace file and journal of one rank.

    The folder is held open and files are named relative to it: a run that is moved while in use keeps all its rows.
    """

    def __init__(self, path: Path, header: TraceHeader, *, has_enqueue: bool = False) -> None:
        self.path = path
        self.journal_path = path.with_suffix(".journal")
        self._header = header
        self._dtypes = row_dtypes(has_enqueue=has_enqueue)
        self._numbers = {name: number for number, name in enumerate(self._dtypes)}
        self._container: Container | None = None
        self._folder: int | None = None
        self._journal: int | None = None
        self._journal_end = 0
        self._is_journal_stale = False
        self._num_stored = dict.fromkeys(self._dtypes, 0)
        self._num_journalled = dict.fromkeys(self._dtypes, 0)
        self._tails = {name: np.zeros(0, dtype=dtype) for name, dtype in self._dtypes.items()}
        self._open_rows = self._tails["collectives"]
        self._journalled_open: set[bytes] = set()

    @property
    def num_kept(self) -> int:
        """Rows in memory, whether the journal holds them or not."""
        return sum(map(len, self._tails.values()))

    def add(self, name: str, rows: NDArray[np.void]) -> None:
        """Take rows of a table; nothing is written yet."""
        if len(rows):
            self._tails[name] = np.concatenate([self._tails[name], rows])

    def set_open(self, rows: NDArray[np.void]) -> None:
        """Take the operations that are entered and not completed now."""
        self._open_rows = rows

    def flush(self) -> bool:
        """Write what there is; return whether the files had been removed and were made again.

        Raises:
            OSError: a file cannot be made or written. Rows stay in memory, and the next flush tries again.
        """
        self._open_folder()
        was_removed = self._renew_if_removed()
        if self._journal is None:
            self._start_journal()
        try:
            if self._container is None:
                self._create_container()
            self._store({name: len(tail) - len(tail) % TABLES[name].chunk_rows for name, tail in self._tails.items()})
        finally:
            if self._is_journal_stale:
                self._start_journal()
            else:
                self._append_to_journal()
        return was_removed

    def close(self) -> None:
        """Write everything into the HDF5 file, close it and remove the journal.

        Raises:
            OSError: something could not be written; the journal stays where it is.
        """
        try:
            self.flush()
            self.add("collectives", self._open_rows)
            self._store({name: len(tail) for name, tail in self._tails.items()})
        except BaseException:
            self.abandon()
            raise
        assert self._container is not None
        self._container.close()
        self._container = None
        os.unlink(self._place(self.journal_path))
        self.abandon()

    def abandon(self) -> None:
        """Let go of the files as they are; a journal stays, so that a reader misses nothing that is in it."""
        self._close_journal()
        self._close_folder()
        if self._container is not None:
            self._container.close()
            self._container = None

    def _store(self, num_rows: Mapping[str, int]) -> None:
        tables = {name: self._tails[name][:count] for name, count in num_rows.items() if count}
        if not tables:
            return
        assert self._container is not None
        self._container.append(self._num_stored, tables)
        for name, rows in tables.items():
            self._num_stored[name] += len(rows)
            self._tails[name] = self._tails[name][len(rows) :].copy()
        self._is_journal_stale = True

    def _append_to_journal(self) -> None:
        new_open = [row for row in self._open_rows if row.tobytes() not in self._journalled_open]
        content = b"".join(self._records(np.array(new_open, dtype=self._open_rows.dtype), self._num_journalled))
        self._write_at(self._journal, content, self._journal_end)
        self._journalled(len(content), self._journal_end)

    def _start_journal(self) -> None:
        """Write a journal of the rows that HDF5 does not hold, and put it in the place of the old one at once."""
        content = encode_header(self._header, self._dtypes) + b"".join(self._records(self._open_rows, {}))
        if self._journal is None:
            self._refuse_existing(self.journal_path)
            self._refuse_existing(self.path)
        place = self._place(self.journal_path)
        temporary = place.with_suffix(".journal-new")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            self._write_at(descriptor, content, 0)
            os.replace(temporary, place)
        except BaseException:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
            raise
        self._close_journal()
        self._journal, self._is_journal_stale = descriptor, False
        self._journalled_open.clear()
        self._journalled(len(content), 0)

    def _journalled(self, size_bytes: int, offset: int) -> None:
        self._journal_end = offset + size_bytes
        self._journalled_open.update(row.tobytes() for row in self._open_rows)
        for name, tail in self._tails.items():
            self._num_journalled[name] = self._num_stored[name] + len(tail)

    def _records(self, open_rows: NDArray[np.void], first_rows: Mapping[str, int]) -> Iterable[bytes]:
        for name, tail in self._tails.items():
            first = max(first_rows.get(name, 0), self._num_stored[name])
            yield encode_records(self._numbers[name], RecordKind.ROW, first, tail[first - self._num_stored[name] :])
        yield encode_records(self._numbers["collectives"], RecordKind.OPEN, 0, open_rows)

    def _write_at(self, descriptor: int | None, content: bytes, offset: int) -> None:
        assert descriptor is not None
        view, end = memoryview(content), offset
        try:
            while view:
                size = os.pwrite(descriptor, view, end)
                view, end = view[size:], end + size
        except OSError:
            # What a full disk took of it is cut off, so that the journal ends with a whole record.
            os.ftruncate(descriptor, offset)
            raise

    def _create_container(self) -> None:
        image = container_image(self._header, self._dtypes)
        place = self._place(self.path)
        temporary = place.with_suffix(".h5-new")
        try:
            temporary.write_bytes(image)
            os.replace(temporary, place)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._container = Container(place)

    def _renew_if_removed(self) -> bool:
        """Make files again where somebody removed them, with what the open ones still hold."""
        if self._journal is None:
            return False
        is_journal_removed = os.fstat(self._journal).st_nlink == 0
        if self._container is not None and self._container.is_removed:
            place = self._place(self.path)
            temporary = place.with_suffix(".h5-new")
            self._container.copy_to(temporary)
            os.replace(temporary, place)
            renewed = Container(place)
            self._container.close()
            self._container, self._is_journal_stale = renewed, True
            return True
        self._is_journal_stale |= is_journal_removed
        return is_journal_removed

    def _open_folder(self) -> None:
        """Make and open the folder where it is not open yet, or was removed."""
        if self._folder is not None and os.fstat(self._folder).st_nlink:
            return
        self._close_folder()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _place(self, path: Path) -> Path:
        """Return a path that names a file of the open folder, wherever that was moved to."""
        return Path(f"/proc/self/fd/{self._folder}", path.name)

    def _refuse_existing(self, path: Path) -> None:
        if self._place(path).exists():
            raise FileExistsError(f"{path} exists already; a run never overwrites another one's trace")

    def _close_folder(self) -> None:
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def _close_journal(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None
