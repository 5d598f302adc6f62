"""How fast cores copy within the memory of their NUMA node.

Each core copies in a thread that is bound to it, between arrays that it has touched first, so that Linux has put them
into its node's memory. All threads copy at once, as in STREAM (McCalpin, 1995), whose way of counting is used: what is
read and what is written.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

NODES = Path("/sys/devices/system/node")
_READ_AND_WRITTEN = 2
_SET_UP_TIMEOUT_S = 30.0
# Of the memory that is free, what the arrays of all cores may take.
_MEMORY_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class NodeRate:
    """What the cores of one rank reached on one NUMA node; attributes as of `MemoryRate`."""

    numa_node: int
    num_threads: int
    rate: float


def numa_of_cpus(nodes: Path = NODES) -> dict[int, int]:
    """Return the NUMA node of each core; empty where the kernel knows none.

    Args:
        nodes: where the kernel lists them.
    """
    found = {}
    for folder in sorted(nodes.glob("node[0-9]*")):
        try:
            text = (folder / "cpulist").read_text(encoding="ascii").strip()
        except OSError:
            continue
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
            found.update(dict.fromkeys(range(int(first), int(last or first) + 1), int(folder.name[4:])))
    return found


def affordable_bytes(num_cpus: int) -> int:
    """Return how large each of two arrays of so many cores may be."""
    return int(_MEMORY_SHARE * psutil.virtual_memory().available / (2 * max(num_cpus, 1)))


def memory_rates(
    cpus: Sequence[int], numa_of_cpu: Mapping[int, int], *, length_s: float, array_bytes: int
) -> list[NodeRate]:
    """Return the rate of some cores for each NUMA node, ascending; all of them copy at once.

    Args:
        cpus: the cores.
        numa_of_cpu: node of each core; 0 for those not listed.
        length_s: for which they copy.
        array_bytes: of each of a core's two arrays; more than its share of the caches.
    """
    barrier = threading.Barrier(max(len(cpus), 1), timeout=_SET_UP_TIMEOUT_S)
    rates: dict[int, float] = {}

    def copy(cpu: int) -> None:
        try:
            os.sched_setaffinity(0, {cpu})  # of this thread
            source, target = np.ones(array_bytes // 8), np.zeros(array_bytes // 8)
            target.fill(2.0)
            barrier.wait()
        except (OSError, MemoryError):
            barrier.abort()
            return
        except threading.BrokenBarrierError:
            return
        begin_s, num_copies = time.perf_counter(), 0
        while (now_s := time.perf_counter()) < begin_s + length_s or not num_copies:
            np.copyto(target, source)
            num_copies += 1
        now_s = time.perf_counter()
        rates[cpu] = _READ_AND_WRITTEN * num_copies * target.nbytes / (now_s - begin_s)

    threads = [threading.Thread(target=copy, args=(cpu,), name=f"hpcpace-copy-{cpu}") for cpu in cpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = []
    for node in sorted({numa_of_cpu.get(cpu, 0) for cpu in rates}):
        of_node = [rate for cpu, rate in rates.items() if numa_of_cpu.get(cpu, 0) == node]
        found.append(NodeRate(numa_node=node, num_threads=len(of_node), rate=sum(of_node)))
    return found
