"""The content of a snapshot: the facts of one host and its ranks as they were read, without any judgement.

A fact that could not be read is None, and `Snapshot.unreadable` has the reason under the fact's name. Sets of CPUs are
texts as the kernel writes them (`0-3,8`). docs/audit-rules.md describes the JSON form. Why a GPU lowers its clock are
NVML's bits (nvmlClocksEventReasons of nvml.h): an idle GPU, clocks that a user set, and clocks kept equal for a display
are no faults; the reasons about heat and power are what the node should provide.
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
    """The processors of a node.

    Attributes:
        online: CPUs that can be used.
        offline: CPUs that are present but switched off.
        packages: CPUs of each physical package, by its id.
        cores: CPUs of each core, one per hardware thread.
        caches: every cache, listed once.
        governors: CPUs of each frequency governor; empty if the kernel does not control frequencies.
        driver: frequency driver, like `intel_pstate`; empty if there is none.
        fast: CPUs of the performance cores of a hybrid processor; empty if all cores are alike.
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
    """One NUMA node; `cpus` is empty for a node with memory only."""

    number: int
    cpus: str | None
    distances: tuple[int, ...] | None
    memory_kb: int | None


@dataclass(frozen=True, kw_only=True)
class PciDevice:
    """One GPU or network adapter, or a bridge above one.

    Attributes:
        address: domain, bus, device and function, like `0000:17:00.0`.
        kind: `gpu`, `nic` or `bridge`.
        parents: the path down to it, the host bridge (`pci0000:16`) first; None if it cannot be read.
        numa_node: -1 if the firmware does not say.
        speed_gts, max_speed_gts: speed of the link above it, in GT/s.
        width, max_width: lanes of that link.
        is_virtual_function: whether it is a virtual function (SR-IOV) of an adapter.
        acs_control: a bridge's ACS control register; -1 if it has none, None if it cannot be read (needs root).
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
    """What identical nodes have in common; `eq=False`, so that results can be cached by identity.

    Attributes:
        pci: GPUs, network adapters, and the bridges above them; None if PCI cannot be read.
        num_nvswitches: number of NVSwitches among the PCI devices.
    """

    cpus: Cpus
    numa: tuple[NumaNode, ...] | None
    pci: tuple[PciDevice, ...] | None
    num_nvswitches: int


@dataclass(frozen=True, kw_only=True)
class Gid:
    """One entry of a port's GID table: its kind, like `RoCE v2`, and the network interface behind it."""

    index: int
    kind: str
    net: str


