"""Measures the traces of one attempt, in the order in which one figure rests on another.

The summary, the plots and the scripts of analysis/ take their figures from here; nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import cached_property

import numpy as np

from hpcpace.core.errors import CannotTell
from hpcpace.core.pool import Team
from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import ThresholdValues
from hpcpace.diagnosis.clocks import DEVICE_ERROR_NS, ClockThresholds, clock_figures
from hpcpace.diagnosis.close_up import (
    CloseUp,
    ahead_of_samples_ns,
    close_up_evidence,
    data_variation_of,
    take_close_up,
)
from hpcpace.diagnosis.devices import has_device, idle_by_phase, is_host_timed, is_on_device, on_devices
from hpcpace.diagnosis.evidence import StepOperations, TimedTraces, timed_traces
from hpcpace.diagnosis.finding import CpuQuota, Panels
from hpcpace.diagnosis.host_pace import issue_ratio
from hpcpace.diagnosis.incomplete import HOST_TIMES, MARK_STEPS, NO_PHASES, sound_stream
from hpcpace.diagnosis.operation_figures import OperationFigures, measure_operations
from hpcpace.diagnosis.stops import JudgedStops, stops_of
from hpcpace.diagnosis.summary import Clocks
from hpcpace.diagnosis.within_steps import WaitThresholds, are_waits_known, unknown_waits, unmatched_share
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.flows import Flows, InterfaceUse, flows_of, interface_use
from hpcpace.metrics.host_waits import CoreUse, CounterThresholds, core_use
from hpcpace.metrics.kernels import others_median
from hpcpace.metrics.operations import MESSAGE_NAMES
from hpcpace.metrics.phase_cores import WorkThresholds
from hpcpace.metrics.phases import EXPOSED_TRANSFER, EXPOSED_WAIT, OWN_WORK, Part
from hpcpace.metrics.plausibility import Alternation, CountThresholds, alternation
from hpcpace.metrics.resampling import Estimate
from hpcpace.metrics.roles import VariationThresholds, same_work
from hpcpace.metrics.segments import BlockingThresholds
from hpcpace.metrics.steps import StepPanel, common_steps, is_plain, is_unphased, is_warmup, step_times, used_steps
from hpcpace.metrics.stops import StopThresholds
from hpcpace.metrics.topology import Topology, stages_of_traffic, topology_of
from hpcpace.metrics.what_if import Rebuilt, rebuild, transient_loss_ns
from hpcpace.trace.reader import RankTrace
from hpcpace.trace.schema import MILLICORES, EventKind, Phase

_MAX_COUNTS = 8  # display: ranks whose numbers of steps an error names
_AWAY = (Part.SYNC_WAIT, Part.SYNC_TRANSFER, Part.CHECKPOINT, Part.EVAL, Part.PACE)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which steps a report uses: not the warm-up unless asked for, and `first <= step < stop`."""

    include_warmup: bool = False
    first: int | None = None
    stop: int | None = None

    def used(self, panel: StepPanel) -> Bools:
        """Return which common steps are used, bool, (num_common,)."""
        return used_steps(panel, include_warmup=self.include_warmup, first=self.first, stop=self.stop)


