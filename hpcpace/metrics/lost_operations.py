"""Operations that are not complete: entered and never left, failed, or lost with a killed rank.

A killed rank loses the rows recorded since its last flush. Operations that others completed with it show how many, at
least: a rank that left an all_reduce has seen all members enter, a receiver has seen its sender send, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Ints
from hpcpace.metrics.matching import Matching, match
from hpcpace.metrics.operations import (
    MESSAGES,
    UNKNOWN_GROUP,
    Operations,
    ProcessGroup,
    failed_operations,
    is_one_of,
    join_rows,
    meets_all,
    op_name,
    select_rows,
    shows_all_members,
    shows_peer,
)
from hpcpace.trace.schema import ExitKind, Op


@dataclass(frozen=True, kw_only=True)
class OpenOperation:
    """An operation that some rank entered and did not complete.

    Attributes:
        members: the ranks of its group; empty if the group is unknown.
        inside: members that entered and did not complete it.
        completed: members that completed it.
        absent: members with no record of it.
        age_ns: from the first enter to the end of the recording, or to the last failure where it failed on all of
            `inside`.
        inside_ns: the longest that one of `inside` is known to have been there, up to the end of its own recording.
        failed: those of `inside` for which it ended with an error, such as a timeout.
        late: those of `inside` that entered it when it had failed on another member.
    """

    op: str
    group: str
    seq: int
    step: int
    members: tuple[int, ...]
    inside: tuple[int, ...]
    completed: tuple[int, ...]
    absent: tuple[int, ...]
    age_ns: int
    inside_ns: int
    failed: tuple[int, ...] = ()
    late: tuple[int, ...] = ()


def open_operations(
    opened: Operations, done: Operations, *, end_ns: int, ends_ns: Mapping[int, int], limit: int
) -> list[OpenOperation]:
    """Return the operations that were entered and not completed, the oldest first, at most `limit`.

    Args:
        opened: rows without an end, and rows that failed.
        done: rows with an end, with the same groups.
        end_ns: when the recording ended, on the common clock.
        ends_ns: when that of each rank ended, by rank; of one that is not known, nothing counts behind its enter.
        limit: how many to return at most.
    """
    if not len(opened):
        return []
    matching = match(opened)
    first_enter = np.minimum.reduceat(opened.enter_ns[matching.order], matching.starts)
    oldest = np.argsort(first_enter, kind="stable")[:limit]
    has_failed = opened.exit_kind == ExitKind.FAILED
    entered = zip(opened.rank.tolist(), opened.enter_ns.tolist(), strict=True)
    until_ns = np.array([ends_ns.get(rank, enter_ns) for rank, enter_ns in entered], np.int64)
    inside_ns = np.maximum(np.where(has_failed, opened.exit_ns, until_ns) - opened.enter_ns, 0)
    over_ns = np.where(has_failed, opened.exit_ns, end_ns)
    return [
        _describe(opened, done, rows, int(over_ns[rows].max()) - int(first_enter[instance]), int(inside_ns[rows].max()))
        for instance, rows in ((each, np.flatnonzero(matching.instance == each)) for each in oldest.tolist())
    ]


def _describe(opened: Operations, done: Operations, rows: Ints, age_ns: int, inside_ns: int) -> OpenOperation:
    row = int(rows[0])
    op, rank, peer = int(opened.op[row]), int(opened.rank[row]), int(opened.peer[row])
    group_index = int(opened.group[row])
    group = opened.groups[group_index] if group_index != UNKNOWN_GROUP else None
    same = (done.group == group_index) & (done.seq == opened.seq[row])
    if op in (Op.SEND, Op.RECV):
        members = tuple(sorted({rank, peer} - {-1}))
        other = Op.RECV if op == Op.SEND else Op.SEND
        same &= (done.op == other) & (done.rank == peer) & (done.peer == rank)
    else:
        members = group.ranks if group else ()
        same &= done.op == op
    inside = {int(value) for value in opened.rank[rows]}
    completed = {int(value) for value in done.rank[same]} - inside
    failed = rows[opened.exit_kind[rows] == ExitKind.FAILED]
    first_failure_ns = opened.exit_ns[failed].min(initial=np.iinfo(np.int64).max)
    late = rows[opened.enter_ns[rows] > first_failure_ns]
    return OpenOperation(
        op=op_name(op),
        group=group.name if group else "",
        seq=int(opened.seq[row]),
        step=int(opened.step[row]),
        members=members,
        inside=tuple(sorted(inside)),
        completed=tuple(sorted(completed)),
        absent=tuple(sorted(set(members) - inside - completed)),
        age_ns=max(age_ns, 0),
        inside_ns=inside_ns,
        failed=tuple(sorted({int(value) for value in opened.rank[failed]})),
        late=tuple(sorted({int(value) for value in opened.rank[late]})),
    )


_NONE = -1
_NEVER = np.iinfo(np.int64).max
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Range = tuple[int, int]
"""The smallest and the largest number of some operations."""
_Channel = tuple[int, int, int]
"""What numbers operations in order for a rank: the rank, a group, and the rank that it sends to, -1 for collectives."""


@dataclass(frozen=True, kw_only=True)
class LostOperations:
    """Operations that a rank entered, as others show, but that are not in its trace.

    Attributes:
        num_operations: least number of them; of messages, only sends can be shown.
        step: the last step in which it entered one of them.
    """

    num_operations: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Records:
    """What completed operations show about lost ones; for a long run, joined from parts of it.

    Attributes:
        groups: what `group` indexes.
        rows: rows of operations that some member has no row of.
        reached: the largest number that all members of a group are shown to have entered, -1 for none, int64,
            (num_groups,).
        reached_by_root: the same for a root that others heard from, by (group, root).
        recorded: the numbers of collectives and of sends that ranks have rows of.
        num_steps_apart: the most steps by which ranks disagree on the step of an operation.
    """

    groups: tuple[ProcessGroup, ...]
    rows: Operations
    reached: Ints
    reached_by_root: Mapping[tuple[int, int], int]
    recorded: Mapping[_Channel, _Range]
    num_steps_apart: int


def records_of(done: Operations, matching: Matching) -> Records:
    """Return what completed operations show about lost ones.

    Args:
        done: completed operations of all ranks, ordered by rank.
        matching: which of them belong together.
    """
    is_message = is_one_of(done.op, MESSAGES)
    # For most operations, one row shows all that any of its rows does. Messages show nothing about members, and nor
    # does a row that ended with an error.
    op = done.op[matching.first]
    is_plain = meets_all(op, done.size_bytes[matching.first])
    is_plain &= ~failed_operations(done, matching.instance, len(matching.num_rows))
    is_plain_or_message = (is_plain | is_one_of(op, MESSAGES))[matching.instance]
    rows = np.flatnonzero(~is_plain_or_message & (done.exit_kind != ExitKind.FAILED))
    others = select_rows(done, rows)
    reached, shows_all = np.full(len(done.groups) + 1, _NONE), rows[shows_all_members(others)]
    for shown in (matching.first[is_plain], shows_all):
        np.maximum.at(reached, done.group[shown], done.seq[shown])
    heard = rows[shows_peer(others) & (others.group != UNKNOWN_GROUP)]
    is_complete = matching.is_matched
    if matching.slices and not is_complete.all():
        # A member whose clock is unknown still has its row.
        is_there = matching.num_rows[matching.instance] == np.where(is_message, 2, done.group_size)
        is_complete = is_complete | (is_there & (done.group != UNKNOWN_GROUP))
    is_apart = done.step[matching.first][matching.instance] != done.step
    return Records(
        groups=done.groups,
        rows=select_rows(done, np.flatnonzero(~is_complete)),
        reached=reached[:-1],
        reached_by_root=_last_of_each((done.group, done.peer), done.seq, heard),
        recorded={**_collective_ranges(done, is_message), **_send_ranges(done)},
        num_steps_apart=_num_steps_apart(done) if (is_apart & ~is_message).any() else 0,
    )


def join_records(parts: Sequence[Records]) -> Records:
    """Return what parts of a run, at least one and all with the same groups, show together."""
    return Records(
        groups=parts[0].groups,
        rows=join_rows([part.rows for part in parts]),
        reached=np.maximum.reduce([part.reached for part in parts]),
        reached_by_root=_joined((part.reached_by_root for part in parts), max),
        recorded=_joined((part.recorded for part in parts), _whole),
        num_steps_apart=max(part.num_steps_apart for part in parts),
    )


def lost_operations(
    records: Records, opened: Operations, ranks: Mapping[int, bool], first_steps: Mapping[int, int] | None = None
) -> dict[int, LostOperations]:
    """Return what ranks have lost, for those that have lost something.

    Operations of a group, and messages from one rank to another, are numbered in order: a rank that entered one has
    entered all before it. So the operations that one rank completed and another must have entered count, and all with
    smaller numbers.

    Args:
        records: what completed operations tell.
        opened: operations that were entered and not completed, with the same groups, ordered by rank.
        ranks: ranks to examine, and whether each closed its trace: if so, its recording began with its first operation
            or the end of its first step, and ended with its last operation, and only gaps between these count.
        first_steps: the first step that each rank recorded, as far as it recorded any.
    """
    if not len(records.rows.rank):
        return {}
    groups_of: dict[int, list[int]] = {}
    for index, group in enumerate(records.groups):
        for rank in group.ranks:
            groups_of.setdefault(rank, []).append(index)
    rows = select_rows(records.rows, np.argsort(records.rows.rank, kind="stable"))
    collectives, messages = _known_collectives(rows), _known_messages(rows)
    found = {}
    for rank, is_closed in ranks.items():
        search = _Search(records, rank, is_closed, (first_steps or {}).get(rank, _NEVER), rows, opened)
        steps = np.concatenate([*search.collectives(*collectives, groups_of.get(rank, [])), *search.sends(*messages)])
        if len(steps):
            found[rank] = LostOperations(num_operations=len(steps), step=int(steps.max()) - records.num_steps_apart)
    return found


def _collective_ranges(done: Operations, is_message: Bools) -> dict[_Channel, _Range]:
    ranges: dict[_Channel, _Range] = {}
    for rows in done.slices or []:
        first, last = np.full(len(done.groups) + 1, _NEVER), np.full(len(done.groups) + 1, _NONE)
        group = np.where(is_message[rows], UNKNOWN_GROUP, done.group[rows])
        np.minimum.at(first, group, done.seq[rows])
        np.maximum.at(last, group, done.seq[rows])
        own, rank = np.flatnonzero(last[:-1] > _NONE), int(done.rank[rows.start])
        numbers = zip(own.tolist(), first[own].tolist(), last[own].tolist(), strict=True)
        ranges |= {(rank, number, _NONE): (smallest, largest) for number, smallest, largest in numbers}
    return ranges


def _send_ranges(done: Operations) -> dict[_Channel, _Range]:
    keys, rows = (done.rank, done.group, done.peer), np.flatnonzero(done.op == Op.SEND)
    firsts = _last_of_each(keys, -done.seq, rows)
    return {key: (-firsts[key], last) for key, last in _last_of_each(keys, done.seq, rows).items()}


def _last_of_each(keys: Sequence[Ints], seq: Ints, rows: Ints) -> dict[Any, int]:
    """Return the largest number of some rows, by their keys."""
    rows = rows[np.lexsort((seq[rows], *(key[rows] for key in keys)))]
    differs = np.logical_or.reduce([np.diff(key[rows]) != 0 for key in keys])
    lasts = rows[np.append(differs, True)[: len(rows)]]
    return dict(zip(zip(*(key[lasts].tolist() for key in keys), strict=True), seq[lasts].tolist(), strict=True))


def _num_steps_apart(done: Operations) -> int:
    """Return the most steps by which ranks disagree, comparing rows of the same (group, number)."""
    _, _, step, begins = _by_number(done)
    return int((np.maximum.reduceat(step, begins) - np.minimum.reduceat(step, begins)).max()) if len(begins) else 0


def _by_number(done: Operations) -> tuple[Ints, Ints, Ints, Ints]:
    """Return group, number and step of collectives by ascending group and number, and where each of these begins."""
    rows = np.flatnonzero(~np.isin(done.op, MESSAGES) & (done.group != UNKNOWN_GROUP))
    rows = rows[np.lexsort((done.seq[rows], done.group[rows]))]
    group, seq = done.group[rows], done.seq[rows]
    differs = (np.diff(group) != 0) | (np.diff(seq) != 0)
    return group, seq, done.step[rows], np.flatnonzero(np.append(True, differs)[: len(rows)])


def _joined(parts: Iterable[Mapping[_Key, _Value]], join: Callable[[_Value, _Value], _Value]) -> dict[_Key, _Value]:
    joined: dict[_Key, _Value] = {}
    for part in parts:
        for key, value in part.items():
            joined[key] = join(value, joined[key]) if key in joined else value
    return joined


def _whole(one: _Range, other: _Range) -> _Range:
    return min(one[0], other[0]), max(one[1], other[1])


def _known_collectives(rows: Operations) -> tuple[Ints, Ints, Ints]:
    """Return group, number and smallest step of collectives that another rank has no row of, ascending."""
    group, seq, step, begins = _by_number(rows)
    return group[begins], seq[begins], np.minimum.reduceat(step, begins) if len(begins) else step


def _known_messages(rows: Operations) -> tuple[Ints, ...]:
    """Return source, target, group, number and step of messages without a row of their sending, by source."""
    is_received = (rows.op == Op.RECV) & (rows.exit_kind != ExitKind.FAILED)
    at = np.flatnonzero(is_received & (rows.peer >= 0) & (rows.group != UNKNOWN_GROUP))
    at = at[np.argsort(rows.peer[at], kind="stable")]
    return rows.peer[at], rows.rank[at], rows.group[at], rows.seq[at], rows.step[at]


class _Search:
    """The search for what one rank has lost."""

    def __init__(
        self, records: Records, rank: int, is_closed: bool, first_step: int, done: Operations, opened: Operations
    ) -> None:
        """Take the rows of the rank, from tables ordered by rank."""
        self._records, self._rank, self._is_closed, self._first_step = records, rank, is_closed, first_step
        parts = [(table, slice(*np.searchsorted(table.rank, [rank, rank + 1]))) for table in (done, opened)]
        self._group, self._op, self._peer, self._seq = (
            np.concatenate([getattr(table, name)[rows] for table, rows in parts])
            for name in ("group", "op", "peer", "seq")
        )

    def collectives(self, group: Ints, seq: Ints, step: Ints, groups: Iterable[int]) -> Iterator[Ints]:
        """Yield the steps of the operations of each group that the rank entered but has no record of."""
        is_own = ~np.isin(self._op, MESSAGES)
        for number in groups:
            last = max(
                int(self._records.reached[number]), self._records.reached_by_root.get((number, self._rank), _NONE)
            )
            begin, end = np.searchsorted(group, [number, number + 1])
            here = slice(begin, begin + int(np.searchsorted(seq[begin:end], last, side="right")))
            yield self._missing(seq[here], step[here], self._seq[is_own & (self._group == number)], number, _NONE)

    def sends(self, source: Ints, target: Ints, group: Ints, seq: Ints, step: Ints) -> Iterator[Ints]:
        """Yield the steps of the messages of each channel that the rank sent but has no record of."""
        yield np.zeros(0, np.int64)
        mine = np.flatnonzero(source == self._rank)
        for number, to in np.unique(np.stack([group[mine], target[mine]], axis=1), axis=0).tolist():
            here = mine[(group[mine] == number) & (target[mine] == to)]
            is_own = (self._group == number) & (self._peer == to) & (self._op == Op.SEND)
            yield self._missing(seq[here], step[here], self._seq[is_own], number, to)

    def _missing(self, seq: Ints, step: Ints, own: Ints, group: int, target: int) -> Ints:
        """Return the steps of known numbers that are not among the rank's own, int64.

        Of a closed trace, those before its first number and after its last one do not count, but for those before its
        first number where it had recorded a step by then.
        """
        missing = ~np.isin(seq, own)
        if self._is_closed:
            first, last = self._records.recorded.get((self._rank, group, target), (_NEVER, _NONE))
            first, last = int(own.min(initial=first)), int(own.max(initial=last))
            missing &= ((step > self._first_step) | (seq > first)) & (seq < last)
        return step[missing]
