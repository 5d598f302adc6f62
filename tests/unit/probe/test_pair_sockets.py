"""Whom a host of a probe takes for its partner, whatever others do at its port."""

from __future__ import annotations

import os
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace

import pytest

from hpcpace.core.text import NS_PER_S
from hpcpace.probe import pair_player
from hpcpace.probe.pair_player import MAX_UNKNOWN, Listener, connect_to, hello, receive_stream

SECRET, NAME = "secret", "1 0 latency"
TIMEOUT_S = 5.0


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    with closing(Listener(request.param, SECRET)) as listener:
        yield listener


@pytest.fixture
def strangers() -> Iterator[ExitStack]:
    """Close the connections of strangers at the end."""
    with ExitStack() as stack:
        yield stack


def stranger_at(listener: Listener, strangers: ExitStack) -> socket.socket:
    place = listener._socket.getsockname()
    stranger = strangers.enter_context(socket.create_connection(place[:2], timeout=TIMEOUT_S))
    stranger.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stranger


def partner_of(listener: Listener, name: str = NAME, secret: str = SECRET) -> socket.socket:
    return connect_to(listener._socket.getsockname()[0], listener.port, name, secret, TIMEOUT_S)


def check_that_the_partner_is_accepted(listener: Listener) -> None:
    with closing(partner_of(listener)) as partner, closing(listener.accept(NAME, TIMEOUT_S)) as accepted:
        assert accepted.getpeername()[:2] == partner.getsockname()[:2]


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"nothing of ours",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        hello(NAME, SECRET)[:40],
        hello(NAME, SECRET)[:-1] + b"\0",
        hello("1 0 forward", SECRET)[:32] + hello(NAME, SECRET)[32:],
        hello(NAME, "another secret"),
        b"\0" * (1 << 21),
    ],
    ids=["nothing", "words", "http", "bytes", "a prefix", "a wrong end", "another name", "another secret", "megabytes"],
)
def test_a_connection_without_the_secret_is_no_partner(listener: Listener, strangers: ExitStack, said: bytes) -> None:
    stranger = stranger_at(listener, strangers)
    stranger.setblocking(False)
    stranger.send(said)  # of megabytes what the kernel takes
    stranger.shutdown(socket.SHUT_WR)
    check_that_the_partner_is_accepted(listener)


@pytest.mark.parametrize("num_silent", [20, 2 * MAX_UNKNOWN])
def test_silent_connections_do_not_hold_up_the_partner(strangers: ExitStack, num_silent: int) -> None:
    with closing(Listener("127.0.0.1", SECRET)) as listener:
        for _ in range(num_silent):
            stranger_at(listener, strangers)
        check_that_the_partner_is_accepted(listener)
        assert len(listener._unknown) <= MAX_UNKNOWN


def test_who_says_its_hello_in_pieces_is_heard(listener: Listener, strangers: ExitStack) -> None:
    first, second = partner_of(listener, "1 0 forward"), stranger_at(listener, strangers)
    said = hello(NAME, SECRET)
    second.send(said[:20])
    with closing(first), closing(listener.accept("1 0 forward", TIMEOUT_S)):
        second.send(said[20:])
        with closing(listener.accept(NAME, TIMEOUT_S)) as accepted:
            assert accepted.getpeername()[:2] == second.getsockname()[:2]


def test_who_does_not_say_its_hello_in_time_is_dropped(
    listener: Listener, strangers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_player, "HELLO_TIMEOUT_S", 0.01)
    stranger = stranger_at(listener, strangers)
    stranger.send(b"1")
    with pytest.raises(TimeoutError):
        listener.accept(NAME, 0.05)
    assert is_closed(stranger)


def test_a_stranger_that_resets_its_connection_is_dropped(listener: Listener, strangers: ExitStack) -> None:
    stranger = stranger_at(listener, strangers)
    stranger.send(b"1")
    with closing(partner_of(listener, "1 0 forward")), closing(listener.accept("1 0 forward", TIMEOUT_S)):
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()
        check_that_the_partner_is_accepted(listener)


def test_a_connection_that_comes_before_it_is_waited_for_is_kept(listener: Listener, strangers: ExitStack) -> None:
    with closing(partner_of(listener)) as early:
        for _ in range(3):
            stranger_at(listener, strangers)
        with closing(partner_of(listener, "1 0 forward")), closing(listener.accept("1 0 forward", TIMEOUT_S)):
            pass
        with closing(listener.accept(NAME, TIMEOUT_S)) as accepted:
            assert accepted.getpeername()[:2] == early.getsockname()[:2]


@pytest.mark.parametrize("is_accepted", [False, True])
def test_who_repeats_the_hello_of_a_partner_is_closed(
    listener: Listener, strangers: ExitStack, is_accepted: bool
) -> None:
    with ExitStack() as ours:
        partner = ours.enter_context(closing(partner_of(listener)))
        if is_accepted:
            accepted = ours.enter_context(closing(listener.accept(NAME, TIMEOUT_S)))
        stranger = stranger_at(listener, strangers)
        stranger.send(hello(NAME, SECRET))
        ours.enter_context(closing(partner_of(listener, "1 0 forward")))
        ours.enter_context(closing(listener.accept("1 0 forward", TIMEOUT_S)))
        if not is_accepted:
            accepted = ours.enter_context(closing(listener.accept(NAME, TIMEOUT_S)))
        assert accepted.getpeername()[:2] == partner.getsockname()[:2]
        assert is_closed(stranger)


def test_a_hello_shows_neither_the_secret_nor_the_next_hello() -> None:
    one, other = hello("1 0 latency", SECRET), hello("1 0 forward", SECRET)
    assert len(one) == len(other) == 64
    assert SECRET.encode() not in one
    assert one[32:] != other[32:]


def test_where_no_file_is_left_the_oldest_strangers_are_dropped(strangers: ExitStack) -> None:
    with closing(Listener("127.0.0.1", SECRET)) as listener:
        for _ in range(30):
            stranger_at(listener, strangers)
        with closing(partner_of(listener)) as partner, files_left(5), closing(listener.accept(NAME, TIMEOUT_S)) as own:
            assert own.getpeername() == partner.getsockname()


def test_a_process_without_any_file_left_says_so() -> None:
    with (
        closing(Listener("127.0.0.1", SECRET)) as listener,
        closing(partner_of(listener)),
        files_left(0),
        pytest.raises(OSError, match="Too many open files"),
    ):
        listener.accept(NAME, TIMEOUT_S)


@contextmanager
def files_left(num_files: int) -> Iterator[None]:
    """Let this process open so many more files."""
    old, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + num_files, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (old, most))


def test_what_came_before_it_was_read_is_no_part_of_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the receiver had no core: of 14 messages, 4 come in the time that counts, and all are read in it."""
    ours, theirs = socket.socketpair()
    message, now_ms = bytes(1000), iter(range(0, 1000, 30))

    def monotonic() -> float:
        now_s = next(now_ms) / 1000
        if now_s == 0.09:
            theirs.sendall(4 * message)
        clock.perf_counter_ns = lambda: round(now_s * NS_PER_S)
        return now_s

    clock = SimpleNamespace(monotonic=monotonic)
    monkeypatch.setattr(pair_player, "time", clock)
    monkeypatch.setattr(pair_player, "_RECEIVE_BYTES", len(message))
    with closing(ours), closing(theirs):
        theirs.sendall(10 * message)
        assert receive_stream(ours, 0.25) == pytest.approx(4 * len(message) / 0.21)
