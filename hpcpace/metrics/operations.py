"""The communication operations of all ranks as one table, and which ranks wait for which in an operation.

Process groups have the same numbers on all ranks. All wait for all, all for the root, the root for all, or the two
sides of a message for each other. Rows are selected by comparing bytes, which is ten times faster than a lookup table
or `np.isin`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.pool import num_threads, run_threads
from hpcpace.metrics import Bools, Bytes, Ints
from hpcpace.trace.schema import ExitKind, Op

FROM_ROOT = (Op.BROADCAST, Op.SCATTER)
"""The root sends: all others wait for it. Who is held until all have come (`held_until`) waits for all."""
TO_ROOT = (Op.REDUCE, Op.GATHER)
"""The root receives: it waits for all others."""
MESSAGES = (Op.SEND, Op.RECV)


def is_one_of(op: Bytes, ops: Sequence[IntEnum]) -> Bools:
    """Return which operations, or phases, are one of `ops`, bool, (num_operations,).

    Args:
        op: operations, (num_operations,).
        ops: the ones to find, at least one.
    """
    found: Bools = op == ops[0]
    for other in ops[1:]:
        found |= op == other
    return found


def synchronises(op: Bytes) -> Bools:
    """Return which operations no rank leaves before all have entered, bool, (num_operations,)."""
    return ~is_one_of(op, (*FROM_ROOT, *TO_ROOT, *MESSAGES))


def releases_others(op: Bytes, is_root: Bools) -> Bools:
    """Return which rows others wait for, bool, (num_operations,); both sides of a message count.

    Args:
        op: operations, (num_operations,).
        is_root: whether the row's rank is the root of the operation, (num_operations,); without meaning where the
            operation has no root.
    """
    return np.where(is_one_of(op, FROM_ROOT), is_root, ~(is_one_of(op, TO_ROOT) & is_root))


def depends_on_others(op: Bytes, is_root: Bools) -> Bools:
    """Return which rows wait for a side of their operation, bool, (num_operations,): all but senders to a root.

    Arguments are as in `releases_others`. The side is that of `sides`; a sender of a message need not wait.
    """
    return ~is_one_of(op, TO_ROOT) | is_root


def sides(op: Bytes, is_root: Bools) -> tuple[Bytes, Bytes]:
    """Return the side of its operation that each row is on, and the side that it waits for, uint8, (num_operations,).

    The sides are the sender of a message (0) and its receiver (1), and a root (0) and the others (1). In other
    operations all are on side 0, and wait for it.

    Args:
        op, is_root: as in `releases_others`.
    """
    to_root = is_one_of(op, TO_ROOT)
    own = (op == Op.RECV) | ((to_root | is_one_of(op, FROM_ROOT)) & ~is_root)
    return own.astype(np.uint8), ((op == Op.SEND) | to_root).astype(np.uint8)


def held_until(exit_ns: Ints, blocked_ns: Ints, last_ns: Ints) -> Bools:
    """Return which members of broadcasts and scatters were blocked across the last enter of all: they waited for it.

    gloo holds a root until its readers come, and ranks that pass the data on likewise. Who was not blocked then, or had
    ended before, waits for the root alone: its operation is asynchronous, its data is buffered (NCCL), or it does
    not pass it on.

    Args:
        exit_ns, blocked_ns: of each member.
        last_ns: the last enter of all members of its operation.
    """
    return np.asarray((exit_ns >= last_ns) & (exit_ns - blocked_ns <= last_ns))


def awaited(operations: Operations, rows: slice, instance: Ints, last_ns: Ints) -> Ints:
    """Return where the enter is in `last_ns` that each of some rows waits for, if it waits, int64, (num_rows,).

    It is the last one of the side that it waits for, or of all members of a broadcast that held it (`held_until`).

    Args:
        operations: rows of all ranks.
        rows: some of them.
        instance: the operation of each of these, (num_rows,).
        last_ns: the last enter of both sides of each operation, one behind the other, (2 num_instances,).
    """
    op, is_root = operations.op[rows], operations.rank[rows] == operations.peer[rows]
    found: Ints = 2 * instance + sides(op, is_root)[1]
    sent = np.flatnonzero(is_one_of(op, FROM_ROOT))
    later = 2 * instance[sent]
    later += last_ns[later + 1] > last_ns[later]
    is_held = held_until(operations.exit_ns[rows][sent], operations.blocked_ns[rows][sent], last_ns[later])
    found[sent[is_held]] = later[is_held]
    return found


@cache
def operation_roles() -> Bytes:
    """Return what the kernels ask of an operation, not as its root and as its root, uint8, (256, 2).

    A bit each, from the lowest: its side, and the one that it waits for (`sides`), if it waits for one; no rank leaves
    before all have entered; it is the sender of a message; its root sends.
    """
    op, is_root = np.arange(np.iinfo(np.uint8).max + 1, dtype=np.uint8)[:, None], np.array([[False, True]])
    answers = (
        *sides(op, is_root),
        depends_on_others(op, is_root),
        synchronises(op),
        op == Op.SEND,
        is_one_of(op, FROM_ROOT),
    )
    roles = sum(answer.astype(np.uint8) << bit for bit, answer in enumerate(answers))
    return np.ascontiguousarray(np.broadcast_to(roles, (len(op), 2)), np.uint8)


UNKNOWN_GROUP = -1
_MAX_KEPT = 1024  # memory: groups kept for ranks that name the same one
_COLUMNS = {
    **dict.fromkeys(
        ("rank", "step", "group", "seq", "size_bytes", "peer", "enter_ns", "exit_ns", "blocked_ns"), np.int64
    ),
    **dict.fromkeys(("op", "exit_kind"), np.uint8),
}
_OWN_NAMES = {name: name for name in ("step", "seq", "op", "peer", "blocked_ns", "exit_kind")} | {"size_bytes": "bytes"}


@dataclass(frozen=True, order=True)
class ProcessGroup:
    """A process group: its name, its members' ranks, ascending, and whether its operations are those of devices."""

    name: str
    ranks: tuple[int, ...]
    is_on_device: bool = field(default=False, compare=False)

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
    rank: Ints
    step: Ints
    group: Ints
    seq: Ints
    op: Bytes
    size_bytes: Ints
    peer: Ints
    enter_ns: Ints
    exit_ns: Ints
    blocked_ns: Ints
    exit_kind: Bytes

    def __len__(self) -> int:
        return len(self.rank)

    @cached_property
    def slices(self) -> list[slice] | None:
        """The rows of each rank; None if they are not ordered by rank."""
        return rank_slices(self.rank)

    @cached_property
    def bounds(self) -> Ints:
        """Where the rows of each of `slices` begin, and the last ones end, (num_slices + 1,)."""
        return np.array([0, *(rows.stop for rows in self.slices or ())], np.int64)

    @property
    def group_size(self) -> Ints:
        """Members of each row's group, (num_operations,); 0 where the group is unknown."""
        return np.append(self.group_sizes, 0)[self.group]

    @property
    def group_sizes(self) -> Ints:
        """Members of each group, (num_groups,)."""
        return np.array([len(group.ranks) for group in self.groups], np.int64)


