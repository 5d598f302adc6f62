"""A table of a trace as arrays, and what one rank's trace is once read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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

    def select(self, mask: NDArray[np.bool_] | NDArray[np.integer[Any]] | slice) -> Table:
        """Return the rows under a mask, of these numbers, or of a slice."""
        return Table({name: column[mask] for name, column in self._columns.items()})


def join_tables(tables: Sequence[Table]) -> Table:
    """Return the rows of all tables, at least one, that have the same columns."""
    tables = [table for table in tables if len(table)] or tables[:1]
    if len(tables) == 1:
        return tables[0]
    return Table({name: np.concatenate([table[name] for table in tables]) for name in tables[0]})


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank.

    Attributes:
        tables: every table of the schema; one that the file does not hold has no rows.
        problems: what was left out and why, one sentence each; empty for a sound file.
        closed_cleanly: whether the rank ended its recording; else it was killed, or runs still.
        open_collectives: operations that were entered and not completed at the last flush, with `exit_kind` 2.
    """

    path: Path
    header: TraceHeader
    tables: dict[str, Table]
    problems: tuple[str, ...]
    closed_cleanly: bool
    open_collectives: Table
