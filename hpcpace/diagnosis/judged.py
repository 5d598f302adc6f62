"""A run as every figure of its report takes it: its measurements, its diagnosis, and what its flows show of links.

Each part is computed when it is first asked for, so a verdict on traces alone takes no more than it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hpcpace.core.config import Config
from hpcpace.core.errors import CannotTell
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.core.text import listed, printable, rank_list
from hpcpace.core.thresholds import Thresholds, ThresholdValues, number
from hpcpace.diagnosis.clocks import ClockThresholds, are_exits_early
from hpcpace.diagnosis.close_up import touching
from hpcpace.diagnosis.credible import CredibleRun
from hpcpace.diagnosis.devices import is_host_timed, is_on_device, is_timed_there
from hpcpace.diagnosis.figures.network import NetworkEvidence, NetworkThresholds, StepWindow, recorded_network
from hpcpace.diagnosis.finding import Case, Panels
from hpcpace.diagnosis.host_pace import pace_of
from hpcpace.diagnosis.incomplete import held_up
from hpcpace.diagnosis.measure import Measured, Selection, node_by_rank, own_excess_ns, panels_of
from hpcpace.diagnosis.records import AttemptRecords, ReadProbe
from hpcpace.diagnosis.settings import DiagnosisConfig, ReportConfig
from hpcpace.diagnosis.stops import GrowingMemory, GrowthThresholds, growing_memory, memory_limits
from hpcpace.diagnosis.summary import Verdict
from hpcpace.diagnosis.topics.gpus import GpuThresholds, gpu_differences, gpu_state, with_gpus
from hpcpace.diagnosis.topics.straggler import work_excess
from hpcpace.diagnosis.verdict import Diagnosis, diagnose, verdict_of, with_end
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.arrivals import ArrivalThresholds, LateArrival, late_arrivals
from hpcpace.metrics.communication import OperationKind
from hpcpace.metrics.flow_figures import (
    FigureThresholds,
    FlowFindings,
    LinkCause,
    LinkFault,
    flow_figures,
    foreign_on_links,
)
from hpcpace.metrics.flow_job import FlowLimits, FlowThresholds
from hpcpace.metrics.flows import Flows
from hpcpace.metrics.host_waits import HostPaceThresholds, cpus_of
from hpcpace.metrics.hotspots import Hotspot, HotspotThresholds, delay_hotspots
from hpcpace.metrics.link_faults import (
    Stretch,
    StretchThresholds,
    in_stretches,
    locate_by_flows,
    select_flows,
    slow_stretches,
    within,
)
from hpcpace.metrics.links import GroupTransfers, LinkFindings, TransferThresholds, locality, locate_links
from hpcpace.metrics.operations import MESSAGE_NAMES
from hpcpace.metrics.roles import ExcessThresholds, WorkExcess
from hpcpace.metrics.topology import Topology
from hpcpace.topology.switch_tree import PlacedTraces

if TYPE_CHECKING:
    from hpcpace.audit.facts import Snapshot
    from hpcpace.hang.notices import Notice
    from hpcpace.hang.views import FoundHang


_MAX_SETTING = 60  # display: letters of a variable
_LOWER_QUARTILE = 0.25  # statistics: of the transfers of the fast groups
Limits = TypeVar("Limits", bound=Thresholds)


@dataclass(frozen=True, kw_only=True)
class JudgedRun:
    """What was measured on traces, and what follows from it.

    Attributes:
        credible: the run as its credible ranks show it.
        records: what its records say; empty without a run directory.
        selection: which steps were used.
        config: the thresholds of diagnosis and audit.
        snapshots, unread: what the audit saved with the run, and why some of it cannot be read.
        notices: what ranks wrote when a step had lasted too long.
        probe: of the hosts, to compare with.
    """

    credible: CredibleRun
    records: AttemptRecords = field(default_factory=AttemptRecords)
    selection: Selection = field(default_factory=Selection)
    config: Config = field(default_factory=Config)
    snapshots: Sequence[Snapshot] = ()
    unread: Sequence[str] = ()
    notices: Mapping[int, Notice] = field(default_factory=dict)
    probe: ReadProbe | None = None

    @property
    def measured(self) -> Measured:
        """What was measured on the credible ranks."""
        return self.credible.measured

    @property
    def thresholds(self) -> DiagnosisConfig:
        """The thresholds of this run."""
        return self.config.of(DiagnosisConfig)

    @property
    def is_shared_on_purpose(self) -> bool:
        """Whether the user says that ranks share cores on purpose: of this report, or else of the run."""
        said = self.config.of(ReportConfig).shared_cores
        return self.records.run.shared_cores if said is None else said

    def limits(self, kind: type[Limits]) -> Limits:
        """Return the thresholds of one topic."""
        return self.config.of(ThresholdValues).of(kind)

    @cached_property
    def network(self) -> NetworkEvidence:
        """What was recorded of the network."""
        return recorded_network(self.credible, self.snapshots, self.limits(NetworkThresholds))

    @cached_property
    def panels(self) -> Panels:
        """What is judged, with what the job's connections show."""
        panels, kinds = panels_of(self.measured), self.measured.operations.kinds
        flows = flow_findings(self.network, self.thresholds, kinds, panels, self.config.of(ThresholdValues))
        panels = replace(panels, flows=flows, bindings=_bindings(self.snapshots, panels))
        if panels.cores is None or not self.records.run.is_lab:
            return panels
        return replace(panels, cores=panels.cores.in_lab(panels.node))

    @cached_property
    def judged_panels(self) -> Panels:
        """The panels without steps in which ranks did not run: a single one would hide all that recurs."""
        kept = self.panels.without_steps(self.measured.stops.is_kept)
        return self.panels if kept is self.panels else replace(kept, transient_share=None)

    @cached_property
    def memory(self) -> tuple[GrowingMemory, ...]:
        """The ranks whose memory grows steadily."""
        measured = self.measured
        return growing_memory(
            measured.timed, measured.chosen, memory_limits(self.snapshots), self.limits(GrowthThresholds)
        )

    @cached_property
    def hang(self) -> FoundHang | None:
        """What held the job up; None without an operation that a rank may have been in at its end."""
        run = self.credible
        if not held_up(run.incomplete.open, run.traces):
            return None
        from hpcpace.hang.from_traces import hang_in, records_of

        job = records_of(run.traces, world_size=run.world_size, hosts=run.hosts, notices=self.notices)
        return hang_in(job, hang_s=self.thresholds.hang_s)

    def check_whole(self) -> None:
        """Refuse a run that does not show all that its steps do.

        Raises:
            CannotTell: it hung, or lacks ranks.
        """
        if self.hang is not None:
            raise CannotTell("the run hung, so that its steps do not show all that they do: take one that ended")
        if self.credible.missing or len(self.credible.traces) < self.credible.world_size:
            raise CannotTell(f"{rank_list(self.credible.missing)} left no trace that can be used: trace all ranks")

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """What is wrong with the run."""
        measured, settings, panels = self.measured, self.thresholds, self.judged_panels
        groups, places, clocks = measured.operations.transfers, measured.places, measured.clocks
        min_steps = self.limits(TransferThresholds).min_steps
        are_messages_timed = any(is_on_device(trace) for trace in measured.timed.traces)
        links = _slow_links(groups if are_messages_timed else _collectives(groups), places, settings, min_steps)
        if any(is_host_timed(trace) for trace in measured.timed.traces):
            panels = replace(panels, arrivals=_late_arrivals(measured, panels.node, settings.level))
        return diagnose(
            Case(
                panels=panels,
                hang=self.hang,
                opened=self.credible.incomplete.open,
                links=_widened(links, _collectives(groups) or groups, clocks.median_halfwidth_ns or 0.0),
                touches=partial(touching, measured.close_up, places) if measured.close_up is not None else None,
                crossing=locality(groups, places, min_steps),
                is_clock_wrong=clocks.num_wrong > 0,
                are_exits_early=are_exits_early(clocks, self.limits(ClockThresholds)),
                rebuilt=measured.rebuilt if measured.stops.is_kept.all() else None,
                pace=lambda step, rows: pace_of(
                    measured.timed.traces, self.limits(HostPaceThresholds), step=step, rows=rows
                ),
                issued=lambda: measured.close_up.issued if measured.close_up is not None else None,
                stretches=lambda phase: measured.close_up.stretches(phase) if measured.close_up is not None else None,
                pass_work=measured.close_up.pass_work if measured.close_up is not None else None,
                absent=self.credible.absent,
                stepless=self.credible.stepless,
                end=self.credible.end,
                is_shared_on_purpose=self.is_shared_on_purpose,
                stops=measured.stops,
                memory=self.memory,
                settings=settings,
                thresholds=self.config.of(ThresholdValues),
            )
        )

    @cached_property
    def excess(self) -> WorkExcess | None:
        """The excess of own work over the roles; None where own work is not known."""
        return (
            None
            if self.panels.host_timed
            else work_excess(self.judged_panels, self.diagnosis.slow, self.limits(ExcessThresholds))
        )

    @cached_property
    def hotspots(self) -> tuple[Hotspot, ...]:
        """The places whose ranks do their own work more slowly than others of their role; none where not known."""
        return hotspots_of(self.measured, self.judged_panels)

    def verdict(self, remarks: Sequence[str] = ()) -> Verdict:
        """Return the verdict, with what held GPUs back and what ended the run; `remarks` are added to its reasons."""
        hosts, panels, limits = self.credible.hosts, self.panels, self.limits(GpuThresholds)
        traces, steps = self.measured.timed.traces, self.measured.chosen
        states = [
            gpu_state(trace.tables["host"], begin_ns, end_ns, limits) if "host" in trace.tables else None
            for trace, begin_ns, end_ns in zip(traces, steps.begin_ns[:, 0], steps.end_ns[:, -1], strict=True)
        ]
        differences = gpu_differences(states, panels.role.tolist(), panels.rank.tolist(), limits)
        verdict = verdict_of(self.diagnosis, hosts=hosts, remarks=remarks)
        verdict = with_gpus(verdict, differences, self.diagnosis.late_ranks, hosts)
        verdict = with_end(verdict, self.credible.end, hosts)
        judged = self.credible.judged_steps
        if not judged:
            return verdict
        find_out = "find out why a trace ends before the others: the list of what is missing, below, says more"
        next_ = verdict.next if verdict.findings else (find_out,)
        return replace(verdict, headline=f"{verdict.headline}; {judged}", next=next_)


