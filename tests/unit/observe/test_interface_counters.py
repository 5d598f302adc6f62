"""State, speed and pause frames of network devices: what the kernel of any machine says, and answers made up."""

from __future__ import annotations

import socket
import struct

import pytest
from cases import each_case

from hpcpace.core import netlink
from hpcpace.observe.host import network
from hpcpace.observe.host.network import Details, LinkDetails, pauses_in, speed_mbps
from hpcpace.trace.schema import LinkState


@each_case("name", ["no-such-device", "a-name-that-is-longer-than-any", ""])
def test_nothing_is_known_of_a_device_that_is_not_there(name):
    assert LinkDetails().read(name) == Details()


def test_every_device_of_this_machine_can_be_asked():
    for _, name in socket.if_nameindex():
        found = LinkDetails().read(name)
        assert found.state in LinkState and found.rate_bps == speed_mbps(name) * 10**6


def answer(*stats: tuple[int, int]) -> bytes:
    counted = b"".join(netlink.attribute(number, struct.pack("=Q", value)) for number, value in stats)
    return bytes(4) + netlink.attribute(2, b"\1") + netlink.attribute(5 | 0x8000, counted)


@each_case(
    ("body", "expected"),
    [
        (answer((2, 7), (3, 9)), {2: 7, 3: 9}),
        (answer((3, 9)), {3: 9}),
        (answer((2, 2**64 - 1), (3, 1)), {3: 1}),
        (answer(), {}),
        (b"", {}),
        (answer((2, 7))[:-3], {}),
        (bytes(4) + b"\xff" * 40, {}),
    ],
    ids=["both", "received only", "one that is not counted", "none", "empty", "cut off", "nonsense"],
)
def test_pause_frames_are_those_that_the_driver_counts(body, expected):
    assert pauses_in(body) == expected


def test_a_device_without_pause_frames_is_asked_once(monkeypatch):
    asked = []

    def refuse(family: int, name: str) -> dict[int, int]:
        asked.append(name)
        raise OSError(95, "refused")

    monkeypatch.setattr(network, "_ethtool_family", lambda: 21)
    monkeypatch.setattr(network, "_pause_stats", refuse)
    details = LinkDetails()
    assert [details.read("lo").pauses for _ in range(3)] == [0, 0, 0]
    assert asked == ["lo"]


def test_pause_frames_of_both_directions_are_added(monkeypatch):
    monkeypatch.setattr(network, "_ethtool_family", lambda: 21)
    monkeypatch.setattr(network, "_pause_stats", lambda family, name: {2: 7, 3: 9})
    assert LinkDetails().read("lo").pauses == 16


def test_a_kernel_without_netlink_says_what_ioctl_knows(monkeypatch):
    def refuse(family: int, request: bytes) -> list[tuple[int, bytes]]:
        raise PermissionError(1, "refused")

    monkeypatch.setattr(network, "_ask", refuse)
    monkeypatch.setattr(network, "speed_mbps", lambda name: 25_000)
    assert LinkDetails().read("lo") == Details(rate_bps=25 * 10**9)


def test_an_error_of_netlink_is_an_error():
    with pytest.raises(OSError, match="refused"):
        netlink.check_error(netlink.ERROR, struct.pack("=i", -95))
    netlink.check_error(netlink.DONE, b"")


def test_messages_and_attributes_come_back_as_they_were_made():
    body = netlink.attribute(1, b"abc") + netlink.attribute(2 | 0x8000, b"")
    content = netlink.message(16, body) + netlink.message(17, b"")
    assert [(kind, list(netlink.attributes(one))) for kind, one in netlink.messages(content)] == [
        (16, [(1, b"abc"), (2, b"")]),
        (17, []),
    ]
    assert list(netlink.messages(content[:20])) == [] and list(netlink.attributes(b"\1")) == []
