"""One rank in the rounds of pairs: it meets its partner of the round, and measures latency and both rates with it.

All ranks of two hosts take part, the first with the first and so on, so that several processes and interfaces carry a
pair's data. What happens when in a round follows from its plan, on each host from when it has read it.
"""

from __future__ import annotations

import ipaddress
import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcpace.probe.pair_sockets import (
    Listener,
    answer,
    close_all,
    connect_to,
    half_round_trips,
    receive_stream,
    send_stream,
)

_STAGES = ("latency", "forward", "backward")


@dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """How long the stages of a round last, in seconds.

    Attributes:
        set_up_s: to make the connections.
        latency_s: for which messages go to and fro.
        pause_s: in which queues in switches run empty; those of the lab hold 50 ms.
        rate_s: for which each stream goes.
    """

    set_up_s: float = 0.05
    latency_s: float = 0.05
    pause_s: float = 0.06
    rate_s: float = 0.25


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """What happens in a round, the same for all ranks.

    Attributes:
        number: of the round.
        pairs: of hosts, by index.
        at_once: pairs that measure latency at the same time: hosts that share a machine would disturb each other.
        times: of its stages.
    """

    number: int
    pairs: tuple[tuple[int, int], ...]
    at_once: int
    times: RoundTimes

    @property
    def length_s(self) -> float:
        """How long a round takes."""
        return self.begin_s("backward", 0) + self.times.rate_s + self.times.pause_s

    def begin_s(self, stage: str, place: int) -> float:
        """Return when a stage of the pair at a place begins, in seconds from the begin of the round."""
        times = self.times
        if stage == "latency":
            return times.set_up_s + place // self.at_once * times.latency_s
        num_turns = math.ceil(len(self.pairs) / self.at_once)
        begin_s = times.set_up_s + num_turns * times.latency_s + times.pause_s
        return begin_s if stage == "forward" else begin_s + times.rate_s + times.pause_s

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RoundPlan:
        """Return what to_json made plain."""
        pairs = tuple((first, second) for first, second in content["pairs"])
        return cls(**{**content, "pairs": pairs, "times": RoundTimes(**content["times"])})


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What one rank found out in a round.

    Attributes:
        latency_ns: quantiles as `half_round_trips` returns them; empty where the other side measures.
        rate: of what this rank received, bytes per second; None if nothing came.
        problem: why something is missing; empty if all is there.
    """

    latency_ns: tuple[float, ...] = ()
    rate: float | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rank can be reached.

    Attributes:
        address: of its host.
        port: of its listener; 0 if it has none.
    """

    address: str
    port: int


