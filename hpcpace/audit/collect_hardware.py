"""NUMA nodes, PCI devices, processors, cores, caches and frequency governors, read from sysfs.

Kernels older than 2.6.32 write sets of CPUs as masks only, and have no list of the CPUs that are online; both are read
where the newer files are missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpcpace.audit import cpusets
from hpcpace.audit.facts import Cache, Cpus, Hardware, NumaNode, PciDevice
from hpcpace.audit.tree import Tree, Unreadable
from hpcpace.core.text import printable

_CPU = "sys/devices/system/cpu"
_MAX_CPUS = 8_192
_SMALL_SHARE = 0.8


def collect_cpus(tree: Tree) -> Cpus:
    """Return the processors; facts that cannot be read are None, with the reason in `tree.unreadable`."""
    online = tree.fact("cpus/online", _online, tree)
    cpus = [cpu for cpu in cpusets.members(cpusets.parse_list(online or "")) if cpu < _MAX_CPUS]
    siblings = tree.fact("cpus/cores", _siblings, tree, cpus) if cpus else None
    driver = f"{_CPU}/cpu{cpus[0]}/cpufreq/scaling_driver" if cpus else ""
    return Cpus(
        online=online,
        offline=_offline(tree),
        model=tree.fact("cpus/model", _cpu_model, tree),
        packages=tree.fact("cpus/packages", _packages, tree, siblings or {cpu: str(cpu) for cpu in cpus})
        if cpus
        else None,
        cores=None if siblings is None else tuple(dict.fromkeys(siblings.values())),
        caches=tree.fact("cpus/caches", _caches, tree, cpus) if cpus else None,
        governors=tree.fact("cpus/governors", _governors, tree, cpus) if cpus else None,
        driver=tree.fact("cpus/driver", tree.word, driver) or "" if driver and tree.exists(driver) else "",
        fast=_fast_cpus(tree, cpus),
    )


def read_cpus(tree: Tree, listed: str, mask: str) -> str:
    """Return the set of CPUs in a file, as a list.

    Args:
        tree: where to read.
        listed: file with a list, like `cpulist`.
        mask: file with the same set as a mask, which is read where the list is missing.

    Raises:
        Unreadable: neither can be read.
        ValueError: the file is damaged.
    """
    if not tree.exists(listed) and tree.exists(mask):
        return cpusets.format_list(cpusets.parse_mask(tree.text(mask)))
    return cpusets.format_list(cpusets.parse_list(tree.text(listed)))


def _some_cpus(tree: Tree, listed: str, mask: str = "") -> str:
    cpus = read_cpus(tree, listed, mask or listed)
    if not cpus:
        raise Unreadable("empty")
    return cpus


def _online(tree: Tree) -> str:
    if tree.exists(f"{_CPU}/online"):
        return _some_cpus(tree, f"{_CPU}/online")
    numbers = [int(name[3:]) for name in tree.names(_CPU) if re.fullmatch(r"cpu\d{1,5}", name)]
    online = [number for number in numbers if tree.word_or_empty(f"{_CPU}/cpu{number}/online") != "0"]
    if not online:
        raise Unreadable("no such file or directory")
    return cpusets.format_list(cpusets.of(online))


def _offline(tree: Tree) -> str | None:
    """Return the CPUs that could be switched on; empty if the kernel has no CPU hot-plugging."""
    if not tree.exists(f"{_CPU}/offline"):
        return ""
    text = tree.fact("cpus/offline", read_cpus, tree, f"{_CPU}/offline", "")
    if not text:
        return text
    # `offline` also lists CPUs that could be plugged in one day; only those in `present` exist.
    present = tree.fact("cpus/present", _some_cpus, tree, f"{_CPU}/present")
    if present is None:
        return None
    return cpusets.format_list(cpusets.parse_list(text) & cpusets.parse_list(present))


def _siblings(tree: Tree, cpus: Sequence[int]) -> dict[int, str]:
    """Return all CPUs of each core, by the core's first CPU."""
    found: dict[int, str] = {}
    seen = 0
    # The second name is the newer one; kernels have both, copied trees may have one of them.
    names = ("thread_siblings", "core_cpus")
    places = [f"{_CPU}/cpu{cpu}/topology/{name}" for cpu in cpus[:1] for name in names]
    name = next((name for name, at in zip(names, places, strict=True) if tree.exists(at)), names[0])
    for cpu in cpus:
        if seen >> cpu & 1:
            continue
        place = f"{_CPU}/cpu{cpu}/topology/{name}"
        text = _some_cpus(tree, f"{place}_list", place)
        core = cpusets.parse_list(text)
        if not core >> cpu & 1 or core & seen:
            raise Unreadable(f"thread_siblings_list of cpu{cpu} contradicts those of other CPUs")
        seen |= core
        found[cpu] = text
    return found