def select_rows(operations: Operations, rows: slice | Ints) -> Operations:
    """Return some rows: a range of them without copies, or those of these numbers."""
    columns: dict[str, Any] = {name: getattr(operations, name)[rows] for name in _COLUMNS}
    return replace(operations, **columns)


def join_rows(parts: Sequence[Operations]) -> Operations:
    """Return the rows of all parts, at least one and all with the same groups."""
    columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
    return replace(parts[0], **columns)


def rank_slices(rank: Ints) -> list[slice] | None:
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
    enter_ns: Ints
    exit_ns: Ints


def completed(collectives: Mapping[str, NDArray[Any]]) -> Bools:
    """Return which rows of a `collectives` table were completed, no earlier than they began, bool, (num_rows,)."""
    ends: Bools = collectives["exit_ns"] >= collectives["enter_ns"]
    ends &= collectives["exit_kind"] != ExitKind.NEVER
    return ends


def failed_operations(operations: Operations, instance: Ints, num_instances: int) -> Bools:
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
    numbers, all_ranks = (np.asarray(table[column], np.int64) for column in ("id", "rank"))
    names, backends = table["name"], table["backend"]
    order = np.argsort(numbers, kind="stable")
    found = {}
    for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []:
        last = rows[-1]
        is_on_device = is_of_devices(bytes(backends[last]))
        found[int(numbers[last])] = _group(bytes(names[last]), all_ranks[rows].tobytes(), is_on_device)
    return found


@lru_cache(maxsize=_MAX_KEPT)
def _group(name: bytes, ranks: bytes, is_on_device: bool) -> ProcessGroup:
    """Return a group, cached because thousands of ranks name the same one with thousands of members."""
    members = tuple(np.unique(np.frombuffer(ranks, np.int64)).tolist())
    return ProcessGroup(name.decode(errors="replace"), members, is_on_device=is_on_device)


def is_of_devices(backend: bytes) -> bool:
    """Return whether a backend knows devices alone: NCCL and its kin of other vendors (RCCL, HCCL, XCCL).

    oneCCL, `ccl`, knows hosts, too.
    """
    return backend.endswith(b"ccl") and backend != b"ccl"


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


def shows_all_members(operations: Operations) -> Bools:
    """Return whose completion shows that all members of the group have entered, bool, (num_operations,).

    These are synchronising operations on every rank, and reduce and gather on their root. An all_to_all does not show
    it, because with uneven parts a rank need not hear from all. Nor does an empty operation, which may send nothing.
    """
    to_root = is_one_of(operations.op, TO_ROOT) & (operations.rank == operations.peer)
    return np.asarray(meets_all(operations.op, operations.size_bytes) | (to_root & (operations.size_bytes > 0)))


def meets_all(op: Bytes, size_bytes: Ints) -> Bools:
    """Return which operations show on every rank that all members have entered, bool, (num_operations,).

    Args:
        op: operations, (num_operations,).
        size_bytes: their content.
    """
    return np.asarray(synchronises(op) & (op != Op.ALL_TO_ALL) & ((op == Op.BARRIER) | (size_bytes > 0)))


def shows_peer(operations: Operations) -> Bools:
    """Return whose completion shows that the rank `peer` has entered, bool, (num_operations,).

    These are broadcast and scatter on all ranks but the root, and recv. A completed send shows nothing, because small
    messages are buffered.
    """
    op, is_root = operations.op, operations.rank == operations.peer
    from_peer = (is_one_of(op, FROM_ROOT) & ~is_root) | (op == Op.RECV)
    return np.asarray((operations.size_bytes > 0) & (operations.peer >= 0) & from_peer)


def op_name(op: int) -> str:
    """Return the name of an operation, or its number if it comes from a newer hpcpace and is unknown to this one."""
    return Op(op).name.lower() if op in Op._value2member_map_ else f"op {op}"


MESSAGE_NAMES = tuple(op_name(op) for op in MESSAGES)
