"""The links that transfers between hosts pass, each direction apart: hosts' links, and uplinks of leaf switches.

A transfer from n1 to n3 leaves by n1's link, passes the uplinks of both leaf switches where these differ, and arrives
by n3's link. Everything that judges pairs of hosts counts links in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.topology import topology_of

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

NO_LINK = -1
"""Fills the columns of a path that has fewer links."""


@dataclass(frozen=True)
class PairNetwork:
    """Hosts and the leaf switches that they are connected to.

    Directed links have numbers: host h sends by link 2h and receives by 2h + 1; of H hosts, leaf k sends up by link
    2(H + k) and receives from above by 2(H + k) + 1.

    Attributes:
        hosts: names, unique, (num_hosts,).
        leaf: index of each host's leaf switch, int64, (num_hosts,); all -1 where the network is unknown.
        leaf_names: names of the leaf switches, (num_leaves,).
    """

    hosts: tuple[str, ...]
    leaf: IntArray
    leaf_names: tuple[str, ...] = ()

    @property
    def num_hosts(self) -> int:
        """Hosts."""
        return len(self.hosts)

    @property
    def num_links(self) -> int:
        """Directed links: two of each host and of each leaf switch."""
        return 2 * (len(self.hosts) + len(self.leaf_names))

    @property
    def is_known(self) -> bool:
        """Whether it is known which hosts share a leaf switch."""
        return bool(self.leaf_names)

    @cached_property
    def leaf_hosts(self) -> tuple[tuple[int, ...], ...]:
        """Hosts of each leaf switch; where the network is unknown, one entry with all hosts."""
        if not self.is_known:
            return (tuple(range(self.num_hosts)),)
        return tuple(tuple(np.flatnonzero(self.leaf == leaf).tolist()) for leaf in range(len(self.leaf_names)))

    @cached_property
    def is_uplink(self) -> BoolArray:
        """Which directed links are uplinks, bool, (num_links,)."""
        return np.arange(self.num_links) >= 2 * self.num_hosts

    def crosses(self, source: IntArray, target: IntArray) -> BoolArray:
        """Return which transfers pass from one leaf switch to another, bool, (num_transfers,)."""
        crosses: BoolArray = self.leaf[source] != self.leaf[target]
        return crosses

    def paths(self, source: IntArray, target: IntArray) -> IntArray:
        """Return the directed links of each transfer, int64, (num_transfers, 4), NO_LINK where there are only two.

        Args:
            source: index of the sending host, (num_transfers,).
            target: index of the receiving host, (num_transfers,).
        """
        path = np.full((len(source), 4), NO_LINK, np.int64)
        path[:, 0], path[:, 3] = 2 * source, 2 * target + 1
        crosses = self.crosses(source, target)
        path[crosses, 1] = 2 * (self.num_hosts + self.leaf[source[crosses]])
        path[crosses, 2] = 2 * (self.num_hosts + self.leaf[target[crosses]]) + 1
        return path

    def owner(self, link: int) -> str:
        """Return whose directed link one is: the name of the host, or `leaf2 uplink`."""
        unit = link // 2
        if unit < self.num_hosts:
            return self.hosts[unit]
        return f"{self.leaf_names[unit - self.num_hosts]} uplink"


def pair_network(hosts: Sequence[str], addresses: Sequence[str]) -> PairNetwork:
    """Return the network of hosts by Slurm's addresses of them, such as `spine.leaf1.n1`.

    Args:
        hosts: names, unique.
        addresses: SLURM_TOPOLOGY_ADDR of each, empty where unknown: then no leaf switch is taken as known.
    """
    indices = range(len(hosts))
    topology = topology_of(ranks=indices, nodes=indices, hosts=hosts, addresses=addresses)
    return PairNetwork(tuple(topology.node_names), topology.node_leaf, topology.leaf_names)
