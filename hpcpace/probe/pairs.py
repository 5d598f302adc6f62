"""The part that measures pairs of hosts: rank 0 plans rounds and judges, all ranks play them.

Data goes over TCP on the interfaces that carry the training's collectives. Nothing waits for a host longer than its
patience: a host that stops answering loses the pairs that it is in, and takes part in no further round. Slow links are
reported in sentences: which one it is, what it reaches, and what clears the others on the path.
"""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from hpcpace.core.codec import convert
from hpcpace.core.environment import host_identity, process_environ
from hpcpace.core.errors import WorldError
from hpcpace.core.records import dataclass
from hpcpace.core.text import format_duration, format_rate, listed, printable
from hpcpace.probe.pair_network import (
    MIN_LATENCY_TESTS,
    MIN_TESTS,
    PairResult,
    PairResults,
    Round,
    SlowLinks,
    pair_network,
    search_slow_links,
)
from hpcpace.probe.pair_player import Listener, Meeting, PairPlayer, RoundPlan, RoundTimes, Seat, reachable
from hpcpace.probe.record import BisectionRow, LinkFinding, PairRow, PairsRecord, ProbedHost, ProbeRecord
from hpcpace.probe.world import ProbeWorld
from hpcpace.world.deadline import Deadline
from hpcpace.world.interfaces import HostAddresses, choose_route, host_addresses

_MAX_WITNESSES = 3
_ORDER = ("link", "unclear", "between")


def link_findings(search: PairResults) -> tuple[LinkFinding, ...]:
    """Return the slow links that a search found, certain ones first."""
    found = [*_RateSentences(search, search.slow_links()).findings()]
    named = {name for each in found for name in each.names}
    others = (*_uplink_findings(search), *_latency_findings(search))
    found += [each for each in others if not named & set(each.names)]
    return tuple(sorted(found, key=lambda each: _ORDER.index(each.kind)))


_VERBS = {"both": "sends and receives", "sends": "sends", "receives": "receives"}


