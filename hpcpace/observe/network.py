"""Byte counters of the network interfaces of a host, once a second by one rank of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_RDMA_WORD_BYTES = 4


@dataclass(frozen=True)
class NetworkCounters:
    """Reads the counters of fixed interfaces; an interface that goes away reads as zero.

    Attributes:
        ethernet: names of network devices, in the order of the trace's `interface` numbers.
        rdma_ports: folders of InfiniBand or RoCE ports, numbered on behind them.
        net_dev: the kernel's table of network devices, of this process's network namespace.
    """

    ethernet: tuple[str, ...]
    rdma_ports: tuple[Path, ...]
    net_dev: Path

    @property
    def interfaces(self) -> tuple[str, ...]:
        """Names of all interfaces, `DEVICE` or `DEVICE/PORT`."""
        return self.ethernet + tuple(f"{port.parent.parent.name}/{port.name}" for port in self.rdma_ports)

    def read(self) -> list[tuple[int, int, int]]:
        """Return (interface number, transmitted bytes, received bytes) of every interface."""
        table = _read_net_dev(self.net_dev)
        values = [table.get(name, (0, 0)) for name in self.ethernet] + [_read_rdma(port) for port in self.rdma_ports]
        return [(number, sent, received) for number, (sent, received) in enumerate(values)]


def find_network_counters(*, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> NetworkCounters:
    """Find the interfaces of this host.

    /proc/self/net/dev follows the network namespace of the process, which /sys/class/net does not where sysfs was
    mounted outside of it. Bytes sent by RDMA pass no network device: the ports of the adapters count them.
    """
    net_dev = proc / "self" / "net" / "dev"
    ports = sorted(p for p in (sys / "class" / "infiniband").glob("*/ports/*") if (p / "counters").is_dir())
    return NetworkCounters(tuple(sorted(_read_net_dev(net_dev))), tuple(ports), net_dev)


def _read_net_dev(path: Path) -> dict[str, tuple[int, int]]:
    try:
        lines = path.read_text().splitlines()[2:]
    except OSError:
        return {}
    table = {}
    for line in lines:
        name, _, counters = line.partition(":")
        columns = counters.split()
        if len(columns) >= 16:
            table[name.strip()] = (int(columns[8]), int(columns[0]))
    return table


def _read_rdma(port: Path) -> tuple[int, int]:
    def counter(name: str) -> int:
        try:
            return int((port / "counters" / name).read_text()) * _RDMA_WORD_BYTES
        except (OSError, ValueError):
            return 0

    return counter("port_xmit_data"), counter("port_rcv_data")
