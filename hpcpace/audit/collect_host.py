"""The operating system, its settings and drivers, and the GPUs that the drivers list, read from procfs and sysfs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpcpace.audit.facts import Gpu, Kernel, Nvml, PciDevice
from hpcpace.audit.tree import Tree, Unreadable
from hpcpace.core.redaction import Redaction
from hpcpace.core.text import printable

_MODULES = ("nvidia", "nvidia_peermem", "nv_peer_mem", "gdrdrv", "amdgpu", "mlx5_ib", "ib_uverbs", "efa", "cxi_core")
_NVIDIA_GPUS = "proc/driver/nvidia/gpus"
_MOST_GPUS = 64


def collect_kernel(tree: Tree) -> Kernel:
    """Return the kernel, drivers and settings of a host."""
    driver = tree.fact("kernel/nvidia_driver", _nvidia_driver, tree)
    return Kernel(
        release=tree.fact("kernel/release", tree.word, "proc/sys/kernel/osrelease"),
        command_line=tree.fact("kernel/command_line", _command_line, tree),
        is_virtual=tree.fact("kernel/is_virtual", _is_virtual, tree),
        numa_balancing=_numa_balancing(tree),
        huge_pages=_choice(tree, "enabled"),
        huge_pages_defrag=_choice(tree, "defrag"),
        modules=tree.fact("kernel/modules", _modules, tree),
        rdma_holders=_rdma_holders(tree),
        nvidia_driver=None if driver is None else driver[0],
        is_nvidia_open=None if driver is None else driver[1],
        has_verbs=tree.exists("dev/infiniband"),
        shm_bytes=tree.fact("kernel/shm", _shm_bytes, tree),
        memory_bytes=tree.fact("kernel/memory", _memory_bytes, tree),
        nccl_conf=nccl_conf(tree, "etc/nccl.conf"),
    )


def collect_gpus(tree: Tree, pci: Sequence[PciDevice] | None, nvml: Mapping[str, Nvml]) -> tuple[Gpu, ...] | None:
    """Return the GPUs of a host; None if neither PCI nor the driver lists them.

    Args:
        tree: where to read.
        pci: the PCI devices.
        nvml: facts from NVML, by PCI address.
    """
    if pci is not None:
        addresses = [device.address for device in pci if device.kind == "gpu"]
    elif tree.exists(_NVIDIA_GPUS):
        addresses = [printable(name) for name in tree.fact("gpus", tree.names, _NVIDIA_GPUS) or []]
    else:
        tree.unreadable["gpus"] = "PCI cannot be read"
        return None
    vendors = {device.address: device.vendor for device in pci or ()}
    return tuple(
        _gpu(tree, address, vendors.get(address), nvml.get(address)) for address in sorted(addresses)[:_MOST_GPUS]
    )


def nccl_conf(tree: Tree, path: str) -> dict[str, str]:
    """Return the variables that an NCCL configuration file sets; empty if there is no file."""
    if not tree.exists(path):
        return {}
    try:
        lines = tree.text(path).split("\n")
    except Unreadable as error:
        tree.unreadable[path] = str(error)
        return {}
    pairs = [line.split("#")[0].partition("=") for line in lines if "=" in line.split("#")[0]]
    # Redacted before it is cut: a half of a token has no known shape.
    variables = Redaction().variables({name.strip(): value.strip() for name, _, value in pairs[:50]})
    return {printable(name)[:60]: printable(value)[:200] for name, value in variables.items()}


def _gpu(tree: Tree, address: str, vendor: str | None, nvml: Nvml | None) -> Gpu:
    if vendor == "0x1002":
        place = f"sys/bus/pci/devices/{address}"
        return Gpu(
            address=address,
            uuid=tree.fact(f"gpu/{address}/uuid", tree.word, f"{place}/unique_id"),
            name=tree.fact(f"gpu/{address}/name", tree.word, f"{place}/product_name"),
            vbios=tree.fact(f"gpu/{address}/vbios", tree.word, f"{place}/vbios_version"),
            nvml=None,
        )
    lines = tree.fact(f"gpu/{address}", _nvidia_information, tree, address) or {}
    return Gpu(
        address=address,
        uuid=lines.get("GPU UUID"),
        name=lines.get("Model"),
        vbios=lines.get("Video BIOS"),
        nvml=nvml,
    )


def _nvidia_information(tree: Tree, address: str) -> dict[str, str]:
    text = tree.text(f"{_NVIDIA_GPUS}/{address}/information")
    pairs = [line.partition(":") for line in text.split("\n")]
    # The driver writes question marks if the GPU was never opened.
    return {name.strip(): printable(value.strip())[:80] for name, _, value in pairs if value.strip("?- \t")}


def _nvidia_driver(tree: Tree) -> tuple[str, bool]:
    """Return the version of NVIDIA's driver, and whether it is the open one; an empty version if none is loaded."""
    if not tree.exists("proc/driver/nvidia/version"):
        return "", False
    text = tree.text("proc/driver/nvidia/version")
    found = re.search(r"NVRM version:.*?\s(\d{2,4}\.\d{1,4}(?:\.\d{1,4})?)\s", text + " ")
    if not found:
        raise Unreadable("no version in /proc/driver/nvidia/version")
    return found[1], "Open Kernel Module" in text


