"""Operations that are not complete: entered and never left, failed, or lost with a killed rank.

A killed rank loses the rows recorded since its last flush. Operations that others completed with it show how many, at
least: a rank that left an all_reduce has seen all members enter, a receiver has seen its sender send, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hpcpace.metrics import Bools, Bytes, Ints
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


class _Range(NamedTuple):
    """Numbers of operations, from the first to the last."""

    first: int
    last: int

    def joined(self, other: _Range) -> _Range:
        """Return the range of both."""
        return _Range(min(self.first, other.first), max(self.last, other.last))

    @classmethod
    def of(cls, numbers: Ints) -> _Range:
        """Return the range of some numbers; one that nothing is in without any."""
        return cls(int(numbers.min()), int(numbers.max())) if len(numbers) else _NOTHING


_NOTHING = _Range(_NEVER, _NONE)


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
        own: the smallest and the largest number of a collective that a rank has a row of, by (rank, group).
        sent: those of a message that a rank has a send row of, by (rank, group, target).
        num_steps_apart: the most steps by which ranks disagree on the step of an operation.
    """

    groups: tuple[ProcessGroup, ...]
    rows: Operations
    reached: Ints
    reached_by_root: Mapping[tuple[int, int], int]
    own: Mapping[tuple[int, int], _Range]
    sent: Mapping[tuple[int, int, int], _Range]
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
        own=_own_ranges(done, is_message),
        sent=_range_of_each((done.rank, done.group, done.peer), done.seq, np.flatnonzero(done.op == Op.SEND)),
        num_steps_apart=_num_steps_apart(done, matching) if (is_apart & ~is_message).any() else 0,
    )