@dataclass(frozen=True, kw_only=True)
class ClockSamples:
    """The clocks by their samples alone, and what operations of devices say against them.

    Attributes:
        timed: the traces with these clocks.
        ahead_ns: by how much each clock is ahead of its samples, int64, (num_ranks,).
        halfwidth_ns: how wrong the samples may be, float64, (num_ranks,).
    """

    timed: TimedTraces
    ahead_ns: Ints
    halfwidth_ns: Floats

    @property
    def is_wrong(self) -> Bools:
        """Which clocks are wrong by more than their samples allow, bool, (num_ranks,)."""
        return np.asarray(np.abs(self.ahead_ns) > 2 * self.halfwidth_ns)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured on an attempt, and what all of its figures rest on.

    Attributes:
        timed: the traces without their operations, on their devices where these are known, and their clocks.
        panel: the steps that all ranks have.
        used: which of them the figures use, bool, (num_common,).
        chosen: the used steps, on each rank's own clock.
        common: the same on the common clock, or on a rank's own where its clock is unknown.
        times_ns: step times of the used steps, int64, (num_steps,).
        end_ns: the latest end of each, of ranks with a known clock, int64, (num_steps,).
        operations: the figures of the operations.
        thresholds: the numbers that decide.
        samples: the clocks by their samples alone, where operations of devices have corrected them, else None.
        seen: the operations of the steps to take apart, and these steps, where they are known already.
    """

    timed: TimedTraces
    panel: StepPanel
    used: Bools
    chosen: StepPanel
    common: StepPanel
    times_ns: Ints
    end_ns: Ints
    operations: OperationFigures
    thresholds: ThresholdValues = field(default_factory=ThresholdValues)
    samples: ClockSamples | None = None
    seen: tuple[StepOperations, StepPanel] | None = None

    @property
    def parts(self) -> Floats:
        """Nanoseconds of each part of each used step, float64, (num_ranks, num_steps, num_parts)."""
        return self.operations.panels.parts_ns

    def spent_ns(self, of: Sequence[Part]) -> Floats:
        """Return the time in some of the parts, float64, (num_ranks, num_steps)."""
        return np.asarray(self.parts[:, :, list(of)].sum(axis=2))

    @property
    def lengths_ns(self) -> Floats:
        """Length of each used step on each rank, float64, (num_ranks, num_steps)."""
        return (self.chosen.end_ns - self.chosen.begin_ns).astype(np.float64)

    @cached_property
    def is_unphased(self) -> bool:
        """Whether the used steps were recorded without phases, so that work and waits in them are not known."""
        return bool(is_unphased(self.chosen.flags).any())

    @cached_property
    def host_timed(self) -> tuple[int, ...]:
        """Ranks whose phases do not show what takes time: times of the host on ranks with a device, or not recorded."""
        return tuple(trace.header.rank for trace in self.timed.traces if self.is_unphased or is_host_timed(trace))

    @property
    def unknown(self) -> str:
        """Why figures that rest on phases are not known; empty where they are."""
        if self.is_unphased:
            return NO_PHASES
        return HOST_TIMES if self.host_timed else ""

    @property
    def limits(self) -> WaitThresholds:
        """When waits are known."""
        return self.thresholds.of(WaitThresholds)

    @cached_property
    def unknown_waits(self) -> tuple[int, ...]:
        """Ranks whose waits cannot be distinguished from transfers, because what blocks them has no counterpart."""
        return tuple(np.array(self.timed.ranks)[unknown_waits(self.operations.panels, self.limits)].tolist())

    @cached_property
    def are_waits_known(self) -> bool:
        """Whether waits can be distinguished from transfers in the means over all ranks."""
        return are_waits_known(self.operations.panels, self.limits)

    @cached_property
    def halfwidth_ns(self) -> Floats:
        """Error of the times of each rank's operations in these steps, by median, float64, (num_ranks,)."""
        return halfwidths_ns(self.timed, self.chosen)

    @cached_property
    def alternation(self) -> Alternation | None:
        """How steps alternate on all ranks, as parts of steps counted as steps do; None if they do not."""
        return alternation(self.parts, self.lengths_ns, self.thresholds.of(CountThresholds))

    @cached_property
    def stage(self) -> Ints:
        """The pipeline stage of each rank, from its coordinates or else from traffic, -1 without one, (num_ranks,)."""
        return _stages(self)

    @property
    def _has_found_replicas(self) -> bool:
        """Whether stages were found in traffic, and each has several ranks."""
        return not self._is_labelled and 0 <= int(self.stage.max()) < len(self.stage) - 1

    @property
    def _is_labelled(self) -> bool:
        return self.timed.traces[0].header.pp >= 0

    @cached_property
    def role(self) -> Ints:
        """Which ranks do the same work, int64, (num_ranks,)."""
        if self._has_found_replicas:
            return self.stage
        headers = [trace.header for trace in self.timed.traces]
        return same_work(
            np.array([header.pp for header in headers], np.int64), np.array([header.tp for header in headers], np.int64)
        )

    @property
    def is_role_known(self) -> bool:
        """Whether ranks of one role are known to do the same work.

        Without coordinates, ranks that send to each other may be stages of a pipeline, which do different work. Those
        of a stage that was found in traffic have collectives together, and so do the same.
        """
        return self._is_labelled or self._has_found_replicas or not self.operations.has_messages

    @cached_property
    def excess_ns(self) -> Floats | None:
        """Own work beyond that of others of the role, (num_ranks, num_steps), as of `own_excess_ns`."""
        return None if self.host_timed else excess_ns(self.spent_ns(OWN_WORK), self.role, self.is_role_known)

    @cached_property
    def close_up(self) -> CloseUp | None:
        """Some of the steps, or all, taken apart; None without operations."""
        # What is wrong with the rows of these files is known from the first reading.
        streams = [sound_stream(stream.original) for stream in self.operations.streams]
        return take_close_up(streams, self.timed, self.common, self.role, self.thresholds, seen=self.seen)

    @cached_property
    def rebuilt(self) -> Rebuilt | None:
        """The steps rebuilt, which shows what a change of some work would gain; None if it is, or would be, wrong.

        A sender that is held until its receiver comes, as by gloo, is rebuilt as if it were held as long whatever the
        receiver does, and so hides what its receiver costs, unless its completion shows that both must be there. Work
        that is not known cannot be rebuilt, nor can waits where a clock is wrong; without messages, all wait together,
        and own work alone tells what it costs.
        """
        is_known = not self.host_timed and (self.operations.has_messages or not self.clocks.num_wrong)
        close_up = self.close_up if is_known else None
        held_share = float(self.operations.panels.sent_ns.mean()) / max(float(self.times_ns.mean()), 1.0)
        if close_up is None or close_up.graph is None:
            return None
        if close_up.graph.has_free_senders and held_share > self.limits.max_held_share:
            return None
        rebuilt = rebuild(close_up.graph, close_up.apart_ns)
        return rebuilt if rebuilt is not None and rebuilt.error_share <= self.limits.max_rebuild_error else None

    @cached_property
    def clocks(self) -> Clocks:
        """How well times of different ranks compare, by clocks that may have been corrected."""
        limits = self.thresholds.of(ClockThresholds)
        return clock_figures(self.timed, self.chosen, self.operations.causality, limits)

    @cached_property
    def sampled_clocks(self) -> Clocks:
        """The same by the samples of the clocks alone."""
        if self.samples is None or self.operations.of_samples is None:
            return self.clocks
        limits = self.thresholds.of(ClockThresholds)
        return clock_figures(self.samples.timed, self.chosen, self.operations.of_samples, limits)

    @cached_property
    def stops(self) -> JudgedStops:
        """When ranks did not run."""
        return stops_of(self.timed, self.common, self.times_ns, self.thresholds.of(StopThresholds))

    @cached_property
    def flows(self) -> Flows | None:
        """What each connection of the ranks carried; None where no rank recorded its connections."""
        if not any(len(trace.tables["flows"]) for trace in self.timed.traces):
            return None
        return flows_of(self.timed.traces, self.timed.clocks, self.places)

    @cached_property
    def interfaces(self) -> InterfaceUse | None:
        """What each interface of the hosts carried; None where no rank recorded that."""
        found = interface_use(self.timed.traces, self.timed.clocks, self.places)
        return found if found.names else None

    @cached_property
    def places(self) -> Topology:
        """Where the ranks are."""
        headers = [trace.header for trace in self.timed.traces]
        return topology_of(
            ranks=[header.rank for header in headers],
            nodes=[header.node for header in headers],
            hosts=[header.host for header in headers],
            addresses=[header.topology_addr for header in headers],
        )


