"""A table of a trace as arrays, and one rank's trace in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.schema import TraceHeader


class Table(Mapping[str, NDArray[Any]]):
    """Columns of equal length, by name; `len()` is the number of rows.

    Args:
        columns: 1-D arrays of one length.
    """

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        self._columns = dict(columns)
        lengths = {len(column) for column in self._columns.values()}
        if len(lengths) > 1:
            raise ValueError(f"the columns of a table differ in length: {sorted(lengths)}")
        self._num_rows = lengths.pop() if lengths else 0

    @classmethod
    def from_rows(cls, rows: NDArray[np.void]) -> Table:
        """Return the table of a structured array."""
        return cls({column: np.ascontiguousarray(rows[column]) for column in rows.dtype.names or ()})

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self._columns[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return self._num_rows

    def __contains__(self, column: object) -> bool:
        return column in self._columns

    def __repr__(self) -> str:
        return f"Table({self._num_rows} rows: {', '.join(self._columns)})"

    @property
    def size_bytes(self) -> int:
        """The memory that the columns take."""
        return sum(column.nbytes for column in self._columns.values())

    def select(self, mask: NDArray[np.bool_] | NDArray[np.integer[Any]] | slice) -> Table:
        """Return the rows under a mask, of these numbers, or of a slice."""
        return Table({name: column[mask] for name, column in self._columns.items()})


class GroupTable(Table):
    """The table `groups` with the texts of each group only once, because thousands of ranks name thousands of members.

    Args:
        table: the table of the file.
    """

    def __init__(self, table: Table) -> None:
        super().__init__({name: table[name] for name in ("id", "rank")})
        numbers = self["id"]
        self._numbers, last = np.unique(numbers[::-1], return_index=True)
        self._texts = {name: table[name][len(numbers) - 1 - last] for name in ("name", "backend")}

    @classmethod
    def of_parts(
        cls, columns: Mapping[str, NDArray[Any]], numbers: NDArray[Any], texts: Mapping[str, NDArray[Any]]
    ) -> GroupTable:
        """Return a table whose groups are known.

        Args:
            columns: `id` and `rank`.
            numbers: the numbers of the groups, ascending.
            texts: `name` and `backend` of each.
        """
        table = cls.__new__(cls)
        Table.__init__(table, columns)
        table._numbers, table._texts = numbers, dict(texts)
        return table

    def __getitem__(self, column: str) -> NDArray[Any]:
        texts = self._texts.get(column) if column not in self._columns else None
        return self._columns[column] if texts is None else texts[np.searchsorted(self._numbers, self["id"])]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._columns, *self._texts))

    def __contains__(self, column: object) -> bool:
        return column in self._columns or column in self._texts

    def select(self, mask: NDArray[np.bool_] | NDArray[np.integer[Any]] | slice) -> Table:
        """Return the rows under a mask, of these numbers, or of a slice."""
        return Table({name: self[name][mask] for name in self})

    def share(self, known: dict[bytes, NDArray[Any]]) -> int:
        """Replace columns by equal ones of other ranks, and return the bytes of the columns that are new.

        Args:
            known: columns by their digest; new ones are added.
        """
        num_new = 0
        for name, column in self._columns.items():
            digest = blake2b(column.data, digest_size=16).digest()
            if digest not in known:
                known[digest] = column
                num_new += column.nbytes
            self._columns[name] = known[digest]
        return num_new


def join_tables(tables: Sequence[Table]) -> Table:
    """Return the rows of all tables, at least one and all with the same columns."""
    tables = [table for table in tables if len(table)] or tables[:1]
    if len(tables) == 1:
        return tables[0]
    return Table({name: np.concatenate([table[name] for table in tables]) for name in tables[0]})


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank.

    Attributes:
        tables: every table of the schema; those that the file lacks have no rows.
        problems: what was left out and why, one sentence each; empty for an intact file.
        closed_cleanly: whether the rank ended its recording; otherwise it was killed, or is still running.
        open_collectives: operations that were entered but not completed at the last flush, with `exit_kind` 2.
        first_step: the first step of which rows were kept, where the rank was told to keep only the last ones; else 0.
    """

    path: Path
    header: TraceHeader
    tables: dict[str, Table]
    problems: tuple[str, ...]
    closed_cleanly: bool
    open_collectives: Table
    first_step: int = 0

    @property
    def size_bytes(self) -> int:
        """The memory that its tables take."""
        return sum(table.size_bytes for table in self.tables.values())
