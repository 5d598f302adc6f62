"""NUMA nodes, PCI devices, processors, caches, adapters, interfaces and traffic shaping, from sysfs and netlink.

Kernels older than 2.6.32 write sets of CPUs as masks only, and have no list of the CPUs that are online; both are read
where the newer files are missing.

Neither sysfs nor procfs has the rate of the token bucket at an interface's root, and `tc` would be another process;
netlink needs no root. Formats: rtnetlink(7), linux/pkt_sched.h and linux/rtnetlink.h of the kernel.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence, Set

from hpcpace.audit import cpusets
from hpcpace.audit.facts import Cache, Cpus, Gid, Hardware, NetDevice, NumaNode, PciDevice, RdmaDevice, RdmaPort
from hpcpace.audit.tree import Tree, Unreadable
from hpcpace.core import netlink
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


_GET_QDISC, _NEW_QDISC = 38, 36
_DUMP = 0x300
_AT_ROOT = 0xFFFFFFFF
_KIND, _OPTIONS, _TBF_PARMS, _TBF_RATE64 = 1, 2, 1, 4
_TRAFFIC = struct.Struct("=BxxxiIII")
_RATE_AT = 8  # of the 32-bit rate in tc_ratespec
_MAX_BYTES, _TIMEOUT_S = 1 << 16, 1.0
_BITS_PER_BYTE, _PER_MEGA = 8, 1e6


def read_shapers() -> Mapping[str, float]:
    """Return the rate in Mb/s of each interface that a token bucket (tc-tbf) shapes, by name.

    Raises:
        Unreadable: the kernel does not say.
    """
    try:
        names = dict(socket.if_nameindex())
        rates = {names[index]: rate for index, rate in _root_buckets() if index in names}
    except (OSError, AttributeError, struct.error) as error:
        raise Unreadable(f"netlink: {getattr(error, 'strerror', None) or error}") from None
    return rates


def buckets_in(message: bytes) -> Iterator[tuple[int, float]]:
    """Yield interface number and rate in Mb/s of each root token bucket in a netlink message.

    Raises:
        EOFError: the message is the last one.
        OSError: the message is an error.
    """
    for kind, body in netlink.messages(message):
        if kind == netlink.DONE:
            raise EOFError
        netlink.check_error(kind, body)
        if kind == _NEW_QDISC and len(body) >= _TRAFFIC.size:
            _, index, _, parent, _ = _TRAFFIC.unpack_from(body)
            found = dict(netlink.attributes(body[_TRAFFIC.size :]))
            if parent == _AT_ROOT and found.get(_KIND, b"").rstrip(b"\0") == b"tbf":
                yield (
                    index,
                    _rate_bytes(dict(netlink.attributes(found.get(_OPTIONS, b"")))) * _BITS_PER_BYTE / _PER_MEGA,
                )


def _root_buckets() -> Iterator[tuple[int, float]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as channel:
        channel.settimeout(_TIMEOUT_S)
        request = _TRAFFIC.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        channel.send(netlink.message(_GET_QDISC, request, flags=_DUMP))
        while True:
            try:
                yield from buckets_in(channel.recv(_MAX_BYTES))
            except EOFError:
                return


def _rate_bytes(options: Mapping[int, bytes]) -> int:
    if len(options.get(_TBF_RATE64, b"")) >= 8:
        return int(struct.unpack_from("=Q", options[_TBF_RATE64])[0])
    return int(struct.unpack_from("=I", options.get(_TBF_PARMS, b"\0" * 12), _RATE_AT)[0])


_RDMA = "sys/class/infiniband"
_NET = "sys/class/net"
_MAX_RDMA, _MAX_NET, _MAX_GIDS, _MAX_GIDS_KEPT = 64, 96, 256, 24
_PROC_NET, _MAX_ROUTES = "proc/net", 1 << 18
_LINK_LOCAL = "FEA9"  # 169.254 as /proc/net/route writes addresses, in the order of a little-endian machine
_NET_KINDS = {1: "ethernet", 32: "infiniband", 772: "loopback"}

LINK_ERRORS = ("symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors")
"""Port counters that hardly ever grow on a good link."""
_CONGESTION_ERRORS = ("port_xmit_discards", "out_of_sequence", "roce_adp_retrans", "local_ack_timeout_err")
"""Port counters that grow when the fabric loses packets."""
_NET_COUNTERS = ("rx_packets", "tx_packets", "rx_dropped", "tx_dropped", "rx_errors", "tx_errors")


def collect_rdma(tree: Tree) -> tuple[RdmaDevice, ...] | None:
    """Return the RDMA adapters; empty if the kernel has no class for them, None if they cannot be read."""
    if not tree.exists(_RDMA):
        return () if tree.exists("sys/class") else tree.fact("rdma", lambda: _fail("no /sys/class"))
    names = tree.fact("rdma", tree.names, _RDMA)
    return None if names is None else tuple(_rdma_device(tree, name) for name in names[:_MAX_RDMA])


def collect_net(tree: Tree) -> tuple[NetDevice, ...] | None:
    """Return the network interfaces, up to a limit at which those with an adapter take precedence."""
    names = tree.fact("net", tree.names, _NET)
    if names is None:
        return None
    # bonding_masters is a file in the same folder, not an interface.
    names = [name for name in names if name != "bonding_masters"]
    chosen = sorted(names, key=lambda name: (not tree.exists(f"{_NET}/{name}/device"), name))[:_MAX_NET]
    # A copied tree does not contain it, and netlink would answer for this machine.
    shapers = tree.fact("net/shaping", read_shapers) if tree.is_live else {}
    routed = tree.fact("net/routes", _routed, tree)
    return tuple(_net_device(tree, name, shapers, routed) for name in sorted(chosen))


def read_counters(tree: Tree) -> dict[str, int]:
    """Return the error and drop counters that are not 0; `tree.unreadable` names devices without counters."""
    found: dict[str, int] = {}
    for device in _names(tree, _RDMA)[:_MAX_RDMA]:
        for port in _names(tree, f"{_RDMA}/{device}/ports")[:8]:
            place, name = f"{_RDMA}/{device}/ports/{port}", f"rdma/{printable(device)}/{port}"
            names = tree.fact(f"{name}/counters", tree.names, f"{place}/counters") or []
            for folder, listed in (("counters", names), ("hw_counters", _names(tree, f"{place}/hw_counters"))):
                for counter in sorted({*LINK_ERRORS, *_CONGESTION_ERRORS} & set(listed)):
                    _count(tree, found, f"{place}/{folder}/{counter}", f"{name}/{counter}")
    for device in _names(tree, _NET)[:_MAX_NET]:
        if tree.exists(f"{_NET}/{device}/device") or device.startswith(("eth", "en", "ib", "hsn")):
            name = f"net/{printable(device)}"
            if tree.fact(f"{name}/counters", tree.names, f"{_NET}/{device}/statistics") is not None:
                for counter in _NET_COUNTERS:
                    _count(tree, found, f"{_NET}/{device}/statistics/{counter}", f"{name}/{counter}")
    return found


def read_aer(tree: Tree, addresses: list[str]) -> dict[str, int]:
    """Return the counts of corrected PCIe errors that are not 0, for devices at the given addresses."""
    found: dict[str, int] = {}
    for address in addresses:
        name = f"pci/{address}/corrected"
        count = tree.fact(name, _corrected, tree, address)
        if count:
            found[name] = count
    return found


def _corrected(tree: Tree, address: str) -> int:
    total = re.search(
        r"^TOTAL_ERR_COR (\d{1,18})$", tree.text(f"sys/bus/pci/devices/{address}/aer_dev_correctable"), re.MULTILINE
    )
    if not total:
        raise Unreadable("no TOTAL_ERR_COR")
    return int(total[1])


def _fail(reason: str) -> tuple[RdmaDevice, ...]:
    raise Unreadable(reason)


def _names(tree: Tree, path: str) -> list[str]:
    try:
        return tree.names(path)
    except Unreadable:
        return []


def _count(tree: Tree, found: dict[str, int], path: str, name: str) -> None:
    try:
        value = tree.number(path)
    except Unreadable:
        return
    if value > 0:
        found[name] = max(value, found.get(name, 0))


def _rdma_device(tree: Tree, name: str) -> RdmaDevice:
    place, shown = f"{_RDMA}/{name}", printable(name)
    ports = tree.fact(f"rdma/{shown}/ports", tree.names, f"{place}/ports") or []
    return RdmaDevice(
        name=shown,
        pci=tree.fact(f"rdma/{shown}/pci", _adapter, tree, f"{place}/device"),
        firmware=tree.word_or_empty(f"{place}/fw_ver"),
        board=tree.word_or_empty(f"{place}/board_id") or tree.word_or_empty(f"{place}/hca_type"),
        ports=tuple(_port(tree, place, shown, int(port)) for port in ports[:8] if re.fullmatch(r"\d{1,3}", port)),
    )


def _port(tree: Tree, device_place: str, device: str, number: int) -> RdmaPort:
    place, fact = f"{device_place}/ports/{number}", f"rdma/{device}/{number}"
    return RdmaPort(
        number=number,
        state=tree.fact(f"{fact}/state", lambda: _after_colon(tree.word(f"{place}/state"))),
        phys_state=tree.fact(f"{fact}/phys_state", lambda: _after_colon(tree.word(f"{place}/phys_state"))),
        rate_gbps=tree.fact(f"{fact}/rate", lambda: _rate_gbps(tree.word(f"{place}/rate"))),
        link_layer=tree.fact(f"{fact}/link_layer", tree.word, f"{place}/link_layer"),
        gids=_gids(tree, place),
    )


def _gids(tree: Tree, place: str) -> tuple[Gid, ...]:
    """Return the GID entries in use; reading the type of an unused one fails with EINVAL."""
    found: list[Gid] = []
    for name in sorted(_names(tree, f"{place}/gid_attrs/types"), key=lambda text: (len(text), text))[:_MAX_GIDS]:
        kind = tree.word_or_empty(f"{place}/gid_attrs/types/{name}")
        if kind and re.fullmatch(r"\d{1,4}", name) and len(found) < _MAX_GIDS_KEPT:
            found.append(Gid(index=int(name), kind=kind, net=tree.word_or_empty(f"{place}/gid_attrs/ndevs/{name}")))
    return tuple(found)


def _net_device(tree: Tree, name: str, shapers: Mapping[str, float] | None, routed: Set[str] | None) -> NetDevice:
    place, shown = f"{_NET}/{name}", printable(name)
    is_physical = tree.exists(f"{place}/device")
    return NetDevice(
        name=shown,
        pci=(tree.fact(f"net/{shown}/pci", _adapter, tree, f"{place}/device") or "") if is_physical else "",
        kind=_NET_KINDS.get(tree.fact(f"net/{shown}/type", tree.number, f"{place}/type") or 0, "other"),
        mtu=tree.fact(f"net/{shown}/mtu", tree.number, f"{place}/mtu"),
        speed_mbps=_net_speed_mbps(tree, place),
        state=tree.fact(f"net/{shown}/state", tree.word, f"{place}/operstate"),
        is_physical=is_physical,
        master=tree.link_name(f"{place}/master"),
        shaped_mbps=None if shapers is None else shapers.get(name, 0.0),
        has_route=None if routed is None else shown in routed,
    )


def _routed(tree: Tree) -> Set[str]:
    """Return the interfaces that any IPv4 or IPv6 route uses; link-local routes do not count."""
    found = set()
    # `text` refuses a table that is too long: a truncated one may lack interfaces.
    for line in tree.text(f"{_PROC_NET}/route", most_bytes=_MAX_ROUTES).split("\n")[1:]:
        words = line.split()
        if len(words) > 7 and not words[1].endswith(_LINK_LOCAL):
            found.add(printable(words[0]))
    if tree.exists(f"{_PROC_NET}/ipv6_route"):
        for line in tree.text(f"{_PROC_NET}/ipv6_route", most_bytes=_MAX_ROUTES).split("\n"):
            words = line.split()
            if len(words) > 9 and not words[0].startswith(("fe8", "ff")) and words[9] != "lo":
                found.add(printable(words[9]))
    return found


def _net_speed_mbps(tree: Tree, place: str) -> int | None:
    # An interface that is virtual or down gives -1 or EINVAL, which is not a failure.
    try:
        speed = tree.number(f"{place}/speed")
    except Unreadable:
        return None
    return speed if 0 < speed < 100_000_000 else None


def _adapter(tree: Tree, path: str) -> str:
    """Return the PCI address of the target of a `device` link; empty if it is not a PCI device."""
    parts = tree.resolve(path).split("/")
    return next((part for part in reversed(parts) if ADDRESS.fullmatch(part)), "")


def _after_colon(text: str) -> str:
    number, colon, word = text.partition(":")
    return word.strip() if colon else number


def _rate_gbps(text: str) -> float:
    found = re.match(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec", text)
    if not found:
        raise Unreadable(f"{text[:40]!r} is not a rate")
    return float(found[1])
