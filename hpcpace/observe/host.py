"""What the host does to this process, once a second: switches, faults, throttling, memory, GPUs, retransmits, cores."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

from hpcpace.observe.cores import CoreCounters, read_counter
from hpcpace.observe.gpu import UNKNOWN as NO_GPU
from hpcpace.observe.gpu import Gpu, gpu_counters

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
        gpu_memory_bytes, gpu_clock_mhz, gpu_throttle_reasons, *gpu_health = self._gpu() if self._gpu else NO_GPU
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