@dataclass(frozen=True, kw_only=True)
class JudgedAttempt(JudgedRun):
    """The same of an attempt with its run directory; `placed` are all its readable traces and their leaf switches."""

    run: RunDirectory
    attempt: Attempt
    placed: PlacedTraces


def hotspots_of(measured: Measured, panels: Panels) -> tuple[Hotspot, ...]:
    """Return the places whose ranks do their own work more slowly than others of their role; none where not known."""
    excess_ns = own_excess_ns(panels)
    limits = measured.thresholds.of(HotspotThresholds)
    if excess_ns is None:
        return ()
    return delay_hotspots(excess_ns, measured.places, level=limits.level, min_steps=limits.min_steps)


def _bindings(snapshots: Sequence[Snapshot], panels: Panels) -> dict[int, tuple[str, str]]:
    """Return the settings of OpenMP that narrow the CPUs of ranks, and the line that undoes them, by rank.

    A rank whose cgroup has no more CPUs than it may use was not narrowed by them.
    """
    if panels.cores is None or not snapshots:
        return {}
    from hpcpace.audit.rules.affinity import binding_variables, unbound_fix  # with the logs that rules read

    cpus, found = dict(zip(panels.rank.tolist(), panels.cores.cpus, strict=True)), {}
    for facts in (rank for snapshot in snapshots for rank in snapshot.ranks):
        names, own = binding_variables(facts.variables), cpus.get(facts.rank, frozenset())
        could_have = cpus_of(facts.cgroup_cpus or "")
        if names and own and (not could_have or len(own) < len(could_have)):
            settings = [f"{name}={printable(facts.variables[name])[:_MAX_SETTING]}" for name in names]
            found[facts.rank] = listed(settings), unbound_fix(names)
    return found


