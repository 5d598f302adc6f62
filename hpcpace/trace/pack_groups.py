"""The groups of the ranks of a pack: what many ranks have alike is stored once.

Thousands of ranks name thousands of members each. A part is a run of rows of the table `groups` with one id, name and
backend; a rank's table is some parts, one after the other.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.schema import TABLES
from hpcpace.trace.tables import GroupTable, Table, join_tables

_TEXTS = ("name", "backend")
_ALIKE = ("id", *_TEXTS)
GROUP_ROW_BYTES = 6
"""Memory that a row of `groups` takes, without the texts, which are kept once."""
MOST_GROUP_ROWS = 1 << 21
"""Members of all groups of a rank: several times the ranks of the run."""


class GroupPart(NamedTuple):
    """Consecutive rows of `groups` with one id, name and backend.

    Attributes:
        ranks: the members as they are in memory.
        texts: the bytes of `id`, `name` and `backend`.
    """

    ranks: bytes
    texts: tuple[bytes, ...]

    def rows(self) -> Table:
        """Return the rows."""
        dtype = TABLES["groups"].dtype
        ranks = np.frombuffer(self.ranks, dtype["rank"])
        alike = {
            name: np.repeat(np.frombuffer(text, dtype[name]), len(ranks))
            for name, text in zip(_ALIKE, self.texts, strict=True)
        }
        return Table({"rank": ranks, **alike})


def split_parts(groups: Table) -> tuple[GroupPart, ...]:
    """Return the parts of a rank's table."""
    if not len(groups):
        return ()
    is_first = np.logical_or.reduce([groups[name][1:] != groups[name][:-1] for name in _ALIKE])
    bounds = [0, *(np.flatnonzero(is_first) + 1).tolist(), len(groups)]
    return tuple(
        GroupPart(
            groups["rank"][begin:end].tobytes(), tuple(groups[name][begin : begin + 1].tobytes() for name in _ALIKE)
        )
        for begin, end in itertools.pairwise(bounds)
    )


class PackedGroups:
    """The groups of the ranks of a pack.

    Args:
        rows: the rows of all parts, one part after the other.
        num_rows: rows of each part, int64, (num_parts,).
        members: the numbers of the parts of each rank, one rank after the other.
        num_members: how many parts each rank has, int64, (num_ranks,).

    Raises:
        ValueError: these do not fit together.
    """

    def __init__(
        self, rows: Table, num_rows: NDArray[np.int64], members: NDArray[np.int64], num_members: NDArray[np.int64]
    ) -> None:
        if num_rows.sum() != len(rows) or (len(num_rows) and not 1 <= num_rows.min() <= num_rows.max() <= len(rows)):
            raise ValueError("its parts have other rows than the table")
        if len(members) and not 0 <= members.min() <= members.max() < len(num_rows):
            raise ValueError("ranks have parts that are not there")
        self.rows = rows
        self._num_rows, self._ends = num_rows, np.cumsum(num_rows)
        self._members = np.split(members, np.cumsum(num_members)[:-1])
        first = self._ends - num_rows
        self._ids = rows["id"][first]
        self._texts = {name: rows[name][first] for name in _TEXTS}
        self._known: dict[bytes, GroupTable] = {}
        self._last_parts: dict[bytes, tuple[NDArray[Any], NDArray[Any]]] = {}
        self._id_columns: dict[bytes, NDArray[Any]] = {}

    @property
    def sizes_bytes(self) -> NDArray[np.float64]:
        """The memory that the table of each rank takes, float64, (num_ranks,); infinity for more than any rank has."""
        num_rows = np.array([self._num_rows[parts].sum() for parts in self._members], np.float64)
        return np.where(num_rows <= MOST_GROUP_ROWS, num_rows * GROUP_ROW_BYTES, math.inf)

    def table(self, place: int) -> Table:
        """Return the table of the rank at a place with all its columns."""
        parts = self._members[place].tolist()
        return join_tables([self.rows.select(slice(0)), *(self.rows.select(self._rows_of(part)) for part in parts)])

    def group_table(self, place: int) -> GroupTable:
        """Return the table of the rank at a place, the same object for ranks with the same groups."""
        parts = self._members[place]
        key = parts.tobytes()
        if key not in self._known:
            ids, num_rows = self._ids[parts], self._num_rows[parts]
            shape = ids.tobytes() + num_rows.tobytes()
            if shape not in self._id_columns:
                self._id_columns[shape] = np.repeat(ids, num_rows)
            ranks = [self.rows["rank"][self._rows_of(part)] for part in parts.tolist()]
            columns = {"id": self._id_columns[shape], "rank": np.concatenate([self.rows["rank"][:0], *ranks])}
            numbers, last = self._last(ids)
            texts = {name: texts[parts[last]] for name, texts in self._texts.items()}
            self._known[key] = GroupTable.of_parts(columns, numbers, texts)
        return self._known[key]

    def _last(self, ids: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the numbers of groups, ascending, and the last part of each: it counts, as in a rank's own file."""
        key = ids.tobytes()
        if key not in self._last_parts:
            numbers, last = np.unique(ids[::-1], return_index=True)
            self._last_parts[key] = numbers, len(ids) - 1 - last
        return self._last_parts[key]

    def _rows_of(self, part: int) -> slice:
        return slice(int(self._ends[part] - self._num_rows[part]), int(self._ends[part]))