def _modules(tree: Tree) -> dict[str, str]:
    if not tree.exists("sys/module"):
        raise Unreadable("no /sys/module")
    found = {}
    for name in _MODULES:
        if tree.exists(f"sys/module/{name}"):
            found[name] = tree.word_or_empty(f"sys/module/{name}/version")
    return found


def _rdma_holders(tree: Tree) -> tuple[str, ...] | None:
    holders: set[str] = set()
    for module in ("ib_core", "ib_uverbs"):
        if tree.exists(f"sys/module/{module}/holders"):
            names = tree.fact("kernel/rdma_holders", tree.names, f"sys/module/{module}/holders")
            if names is None:
                return None
            holders |= {printable(name) for name in names[:200]}
    return tuple(sorted(holders))


def _command_line(tree: Tree) -> str:
    return printable(" ".join(Redaction().command(tree.text("proc/cmdline").split(" "))))[:2000]


def _is_virtual(tree: Tree) -> bool:
    text = tree.beginning("proc/cpuinfo")
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    if flags:
        return "hypervisor" in flags[1].split()
    if tree.exists("sys/hypervisor/type"):
        return True
    # Only x86 has this flag; elsewhere the firmware names the manufacturer of the machine.
    maker = f"{tree.word('sys/class/dmi/id/sys_vendor')} {tree.word_or_empty('sys/class/dmi/id/product_name')}"
    return bool(re.search(r"QEMU|KVM|Virtual|VMware|Xen|Amazon EC2(?!.*metal)|Google", maker))


def _numa_balancing(tree: Tree) -> int | None:
    # A kernel built without NUMA balancing, or for a single node, does not have this file.
    if not tree.exists("proc/sys/kernel/numa_balancing"):
        return 0 if tree.exists("proc/sys/kernel") else None
    return tree.fact("kernel/numa_balancing", tree.number, "proc/sys/kernel/numa_balancing")


def _choice(tree: Tree, name: str) -> str | None:
    place = "sys/kernel/mm/transparent_hugepage"
    return tree.fact(f"kernel/huge_pages_{name}", lambda: _chosen(tree.word(f"{place}/{name}")))


def _chosen(text: str) -> str:
    found = re.search(r"\[([a-z+_]{1,30})\]", text)
    if not found:
        raise Unreadable(f"{text[:40]!r} marks no value with brackets")
    return found[1]


def _shm_bytes(tree: Tree) -> int:
    """Return the size of /dev/shm from its mount options; without size= it is half of the memory (tmpfs(5))."""
    found = re.findall(
        r"^\S+ /dev/shm tmpfs (\S+)", tree.beginning("proc/self/mounts", most_bytes=262_144), re.MULTILINE
    )
    if not found:
        raise Unreadable("/dev/shm is not mounted")
    size = re.search(r"(?:^|,)size=(\d{1,15})([kmg]?)", found[-1])
    if not size:
        return _memory_bytes(tree) // 2
    return int(size[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[size[2]]


def _memory_bytes(tree: Tree) -> int:
    found = re.search(r"^MemTotal: *(\d{1,15}) kB", tree.beginning("proc/meminfo"), re.MULTILINE)
    if not found:
        raise Unreadable("no MemTotal in /proc/meminfo")
    return int(found[1]) * 1024
