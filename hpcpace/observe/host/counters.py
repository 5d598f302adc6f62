"""What the host does to this process, once a second: cores, memory, throttling, its GPU.

That a process lacks cores shows in the time for which its threads waited for one, and in pressure stall information:
the kernel counts both in any case, and reading them costs some microseconds a second for each thread. Of the GPU, NVML
has clocks, heat, power and errors, and torch's allocator its retries; reading waits for nothing on the device, and CUDA
is never initialised here. A counter that a host lacks, or that says nothing sensible, reads as zero.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hpcpace.core.text import NS_PER_US
from hpcpace.observe.host.phase_cores import UNKNOWN_PHASES, PhaseCores
from hpcpace.trace.schema import MILLICORES

_TOTAL = re.compile(rb"^some\b.*\btotal=(\d{1,18})\s*$", re.MULTILINE)
# Of cgroup v2, and of v1 (Documentation/scheduler/sched-bwc.rst).
_THROTTLED = re.compile(rb"^(throttled_usec|throttled_time) (\d{1,18})\s*$", re.MULTILINE)
_MAX_LEVELS = 16  # of nested cgroups: each costs a file a second
_MAX_THROTTLED_NS = 1 << 60  # beyond what a counter can have reached


def read_counter(path: Path) -> bytes:
    """Return the content of a file of procfs or of a cgroup; empty if it cannot be read."""
    # Without the buffer and the text layer of `read_text`, which cost more than the kernel's part.
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


class Pressure:
    """CPU pressure of the cgroup of this process, or else of its host.

    Args:
        proc: where procfs is mounted.
        cgroup: where the cgroup tree is mounted.
    """

    def __init__(self, *, proc: Path, cgroup: Path) -> None:
        paths = [path for number, _, path in _memberships(proc) if number == "0"]
        candidates = [root / path / "cpu.pressure" for path in paths for root in (cgroup, cgroup / "unified")]
        candidates.append(proc / "pressure" / "cpu")
        # A kernel started with psi=0 has the files and refuses to read them.
        self._file = next((path for path in candidates if _TOTAL.search(read_counter(path))), None)

    def read_ns(self) -> int:
        """Return for how long some task waited for a core, cumulative, nanoseconds."""
        found = _TOTAL.search(read_counter(self._file)) if self._file is not None else None
        return int(found.group(1)) * NS_PER_US if found else 0


class CpuQuota(NamedTuple):
    """A CPU quota that stops this process.

    Attributes:
        file: that sets it, as this process sees it.
        millicores: thousandths of a core that it allows.
    """

    file: str
    millicores: int


class Throttling:
    """For how long CPU quotas have kept this process from running, and which ones: of its cgroup and those above it.

    A cgroup counts what its own quota does, not what those above it do.

    Args:
        proc: where procfs is mounted.
        cgroup: where the cgroup tree is mounted.
    """

    def __init__(self, *, proc: Path, cgroup: Path) -> None:
        self._folders = _cpu_folders(proc, cgroup)
        self._last_ns: dict[Path, int] = {}
        self._known: dict[Path, CpuQuota] = {}
        self._new: list[CpuQuota] = []

    def read_ns(self) -> int:
        """Return for how long quotas have stopped this process, cumulative, nanoseconds."""
        for folder in self._folders:
            found = _THROTTLED.search(read_counter(folder / "cpu.stat"))
            if found is None:
                continue
            now_ns = int(found.group(2)) * (NS_PER_US if found.group(1) == b"throttled_usec" else 1)
            # Only a quota that stops somebody is read.
            if now_ns > self._last_ns.get(folder, now_ns):
                self._look_at_quota(folder)
            self._last_ns[folder] = now_ns
        return min(sum(self._last_ns.values()), _MAX_THROTTLED_NS)

    def take_new(self) -> list[CpuQuota]:
        """Return the quotas that have stopped this process since the last call, and are new or have changed."""
        new, self._new = self._new, []
        return new

    def _look_at_quota(self, folder: Path) -> None:
        quota = _quota_of(folder)
        if quota is not None and self._known.get(folder) != quota:
            self._known[folder] = quota
            self._new.append(quota)


def _quota_of(folder: Path) -> CpuQuota | None:
    """Return the quota of a cgroup; None where it has none any more."""
    file = folder / "cpu.max"
    words = read_counter(file).split()
    if not words:
        file = folder / "cpu.cfs_quota_us"
        words = [*read_counter(file).split(), *read_counter(folder / "cpu.cfs_period_us").split()]
    if len(words) != 2 or not all(word.isdigit() and len(word) <= 15 for word in words) or not int(words[1]):
        return None
    return CpuQuota(str(file), MILLICORES * int(words[0]) // int(words[1]))


def _cpu_folders(proc: Path, cgroup: Path) -> list[Path]:
    """Return the folder of this process's cgroup in the tree that limits CPU time, and those above it."""
    for number, controllers, path in _memberships(proc):
        roots = [cgroup] if number == "0" else []
        if "cpu" in controllers:
            roots += [cgroup / ",".join(controllers), cgroup / "cpu"]
        for root in roots:
            if (root / path / "cpu.stat").is_file():
                return [root / path, *(above for above in (root / path).parents if above.is_relative_to(root))][
                    :_MAX_LEVELS
                ]
    return []