@dataclass(frozen=True)
class _RateSentences:
    search: PairResults
    slow: SlowLinks

    def findings(self) -> Iterator[LinkFinding]:
        disturbed = "in one measurement, which may have been disturbed"
        shared = "or what it shares with others: it is unknown who shares a switch, and pairs of fast hosts are as slow"
        once = [link for link in self.slow.certain if self.slow.num_alone[link] < MIN_TESTS]
        for links in _by_owner(link for link in self.slow.certain if self.slow.num_alone[link] >= MIN_TESTS):
            yield self._finding("link", links, self._certain(links))
        for links in _joined_ways(self.slow.unclear):
            yield self._finding("unclear", links, self._unclear(links))
        for reason, some in ((disturbed, once), (shared, self.slow.doubtful)):
            for links in _by_owner(some):
                name = self._names(links)[0]
                words = f"{_possessive(name)} link, cannot tell: {name} {self._reached(links)}, {reason}"
                yield self._finding("unclear", links, words)
        for pair in {tuple(sorted(pair)): pair for pair in self.search.slow_pairs()}.values():
            yield self._between(pair)

    def _certain(self, links: Sequence[int]) -> str:
        network = self.search.network
        name = network.owner(links[0])
        if network.is_uplink[links[0]]:
            inside = [network.hosts[host] for host in network.leaf_hosts[links[0] // 2 - network.num_hosts]]
            cleared = [host for host in inside if self._fast_partners(host)]
            are = "is" if len(cleared) == 1 else "are"
            reason = f", {listed(cleared[:_MAX_WITNESSES])} {are} fast with others" if cleared else ""
            head = f"{_possessive(name)}, not its hosts' links"
        else:
            other, partners = self._witness(links)
            reason = f", {other} is fast with {listed(partners)}" if partners else ""
            head = f"{_possessive(name)} link" + (f", not {_possessive(other)}" if partners else "")
        return f"{head}: {name} {self._reached(links)}{reason}"

    def _unclear(self, links: Sequence[int]) -> str:
        names = self._names(links)
        reason = "none of them was fast with another" if len(names) > 2 else "neither was fast with another"
        value, usual = self._values(links)
        return (
            f"{' or '.join(map(printable, names))}, cannot tell: what passes their links reaches {_rate(value)} of the "
            f"usual {_rate(usual)}, and {reason} host"
        )

    def _between(self, pair: tuple[int, int]) -> LinkFinding:
        first, second = names = tuple(self.search.network.hosts[host] for host in pair)
        value = max(rate for way, rate in self.search.rates_apart() if way == pair)
        usual = float(self.slow.usual[0])
        fast = [listed(self._fast_partners(name)) or "none both ways" for name in names]
        words = (
            f"between {first} and {second}, neither host's link: {first} sends to {second} at {_rate(value)} of "
            f"the usual {_rate(usual)} each time, {first} is fast with {fast[0]}, {second} with {fast[1]}"
        )
        return _link_finding("between", names, "sends", "rate", value, usual, words)

    def _finding(self, kind: str, links: Sequence[int], words: str) -> LinkFinding:
        return _link_finding(kind, self._names(links), _way(links), "rate", *self._values(links), words)

    def _names(self, links: Sequence[int]) -> tuple[str, ...]:
        """Return the owners of links, hosts before uplinks."""
        owners = dict.fromkeys(self.search.network.owner(link) for link in links)
        return tuple(sorted(owners, key=lambda name: " uplink" in name))

    def _values(self, links: Sequence[int]) -> tuple[float, float]:
        value = float(np.nanmax(self.slow.capability[list(links)]))
        return value, float(self.slow.usual[int(self.search.network.is_uplink[links[0]])])

    def _reached(self, links: Sequence[int]) -> str:
        value, usual = self._values(links)
        return f"{_VERBS[_way(links)]} at {_rate(value)} of the usual {_rate(usual)}"

    def _witness(self, links: Sequence[int]) -> tuple[str, list[str]]:
        """Return a host with which the owner of links was slow, and the hosts with which that one is fast."""
        network = self.search.network
        owner = links[0] // 2
        partners = [sum(each.pair) - owner for each in self.search.results if each.is_apart and owner in each.pair]
        found = [(network.hosts[host], self._fast_partners(network.hosts[host])) for host in dict.fromkeys(partners)]
        return max(found, key=lambda each: len(each[1]), default=("", []))

    def _fast_partners(self, name: str) -> list[str]:
        hosts = self.search.network.hosts
        host, threshold = hosts.index(name), self.slow.threshold[0]
        fast = [
            hosts[sum(each.pair) - host]
            for each in self.search.results
            if host in each.pair and min(each.forward, each.backward) >= threshold
        ]
        return sorted(dict.fromkeys(fast), key=hosts.index)[:_MAX_WITNESSES]


def _uplink_findings(search: PairResults) -> Iterator[LinkFinding]:
    """Yield uplinks that many hosts together found slow."""
    slow = search.slow_uplinks()
    if slow is None:
        return
    usual = float(slow.usual[0])
    confirmed = [link for link in slow.certain if slow.num_alone[link] >= MIN_TESTS]
    names = search.network.leaf_names
    for kind, sets in (("link", _by_owner(confirmed)), ("unclear", _joined_ways(slow.unclear))):
        for links in sets:
            owners = tuple(dict.fromkeys(f"{names[link // 2]} uplink" for link in links))
            value, way = float(np.nanmax(slow.capability[list(links)])), _way(links)
            head = _possessive(owners[0]) if len(owners) == 1 else f"{' or '.join(owners)}, cannot tell"
            words = f"{head}: with all its hosts at once it {_VERBS[way]} {_rate(value)} of the usual {_rate(usual)}"
            yield _link_finding(kind, owners, way, "bisection", value, usual, words)


def _latency_findings(search: PairResults) -> Iterator[LinkFinding]:
    """Yield hosts to which each message takes longer; both ways of a round trip count together."""
    slow = search.slow_latencies()
    network = search.network
    for links in _by_owner(link for link in slow.certain if slow.num_alone[link] >= MIN_LATENCY_TESTS):
        is_uplink = bool(network.is_uplink[links[0]])
        value, usual = float(1 / slow.capability[links[0]]), float(1 / slow.usual[int(is_uplink)])
        name = network.owner(links[0])
        head = _possessive(name) + ("" if is_uplink else " link")
        words = f"{head}: messages take {format_duration(value)}, usually {format_duration(usual)}"
        yield _link_finding("link", (name,), "both", "latency", value, usual, words)


def _link_finding(
    kind: str, names: tuple[str, ...], way: str, measure: str, value: float, usual: float, words: str
) -> LinkFinding:
    return LinkFinding(kind=kind, names=names, way=way, measure=measure, value=value, usual=usual, words=words)


def _by_owner(links: Iterable[int]) -> list[tuple[int, ...]]:
    """Return directed links with both directions of one link together."""
    found: dict[int, list[int]] = {}
    for link in links:
        found.setdefault(link // 2, []).append(link)
    return [tuple(each) for each in found.values()]


def _joined_ways(sets: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return sets of directed links; those of the same links in different directions are one."""
    found: dict[frozenset[int], list[int]] = {}
    for links in sets:
        found.setdefault(frozenset(link // 2 for link in links), []).extend(links)
    return [tuple(sorted(each)) for each in found.values()]


def _way(links: Sequence[int]) -> str:
    """Return which directions links of one owner have; several owners have both by their nature."""
    directions = {link % 2 for link in links}
    return "both" if len(directions) > 1 else "receives" if directions == {1} else "sends"


def _possessive(name: str) -> str:
    """Return `n3's`, and `leaf2's uplink` for an uplink."""
    unit, _, what = printable(name).partition(" ")
    return f"{unit}'s {what}".rstrip()


def _rate(bytes_per_s: float) -> str:
    return format_rate(8 * bytes_per_s)


# What rank 0 needs between two rounds, of which the messages to all ranks are most.
_BETWEEN_S = 0.05
_MAX_PATIENCE_S = 5.0
_GATHER_S = 0.5
_NUM_QUANTILES = 3


class Pairs:
    """The part that measures pairs of hosts.

    Args:
        times: of the stages of a round.
        own_addresses: of this host, on the interfaces named.
    """

    name = "pairs"
    weight = 3.0

    def __init__(
        self, *, times: RoundTimes | None = None, own_addresses: Callable[[str], HostAddresses] = host_addresses
    ) -> None:
        self._times = times or RoundTimes()
        self._own_addresses = own_addresses

    def measure(self, world: ProbeWorld, deadline: Deadline, record: ProbeRecord) -> ProbeRecord:
        """Measure; see `hpcpace.probe.world.Measurement`."""
        if len(world.nodes) < 2:
            note = f"all ranks are on {world.hosts[world.nodes[0]]}: pairs take at least two hosts"
            return dataclasses.replace(record, pairs=PairsRecord(carrier="", note=note)) if world.is_first else record
        table = _introduced(world, self._own_addresses)
        with ExitStack() as held:
            player = _seated(world, table)
            if player.listener is not None:
                held.enter_context(closing(player.listener))
            if world.is_first:
                conductor = _Conductor(world, player, table, self._times)
                results = conductor.search(deadline)
            else:
                _follow(world, player)
        world.meet("pairs of hosts", wait_s=table.patience_s)
        if not world.is_first:
            return record
        world.problems += conductor.problems
        return dataclasses.replace(record, pairs=pairs_record(results, record.hosts, table.carrier))


@dataclass(frozen=True, kw_only=True)
class _Table:
    """What rank 0 sends to all ranks before the first round.

    Attributes:
        nodes: hosts that take part, as indices into the world's.
        addresses: of each of them, one for each interface.
        interfaces: of each of them.
        token: a secret of this probe.
        patience_s: how long a host may not answer.
        at_once: pairs that measure latency at the same time.
        carrier: what carries the data, in words.
    """

    nodes: tuple[int, ...]
    addresses: tuple[tuple[str, ...], ...]
    interfaces: tuple[tuple[str, ...], ...]
    token: str
    patience_s: float
    at_once: int
    carrier: str


def _introduced(world: ProbeWorld, own_addresses: Callable[[str], HostAddresses]) -> _Table:
    """Return where the hosts can be reached.

    Collective: every rank alive calls this.
    """
    name = f"pairs/addresses/{world.num_meetings}"
    leaders = {world.leader_of(node): node for node in world.nodes}
    if world.rank in leaders:
        own = own_addresses(_interfaces_of_job(world))
        world.board.post(f"{name}/{world.rank}", {"addresses": own, "machine": host_identity().boot_id})
    table = None
    if world.is_first:
        found = world.board.gather(name, leaders, world.timeout_s)
        table = _table(world, {leaders[rank]: each for rank, each in found.items()})
    agreed = world.agree(table, _Table)
    assert agreed is not None  # rank 0 has one
    return agreed


def _interfaces_of_job(world: ProbeWorld) -> str:
    """Return the interfaces that the process group was made on, separated by commas; empty where the backend chose."""
    variable = "NCCL_SOCKET_IFNAME" if world.backend == "nccl" else "GLOO_SOCKET_IFNAME"
    return process_environ().get(variable, "").removeprefix("=")


def _table(world: ProbeWorld, found: Mapping[int, Mapping[str, Any]]) -> _Table:
    hosts = {str(node): convert(each["addresses"], HostAddresses) for node, each in sorted(found.items())}
    interfaces, addresses = [], []
    try:
        routes = choose_route(hosts)
        for name, host in hosts.items():
            interfaces.append(routes[name].interfaces)
            addresses.append(tuple(host.addresses[each].partition("/")[0] for each in routes[name].interfaces))
    except WorldError:
        # Hosts in different subnets may reach each other by routers: each is tried at its own first address.
        for host in hosts.values():
            own = [(each, text.partition("/")[0]) for each, text in host.addresses.items() if each != "lo"]
            interfaces.append(tuple(each for each, _ in own[:1]))
            addresses.append(tuple(text for _, text in own[:1]))
    names = sorted({",".join(each) for each in interfaces})
    share_machine = len({each["machine"] for each in found.values()}) < len(found)
    return _Table(
        nodes=tuple(map(int, hosts)),
        addresses=tuple(addresses),
        interfaces=tuple(interfaces),
        token=secrets.token_hex(16),
        patience_s=min(_MAX_PATIENCE_S, world.timeout_s / 4),
        at_once=max((os.cpu_count() or 1) // 2, 1) if share_machine else len(found),
        carrier=f"TCP over {' or '.join(names)}",
    )


def _seated(world: ProbeWorld, table: _Table) -> PairPlayer:
    """Return this rank as a player, which listens if it can.

    Collective: every rank alive calls this.
    """
    name, node = f"pairs/ports/{world.num_meetings}", world.node_of_rank[world.rank]
    ranks_of_host = [world.ranks_of([each]) for each in table.nodes]
    place = table.nodes.index(node) if node in table.nodes else None
    turn = 0 if place is None else ranks_of_host[place].index(world.rank)
    listener, interface = None, ""
    if place is not None and table.addresses[place]:
        number = turn % len(table.addresses[place])
        interface = table.interfaces[place][number]
        listener = _listener(table.addresses[place][number], interface, table.token)
    world.board.post(f"{name}/{world.rank}", listener.port if listener is not None else 0)
    ports = world.board.gather(name, world.alive, world.timeout_s) if world.is_first else {}
    agreed = dict(world.agree(sorted(ports.items())))
    seats = [Seat(address="", port=0)] * len(world.node_of_rank)
    for addresses, ranks in zip(table.addresses, ranks_of_host, strict=True):
        for number, rank in enumerate(ranks):
            if addresses:
                seats[rank] = Seat(address=addresses[number % len(addresses)], port=agreed.get(rank, 0))
    return PairPlayer(
        rank=world.rank,
        ranks_of_host=ranks_of_host,
        hosts=[world.hosts[each] for each in table.nodes],
        seats=seats,
        listener=listener,
        interface=interface,
        token=table.token,
        patience_s=table.patience_s,
    )


def _listener(address: str, interface: str, token: str) -> Listener | None:
    try:
        return Listener(reachable(address, interface), token)
    except OSError:
        return None  # who cannot listen is named by those that try to connect


_NO_PLAN: RoundPlan | None = None


def _follow(world: ProbeWorld, player: PairPlayer) -> None:
    """Play the rounds that rank 0 plans until it ends them."""
    while (plan := world.agree(_NO_PLAN, RoundPlan | None)) is not None:
        meeting = player.play(plan)
        if meeting is not None:
            world.board.post(f"pairs/{plan.number}/{world.rank}", meeting)


class _Conductor:
    """Rank 0, which plans the rounds, plays them, too, and gathers what the others found out.

    Attributes:
        problems: what kept pairs from being measured, a sentence each.
    """

    def __init__(self, world: ProbeWorld, player: PairPlayer, table: _Table, times: RoundTimes) -> None:
        self._world = world
        self._player = player
        self._table = table
        self._times = times
        self._ranks_of_host = [world.ranks_of([node]) for node in table.nodes]
        self._hosts = [world.hosts[node] for node in table.nodes]
        self._silent: set[int] = set()
        self._number = world.num_meetings * 1000
        self.problems: list[str] = []

    def search(self, deadline: Deadline) -> PairResults:
        """Measure rounds until nothing is open or the time is over, and end the others' part."""
        network = pair_network(self._hosts, [self._world.topology_addrs[node] for node in self._table.nodes])
        try:
            round_s = self._plan(((0, 1),)).length_s + _BETWEEN_S
            return search_slow_links(
                network,
                self.measure,
                num_affordable=int(deadline.left_s / round_s),
                is_over=lambda: deadline.left_s < round_s,
            )
        finally:
            self._world.agree(_NO_PLAN)

    def _plan(self, pairs: Sequence[tuple[int, int]]) -> RoundPlan:
        return RoundPlan(number=self._number, pairs=tuple(pairs), at_once=self._table.at_once, times=self._times)

    def measure(self, round_: Round) -> list[PairResult]:
        """Measure the pairs of one round; those of hosts that have stopped answering are left out."""
        self._number += 1
        playing = [pair for pair in round_.pairs if not self._silent & set(pair)]
        if not playing:
            return [_silent(pair, round_.is_apart) for pair in round_.pairs]
        plan = self._plan(playing)
        self._world.agree(plan)
        own = self._player.play(plan)
        ranks = [rank for pair in playing for rank in self._players(pair)]
        wanted = [rank for rank in ranks if rank != self._world.rank]
        limit_s = self._player.limit_s(plan) + _GATHER_S
        meetings: dict[int, Meeting] = self._world.board.gather(f"pairs/{self._number}", wanted, limit_s, Meeting)
        if own is not None:
            meetings[self._world.rank] = own
        node_of = {rank: host for host, ranks in enumerate(self._ranks_of_host) for rank in ranks}
        self._silent |= {node_of[rank] for rank in ranks if rank not in meetings}
        return [
            self._result(pair, round_.is_apart, meetings) if pair in playing else _silent(pair, round_.is_apart)
            for pair in round_.pairs
        ]

    def _players(self, pair: tuple[int, int]) -> list[int]:
        both = zip(*(self._ranks_of_host[host] for host in pair), strict=False)
        return [rank for ranks in both for rank in ranks]

    def _result(self, pair: tuple[int, int], is_apart: bool, meetings: Mapping[int, Meeting]) -> PairResult:
        first, second = pair
        players = self._players(pair)
        senders, receivers = players[::2], players[1::2]
        forward, backward = (_sum(meetings, ranks) for ranks in (receivers, senders))
        latency = meetings[senders[0]].latency_ns if senders[0] in meetings else ()
        problem = ""
        for rank, host in [(rank, first) for rank in senders] + [(rank, second) for rank in receivers]:
            if rank in meetings and meetings[rank].problem and not problem:
                problem = f"{self._hosts[host]}: {meetings[rank].problem}"
        if problem and problem not in self.problems:
            self.problems.append(problem)
        return PairResult(
            pair=pair,
            is_apart=is_apart,
            forward=forward,
            backward=backward,
            latency_ns=(latency[0], latency[1], latency[2]) if len(latency) == _NUM_QUANTILES else _NO_LATENCY,
            problem=problem,
        )


_NO_LATENCY = (math.nan, math.nan, math.nan)


def _silent(pair: tuple[int, int], is_apart: bool) -> PairResult:
    problem = "a host stopped answering before"
    return PairResult(pair=pair, is_apart=is_apart, forward=math.nan, backward=math.nan, problem=problem)


def _sum(meetings: Mapping[int, Meeting], ranks: Sequence[int]) -> float:
    """Return what ranks received together, nan if that of one is unknown."""
    rates = [meetings[rank].rate if rank in meetings else None for rank in ranks]
    return sum(math.nan if rate is None else rate for rate in rates)


def pairs_record(results: PairResults, hosts: Sequence[ProbedHost], carrier: str) -> PairsRecord:
    """Return what is saved of a search.

    Args:
        results: of the search.
        hosts: with what their interfaces allow.
        carrier: what carried the data, in words.
    """
    slow = results.slow_links()
    usual = float(slow.usual[0])
    limits = sorted(host.limit or math.nan for host in hosts if host.name in results.network.hosts)
    usual_limit = limits[len(limits) // 2]
    latencies = sorted(each.latency_ns[0] for each in results.results if math.isfinite(each.latency_ns[0]))
    names, leaves = results.network.hosts, results.network.leaf_names
    return PairsRecord(
        carrier=carrier,
        usual=_known(usual),
        usual_of_limit=_known(usual / usual_limit),
        usual_latency_ns=latencies[len(latencies) // 2] if latencies else None,
        rows=tuple(_row(each, names) for each in results.results),
        bisections=tuple(
            BisectionRow(
                source=leaves[each.source_leaf],
                target=leaves[each.target_leaf],
                num_pairs=each.num_pairs,
                rate=each.rate,
                possible=each.possible,
            )
            for each in results.bisections()
        ),
        findings=link_findings(results),
        note=_note(results),
    )


def _note(results: PairResults) -> str:
    network = results.network
    if network.num_hosts == 2:
        return "two hosts are one pair: a slow link of one cannot be told from one of the other, nor from the usual"
    if not network.is_known:
        return "it is unknown which hosts share a switch: no uplink was measured"
    return ""


def _row(result: PairResult, names: Sequence[str]) -> PairRow:
    least_ns, p50_ns, p99_ns = result.latency_ns
    return PairRow(
        first=names[result.pair[0]],
        second=names[result.pair[1]],
        is_apart=result.is_apart,
        forward=_known(result.forward),
        backward=_known(result.backward),
        least_ns=_known(least_ns),
        p50_ns=_known(p50_ns),
        p99_ns=_known(p99_ns),
        problem=result.problem,
    )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
