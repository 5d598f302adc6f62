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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hpcpace.core.text import NS_PER_US

_MOST_THREADS = 64
_MOST_NS = 1 << 60
_TOTAL = re.compile(rb"^some\b.*\btotal=(\d{1,18})\s*$", re.MULTILINE)
_ALLOWED = re.compile(rb"^Cpus_allowed_list:\s*([\d,-]{1,4096})\s*$", re.MULTILINE)


def usable_cpus(proc: Path = Path("/proc")) -> str:
    """Return the CPUs that this process may use, as the kernel lists them, like `0-3,8`; empty if that is not known."""
    found = _ALLOWED.search(read_counter(proc / "self" / "status"))
    return found.group(1).decode() if found else ""


class CoreCounters:
    """Reads the columns of a `host` row that are about cores.

    Args:
        proc: where procfs is mounted.
        cgroup: where the cgroup tree is mounted.
    """

    def __init__(self, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._run_queue = _RunQueue(proc / "self" / "task")
        self._pressure = _find_pressure(proc, cgroup)

    def read(self) -> tuple[int, int, int]:
        """Return processor time, run-queue wait and CPU pressure, all cumulative, nanoseconds."""
        pressure_ns = _pressure_ns(self._pressure) if self._pressure is not None else 0
        return time.process_time_ns(), self._run_queue.wait_ns(), pressure_ns


class _RunQueue:
    """The time for which the threads of a process were ready to run and had no core, summed over them.

    `/proc/PID/schedstat` has that of the main thread alone, so each thread is read. Of many threads, the main one and
    a part of the others is read at a time: the counters are cumulative, so that nothing is lost, only told later.

    Args:
        tasks: the folder with the threads of the process.
    """

    def __init__(self, tasks: Path) -> None:
        self._tasks = tasks
        self._last_ns: dict[str, int] = {}
        self._total_ns = 0
        self._next = 0

    def wait_ns(self) -> int:
        """Return the waiting of all threads so far, of those that have ended included."""
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
        ended = self._last_ns.keys() - set(threads)
        for name in ended:
            del self._last_ns[name]
        return min(self._total_ns, _MOST_NS)

    def _chosen(self, threads: list[str]) -> list[str]:
        if len(threads) <= _MOST_THREADS:
            return threads
        main, others = threads[0], threads[1:]
        first = self._next % len(others)
        self._next = first + _MOST_THREADS - 1
        return [main, *(others + others)[first : self._next]]


def _find_pressure(proc: Path, cgroup: Path) -> Path | None:
    """Return the pressure file of the process's cgroup, else of the host; None where neither can be read."""
    candidates = []
    for line in read_counter(proc / "self" / "cgroup").decode(errors="replace").splitlines():
        number, _, path = line.split(":", 2) if line.count(":") >= 2 else ("", "", "")
        if number == "0":
            candidates += [root / path.lstrip("/") / "cpu.pressure" for root in (cgroup, cgroup / "unified")]
    candidates.append(proc / "pressure" / "cpu")
    # A kernel started with psi=0 has the files and refuses to read them.
    return next((path for path in candidates if _TOTAL.search(read_counter(path))), None)


def _pressure_ns(path: Path) -> int:
    found = _TOTAL.search(read_counter(path))
    return min(int(found.group(1)) * NS_PER_US, _MOST_NS) if found else 0


def read_counter(path: Path) -> bytes:
    """Return the content of a file of procfs or of a cgroup; empty if it cannot be read."""
    # Without the buffer and the text layer of `read_text`, which cost more than the kernel's part.
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


_NO_NVML, _NO_ALLOCATOR = (0,) * 10, (0,) * 2
UNKNOWN = (*_NO_NVML, *_NO_ALLOCATOR)
"""What is read where there is no GPU."""
_MOST_I4, _MOST_I8 = (1 << 31) - 1, (1 << 62) - 1


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
    nvml = _open(gpu.uuid, warn)

    def read() -> tuple[int, ...]:
        return (*(nvml() if nvml is not None else _NO_NVML), *_allocator(gpu.number))

    return read


def _open(uuid: str, warn: Callable[[str], None]) -> Callable[[], tuple[int, ...]] | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except ImportError:
        warn("no GPU counters: install hpcpace[gpu]")
        return None
    except pynvml.NVMLError as error:
        warn(f"no GPU counters: NVML says {error}")
        return None

    def ask(function: str, *arguments: int, most: int = _MOST_I8) -> int:
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
            ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM, most=_MOST_I4),
            ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
            ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM, most=_MOST_I4),
            ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU, most=_MOST_I4),
            ask("nvmlDeviceGetPowerUsage", most=_MOST_I4),
            ask("nvmlDeviceGetEnforcedPowerLimit", most=_MOST_I4),
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


