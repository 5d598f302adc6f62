"""Placements: what they send, and whether the search finds one that is known to be the best."""

from __future__ import annotations

import numpy as np
import pytest

from hpcpace.metrics import Floats, Ints
from hpcpace.placement.assign import PlacementThresholds, Volumes, better_host, levels_between, volumes

LIMITS = PlacementThresholds()
TWO_LEAVES = levels_between([("spine", "leaf1")] * 2 + [("spine", "leaf2")] * 2)


def cliques(sizes: list[int], order: Ints) -> Floats:
    """Return traffic of one byte between all ranks of each clique; `order` says which rank has each place in them."""
    traffic = np.zeros((sum(sizes), sum(sizes)))
    for first, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
        members = order[first : first + size]
        traffic[np.ix_(members, members)] = 1.0
    np.fill_diagonal(traffic, 0.0)
    return traffic


def test_levels_count_the_switches_up_to_the_shared_one() -> None:
    paths = [("core", "pod1", "leaf1"), ("core", "pod1", "leaf1"), ("core", "pod1", "leaf2"), ("core", "pod2", "leaf3")]
    assert levels_between(paths).tolist() == [[0, 0, 1, 2], [0, 0, 1, 2], [1, 1, 0, 2], [2, 2, 2, 0]]


def test_leaves_without_a_switch_above_are_one_level_apart() -> None:
    assert levels_between([("leaf1",), ("leaf2",)]).tolist() == [[0, 1], [1, 0]]


def test_volumes_count_each_byte_where_it_crosses() -> None:
    traffic = np.zeros((4, 4))
    traffic[0, 1], traffic[1, 2], traffic[2, 2] = 5.0, 7.0, 9.0
    assert volumes(traffic, np.array([0, 1, 2, 3]), TWO_LEAVES) == Volumes(uplink_bytes=7.0, host_bytes=12.0)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_talk_come_below_one_leaf(seed: int) -> None:
    order = np.random.default_rng(seed).permutation(16)
    host = np.repeat(np.arange(4), 4)
    found = better_host(cliques([8, 8], order), host, TWO_LEAVES, LIMITS)
    assert volumes(cliques([8, 8], order), found, TWO_LEAVES).uplink_bytes == 0
    assert np.bincount(found).tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_talk_come_onto_one_host(seed: int) -> None:
    order = np.random.default_rng(seed).permutation(16)
    traffic = cliques([4, 4, 4, 4], order)
    found = better_host(traffic, np.repeat(np.arange(4), 4), TWO_LEAVES, LIMITS)
    assert volumes(traffic, found, TWO_LEAVES) == Volumes(uplink_bytes=0.0, host_bytes=0.0)


def test_hosts_keep_how_many_ranks_they_have() -> None:
    host = np.array([0, 1, 1, 1, 2, 2, 3, 3, 3, 3])
    traffic = np.random.default_rng(1).random((10, 10))
    found = better_host(traffic, host, TWO_LEAVES, PlacementThresholds(min_gain_share=0.0))
    assert np.bincount(found).tolist() == [1, 3, 2, 4]


def test_a_good_placement_is_left_alone() -> None:
    host = np.repeat(np.arange(4), 4)
    traffic = cliques([4, 4, 4, 4], np.arange(16))
    assert better_host(traffic, host, TWO_LEAVES, LIMITS).tolist() == host.tolist()


def test_a_gain_below_the_threshold_is_left_alone() -> None:
    host = np.array([0, 1, 2, 3])
    traffic = np.full((4, 4), 100.0)
    traffic[0, 2] = traffic[1, 3] = 101.0
    assert better_host(traffic, host, TWO_LEAVES, LIMITS).tolist() == host.tolist()
    found = better_host(traffic, host, TWO_LEAVES, PlacementThresholds(min_gain_share=0.0))
    assert volumes(traffic, found, TWO_LEAVES).uplink_bytes == 800.0


def test_the_same_traffic_gives_the_same_placement() -> None:
    traffic, host = np.random.default_rng(2).random((32, 32)), np.repeat(np.arange(4), 8)
    limits = PlacementThresholds(min_gain_share=0.0)
    first, second = (better_host(traffic, host, TWO_LEAVES, limits) for _ in range(2))
    assert first.tolist() == second.tolist()
