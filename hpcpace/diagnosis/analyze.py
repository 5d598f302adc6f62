"""From a run directory to everything that its report says and draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from hpcpace.audit.snapshot_files import read_attempt as read_snapshots
from hpcpace.config import Config, DiagnosisConfig, ReportConfig
from hpcpace.diagnosis.attempts import attempt_rows
from hpcpace.diagnosis.credible_run import CredibleRun, measure_credible_run
from hpcpace.diagnosis.diagnose import Diagnosis
from hpcpace.diagnosis.evidence import TABLES_USED
from hpcpace.diagnosis.figures.audit import audit_figures
from hpcpace.diagnosis.figures.causes import cause_figures
from hpcpace.diagnosis.figures.comparable import comparable_figures
from hpcpace.diagnosis.figures.cores import core_figures
from hpcpace.diagnosis.figures.devices import device_figures
from hpcpace.diagnosis.figures.gpus import gpu_differences, gpu_state
from hpcpace.diagnosis.figures.hang import hang_figures
from hpcpace.diagnosis.figures.hotspots import place_excess
from hpcpace.diagnosis.figures.jitter import jitter_figures
from hpcpace.diagnosis.figures.network import NetworkEvidence, network_figures
from hpcpace.diagnosis.figures.network_plots import network_plots
from hpcpace.diagnosis.figures.overview import share_figures, step_figures, tracing_figures
from hpcpace.diagnosis.figures.pacing import with_slack
from hpcpace.diagnosis.figures.probed import probed_figures, probed_term
from hpcpace.diagnosis.figures.ranks import rank_figures
from hpcpace.diagnosis.figures.sensitivity import sensitivity_figures
from hpcpace.diagnosis.flow_evidence import flow_findings
from hpcpace.diagnosis.gpu_words import with_gpus
from hpcpace.diagnosis.incomplete import held_up
from hpcpace.diagnosis.measure import Measured, Selection, diagnose_run, hotspots_of, panels_of
from hpcpace.diagnosis.modes.finding import Panels
from hpcpace.diagnosis.modes.obstacle import NothingMeasured
from hpcpace.diagnosis.modes.straggler import work_excess
from hpcpace.diagnosis.plot_data import PlotData
from hpcpace.diagnosis.plot_source import plot_data
from hpcpace.diagnosis.probe_words import with_probe
from hpcpace.diagnosis.recorded_network import recorded_network
from hpcpace.diagnosis.records.attempt import AttemptRecords, read_records
from hpcpace.diagnosis.records.probe import ReadProbe
from hpcpace.diagnosis.summary import (
    AuditFigures,
    Causes,
    Jitter,
    RankRow,
    RoleRow,
    SensitivityRow,
    Summary,
    Switches,
    Verdict,
    World,
)
from hpcpace.diagnosis.verdict import audit_remarks, near_misses, remarks_of, verdict_of, with_end
from hpcpace.errors import CannotTell
from hpcpace.hang.from_traces import records_of
from hpcpace.hang.notices import Notice, read_notices
from hpcpace.hang.search import hang_in
from hpcpace.hang.views import FoundHang
from hpcpace.hang.words import describe
from hpcpace.metrics.jitter.growth import GrowthCurve
from hpcpace.metrics.lateness.hotspots import Hotspot
from hpcpace.metrics.steps import throughput
from hpcpace.parallel import Team, in_background
from hpcpace.quoting import one_line
from hpcpace.rundir import Attempt, RunDirectory
from hpcpace.topology.placing import PlacedTraces, place_traces
from hpcpace.topology.read import read_topology
from hpcpace.trace.attempt_reader import AttemptTraces, read_attempt, world_size_of
from hpcpace.trace.reader import RankTrace
from hpcpace.trace.same_run import of_one_run

_LEAST_SHARED = 20_000
"""Operations below which another process takes longer to start than to do its part."""

Progress = Callable[[int, int], None]
"""Takes how many parts of a stage are done, and how many there are."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What a report says, and what its page draws."""

    summary: Summary
    plots: PlotData


