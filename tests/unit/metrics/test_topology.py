from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.core.errors import TraceError
from hpcpace.core.hostlist import compress, exclude_line
from hpcpace.metrics.topology import topology_of


def of_addresses(addresses: list[str], hosts: list[str] | None = None, nodes: list[int] | None = None):
    hosts = hosts or [f"n{row}" for row in range(len(addresses))]
    nodes = nodes or list(range(len(addresses)))
    return topology_of(ranks=range(len(addresses)), nodes=nodes, hosts=hosts, addresses=addresses)


def test_the_leaf_is_the_component_before_the_node():
    topology = of_addresses(["spine.leaf1.n0", "spine.leaf1.n1", "spine.leaf2.n2", "spine.leaf2.n3"])
    assert topology.leaf_names == ("leaf1", "leaf2")
    assert topology.leaf.tolist() == [0, 0, 1, 1]
    assert topology.node_leaf.tolist() == [0, 0, 1, 1]
    assert topology.links == ("n0", "n1", "n2", "n3", "leaf1 uplink", "leaf2 uplink")


@each_case(
    ("addresses", "hosts", "leaves"),
    [
        (["leaf1.n0", "leaf2.n1"], None, ("leaf1", "leaf2")),
        ([".ib-core.tors-r1.n0", ".ib-core.tors-r2.n1"], None, ("tors-r1", "tors-r2")),
        (["s[0-1].leaf1.n0", "s[0-1].leaf1.n1"], None, ("leaf1",)),
        (
            ["top.leaf1.a.example.org", "top.leaf2.b.example.org"],
            ["a.example.org", "b.example.org"],
            ("leaf1", "leaf2"),
        ),
        (["leaf1.c0", "leaf2.c1"], ["ip-10-0-0-1", "ip-10-0-0-2"], ("leaf1", "leaf2")),
    ],
)
def test_addresses_that_name_a_leaf(addresses, hosts, leaves):
    assert of_addresses(addresses, hosts).leaf_names == leaves


@each_case(
    ("addresses", "hosts"),
    [
        (["", ""], None),
        (["n0", "n1"], None),
        (["spine.leaf1.n0", ""], None),
        (["spine.leaf1.n0", "n1"], None),
        (["spine.leaf1.n0", "spine.leaf1.n0"], None),
        (["spine..n0", "spine..n1"], None),
        (["spine.leaf1.", "spine.leaf1.n1"], None),
        (["spine1.leaf1.n0", "spine2.leaf1.n1"], None),
        (["a.example.org", "b.example.org"], ["a", "b"]),
        (["a.example.org", "b.example.org"], ["a.example.org", "b.example.org"]),
    ],
)
def test_empty_or_damaged_addresses_give_nodes_only(addresses, hosts):
    topology = of_addresses(addresses, hosts)
    assert topology.num_leaves == 0
    assert topology.num_nodes == 2
    assert topology.leaf.tolist() == [-1, -1]


def test_two_addresses_of_one_node_give_nodes_only():
    topology = of_addresses(["leaf1.n0", "leaf2.n0", "leaf1.n1"], ["n0", "n0", "n1"], [0, 0, 1])
    assert topology.num_leaves == 0


def test_slurm_names_are_those_of_the_addresses_and_else_short_host_names():
    assert of_addresses(["l.c0", "l.c1"], ["x", "y"]).slurm_names == ("c0", "c1")
    assert of_addresses(["", ""], ["a.example.org", "b.example.org"]).slurm_names == ("a", "b")


def test_nodes_of_one_host_name_keep_different_ids():
    assert of_addresses(["", ""], ["box", "box"]).node_names == ("box", "box#2")


def test_ranks_without_a_node_index_share_the_node_of_their_host():
    assert of_addresses(["", "", ""], ["a", "b", "a"], [-1, -1, -1]).node.tolist() == [0, 1, 0]


def test_no_ranks_are_an_empty_topology():
    topology = of_addresses([])
    assert (topology.num_ranks, topology.num_nodes, topology.links) == (0, 0, ())
    assert topology.touches([(0, 1)]).shape == (1, 0)


