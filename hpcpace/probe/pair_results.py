"""What pairs of hosts reached, round by round, and what that says about the links between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hpcpace.probe.pair_network import NO_LINK, FloatArray, IntArray, Pair, PairNetwork, Round
from hpcpace.probe.pair_solver import LinkTests, SlowLinks, find_slow_links, outlier_limit

LEAST_LATENCY_NS = 5_000.0
"""By less than this, latencies differ because of schedulers and interrupts, not because of links."""
AS_SLOW = 0.9
"""Above this share of another rate, a rate counts as equal to it."""
# A pair that is slow so often, and never fast, is slow for another reason than a disturbance.
_LEAST_TIMES = 3
# Two flows on one route get half of it; less than a quarter off is what hosts differ by from time to time.
_BETWEEN_SHARE = 0.75
# Below this share of what the hosts' links allow, uplinks limit what many hosts send together.
_LOAD_SHARE = 0.85


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """What a pair of hosts reached in one round.

    Attributes:
        pair: the two hosts by index.
        is_apart: whether no other pair of the round shared a link with it.
        forward: rate from the first to the second host, bytes per second; nan if not measured.
        backward: rate from the second to the first host, bytes per second; nan if not measured.
        latency_ns: half round trips, ascending quantiles: least, median, 99 %; nan if not measured.
        problem: why something was not measured; empty if all was.
    """

    pair: Pair
    is_apart: bool
    forward: float
    backward: float
    latency_ns: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    problem: str = ""


@dataclass(frozen=True)
class Bisection:
    """What the hosts of one leaf switch sent to those of another one, all at once.

    Attributes:
        source_leaf: index of the switch that sends.
        target_leaf: index of the switch that receives.
        num_pairs: pairs of hosts.
        rate: of all pairs together, bytes per second.
        possible: what the links of these hosts allow together, bytes per second.
    """

    source_leaf: int
    target_leaf: int
    num_pairs: int
    rate: float
    possible: float

    @property
    def share(self) -> float:
        """The rate by what the hosts' links allow: 1 where the uplinks hold nobody back."""
        return self.rate / self.possible