def _collectives(groups: Sequence[GroupTransfers]) -> list[GroupTransfers]:
    return [group for group in groups if group.op not in MESSAGE_NAMES]


def _slow_links(
    groups: Sequence[GroupTransfers], places: Topology, settings: DiagnosisConfig, min_steps: int
) -> LinkFindings:
    """Return the slow links by collectives, and where these cannot single one out by messages as well.

    How long a message takes depends on its receiver, too, and on hosts also on when its sender hands it over; that of a
    collective depends on the links alone.
    """
    collectives = _collectives(groups)
    find = partial(
        locate_links,
        topology=places,
        floor_share=settings.link_share,
        level=settings.level,
        min_steps=min_steps,
    )
    by_collectives = find(collectives)
    if len(collectives) == len(groups) or by_collectives.is_identifiable:
        return by_collectives
    by_all = find(groups)
    if not by_collectives.culprits:
        return by_all
    single = [culprit for culprit in by_all.culprits if len(culprit.ids) == 1]
    culprits = tuple(
        next((one for one in single if set(one.ids) < set(culprit.ids)), culprit) for culprit in by_collectives.culprits
    )
    is_settled = all(len(culprit.ids) == 1 for culprit in culprits)
    return replace(
        by_collectives,
        culprits=culprits,
        is_identifiable=is_settled or by_collectives.is_identifiable,
        reason="" if is_settled else by_collectives.reason,
    )