def analyze(
    run: RunDirectory,
    attempt: Attempt,
    selection: Selection,
    config: Config,
    *,
    begin_stage: Callable[[str], Progress],
    team: Team | None = None,
    probe: ReadProbe | None = None,
) -> Analysis | None:
    """Read an attempt of a run and return all that is known of it; None in all processes of a team but the first.

    Args:
        run: the run.
        attempt: the attempt to read.
        selection: which steps to use.
        config: memory for reading, and the thresholds of diagnosis and audit.
        begin_stage: takes the name of a stage that begins, and returns what is called as it advances.
        team: the processes that do this together.
        probe: of the hosts, to compare with; the one that was saved with the attempt if None.

    Raises:
        TraceError: no trace can be read.
        CannotTell: there is no step that all ranks have, or no trace that can be believed.
    """
    memory_bytes = config.report.memory_bytes
    progress = begin_stage("reading traces")

    def read() -> AttemptTraces:
        return read_attempt(attempt, progress=progress, most_rows=0, tables=TABLES_USED, memory_bytes=memory_bytes)

    found = read() if team is None else team.agree(read, _signature)
    measuring = begin_stage("measuring")
    if team is not None and team.rank:
        _credible_run(attempt, found, selection, config.diagnosis, progress=measuring, team=team)
        return None
    return analyze_traces(run, attempt, found, selection, config, progress=measuring, team=team, probe=probe)


def _signature(found: AttemptTraces) -> str:
    """Return what is the same wherever a run is read."""
    num_rows = sum(len(trace.tables["collectives"]) for trace in found.traces)
    return f"{len(found.traces)} traces with {num_rows} operations"


def analyze_traces(
    run: RunDirectory,
    attempt: Attempt,
    found: AttemptTraces,
    selection: Selection,
    config: Config | None = None,
    *,
    progress: Progress | None = None,
    team: Team | None = None,
    probe: ReadProbe | None = None,
) -> Analysis:
    """Return all that is known of an attempt whose traces have been read; arguments and errors as of `analyze`."""
    config = config or Config()
    placed = _placed(found, config.report)
    found = replace(found, traces=list(placed.traces))
    credible, records = _credible_run(attempt, found, selection, config.diagnosis, progress=progress, team=team)
    measured = credible.measured
    thresholds = _thresholds(config.diagnosis, records)
    snapshots, unread = read_snapshots(attempt)
    network = recorded_network(credible, snapshots)
    panels = _panels(measured, network, records, thresholds)
    hang = _hang(credible, thresholds, read_notices(attempt))
    probe = probe or records.probe
    figures = _figures(credible, panels, thresholds, hang, probe)
    probed = probed_figures(measured, probe)
    audit = audit_figures(snapshots, unread, figures.diagnosis.findings, credible.hosts, config.audit)
    verdict = _verdict(credible, panels, figures.diagnosis, _remarks(credible, panels, figures, audit))
    summary = Summary(
        run=str(run.path),
        run_id=credible.traces[0].header.run_id,
        attempt=attempt.number,
        attempts=tuple(other.number for other in run.attempts()),
        verdict=with_probe(verdict, probed, thresholds.probed_share),
        world=_world(credible, records),
        steps=step_figures(measured, selection, found.traces),
        throughput=throughput(measured.times_ns, measured.chosen.samples),
        shares=share_figures(measured),
        jitter=figures.jitter,
        hotspots=figures.hotspots,
        causes=figures.causes,
        tracing=tracing_figures(attempt, credible.traces),
        ranks=figures.ranks,
        roles=figures.roles,
        kinds=measured.operations.kinds,
        clocks=measured.clocks,
        cut_off=credible.incomplete,
        settings=asdict(thresholds),
        sensitivity=figures.sensitivity,
        history=attempt_rows(run, attempt, credible.traces, selection),
        outcome=records.result.outcome,
        dtype=records.run.dtype,
        memory=records.result.memory,
        audit=audit,
        pacing=with_slack(records.pacing, panels, are_waits_known=measured.are_waits_known),
        end=credible.end,
        unknown=measured.unknown,
        devices=device_figures(measured),
        cores=core_figures(panels),
        hang=hang_figures(hang),
        comparable=comparable_figures(measured, selection),
        network=network_figures(network),
        switches=_switches(placed, measured.places.num_leaves),
        probe=probed,
    )
    plots = replace(_plots(measured, panels, figures, records), network=network_plots(network, summary.network))
    return Analysis(summary=summary, plots=plots)


