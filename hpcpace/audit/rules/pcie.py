"""Rules P01 to P06: PCIe links, switches, and devices whose NUMA node the firmware hides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

from hpcpace.audit.facts import PciDevice
from hpcpace.audit.findings import AuditFinding, Certainty, Severity, Skip, unknown
from hpcpace.audit.job import AuditedHost, AuditedJob
from hpcpace.audit.tree import Unreadable
from hpcpace.core.text import printable

_BUSY_PERCENT = 50
_REDIRECT = 0x0C
# ACS control: bit 2 P2P Request Redirect, bit 3 P2P Completion Redirect (PCI Express Base Specification 7.7.11.3).


def p01_width(job: AuditedJob, host: AuditedHost, device: PciDevice) -> Iterator[AuditFinding]:
    """Find a link with fewer lanes than both of its ends support."""
    port = host.hardware.port_of(device)
    if port is None and device.width is None and device.kind == "nic":
        return  # on-chip or virtual: it has no link
    fact = f"pci/{device.address}"
    if device.width is None or device.max_width is None:
        raise host.unreadable("the width of its link", f"{fact}/width", f"{fact}/max_width")
    if port is not None and port.max_width is None:
        raise host.unreadable("the width of its slot", f"pci/{port.address}/max_width")
    most = min(device.max_width, port.max_width or device.max_width) if port is not None else device.max_width
    if device.width < most:
        yield AuditFinding(
            rule="P01",
            severity=Severity.FAIL,
            host=host.name,
            place=_name(device),
            seen=f"its link has {device.width} lanes of {most}",
            cost=f"it has at most {device.width / most:.0%} of its bandwidth, and NCCL reads only the maximum",
            fix="# admin: reseat the card; check riser and bifurcation",
            certainty=Certainty.READ,
        )


def p02_speed(job: AuditedJob, host: AuditedHost, device: PciDevice) -> Iterator[AuditFinding]:
    """Find a link that runs slower than both of its ends support; for a GPU only while it is busy."""
    port = host.hardware.port_of(device)
    if port is None and device.speed_gts is None and device.kind == "nic":
        return
    fact = f"pci/{device.address}"
    if device.speed_gts is None or device.max_speed_gts is None:
        raise host.unreadable("the speed of its link", f"{fact}/speed", f"{fact}/max_speed")
    if port is not None and port.max_speed_gts is None:
        raise host.unreadable("the speed of its slot", f"pci/{port.address}/max_speed")
    most = min(device.max_speed_gts, (port.max_speed_gts if port is not None else None) or device.max_speed_gts)
    if device.speed_gts >= most:
        return
    if device.kind == "gpu" and (_nvml(host, device.address, "utilization_percent") or 0) < _BUSY_PERCENT:
        raise Unreadable(
            f"the speed of its link under load: now {device.speed_gts:g} of {most:g} GT/s, and idle GPUs slow down"
        )
    yield AuditFinding(
        rule="P02",
        severity=Severity.WARNING if device.kind == "gpu" else Severity.FAIL,
        host=host.name,
        place=_name(device),
        seen=f"its link runs at {device.speed_gts:g} of {most:g} GT/s",
        cost=f"it has at most {device.speed_gts / most:.0%} of its bandwidth",
        fix="# admin: reseat the card; check riser, BIOS link speed and retimers",
        certainty=Certainty.READ,
    )


def p03_unequal(job: AuditedJob) -> Iterator[AuditFinding]:
    """Find devices of one kind in slots that support less than the slots of the others."""
    kinds: dict[tuple[str, str, str], list[tuple[AuditedHost, PciDevice, int, float]]] = {}
    for host in job.hosts:
        for device in host.hardware.hardware.pci or ():
            if device.kind in ("gpu", "nic") and device.vendor and device.device:
                try:
                    width, speed = _possible(host, device)
                except Unreadable as error:
                    if device.kind == "gpu" or len(device.parents or ()) > 1:
                        yield unknown("P03", host.name, _name(device), host.explain(error))
                    continue
                if width:
                    kinds.setdefault((device.kind, device.vendor, device.device), []).append(
                        (host, device, width, speed)
                    )
        if host.hardware.hardware.pci is None:
            yield unknown("P03", host.name, "", f"the PCI devices: {host.reason('pci')}")
    for entries in kinds.values():
        yield from _unequal(entries)


def p04_replays(job: AuditedJob, host: AuditedHost, device: PciDevice) -> Iterator[AuditFinding]:
    """Find links that retransmit packets."""
    name = f"pci/{device.address}/corrected"
    counters = host.snapshot.counters
    replays = _nvml(host, device.address, "replays")
    if name in host.snapshot.unreadable and replays is None:
        if device.kind == "nic":
            return  # nothing is counted without AER in the kernel, or for a virtual adapter
        raise host.unreadable("its corrected PCIe errors", name)
    count = max(counters.values.get(name, 0), replays or 0)
    grown = (counters.growth or {}).get(name, 0)
    if grown or count > job.settings.pcie_errors:
        yield AuditFinding(
            rule="P04",
            severity=Severity.WARNING,
            host=host.name,
            place=_name(device),
            seen=f"+{grown} corrected PCIe errors in {counters.window_s:g} s"
            if grown
            else f"{count} corrected PCIe errors",
            cost="packets are retransmitted: the link is marginal, gets slower and may fail",
            fix="# admin: reseat the card; swap riser or slot",
            certainty=Certainty.MEASURED if grown else Certainty.READ,
        )


def p05_acs(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find switches whose ACS routes traffic between GPUs and adapters through the processor."""
    view = host.hardware
    adapters = [port.pci for port in host.fabric if port.pci in view.devices]
    gpus = view.of_kind("gpu")
    pairs = [
        (view.device(one), view.device(other))
        for one, other in [*product((gpu.address for gpu in gpus), adapters), *_neighbours(gpus)]
        if view.class_of(one, other) in ("PIX", "PXB")
    ]
    if not pairs:
        raise Skip("no GPU shares a switch with an adapter or another GPU")
    if host.snapshot.kernel.is_virtual:
        yield _acs(
            host, Severity.INFORMATION, "in a virtual machine ACS is up to the hypervisor's host", Certainty.READ
        )
        return
    bridges = {parent for pair in pairs for device in pair for parent in (device.parents or ())[1:]}
    controls = {address: view.device(address).acs_control for address in sorted(bridges)}
    redirecting = [
        address for address, control in controls.items() if control is not None and control > 0 and control & _REDIRECT
    ]
    split = [pair for pair in pairs if "" != pair[0].iommu_group != pair[1].iommu_group != ""]
    if redirecting:
        seen = f"ACS redirects requests on {len(redirecting)} bridges, such as {redirecting[0]}"
        yield _acs(host, Severity.WARNING, seen, Certainty.READ)
    elif None in controls.values():
        if split:
            one, other = split[0]
            seen = f"{one.address} and {other.address} share a switch but not an IOMMU group, so ACS is on"
            yield _acs(host, Severity.WARNING, seen, Certainty.INFERRED)
        elif any(not device.iommu_group for pair in pairs for device in pair):
            reason = next(host.reason(f"pci/{address}/acs") for address, control in controls.items() if control is None)
            raise Unreadable(f"the ACS control of the bridges: {reason}")


