"""Ranks onto hosts so that few bytes cross the uplinks of leaf switches, and then few leave their host.

The problem is a quadratic assignment. The search starts from the placement of the run and from a greedy one, swaps
ranks of two hosts while that helps, and keeps the best; it is deterministic. Hosts keep how many ranks they have, and
ranks of one host are numbered in ascending order, as launchers do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Floats, Ints


@dataclass(frozen=True, kw_only=True)
class PlacementThresholds(Thresholds, topic="placement"):
    """When a placement is worth a change."""

    min_gain_share: float = number(0.05, "share")
    """Least share by which bytes over uplinks, or else between hosts, must shrink: less is lost in a job's noise."""
    uplink_weight: float = number(16.0, "times", at_least=1)
    """What a byte over a level of uplinks costs, in bytes between hosts of a leaf: its ranks share uplinks."""
    rate_error: float = number(0.4, "share")
    """Part by which transfers on other links may take longer than predicted, or be predicted too long: it widens the
    interval. Of three trials in the lab, whose ranks shared cores, one had transfers 38 % longer."""


@dataclass(frozen=True, kw_only=True)
class Volumes:
    """Bytes of a step in one placement.

    Attributes:
        uplink_bytes: sent from one leaf to another, counted once for each level of switches that it climbs.
        host_bytes: sent from one host to another, below one leaf or not.
    """

    uplink_bytes: float
    host_bytes: float

    def shrunk_to(self, after: Volumes) -> float:
        """Return the share by which bytes over uplinks shrink, or those between hosts where uplinks carry as many."""
        is_below_leaves = self.uplink_bytes == after.uplink_bytes
        old, new = ((one.host_bytes if is_below_leaves else one.uplink_bytes) for one in (self, after))
        return max(1 - new / old, 0.0) if old else 0.0


def switches_above(paths: Sequence[tuple[str, ...]]) -> list[Ints]:
    """Return the number of the switch above each host on each level, from the leaves up, int64, (num_hosts,) each.

    Args:
        paths: the switches above each host, from the top down to its leaf.
    """
    found = []
    for level in range(max(map(len, paths), default=0)):
        upper = [path[: len(path) - level] for path in paths]
        index = {one: place for place, one in enumerate(dict.fromkeys(upper))}
        found.append(np.array([index[one] for one in upper], np.int64))
    return found


def levels_between(paths: Sequence[tuple[str, ...]]) -> Ints:
    """Return how many levels of uplinks separate hosts, int64, (num_hosts, num_hosts); 0 below one leaf.

    Args:
        paths: as of `switches_above`.
    """
    found = np.zeros((len(paths), len(paths)), np.int64)
    for switch in switches_above(paths):
        found += switch[:, None] != switch[None, :]
    return found


def volumes(traffic: Floats, host: Ints, levels: Ints) -> Volumes:
    """Return what a placement sends.

    Args:
        traffic: bytes from rank (row) to rank, float64, (num_ranks, num_ranks).
        host: of each rank, int64, (num_ranks,).
        levels: as `levels_between` returns it.
    """
    climbed = levels[host[:, None], host[None, :]]
    is_apart = host[:, None] != host[None, :]
    return Volumes(uplink_bytes=float((traffic * climbed).sum()), host_bytes=float(traffic[is_apart].sum()))


def better_host(traffic: Floats, host: Ints, levels: Ints, limits: PlacementThresholds) -> Ints:
    """Return the host of each rank in the best placement found, int64, (num_ranks,); the same one if it is good.

    Args:
        traffic, host, levels: as of `volumes`, the placement as it is.
        limits: what a change must gain.
    """
    both_ways = traffic + traffic.T
    cost = (levels * limits.uplink_weight + ~np.eye(len(levels), dtype=np.bool_)).astype(np.float64)
    starts = (host, _greedy(both_ways, host, cost))
    found = [_swapped(both_ways, start, cost) for start in starts]
    best = min(found, key=lambda one: _total(both_ways, one, cost))
    before, after = volumes(traffic, host, levels), volumes(traffic, best, levels)
    is_worth_it = after.uplink_bytes < (1 - limits.min_gain_share) * before.uplink_bytes or (
        after.uplink_bytes <= before.uplink_bytes and after.host_bytes < (1 - limits.min_gain_share) * before.host_bytes
    )
    return best if is_worth_it else host


def _total(both_ways: Floats, host: Ints, cost: Floats) -> float:
    return float((both_ways * cost[host[:, None], host[None, :]]).sum())


def _greedy(both_ways: Floats, host: Ints, cost: Floats) -> Ints:
    """Fill hosts one after the other, near ones next, each time with the rank that talks most to those nearby."""
    slots = np.bincount(host, minlength=len(cost))
    placed, nearness = np.full(len(host), -1), cost.max() - cost
    pull = np.zeros((len(host), len(cost)))
    for at in _near_order(cost).tolist():
        for _ in range(slots[at]):
            wanted = np.where(placed < 0, pull[:, at], -1.0)
            rank = int(wanted.argmax())
            placed[rank] = at
            pull += both_ways[:, rank, None] * nearness[at]
    return placed.astype(np.int64)


def _near_order(cost: Floats) -> Ints:
    """Return hosts so that those near each other follow each other, int64, (num_hosts,)."""
    order, left = [0], np.ones(len(cost), np.bool_)
    left[0] = False
    distance = cost[0].copy()
    while left.any():
        order.append(int(np.where(left, distance, np.inf).argmin()))
        left[order[-1]] = False
        distance = cost[order[-1]] + distance * 2.0**-8  # statistics: earlier hosts break ties alone
    return np.array(order, np.int64)


def _swapped(both_ways: Floats, start: Ints, cost: Floats) -> Ints:
    """Swap ranks of different hosts, the best swap of each rank first, until no swap helps.

    Each swap lowers the total cost by more than rounding, so that this ends.
    """
    host, ranks = start.copy(), np.arange(len(start))
    at_host = both_ways @ cost[host]  # what each rank would cost on each host, (num_ranks, num_hosts)
    least = 1e-9 * max(_total(both_ways, host, cost), 1.0)  # statistics: rounding of float64 sums
    while True:
        there = at_host[:, host]
        move = there - there.diagonal()[:, None]
        change = move + move.T + 2 * both_ways * cost[host[:, None], host[None, :]]
        partner = change.argmin(axis=1)
        gain = change[ranks, partner]
        order = np.argsort(gain, kind="stable")
        num_swaps = 0
        for one in order[gain[order] < -least].tolist():
            other = int(partner[one])
            here, away = host[one], host[other]
            now = at_host[one, away] - at_host[one, here] + at_host[other, here] - at_host[other, away]
            if now + 2 * both_ways[one, other] * cost[here, away] >= -least:
                continue  # an earlier swap took its gain
            at_host += (both_ways[:, one] - both_ways[:, other])[:, None] * (cost[away] - cost[here])
            host[one], host[other] = away, here
            num_swaps += 1
        if not num_swaps:
            return host
