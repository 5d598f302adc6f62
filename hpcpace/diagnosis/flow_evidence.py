"""What the job's own connections show of links, from what was recorded of the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.figures.network import NetworkEvidence
from hpcpace.metrics.network.flow_figures import flow_figures
from hpcpace.metrics.network.flow_links import locate_by_flows
from hpcpace.metrics.network.flow_tables import Flows
from hpcpace.metrics.network.foreign_links import foreign_on_links
from hpcpace.metrics.network.link_faults import FlowFindings, FlowLimits, LinkCause
from hpcpace.metrics.operations.communication import Kind

_MESSAGES = ("send", "recv")
_BY_RATE = (LinkCause.SLOW, LinkCause.UPLINK)


def flow_findings(network: NetworkEvidence, settings: DiagnosisConfig, kinds: Sequence[Kind]) -> FlowFindings | None:
    """Return the links that hold connections up; None where no rank recorded its connections.

    Where most bytes are messages, as in a pipeline, no link is called slow: a message waits for its receiver, so that
    connections between different stages differ also on equal links.

    Args:
        network: what was recorded in the time of the used steps.
        settings: the thresholds.
        kinds: the operations of the run.
    """
    if network.flows is None:
        return None
    found = _located(network.flows, network, settings)
    if not _are_messages(kinds):
        return found
    faults = tuple(fault for fault in found.faults if fault.cause not in _BY_RATE)
    return replace(found, faults=faults, is_compared=False, reason="messages wait for their receivers")


def _are_messages(kinds: Sequence[Kind]) -> bool:
    messages = sum(kind.size_bytes for kind in kinds if kind.op in _MESSAGES)
    return messages > sum(kind.size_bytes for kind in kinds) / 2


def _located(flows: Flows, network: NetworkEvidence, settings: DiagnosisConfig) -> FlowFindings:
    places, window, loads = network.places, network.window, network.loads
    foreign, line_rate_bps = np.full((len(places.links), 2), np.nan), np.zeros(places.num_nodes)
    if loads is not None:
        foreign = foreign_on_links(loads, places)
        line_rate_bps[loads.node[loads.carries_job]] = loads.line_rate_bps[loads.carries_job]
    return locate_by_flows(
        flow_figures(flows, places, begin_ns=window.begin_ns, end_ns=window.end_ns),
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
