"""Machines in sysfs form: a compact description becomes the files and links that a kernel would show.

`experiments/bench/dgx-*.json` are snapshots of the two DGX H100, sound and badly bound.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcpace.audit import cpusets

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"

GPU, NIC, IB_NIC, BRIDGE = "0x030200", "0x020000", "0x020700", "0x060400"
NVIDIA, AMD, MELLANOX, SLINGSHOT, VIRTIO = "0x10de", "0x1002", "0x15b3", "0x17db", "0x1af4"
GEN1, GEN3, GEN4, GEN5 = "2.5 GT/s PCIe", "8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe"

_COUNTERS = {
    "counters": ("symbol_error", "link_downed", "port_xmit_discards"),
    "hw_counters": ("out_of_sequence", "local_ack_timeout_err"),
}


class Machine:
    """Files and links of one host."""

    def __init__(
        self, host: str, *, kernel: str = "6.8.0-51-generic", flags: str = "fpu vme", mounts: str = ""
    ) -> None:
        self.files: dict[str, str | bytes] = {}
        self.put(
            "proc/sys/kernel",
            hostname=host,
            osrelease=kernel,
            numa_balancing=0,
            **{"random/boot_id": f"boot-of-{host}"},
        )
        self.put("proc", cmdline="BOOT_IMAGE=/vmlinuz root=/dev/sda1", meminfo="MemTotal:       2113560000 kB\n")
        self.put("proc", cpuinfo=f"processor\t: 0\nmodel name\t: Test CPU\nflags\t\t: {flags}\n")
        self.put("proc/self", mounts=mounts or "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0\n")
        modes = {"enabled": "always [madvise] never", "defrag": "always defer defer+madvise [madvise] never"}
        self.put("sys/kernel/mm/transparent_hugepage", **modes)
        self.put("sys/module/kernel/parameters", x=0)
        self.links: dict[str, str] = {}
        self.folders = {"sys/class/net", "sys/bus/pci/devices"}

    def put(self, place: str, **values: object) -> Machine:
        """Write files below a place, by their names."""
        self.files |= {f"{place}/{name}": v if isinstance(v, bytes) else str(v) for name, v in values.items()}
        return self

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
            memory = f"Node {node} MemTotal:       1056780000 kB\n"
            self.put(place, cpulist=cpusets.format_list(own), distance=" ".join(map(str, row)), meminfo=memory)
        for shared in l3 or [self.files[f"{_NODE}/node{node}/cpulist"] for node, cores in numa.items() if cores]:
            self._cache(3, "Unified", str(shared))
        present = cpusets.format_list(everything | cpusets.parse_list(offline))
        return self.put(_CPU, online=cpusets.format_list(everything), offline=offline, present=present)

    def hybrid(self, fast: str, slow: str) -> Machine:
        """Say which CPUs are performance cores."""
        return self.put("sys/devices", **{"cpu_core/cpus": fast, "cpu_atom/cpus": slow})

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
        return self.put(self._place(address), max_link_width=width, max_link_speed=speed)

    def acs(self, address: str, control: int) -> Machine:
        """Give a bridge a configuration space, as root reads it, with an ACS capability."""
        config = bytearray(4096)
        config[0x100:0x104] = (0x0001 | 1 << 16 | 0x140 << 20).to_bytes(4, "little")  # AER, next at 0x140
        config[0x140:0x144] = (0x000D | 1 << 16).to_bytes(4, "little")
        config[0x146:0x148] = control.to_bytes(2, "little")
        return self.put(self._place(address), config=bytes(config))

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
        self.put(place, fw_ver=firmware, board_id=board)
        self.put(port, state=state, phys_state=phys, rate=rate, link_layer=layer)
        for folder, names in _COUNTERS.items():
            self.put(f"{port}/{folder}", **{name: (counters or {}).get(name, 0) for name in names})
        for index, (kind, net) in (gids or {}).items():
            self.put(f"{port}/gid_attrs", **{f"types/{index}": kind, f"ndevs/{index}": net})
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
        self.put(place, mtu=mtu, operstate=state, type=kind, speed=-1 if speed is None else speed)
        return self.put(f"{place}/statistics", rx_packets=1_000_000, rx_dropped=0)

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
        """
        proc = f"proc/{1000 + rank}"
        local = rank if local is None else local
        step = {"SLURM_JOB_ID": 17, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": world, "SLURM_PROCID": rank}
        variables = {**step, "SLURM_LOCALID": local, "SLURM_NODEID": 0, "OMP_NUM_THREADS": 1, **(environ or {})}
        group = f"job_17/step_0/task_{rank}"
        self.put(
            proc,
            environ="\0".join(f"{name}={value}" for name, value in variables.items()) + "\0",
            status=f"Name:\tpython\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}\n",
            limits=_limits(locked, open_files),
            numa_maps="55d0a0000000 default file=/usr/bin/python3 mapped=1\n",
            cgroup=f"0::/{group}\n",
        )
        effective = cgroup or str(self.files[f"{_CPU}/online"])
        limits = {"cpu.max": quota, "cpuset.cpus.effective": effective, "memory.max": "max"}
        return self.put(f"sys/fs/cgroup/{group}", **limits)

    def write(self, root: Path) -> Path:
        """Make the tree below a folder."""
        for folder in self.folders:
            (root / folder).mkdir(parents=True, exist_ok=True)
        for path, content in self.files.items():
            place = os.path.join(root, path)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(place, "wb") as stream:
                stream.write(content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape"))
        for path, target in self.links.items():
            os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
            os.symlink(target, os.path.join(root, path))
        return root

    def _place(self, address: str) -> str:
        link = self.links[f"sys/bus/pci/devices/{address}"]
        return link.removeprefix("../../../").replace("devices", "sys/devices", 1)

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
        self.put(place, vendor=vendor, device=device, numa_node=numa, local_cpulist=cpus, **{"class": kind})
        for name, values in (("width", width), ("speed", speed)):
            if values is not None:
                self.put(place, **{f"current_link_{name}": values[0], f"max_link_{name}": values[1]})
        return place

    def _cpu(self, cpu: int, core: str, package: int, governor: str, driver: str) -> None:
        place = f"{_CPU}/cpu{cpu}"
        self.put(f"{place}/topology", physical_package_id=package, thread_siblings_list=core)
        if governor:
            self.put(f"{place}/cpufreq", scaling_governor=governor, scaling_driver=driver)
        if cpu == min(cpusets.members(cpusets.parse_list(core))):
            self._cache_of(cpu, 0, 2, "Unified", core, "2048K")

    def _cache(self, level: int, kind: str, shared: str) -> None:
        self._cache_of(min(cpusets.members(cpusets.parse_list(shared))), 1, level, kind, shared, "107520K")

    def _cache_of(self, cpu: int, index: int, level: int, kind: str, shared: str, size: str) -> None:
        # A kernel shows a cache with each CPU that shares it; the first one is enough, and trees stay small.
        place = f"{_CPU}/cpu{cpu}/cache/index{index}"
        self.put(place, level=level, type=kind, shared_cpu_list=shared, size=size)


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
        near: dict[str, Any] = {"numa": numa, "cpus": local[numa], "iommu": str(number)}
        machine.pci(f"{switch}/0000:{bus + 2:02x}:00.0/{nic}", IB_NIC, MELLANOX, CX7, driver="mlx5_core", **near)
        machine.pci(f"{switch}/0000:{bus + 2:02x}:02.0/{gpu}", GPU, NVIDIA, H100, driver="nvidia", **near)
        machine.rdma(f"mlx5_{number}", nic).net(f"ibs{number}", nic, mtu=4092, kind=32)
    for number, (root, numa) in enumerate((("f5", 1), ("70", 0))):
        nic = f"0000:{int(root, 16) + 1:02x}:00.0"
        near = {"numa": numa, "cpus": local[numa], "iommu": f"9{number}"}
        machine.pci(f"pci0000:{root}/0000:{root}:01.0/{nic}", NIC, MELLANOX, "0xa2dc", **near)
        gids = {0: ("IB/RoCE v1", f"ens{number}"), 1: ("RoCE v2", f"ens{number}")}
        ethernet: dict[str, Any] = {"layer": "Ethernet", "rate": "200 Gb/sec (2X NDR)", "board": "MT_0000000884"}
        machine.rdma(f"mlx5_bond_{number}", nic, gids=gids, **ethernet)
        machine.net(f"ens{number}", nic, mtu=9000, speed=200_000)
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