def _packages(tree: Tree, siblings: dict[int, str]) -> dict[str, str]:
    packages: dict[str, int] = {}
    for cpu, core in siblings.items():
        place = f"{_CPU}/cpu{cpu}/topology"
        number = tree.number(f"{place}/physical_package_id")
        if number < 0:  # the firmware gives no numbers, as on POWER; the kernel knows which CPUs belong together
            others = cpusets.parse_list(_some_cpus(tree, f"{place}/core_siblings_list", f"{place}/core_siblings"))
            number = next(cpusets.members(others))
        packages[str(number)] = packages.get(str(number), 0) | cpusets.parse_list(core)
    return {package: cpusets.format_list(cpus) for package, cpus in packages.items()}


def _caches(tree: Tree, cpus: list[int]) -> tuple[Cache, ...]:
    found: dict[tuple[int, str, str], Cache] = {}
    covered: dict[tuple[int, str], int] = {}
    index_names = [name for name in tree.names(f"{_CPU}/cpu{cpus[0]}/cache") if re.fullmatch(r"index\d{1,2}", name)]
    kinds: dict[str, tuple[int, str]] = {}
    for cpu in cpus:
        for index in index_names:
            # All CPUs number their caches alike, except on hybrid processors, where the kinds are the same.
            place = f"{_CPU}/cpu{cpu}/cache/{index}"
            kind = kinds.get(index)
            if kind is None:
                kind = kinds[index] = (tree.number(f"{place}/level"), tree.word(f"{place}/type"))
            if covered.get(kind, 0) >> cpu & 1 or not tree.exists(place):
                continue
            shared = _some_cpus(tree, f"{place}/shared_cpu_list", f"{place}/shared_cpu_map")
            covered[kind] = covered.get(kind, 0) | cpusets.parse_list(shared)
            size = tree.word(f"{place}/size") if tree.exists(f"{place}/size") else ""
            found[(*kind, shared)] = Cache(level=kind[0], kind=kind[1], size=size, cpus=shared)
    return tuple(found.values())


def _governors(tree: Tree, cpus: list[int]) -> dict[str, str]:
    """Return the CPUs of each governor; empty if the kernel sets no frequencies, as in most virtual machines."""
    found: dict[str, int] = {}
    if not tree.exists(f"{_CPU}/cpu{cpus[0]}/cpufreq"):
        return {}
    for cpu in cpus:
        governor = tree.word(f"{_CPU}/cpu{cpu}/cpufreq/scaling_governor")
        found[governor] = found.get(governor, 0) | 1 << cpu
    return {governor: cpusets.format_list(of) for governor, of in found.items()}


def _fast_cpus(tree: Tree, cpus: list[int]) -> str:
    # Only Intel's hybrid processors have both folders.
    if tree.exists("sys/devices/cpu_atom/cpus") and tree.exists("sys/devices/cpu_core/cpus"):
        return tree.fact("cpus/fast", _some_cpus, tree, "sys/devices/cpu_core/cpus") or ""
    if not cpus or not tree.exists(f"{_CPU}/cpu{cpus[0]}/cpu_capacity"):
        return ""
    return tree.fact("cpus/fast", _of_much_capacity, tree, cpus) or ""


def _of_much_capacity(tree: Tree, cpus: list[int]) -> str:
    """Return the CPUs of the fast cores, by the kernel's capacity of each CPU; empty if all cores are alike.

    Cores of one kind differ by a few percent in their highest frequency; small cores have at most three quarters.
    """
    capacities = {cpu: tree.number(f"{_CPU}/cpu{cpu}/cpu_capacity") for cpu in cpus}
    least = _SMALL_SHARE * max(capacities.values())
    fast = [cpu for cpu, capacity in capacities.items() if capacity >= least]
    return "" if len(fast) == len(cpus) else cpusets.format_list(cpusets.of(fast))


