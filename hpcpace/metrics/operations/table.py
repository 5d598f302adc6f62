"""The communication operations of all ranks as one table, with the same numbers for process groups on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.pool import num_threads, run_threads
from hpcpace.trace.schema import ExitKind

UNKNOWN_GROUP = -1
_COLUMNS = {
    **dict.fromkeys(
        ("rank", "step", "group", "seq", "size_bytes", "peer", "enter_ns", "exit_ns", "blocked_ns"), np.int64
    ),
    **dict.fromkeys(("op", "exit_kind"), np.uint8),
}
_OWN_NAMES = {name: name for name in ("step", "seq", "op", "peer", "blocked_ns", "exit_kind")} | {"size_bytes": "bytes"}


@dataclass(frozen=True, order=True)
class ProcessGroup:
    """A process group: its name and its members' ranks, ascending."""

    name: str
    ranks: tuple[int, ...]

    def __hash__(self) -> int:
        # Hashing thousands of members each time would be slow.
        return hash((self.name, len(self.ranks), self.ranks[:1], self.ranks[-1:]))


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The completed operations of all ranks; columns of length num_operations, ordered by rank.

    Attributes:
        groups: what `group` indexes.
        rank: the rank that recorded the row.
        group: index into `groups`, -1 if the rank's file does not name the group.
        peer: rank of the peer or root, -1 for none.
        enter_ns, exit_ns: on the common clock.
        blocked_ns: time in which the caller was blocked on it.
        exit_kind: how its end became known, `hpcpace.trace.schema.ExitKind`.
    """

    groups: tuple[ProcessGroup, ...]
    rank: NDArray[np.int64]
    step: NDArray[np.int64]
    group: NDArray[np.int64]
    seq: NDArray[np.int64]
    op: NDArray[np.uint8]
    size_bytes: NDArray[np.int64]
    peer: NDArray[np.int64]
    enter_ns: NDArray[np.int64]
    exit_ns: NDArray[np.int64]
    blocked_ns: NDArray[np.int64]
    exit_kind: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.rank)

    @cached_property
    def slices(self) -> list[slice] | None:
        """The rows of each rank; None if they are not ordered by rank."""
        return rank_slices(self.rank)

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """Where the rows of each of `slices` begin, and the last ones end, (num_slices + 1,)."""
        return np.array([0, *(rows.stop for rows in self.slices or ())], np.int64)

    @property
    def group_size(self) -> NDArray[np.int64]:
        """Members of each row's group, (num_operations,); 0 where the group is unknown."""
        return np.append(self.group_sizes, 0)[self.group]

    @property
    def group_sizes(self) -> NDArray[np.int64]:
        """Members of each group, (num_groups,)."""
        return np.array([len(group.ranks) for group in self.groups], np.int64)


def select_rows(operations: Operations, rows: slice | NDArray[np.int64]) -> Operations:
    """Return some rows: a range of them without copies, or those of these numbers."""
    columns: dict[str, Any] = {name: getattr(operations, name)[rows] for name in _COLUMNS}
    return replace(operations, **columns)


def join_rows(parts: Sequence[Operations]) -> Operations:
    """Return the rows of all parts, at least one and all with the same groups."""
    columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
    return replace(parts[0], **columns)


def rank_slices(rank: NDArray[np.int64]) -> list[slice] | None:
    """Return the rows of each rank; None if they are not ordered by rank.

    Args:
        rank: the rank of each row, (num_operations,).
    """
    changes = np.flatnonzero(rank[1:] != rank[:-1]) + 1
    if (rank[changes] < rank[changes - 1]).any():
        return None
    bounds = [0, *changes.tolist(), len(rank)] if len(rank) else [0]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def shares(slices: Sequence[slice]) -> list[Sequence[slice]]:
    """Return the slices divided evenly among the threads."""
    size = max(-(-len(slices) // num_threads()), 1)
    return [slices[first : first + size] for first in range(0, len(slices), size)] or [slices]


@dataclass(frozen=True, kw_only=True)
class RankOperations:
    """The completed operations of one rank.

    Attributes:
        collectives: rows of its table `collectives`.
        groups: its table `groups`.
        enter_ns, exit_ns: on the common clock, each (num_rows,).
    """

    rank: int
    collectives: Mapping[str, NDArray[Any]]
    groups: Mapping[str, NDArray[Any]]
    enter_ns: NDArray[np.int64]
    exit_ns: NDArray[np.int64]


def completed(collectives: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
    """Return which rows of a `collectives` table were completed, no earlier than they began, bool, (num_rows,)."""
    ends: NDArray[np.bool_] = collectives["exit_ns"] >= collectives["enter_ns"]
    ends &= collectives["exit_kind"] != ExitKind.NEVER
    return ends


def failed_operations(operations: Operations, instance: NDArray[np.int64], num_instances: int) -> NDArray[np.bool_]:
    """Return which operations ended with an error on some member, bool, (num_instances,).

    Args:
        operations: rows of all ranks.
        instance: the operation of each row, (num_operations,).
        num_instances: number of the operations.
    """
    has_failed = np.zeros(num_instances, np.bool_)
    has_failed[instance[operations.exit_kind == ExitKind.FAILED]] = True
    return has_failed


def groups_of(table: Mapping[str, NDArray[Any]]) -> dict[int, ProcessGroup]:
    """Return the process groups that a rank's table `groups` names, by their number in its file."""
    numbers = np.asarray(table["id"], np.int64)
    order = np.argsort(numbers, kind="stable")
    found = {}
    for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []:
        ranks = np.asarray(table["rank"][rows], np.int64)
        found[int(numbers[rows[0]])] = _group(bytes(table["name"][rows[-1]]), ranks.tobytes())
    return found


@lru_cache(maxsize=1024)
def _group(name: bytes, ranks: bytes) -> ProcessGroup:
    """Return a group, cached because thousands of ranks name the same one with thousands of members."""
    return ProcessGroup(name.decode(errors="replace"), tuple(np.unique(np.frombuffer(ranks, np.int64)).tolist()))


def gather_operations(parts: Sequence[RankOperations]) -> Operations:
    """Return the operations of all ranks as one table, with the same numbers for groups on all ranks."""
    # Keep one of thousands of equal groups of thousands of ranks.
    known: dict[ProcessGroup, ProcessGroup] = {}
    named = [{own: known.setdefault(group, group) for own, group in groups_of(part.groups).items()} for part in parts]
    groups = tuple(sorted({group for table in named for group in table.values()}))
    number = {group: index for index, group in enumerate(groups)}

    ends = np.cumsum([len(part.enter_ns) for part in parts], dtype=np.int64).tolist()
    num_rows = ends[-1] if ends else 0
    columns = {name: np.empty(num_rows, dtype) for name, dtype in _COLUMNS.items()}

    def fill(part: RankOperations, table: dict[int, ProcessGroup], end: int) -> None:
        rows = slice(end - len(part.enter_ns), end)
        own_groups = np.asarray(part.collectives["group"], np.int64)
        lookup = np.full(max([int(own_groups.max(initial=0)), *table]) + 1, UNKNOWN_GROUP)
        for own, group in table.items():
            lookup[own] = number[group]
        columns["rank"][rows] = part.rank
        columns["group"][rows] = lookup[own_groups]
        columns["enter_ns"][rows], columns["exit_ns"][rows] = part.enter_ns, part.exit_ns
        for name, own_name in _OWN_NAMES.items():
            columns[name][rows] = part.collectives[own_name]

    run_threads(lambda of_rank: fill(*of_rank), zip(parts, named, ends, strict=True))
    return Operations(groups=groups, **columns)
