"""The operating system, its settings, drivers, load, memory and clock, GPUs, and ranks, from procfs and sysfs.

A rank's facts are its CPU mask, memory, limits, cgroup, GPUs, and the variables that control its libraries. CPU times
are differences between two readings of /proc, which the caller spaces by a second. Of processes only user, name, CPUs
and CPU time are kept, and only of those outside the job: what the job itself does is no finding.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import field

from hpcpace.audit import cpusets
from hpcpace.audit.facts import Gpu, Kernel, Load, Memory, Nvml, OtherProcesses, PciDevice, RankFacts, RankGpu, TimeSync
from hpcpace.audit.tree import Tree, Unreadable
from hpcpace.core.environment import RankInfo
from hpcpace.core.records import dataclass
from hpcpace.core.redaction import Redaction
from hpcpace.core.text import printable

_MODULES = ("nvidia", "nvidia_peermem", "nv_peer_mem", "gdrdrv", "amdgpu", "mlx5_ib", "ib_uverbs", "efa", "cxi_core")
_NVIDIA_GPUS = "proc/driver/nvidia/gpus"
_MAX_GPUS = 64


def collect_kernel(tree: Tree) -> Kernel:
    """Return the kernel, drivers and settings of a host."""
    driver = tree.fact("kernel/nvidia_driver", _nvidia_driver, tree)
    return Kernel(
        release=tree.fact("kernel/release", tree.word, "proc/sys/kernel/osrelease"),
        command_line=tree.fact("kernel/command_line", _command_line, tree),
        is_virtual=tree.fact("kernel/is_virtual", _is_virtual, tree),
        numa_balancing=_numa_balancing(tree),
        huge_pages=_choice(tree, "enabled"),
        huge_pages_defrag=_choice(tree, "defrag"),
        modules=tree.fact("kernel/modules", _modules, tree),
        rdma_holders=_rdma_holders(tree),
        nvidia_driver=None if driver is None else driver[0],
        is_nvidia_open=None if driver is None else driver[1],
        has_verbs=tree.exists("dev/infiniband"),
        shm_bytes=tree.fact("kernel/shm", _shm_bytes, tree),
        memory_bytes=tree.fact("kernel/memory", _memory_bytes, tree),
        nccl_conf=nccl_conf(tree, "etc/nccl.conf"),
    )


def collect_gpus(tree: Tree, pci: Sequence[PciDevice] | None, nvml: Mapping[str, Nvml]) -> tuple[Gpu, ...] | None:
    """Return the GPUs of a host; None if neither PCI nor the driver lists them.

    Args:
        tree: where to read.
        pci: the PCI devices.
        nvml: facts from NVML, by PCI address.
    """
    if pci is not None:
        addresses = [device.address for device in pci if device.kind == "gpu"]
    elif tree.exists(_NVIDIA_GPUS):
        addresses = [printable(name) for name in tree.fact("gpus", tree.names, _NVIDIA_GPUS) or []]
    else:
        tree.unreadable["gpus"] = "PCI cannot be read"
        return None
    vendors = {device.address: device.vendor for device in pci or ()}
    return tuple(
        _gpu(tree, address, vendors.get(address), nvml.get(address)) for address in sorted(addresses)[:_MAX_GPUS]
    )


def nccl_conf(tree: Tree, path: str) -> dict[str, str]:
    """Return the variables that an NCCL configuration file sets; empty if there is no file."""
    if not tree.exists(path):
        return {}
    try:
        lines = tree.text(path).split("\n")
    except Unreadable as error:
        tree.unreadable[path] = str(error)
        return {}
    pairs = [line.split("#")[0].partition("=") for line in lines if "=" in line.split("#")[0]]
    # Redacted before it is cut: a half of a token has no known shape.
    variables = Redaction().variables({name.strip(): value.strip() for name, _, value in pairs[:50]})
    return {printable(name)[:60]: printable(value)[:200] for name, value in variables.items()}


def _gpu(tree: Tree, address: str, vendor: str | None, nvml: Nvml | None) -> Gpu:
    if vendor == "0x1002":
        place = f"sys/bus/pci/devices/{address}"
        return Gpu(
            address=address,
            uuid=tree.fact(f"gpu/{address}/uuid", tree.word, f"{place}/unique_id"),
            name=tree.fact(f"gpu/{address}/name", tree.word, f"{place}/product_name"),
            vbios=tree.fact(f"gpu/{address}/vbios", tree.word, f"{place}/vbios_version"),
            nvml=None,
        )
    lines = tree.fact(f"gpu/{address}", _nvidia_information, tree, address) or {}
    return Gpu(
        address=address,
        uuid=lines.get("GPU UUID"),
        name=lines.get("Model"),
        vbios=lines.get("Video BIOS"),
        nvml=nvml,
    )


def _nvidia_information(tree: Tree, address: str) -> dict[str, str]:
    text = tree.text(f"{_NVIDIA_GPUS}/{address}/information")
    pairs = [line.partition(":") for line in text.split("\n")]
    # The driver writes question marks if the GPU was never opened.
    return {name.strip(): printable(value.strip())[:80] for name, _, value in pairs if value.strip("?- \t")}


def _nvidia_driver(tree: Tree) -> tuple[str, bool]:
    """Return the version of NVIDIA's driver, and whether it is the open one; an empty version if none is loaded."""
    if not tree.exists("proc/driver/nvidia/version"):
        return "", False
    text = tree.text("proc/driver/nvidia/version")
    found = re.search(r"NVRM version:.*?\s(\d{2,4}\.\d{1,4}(?:\.\d{1,4})?)\s", text + " ")
    if not found:
        raise Unreadable("no version in /proc/driver/nvidia/version")
    return found[1], "Open Kernel Module" in text


