"""What the job's own connections show of links, from what was recorded of the network."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.figures.network import NetworkEvidence
from hpcpace.diagnosis.modes.cores import NOTABLE_WAIT
from hpcpace.diagnosis.modes.finding import Panels
from hpcpace.metrics.network.flow_figures import FlowFigures, flow_figures
from hpcpace.metrics.network.flow_links import locate_by_flows
from hpcpace.metrics.network.foreign_links import foreign_on_links
from hpcpace.metrics.network.link_faults import FlowFindings, FlowLimits
from hpcpace.metrics.operations.communication import Kind
from hpcpace.metrics.topology import Topology

_MESSAGES = ("send", "recv")
_TIMES_USUAL_WAIT = 2.0


def flow_findings(
    network: NetworkEvidence, settings: DiagnosisConfig, kinds: Sequence[Kind], panels: Panels
) -> FlowFindings | None:
    """Return the links that hold connections up; None where no rank recorded its connections.

    Where most bytes are messages, as in a pipeline, the acknowledgement of the end of each may be delayed, unless data
    is sent back: connections between different stages then differ also on equal links, small messages by the most.

    Args:
        network: what was recorded in the time of the used steps.
        settings: the thresholds.
        kinds: the operations of the run.
        panels: what the ranks had of their cores: a host without some takes data off its connections late.
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
        is_starved=_starved_nodes(places, panels),
    )
    return _located(figures, network, settings)


def _starved_nodes(places: Topology, panels: Panels) -> NDArray[np.bool_]:
    """Return the nodes of which a rank is kept from running: by a quota, or far more than those of other nodes."""
    waiting, throttled = np.zeros(places.num_nodes), np.zeros(places.num_nodes)
    node_of = dict(zip(places.ranks, places.node.tolist(), strict=True))
    nodes = [node_of.get(rank, -1) for rank in panels.rank.tolist()]
    use = panels.cores
    for row, node in enumerate(nodes if use is not None else []):
        if use is not None and node >= 0:
            certain = float(np.nan_to_num(use.waiting[row]) - 2 * np.nan_to_num(use.error[row]))
            waiting[node] = max(waiting[node], certain)
            throttled[node] = max(throttled[node], float(np.nan_to_num(use.throttled[row])))
    usual = float(np.median(waiting)) if len(waiting) else 0.0
    is_behind = waiting >= np.maximum(NOTABLE_WAIT, _TIMES_USUAL_WAIT * usual)
    return np.asarray(is_behind | (throttled >= NOTABLE_WAIT))


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
