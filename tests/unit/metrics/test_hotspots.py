from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.hotspots import delay_hotspots
from hpcpace.metrics.topology import Topology, topology_of

MS = 1_000_000.0


def tree(num_leaves: int, nodes_per_leaf: int, ranks_per_node: int) -> Topology:
    """Return a topology whose nodes are n0, n1, ... on leaf0, leaf1, ..."""
    num_nodes = num_leaves * nodes_per_leaf
    nodes = np.repeat(np.arange(num_nodes), ranks_per_node)
    return topology_of(
        ranks=range(len(nodes)),
        nodes=nodes.tolist(),
        hosts=[f"n{node}" for node in nodes],
        addresses=[f"spine.leaf{node // nodes_per_leaf}.n{node}" for node in nodes],
    )


def noise(topology: Topology, *, num_steps: int = 100, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, MS, (topology.num_ranks, num_steps))


def ids(found) -> list[tuple[str, str]]:
    return [(hotspot.kind, hotspot.id) for hotspot in found]


SHAPES = [(1, 8, 1), (1, 8, 4), (1, 2, 4), (1, 1, 8), (2, 2, 1), (2, 4, 2), (2, 2, 2), (4, 4, 1), (4, 2, 4), (8, 1, 2)]


@each_case("shape", SHAPES)
def test_one_slow_rank_is_the_only_hotspot_with_its_effect_in_the_interval(shape):
    topology = tree(*shape)
    excess = noise(topology)
    excess[1] += 2 * MS
    (hotspot,) = delay_hotspots(excess, topology)
    assert "rank 1" in hotspot.aliases
    assert hotspot.interval_ns[0] < 2 * MS < hotspot.interval_ns[1]
    assert len([alias for alias in hotspot.aliases if alias.startswith("rank")]) == 1


@each_case("shape", [shape for shape in SHAPES if shape[0] * shape[1] > 1])
def test_one_slow_node_is_the_only_hotspot(shape):
    topology = tree(*shape)
    excess = noise(topology)
    excess[topology.node == 1] += 2 * MS
    (hotspot,) = delay_hotspots(excess, topology)
    assert (hotspot.kind, hotspot.id) == ("node", "n1")
    assert hotspot.interval_ns[0] < 2 * MS < hotspot.interval_ns[1]


@each_case("shape", [shape for shape in SHAPES if shape[0] > 1 and shape[1] > 1])
def test_a_slow_leaf_is_the_only_hotspot_and_cannot_be_told_from_its_uplink(shape):
    topology = tree(*shape)
    excess = noise(topology)
    excess[topology.leaf == 1] += 2 * MS
    (hotspot,) = delay_hotspots(excess, topology)
    assert (hotspot.kind, hotspot.id) == ("leaf", "leaf1")
    assert hotspot.aliases == ("leaf leaf1", "link leaf1 uplink")


def test_the_only_rank_of_the_only_node_of_a_leaf_is_all_three():
    topology = tree(8, 1, 1)
    excess = noise(topology)
    excess[3] += 2 * MS
    (hotspot,) = delay_hotspots(excess, topology)
    assert hotspot.aliases == ("node n3", "rank 3", "leaf leaf3", "link leaf3 uplink")


def test_a_node_of_one_rank_among_larger_ones_has_the_whole_effect():
    nodes = [0, 1, 1, 2, 2, 3, 3, 4, 4]
    topology = topology_of(ranks=range(9), nodes=nodes, hosts=[f"n{n}" for n in nodes], addresses=[""] * 9)
    excess = noise(topology)
    excess[0] += 2 * MS
    (hotspot,) = delay_hotspots(excess, topology)
    assert hotspot.aliases == ("node n0", "rank 0")
    assert hotspot.interval_ns[0] < 2 * MS < hotspot.interval_ns[1]


def test_a_slow_node_and_a_slow_rank_elsewhere_are_both_found_with_their_sizes():
    topology = tree(4, 4, 4)
    excess = noise(topology)
    excess[topology.node == 5] += 3 * MS
    excess[60] += 2 * MS
    found = delay_hotspots(excess, topology)
    assert ids(found) == [("node", "n5"), ("rank", "60")]
    assert [hotspot.effect_ns / MS for hotspot in found] == pytest.approx([3, 2], abs=0.4)


