"""Whether runs do the same work, and what else changed between two groups: hosts, software, settings, findings.

A change is reported, not blamed: that two things changed at the same time does not make one the cause of the other.
Operations of both groups are paired where their groups of ranks have other sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from hpcpace.core.change import MISSING, FactChange, fact_changes
from hpcpace.core.hostlist import short_list
from hpcpace.core.text import format_bytes, format_count, format_duration
from hpcpace.runs.measured import MeasuredRun, Transfers

_OTHER_BATCH = 0.02
# The same data may be found in another place.
_NOT_WORK = ("data.source", "model.name")


def is_same_batch(one: float, two: float) -> bool:
    """Return whether two numbers of samples per step, both above 0, differ by less than 2 %.

    Where samples have different lengths, their mean number differs by as much from run to run, and nobody changed it.
    """
    return max(one, two) < (1 + _OTHER_BATCH) * min(one, two)


def usual_batches(batches: Iterable[float]) -> dict[float, float]:
    """Return for each number of samples per step the one that it counts as; 0, which is unknown, for 0.

    Those that count as one are all the same by `is_same_batch`: the range with most of the batches given, then that of
    the rest with most. They count as their median.
    """
    given = sorted(batches)
    left = [batch for batch in given if batch > 0]
    usual = {batch: batch for batch in given if batch <= 0}
    while left:
        stops = [bisect_left(left, batch * (1 + _OTHER_BATCH), lo=at) for at, batch in enumerate(left)]
        first = max(range(len(left)), key=lambda at: stops[at] - at)
        alike = left[first : stops[first]]
        usual |= dict.fromkeys(alike, alike[(len(alike) - 1) // 2])
        del left[first : stops[first]]
    return usual


def work_differences(runs: Sequence[MeasuredRun]) -> list[str]:
    """Return in what the work of runs differs, one sentence each; empty where it is the same as far as recorded."""
    return list(dict.fromkeys(_differences(runs[0], runs[1:])))


def differs_beyond_batch(runs: Sequence[MeasuredRun]) -> bool:
    """Return whether more of the work differs than how many samples a step has, so that samples are not alike."""
    return bool(work_differences([replace(run, samples_per_step=0.0, is_per_sample=False) for run in runs]))


def _differences(first: MeasuredRun, others: Sequence[MeasuredRun]) -> Iterator[str]:
    for other in others:
        if bool(first.samples_unit) != bool(other.samples_unit):
            yield "how many samples a step has is known of one of them alone"
        elif first.samples_unit != other.samples_unit:
            yield f"samples are {first.samples_unit} and {other.samples_unit}"
        elif first.is_per_sample != other.is_per_sample:
            yield "the batch is known of one of them alone, the other has a throughput without it"
        elif is_work_known((first, other)) and not is_same_batch(first.samples_per_step, other.samples_per_step):
            sizes = [format_count(run.samples_per_step) for run in (first, other)]
            yield f"a step has {sizes[0]} and {sizes[1]} {first.samples_unit}"
        if first.emulation != other.emulation:
            yield "computation was emulated in one of them, or in another way"
        one, two = compared_work(first), compared_work(other)
        for name in sorted(set(one) & set(two)):
            if one[name] != two[name]:
                yield f"{name} is {one[name]} and {two[name]}"


def compared_work(run: MeasuredRun) -> dict[str, str]:
    """Return what a run says of its work, by name, without what does not make it other work."""
    return {name: value for name, value in run.conditions.work.items() if name not in _NOT_WORK}


def is_work_known(runs: Sequence[MeasuredRun]) -> bool:
    """Return whether each run says what a step of it is."""
    return all(run.samples_per_step > 0 for run in runs)


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
    both groups, where a mesh changed, is not distinguished and has one name.

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
# Of hpcpace itself; they do not change what the job does.
_OWN_SETTINGS = ("trace.trace_dir",)


def changes(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> list[FactChange]:
    """Return what differs, by kind: hosts, placement, layout, software, settings, environment, findings, verdict.

    Where runs of a group differ, all of its values are listed.
    """
    groups = before, after
    # Hosts of ranks without a trace are not known.
    is_whole = not any(run.num_missing for run in (*before, *after))
    return [
        *_differing(groups, "hosts", lambda run: {"hosts": short_list(sorted(set(run.hosts))) if is_whole else ""}),
        *_placement(groups),
        *_differing(groups, "layout", lambda run: _layout(run, is_whole=is_whole)),
        *_traffic(groups),
        *_tables(groups, "version", lambda run: run.conditions.versions),
        *_differing(groups, "version", lambda run: {"commit": run.conditions.commit[:12]}),
        *_differing(groups, "setting", lambda run: {"command": run.conditions.command}),
        *_tables(groups, "setting", lambda run: run.conditions.settings),
        *_tables(groups, "environment", lambda run: run.conditions.environment),
        *_audit(groups),
        *_probe(groups),
        *_differing(groups, "verdict", lambda run: {"mode": run.mode}),
    ]


def _layout(run: MeasuredRun, *, is_whole: bool) -> dict[str, str]:
    nodes, ranks = str(run.num_nodes or "") if is_whole else "", str(run.world_size or "")
    return {"nodes": nodes, "ranks": ranks, "mesh": run.mesh, "dtype": run.conditions.dtype}


def _differing(groups: _Groups, kind: str, values: Callable[[MeasuredRun], Mapping[str, str]]) -> Iterator[FactChange]:
    """Yield the facts whose values are not the same in both groups, in the order in which runs have them."""
    tables = [[values(run) for run in group] for group in groups]
    names = dict.fromkeys(name for side in tables for table in side for name in table)
    one, two = ({name: {table.get(name) or MISSING for table in side} for name in names} for side in tables)
    return fact_changes(kind, one, two, words=lambda found: ", ".join(sorted(found)))


def _placement(groups: _Groups) -> Iterator[FactChange]:
    one, two = ({rank.rank: rank.host for rank in group[0].ranks} for group in groups)
    moved = [rank for rank in one if rank in two and one[rank] != two[rank]]
    if moved and set(groups[0][0].hosts) == set(groups[1][0].hosts):
        first = moved[0]
        yield FactChange(
            kind="placement",
            name=f"{len(moved)} of {len(one)} ranks, as rank {first}",
            before=one[first],
            after=two[first],
        )


def _traffic(groups: _Groups) -> Iterator[FactChange]:
    names = operation_names(*(group[:1] for group in groups))
    found = [_bytes_by_name(group[0], names) for group in groups]
    one, two = (
        {f"bytes of {name} a rank and step": side.get(name, 0.0) for name in dict.fromkeys([*found[0], *found[1]])}
        for side in found
    )
    return fact_changes("layout", one, two, words=format_bytes, tolerance=_MIN_BYTES_CHANGE)


def _bytes_by_name(run: MeasuredRun, names: Mapping[Operation, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind in run.transfers:
        name = names[operation_of(kind, run)]
        found[name] = found.get(name, 0.0) + kind.size_bytes
    return found


def _tables(groups: _Groups, kind: str, table: Callable[[MeasuredRun], Mapping[str, str]]) -> Iterable[FactChange]:
    if not all(table(run) for run in (*groups[0], *groups[1])):  # nothing is known of one of them
        return ()
    found = sorted(_differing(groups, kind, table), key=lambda change: change.name)
    return [change for change in found if change.name not in _OWN_SETTINGS]


def _probe(groups: _Groups) -> Iterator[FactChange]:
    """Yield operations that take another time by the probes of the hosts, which know nothing of the job."""
    runs = [*groups[0], *groups[1]]
    names = [name for name in runs[0].probed if all(name in run.probed for run in runs)]
    one, two = ({name: fmean(run.probed[name] for run in group) for name in names} for group in groups)
    return fact_changes("probe", one, two, words=format_duration, tolerance=_MIN_PROBED_CHANGE)


def _audit(groups: _Groups) -> Iterator[FactChange]:
    if any(run.audit is None for run in (*groups[0], *groups[1])):
        return iter(())
    found = [{finding for run in group for finding in run.audit or ()} for group in groups]
    names = (*sorted(found[1] - found[0]), *sorted(found[0] - found[1]))
    one, two = ({name: "found" if name in side else "not found" for name in names} for side in found)
    return fact_changes("audit", one, two)
