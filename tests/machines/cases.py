"""The machines that the audit is tested on, each with something known about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcpace.audit.facts import Counters, Load, Memory, Nvml, OtherProcesses, Snapshot, TimeSync
from hpcpace.audit.job import TopoMatrix, read_topo
from hpcpace.audit.nccl_log import NcclLog, read_nccl_log
from hpcpace.audit.settings import AuditConfig
from hpcpace.audit.snapshot import take_tree
from tests.machines.machine import (
    AMD,
    CX7,
    GEN1,
    GEN3,
    GEN4,
    GPU,
    H100,
    IB_NIC,
    MELLANOX,
    NIC,
    NVIDIA,
    SLINGSHOT,
    VIRTIO,
    Machine,
    dgx_badly_bound,
    dgx_h100,
    threaded,
)
from tests.machines.real import dgx_spark, magny_cours_sparse, raptor_lake, xeon_e7_4870

LOGS = Path(__file__).parents[1] / "data" / "nccl-logs"

HEALTHY = Nvml(
    links_active=18,
    links_inactive=0,
    replays=0,
    throttle_reasons=0,
    power_limit_w=700.0,
    power_default_w=700.0,
    sm_clock_limit_mhz=1980,
    sm_clock_max_mhz=1980,
    utilization_percent=0,
    is_ecc_pending=False,
    is_persistent=True,
    is_mig=False,
)


_GIB = 1 << 30
QUIET_LOAD = Load(
    averages=(7.9, 7.5, 4.0),
    pressure={"cpu some": 0.5, "memory full": 0.0},
    window_s=1.0,
    used_cpus=8.1,
    job_cpus=8.0,
    stolen_cpus=0.0,
    num_blocked=0,
    others=(OtherProcesses(user="root", name="slurmd", count=1, used_cpus=0.06, cpus="0-15"),),
)
QUIET_MEMORY = Memory(
    total_bytes=64 * _GIB,
    available_bytes=50 * _GIB,
    swap_total_bytes=8 * _GIB,
    swap_free_bytes=8 * _GIB,
    committed_bytes=90 * _GIB,
    commit_limit_bytes=40 * _GIB,
    overcommit=0,
    huge_free_bytes=0,
    swapped_bytes=0,
)
SYNCHRONISED = TimeSync(is_synchronised=True, error_s=0.0002, max_error_s=0.03, daemons=("chronyd",))
QUIET = {"load": QUIET_LOAD, "memory": QUIET_MEMORY, "time_sync": SYNCHRONISED}
CROWDED = {
    "load": dataclasses.replace(
        QUIET_LOAD,
        averages=(30.2, 28.0, 20.1),
        used_cpus=15.9,
        stolen_cpus=0.4,
        num_blocked=9,
        others=(
            OtherProcesses(user="ann", name="python", count=6, used_cpus=6.0, cpus="0-7"),
            OtherProcesses(user="ben", name="make", count=1, used_cpus=1.2, cpus="100"),
        ),
    ),
    "memory": dataclasses.replace(QUIET_MEMORY, available_bytes=2 * _GIB, swap_free_bytes=_GIB, swapped_bytes=5 << 20),
    "time_sync": TimeSync(is_synchronised=False, error_s=16.0, max_error_s=16.0, daemons=()),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Some hosts, and what a copied tree cannot hold: NVML's answers, growth of counters, MPI, a log, settings."""

    hosts: Callable[[], list[Machine]]
    nvml: Mapping[str, Nvml] | None = None
    default_nvml: Nvml | None = None
    growth: Mapping[str, int] | None = None
    mpi_size: int | None = None
    nccl_version: str = ""
    log: NcclLog | None = None
    topo: tuple[TopoMatrix, ...] = ()
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: AuditConfig = dataclasses.field(default_factory=AuditConfig)

    def snapshots(self, folder: Path) -> list[Snapshot]:
        made = []
        for number, machine in enumerate(self.hosts()):
            made.append(self.patched(take_tree(machine.write(folder / str(number)))))
        return made

    def patched(self, snapshot: Snapshot) -> Snapshot:
        if snapshot.gpus is not None and (self.nvml or self.default_nvml):
            gpus = tuple(
                dataclasses.replace(gpu, nvml=(self.nvml or {}).get(gpu.address, self.default_nvml))
                for gpu in snapshot.gpus
            )
            unreadable = {name: reason for name, reason in snapshot.unreadable.items() if name != "nvml"}
            snapshot = dataclasses.replace(snapshot, gpus=gpus, unreadable=unreadable)
        if self.growth is not None:
            values = {**snapshot.counters.values, **self.growth}
            counters = Counters(values=values, growth=dict(self.growth), window_s=2.0)
            snapshot = dataclasses.replace(snapshot, counters=counters)
        unreadable = snapshot.unreadable | self.facts.get("unreadable", {})
        snapshot = dataclasses.replace(snapshot, **{**self.facts, "unreadable": unreadable})
        ranks = tuple(
            dataclasses.replace(rank, mpi_size=self.mpi_size, nccl_version=self.nccl_version) for rank in snapshot.ranks
        )
        return dataclasses.replace(snapshot, ranks=ranks)