class PairPlayer:
    """A rank that takes part in rounds.

    Args:
        rank: its number.
        ranks_of_host: ranks of each host, in the order of the hosts.
        hosts: names of the hosts.
        seats: of all ranks.
        listener: of this rank; None if it could not listen.
        interface: of this rank, for addresses that hold on one interface only.
        token: a secret of this probe.
        patience_s: how much longer than a round lasts another host may not answer.
    """

    def __init__(
        self,
        *,
        rank: int,
        ranks_of_host: Sequence[Sequence[int]],
        hosts: Sequence[str],
        seats: Sequence[Seat],
        listener: Listener | None,
        interface: str,
        token: str,
        patience_s: float,
    ) -> None:
        self._rank = rank
        self._ranks_of_host = ranks_of_host
        self._hosts = hosts
        self._seats = seats
        self._listener = listener
        self._interface = interface
        self._token = token
        self._patience_s = patience_s

    def limit_s(self, plan: RoundPlan) -> float:
        """Return after how long a rank has played a round, whatever its partner does."""
        return 2 * plan.length_s + self._patience_s

    def partner(self, plan: RoundPlan) -> tuple[int, bool, int] | None:
        """Return the rank that this one meets, whether this one is of the first host, and the place of the pair."""
        for place, (first, second) in enumerate(plan.pairs):
            for one, other in zip(self._ranks_of_host[first], self._ranks_of_host[second], strict=False):
                if self._rank in (one, other):
                    return one + other - self._rank, self._rank == one, place
        return None

    def play(self, plan: RoundPlan) -> Meeting | None:
        """Measure with the partner of a round; None where this rank rests."""
        found = self.partner(plan)
        if found is None:
            return None
        begin_s = time.monotonic()
        partner, is_first, place = found
        connections: dict[str, socket.socket] = {}
        try:
            for stage in _STAGES:
                connections[stage] = self._connected(plan, stage, partner, place, is_first)
        except OSError as error:
            close_all(list(connections.values()))
            return Meeting(problem=self._unreachable(partner, is_first, error))
        stages = _Stages(plan, place, begin_s, connections)
        try:
            latency_ns = stages.latency(is_first)
            if is_first:
                stages.send("forward")
                rate = stages.receive("backward")
            else:
                rate = stages.receive("forward")
                stages.send("backward")
        except OSError as error:
            return Meeting(problem=self._silent(partner, error))
        finally:
            close_all(list(connections.values()))
        if math.isnan(rate):
            return Meeting(latency_ns=latency_ns, problem=f"{self._name(partner)} sent nothing")
        return Meeting(latency_ns=latency_ns, rate=rate)

    def _connected(self, plan: RoundPlan, stage: str, partner: int, place: int, is_first: bool) -> socket.socket:
        pair_rank = self._rank if is_first else partner
        name = f"{plan.number} {pair_rank} {stage}"
        timeout_s = plan.length_s + self._patience_s
        if not is_first:
            if self._listener is None:
                raise ConnectionRefusedError("this rank has no socket to listen on")
            return self._listener.accept(name, timeout_s)
        seat = self._seats[partner]
        if not seat.port:
            raise ConnectionRefusedError("it has no socket to listen on")
        return connect_to(reachable(seat.address, self._interface), seat.port, name, self._token, timeout_s)

    def _unreachable(self, partner: int, is_first: bool, error: OSError) -> str:
        if not is_first and not isinstance(error, TimeoutError):
            return f"cannot wait for {self._name(partner)}: {error.strerror or error}"
        if not is_first:
            return f"{self._name(partner)} did not connect in time"
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return f"cannot connect to {self._name(partner)} at {self._seats[partner].address}: {reason}"

    def _silent(self, partner: int, error: OSError) -> str:
        if isinstance(error, TimeoutError | BlockingIOError):
            return f"{self._name(partner)} stopped answering"
        return f"{self._name(partner)} closed the connection ({error.strerror or error})"

    def _name(self, rank: int) -> str:
        return next(name for name, ranks in zip(self._hosts, self._ranks_of_host, strict=True) if rank in ranks)


@dataclass(frozen=True)
class _Stages:
    """The stages of a round on one rank, each at its time."""

    plan: RoundPlan
    place: int
    begin_s: float
    connections: Mapping[str, socket.socket]

    def latency(self, is_first: bool) -> tuple[float, ...]:
        with self.connections["latency"] as connection:
            if not is_first:
                answer(connection)
                return ()
            self._wait("latency")
            return half_round_trips(connection, self._at("latency") + self.plan.times.latency_s)

    def send(self, stage: str) -> None:
        with self.connections[stage] as connection:
            self._wait(stage)
            send_stream(connection, self.plan.length_s + self.plan.times.rate_s)

    def receive(self, stage: str) -> float:
        with self.connections[stage] as connection:
            return receive_stream(connection, self.plan.times.rate_s)

    def _at(self, stage: str) -> float:
        return self.begin_s + self.plan.begin_s(stage, self.place)

    def _wait(self, stage: str) -> None:
        time.sleep(max(self._at(stage) - time.monotonic(), 0.0))


def reachable(address: str, interface: str) -> str:
    """Return an address as this host has to write it: a link-local one with the interface."""
    parsed = ipaddress.ip_address(address)
    return f"{address}%{interface}" if parsed.version == 6 and parsed.is_link_local else address
