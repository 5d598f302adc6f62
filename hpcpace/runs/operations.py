"""Which operation of B is which one of A, where their groups of ranks have other sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcpace.runs.measured import MeasuredRun, Transfers


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A kind of operation in the runs of one group.

    Attributes:
        op: such as all_reduce.
        group_size: ranks that take part; 0 where unknown.
        is_of_all: whether these are all ranks of the run.
    """

    op: str
    group_size: int
    is_of_all: bool


def operation_of(kind: Transfers, run: MeasuredRun) -> Operation:
    """Return the operation of a run's transfers."""
    is_of_all = bool(kind.group_size) and kind.group_size == run.world_size
    return Operation(op=kind.op, group_size=kind.group_size, is_of_all=is_of_all)


def operation_names(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> dict[Operation, str]:
    """Return names under which the operations of both groups compare.

    Operations of one op are the same if they are of all ranks in both groups, or else of as many. What is left of it in
    both groups, where a mesh changed, is not told apart and has one name.

    Args:
        before, after: the groups.
    """
    sides = [_operations(group) for group in (before, after)]
    names: dict[Operation, str] = {}
    for op in sorted({operation.op for side in sides for operation in side}):
        left = [{operation for operation in side if operation.op == op} for side in sides]
        of_all = [{operation for operation in side if operation.is_of_all} for side in left]
        if all(of_all):
            names |= _named(op, *of_all)
            left = [side - of_side for side, of_side in zip(left, of_all, strict=True)]
        sizes = [{operation.group_size for operation in side} for side in left]
        for size in sizes[0] & sizes[1]:
            of_size = [{operation for operation in side if operation.group_size == size} for side in left]
            names |= _named(op, *of_size)
            left = [side - of_side for side, of_side in zip(left, of_size, strict=True)]
        if all(left):
            names |= _named(op, *left)
        else:
            for operation in left[0] | left[1]:
                names |= _named(op, {operation}, {operation})
    return names


def _operations(group: Sequence[MeasuredRun]) -> set[Operation]:
    return {operation_of(kind, run) for run in group for kind in run.transfers}


def _named(op: str, before: Iterable[Operation], after: Iterable[Operation]) -> dict[Operation, str]:
    """Return the same name for operations of both groups: with the sizes of their groups of ranks."""
    one, two = (
        ", ".join(map(str, sorted({operation.group_size for operation in side if operation.group_size})))
        for side in (before, after)
    )
    if one == two:
        name = f"{op} of {one} ranks" if one else op
    else:
        name = f"{op} of {one or 'unknown'} (A) and {two or 'unknown'} (B) ranks"
    return dict.fromkeys((*before, *after), name)
