"""Machines that exist, rebuilt from dumps that hwloc publishes.

Facts only, none of the files: hwloc (https://github.com/open-mpi/hwloc, BSD-3-Clause, commit 3b37b024), folder
tests/hwloc/linux; each function names its dump. The dumps hold processors, NUMA nodes and, one of them, PCI and RDMA;
the kernel's settings, the ranks,
and that the others have no PCI devices or no PCI in sysfs, are ours.
"""

from __future__ import annotations

from tests.machines.machine import Machine, threaded


def xeon_e7_4870() -> Machine:
    """40intel64-2g2n4c+pcilocality: CPUs dealt out to 4 sockets in turn, an InfiniBand adapter of PCI class 0x0c06."""
    machine = Machine("e7-4870")
    machine.processors(
        {node: [str(cpu) for cpu in range(node, 40, 4)] for node in range(4)},
        packages={node: [node] for node in range(4)},
        governor="",
    )
    none = {"cpus": "0-39", "width": None, "speed": None, "corrected": None}
    for number, way in enumerate(("05.0/0000:02:00.0", "05.0/0000:02:00.1", "06.0/0000:03:00.0", "06.0/0000:03:00.1")):
        machine.pci(f"pci0000:00/0000:00:{way}", "0x020000", "0x14e4", "0x1639", **none)
        state, speed = ("down", None) if number else ("up", 1000)
        machine.net(f"eth{number}", way.split("/")[1], mtu=1500, speed=speed, state=state)
    machine.pci("pci0000:40/0000:40:03.0/0000:43:00.0", "0x0c0600", "0x1077", "0x7322", numa=2, **none)
    machine.rdma("qib0", "0000:43:00.0", rate="40 Gb/sec (4X QDR)", firmware="", board="InfiniPath_QLE7340")
    machine.net("ib0", "0000:43:00.0", mtu=2044, kind=32)
    for rank in range(4):
        machine.rank(rank, f"{10 * rank}-{10 * rank + 9}", world=4, mems="0-3", environ={"OMP_NUM_THREADS": "10"})
    return machine


def magny_cours_sparse() -> Machine:
    """48amd64-4pa2n6c-sparse: 8 NUMA nodes numbered 0, 1, 2, 33, 34, 45, 72 and 73."""
    numbers = (0, 1, 2, 33, 34, 45, 72, 73)
    rows = (
        (10, 16, 16, 22, 16, 22, 16, 22),
        (16, 10, 22, 16, 16, 22, 22, 16),
        (16, 22, 10, 16, 16, 16, 16, 16),
        (22, 16, 16, 10, 16, 16, 22, 22),
        (16, 16, 16, 16, 10, 16, 16, 22),
        (22, 22, 16, 16, 16, 10, 22, 16),
        (16, 22, 16, 22, 16, 22, 10, 16),
        (22, 16, 16, 22, 22, 16, 16, 10),
    )
    machine = Machine("magny1").processors(
        {number: threaded(6 * place, 6) for place, number in enumerate(numbers)},
        packages={package: numbers[2 * package : 2 * package + 2] for package in range(4)},
        driver="powernow-k8",
        distances=dict(zip(numbers, rows, strict=True)),
    )
    for rank, cpus in enumerate(("0-5", "6-11", "12-20", "21-26")):
        machine.rank(rank, cpus, world=4, mems="0-2,33-34,45,72-73", environ={"OMP_NUM_THREADS": "6"})
    return machine


def raptor_lake() -> Machine:
    """20em64t-hybrid-1p6c2t+2ca4co1t: Core i7-1370P, 6 cores of two threads and 8 small ones."""
    cores = [f"{2 * core}-{2 * core + 1}" for core in range(6)] + [str(cpu) for cpu in range(12, 20)]
    machine = Machine("i7-1370p").processors({0: cores}, governor="powersave", driver="intel_pstate")
    for rank, cpus in enumerate(("0-9", "10-19")):
        machine.rank(rank, cpus, world=2, mems="0", environ={"OMP_NUM_THREADS": "10"})
    return machine


def dgx_spark() -> Machine:
    """nvidia-dgx-gb10: two clusters of 10 Arm cores with an L3 cache each, package id 36."""
    machine = Machine("gb10", kernel="6.11.0-1016-nvidia")
    machine.files["proc/cpuinfo"] = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd87\n"
    machine.files |= {"sys/class/dmi/id/sys_vendor": "NVIDIA", "sys/class/dmi/id/product_name": "DGX Spark"}
    machine.processors({0: threaded(0, 20)}, packages={36: [0]}, driver="cppc_cpufreq", l3=("0-9", "10-19"))
    capacities = (*(718,) * 5, *(997,) * 5, *(731,) * 5, *(1017,) * 4, 1024)
    for cpu, capacity in enumerate(capacities):
        machine.files[f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity"] = str(capacity)
    machine.without("sys/bus/pci")
    machine.rank(0, "0-19", world=1, mems="0", environ={"OMP_NUM_THREADS": "20"})
    return machine