def gb200(host: str = "gb1") -> Machine:
    """2 Grace processors of 72 cores with 2 Blackwell GPUs each over C2C; GPU memory as separate NUMA nodes."""
    machine = Machine(host, kernel="6.8.0-1021-nvidia-64k")
    machine.files["proc/cpuinfo"] = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"
    machine.files |= {"sys/class/dmi/id/sys_vendor": "NVIDIA", "sys/class/dmi/id/product_name": "GB200 NVL"}
    empty: dict[int, list[str]] = {node: [] for node in range(2, 34)}
    machine.processors(
        {0: threaded(0, 72), 1: threaded(72, 72), **empty}, packages={0: [0, *empty], 1: [1]}, driver="cppc_cpufreq"
    )
    for number, domain in enumerate(("0008", "0009", "0018", "0019")):
        numa, cpus = number // 2, ("0-71", "72-143")[number // 2]
        machine.pci(
            f"pci{domain}:00/{domain}:00:00.0/{domain}:01:00.0",
            GPU,
            NVIDIA,
            "0x2941",
            numa=numa,
            cpus=cpus,
            driver="nvidia",
        )
    for number, domain in enumerate(("0000", "0002", "0010", "0012")):
        numa, cpus = number // 2, ("0-71", "72-143")[number // 2]
        address = f"{domain}:03:00.0"
        machine.pci(
            f"pci{domain}:00/{domain}:00:00.0/{domain}:01:00.0/{domain}:02:00.0/{address}",
            IB_NIC,
            MELLANOX,
            CX7,
            numa=numa,
            cpus=cpus,
        )
        machine.rdma(f"mlx5_{number}", address).net(f"ibp{number}", address, mtu=4092, kind=32)
    machine.nvidia(*(f"{domain}:01:00.0" for domain in ("0008", "0009", "0018", "0019")), name="GB200")
    for rank in range(4):
        first = rank * 36
        environ = {"OMP_NUM_THREADS": "36"}
        machine.rank(rank, f"{first}-{first + 35}", world=4, mems="0-33", environ=environ)
    return machine


_MI250X_NUMA = (3, 3, 1, 1, 0, 0, 2, 2)
"""NUMA node of each GPU in PCI order, as on Frontier: its documentation gives the order 4,5,2,3,6,7,0,1."""


