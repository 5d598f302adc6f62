"""Machines in sysfs form: a compact description becomes the files and links that a kernel would show.

Two DGX H100, one of them badly bound, are what `experiments.bench.audit` measures; tests have many others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcpace.audit import cpusets

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"

GPU, NIC, IB_NIC, BRIDGE = "0x030200", "0x020000", "0x020700", "0x060400"
NVIDIA, AMD, MELLANOX, SLINGSHOT, VIRTIO = "0x10de", "0x1002", "0x15b3", "0x17db", "0x1af4"
GEN1, GEN3, GEN4, GEN5 = "2.5 GT/s PCIe", "8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe"


class Machine:
    """Files and links of one host."""

    def __init__(
        self, host: str, *, kernel: str = "6.8.0-51-generic", flags: str = "fpu vme", mounts: str = ""
    ) -> None:
        self.files: dict[str, str | bytes] = {
            "proc/sys/kernel/hostname": host,
            "proc/sys/kernel/osrelease": kernel,
            "proc/sys/kernel/random/boot_id": f"boot-of-{host}",
            "proc/sys/kernel/numa_balancing": "0",
            "proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1",
            "proc/cpuinfo": f"processor\t: 0\nmodel name\t: Test CPU\nflags\t\t: {flags}\n",
            "proc/meminfo": "MemTotal:       2113560000 kB\n",
            "proc/self/mounts": mounts or "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "sys/kernel/mm/transparent_hugepage/defrag": "always defer defer+madvise [madvise] never",
            "sys/module/kernel/parameters/x": "0",
        }
        self.links: dict[str, str] = {}
        self.folders = {"sys/class/net", "sys/bus/pci/devices"}

    def without(self, *prefixes: str) -> Machine:
        """Remove files and links whose path begins so."""
        for kind in (self.files, self.links):
            for path in [path for path in kind if path.startswith(prefixes)]:
                del kind[path]
        self.folders = {folder for folder in self.folders if not folder.startswith(prefixes)}
        return self

    def processors(
        self,
        numa: Mapping[int, Sequence[str]],
        *,
        packages: Mapping[int, Sequence[int]] | None = None,
        offline: str = "",
        governor: str = "performance",
        driver: str = "intel_pstate",
        l3: Sequence[str] = (),
        distances: Mapping[int, Sequence[int]] | None = None,
    ) -> Machine:
        """Add NUMA nodes, each with its cores as lists of threads; a node without cores has memory alone.

        Args:
            numa: cores of each NUMA node, each a list of CPUs like `0,64`.
            packages: NUMA nodes of each package; all in package 0 when not given.
            offline: CPUs that are there and switched off.
            governor: of all CPUs; empty for a machine without frequencies.
            driver: that sets them.
            l3: CPUs of each L3 cache; one a NUMA node when not given.
            distances: of each node; 10 to itself and 20 to others when not given.
        """
        packages = packages or {0: list(numa)}
        package_of = {node: package for package, nodes in packages.items() for node in nodes}
        everything = 0
        for node, cores in numa.items():
            own = 0
            for core in cores:
                threads = cpusets.parse_list(core)
                own |= threads
                for cpu in cpusets.members(threads):
                    self._cpu(cpu, core, package_of[node], governor, driver)
            everything |= own
            place = f"{_NODE}/node{node}"
            row = (distances or {}).get(node) or [10 if other == node else 20 for other in numa]
            self.files[f"{place}/cpulist"] = cpusets.format_list(own)
            self.files[f"{place}/distance"] = " ".join(map(str, row))
            self.files[f"{place}/meminfo"] = f"Node {node} MemTotal:       1056780000 kB\n"
        for shared in l3 or [self.files[f"{_NODE}/node{node}/cpulist"] for node, cores in numa.items() if cores]:
            self._cache(3, "Unified", str(shared))
        self.files[f"{_CPU}/online"] = cpusets.format_list(everything)
        self.files[f"{_CPU}/offline"] = offline
        self.files[f"{_CPU}/present"] = cpusets.format_list(everything | cpusets.parse_list(offline))
        return self

    def hybrid(self, fast: str, slow: str) -> Machine:
        """Say which CPUs are performance cores."""
        self.files["sys/devices/cpu_core/cpus"] = fast
        self.files["sys/devices/cpu_atom/cpus"] = slow
        return self

    def pci(
        self,
        way: str,
        kind: str,
        vendor: str,
        device: str,
        *,
        numa: int = -1,
        cpus: str = "",
        width: tuple[int, int] | None = (16, 16),
        speed: tuple[str, str] | None = (GEN5, GEN5),
        driver: str = "",
        iommu: str = "",
        corrected: int | None = 0,
    ) -> Machine:
        """Add a device, and the bridges above it that are not there yet.

        Args:
            way: host bridge, bridges and the device, like `pci0000:16/0000:16:01.0/0000:17:00.0`.
            kind: class code.
            vendor, device: ids.
            numa: numa_node.
            cpus: local_cpulist.
            width, speed: current and most; None for a device without a link.
            driver, iommu: driver and IOMMU group.
            corrected: AER's count; None for a kernel without it.
        """
        parts = way.split("/")
        for length in range(2, len(parts)):
            if f"sys/bus/pci/devices/{parts[length - 1]}" not in self.links:
                self._pci("/".join(parts[:length]), BRIDGE, "0x1000", "0xc030", numa, "", (16, 16), (GEN5, GEN5))
        place = self._pci(way, kind, vendor, device, numa, cpus, width, speed)
        if driver:
            self.links[f"{place}/driver"] = f"/sys/bus/pci/drivers/{driver}"
            self.folders.add(f"sys/bus/pci/drivers/{driver}")
        if iommu:
            self.links[f"{place}/iommu_group"] = f"/sys/kernel/iommu_groups/{iommu}"
            self.folders.add(f"sys/kernel/iommu_groups/{iommu}")
        if corrected is not None:
            self.files[f"{place}/aer_dev_correctable"] = f"RxErr {corrected}\nBadTLP 0\nTOTAL_ERR_COR {corrected}\n"
        return self

    def slot(self, address: str, *, width: int = 16, speed: str = GEN5) -> Machine:
        """Change what a bridge's link can do."""
        place = self._place(address)
        self.files[f"{place}/max_link_width"] = str(width)
        self.files[f"{place}/max_link_speed"] = speed
        return self

    def acs(self, address: str, control: int) -> Machine:
        """Give a bridge a configuration space, as root reads it, with an ACS capability."""
        config = bytearray(4096)
        config[0x100:0x104] = (0x0001 | 1 << 16 | 0x140 << 20).to_bytes(4, "little")  # AER, next at 0x140
        config[0x140:0x144] = (0x000D | 1 << 16).to_bytes(4, "little")
        config[0x146:0x148] = control.to_bytes(2, "little")
        self.files[f"{self._place(address)}/config"] = bytes(config)
        return self

    def rdma(
        self,
        name: str,
        address: str,
        *,
        state: str = "4: ACTIVE",
        phys: str = "5: LinkUp",
        rate: str = "400 Gb/sec (4X NDR)",
        layer: str = "InfiniBand",
        gids: Mapping[int, tuple[str, str]] | None = None,
        counters: Mapping[str, int] | None = None,
        firmware: str = "28.39.1002",
        board: str = "MT_0000000838",
    ) -> Machine:
        """Add an RDMA adapter with one port; `gids` are (type, interface) by index."""
        place = f"sys/class/infiniband/{name}"
        port = f"{place}/ports/1"
        self.links[f"{place}/device"] = f"/{self._place(address)}"
        self.files |= {
            f"{place}/fw_ver": firmware,
            f"{place}/board_id": board,
            f"{port}/state": state,
            f"{port}/phys_state": phys,
            f"{port}/rate": rate,
            f"{port}/link_layer": layer,
        }
        for counter in ("symbol_error", "link_downed", "port_xmit_discards"):
            self.files[f"{port}/counters/{counter}"] = str((counters or {}).get(counter, 0))
        for counter in ("out_of_sequence", "local_ack_timeout_err"):
            self.files[f"{port}/hw_counters/{counter}"] = str((counters or {}).get(counter, 0))
        for index, (kind, net) in (gids or {}).items():
            self.files[f"{port}/gid_attrs/types/{index}"] = kind
            self.files[f"{port}/gid_attrs/ndevs/{index}"] = net
        self.files["dev/infiniband/uverbs0"] = ""
        self.module("ib_uverbs")
        return self

    def net(
        self,
        name: str,
        address: str = "",
        *,
        mtu: int = 1500,
        speed: int | None = None,
        state: str = "up",
        kind: int = 1,
        dropped: int = 0,
        has_route: bool = True,
    ) -> Machine:
        """Add a network interface, of an adapter where an address is given."""
        self.files.setdefault("proc/net/route", "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\n")
        if has_route:
            row = f"{name}\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n"
            self.files["proc/net/route"] = f"{self.files['proc/net/route']!s}{row}"
        place = f"sys/class/net/{name}"
        if address:
            self.links[f"{place}/device"] = f"/{self._place(address)}"
        self.files |= {
            f"{place}/mtu": str(mtu),
            f"{place}/operstate": state,
            f"{place}/type": str(kind),
            f"{place}/speed": str(-1 if speed is None else speed),
            f"{place}/statistics/rx_packets": "1000000",
            f"{place}/statistics/rx_dropped": str(dropped),
        }
        return self

    def nvidia(self, *addresses: str, driver: str = "570.86.15", is_open: bool = True, name: str = "H100") -> Machine:
        """Add NVIDIA's driver with some GPUs."""
        words = "Open Kernel Module for x86_64" if is_open else "x86_64 Kernel Module"
        self.files["proc/driver/nvidia/version"] = f"NVRM version: NVIDIA UNIX {words}  {driver}  Release Build\n"
        for number, address in enumerate(addresses):
            self.files[f"proc/driver/nvidia/gpus/{address}/information"] = (
                f"Model: \t\t NVIDIA {name}\nGPU UUID: \t GPU-{number:08d}\nVideo BIOS: \t 96.00.89.00.01\n"
            )
        return self.module("nvidia", driver)

    def module(self, name: str, version: str = "", *, holders: Sequence[str] = ()) -> Machine:
        """Add a kernel module."""
        self.folders.add(f"sys/module/{name}")
        if version:
            self.files[f"sys/module/{name}/version"] = version
        for holder in holders:
            self.folders.add(f"sys/module/{name}/holders/{holder}")
        return self

    def rank(
        self,
        rank: int,
        cpus: str,
        *,
        world: int,
        local: int | None = None,
        mems: str = "0-1",
        environ: Mapping[str, str] | None = None,
        cgroup: str = "",
        quota: str = "max 100000",
        locked: str = "unlimited",
        open_files: int = 65536,
        policy: str = "default",
    ) -> Machine:
        """Add a rank of a Slurm step as a process.

        Args:
            rank, world: number among all ranks, and how many there are.
            cpus, mems: its mask and memory nodes.
            local: number among those of the host; `rank` when not given.
            environ: further variables.
            cgroup: CPUs of its cgroup; all when not given.
            quota: its cpu.max.
            locked, open_files: limits.
            policy: of its memory.
        """
        proc = f"proc/{1000 + rank}"
        local = rank if local is None else local
        variables = {
            "SLURM_JOB_ID": "17",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(world),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local),
            "SLURM_NODEID": "0",
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
        }
        group = f"sys/fs/cgroup/job_17/step_0/task_{rank}"
        self.files |= {
            f"{proc}/environ": "\0".join(f"{name}={value}" for name, value in variables.items()) + "\0",
            f"{proc}/status": f"Name:\tpython\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}\n",
            f"{proc}/limits": _limits(locked, open_files),
            f"{proc}/numa_maps": f"55d0a0000000 {policy} file=/usr/bin/python3 mapped=1\n",
            f"{proc}/cgroup": f"0::/job_17/step_0/task_{rank}\n",
            f"{group}/cpu.max": quota,
            f"{group}/cpuset.cpus.effective": cgroup or str(self.files[f"{_CPU}/online"]),
            f"{group}/memory.max": "max",
        }
        return self

    def write(self, root: Path) -> Path:
        """Make the tree below a folder."""
        for folder in self.folders:
            (root / folder).mkdir(parents=True, exist_ok=True)
        made: set[str] = set()
        for path, content in self.files.items():
            place = os.path.join(root, path)
            parent = os.path.dirname(place)
            if parent not in made:
                os.makedirs(parent, exist_ok=True)
                made.add(parent)
            with open(place, "wb") as stream:
                stream.write(content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape"))
        for path, target in self.links.items():
            os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
            os.symlink(target, os.path.join(root, path))
        return root

    def _place(self, address: str) -> str:
        return (
            self.links[f"sys/bus/pci/devices/{address}"].removeprefix("../../../").replace("devices", "sys/devices", 1)
        )

    def _pci(
        self,
        way: str,
        kind: str,
        vendor: str,
        device: str,
        numa: int,
        cpus: str,
        width: tuple[int, int] | None,
        speed: tuple[str, str] | None,
    ) -> str:
        place = f"sys/devices/{way}"
        self.links[f"sys/bus/pci/devices/{way.split('/')[-1]}"] = f"../../../devices/{way}"
        self.files |= {
            f"{place}/class": kind,
            f"{place}/vendor": vendor,
            f"{place}/device": device,
            f"{place}/numa_node": str(numa),
            f"{place}/local_cpulist": cpus,
        }
        if width is not None:
            self.files |= {f"{place}/current_link_width": str(width[0]), f"{place}/max_link_width": str(width[1])}
        if speed is not None:
            self.files |= {f"{place}/current_link_speed": speed[0], f"{place}/max_link_speed": speed[1]}
        return place

    def _cpu(self, cpu: int, core: str, package: int, governor: str, driver: str) -> None:
        place = f"{_CPU}/cpu{cpu}"
        self.files[f"{place}/topology/physical_package_id"] = str(package)
        self.files[f"{place}/topology/thread_siblings_list"] = core
        if governor:
            self.files[f"{place}/cpufreq/scaling_governor"] = governor
            self.files[f"{place}/cpufreq/scaling_driver"] = driver
        if cpu == min(cpusets.members(cpusets.parse_list(core))):
            self._cache_of(cpu, 0, 2, "Unified", core, "2048K")

    def _cache(self, level: int, kind: str, shared: str) -> None:
        self._cache_of(min(cpusets.members(cpusets.parse_list(shared))), 1, level, kind, shared, "107520K")

    def _cache_of(self, cpu: int, index: int, level: int, kind: str, shared: str, size: str) -> None:
        # A kernel shows a cache with each CPU that shares it; the first one is enough, and trees stay small.
        place = f"{_CPU}/cpu{cpu}/cache/index{index}"
        self.files |= {
            f"{place}/level": str(level),
            f"{place}/type": kind,
            f"{place}/shared_cpu_list": shared,
            f"{place}/size": size,
        }


def memory_folder() -> str | None:
    """Return a folder in memory for temporary files, None if there is no such folder: trees are many small files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def threaded(first: int, count: int, sibling_offset: int = 0) -> list[str]:
    """Return cores of consecutive CPUs, with a second thread each where an offset is given."""
    return [f"{cpu},{cpu + sibling_offset}" if sibling_offset else str(cpu) for cpu in range(first, first + count)]


def _limits(locked: str, open_files: int) -> str:
    rows = [("Max open files", str(open_files), "files"), ("Max locked memory", locked, "bytes")]
    return "Limit                     Soft Limit           Hard Limit           Units     \n" + "".join(
        f"{name:<26}{value:<21}{value:<21}{unit:<10}\n" for name, value, unit in rows
    )


H100, CX7 = "0x2330", "0x1021"


def dgx_h100(host: str = "dgx1", *, first_rank: int = 0, world: int = 8, ranks: bool = True, lid: str = "") -> Machine:
    """8 GPUs, each on a switch with its own 400G adapter, 2 storage adapters far off, 2 sockets of 56 cores."""
    machine = Machine(host, kernel="6.8.0-1012-nvidia")
    machine.processors({0: threaded(0, 56, 112), 1: threaded(56, 56, 112)}, packages={0: [0], 1: [1]})
    local = ("0-55,112-167", "56-111,168-223")
    roots = ("15", "26", "37", "48", "93", "a6", "ba", "cc")
    for number, root in enumerate(roots):
        numa = number // 4
        bus = int(root, 16)
        switch = f"pci0000:{root}/0000:{root}:01.0/0000:{bus + 1:02x}:00.0"
        nic, gpu = f"0000:{bus + 3:02x}:00.0", f"0000:{bus + 6:02x}:00.0"
        machine.pci(
            f"{switch}/0000:{bus + 2:02x}:00.0/{nic}",
            IB_NIC,
            MELLANOX,
            CX7,
            numa=numa,
            cpus=local[numa],
            driver="mlx5_core",
            iommu=str(number),
        )
        machine.pci(
            f"{switch}/0000:{bus + 2:02x}:02.0/{gpu}",
            GPU,
            NVIDIA,
            H100,
            numa=numa,
            cpus=local[numa],
            driver="nvidia",
            iommu=str(number),
        )
        machine.rdma(f"mlx5_{number}", nic).net(f"ibs{number}", nic, mtu=4092, kind=32)
    for number, (root, numa) in enumerate((("f5", 1), ("70", 0))):
        nic = f"0000:{int(root, 16) + 1:02x}:00.0"
        machine.pci(
            f"pci0000:{root}/0000:{root}:01.0/{nic}",
            NIC,
            MELLANOX,
            "0xa2dc",
            numa=numa,
            cpus=local[numa],
            iommu=f"9{number}",
        )
        machine.rdma(
            f"mlx5_bond_{number}",
            nic,
            layer="Ethernet",
            rate="200 Gb/sec (2X NDR)",
            board="MT_0000000884",
            gids={0: ("IB/RoCE v1", f"ens{number}"), 1: ("RoCE v2", f"ens{number}")},
        ).net(f"ens{number}", nic, mtu=9000, speed=200_000)
    gpus = [f"0000:{int(root, 16) + 6:02x}:00.0" for root in roots]
    machine.nvidia(*gpus, name="H100 80GB HBM3").module("ib_core", holders=("ib_uverbs", "nvidia_peermem"))
    machine.module("nvidia_peermem")
    if ranks:
        for local_rank in range(8):
            first = local_rank * 14
            cpus = f"{first}-{first + 13},{first + 112}-{first + 125}"
            environ = {"NCCL_IB_HCA": "^mlx5_bond", "OMP_NUM_THREADS": "14"}
            if lid:
                environ["SLURM_TOPOLOGY_ADDR"] = f"spine.{lid}.{host}"
            machine.rank(first_rank + local_rank, cpus, world=world, local=local_rank, environ=environ)
    return machine


def dgx_badly_bound() -> Machine:
    """Ranks 0 to 3 on the socket of GPUs 4 to 7 and the other way round; ranks 6 and 7 share; rank 5 spans both."""
    machine = dgx_h100("dgx2", ranks=False)
    masks = ["56-69", "70-83", "84-97", "98-111", "0-13", "40-70", "28-41", "35-48"]
    for rank, cpus in enumerate(masks):
        variables = {"SLURM_CPUS_PER_TASK": "28", "OMP_NUM_THREADS": "28", "NCCL_ALGO": "Ring", "NCCL_P2P_DISABLE": "1"}
        variables |= {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "bond7", "UCX_NET_DEVICES": "mlx5_99:1"}
        variables |= {"NCCL_IB_GID_INDEX": "0", "GLOO_SOCKET_IFNAME": "ens0"}
        machine.rank(
            rank, cpus, world=8, environ=variables, mems="0", quota="1000000 100000", locked="65536", open_files=512
        )
    return machine