@dataclass(frozen=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA adapter; `rate_gbps` is the rate of all lanes together."""

    number: int
    state: str | None
    phys_state: str | None
    rate_gbps: float | None
    link_layer: str | None
    gids: tuple[Gid, ...]


@dataclass(frozen=True, kw_only=True)
class RdmaDevice:
    """One RDMA adapter, with a name like `mlx5_0`."""

    name: str
    pci: str | None
    firmware: str
    board: str
    ports: tuple[RdmaPort, ...]


@dataclass(frozen=True, kw_only=True)
class NetDevice:
    """One network interface.

    Attributes:
        pci: address of its adapter; empty if it has none.
        kind: `ethernet`, `infiniband`, `loopback` or `other`.
        speed_mbps: None if it is down or virtual.
        is_physical: whether it belongs to an adapter.
        master: the bond or bridge that it is part of.
        shaped_mbps: rate to which a token bucket shapes it; 0 for none, None if the kernel does not say.
        has_route: whether any route to other hosts uses it; None if the routing tables cannot be read.
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
    """What NVML, NVIDIA's management library, says about a GPU; None where it does not answer.

    Attributes:
        links_active, links_inactive: number of NVLinks.
        replays: PCIe packets retransmitted since the driver was loaded.
        throttle_reasons: bits of nvmlClocksEventReasons.
        utilization_percent: share of the last sampling period in which a kernel ran.
        is_ecc_pending: whether the ECC mode will change at the next reset.
        fabric: state of its registration with the fabric manager: `none` (no such fabric), `not started`,
            `in progress`, `completed`, or `failed N` with NVML's error number.
        links_to: number of active NVLinks by the PCI address of what is at their other end, a GPU or a switch.
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
    links_to: dict[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU that a driver manages; others are among the PCI devices only."""

    address: str
    uuid: str | None
    name: str | None
    vbios: str | None
    nvml: Nvml | None


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The operating system and its settings; texts are as in /proc and /sys.

    Attributes:
        is_virtual: whether the host is a virtual machine.
        modules: loaded modules that matter here, with their version or an empty text.
        rdma_holders: modules that have registered with the RDMA stack.
        nvidia_driver: version of NVIDIA's driver; empty if it is not loaded.
        is_nvidia_open: whether the NVIDIA kernel module is the open one.
        has_verbs: whether /dev/infiniband exists.
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
    """Error and drop counters that are not 0, by names like `rdma/mlx5_0/1/symbol_error`.

    Attributes:
        values: counts since boot or the last reset.
        growth: growth during the probe window; None without one.
        window_s: length of the probe window.
    """

    values: dict[str, int]
    growth: dict[str, int] | None
    window_s: float


@dataclass(frozen=True, kw_only=True)
class OtherProcesses:
    """Processes outside the job that used CPUs while the audit watched: those of one user and name on the same CPUs.

    Attributes:
        user: name, or number where it has none.
        name: of the program, as the kernel keeps it; never its arguments.
        count: number of processes.
        used_cpus: their CPU time over the time watched.
        cpus: where they may run; empty if that is not known.
    """

    user: str
    name: str
    count: int
    used_cpus: float
    cpus: str


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy a node is, and with what.

    Attributes:
        averages: the kernel's load averages over 1, 5 and 15 minutes.
        pressure: percentage of the last 10 s in which some or all tasks stood still, by names like `cpu some`.
        window_s: for how long CPU times were watched; 0 if they were not.
        used_cpus: CPU time of everything on the node over the window; None if not watched.
        job_cpus: the part of it that the job itself used.
        stolen_cpus: what the hypervisor gave to other machines meanwhile.
        num_blocked: tasks that waited uninterruptibly, as for I/O, at both ends of the window.
        others: the busiest processes outside the job; None if processes could not be read.
    """

    averages: tuple[float, ...]
    pressure: dict[str, float]
    window_s: float
    used_cpus: float | None
    job_cpus: float
    stolen_cpus: float
    num_blocked: int
    others: tuple[OtherProcesses, ...] | None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory and swap of a node, in bytes.

    Attributes:
        available_bytes: what programs can have without swapping.
        committed_bytes, commit_limit_bytes: what was promised, and may be; the limit holds with overcommit 2 only.
        overcommit: vm.overcommit_memory.
        huge_free_bytes: reserved huge pages that nobody uses.
        swapped_bytes: moved to and from swap during the window of `Load`; None if not watched.
    """

    total_bytes: int
    available_bytes: int
    swap_total_bytes: int
    swap_free_bytes: int
    committed_bytes: int
    commit_limit_bytes: int
    overcommit: int | None
    huge_free_bytes: int
    swapped_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class TimeSync:
    """What the kernel knows of its clock (adjtimex), and, if that is not synchronised, which time daemons run."""

    is_synchronised: bool
    error_s: float
    max_error_s: float
    daemons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankGpu:
    """One of the GPUs that a rank sees."""

    address: str
    uuid: str


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """The facts of one rank of a job, read by the rank itself.

    Attributes:
        cpus: its CPU mask.
        memory_nodes: NUMA nodes that it may allocate memory on.
        memory_policy: its memory policy, like `default` or `bind:0`.
        cgroup_cpus: CPUs of its cgroup.
        quota_cpus: its CPU quota, in CPUs; 0 for no limit.
        memory_max_bytes: its memory limit; 0 for no limit.
        locked_bytes, open_files: its limits of locked memory and open files; -1 for no limit.
        gpus: the GPUs that it sees, in its order; None if that is not known.
        gpu: index into `gpus` of the GPU that it uses; -1 for none.
        gpu_source: where its GPUs are known from: `nvml`, `session` or `environment`.
        mpi_size: size of MPI_COMM_WORLD; None if MPI was not checked, -1 if it cannot be loaded.
        variables: the variables of its environment that matter here.
        user_conf: variables of ~/.nccl.conf.
        nccl_version: version like `2.27.3`; empty if unknown.
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
    """One host: everything that the rules check."""

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
    load: Load | None = None
    memory: Memory | None = None
    time_sync: TimeSync | None = None
    unreadable: dict[str, str] = field(default_factory=dict)