def mi250x(host: str = "frontier1", *, in_order: bool = True) -> Machine:
    """4 MI250X, 8 GPUs, whose order runs against the NUMA nodes; Slingshot; 64 cores in 8 L3 regions."""
    machine = Machine(host, kernel="5.14.21-150400.24.46_12.0.83-cray_shasta_c")
    machine.processors(
        {node: threaded(16 * node, 16, 64) for node in range(4)},
        l3=[f"{8 * l3}-{8 * l3 + 7},{64 + 8 * l3}-{64 + 8 * l3 + 7}" for l3 in range(8)],
        driver="acpi-cpufreq",
    )
    roots = ("c0", "c8", "d0", "d8", "e0", "e8", "f0", "f8")
    addresses = []
    for number, numa in enumerate(_MI250X_NUMA):
        bus = int(roots[number], 16)
        root, gpu = f"{bus:02x}", f"0000:{bus + 1:02x}:00.0"
        cpus = f"{16 * numa}-{16 * numa + 15},{64 + 16 * numa}-{79 + 16 * numa}"
        machine.pci(
            f"pci0000:{root}/0000:{root}:01.1/{gpu}",
            "0x038000",
            AMD,
            "0x7408",
            numa=numa,
            cpus=cpus,
            speed=(GEN4, GEN4),
            driver="amdgpu",
        )
        place = f"sys/devices/pci0000:{root}/0000:{root}:01.1/{gpu}"
        machine.files |= {
            f"{place}/unique_id": f"{0xABC0 + number:x}",
            f"{place}/product_name": "AMD INSTINCT MI250X",
            f"{place}/vbios_version": "113-D65209-073",
        }
        addresses.append(gpu)
        machine.folders.add(f"sys/module/amdgpu/drivers/pci:amdgpu/{gpu}")
        if number % 2:
            nic = f"0000:{bus + 2:02x}:00.0"
            machine.pci(
                f"pci0000:{root}/0000:{root}:02.1/{nic}",
                NIC,
                SLINGSHOT,
                "0x0501",
                numa=numa,
                cpus=cpus,
                speed=(GEN4, GEN4),
            )
            machine.net(f"hsn{number // 2}", nic, mtu=9000, speed=200_000)
    order = (4, 5, 2, 3, 6, 7, 0, 1)
    for rank in range(8):
        seen = order[rank] if in_order else rank
        first = 8 * rank
        machine.rank(
            rank,
            f"{first}-{first + 7}",
            world=8,
            mems="0-3",
            environ={"ROCR_VISIBLE_DEVICES": str(seen), "OMP_NUM_THREADS": "8"},
        )
    return machine


def virtual_machine() -> Machine:
    """A guest of 2 NUMA nodes that does not know where its GPUs and adapters are."""
    machine = Machine("vm1", flags="fpu vme hypervisor", kernel="5.15.0-1064-azure")
    machine.processors({0: threaded(0, 48), 1: threaded(48, 48)}, governor="")
    for number in range(4):
        gpu, nic = f"{number + 1:04x}:00:00.0", f"{number + 0x101:04x}:00:02.0"
        machine.pci(
            f"pci{number + 1:04x}:00/{gpu}", GPU, NVIDIA, "0x20b2", speed=(GEN4, GEN4), corrected=None, driver="nvidia"
        )
        machine.pci(
            f"pci{number + 0x101:04x}:00/{nic}", IB_NIC, MELLANOX, "0x101c", width=None, speed=None, corrected=None
        )
        machine.rdma(f"mlx5_{number}", nic, rate="200 Gb/sec (4X HDR)")
    machine.nvidia(*(f"{number + 1:04x}:00:00.0" for number in range(4)), is_open=False, name="A100-SXM4-80GB")
    machine.net("eth0", mtu=1500)
    for rank in range(4):
        machine.rank(rank, f"{rank * 24}-{rank * 24 + 23}", world=4, environ={"OMP_NUM_THREADS": "24"})
    return machine


def small_node(host: str, *, ranks: int = 2, kernel: str = "6.8.0-51-generic") -> Machine:
    """One socket of 16 cores, 2 GPUs and 2 Ethernet adapters with RDMA, GPU and adapter below one host bridge."""
    machine = Machine(host, kernel=kernel).processors({0: threaded(0, 16)})
    for number, root in enumerate(("10", "20")):
        bus = int(root, 16)
        gpu, nic = f"0000:{bus + 1:02x}:00.0", f"0000:{bus + 2:02x}:00.0"
        machine.pci(
            f"pci0000:{root}/0000:{root}:01.0/{gpu}",
            GPU,
            NVIDIA,
            "0x20b5",
            numa=0,
            cpus="0-15",
            speed=(GEN4, GEN4),
            driver="nvidia",
        ).slot(f"0000:{root}:01.0", speed=GEN4)
        machine.pci(
            f"pci0000:{root}/0000:{root}:02.0/{nic}", NIC, MELLANOX, "0x101d", numa=0, cpus="0-15", speed=(GEN4, GEN4)
        )
        machine.rdma(
            f"mlx5_{number}",
            nic,
            layer="Ethernet",
            rate="100 Gb/sec (4X EDR)",
            gids={0: ("IB/RoCE v1", f"ens{number}"), 3: ("RoCE v2", f"ens{number}")},
        ).net(f"ens{number}", nic, mtu=9000, speed=100_000)
    machine.nvidia("0000:11:00.0", "0000:21:00.0", name="A100-PCIE-80GB")
    for rank in range(ranks):
        machine.rank(rank, f"{rank * 8}-{rank * 8 + 7}", world=ranks, mems="0", environ={"OMP_NUM_THREADS": "8"})
    return machine