def test_levels_with_the_same_ranks_are_aliases():
    topology = of_addresses(["s.l1.a", "s.l2.b", "s.l2.b", "s.l3.c", "s.l3.d"], list("abbcd"), [0, 1, 1, 2, 3])
    assert topology.aliases("rank", 0) == (("node", "a"), ("rank", "0"), ("leaf", "l1"), ("link", "l1 uplink"))
    assert topology.aliases("node", 1) == (("node", "b"), ("leaf", "l2"), ("link", "l2 uplink"))
    assert topology.aliases("rank", 1) == (("rank", "1"),)
    assert topology.aliases("rank", 3) == (("node", "c"), ("rank", "3"))
    assert topology.aliases("leaf", 2) == (("leaf", "l3"), ("link", "l3 uplink"))


def test_one_leaf_for_all_is_no_unit_and_has_no_uplink():
    topology = of_addresses(["s.l1.n0", "s.l1.n1"])
    assert topology.aliases("rank", 0) == (("node", "n0"), ("rank", "0"))
    assert topology.links == ("n0", "n1")


def test_groups_touch_the_links_on_their_way():
    topology = of_addresses(["leaf1.a", "leaf1.a", "leaf1.b", "leaf2.c"], list("aabc"), [0, 0, 1, 2])
    touches = topology.touches([(0, 1), (0, 2), (1, 3), (0, 1, 2, 3), (3,)])
    assert topology.links == ("a", "b", "c", "leaf1 uplink", "leaf2 uplink")
    assert touches.astype(int).tolist() == [
        [0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 1, 1],
        [1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0],
    ]


def test_members_without_a_trace_are_on_no_unit():
    topology = topology_of(ranks=[0, 3], nodes=[0, 1], hosts=["a", "b"], addresses=["", ""])
    assert topology.members_by([(0, 1, 2, 3)], topology.node, 2).tolist() == [[1, 1]]


@each_case(
    ("hosts", "expected"),
    [
        ([], ""),
        (["n3"], "n3"),
        (["n9", "n3", "n7", "n8", "n3"], "n[3,7-9]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n08", "n09", "n10"], "n[08-10]"),
        (["n099", "n100"], "n[099-100]"),
        (["n1", "n01", "n2"], "n[1,01,2]"),
        (["gpu5", "n1", "n2"], "gpu5,n[1-2]"),
        (["rack1-n1", "rack1-n2", "rack2-n1"], "rack1-n[1-2],rack2-n1"),
        (["login", "login1"], "login,login1"),
        (["7", "8"], "7,8"),
        (["a.b_c-d"], "a.b_c-d"),
        (["n1-ib", "n2-ib"], "n1-ib,n2-ib"),
    ],
)
def test_names_are_compressed_as_slurm_reads_them(hosts, expected):
    assert compress(hosts) == expected


def expanded(expression: str) -> set[str]:
    """Return the names of a hostlist with one bracket, as Slurm expands it."""
    prefix, _, inside = expression.removesuffix("]").partition("[")
    names = set()
    for part in inside.split(",") if inside else []:
        low, _, high = part.partition("-")
        names |= {f"{prefix}{value:0{len(low)}d}" for value in range(int(low), int(high or low) + 1)}
    return names or {prefix}


@each_case("seed", range(20))
def test_expansion_gives_the_same_names_again(seed):
    random = np.random.default_rng(seed)
    width = int(random.integers(1, 5))
    hosts = {f"n{value:0{width}d}" for value in random.integers(0, 200, 60).tolist()}
    assert expanded(compress(hosts)) == hosts


def test_the_line_excludes_the_nodes():
    assert exclude_line(["n3", "n7", "n8", "n9"]) == "#SBATCH --exclude=n[3,7-9]"
    assert exclude_line([]) == ""


@each_case("name", ["", "n 1", "n1;reboot", "n[1-2]", "n1\n#SBATCH --wrap=x", "n$HOME", "-x", "nö", "n٣"])
def test_names_that_no_node_has_are_refused(name):
    with pytest.raises(TraceError, match="is no name of a node"):
        exclude_line(["n1", name])
