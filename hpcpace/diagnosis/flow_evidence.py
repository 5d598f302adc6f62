"""What a run's own connections show of links: in all of its steps, and in stretches in which they were slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpcpace.core.thresholds import Thresholds, ThresholdValues, number
from hpcpace.diagnosis.figures.network import NetworkEvidence, StepWindow
from hpcpace.diagnosis.finding import Panels
from hpcpace.diagnosis.settings import DiagnosisConfig
from hpcpace.metrics import Floats
from hpcpace.metrics.communication import Kind
from hpcpace.metrics.flow_figures import (
    FigureThresholds,
    FlowFindings,
    LinkCause,
    LinkFault,
    flow_figures,
    foreign_on_links,
)
from hpcpace.metrics.flow_job import FlowLimits, FlowThresholds
from hpcpace.metrics.flow_links import locate_by_flows
from hpcpace.metrics.flows import Flows
from hpcpace.metrics.link_faults import (
    Stretch,
    StretchThresholds,
    in_stretches,
    select_flows,
    slow_stretches,
    within,
)
from hpcpace.metrics.operations import MESSAGE_NAMES
from hpcpace.metrics.topology import Topology

_NUM_ALONE = 2  # format: hosts whose connections all pass the same links, and can be compared only over time


@dataclass(frozen=True, kw_only=True)
class CoreWaitThresholds(Thresholds, topic="links"):
    """How much waiting for cores excuses slow connections."""

    shared_wait_part: float = number(1 / 3, "share")
    """Part of the waiting for cores that all nodes have in common which excuses a connection: it slows all alike."""


def flow_findings(
    network: NetworkEvidence,
    settings: DiagnosisConfig,
    kinds: Sequence[Kind],
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


def _message_bytes(kinds: Sequence[Kind]) -> float:
    """Return the mean size of messages, infinite where most bytes are of collectives."""
    messages = [kind for kind in kinds if kind.op in MESSAGE_NAMES]
    total = sum(kind.size_bytes for kind in messages)
    if total <= sum(kind.size_bytes for kind in kinds) / 2:
        return np.inf
    return total / max(sum(kind.num_rows for kind in messages), 1)
