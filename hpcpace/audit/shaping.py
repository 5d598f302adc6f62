"""Traffic shaping of network interfaces: the rate of the token bucket at an interface's root, read over netlink.

Neither sysfs nor procfs has it, and running `tc` would start a process; reading over netlink needs no root. Formats:
rtnetlink(7), linux/pkt_sched.h and linux/rtnetlink.h of the kernel.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping

from hpcpace import netlink
from hpcpace.audit.tree import Unreadable

_GET_QDISC, _NEW_QDISC = 38, 36
_DUMP = 0x300
_AT_ROOT = 0xFFFFFFFF
_KIND, _OPTIONS, _TBF_PARMS, _TBF_RATE64 = 1, 2, 1, 4
_TRAFFIC = struct.Struct("=BxxxiIII")
_RATE_AT = 8  # of the 32-bit rate in tc_ratespec
_MOST_BYTES, _TIMEOUT_S = 1 << 16, 1.0
_BITS_PER_BYTE, _PER_MEGA = 8, 1e6


def read_shapers() -> Mapping[str, float]:
    """Return the rate in Mb/s of each interface that a token bucket (tc-tbf) shapes, by name.

    Raises:
        Unreadable: the kernel does not say.
    """
    try:
        names = dict(socket.if_nameindex())
        rates = {names[index]: rate for index, rate in _root_buckets() if index in names}
    except (OSError, AttributeError, struct.error) as error:
        raise Unreadable(f"netlink: {getattr(error, 'strerror', None) or error}") from None
    return rates


def buckets_in(message: bytes) -> Iterator[tuple[int, float]]:
    """Yield interface number and rate in Mb/s of each root token bucket in a netlink message.

    Raises:
        EOFError: the message is the last one.
        OSError: the message is an error.
    """
    for kind, body in netlink.messages(message):
        if kind == netlink.DONE:
            raise EOFError
        netlink.check_error(kind, body)
        if kind == _NEW_QDISC and len(body) >= _TRAFFIC.size:
            _, index, _, parent, _ = _TRAFFIC.unpack_from(body)
            found = dict(netlink.attributes(body[_TRAFFIC.size :]))
            if parent == _AT_ROOT and found.get(_KIND, b"").rstrip(b"\0") == b"tbf":
                yield (
                    index,
                    _rate_bytes(dict(netlink.attributes(found.get(_OPTIONS, b"")))) * _BITS_PER_BYTE / _PER_MEGA,
                )


def _root_buckets() -> Iterator[tuple[int, float]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as channel:
        channel.settimeout(_TIMEOUT_S)
        request = _TRAFFIC.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        channel.send(netlink.message(_GET_QDISC, request, flags=_DUMP))
        while True:
            try:
                yield from buckets_in(channel.recv(_MOST_BYTES))
            except EOFError:
                return


def _rate_bytes(options: Mapping[int, bytes]) -> int:
    if len(options.get(_TBF_RATE64, b"")) >= 8:
        return int(struct.unpack_from("=Q", options[_TBF_RATE64])[0])
    return int(struct.unpack_from("=I", options.get(_TBF_PARMS, b"\0" * 12), _RATE_AT)[0])
