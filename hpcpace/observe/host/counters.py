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

from hpcpace.observe.host.kernel_counters import Pressure, Throttling, read_counter
from hpcpace.observe.host.phase_cores import UNKNOWN_PHASES, PhaseCores

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
