"""The arrays behind the plots of the network: interfaces over time, and host by host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.figures.network import PART_TO_COUNT, NetworkEvidence, host_traffic
from hpcpace.diagnosis.network_summary import NetworkFigures
from hpcpace.diagnosis.plot_data import InterfaceLine, NetworkPlots
from hpcpace.metrics.network.interface_use import InterfaceLoads
from hpcpace.units import NS_PER_S

_MOST_LINES = 1024
_MOST_HOSTS = 1024
_BITS, _PER_MEGA = 8, 1e6


def network_plots(evidence: NetworkEvidence, figures: NetworkFigures | None) -> NetworkPlots | None:
    """Return what the plots of the network show, interfaces in the order of the figures; None without figures."""
    if figures is None:
        return None
    loads, window = evidence.loads, evidence.window
    step_mb, rate_mbps, hosts = _matrices(evidence)
    return NetworkPlots(
        time_s=(loads.edges_ns[:-1] - window.begin_ns) / NS_PER_S if loads is not None else np.zeros(0),
        lines=_lines(loads, figures) if loads is not None else (),
        num_interfaces=len(figures.interfaces),
        hosts=hosts,
        step_mb=step_mb,
        rate_mbps=rate_mbps,
    )


def _lines(loads: InterfaceLoads, figures: NetworkFigures) -> tuple[InterfaceLine, ...]:
    row_of = {name: row for row, name in enumerate(loads.names)}
    per_cell = _BITS / _PER_MEGA / loads.cell_s
    found = []
    for shown in figures.interfaces[:_MOST_LINES]:
        row = row_of[shown.host, shown.interface]
        foreign_bytes = loads.total_bytes[:, row] - loads.job_bytes[:, row]
        found.append(
            InterfaceLine(
                host=shown.host,
                interface=shown.interface,
                line_mbps=shown.line_rate_bps / _PER_MEGA if shown.line_rate_bps else None,
                total_mbps=loads.total_bytes[:, row] * per_cell,
                foreign_mbps=np.maximum(foreign_bytes, 0.0) * per_cell,
            )
        )
    return tuple(found)


def _matrices(evidence: NetworkEvidence) -> tuple[NDArray[np.float64], NDArray[np.float64], tuple[str, ...]]:
    """Return payload per step in MB and rate in Mb/s from host to host, and the hosts, those of a leaf side by side."""
    traffic, places = host_traffic(evidence), evidence.places
    if traffic is None or places.num_nodes > _MOST_HOSTS:
        return np.zeros((0, 0)), np.zeros((0, 0)), ()
    order = np.argsort(places.node_leaf, kind="stable")
    place = np.empty(places.num_nodes, np.int64)
    place[order] = np.arange(places.num_nodes)
    step_mb, rate_mbps = np.full((2, places.num_nodes, places.num_nodes), np.nan)
    is_used = traffic.acked_bytes > 0
    cells = place[traffic.source[is_used]], place[traffic.destination[is_used]]
    step_mb[cells] = traffic.acked_bytes[is_used] / evidence.window.num_steps / _PER_MEGA
    # The rate of small messages is that of round trips.
    carried = traffic.acked_bytes[is_used]
    counts = carried >= PART_TO_COUNT * carried.max(initial=0)
    rate_mbps[cells] = np.where(counts, traffic.bytes_per_s[is_used] * _BITS / _PER_MEGA, np.nan)
    return step_mb, rate_mbps, tuple(places.node_names[node] for node in order.tolist())