_PAGE_BYTES = resource.getpagesize()


class HostCounters:
    """Reads one row of the trace's `host` table; counters that this host lacks read as zero.

    Args:
        proc: where procfs is mounted.
        cgroup: where the cgroup tree is mounted.
        warn: takes one warning that says why GPU counters stay zero.
    """

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        cgroup: Path = Path("/sys/fs/cgroup"),
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._statm = proc / "self" / "statm"
        self._snmp = proc / "self" / "net" / "snmp"
        self._net_dev = proc / "self" / "net" / "dev"
        self._cpu_stat = _find_cpu_stat(proc / "self" / "cgroup", cgroup)
        self._warn = warn
        self._gpu: Callable[[], tuple[int, ...]] | None = None
        self._cores = CoreCounters(proc=proc, cgroup=cgroup)

    def use_gpu(self, gpu: Gpu) -> None:
        """Read the counters of this rank's GPU from here on."""
        self._gpu = gpu_counters(gpu, self._warn)

    def read(self) -> tuple[int, ...]:
        """Return the columns of a `host` row behind its time."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        gpu_memory_bytes, gpu_clock_mhz, gpu_throttle_reasons, *gpu_health = self._gpu() if self._gpu else UNKNOWN
        return (
            usage.ru_nivcsw,
            usage.ru_majflt,
            self._throttled_ns(),
            self._rss_bytes(),
            gpu_memory_bytes,
            gpu_clock_mhz,
            gpu_throttle_reasons,
            self._tcp_retransmits(),
            self._nic_drops(),
            *self._cores.read(),
            *gpu_health,
        )

    def _rss_bytes(self) -> int:
        fields = _read(self._statm).split()
        return int(fields[1]) * _PAGE_BYTES if len(fields) > 1 else 0

    def _throttled_ns(self) -> int:
        for line in _read(self._cpu_stat).splitlines() if self._cpu_stat else ():
            key, _, value = line.partition(" ")
            if key == "throttled_usec":  # cgroup v2
                return int(value) * 1000
            if key == "throttled_time":  # cgroup v1
                return int(value)
        return 0

    def _tcp_retransmits(self) -> int:
        rows = [line.split() for line in _read(self._snmp).splitlines() if line.startswith("Tcp:")]
        return int(rows[1][rows[0].index("RetransSegs")]) if len(rows) == 2 else 0

    def _nic_drops(self) -> int:
        rows = [line.partition(":")[2].split() for line in _read(self._net_dev).splitlines()[2:]]
        return sum(int(columns[3]) + int(columns[11]) for columns in rows if len(columns) >= 16)


def _read(path: Path) -> str:
    return read_counter(path).decode()


def _find_cpu_stat(membership: Path, cgroup: Path) -> Path | None:
    for line in _read(membership).splitlines():
        number, controllers, path = line.split(":", 2)
        candidates = [cgroup / path.lstrip("/")] if number == "0" else []
        if "cpu" in controllers.split(","):
            candidates.append(cgroup / controllers / path.lstrip("/"))
            candidates.append(cgroup / "cpu" / path.lstrip("/"))
        for candidate in candidates:
            if (candidate / "cpu.stat").is_file():
                return candidate / "cpu.stat"
    return None
