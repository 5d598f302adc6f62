"""Rounds of disjoint pairs: everybody meets everybody, and no link is shared where that is promised."""

from __future__ import annotations

from collections import Counter

from cases import each_case

from hpcpace.probe.pair_network import (
    Round,
    circle,
    first_rounds,
    loaded_rounds,
    rounds_across_leaves,
    rounds_within_leaves,
)
from tests.unit.probe.simulated_pairs import network_of


@each_case("num_hosts", [2, 3, 4, 5, 8, 33])
def test_each_host_meets_each_other_host_once(num_hosts: int) -> None:
    met = Counter(frozenset(pair) for pairs in circle(range(num_hosts)) for pair in pairs)
    assert set(met.values()) == {1}
    assert len(met) == num_hosts * (num_hosts - 1) // 2


@each_case("sizes", [[2, 2], [4, 4, 4], [1, 3, 5], [6], [1, 1, 1]])
def test_rounds_apart_share_no_link(sizes: list[int]) -> None:
    network = network_of(sizes)
    for round_ in [*rounds_within_leaves(network, 99), *rounds_across_leaves(network, 99)]:
        hosts = [host for pair in round_.pairs for host in pair]
        crossing = [pair for pair in round_.pairs if network.leaf[pair[0]] != network.leaf[pair[1]]]
        leaves = [network.leaf[host] for pair in crossing for host in pair]
        assert round_.is_apart
        assert len(hosts) == len(set(hosts))
        assert len(leaves) == len(set(leaves))


@each_case("sizes", [[2, 2], [4, 4, 4], [1, 3, 5], [6], [1, 1, 1]])
def test_all_pairs_meet_where_time_allows(sizes: list[int]) -> None:
    network = network_of(sizes)
    rounds = [*rounds_within_leaves(network, 99), *rounds_across_leaves(network, 999)]
    met = Counter(frozenset(pair) for round_ in rounds for pair in round_.pairs)
    assert len(met) == network.num_hosts * (network.num_hosts - 1) // 2
    assert set(met.values()) == {1}


def test_hosts_of_one_switch_send_to_those_of_another_at_once() -> None:
    network = network_of([3, 3, 3, 3])
    rounds = loaded_rounds(network, 99)
    assert [len(round_.pairs) for round_ in rounds] == [6, 6, 6]
    assert all(network.leaf[a] != network.leaf[b] for round_ in rounds for a, b in round_.pairs)


def test_a_thousand_hosts_take_rounds_by_their_logarithm() -> None:
    for network in (network_of([32] * 32), network_of([1024], is_known=False)):
        rounds = first_rounds(network, num_affordable=100)
        assert len(rounds) <= 4 * 10
        assert {host for round_ in rounds for pair in round_.pairs for host in pair} == set(range(1024))


def test_an_unknown_network_measures_pairs_one_by_one_where_time_allows() -> None:
    rounds = first_rounds(network_of([4], is_known=False), num_affordable=60)
    apart = [round_ for round_ in rounds if round_.is_apart]
    assert [len(round_.pairs) for round_ in apart] == [1] * 6


def test_one_host_has_no_rounds() -> None:
    assert first_rounds(network_of([1]), num_affordable=60) == []
    assert Round((), False) not in first_rounds(network_of([1], is_known=False), num_affordable=60)