def _modules(tree: Tree) -> dict[str, str]:
    if not tree.exists("sys/module"):
        raise Unreadable("no /sys/module")
    found = {}
    for name in _MODULES:
        if tree.exists(f"sys/module/{name}"):
            found[name] = tree.word_or_empty(f"sys/module/{name}/version")
    return found


def _rdma_holders(tree: Tree) -> tuple[str, ...] | None:
    holders: set[str] = set()
    for module in ("ib_core", "ib_uverbs"):
        if tree.exists(f"sys/module/{module}/holders"):
            names = tree.fact("kernel/rdma_holders", tree.names, f"sys/module/{module}/holders")
            if names is None:
                return None
            holders |= {printable(name) for name in names[:200]}
    return tuple(sorted(holders))


def _command_line(tree: Tree) -> str:
    return printable(" ".join(Redaction().command(tree.text("proc/cmdline").split(" "))))[:2000]


def _is_virtual(tree: Tree) -> bool:
    text = tree.beginning("proc/cpuinfo")
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    if flags:
        return "hypervisor" in flags[1].split()
    if tree.exists("sys/hypervisor/type"):
        return True
    # Only x86 has this flag; elsewhere the firmware names the manufacturer of the machine.
    maker = f"{tree.word('sys/class/dmi/id/sys_vendor')} {tree.word_or_empty('sys/class/dmi/id/product_name')}"
    return bool(re.search(r"QEMU|KVM|Virtual|VMware|Xen|Amazon EC2(?!.*metal)|Google", maker))


def _numa_balancing(tree: Tree) -> int | None:
    # A kernel built without NUMA balancing, or for a single node, does not have this file.
    if not tree.exists("proc/sys/kernel/numa_balancing"):
        return 0 if tree.exists("proc/sys/kernel") else None
    return tree.fact("kernel/numa_balancing", tree.number, "proc/sys/kernel/numa_balancing")


def _choice(tree: Tree, name: str) -> str | None:
    place = "sys/kernel/mm/transparent_hugepage"
    return tree.fact(f"kernel/huge_pages_{name}", lambda: _chosen(tree.word(f"{place}/{name}")))


def _chosen(text: str) -> str:
    found = re.search(r"\[([a-z+_]{1,30})\]", text)
    if not found:
        raise Unreadable(f"{text[:40]!r} marks no value with brackets")
    return found[1]