def _widened(found: LinkFindings, groups: Sequence[GroupTransfers], halfwidth_ns: float) -> LinkFindings:
    """Return slow links with the clocks' error in their intervals: it does not shrink with more steps.

    A transfer is counted from the last enter of all ranks, so it is wrong by up to the half-widths, relative to the
    fast groups' transfer.
    """
    usual_ns = [float(np.nanmedian(group.transfer_ns)) for group in groups if np.isfinite(group.transfer_ns).any()]
    if not found.culprits or not usual_ns:
        return found
    share = halfwidth_ns / max(float(np.quantile(usual_ns, _LOWER_QUARTILE)), 1.0)
    culprits = []
    for culprit in found.culprits:
        effect, extra = culprit.effect, share * (1 + culprit.effect.value)
        low = effect.value - float(np.hypot(effect.value - effect.low, extra))
        high = effect.value + float(np.hypot(effect.value - effect.high, extra))
        culprits.append(replace(culprit, effect=replace(effect, low=low, high=high)))
    return replace(found, culprits=tuple(culprits))


def _late_arrivals(measured: Measured, node: Ints, level: float) -> tuple[LateArrival, ...]:
    """Return who is late at collectives on devices by arrival and duration alike, the latest first.

    Args:
        measured: what was measured.
        node: of each rank, int64, (num_ranks,).
        level: probability of naming somebody by chance.
    """
    close_up = measured.close_up
    if close_up is None:
        return ()
    evidence = close_up.evidence
    pairs = zip(evidence.traces, evidence.collectives, strict=True)
    return late_arrivals(
        evidence.operations,
        evidence.matching,
        np.concatenate([is_timed_there(trace, table) for trace, table in pairs]),
        ranks=evidence.ranks,
        halfwidth_ns=measured.halfwidth_ns,
        node=node_by_rank(evidence.ranks, node),
        level=level,
        limits=measured.thresholds.of(ArrivalThresholds),
    )


_NUM_ALONE = 2  # format: hosts whose connections all pass the same links, and can be compared only over time