def _plots(measured: Measured, panels: Panels, figures: _Figures, records: AttemptRecords) -> PlotData:
    return plot_data(
        measured,
        panels,
        curve=figures.growth,
        is_node_unit=figures.jitter is not None and figures.jitter.is_node_unit,
        hotspots=figures.hotspots,
        versions=records.run.versions,
        late=figures.diagnosis.late_ranks,
    )


def _placed(found: AttemptTraces, settings: ReportConfig) -> PlacedTraces:
    """Return the traces with their hosts where the file of the settings says, if they name one."""
    trees = read_topology(Path(settings.topology)) if settings.topology else []
    return place_traces(found.traces, trees, file=settings.topology)


def _remarks(credible: CredibleRun, panels: Panels, figures: _Figures, audit: AuditFigures | None) -> tuple[str, ...]:
    return (
        *near_misses(figures.diagnosis, panels, figures.hotspots, figures.first_excess),
        *remarks_of(figures.causes, credible.hosts),
        *audit_remarks(audit),
    )


def _switches(placed: PlacedTraces, num_leaves: int) -> Switches:
    return Switches(source=placed.source if num_leaves else "", num_leaves=num_leaves, problems=placed.problems)


def _panels(measured: Measured, network: NetworkEvidence, records: AttemptRecords, settings: DiagnosisConfig) -> Panels:
    """Return what is judged, with what the job's connections show."""
    panels = panels_of(measured)
    panels = replace(panels, flows=flow_findings(network, settings, measured.operations.kinds, panels))
    # Hosts of a lab share the cores of one machine, which says nothing of the cluster that it shows.
    return replace(panels, cores=None, lab_cores=panels.cores) if records.run.is_lab else panels


def _thresholds(settings: DiagnosisConfig, records: AttemptRecords) -> DiagnosisConfig:
    """Return the thresholds for a run: that ranks share cores is no finding where they do so on purpose."""
    return replace(settings, core_share=1.0) if records.run.shared_cores else settings


def _credible_run(
    attempt: Attempt,
    found: AttemptTraces,
    selection: Selection,
    settings: DiagnosisConfig,
    *,
    progress: Progress | None,
    team: Team | None,
) -> tuple[CredibleRun, AttemptRecords]:
    records = read_records(attempt)
    try:
        return measure_credible_run(found, selection, records, progress=progress, team=team), records
    except CannotTell as error:
        raise CannotTell(f"{attempt.path}: {error}{_told_hang(attempt, found, records, settings)}") from None


def _told_hang(attempt: Attempt, found: AttemptTraces, records: AttemptRecords, settings: DiagnosisConfig) -> str:
    """Return who holds up a job of which nothing can be measured, such as one in its first step; empty if none does."""
    traces, _ = of_one_run(found.traces)
    if not traces:
        return ""
    job = records_of(traces, world_size=world_size_of(traces), hosts=records.run.hosts, notices=read_notices(attempt))
    hang = hang_in(job, hang_s=settings.hang_s)
    return "" if hang is None else f"; {describe(hang.hang, hang.job).headline}"


def examine(
    traces: Sequence[RankTrace],
    problems: Sequence[str] = (),
    selection: Selection | None = None,
    settings: DiagnosisConfig | None = None,
) -> Verdict:
    """Return the verdict on traces alone, without a run directory around them.

    If nothing can be judged, the verdict is that it cannot tell.

    Args:
        traces: the readable traces, at least one; those of other runs are left out.
        problems: what could not be read.
        selection: which steps to use; all but the warm-up when not given.
        settings: the thresholds.
    """
    of_run, _ = of_one_run(traces)
    found = AttemptTraces(list(of_run), tuple(problems))
    try:
        credible = measure_credible_run(found, selection or Selection(), AttemptRecords())
    except CannotTell as error:
        return verdict_of(
            Diagnosis(findings=(), obstacle=NothingMeasured(error=one_line(str(error))), smallest_effect=None), hosts={}
        )
    settings = settings or DiagnosisConfig()
    panels = panels_of(credible.measured)
    network, kinds = recorded_network(credible, ()), credible.measured.operations.kinds
    panels = replace(panels, flows=flow_findings(network, settings, kinds, panels))
    return _verdict(credible, panels, _diagnosis(credible, panels, settings, _hang(credible, settings, {})))


