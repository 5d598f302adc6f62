"""What the job's own connections show of links, from what was recorded of the network."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.figures.network import NetworkEvidence
from hpcpace.metrics.network.flow_figures import flow_figures
from hpcpace.metrics.network.flow_links import locate_by_flows
from hpcpace.metrics.network.flow_tables import Flows
from hpcpace.metrics.network.foreign_links import foreign_on_links
from hpcpace.metrics.network.link_faults import FlowFindings, FlowLimits
from hpcpace.metrics.operations.communication import Kind

_MESSAGES = ("send", "recv")


def flow_findings(network: NetworkEvidence, settings: DiagnosisConfig, kinds: Sequence[Kind]) -> FlowFindings | None:
    """Return the links that hold connections up; None where no rank recorded its connections.

    Where most bytes are messages, as in a pipeline, the acknowledgement of the end of each may be delayed, unless data
    is sent back: connections between different stages then differ also on equal links, small messages by the most.

    Args:
        network: what was recorded in the time of the used steps.
        settings: the thresholds.
        kinds: the operations of the run.
    """
    if network.flows is None:
        return None
    return _located(network.flows, network, settings, _message_bytes(kinds))


def _message_bytes(kinds: Sequence[Kind]) -> float:
    """Return the mean size of messages, infinite where most bytes are of collectives."""
    messages = [kind for kind in kinds if kind.op in _MESSAGES]
    total = sum(kind.size_bytes for kind in messages)
    if total <= sum(kind.size_bytes for kind in kinds) / 2:
        return np.inf
    return total / max(sum(kind.num_rows for kind in messages), 1)


def _located(flows: Flows, network: NetworkEvidence, settings: DiagnosisConfig, message_bytes: float) -> FlowFindings:
    places, window, loads = network.places, network.window, network.loads
    foreign, line_rate_bps = np.full((len(places.links), 2), np.nan), np.zeros(places.num_nodes)
    if loads is not None:
        foreign = foreign_on_links(loads, places)
        line_rate_bps[loads.node[loads.carries_job]] = loads.line_rate_bps[loads.carries_job]
    return locate_by_flows(
        flow_figures(flows, places, begin_ns=window.begin_ns, end_ns=window.end_ns, message_bytes=message_bytes),
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
