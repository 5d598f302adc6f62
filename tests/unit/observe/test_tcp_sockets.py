"""Connections of this process, read without a socket being touched: real sockets, and what the kernel might answer."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hpcpace.observe.host import connections
from hpcpace.observe.host.connections import Counters, OwnConnections, parse_address, parse_tcp_info

INFO_BYTES = 220


@pytest.fixture(autouse=True)
def loopback_is_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_is_loopback", lambda address: False)
    monkeypatch.setattr(connections, "interface_addresses", lambda: {b"none": "eth0"})


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect(stack: ExitStack, family: socket.AddressFamily = socket.AF_INET) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection."""
    address = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((address, 0), family=family) as server:
        client = stack.enter_context(socket.create_connection(server.getsockname()[:2]))
        accepted = stack.enter_context(server.accept()[0])
    return client, accepted


@pytest.fixture
def before() -> set[tuple[str, str]]:
    """Return the connections that tests before have left open, as torch's RPC does."""
    return {*by_end(OwnConnections())}


def by_end(own: OwnConnections) -> dict[tuple[str, str], Counters]:
    return {(reading.ends.local, reading.ends.remote): reading.counters for reading in own.read()}


def name(one: socket.socket) -> str:
    return "{}:{}".format(*one.getsockname())


def test_both_ends_of_a_connection_count_what_it_carried(opened):
    client, server = connect(opened)
    client.sendall(b"x" * 5000)
    assert len(server.recv(5000, socket.MSG_WAITALL)) == 5000
    found = by_end(OwnConnections())
    sender, receiver = found[name(client), name(server)], found[name(server), name(client)]
    assert (sender.sent_bytes, receiver.received_bytes, receiver.sent_bytes) == (5000, 5000, 0)
    assert sender.least_rtt_ns > 0 and sender.segment_bytes > 0


def test_addresses_of_ipv6_are_in_brackets_and_mapped_ones_are_of_ipv4(opened):
    client, _ = connect(opened, socket.AF_INET6)
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening:
        mapped = opened.enter_context(socket.create_connection(("127.0.0.1", listening.getsockname()[1])))
        accepted = opened.enter_context(listening.accept()[0])
    found = by_end(OwnConnections())
    assert any(local == f"[::1]:{client.getsockname()[1]}" for local, _ in found)
    assert accepted.getpeername()[0] == "::ffff:127.0.0.1"
    assert (f"127.0.0.1:{accepted.getsockname()[1]}", name(mapped)) in found


def test_other_descriptors_are_no_connections(opened, before, tmp_path):
    opened.enter_context(socket.create_server(("127.0.0.1", 0)))
    left, right = socket.socketpair()
    opened.enter_context(left), opened.enter_context(right)
    datagram = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    datagram.connect(("127.0.0.1", 9))
    opened.enter_context((tmp_path / "file").open("w"))
    assert {*by_end(OwnConnections())} == before


@pytest.mark.parametrize("address", [b"\x7f\0\0\1", b"own "])
def test_connections_within_a_host_are_left_out(opened, monkeypatch, address):
    connect(opened)
    monkeypatch.setattr(connections, "_is_loopback", lambda found: found == address)
    monkeypatch.setattr(connections, "interface_addresses", lambda: {b"\x7f\0\0\1": "eth0"})
    assert by_end(OwnConnections()) == {}


def test_a_socket_that_connects_later_is_found_then(opened, before):
    own = OwnConnections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = opened.enter_context(socket.socket())
        assert {*by_end(own)} == before
        client.connect(server.getsockname())
        assert {*by_end(own)} - before == {(name(client), name(server))}


def test_a_descriptor_that_gets_another_socket_is_read_as_that_one(opened):
    client, _ = connect(opened)
    client.sendall(b"x" * 100)
    own, descriptor = OwnConnections(), client.fileno()
    before = {reading.inode: reading for reading in own.read()}
    client.close()
    other, _ = connect(opened)
    assert other.fileno() == descriptor
    inode = os.fstat(descriptor).st_ino
    (found,) = (reading for reading in own.read() if reading.inode == inode)
    assert inode not in before and found.counters.sent_bytes == 0
    assert found.ends.local == name(other)


@pytest.mark.parametrize("call", ["getsockopt", "getpeername"])
def test_what_was_read_of_a_descriptor_that_changed_hands_meanwhile_is_thrown_away(opened, monkeypatch, call):
    client, _ = connect(opened)
    other, _ = connect(opened)
    kept, swapped, inode = os.dup(client.fileno()), client.fileno(), os.fstat(client.fileno()).st_ino
    own_name, other_name = name(client), name(other)
    opened.callback(os.close, kept)
    own = OwnConnections()
    real: Callable[..., int] = getattr(own, f"_{call}")

    def swap(descriptor: int, *arguments: Any) -> int:
        if descriptor == swapped:
            os.dup2(other.fileno(), swapped)
        return real(descriptor, *arguments)

    monkeypatch.setattr(own, f"_{call}", swap)
    ends = {reading.inode: reading.ends for reading in own.read()}
    assert ends[inode].local == own_name
    assert ends[os.fstat(other.fileno()).st_ino].local == other_name


