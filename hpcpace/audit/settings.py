"""From which figures on the audit reports a problem, and what every node must have: the settings of `[audit]`."""

from __future__ import annotations

from hpcpace.core.config import Section, number
from hpcpace.core.records import dataclass


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Section, section="audit"):
    """Thresholds from which the audit reports a problem, and what every node must have: docs/audit-rules.md."""

    ignore: tuple[str, ...] = ()
    """Rules that do not run."""
    dataloader_workers: int = number(0, 0)
    """Data-loading processes per rank, each of which needs a CPU (A05)."""
    roce_mtu: int = number(4200, 0)
    """Smallest MTU of an Ethernet interface that carries RDMA (N06)."""
    link_errors: int = number(10, 0)
    """Link errors since boot above which a port is reported (N08)."""
    congestion_errors: int = number(1000, 0)
    """Packets lost or retransmitted since boot above which a port is reported (N08)."""
    drop_share: float = number(0.001, 0, 1)
    """Share of dropped packets above which an interface is reported (N08)."""
    pcie_errors: int = number(100, 0)
    """Corrected errors above which a PCIe link is reported (P04)."""
    slow_share: float = number(0.5, 0, 1)
    """Share of the fastest interface's speed below which a selected interface is slow (N03)."""
    least_locked: int = number(1 << 30, 0, 1 << 62)
    """Bytes of memory that a rank must at least be allowed to lock for RDMA (N04)."""
    least_shm: int = number(1 << 30, 0, 1 << 62)
    """Smallest size of /dev/shm in bytes (S06)."""
    least_open_files: int = number(1024, 0)
    """Number of files that a rank must at least be allowed to open (S06)."""
    foreign_share: float = number(0.1, 0, 1)
    """Share of a node's CPUs used by others from which its load is reported (S07)."""
    stray_cpus: float = number(0.2, 0)
    """CPUs that processes of others use, or a hypervisor takes, from which they are reported (S07, S08)."""
    available_share: float = number(0.05, 0, 1)
    """Share of memory that must be available (S09)."""
    swap_bytes_per_s: int = number(1 << 20, 0, 1 << 62)
    """Bytes per second to and from swap from which a node is reported (S09)."""
    clock_error_s: float = number(0.1, 0)
    """Estimated error of a synchronised clock in seconds above which it is reported (S10)."""
    nodes_per_leaf: int = number(0, 0)
    """Nodes per leaf switch, to compute the smallest number of leaves; 0 for unknown (H02)."""
    expect_gpus: int | None = number(None, 0)
    """Number of GPUs of each node (H01)."""
    expect_nics: int | None = number(None, 0)
    """Number of active RDMA ports of each node (H01)."""
    expect_mtu: int | None = number(None, 0)
    """MTU of every Ethernet interface that carries RDMA (N06)."""
    expect_rate_gbps: float | None = number(None, 0)
    """Rate of each active RDMA port in Gb/s (N05)."""
    expect_driver: str | None = None
    """Version of the NVIDIA driver (H01)."""
    expect_kernel: str | None = None
    """Kernel release (H01)."""
