"""Thresholds of the audit's rules, and what a centre expects of its nodes: the table [audit] of a configuration."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from hpcpace.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """From where on the audit finds fault, and what every node must have; docs/audit.md explains each."""

    ignore: tuple[str, ...] = ()
    """Rules that are not run."""
    dataloader_workers: int = 0
    """Processes that load data for each rank, which need CPUs of their own (A05)."""
    roce_mtu: int = 4200
    """Least MTU of an Ethernet interface that RDMA runs over (N06)."""
    link_errors: int = 10
    """Errors of a link since the boot above which it is worth a look (N08)."""
    congestion_errors: int = 1000
    """Packets lost or sent again since the boot above which the fabric is worth a look (N08)."""
    drop_share: float = 0.001
    """Share of an interface's packets dropped above which it is worth a look (N08)."""
    pcie_errors: int = 100
    """Corrected errors of a PCIe link above which it is worth a look (P04)."""
    slow_share: float = 0.5
    """An interface that a variable names is slow below this share of the fastest one's speed (N03)."""
    least_locked: int = 1 << 30
    """Bytes that RDMA must be able to lock at least (N04)."""
    least_shm: int = 1 << 30
    """Bytes that /dev/shm must have at least (S06)."""
    least_open_files: int = 1024
    """Files that a rank must be able to open at least (S06)."""
    nodes_per_leaf: int = 0
    """Nodes below a leaf switch, from which the least number of leaves follows; 0 for unknown (H02)."""
    expect_gpus: int | None = None
    """GPUs of each node (H01)."""
    expect_nics: int | None = None
    """Active RDMA ports of each node (H01)."""
    expect_mtu: int | None = None
    """MTU of every interface with RDMA over Ethernet (N06)."""
    expect_rate_gbps: float | None = None
    """Rate of each active RDMA port (N05)."""
    expect_driver: str | None = None
    """Version of the NVIDIA driver (H01)."""
    expect_kernel: str | None = None
    """Release of the kernel (H01)."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, (int, float)) and (value < 0 or not math.isfinite(value)):
                raise ConfigError(f"audit.{item.name} is {value}: it must be a number of at least 0")
        for name in ("drop_share", "slow_share"):
            if getattr(self, name) > 1:
                raise ConfigError(f"audit.{name} is {getattr(self, name)}: it must be at most 1")
