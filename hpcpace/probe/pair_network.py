"""Pairs of hosts in a network: its links by number, rounds of pairs, and which link is slow by their rates.

A transfer from n1 to n3 leaves by n1's link, passes the uplinks of both leaf switches where these differ, and arrives
by n3's link. Everything that judges pairs of hosts counts links in this way.

Pairs of one round run at the same time, so no host is in two of them. In a round that shares no link, no uplink is
passed by two pairs either: the rate of such a pair is that of its links. The circle method gives rounds in which every
host meets each other host once (Kirkman's schedule of tournaments).

A link is at least as fast as the fastest transfer that passed it, its capability. A kind of link (of hosts, or uplinks)
has a usual capability, the median over its links, and a link below that by more than three robust deviations and 10 %
is not cleared. A slow transfer accuses the links on its path that are not cleared. Where that is one link, it is the
slow one; where several are, the slow one cannot be singled out, and all of them are named.

Pairs are measured while the links of slow ones cannot be distinguished. The number of first rounds grows with the
logarithm of the hosts, and is that of all pairs where time allows. Each further round pairs the suspects with hosts
that are fast with others. What measures a round is an argument, so that the same search runs on a network and on a
simulated one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import islice, product, zip_longest

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.links import explanations
from hpcpace.metrics.topology import topology_of
from hpcpace.probe.record import PairRow


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
    leaf: Ints
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
    def is_uplink(self) -> Bools:
        """Which directed links are uplinks, bool, (num_links,)."""
        return np.arange(self.num_links) >= 2 * self.num_hosts

    def crosses(self, source: Ints, target: Ints) -> Bools:
        """Return which transfers pass from one leaf switch to another, bool, (num_transfers,)."""
        return np.asarray(self.leaf[source] != self.leaf[target])

    def paths(self, source: Ints, target: Ints) -> Ints:
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


MIN_LATENCY_NS = 5_000.0
"""By less than this, latencies differ because of schedulers and interrupts, not because of links."""
AS_SLOW = 0.9
"""Above this share of another rate, a rate counts as equal to it."""
# A pair that is slow so often, and never fast, is slow for another reason than a disturbance.
_MIN_TIMES = 3
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
        certain = [link for link in slow.certain if 1 / slow.capability[link] - 1 / usual[link] >= MIN_LATENCY_NS]
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

    def _sums(self, round_: Round, first: int, capability: Floats) -> Iterator[Bisection]:
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
        return [test for test in slow.unexplained if times[ways[test]] >= _MIN_TIMES]

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


def uplinks_of(sums: Sequence[Bisection]) -> Ints:
    """Return the uplinks that each sum passed: of switch k, 2k up and 2k + 1 down, (num_sums, 2)."""
    return np.array([[2 * each.source_leaf, 2 * each.target_leaf + 1] for each in sums], np.int64)


Way = tuple[str, str]
"""The host that sends, and the one that receives."""


def best_rates(rows: Iterable[PairRow]) -> dict[Way, float]:
    """Return the best rate from each host to each other one, bytes per second, where one was measured."""
    best: dict[Way, float] = {}
    for row in rows:
        for way, rate in (((row.first, row.second), row.forward), ((row.second, row.first), row.backward)):
            if rate is not None:
                best[way] = max(rate, best.get(way, 0.0))
    return best


def least_latencies(rows: Iterable[PairRow]) -> dict[Way, PairRow]:
    """Return the row of each pair with its least half round trip, by its hosts in order of their names."""
    best: dict[Way, PairRow] = {}
    for row in rows:
        way = (min(row.first, row.second), max(row.first, row.second))
        if row.least_ns is not None and (way not in best or row.least_ns < (best[way].least_ns or 0.0)):
            best[way] = row
    return best


def late_pairs(rows: Iterable[PairRow]) -> list[PairRow]:
    """Return pairs whose least half round trip stands out, the latest first.

    As for links: by more than three robust deviations and 10 % in 1/ns, and by 5 us, since schedulers do as much.
    """
    best = [row for row in least_latencies(rows).values() if row.least_ns]
    inverse = np.array([1 / (row.least_ns or np.nan) for row in best])
    usual, lowest = outlier_limit(inverse)
    late = [
        row for row, one in zip(best, inverse, strict=True) if one < lowest and 1 / one - 1 / usual >= MIN_LATENCY_NS
    ]
    return sorted(late, key=lambda row: -(row.least_ns or 0.0))


NO_LINK = -1
"""Fills the columns of a path that has fewer links."""
_DEVIATIONS = 3.0
_MIN_SHARE = 0.10
# The standard deviation of a normal distribution is 1.4826 times its median absolute deviation.
_MAD_TO_DEVIATION = 1.4826


@dataclass(frozen=True, kw_only=True)
class LinkTests:
    """Transfers and the directed links that they passed.

    Attributes:
        path: numbers of links, int64, (num_tests, most_links), filled up with NO_LINK.
        value: what was reached, the more the better, such as bytes per second, (num_tests,); nan where nothing was
            measured.
        is_apart: whether nothing else passed these links meanwhile, (num_tests,); other transfers clear links and
            accuse none.
        kind: kind of each link, int64, (num_links,).
    """

    path: Ints
    value: Floats
    is_apart: Bools
    kind: Ints

    @property
    def num_links(self) -> int:
        """Directed links."""
        return len(self.kind)


@dataclass(frozen=True, kw_only=True)
class SlowLinks:
    """What the transfers say about the links.

    Attributes:
        capability: of each link, in the unit of the values, (num_links,); nan where nothing passed it.
        usual: usual capability by kind, (num_kinds,); nan where no link of a kind was passed.
        threshold: the least capability by kind that counts as usual, (num_kinds,).
        is_cleared: links that a fast transfer passed, (num_links,).
        num_alone: slow transfers that leave each link as the only possible one, int64, (num_links,).
        certain: links that some slow transfer leaves as the only possible one, ascending.
        unclear: sets of links of which at least one is slow; no set shares a link with another.
        unexplained: slow transfers all of whose links are cleared, indices of tests.
        doubtful: links that would be certain if they were not as fast as transfers that are unexplained.
    """

    capability: Floats
    usual: Floats
    threshold: Floats
    is_cleared: Bools
    num_alone: Ints
    certain: tuple[int, ...]
    unclear: tuple[tuple[int, ...], ...]
    unexplained: tuple[int, ...]
    doubtful: tuple[int, ...] = ()

    @property
    def suspects(self) -> set[int]:
        """Links that are certain or possible."""
        return set(self.certain) | {link for links in self.unclear for link in links}


def find_slow_links(tests: LinkTests) -> SlowLinks:
    """Return which links are slow, or among which links one is."""
    on_path = tests.path != NO_LINK
    capability = _capability(tests, on_path)
    usual, threshold = _references(_comparable(tests, on_path, capability), tests.kind)
    with np.errstate(invalid="ignore"):
        is_cleared = capability >= threshold[tests.kind]
        # A transfer cannot be faster than what is usual of the slowest kind of link on its path.
        limits = np.where(on_path, usual[tests.kind[tests.path]], np.inf)
        limiting = np.take_along_axis(
            tests.kind[tests.path], np.argmin(np.where(np.isnan(limits), np.inf, limits), axis=1)[:, None], axis=1
        )
        least = threshold[limiting[:, 0]]
        slow = np.flatnonzero(tests.is_apart & (tests.value < least))
        # What a link of a host has carried over an uplink clears it of slow transfers over uplinks.
        can_be_slow = ~(is_cleared | (capability >= least[slow, None]))
    passed = np.zeros((len(slow), tests.num_links + 1), np.bool_)  # the last column is that of NO_LINK
    np.put_along_axis(passed, tests.path[slow], True, axis=1)
    suspected = passed[:, :-1] & can_be_slow
    count = suspected.sum(axis=1)
    num_alone = suspected[count == 1].sum(axis=0)
    return SlowLinks(
        capability=capability,
        usual=usual,
        threshold=threshold,
        is_cleared=is_cleared,
        num_alone=num_alone,
        certain=tuple(np.flatnonzero(num_alone).tolist()),
        unclear=_unclear(suspected, num_alone > 0, capability, tests.value[slow]),
        unexplained=tuple(slow[count == 0].tolist()),
    )


def _capability(tests: LinkTests, on_path: Bools) -> Floats:
    capability = np.full(tests.num_links, -np.inf)
    known = on_path & np.isfinite(tests.value)[:, None]
    np.maximum.at(capability, tests.path[known], np.broadcast_to(tests.value[:, None], known.shape)[known])
    return np.where(np.isfinite(capability), capability, np.nan)


def _comparable(tests: LinkTests, on_path: Bools, capability: Floats) -> Floats:
    """Return the capabilities of links that something passed alone; all of them where nothing did.

    What links carry while others share them varies with the others.
    """
    is_comparable = np.zeros(tests.num_links, np.bool_)
    is_comparable[tests.path[on_path & (tests.is_apart & np.isfinite(tests.value))[:, None]]] = True
    return np.where(is_comparable, capability, np.nan) if is_comparable.any() else capability


def _references(capability: Floats, kind: Ints) -> tuple[Floats, Floats]:
    """Return the usual capability and the threshold of each kind."""
    num_kinds = int(kind.max(initial=-1)) + 1
    usual, threshold = np.full(num_kinds, np.nan), np.full(num_kinds, np.nan)
    for number in range(num_kinds):
        usual[number], threshold[number] = outlier_limit(capability[(kind == number) & np.isfinite(capability)])
    return usual, threshold


def outlier_limit(values: Floats) -> tuple[float, float]:
    """Return the median of values, and what is an outlier below: three robust deviations and 10 % less; nan for none.

    An even number of values takes the upper middle value and the lower middle deviation: where half of four hosts are
    slow, no link has the mean of both halves.
    """
    if not len(values):
        return float("nan"), float("nan")
    usual = float(np.sort(values)[len(values) // 2])
    away = np.sort(np.abs(values - usual))
    deviation = _MAD_TO_DEVIATION * float(away[(len(away) - 1) // 2])
    return usual, usual - max(_DEVIATIONS * deviation, _MIN_SHARE * usual)


def _unclear(suspected: Bools, is_certain: Bools, capability: Floats, value: Floats) -> tuple[tuple[int, ...], ...]:
    """Return the sets of links that slow transfers accuse, without transfers that a certain link explains."""
    # A transfer much slower than the certain links on its path has passed another slow link.
    certain_limit = np.where(suspected & is_certain, capability, np.inf).min(axis=1, initial=np.inf)
    with np.errstate(invalid="ignore"):
        is_explained = value >= (1 - _MIN_SHARE) * certain_limit
    left = suspected & ~is_certain & ~is_explained[:, None]
    return tuple(sorted(tuple(np.flatnonzero(links).tolist()) for links, _ in explanations(left, is_joined=True)))


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
