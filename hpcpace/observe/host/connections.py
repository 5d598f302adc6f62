"""What this process's TCP connections to other hosts carry, without touching a socket.

A process may ask the kernel about its own sockets: `getsockopt(TCP_INFO)` needs no rights and changes nothing. The
descriptor is used by its number alone. It is never duplicated, which would keep a connection alive that the job closes,
and no Python socket is made of it, which would close it in the end. Since the job may close it at any moment, and get
the same number for another socket, its inode is looked at after each reading: what was read of another socket is thrown
away.

Rows are bounded, however many sockets a job opens: the connections with the most bytes have rows of their own, what the
others carry is added up, and of more than a few connections each has a row every few seconds only. Counters are
cumulative, so that nothing is lost by that.
"""

from __future__ import annotations

import ctypes
import math
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from hpcpace.core.text import NS_PER_S, NS_PER_US
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import OTHER_CONNECTIONS

_SO_DOMAIN, _SO_PROTOCOL = 39, 38
# struct tcp_info of linux/tcp.h up to `tcpi_dsack_dups` (4.19); older kernels return less of it, newer ones more.
# state, delivery_rate_app_limited, snd_mss, rtt, bytes_acked, bytes_received, notsent_bytes, min_rtt, delivery_rate,
# busy_time, rwnd_limited, sndbuf_limited, delivered_ce, bytes_sent, bytes_retrans, dsack_dups
_TCP_INFO = struct.Struct("=B6xB8xI48xI48xQQ8xII8xQQQQ4xIQQI")
_MAX_BYTES = 128
_ESTABLISHED, _CLOSE_WAIT = 1, 8
_UNKNOWN_US = 0xFFFFFFFF
_MAPPED = bytes(10) + b"\xff\xff"
_FDS = Path("/proc/self/fd")


class Ends(NamedTuple):
    """The addresses of a connection, with ports, and the interface that has the local one."""

    local: str
    remote: str
    interface: str


class Counters(NamedTuple):
    """What the kernel has counted of a connection, the columns of a trace's `flows` behind the connection's number."""

    sent_bytes: int = 0
    acked_bytes: int = 0
    received_bytes: int = 0
    retransmitted_bytes: int = 0
    busy_ns: int = 0
    receiver_limited_ns: int = 0
    sender_limited_ns: int = 0
    rtt_ns: int = 0
    least_rtt_ns: int = 0
    delivery_bytes_per_s: int = 0
    unsent_bytes: int = 0
    marked_packets: int = 0
    segment_bytes: int = 0
    flags: int = 0
    duplicate_segments: int = 0


class Reading(NamedTuple):
    """A connection as it was at some time; `inode` is the socket's identity as long as it is open."""

    inode: int
    ends: Ends
    time_ns: int
    counters: Counters


class _Socket(NamedTuple):
    """A socket; without ends it is no connection to another host and never will be one."""

    inode: int
    ends: Ends | None


def parse_tcp_info(content: Any) -> Counters | None:
    """Return what a buffer with a `struct tcp_info` says, padded with zeros; None if there is no connection."""
    (
        state, limited, segment_bytes, rtt_us, acked_bytes, received_bytes, unsent_bytes, least_rtt_us, rate, busy_us,
        receiver_limited_us, sender_limited_us, marked_packets, sent_bytes, retransmitted_bytes, duplicate_segments,
    ) = _TCP_INFO.unpack_from(content)  # fmt: skip
    if state not in (_ESTABLISHED, _CLOSE_WAIT):
        return None
    return Counters(
        sent_bytes,
        acked_bytes,
        received_bytes,
        retransmitted_bytes,
        busy_us * NS_PER_US,
        receiver_limited_us * NS_PER_US,
        sender_limited_us * NS_PER_US,
        rtt_us * NS_PER_US,
        0 if least_rtt_us == _UNKNOWN_US else least_rtt_us * NS_PER_US,
        rate,
        unsent_bytes,
        marked_packets,
        segment_bytes,
        limited & 1 if sys.byteorder == "little" else limited >> 7,
        duplicate_segments,
    )


