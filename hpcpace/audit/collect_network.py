"""RDMA adapters, interfaces and error counters from sysfs, and traffic shaping over netlink.

Neither sysfs nor procfs has the rate of the token bucket at an interface's root, and `tc` would be another process;
netlink needs no root. Formats: rtnetlink(7), linux/pkt_sched.h and linux/rtnetlink.h of the kernel.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterator, Mapping, Set

from hpcpace.audit.collect_hardware import ADDRESS
from hpcpace.audit.facts import Gid, NetDevice, RdmaDevice, RdmaPort
from hpcpace.audit.tree import Tree, Unreadable
from hpcpace.core import netlink
from hpcpace.core.text import printable

_GET_QDISC, _NEW_QDISC = 38, 36
_DUMP = 0x300
_AT_ROOT = 0xFFFFFFFF
_KIND, _OPTIONS, _TBF_PARMS, _TBF_RATE64 = 1, 2, 1, 4
_TRAFFIC = struct.Struct("=BxxxiIII")
_RATE_AT = 8  # of the 32-bit rate in tc_ratespec
_MAX_BYTES, _TIMEOUT_S = 1 << 16, 1.0
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
                yield from buckets_in(channel.recv(_MAX_BYTES))
            except EOFError:
                return


def _rate_bytes(options: Mapping[int, bytes]) -> int:
    if len(options.get(_TBF_RATE64, b"")) >= 8:
        return int(struct.unpack_from("=Q", options[_TBF_RATE64])[0])
    return int(struct.unpack_from("=I", options.get(_TBF_PARMS, b"\0" * 12), _RATE_AT)[0])


_RDMA = "sys/class/infiniband"
_NET = "sys/class/net"
_MAX_RDMA, _MAX_NET, _MAX_GIDS, _MAX_GIDS_KEPT = 64, 96, 256, 24
_PROC_NET, _MAX_ROUTES = "proc/net", 1 << 18
_LINK_LOCAL = "FEA9"  # 169.254 as /proc/net/route writes addresses, in the order of a little-endian machine
_NET_KINDS = {1: "ethernet", 32: "infiniband", 772: "loopback"}

LINK_ERRORS = ("symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors")
"""Port counters that hardly ever grow on a good link."""
_CONGESTION_ERRORS = ("port_xmit_discards", "out_of_sequence", "roce_adp_retrans", "local_ack_timeout_err")
"""Port counters that grow when the fabric loses packets."""
_NET_COUNTERS = ("rx_packets", "tx_packets", "rx_dropped", "tx_dropped", "rx_errors", "tx_errors")


def collect_rdma(tree: Tree) -> tuple[RdmaDevice, ...] | None:
    """Return the RDMA adapters; empty if the kernel has no class for them, None if they cannot be read."""
    if not tree.exists(_RDMA):
        return () if tree.exists("sys/class") else tree.fact("rdma", lambda: _fail("no /sys/class"))
    names = tree.fact("rdma", tree.names, _RDMA)
    return None if names is None else tuple(_rdma_device(tree, name) for name in names[:_MAX_RDMA])


def collect_net(tree: Tree) -> tuple[NetDevice, ...] | None:
    """Return the network interfaces, up to a limit at which those with an adapter take precedence."""
    names = tree.fact("net", tree.names, _NET)
    if names is None:
        return None
    # bonding_masters is a file in the same folder, not an interface.
    names = [name for name in names if name != "bonding_masters"]
    chosen = sorted(names, key=lambda name: (not tree.exists(f"{_NET}/{name}/device"), name))[:_MAX_NET]
    # A copied tree does not contain it, and netlink would answer for this machine.
    shapers = tree.fact("net/shaping", read_shapers) if tree.is_live else {}
    routed = tree.fact("net/routes", _routed, tree)
    return tuple(_net_device(tree, name, shapers, routed) for name in sorted(chosen))


def read_counters(tree: Tree) -> dict[str, int]:
    """Return the error and drop counters that are not 0; `tree.unreadable` names devices without counters."""
    found: dict[str, int] = {}
    for device in _names(tree, _RDMA)[:_MAX_RDMA]:
        for port in _names(tree, f"{_RDMA}/{device}/ports")[:8]:
            place, name = f"{_RDMA}/{device}/ports/{port}", f"rdma/{printable(device)}/{port}"
            names = tree.fact(f"{name}/counters", tree.names, f"{place}/counters") or []
            for folder, listed in (("counters", names), ("hw_counters", _names(tree, f"{place}/hw_counters"))):
                for counter in sorted({*LINK_ERRORS, *_CONGESTION_ERRORS} & set(listed)):
                    _count(tree, found, f"{place}/{folder}/{counter}", f"{name}/{counter}")
    for device in _names(tree, _NET)[:_MAX_NET]:
        if tree.exists(f"{_NET}/{device}/device") or device.startswith(("eth", "en", "ib", "hsn")):
            name = f"net/{printable(device)}"
            if tree.fact(f"{name}/counters", tree.names, f"{_NET}/{device}/statistics") is not None:
                for counter in _NET_COUNTERS:
                    _count(tree, found, f"{_NET}/{device}/statistics/{counter}", f"{name}/{counter}")
    return found


def read_aer(tree: Tree, addresses: list[str]) -> dict[str, int]:
    """Return the counts of corrected PCIe errors that are not 0, for devices at the given addresses."""
    found: dict[str, int] = {}
    for address in addresses:
        name = f"pci/{address}/corrected"
        count = tree.fact(name, _corrected, tree, address)
        if count:
            found[name] = count
    return found


def _corrected(tree: Tree, address: str) -> int:
    total = re.search(
        r"^TOTAL_ERR_COR (\d{1,18})$", tree.text(f"sys/bus/pci/devices/{address}/aer_dev_correctable"), re.MULTILINE
    )
    if not total:
        raise Unreadable("no TOTAL_ERR_COR")
    return int(total[1])


def _fail(reason: str) -> tuple[RdmaDevice, ...]:
    raise Unreadable(reason)


def _names(tree: Tree, path: str) -> list[str]:
    try:
        return tree.names(path)
    except Unreadable:
        return []


def _count(tree: Tree, found: dict[str, int], path: str, name: str) -> None:
    try:
        value = tree.number(path)
    except Unreadable:
        return
    if value > 0:
        found[name] = max(value, found.get(name, 0))


def _rdma_device(tree: Tree, name: str) -> RdmaDevice:
    place, shown = f"{_RDMA}/{name}", printable(name)
    ports = tree.fact(f"rdma/{shown}/ports", tree.names, f"{place}/ports") or []
    return RdmaDevice(
        name=shown,
        pci=tree.fact(f"rdma/{shown}/pci", _adapter, tree, f"{place}/device"),
        firmware=tree.word_or_empty(f"{place}/fw_ver"),
        board=tree.word_or_empty(f"{place}/board_id") or tree.word_or_empty(f"{place}/hca_type"),
        ports=tuple(_port(tree, place, shown, int(port)) for port in ports[:8] if re.fullmatch(r"\d{1,3}", port)),
    )


def _port(tree: Tree, device_place: str, device: str, number: int) -> RdmaPort:
    place, fact = f"{device_place}/ports/{number}", f"rdma/{device}/{number}"
    return RdmaPort(
        number=number,
        state=tree.fact(f"{fact}/state", lambda: _after_colon(tree.word(f"{place}/state"))),
        phys_state=tree.fact(f"{fact}/phys_state", lambda: _after_colon(tree.word(f"{place}/phys_state"))),
        rate_gbps=tree.fact(f"{fact}/rate", lambda: _rate_gbps(tree.word(f"{place}/rate"))),
        link_layer=tree.fact(f"{fact}/link_layer", tree.word, f"{place}/link_layer"),
        gids=_gids(tree, place),
    )


def _gids(tree: Tree, place: str) -> tuple[Gid, ...]:
    """Return the GID entries in use; reading the type of an unused one fails with EINVAL."""
    found: list[Gid] = []
    for name in sorted(_names(tree, f"{place}/gid_attrs/types"), key=lambda text: (len(text), text))[:_MAX_GIDS]:
        kind = tree.word_or_empty(f"{place}/gid_attrs/types/{name}")
        if kind and re.fullmatch(r"\d{1,4}", name) and len(found) < _MAX_GIDS_KEPT:
            found.append(Gid(index=int(name), kind=kind, net=tree.word_or_empty(f"{place}/gid_attrs/ndevs/{name}")))
    return tuple(found)


def _net_device(tree: Tree, name: str, shapers: Mapping[str, float] | None, routed: Set[str] | None) -> NetDevice:
    place, shown = f"{_NET}/{name}", printable(name)
    is_physical = tree.exists(f"{place}/device")
    return NetDevice(
        name=shown,
        pci=(tree.fact(f"net/{shown}/pci", _adapter, tree, f"{place}/device") or "") if is_physical else "",
        kind=_NET_KINDS.get(tree.fact(f"net/{shown}/type", tree.number, f"{place}/type") or 0, "other"),
        mtu=tree.fact(f"net/{shown}/mtu", tree.number, f"{place}/mtu"),
        speed_mbps=_net_speed_mbps(tree, place),
        state=tree.fact(f"net/{shown}/state", tree.word, f"{place}/operstate"),
        is_physical=is_physical,
        master=tree.link_name(f"{place}/master"),
        shaped_mbps=None if shapers is None else shapers.get(name, 0.0),
        has_route=None if routed is None else shown in routed,
    )


def _routed(tree: Tree) -> Set[str]:
    """Return the interfaces that any IPv4 or IPv6 route uses; link-local routes do not count."""
    found = set()
    # `text` refuses a table that is too long: a truncated one may lack interfaces.
    for line in tree.text(f"{_PROC_NET}/route", most_bytes=_MAX_ROUTES).split("\n")[1:]:
        words = line.split()
        if len(words) > 7 and not words[1].endswith(_LINK_LOCAL):
            found.add(printable(words[0]))
    if tree.exists(f"{_PROC_NET}/ipv6_route"):
        for line in tree.text(f"{_PROC_NET}/ipv6_route", most_bytes=_MAX_ROUTES).split("\n"):
            words = line.split()
            if len(words) > 9 and not words[0].startswith(("fe8", "ff")) and words[9] != "lo":
                found.add(printable(words[9]))
    return found


def _net_speed_mbps(tree: Tree, place: str) -> int | None:
    # An interface that is virtual or down gives -1 or EINVAL, which is not a failure.
    try:
        speed = tree.number(f"{place}/speed")
    except Unreadable:
        return None
    return speed if 0 < speed < 100_000_000 else None


def _adapter(tree: Tree, path: str) -> str:
    """Return the PCI address of the target of a `device` link; empty if it is not a PCI device."""
    parts = tree.resolve(path).split("/")
    return next((part for part in reversed(parts) if ADDRESS.fullmatch(part)), "")


def _after_colon(text: str) -> str:
    number, colon, word = text.partition(":")
    return word.strip() if colon else number


def _rate_gbps(text: str) -> float:
    found = re.match(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec", text)
    if not found:
        raise Unreadable(f"{text[:40]!r} is not a rate")
    return float(found[1])
