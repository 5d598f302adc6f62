"""On this machine, NUMA nodes, cores, siblings, caches and PCI devices are those that hwloc's lstopo sees."""

from __future__ import annotations

import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from hpcpace.audit import cpusets
from hpcpace.audit.collect_hardware import collect_hardware
from hpcpace.audit.facts import Hardware
from hpcpace.audit.tree import Tree

LSTOPO = shutil.which("lstopo-no-graphics") or shutil.which("lstopo")
pytestmark = [
    pytest.mark.tool,
    pytest.mark.skipif(LSTOPO is None, reason="needs hwloc's lstopo: apt-get install hwloc-nox"),
]

_LEVELS = {"L1Cache": (1, "Data"), "L1iCache": (1, "Instruction"), "L2Cache": (2, "Unified"), "L3Cache": (3, "Unified")}


@pytest.fixture(scope="module")
def topology() -> ElementTree.Element:
    command = [str(LSTOPO), "--of", "xml", "--whole-io", "--disallowed", "--no-collapse"]
    return ElementTree.fromstring(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return collect_hardware(Tree())


def _objects(topology: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [element for element in topology.iter("object") if element.get("type") == kind]


def _cpus(element: ElementTree.Element) -> int:
    """Return hwloc's `0x00000001,0x0000000f`, the highest 32 CPUs first, as a set."""
    mask = 0
    for part in (element.get("cpuset") or "0x0").split(","):
        mask = mask << 32 | int(part or "0x0", 16)
    return mask


def test_cores_and_their_siblings(topology: ElementTree.Element, hardware: Hardware) -> None:
    seen = sorted(_cpus(core) for core in _objects(topology, "Core"))
    assert sorted(map(cpusets.parse_list, hardware.cpus.cores or ())) == seen


def test_packages(topology: ElementTree.Element, hardware: Hardware) -> None:
    seen = sorted(_cpus(package) for package in _objects(topology, "Package"))
    assert sorted(map(cpusets.parse_list, (hardware.cpus.packages or {}).values())) == seen


def test_numa_nodes(topology: ElementTree.Element, hardware: Hardware) -> None:
    seen = {int(node.get("os_index", "-1")): _cpus(node) for node in _objects(topology, "NUMANode")}
    assert {node.number: cpusets.parse_list(node.cpus or "") for node in hardware.numa or ()} == seen


def test_memory_of_numa_nodes(topology: ElementTree.Element, hardware: Hardware) -> None:
    seen = {
        int(node.get("os_index", "-1")): int(node.get("local_memory", "0")) // 1024
        for node in _objects(topology, "NUMANode")
    }
    assert {node.number: node.memory_kb for node in hardware.numa or ()} == seen


def test_caches(topology: ElementTree.Element, hardware: Hardware) -> None:
    seen = Counter((*_LEVELS[kind], _cpus(cache)) for kind in _LEVELS for cache in _objects(topology, kind))
    own = Counter((cache.level, cache.kind, cpusets.parse_list(cache.cpus)) for cache in hardware.cpus.caches or ())
    assert own == seen


def test_network_adapters_and_gpus(topology: ElementTree.Element, hardware: Hardware) -> None:
    """hwloc writes `0200 [1af4:1041] ...` for class, vendor and device."""
    seen = set()
    for device in _objects(topology, "PCIDev"):
        code, ids = (device.get("pci_type") or "").split(" ")[:2]
        if code.startswith("02"):
            vendor, product = ids.strip("[]").split(":")
            seen.add((device.get("pci_busid"), f"0x{vendor}", f"0x{product}"))
    own = {(d.address, d.vendor, d.device) for d in hardware.pci or () if d.kind == "nic"}
    assert own == seen
