"""The facts of one host and its ranks as they were read, and queries on its hardware, without any judgement.

docs/audit.md describes the path classes: SYS between NUMA nodes, NODE between host bridges of one NUMA node, PHB below
one host bridge, PXB over several bridges, PIX over one switch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from functools import cached_property, lru_cache

from hpcpace.audit import cpusets
from hpcpace.audit.tree import Unreadable
from hpcpace.core.records import dataclass

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


ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS", "UNKNOWN")
"""Path classes, the nearest first."""

NO_REASON = "not in the snapshot"

# GPUs that reach their processor over NVLink-C2C: GH200, GB200, GB300. PCI IDs, pci.ids 2025.
_C2C_DEVICES = frozenset({"0x2342", "0x2345", "0x2348", "0x2941", "0x31c2", "0x31c3"})


@lru_cache(maxsize=256)
def hardware_view(hardware: Hardware) -> HardwareView:
    """Return the view of a node's hardware; nodes that share a `Hardware` share it."""
    return HardwareView(hardware)


class HardwareView:
    """A node's hardware with what is derived from it; every query raises Unreadable if a fact is missing."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._classes: dict[tuple[str, str], str] = {}
        self._kinds: dict[str, tuple[PciDevice, ...]] = {}

    @cached_property
    def online(self) -> int:
        """CPUs that can be used."""
        return parsed(self.hardware.cpus.online, "which CPUs are online", "cpus/online")

    @cached_property
    def fast(self) -> int:
        """CPUs of the performance cores of a hybrid processor; all CPUs on other processors."""
        return parsed(self.hardware.cpus.fast, "which cores are fast") & self.online or self.online

    @cached_property
    def cores(self) -> tuple[int, ...]:
        """CPUs of each core."""
        if self.hardware.cpus.cores is None:
            raise Unreadable("the siblings of the CPUs", "cpus/cores")
        return tuple(parsed(text, "the siblings of the CPUs") for text in self.hardware.cpus.cores)

    @cached_property
    def numa_cpus(self) -> Mapping[int, int]:
        """CPUs of each NUMA node that has any, by node number; a kernel without NUMA has one node with all CPUs."""
        if self.hardware.numa is None:
            raise Unreadable("the NUMA nodes", "numa")
        found = {
            node.number: parsed(node.cpus, f"the CPUs of NUMA node {node.number}", f"numa/{node.number}/cpus")
            for node in self.hardware.numa
        }
        return {number: cpus for number, cpus in found.items() if cpus}

    @cached_property
    def devices(self) -> Mapping[str, PciDevice]:
        """PCI devices by address."""
        if self.hardware.pci is None:
            raise Unreadable("the PCI devices", "pci")
        return {device.address: device for device in self.hardware.pci}

    def of_kind(self, kind: str) -> tuple[PciDevice, ...]:
        """Return the devices of a kind, in order of their address."""
        if kind not in self._kinds:
            self._kinds[kind] = tuple(device for device in self.devices.values() if device.kind == kind)
        return self._kinds[kind]

    def whole_cores(self, cpus: int) -> int:
        """Return all CPUs of the cores that a set of CPUs touches."""
        return sum_of(core for core in self.cores if core & cpus)

    def nodes_of(self, cpus: int) -> list[int]:
        """Return the numbers of the NUMA nodes that a set of CPUs touches."""
        return [number for number, own in self.numa_cpus.items() if own & cpus]

    def node_of(self, address: str) -> int:
        """Return the NUMA node with CPUs that a PCI device belongs to; -1 counts only if there is a single node.

        Without a numa_node it is the node that has all CPUs in the device's local_cpus.

        Raises:
            Unreadable: the firmware does not say, or names a node without CPUs whose nearest node is not known.
        """
        device = self.device(address)
        nodes = self.numa_cpus
        if len(nodes) == 1:
            return next(iter(nodes))
        if device.numa_node is not None and device.numa_node in nodes:
            return device.numa_node
        if device.numa_node is not None and device.numa_node >= 0:
            # A node with memory only, such as a GPU's: take the nearest node with CPUs.
            return self._nearest_with_cpus(device.numa_node)
        near = self.nodes_near(device)
        if len(near) == 1:
            return near[0]
        if device.numa_node is None:
            raise Unreadable(f"the NUMA node of {address}", f"pci/{address}/numa_node")
        raise Unreadable(f"the NUMA node of {address}: the firmware reports {device.numa_node}")

    def nodes_near(self, device: PciDevice) -> list[int]:
        """Return the NUMA nodes of a device's local CPUs; none if these are not known."""
        return self.nodes_of(parsed(device.local_cpus or "", f"the CPUs near {device.address}"))

    def device(self, address: str) -> PciDevice:
        """Return a PCI device.

        Raises:
            Unreadable: no device has this address.
        """
        found = self.devices.get(address)
        if found is None:
            raise Unreadable(f"the PCI device {address or 'of the GPU'}")
        return found

    def port_of(self, device: PciDevice) -> PciDevice | None:
        """Return the bridge right above a device; None if it is attached to the host bridge itself."""
        if device.parents is None:
            raise Unreadable(f"the PCI path to {device.address}", f"pci/{device.address}/parents")
        return self.device(device.parents[-1]) if len(device.parents) > 1 else None

    def class_of(self, first: str, second: str) -> str:
        """Return the class of the path between two PCI devices; UNKNOWN if the firmware hides it."""
        key = (first, second)
        if key not in self._classes:
            self._classes[key] = self._class_of(self.device(first), self.device(second))
        return self._classes[key]

    def is_c2c(self, address: str) -> bool:
        """Return whether a GPU reaches its processor over NVLink-C2C."""
        device = self.device(address)
        return device.vendor == "0x10de" and device.device in _C2C_DEVICES

    def _class_of(self, first: PciDevice, second: PciDevice) -> str:
        one, other = first.parents, second.parents
        if one and other and one[0] == other[0]:
            common = 0
            while common < min(len(one), len(other)) and one[common] == other[common]:
                common += 1
            if common == 1:
                return "PHB"
            return "PIX" if max(len(one), len(other)) - common <= 1 else "PXB"
        try:
            is_near = self.node_of(first.address) == self.node_of(second.address)
        except Unreadable:
            return "UNKNOWN"
        if not is_near:
            return "SYS"
        return "NODE" if one and other else "UNKNOWN"

    def _nearest_with_cpus(self, number: int) -> int:
        nodes = self.hardware.numa or ()
        numbers = [node.number for node in nodes]
        distances = next((node.distances for node in nodes if node.number == number), None)
        if distances is None or len(distances) != len(numbers):
            raise Unreadable(f"the distances of NUMA node {number}")
        if not self.numa_cpus:
            raise Unreadable("which NUMA node has CPUs: all are listed without any")
        by_number = dict(zip(numbers, distances, strict=True))
        return min(self.numa_cpus, key=lambda other: by_number[other])


def class_of_nccl(physical: str, *, has_gdr: bool, is_c2c: bool) -> str:
    """Return the class that NCCL uses: it has no NODE, and treats PIX and PXB as PHB if GPUDirect RDMA is off.

    Over C2C a NIC of the same processor is P2C (NCCL 2.27, src/graph/topo.h).
    """
    if physical in ("PIX", "PXB"):
        return physical if has_gdr else "PHB"
    if physical in ("PHB", "NODE"):
        return "P2C" if is_c2c else "PHB"
    return physical


def parsed(text: str | None, what: str, fact: str = "") -> int:
    """Return the set of CPUs that a fact lists.

    Raises:
        Unreadable: the fact could not be read, or is damaged.
    """
    if text is None:
        raise Unreadable(what, fact)
    try:
        return cpusets.parse_list(text)
    except ValueError:
        raise Unreadable(f"{what}: damaged") from None


def sum_of(sets: Iterable[int]) -> int:
    """Return the union of sets of CPUs."""
    union = 0
    for cpus in sets:
        union |= cpus
    return union
