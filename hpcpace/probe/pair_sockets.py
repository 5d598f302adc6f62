"""What two hosts exchange over TCP: small messages to and fro, then a stream one way and a stream the other way.

Sockets of our own, each with a timeout, instead of a collective library: if one host dies or freezes, its partner
notices after that timeout, and no other pair does. Each connection begins with a secret of this probe.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Callable, Sequence

import numpy as np

from hpcpace.units import NS_PER_S, NS_PER_US

MESSAGE_BYTES = 8
_SEND_BYTES, _RECEIVE_BYTES = 1 << 20, 1 << 18
_WARM_UP_MESSAGES = 10
# Of the time of a stream: TCP finds its rate meanwhile, and the bucket of a shaper is used up.
_WARM_UP_SHARE = 0.2
_HELLO_BYTES = 64
_HELLO_TIMEOUT_S = 1.0
_BACKLOG = 128
# Closing drops what is still in the buffers: on a slow link that would go on for seconds.
_DROP_UNSENT = struct.pack("ii", 1, 0)

Clock = Callable[[], float]


class Listener:
    """Where other hosts connect to; connections may come in any order.

    Args:
        address: of this host.
    """

    def __init__(self, address: str) -> None:
        family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind)
        self._waiting: dict[str, socket.socket] = {}
        try:
            self._socket.bind(place)
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    def accept(self, hello: str, timeout_s: float) -> socket.socket:
        """Return the connection that begins with `hello`; others wait, or are closed where they say nothing of ours.

        Raises:
            TimeoutError: it did not come in time.
            OSError: the connection broke.
        """
        end_s = time.monotonic() + timeout_s
        while hello not in self._waiting:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            connection, _ = self._socket.accept()
            try:
                connection.settimeout(min(left_s, _HELLO_TIMEOUT_S))
                self._keep(_received(connection, _HELLO_BYTES).decode("ascii", "replace").rstrip(), connection)
            except OSError:  # of which a timeout is one
                connection.close()
        connection = self._waiting.pop(hello)
        _prepare(connection, timeout_s)
        return connection

    def _keep(self, hello: str, connection: socket.socket) -> None:
        previous = self._waiting.pop(hello, None)
        if previous is not None:
            previous.close()
        if len(self._waiting) >= _BACKLOG:
            self._waiting.pop(next(iter(self._waiting))).close()
        self._waiting[hello] = connection

    def close(self) -> None:
        """Stop listening."""
        for connection in (self._socket, *self._waiting.values()):
            connection.close()


def connect_to(address: str, port: int, hello: str, timeout_s: float) -> socket.socket:
    """Return a connection to a listener.

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
        connection.sendall(hello.ljust(_HELLO_BYTES).encode("ascii"))
    except OSError:
        connection.close()
        raise
    return connection


def half_round_trips(connection: socket.socket, end_s: float, clock: Clock = time.monotonic) -> tuple[float, ...]:
    """Send small messages to and fro until a point in time, and return least, median and 99 % of half a round trip, ns.

    Raises:
        OSError: the other side stopped answering.
    """
    _wait_in_the_kernel(connection)
    message, buffer = bytes(MESSAGE_BYTES), bytearray(MESSAGE_BYTES)
    send, receive, now_ns = connection.send, connection.recv_into, time.perf_counter_ns
    times_ns: list[int] = []
    while len(times_ns) <= _WARM_UP_MESSAGES or clock() < end_s:
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


def send_stream(connection: socket.socket, most_s: float, clock: Clock = time.monotonic) -> None:
    """Send as fast as the other side receives, until it closes.

    Args:
        connection: to the other side.
        most_s: time after which sending ends in any case.
        clock: monotonic, in seconds.

    Raises:
        OSError: the other side stopped receiving.
    """
    chunk, end_s = memoryview(bytes(_SEND_BYTES)), clock() + most_s
    try:
        while clock() < end_s:
            connection.send(chunk)
    except (ConnectionResetError, BrokenPipeError):
        return


def receive_stream(connection: socket.socket, length_s: float, clock: Clock = time.monotonic) -> float:
    """Receive for a time from the first data on, and return the rate without the first moments, bytes per second.

    Raises:
        OSError: the other side stopped sending.
    """
    buffer = memoryview(bytearray(_RECEIVE_BYTES))
    warm_s = end_s = math.inf
    begin_ns = last_ns = num_bytes = 0
    while received := connection.recv_into(buffer):
        now_s, now_ns = clock(), time.perf_counter_ns()
        if warm_s == math.inf:
            warm_s, end_s = now_s + _WARM_UP_SHARE * length_s, now_s + length_s
        if begin_ns:
            num_bytes, last_ns = num_bytes + received, now_ns
            if now_s >= end_s:
                break
        elif now_s >= warm_s:
            begin_ns = now_ns
    return num_bytes * NS_PER_S / (last_ns - begin_ns) if last_ns > begin_ns else math.nan


def close_all(connections: Sequence[socket.socket]) -> None:
    """Close connections at once, without sending what is left."""
    for connection in connections:
        connection.close()


def _prepare(connection: socket.socket, timeout_s: float) -> None:
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_UNSENT)


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    """Return exactly so many bytes.

    Raises:
        ConnectionResetError: the other side closed before.
        OSError: it stopped sending.
    """
    content = b""
    while len(content) < num_bytes:
        part = connection.recv(num_bytes - len(content))
        if not part:
            raise ConnectionResetError("closed by the other side")
        content += part
    return content
