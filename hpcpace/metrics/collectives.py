"""Communication operations of all ranks as one table, matched across ranks by name and number, never by time.

A collective is known by (members and name of its group, seq, op); a message by (group, source, destination, seq).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.schema import ExitKind, Op

UNKNOWN_GROUP = -1


@dataclass(frozen=True, order=True)
class Group:
    """A process group: its name and its members' ranks, ascending."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The completed operations of all ranks; columns of length num_operations, ordered by rank.

    Attributes:
        groups: what `group` indexes.
        rank: the rank that recorded the row.
        group: index into `groups`, -1 where the rank's file does not name the group.
        peer: rank of the peer or root, -1 where there is none.
        enter_ns, exit_ns: on the common clock.
        blocked_ns: time in which the caller was blocked on it.
        exit_kind: how its end became known, `hpcpace.trace.schema.ExitKind`.
    """

    groups: tuple[Group, ...]
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

    @property
    def group_size(self) -> NDArray[np.int64]:
        """Members of each row's group, (num_operations,); 0 where the group is unknown."""
        sizes = np.array([*(len(group.ranks) for group in self.groups), 0], np.int64)
        return sizes[self.group]


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
    """Return which rows of a `collectives` table ended and end no earlier than they begin, bool, (num_rows,)."""
    ends: NDArray[np.bool_] = collectives["exit_ns"] >= collectives["enter_ns"]
    ends &= collectives["exit_kind"] != ExitKind.NEVER
    return ends


def groups_of(table: Mapping[str, NDArray[Any]]) -> dict[int, Group]:
    """Return the process groups that a rank's table `groups` names, by their number in its file."""
    members: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for number, rank, name in zip(table["id"].tolist(), table["rank"].tolist(), table["name"].tolist(), strict=True):
        members.setdefault(number, []).append(rank)
        names[number] = name.decode(errors="replace")
    return {number: Group(names[number], tuple(sorted(set(ranks)))) for number, ranks in members.items()}


def gather_operations(parts: Sequence[RankOperations]) -> Operations:
    """Return the operations of all ranks as one table, with groups numbered alike on all of them."""
    named = [groups_of(part.groups) for part in parts]
    groups = tuple(sorted({group for table in named for group in table.values()}))
    number = {group: index for index, group in enumerate(groups)}

    def renumbered(part: RankOperations, table: dict[int, Group]) -> NDArray[np.int64]:
        lookup = np.full(1 << 16, UNKNOWN_GROUP, np.int64)
        for own, group in table.items():
            lookup[own] = number[group]
        return lookup[np.asarray(part.collectives["group"], np.uint16)]

    def joined(columns: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
        return np.concatenate([np.zeros(0, dtype), *(np.asarray(column, dtype) for column in columns)])

    def column(name: str, dtype: type[np.generic] = np.int64) -> NDArray[Any]:
        return joined([part.collectives[name] for part in parts], dtype)

    return Operations(
        groups=groups,
        rank=joined([np.full(len(part.enter_ns), part.rank) for part in parts], np.int64),
        step=column("step"),
        group=joined([renumbered(part, table) for part, table in zip(parts, named, strict=True)], np.int64),
        seq=column("seq"),
        op=column("op", np.uint8),
        size_bytes=column("bytes"),
        peer=column("peer"),
        enter_ns=joined([part.enter_ns for part in parts], np.int64),
        exit_ns=joined([part.exit_ns for part in parts], np.int64),
        blocked_ns=column("blocked_ns"),
        exit_kind=column("exit_kind", np.uint8),
    )


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Which rows belong together.

    Attributes:
        order: row numbers, those of one operation side by side, (num_operations,).
        starts: where each operation begins in `order`, (num_matches + num_incomplete,).
        instance: the operation of each row, an index into `starts`, (num_operations,).
        is_matched: whether every member of the row's operation is there once, with a known clock, bool,
            (num_operations,).
    """

    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    instance: NDArray[np.int64]
    is_matched: NDArray[np.bool_]


def match(operations: Operations, *, unknown_clocks: Sequence[int] = ()) -> Matching:
    """Return which rows of all ranks are one operation.

    Args:
        operations: rows of all ranks.
        unknown_clocks: ranks whose times cannot be compared; no operation with one of them counts as matched.
    """
    op = operations.op.astype(np.int64)
    is_message = (op == Op.SEND) | (op == Op.RECV)
    source = np.where(op == Op.SEND, operations.rank, np.where(op == Op.RECV, operations.peer, -1))
    target = np.where(op == Op.SEND, operations.peer, np.where(op == Op.RECV, operations.rank, -1))
    keys = (np.where(is_message, Op.SEND, op), source, target, operations.seq, operations.group)
    order = np.lexsort((operations.rank, *keys))
    differs = np.zeros(len(order), np.bool_)
    same_rank = np.zeros(len(order), np.bool_)
    if len(order):
        differs[0] = True
        for key in keys:
            differs[1:] |= np.diff(key[order]) != 0
        same_rank[1:] = (np.diff(operations.rank[order]) == 0) & ~differs[1:]
    unusable = same_rank | np.isin(operations.rank[order], np.asarray(unknown_clocks, np.int64))
    starts = np.flatnonzero(differs)
    instance = np.empty(len(order), np.int64)
    instance[order] = np.cumsum(differs) - 1

    present = np.diff(np.append(starts, len(order)))
    expected = np.where(is_message, 2, operations.group_size)[order[starts]] if len(order) else present
    is_usable = np.bincount(instance[order], weights=unusable, minlength=len(starts)) == 0
    is_known = operations.group[order[starts]] != UNKNOWN_GROUP if len(order) else np.zeros(0, np.bool_)
    is_complete = (present == expected) & is_usable & is_known
    return Matching(order=order, starts=starts, instance=instance, is_matched=is_complete[instance])
