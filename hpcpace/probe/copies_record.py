"""Rates of copies, as they are saved: within the memory of NUMA nodes, and between host and devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MemoryRate:
    """How fast the cores of one NUMA node copy within its memory.

    Attributes:
        host: its name.
        numa_node: number of the node, as Linux counts.
        num_threads: cores that copied at once, one thread each.
        rate: read and written together, as STREAM's copy counts, bytes per second.
    """

    host: str
    numa_node: int
    num_threads: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class DeviceRate:
    """How fast a device copies from and to the memory of one NUMA node.

    Attributes:
        host: its name.
        device: number of the device, as the rank sees it.
        bus_id: its PCI address; empty if unknown.
        numa_node: node whose memory it copies from and to.
        is_pinned: whether that memory is pinned.
        to_device, from_device: bytes per second.
        limit: of its PCIe link, bytes per second; None if unknown.
    """

    host: str
    device: int
    bus_id: str
    numa_node: int
    is_pinned: bool
    to_device: float
    from_device: float
    limit: float | None


@dataclass(frozen=True, kw_only=True)
class CopiesRecord:
    """Rates of copies on all hosts.

    Attributes:
        memory: by host and NUMA node.
        devices: by host, device, NUMA node, pinned first.
        notes: what was not measured, and why.
    """

    memory: tuple[MemoryRate, ...] = ()
    devices: tuple[DeviceRate, ...] = ()
    notes: tuple[str, ...] = ()
