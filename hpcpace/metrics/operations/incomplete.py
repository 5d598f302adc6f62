"""Operations that were entered but never completed, or that failed: the traces of a hang or of a killed rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.operations.communication import op_name
from hpcpace.metrics.operations.matching import UNKNOWN_GROUP, Operations, match
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


def _describe(
    opened: Operations, done: Operations, rows: NDArray[np.int64], age_ns: int, inside_ns: int
) -> OpenOperation:
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
