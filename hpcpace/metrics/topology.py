"""Where the ranks of a run are: in the network (node, leaf switch, links), and in a pipeline that no mesh names.

Slurm gives each task the path from the top of the network to its node. If units of two levels hold the same ranks, no
measurement can separate them: they are aliases of each other and reported together. Stages of a pipeline are found from
which ranks reduce together and which send to each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Literal

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Ints


def strong_components(num_vertices: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the component of each vertex, numbered from 0, in time linear in vertices and edges.

    The components of an undirected graph are those of a graph with each edge in both directions. Tarjan's method
    (SIAM Journal on Computing 1, 1972), without recursion: chains of thousands of ranks are usual.
    """
    followers: list[list[int]] = [[] for _ in range(num_vertices)]
    for source, target in edges:
        followers[source].append(target)
    component = [-1] * num_vertices
    order = [-1] * num_vertices  # in which vertices were found
    lowest = [0] * num_vertices  # order of the first vertex, not yet in a component, that is known to be reached
    num_found = num_components = 0
    open_vertices: list[int] = []
    for root in range(num_vertices):
        path = [root] if order[root] < 0 else []
        while path:
            vertex = path[-1]
            if order[vertex] < 0:
                order[vertex] = lowest[vertex] = num_found
                num_found += 1
                open_vertices.append(vertex)
            if followers[vertex]:
                follower = followers[vertex].pop()
                if order[follower] < 0:
                    path.append(follower)
                elif component[follower] < 0:
                    lowest[vertex] = min(lowest[vertex], order[follower])
                continue
            path.pop()
            if path:
                lowest[path[-1]] = min(lowest[path[-1]], lowest[vertex])
            if lowest[vertex] == order[vertex]:
                while component[vertex] < 0:
                    component[open_vertices.pop()] = num_components
                num_components += 1
    return component


_MAX_NEIGHBOURS = 2


def stages_of_traffic(
    ranks: Sequence[int], groups: Collection[Sequence[int]], messages: Collection[Sequence[int]]
) -> Ints:
    """Return the stage of each rank, int64, (num_ranks,), numbered by their lowest ranks; all -1 if there are none.

    Ranks that have collectives together, but not with all, are of one stage (data and tensor parallelism). It is a
    pipeline, or any other chain or ring, if all stages have as many ranks, messages go between stages only, and each
    stage has at most two neighbours.

    Args:
        ranks: the ranks, distinct.
        groups: the ranks of each group that has collectives.
        messages: pairs of ranks that send to each other.
    """
    none = np.full(len(ranks), -1, np.int64)
    index = {rank: place for place, rank in enumerate(ranks)}
    pairs = [(index[a], index[b]) for a, b in messages if a in index and b in index]
    if not pairs:
        return none  # parts that no message joins are no stages

    together = [
        (index[group[0]], index[other])
        for group in groups
        if len(set(group)) < len(ranks) and all(rank in index for rank in group)
        for other in group[1:]
    ]
    part = np.array(_connected(len(ranks), together))
    num_parts = int(part.max()) + 1
    links = {(int(part[a]), int(part[b])) for a, b in pairs}
    if num_parts < 2 or len(set(np.bincount(part).tolist())) > 1 or any(a == b for a, b in links):
        return none
    neighbours = np.zeros((num_parts, num_parts), bool)
    for a, b in links:
        neighbours[a, b] = neighbours[b, a] = True
    is_whole = max(_connected(num_parts, links)) == 0
    if not is_whole or neighbours.sum(axis=0).max() > _MAX_NEIGHBOURS:
        return none
    lowest = np.array([min(np.asarray(ranks)[part == one]) for one in range(num_parts)])
    return np.asarray(np.argsort(np.argsort(lowest))[part].astype(np.int64))


def _connected(num_vertices: int, edges: Collection[tuple[int, int]]) -> list[int]:
    return strong_components(num_vertices, chain(edges, ((b, a) for a, b in edges)))


UnitKind = Literal["rank", "node", "leaf", "link"]
Unit = tuple[UnitKind, str]
"""Kind and id of something that can be at fault: ("rank", "5"), ("node", "n3"), ("link", "leaf2 uplink")."""

SLURM_ADDRESS = "SLURM_TOPOLOGY_ADDR"
"""The variable in which Slurm gives a task its node's place in the network."""