@dataclass(frozen=True, kw_only=True)
class CoreWaitThresholds(Thresholds, topic="links"):
    """How much waiting for cores excuses slow connections."""

    shared_wait_part: float = number(1 / 3, "share")
    """Part of the waiting for cores that all nodes have in common which excuses a connection: it slows all alike."""


def flow_findings(
    network: NetworkEvidence,
    settings: DiagnosisConfig,
    kinds: Sequence[OperationKind],
    panels: Panels,
    thresholds: ThresholdValues,
) -> FlowFindings | None:
    """Return the links that hold connections up; None where no rank recorded its connections.

    Where most bytes are messages, as in a pipeline, the acknowledgement of the end of each may be delayed, unless data
    is sent back: connections between different stages then differ also on equal links, small messages by the most.

    Args:
        network: what was recorded in the time of the used steps.
        settings: the thresholds.
        kinds: the operations of the run.
        panels: the ranks' use of their cores: a rank that waits for one sends and receives late.
        thresholds: how much of that counts, and when a connection is slow.
    """
    if network.flows is None:
        return None
    search = _Search(
        network=network,
        flows=network.flows,
        message_bytes=_message_bytes(kinds),
        core_wait=_core_wait(network.places, panels, thresholds.of(CoreWaitThresholds).shared_wait_part),
        settings=settings,
        thresholds=thresholds,
    )
    whole = search.located()
    stretches = search.stretches()
    if not stretches or not (whole.is_compared or network.places.num_nodes == _NUM_ALONE):
        return whole
    found = [
        (one, fault)
        for one in stretches
        for fault in search.located(inside=[one]).faults
        if one.flow in fault.flows and fault.cause is not LinkCause.FLAPPING
    ]
    rest = search.located(outside=[one for one, _ in found])
    always = _names(fault for fault in rest.faults if fault.cause is not LinkCause.FLAPPING)
    passing = _joined([(one, fault) for one, fault in found if not always & set(fault.ids)], network.window)
    if not passing:
        return whole
    # What is slow at the ends of a stretch looks like stalls in the rest.
    names = _names(passing)
    lasting = (fault for fault in rest.faults if fault.cause is not LinkCause.FLAPPING or not names & set(fault.ids))
    faults = sorted((*lasting, *passing), key=lambda fault: -fault.effect.value)
    return replace(whole, faults=tuple(faults))


def _names(faults: Iterable[LinkFault]) -> set[str]:
    return {name for fault in faults for name in fault.ids}


def _joined(found: Sequence[tuple[Stretch, LinkFault]], window: StepWindow) -> list[LinkFault]:
    """Return one fault for each link and cause, the worst one of its stretches, with the steps of all."""
    alike: dict[tuple[LinkCause, tuple[str, ...]], list[tuple[Stretch, LinkFault]]] = {}
    for one, fault in found:
        alike.setdefault((fault.cause, fault.ids), []).append((one, fault))
    joined = []
    for pairs in alike.values():
        worst = max((fault for _, fault in pairs), key=lambda fault: fault.effect.value)
        steps = sorted(window.steps_in(one.begin_ns, one.end_ns) for one, _ in pairs)
        busy_share = sum(fault.busy_share for _, fault in pairs)
        joined.append(replace(worst, busy_share=busy_share, steps=tuple(steps)))
    return joined