def nic_at_x8() -> Machine:
    machine = small_node("narrow1")
    machine.files["sys/devices/pci0000:10/0000:10:02.0/0000:12:00.0/current_link_width"] = "8"
    machine.files["sys/devices/pci0000:20/0000:20:02.0/0000:22:00.0/current_link_speed"] = GEN3
    machine.files["sys/devices/pci0000:20/0000:20:02.0/0000:22:00.0/aer_dev_correctable"] = "TOTAL_ERR_COR 4711\n"
    return machine


def card_in_x8_slot() -> Machine:
    machine = small_node("slot1").slot("0000:20:01.0", width=8, speed=GEN4)
    machine.files["sys/devices/pci0000:20/0000:20:01.0/0000:21:00.0/current_link_width"] = "8"
    machine.files["sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/current_link_speed"] = GEN1
    return machine


def mtu_differs() -> list[Machine]:
    machines = [small_node(f"n{number}", ranks=0) for number in range(1, 5)]
    for number, machine in enumerate(machines):
        for local in range(2):
            addr = f"top.leaf{number // 2}.n{number + 1}"
            machine.rank(
                2 * number + local,
                f"{local * 8}-{local * 8 + 7}",
                world=8,
                local=local,
                mems="0",
                environ={"SLURM_TOPOLOGY_ADDR": addr, "OMP_NUM_THREADS": "8"},
            )
    machines[1].files["sys/class/net/ens0/mtu"] = "1500"
    machines[2].files["sys/class/infiniband/mlx5_1/ports/1/rate"] = "50 Gb/sec (2X EDR)"
    machines[3].files["sys/class/infiniband/mlx5_0/ports/1/state"] = "1: DOWN"
    machines[3].files["sys/class/infiniband/mlx5_0/ports/1/phys_state"] = "3: Disabled"
    machines[3].files["proc/driver/nvidia/version"] = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  x\n"
    )
    machines[2].files["sys/class/net/ens1/speed"] = "50000"
    for machine in machines:
        machine.net("eth0", mtu=1500, speed=1_000).files["sys/class/net/docker0/mtu"] = "1500"
        machine.files["sys/class/infiniband/mlx5_1/ports/1/counters/symbol_error"] = "99"
    return machines


def cgroup_cut() -> Machine:
    """A step that the cgroup has left 4 of 16 cores; ranks without GPUs on 2 NUMA nodes."""
    machine = Machine("cut1", mounts="shm /dev/shm tmpfs rw,nosuid,size=65536k 0 0\n")
    machine.processors({0: threaded(0, 8), 1: threaded(8, 8)}, governor="schedutil", driver="acpi-cpufreq")
    machine.net("eth0", mtu=1500, speed=25_000)
    for rank in range(4):
        machine.rank(
            rank, "6-9", world=4, cgroup="6-9", quota="200000 100000", environ={"OMP_NUM_THREADS": "4"}, mems="0-1"
        )
    machine.files["etc/nccl.conf"] = "NCCL_BUFFSIZE=1048576\n# a comment\nNCCL_DEBUG=WARN\n"
    return machine


def siblings_shared() -> Machine:
    machine = Machine("smt1").processors({0: threaded(0, 8, 8)}).net("eth0", speed=10_000)
    for rank, cpus in enumerate(("0-3", "8-11", "4-5", "6-7")):
        machine.rank(rank, cpus, world=4, mems="0", environ={"OMP_NUM_THREADS": "2"})
    return machine


def hybrid_cpu() -> Machine:
    cores = [*[f"{2 * core},{2 * core + 1}" for core in range(6)], *map(str, range(12, 20))]
    machine = Machine("hybrid1").processors({0: cores}, governor="powersave").hybrid("0-11", "12-19")
    machine.net("enp0s1", speed=1_000)
    for rank, (cpus, policy) in enumerate((("0-11", "close"), ("12-19", "false"))):
        environ = {"OMP_NUM_THREADS": "8", "OMP_PROC_BIND": policy, "OMP_PLACES": "cores"}
        machine.rank(rank, cpus, world=2, mems="0", environ=environ)
    return machine


def offline_cpus() -> Machine:
    machine = Machine("offline1").processors({0: threaded(0, 6), 1: threaded(8, 4)}, offline="6-7,12-15")
    machine.net("eth0", speed=10_000)
    for rank, cpus in enumerate(("0-4", "5,8-11")):
        machine.rank(rank, cpus, world=2, environ={"OMP_NUM_THREADS": "5"})
    return machine