@dataclass(frozen=True, kw_only=True)
class _Figures:
    """The figures that rest on what was measured."""

    diagnosis: Diagnosis
    jitter: Jitter | None
    growth: GrowthCurve | None
    hotspots: tuple[Hotspot, ...]
    first_excess: float
    causes: Causes | None
    ranks: tuple[RankRow, ...]
    roles: tuple[RoleRow, ...]
    sensitivity: tuple[SensitivityRow, ...]


def _figures(
    credible: CredibleRun,
    panels: Panels,
    settings: DiagnosisConfig,
    hang: FoundHang | None,
    probe: ReadProbe | None,
) -> _Figures:
    measured = credible.measured
    # The steps are taken apart before the processes part, which then take about as long as each other.
    num_close = len(measured.close_up.evidence.operations) if measured.close_up is not None else 0
    start = in_background if num_close > _LEAST_SHARED else nullcontext
    with start(partial(_jitter_and_sensitivity, measured, panels, probe)) as finish:
        diagnosis = _diagnosis(credible, panels, settings, hang)
        excess = None if panels.host_timed else work_excess(panels, diagnosis.slow)
        hotspots = hotspots_of(measured, panels)
        # Nobody knows where waits for an absent rank began; they would be taken for transfers.
        causes = None if diagnosis.absent else cause_figures(measured, panels)
        ranks, roles = rank_figures(
            measured.timed.traces,
            measured.parts,
            measured.operations.totals,
            excess=excess,
            late=diagnosis.late_ranks,
            host_timed=panels.host_timed,
            unknown_waits=measured.unknown_waits,
        )
        (jitter, growth), sensitivity = finish()
    return _Figures(
        diagnosis=diagnosis,
        jitter=jitter,
        growth=growth,
        hotspots=hotspots,
        first_excess=place_excess(excess, measured.places, hotspots[0])[0] if hotspots and excess else 0.0,
        causes=causes,
        ranks=ranks,
        roles=roles,
        sensitivity=sensitivity,
    )


def _jitter_and_sensitivity(
    measured: Measured, panels: Panels, probe: ReadProbe | None
) -> tuple[tuple[Jitter | None, GrowthCurve | None], tuple[SensitivityRow, ...]]:
    term = probed_term(measured, probe, float(panels.transfer_ns.mean()))
    return jitter_figures(measured, panels, term), sensitivity_figures(measured)


def _diagnosis(credible: CredibleRun, panels: Panels, settings: DiagnosisConfig, hang: FoundHang | None) -> Diagnosis:
    return diagnose_run(
        credible.measured,
        panels,
        hang=hang,
        opened=credible.incomplete.open,
        absent=credible.absent,
        end=credible.end,
        settings=settings,
    )


def _hang(credible: CredibleRun, settings: DiagnosisConfig, notices: Mapping[int, Notice]) -> FoundHang | None:
    """Return what held the job up; None without an operation that a rank may have been in at its end."""
    if not held_up(credible.incomplete.open, credible.traces):
        return None
    records = records_of(credible.traces, world_size=credible.world_size, hosts=credible.hosts, notices=notices)
    return hang_in(records, hang_s=settings.hang_s)


def _verdict(credible: CredibleRun, panels: Panels, diagnosis: Diagnosis, remarks: Sequence[str] = ()) -> Verdict:
    verdict = verdict_of(diagnosis, hosts=credible.hosts, remarks=remarks)
    traces, steps = credible.measured.timed.traces, credible.measured.chosen
    states = [
        gpu_state(trace.tables["host"], begin_ns, end_ns) if "host" in trace.tables else None
        for trace, begin_ns, end_ns in zip(traces, steps.begin_ns[:, 0], steps.end_ns[:, -1], strict=True)
    ]
    differences = gpu_differences(states, panels.role.tolist(), panels.rank.tolist())
    verdict = with_gpus(verdict, differences, diagnosis.late_ranks, credible.hosts)
    return with_end(verdict, credible.end, credible.hosts)


def _world(credible: CredibleRun, records: AttemptRecords) -> World:
    headers = [trace.header for trace in credible.traces]
    return World(
        world_size=credible.world_size,
        ranks=tuple(header.rank for header in headers),
        missing=credible.missing,
        hosts=tuple(dict.fromkeys(header.host for header in headers)),
        mesh=headers[0].mesh,
        samples_unit=headers[0].samples_unit,
        emulation=records.run.emulation,
        imported=records.run.imported,
    )
