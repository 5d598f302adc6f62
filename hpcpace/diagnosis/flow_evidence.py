"""What the job's own connections show of links, from what was recorded of the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.config import DiagnosisConfig
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.figures.network import NetworkEvidence
from hpcpace.diagnosis.modes.finding import Panels
from hpcpace.metrics.communication import Kind
from hpcpace.metrics.flow_figures import FlowFigures, FlowFindings, FlowLimits, flow_figures, foreign_on_links
from hpcpace.metrics.flow_links import locate_by_flows
from hpcpace.metrics.topology import Topology

_MESSAGES = ("send", "recv")


@dataclass(frozen=True, kw_only=True)
class CoreWaitThresholds(Thresholds, topic="links"):
    """How much waiting for cores excuses slow connections."""

    shared_wait_part: float = number(
        1 / 3,
        "share",
        "Part of the waiting for cores that all nodes have in common which excuses a connection: it slows all alike.",
    )


def flow_findings(
    network: NetworkEvidence,
    settings: DiagnosisConfig,
    kinds: Sequence[Kind],
    panels: Panels,
    thresholds: CoreWaitThresholds,
) -> FlowFindings | None:
    """Return the links that hold connections up; None where no rank recorded its connections.

    Where most bytes are messages, as in a pipeline, the acknowledgement of the end of each may be delayed, unless data
    is sent back: connections between different stages then differ also on equal links, small messages by the most.

    Args:
        network: what was recorded in the time of the used steps.
        settings: the thresholds.
        kinds: the operations of the run.
        panels: what the ranks had of their cores: whoever waits for one gives and takes data late.
        thresholds: how much of that counts.
    """
    if network.flows is None:
        return None
    places, window = network.places, network.window
    figures = flow_figures(
        network.flows,
        places,
        begin_ns=window.begin_ns,
        end_ns=window.end_ns,
        message_bytes=_message_bytes(kinds),
        core_wait=_core_wait(places, panels, thresholds.shared_wait_part),
    )
    return _located(figures, network, settings)


def _core_wait(places: Topology, panels: Panels, shared_part: float) -> NDArray[np.float64]:
    """Return for which share of the time connections of each node may be held up for want of a core, (num_nodes,).

    A rank waits for a core or is kept from it. What all nodes wait slows all connections, so that only a part counts.
    """
    found, use = np.zeros(places.num_nodes), panels.cores
    if use is not None:
        share = np.nan_to_num(np.fmax(use.waiting, use.throttled))
        node_of = dict(zip(places.ranks, places.node.tolist(), strict=True))
        for row, rank in enumerate(panels.rank.tolist()):
            node = node_of.get(rank, -1)
            if node >= 0:
                found[node] = max(found[node], float(share[row]))
    usual = float(np.median(found)) if len(found) else 0.0
    return np.asarray(np.maximum(found - usual, 0.0) + shared_part * np.minimum(found, usual))


def _message_bytes(kinds: Sequence[Kind]) -> float:
    """Return the mean size of messages, infinite where most bytes are of collectives."""
    messages = [kind for kind in kinds if kind.op in _MESSAGES]
    total = sum(kind.size_bytes for kind in messages)
    if total <= sum(kind.size_bytes for kind in kinds) / 2:
        return np.inf
    return total / max(sum(kind.num_rows for kind in messages), 1)


def _located(figures: FlowFigures, network: NetworkEvidence, settings: DiagnosisConfig) -> FlowFindings:
    places, loads = network.places, network.loads
    foreign, line_rate_bps = np.full((len(places.links), 2), np.nan), np.zeros(places.num_nodes)
    if loads is not None:
        foreign = foreign_on_links(loads, places)
        line_rate_bps[loads.node[loads.carries_job]] = loads.line_rate_bps[loads.carries_job]
    return locate_by_flows(
        figures,
        places,
        foreign_bytes_per_s=foreign,
        line_rate_bps=line_rate_bps,
        limits=FlowLimits(
            rate_share=settings.flow_share,
            uplink_factor=settings.uplink_factor,
            foreign_share=settings.foreign_share,
            repeat_share=settings.repeat_share,
            level=settings.level,
        ),
    )
