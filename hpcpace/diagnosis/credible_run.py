"""Measures a run on the ranks that can be believed, and finds out what is missing from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hpcpace.diagnosis.common_steps import ranks_with_common_steps
from hpcpace.diagnosis.credible import absent_ranks, credible_traces, incredible_ranks, sentences_on_operations
from hpcpace.diagnosis.ends import find_end
from hpcpace.diagnosis.evidence import timed_traces
from hpcpace.diagnosis.incomplete import find_incomplete
from hpcpace.diagnosis.measure import Measured, Selection, measure
from hpcpace.diagnosis.modes.run_end import RunEnd
from hpcpace.diagnosis.operation_figures import OperationFigures, measure_operations
from hpcpace.diagnosis.records.attempt import AttemptRecords
from hpcpace.diagnosis.sentences import incomplete_rank_line, open_line, run_end_line
from hpcpace.diagnosis.sound_stream import problems_of
from hpcpace.diagnosis.summary import Incomplete
from hpcpace.errors import CannotTell, with_reasons
from hpcpace.metrics.steps import common_steps
from hpcpace.parallel import Team
from hpcpace.trace.attempt_reader import AttemptTraces, world_size_of
from hpcpace.trace.reader import RankTrace

_MOST_LOST_SHOWN = 10
_MOST_MISSING = 1 << 17  # a damaged world size must not fill the memory


class _How(NamedTuple):
    """Who measures, and who is told of it."""

    progress: Callable[[int, int], None] | None
    team: Team | None


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
    def absent(self) -> tuple[int, ...]:
        """Ranks that were not measured, and with which measured ones communicate."""
        return absent_ranks(self.measured.timed.traces, self.world_size)


def measure_credible_run(
    found: AttemptTraces,
    selection: Selection,
    records: AttemptRecords,
    *,
    progress: Callable[[int, int], None] | None = None,
    team: Team | None = None,
) -> CredibleRun:
    """Measure a run, and measure it again without the ranks that all others contradict, until none is left.

    Args:
        found: the readable traces, at least one, and what could not be read.
        selection: which steps to use.
        records: what the run's records say.
        progress, team: as `measure_operations` takes them. Processes of a team have the same arguments.

    Raises:
        CannotTell: there is no trace that can be believed, or no step that all ranks have.
    """
    world_size = world_size_of(found.traces)
    traces, contradictions = credible_traces(found.traces)
    problems = [*found.problems, *contradictions]
    how = _How(progress, team)
    while traces:
        run = _measure_traces(traces, world_size, problems, selection, records, how)
        incredible, reasons = incredible_ranks(run.measured)
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
    how: _How,
) -> CredibleRun:
    ranks = {trace.header.rank for trace in traces}
    missing = tuple(sorted(set(range(min(world_size, _MOST_MISSING))) - ranks))
    hosts = {**records.run.hosts, **{trace.header.rank: trace.header.host for trace in traces}}
    problems = [*problems, *records.problems]
    try:
        measured = measure(traces, selection, progress=how.progress, team=how.team)
    except CannotTell as error:
        # One rank without a common step must not leave the others without figures.
        common, left_out = ranks_with_common_steps(traces, selection)
        figures = _without_steps(traces, how)
        problems = [*problems, *left_out, *_problems_of(figures)]
        incomplete = find_incomplete(
            timed_traces(traces), problems, missing=missing, hosts=hosts, done=figures.completed
        )
        end = find_end(timed_traces(traces), incomplete, figures.completed.opened)
        if not left_out:
            ended = [] if end is None else [run_end_line(end, hosts)]
            reasons = [*ended, str(error), *_losses(incomplete, hosts)]
            raise CannotTell(with_reasons(reasons[0], reasons[1:])) from None
        measured = measure(common, selection, progress=how.progress, team=how.team)
    else:
        problems = [*problems, *sentences_on_operations(measured), *_problems_of(measured.operations)]
        # What is missing shows in the steps of the host.
        timed, done = replace(measured.timed, traces=traces), measured.operations.completed
        incomplete = find_incomplete(timed, problems, missing=missing, hosts=hosts, done=done)
        end = find_end(timed, incomplete, done.opened)
    return CredibleRun(
        world_size=world_size,
        traces=traces,
        missing=missing,
        hosts=hosts,
        measured=measured,
        incomplete=incomplete,
        end=end,
    )


def _without_steps(traces: Sequence[RankTrace], how: _How) -> OperationFigures:
    """Return the figures of the operations of traces that share no step, and so cannot be measured together."""
    none = common_steps([trace.tables["steps"] for trace in traces]).select(slice(0))
    return measure_operations(timed_traces(traces), none, none, progress=how.progress, team=how.team)


def _problems_of(figures: OperationFigures) -> list[str]:
    return list(dict.fromkeys(problem for stream in figures.streams for problem in problems_of(stream)))


def _losses(incomplete: Incomplete, hosts: Mapping[int, str]) -> list[str]:
    lost = [rank for rank in incomplete.ranks if rank.num_lost_operations][:_MOST_LOST_SHOWN]
    return [
        *(open_line(operation, hosts) for operation in incomplete.open),
        *(incomplete_rank_line(rank, hosts) for rank in lost),
        *incomplete.problems,
    ]