def _cpu_model(tree: Tree) -> str:
    fields: dict[str, str] = {}
    for line in tree.beginning("proc/cpuinfo").split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    for name in ("model name", "cpu"):
        if fields.get(name):
            return printable(fields[name])[:100]
    if "CPU part" in fields:
        return printable(f"Arm implementer {fields.get('CPU implementer', '?')} part {fields['CPU part']}")[:100]
    raise Unreadable("no model in /proc/cpuinfo")


ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

_NODE = "sys/devices/system/node"
_PCI = "sys/bus/pci/devices"
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_MAX_DEVICES = 256
_NIC_CLASSES = ("0x02", "0x0c06")
# Some InfiniBand adapters, like the QLE7340, have the class of serial buses (0x0c06).
_CLASSES = (*_NIC_CLASSES, "0x03", "0x12")
_NVIDIA, _AMD, _INTEL, _HABANA = "0x10de", "0x1002", "0x8086", "0x1da3"


def collect_hardware(tree: Tree) -> Hardware:
    """Return the hardware of the host; facts that cannot be read are None, with the reason in `tree.unreadable`."""
    classes = tree.fact("pci", _pci_classes, tree)
    return Hardware(
        cpus=collect_cpus(tree),
        numa=tree.fact("numa", _numa_nodes, tree),
        pci=None if classes is None else _pci_devices(tree, classes),
        num_nvswitches=_num_nvswitches(tree, classes or {}),
    )


def _numa_nodes(tree: Tree) -> tuple[NumaNode, ...]:
    numbers = [int(name[4:]) for name in tree.names(_NODE) if re.fullmatch(r"node\d{1,5}", name)]
    if not numbers:
        raise Unreadable(f"no NUMA node in /{_NODE}")
    return tuple(_numa_node(tree, number) for number in sorted(numbers))


def _numa_node(tree: Tree, number: int) -> NumaNode:
    place = f"{_NODE}/node{number}"
    fact = f"numa/{number}"
    return NumaNode(
        number=number,
        cpus=tree.fact(f"{fact}/cpus", read_cpus, tree, f"{place}/cpulist", f"{place}/cpumap"),
        distances=tree.fact(f"{fact}/distances", lambda: _distances(tree.text(f"{place}/distance"))),
        memory_kb=tree.fact(f"{fact}/memory_kb", lambda: _memory_kb(tree.beginning(f"{place}/meminfo"))),
    )


def _distances(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,9}( +\d{1,9})*", text):
        raise Unreadable(f"{text[:40]!r} is not a list of distances")
    return tuple(int(part) for part in text.split())


def _memory_kb(text: str) -> int:
    found = re.search(r"MemTotal: *(\d{1,15}) kB", text)
    if not found:
        raise Unreadable("no MemTotal")
    return int(found[1])


def _pci_classes(tree: Tree) -> dict[str, str]:
    """Return the class of each PCI device; empty if it cannot be read."""
    found = {}
    for address in tree.names(_PCI):
        if ADDRESS.fullmatch(address):
            text = tree.fact(f"pci/{address}/class", tree.word, f"{_PCI}/{address}/class")
            found[address] = text or ""
    return found


def _num_nvswitches(tree: Tree, classes: dict[str, str]) -> int:
    bridges = [address for address, code in classes.items() if code.startswith("0x0680")]
    vendors = [tree.fact(f"pci/{address}/vendor", tree.word, f"{_PCI}/{address}/vendor") for address in bridges]
    return vendors.count(_NVIDIA)


def _pci_devices(tree: Tree, classes: dict[str, str]) -> tuple[PciDevice, ...]:
    """Return GPUs, network adapters and the bridges above them, sorted by address."""
    chosen: dict[str, PciDevice] = {}
    for address, code in classes.items():
        if code.startswith(_CLASSES) and len(chosen) < _MAX_DEVICES:
            device = _pci_device(tree, address, code)
            hidden = device.is_virtual_function and _has_physical_function(tree, address, classes)
            if device.kind and not hidden:
                chosen[address] = device
    above = {parent for device in chosen.values() for parent in (device.parents or ())[1:]}
    for address in sorted(above - set(chosen))[:_MAX_DEVICES]:
        chosen[address] = _pci_device(tree, address, "0x0604")
    return tuple(device for _, device in sorted(chosen.items()))


