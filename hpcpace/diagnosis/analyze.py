"""From a run directory to everything that its report says and draws."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcpace.core.config import Config
from hpcpace.core.errors import CannotTell
from hpcpace.core.hostlist import short_list
from hpcpace.core.pool import Team, in_background
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.core.text import format_duration, listed, one_line, printable
from hpcpace.core.thresholds import ThresholdValues
from hpcpace.diagnosis.credible import CredibleRun, measure_credible_run
from hpcpace.diagnosis.devices import has_device
from hpcpace.diagnosis.evidence import TABLES_USED
from hpcpace.diagnosis.figures import causes, network, overview
from hpcpace.diagnosis.judged import JudgedAttempt, JudgedRun
from hpcpace.diagnosis.measure import Measured, Selection
from hpcpace.diagnosis.network_summary import ProbedFigures, ProbedRow
from hpcpace.diagnosis.plot_data import PlotData
from hpcpace.diagnosis.plot_source import plot_data
from hpcpace.diagnosis.records import AttemptRecords, ReadProbe, read_records
from hpcpace.diagnosis.settings import DiagnosisConfig, ReportConfig
from hpcpace.diagnosis.summary import AuditFigures, Jitter, SensitivityRow, Summary, Verdict
from hpcpace.diagnosis.topics.communication import with_probe
from hpcpace.diagnosis.topics.core_waiting import CoreThresholds
from hpcpace.diagnosis.topics.cores import core_figures, rank_figures
from hpcpace.diagnosis.topics.gpus import device_figures
from hpcpace.diagnosis.topics.pipeline import PipelineThresholds
from hpcpace.diagnosis.verdict import Diagnosis, Obstacle, audit_remarks, near_misses, remarks_of, verdict_of
from hpcpace.metrics.growth import TransferTerm
from hpcpace.metrics.links import GroupTransfers
from hpcpace.metrics.steps import throughput
from hpcpace.topology.switch_tree import place_traces
from hpcpace.trace.attempt_reader import AttemptTraces, of_one_run, read_attempt, world_size_of
from hpcpace.trace.reader import RankTrace

if TYPE_CHECKING:
    from hpcpace.audit.facts import Snapshot
    from hpcpace.hang.notices import Notice
    from hpcpace.probe.record import LatencyLaw, ProbeRecord
    from hpcpace.topology.switch_tree import SwitchTree


_MAX_ROWS = 32  # display: of transfers next to a probe
_OF_PROBE = {"send": "send_recv", "recv": "send_recv"}


class _Compared(NamedTuple):
    """What groups must have in common to be compared with one law."""

    op: str
    num_nodes: int
    num_ranks: int
    size_bytes: int


def probed_figures(run: JudgedRun) -> ProbedFigures | None:
    """Return the transfers next to the probe; None without one."""
    measured, probe = run.measured, run.probe
    if probe is None:
        return None
    refused = _refusal(measured, probe.record)
    laws = {(law.op, law.num_nodes, law.num_ranks): law for law in probe.record.laws}
    rows, num_unprobed = ([], 0) if refused else _rows(_kinds(measured), laws)
    total_ns = sum(row.transfer_ns * row.num_groups for row in rows)
    achieved = sum(row.probed_ns * row.num_groups for row in rows) / total_ns if total_ns else None
    return ProbedFigures(
        source=probe.source,
        probed_unix_ns=probe.record.started_unix_ns,
        refused=refused,
        achieved=achieved,
        rows=tuple(rows[:_MAX_ROWS]),
        num_unprobed=num_unprobed,
    )


def probed_term(run: JudgedRun) -> TransferTerm | None:
    """Return how the exposed transfer of a step grows with nodes by the laws of the probe; None where it cannot."""
    measured, probe, transfer_ns = run.measured, run.probe, float(run.panels.transfer_ns.mean())
    if probe is None or _refusal(measured, probe.record):
        return None
    from hpcpace.probe.laws import transfer_term

    num_nodes = measured.places.num_nodes
    calls = [(kind.op, float(kind.size_bytes), 1.0) for kind in _kinds(measured) if kind.num_nodes == num_nodes]
    return transfer_term(probe.record.laws, calls, num_nodes=num_nodes, transfer_ns=transfer_ns)


def _refusal(measured: Measured, probe: ProbeRecord) -> str:
    """Return why a probe says nothing about a run; empty if it does."""
    probed = {host.name for host in probe.hosts}
    others = [name for name in measured.places.node_names if name not in probed]
    if others:
        return f"it has no {short_list(others)}, where this run was: probe the hosts of the run"
    if not probe.laws:
        return "it has no laws: probe for longer (--time)"
    if any(has_device(trace) for trace in measured.timed.traces) and probe.device != "cuda":
        return "it was taken on CPUs and the run used GPUs: probe with --device cuda"
    return ""


def _kinds(measured: Measured) -> dict[_Compared, list[GroupTransfers]]:
    """Return the groups of each kind that communicate between nodes."""
    places = measured.places
    node_of = dict(zip(places.ranks, places.node.tolist(), strict=True))
    found: dict[_Compared, list[GroupTransfers]] = {}
    for group in measured.operations.transfers:
        if not all(member in node_of for member in group.members) or not np.isfinite(group.transfer_ns).any():
            continue
        num_nodes = len({node_of[member] for member in group.members})
        if num_nodes > 1:
            op = _OF_PROBE.get(group.op, group.op)
            kind = _Compared(op=op, num_nodes=num_nodes, num_ranks=len(group.members), size_bytes=group.size_bytes)
            found.setdefault(kind, []).append(group)
    return found


def _rows(
    kinds: dict[_Compared, list[GroupTransfers]], laws: dict[tuple[str, int, int], LatencyLaw]
) -> tuple[list[ProbedRow], int]:
    """Return rows, those with the most transfer first, and the number of kinds without a law."""
    rows = []
    for kind, groups in kinds.items():
        if (law := laws.get((kind.op, kind.num_nodes, kind.num_ranks))) is not None:
            transfer_ns = max(float(np.mean([np.nanmedian(group.transfer_ns) for group in groups])), 1.0)
            probed_ns = law.time_ns(kind.size_bytes)
            rows.append(
                ProbedRow(
                    **kind._asdict(),
                    num_groups=len(groups),
                    transfer_ns=transfer_ns,
                    probed_ns=probed_ns,
                    achieved=probed_ns / transfer_ns,
                    is_beyond=kind.size_bytes > law.most_bytes,
                )
            )
    return sorted(rows, key=lambda row: -row.transfer_ns * row.num_groups), len(kinds) - len(rows)


_MIN_SHARED = 20_000
"""Speed: operations below which another process takes longer to start than to do its part."""

Progress = Callable[[int, int], None]
"""Takes how many parts of a stage are done, and how many there are."""


def _snapshots(attempt: Attempt) -> tuple[Sequence[Snapshot], Sequence[str]]:
    """Return the snapshots of the audit, and what cannot be read of them; without any, nothing of the audit loads."""
    if not os.path.lexists(attempt.snapshot_dir):
        return (), ()
    from hpcpace.audit.snapshot_files import read_attempt

    return read_attempt(attempt)


def _audit_figures(run: JudgedAttempt) -> AuditFigures | None:
    """Return what the snapshots of an attempt say; None where it has none."""
    if not run.snapshots and not run.unread:
        return None
    # All rules take longer to load than the summary of a run without snapshots.
    from hpcpace.diagnosis.figures.audit import audit_figures

    return audit_figures(run)


FIGURES: Mapping[str, Callable[[JudgedAttempt], Any]] = {
    "world": overview.world_figures,
    "steps": overview.step_figures,
    "throughput": lambda run: throughput(run.measured.times_ns, run.measured.chosen.samples),
    "shares": overview.share_figures,
    "hotspots": lambda run: run.hotspots,
    # Nobody knows where waits for an absent rank began; they would be taken for transfers.
    "causes": lambda run: (
        None if run.diagnosis.absent else causes.cause_figures(run.measured, run.panels, run.limits(PipelineThresholds))
    ),
    "tracing": overview.tracing_figures,
    "ranks": overview.rank_rows,
    "roles": overview.role_rows,
    "kinds": lambda run: run.measured.operations.kinds,
    "clocks": lambda run: run.measured.sampled_clocks,
    "cut_off": lambda run: run.credible.incomplete,
    "settings": lambda run: asdict(run.thresholds),
    "thresholds": lambda run: run.config.of(ThresholdValues).table(),
    "history": lambda run: overview.attempt_rows(run.run, run.attempt, run.credible.traces, run.selection),
    "outcome": lambda run: run.records.result.outcome,
    "dtype": lambda run: run.records.run.dtype,
    "memory": lambda run: run.records.result.memory,
    "audit": _audit_figures,
    "pacing": overview.pacing_figures,
    "end": lambda run: run.credible.end,
    "unknown": lambda run: run.measured.unknown,
    "devices": lambda run: device_figures(run.measured),
    "cores": lambda run: core_figures(run.panels, run.limits(CoreThresholds)),
    "rank_cores": lambda run: rank_figures(run.panels, run.limits(CoreThresholds)),
    "hang": overview.hang_figures,
    "network": lambda run: network.network_figures(run.network),
    "comparable": overview.comparable_figures,
    "switches": overview.switch_figures,
    "probe": probed_figures,
}
"""By field of `Summary`, the function that fills it. Jitter and sensitivity take long, and have their own process."""


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
    memory_bytes = config.of(ReportConfig).memory_bytes
    progress = begin_stage("reading traces")

    def read() -> AttemptTraces:
        return read_attempt(attempt, progress=progress, most_rows=0, tables=TABLES_USED, memory_bytes=memory_bytes)

    found = read() if team is None else team.agree(read, _signature)
    measuring = begin_stage("measuring")
    if team is not None and team.rank:
        _credible_run(attempt, found, selection, config, progress=measuring, team=team)
        return None
    return _analysis(judge_traces(run, attempt, found, selection, config, progress=measuring, team=team, probe=probe))


# Notices of a hang and topology files are read by modules that most reports do not need.


def _notices(attempt: Attempt) -> dict[int, Notice]:
    if not attempt.hang_dir.exists():
        return {}
    from hpcpace.hang.notices import read_notices

    return read_notices(attempt)


def _switches(topology: str) -> Sequence[SwitchTree]:
    if not topology:
        return []
    from hpcpace.topology.switch_tree import read_topology

    return read_topology(Path(topology))


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
    probe: ReadProbe | None = None,
) -> Analysis:
    """Return all that is known of an attempt whose traces have been read; arguments and errors as of `analyze`."""
    return _analysis(judge_traces(run, attempt, found, selection, config, probe=probe))


def judge_traces(
    run: RunDirectory,
    attempt: Attempt,
    found: AttemptTraces,
    selection: Selection,
    config: Config | None = None,
    *,
    progress: Progress | None = None,
    team: Team | None = None,
    probe: ReadProbe | None = None,
) -> JudgedAttempt:
    """Return an attempt as all of its figures take it, measured; arguments and errors as of `analyze`."""
    config = config or Config()
    topology = config.of(ReportConfig).topology
    placed = place_traces(found.traces, _switches(topology), file=topology)
    found = replace(found, traces=list(placed.traces))
    credible, records = _credible_run(attempt, found, selection, config, progress=progress, team=team)
    snapshots, unread = _snapshots(attempt)
    return JudgedAttempt(
        credible=credible,
        records=records,
        selection=selection,
        config=config,
        snapshots=snapshots,
        unread=unread,
        notices=_notices(attempt),
        probe=probe or records.probe,
        run=run,
        attempt=attempt,
        placed=placed,
    )


def _analysis(judged: JudgedAttempt) -> Analysis:
    summary = summary_of(judged)
    plots = plot_data(judged, summary.jitter)
    return Analysis(
        summary=summary, plots=replace(plots, network=network.network_plots(judged.network, summary.network))
    )


def summary_of(judged: JudgedAttempt) -> Summary:
    """Return what a report says of a run: its figures, then its verdict."""
    measured, panels = judged.measured, judged.panels
    # The steps are taken apart before the processes part, which then take about as long as each other.
    num_close = len(measured.close_up.evidence.operations) if measured.close_up is not None else 0
    start = in_background if num_close > _MIN_SHARED else nullcontext
    with start(lambda: _jitter_and_sensitivity(judged)) as finish:
        figures = {name: of_run(judged) for name, of_run in FIGURES.items()}
        jitter, sensitivity = finish()
    hosts, diagnosis, hotspots = judged.credible.hosts, judged.diagnosis, judged.hotspots
    first = overview.place_excess(judged.excess, measured.places, hotspots[0])[0] if hotspots and judged.excess else 0.0
    remarks = (
        *near_misses(diagnosis, panels, hotspots, first, judged.config.of(ThresholdValues)),
        *remarks_of(figures["causes"], hosts, judged.config.of(ThresholdValues)),
        *_clock_remarks(judged.measured),
        *audit_remarks(figures["audit"]),
    )
    return Summary(
        run=str(judged.run.path),
        run_id=judged.credible.traces[0].header.run_id,
        attempt=judged.attempt.number,
        attempts=tuple(other.number for other in judged.run.attempts()),
        verdict=with_probe(judged.verdict(remarks), figures["probe"], judged.thresholds.probed_share),
        jitter=jitter,
        sensitivity=sensitivity,
        **figures,
    )


def _clock_remarks(measured: Measured) -> list[str]:
    """Return which clocks operations of devices have corrected."""
    samples = measured.samples
    if samples is None:
        return []
    of_host = {trace.header.host: ns for trace, ns in zip(samples.timed.traces, samples.ahead_ns.tolist(), strict=True)}
    wrong = dict.fromkeys(
        trace.header.host for trace, wrong in zip(samples.timed.traces, samples.is_wrong, strict=True) if wrong
    )
    who = listed([f"{printable(host)} by {format_duration(abs(of_host[host]))}" for host in wrong])
    return [f"clocks are wrong, {who}: operations of devices show it, and all times here are corrected by that"]


def _jitter_and_sensitivity(judged: JudgedRun) -> tuple[Jitter | None, tuple[SensitivityRow, ...]]:
    measured = judged.measured
    return causes.jitter_figures(measured, judged.panels, probed_term(judged)), causes.sensitivity_figures(measured)


def _credible_run(
    attempt: Attempt,
    found: AttemptTraces,
    selection: Selection,
    config: Config,
    *,
    progress: Progress | None,
    team: Team | None,
) -> tuple[CredibleRun, AttemptRecords]:
    records = read_records(attempt)
    try:
        return measure_credible_run(
            found, selection, records, progress=progress, team=team, thresholds=config.of(ThresholdValues)
        ), records
    except CannotTell as error:
        raise CannotTell(
            f"{attempt.path}: {error}{_hang_words(attempt, found, records, config.of(DiagnosisConfig))}"
        ) from None


def _hang_words(attempt: Attempt, found: AttemptTraces, records: AttemptRecords, settings: DiagnosisConfig) -> str:
    """Return who holds up a job of which nothing can be measured, such as one in its first step; empty if none does."""
    traces, _ = of_one_run(found.traces)
    if not traces:
        return ""
    from hpcpace.hang.from_traces import hang_in, records_of
    from hpcpace.hang.verdict import describe

    job = records_of(traces, world_size=world_size_of(traces), hosts=records.run.hosts, notices=_notices(attempt))
    hang = hang_in(job, hang_s=settings.hang_s)
    return "" if hang is None else f"; {describe(hang.hang, hang.job).headline}"


def examine(
    traces: Sequence[RankTrace],
    problems: Sequence[str] = (),
) -> Verdict:
    """Return the verdict on all steps of traces but the warm-up, without a run directory around them.

    If nothing can be judged, the verdict is that it cannot tell.

    Args:
        traces: the readable traces, at least one; those of other runs are left out.
        problems: what could not be read.
    """
    of_run, _ = of_one_run(traces)
    found = AttemptTraces(list(of_run), tuple(problems))
    try:
        credible = measure_credible_run(found, Selection(), AttemptRecords())
    except CannotTell as error:
        return verdict_of(
            Diagnosis(findings=(), obstacle=Obstacle(words=one_line(str(error))), smallest_effect=None), hosts={}
        )
    return JudgedRun(credible=credible, config=Config()).verdict()