def _memberships(proc: Path) -> Iterator[tuple[str, list[str], str]]:
    """Yield number, controllers and path of each cgroup of this process."""
    for line in read_counter(proc / "self" / "cgroup").decode(errors="replace").splitlines():
        if line.count(":") >= 2:
            number, controllers, path = line.split(":", 2)
            yield number, controllers.split(","), path.lstrip("/")


UNKNOWN = (0,) * 12
"""What is read of a GPU where there is none."""
_NO_NVML, _NO_ALLOCATOR = UNKNOWN[:10], UNKNOWN[10:]
# Each thread costs some microseconds a second.
_MAX_THREADS = 64
# Beyond what a counter can have reached, and within the columns of the trace.
_MAX_NS = 1 << 60
_MAX_I4, _MAX_I8 = (1 << 31) - 1, (1 << 62) - 1
_PAGE_BYTES = resource.getpagesize()
_ALLOWED = re.compile(rb"^Cpus_allowed_list:\s*([\d,-]{1,4096})\s*$", re.MULTILINE)


def usable_cpus(proc: Path = Path("/proc")) -> str:
    """Return the CPUs that this process may use, as the kernel lists them, like `0-3,8`; empty if that is not known."""
    found = _ALLOWED.search(read_counter(proc / "self" / "status"))
    return found.group(1).decode() if found else ""