def measure(
    traces: Sequence[RankTrace],
    selection: Selection,
    *,
    progress: Callable[[int, int], None] | None = None,
    team: Team | None = None,
    thresholds: ThresholdValues | None = None,
) -> Measured:
    """Measure everything that the figures share, on devices where their times are known.

    Where operations of devices contradict a clock, they correct it before.

    Args:
        traces: the readable traces, ascending by rank.
        selection: which steps to use.
        progress, team: as `measure_operations` takes them.
        thresholds: the numbers that decide; the defaults if None.

    Raises:
        CannotTell: no step that all ranks have is left.
    """
    thresholds = thresholds or ThresholdValues()
    traces = on_devices(traces, thresholds)
    panel = common_steps([trace.tables["steps"] for trace in traces])
    used = selection.used(panel)
    if not used.any():
        raise CannotTell(_why_no_steps(traces, panel))

    timed, chosen = timed_traces(traces), panel.select(used)
    samples, seen = _contradicted(timed, chosen)
    if samples is not None:
        clocks = [clock.ahead_by(ns) for clock, ns in zip(timed.clocks, samples.ahead_ns.tolist(), strict=True)]
        timed = replace(timed, clocks=clocks)
    whole = timed.on_common_clock(panel)
    common = whole.select(used)
    # A rank whose clock is unknown cannot say when a step ended for the others.
    times_ns = step_times(panel.step, whole.begin_ns[timed.known], whole.end_ns[timed.known])
    operations = measure_operations(
        timed,
        chosen,
        common,
        progress=progress,
        team=team,
        limits=thresholds.of(BlockingThresholds),
        samples=None if samples is None else samples.timed.clocks,
    )
    return Measured(
        timed=timed,
        panel=panel,
        used=used,
        chosen=chosen,
        common=common,
        times_ns=times_ns[used],
        end_ns=common.end_ns[timed.known].max(axis=0),
        operations=operations,
        thresholds=thresholds,
        samples=samples,
        seen=seen,
    )