def sparse_numa() -> Machine:
    machine = Machine("sparse1", kernel="5.14.0-427.el9.ppc64le")
    machine.files["proc/cpuinfo"] = "processor\t: 0\ncpu\t\t: POWER9, altivec supported\n"
    machine.files |= {"sys/class/dmi/id/sys_vendor": "IBM", "sys/class/dmi/id/product_name": "8335-GTH"}
    memory: dict[int, list[str]] = {node: [] for node in (252, 253, 254, 255)}
    numa = {0: threaded(0, 20), 8: threaded(20, 20)}
    near = {252: (80, 40, 10, 80, 80, 80), 253: (80, 40, 80, 10, 80, 80)}
    far = {254: (40, 80, 80, 80, 10, 80), 255: (40, 80, 80, 80, 80, 10)}
    cpu_rows = {0: (10, 40, 80, 80, 80, 80), 8: (40, 10, 80, 80, 80, 80)}
    machine.processors({**numa, **memory}, governor="", distances={**near, **far, **cpu_rows})
    for number, (domain, numa_node) in enumerate((("0004", 255), ("0035", 252))):
        gpu = f"{domain}:04:00.0"
        machine.pci(
            f"pci{domain}:00/{domain}:00:00.0/{gpu}",
            GPU,
            NVIDIA,
            "0x1db5",
            numa=numa_node,
            cpus=("0-19", "20-39")[number],
            speed=(GEN3, GEN3),
            driver="nvidia",
        ).slot(f"{domain}:00:00.0", speed=GEN3)
    machine.nvidia("0004:04:00.0", "0035:04:00.0", is_open=False, name="V100-SXM2")
    machine.rank(0, "20-39", world=2, mems="0,8,252-255", environ={"OMP_NUM_THREADS": "20"})
    machine.rank(1, "0-19", world=2, mems="0,8,252-255", environ={"OMP_NUM_THREADS": "20"})
    return machine


def wide_domains() -> Machine:
    """A guest whose adapter is in a PCI domain of 32 bits, as hypervisors make them."""
    machine = Machine("domain1", flags="fpu hypervisor").processors({0: threaded(0, 8)}, governor="")
    gpu = "10000:e1:00.0"
    machine.pci(
        f"pci10000:e0/10000:e0:01.0/{gpu}",
        GPU,
        NVIDIA,
        "0x20b5",
        numa=0,
        cpus="0-7",
        speed=(GEN4, GEN4),
        driver="nvidia",
    )
    machine.slot("10000:e0:01.0", speed=GEN4)
    machine.pci("pci3cd4:00/3cd4:00:02.0", NIC, MELLANOX, "0x1016", numa=0, width=None, speed=None, corrected=None)
    machine.rdma("mlx5_an0", "3cd4:00:02.0", layer="Ethernet", gids={0: ("IB/RoCE v1", "eth1"), 1: ("RoCE v2", "eth1")})
    machine.net("eth1", "3cd4:00:02.0", mtu=1500, speed=100_000)
    machine.nvidia(gpu, is_open=False)
    machine.rank(0, "0-7", world=2, mems="0", environ={"NCCL_IB_GID_INDEX": "0", "NCCL_SOCKET_IFNAME": "eth1"})
    return machine


def no_pci() -> Machine:
    """A container whose sysfs has no PCI, with NVIDIA's driver mounted in."""
    machine = small_node("container1").without("sys/bus", "sys/devices/pci", "sys/class/infiniband", "dev/")
    for name in ("ens0", "ens1"):
        del machine.links[f"sys/class/net/{name}/device"]
    return machine


def per_task_gpus() -> Machine:
    """--gpus-per-task: each rank sees one GPU as number 0, and only NVML could tell which."""
    machine = small_node("pertask1", ranks=0)
    machine.files["proc/sys/kernel/numa_balancing"] = "1"
    machine.files["sys/kernel/mm/transparent_hugepage/enabled"] = "[always] madvise never"
    for rank in range(2):
        environ = {"SLURM_GPUS_PER_TASK": "1", "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0"}
        machine.rank(rank, f"{8 * rank}-{8 * rank + 7}", world=2, mems="0", environ=environ)
        del machine.links[f"sys/bus/pci/devices/0000:{1 + rank}2:00.0"]
    return machine


