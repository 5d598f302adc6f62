"""What else changed between two groups of runs: hosts, software, settings, findings.

A change is reported, not blamed: that two things changed at the same time does not make one the cause of the other.
Operations of both groups are paired where their groups of ranks have other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from hpcpace.core.hostlist import short_list
from hpcpace.core.text import format_bytes, format_duration
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


_MIN_BYTES_CHANGE = 0.01
_MIN_PROBED_CHANGE = 0.1  # of the time of an operation; two probes of the same hosts differ, too
_NONE = "-"
# Of hpcpace itself; they do not change what the job does.
_OWN_SETTINGS = ("trace.trace_dir",)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something that is not the same in both groups; where runs of a group differ, its values are all listed."""

    kind: str
    name: str
    before: str
    after: str


def changes(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> list[Change]:
    """Return what differs, by kind: hosts, placement, layout, software, settings, environment, findings, verdict."""
    is_whole = not any(run.num_missing for run in (*before, *after))  # hosts of ranks without a trace are not known
    return [
        *_single(before, after, "hosts", "hosts", lambda run: short_list(sorted(set(run.hosts))) if is_whole else ""),
        *_placement(before, after),
        *_single(before, after, "layout", "nodes", lambda run: str(run.num_nodes or "") if is_whole else ""),
        *_single(before, after, "layout", "ranks", lambda run: str(run.world_size or "")),
        *_single(before, after, "layout", "mesh", lambda run: run.mesh),
        *_single(before, after, "layout", "dtype", lambda run: run.conditions.dtype),
        *_traffic(before, after),
        *_tables(before, after, "version", lambda run: run.conditions.versions),
        *_single(before, after, "version", "commit", lambda run: run.conditions.commit[:12]),
        *_single(before, after, "setting", "command", lambda run: run.conditions.command),
        *_tables(before, after, "setting", lambda run: run.conditions.settings, _OWN_SETTINGS),
        *_tables(before, after, "environment", lambda run: run.conditions.environment),
        *_audit(before, after),
        *_probe(before, after),
        *_single(before, after, "verdict", "mode", lambda run: run.mode),
    ]


def _single(
    before: Sequence[MeasuredRun],
    after: Sequence[MeasuredRun],
    kind: str,
    name: str,
    value: Callable[[MeasuredRun], str],
) -> Iterator[Change]:
    one, two = ({value(run) for run in group} for group in (before, after))
    if one != two:
        yield Change(kind=kind, name=name, before=_joined(one), after=_joined(two))


def _joined(values: set[str]) -> str:
    return ", ".join(sorted(value or _NONE for value in values))


def _placement(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> Iterator[Change]:
    one, two = ({rank.rank: rank.host for rank in group[0].ranks} for group in (before, after))
    moved = [rank for rank in one if rank in two and one[rank] != two[rank]]
    if moved and set(before[0].hosts) == set(after[0].hosts):
        first = moved[0]
        yield Change(
            kind="placement",
            name=f"{len(moved)} of {len(one)} ranks, as rank {first}",
            before=one[first],
            after=two[first],
        )


def _traffic(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> Iterator[Change]:
    names = operation_names(before[:1], after[:1])
    one, two = (_bytes_by_name(group[0], names) for group in (before, after))
    for name in dict.fromkeys([*one, *two]):
        old, new = one.get(name, 0.0), two.get(name, 0.0)
        if abs(new - old) > _MIN_BYTES_CHANGE * max(old, new):
            yield Change(
                kind="layout",
                name=f"bytes of {name} a rank and step",
                before=format_bytes(old),
                after=format_bytes(new),
            )


def _bytes_by_name(run: MeasuredRun, names: Mapping[Operation, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind in run.transfers:
        name = names[operation_of(kind, run)]
        found[name] = found.get(name, 0.0) + kind.size_bytes
    return found


def _tables(
    before: Sequence[MeasuredRun],
    after: Sequence[MeasuredRun],
    kind: str,
    table: Callable[[MeasuredRun], Mapping[str, str]],
    ignored: Sequence[str] = (),
) -> Iterator[Change]:
    if not all(table(run) for run in (*before, *after)):  # nothing is known of one of them
        return
    names = sorted({name for run in (*before, *after) for name in table(run)} - set(ignored))
    for name in names:
        yield from _single(before, after, kind, name, partial(_entry, table, name))


def _entry(table: Callable[[MeasuredRun], Mapping[str, str]], name: str, run: MeasuredRun) -> str:
    return table(run).get(name, "")


def _probe(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> Iterator[Change]:
    """Yield operations that take another time by the probes of the hosts, which know nothing of the job."""
    one, two = (
        {
            name: fmean(run.probed[name] for run in group)
            for name in group[0].probed
            if all(name in run.probed for run in group)
        }
        for group in (before, after)
    )
    for name in one:
        if name in two and abs(two[name] - one[name]) > _MIN_PROBED_CHANGE * max(one[name], two[name]):
            yield Change(kind="probe", name=name, before=format_duration(one[name]), after=format_duration(two[name]))


def _audit(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> Iterator[Change]:
    if any(run.audit is None for run in (*before, *after)):
        return
    one, two = ({finding for run in group for finding in run.audit or ()} for group in (before, after))
    for finding in sorted(two - one):
        yield Change(kind="audit", name=finding, before="not found", after="found")
    for finding in sorted(one - two):
        yield Change(kind="audit", name=finding, before="found", after="not found")
