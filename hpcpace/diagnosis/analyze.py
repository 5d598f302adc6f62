"""From the traces of one attempt to the summary that the report shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hpcpace.audit.settings import AuditConfig
from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.attempts import attempt_rows
from hpcpace.diagnosis.common_steps import ranks_with_common_steps
from hpcpace.diagnosis.credible import absent_ranks, credible_traces, incredible_ranks
from hpcpace.diagnosis.diagnose import Diagnosis
from hpcpace.diagnosis.evidence import gather_evidence
from hpcpace.diagnosis.figures.audit import audit_figures
from hpcpace.diagnosis.figures.causes import cause_figures
from hpcpace.diagnosis.figures.jitter import jitter_figures
from hpcpace.diagnosis.figures.ranks import rank_figures, relative
from hpcpace.diagnosis.figures.sensitivity import sensitivity_figures
from hpcpace.diagnosis.incomplete import find_incomplete
from hpcpace.diagnosis.measure import Measured, Selection, diagnose_run, hotspots_of, measure, panels_of
from hpcpace.diagnosis.plot_data import PlotData
from hpcpace.diagnosis.plot_source import plot_data
from hpcpace.diagnosis.records.result import read_result_record
from hpcpace.diagnosis.records.run import read_run_record
from hpcpace.diagnosis.records.trial import read_trial_record
from hpcpace.diagnosis.sentences import incomplete_rank_line, open_line
from hpcpace.diagnosis.streamed_operations import is_on_disk, stream_operations, under_way_of
from hpcpace.diagnosis.summary import Incomplete, Shares, Steps, Summary, Tracing, Verdict, World
from hpcpace.diagnosis.verdict import audit_remarks, near_misses, remarks_of, verdict_of
from hpcpace.errors import CannotTell
from hpcpace.metrics.operations.overlap import overlap_share
from hpcpace.metrics.phases import BUSY, EXPOSED_TRANSFER, EXPOSED_WAIT
from hpcpace.metrics.steps import StepPanel, throughput
from hpcpace.parallel import in_background
from hpcpace.rundir import Attempt, RunDirectory
from hpcpace.trace.attempt_reader import world_size_of
from hpcpace.trace.reader import RankTrace
from hpcpace.trace.same_run import of_one_run
from hpcpace.trace.schema import StepFlag

_MOST_LOST_SHOWN = 10
_MOST_MISSING = 1 << 17  # a damaged world size must not fill the memory


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What a report says, and what its page draws."""

    summary: Summary
    plots: PlotData


