"""An sqlite export of Nsight Systems, opened and read within bounds.

SQLite believes a file: a page may be that of many tables, a text that of many rows, and a view may never end. So only
plain tables are read, row by row, no value is long, and there are no more rows than a file of its size can have.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder
from hpcpace.core.text import printable
from hpcpace.runs.imports.kineto_names import kernel_op, op_of, phase_of
from hpcpace.trace.schema import Op, Phase

SESSION = "TARGET_INFO_SESSION_START_TIME"
KERNELS, RUNTIME, NVTX, STRINGS = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "NVTX_EVENTS",
    "StringIds",
)
COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
MOST_ROWS = 50_000_000
_MAGIC = b"SQLite format 3\x00"
_STEP = re.compile(r"(?:^|[^a-z])(?:step|iteration|iter)[ _#:=]*([0-9]{1,9})$", re.IGNORECASE)
_MAX_NAME = 200
"""Letters of a name that are read; one that is longer says neither a step nor a phase."""
_MAX_VALUE_BYTES = 1 << 20
"""Of a text, a row and a statement: names of C++ templates have up to some ten thousand letters."""
_MIN_ROW_BYTES = 4
"""A file with more rows than that leads back to the same pages; SQLite would read them without end."""
_STEPS_PER_BYTE, _FREE_STEPS = 64, 10_000_000
"""Instructions of SQLite's machine: a row of a plain query takes some 15."""
_LOOK_EVERY = 1 << 16


@dataclass(frozen=True)
class Meaning:
    """What the name of a kernel or range says.

    Attributes:
        op: the operation of a kernel of NCCL; None where it does not say one.
        is_nccl: whether it is a kernel of NCCL.
        step: the number of a step, and what is before it, which is that of a level where ranges nest.
        phase: of a range.
    """

    op: Op | None
    is_nccl: bool
    step: tuple[str, int] | None
    phase: Phase | None

    @classmethod
    def of(cls, name: str) -> Meaning:
        """Return what a name says."""
        is_nccl = name[:4].lower() == "nccl"
        is_range = len(name) <= _MAX_NAME and ", op_id" not in name
        step = _STEP.search(name) if is_range else None
        return cls(
            op=op_of(kernel_op(name)) if is_nccl else None,
            is_nccl=is_nccl,
            step=(name[: step.start(1)], int(step.group(1))) if step else None,
            phase=phase_of(name) if is_range and step is None else None,
        )


PLAIN = Meaning.of("")
"""That of a name that says nothing."""


class Export:
    """An opened export; only plain tables of it are read, row by row, without joins and indices."""

    def __init__(self, connection: sqlite3.Connection, path: Path, size: int) -> None:
        self._connection, self._path = connection, path
        self.size = size
        self._max_rows, self._num_text_bytes = size // _MIN_ROW_BYTES, 0
        rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        self._columns = {
            name: {row[1] for row in connection.execute(f'PRAGMA table_xinfo("{name}")') if row[6] == 0}
            for name, sql in rows
            if name in (KERNELS, RUNTIME, NVTX, STRINGS, *COPIES, SESSION, "META_DATA_EXPORT", "TARGET_INFO_SYSTEM_ENV")
            # So SQLite writes it down, whatever the statement was; one of a virtual table goes on otherwise.
            and str(sql).startswith("CREATE TABLE ")
        }
        self.meanings = self._meanings()

    def has(self, table: str, *columns: str) -> bool:
        """Return whether a table has some columns."""
        return set(columns) <= self._columns.get(table, set())

    def column(self, table: str, *names: str) -> str:
        """Return the first of some names that a table has as a column, `NULL` without one."""
        return next((name for name in names if self.has(table, name)), "NULL")

    def rows(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield some columns of the rows of a table.

        Raises:
            TraceError: the table has more rows than `MOST_ROWS`, or than the file has bytes for.
        """
        for number, row in enumerate(self._connection.execute(f"SELECT {', '.join(columns)} FROM {table} NOT INDEXED")):
            if number >= MOST_ROWS:
                raise TraceError(f"{self._path}: {table} has more rows than {MOST_ROWS}: export a shorter range")
            if number >= self._max_rows:
                raise TraceError(f"{self._path}: {table} has more rows than its bytes can hold; is it damaged?")
            yield row

    def rows_with_text(self, table: str, text: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield some columns of the rows of a table, and behind them the begin of a text; None where it is no text.

        Raises:
            TraceError: as for `rows`, or texts have more bytes than the file, so that many rows have the same.
        """
        size = f"CASE typeof({text}) WHEN 'text' THEN length(CAST({text} AS BLOB)) ELSE 0 END"
        for *values, found, num_bytes in self.rows(table, *columns, text_column(text), size):
            self._num_text_bytes += num_bytes
            if self._num_text_bytes > self.size:
                raise TraceError(f"{self._path}: {table} has more text than the file has bytes; is it damaged?")
            yield *values, found

    def _meanings(self) -> dict[int, Meaning]:
        """Return what each text means to which rows refer, by its number."""
        if not self.has(STRINGS, "id", "value"):
            return {}
        found = {}
        for number, text in self.rows_with_text(STRINGS, "value", "id"):
            if isinstance(number, int) and text is not None:
                meaning = Meaning.of(text)
                found[number] = PLAIN if meaning == PLAIN else meaning
        return found


def text_column(column: str) -> str:
    """Return the begin of a text as a column of a query; NULL where it is no text."""
    return f"CASE typeof({column}) WHEN 'text' THEN substr({column}, 1, {_MAX_NAME + 1}) END"


@contextmanager
def open_export(path: Path) -> Iterator[Export]:
    """Yield an export.

    Raises:
        TraceError: it cannot be read, is no database, or what is read inside of the block is of a wrong kind.
    """
    size = _checked_size(path)
    # Immutable: whatever is beside it, such as a journal, is not looked at.
    address = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(address, uri=True)) as connection:
            for limit in (sqlite3.SQLITE_LIMIT_LENGTH, sqlite3.SQLITE_LIMIT_SQL_LENGTH):
                connection.setlimit(limit, _MAX_VALUE_BYTES)
            num_left = iter(range((_STEPS_PER_BYTE * size + _FREE_STEPS) // _LOOK_EVERY))
            connection.set_progress_handler(lambda: next(num_left, None) is None, _LOOK_EVERY)
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            yield Export(connection, path, size)
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise TraceError(f"cannot read {path}: {printable(str(error))[:160]}; is it damaged or cut off?") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{path} has values of a kind that no export has ({printable(str(error))[:120]})") from error


def _checked_size(path: Path) -> int:
    try:
        with Folder.open(path.parent) as folder:
            descriptor = folder.open_file(path.name)
            with os.fdopen(descriptor, "rb") as file:
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise TraceError(f"{path} is no sqlite database: write one with nsys export --type sqlite")
                return os.fstat(descriptor).st_size
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
