"""The search for slow links on simulated networks whose truth is known, and on published measurements."""

from __future__ import annotations

import numpy as np

from hpcpace.probe.pair_network import (
    MIN_TESTS,
    PairNetwork,
    PairResult,
    PairResults,
    Round,
    pair_network,
    search_slow_links,
)
from hpcpace.probe.pairs import link_findings
from tests.unit.probe.simulated_pairs import HOST_RATE, SimulatedNetwork, healthy, network_of, searched

_NUM_NETWORKS = 200


def _search_of(pairs: list[tuple[str, str, float]]) -> PairResults:
    """Return a search that has measured pairs of hosts in an unknown network, as fast one way as the other."""
    hosts = tuple(dict.fromkeys(host for pair in pairs for host in pair[:2]))
    search = PairResults(PairNetwork(hosts, np.full(len(hosts), -1)))
    for first, second, rate in pairs:
        pair = hosts.index(first), hosts.index(second)
        search.results.append(PairResult(pair=pair, is_apart=True, forward=rate * 1e9, backward=rate * 1e9))
    return search


def _names(search: PairResults, kind: str) -> list[tuple[str, ...]]:
    return [found.names for found in link_findings(search) if found.kind == kind]


# NVIDIA/nccl-tests, issue 106: busbw between nodes of one cluster, GB/s. A maintainer answered that 644 has a problem.
_ISSUE_106 = [
    ("644", "699", 49.36),
    ("632", "641", 88.36),
    ("284", "678", 49.28),
    ("641", "644", 49.30),
    ("404", "699", 86.81),
]


def test_published_pairs_name_the_node_that_the_maintainers_named() -> None:
    search = _search_of(_ISSUE_106)
    assert _names(search, "link") == [("644",)]
    assert _names(search, "unclear") == [("284", "678")]


def test_two_slow_pairs_and_fast_ones_of_the_others_clear_all_but_one() -> None:
    fast = [("284", "678", 88.0), ("284", "632", 87.5), ("678", "641", 88.4)]
    search = _search_of([("284", "644", 49.0), ("644", "678", 49.3), *fast])
    (finding,) = link_findings(search)
    assert finding.names == ("644",)
    assert finding.words == (
        "644's link, not 284's: 644 sends and receives at 394 Gb/s of the usual 704 Gb/s, 284 is fast with 678 and 632"
    )


def test_one_slow_pair_alone_cannot_tell() -> None:
    search = _search_of([("284", "644", 49.0), ("632", "641", 88.0), ("404", "699", 87.0)])
    (finding,) = link_findings(search)
    assert (finding.kind, finding.names) == ("unclear", ("284", "644"))
    assert finding.words == (
        "284 or 644, cannot tell: what passes their links reaches 392 Gb/s of the usual 696 Gb/s, and neither was fast "
        "with another host"
    )


def test_a_single_pair_has_nothing_to_compare_with() -> None:
    assert link_findings(_search_of([("284", "644", 49.0)])) == ()


def test_one_direction_is_told_from_both() -> None:
    simulated = healthy([4, 4])
    simulated.rate[2 * 5 + 1] /= 3
    (finding,) = link_findings(searched(simulated))
    assert (finding.names, finding.way) == (("n6",), "receives")


def test_an_uplink_that_all_crossing_pairs_find_slow_is_not_its_hosts() -> None:
    simulated = healthy([2, 2, 2, 2])
    uplink = 2 * (simulated.network.num_hosts + 1)
    simulated.rate[[uplink, uplink + 1]] = HOST_RATE / 4
    (finding,) = link_findings(searched(simulated))
    assert (finding.kind, finding.names) == ("link", ("leaf2 uplink",))
    assert finding.words.startswith("leaf2's uplink, not its hosts' links: leaf2 uplink sends and receives at 2")
    assert finding.words.endswith("n3 and n4 are fast with others")


def test_an_uplink_that_only_many_hosts_together_fill_is_found_by_its_sums() -> None:
    simulated = healthy([4, 4, 4, 4])
    uplink = 2 * (simulated.network.num_hosts + 2)
    simulated.rate[[uplink, uplink + 1]] *= 0.6
    (finding,) = link_findings(searched(simulated))
    assert (finding.names, finding.measure) == (("leaf3 uplink",), "bisection")


def test_a_host_alone_on_its_switch_cannot_be_told_from_the_uplink() -> None:
    simulated = healthy([1, 3, 3, 3])
    simulated.rate[[0, 1]] /= 5
    assert _names(searched(simulated), "unclear") == [("n1", "leaf1 uplink")]


def test_oversubscribed_uplinks_that_are_all_alike_accuse_nobody() -> None:
    assert link_findings(searched(healthy([4, 4, 4, 4], uplink_share=0.25))) == ()


def test_a_slow_host_of_four_is_found_and_no_neighbour_behind_the_same_uplink() -> None:
    """Each measurement loses some percent at random, and one of fifty a third; uplinks carry half of a host's link."""
    found = []
    for seed in range(60):
        simulated = healthy([2, 2], uplink_share=0.25, seed=seed)
        simulated.rate[[4, 5]] /= 10
        found.append({(each.kind, *each.names) for each in link_findings(searched(simulated))})
    assert [(seed, names) for seed, names in enumerate(found) if names != {("link", "n3")}] == []


