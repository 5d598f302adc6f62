"""Foreign traffic on each link, from what interfaces carried beside this job."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.network.flow_figures import DOWN, UP
from hpcpace.metrics.network.interface_use import RECEIVED, SENT, InterfaceLoads, interface_totals
from hpcpace.metrics.topology import Topology

FloatArray = NDArray[np.float64]


def foreign_on_links(loads: InterfaceLoads, topology: Topology) -> FloatArray:
    """Return the mean foreign traffic on each link in each direction, bytes per second, (num_links, 2): up, down.

    A host's link has what its interface counted; NaN where that is not known. Of an uplink only the least is known:
    what the hosts of its leaf sent beyond what they received from others cannot have stayed below it. What other hosts
    of the leaf send is not seen.

    Args:
        loads: what the interfaces carried.
        topology: where the nodes are.
    """
    foreign = np.full((len(topology.links), 2), np.nan)
    totals = interface_totals(loads)
    seen = np.where(totals.is_foreign, totals.foreign_bytes_per_s, 0.0)
    of_node = np.full((topology.num_nodes, 2), np.nan)
    for number in np.flatnonzero(loads.carries_job).tolist():
        of_node[loads.node[number]] = seen[[SENT, RECEIVED], number]
    if topology.num_nodes > 1:
        foreign[: topology.num_nodes] = of_node
    if topology.num_leaves > 1:
        for leaf in range(topology.num_leaves):
            nodes = of_node[topology.node_leaf == leaf]
            if np.isfinite(nodes).all():
                sent, received = nodes.sum(axis=0)
                foreign[topology.num_nodes + leaf, [UP, DOWN]] = max(sent - received, 0.0), max(received - sent, 0.0)
    return foreign