def p06_hidden_numa(job: AuditedJob, host: AuditedHost, device: PciDevice) -> Iterator[AuditFinding]:
    """Find a GPU or adapter whose NUMA node the firmware hides."""
    view = host.hardware
    if len(view.numa_cpus) < 2 or len(view.nodes_near(device)) == 1:
        return
    if device.numa_node is None:
        raise host.unreadable("its NUMA node", f"pci/{device.address}/numa_node")
    if device.numa_node < 0:
        yield AuditFinding(
            rule="P06",
            severity=Severity.WARNING,
            host=host.name,
            place=_name(device),
            seen=f"its numa_node is {device.numa_node} on a machine with {len(view.numa_cpus)} NUMA nodes",
            cost="ranks cannot be bound near it, and NCCL guesses its paths",
            fix="export NCCL_TOPO_FILE=/path/to/topo.xml  # for this type of machine; or a firmware fix, admin",
            certainty=Certainty.READ,
        )


def _possible(host: AuditedHost, device: PciDevice) -> tuple[int, float]:
    """Return the lanes and speed in GT/s that a device and its slot both support."""
    port = host.hardware.port_of(device)
    if device.max_width is None or device.max_speed_gts is None:
        fact = f"pci/{device.address}"
        raise host.unreadable("what its link supports", f"{fact}/max_width", f"{fact}/max_speed")
    if port is None:
        return device.max_width, device.max_speed_gts
    if port.max_width is None or port.max_speed_gts is None:
        fact = f"pci/{port.address}"
        raise host.unreadable("what its slot supports", f"{fact}/max_width", f"{fact}/max_speed")
    return min(device.max_width, port.max_width), min(device.max_speed_gts, port.max_speed_gts)


def _unequal(entries: list[tuple[AuditedHost, PciDevice, int, float]]) -> Iterator[AuditFinding]:
    widths, speeds = Counter(entry[2] for entry in entries), Counter(entry[3] for entry in entries)
    widest, fastest = max(widths), max(speeds)
    for host, device, width, speed in entries:
        if width < widest or speed < fastest:
            seen = f"its slot offers x{width} at {speed:g} GT/s, others of its kind have x{widest} at {fastest:g}"
            severity = Severity.WARNING
        elif device.max_width is not None and width < device.max_width:
            seen = f"is an x{device.max_width} card in an x{width} slot"
            severity = Severity.INFORMATION if len(entries) > 1 else Severity.WARNING
        else:
            continue
        yield AuditFinding(
            rule="P03",
            severity=severity,
            host=host.name,
            place=_name(device),
            seen=seen,
            cost="it has less bandwidth than the others, and they wait for it"
            if width < widest or speed < fastest
            else f"it has at most {width / (device.max_width or width):.0%} of its bandwidth",
            fix="# admin: move the card to a full-width slot; check riser and bifurcation",
            certainty=Certainty.READ,
        )


def _acs(host: AuditedHost, severity: Severity, seen: str, certainty: Certainty) -> AuditFinding:
    return AuditFinding(
        rule="P05",
        severity=severity,
        host=host.name,
        place="",
        seen=seen,
        cost="traffic from a GPU to an adapter or another GPU takes a detour through the processor",
        fix="lspci -vvv | grep ACSCtl  # admin: want SrcValid-, ReqRedir-; `rdma_topo check`; not in virtual machines; "
        "Direct-NIC CX8 needs certain bits",
        certainty=certainty,
    )


def _neighbours(gpus: Sequence[PciDevice]) -> list[tuple[str, str]]:
    return [(one.address, other.address) for one, other in pairwise(gpus)]


def _nvml(host: AuditedHost, address: str, name: str) -> int | None:
    gpu = next((gpu for gpu in host.snapshot.gpus or () if gpu.address == address), None)
    value: int | None = getattr(gpu.nvml, name) if gpu is not None and gpu.nvml is not None else None
    return value


def _name(device: PciDevice) -> str:
    return f"{'GPU' if device.kind == 'gpu' else 'NIC'} {printable(device.address)}"
