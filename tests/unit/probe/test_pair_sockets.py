"""Whom a host of a probe takes for its partner."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from hpcpace.probe.pair_sockets import Listener, connect_to


@pytest.mark.parametrize("said", [b"", b"nothing of ours", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64])
def test_a_connection_without_the_secret_is_no_partner(said: bytes) -> None:
    with closing(Listener("127.0.0.1")) as listener:
        stranger = socket.create_connection(("127.0.0.1", listener.port))
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        with (
            closing(stranger),
            closing(connect_to("127.0.0.1", listener.port, "secret 0 1 2", 5.0)) as partner,
            closing(listener.accept("secret 0 1 2", 5.0)) as accepted,
        ):
            assert accepted.getpeername() == partner.getsockname()