def test_intervals_cover_random_effects_of_ranks_and_nodes():
    covered = []
    for seed in range(40):
        random, topology = np.random.default_rng(seed), tree(1, 8, 4)
        of_node, of_rank = random.normal(0, 2 * MS, 8), np.zeros(32)
        of_rank[::4] = random.normal(0, 2 * MS, 8)
        excess = random.normal(0, 5 * MS, (32, 200)) + (of_node[topology.node] + of_rank)[:, None]
        for hotspot in delay_hotspots(excess, topology, level=np.inf, floor_ns=-np.inf, most=1000, num_draws=200):
            own, unit = (of_node, int(hotspot.id[1:])) if hotspot.kind == "node" else (of_rank, int(hotspot.id))
            if hotspot.effect_ns > 2 * MS:
                truth = own[unit] - np.median(np.delete(own, unit))
                covered.append(hotspot.interval_ns[0] <= truth <= hotspot.interval_ns[1])
    assert len(covered) > 50
    assert np.mean(covered) > 0.88


def autocorrelated(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    values = random.normal(0, MS, shape)
    for step in range(1, shape[1]):
        values[:, step] += 0.5 * values[:, step - 1]
    return values


NOISES = {
    "normal": lambda random, shape: random.normal(0, MS, shape),
    "lognormal": lambda random, shape: random.lognormal(0, 1, shape) * MS,
    "heavy": lambda random, shape: random.standard_t(3, shape) * MS,
    "autocorrelated": autocorrelated,
}


@each_case("kind", NOISES)
@each_case("shape", [(2, 2, 1), (4, 4, 2)])
def test_healthy_noise_gives_at_most_one_percent_false_alarms(kind, shape):
    topology = tree(*shape)
    runs = (NOISES[kind](np.random.default_rng(seed), (topology.num_ranks, 60)) for seed in range(100))
    assert sum(bool(delay_hotspots(run, topology, num_draws=100)) for run in runs) <= 1


def test_noise_that_a_node_shares_names_no_rank_and_no_node():
    topology = tree(2, 4, 4)
    alarms = 0
    for seed in range(100):
        random = np.random.default_rng(seed)
        alarms += bool(delay_hotspots(random.normal(0, MS, (8, 60))[topology.node], topology, num_draws=100))
    assert alarms <= 1


def test_the_share_of_the_loss_is_what_goes_away_with_the_effect():
    topology = tree(1, 8, 1)
    excess = np.zeros((8, 50))
    excess[2], excess[4] = 4 * MS, 1 * MS
    excess += noise(topology, num_steps=50) * 1e-6
    first, second = delay_hotspots(excess, topology)
    assert (first.id, second.id) == ("n2", "n4")
    assert first.loss_share == pytest.approx(0.75, abs=0.01)
    assert second.loss_share == pytest.approx(0.0, abs=0.01)


def test_effects_are_shrunk_by_no_more_than_one_standard_error():
    topology = tree(1, 64, 1)
    excess = noise(topology)
    excess[7] += 1 * MS
    (hotspot,) = delay_hotspots(excess, topology)
    middle, half = np.mean(hotspot.interval_ns), np.diff(hotspot.interval_ns)[0] / 2
    assert middle - half < hotspot.effect_ns < middle


def test_the_same_seed_gives_the_same_list():
    topology = tree(2, 2, 2)
    excess = noise(topology) + np.arange(8)[:, None] * MS
    assert delay_hotspots(excess, topology, seed=3) == delay_hotspots(excess, topology, seed=3)


@each_case("shape", [(1, 0), (8, 0), (8, 9), (1, 100)])
def test_too_little_data_names_nobody(shape):
    topology = tree(1, shape[0], 1)
    assert delay_hotspots(np.ones(shape), topology) == ()


@each_case("value", [0.0, 7.3, -1e9])
def test_constant_data_names_nobody(value):
    assert delay_hotspots(np.full((16, 40), value), tree(2, 4, 2)) == ()
