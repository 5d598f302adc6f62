"""The offset of this rank's clock from rank 0's, measured again and again, with the messages and the agreements for it.

The leaders of the hosts form a binomial tree; along each edge the offset comes from the ping-pong with the shortest
round trip, and the truth lies within half of that round trip (Cristian 1989, "Probabilistic clock synchronization").
Offsets and half-widths add up along the tree. Ranks of one host share a clock, and therefore their leader's sample.
A synchronisation counts only if every rank completed it; if a rank does not come, the others wait no longer than the
timeout. In each, the ranks agree on the time of the next one, and on a step that no rank has reached yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpcpace.core.errors import ClockSyncError
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S
from hpcpace.trace.schema import DRIFT_PPM
from hpcpace.world.messages import NUM_VALUES, Messages

# Short jobs are to have several synchronisations: the pauses between the first ones double.
_FIRST_PAUSE_S = 0.5
# A step to agree on is this far ahead of the rank that is furthest: longer than a message can take to reach all ranks.
_LEAD_NS = NS_PER_S
_MIN_LEAD_STEPS = 2
# Python's lock, or a busy core, may lengthen all round trips by milliseconds: up to so many times as many are made,
# until one is at most so many times as long as the shortest of earlier synchronisations.
_MAX_PINGS, _WIDE = 5, 4
_PING, _END = 1, 0

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

        In round k the first 2^k hosts know the time, and each passes it to one more: ceil(log2(num_hosts)) rounds.

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


class Agreement(NamedTuple):
    """What all ranks know after a synchronisation.

    Attributes:
        next_ns: when the next one is due, on the clock of the reference.
        all_leave: whether every rank said that it takes part in no further one.
        step: a step that no rank has reached yet, before which all do the same; 0 if there is none.
        notice: what the reference says about that step.
    """

    next_ns: int
    all_leave: bool
    step: int
    notice: tuple[int, ...]


class Standing(NamedTuple):
    """How far a rank is.

    Attributes:
        step: number of the step that is running.
        step_ns: how long a step takes at least; 0 as long as that is unknown.
        leaves: whether it takes part in no further synchronisation.
        notice: what it says about the step to agree on, four numbers; that of the reference counts.
    """

    step: int = 0
    step_ns: int = 0
    leaves: bool = False
    notice: tuple[int, ...] = (0, 0, 0, 0)


AT_THE_START = Standing()
"""The standing of a rank that has done nothing and says nothing."""


class ClockSync:
    """Synchronisations of one rank.

    Attributes:
        timeout_s: time after which every rank gives up a synchronisation.
        agreement: that of the last synchronisation; None before the first.
        broken: whether one failed; there is no further one after that.
    """

    def __init__(
        self,
        messages: Messages | None,
        rank: int,
        host_keys: Sequence[str],
        *,
        num_pings: int = 20,
        interval_s: float = 30.0,
        timeout_s: float = 30.0,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Prepare synchronisations; no message is sent yet.

        Args:
            messages: between the ranks; None for a world of one.
            rank: this rank.
            host_keys: `HostIdentity.host_key` of every rank, in order of rank, (world_size,).
            num_pings: round trips per edge of the tree.
            interval_s: time between two synchronisations.
            timeout_s: time after which every rank gives up a synchronisation.
            clock: local clock, in nanoseconds.
        """
        if messages is None and len(host_keys) > 1:
            raise ValueError(f"a world of {len(host_keys)} ranks needs a transport")
        self.timeout_s = timeout_s
        self.agreement: Agreement | None = None
        self.broken = False
        self._messages = messages
        self._tree = SyncTree.of(rank, host_keys)
        self._num_pings = num_pings
        self._clock = clock
        self._interval_s = interval_s
        self._pause_s = min(_FIRST_PAUSE_S, interval_s)
        self._deadline_ns = 0
        self._shortest_ns = 1 << 62

    @property
    def works_in_any_thread(self) -> bool:
        """Whether the messages may come from another thread than the one that trains."""
        return self._messages is None or self._messages.works_in_any_thread

    def sync(self, standing: Standing = AT_THE_START, *, until_ns: int | None = None) -> ClockSample:
        """Measure this rank's offset, and agree on what comes next.

        Collective: every rank calls this equally often.

        Args:
            standing: how far this rank is.
            until_ns: when this rank gives up, if that is before the timeout.

        Raises:
            ClockSyncError: a rank did not take part within the timeout; every other rank raises too.
        """
        if self.broken:
            raise ClockSyncError("an earlier synchronisation failed: the ranks no longer agree on the next one")
        self._deadline_ns = self._clock() + round(self.timeout_s * NS_PER_S)
        if until_ns is not None:
            self._deadline_ns = min(self._deadline_ns, until_ns)
        self.broken = True  # until everything has gone well
        sample = self._obtain()
        for child in self._tree.children:
            self._serve(child, sample)
        for follower in self._tree.followers:
            self._send(follower, *sample)
        self.agreement = self._conclude(standing)
        self.broken = False
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
        return self._recv_sample(parent)

    def _measure(self, parent: int) -> ClockSample:
        """Ping the parent; the other half is _serve. Where no round trip is as short as before, ping on."""
        clock, best, num_pings, last_ns = self._clock, None, 0, 1
        while (
            best is None
            or num_pings < self._num_pings
            or (num_pings < _MAX_PINGS * self._num_pings and best[0] > _WIDE * self._shortest_ns)
        ):
            sent_ns = clock()
            self._send(parent, _PING)
            parent_ns = self._recv(parent)[0]
            rtt_ns = clock() - sent_ns
            num_pings += 1
            # In none or a negative one this clock stood still or was set back: in the ones around it for a part, maybe.
            if rtt_ns <= 0:
                best = None
            elif last_ns > 0 and (best is None or rtt_ns < best[0]):
                best = rtt_ns, sent_ns, parent_ns
            last_ns = rtt_ns
        self._send(parent, _END)
        known = self._recv_sample(parent)
        rtt_ns, sent_ns, parent_ns = best
        self._shortest_ns = min(rtt_ns, self._shortest_ns)
        local_ns = sent_ns + rtt_ns // 2
        # The reference never drifts from itself.
        age_ns = abs(parent_ns - known.local_ns) if known.num_pings else 0
        return ClockSample(
            ref_rank=known.ref_rank,
            local_ns=local_ns,
            offset_ns=local_ns - parent_ns + known.offset_ns,
            rtt_ns=rtt_ns + known.rtt_ns,
            halfwidth_ns=-(-rtt_ns // 2) + known.halfwidth_ns + round(age_ns * DRIFT_PPM * 1e-6),
            num_pings=num_pings,
        )

    def _serve(self, child: int, sample: ClockSample) -> None:
        while self._recv(child)[0] != _END:
            self._send(child, self._clock())
        self._send(child, *sample)

    def _conclude(self, standing: Standing) -> Agreement:
        """Return the reference's agreement once every rank has its sample; otherwise all of them time out."""
        below = (*self._tree.followers, *self._tree.children)
        furthest, leaves = standing.step, standing.leaves
        for rank in below:
            step, leaves_too, *_ = self._recv(rank)
            furthest, leaves = max(furthest, step), leaves and bool(leaves_too)
        if self._tree.parent is None:
            agreement = self._agree(furthest, leaves, standing)
        else:
            self._send(self._tree.parent, furthest, leaves)
            next_ns, all_leave, step, *notice = self._recv(self._tree.parent)
            agreement = Agreement(next_ns, bool(all_leave), step, tuple(notice))
        for rank in below:
            self._send(rank, agreement.next_ns, agreement.all_leave, agreement.step, *agreement.notice)
        return agreement

    def _agree(self, furthest: int, all_leave: bool, standing: Standing) -> Agreement:
        """Return an agreement, on the reference; a step that some rank has still to reach stays agreed."""
        next_ns = self._clock() + round(self._pause_s * NS_PER_S)
        self._pause_s = min(2 * self._pause_s, self._interval_s)
        if self.agreement is not None and self.agreement.step > furthest:
            return self.agreement._replace(next_ns=next_ns, all_leave=all_leave)
        lead = max(math.ceil(_LEAD_NS / standing.step_ns), _MIN_LEAD_STEPS) if standing.step_ns else 0
        return Agreement(next_ns, all_leave, furthest + lead if lead else 0, standing.notice)

    def _send(self, peer: int, *values: int) -> None:
        assert self._messages is not None, "a world of one sends nothing"
        self._messages.send(peer, values + (0,) * (NUM_VALUES - len(values)), self._left_s())

    def _recv(self, peer: int) -> tuple[int, ...]:
        assert self._messages is not None, "a world of one receives nothing"
        return self._messages.recv(peer, self._left_s())

    def _recv_sample(self, peer: int) -> ClockSample:
        return ClockSample(*self._recv(peer)[: len(ClockSample._fields)])

    def _left_s(self) -> float:
        remaining_s = (self._deadline_ns - self._clock()) / NS_PER_S
        if remaining_s <= 0:
            raise ClockSyncError(f"the clock synchronisation took longer than {self.timeout_s:g} s")
        return remaining_s