class OwnConnections:
    """Finds the process's TCP connections to other hosts and reads their counters.

    Connections by a loopback address, or to an address of this host, are none to another host: in containers and in the
    lab a host is a network namespace, with the addresses that the process sees.

    Args:
        fds: the folder that lists the descriptors of the process.
    """

    def __init__(self, *, fds: Path = _FDS) -> None:
        self._fds = fds
        self._interfaces: dict[bytes, str] = {}
        self._sockets: dict[int, _Socket] = {}
        # Foreign functions give up Python's global lock while they run: a socket may be locked for as long as the job
        # copies data into it.
        library = ctypes.CDLL(None)
        self._getsockopt, self._getpeername = library.getsockopt, library.getpeername
        self._getsockname = library.getsockname
        self._content = ctypes.create_string_buffer(_MAX_BYTES)
        # Of a kernel whose structure is shorter, the rest stays zero.
        self._info = ctypes.create_string_buffer(_TCP_INFO.size)
        self._size = ctypes.c_uint32()
        self._size_at = ctypes.byref(self._size)

    def read(self) -> Iterator[Reading]:
        """Yield a reading of each connection.

        Raises:
            OSError: the descriptors of this process cannot be listed.
        """
        before, self._sockets = self._sockets, {}
        seen = set[int]()
        for name in os.listdir(self._fds):
            descriptor = int(name)
            known = before.get(descriptor)
            reading = None if known is None else self._reading(descriptor, known)
            inode = _socket_inode(descriptor)
            if inode is None or inode in seen:
                continue
            if known is None or known.inode != inode:
                known = _Socket(inode, self._ends_of(descriptor))
                reading = self._reading(descriptor, known)
                # One of TCP without a peer may have one later.
                is_open = known.ends is None and self._number(descriptor, _SO_PROTOCOL) == socket.IPPROTO_TCP
                may_connect = is_open and self._name(self._getpeername, descriptor) is None
                if may_connect or _socket_inode(descriptor) != inode:
                    continue
            self._sockets[descriptor] = known
            if reading is not None:
                seen.add(inode)
                yield reading

    def _reading(self, descriptor: int, known: _Socket) -> Reading | None:
        """Return a reading of what is behind a descriptor now, None if it is no connection to another host."""
        if known.ends is None:
            return None
        self._size.value = _TCP_INFO.size
        if self._getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, self._info, self._size_at):
            return None
        counters = parse_tcp_info(self._info)
        return None if counters is None else Reading(known.inode, known.ends, time.monotonic_ns(), counters)

    def _ends_of(self, descriptor: int) -> Ends | None:
        """Return the ends of a connection to another host, None if the descriptor has none."""
        if self._number(descriptor, _SO_DOMAIN) not in (socket.AF_INET, socket.AF_INET6):
            return None
        if self._number(descriptor, _SO_PROTOCOL) != socket.IPPROTO_TCP:
            return None
        local, remote = self._name(self._getsockname, descriptor), self._name(self._getpeername, descriptor)
        if local is None or remote is None:
            return None
        if local[0] not in self._interfaces:
            self._interfaces = interface_addresses()
        if remote[0] in self._interfaces or _is_loopback(remote[0]):
            return None
        return Ends(_text(*local), _text(*remote), self._interfaces.get(local[0], ""))

    def _number(self, descriptor: int, option: int) -> int:
        self._size.value = _MAX_BYTES
        if self._getsockopt(descriptor, socket.SOL_SOCKET, option, self._content, self._size_at):
            return 0
        return int.from_bytes(self._content.raw[: self._size.value][:4], sys.byteorder)

    def _name(self, call: Callable[..., int], descriptor: int) -> tuple[bytes, int] | None:
        self._size.value = _MAX_BYTES
        if call(descriptor, self._content, self._size_at):
            return None
        return parse_address(self._content.raw[: self._size.value])


def parse_address(content: bytes) -> tuple[bytes, int] | None:
    """Return address (4 or 16 bytes) and port of a `sockaddr`; an IPv4 address mapped into IPv6 is one of IPv4."""
    family = int.from_bytes(content[:2], sys.byteorder)
    port = int.from_bytes(content[2:4], "big")
    if family == socket.AF_INET and len(content) >= 8:
        return content[4:8], port
    if family == socket.AF_INET6 and len(content) >= 24:
        return _unmapped(content[8:24]), port
    return None


def interface_addresses() -> dict[bytes, str]:
    """Return the interface of each IP address of this host; none if the kernel does not say."""
    import psutil  # only where there is a connection

    found = {}
    with suppress(OSError):
        for interface, addresses in psutil.net_if_addrs().items():
            for address in addresses:
                if address.family in (socket.AF_INET, socket.AF_INET6):
                    packed = socket.inet_pton(address.family, address.address.partition("%")[0])
                    found[_unmapped(packed)] = interface
    return found


def _socket_inode(descriptor: int) -> int | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None


def _unmapped(address: bytes) -> bytes:
    return address[12:] if len(address) == 16 and address.startswith(_MAPPED) else address


def _is_loopback(address: bytes) -> bool:
    return address[0] == 127 if len(address) == 4 else address == bytes(15) + b"\x01"


def _text(address: bytes, port: int) -> str:
    if len(address) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, address)}:{port}"
    return f"[{socket.inet_ntop(socket.AF_INET6, address)}]:{port}"