def _pci_device(tree: Tree, address: str, code: str) -> PciDevice:
    place, fact = f"{_PCI}/{address}", f"pci/{address}"
    vendor = tree.fact(f"{fact}/vendor", tree.word, f"{place}/vendor")
    is_end = not code.startswith("0x0604")
    return PciDevice(
        address=address,
        kind=_kind(code, vendor),
        vendor=vendor,
        device=tree.fact(f"{fact}/device", tree.word, f"{place}/device"),
        parents=tree.fact(f"{fact}/parents", _parents, tree, address) if is_end else (),
        numa_node=tree.fact(f"{fact}/numa_node", tree.number, f"{place}/numa_node"),
        local_cpus=_local_cpus(tree, address) if is_end else None,
        speed_gts=tree.fact(f"{fact}/speed", lambda: _speed_gts(tree.text(f"{place}/current_link_speed"))),
        max_speed_gts=tree.fact(f"{fact}/max_speed", lambda: _speed_gts(tree.text(f"{place}/max_link_speed"))),
        width=tree.fact(f"{fact}/width", lambda: _width(tree.number(f"{place}/current_link_width"))),
        max_width=tree.fact(f"{fact}/max_width", lambda: _width(tree.number(f"{place}/max_link_width"))),
        driver=tree.link_name(f"{place}/driver"),
        iommu_group=tree.link_name(f"{place}/iommu_group"),
        is_virtual_function=tree.exists(f"{place}/physfn"),
        acs_control=None if is_end else tree.fact(f"{fact}/acs", _acs_control, tree, f"{place}/config"),
    )


def _local_cpus(tree: Tree, address: str) -> str | None:
    place = f"{_PCI}/{address}"
    return tree.fact(f"pci/{address}/local_cpus", read_cpus, tree, f"{place}/local_cpulist", f"{place}/local_cpus")


def _kind(code: str, vendor: str | None) -> str:
    """Return `gpu`, `nic` or `bridge`, or an empty text for a device that does not matter, like a BMC's display."""
    if code.startswith("0x0604"):
        return "bridge"
    if code.startswith(_NIC_CLASSES):
        return "nic"
    if vendor == _NVIDIA:
        return "gpu" if code.startswith("0x03") else ""
    if vendor == _AMD:
        return "gpu"
    if vendor == _INTEL:  # 0x0380: display controller without a display; 0x0300: graphics integrated in a processor
        return "gpu" if code.startswith(("0x0380", "0x0302", "0x12")) else ""
    return "gpu" if vendor == _HABANA or vendor is None else ""


def _parents(tree: Tree, address: str) -> tuple[str, ...]:
    parts = tree.resolve(f"{_PCI}/{address}").split("/")
    first = next((index for index, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)), None)
    if first is None or parts[-1] != address:
        raise Unreadable("its path is not below a host bridge")
    way = parts[first:-1]
    if any(not ADDRESS.fullmatch(part) for part in way[1:]):
        raise Unreadable("its path has other parts than bridges")
    return tuple(way)


def _has_physical_function(tree: Tree, address: str, classes: dict[str, str]) -> bool:
    try:
        return tree.resolve(f"{_PCI}/{address}/physfn").split("/")[-1] in classes
    except Unreadable:
        return False


def _acs_control(tree: Tree, path: str) -> int:
    """Return the ACS control register of a bridge; -1 if it has none.

    PCI Express Base Specification 7.7.11: extended capability 0x000d, control at offset 6. Extended capabilities are a
    list from 0x100 on: id in bits 0 to 15, next in bits 20 to 31. Users other than root can read only 64 bytes.
    """
    config = tree.content(path, most_bytes=4096)
    if len(config) <= 64:
        raise Unreadable("needs root")
    if len(config) <= 256:
        return -1
    place = 0x100
    for _ in range(48):
        header = int.from_bytes(config[place : place + 4], "little")
        if header & 0xFFFF == 0x000D:
            return int.from_bytes(config[place + 6 : place + 8], "little")
        place = header >> 20
        if not 0x100 <= place <= len(config) - 8:
            return -1
    raise Unreadable("its list of capabilities is cyclic")


def _speed_gts(text: str) -> float:
    found = re.match(r"(\d{1,4}(?:\.\d{1,3})?) GT/s", text)
    if not found:
        raise Unreadable(f"{text[:40]!r} is not a speed")
    return float(found[1])


def _width(lanes: int) -> int:
    # The kernel writes 0 or 255 for unknown.
    if not 1 <= lanes <= 64:
        raise Unreadable(f"{lanes} is not a valid number of lanes")
    return lanes
