"""Measures a run on the ranks that can be believed, and finds what is missing from it.

A rank whose operations or steps contradict those of all others would distort every figure, so it is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from hpcpace.core.errors import CannotTell, with_reasons
from hpcpace.core.pool import Team
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, format_duration, rank_list
from hpcpace.core.thresholds import Thresholds, ThresholdValues, number
from hpcpace.diagnosis.evidence import timed_traces
from hpcpace.diagnosis.incomplete import (
    MARK_STEPS,
    contradictions_of,
    find_incomplete,
    incomplete_rank_line,
    open_line,
    problems_of,
    sound_stream,
)
from hpcpace.diagnosis.measure import Measured, Selection, measure
from hpcpace.diagnosis.operation_figures import measure_operations
from hpcpace.diagnosis.records import AttemptRecords
from hpcpace.diagnosis.summary import Incomplete, RunEnd
from hpcpace.diagnosis.topics.run_end import RunEndThresholds, end_lines, find_end, run_end_line
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.plausibility import Contradiction, DamageThresholds, contradictions
from hpcpace.metrics.steps import common_steps
from hpcpace.trace.attempt_reader import AttemptTraces, world_size_of
from hpcpace.trace.tables import RankTrace

# Clocks that are wrong by less are found by what they contradict; a rank that is so far off is not of this job.
_MAX_LOST_SHOWN = 10  # display: sentences on lost operations
_MAX_MISSING = 1 << 17  # memory: a damaged world size must not fill it


@dataclass(frozen=True, kw_only=True)
class CredibleThresholds(Thresholds, topic="credible"):
    """When all other ranks contradict one, so that nothing of its trace is believed."""

    max_steps_apart: float = number(10.0, "steps")
    """Steps by which a rank may be behind the others, who wait for it in every step: more is a clock."""
    max_apart_ns: int = number(NS_PER_S, "ns")
    """Time by which it may be behind however short steps are."""
    least_operations_share: float = number(0.5, "share")
    """Share of the operations of others of its role that a rank must have recorded."""
    max_steps_short_share: float = number(0.1, "share")
    """Share of the steps that the trace of a rank may lack at its end before the verdict says so."""


def credible_traces(traces: Sequence[RankTrace], limits: DamageThresholds) -> tuple[list[RankTrace], list[str]]:
    """Return the traces whose steps and phases do not contradict themselves, and a sentence for each contradiction."""
    kept, said = [], []
    for trace in traces:
        found = contradictions({**trace.tables, "collectives": sound_stream(trace).nothing})
        kept += [] if any(one.is_grave(limits) for one in found) else [trace]
        said += [_sentence(trace, found, limits)] if found else []
    return kept, said


def _sentence(trace: RankTrace, found: Sequence[Contradiction], limits: DamageThresholds) -> str:
    end = f"; nothing of rank {trace.header.rank} is believed" if any(one.is_grave(limits) for one in found) else ""
    return f"{trace.path}: {', '.join(map(str, found))}{end}"


def sentences_on_operations(measured: Measured) -> list[str]:
    """Return a sentence for each trace whose operations contradict themselves, though not too many of them."""
    limits = measured.thresholds.of(DamageThresholds)
    found = [(stream.original, contradictions_of(stream)) for stream in measured.operations.streams]
    return [_sentence(trace, said, limits) for trace, said in found if said]


def incredible_ranks(measured: Measured, limits: CredibleThresholds) -> tuple[set[int], list[str]]:
    """Return the ranks that all others contradict, and a sentence for each."""
    found = {
        **_silent(measured, limits.least_operations_share),
        **_apart_in_time(measured, limits),
        **_contradictory(measured),
    }
    return set(found), list(found.values())


def _contradictory(measured: Measured) -> dict[int, str]:
    """Return the ranks whose operations contradict themselves."""
    limits = measured.thresholds.of(DamageThresholds)
    found = [(stream.original, contradictions_of(stream)) for stream in measured.operations.streams]
    grave = [(trace, said) for trace, said in found if any(one.is_grave(limits) for one in said)]
    return {trace.header.rank: _sentence(trace, said, limits) for trace, said in grave}


def _apart_in_time(measured: Measured, limits: CredibleThresholds) -> dict[int, str]:
    """Return the ranks whose steps are at another time than the same steps of the others.

    Ranks of one job step together. The file of an earlier start with the same names, or a clock that is wrong by hours,
    must not be taken for a rank of it.
    """
    timed = measured.timed
    rows = [row for row, rank in enumerate(timed.ranks) if rank not in timed.unknown_clocks]
    if len(rows) < 2:
        return {}
    apart_ns = steps_apart_ns(measured.common.begin_ns[rows], float(np.median(measured.times_ns)), limits)
    return {
        timed.ranks[row]: (
            f"{timed.traces[row].path}: the steps of rank {timed.ranks[row]} are {format_duration(abs(ns))} "
            f"{'behind' if ns > 0 else 'before'} those of the others: it belongs to another start, "
            "or its clock is wrong; nothing of it is believed"
        )
        for row, ns in zip(rows, apart_ns.tolist(), strict=True)
        if ns
    }


def steps_apart_ns(begin_ns: Ints, step_ns: float, limits: CredibleThresholds) -> Floats:
    """Return by how much the steps of each rank are behind those of the others, float64, (num_ranks,).

    It is 0 where they are at the same time, give or take some steps and a second.

    Args:
        begin_ns: of the same steps of each rank on the common clock, int64, (num_ranks, num_steps).
        step_ns: how long a step takes.
        limits: how far apart they may be.
    """
    apart_ns = np.median(begin_ns - np.median(begin_ns, axis=0), axis=1)
    return np.where(np.abs(apart_ns) > max(limits.max_steps_apart * step_ns, limits.max_apart_ns), apart_ns, 0.0)


def _silent(measured: Measured, least_share: float) -> dict[int, str]:
    """Return the ranks that recorded far fewer operations than others of their role.

    The time of the operations that they lack would be taken for their own work.
    """
    num_operations = measured.operations.totals.num_operations
    found = {}
    for role in np.unique(measured.role):
        members = np.flatnonzero(measured.role == role)
        usual = float(np.median(num_operations[members]))
        # If it is not known who does the same work, ranks may do different things, but not nothing.
        is_role_known = measured.timed.traces[members[0]].header.pp >= 0
        least = least_share * usual if is_role_known else min(usual, 1.0)
        for row in members[num_operations[members] < least].tolist():
            trace = measured.timed.traces[row]
            found[trace.header.rank] = (
                f"{trace.path}: rank {trace.header.rank} has {num_operations[row]} operations in the steps in which "
                f"others of its role have {usual:.0f}; nothing of it is believed"
            )
    return found


def absent_ranks(traces: Sequence[RankTrace], world_size: int) -> tuple[int, ...]:
    """Return the ranks without a trace with which those with a trace communicate.

    If no trace says with whom its rank communicates, these are all ranks without a trace.
    """
    is_member = np.zeros(world_size, np.bool_)
    for trace in traces:
        members = trace.tables["groups"]["rank"]
        is_member[members[(members >= 0) & (members < world_size)]] = True
    is_absent = is_member if is_member.any() else ~is_member
    is_absent[[trace.header.rank for trace in traces]] = False
    return tuple(np.flatnonzero(is_absent).tolist())


def ranks_with_common_steps(traces: Sequence[RankTrace], selection: Selection) -> tuple[list[RankTrace], list[str]]:
    """Return the traces that have the step shared by most ranks, and a sentence on each of the others.

    A rank shares no step if it was killed before its first one, or if its table of steps is damaged.

    Args:
        traces: the readable traces.
        selection: which steps count.

    Returns:
        All traces and no sentence if all share that step, or if no rank has any step that counts.
    """
    panels = [common_steps([trace.tables["steps"]]) for trace in traces]
    steps = [panel.step[selection.used(panel)] for panel in panels]
    numbers, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *steps]), return_counts=True)
    if not len(numbers) or counts.max() == len(traces):
        return list(traces), []
    shared = numbers[counts.argmax()]
    is_kept = [bool(np.isin(shared, own)) for own in steps]
    kept = [trace for trace, has_shared in zip(traces, is_kept, strict=True) if has_shared]
    left_out = [trace for trace, has_shared in zip(traces, is_kept, strict=True) if not has_shared]
    sentences = [
        f"{trace.path}: rank {trace.header.rank} shares none of its {len(trace.tables['steps'])} steps with the other "
        f"ranks; it is left out of all figures{f': if it trains, {MARK_STEPS}' if trace.has_no_steps else ''}"
        for trace in left_out
    ]
    return kept, sentences


@dataclass(frozen=True, kw_only=True)
class CredibleRun:
    """A run as shown by the ranks that contradict neither themselves nor all others.

    Attributes:
        world_size: ranks of the run.
        traces: those of the credible ranks, ascending by rank.
        missing: ranks without a credible trace, ascending.
        hosts: host names by rank, as far as they are known.
        measured: what was measured on the credible ranks that share a step.
        incomplete: what is missing from the run.
        end: what ended the run before its time; None where nothing did.
    """

    world_size: int
    traces: Sequence[RankTrace]
    missing: tuple[int, ...]
    hosts: Mapping[int, str]
    measured: Measured
    incomplete: Incomplete
    end: RunEnd | None

    @property
    def judged_steps(self) -> str:
        """Which steps are judged, where traces of some ranks end long before the others'; else empty."""
        used, ends = self.measured.chosen.step, self.early_ends
        if not ends or not len(used):
            return ""
        last = max(int(trace.tables["steps"]["step"].max(initial=-1)) for trace in self.traces)
        whose = "the trace of" if len(ends) == 1 else "the traces of"
        return (
            f"judged are steps {used[0]} to {used[-1]} of {last + 1}: {whose} {rank_list(ends)} "
            f"{'ends' if len(ends) == 1 else 'end'} there"
        )

    @cached_property
    def early_ends(self) -> tuple[int, ...]:
        """Ranks whose traces lack many of the last steps of the others: what those did then is not judged.

        None while no trace is closed: a job that runs flushes its ranks one after the other.
        """
        traces = self.measured.timed.traces
        if not any(trace.closed_cleanly for trace in traces):
            return ()
        limit = self.measured.thresholds.of(CredibleThresholds).max_steps_short_share
        last = {trace.header.rank: int(trace.tables["steps"]["step"].max(initial=-1)) for trace in traces}
        num_steps = max(last.values()) - int(self.measured.panel.step[0]) + 1
        return tuple(rank for rank, step in last.items() if max(last.values()) - step > limit * num_steps)

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks that were not measured, and with which measured ones communicate."""
        return absent_ranks(self.measured.timed.traces, self.world_size)

    @property
    def stepless(self) -> tuple[int, ...]:
        """Those of them whose traces are complete and show no step."""
        found = {trace.header.rank for trace in self.traces if trace.has_no_steps}
        return tuple(rank for rank in self.absent if rank in found)


def measure_credible_run(
    found: AttemptTraces,
    selection: Selection,
    records: AttemptRecords,
    *,
    progress: Callable[[int, int], None] | None = None,
    team: Team | None = None,
    thresholds: ThresholdValues | None = None,
) -> CredibleRun:
    """Measure a run, and measure it again without the ranks that all others contradict, until none is left.

    Args:
        found: the readable traces, at least one, and what could not be read.
        selection: which steps to use.
        records: what the run's records say.
        progress, team: as `measure_operations` takes them. Processes of a team have the same arguments.
        thresholds: the numbers that decide; the defaults if None.

    Raises:
        CannotTell: there is no trace that can be believed, or no step that all ranks have.
    """
    limits = thresholds or ThresholdValues()
    world_size = world_size_of(found.traces)
    traces, contradictions = credible_traces(found.traces, limits.of(DamageThresholds))
    problems = [*found.problems, *contradictions]
    while traces:
        run = _measure_traces(traces, world_size, problems, selection, records, progress, team, limits)
        incredible, reasons = incredible_ranks(run.measured, limits.of(CredibleThresholds))
        if not incredible:
            return run
        traces = [trace for trace in traces if trace.header.rank not in incredible]
        problems += reasons
    raise CannotTell(with_reasons("there is no trace that can be believed", problems))


def _measure_traces(
    traces: Sequence[RankTrace],
    world_size: int,
    problems: Sequence[str],
    selection: Selection,
    records: AttemptRecords,
    progress: Callable[[int, int], None] | None,
    team: Team | None,
    limits: ThresholdValues,
) -> CredibleRun:
    ranks = {trace.header.rank for trace in traces}
    missing = tuple(sorted(set(range(min(world_size, _MAX_MISSING))) - ranks))
    hosts = {**records.run.hosts, **{trace.header.rank: trace.header.host for trace in traces}}
    said, left_out, reason = [*problems, *records.problems], list[str](), ""
    measured: Measured | None = None
    try:
        measured = measure(traces, selection, progress=progress, team=team, thresholds=limits)
        said += sentences_on_operations(measured)
        # What is missing shows in the steps of the host.
        timed, figures = replace(measured.timed, traces=traces), measured.operations
    except CannotTell as error:
        # One rank without a common step must not leave the others without figures.
        common, left_out = ranks_with_common_steps(traces, selection)
        reason, said = str(error), [*said, *left_out]
        timed, none = timed_traces(traces), common_steps([trace.tables["steps"] for trace in traces]).select(slice(0))
        figures = measure_operations(timed, none, none, progress=progress, team=team)
    said += dict.fromkeys(problem for stream in figures.streams for problem in problems_of(stream))
    incomplete = find_incomplete(timed, said, missing=missing, hosts=hosts, done=figures.completed)
    end = find_end(timed, incomplete, figures.completed.opened, limits.of(RunEndThresholds))
    if measured is None:
        if not left_out:
            ends = end_lines(timed, incomplete, hosts, limits.of(RunEndThresholds))
            if end is not None:
                ends.insert(0, run_end_line(end, hosts))
            # Where all ranks ended alike and nobody is to blame, the steps say more.
            num_first = int(end is not None or len(ends) > 1)
            rest = [*ends[num_first:][:_MAX_LOST_SHOWN], *_losses(incomplete, hosts)]
            reasons = [*ends[:num_first], reason, *rest]
            raise CannotTell(with_reasons(reasons[0], reasons[1:]))
        measured = measure(common, selection, progress=progress, team=team, thresholds=limits)
    run = CredibleRun(
        world_size=world_size,
        traces=traces,
        missing=missing,
        hosts=hosts,
        measured=measured,
        incomplete=incomplete,
        end=end,
    )
    if not run.judged_steps:
        return run
    return replace(run, incomplete=replace(incomplete, problems=(*incomplete.problems, run.judged_steps)))


def _losses(incomplete: Incomplete, hosts: Mapping[int, str]) -> list[str]:
    lost = [rank for rank in incomplete.ranks if rank.num_lost_operations][:_MAX_LOST_SHOWN]
    return [
        *(open_line(operation, hosts) for operation in incomplete.open),
        *(incomplete_rank_line(rank, hosts) for rank in lost),
        *incomplete.problems,
    ]
