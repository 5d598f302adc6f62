from __future__ import annotations

from functools import partial
from itertools import combinations

import numpy as np
import pytest
from cases import each_case

from hpcpace.diagnosis.settings import DiagnosisConfig
from hpcpace.metrics import links
from hpcpace.metrics.links import GroupTransfers, leaf_matrix, locality, node_matrix
from hpcpace.metrics.topology import Topology, topology_of

MS = 1_000_000.0
locate_links = partial(links.locate_links, floor_share=DiagnosisConfig.link_share, level=DiagnosisConfig.level)


def tree(num_leaves: int, nodes_per_leaf: int, ranks_per_node: int = 1) -> Topology:
    """Return a topology of nodes n0, n1, ... on leaf0, leaf1, ..., ranks in order."""
    nodes = np.repeat(np.arange(num_leaves * nodes_per_leaf), ranks_per_node)
    return topology_of(
        ranks=range(len(nodes)),
        nodes=nodes.tolist(),
        hosts=[f"n{node}" for node in nodes],
        addresses=[f"spine.leaf{node // nodes_per_leaf}.n{node}" for node in nodes],
    )


def timed(
    topology: Topology,
    members,
    slow: dict[str, float] | None = None,
    *,
    num_steps: int = 60,
    seed: int = 0,
    noise: float = 0.05,
    kind: str = "lognormal",
    op: str = "all_reduce",
    size_bytes: int = 1 << 20,
) -> list[GroupTransfers]:
    """Return transfers that take 1 ms times the largest factor of the links that each group passes."""
    random = np.random.default_rng(seed)
    factors = np.array([(slow or {}).get(link, 1.0) for link in topology.links])
    found = []
    for group, touches in zip(members, topology.touches(members), strict=True):
        log = random.normal(0, noise, num_steps) if kind == "lognormal" else random.standard_t(3, num_steps) * noise
        transfer_ns = MS * factors[touches].max(initial=1.0) * np.exp(log)
        found.append(GroupTransfers(members=group, op=op, size_bytes=size_bytes, transfer_ns=transfer_ns))
    return found


def named(findings) -> list[tuple[str, ...]]:
    return [culprit.ids for culprit in findings.culprits]


def pairs(topology: Topology) -> list[tuple[int, ...]]:
    return list(combinations(topology.ranks, 2))


LAB = tree(2, 2)
FOUR = tree(4, 2)


@each_case("link", FOUR.links)
@each_case("factor", [1.35, 2.0, 10.0])
def test_messages_between_all_nodes_locate_any_link(link, factor):
    findings = locate_links(timed(FOUR, pairs(FOUR), {link: factor}), FOUR)
    assert named(findings) == [(link,)]
    assert findings.is_identifiable and findings.reason == ""
    low, high = findings.culprits[0].effect.interval
    assert low < factor - 1 < high
    assert findings.culprits[0].aliases == (f"link {link}",)


def test_a_slow_host_link_of_eight_is_found_by_overlapping_groups():
    topology = tree(1, 8)
    members = [(0, 1, 2, 3), (4, 5, 6, 7), (0, 2, 4, 6), (1, 3, 5, 7), (0, 1, 4, 5), (2, 3, 6, 7)]
    assert named(locate_links(timed(topology, members, {"n5": 1.6}), topology)) == [("n5",)]


def test_the_uplinks_of_two_leaves_are_one_set():
    findings = locate_links(timed(LAB, [(0, 1), (2, 3), (0, 2), (1, 3)], {"leaf1 uplink": 3.0}), LAB)
    assert named(findings) == [("leaf0 uplink", "leaf1 uplink")]
    assert not findings.is_identifiable
    assert "no group separates the links leaf0<->spine, leaf1<->spine" in findings.reason


def test_both_ends_of_a_message_are_one_set_where_nothing_else_passes_them():
    findings = locate_links(timed(LAB, [(0, 2), (1, 3)], {"n0": 2.0}), LAB)
    assert named(findings) == [("n0", "n2")]
    assert not findings.is_identifiable


@pytest.mark.parametrize("slow", [{}, {"n2": 3.0}])
def test_one_global_all_reduce_locates_nothing_and_names_all_links_as_candidates(slow):
    findings = locate_links(timed(LAB, [(0, 1, 2, 3)], slow), LAB)
    assert findings.culprits == ()
    assert not findings.is_identifiable
    assert findings.candidates == LAB.links
    assert "one of the links n0<->leaf0, n1<->leaf0, n2<->leaf1, n3<->leaf1, and 2 more may be slow" in findings.reason


def test_groups_over_the_same_nodes_locate_nothing():
    topology = tree(2, 2, 2)
    findings = locate_links(timed(topology, [(0, 2, 4, 6), (1, 3, 5, 7)], {"n1": 2.0}), topology)
    assert findings.culprits == () and not findings.is_identifiable