def join_records(parts: Sequence[Records]) -> Records:
    """Return what parts of a run, at least one and all with the same groups, show together."""
    return Records(
        groups=parts[0].groups,
        rows=join_rows([part.rows for part in parts]),
        reached=np.maximum.reduce([part.reached for part in parts]),
        reached_by_root=_largest(part.reached_by_root for part in parts),
        own=_joined_ranges(part.own for part in parts),
        sent=_joined_ranges(part.sent for part in parts),
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
    known, sent = _known_collectives(records), _known_messages(records)
    groups_of: dict[int, list[int]] = {}
    for index, group in enumerate(records.groups):
        for rank in group.ranks:
            groups_of.setdefault(rank, []).append(index)
    rows = select_rows(records.rows, np.argsort(records.rows.rank, kind="stable"))
    found = {}
    for rank, is_closed in ranks.items():
        own, first_step = _own_rows(rank, rows, opened), (first_steps or {}).get(rank, _NEVER)
        lost = [known.lost(group, rank, own, first_step, is_closed=is_closed) for group in groups_of.get(rank, [])]
        lost += [sent.lost(rank, own, first_step, is_closed=is_closed)]
        steps = np.concatenate(lost)
        if len(steps):
            found[rank] = LostOperations(num_operations=len(steps), step=int(steps.max()) - records.num_steps_apart)
    return found


class _Rows(NamedTuple):
    """Rows of one rank, each (num_rows,)."""

    group: Ints
    op: Bytes
    peer: Ints
    seq: Ints


def _own_ranges(done: Operations, is_message: Bools) -> dict[tuple[int, int], _Range]:
    ranges: dict[tuple[int, int], _Range] = {}
    for rows in done.slices or []:
        first, last = np.full(len(done.groups) + 1, _NEVER), np.full(len(done.groups) + 1, _NONE)
        group = done.group[rows]
        if is_message[rows].any():
            group = np.where(is_message[rows], UNKNOWN_GROUP, group)
        np.minimum.at(first, group, done.seq[rows])
        np.maximum.at(last, group, done.seq[rows])
        rank = int(done.rank[rows.start])
        ranges |= {
            (rank, own): _Range(int(first[own]), int(last[own])) for own in np.flatnonzero(last[:-1] > _NONE).tolist()
        }
    return ranges


def _range_of_each(keys: Sequence[Ints], seq: Ints, rows: Ints) -> dict[Any, _Range]:
    """Return the smallest and the largest number of some rows, by their keys."""
    firsts = _last_of_each(keys, -seq, rows)
    return {key: _Range(-firsts[key], last) for key, last in _last_of_each(keys, seq, rows).items()}


def _last_of_each(keys: Sequence[Ints], seq: Ints, rows: Ints) -> dict[Any, int]:
    """Return the largest number of some rows, by their keys."""
    rows = rows[np.lexsort((seq[rows], *(key[rows] for key in keys)))]
    differs = np.logical_or.reduce([np.diff(key[rows]) != 0 for key in keys])
    lasts = rows[np.append(differs, True)[: len(rows)]]
    return dict(zip(zip(*(key[lasts].tolist() for key in keys), strict=True), seq[lasts].tolist(), strict=True))


def _num_steps_apart(done: Operations, matching: Matching) -> int:
    """Return the most steps by which ranks disagree, comparing rows of the same (group, number)."""
    rows = np.flatnonzero(~np.isin(done.op, MESSAGES) & (done.group != UNKNOWN_GROUP))
    lowest, highest = done.step[matching.first], done.step[matching.first]
    np.minimum.at(lowest, matching.instance[rows], done.step[rows])
    np.maximum.at(highest, matching.instance[rows], done.step[rows])
    group, seq = done.group[matching.first], done.seq[matching.first]
    of = np.flatnonzero(~np.isin(done.op[matching.first], MESSAGES) & (group != UNKNOWN_GROUP))
    of = of[np.lexsort((seq[of], group[of]))]
    begins = _begins(group[of], seq[of])
    if not len(of):
        return 0
    return int((np.maximum.reduceat(highest[of], begins) - np.minimum.reduceat(lowest[of], begins)).max())


def _begins(group: Ints, seq: Ints) -> Ints:
    return np.flatnonzero(np.append(True, (np.diff(group) != 0) | (np.diff(seq) != 0))[: len(group)])


def _largest(parts: Iterable[Mapping[_Key, int]]) -> dict[_Key, int]:
    joined: dict[_Key, int] = {}
    for part in parts:
        for key, number in part.items():
            joined[key] = max(number, joined.get(key, number))
    return joined


def _joined_ranges(parts: Iterable[Mapping[_Key, _Range]]) -> dict[_Key, _Range]:
    joined: dict[_Key, _Range] = {}
    for part in parts:
        for key, numbers in part.items():
            joined[key] = numbers.joined(joined.get(key, numbers))
    return joined


@dataclass(frozen=True, kw_only=True)
class _Collectives:
    """Collectives that some rank completed and another has no row of, by ascending group and number.

    Attributes:
        group, seq, step: each (num_known,); the step is the smallest that any rank recorded.
    """

    records: Records
    group: Ints
    seq: Ints
    step: Ints

    def lost(self, group: int, rank: int, own: _Rows, first_step: int, *, is_closed: bool) -> Ints:
        """Return the steps of the operations of a group that a rank entered but has no record of."""
        last = max(int(self.records.reached[group]), self.records.reached_by_root.get((group, rank), _NONE))
        begin, end = np.searchsorted(self.group, [group, group + 1])
        end = begin + int(np.searchsorted(self.seq[begin:end], last, side="right"))
        of_group = own.seq[(own.group == group) & ~np.isin(own.op, MESSAGES)]
        recorded = _Range.of(of_group).joined(self.records.own.get((rank, group), _NOTHING))
        seq, step = self.seq[begin:end], self.step[begin:end]
        return step[_is_missing(seq, of_group, recorded if is_closed else None, step > first_step)]


@dataclass(frozen=True, kw_only=True)
class _Messages:
    """Messages that were received but have no row of their sending, by ascending sender; each (num_known,)."""

    records: Records
    source: Ints
    target: Ints
    group: Ints
    seq: Ints
    step: Ints

    def lost(self, rank: int, own: _Rows, first_step: int, *, is_closed: bool) -> Ints:
        """Return the steps of the messages that a rank sent but has no record of."""
        mine = slice(*np.searchsorted(self.source, [rank, rank + 1]))
        group, target, seq, step = self.group[mine], self.target[mine], self.seq[mine], self.step[mine]
        lost = [np.zeros(0, np.int64)]
        for of_group, to in np.unique(np.stack([group, target], axis=1), axis=0).tolist():
            here = (group == of_group) & (target == to)
            sends = own.seq[(own.group == of_group) & (own.peer == to) & (own.op == Op.SEND)]
            recorded = _Range.of(sends).joined(self.records.sent.get((rank, of_group, to), _NOTHING))
            was_recorded = step[here] > first_step
            lost.append(step[here][_is_missing(seq[here], sends, recorded if is_closed else None, was_recorded)])
        return np.concatenate(lost)


def _known_collectives(records: Records) -> _Collectives:
    done = records.rows
    rows = np.flatnonzero(~np.isin(done.op, MESSAGES) & (done.group != UNKNOWN_GROUP))
    rows = rows[np.lexsort((done.seq[rows], done.group[rows]))]
    group, seq, step = done.group[rows], done.seq[rows], done.step[rows]
    begins = _begins(group, seq)
    return _Collectives(
        records=records,
        group=group[begins],
        seq=seq[begins],
        step=np.minimum.reduceat(step, begins) if len(rows) else step,
    )


def _known_messages(records: Records) -> _Messages:
    done = records.rows
    is_received = (done.op == Op.RECV) & (done.exit_kind != ExitKind.FAILED)
    rows = np.flatnonzero(is_received & (done.peer >= 0) & (done.group != UNKNOWN_GROUP))
    rows = rows[np.argsort(done.peer[rows], kind="stable")]
    return _Messages(
        records=records,
        source=done.peer[rows],
        target=done.rank[rows],
        group=done.group[rows],
        seq=done.seq[rows],
        step=done.step[rows],
    )


def _own_rows(rank: int, done: Operations, opened: Operations) -> _Rows:
    parts = [(table, slice(*np.searchsorted(table.rank, [rank, rank + 1]))) for table in (done, opened)]
    columns = (np.concatenate([getattr(table, name)[rows] for table, rows in parts]) for name in _Rows._fields)
    return _Rows(*columns)


def _is_missing(known: Ints, own: Ints, recorded: _Range | None, was_recorded: Bools) -> Bools:
    """Return which known numbers are not among a rank's own, bool, (num_known,).

    Args:
        known: of one group or two ranks of it, (num_known,).
        own: of the rank.
        recorded: the first and the last one that the rank recorded; None where all count.
        was_recorded: whether the rank recorded its steps by then, in which case what is before its first one counts.
    """
    missing = ~np.isin(known, own)
    if recorded is None:
        return missing
    return np.asarray(missing & (was_recorded | (known > recorded.first)) & (known < recorded.last))
