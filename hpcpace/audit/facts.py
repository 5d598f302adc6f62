"""What a snapshot holds: the facts of one host and of its ranks, as read, without any judgement.

None stands for a fact that could not be read; `Snapshot.unreadable` has the reason under the fact's name. Sets of CPUs
are texts as the kernel writes them (`0-3,8`). docs/audit.md describes the same as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SCHEMA = "hpcpace-audit-snapshot/1"


@dataclass(frozen=True, kw_only=True)
class Cache:
    """One cache and the CPUs that share it."""

    level: int
    kind: str
    size: str
    cpus: str


@dataclass(frozen=True, kw_only=True)
class Cpus:
    """The processors.

    Attributes:
        online: CPUs that can be used.
        offline: CPUs that are there and switched off.
        packages: CPUs of each physical package, by its id.
        cores: CPUs of each core, one or more threads.
        caches: each cache once.
        governors: CPUs of each frequency governor; empty where frequencies are not the kernel's matter.
        driver: what sets frequencies, like `intel_pstate`; empty where nothing does.
        fast: CPUs of the performance cores of a hybrid processor; empty where all are alike.
    """

    online: str | None
    offline: str | None
    model: str | None
    packages: dict[str, str] | None
    cores: tuple[str, ...] | None
    caches: tuple[Cache, ...] | None
    governors: dict[str, str] | None
    driver: str
    fast: str


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """One NUMA node; `cpus` is empty for one of memory alone."""

    number: int
    cpus: str | None
    distances: tuple[int, ...] | None
    memory_kb: int | None


@dataclass(frozen=True, kw_only=True)
class PciDevice:
    """One GPU, network adapter, or bridge above one.

    Attributes:
        address: domain, bus, device and function, like `0000:17:00.0`.
        kind: `gpu`, `nic` or `bridge`.
        parents: the way down to it, the host bridge (`pci0000:16`) first; None where it cannot be read.
        numa_node: -1 where the firmware does not say.
        speed_gts, max_speed_gts: of the link above it, in GT/s.
        width, max_width: lanes of that link.
        is_virtual_function: whether it is a part of an adapter, made for virtual machines.
        acs_control: a bridge's ACS control register; -1 where it has none, None where it cannot be read (needs root).
    """

    address: str
    kind: str
    vendor: str | None
    device: str | None
    parents: tuple[str, ...] | None
    numa_node: int | None
    local_cpus: str | None
    speed_gts: float | None
    max_speed_gts: float | None
    width: int | None
    max_width: int | None
    driver: str
    iommu_group: str
    is_virtual_function: bool
    acs_control: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Hardware:
    """What nodes of one kind have in common; `eq=False`, so that what rules compute from it can be kept by identity.

    Attributes:
        pci: GPUs, network adapters, and the bridges above them; None where PCI cannot be read.
        num_nvswitches: NVIDIA switches among the PCI devices.
    """

    cpus: Cpus
    numa: tuple[NumaNode, ...] | None
    pci: tuple[PciDevice, ...] | None
    num_nvswitches: int


@dataclass(frozen=True, kw_only=True)
class Gid:
    """One entry of a port's table of addresses: `RoCE v2`, and the network device behind it."""

    index: int
    kind: str
    net: str


@dataclass(frozen=True, kw_only=True)
class RdmaPort:
    """One port; `rate_gbps` of all lanes together."""

    number: int
    state: str | None
    phys_state: str | None
    rate_gbps: float | None
    link_layer: str | None
    gids: tuple[Gid, ...]


@dataclass(frozen=True, kw_only=True)
class RdmaDevice:
    """One adapter that moves data by RDMA, by its name (`mlx5_0`)."""

    name: str
    pci: str | None
    firmware: str
    board: str
    ports: tuple[RdmaPort, ...]