def one_gpu_for_two() -> Machine:
    machine = small_node("shared1", ranks=0, kernel="5.4.0-150-generic")
    for rank, seen in enumerate(("0", "0", "")):
        environ = {"CUDA_VISIBLE_DEVICES": seen, "OMP_NUM_THREADS": "5"}
        machine.rank(rank, f"{5 * rank}-{5 * rank + 4}", world=3, mems="0", environ=environ)
    machine.acs("0000:10:01.0", 0x1D).acs("0000:10:02.0", 0x00)
    return machine


def uneven_adapters() -> Machine:
    """4 GPUs and an adapter on one switch, whose ACS sends all through the root; a second adapter far from them."""
    machine = Machine("uneven1").processors({0: threaded(0, 32)})
    switch = "pci0000:10/0000:10:01.0/0000:11:00.0"
    gpus = []
    for number in range(4):
        gpu = f"0000:{0x13 + number:02x}:00.0"
        machine.pci(
            f"{switch}/0000:12:{number:02x}.0/{gpu}",
            GPU,
            NVIDIA,
            H100,
            numa=0,
            cpus="0-31",
            driver="nvidia",
            iommu=str(number),
        )
        gpus.append(gpu)
    machine.pci(f"{switch}/0000:12:0f.0/0000:1f:00.0", IB_NIC, MELLANOX, CX7, numa=0, cpus="0-31", iommu="8")
    machine.pci(f"{switch}/0000:12:10.0/0000:20:00.0", IB_NIC, MELLANOX, CX7, numa=0, cpus="0-31", iommu="9")
    machine.pci("pci0000:40/0000:40:01.0/0000:41:00.0", IB_NIC, MELLANOX, CX7, numa=0, cpus="0-31", iommu="10")
    machine.rdma("mlx5_0", "0000:1f:00.0").rdma("mlx5_1", "0000:20:00.0", state="1: DOWN", phys="3: Disabled")
    machine.rdma("mlx5_2", "0000:41:00.0")
    machine.nvidia(*gpus, is_open=False).module("nvidia_peermem").module("ib_core", holders=("nvidia_peermem",))
    for address in ("0000:10:01.0", "0000:11:00.0", "0000:12:00.0"):
        machine.acs(address, 0x1D)
    for rank in range(4):
        machine.rank(rank, f"{8 * rank}-{8 * rank + 7}", world=4, mems="0", environ={"OMP_NUM_THREADS": "8"})
    return machine


def far_adapter() -> Machine:
    """One GPU on NUMA node 1, the only adapter on node 0."""
    machine = Machine("far1").processors({0: threaded(0, 8), 1: threaded(8, 8)})
    machine.pci("pci0000:90/0000:90:01.0/0000:91:00.0", GPU, NVIDIA, H100, numa=1, cpus="8-15", driver="nvidia")
    machine.pci("pci0000:10/0000:10:01.0/0000:11:00.0", IB_NIC, MELLANOX, CX7, numa=0, cpus="0-7")
    machine.rdma("mlx5_0", "0000:11:00.0").nvidia("0000:91:00.0")
    machine.rank(0, "0-15", world=1, environ={"OMP_NUM_THREADS": "8"})
    return machine


def plain_pair() -> list[Machine]:
    """Two virtual machines with Ethernet, like hosts of a lab; one of them has another MTU."""
    machines = []
    for number in range(2):
        machine = Machine(f"n{number + 1}", flags="fpu hypervisor").processors({0: threaded(0, 2)}, governor="")
        machine.pci("pci0000:00/0000:00:03.0", NIC, VIRTIO, "0x1041", width=None, speed=None, corrected=None)
        machine.net("eth0", "0000:00:03.0", mtu=1500 - 100 * number).net("docker0", mtu=1400 + number)
        machine.rank(number, "0-1", world=2, local=0, mems="0")
        machines.append(machine)
    return machines


