"""What tells that a process lacks cores: time in which its threads waited for one, and pressure stall information.

The kernel counts both in any case; reading them costs some microseconds a second for each thread. A counter that the
kernel lacks, or that says nothing sensible, reads as zero.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

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
