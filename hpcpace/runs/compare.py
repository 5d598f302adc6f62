"""Two groups of runs compared: whether B is slower than A, by how much, why, and what else changed.

The parts of a step add up to its mean exactly, so that differences between runs do, too.

A change is reported, not blamed: that two things changed at the same time does not make one the cause of the other.
Operations of both groups are paired where their groups of ranks have other sizes.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from math import log
from statistics import fmean
from typing import Any, TypeVar

from hpcpace import __version__
from hpcpace.core.change import MISSING, FactChange, Outcome, fact_changes
from hpcpace.core.errors import CannotTell, UsageError
from hpcpace.core.hostlist import short_list
from hpcpace.core.records import dataclass
from hpcpace.core.text import first_few, format_bytes, format_count, format_duration
from hpcpace.metrics.run_difference import PRIOR_CV, LogDifference, log_difference
from hpcpace.runs.measured import MeasuredRun, Transfers
from hpcpace.runs.units import UnitChanges, unit_changes

_COMPUTATION = ("forward", "backward", "optimizer")
_OWN = {"data": "waiting for data", "gc": "garbage collection", "host": "device idle for its host", "other": "no phase"}
_APART = {"pace": "held back by pacing", "checkpoint": "checkpoints", "eval": "evaluations"}
_WAITS, _TRANSFERS = ("wait", "sync_wait"), ("transfer", "sync_transfer")
_MAX_CAUSES = 5
_MIN_NS = 1.0  # clocks count whole ones; what is left of sums of floats is less
_Name = TypeVar("_Name")


@dataclass(frozen=True, kw_only=True)
class PartRow:
    """A part of the mean step of both groups, means over their runs.

    Attributes:
        kind: own work, exposed wait, transfer, other.
        name: of the part.
        before_ns, after_ns: nanoseconds per step.
    """

    kind: str
    name: str
    before_ns: float
    after_ns: float

    @property
    def change_ns(self) -> float:
        """By how much it is longer in B."""
        return self.after_ns - self.before_ns


def part_rows(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> list[PartRow]:
    """Return the parts of the mean step in two groups of runs; empty where a run's parts are not known.

    Where waits are not known in any run, as those for a rank without a trace, they look like transfers, so that both
    are one part.

    Args:
        before, after: the groups.
    """
    if any(rank.parts_ns is None for run in (*before, *after) for rank in run.ranks) or not all(
        run.ranks for run in (*before, *after)
    ):
        return []
    are_told = all(run.are_waits_known for run in (*before, *after))
    why = "without all ranks" if any(run.num_missing for run in (*before, *after)) else "where they match nothing"
    untold = "" if are_told else f"waits and transfers, not told apart {why}"
    operations = operation_names(before, after)
    is_one_host = all(len({rank.host for rank in run.ranks}) == 1 for run in (*before, *after))
    place = "rank" if is_one_host else "host"
    sides = [_mean([_parts(run, untold, operations, place) for run in group]) for group in (before, after)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    rows = [
        PartRow(kind=name[0], name=name[1], before_ns=sides[0].get(name, 0.0), after_ns=sides[1].get(name, 0.0))
        for name in names
    ]
    return _merged([row for row in rows if max(abs(row.before_ns), abs(row.after_ns)) >= _MIN_NS], place)


def _parts(
    run: MeasuredRun, untold: str, operations: Mapping[ComparedOperation, str], place: str
) -> dict[tuple[str, str], float]:
    """Return the parts of a run by kind and name; `untold` names waits and transfers together, or is empty."""
    mean = _mean([dict(rank.parts_ns or {}) for rank in run.ranks])
    step_ns = sum(mean.values())
    found = {("own work", "computation"): sum(mean.get(name, 0.0) for name in _COMPUTATION)}
    found |= {("own work", words): mean.get(name, 0.0) for name, words in _OWN.items()}
    waits_ns, transfers_ns = (sum(mean.get(name, 0.0) for name in names) for names in (_WAITS, _TRANSFERS))
    if not untold:
        found |= _by_cause(run, waits_ns, place) | _by_operation(run, transfers_ns, operations)
    else:
        found["other", untold] = waits_ns + transfers_ns
    found |= {("other", words): mean.get(name, 0.0) for name, words in _APART.items()}
    found["other", "gaps"] = run.mean_ns - step_ns  # time between steps is in no part
    return found


def _by_cause(run: MeasuredRun, exposed_ns: float, place: str) -> dict[tuple[str, str], float]:
    """Return the exposed wait by the host at which it began, or by the rank, if `place` says so."""
    caused: dict[str, float] = {}
    for rank in run.ranks:
        name = f"rank {rank.rank}" if place == "rank" else rank.host
        caused[name] = caused.get(name, 0.0) + rank.caused_wait_ns
    total = sum(caused.values())
    share = min(exposed_ns / total, 1.0) if total else 0.0
    found = {("exposed wait", f"for {name}"): value * share for name, value in caused.items()}
    return found | {("exposed wait", f"not traced to a {place}"): max(exposed_ns - total * share, 0.0)}


def _by_operation(
    run: MeasuredRun, exposed_ns: float, operations: Mapping[ComparedOperation, str]
) -> dict[tuple[str, str], float]:
    """Return the exposed transfer by operation, shared out by how long their transfers are, exposed or not."""
    lengths: dict[str, float] = {}
    for kind in run.transfers:
        name = operations[operation_of(kind, run)]
        lengths[name] = lengths.get(name, 0.0) + kind.transfer_ns
    total = sum(lengths.values())
    if not total:
        return {("transfer", "of unknown operations"): exposed_ns}
    return {("transfer", name): exposed_ns * value / total for name, value in lengths.items()}


def _mean(tables: Sequence[Mapping[_Name, float]]) -> dict[_Name, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: fmean(table.get(name, 0.0) for table in tables) for name in names}


def _merged(rows: Sequence[PartRow], place: str) -> list[PartRow]:
    """Return the rows with hosts, or ranks, that hardly changed as one."""
    waits = [row for row in rows if row.kind == "exposed wait" and row.name.startswith("for ")]
    ordered = sorted(waits, key=lambda row: -abs(row.change_ns))
    kept, merged = ordered[:_MAX_CAUSES], ordered[_MAX_CAUSES:]
    others = [row for row in rows if row not in waits]
    if merged:
        before_ns, after_ns = sum(row.before_ns for row in merged), sum(row.after_ns for row in merged)
        name = f"for {len(merged)} other {place}s"
        kept.append(PartRow(kind="exposed wait", name=name, before_ns=before_ns, after_ns=after_ns))
    first = [row for row in others if row.kind == "own work"]
    return [*first, *kept, *(row for row in others if row.kind != "own work")]


SCHEMA = "hpcpace-compare/1"
_MAX_REASONS = 3
# Of the intervals of median and mean step, so that both hold in 95 % of comparisons (Bonferroni). The median, which few
# long steps do not move, has most of it: the mean finds what the median cannot see, and that is large.
_MEDIAN_CONFIDENCE, _MEAN_CONFIDENCE = 0.955, 0.995


class Judged(StrEnum):
    """By which step time."""

    MEDIAN = "median step"
    MEAN = "mean step"


_SHOWN = (
    *("path", "attempt", "p50_ns", "log_p50_error", "mean_ns", "log_mean_error", "cv", "samples_per_s", "num_steps"),
    *("num_missing", "block_p50_ns"),
)
"""What the JSON has of each run."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `hpcpace compare` found; A is before, B is after.

    Attributes:
        outcome: of B.
        judged_by: the step time that `share` is of: the median, or the mean where throughput does not follow that.
        difference: ln(B / A) of the median step time, or of the time for a batch of A where batches differ.
        mean_difference: the same of the mean step time, which throughput follows; None where its error is not known.
        before, after: the runs.
        per_batch: samples of the batch that times are scaled to; None where they are those of a step of each run.
        prior_cv: standard deviation between runs that was taken where there were too few repeats.
        parts: rows that add up to the mean step times; empty where they are not known.
        places: what changed where; None where own work is not known.
        changes: what else changed.
        other_work: in what the work differs; such a comparison was asked for.
        differs_beyond_batch: whether that is more than how many samples a step has.
        remarks: what the figures do not say, one sentence each.
    """

    outcome: Outcome
    judged_by: Judged
    difference: LogDifference
    mean_difference: LogDifference | None
    before: tuple[MeasuredRun, ...]
    after: tuple[MeasuredRun, ...]
    per_batch: float | None
    prior_cv: float
    parts: tuple[PartRow, ...]
    places: UnitChanges | None
    changes: tuple[FactChange, ...]
    other_work: tuple[str, ...]
    differs_beyond_batch: bool
    remarks: tuple[str, ...]

    @property
    def judged(self) -> LogDifference:
        """The difference of the step time that the outcome is of."""
        mean = self.mean_difference
        return mean if self.judged_by is Judged.MEAN and mean is not None else self.difference

    @property
    def share(self) -> float:
        """By how much a step of B takes longer, relative."""
        return self.judged.share

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of `share`."""
        return self.judged.interval

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values; times are nanoseconds."""
        groups = {
            side: [
                {**{name: getattr(run, name) for name in _SHOWN}, "begun_unix_ns": run.conditions.begun_unix_ns}
                for run in runs
            ]
            for side, runs in (("before", self.before), ("after", self.after))
        }
        own = asdict(replace(self, before=(), after=()))
        figures = {"share": self.share, "interval": self.interval}
        return {"schema": SCHEMA, "hpcpace_version": __version__, **own, **groups, **figures}


def compare(
    before: Sequence[MeasuredRun],
    after: Sequence[MeasuredRun],
    *,
    prior_cv: float = PRIOR_CV,
    takes_other_work: bool = False,
) -> Comparison:
    """Compare two groups of runs.

    Args:
        before, after: A and B, at least one run each.
        prior_cv: standard deviation between runs of the same thing, relative, where there are too few repeats.
        takes_other_work: whether to compare runs whose work differs.

    Raises:
        UsageError: a run is in both groups or twice in one, or the work differs and that was not asked for.
        CannotTell: a run has too few steps to know its median.
    """
    _check_distinct(before, after)
    _check_steps([*before, *after])
    runs = [*before, *after]
    other_work = work_differences(runs)
    if other_work and not takes_other_work:
        said = "; ".join(first_few(other_work, _MAX_REASONS))
        raise UsageError(
            f"the runs do different work ({said}), so that a longer step need "
            "not be a slower one: compare runs of the same work, or add --anyway"
        )
    batch = _common_batch(runs)
    if batch is not None:
        before, after = ([run.scaled(batch / run.samples_per_step) for run in group] for group in (before, after))
    difference, mean = _differences(before, after, prior_cv)
    judged_by = _judged_by(difference, mean)
    has_same_layout = len({(run.world_size, run.mesh) for run in runs}) == 1 and batch is None and not other_work
    return Comparison(
        outcome=(mean if mean is not None and judged_by is Judged.MEAN else difference).outcome(),
        judged_by=judged_by,
        difference=difference,
        mean_difference=mean,
        before=tuple(before),
        after=tuple(after),
        per_batch=batch,
        prior_cv=prior_cv,
        parts=tuple(part_rows(before, after)),
        places=unit_changes(before, after, prior_cv=prior_cv, has_same_layout=has_same_layout),
        changes=tuple(changes(before, after)),
        other_work=tuple(other_work),
        differs_beyond_batch=differs_beyond_batch(runs),
        remarks=tuple(_remarks(before, after)),
    )


def _differences(
    before: Sequence[MeasuredRun], after: Sequence[MeasuredRun], prior_cv: float
) -> tuple[LogDifference, LogDifference | None]:
    """Return the differences of median and mean step."""
    has_means = all(run.log_mean_error is not None for run in (*before, *after))

    def of(time_ns: str, error: str, confidence: float) -> LogDifference:
        times, errors = (
            [[getattr(run, name) for run in group] for group in (before, after)] for name in (time_ns, error)
        )
        return log_difference(
            *([log(value) for value in group] for group in times),
            before_errors=[value or 0.0 for value in errors[0]],
            after_errors=[value or 0.0 for value in errors[1]],
            prior_cv=prior_cv,
            confidence=confidence,
        )

    median = of("p50_ns", "log_p50_error", _MEDIAN_CONFIDENCE if has_means else 0.95)
    return median, of("mean_ns", "log_mean_error", _MEAN_CONFIDENCE) if has_means else None


def _judged_by(median: LogDifference, mean: LogDifference | None) -> Judged:
    """Return the median, which is known better, unless the mean shows that throughput does not follow it.

    Where steps are of two kinds, short and long, the median is one of the more frequent kind, and may jump alone.
    """
    if mean is None:
        return Judged.MEDIAN
    is_of_all = mean.low <= median.value <= mean.high
    is_seen = median.is_beyond_noise or not mean.is_beyond_noise
    return Judged.MEDIAN if is_of_all and is_seen else Judged.MEAN


def _check_distinct(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> None:
    seen: set[tuple[str, int]] = set()
    by_identity: dict[str, str] = {}
    for run in (*before, *after):
        named = os.path.realpath(run.path), run.attempt  # a link to a run is that run
        if named in seen:
            raise UsageError(f"{run.path} (attempt {run.attempt}) is named twice: a run does not differ from itself")
        seen.add(named)
        if run.identity and by_identity.setdefault(run.identity, run.path) != run.path:
            raise UsageError(f"{run.path} is a copy of {by_identity[run.identity]}: a run does not differ from itself")


def _check_steps(runs: Sequence[MeasuredRun]) -> None:
    for run in runs:
        if run.log_p50_error is None:
            raise CannotTell(
                f"{run.path} has {run.num_steps} steps to use: 8 are needed to know how certain its median is"
            )


def _common_batch(runs: Sequence[MeasuredRun]) -> float | None:
    """Return the batch to which times are scaled where batches of one unit differ; None elsewhere."""
    batches = [run.samples_per_step for run in runs]
    is_comparable = is_work_known(runs) and len({run.samples_unit for run in runs}) == 1
    return batches[0] if is_comparable and max(batches) - min(batches) > 0.001 * max(batches) else None


def _remarks(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> list[str]:
    runs = [*before, *after]
    remarks = []
    if not is_work_known(runs):
        remarks.append("not all runs record their samples: that their steps do the same work is your word")
    tools = sorted({run.conditions.tool or "hpcpace" for run in runs})
    if len(tools) > 1:
        named = " and ".join(tools)
        remarks.append(f"recorded by {named}: what recording costs differs, and where phases and waits begin")
    for run in runs:
        if run.num_missing:
            remarks.append(f"{run.path}: {run.num_missing} of {run.world_size} ranks have no trace")
        if not run.is_final:
            remarks.append(f"{run.path}: not all traces are closed; it still runs, or ranks were killed")
    for run in runs:
        if run.log_mean_error is None and run.num_steps:
            remarks.append(
                f"{run.path}: its summary is of an older version and lacks the error of the mean step, so that median "
                "steps alone are judged, in which long steps do not show"
            )
    if any(len({(run.hosts, run.mesh) for run in group}) > 1 for group in (before, after)):
        remarks.append("repeats ran on different hosts or meshes: their spread includes that")
    return remarks


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
    return list(dict.fromkeys(_facts_that_differ(runs[0], runs[1:])))


def differs_beyond_batch(runs: Sequence[MeasuredRun]) -> bool:
    """Return whether more of the work differs than how many samples a step has, so that samples are not alike."""
    return bool(work_differences([replace(run, samples_per_step=0.0, is_per_sample=False) for run in runs]))


def _facts_that_differ(first: MeasuredRun, others: Sequence[MeasuredRun]) -> Iterator[str]:
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
class ComparedOperation:
    """A kind of operation in the runs of one group.

    Attributes:
        op: such as all_reduce.
        group_size: ranks that take part; 0 where unknown.
        is_of_all: whether these are all ranks of the run.
    """

    op: str
    group_size: int
    is_of_all: bool


def operation_of(kind: Transfers, run: MeasuredRun) -> ComparedOperation:
    """Return the operation of a run's transfers."""
    is_of_all = bool(kind.group_size) and kind.group_size == run.world_size
    return ComparedOperation(op=kind.op, group_size=kind.group_size, is_of_all=is_of_all)


def operation_names(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> dict[ComparedOperation, str]:
    """Return names under which the operations of both groups compare.

    Operations of one op are the same if they are of all ranks in both groups, or else of as many. What is left of it in
    both groups, where a mesh changed, is not distinguished and has one name.

    Args:
        before, after: the groups.
    """
    sides = [_operations(group) for group in (before, after)]
    names: dict[ComparedOperation, str] = {}
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


def _operations(group: Sequence[MeasuredRun]) -> set[ComparedOperation]:
    return {operation_of(kind, run) for run in group for kind in run.transfers}


def _named(
    op: str, before: Iterable[ComparedOperation], after: Iterable[ComparedOperation]
) -> dict[ComparedOperation, str]:
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


def _bytes_by_name(run: MeasuredRun, names: Mapping[ComparedOperation, str]) -> dict[str, float]:
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