class CoreCounters:
    """Reads the columns of a `host` row that are about cores.

    `/proc/PID/schedstat` has the run-queue wait of the main thread alone, so each thread is read. Of many threads, the
    main one and a part of the others is read at a time: the counters are cumulative, so that nothing is lost, and only
    comes later.

    Args:
        proc: where procfs is mounted.
        cgroup: where the cgroup tree is mounted.
    """

    def __init__(self, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._tasks = proc / "self" / "task"
        self._pressure = Pressure(proc=proc, cgroup=cgroup)
        self._last_ns: dict[str, int] = {}
        self._total_ns = self._next = 0

    def read(self) -> tuple[int, int, int]:
        """Return processor time, run-queue wait and CPU pressure, all cumulative, nanoseconds."""
        return time.process_time_ns(), self._wait_ns(), min(self._pressure.read_ns(), _MAX_NS)

    def _wait_ns(self) -> int:
        """Return for how long threads were ready to run and had no core, those that have ended included."""
        try:
            threads = sorted(os.listdir(self._tasks), key=lambda name: (len(name), name))
        except OSError:
            return self._total_ns
        for name in self._chosen(threads):
            # Running, waiting, and how often it ran (Documentation/scheduler/sched-stats.rst).
            fields = read_counter(self._tasks / name / "schedstat").split()
            if len(fields) < 2 or not fields[1].isdigit() or len(fields[1]) > 18:
                continue
            now_ns = int(fields[1])
            self._total_ns += max(now_ns - self._last_ns.get(name, 0), 0)
            self._last_ns[name] = now_ns
        for ended in self._last_ns.keys() - set(threads):
            del self._last_ns[ended]
        return min(self._total_ns, _MAX_NS)

    def _chosen(self, threads: list[str]) -> list[str]:
        if len(threads) <= _MAX_THREADS:
            return threads
        main, others = threads[0], threads[1:]
        first = self._next % len(others)
        self._next = first + _MAX_THREADS - 1
        return [main, *(others + others)[first : self._next]]


class Device(NamedTuple):
    """The counters of a network device in /proc/net/dev."""

    sent_bytes: int = 0
    received_bytes: int = 0
    errors: int = 0
    drops: int = 0


def read_devices(net_dev: Path) -> dict[str, Device]:
    """Return the network devices in the kernel's table, by name; none if it cannot be read."""
    table = {}
    for line in _read(net_dev).splitlines()[2:]:
        name, _, counters = line.partition(":")
        # Bytes, packets, errors and drops received, four more columns, and the same sent.
        columns = [int(column) for column in counters.split()]
        if len(columns) >= 16:
            table[name.strip()] = Device(columns[8], columns[0], columns[2] + columns[10], columns[3] + columns[11])
    return table


class Gpu(NamedTuple):
    """A rank's GPU: its identity for NVML, like `GPU-3f...`, and its number in torch, which is another than NVML's."""

    uuid: str
    number: int


def gpu_in_use() -> Gpu | None:
    """Return the GPU that this thread computes on; None where torch has not begun to use any, so as not to begin it."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    number = torch.cuda.current_device()
    return Gpu(f"GPU-{torch.cuda.get_device_properties(number).uuid}", number)


def gpu_counters(gpu: Gpu, warn: Callable[[str], None]) -> Callable[[], tuple[int, ...]]:
    """Return a function that reads the GPU's columns of a `host` row, in their order; what is unknown reads as zero.

    Args:
        gpu: of this rank.
        warn: takes one warning that says why NVML's columns stay zero.
    """
    nvml = _open_nvml(gpu.uuid, warn)
    return lambda: (*nvml(), *_allocator(gpu.number))


def _open_nvml(uuid: str, warn: Callable[[str], None]) -> Callable[[], tuple[int, ...]]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except ImportError:
        warn("no GPU counters: install hpcpace[gpu]")
        return lambda: _NO_NVML
    except pynvml.NVMLError as error:
        warn(f"no GPU counters: NVML says {error}")
        return lambda: _NO_NVML

    def ask(function: str, *arguments: int, most: int = _MAX_I8) -> int:
        try:
            value = int(getattr(pynvml, function)(handle, *arguments))
        except (AttributeError, pynvml.NVMLError):  # a library or a card that does not know the question
            return 0
        return value if 0 <= value <= most else 0  # NVML says -1 of any width where a value is not available

    def memory_bytes() -> int:
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        except pynvml.NVMLError:
            return 0

    def read() -> tuple[int, ...]:
        return (
            memory_bytes(),
            ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM, most=_MAX_I4),
            ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
            ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM, most=_MAX_I4),
            ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU, most=_MAX_I4),
            ask("nvmlDeviceGetPowerUsage", most=_MAX_I4),
            ask("nvmlDeviceGetEnforcedPowerLimit", most=_MAX_I4),
            ask("nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC),
            ask("nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
            ask("nvmlDeviceGetPcieReplayCounter"),
        )

    return read


def _allocator(index: int) -> tuple[int, int]:
    """Return how often torch's allocator freed its cache to try again, and how often memory ran out."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return _NO_ALLOCATOR
    try:
        # Takes the allocator's lock for a copy of its counters, and calls nothing of the driver.
        stats = torch.cuda.memory_stats(index)
    except RuntimeError:  # an allocator that counts nothing
        return _NO_ALLOCATOR
    return int(stats.get("num_alloc_retries", 0)), int(stats.get("num_ooms", 0))


class HostCounters:
    """Reads one row of the trace's `host` table; counters that this host lacks read as zero.

    Attributes:
        throttling: by the CPU quotas of this process.

    Args:
        proc: where procfs is mounted.
        cgroup: where the cgroup tree is mounted.
        warn: takes one warning that says why GPU counters stay zero.
        phases: what the thread that trains had of its core; None where that is not read.
    """

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        cgroup: Path = Path("/sys/fs/cgroup"),
        warn: Callable[[str], None] = lambda message: None,
        phases: PhaseCores | None = None,
    ) -> None:
        self._proc = proc / "self"
        self.throttling = Throttling(proc=proc, cgroup=cgroup)
        self._warn = warn
        self._gpu: Callable[[], tuple[int, ...]] | None = None
        self._cores, self._phases = CoreCounters(proc=proc, cgroup=cgroup), phases

    def use_gpu(self, gpu: Gpu) -> None:
        """Read the counters of this rank's GPU from here on."""
        self._gpu = gpu_counters(gpu, self._warn)

    def read(self) -> tuple[int, ...]:
        """Return the columns of a `host` row behind its time; always called by the thread that samples."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        gpu_memory_bytes, gpu_clock_mhz, gpu_throttle_reasons, *gpu_health = self._gpu() if self._gpu else UNKNOWN
        statm = _read(self._proc / "statm").split()
        tcp = [line.split() for line in _read(self._proc / "net" / "snmp").splitlines() if line.startswith("Tcp:")]
        return (
            usage.ru_nivcsw,
            usage.ru_majflt,
            self.throttling.read_ns(),
            int(statm[1]) * _PAGE_BYTES if len(statm) > 2 else 0,
            gpu_memory_bytes,
            gpu_clock_mhz,
            gpu_throttle_reasons,
            int(tcp[1][tcp[0].index("RetransSegs")]) if len(tcp) == 2 else 0,
            sum(device.drops for device in read_devices(self._proc / "net" / "dev").values()),
            *self._cores.read(),
            *gpu_health,
            resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw,
            int(statm[2]) * _PAGE_BYTES if len(statm) > 2 else 0,
            *(UNKNOWN_PHASES if self._phases is None else (self._phases.nice, *self._phases.columns)),
        )


def _read(path: Path) -> str:
    return read_counter(path).decode()
