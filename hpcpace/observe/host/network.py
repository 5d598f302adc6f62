"""Counters of the network interfaces of a host, once a second by one rank of it.

Network devices are asked of the kernel: speed by `ioctl(SIOCETHTOOL)`, which every kernel has, pause frames by the
netlink family `ethtool` (5.9), and state by rtnetlink. /sys/class/net has most of it as well, but shows the devices of
the namespace in which it was mounted, in a container those of the host.

The traffic of InfiniBand, RoCE, EFA and Slingshot passes no network device; sysfs has counters of their ports. Every
driver has names of its own for the same thing, so each column of the trace's `network` is the sum of the files that
exist. Sources: the kernel's Documentation/ABI/stable/sysfs-class-infiniband, NVIDIA's "Understanding mlx5 ethtool and
RDMA counters", drivers/infiniband/hw/efa/efa_verbs.c, and cxi_stat's counters of Cassini.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hpcpace.core import netlink
from hpcpace.core.records import dataclass
from hpcpace.observe.host.counters import Device, read_counter, read_devices
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
_MAX_BYTES, _TIMEOUT_S = 1 << 14, 0.2
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
        found = list(netlink.messages(channel.recv(_MAX_BYTES)))
    for kind, body in found:
        netlink.check_error(kind, body)
    return found


_WORD_BYTES = 4
_MAX = 1 << 62
# Slingshot writes `VALUE@TIME`.
_NUMBER = re.compile(rb"\s*(\d{1,20})\b")
_RATE = re.compile(rb"\s*(\d{1,6}(?:\.\d{1,3})?) Gb/sec")
_BITS_PER_GIGABIT = 10**9

_RDMA_BYTES = (
    (("counters/port_xmit_data", "counters/port_rcv_data"), _WORD_BYTES),
    (("hw_counters/tx_bytes", "hw_counters/rx_bytes"), 1),
)
_RDMA_EVENTS: Mapping[str, Sequence[str]] = {
    "errors": [
        f"counters/{name}"
        for name in ("symbol_error", "port_rcv_errors", "link_error_recovery", "local_link_integrity_errors")
    ],
    "drops": ["counters/port_xmit_discards", "hw_counters/rx_drops"],
    "pauses": ["counters/port_xmit_wait"],
    "marks": [
        f"hw_counters/{name}"
        for name in ("np_cnp_sent", "rp_cnp_handled", "tx_cnp_pkts", "rx_cnp_pkts", "cnpSent", "cnpHandled")
    ],
    "retransmits": [
        f"hw_counters/{name}"
        for name in (
            "packet_seq_err", "roce_adp_retrans", "rnr_nak_retry_err", "local_ack_timeout_err", "to_retransmits",
            "retrans_pkts",
        )
    ],
    "out_of_order": ["hw_counters/out_of_sequence", "hw_counters/oos_drop_count"],
    "link_downs": ["counters/link_downed"],
}  # fmt: skip
_CXI_BYTES = ((("hni_sts_tx_ok_octets", "hni_sts_rx_ok_octets"), 1),)
_CXI_EVENTS: Mapping[str, Sequence[str]] = {
    "errors": ["hni_pcs_uncorrected_cw"],
    "drops": ["hni_llr_tx_discard", "ixe_rx_pkt_drop_pct"],
    "pauses": [f"hni_tx_paused_{number}" for number in range(8)],
    "retransmits": ["hni_llr_tx_replay_event"],
    "out_of_order": ["pct_bad_seq_nacks"],
}


@dataclass(frozen=True)
class FabricPort:
    """A port of an adapter; files that it does not have count as zero.

    Attributes:
        name: `DEVICE/PORT`, or `DEVICE` of Slingshot.
        folder: where its counters are.
        bytes_files: files with bytes sent and received, and by how much to multiply them.
        event_files: by column, the files that are added up.
    """

    name: str
    folder: Path
    bytes_files: tuple[Sequence[str], int]
    event_files: Mapping[str, Sequence[str]]

    def bytes(self) -> tuple[int, int]:
        """Return bytes sent and received."""
        names, factor = self.bytes_files
        sent, received = (self._sum([name]) * factor for name in names)
        return sent, received

    def details(self) -> Details:
        """Return all else that is counted."""
        events = {column: self._sum(names) for column, names in self.event_files.items()}
        rate = _RATE.match(read_counter(self.folder / "rate"))
        state = LinkState.UNKNOWN
        if named := read_counter(self.folder / "state").strip():  # like `4: ACTIVE`
            state = LinkState.UP if b"ACTIVE" in named else LinkState.DOWN
        return Details(
            **events,
            rate_bps=round(float(rate[1]) * _BITS_PER_GIGABIT) if rate else 0,
            state=state,
        )

    def _sum(self, names: Sequence[str]) -> int:
        found = (_NUMBER.match(read_counter(self.folder / name)) for name in names)
        return min(sum(int(number[1]) for number in found if number), _MAX)


def find_fabric_ports(sys: Path = Path("/sys")) -> tuple[FabricPort, ...]:
    """Return the ports of the adapters of this host that have counters, ascending by name."""
    rdma = sorted(port for port in (sys / "class" / "infiniband").glob("*/ports/*") if port.is_dir())
    found = [_port(f"{port.parent.parent.name}/{port.name}", port, _RDMA_BYTES, _RDMA_EVENTS) for port in rdma]
    cxi = sorted((sys / "class" / "cxi").glob("*/device/telemetry"))
    found += [_port(folder.parent.parent.name, folder, _CXI_BYTES, _CXI_EVENTS) for folder in cxi]
    return tuple(port for port in found if port is not None)


def _port(
    name: str,
    folder: Path,
    bytes_files: Sequence[tuple[Sequence[str], int]],
    event_files: Mapping[str, Sequence[str]],
) -> FabricPort | None:
    """Return a port with the files that it has; None if it does not count bytes."""
    for names, factor in bytes_files:
        if all(os.access(folder / file, os.R_OK) for file in names):
            events = {
                column: [file for file in files if os.access(folder / file, os.R_OK)]
                for column, files in event_files.items()
            }
            return FabricPort(name, folder, (names, factor), events)
    return None


_LOOPBACK = "lo"
_MAX_INTERFACES = 256
"""Numbers of interfaces are one byte in the trace."""


class NetworkCounters:
    """Reads the counters of fixed interfaces; an interface that goes away reads as zero.

    Bytes are read each time. All else costs a call or a file each, and on some adapters a question to their firmware,
    so one interface is asked at a time; of the others, what they last said is repeated.

    Args:
        devices: names of network devices, in the order of the trace's `interface` numbers.
        ports: ports of other adapters, numbered on behind them.
        net_dev: the kernel's table of network devices, of this process's network namespace.
        link: returns what else the kernel says of a network device.
    """

    def __init__(
        self,
        devices: tuple[str, ...],
        ports: tuple[FabricPort, ...],
        net_dev: Path,
        link: Callable[[str], Details] | None = None,
    ) -> None:
        self._devices = devices[:_MAX_INTERFACES]
        self._ports = ports[: _MAX_INTERFACES - len(self._devices)]
        self._net_dev = net_dev
        self._link = link or LinkDetails().read
        self._details = [Details()] * len(self.interfaces)
        self._asked = [number for number, name in enumerate(self.interfaces) if name != _LOOPBACK]
        self._next = 0

    @property
    def interfaces(self) -> tuple[str, ...]:
        """Names of all interfaces: `eth0`, `mlx5_0/1` with its port, `cxi0`."""
        return self._devices + tuple(port.name for port in self._ports)

    def read(self) -> list[tuple[int, ...]]:
        """Return the columns of a `network` row behind its time, for every interface."""
        if self._asked:
            asked = self._asked[self._next % len(self._asked)]
            num_devices = len(self._devices)
            is_device = asked < num_devices
            self._details[asked] = (
                self._link(self._devices[asked]) if is_device else self._ports[asked - num_devices].details()
            )
            self._next += 1
        table = read_devices(self._net_dev)
        rows: list[tuple[int, ...]] = []
        for number, name in enumerate(self._devices):
            found = table.get(name, Device())
            details = self._details[number]._replace(errors=found.errors, drops=found.drops)
            rows.append((number, found.sent_bytes, found.received_bytes, *details))
        for number, port in enumerate(self._ports, start=len(self._devices)):
            rows.append((number, *port.bytes(), *self._details[number]))
        return rows


def find_network_counters(*, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> NetworkCounters:
    """Find the interfaces of this host.

    /proc/self/net/dev follows the network namespace of the process, which /sys/class/net does not where sysfs was
    mounted outside of it. Bytes sent by RDMA pass no network device: the ports of the adapters count them.
    """
    net_dev = proc / "self" / "net" / "dev"
    return NetworkCounters(tuple(sorted(read_devices(net_dev))), find_fabric_ports(sys), net_dev)
