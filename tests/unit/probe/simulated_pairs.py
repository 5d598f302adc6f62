"""A simulated network of hosts and leaf switches, some with slow links, that a search for them measures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcpace.probe.pair_network import PairNetwork, PairResult, PairResults, Round, search_slow_links

HOST_RATE = 1.2e8
LATENCY_NS = 20_000.0
_MAX_ROUNDS = 300


def network_of(sizes: list[int], *, is_known: bool = True) -> PairNetwork:
    """Return leaf switches with so many hosts."""
    leaf = np.repeat(np.arange(len(sizes)), sizes)
    hosts = tuple(f"n{number + 1}" for number in range(len(leaf)))
    if not is_known:
        return PairNetwork(hosts, np.full(len(leaf), -1))
    return PairNetwork(hosts, leaf, tuple(f"leaf{number + 1}" for number in range(len(sizes))))


@dataclass
class SimulatedNetwork:
    """Links with their true rates.

    Attributes:
        network: with all leaf switches, whether the search knows them or not.
        rate: of each directed link, bytes per second.
        seed: of the noise: each measurement loses a few percent, one of fifty a third.
    """

    network: PairNetwork
    rate: np.ndarray
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.silent: set[int] = set()

    def measure(self, round_: Round) -> list[PairResult]:
        """Measure a round: pairs that pass a link at the same time share it."""
        pairs = np.array(round_.pairs)
        ways = []
        for source, target in ((pairs[:, 0], pairs[:, 1]), (pairs[:, 1], pairs[:, 0])):
            path = self.network.paths(source, target)
            share = fair_shares(path, self.rate)
            lost = np.abs(self.random.normal(0.0, 0.02, len(share)))
            disturbed = self.random.random(len(share)) < 0.02
            ways.append(share * (1 - np.minimum(lost + 0.33 * disturbed, 0.9)))
        silent = np.isin(pairs, list(self.silent)).any(axis=1)
        forward, backward = (np.where(silent, np.nan, way) for way in ways)
        quantiles = (LATENCY_NS, 1.1 * LATENCY_NS, 2 * LATENCY_NS)
        return [
            PairResult(pair=pair, is_apart=round_.is_apart, forward=float(a), backward=float(b), latency_ns=quantiles)
            for pair, a, b in zip(round_.pairs, forward, backward, strict=True)
        ]


def fair_shares(path: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Return what each transfer gets of the links on its path: the links fill up one after the other (max-min)."""
    share = np.full(len(path), np.nan)
    left = rate.copy()
    while (is_open := np.isnan(share)).any():
        passes = (path >= 0) & is_open[:, None]
        users = np.bincount(path[passes], minlength=len(rate))
        level = np.where(users > 0, left / np.maximum(users, 1), np.inf)
        full = int(np.argmin(level))
        ended = is_open & (path == full).any(axis=1)
        share[ended] = level[full]
        np.subtract.at(left, path[ended][path[ended] >= 0], level[full])
    return share


def healthy(sizes: list[int], *, uplink_share: float = 1.0, seed: int = 0) -> SimulatedNetwork:
    """Return a network without a slow link; uplinks have this share of what their hosts can send."""
    network = network_of(sizes)
    rate = np.full(network.num_links, HOST_RATE)
    uplinks = np.repeat(np.array(sizes), 2) * HOST_RATE * uplink_share
    rate[network.is_uplink] = max(uplinks.min(), HOST_RATE / 4)
    return SimulatedNetwork(network, rate, seed)


def searched(simulated: SimulatedNetwork, *, is_known: bool = True, num_affordable: int = 60) -> PairResults:
    """Return a search that has come to its end."""
    hosts = simulated.network.num_hosts
    network = simulated.network if is_known else PairNetwork(simulated.network.hosts, np.full(hosts, -1))
    turns = iter(range(_MAX_ROUNDS))
    return search_slow_links(
        network, simulated.measure, num_affordable=num_affordable, is_over=lambda: next(turns, None) is None
    )