@dataclass(frozen=True, kw_only=True)
class _Search:
    """A search of links, in all of the time or in a part of it; shares are relative to all of it."""

    network: NetworkEvidence
    flows: Flows
    message_bytes: float
    core_wait: Floats
    settings: DiagnosisConfig
    thresholds: ThresholdValues

    def stretches(self) -> list[Stretch]:
        """Return the stretches in which a connection was slow, and about as busy as any: others wait for its data."""
        window = self.network.window
        found = slow_stretches(
            self.flows,
            self.network.places,
            begin_ns=window.begin_ns,
            end_ns=window.end_ns,
            rate_share=self.settings.flow_share,
            thresholds=self.thresholds.of(StretchThresholds),
        )
        return [one for one in found if self._is_busy(one)]

    def _is_busy(self, stretch: Stretch) -> bool:
        rows = within(self.flows, [stretch]) & (self.flows.connection >= 0)
        busy_ns = np.bincount(self.flows.connection[rows], self.flows.busy_ns[rows])
        least = self.thresholds.of(FlowThresholds).min_busy_share
        return bool(busy_ns[stretch.connection] >= least * busy_ns.max())

    def located(self, *, inside: Sequence[Stretch] = (), outside: Sequence[Stretch] = ()) -> FlowFindings:
        """Return the faulty links in some stretches, outside of some, or in all of the time."""
        places, window, loads = self.network.places, self.network.window, self.network.loads
        is_meant = within(self.flows, inside) if inside else ~within(self.flows, outside)
        part, limits = 1.0, self.thresholds.of(FigureThresholds)
        if inside:
            part = sum(one.end_ns - one.begin_ns for one in inside) / (window.end_ns - window.begin_ns)
            fewest = self.thresholds.of(StretchThresholds).min_stretch_samples
            limits = replace(limits, min_intervals=min(limits.min_intervals, fewest))
        figures, rest = (
            flow_figures(
                select_flows(self.flows, chosen),
                places,
                begin_ns=window.begin_ns,
                end_ns=window.end_ns,
                message_bytes=self.message_bytes,
                core_wait=part * self.core_wait,
                thresholds=limits,
            )
            for chosen in (is_meant, ~is_meant)
        )
        foreign, line_rate_bps = np.full((len(places.links), 2), np.nan), np.zeros(places.num_nodes)
        if loads is not None:
            middle_ns = (loads.edges_ns[:-1] + loads.edges_ns[1:]) // 2
            is_cell = in_stretches(middle_ns, inside) if inside else ~in_stretches(middle_ns, outside)
            then = replace(loads, total_bytes=np.where(is_cell, loads.total_bytes, np.nan))
            foreign = foreign_on_links(then, places)
            line_rate_bps[loads.node[loads.carries_job]] = loads.line_rate_bps[loads.carries_job]
        return locate_by_flows(
            figures,
            places,
            foreign_bytes_per_s=foreign,
            line_rate_bps=line_rate_bps,
            rest=rest if inside and len(rest) else None,
            limits=flow_limits(self.settings),
            thresholds=self.thresholds.of(FlowThresholds),
        )


def flow_limits(settings: DiagnosisConfig) -> FlowLimits:
    """Return the limits for the connections of a job."""
    return FlowLimits(
        rate_share=settings.flow_share,
        uplink_factor=settings.uplink_factor,
        foreign_share=settings.foreign_share,
        repeat_share=settings.repeat_share,
        level=settings.level,
    )


def _core_wait(places: Topology, panels: Panels, shared_part: float) -> Floats:
    """Return for which share of the time connections of each node may be held up for want of a core, (num_nodes,).

    A rank waits for a core or is kept from it. Waiting that all nodes have in common slows all connections, so only a
    part of it counts.
    """
    found, use = np.zeros(places.num_nodes), panels.cores
    if use is not None:
        is_placed = np.isin(panels.rank, places.ranks)
        node = places.node[np.searchsorted(places.ranks, panels.rank[is_placed])]
        np.maximum.at(found, node, np.nan_to_num(np.fmax(use.waiting, use.throttled))[is_placed])
    usual = float(np.median(found)) if len(found) else 0.0
    return np.asarray(np.maximum(found - usual, 0.0) + shared_part * np.minimum(found, usual))


def _message_bytes(kinds: Sequence[OperationKind]) -> float:
    """Return the mean size of messages, infinite where most bytes are of collectives."""
    messages = [kind for kind in kinds if kind.op in MESSAGE_NAMES]
    total = sum(kind.size_bytes for kind in messages)
    if total <= sum(kind.size_bytes for kind in kinds) / 2:
        return np.inf
    return total / max(sum(kind.num_rows for kind in messages), 1)