_PREFERENCE: tuple[UnitKind, ...] = ("node", "rank", "leaf", "link")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The places of the ranks; row r of every array is the rank `ranks[r]`.

    Attributes:
        ranks: rank numbers, ascending, (num_ranks,).
        node: index into `node_names`, int64, (num_ranks,).
        leaf: index into `leaf_names`, int64, (num_ranks,); all -1 where the network is not known.
        node_names: host name of each node, unique, (num_nodes,).
        slurm_names: name by which Slurm knows each node, (num_nodes,).
        leaf_names: name of each leaf switch, (num_leaves,); empty where the network is not known.
    """

    ranks: tuple[int, ...]
    node: Ints
    leaf: Ints
    node_names: tuple[str, ...]
    slurm_names: tuple[str, ...]
    leaf_names: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return len(self.ranks)

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return len(self.node_names)

    @property
    def num_leaves(self) -> int:
        """Leaf switches, 0 where the network is not known."""
        return len(self.leaf_names)

    @property
    def node_leaf(self) -> Ints:
        """Leaf of each node, int64, (num_nodes,), -1 where the network is not known."""
        leaf = np.full(self.num_nodes, -1, np.int64)
        leaf[self.node] = self.leaf
        return leaf

    @property
    def links(self) -> tuple[str, ...]:
        """Ids of the links between nodes: the host link of each node, then the uplink of each leaf.

        One node has no link that matters, one leaf no uplink.
        """
        hosts = self.node_names if self.num_nodes > 1 else ()
        uplinks = tuple(uplink_id(name) for name in self.leaf_names) if self.num_leaves > 1 else ()
        return hosts + uplinks

    @property
    def link_ends(self) -> dict[str, str]:
        """Both ends of each of `links` by its id: `n3<->leaf1`, `leaf1<->spine`; `n3<->switch` if it has no name."""
        leaves = (self.leaf_names[leaf] if leaf >= 0 else "switch" for leaf in self.node_leaf.tolist())
        of_hosts = [f"{name}<->{leaf}" for name, leaf in zip(self.node_names, leaves, strict=True)]
        of_leaves = [f"{name}<->spine" for name in self.leaf_names]
        ends = (of_hosts if self.num_nodes > 1 else []) + (of_leaves if self.num_leaves > 1 else [])
        return dict(zip(self.links, ends, strict=True))

    @property
    def is_uplink(self) -> Bools:
        """Which of `links` are uplinks, bool, (num_links,)."""
        return np.arange(len(self.links)) >= self.num_nodes

    def rows_of(self, kind: str, name: str) -> Ints:
        """Return the rows of the ranks of a unit by its name; none for what has no ranks, such as a link."""
        if kind == "rank":
            return np.flatnonzero(np.asarray(self.ranks, np.int64) == int(name))
        units, names = (self.node, self.node_names) if kind == "node" else (self.leaf, self.leaf_names)
        return np.flatnonzero(units == names.index(name)) if kind in ("node", "leaf") else np.zeros(0, np.int64)

    def touches(self, groups: Sequence[Sequence[int]]) -> Bools:
        """Return which links the transfers of each group must pass, bool, (num_groups, num_links).

        A group passes a node's host link if it has members on the node and elsewhere; uplinks likewise.

        Args:
            groups: rank numbers of the members of each group.
        """
        nodes = self.members_by(groups, self.node, self.num_nodes) > 0
        leaves = self.members_by(groups, self.leaf, self.num_leaves) > 0
        parts = [units & (units.sum(axis=1, keepdims=True) > 1) for units in (nodes, leaves) if units.shape[1] > 1]
        return np.concatenate([np.zeros((len(groups), 0), np.bool_), *parts], axis=1)

    def members_by(self, groups: Sequence[Sequence[int]], unit: Ints, num_units: int) -> Ints:
        """Return how many members of each group are on each unit, int64, (num_groups, num_units).

        Args:
            groups: rank numbers of the members of each group.
            unit: unit of each row, -1 for none, (num_ranks,).
            num_units: number of units.
        """
        members = np.array([rank for group in groups for rank in group], np.int64)
        group = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        ranks = np.asarray(self.ranks, np.int64)
        row = np.minimum(np.searchsorted(ranks, members), max(self.num_ranks - 1, 0))
        known = (ranks[row] == members) & (unit[row] >= 0) if self.num_ranks else np.zeros(len(members), np.bool_)
        cell = group[known] * num_units + unit[row[known]]
        return np.bincount(cell, minlength=len(groups) * num_units).reshape(len(groups), num_units)

    def aliases(self, kind: UnitKind, index: int) -> tuple[Unit, ...]:
        """Return the units that hold exactly the ranks of one unit, itself included, the most specific first.

        A node of one rank is that rank, a leaf of one node that node, a leaf always its uplink.

        Args:
            kind: "rank", "node" or "leaf".
            index: row of the rank, index of the node, or of the leaf.
        """
        unit = {"rank": np.arange(self.num_ranks), "node": self.node, "leaf": self.leaf}[kind]
        rows = np.flatnonzero(unit == index)
        found: list[Unit] = [("rank", str(self.ranks[rows[0]]))] if len(rows) == 1 else []
        for name, of_rank, names in (("node", self.node, self.node_names), ("leaf", self.leaf, self.leaf_names)):
            own = of_rank[rows[0]] if len(rows) else -1
            if own >= 0 and np.array_equal(np.flatnonzero(of_rank == own), rows) and len(names) > 1:
                found.append(("node" if name == "node" else "leaf", names[own]))
                found += [("link", uplink_id(names[own]))] if name == "leaf" else []
        return tuple(sorted(found, key=lambda pair: _PREFERENCE.index(pair[0])))


def uplink_id(leaf: str) -> str:
    """Return the id of the link between a leaf switch and what is above it."""
    return f"{leaf} uplink"


def unit_name(unit: Unit) -> str:
    """Return kind and id as one text: `node n3`, `link leaf2 uplink`."""
    return " ".join(unit)


def topology_of(
    *, ranks: Sequence[int], nodes: Sequence[int], hosts: Sequence[str], addresses: Sequence[str]
) -> Topology:
    """Return the places of ranks; sequences are by rank, (num_ranks,), with `ranks` ascending.

    The leaf switch is the component before the node in Slurm's SLURM_TOPOLOGY_ADDR (srun's manual: "the names of
    network switches which may be involved in the job's communications from the system's top level switch down to the
    leaf switch and ending with node name", separated by periods). Upper components may be empty and are not used. If
    the address of any rank is empty, has no leaf or contradicts another one, no leaf is taken as known: with half a
    network, the blame would fall on those whose place is known.

    Args:
        ranks: rank numbers.
        nodes: index of the node, -1 where unknown: then the host name counts.
        hosts: host names.
        addresses: SLURM_TOPOLOGY_ADDR, empty where not given.
    """
    keys = [(node, "") if node >= 0 else (-1, host) for node, host in zip(nodes, hosts, strict=True)]
    order = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    node = np.array([order[key] for key in keys], np.int64)
    first = [keys.index(key) for key in order]
    places = [split_address(address, host) for address, host in zip(addresses, hosts, strict=True)]
    leaf_names = tuple(dict.fromkeys(above[-1] for above, _ in places)) if _are_consistent(places, node) else ()
    leaf = [leaf_names.index(above[-1]) if leaf_names else -1 for above, _ in places]
    return Topology(
        ranks=tuple(int(rank) for rank in ranks),
        node=node,
        leaf=np.array(leaf, np.int64),
        node_names=_unique([hosts[row] or f"node {node[row]}" for row in first]),
        slurm_names=tuple(places[row][1] if leaf_names else hosts[row].partition(".")[0] for row in first),
        leaf_names=leaf_names,
    )


def split_address(address: str, host: str) -> tuple[tuple[str, ...], str]:
    """Return the switches above a node, from the top down, and the node's name; names with periods are the host's.

    Args:
        address: as SLURM_TOPOLOGY_ADDR has it.
        host: by which the node calls itself.
    """
    address, host = address.strip(), host.strip()
    if host and (address == host or address.endswith(f".{host}")):
        return tuple(address[: -len(host) - 1].split(".")) if address != host else (), host
    *above, node = address.split(".")
    return tuple(above), node


def _are_consistent(places: Sequence[tuple[tuple[str, ...], str]], node: Ints) -> bool:
    """Return whether each node has one place, each place one node, and each leaf one path up."""
    if not places or any(not above or not above[-1] or not name for above, name in places):
        return False
    by_node = set(zip(node.tolist(), places, strict=True))
    names = {name for _, (_, name) in by_node}
    ways = {above for _, (above, _) in by_node}
    return len(by_node) == len(names) == len(np.unique(node)) and len({above[-1] for above in ways}) == len(ways)


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    """Return names with a number added to repeated ones: containers may share a host name."""
    seen: dict[str, int] = {}
    made = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        made.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return tuple(made)
