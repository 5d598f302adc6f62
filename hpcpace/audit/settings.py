"""Thresholds of the audit's rules, and what a site expects of its nodes: the table [audit] of a configuration."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from hpcpace.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Thresholds from which the audit reports a problem, and what every node must have; listed in docs/audit.md."""

    ignore: tuple[str, ...] = ()
    """Rules that do not run."""
    dataloader_workers: int = 0
    """Data-loading processes per rank, each of which needs a CPU (A05)."""
    roce_mtu: int = 4200
    """Smallest MTU of an Ethernet interface that carries RDMA (N06)."""
    link_errors: int = 10
    """Link errors since boot above which a port is reported (N08)."""
    congestion_errors: int = 1000
    """Packets lost or retransmitted since boot above which a port is reported (N08)."""
    drop_share: float = 0.001
    """Share of dropped packets above which an interface is reported (N08)."""
    pcie_errors: int = 100
    """Corrected errors above which a PCIe link is reported (P04)."""
    slow_share: float = 0.5
    """Share of the fastest interface's speed below which a selected interface is slow (N03)."""
    least_locked: int = 1 << 30
    """Bytes of memory that a rank must at least be allowed to lock for RDMA (N04)."""
    least_shm: int = 1 << 30
    """Smallest size of /dev/shm in bytes (S06)."""
    least_open_files: int = 1024
    """Number of files that a rank must at least be allowed to open (S06)."""
    nodes_per_leaf: int = 0
    """Nodes per leaf switch, to compute the smallest number of leaves; 0 for unknown (H02)."""
    expect_gpus: int | None = None
    """Number of GPUs of each node (H01)."""
    expect_nics: int | None = None
    """Number of active RDMA ports of each node (H01)."""
    expect_mtu: int | None = None
    """MTU of every Ethernet interface that carries RDMA (N06)."""
    expect_rate_gbps: float | None = None
    """Rate of each active RDMA port in Gb/s (N05)."""
    expect_driver: str | None = None
    """Version of the NVIDIA driver (H01)."""
    expect_kernel: str | None = None
    """Kernel release (H01)."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, (int, float)) and (value < 0 or not math.isfinite(value)):
                raise ConfigError(f"audit.{item.name} is {value}: it must be a number of at least 0")
        for name in ("drop_share", "slow_share"):
            if getattr(self, name) > 1:
                raise ConfigError(f"audit.{name} is {getattr(self, name)}: it must be at most 1")
