"""How early ranks affect late ones: without such a coupling, delaying an early rank cannot gain anything.

Each coupling is one mechanism with its strength. All are off by default; a simulated job is then a plain (max,+)
system.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.errors import UsageError

Sleep = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""How long ranks sleep once they are ready."""


@dataclass(frozen=True, kw_only=True)
class PollStealing:
    """Ranks that wait by polling take processor time from ranks of their node that still compute.

    A fluid model of a fair scheduler: on a node with C cores, k computing and q polling ranks, each computing rank
    advances at the rate min(1, C / (k + weight q)). A sleeping rank takes nothing.

    Attributes:
        ranks_per_node: ranks that share the cores; their numbers are consecutive.
        cores_per_node: computing power of a node, in cores: less than its ranks if these share cores; for two ranks on
            the hardware threads of one core, what both achieve together (about 1.3).
        weight: processor share of a polling rank relative to a computing one: 1 is the same, 0 nothing.
    """

    ranks_per_node: int
    cores_per_node: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or self.cores_per_node <= 0 or self.weight < 0:
            raise UsageError(f"poll stealing needs ranks, cores and a weight of at least 0, not {self}")


@dataclass(frozen=True, kw_only=True)
class PowerShare:
    """Sleeping ranks leave power to computing ranks of their node; polling ranks do not.

    Attributes:
        ranks_per_node: ranks that share the power budget.
        boost: how much faster a rank computes while all others of its node sleep; proportionally less with fewer.
    """

    ranks_per_node: int
    boost: float

    def __post_init__(self) -> None:
        if self.ranks_per_node < 2 or self.boost < 0:
            raise UsageError(f"a shared power budget needs 2 ranks per node and a boost of at least 0, not {self}")


@dataclass(frozen=True, kw_only=True)
class Incast:
    """All ranks send over one link, whose goodput falls when many send at once.

    A fluid link: k simultaneous messages share the goodput g(k) = 1 for k <= limit, else
    max(floor, 1 / (1 + collapse (k - limit) / limit)) of its rate (shape after Phanishayee et al. 2008, Measurement and
    Analysis of TCP Throughput Collapse; the parameters depend on the network and must be measured).

    Attributes:
        message_ns: time of one message alone on the link.
        limit: simultaneous messages that the link carries without loss.
        collapse: strength; 0 means no loss at all.
        floor: least goodput.
    """

    message_ns: float
    limit: int = 1
    collapse: float = 0.0
    floor: float = 0.05

    def __post_init__(self) -> None:
        if self.message_ns < 0 or self.limit < 1 or self.collapse < 0 or not 0 < self.floor <= 1:
            raise UsageError(f"incast needs a message, a limit of at least 1 and a collapse of at least 0, not {self}")

    def end_ns(self, entry_ns: NDArray[np.float64]) -> float:
        """Return when the last message has arrived.

        Equal messages under processor sharing end in the order in which they began, so a loop over begins and ends is
        exact.

        Args:
            entry_ns: when each rank begins to send, float64, (num_ranks,).
        """
        begins = np.sort(entry_ns)
        if self.collapse == 0.0:
            # Lindley's recursion: a link that never idles while there is work ends with its last busy period.
            after = np.arange(len(begins), 0, -1) * self.message_ns
            return float((begins + after).max())
        return self._shared(begins.tolist())

    def goodput(self, num_active: int) -> float:
        """Return the share of its rate that the link delivers with this many simultaneous messages."""
        excess = max(num_active - self.limit, 0) / self.limit
        return max(self.floor, 1.0 / (1.0 + self.collapse * excess))

    def _shared(self, begins: list[float]) -> float:
        served, now, first, last = 0.0, begins[0], 0, 0
        ends: list[float] = []  # of the messages that have begun, in attained service
        while first < len(begins):
            active = last - first
            until_begin = begins[last] - now if last < len(begins) else float("inf")
            rate = self.goodput(active) / active if active else 0.0
            until_end = (ends[first] - served) / rate if active else float("inf")
            if until_begin <= until_end:
                served, now = served + rate * until_begin, begins[last]
                ends.append(served + self.message_ns)
                last += 1
            else:
                served, now = ends[first], now + until_end
                first += 1
        return now


def shared_ready_ns(
    work_ns: NDArray[np.float64],
    sleep: Sleep,
    *,
    poll: PollStealing | None,
    power: PowerShare | None,
) -> NDArray[np.float64]:
    """Return when each rank has done its work, counted from their common begin, if the ranks of a node interact.

    This loops over the ends of work and of delays, for all nodes at once: rates are constant in between.

    Args:
        work_ns: time of the work at full rate, float64, (num_nodes, ranks_per_node).
        sleep: returns how long each rank sleeps from when each is ready, both shaped like `work_ns`.
        poll: what polling costs; None for nothing.
        power: what sleeping gains; None for nothing.
    """
    left, ready = np.maximum(work_ns, 0.0), np.zeros_like(work_ns)
    entry = np.where(left > 0.0, np.inf, sleep(ready))
    now = np.zeros(len(work_ns))
    for _ in range(2 * work_ns.shape[1]):
        computing = left > 0.0
        num_computing = computing.sum(axis=1)
        if not num_computing.any():
            break
        sleeping = ~computing & (entry > now[:, np.newaxis])
        num_sleeping = sleeping.sum(axis=1)
        rate = _rates(num_computing, num_sleeping, work_ns.shape[1], poll, power)
        least = np.where(computing, left, np.inf).min(axis=1)
        end = now + least / rate
        wake = np.where(sleeping, entry, np.inf).min(axis=1)
        ends = (num_computing > 0) & (end <= wake)
        then = np.where(num_computing > 0, np.minimum(end, wake), now)
        done = computing & ends[:, np.newaxis] & (left <= least[:, np.newaxis])
        left = np.where(computing, left - ((then - now) * rate)[:, np.newaxis], 0.0)
        # Rounding must not leave a rank with a tiny rest of work.
        left = np.where(done, 0.0, np.where(computing, np.maximum(left, np.finfo(np.float64).tiny), 0.0))
        now = then
        ready = np.where(done, now[:, np.newaxis], ready)
        entry = np.where(done, now[:, np.newaxis] + sleep(ready), entry)
    return ready


def _rates(
    num_computing: NDArray[np.int64],
    num_sleeping: NDArray[np.int64],
    num_ranks: int,
    poll: PollStealing | None,
    power: PowerShare | None,
) -> NDArray[np.float64]:
    """Return how fast the computing ranks of each node advance, float64, (num_nodes,)."""
    rate = np.ones(len(num_computing))
    if poll is not None:
        num_polling = num_ranks - num_computing - num_sleeping
        wanted = np.maximum(num_computing + poll.weight * num_polling, 1.0)
        rate = np.minimum(rate, poll.cores_per_node / wanted)
    if power is not None:
        rate = rate * (1.0 + power.boost * num_sleeping / (num_ranks - 1))
    return rate