@dataclass(frozen=True, kw_only=True)
class NetDevice:
    """One network interface.

    Attributes:
        pci: address of its adapter; empty for one that is none's.
        kind: `ethernet`, `infiniband`, `loopback` or `other`.
        speed_mbps: None where down or virtual.
        is_physical: whether an adapter is behind it.
        master: the bond or bridge that it is part of.
        shaped_mbps: rate that a token bucket holds what it sends to; 0 for none, None where the kernel does not say.
        has_route: whether any route to others leads over it; None where the kernel's tables cannot be read.
    """

    name: str
    pci: str
    kind: str
    mtu: int | None
    speed_mbps: int | None
    state: str | None
    is_physical: bool
    master: str
    shaped_mbps: float | None = 0.0
    has_route: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Nvml:
    """What NVIDIA's management library says of a GPU; None where it does not.

    Attributes:
        links_active, links_inactive: NVLinks.
        replays: PCIe packets sent again since the driver was loaded.
        throttle_reasons: bits of nvmlClocksEventReasons.
        utilization_percent: share of the last sampling period in which a kernel ran.
        is_ecc_pending: whether ECC is to change at the next reset.
        fabric: how far the fabric manager has come with it: `none` (no such fabric), `not started`, `in progress`,
            `completed`, or `failed N` with NVML's number of the error.
    """

    links_active: int | None
    links_inactive: int | None
    replays: int | None
    throttle_reasons: int | None
    power_limit_w: float | None
    power_default_w: float | None
    sm_clock_limit_mhz: int | None
    sm_clock_max_mhz: int | None
    utilization_percent: int | None
    is_ecc_pending: bool | None
    is_persistent: bool | None
    is_mig: bool | None
    fabric: str | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU of a driver; those without one are among the PCI devices only."""

    address: str
    uuid: str | None
    name: str | None
    vbios: str | None
    nvml: Nvml | None


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The operating system and its settings, texts as in /proc and /sys.

    Attributes:
        is_virtual: whether a hypervisor is below.
        modules: of those that matter here, which are loaded, with their version or an empty text.
        rdma_holders: modules that have registered with the RDMA stack.
        nvidia_driver: version; empty where it is not loaded.
        is_nvidia_open: whether the NVIDIA kernel module is the open one.
        has_verbs: whether /dev/infiniband has a device for programs.
        nccl_conf: variables of /etc/nccl.conf.
    """

    release: str | None
    command_line: str | None
    is_virtual: bool | None
    numa_balancing: int | None
    huge_pages: str | None
    huge_pages_defrag: str | None
    modules: dict[str, str] | None
    rdma_holders: tuple[str, ...] | None
    nvidia_driver: str | None
    is_nvidia_open: bool | None
    has_verbs: bool
    shm_bytes: int | None
    memory_bytes: int | None
    nccl_conf: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Counters of errors and drops that are not 0, by `rdma/mlx5_0/1/symbol_error` and the like.

    Attributes:
        values: since the boot or the last reset.
        growth: within the probe window; None where there was none.
        window_s: length of the probe window.
    """

    values: dict[str, int]
    growth: dict[str, int] | None
    window_s: float


@dataclass(frozen=True, kw_only=True)
class RankGpu:
    """One GPU that a rank sees, in the order in which it sees them."""

    address: str
    uuid: str


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What one rank of a job has, read by the rank itself.

    Attributes:
        cpus: its mask.
        memory_nodes: NUMA nodes that it may take memory from.
        memory_policy: the policy of its first mapping, like `default` or `bind:0`.
        cgroup_cpus: CPUs of its cgroup.
        quota_cpus: processor time it gets at most, in CPUs; 0 for no limit.
        memory_max_bytes: 0 for no limit.
        locked_bytes, open_files: limits; -1 for none.
        gpus: those that it sees; None where that cannot be told.
        gpu: index into `gpus` of the one that it uses, -1 for none.
        gpu_source: `nvml`, `session` or `environment`.
        mpi_size: size of MPI's world; None where MPI was not asked, -1 where it cannot be loaded.
        variables: those of its environment that matter here.
        user_conf: variables of ~/.nccl.conf.
        nccl_version: like `2.27.3`; empty where unknown.
    """

    rank: int
    local_rank: int
    world_size: int
    launcher: str
    cpus: str | None
    memory_nodes: str | None
    memory_policy: str | None
    cgroup_cpus: str | None
    quota_cpus: float | None
    memory_max_bytes: int | None
    locked_bytes: int | None
    open_files: int | None
    gpus: tuple[RankGpu, ...] | None
    gpu: int
    gpu_source: str
    mpi_size: int | None
    variables: dict[str, str]
    user_conf: dict[str, str]
    nccl_version: str


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One host: everything that the rules look at."""

    schema: str = SCHEMA
    hpcpace_version: str
    host: str
    boot_id: str
    taken_unix_ns: int
    is_live: bool
    hardware: Hardware
    rdma: tuple[RdmaDevice, ...] | None
    net: tuple[NetDevice, ...] | None
    gpus: tuple[Gpu, ...] | None
    kernel: Kernel
    counters: Counters
    ranks: tuple[RankFacts, ...] = ()
    unreadable: dict[str, str] = field(default_factory=dict)