def test_uplinks_that_all_groups_pass_are_candidates_while_host_links_are_compared():
    findings = locate_links(timed(LAB, [(0, 2), (1, 3)], {"leaf0 uplink": 3.0}), LAB)
    assert findings.culprits == ()
    assert findings.candidates == ("leaf0 uplink", "leaf1 uplink")
    assert not findings.is_identifiable


def test_without_a_slow_link_all_compared_links_are_cleared():
    findings = locate_links(timed(FOUR, pairs(FOUR)), FOUR)
    assert (findings.culprits, findings.is_identifiable, findings.reason) == ((), True, "")


def test_where_all_that_cross_leaves_are_slow_the_uplinks_are_one_set():
    slow = dict.fromkeys(FOUR.links[8:], 2.0)
    members = [(0, 1), (2, 3), (4, 5), (6, 7), (0, 2), (4, 6), (1, 3), (5, 7)]
    findings = locate_links(timed(FOUR, members, slow), FOUR)
    assert named(findings) == [FOUR.links[8:]]


def test_two_slow_links_are_both_found():
    found = named(locate_links(timed(FOUR, pairs(FOUR), {"n1": 2.0, "leaf3 uplink": 4.0}), FOUR))
    assert found == [("leaf3 uplink",), ("n1",)]


def test_links_that_explain_different_slow_groups_equally_well_are_one_set():
    topology = tree(1, 4)
    slow = timed(topology, [(0, 1), (1, 2), (2, 3)], dict.fromkeys(topology.links, 2.0))
    rest = tree(1, 6)
    findings = locate_links([*slow, *timed(rest, [(4, 5), (4, 5), (4, 5)])], rest)
    assert named(findings) == [("n0", "n1", "n2", "n3")]


def test_a_kind_of_operation_that_no_link_slows_clears_nothing():
    slow = {"leaf0 uplink": 2.0}
    large = timed(FOUR, pairs(FOUR), slow)
    small = timed(FOUR, pairs(FOUR), op="barrier", size_bytes=0, seed=1)
    assert named(locate_links([*large, *small], FOUR)) == [("leaf0 uplink",)]


def test_other_sizes_are_not_compared():
    members = pairs(FOUR)
    mixed = timed(FOUR, members[:14]) + timed(FOUR, members[14:], dict.fromkeys(FOUR.links, 5.0), size_bytes=1 << 24)
    assert named(locate_links(mixed, FOUR)) == []


def test_groups_inside_a_node_are_no_reference():
    topology = tree(2, 2, 2)
    inside = timed(topology, [(0, 1), (2, 3), (4, 5), (6, 7)])
    inside = [
        GroupTransfers(members=g.members, op=g.op, size_bytes=g.size_bytes, transfer_ns=g.transfer_ns / 50)
        for g in inside
    ]
    assert named(locate_links([*inside, *timed(topology, [(0, 2), (4, 6), (1, 5), (3, 7)])], topology)) == []


def test_groups_with_members_of_unknown_place_are_left_out():
    topology = topology_of(ranks=[0, 1, 2], nodes=[0, 1, 2], hosts=["a", "b", "c"], addresses=[""] * 3)
    groups = timed(topology, [(0, 1), (1, 2), (0, 2), (0, 9)])
    slow = GroupTransfers(members=(0, 9), op="all_reduce", size_bytes=1 << 20, transfer_ns=groups[3].transfer_ns * 5)
    assert named(locate_links([*groups[:3], slow], topology)) == []


def test_steps_without_an_operation_are_left_out():
    groups = timed(FOUR, pairs(FOUR), {"n3": 2.0})
    groups[0].transfer_ns[::2] = np.nan
    assert named(locate_links(groups, FOUR)) == [("n3",)]


def test_bursts_in_a_third_of_the_steps_accuse_no_link():
    groups = timed(FOUR, pairs(FOUR))
    random = np.random.default_rng(5)
    for group in groups:
        group.transfer_ns[random.random(60) < 0.3] *= 4
    assert named(locate_links(groups, FOUR)) == []


@each_case("kind", ["lognormal", "heavy"])
@each_case("noise", [0.1, 0.5])
def test_healthy_links_give_at_most_one_percent_false_alarms(kind, noise):
    members = pairs(FOUR)
    runs = (timed(FOUR, members, num_steps=30, seed=seed, noise=noise, kind=kind) for seed in range(100))
    assert sum(bool(locate_links(groups, FOUR).culprits) for groups in runs) <= 1


def test_an_effect_below_the_floor_is_no_culprit():
    assert named(locate_links(timed(FOUR, pairs(FOUR), {"n3": 1.1}), FOUR)) == []