def analyze(
    run: RunDirectory,
    attempt: Attempt,
    traces: Sequence[RankTrace],
    problems: Sequence[str],
    selection: Selection,
    settings: DiagnosisConfig | None = None,
    audit_settings: AuditConfig | None = None,
    *,
    world_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Analysis:
    """Return all that is known of one attempt.

    Args:
        run: the run.
        attempt: its attempt.
        traces: the readable traces, ascending by rank; at least one.
        problems: what could not be read.
        selection: which steps to use.
        settings: the thresholds of the diagnosis.
        audit_settings: those of the audit.
        world_size: ranks of the run; what most traces say when not given.
        progress: called with the number of ranges measured and their number, where a run is measured in ranges.

    Raises:
        CannotTell: no step that all ranks have is left, or no trace that can be believed.
    """
    settings = settings or DiagnosisConfig()
    world_size = world_size or world_size_of(traces)
    traces, contradictory = credible_traces(traces)
    problems = [*problems, *contradictory]
    if not traces:
        raise CannotTell("\n- ".join([f"{attempt.path}: there is no trace that can be believed", *problems]))
    # What does not fit into memory is folded when it is known which steps count.
    evidence = None if is_on_disk(traces) else gather_evidence(traces)
    ranks = {trace.header.rank for trace in traces}
    missing = tuple(sorted(set(range(min(world_size, _MOST_MISSING))) - ranks))
    unusable: list[str] = []
    record, result = read_run_record(attempt, unusable), read_result_record(attempt, unusable)
    pacing = read_trial_record(attempt, unusable)
    hosts = {**record.hosts, **{trace.header.rank: trace.header.host for trace in traces}}
    together, apart, nothing_common = traces, list[str](), ""
    try:
        measured = measure(traces, selection, evidence=evidence, progress=progress)
    except CannotTell as error:
        together, apart = ranks_with_common_steps(traces, selection)
        nothing_common = f"{attempt.path}: {error}"
    whole, streamed = evidence, None
    if whole is None:
        streamed = measured.streamed if not nothing_common else None
        if streamed is None:
            streamed, kept = stream_operations(traces, None)
            whole = gather_evidence(kept)
        else:
            whole = measured.evidence
    incomplete = find_incomplete(
        whole,
        (*problems, *unusable, *apart, *(streamed.problems if streamed else ())),
        missing=missing,
        hosts=hosts,
        done=streamed.completed if streamed else None,
    )
    if nothing_common and not apart:
        raise CannotTell("\n- ".join([nothing_common, *_what_is_cut(incomplete, hosts)]))
    if apart:
        measured = measure(together, selection, progress=progress)
    incredible, why = incredible_ranks(measured)
    if incredible:
        return analyze(
            run,
            attempt,
            [trace for trace in traces if trace.header.rank not in incredible],
            [*problems, *why],
            selection,
            settings,
            audit_settings,
            world_size=world_size,
            progress=progress,
        )
    panel, chosen, parts, clocks = measured.panel, measured.chosen, measured.parts, measured.clocks
    panels = panels_of(measured)
    # Of all that rests on the panels, jitter takes about half of the time, of large runs more than to fork.
    apart_from_others = in_background if measured.streamed is not None else nullcontext
    with apart_from_others(partial(jitter_figures, measured, panels)) as figures_of_jitter:
        diagnosis = diagnose_run(
            measured,
            panels,
            clocks=clocks,
            incomplete=incomplete,
            settings=settings,
            absent=absent_ranks(measured.evidence.traces, world_size),
        )
        hotspots = hotspots_of(measured, panels)
        # Of waits for an absent rank nobody knows where they began; they would pass for transfers.
        causes = None if diagnosis.absent else cause_figures(measured, panels)
        rows, roles = rank_figures(measured.evidence.traces, parts, measured.totals, has_messages=measured.has_messages)
        sensitivity = sensitivity_figures(measured)
        jitter, curve = figures_of_jitter()
    audit = audit_figures(attempt, diagnosis.findings, hosts, audit_settings)
    summary = Summary(
        run=str(run.path),
        run_id=traces[0].header.run_id,
        attempt=attempt.number,
        attempts=tuple(other.number for other in run.attempts()),
        verdict=verdict_of(
            diagnosis,
            hosts=hosts,
            remarks=(
                *near_misses(diagnosis, panels, hotspots),
                *remarks_of(causes, hosts),
                *audit_remarks(audit),
            ),
        ),
        world=World(
            world_size=world_size,
            ranks=tuple(trace.header.rank for trace in traces),
            missing=missing,
            hosts=tuple(dict.fromkeys(trace.header.host for trace in traces)),
            mesh=traces[0].header.mesh,
            samples_unit=traces[0].header.samples_unit,
            emulation=record.emulation,
        ),
        steps=_steps(panel, measured.used, selection),
        throughput=throughput(measured.times_ns, chosen.samples),
        shares=_shares(parts, _overlap(measured)),
        jitter=jitter,
        hotspots=hotspots,
        causes=causes,
        tracing=_tracing(attempt, traces),
        ranks=rows,
        roles=roles,
        kinds=measured.kinds,
        clocks=clocks,
        incomplete=incomplete,
        settings=asdict(settings),
        sensitivity=sensitivity,
        history=attempt_rows(run, attempt, traces, selection),
        outcome=result.outcome,
        memory=result.memory,
        audit=audit,
        pacing=pacing,
    )
    plots = plot_data(
        measured,
        panels,
        curve=curve,
        is_node_unit=jitter is not None and jitter.is_node_unit,
        hotspots=hotspots,
        versions=record.versions,
    )
    return Analysis(summary=summary, plots=plots)


def summarize(
    run: RunDirectory,
    attempt: Attempt,
    traces: Sequence[RankTrace],
    problems: Sequence[str],
    selection: Selection,
    settings: DiagnosisConfig | None = None,
) -> Summary:
    """Return the summary of one attempt; arguments and errors as those of `analyze`."""
    return analyze(run, attempt, traces, problems, selection, settings).summary


def examine(
    traces: Sequence[RankTrace],
    problems: Sequence[str] = (),
    selection: Selection | None = None,
    settings: DiagnosisConfig | None = None,
) -> Verdict:
    """Return the verdict on traces alone, without a run directory around them; arguments as for `summarize`.

    Where nothing can be judged, it is that it cannot tell.
    """
    of_run, _ = of_one_run(traces)
    try:
        measured = _believed(of_run, selection or Selection())
    except CannotTell as error:
        return verdict_of(Diagnosis(findings=(), cannot_tell=str(error), smallest_effect=None), hosts={})
    hosts = {trace.header.rank: trace.header.host for trace in measured.evidence.traces}
    diagnosis = diagnose_run(
        measured,
        panels_of(measured),
        clocks=measured.clocks,
        incomplete=find_incomplete(measured.evidence, problems, missing=(), hosts=hosts),
        settings=settings or DiagnosisConfig(),
        absent=absent_ranks(measured.evidence.traces, world_size_of(of_run)),
    )
    return verdict_of(diagnosis, hosts=hosts)


def _believed(traces: Sequence[RankTrace], selection: Selection) -> Measured:
    """Return what the figures rest on, of the ranks that contradict neither themselves nor all others.

    Raises:
        CannotTell: nothing is left.
    """
    traces, contradictory = credible_traces(traces)
    if not traces:
        raise CannotTell("\n- ".join(["there is no trace that can be believed", *contradictory]))
    measured = measure(traces, selection, evidence=gather_evidence(traces))
    incredible, _ = incredible_ranks(measured)
    if not incredible:
        return measured
    return _believed([trace for trace in traces if trace.header.rank not in incredible], selection)


def _what_is_cut(incomplete: Incomplete, hosts: Mapping[int, str]) -> list[str]:
    lost = [rank for rank in incomplete.ranks if rank.num_lost_operations][:_MOST_LOST_SHOWN]
    return [
        *(open_line(operation, hosts) for operation in incomplete.open),
        *(incomplete_rank_line(rank, hosts) for rank in lost),
        *incomplete.problems,
    ]


def _shares(parts: NDArray[np.float64], overlap: float | None) -> Shares:
    share = relative(parts.sum(axis=(0, 1)))
    busy, wait, transfer = (float(share[list(of)].sum()) for of in (BUSY, EXPOSED_WAIT, EXPOSED_TRANSFER))
    other = max(1.0 - busy - wait - transfer, 0.0)
    return Shares(busy=busy, exposed_wait=wait, transfer=transfer, other=other, overlap=overlap)


def _overlap(measured: Measured) -> float | None:
    """Return the share of communication that is hidden."""
    streamed = measured.streamed
    under_way_ns = under_way_of(measured.evidence, measured.in_steps) if streamed is None else streamed.under_way_ns
    exposed_ns = measured.parts[:, :, [*EXPOSED_WAIT, *EXPOSED_TRANSFER]].sum(axis=(1, 2))
    return overlap_share(under_way_ns, exposed_ns)


def _steps(panel: StepPanel, used: NDArray[np.bool_], selection: Selection) -> Steps:
    flags = panel.flags[used]
    return Steps(
        num_used=int(used.sum()),
        first=int(panel.step[used][0]),
        last=int(panel.step[used][-1]),
        num_common=len(panel),
        num_seen=panel.num_seen,
        num_warmup=0 if selection.include_warmup else int(((panel.flags & StepFlag.WARMUP) != 0).sum()),
        num_checkpoint=int(((flags & StepFlag.CHECKPOINT) != 0).sum()),
        num_eval=int(((flags & StepFlag.EVAL) != 0).sum()),
    )


def _tracing(attempt: Attempt, traces: Sequence[RankTrace]) -> Tracing:
    accounts = [trace.tables["account"] for trace in traces]
    cost_ns = sum(int(account["cost_ns"].sum()) for account in accounts)
    span_ns = sum(
        int(account["time_ns"].max()) - int(trace.tables["steps"]["begin_ns"].min(initial=account["time_ns"].max()))
        for trace, account in zip(traces, accounts, strict=True)
        if len(account)
    )
    return Tracing(
        overhead_share=cost_ns / span_ns if span_ns > 0 else None,
        size_bytes=_size_bytes(attempt),
        num_events=sum(int(account["events"].sum()) for account in accounts),
        num_dropped=sum(int(account["dropped"].sum()) for account in accounts),
    )


def _size_bytes(attempt: Attempt) -> int:
    """Return what the traces take on disk; nothing where they have been taken away since they were read."""
    try:
        with attempt.open() as folder, folder.folder(attempt.trace_dir.name) as traces:
            names = {name for path in attempt.trace_files().values() for name in (path.name, path.stem + ".journal")}
            return sum(traces.size_bytes(name) for name in names)
    except OSError:
        return 0