@dataclass
class PairResults:
    """Rounds measured so far.

    Attributes:
        network: hosts and leaf switches.
        results: one for each pair and round.
        rounds: as measured, with the number of the first of its results.
    """

    network: PairNetwork
    results: list[PairResult] = field(default_factory=list)
    rounds: list[tuple[Round, int]] = field(default_factory=list)

    def add(self, round_: Round, results: Sequence[PairResult]) -> None:
        """Add the results of one round, in the order of its pairs."""
        self.rounds.append((round_, len(self.results)))
        self.results += results

    def slow_links(self) -> SlowLinks:
        """Return what the rates of all pairs say about hosts' links and uplinks.

        In an unknown network, a link is not certain if pairs of hosts that are fast with others are as slow: then it
        may be what is between the hosts, such as an uplink that all of them share.
        """
        tests = self._rate_tests()
        slow = find_slow_links(self._with_sums(tests))
        unexplained = [] if self.network.is_known else self._slow_each_time(slow)
        if not unexplained:
            return slow
        between = tests.value[unexplained].min()
        doubtful = [link for link in slow.certain if slow.capability[link] >= AS_SLOW * between]
        certain = tuple(link for link in slow.certain if link not in doubtful)
        return replace(slow, certain=certain, doubtful=tuple(doubtful))

    def slow_latencies(self) -> SlowLinks:
        """Return which links add latency; values are the inverse of the least half round trip, 1/ns.

        Links that add less than 5 us count as cleared: schedulers and interrupts do as much.
        """
        inverse = [1 / each.latency_ns[0] for each in self.results]
        slow = find_slow_links(self._tests([(value, value) for value in inverse]))
        usual = slow.usual[self.network.is_uplink.astype(np.int64)]
        certain = [link for link in slow.certain if 1 / slow.capability[link] - 1 / usual[link] >= LEAST_LATENCY_NS]
        return replace(slow, certain=tuple(certain), unclear=())

    def slow_pairs(self) -> list[Pair]:
        """Return transfers that are slow each time though both hosts are fast with others: (from, to), ascending.

        Something between the hosts is slow for them, such as a route; one slow measurement may have been disturbed.
        """
        slow, tests, ways = self.slow_links(), self._rate_tests(), self._ways()
        is_compared = tests.is_apart & np.isfinite(tests.value)
        lowest = outlier_limit(tests.value[is_compared])[1]
        lowest = min(lowest, _BETWEEN_SHARE * float(slow.usual[0]))
        return sorted({ways[test] for test in self._slow_each_time(slow) if tests.value[test] < lowest})

    def rates_apart(self) -> Iterator[tuple[Pair, float]]:
        """Yield (from, to) and the rate of each transfer that shared no link with another one."""
        for each in self.results:
            if each.is_apart:
                yield each.pair, each.forward
                yield each.pair[::-1], each.backward

    def bisections(self) -> list[Bisection]:
        """Return what the hosts of two leaf switches reached together, for each loaded round and direction."""
        if not self.network.is_known:
            return []
        capability = find_slow_links(self._rate_tests()).capability
        loaded = [(round_, first) for round_, first in self.rounds if not round_.is_apart]
        return [each for round_, first in loaded for each in self._sums(round_, first, capability)]

    def slow_uplinks(self) -> SlowLinks | None:
        """Return what loaded rounds say about uplinks, whose links alone are counted; None without such rounds.

        A sum that is near what its hosts' links allow accuses no uplink: slow hosts do not fill one.
        """
        sums = self.bisections()
        if not sums:
            return None
        return find_slow_links(
            LinkTests(
                path=uplinks_of(sums),
                value=np.array([each.rate for each in sums]),
                is_apart=np.array([each.share < _LOAD_SHARE for each in sums]),
                kind=np.zeros(2 * len(self.network.leaf_names), np.int64),
            )
        )

    def _sums(self, round_: Round, first: int, capability: FloatArray) -> Iterator[Bisection]:
        by_leaves: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
        for each in self.results[first : first + len(round_.pairs)]:
            for source, target, rate in ((*each.pair, each.forward), (*each.pair[::-1], each.backward)):
                key = int(self.network.leaf[source]), int(self.network.leaf[target])
                by_leaves.setdefault(key, []).append((source, target, rate))
        for (source_leaf, target_leaf), ways in by_leaves.items():
            possible = sum(min(capability[2 * source], capability[2 * target + 1]) for source, target, _ in ways)
            rate = sum(rate for _, _, rate in ways)
            if math.isfinite(rate):
                yield Bisection(source_leaf, target_leaf, len(ways), rate, float(possible))

    def _ways(self) -> list[Pair]:
        return [*(each.pair for each in self.results), *(each.pair[::-1] for each in self.results)]

    def _slow_each_time(self, slow: SlowLinks) -> list[int]:
        """Return the tests that slow links do not explain, of transfers that were slow each time, and often enough."""
        ways, is_apart = self._ways(), [each.is_apart for each in self.results] * 2
        times = Counter(way for way, counts in zip(ways, is_apart, strict=True) if counts)
        return [test for test in slow.unexplained if times[ways[test]] >= _LEAST_TIMES]

    def _rate_tests(self) -> LinkTests:
        """Return the rates; of a transfer measured alone several times the best one, as the others were disturbed."""
        tests = self._tests([(each.forward, each.backward) for each in self.results])
        best: dict[Pair, float] = {}
        for way, rate in self.rates_apart():
            best[way] = np.fmax(best.get(way, np.nan), rate)
        ways = self._ways()
        value = [
            best[way] if is_apart else rate
            for way, is_apart, rate in zip(ways, tests.is_apart, tests.value, strict=True)
        ]
        return replace(tests, value=np.array(value, np.float64))

    def _with_sums(self, tests: LinkTests) -> LinkTests:
        """Return the tests with sums over uplinks, which clear them as far as a single transfer needs them."""
        sums = self.bisections()
        if not sums:
            return tests
        usual = find_slow_links(tests).usual[0]
        up = 2 * self.network.num_hosts + uplinks_of(sums)
        return LinkTests(
            path=np.concatenate([tests.path, np.column_stack([up, np.full_like(up, NO_LINK)])]),
            value=np.append(tests.value, [min(each.rate, usual) for each in sums]),
            is_apart=np.append(tests.is_apart, np.zeros(len(sums), np.bool_)),
            kind=tests.kind,
        )

    def _tests(self, values: Sequence[tuple[float, float]]) -> LinkTests:
        pairs = np.array([each.pair for each in self.results], np.int64).reshape(-1, 2)
        ways = np.array(values, np.float64).reshape(-1, 2)
        is_apart = np.array([each.is_apart for each in self.results], np.bool_)
        source, target = np.concatenate([pairs, pairs[:, ::-1]]).T
        return LinkTests(
            path=self.network.paths(source, target),
            value=ways.T.reshape(-1),
            is_apart=np.concatenate([is_apart, is_apart]),
            kind=self.network.is_uplink.astype(np.int64),
        )


def uplinks_of(sums: Sequence[Bisection]) -> IntArray:
    """Return the uplinks that each sum passed: of switch k, 2k up and 2k + 1 down, (num_sums, 2)."""
    return np.array([[2 * each.source_leaf, 2 * each.target_leaf + 1] for each in sums], np.int64)