@pytest.mark.parametrize("num_steps", [0, 9])
def test_too_few_steps_locate_nothing(num_steps):
    findings = locate_links(timed(FOUR, pairs(FOUR), {"n3": 3.0}, num_steps=num_steps), FOUR)
    assert findings.culprits == () and not findings.is_identifiable


@each_case("members", [[], [(0,)], [(0, 1)]])
def test_without_operations_between_nodes_there_is_nothing_to_tell(members):
    topology = tree(1, 1, 2)
    findings = locate_links(timed(topology, members), topology)
    assert findings.culprits == () and findings.candidates == ()
    assert "no group of known ranks communicates between nodes" in findings.reason


def test_constant_transfers_name_no_link():
    assert named(locate_links(timed(FOUR, pairs(FOUR), noise=0.0), FOUR)) == []


def test_locality_is_the_factor_of_crossing_leaves():
    slow = dict.fromkeys(FOUR.links[8:], 1.5)
    found = locality(timed(FOUR, pairs(FOUR), slow), FOUR)
    assert found is not None
    assert found.factor.low < 1.5 < found.factor.high
    assert found.p_value < 1e-6


def test_no_locality_where_crossing_costs_nothing():
    found = locality(timed(FOUR, pairs(FOUR)), FOUR)
    assert found is not None
    assert found.factor.low < 1.0 < found.factor.high


@each_case("members", [[], [(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1, 2, 3)]])
def test_locality_needs_groups_inside_and_across(members):
    assert locality(timed(LAB, members), LAB) is None


def test_the_matrix_of_nodes_shows_messages_and_is_empty_where_there_are_none():
    matrix = node_matrix(timed(LAB, [(0, 1), (0, 2), (1, 2)], {"n2": 3.0}, noise=0.0), LAB)
    assert matrix.labels == ("n0", "n1", "n2", "n3")
    assert matrix.relative[0, 2] == matrix.relative[2, 0] == pytest.approx(1.0)
    assert matrix.relative[0, 1] == pytest.approx(1 / 3)
    assert np.isnan(matrix.relative[3]).all() and np.isnan(matrix.relative[0, 0])


def test_kinds_of_different_size_are_relative_to_their_own_median():
    small = timed(LAB, [(0, 1)], noise=0.0)
    large = timed(LAB, [(2, 3)], dict.fromkeys(LAB.links, 100.0), noise=0.0, size_bytes=1 << 28)
    matrix = node_matrix([*small, *large], LAB)
    assert matrix.relative[0, 1] == pytest.approx(1.0) == matrix.relative[2, 3]


def test_groups_fill_the_matrix_where_no_messages_are():
    slow = dict.fromkeys(LAB.links, 4.0)
    groups = timed(LAB, [(0, 1, 2, 3)], slow, noise=0.0) + timed(LAB, [(0, 1)], noise=0.0)
    groups += timed(LAB, [(0, 1)], slow, noise=0.0)
    matrix = node_matrix(groups, LAB)
    assert matrix.relative[0, 1] == pytest.approx(1.0)  # of both messages
    assert matrix.relative[0, 3] == pytest.approx(1.0)  # of the only group


def test_the_diagonal_of_leaves_is_of_groups_inside_them():
    slow = {"leaf0 uplink": 2.0}
    matrix = leaf_matrix(timed(LAB, [(0, 1), (2, 3), (0, 2), (1, 3)], slow, noise=0.0), LAB)
    assert matrix.relative == pytest.approx(np.array([[1, 2], [2, 1]]) / 1.5)


def test_matrices_of_nothing_are_empty():
    topology = topology_of(ranks=[], nodes=[], hosts=[], addresses=[])
    assert node_matrix([], topology).relative.shape == (0, 0)
    assert leaf_matrix([], LAB).relative.shape == (2, 2)


def test_more_groups_on_a_slow_link_make_its_effect_surer():
    topology = tree(1, 8)
    widths = []
    for num_slow in (1, 4):
        slow = [(0, 1)] * num_slow
        groups = timed(topology, [*slow, *[(2, 3), (4, 5), (6, 7)] * 4], {"n0": 2.0, "n1": 2.0}, seed=4)
        (culprit,) = locate_links(groups, topology).culprits
        assert culprit.effect.low < 1.0 < culprit.effect.high
        widths.append(culprit.effect.high - culprit.effect.low)
    assert widths[1] < 0.8 * widths[0]


def test_a_pair_with_few_visible_messages_hides_no_slow_link():
    """Messages that came before their receivers show no transfer, so that few steps have all pairs."""
    topology = tree(1, 4)
    groups = timed(topology, [(0, 1), (1, 2), (2, 3), (0, 3)], {"n0": 3.0})
    groups[3].transfer_ns[5:] = np.nan
    assert named(locate_links(groups, topology)) == [("n0",)]
