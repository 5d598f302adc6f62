"""The links of a network by number, and rounds of disjoint pairs of hosts.

A transfer from n1 to n3 leaves by n1's link, passes the uplinks of both leaf switches where these differ, and arrives
by n3's link. Everything that judges pairs of hosts counts links in this way.

Pairs of one round run at the same time, so no host is in two of them. In a round that shares no link, no uplink is
passed by two pairs either: the rate of such a pair is that of its links. The circle method gives rounds in which every
host meets each other host once (Kirkman's schedule of tournaments).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

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


Pair = tuple[int, int]
"""Two hosts by their index; the first one sends first."""


@dataclass(frozen=True)
class Round:
    """Pairs of hosts that are measured at the same time.

    Attributes:
        pairs: no host is in two of them.
        is_apart: whether no two pairs share a link.
    """

    pairs: tuple[Pair, ...]
    is_apart: bool


def circle(members: Sequence[int]) -> list[list[Pair]]:
    """Return rounds in which each member meets each other one once; with an odd number, one rests in each round."""
    seats: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    half = len(seats) // 2
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def spread(rounds: Sequence[list[Pair]], most: int) -> list[list[Pair]]:
    """Return at most so many of the rounds, evenly spread, so that the partners of a host are far apart."""
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[index * len(rounds) // most] for index in range(most)]


def some_rounds(network: PairNetwork) -> int:
    """Return how many rounds of a kind are measured where time does not allow all of them."""
    return max(3, math.ceil(math.log2(max(network.num_hosts, 2))))


def rounds_within_leaves(network: PairNetwork, most: int) -> list[Round]:
    """Return rounds of pairs that share a leaf switch, all switches at once; none where the network is unknown."""
    if not network.is_known:
        return []
    by_leaf = [spread(circle(hosts), most) for hosts in network.leaf_hosts if len(hosts) > 1]
    return [Round(tuple(pair for pairs in same if pairs for pair in pairs), True) for same in zip_longest(*by_leaf)]


def rounds_across_leaves(network: PairNetwork, most: int) -> list[Round]:
    """Return rounds of one pair for two leaf switches, so that no uplink is shared; other hosts each time.

    First all switches meet by one pair of hosts each, then by the next ones, so that few rounds pass every uplink.
    """
    if not network.is_known:
        return []
    leaves = circle(range(len(network.leaf_hosts)))
    rounds = []
    for turn in range(max(len(hosts) for hosts in network.leaf_hosts) ** 2):
        for meeting in leaves:
            pairs = [pair for a, b in meeting if (pair := _turn(network, a, b, turn)) is not None]
            if pairs:
                rounds.append(Round(tuple(pairs), True))
            if len(rounds) >= most:
                return rounds
    return rounds


def _turn(network: PairNetwork, a: int, b: int, turn: int) -> Pair | None:
    """Return the hosts by which two leaf switches meet for the n-th time: all combinations, diagonal by diagonal."""
    first, second = network.leaf_hosts[a], network.leaf_hosts[b]
    most = max(len(first), len(second))
    row, shift = turn % most, turn // most
    column = (row + shift) % most
    if shift >= most or row >= len(first) or column >= len(second):
        return None
    return first[row], second[column]


def rounds_one_by_one(network: PairNetwork) -> Iterator[Round]:
    """Yield all pairs of hosts, each in a round for itself: nothing is known of what they share."""
    for pairs in circle(range(network.num_hosts)):
        for pair in pairs:
            yield Round((pair,), True)


def loaded_rounds(network: PairNetwork, most: int) -> list[Round]:
    """Return rounds in which all hosts send at once: across leaf switches, to load the uplinks, where these are known.

    The hosts of a switch send to those of another one, which gives the bisection bandwidth of their uplinks.
    """
    if not network.is_known:
        rounds = spread(circle(range(network.num_hosts)), most)
        return [Round(tuple(pairs), len(pairs) == 1) for pairs in rounds if pairs]
    made = []
    for meeting in spread(circle(range(len(network.leaf_hosts))), most):
        pairs = [
            pair
            for a, b in meeting
            for pair in zip(network.leaf_hosts[a], network.leaf_hosts[b], strict=False)
        ]  # fmt: skip
        if pairs:
            made.append(Round(tuple(pairs), False))
    return made
