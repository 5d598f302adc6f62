"""Queries on the hardware of a node: which CPUs and NUMA node are near a device, and the class of a path.

docs/audit.md describes the path classes: SYS between NUMA nodes, NODE between host bridges of one NUMA node, PHB below
one host bridge, PXB over several bridges, PIX over one switch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache

from hpcpace.audit import cpusets
from hpcpace.audit.facts import Hardware, PciDevice
from hpcpace.audit.tree import Unreadable

ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS", "UNKNOWN")
"""Path classes, the nearest first."""

NO_REASON = "not in the snapshot"

# GPUs that reach their processor over NVLink-C2C: GH200, GB200, GB300. PCI IDs, pci.ids 2025.
_C2C_DEVICES = frozenset({"0x2342", "0x2345", "0x2348", "0x2941", "0x31c2", "0x31c3"})


@lru_cache(maxsize=256)
def hardware_view(hardware: Hardware) -> HardwareView:
    """Return the view of a node's hardware; nodes that share a `Hardware` share it."""
    return HardwareView(hardware)


class HardwareView:
    """A node's hardware with what is derived from it; every query raises Unreadable if a fact is missing."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._classes: dict[tuple[str, str], str] = {}
        self._kinds: dict[str, tuple[PciDevice, ...]] = {}

    @cached_property
    def online(self) -> int:
        """CPUs that can be used."""
        return parsed(self.hardware.cpus.online, "which CPUs are online", "cpus/online")

    @cached_property
    def fast(self) -> int:
        """CPUs of the performance cores of a hybrid processor; all CPUs on other processors."""
        return parsed(self.hardware.cpus.fast, "which cores are fast") & self.online or self.online

    @cached_property
    def cores(self) -> tuple[int, ...]:
        """CPUs of each core."""
        if self.hardware.cpus.cores is None:
            raise Unreadable("the siblings of the CPUs", "cpus/cores")
        return tuple(parsed(text, "the siblings of the CPUs") for text in self.hardware.cpus.cores)

    @cached_property
    def numa_cpus(self) -> Mapping[int, int]:
        """CPUs of each NUMA node that has any, by node number; a kernel without NUMA has one node with all CPUs."""
        if self.hardware.numa is None:
            raise Unreadable("the NUMA nodes", "numa")
        found = {
            node.number: parsed(node.cpus, f"the CPUs of NUMA node {node.number}", f"numa/{node.number}/cpus")
            for node in self.hardware.numa
        }
        return {number: cpus for number, cpus in found.items() if cpus}

    @cached_property
    def devices(self) -> Mapping[str, PciDevice]:
        """PCI devices by address."""
        if self.hardware.pci is None:
            raise Unreadable("the PCI devices", "pci")
        return {device.address: device for device in self.hardware.pci}

    def of_kind(self, kind: str) -> tuple[PciDevice, ...]:
        """Return the devices of a kind, in order of their address."""
        if kind not in self._kinds:
            self._kinds[kind] = tuple(device for device in self.devices.values() if device.kind == kind)
        return self._kinds[kind]

    def whole_cores(self, cpus: int) -> int:
        """Return all CPUs of the cores that a set of CPUs touches."""
        return sum_of(core for core in self.cores if core & cpus)

    def nodes_of(self, cpus: int) -> list[int]:
        """Return the numbers of the NUMA nodes that a set of CPUs touches."""
        return [number for number, own in self.numa_cpus.items() if own & cpus]

    def node_of(self, address: str) -> int:
        """Return the NUMA node with CPUs that a PCI device belongs to; -1 counts only if there is a single node.

        Without a numa_node it is the node that has all CPUs in the device's local_cpus.

        Raises:
            Unreadable: the firmware does not say, or names a node without CPUs whose nearest node is not known.
        """
        device = self.device(address)
        nodes = self.numa_cpus
        if len(nodes) == 1:
            return next(iter(nodes))
        if device.numa_node is not None and device.numa_node in nodes:
            return device.numa_node
        if device.numa_node is not None and device.numa_node >= 0:
            # A node with memory only, such as a GPU's: take the nearest node with CPUs.
            return self._nearest_with_cpus(device.numa_node)
        near = self.nodes_near(device)
        if len(near) == 1:
            return near[0]
        if device.numa_node is None:
            raise Unreadable(f"the NUMA node of {address}", f"pci/{address}/numa_node")
        raise Unreadable(f"the NUMA node of {address}: the firmware reports {device.numa_node}")

    def nodes_near(self, device: PciDevice) -> list[int]:
        """Return the NUMA nodes of a device's local CPUs; none if these are not known."""
        return self.nodes_of(parsed(device.local_cpus or "", f"the CPUs near {device.address}"))

    def device(self, address: str) -> PciDevice:
        """Return a PCI device.

        Raises:
            Unreadable: no device has this address.
        """
        found = self.devices.get(address)
        if found is None:
            raise Unreadable(f"the PCI device {address or 'of the GPU'}")
        return found

    def port_of(self, device: PciDevice) -> PciDevice | None:
        """Return the bridge right above a device; None if it is attached to the host bridge itself."""
        if device.parents is None:
            raise Unreadable(f"the PCI path to {device.address}", f"pci/{device.address}/parents")
        return self.device(device.parents[-1]) if len(device.parents) > 1 else None

    def class_of(self, first: str, second: str) -> str:
        """Return the class of the path between two PCI devices; UNKNOWN if the firmware hides it."""
        key = (first, second)
        if key not in self._classes:
            self._classes[key] = self._class_of(self.device(first), self.device(second))
        return self._classes[key]

    def is_c2c(self, address: str) -> bool:
        """Return whether a GPU reaches its processor over NVLink-C2C."""
        device = self.device(address)
        return device.vendor == "0x10de" and device.device in _C2C_DEVICES

    def _class_of(self, first: PciDevice, second: PciDevice) -> str:
        one, other = first.parents, second.parents
        if one and other and one[0] == other[0]:
            common = 0
            while common < min(len(one), len(other)) and one[common] == other[common]:
                common += 1
            if common == 1:
                return "PHB"
            return "PIX" if max(len(one), len(other)) - common <= 1 else "PXB"
        try:
            is_near = self.node_of(first.address) == self.node_of(second.address)
        except Unreadable:
            return "UNKNOWN"
        if not is_near:
            return "SYS"
        return "NODE" if one and other else "UNKNOWN"

    def _nearest_with_cpus(self, number: int) -> int:
        nodes = self.hardware.numa or ()
        numbers = [node.number for node in nodes]
        distances = next((node.distances for node in nodes if node.number == number), None)
        if distances is None or len(distances) != len(numbers):
            raise Unreadable(f"the distances of NUMA node {number}")
        if not self.numa_cpus:
            raise Unreadable("which NUMA node has CPUs: all are listed without any")
        by_number = dict(zip(numbers, distances, strict=True))
        return min(self.numa_cpus, key=lambda other: by_number[other])


def class_of_nccl(physical: str, *, has_gdr: bool, is_c2c: bool) -> str:
    """Return the class that NCCL uses: it has no NODE, and treats PIX and PXB as PHB if GPUDirect RDMA is off.

    Over C2C a NIC of the same processor is P2C (NCCL 2.27, src/graph/topo.h).
    """
    if physical in ("PIX", "PXB"):
        return physical if has_gdr else "PHB"
    if physical in ("PHB", "NODE"):
        return "P2C" if is_c2c else "PHB"
    return physical


def parsed(text: str | None, what: str, fact: str = "") -> int:
    """Return the set of CPUs that a fact lists.

    Raises:
        Unreadable: the fact could not be read, or is damaged.
    """
    if text is None:
        raise Unreadable(what, fact)
    try:
        return cpusets.parse_list(text)
    except ValueError:
        raise Unreadable(f"{what}: damaged") from None


def sum_of(sets: Iterable[int]) -> int:
    """Return the union of sets of CPUs."""
    union = 0
    for cpus in sets:
        union |= cpus
    return union