def test_a_pair_that_is_slow_each_time_while_both_are_fast_with_others_is_no_link() -> None:
    simulated = healthy([6])

    def measure(round_: Round) -> list[PairResult]:
        return [
            PairResult(
                pair=each.pair,
                is_apart=each.is_apart,
                forward=each.forward / (3 if each.pair == (1, 4) else 1),
                backward=each.backward / (3 if each.pair == (4, 1) else 1),
            )
            for each in simulated.measure(round_)
        ]

    search = search_slow_links(simulated.network, measure, num_affordable=60, is_over=lambda: False)
    (finding,) = link_findings(search)
    assert (finding.kind, finding.names) == ("between", ("n2", "n5"))


def test_a_silent_host_is_accused_of_nothing_and_accuses_nobody() -> None:
    simulated = healthy([4, 4])
    simulated.silent = {2}
    assert link_findings(searched(simulated)) == ()


def test_a_host_whose_messages_take_longer_is_named() -> None:
    network = network_of([4])
    search = PairResults(network)
    for first in range(4):
        for second in range(first + 1, 4):
            least_ns = 60_000.0 if 3 in (first, second) else 20_000.0
            latency = (least_ns, 1.1 * least_ns, 2 * least_ns)
            pair = PairResult(
                pair=(first, second), is_apart=True, forward=HOST_RATE, backward=HOST_RATE, latency_ns=latency
            )
            search.results.append(pair)
    (finding,) = link_findings(search)
    assert (finding.measure, finding.names) == ("latency", ("n4",))
    assert finding.words == "n4's link: messages take 60.0 us, usually 20.0 us"


def test_addresses_of_slurm_give_the_network() -> None:
    network = pair_network(["a", "b", "c"], ["s.l1.a", "s.l1.b", "s.l2.c"])
    assert (network.leaf_names, network.leaf.tolist()) == (("l1", "l2"), [0, 0, 1])
    assert not pair_network(["a", "b"], ["", "s.l1.b"]).is_known


def _random_network(seed: int) -> tuple[SimulatedNetwork, set[int], bool]:
    """Return a network, the directed links that are slow, and whether the search knows the switches.

    At most one host of five and one switch of three is slow, because what is usual is what most are. Uplinks of
    networks that the search does not know carry all that their hosts send.
    """
    random = np.random.default_rng(seed)
    sizes = random.integers(2, 7, random.integers(2, 6)).tolist()
    is_known = bool(random.random() < 0.7)
    simulated = healthy(sizes, uplink_share=float(random.choice([0.25, 0.5, 1.0])) if is_known else 1.0, seed=seed)
    network = simulated.network
    units = random.choice(network.num_hosts, random.integers(0, network.num_hosts // 5 + 1), replace=False).tolist()
    if is_known and len(sizes) >= 4 and random.random() < 0.5:
        units.append(network.num_hosts + int(random.integers(len(sizes))))
    slow = set()
    for unit in units:
        ways = (2 * unit, 2 * unit + 1) if random.random() < 0.6 else (2 * unit + int(random.integers(2)),)
        simulated.rate[list(ways)] *= random.uniform(0.05, 0.6)
        slow |= set(ways)
    return simulated, slow, is_known


def test_slow_links_of_random_networks_are_found_and_no_other_is_accused() -> None:
    """Each measurement loses some percent at random, and one of fifty a third."""
    accused_wrongly, missed, num_slow, num_certain = [], [], 0, 0
    for seed in range(_NUM_NETWORKS):
        simulated, slow, is_known = _random_network(seed)
        search = searched(simulated, is_known=is_known, num_affordable=(10, 30, 100)[seed % 3])
        certain, unclear = _accused(search)
        num_slow, num_certain = num_slow + len(slow), num_certain + len(certain)
        accused_wrongly += [(seed, link) for link in certain - slow]
        accused_wrongly += [(seed, links) for links in unclear if not set(links) & slow]
        missed += [(seed, link) for link in slow - certain - {link for links in unclear for link in links}]
    assert accused_wrongly == []
    assert missed == []
    assert num_certain > 0.9 * num_slow > 100


def _accused(search: PairResults) -> tuple[set[int], list[tuple[int, ...]]]:
    """Return the certain links and the sets of links of which one is slow; uplinks by rate and by their sums."""
    links, uplinks = search.slow_links(), search.slow_uplinks()
    certain = {link for link in links.certain if links.num_alone[link] >= MIN_TESTS}
    unclear = [*links.unclear, *((link,) for link in {*links.certain, *links.doubtful} - certain)]
    if uplinks is not None:
        first = 2 * search.network.num_hosts
        certain |= {first + link for link in uplinks.certain if uplinks.num_alone[link] >= MIN_TESTS}
        unclear += [tuple(first + link for link in links) for links in uplinks.unclear]
    return certain, unclear