def _contradicted(
    timed: TimedTraces, chosen: StepPanel
) -> tuple[ClockSamples | None, tuple[StepOperations, StepPanel] | None]:
    """Return the clocks where operations of devices show that one is wrong by more than its samples allow, else None.

    And, if none is wrong, the operations of the steps to take apart.
    """
    if not any(is_on_device(trace) for trace in timed.traces):
        return None, None
    # What is wrong with the rows of these files is said by the reading of all.
    streams = [sound_stream(trace) for trace in timed.traces]
    evidence, steps = close_up_evidence(streams, timed, timed.on_common_clock(chosen))
    if not len(evidence.operations):
        return None, None
    found = ClockSamples(timed=timed, ahead_ns=ahead_of_samples_ns(evidence), halfwidth_ns=halfwidths_ns(timed, chosen))
    return (found, None) if found.is_wrong.any() else (None, (evidence, steps))


def halfwidths_ns(timed: TimedTraces, chosen: StepPanel) -> Floats:
    """Return the error of the times of each rank's operations in some steps, by median, float64, (num_ranks,)."""
    return np.array(
        [
            float(np.median(clock.to_reference(end_ns).halfwidth_ns)) + DEVICE_ERROR_NS * has_device(trace)
            for trace, clock, end_ns in zip(timed.traces, timed.clocks, chosen.end_ns, strict=True)
        ]
    )


def _why_no_steps(traces: Sequence[RankTrace], panel: StepPanel) -> str:
    num_plain = int(is_plain(panel.flags).sum())
    if num_plain and (is_plain(panel.flags) | is_warmup(panel.flags)).all():
        which = f"{num_plain} of the" if num_plain < len(panel) else "all"
        rest = ", and the others are warm-up" if num_plain < len(panel) else ""
        return (
            f"{which} {len(panel)} common steps ({panel.step[0]} to {panel.step[-1]}) were recorded without "
            f"detail{rest}: neither collectives nor phases are known: record some in detail (trace.detail_steps, "
            "hpcpace switch)"
        )
    if len(panel):
        return (
            f"none of the {len(panel)} common steps ({panel.step[0]} to {panel.step[-1]}) is left: "
            "use --include-warmup, or another --steps A:B"
        )
    trains_unseen = all(trace.has_no_steps for trace in traces)
    seen = next((words for trace in traces if (words := trace.step_source[1])), "")
    counts = ", ".join(f"rank {trace.header.rank}: {len(trace.tables['steps'])}" for trace in traces[:_MAX_COUNTS])
    return (
        f"no step that all {len(traces)} ranks have ({counts}): the job ended before its first step, steps were not "
        f"marked, or files are mixed{f' (steps {seen})' if seen else ''}"
        f"{f': if it trains, {MARK_STEPS}' if trains_unseen else ''}"
    )


