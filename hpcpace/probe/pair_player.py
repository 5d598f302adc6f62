"""One rank in the rounds of pairs: it meets its partner of the round, and measures latency and both rates with it.

All ranks of two hosts take part, the first with the first and so on, so that several processes and interfaces carry a
pair's data. What happens when in a round follows from its plan, on each host from when it has read it. Sockets of our
own, each with a timeout, instead of a collective library: if one host dies or freezes, its partner notices after that
timeout, and no other pair does. Each connection begins by proving that it knows a secret of this probe.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import ipaddress
import math
import selectors
import socket
import struct
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, NS_PER_US

MESSAGE_BYTES = 8
_SEND_BYTES, _RECEIVE_BYTES = 1 << 20, 1 << 18
_WARM_UP_MESSAGES = 10
# Of the time of a stream: TCP finds its rate meanwhile, and the bucket of a shaper is used up.
_WARM_UP_SHARE = 0.2
_NAME_BYTES = 32
_HELLO_BYTES = _NAME_BYTES + 32  # of SHA-256
HELLO_TIMEOUT_S = 3.0
"""How long a connection may take to say who it is: TCP has sent it again twice by then."""
MAX_UNKNOWN = 256
"""Connections that have not said yet who they are. A process may often open 1,024 files, and torch has some of them."""
_MAX_WAITING = 128
# Who connects while a pair is measured waits in the kernel, which lowers this to net.core.somaxconn.
_BACKLOG = 4096
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# Closing drops what is still in the buffers: on a slow link that would go on for seconds.
_DROP_UNSENT = struct.pack("ii", 1, 0)


class Listener:
    """Where other hosts connect to; connections may come in any order, and before they are waited for.

    Anybody may connect. All connections are read at once, so nobody can hold up a partner by saying nothing.

    Args:
        address: of this host.
        secret: of this probe; see `hello`.
    """

    def __init__(self, address: str, secret: str) -> None:
        family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._secret = secret
        self._unknown: dict[socket.socket, _Unknown] = {}  # the oldest one first
        self._waiting: dict[str, socket.socket] = {}
        self._accepted: set[str] = set()
        with ExitStack() as failed:
            self._socket = failed.enter_context(socket.socket(family, kind))
            self._socket.bind(place)
            self._socket.listen(_BACKLOG)
            self._socket.setblocking(False)
            self._selector = failed.enter_context(selectors.DefaultSelector())
            self._selector.register(self._socket, selectors.EVENT_READ)
            failed.pop_all()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    def accept(self, name: str, timeout_s: float) -> socket.socket:
        """Return the connection whose hello has this name and the secret; those of other names wait.

        Raises:
            TimeoutError: it did not come in time.
            OSError: it cannot be accepted.
        """
        end_s = time.monotonic() + timeout_s
        while name not in self._waiting:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            for key, _ in self._selector.select(min(left_s, HELLO_TIMEOUT_S)):
                if key.fileobj is self._socket:
                    self._take_one()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._unknown:
                    self._hear(key.fileobj)
            now_s = time.monotonic()
            while self._unknown and next(iter(self._unknown.values())).end_s <= now_s:
                self._drop_oldest()
        self._accepted.add(name)
        connection = self._waiting.pop(name)
        _prepare(connection, timeout_s)
        return connection

    def _take_one(self) -> None:
        """Take one new connection and what it has said so far.

        Raises:
            OSError: this process has no file left, although all strangers have been dropped.
        """
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _NO_FILES:
                if not self._unknown:
                    raise
                self._drop_oldest()
            return  # else the other side has left meanwhile
        connection.setblocking(False)
        self._unknown[connection] = _Unknown(time.monotonic() + HELLO_TIMEOUT_S)
        self._selector.register(connection, selectors.EVENT_READ)
        self._hear(connection)
        if len(self._unknown) > MAX_UNKNOWN:
            self._drop_oldest()

    def _hear(self, connection: socket.socket) -> None:
        """Read on in the hello of a connection, and close it where that is not one of ours."""
        said = self._unknown[connection].said
        try:
            part = connection.recv(_HELLO_BYTES - len(said))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        said += part
        if part and len(said) < _HELLO_BYTES:
            return
        del self._unknown[connection]
        self._selector.unregister(connection)
        name = bytes(said[:_NAME_BYTES]).decode("ascii", "replace").rstrip()
        is_ours = hmac.compare_digest(said, hello(name, self._secret)) if part else False
        # The first one counts: who has only seen the hello of another one comes later.
        if not is_ours or name in self._waiting or name in self._accepted:
            connection.close()
            return
        if len(self._waiting) >= _MAX_WAITING:
            self._waiting.pop(next(iter(self._waiting))).close()
        self._waiting[name] = connection

    def _drop_oldest(self) -> None:
        connection = next(iter(self._unknown))
        del self._unknown[connection]
        self._selector.unregister(connection)
        connection.close()

    def close(self) -> None:
        """Stop listening."""
        self._selector.close()
        for connection in (self._socket, *self._unknown, *self._waiting.values()):
            connection.close()


@dataclass
class _Unknown:
    """A connection that has not yet said a whole hello: until when it may, and what it has said."""

    end_s: float
    said: bytearray = field(default_factory=bytearray)


def hello(name: str, secret: str) -> bytes:
    """Return how a connection begins: its name, and what only somebody who knows the secret can write behind it.

    A hello shows neither the secret nor the hello of another name.
    """
    head = name.ljust(_NAME_BYTES).encode("ascii", "replace")[:_NAME_BYTES]
    return head + hmac.digest(secret.encode(), head, "sha256")


def connect_to(address: str, port: int, name: str, secret: str, timeout_s: float) -> socket.socket:
    """Return a connection to a listener, which accepts it by its name.

    Raises:
        TimeoutError: nothing answered.
        OSError: it cannot be reached.
    """
    # Not create_connection: it drops the scope of a link-local address.
    family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind)
    try:
        _prepare(connection, timeout_s)
        connection.connect(place)
        connection.sendall(hello(name, secret))
    except OSError:
        connection.close()
        raise
    return connection


def half_round_trips(connection: socket.socket, end_s: float) -> tuple[float, ...]:
    """Send small messages to and fro until a point in time, and return least, median and 99 % of half a round trip, ns.

    Raises:
        OSError: the other side stopped answering.
    """
    _wait_in_the_kernel(connection)
    message, buffer = bytes(MESSAGE_BYTES), bytearray(MESSAGE_BYTES)
    send, receive, now_ns = connection.send, connection.recv_into, time.perf_counter_ns
    times_ns: list[int] = []
    while len(times_ns) <= _WARM_UP_MESSAGES or time.monotonic() < end_s:
        begin_ns = now_ns()
        send(message)
        num_bytes = receive(buffer)
        times_ns.append(now_ns() - begin_ns)
        if num_bytes < MESSAGE_BYTES:
            raise ConnectionResetError("closed by the other side")
    return tuple(float(value) for value in np.quantile(times_ns[_WARM_UP_MESSAGES:], (0.0, 0.5, 0.99)) / 2)


def answer(connection: socket.socket) -> None:
    """Send each small message back until the other side closes.

    Raises:
        OSError: the other side stopped sending.
    """
    _wait_in_the_kernel(connection)
    buffer = bytearray(MESSAGE_BYTES)
    try:
        while connection.recv_into(buffer):
            connection.send(buffer)
    except (ConnectionResetError, BrokenPipeError):
        return


def _wait_in_the_kernel(connection: socket.socket) -> None:
    """Let the kernel keep the timeout of a connection: Python would poll before each call, which costs microseconds.

    A timeout is a BlockingIOError from then on.
    """
    timeout_s = connection.gettimeout() or 0.0
    connection.settimeout(None)
    seconds = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * NS_PER_S / NS_PER_US))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, seconds)


def send_stream(connection: socket.socket, most_s: float) -> None:
    """Send as fast as the other side receives, until it closes.

    Args:
        connection: to the other side.
        most_s: time after which sending ends in any case.

    Raises:
        OSError: the other side stopped receiving.
    """
    chunk, end_s = memoryview(bytes(_SEND_BYTES)), time.monotonic() + most_s
    try:
        while time.monotonic() < end_s:
            connection.send(chunk)
    except (ConnectionResetError, BrokenPipeError):
        return


def receive_stream(connection: socket.socket, length_s: float) -> float:
    """Receive for a time from the first data on, and return the rate without the first moments, bytes per second.

    What waits in the socket came before it is read, as where this process had no core.

    Raises:
        OSError: the other side stopped sending.
    """
    buffer = memoryview(bytearray(_RECEIVE_BYTES))
    warm_s = end_s = math.inf
    begin_ns = last_ns = num_bytes = 0
    while received := connection.recv_into(buffer):
        now_s, now_ns = time.monotonic(), time.perf_counter_ns()
        if warm_s == math.inf:
            warm_s, end_s = now_s + _WARM_UP_SHARE * length_s, now_s + length_s
        if begin_ns:
            num_bytes, last_ns = num_bytes + received, now_ns
            if now_s >= end_s:
                num_bytes += _waiting_bytes(connection)
                break
        elif now_s >= warm_s:
            begin_ns, num_bytes = now_ns, -_waiting_bytes(connection)
    return num_bytes * NS_PER_S / (last_ns - begin_ns) if last_ns > begin_ns and num_bytes > 0 else math.nan


def _waiting_bytes(connection: socket.socket) -> int:
    return int.from_bytes(fcntl.ioctl(connection, termios.FIONREAD, bytes(4)), sys.byteorder)


def _prepare(connection: socket.socket, timeout_s: float) -> None:
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_UNSENT)


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


@dataclass(frozen=True, kw_only=True)
class PairPlayer:
    """A rank that takes part in rounds.

    Attributes:
        rank: its number.
        ranks_of_host: ranks of each host, in the order of the hosts.
        hosts: names of the hosts.
        seats: of all ranks.
        listener: of this rank; None if it could not listen.
        interface: of this rank, for addresses that hold on one interface only.
        token: a secret of this probe.
        patience_s: how much longer than a round lasts another host may not answer.
    """

    rank: int
    ranks_of_host: Sequence[Sequence[int]]
    hosts: Sequence[str]
    seats: Sequence[Seat]
    listener: Listener | None
    interface: str
    token: str
    patience_s: float

    def limit_s(self, plan: RoundPlan) -> float:
        """Return after how long a rank has played a round, whatever its partner does."""
        return 2 * plan.length_s + self.patience_s

    def partner(self, plan: RoundPlan) -> tuple[int, bool, int] | None:
        """Return the rank that this one meets, whether this one is of the first host, and the place of the pair."""
        for place, (first, second) in enumerate(plan.pairs):
            for one, other in zip(self.ranks_of_host[first], self.ranks_of_host[second], strict=False):
                if self.rank in (one, other):
                    return one + other - self.rank, self.rank == one, place
        return None

    def play(self, plan: RoundPlan) -> Meeting | None:
        """Measure with the partner of a round; None where this rank rests."""
        found = self.partner(plan)
        if found is None:
            return None
        begin_s = time.monotonic()
        partner, is_first, place = found
        with ExitStack() as held:
            connections: dict[str, socket.socket] = {}
            try:
                for stage in _STAGES:
                    connections[stage] = self._connected(plan, stage, partner, place, is_first)
                    held.enter_context(connections[stage])
            except OSError as error:
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
        if math.isnan(rate):
            return Meeting(latency_ns=latency_ns, problem=f"{self._name(partner)} sent nothing")
        return Meeting(latency_ns=latency_ns, rate=rate)

    def _connected(self, plan: RoundPlan, stage: str, partner: int, place: int, is_first: bool) -> socket.socket:
        pair_rank = self.rank if is_first else partner
        name = f"{plan.number} {pair_rank} {stage}"
        timeout_s = plan.length_s + self.patience_s
        if not is_first:
            if self.listener is None:
                raise ConnectionRefusedError("this rank has no socket to listen on")
            return self.listener.accept(name, timeout_s)
        seat = self.seats[partner]
        if not seat.port:
            raise ConnectionRefusedError("it has no socket to listen on")
        return connect_to(reachable(seat.address, self.interface), seat.port, name, self.token, timeout_s)

    def _unreachable(self, partner: int, is_first: bool, error: OSError) -> str:
        if not is_first and not isinstance(error, TimeoutError):
            return f"cannot wait for {self._name(partner)}: {error.strerror or error}"
        if not is_first:
            return f"{self._name(partner)} did not connect in time"
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return f"cannot connect to {self._name(partner)} at {self.seats[partner].address}: {reason}"

    def _silent(self, partner: int, error: OSError) -> str:
        if isinstance(error, TimeoutError | BlockingIOError):
            return f"{self._name(partner)} stopped answering"
        return f"{self._name(partner)} closed the connection ({error.strerror or error})"

    def _name(self, rank: int) -> str:
        return next(name for name, ranks in zip(self.hosts, self.ranks_of_host, strict=True) if rank in ranks)


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
