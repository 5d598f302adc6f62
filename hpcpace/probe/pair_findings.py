"""Slow links in sentences: which one it is, what it reaches, and what clears the others on the path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hpcpace.core.text import format_duration, format_rate, listed, printable
from hpcpace.probe.pair_record import LinkFinding
from hpcpace.probe.pair_results import PairResults
from hpcpace.probe.pair_search import LEAST_LATENCY_TESTS, LEAST_TESTS
from hpcpace.probe.pair_solver import SlowLinks

_MOST_WITNESSES = 3
_ORDER = ("link", "unclear", "between")


def link_findings(search: PairResults) -> tuple[LinkFinding, ...]:
    """Return the slow links that a search found, certain ones first."""
    found = _RateSentences(search, search.slow_links()).findings()
    named = {name for each in found for name in each.names}
    found += [each for each in _uplink_findings(search) if not named & set(each.names)]
    found += [each for each in _latency_findings(search) if not named & set(each.names)]
    return tuple(sorted(found, key=lambda each: _ORDER.index(each.kind)))


@dataclass(frozen=True)
class _RateSentences:
    search: PairResults
    slow: SlowLinks

    def findings(self) -> list[LinkFinding]:
        confirmed = [link for link in self.slow.certain if self.slow.num_alone[link] >= LEAST_TESTS]
        once = [link for link in self.slow.certain if self.slow.num_alone[link] < LEAST_TESTS]
        found = [self._certain(links) for links in _by_owner(confirmed)]
        found += [self._unclear(links) for links in _joined_ways(self.slow.unclear)]
        found += [self._single(links, "in one measurement, which may have been disturbed") for links in _by_owner(once)]
        reason = "or what it shares with others: it is unknown who shares a switch, and pairs of fast hosts are as slow"
        found += [self._single(links, reason) for links in _by_owner(self.slow.doubtful)]
        return found + list(self._between())

    def _certain(self, links: Sequence[int]) -> LinkFinding:
        network = self.search.network
        name = network.owner(links[0])
        if network.is_uplink[links[0]]:
            inside = [network.hosts[host] for host in network.leaf_hosts[links[0] // 2 - network.num_hosts]]
            cleared = [host for host in inside if self._fast_partners(host)]
            reason = f", {listed(cleared[:_MOST_WITNESSES])} {_are(cleared)} fast with others" if cleared else ""
            head = f"{_possessive(name)}, not its hosts' links"
        else:
            other, partners = self._witness(links)
            reason = f", {other} is fast with {listed(partners)}" if partners else ""
            head = f"{_possessive(name)} link" + (f", not {_possessive(other)}" if partners else "")
        return self._finding("link", (name,), links, f"{head}: {name} {self._reached(links)}{reason}")

    def _unclear(self, links: Sequence[int]) -> LinkFinding:
        names = list(dict.fromkeys(self.search.network.owner(link) for link in links))
        names = sorted(names, key=lambda name: " uplink" in name)
        reason = "none of them was fast with another" if len(names) > 2 else "neither was fast with another"
        value, usual = self._values(links)
        words = (
            f"{' or '.join(map(printable, names))}, cannot tell: what passes their links reaches {_rate(value)} of the "
            f"usual {_rate(usual)}, and {reason} host"
        )
        return self._finding("unclear", tuple(names), links, words)

    def _single(self, links: Sequence[int], reason: str) -> LinkFinding:
        name = self.search.network.owner(links[0])
        words = f"{_possessive(name)} link, cannot tell: {name} {self._reached(links)}, {reason}"
        return self._finding("unclear", (name,), links, words)

    def _between(self) -> Iterator[LinkFinding]:
        slow = {tuple(sorted(pair)): pair for pair in self.search.slow_pairs()}
        usual = float(self.slow.usual[0])
        for pair in slow.values():
            first, second = (self.search.network.hosts[host] for host in pair)
            value = max(rate for way, rate in self.search.rates_apart() if way == pair)
            words = (
                f"between {first} and {second}, neither host's link: {first} sends to {second} at {_rate(value)} of "
                f"the usual {_rate(usual)} each time, {first} is fast with {self._fast_words(first)}, "
                f"{second} with {self._fast_words(second)}"
            )
            names = first, second
            yield LinkFinding(
                kind="between", names=names, way="sends", measure="rate", value=value, usual=usual, words=words
            )

    def _finding(
        self, kind: Literal["link", "unclear"], names: tuple[str, ...], links: Sequence[int], words: str
    ) -> LinkFinding:
        value, usual = self._values(links)
        return LinkFinding(
            kind=kind, names=names, way=_way(links), measure="rate", value=value, usual=usual, words=words
        )

    def _values(self, links: Sequence[int]) -> tuple[float, float]:
        value = float(np.nanmax(self.slow.capability[list(links)]))
        return value, float(self.slow.usual[int(self.search.network.is_uplink[links[0]])])

    def _reached(self, links: Sequence[int]) -> str:
        value, usual = self._values(links)
        verb = {"both": "sends and receives", "sends": "sends", "receives": "receives"}[_way(links)]
        return f"{verb} at {_rate(value)} of the usual {_rate(usual)}"

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
        return sorted(dict.fromkeys(fast), key=hosts.index)[:_MOST_WITNESSES]

    def _fast_words(self, name: str) -> str:
        return listed(self._fast_partners(name)) or "none both ways"


def _uplink_findings(search: PairResults) -> Iterator[LinkFinding]:
    """Yield uplinks that many hosts together found slow."""
    slow = search.slow_uplinks()
    if slow is None:
        return
    usual = float(slow.usual[0])
    confirmed = [link for link in slow.certain if slow.num_alone[link] >= LEAST_TESTS]
    names = search.network.leaf_names
    for kind, sets in (("link", _by_owner(confirmed)), ("unclear", _joined_ways(slow.unclear))):
        for links in sets:
            owners = tuple(dict.fromkeys(f"{names[link // 2]} uplink" for link in links))
            value = float(np.nanmax(slow.capability[list(links)]))
            verb = {"both": "sends and receives", "sends": "sends", "receives": "receives"}[_way(links)]
            head = _possessive(owners[0]) if len(owners) == 1 else f"{' or '.join(owners)}, cannot tell"
            words = f"{head}: with all its hosts at once it {verb} {_rate(value)} of the usual {_rate(usual)}"
            yield LinkFinding(
                kind="link" if kind == "link" else "unclear",
                names=owners,
                way=_way(links),
                measure="bisection",
                value=value,
                usual=usual,
                words=words,
            )


def _latency_findings(search: PairResults) -> Iterator[LinkFinding]:
    """Yield hosts to which each message takes longer; both ways of a round trip count together."""
    slow = search.slow_latencies()
    network = search.network
    for links in _by_owner(link for link in slow.certain if slow.num_alone[link] >= LEAST_LATENCY_TESTS):
        value, usual = 1 / slow.capability[links[0]], 1 / slow.usual[int(network.is_uplink[links[0]])]
        name = network.owner(links[0])
        what = "" if network.is_uplink[links[0]] else " link"
        words = f"{_possessive(name)}{what}: messages take {format_duration(value)}, usually {format_duration(usual)}"
        yield LinkFinding(
            kind="link",
            names=(name,),
            way="both",
            measure="latency",
            value=float(value),
            usual=float(usual),
            words=words,
        )


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


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _rate(bytes_per_s: float) -> str:
    return format_rate(8 * bytes_per_s)