def test_a_connection_that_has_two_descriptors_is_read_once(opened, before):
    client, server = connect(opened)
    opened.callback(os.close, os.dup(client.fileno()))
    assert len(list(OwnConnections().read())) == 2 + len(before)
    assert server.fileno() > 0


def test_reading_opens_closes_and_changes_no_descriptor(opened):
    client, server = connect(opened)
    own = OwnConnections()
    before = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)}
    blocking, options = client.getblocking(), client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    for _ in range(3):
        list(own.read())
    after = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)}
    assert after == before
    assert (client.getblocking(), client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) == (blocking, options)
    client.close()
    assert server.recv(1) == b""  # nothing kept the connection open


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_descriptors_that_cannot_be_listed_are_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(OwnConnections(fds=tmp_path / "none").read())


def info(size: int = INFO_BYTES, **values: int) -> bytes:
    places = {
        "state": ("B", 0), "limited": ("B", 7), "mss": ("I", 16), "rtt": ("I", 68), "acked": ("Q", 120),
        "received": ("Q", 128), "unsent": ("I", 144), "least_rtt": ("I", 148), "rate": ("Q", 160), "busy": ("Q", 168),
        "receiver": ("Q", 176), "buffer": ("Q", 184), "marked": ("I", 196), "sent": ("Q", 200), "again": ("Q", 208),
        "twice": ("I", 216),
    }  # fmt: skip
    content = bytearray(max(size, INFO_BYTES))
    for name, value in {"state": 1, **values}.items():
        kind, place = places[name]
        struct.pack_into("=" + kind, content, place, value)
    return bytes(content[:size])


def padded(content: bytes) -> bytes:
    return content.ljust(INFO_BYTES, b"\0")


def test_every_field_is_where_linux_has_it():
    content = info(
        limited=1, mss=1448, rtt=32_800, acked=3, received=4, unsent=5, least_rtt=210, rate=6, busy=7, receiver=8,
        buffer=9, marked=10, sent=11, again=12, twice=13,
    )  # fmt: skip
    expected = Counters(
        sent_bytes=11, acked_bytes=3, received_bytes=4, retransmitted_bytes=12, busy_ns=7_000,
        receiver_limited_ns=8_000, sender_limited_ns=9_000, rtt_ns=32_800_000, least_rtt_ns=210_000,
        delivery_bytes_per_s=6, unsent_bytes=5, marked_packets=10, segment_bytes=1448, flags=1,
        duplicate_segments=13,
    )  # fmt: skip
    assert parse_tcp_info(padded(content)) == expected
    assert parse_tcp_info(padded(content + bytes(40))) == expected


@pytest.mark.parametrize(
    ("size", "lacks"),
    [
        (216, {"duplicate_segments"}),
        (200, {"sent_bytes", "retransmitted_bytes"}),
        (160, {"sent_bytes", "busy_ns", "delivery_bytes_per_s"}),
        (104, {"sent_bytes", "busy_ns", "acked_bytes", "received_bytes", "unsent_bytes", "least_rtt_ns"}),
    ],
)
def test_a_shorter_structure_of_an_older_kernel_gives_what_it_has(size, lacks):
    content = info(
        size, rtt=1, acked=3, received=4, unsent=5, least_rtt=6, rate=7, busy=8, sent=9, again=9, marked=1, twice=2
    )
    found = parse_tcp_info(padded(content))
    assert found is not None and found.rtt_ns == 1_000
    assert all(getattr(found, name) == 0 for name in lacks)


@pytest.mark.parametrize("state", [0, 2, 7, 10])
def test_sockets_without_a_connection_give_nothing(state):
    assert parse_tcp_info(padded(info(state=state))) is None
    assert parse_tcp_info(padded(b"")) is None


def test_a_least_round_trip_that_was_never_measured_is_zero():
    found = parse_tcp_info(padded(info(least_rtt=0xFFFFFFFF)))
    assert found is not None and found.least_rtt_ns == 0


@pytest.mark.parametrize(
    "content", [b"", b"\2", struct.pack("=H", socket.AF_INET) + b"\0\0", struct.pack("=H", socket.AF_UNIX) + bytes(30)]
)
def test_what_is_no_address_of_ip_is_none(content):
    assert parse_address(content) is None


def test_interfaces_are_those_of_the_namespace(monkeypatch):
    monkeypatch.undo()
    assert connections.interface_addresses().get(b"\x7f\0\0\1") == "lo"
    assert Path("/proc/self/net/dev").exists()