def _no_grad_share(measured: Measured) -> Floats:
    """Return what calls of modules without gradients take of each rank's time in no phase, float64, (num_ranks,)."""
    called_ns = []
    for trace in measured.timed.traces:
        phases = trace.tables["phases"]
        rows = phases.select((phases["phase"] == Phase.OTHER) & np.isin(phases["step"], measured.chosen.step))
        called_ns.append(trace.other_is_without_gradients * float((rows["end_ns"] - rows["begin_ns"]).sum()))
    return np.asarray(called_ns / np.maximum(measured.spent_ns((Part.OTHER,)).sum(axis=1), 1.0))


def panels_of(measured: Measured) -> Panels:
    """Return what the diagnosis judges."""
    headers = [trace.header for trace in measured.timed.traces]
    parts, panels, unmatched = measured.parts, measured.operations.panels, unmatched_share(measured.operations.panels)
    transfer_ns = measured.spent_ns(EXPOSED_TRANSFER)
    return Panels(
        rank=np.array([header.rank for header in headers], np.int64),
        host=tuple(header.host for header in headers),
        node=np.array([header.node for header in headers], np.int64),
        role=measured.role,
        stage=_stages(measured),
        times_ns=measured.times_ns.astype(np.float64),
        since_ns=(measured.end_ns - measured.end_ns[0]).astype(np.float64),
        work_ns=measured.spent_ns(OWN_WORK),
        # The time of each step outside of synchronising collectives.
        # An operation that blocks inside phase grad_sync is in its parts already.
        reach_ns=np.maximum(
            parts.sum(axis=2)
            - measured.spent_ns(_AWAY)
            - np.minimum(panels.blocked_ns, measured.spent_ns((Part.WAIT, Part.TRANSFER))),
            0.0,
        ),
        data_ns=parts[:, :, Part.DATA],
        gc_ns=parts[:, :, Part.GC],
        wait_ns=measured.spent_ns(EXPOSED_WAIT),
        # Where large messages are handed over in person, as by gloo, a sender is blocked until its receiver comes: that
        # is no transfer, and the receiver's side has what the message takes.
        transfer_ns=np.maximum(transfer_ns - panels.sent_ns, 0.0) * (1 - unmatched),
        unmatched_ns=transfer_ns * unmatched,
        hidden_ns=np.maximum(panels.under_way_ns - measured.spent_ns((*EXPOSED_WAIT, *EXPOSED_TRANSFER)), 0.0),
        host_ns=parts[:, :, Part.HOST],
        is_role_known=measured.is_role_known,
        transient_share=_transient_share(measured),
        data_variation=None
        if measured.host_timed or measured.close_up is None
        else data_variation_of(measured.close_up, measured.thresholds.of(VariationThresholds).min_passes),
        parts_ns=parts,
        cores=_cores(measured),
        quotas=tuple(_quota(trace) for trace in measured.timed.traces),
        alternation=measured.alternation,
        host_timed=measured.host_timed,
        is_unphased=measured.is_unphased,
        num_plain=int(is_plain(measured.panel.flags).sum()),
        has_device=any(has_device(trace) for trace in measured.timed.traces),
        idle=idle_by_phase(measured.timed.traces, measured.chosen.step),
        issue_ratio=issue_ratio(measured.timed.traces, measured.chosen.step),
        no_grad_share=_no_grad_share(measured),
        step=measured.chosen.step,
    )


def _cores(measured: Measured) -> CoreUse:
    traces, steps = measured.timed.traces, measured.chosen
    return core_use(
        [trace.tables["host"] for trace in traces],
        steps.begin_ns[:, 0].tolist(),
        steps.end_ns[:, -1].tolist(),
        [trace.header.cpus for trace in traces],
        measured.parts,
        measured.thresholds.of(CounterThresholds).min_rows,
        measured.thresholds.of(WorkThresholds),
    )


