"""The offset of this rank's clock from rank 0's, measured between steps, with the messages and the schedule for it.

The leaders of the hosts form a binomial tree; along each edge the offset comes from the ping-pong with the shortest
round trip, and the truth lies within half of that round trip (Cristian 1989, "Probabilistic clock synchronization").
Offsets and half-widths add up along the tree. Ranks of one host share a clock, and therefore their leader's sample.
A synchronisation counts only if every rank completed it; if a rank does not come, the others wait no longer than the
timeout. Rank 0
decides in which step the next synchronisation is due.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpcpace.core.errors import ClockSyncError
from hpcpace.core.text import NS_PER_S
from hpcpace.world.messages import NUM_VALUES, Messages

_RECENT_STEPS = 16


class SyncSchedule:
    """Turns an interval of time into a number of steps, from the steps seen so far.

    The first steps are often long (compilation, caches), and the length of steps changes later. So the number of steps
    to the next synchronisation at most doubles each time, and it follows the slower of the whole last interval and its
    last steps: a wrong guess costs a millisecond by being early rather than minutes by being late.
    """

    def __init__(self, interval_ns: int) -> None:
        self._interval_ns = interval_ns
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT_STEPS + 1)
        self._last: tuple[int, int] | None = None
        self._stride = 1

    def note(self, step: int, now_ns: int) -> None:
        """Note the start of a step."""
        self._recent.append((step, now_ns))

    def next_step(self, step: int, now_ns: int) -> int:
        """Return the step of the next synchronisation, given that one has just ended before `step`."""
        if self._last is not None and step > self._last[0]:
            step_ns = max(_mean_step_ns(self._last, (step, now_ns)), self._recent_step_ns(), 1.0)
            self._stride = max(1, min(2 * self._stride, round(self._interval_ns / step_ns)))
        self._last = step, now_ns
        self._recent.clear()
        self._recent.append(self._last)
        return step + self._stride

    def _recent_step_ns(self) -> float:
        first, last = (self._recent[0], self._recent[-1]) if self._recent else ((0, 0), (0, 0))
        return _mean_step_ns(first, last) if last[0] > first[0] else 0.0


def _mean_step_ns(first: tuple[int, int], last: tuple[int, int]) -> float:
    return (last[1] - first[1]) / (last[0] - first[0])


DRIFT_PPM = 200.0
REFERENCE_RANK = 0


class ClockSample(NamedTuple):
    """One row of the trace's `clock` table, in the order of its columns.

    Attributes:
        ref_rank: rank whose clock is the reference.
        local_ns: time of the sample on the local clock.
        offset_ns: local minus reference at that time.
        rtt_ns: shortest round trips, summed along the tree.
        halfwidth_ns: the true offset is within offset_ns +- halfwidth_ns.
        num_pings: ping-pongs of this rank's host; 0 on the reference host.
    """

    ref_rank: int
    local_ns: int
    offset_ns: int
    rtt_ns: int
    halfwidth_ns: int
    num_pings: int


@dataclass(frozen=True)
class SyncTree:
    """The ranks from which a rank gets its sample and to which it passes it on, in that order.

    Attributes:
        parent: rank from which this one gets its sample; None for the reference.
        measures: whether the sample is measured by ping-pong, or handed over within the host.
        children: leaders of other hosts that measure against this rank.
        followers: ranks of this host.
    """

    parent: int | None
    measures: bool
    children: tuple[int, ...]
    followers: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, host_keys: Sequence[str]) -> SyncTree:
        """Return the place of a rank: a binomial tree over the hosts, a star within each.

        In round k the first 2^k hosts know the time, and each tells one more: ceil(log2(num_hosts)) rounds.

        Args:
            rank: this rank.
            host_keys: one key per rank; equal keys share a clock.
        """
        leaders: dict[str, int] = {}
        for other, key in enumerate(host_keys):
            leaders.setdefault(key, other)
        if leaders[host_keys[rank]] != rank:
            return cls(parent=leaders[host_keys[rank]], measures=False, children=(), followers=())
        hosts = list(leaders.values())
        index = hosts.index(rank)
        # Host i learns the time in round bit_length(i) - 1, from host i without its highest bit.
        parent = hosts[index - (1 << (index.bit_length() - 1))] if index else None
        rounds = range(index.bit_length(), (len(hosts) - 1).bit_length())
        children = tuple(hosts[index + (1 << k)] for k in rounds if index + (1 << k) < len(hosts))
        followers = tuple(r for r, key in enumerate(host_keys) if key == host_keys[rank] and r != rank)
        return cls(parent=parent, measures=parent is not None, children=children, followers=followers)


class ClockSync:
    """Synchronisations of one rank, and when the next one is due.

    Attributes:
        notice: up to `NUM_VALUES - 1` numbers that the reference passes on to all ranks with each synchronisation.
    """

    def __init__(
        self,
        messages: Messages | None,
        rank: int,
        host_keys: Sequence[str],
        *,
        num_pings: int = 20,
        interval_s: float = 30.0,
        timeout_s: float = 10.0,
        drift_ppm: float = DRIFT_PPM,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Prepare synchronisations; no message is sent yet.

        Args:
            messages: between the ranks; None for a world of one.
            rank: this rank.
            host_keys: `HostIdentity.host_key` of every rank, in order of rank, (world_size,).
            num_pings: round trips per edge of the tree.
            interval_s: time between two synchronisations, as closely as the steps allow.
            timeout_s: time after which every rank gives up a synchronisation.
            drift_ppm: bound on the relative drift of two clocks, for the time between two edges of the tree.
            clock: local clock, in nanoseconds.
        """
        if messages is None and len(host_keys) > 1:
            raise ValueError(f"a world of {len(host_keys)} ranks needs a transport")
        self._messages = messages
        self._tree = SyncTree.of(rank, host_keys)
        self._num_pings = num_pings
        self._timeout_s = timeout_s
        self._drift_ppm = drift_ppm
        self._clock = clock
        self._schedule = SyncSchedule(interval_ns=round(interval_s * NS_PER_S))
        self._next_step: int | None = 0
        self._deadline_ns = 0
        self.notice: tuple[int, ...] = ()

    @property
    def broken(self) -> bool:
        """Whether a synchronisation failed; no further one is due after that."""
        return self._next_step is None

    def due(self, step: int) -> bool:
        """Return whether the ranks synchronise before this step; asked once per step, the same answer on all ranks.

        The first synchronisation is due at step 0.
        """
        if self._tree.parent is None:
            self._schedule.note(step, self._clock())
        return self._next_step is not None and step >= self._next_step

    def sync(self, step: int) -> ClockSample:
        """Measure this rank's offset, and agree on the next step to do so.

        Collective: every rank calls this, between two steps.

        Args:
            step: number of the step that comes next.

        Raises:
            ClockSyncError: a rank did not take part within the timeout; every other rank raises too.
        """
        if self.broken:
            raise ClockSyncError("an earlier synchronisation failed: the ranks no longer agree on the next one")
        self._deadline_ns = self._clock() + round(self._timeout_s * NS_PER_S)
        # Set again at the end only: where anything fails in between, no further synchronisation is due.
        self._next_step = None
        sample = self._obtain()
        for child in self._tree.children:
            self._serve(child, sample)
        for follower in self._tree.followers:
            self._send(follower, *sample)
        self._next_step = self._conclude(self._schedule.next_step(step, self._clock()))
        return sample

    def close(self) -> None:
        """End the messages. Collective: every rank calls this."""
        if self._messages is not None:
            self._messages.close()

    def _obtain(self) -> ClockSample:
        parent = self._tree.parent
        if parent is None:
            return ClockSample(REFERENCE_RANK, self._clock(), 0, 0, 0, 0)
        if self._tree.measures:
            return self._measure(parent)
        return ClockSample(*self._recv(parent))

    def _measure(self, parent: int) -> ClockSample:
        """Ping the parent; the other half is _serve."""
        clock, best = self._clock, None
        for _ in range(self._num_pings):
            sent_ns = clock()
            self._send(parent)
            parent_ns = self._recv(parent)[0]
            rtt_ns = clock() - sent_ns
            if best is None or rtt_ns < best[0]:
                best = rtt_ns, sent_ns, parent_ns
        known = ClockSample(*self._recv(parent))
        assert best is not None, "num_pings is at least 1"
        rtt_ns, sent_ns, parent_ns = best
        local_ns = sent_ns + rtt_ns // 2
        # The reference never drifts from itself.
        age_ns = abs(parent_ns - known.local_ns) if known.num_pings else 0
        return ClockSample(
            ref_rank=known.ref_rank,
            local_ns=local_ns,
            offset_ns=local_ns - parent_ns + known.offset_ns,
            rtt_ns=rtt_ns + known.rtt_ns,
            halfwidth_ns=-(-rtt_ns // 2) + known.halfwidth_ns + round(age_ns * self._drift_ppm * 1e-6),
            num_pings=self._num_pings,
        )

    def _serve(self, child: int, sample: ClockSample) -> None:
        for _ in range(self._num_pings):
            self._recv(child)
            self._send(child, self._clock())
        self._send(child, *sample)

    def _conclude(self, proposed_step: int) -> int:
        """Return the reference's next step once every rank has its sample; otherwise all of them time out."""
        below = (*self._tree.followers, *self._tree.children)
        for rank in below:
            self._recv(rank)
        if self._tree.parent is not None:
            self._send(self._tree.parent)
            proposed_step, *notice = self._recv(self._tree.parent)
            self.notice = tuple(notice)
        for rank in below:
            self._send(rank, proposed_step, *self.notice)
        return proposed_step

    def _send(self, peer: int, *values: int) -> None:
        assert self._messages is not None, "a world of one sends nothing"
        self._messages.send(peer, values + (0,) * (NUM_VALUES - len(values)), self._left_s())

    def _recv(self, peer: int) -> tuple[int, ...]:
        assert self._messages is not None, "a world of one receives nothing"
        return self._messages.recv(peer, self._left_s())

    def _left_s(self) -> float:
        remaining_s = (self._deadline_ns - self._clock()) / NS_PER_S
        if remaining_s <= 0:
            raise ClockSyncError(f"the clock synchronisation took longer than {self._timeout_s:g} s")
        return remaining_s
