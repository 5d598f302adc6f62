"""Which pairs of hosts are measured next, while the links of slow pairs cannot be distinguished.

The number of first rounds grows with the logarithm of the hosts, and is that of all pairs where time allows. Each
further round pairs the suspects with hosts that are fast with others. What measures a round is an argument, so that
the same search runs on a network and on a simulated one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, product

import numpy as np

from hpcpace.probe.pair_network import (
    AS_SLOW,
    Pair,
    PairNetwork,
    PairResult,
    PairResults,
    Round,
    SlowLinks,
    loaded_rounds,
    rounds_across_leaves,
    rounds_one_by_one,
    rounds_within_leaves,
    some_rounds,
)

MIN_TESTS = 2
"""So many transfers must accuse one link alone: a single one may have been disturbed."""
MIN_LATENCY_TESTS = 3
"""Likewise of latencies, which a busy host disturbs more."""
# A question that is open after so many partners stays so.
_MAX_PARTNERS = 5
_MAX_LATENCY_PARTNERS = 8
# A pair that fast hosts find slow is measured so often before it counts as slow.
_MAX_TIMES = 3
# So many pairs of hosts that are fast with others show whether an unknown network slows down pairs.
_MIN_CONTROLS = 6
# Hosts in question in one turn of an unknown network, each of which takes a round of one pair.
_MAX_AT_ONCE = 8


def follow_up(results: PairResults) -> list[Round]:
    """Return a round in which suspects meet hosts that are fast with others; none if no question is open.

    A link is in question if it is not cleared, and fewer than two slow transfers accuse it alone. Where the network is
    unknown, each pair has a round for itself.
    """
    network, slow = results.network, results.slow_links()
    planner = _FollowUp(network, results.results, slow)
    unclear = [link for links in slow.unclear for link in links]
    uncleared = [link for link in np.argsort(slow.capability).tolist() if not slow.is_cleared[link]]
    if not network.is_known:
        # What hosts reach while all others send varies with what they share, so more of them are in question.
        low = slow.capability < AS_SLOW * slow.usual[0]
        uncleared += [link for link in np.argsort(slow.capability).tolist() if low[link]]
    for link in dict.fromkeys([*unclear, *slow.certain, *uncleared]):
        if slow.num_alone[link] >= MIN_TESTS:
            continue
        if not network.is_known and len(planner.pairs) >= _MAX_AT_ONCE:
            break
        planner.ask(link, _MAX_PARTNERS if link in slow.suspects else MIN_TESTS)
    for pair in planner.only_once_unexplained():
        planner.take(pair)
    if not network.is_known:
        planner.add_controls()
    if not planner.pairs:
        return []
    if network.is_known:
        return [Round(tuple(planner.pairs), True)]
    return [Round((pair,), True) for pair in planner.pairs]


class _FollowUp:
    """Pairs for one more round, none of which shares a link with another one."""

    def __init__(self, network: PairNetwork, results: Sequence[PairResult], slow: SlowLinks) -> None:
        self.pairs: list[Pair] = []
        self._network = network
        self._slow = slow
        self._results = results
        self._taken: set[int] = set()
        self._crossed: set[int] = set()
        self._partners: list[dict[int, int]] = [{} for _ in network.hosts]
        self._answers = np.zeros(network.num_hosts, np.bool_)
        self._apart = [each for each in results if each.is_apart]
        for each in results:
            first, second = each.pair
            self._answers[[first, second]] |= math.isfinite(each.forward) or math.isfinite(each.backward)
        for each in self._apart:
            first, second = each.pair
            for host, other in ((first, second), (second, first)):
                self._partners[host][other] = self._partners[host].get(other, 0) + 1

    def ask(self, link: int, most_partners: int) -> None:
        """Add a pair that adds evidence about a link, unless the link had that many partners, or no host is free."""
        unit, num_hosts = link // 2, self._network.num_hosts
        if unit < num_hosts:
            useful = self._useful(unit)
            if self._answers[unit] and sum(self._partners[unit].get(each, 0) for each in useful) < most_partners:
                self._pair_host(unit, useful)
        elif self._num_crossings(unit - num_hosts) < most_partners:
            self._pair_leaf(unit - num_hosts)

    def only_once_unexplained(self) -> Iterator[Pair]:
        """Yield pairs that were slow once though both hosts are fast with others."""
        for test in self._slow.unexplained:
            pair = self._results[test % len(self._results)].pair
            if self._partners[pair[0]][pair[1]] < _MAX_TIMES:
                yield pair

    def add_controls(self) -> None:
        """Add pairs of hosts that are fast with others and have not met, until enough such pairs are known."""
        clear = [host for host in range(self._network.num_hosts) if self._answers[host] and not self._doubt(host)]
        known = sum(other in clear for host in clear for other in self._partners[host]) // 2
        half = len(clear) // 2
        for shift, index in product(range(half), range(half)):
            # Neighbours by number often share a switch, so the other half comes first.
            pair = clear[index], clear[half + (index + shift) % half]
            if known >= _MIN_CONTROLS:
                return
            if pair[1] not in self._partners[pair[0]]:
                known += self.take(pair)

    def take(self, pair: Pair) -> bool:
        """Add a pair if it shares no link with those that were added before."""
        leaves = {int(self._network.leaf[host]) for host in pair}
        if self._taken & set(pair) or (len(leaves) > 1 and self._crossed & leaves):
            return False
        self._taken |= set(pair)
        self._crossed |= leaves if len(leaves) > 1 else set()
        self.pairs.append(pair)
        return True

    def _num_crossings(self, leaf: int) -> int:
        return sum((self._network.leaf[list(each.pair)] == leaf).sum() == 1 for each in self._apart)

    def _useful(self, host: int) -> list[int]:
        """Return the hosts with which a host reaches what its link gives: where uplinks limit, those of its switch."""
        others = [other for other in range(self._network.num_hosts) if other != host]
        neighbours = [other for other in others if self._network.leaf[other] == self._network.leaf[host]]
        is_limited = self._network.is_known and self._slow.usual[1] < AS_SLOW * self._slow.usual[0]
        return neighbours if is_limited and neighbours else others

    def _pair_host(self, host: int, others: Iterable[int]) -> None:
        for other in self._by_use(host, others):
            if self.take((host, other)):
                return

    def _pair_leaf(self, leaf: int) -> None:
        inside = self._network.leaf_hosts[leaf]
        outside = [each for each in range(self._network.num_hosts) if each not in inside]
        for host in sorted(inside, key=self._doubt):
            for other in self._by_use(host, outside):
                if self.take((host, other)):
                    return

    def _by_use(self, host: int, others: Iterable[int]) -> list[int]:
        """Return other hosts that answer, the most useful partner first: new, fast with others, of the same switch."""
        leaf = self._network.leaf
        return sorted(
            (other for other in others if other != host and self._answers[other]),
            key=lambda other: (
                self._partners[host].get(other, 0),
                self._doubt(other),
                leaf[other] != leaf[host],
                (other - host) % self._network.num_hosts,
            ),
        )

    def _doubt(self, host: int) -> int:
        """Return how many of the links from a host to the top of the network are not cleared."""
        links = [2 * host, 2 * host + 1]
        if self._network.is_known:
            up = 2 * (self._network.num_hosts + int(self._network.leaf[host]))
            links += [up, up + 1]
        return int((~self._slow.is_cleared[links]).sum())


def loaded_again(results: PairResults) -> list[Round]:
    """Return a loaded round for uplinks that too few such rounds have accused so far, if there are any."""
    slow, sums, network = results.slow_uplinks(), results.bisections(), results.network
    if slow is None:
        return []
    tried = [(each.source_leaf, each.target_leaf) for each in sums]
    leaves = range(len(network.leaf_names))
    most_tried = 2 * (some_rounds(network) + _MAX_PARTNERS)
    is_clear = [bool(slow.is_cleared[2 * leaf] and slow.is_cleared[2 * leaf + 1]) for leaf in leaves]
    pairs: list[Pair] = []
    free = set(leaves)
    unconfirmed = [link for link in sorted(slow.suspects) if slow.num_alone[link] < MIN_TESTS]
    for leaf in dict.fromkeys(link // 2 for link in unconfirmed):
        partners = sorted((not is_clear[other], tried.count((leaf, other)), other) for other in free - {leaf})
        is_open = leaf in free and sum(leaf in each for each in tried) < most_tried
        if is_open and partners:
            free -= {leaf, partners[0][-1]}
            hosts = network.leaf_hosts
            pairs += zip(hosts[leaf], hosts[partners[0][-1]], strict=False)
    return [Round(tuple(pairs), False)] if pairs else []


def latency_again(results: PairResults) -> list[Round]:
    """Return rounds for hosts whose messages take longer with too few partners so far, if there are any."""
    slow, network = results.slow_latencies(), results.network
    planner = _FollowUp(network, results.results, slow)
    for link in slow.certain:
        if slow.num_alone[link] < MIN_LATENCY_TESTS:
            planner.ask(link, _MAX_LATENCY_PARTNERS)
    return [Round((pair,), True) for pair in planner.pairs]


# Of the time allowed, what the first rounds may take if they are to measure all pairs.
_FULL_SHARE = 0.6

# statistics: among so few behind switches, one disturbed transfer moves the median of all: each pair is measured twice.
_FEW_HOSTS = 4

Measure = Callable[[Round], Sequence[PairResult]]


def search_slow_links(
    network: PairNetwork, measure: Measure, *, num_affordable: int, is_over: Callable[[], bool]
) -> PairResults:
    """Measure the first rounds, then those that open questions need, and return all results.

    Args:
        network: hosts and leaf switches.
        measure: measures the pairs of one round; hosts that do not answer have nan.
        num_affordable: how many rounds the allowed time has room for.
        is_over: whether it has passed; asked before each round.
    """
    results = PairResults(network)
    rounds = first_rounds(network, num_affordable)
    while rounds:
        for round_ in rounds:
            if is_over():
                return results
            results.add(round_, measure(round_))
        rounds = follow_up(results) or loaded_again(results) or latency_again(results)
    return results


def first_rounds(network: PairNetwork, num_affordable: int) -> list[Round]:
    """Return the rounds that are measured whatever they show.

    Args:
        network: hosts and leaf switches.
        num_affordable: rounds for which there is time; all pairs are measured where they take 60 % of it at most.
    """
    some = some_rounds(network)
    loaded = [round_ for round_ in loaded_rounds(network, some) if not round_.is_apart]
    if network.is_known:
        loaded *= 2  # a disturbance during one round counts much where few switches are compared
    room = max(int(_FULL_SHARE * num_affordable) - len(loaded), 0)
    if not network.is_known:
        apart = list(islice(rounds_one_by_one(network), room + 1))
        return [*apart, *loaded] if len(apart) <= room else loaded_rounds(network, some)
    apart = _rounds_apart(network, room + 1)
    if len(apart) > room:
        return [*_rounds_apart(network, some), *loaded]
    if network.num_hosts <= _FEW_HOSTS and 2 * len(apart) <= room:
        apart *= 2
    return [*apart, *loaded]


def _rounds_apart(network: PairNetwork, most: int) -> list[Round]:
    """Return rounds that share no link, at most so many within switches, and as many across."""
    return [*rounds_within_leaves(network, most), *rounds_across_leaves(network, most)]