_ROWS_PER_S, _READINGS_PER_S = 4, 16
_MAX_NUMBERS = 4096
"""Connections that get rows in a run: a program that opens new ones all the time must not fill the trace."""
_CUMULATIVE = slice(7)
_ADDED = ("sent_bytes", "acked_bytes", "received_bytes", "retransmitted_bytes", "busy_ns", "receiver_limited_ns",
          "sender_limited_ns", "marked_packets", "duplicate_segments")  # fmt: skip
_UNKNOWN_RANK = -1
_SIZE = attrgetter("size_bytes")
_ZERO = Counters()


@dataclass(slots=True)
class _Known:
    """A connection that is open.

    Attributes:
        number: under which it has rows, None if it has none.
        time_ns, counters: of the last reading.
        is_written: whether that reading has a row.
    """

    number: int | None
    time_ns: int
    counters: Counters
    ends: Ends | None = None
    is_written: bool = False

    @property
    def size_bytes(self) -> int:
        """What it has carried in both directions."""
        return self.counters.acked_bytes + self.counters.received_bytes


class FlowSampler:
    """Records connections and their flows.

    Args:
        recorder: takes the rows.
        read: yields a reading of each connection that is open.
        most: connections that have rows of their own at a time.
        clock: the host's clock.
    """

    def __init__(
        self,
        recorder: Recorder,
        read: Callable[[], Iterable[Reading]],
        *,
        most: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._recorder, self._read, self._most, self._clock = recorder, read, most, clock
        self._known: dict[int, _Known] = {}
        self._num_listed = self._next_number = 0
        self._sum = _ZERO
        self._others = _Known(OTHER_CONNECTIONS, 0, _ZERO)
        self._sampled_ns: int | None = None
        self._due_ns = 0

    def sample(self, *, is_last: bool = False) -> None:
        """Record what has changed, if it is time to, or for the last time."""
        begin_ns = self._clock()
        if begin_ns < self._due_ns and not is_last:
            return
        if self._sampled_ns is None:
            self._others.time_ns = begin_ns
        readings = list(self._read())
        before, self._known = self._known, {}
        for reading in readings:
            known = before.get(reading.inode)
            if known is None and self._sampled_ns is None:
                known = _Known(None, reading.time_ns, reading.counters, reading.ends)
            # At the last sample, all counters of a connection that is seen for the first time were zero.
            self._known[reading.inode] = known or _Known(None, self._sampled_ns or 0, _ZERO, reading.ends)
        self._num_listed = sum(known.number is not None for known in self._known.values())
        self._list_new()
        for reading in readings:
            self._take(self._known[reading.inode], reading)
        num_written = sum(known.is_written for known in self._known.values())
        self._record(self._others, begin_ns, self._sum)
        self._sampled_ns = begin_ns
        interval_s = max(1, math.ceil(num_written / _ROWS_PER_S), math.ceil(len(self._known) / _READINGS_PER_S))
        # Half a second early is in time: the thread that calls does so about once a second.
        self._due_ns = begin_ns + interval_s * NS_PER_S - NS_PER_S // 2

    def _list_new(self) -> None:
        """Give numbers to connections without: while there is room, and then in place of others with half the bytes."""
        unlisted = sorted((known for known in self._known.values() if known.number is None), key=_SIZE, reverse=True)
        listed: list[_Known] = []
        if len(unlisted) > self._most - self._num_listed:
            listed = sorted((known for known in self._known.values() if known.number is not None), key=_SIZE)
        for known in unlisted:
            if self._next_number >= _MAX_NUMBERS:
                return
            if self._num_listed >= self._most:
                if not listed or listed[0].size_bytes * 2 >= known.size_bytes:
                    return
                listed.pop(0).number = None
                self._num_listed -= 1
            self._list(known)

    def _list(self, known: _Known) -> None:
        assert known.ends is not None
        known.number, known.is_written = self._next_number, False
        self._next_number += 1
        self._num_listed += 1
        local, remote, interface = (text.encode() for text in known.ends)
        self._recorder.add_connection(known.number, _UNKNOWN_RANK, b"", local, remote, interface)

    def _take(self, known: _Known, reading: Reading) -> None:
        if known.number is None:
            before, after = known.counters, reading.counters
            grown = {name: max(getattr(after, name) - getattr(before, name), 0) for name in _ADDED}
            self._sum = self._sum._replace(**{name: getattr(self._sum, name) + more for name, more in grown.items()})
            known.time_ns, known.counters = reading.time_ns, reading.counters
        else:
            self._record(known, reading.time_ns, reading.counters)

    def _record(self, known: _Known, time_ns: int, counters: Counters) -> None:
        """Write a row if anything was carried, behind one of when that had not begun."""
        is_changed = counters[_CUMULATIVE] != known.counters[_CUMULATIVE]
        if is_changed:
            if not known.is_written:
                self._recorder.add_flow(known.time_ns, known.number, *known.counters)
            self._recorder.add_flow(time_ns, known.number, *counters)
        known.time_ns, known.counters, known.is_written = time_ns, counters, is_changed
