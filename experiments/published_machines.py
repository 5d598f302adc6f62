"""Compares what the audit reads with what hwloc's lstopo reads, on all Linux trees that hwloc publishes.

`git clone https://github.com/open-mpi/hwloc; python -m experiments.published_machines hwloc/tests/hwloc/linux` unpacks
each `*.tar.bz2` and prints one row per tree; docs/results/audit.md explains each difference. Needs lstopo.

Options:
  folder PATH  tests/hwloc/linux of a checkout of hwloc
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.options import command_line
from experiments.pages import table
from hpcpace.audit import cpusets
from hpcpace.audit.collect_hardware import collect_hardware
from hpcpace.audit.facts import Hardware, HardwareView, PciDevice
from hpcpace.audit.tree import Tree, Unreadable

KINDS = ("packages", "NUMA nodes", "cores", "CPUs", "GPUs", "NICs")

_DISPLAYS = ("1013", "102b", "1a03")
# Cirrus, Matrox and ASPEED.

Objects = Mapping[str, frozenset[tuple[str, str]] | None]
"""For each kind its objects, each with its CPUs, or those near it; None if they cannot be read."""


@dataclass(frozen=True)
class Comparison:
    """What the audit and lstopo read from one tree."""

    name: str
    own: Objects
    lstopo: Objects

    def cell(self, kind: str) -> str:
        """Return `n` objects that agree, `-` where neither has any, otherwise both counts and the first difference."""
        own, other = self.own[kind], self.lstopo[kind] or frozenset()
        if own == other or (own is None and not other):
            return str(len(other)) if other else "-"
        if own is None:
            return f"unknown/{len(other)}"
        return f"{len(own)}/{len(other)}, {len(own & other)} equal"

    @property
    def is_equal(self) -> bool:
        """Whether all objects agree."""
        return all("/" not in self.cell(kind) for kind in KINDS)


def compare(name: str, root: Path) -> Comparison:
    """Return what both read from a tree that contains sys and proc."""
    hardware = collect_hardware(Tree(root))
    without_cpus = {str(node.number) for node in hardware.numa or () if not node.cpus}
    return Comparison(name, of_audit(hardware), of_lstopo(_topology(root), without_cpus))


def of_audit(hardware: Hardware) -> Objects:
    """Return the objects that the audit has read."""
    cpus, view = hardware.cpus, HardwareView(hardware)
    pci = hardware.pci or ()
    return {
        "packages": None if cpus.packages is None else frozenset(("", own) for own in cpus.packages.values()),
        "NUMA nodes": None
        if hardware.numa is None
        else frozenset((str(node.number), _online(node.cpus or "", cpus.online)) for node in hardware.numa),
        "cores": None if cpus.cores is None else frozenset(("", own) for own in cpus.cores),
        "CPUs": None if cpus.online is None else _each(cpusets.parse_list(cpus.online)),
        "GPUs": frozenset((device.address, _near(view, device)) for device in pci if device.kind == "gpu"),
        "NICs": frozenset((device.address, _near(view, device)) for device in pci if device.kind == "nic"),
    }


def of_lstopo(topology: ElementTree.Element, without_cpus: Collection[str]) -> Objects:
    """Return the objects in lstopo's XML.

    Args:
        topology: its root.
        without_cpus: numbers of NUMA nodes with memory only, to which lstopo adds the CPUs that are nearest.
    """
    found: dict[str, set[tuple[str, str]]] = {kind: set() for kind in KINDS}
    online = 0
    for element, near in _walked(topology, 0):
        kind = element.get("type")
        if kind == "PU":
            online |= _cpus(element)
        elif kind == "NUMANode":
            number = element.get("os_index", "")
            cpus = "" if number in without_cpus else cpusets.format_list(_cpus(element))
            found["NUMA nodes"].add((number, cpus))
        elif kind in ("Package", "Core"):
            found["packages" if kind == "Package" else "cores"].add(("", cpusets.format_list(_cpus(element))))
        elif kind == "PCIDev":
            of_pci = _kind(element.get("pci_type") or "")
            if of_pci:
                found[of_pci].add((element.get("pci_busid", ""), cpusets.format_list(near)))
    found["CPUs"] |= _each(online)
    return {kind: frozenset(objects) for kind, objects in found.items()}


def _each(cpus: int) -> frozenset[tuple[str, str]]:
    return frozenset(("", str(cpu)) for cpu in cpusets.members(cpus))


def _online(cpus: str, online: str | None) -> str:
    return cpusets.format_list(cpusets.parse_list(cpus) & cpusets.parse_list(online or ""))


def _kind(pci_type: str) -> str:
    """Return what hwloc's `0300 [10de:20b5] ...` is; displays of management processors and hypervisors are no GPUs."""
    if pci_type.startswith(("02", "0c06")):
        return "NICs"
    is_gpu = pci_type.startswith(("03", "12")) and pci_type[6:10] not in _DISPLAYS
    return "GPUs" if is_gpu else ""


def _near(view: HardwareView, device: PciDevice) -> str:
    """Return the CPUs of the NUMA node of a device, all CPUs if it is not known."""
    try:
        return cpusets.format_list(view.numa_cpus[view.node_of(device.address)] & view.online)
    except Unreadable:
        return cpusets.format_list(view.online)


def _walked(element: ElementTree.Element, near: int) -> Iterator[tuple[ElementTree.Element, int]]:
    """Yield each object with the CPUs of the nearest object above it that has any."""
    for child in element.findall("object"):
        yield child, near
        yield from _walked(child, _cpus(child) or near)


def _cpus(element: ElementTree.Element) -> int:
    """Return hwloc's `0x00000001,,0x0000000f`, the last 32 CPUs first, as a set."""
    cpus = 0
    for part in (element.get("cpuset") or "0x0").split(","):
        cpus = cpus << 32 | int(part or "0x0", 16)
    return cpus


def _topology(root: Path) -> ElementTree.Element:
    environ = {**os.environ, "HWLOC_FSROOT": str(root), "HWLOC_COMPONENTS": "linux,stop", "HWLOC_HIDE_ERRORS": "2"}
    environ["HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES"] = "1"
    command = ["lstopo-no-graphics", "--of", "xml", "--whole-io", "--disallowed", "--no-collapse"]
    text = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout
    return ElementTree.fromstring(text)


def unpacked(archive: Path, folder: Path) -> Path:
    """Unpack a tree into an empty folder, and return its root."""
    with tarfile.open(archive) as stream:
        stream.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


def main() -> None:
    """Print one row per tree, and how many agree."""
    rows = []
    for archive in sorted(command_line(__doc__).folder.glob("*.tar.bz2")):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(archive.name.removesuffix(".tar.bz2"), unpacked(archive, Path(folder))))
    print(table(("tree", *KINDS), [[row.name, *map(row.cell, KINDS)] for row in rows]))
    print(f"\n{sum(row.is_equal for row in rows)} of {len(rows)} trees agree in everything")


if __name__ == "__main__":
    main()