def _quota(trace: RankTrace) -> CpuQuota | None:
    """Return the smallest CPU quota that stopped a rank; None where none did, or it is not known."""
    events = trace.tables["events"]
    rows = np.flatnonzero((events["kind"] == EventKind.CPU_QUOTA) & (events["code"] > 0))
    if not len(rows):
        return None
    row = int(rows[events["code"][rows].argmin()])
    file = events["text"][row].rstrip(b"\0").decode(errors="replace")
    return CpuQuota(file, float(events["code"][row]) / MILLICORES)


def _stages(measured: Measured) -> Ints:
    """Return the pipeline stage of each rank, from its coordinates or else from traffic, int64, (num_ranks,)."""
    headers = [trace.header for trace in measured.timed.traces]
    if headers[0].pp >= 0 or not measured.operations.has_messages:
        return np.array([header.pp for header in headers], np.int64)
    transfers = measured.operations.transfers
    are_messages = [transfer.op in MESSAGE_NAMES for transfer in transfers]
    return stages_of_traffic(
        [header.rank for header in headers],
        [transfer.members for transfer, is_one in zip(transfers, are_messages, strict=True) if not is_one],
        [transfer.members for transfer, is_one in zip(transfers, are_messages, strict=True) if is_one],
    )


def node_by_rank(ranks: Sequence[int], node: Ints) -> Ints:
    """Return the node of each rank by its number, int64, (largest rank + 1,); `node` is that of each of `ranks`."""
    found = np.zeros(max(ranks) + 1, np.int64)
    found[list(ranks)] = np.unique(node, return_inverse=True)[1]  # a damaged number may be anything
    return found


def _transient_share(measured: Measured) -> Estimate | None:
    """Return what changing work costs the rebuilt steps; None where they are not rebuilt, or work is not known.

    Ranks that meet many times in a step, as in tensor and expert parallelism and in pipelines, lose at each meeting
    what the sum over the step hides.
    """
    close_up = measured.close_up
    if measured.host_timed or close_up is None or close_up.graph is None:
        return None
    mean_time_ns = max(float(measured.times_ns.mean()), 1.0)
    loss_ns = transient_loss_ns(close_up.graph, close_up.apart_ns)
    return loss_ns.through(lambda ns: ns / mean_time_ns)


def own_excess_ns(panels: Panels) -> Floats | None:
    """Return each rank's own work less the median of the others of its role, (num_ranks, num_steps).

    Of two ranks of a role, it is the excess over the faster one: else that one would seem early. 0 where a rank is
    alone in its role; None where no two ranks are compared, or own work is not known.
    """
    return None if panels.host_timed else excess_ns(panels.work_ns, panels.role, panels.is_role_known)


def excess_ns(work_ns: Floats, role: Ints, is_role_known: bool) -> Floats | None:
    """Return what `own_excess_ns` does of own work that is known, (num_ranks, num_steps)."""
    sizes = np.unique(role, return_counts=True)[1]
    if not is_role_known or sizes.max() < 2:
        return None
    return beyond_role_ns(work_ns, role, is_faster_usual=True)


def beyond_role_ns(spent_ns: Floats, role: Ints, *, is_faster_usual: bool = False) -> Floats:
    """Return by how much each rank exceeds the median of the others of its role in each step, 0 where it is alone.

    Args:
        spent_ns: time of each rank in each step, (num_ranks, num_steps).
        role: of each rank, (num_ranks,).
        is_faster_usual: whether two ranks of a role are both held against the faster one.
    """
    beyond_ns = np.zeros(spent_ns.shape)
    for value in np.unique(role):
        own_ns = spent_ns[role == value]
        if len(own_ns) == 2 and is_faster_usual:
            beyond_ns[role == value] = own_ns - own_ns[own_ns.mean(axis=1).argmin()]
        elif len(own_ns) > 1:
            beyond_ns[role == value] = own_ns - others_median(own_ns)
    return beyond_ns
