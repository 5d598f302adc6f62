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


_Groups = tuple[Sequence[MeasuredRun], Sequence[MeasuredRun]]
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
    groups = before, after
    # Hosts of ranks without a trace are not known.
    is_whole = not any(run.num_missing for run in (*before, *after))
    return [
        *_single(groups, "hosts", "hosts", lambda run: short_list(sorted(set(run.hosts))) if is_whole else ""),
        *_placement(groups),
        *_single(groups, "layout", "nodes", lambda run: str(run.num_nodes or "") if is_whole else ""),
        *_single(groups, "layout", "ranks", lambda run: str(run.world_size or "")),
        *_single(groups, "layout", "mesh", lambda run: run.mesh),
        *_single(groups, "layout", "dtype", lambda run: run.conditions.dtype),
        *_traffic(groups),
        *_tables(groups, "version", lambda run: run.conditions.versions),
        *_single(groups, "version", "commit", lambda run: run.conditions.commit[:12]),
        *_single(groups, "setting", "command", lambda run: run.conditions.command),
        *_tables(groups, "setting", lambda run: run.conditions.settings, _OWN_SETTINGS),
        *_tables(groups, "environment", lambda run: run.conditions.environment),
        *_audit(groups),
        *_probe(groups),
        *_single(groups, "verdict", "mode", lambda run: run.mode),
    ]


def _single(groups: _Groups, kind: str, name: str, value: Callable[[MeasuredRun], str]) -> Iterator[Change]:
    found = [{value(run) or _NONE for run in group} for group in groups]
    if found[0] != found[1]:
        before, after = (", ".join(sorted(values)) for values in found)
        yield Change(kind=kind, name=name, before=before, after=after)


def _placement(groups: _Groups) -> Iterator[Change]:
    one, two = ({rank.rank: rank.host for rank in group[0].ranks} for group in groups)
    moved = [rank for rank in one if rank in two and one[rank] != two[rank]]
    if moved and set(groups[0][0].hosts) == set(groups[1][0].hosts):
        first = moved[0]
        yield Change(
            kind="placement",
            name=f"{len(moved)} of {len(one)} ranks, as rank {first}",
            before=one[first],
            after=two[first],
        )


def _traffic(groups: _Groups) -> Iterator[Change]:
    names = operation_names(*(group[:1] for group in groups))
    one, two = (_bytes_by_name(group[0], names) for group in groups)
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
    groups: _Groups, kind: str, table: Callable[[MeasuredRun], Mapping[str, str]], ignored: Sequence[str] = ()
) -> Iterator[Change]:
    if not all(table(run) for run in (*groups[0], *groups[1])):  # nothing is known of one of them
        return
    names = sorted({name for run in (*groups[0], *groups[1]) for name in table(run)} - set(ignored))
    for name in names:
        yield from _single(groups, kind, name, partial(_entry, table, name))


def _entry(table: Callable[[MeasuredRun], Mapping[str, str]], name: str, run: MeasuredRun) -> str:
    return table(run).get(name, "")


def _probe(groups: _Groups) -> Iterator[Change]:
    """Yield operations that take another time by the probes of the hosts, which know nothing of the job."""
    one, two = (
        {
            name: fmean(run.probed[name] for run in group)
            for name in group[0].probed
            if all(name in run.probed for run in group)
        }
        for group in groups
    )
    for name in one:
        if name in two and abs(two[name] - one[name]) > _MIN_PROBED_CHANGE * max(one[name], two[name]):
            yield Change(kind="probe", name=name, before=format_duration(one[name]), after=format_duration(two[name]))


def _audit(groups: _Groups) -> Iterator[Change]:
    if any(run.audit is None for run in (*groups[0], *groups[1])):
        return
    one, two = ({finding for run in group for finding in run.audit or ()} for group in groups)
    for finding in (*sorted(two - one), *sorted(one - two)):
        words = ("found", "not found") if finding in one else ("not found", "found")
        yield Change(kind="audit", name=finding, before=words[0], after=words[1])