def _shm_bytes(tree: Tree) -> int:
    """Return the size of /dev/shm from its mount options; without size= it is half of the memory (tmpfs(5))."""
    found = re.findall(
        r"^\S+ /dev/shm tmpfs (\S+)", tree.beginning("proc/self/mounts", most_bytes=262_144), re.MULTILINE
    )
    if not found:
        raise Unreadable("/dev/shm is not mounted")
    size = re.search(r"(?:^|,)size=(\d{1,15})([kmg]?)", found[-1])
    if not size:
        return _memory_bytes(tree) // 2
    return int(size[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[size[2]]


def _memory_bytes(tree: Tree) -> int:
    found = re.search(r"^MemTotal: *(\d{1,15}) kB", tree.beginning("proc/meminfo"), re.MULTILINE)
    if not found:
        raise Unreadable("no MemTotal in /proc/meminfo")
    return int(found[1]) * 1024


KEPT_PREFIXES = ("NCCL_", "UCX_", "GLOO_", "OMP_", "CUDA_MPS_", "TORCH_NCCL_", "RCCL_")
"""Prefixes of the environment variables that a snapshot keeps."""

KEPT_VARIABLES = frozenset(
    (
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        *("MKL_NUM_THREADS", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_CPU_BIND", "SLURM_NTASKS"),
        *("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_TOPOLOGY_ADDR"),
        *("GOMP_CPU_AFFINITY", "KMP_AFFINITY"),
    )
)
"""Further environment variables that a snapshot keeps."""

_MAX_VARIABLES, _MAX_VALUE = 80, 300
# cgroup v1 writes "no limit" as the largest multiple of the page size.
_UNLIMITED_BYTES = 1 << 60


def collect_rank(
    tree: Tree,
    info: RankInfo,
    environ: Mapping[str, str],
    *,
    proc: str = "proc/self",
    visible: Sequence[RankGpu] | None = None,
    gpu: RankGpu | None = None,
    mpi_size: int | None = None,
    nccl_version: str = "",
) -> RankFacts:
    """Return the facts of one rank; reasons for what cannot be read go to `tree.unreadable` under `rank/N/`.

    Args:
        tree: where to read.
        info: the rank's place in the job.
        environ: its environment.
        proc: its folder in procfs.
        visible: the GPUs that NVML lists, before CUDA_VISIBLE_DEVICES applies; None if NVML was not queried.
        gpu: the GPU that it uses, if that is certain.
        mpi_size: size of MPI_COMM_WORLD, if MPI was checked.
        nccl_version: version of the NCCL library that it has loaded.
    """
    fact = f"rank/{info.rank}"
    status = tree.fact(f"{fact}/status", tree.beginning, f"{proc}/status") or ""
    limits = tree.fact(f"{fact}/limits", tree.beginning, f"{proc}/limits") or ""
    seen, source = visible_gpus(tree, environ, visible)
    used = -1
    if gpu is not None:
        seen, source = (gpu, *[other for other in seen or () if other != gpu]), "session"
        used = 0
    elif seen:
        used = 0 if len(seen) == 1 else info.local_rank if 0 <= info.local_rank < len(seen) else -1
    groups = _Cgroups(tree, proc)
    return RankFacts(
        rank=info.rank,
        local_rank=info.local_rank,
        world_size=info.world_size,
        launcher=info.launcher,
        cpus=tree.fact(f"{fact}/cpus", _allowed, status, "Cpus_allowed_list"),
        memory_nodes=tree.fact(f"{fact}/memory_nodes", _allowed, status, "Mems_allowed_list"),
        memory_policy=tree.fact(f"{fact}/memory_policy", _policy, tree, f"{proc}/numa_maps"),
        cgroup_cpus=tree.fact(f"{fact}/cgroup_cpus", groups.cpus),
        quota_cpus=tree.fact(f"{fact}/quota_cpus", groups.quota_cpus),
        memory_max_bytes=tree.fact(f"{fact}/memory_max", groups.memory_max_bytes),
        locked_bytes=tree.fact(f"{fact}/locked_bytes", _limit, limits, "Max locked memory"),
        open_files=tree.fact(f"{fact}/open_files", _limit, limits, "Max open files"),
        gpus=seen,
        gpu=used,
        gpu_source=source,
        mpi_size=mpi_size,
        variables=chosen_variables(environ),
        user_conf=nccl_conf(tree, f"{environ['HOME'].strip('/')}/.nccl.conf") if environ.get("HOME") else {},
        nccl_version=nccl_version,
    )


def chosen_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return only the variables that rules use, with secrets redacted."""
    names = [name for name in sorted(environ) if name in KEPT_VARIABLES or name.startswith(KEPT_PREFIXES)]
    # Redact before cutting: half a token is not recognised as one.
    chosen = Redaction.of(environ).variables({name: environ[name] for name in names[:_MAX_VARIABLES]})
    return {printable(name)[:60]: printable(value)[:_MAX_VALUE] for name, value in chosen.items()}


def visible_gpus(
    tree: Tree, environ: Mapping[str, str], visible: Sequence[RankGpu] | None
) -> tuple[tuple[RankGpu, ...] | None, str]:
    """Return the GPUs that a rank sees, in its order, and the source of that; None if they are not known.

    Without NVML, the driver's list is used. It has all GPUs of the node; so if Slurm binds one GPU to each task, and
    hides the others by a cgroup, the indices in CUDA_VISIBLE_DEVICES do not identify the GPU.
    """
    source = "nvml" if visible is not None else "environment"
    devices = tuple(visible) if visible is not None else _driver_gpus(tree)
    names = ("CUDA_VISIBLE_DEVICES",) if visible is not None else ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    chosen = next((environ[name] for name in names if name in environ), None)
    if chosen is None or devices is None:
        return devices, source
    words = [word.strip() for word in chosen.split(",") if word.strip()]
    by_number = all(word.isdigit() for word in words)
    if visible is None and words and by_number and is_gpu_bound_per_task(environ):
        return None, source
    return tuple(_selected(words, devices)), source


def is_gpu_bound_per_task(variables: Mapping[str, str]) -> bool:
    """Return whether Slurm binds GPUs to single tasks, by a rank's environment variables."""
    return "SLURM_GPUS_PER_TASK" in variables or "gpu" in variables.get("SLURM_TRES_PER_TASK", "")


def _selected(words: Sequence[str], devices: Sequence[RankGpu]) -> list[RankGpu]:
    """Return the devices that CUDA_VISIBLE_DEVICES selects: those before the first invalid entry."""
    chosen: list[RankGpu] = []
    for word in words:
        if word.isdigit() and int(word[:6]) < len(devices):
            chosen.append(devices[int(word[:6])])
            continue
        named = [device for device in devices if device.uuid and device.uuid.startswith(word)]
        if word.startswith("MIG-"):
            named = [RankGpu(address="", uuid=printable(word)[:60])]
        if word.isdigit() or len(named) != 1:
            break
        chosen += named
    return chosen


def _driver_gpus(tree: Tree) -> tuple[RankGpu, ...] | None:
    try:
        addresses = tree.names("proc/driver/nvidia/gpus")
    except Unreadable:
        addresses = _amd_gpus(tree)
    return tuple(RankGpu(address=printable(address), uuid=_uuid(tree, address)) for address in addresses)


def _amd_gpus(tree: Tree) -> list[str]:
    try:
        return [
            name for name in tree.names("sys/module/amdgpu/drivers/pci:amdgpu") if re.fullmatch(r"[0-9a-f:.]+", name)
        ]
    except Unreadable:
        return []


def _uuid(tree: Tree, address: str) -> str:
    try:
        found = re.search(
            r"^GPU UUID:\s*(GPU-\S{1,60})", tree.text(f"proc/driver/nvidia/gpus/{address}/information"), re.M
        )
    except Unreadable:
        return ""
    return printable(found[1]) if found else ""


def _allowed(status: str, name: str) -> str:
    found = re.search(rf"^{name}:[ \t]*([0-9,-]*)$", status, re.MULTILINE)
    if not found:
        raise Unreadable(f"no {name} in its status")
    return cpusets.format_list(cpusets.parse_list(found[1]))


def _limit(limits: str, name: str) -> int:
    found = re.search(rf"^{name} +(unlimited|\d{{1,19}}) ", limits, re.MULTILINE)
    if not found:
        raise Unreadable(f"no {name!r} in its limits")
    return -1 if found[1] == "unlimited" else min(int(found[1]), _UNLIMITED_BYTES)


def _policy(tree: Tree, path: str) -> str:
    # One page is enough: a policy set before the start applies to every mapping.
    lines = tree.beginning(path, most_bytes=4096).split("\n")
    words = {line.split()[1] for line in lines if len(line.split()) > 1}
    others = sorted(words - {"default"})
    if not words:
        raise Unreadable("empty")
    return printable(others[0])[:60] if others else "default"


class _Cgroups:
    """The cgroups (v1 or v2) of a process, from its own up to the root."""

    def __init__(self, tree: Tree, proc: str) -> None:
        self._tree = tree
        self._proc = proc

    def cpus(self) -> str:
        """Return the CPUs of the nearest cgroup that lists any; all online CPUs if none does."""
        for place in self._places("cpuset"):
            for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
                if self._tree.exists(f"{place}/{name}"):
                    return cpusets.format_list(cpusets.parse_list(self._tree.text(f"{place}/{name}")))
        return cpusets.format_list(cpusets.parse_list(self._tree.text("sys/devices/system/cpu/online")))

    def quota_cpus(self) -> float:
        """Return the smallest quota on the way up to the root, in CPUs; 0 for none."""
        quotas = [quota for place in self._places("cpu") if (quota := self._quota(place)) > 0]
        return min(quotas, default=0.0)

    def memory_max_bytes(self) -> int:
        """Return the smallest memory limit on the way up to the root; 0 for none."""
        limits = [limit for place in self._places("memory") if (limit := self._memory(place)) > 0]
        return min(limits, default=0)

    def _quota(self, place: str) -> float:
        if self._tree.exists(f"{place}/cpu.max"):
            found = re.fullmatch(r"(max|\d{1,15}) (\d{1,15})", self._tree.text(f"{place}/cpu.max"))
            if not found or int(found[2]) == 0:
                raise Unreadable("cpu.max has no valid quota and period")
            return 0.0 if found[1] == "max" else int(found[1]) / int(found[2])
        if self._tree.exists(f"{place}/cpu.cfs_quota_us"):
            quota = self._tree.number(f"{place}/cpu.cfs_quota_us")
            period = self._tree.number(f"{place}/cpu.cfs_period_us")
            if period <= 0:
                raise Unreadable(f"cpu.cfs_period_us is {period}")
            return max(quota, 0) / period
        return 0.0

    def _memory(self, place: str) -> int:
        for name in ("memory.max", "memory.limit_in_bytes"):
            if self._tree.exists(f"{place}/{name}"):
                text = self._tree.text(f"{place}/{name}")
                if text == "max":
                    return 0
                value = self._tree.number(f"{place}/{name}")
                return value if value < _UNLIMITED_BYTES else 0
        return 0

    def _places(self, controller: str) -> list[str]:
        """Return the folders of a controller's cgroups, the process's own first."""
        for line in self._tree.beginning(f"{self._proc}/cgroup").split("\n"):
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controller in controllers.split(","):
                base = next(
                    (
                        b
                        for b in (f"sys/fs/cgroup/{controllers}", f"sys/fs/cgroup/{controller}")
                        if self._tree.exists(b)
                    ),
                    "",
                )
                return _upwards(base, path) if base else []
        for line in self._tree.beginning(f"{self._proc}/cgroup").split("\n"):
            if line.startswith("0::"):
                base = "sys/fs/cgroup/unified" if self._tree.exists("sys/fs/cgroup/unified") else "sys/fs/cgroup"
                return _upwards(base, line[3:])
        return []


def _upwards(base: str, path: str) -> list[str]:
    parts = [part for part in path.split("/") if part and part != ".."]
    return [base + "".join(f"/{part}" for part in parts[:length]) for length in range(len(parts), -1, -1)][:32]


WINDOW_S = 1.0
"""How long a busy node is watched: at 100 ticks a second, CPU time is then known to a hundredth of a CPU."""

_BUSY_LOAD = 0.5
_MAX_PROCESSES = 65_536
_MAX_READ_S = 0.5  # timing: for the processes of one reading
_MIN_CPUS = 0.05  # of processes that are kept: less disturbs nobody
_MAX_KEPT = 8
_KTHREADD = 2
_DAEMONS = frozenset(("chronyd", "ntpd", "systemd-timesyn", "ptp4l", "phc2sys", "openntpd", "ntpsec"))


@dataclass(frozen=True)
class _Process:
    """One process as /proc/N/stat has it: `ticks` is its CPU time; `start` differs if its number was used again."""

    name: str
    state: str
    parent: int
    ticks: int
    start: int


@dataclass(frozen=True, kw_only=True)
class LoadReading:
    """One reading of what the rates are computed from."""

    time_s: float
    cpu_ticks: tuple[int, ...] | None
    swapped_pages: int | None
    processes: dict[int, _Process] = field(default_factory=dict)
    is_complete: bool = True


def is_busy(tree: Tree) -> bool:
    """Return whether a node has enough to do that it is worth watching: a quiet one need not wait."""
    try:
        words = tree.text("proc/loadavg").split()
        return float(words[0]) >= _BUSY_LOAD or int(words[3].partition("/")[0]) > 1
    except (Unreadable, ValueError, IndexError):
        return False


def read_load(tree: Tree, *, with_processes: bool) -> LoadReading:
    """Return the counters of CPUs, swap and, if asked, all processes."""
    begin_s = time.monotonic()
    processes: dict[int, _Process] = {}
    is_complete = True
    for pid in _pids(tree) if with_processes else ():
        if time.monotonic() - begin_s > _MAX_READ_S:
            is_complete = False
            break
        try:
            processes[pid] = _process(tree.beginning(f"proc/{pid}/stat", most_bytes=4096) or "")
        except (Unreadable, ValueError, IndexError):  # it has ended
            continue
    ticks, pages = tree.fact("load/cpu", _cpu_ticks, tree), tree.fact("memory/swap", _swapped_pages, tree)
    return LoadReading(
        time_s=time.monotonic(), cpu_ticks=ticks, swapped_pages=pages, processes=processes, is_complete=is_complete
    )


def collect_load(
    tree: Tree, before: LoadReading | None, after: LoadReading | None, environ: Mapping[str, str], *, has_siblings: bool
) -> Load | None:
    """Return the load of a node; None if it has no load averages, with the reason in `tree.unreadable` if they exist.

    Args:
        tree: where to read.
        before, after: two readings; without, only averages and pressure are known.
        environ: of this process, whose job is the one that is audited.
        has_siblings: whether what started this process has started the other ranks of the job as well.
    """
    if not tree.exists("proc/loadavg"):
        return None
    averages = tree.fact("load", _averages, tree)
    if averages is None:
        return None
    pressure = _pressure(tree)
    if before is None or after is None or after.time_s <= before.time_s:
        return Load(
            averages=averages,
            pressure=pressure,
            window_s=0.0,
            used_cpus=None,
            job_cpus=0.0,
            stolen_cpus=0.0,
            num_blocked=0,
            others=None,
        )
    window_s = after.time_s - before.time_s
    scale = 1 / (os.sysconf("SC_CLK_TCK") * window_s)
    used = {pid: scale * _grown(before, pid, process) for pid, process in after.processes.items()}
    own = _own(tree, after.processes, {pid for pid, cpus in used.items() if cpus > 0}, environ, has_siblings)
    busy, stolen = _used_cpus(before, after, scale)
    blocked = [pid for pid, one in after.processes.items() if one.state == "D" and pid not in own]
    is_complete = before.is_complete and after.is_complete
    if not is_complete:
        tree.unreadable["load/processes"] = f"more than could be read in {_MAX_READ_S:g} s"
    return Load(
        averages=averages,
        pressure=pressure,
        window_s=round(window_s, 2),
        used_cpus=busy,
        job_cpus=round(sum(cpus for pid, cpus in used.items() if pid in own), 3),
        stolen_cpus=stolen,
        num_blocked=sum(pid in before.processes and before.processes[pid].state == "D" for pid in blocked),
        others=_others(tree, after.processes, used, own) if is_complete else None,
    )


def collect_memory(tree: Tree, before: LoadReading | None, after: LoadReading | None) -> Memory | None:
    """Return memory and swap of a node; None if the kernel does not say what is available."""
    # Copied trees have a part of it at most.
    if not tree.is_live and not _says_available(tree):
        return None
    swapped = None
    if before and after and before.swapped_pages is not None and after.swapped_pages is not None:
        swapped = max(0, after.swapped_pages - before.swapped_pages) * os.sysconf("SC_PAGE_SIZE")
    return tree.fact("memory", _memory, tree, swapped)


def _says_available(tree: Tree) -> bool:
    try:
        return "MemAvailable" in tree.beginning("proc/meminfo")
    except Unreadable:
        return False


def collect_time_sync(tree: Tree) -> TimeSync | None:
    """Return what the kernel knows of its clock; None for a copied tree."""
    return tree.fact("time_sync", _time_sync, tree) if tree.is_live else None


def _pids(tree: Tree) -> list[int]:
    # Tree.names keeps the first thousands by name, which are not those that were started first.
    try:
        names = os.listdir(tree.root / "proc")
    except OSError:
        return []
    return [int(name) for name in names if name.isdigit() and len(name) < 10][:_MAX_PROCESSES]


def _process(text: str) -> _Process:
    # The name stands in parentheses and may itself have some (proc_pid_stat(5)).
    begin, end = text.index("("), text.rindex(")")
    fields = text[end + 2 :].split()
    return _Process(
        text[begin + 1 : end], fields[0], int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19])
    )


def _grown(before: LoadReading, pid: int, process: _Process) -> int:
    known = before.processes.get(pid)
    return max(0, process.ticks - (known.ticks if known is not None and known.start == process.start else 0))


def _cpu_ticks(tree: Tree) -> tuple[int, ...]:
    found = re.match(r"cpu +((?:\d{1,19} ?){7,10})", tree.beginning("proc/stat", most_bytes=65_536))
    if not found:
        raise Unreadable("no line of all CPUs in /proc/stat")
    return tuple(map(int, found[1].split()))


def _used_cpus(before: LoadReading, after: LoadReading, scale: float) -> tuple[float | None, float]:
    """Return how many CPUs were busy, and how many the hypervisor took: user, nice, system, irq, softirq; steal."""
    if before.cpu_ticks is None or after.cpu_ticks is None:
        return None, 0.0
    grown = [max(0, now - then) for then, now in zip(before.cpu_ticks, after.cpu_ticks, strict=False)]
    stolen = grown[7] if len(grown) > 7 else 0
    return round(scale * (sum(grown[:3]) + sum(grown[5:7])), 3), round(scale * stolen, 3)


def _swapped_pages(tree: Tree) -> int:
    counts = re.findall(r"^pswp(?:in|out) (\d{1,19})$", tree.beginning("proc/vmstat", most_bytes=65_536), re.MULTILINE)
    if len(counts) != 2:
        raise Unreadable("no pswpin and pswpout in /proc/vmstat")
    return sum(map(int, counts))


def _averages(tree: Tree) -> tuple[float, ...]:
    words = tree.text("proc/loadavg").split()[:3]
    if len(words) != 3 or not all(re.fullmatch(r"\d{1,9}\.\d\d", word) for word in words):
        raise Unreadable(f"{' '.join(words)[:40]!r} are no load averages")
    return tuple(map(float, words))


def _pressure(tree: Tree) -> dict[str, float]:
    """Return the pressures of the last 10 s; empty for a kernel without them (Documentation/accounting/psi.rst)."""
    found = {}
    for name in ("cpu", "memory", "io"):
        try:
            text = tree.beginning(f"proc/pressure/{name}", most_bytes=4096)
        except Unreadable:
            continue
        for kind, value in re.findall(r"^(some|full) avg10=(\d{1,3}\.\d\d) ", text, re.MULTILINE):
            found[f"{name} {kind}"] = float(value)
    return found


def _own(
    tree: Tree,
    processes: Mapping[int, _Process],
    active: set[int],
    environ: Mapping[str, str],
    has_siblings: bool,
) -> set[int]:
    """Return the processes of the job: what started this one, what it has started, and what Slurm counts to the job."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    own, parent = {os.getpid()}, os.getpid()
    while parent in processes and (parent := processes[parent].parent) > 1 and parent not in own:
        own.add(parent)
    waiting = [os.getppid() if has_siblings and os.getppid() > 1 else os.getpid()]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            own.add(child)
            waiting.append(child)
    job_id = environ.get("SLURM_JOB_ID", "")
    if re.fullmatch(r"\d{1,12}", job_id):
        own |= {pid for pid in active - own if _is_of_job(tree, pid, job_id)}
    return own


def _is_of_job(tree: Tree, pid: int, job_id: str) -> bool:
    try:
        groups = tree.beginning(f"proc/{pid}/cgroup")
    except Unreadable:
        groups = ""
    if re.search(rf"/job_{job_id}(/|$)", groups, re.MULTILINE):
        return True
    try:  # Slurm without cgroups; only one's own processes can be read
        content = tree.content(f"proc/{pid}/environ", most_bytes=1 << 18)
    except Unreadable:
        return False
    return f"SLURM_JOB_ID={job_id}".encode() in content.split(b"\0")


def _others(
    tree: Tree, processes: Mapping[int, _Process], used: Mapping[int, float], own: set[int]
) -> tuple[OtherProcesses, ...]:
    users = _users(tree)
    found: dict[tuple[str, str, str], list[float]] = {}
    by_use = sorted((pid for pid in used if used[pid] > 0 and pid not in own), key=lambda pid: -used[pid])
    for pid in by_use[: 64 * _MAX_KEPT]:
        process = processes[pid]
        if _KTHREADD in (pid, process.parent):
            continue
        key = _user(tree, pid, users), _name(process.name), _cpus_of(tree, pid)
        found.setdefault(key, []).append(used[pid])
    kept = [
        OtherProcesses(user=user, name=name, count=len(each), used_cpus=round(sum(each), 3), cpus=cpus)
        for (user, name, cpus), each in found.items()
        if sum(each) >= _MIN_CPUS
    ]
    return tuple(sorted(kept, key=lambda other: -other.used_cpus)[:_MAX_KEPT])


def _name(name: str) -> str:
    return printable(Redaction().text(name))[:16]


def _cpus_of(tree: Tree, pid: int) -> str:
    try:
        return _allowed(tree.beginning(f"proc/{pid}/status"), "Cpus_allowed_list")
    except (Unreadable, ValueError):
        return ""


def _user(tree: Tree, pid: int, users: Mapping[int, str]) -> str:
    try:
        uid = os.stat(tree.root / "proc" / str(pid)).st_uid
    except OSError:
        return "?"
    return users.get(uid, str(uid))


def _users(tree: Tree) -> dict[int, str]:
    """Return the names of local users: a directory service might not answer."""
    try:
        lines = tree.beginning("etc/passwd", most_bytes=262_144).split("\n")
    except Unreadable:
        return {}
    rows = [line.split(":") for line in lines]
    return {int(row[2]): printable(row[0])[:32] for row in rows if len(row) > 2 and re.fullmatch(r"\d{1,10}", row[2])}


def _memory(tree: Tree, swapped: int | None) -> Memory:
    pairs = re.findall(r"^(\w+): +(\d{1,15})(?: kB)?$", tree.beginning("proc/meminfo"), re.MULTILINE)
    values = {name: int(value) for name, value in pairs}
    if "MemAvailable" not in values or "MemTotal" not in values:
        raise Unreadable("no MemAvailable in /proc/meminfo")
    try:
        overcommit: int | None = tree.number("proc/sys/vm/overcommit_memory")
    except Unreadable:
        overcommit = None
    kilo = 1024
    return Memory(
        total_bytes=kilo * values["MemTotal"],
        available_bytes=kilo * values["MemAvailable"],
        swap_total_bytes=kilo * values.get("SwapTotal", 0),
        swap_free_bytes=kilo * values.get("SwapFree", 0),
        committed_bytes=kilo * values.get("Committed_AS", 0),
        commit_limit_bytes=kilo * values.get("CommitLimit", 0),
        overcommit=overcommit,
        huge_free_bytes=kilo * values.get("HugePages_Free", 0) * values.get("Hugepagesize", 0),
        swapped_bytes=swapped,
    )


class _Timex(ctypes.Structure):
    """struct timex of sys/timex.h, up to the status; the rest is room for what the kernel writes."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 48),
    )


_STA_UNSYNC = 0x40


def _time_sync(tree: Tree) -> TimeSync:
    timex = _Timex(modes=0)
    try:
        code = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        raise Unreadable("this system has no adjtimex") from None
    if code < 0:
        raise Unreadable(f"adjtimex: {os.strerror(ctypes.get_errno()).lower()}")
    is_synchronised = not timex.status & _STA_UNSYNC
    # Thousands of names are read only where they explain something: a session starts with this.
    names = set() if is_synchronised else {tree.word_or_empty(f"proc/{pid}/comm") for pid in _pids(tree)}
    return TimeSync(
        is_synchronised=is_synchronised,
        error_s=timex.esterror / 1e6,
        max_error_s=timex.maxerror / 1e6,
        daemons=tuple(sorted(names & _DAEMONS)),
    )
