"""What is counted of a network interface but bytes, and how it is asked of the kernel for network devices.

Speed is asked by `ioctl(SIOCETHTOOL)`, which every kernel has, pause frames by the netlink family `ethtool` (5.9), and
state by rtnetlink. /sys/class/net has most of it as well, but shows the devices of the namespace in which it was
mounted, in a container those of the host.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
import sys
from contextlib import suppress
from typing import NamedTuple

from hpcpace.core import netlink
from hpcpace.trace.schema import LinkState

_SIOCETHTOOL, _GSET = 0x8946, 1
_ETHTOOL_CMD = struct.Struct("=IIIH14xH14x")
_IFREQ_BYTES, _NAME_BYTES = 40, 16
_UNKNOWN_SPEEDS = (0, 0xFFFF, 0xFFFFFFFF)
_BITS_PER_MEGABIT = 10**6

_GET_LINK, _NEW_LINK = 18, 16
_LINK = struct.Struct("=BxHiII")
_EXT_MASK, _SKIP_STATS = 29, 8
_CARRIER, _CARRIER_DOWN_COUNT = 33, 48

_NETLINK_GENERIC, _CONTROL_FAMILY, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 16, 16, 3, 1, 2
_GENERIC = struct.Struct("=BBH")
_PAUSE_GET, _PAUSE_HEADER, _PAUSE_STATS, _PAUSE_TX, _PAUSE_RX = 21, 1, 5, 2, 3
_HEADER_NAME, _HEADER_FLAGS, _WITH_STATS = 2, 3, 4
_NESTED = 0x8000
_MOST_BYTES, _TIMEOUT_S = 1 << 14, 0.2
_NOT_COUNTED = (1 << 64) - 1


class Details(NamedTuple):
    """The columns of a row of the trace's `network` behind the bytes."""

    errors: int = 0
    drops: int = 0
    pauses: int = 0
    marks: int = 0
    retransmits: int = 0
    out_of_order: int = 0
    link_downs: int = 0
    rate_bps: int = 0
    state: LinkState = LinkState.UNKNOWN


class LinkDetails:
    """Asks the kernel for state, speed and pause frames of network devices; what it does not say is zero."""

    def __init__(self) -> None:
        self._family: int | None = None
        self._without_pauses: set[str] = set()

    def read(self, name: str) -> Details:
        """Return what is known of a device of this process's network namespace."""
        state, link_downs = _link(name)
        return Details(
            pauses=self._pauses(name), link_downs=link_downs, rate_bps=speed_mbps(name) * _BITS_PER_MEGABIT, state=state
        )

    def _pauses(self, name: str) -> int:
        """Return pause frames sent and received, 0 where the driver does not count them."""
        if name in self._without_pauses:
            return 0
        try:
            if self._family is None:
                self._family = _ethtool_family()
            stats = _pause_stats(self._family, name)
        except OSError:
            stats = {}
        if not stats:
            self._without_pauses.add(name)
        return sum(stats.values())


def speed_mbps(name: str) -> int:
    """Return the speed of a device in Mb/s, 0 if it has none or is down."""
    command = ctypes.create_string_buffer(_ETHTOOL_CMD.pack(_GSET, 0, 0, 0, 0), _ETHTOOL_CMD.size)
    pointer = struct.pack("@P", ctypes.addressof(command))
    request = (name.encode()[: _NAME_BYTES - 1].ljust(_NAME_BYTES, b"\0") + pointer).ljust(_IFREQ_BYTES, b"\0")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
            fcntl.ioctl(channel, _SIOCETHTOOL, request)
    except OSError:
        return 0
    *_, low, high = _ETHTOOL_CMD.unpack(command.raw)
    speed: int = high << 16 | low
    return 0 if speed in _UNKNOWN_SPEEDS else speed


def _link(name: str) -> tuple[LinkState, int]:
    """Return the state of a device and how often its link went down."""
    with suppress(OSError, struct.error):
        index = socket.if_nametoindex(name)
        mask = netlink.attribute(_EXT_MASK, struct.pack("=I", _SKIP_STATS))
        body = _LINK.pack(socket.AF_UNSPEC, 0, index, 0, 0) + mask
        for kind, answer in _ask(socket.NETLINK_ROUTE, netlink.message(_GET_LINK, body)):
            if kind == _NEW_LINK:
                found = dict(netlink.attributes(answer[_LINK.size :]))
                carrier = found.get(_CARRIER, b"")
                state = LinkState.UNKNOWN if not carrier else LinkState.UP if carrier[0] else LinkState.DOWN
                return state, int.from_bytes(found.get(_CARRIER_DOWN_COUNT, b"")[:4], sys.byteorder)
    return LinkState.UNKNOWN, 0


def _ethtool_family() -> int:
    """Return the number of the netlink family `ethtool`.

    Raises:
        OSError: the kernel has none.
    """
    body = _GENERIC.pack(_GET_FAMILY, 1, 0) + netlink.attribute(_FAMILY_NAME, b"ethtool\0")
    for _, answer in _ask(_NETLINK_GENERIC, netlink.message(_CONTROL_FAMILY, body)):
        found = dict(netlink.attributes(answer[_GENERIC.size :]))
        if len(found.get(_FAMILY_ID, b"")) >= 2:
            return int(struct.unpack_from("=H", found[_FAMILY_ID])[0])
    raise OSError("no netlink family ethtool")


def _pause_stats(family: int, name: str) -> dict[int, int]:
    header = netlink.attribute(_HEADER_NAME, name.encode() + b"\0")
    header += netlink.attribute(_HEADER_FLAGS, struct.pack("=I", _WITH_STATS))
    body = _GENERIC.pack(_PAUSE_GET, 1, 0) + netlink.attribute(_PAUSE_HEADER | _NESTED, header)
    for _, answer in _ask(_NETLINK_GENERIC, netlink.message(family, body)):
        return pauses_in(answer)
    return {}


def pauses_in(answer: bytes) -> dict[int, int]:
    """Return the pause frames that the body of an answer counts, by the number of the attribute."""
    found = dict(netlink.attributes(answer[_GENERIC.size :]))
    counted = netlink.attributes(found.get(_PAUSE_STATS, b""))
    values = {number: struct.unpack("=Q", value)[0] for number, value in counted if len(value) == 8}
    return {
        number: values[number] for number in (_PAUSE_TX, _PAUSE_RX) if values.get(number, _NOT_COUNTED) != _NOT_COUNTED
    }


def _ask(family: int, request: bytes) -> list[tuple[int, bytes]]:
    """Return the messages of the answer.

    Raises:
        OSError: the kernel refuses, or does not answer.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, family) as channel:
        channel.settimeout(_TIMEOUT_S)
        channel.send(request)
        found = list(netlink.messages(channel.recv(_MOST_BYTES)))
    for kind, body in found:
        netlink.check_error(kind, body)
    return found
