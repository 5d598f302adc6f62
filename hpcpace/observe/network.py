"""Counters of the network interfaces of a host, once a second by one rank of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hpcpace.observe.fabric import FabricPort, find_fabric_ports
from hpcpace.observe.interface_counters import Details, LinkDetails

_LOOPBACK = "lo"
_MOST_INTERFACES = 256
"""Numbers of interfaces are one byte in the trace."""


class _Device(NamedTuple):
    """What /proc/net/dev counts of a device."""

    sent_bytes: int = 0
    received_bytes: int = 0
    errors: int = 0
    drops: int = 0


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
        self._devices = devices[:_MOST_INTERFACES]
        self._ports = ports[: _MOST_INTERFACES - len(self._devices)]
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
            self._ask(self._asked[self._next % len(self._asked)])
            self._next += 1
        table = _read_net_dev(self._net_dev)
        rows: list[tuple[int, ...]] = []
        for number, name in enumerate(self._devices):
            found = table.get(name, _Device())
            details = self._details[number]._replace(errors=found.errors, drops=found.drops)
            rows.append((number, found.sent_bytes, found.received_bytes, *details))
        for number, port in enumerate(self._ports, start=len(self._devices)):
            rows.append((number, *port.bytes(), *self._details[number]))
        return rows

    def _ask(self, number: int) -> None:
        if number < len(self._devices):
            self._details[number] = self._link(self._devices[number])
        else:
            self._details[number] = self._ports[number - len(self._devices)].details()


def find_network_counters(*, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> NetworkCounters:
    """Find the interfaces of this host.

    /proc/self/net/dev follows the network namespace of the process, which /sys/class/net does not where sysfs was
    mounted outside of it. Bytes sent by RDMA pass no network device: the ports of the adapters count them.
    """
    net_dev = proc / "self" / "net" / "dev"
    return NetworkCounters(tuple(sorted(_read_net_dev(net_dev))), find_fabric_ports(sys), net_dev)


def _read_net_dev(path: Path) -> dict[str, _Device]:
    try:
        lines = path.read_text().splitlines()[2:]
    except OSError:
        return {}
    table = {}
    for line in lines:
        name, _, counters = line.partition(":")
        columns = counters.split()
        if len(columns) >= 16:
            received_bytes, received_errors, received_drops = map(int, (columns[0], columns[2], columns[3]))
            sent_bytes, sent_errors, sent_drops = map(int, (columns[8], columns[10], columns[11]))
            table[name.strip()] = _Device(
                sent_bytes, received_bytes, received_errors + sent_errors, received_drops + sent_drops
            )
    return table