CASES: dict[str, Case] = {
    "dgx-h100": Case(hosts=lambda: [dgx_h100()], default_nvml=HEALTHY),
    "dgx-h100-badly-bound": Case(
        hosts=lambda: [dgx_badly_bound()],
        default_nvml=HEALTHY,
        nvml={
            "0000:1b:00.0": dataclasses.replace(HEALTHY, links_active=16, links_inactive=2, throttle_reasons=0x48),
            "0000:2c:00.0": dataclasses.replace(HEALTHY, power_limit_w=500.0, is_persistent=False, replays=300),
            "0000:3d:00.0": dataclasses.replace(HEALTHY, throttle_reasons=0x20, is_ecc_pending=True),
            "0000:4e:00.0": dataclasses.replace(HEALTHY, sm_clock_limit_mhz=1200),
        },
        growth={"rdma/mlx5_0/1/symbol_error": 3, "pci/0000:1b:00.0/corrected": 2},
        mpi_size=1,
    ),
    "dgx-h100-no-nvml": Case(hosts=lambda: [dgx_h100(ranks=False)]),
    "gb200": Case(hosts=lambda: [gb200()], default_nvml=HEALTHY),
    "mi250x": Case(hosts=lambda: [mi250x()]),
    "mi250x-in-order": Case(hosts=lambda: [mi250x(in_order=False)]),
    "vm-hidden-numa": Case(hosts=lambda: [virtual_machine()], default_nvml=HEALTHY, nccl_version="2.21.5"),
    "nic-at-x8": Case(hosts=lambda: [nic_at_x8()], default_nvml=HEALTHY),
    "card-in-x8-slot": Case(
        hosts=lambda: [card_in_x8_slot()],
        default_nvml=HEALTHY,
        nvml={"0000:11:00.0": dataclasses.replace(HEALTHY, utilization_percent=97)},
    ),
    "mtu-differs": Case(hosts=mtu_differs, default_nvml=HEALTHY, settings=AuditConfig(expect_gpus=2, nodes_per_leaf=4)),
    "cgroup-cut": Case(hosts=lambda: [cgroup_cut()]),
    "smt-siblings-shared": Case(hosts=lambda: [siblings_shared()], mpi_size=4),
    "hybrid-cpu": Case(hosts=lambda: [hybrid_cpu()]),
    "offline-cpus": Case(hosts=lambda: [offline_cpus()]),
    "sparse-numa": Case(hosts=lambda: [sparse_numa()], default_nvml=HEALTHY),
    "pci-domains-32-bits": Case(hosts=lambda: [wide_domains()], default_nvml=HEALTHY),
    "no-pci": Case(hosts=lambda: [no_pci()]),
    "gpus-per-task": Case(hosts=lambda: [per_task_gpus()], default_nvml=HEALTHY),
    "one-gpu-for-two": Case(hosts=lambda: [one_gpu_for_two()], default_nvml=HEALTHY),
    "uneven-adapters": Case(
        hosts=lambda: [uneven_adapters()],
        default_nvml=HEALTHY,
        nccl_version="2.20.5",
        log=NcclLog(edges=frozenset({(0, 1, "SHM/direct/direct"), (1, 2, "P2P/CUMEM"), (2, 3, "P2P/CUMEM")})),
    ),
    "far-adapter": Case(hosts=lambda: [far_adapter()], default_nvml=HEALTHY),
    "two-dgx": Case(
        hosts=lambda: [dgx_h100("dgx1", world=16, lid="leaf1"), dgx_h100("dgx2", first_rank=8, world=16, lid="leaf1")],
        default_nvml=HEALTHY,
        mpi_size=16,
        log=NcclLog(edges=frozenset({(0, 1, "P2P/CUMEM"), (7, 8, "NET/IB/0/GDRDMA")})),
    ),
    "plain-pair": Case(hosts=plain_pair),
    "topology-of-a-matrix": Case(
        hosts=lambda: [small_node("n1"), small_node("n2")], topo=read_topo(LOGS.parent / "topo" / "faults.txt")
    ),
    "crowded": Case(hosts=lambda: [small_node("n1")], facts=CROWDED),
    "busy-with-its-own-job": Case(
        hosts=lambda: [small_node("n1")], facts=QUIET, topo=read_topo(LOGS.parent / "topo" / "healthy.txt")
    ),
    "faults-in-the-log": Case(hosts=list, log=read_nccl_log(LOGS / "faults.log")),
    "real-xeon-e7-4870": Case(hosts=lambda: [xeon_e7_4870()]),
    "real-magny-cours-sparse": Case(hosts=lambda: [magny_cours_sparse()]),
    "real-raptor-lake": Case(hosts=lambda: [raptor_lake()]),
    "real-dgx-spark": Case(hosts=lambda: [dgx_spark()]),
}
