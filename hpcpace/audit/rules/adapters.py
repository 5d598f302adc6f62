"""Rules N01, N02 and N09: which adapter is near which GPU, and whether GPUDirect RDMA works between them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from hpcpace.audit.facts import PciDevice
from hpcpace.audit.findings import AuditFinding, Certainty, Severity, Skip
from hpcpace.audit.hardware import ORDER
from hpcpace.audit.job import AuditedHost, AuditedJob, FabricPort, has_peermem
from hpcpace.audit.rules.network_variables import hca_selects, rank_variables
from hpcpace.audit.tree import Unreadable
from hpcpace.quoting import printable, shell_word

_LAST_GOOD_NCCL_GAP = (2, 22, 3)


def n01_far_nic(job: AuditedJob, host: AuditedHost, gpu: PciDevice) -> Iterator[AuditFinding]:
    """Find a GPU whose nearest adapter is too far for GPUDirect RDMA."""
    ports = _usable(host)
    if not ports:
        raise Skip("no active RDMA or Slingshot port")
    ranked = sorted((ORDER.index(host.hardware.class_of(gpu.address, port.pci)), port.name) for port in ports)
    nearest, name = ORDER[ranked[0][0]], ranked[0][1]
    if nearest in ("PIX", "PXB") or (nearest != "SYS" and host.hardware.is_c2c(gpu.address)):
        return
    if nearest == "UNKNOWN":
        raise Unreadable("the class of its path to any adapter: the firmware hides where they are")
    yield AuditFinding(
        rule="N01",
        severity=Severity.FAIL if nearest == "SYS" else Severity.WARNING,
        host=host.name,
        place=f"GPU {gpu.address}",
        seen=f"its nearest adapter, {name}, is {nearest}",
        cost="NCCL uses GPUDirect RDMA only up to PXB: every message goes through host memory",
        fix="# first what N09 says: without GPUDirect RDMA no NCCL_NET_GDR_LEVEL helps; then check BIOS, slot map"
        if host.has_gdr is False
        else f"export NCCL_NET_GDR_LEVEL={'SYS' if nearest == 'SYS' else 'PHB'}  # measure first; check BIOS, slot map",
        certainty=Certainty.INFERRED if host.snapshot.kernel.is_virtual else Certainty.READ,
    )


def n02_shared_nic(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find adapters that more GPUs map to than necessary, and adapters far from all GPUs that NCCL would use."""
    ports = _usable(host)
    gpus = host.hardware.of_kind("gpu")
    if not gpus or not ports:
        raise Skip("no GPU, or no active RDMA or Slingshot port")
    classes = {
        gpu.address: {port.name: ORDER.index(host.hardware.class_of(gpu.address, port.pci)) for port in ports}
        for gpu in gpus
    }
    if any(ORDER[value] == "UNKNOWN" for of_gpu in classes.values() for value in of_gpu.values()):
        raise Unreadable("which adapter is near which GPU: the firmware hides where they are")
    best = {port.name: min(of_gpu[port.name] for of_gpu in classes.values()) for port in ports}
    nearest = min(best.values())
    far = [port for port in ports if best[port.name] > max(nearest, ORDER.index("PXB"))]
    if nearest <= ORDER.index("PXB"):
        yield from _far_adapters(host, far, best)
    near = [port.name for port in ports if port not in far]
    load = _falling_on(classes, near)
    most, fair = max(load.values()), -(-len(gpus) // len(near))
    if most > fair:
        crowded = sorted(name for name, count in load.items() if count == most)
        yield AuditFinding(
            rule="N02",
            severity=Severity.WARNING,
            host=host.name,
            place=crowded[0],
            seen=f"{most} GPUs map to it; spread evenly over {len(near)} ports it would be {fair} each",
            cost=f"these GPUs share the rate of one port: 1/{most} each when all {most} send at once",
            fix="export NCCL_CROSS_NIC=1  # measure first; admin: as many adapters as GPUs on each switch",
            certainty=Certainty.INFERRED,
        )


def n09_gpudirect(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find nodes on which RDMA adapters cannot reach NVIDIA's GPUs directly."""
    if not host.has_nvidia or not any(port.state == "ACTIVE" for _, port in host.rdma_ports):
        raise Skip("no NVIDIA driver, or no active RDMA port")
    kernel = host.snapshot.kernel
    if kernel.modules is None:
        raise host.unreadable("the kernel modules", "kernel/modules")
    if host.has_dmabuf:
        return
    loaded = has_peermem(kernel.modules)
    if loaded and kernel.rdma_holders is None:
        raise host.unreadable("which modules have registered with RDMA", "kernel/rdma_holders")
    registered = has_peermem(kernel.rdma_holders or ())
    old = [rank for rank in host.ranks if (0,) < _version(rank.nccl_version) <= _LAST_GOOD_NCCL_GAP]
    if loaded and registered and not old:
        return
    seen = "has neither nvidia_peermem nor dma-buf (Linux 5.12 with NVIDIA's open module)"
    fix = "modprobe nvidia-peermem  # admin; or NVIDIA's open kernel module with Linux 5.12 or newer"
    if loaded and not registered:
        seen, fix = (
            "nvidia_peermem is loaded but not registered with RDMA",
            "modprobe -r nvidia_peermem && modprobe nvidia_peermem  # admin, after the RDMA stack",
        )
    elif loaded:
        seen, fix = (
            f"NCCL {printable(old[0].nccl_version)} with nvidia_peermem and without dma-buf",
            "pip install --upgrade nvidia-nccl-cu12  # 2.23 or newer",
        )
    yield AuditFinding(
        rule="N09",
        severity=Severity.FAIL if job.has_many_hosts else Severity.WARNING,
        host=host.name,
        place="",
        seen=seen,
        cost="no GPUDirect RDMA: every message between nodes goes through host memory",
        fix=fix,
        certainty=Certainty.READ,
    )


def _usable(host: AuditedHost) -> list[FabricPort]:
    return [port for port in host.fabric if port.is_active and port.pci in host.hardware.devices]


def _falling_on(classes: Mapping[str, Mapping[str, int]], near: Sequence[str]) -> Counter[str]:
    """Return how many GPUs map to each port if each GPU takes the least used of its nearest ports."""
    load = Counter(dict.fromkeys(near, 0))
    # GPUs with the fewest choices go first; the others can still use the ports that are left.
    choices = []
    for gpu, of_gpu in classes.items():
        best = min(of_gpu[name] for name in near)
        choices.append((gpu, [name for name in near if of_gpu[name] == best]))
    for _, names in sorted(choices, key=lambda choice: (len(choice[1]), choice[0])):
        load[min(names, key=lambda name: (load[name], name))] += 1
    return load


def _far_adapters(host: AuditedHost, far: Sequence[FabricPort], best: Mapping[str, int]) -> Iterator[AuditFinding]:
    values = (rank_variables(host, rank).get("NCCL_IB_HCA", "") for rank in host.ranks)
    value = next(filter(None, values), "")
    rdma = {device.name for device, _ in host.rdma_ports}
    for port in far:
        if port.device not in rdma or (value and not hca_selects(value, port.device, port.number)):
            continue
        yield AuditFinding(
            rule="N02",
            severity=Severity.WARNING,
            host=host.name,
            place=port.name,
            seen=f"is {ORDER[best[port.name]]} from the nearest GPU, while other adapters share a switch with the GPUs",
            cost="NCCL may use it as well, through the processor, even if it is meant for storage or management",
            fix=f"export NCCL_IB_HCA=^{shell_word(port.device)}",
            certainty=Certainty.INFERRED,
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d{1,6}", text)[:3])
