"""Rules A08, A09, P01 to P09: which rank uses which GPU, GPU states, NVLinks, PCIe links, `nvidia-smi topo -m`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

from hpcpace.audit import cpusets
from hpcpace.audit.collect_host import is_gpu_bound_per_task
from hpcpace.audit.facts import Nvml, PciDevice, RankFacts
from hpcpace.audit.findings import AuditFinding, Certainty, Severity, Skip, fewer_ranks_fix, unknown
from hpcpace.audit.job import AuditedHost, AuditedJob, TopoMatrix, device_place, rank_place
from hpcpace.audit.rules.affinity import gpu_certainty, listed, rank_numbers
from hpcpace.audit.throttle import FAULTS, Throttle
from hpcpace.audit.tree import Unreadable
from hpcpace.core.text import printable


def p07_nvlink(job: AuditedJob) -> Iterator[AuditFinding]:
    """Find GPUs with inactive NVLinks, with fewer than others of their model, or not registered with the fabric."""
    most: Counter[str] = Counter()
    for host in job.hosts:
        for gpu in host.snapshot.gpus or ():
            most[gpu.name or ""] = max(most[gpu.name or ""], (gpu.nvml and gpu.nvml.links_active) or 0)
    for host in job.hosts:
        try:
            driven = host.has_nvidia
        except Unreadable as error:
            yield unknown(host.explain(error), host.name)
            continue
        for gpu in host.snapshot.gpus or () if driven else ():
            if gpu.nvml is None:
                yield unknown(f"its NVLinks: {host.reason('nvml')}", host.name, f"GPU {gpu.address}")
            else:
                yield from _check_links(host, gpu.address, gpu.nvml, most[gpu.name or ""])
                yield from _check_fabric(host, gpu.address, gpu.nvml.fabric)


def _check_links(host: AuditedHost, address: str, nvml: Nvml, most: int) -> Iterator[AuditFinding]:
    active, inactive = nvml.links_active, nvml.links_inactive
    if active is None or (not active and not most):
        return  # it has no NVLinks, or they are off on all GPUs of this model
    missing = max(inactive or 0, most - active)
    if missing:
        yield AuditFinding(
            severity=Severity.FAIL,
            hosts=(host.name,),
            place=f"GPU {address}",
            seen=f"{missing} of {active + missing} NVLinks are inactive",
            fix=f"nvidia-smi nvlink -s -i {address}; systemctl status nvidia-fabricmanager  # admin",
        )


def _check_fabric(host: AuditedHost, address: str, fabric: str | None) -> Iterator[AuditFinding]:
    if fabric is None and host.snapshot.hardware.num_nvswitches:
        reason = "whether the fabric manager has registered it: NVML does not say"
        yield unknown(reason, host.name, f"GPU {address}")
    if fabric in (None, "none", "completed"):
        return
    shown = printable(fabric).replace("failed ", "failed with NVML error ")
    words = {"not started": "has not been started", "in progress": "has not finished"}
    yield AuditFinding(
        severity=Severity.FAIL,
        hosts=(host.name,),
        place=f"GPU {address}",
        seen=f"its fabric registration {words.get(fabric, shown)}",
        cost="CUDA does not start on it, or works without NVLink",
        fix="systemctl status nvidia-fabricmanager  # admin: restart it; its version must match the driver's",
    )


def p08_state(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find GPUs that are throttled, capped, or in a state that costs time."""
    if not host.has_nvidia:
        raise Skip("no NVIDIA driver")
    for gpu in host.snapshot.gpus or ():
        nvml = host.known(gpu.nvml, "the state of the GPUs", "nvml")
        for severity, seen, cost, fix in _states(f"nvidia-smi -i {gpu.address}", nvml):
            yield AuditFinding(severity=severity, place=f"GPU {gpu.address}", seen=seen, cost=cost, fix=fix)


def _states(tool: str, nvml: Nvml) -> Iterator[tuple[Severity, str, str, str]]:
    reasons, wait = nvml.throttle_reasons or 0, "every rank waits for this GPU"
    if reasons & FAULTS:
        fix = f"{tool} -q -d PERFORMANCE,TEMPERATURE  # then cooling and power, admin"
        yield Severity.FAIL, f"is throttled by its hardware (reasons {reasons:#x})", wait, fix
    elif reasons & Throttle.SOFTWARE_THERMAL:
        seen = f"is throttled by its driver because of heat (reasons {reasons:#x})"
        yield Severity.WARNING, seen, wait, "# admin: check cooling and fans"
    if nvml.power_limit_w and nvml.power_default_w and nvml.power_limit_w < 0.99 * nvml.power_default_w:
        seen = f"is capped at {nvml.power_limit_w:g} W, the default is {nvml.power_default_w:g}"
        fix = f"{tool} -pl {nvml.power_default_w:.0f}  # admin"
        yield Severity.WARNING, seen, "its clock is lower under load", fix
    if nvml.sm_clock_limit_mhz and nvml.sm_clock_max_mhz and nvml.sm_clock_limit_mhz < 0.8 * nvml.sm_clock_max_mhz:
        seen = f"its clock is limited to {nvml.sm_clock_limit_mhz} of {nvml.sm_clock_max_mhz} MHz"
        yield Severity.WARNING, seen, "it runs slower than it could", f"{tool} -rac  # admin"
    if nvml.is_ecc_pending:
        seen = "its ECC mode will change at the next reset"
        yield Severity.WARNING, seen, "GPUs of one job may differ in memory and speed", "# admin: reboot the node"
    if nvml.is_persistent is False:
        yield (
            Severity.WARNING,
            "persistence mode is off",
            "every job start takes seconds longer",
            f"{tool} -pm 1  # admin",
        )


_HIDING = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def a08_shared_gpu(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find ranks that share a GPU, see none, or do not use the GPU of their local rank."""
    if not host.has_gpus or not host.ranks:
        return
    users: dict[str, list[RankFacts]] = {}
    not_known: Unreadable | None = None
    for rank in host.ranks:
        if rank.gpus == ():
            yield from _sees_none(host, rank)
            continue
        try:
            address = host.gpu_address(rank)
        except Unreadable as error:
            not_known = error
            continue
        if address is not None:
            users.setdefault(address, []).append(rank)
            yield from _another_order(host, rank, address)
    for address, ranks in users.items():
        if len(ranks) > 1:
            yield _one_for_many(host, address, ranks)
    if not_known is not None:
        raise not_known


def a09_ipc(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find GPUs bound to single tasks, so that ranks of a node cannot reach each other's GPUs."""
    if not host.has_gpus or len(host.ranks) < 2:
        return
    bound = [rank for rank in host.ranks if is_gpu_bound_per_task(rank.variables)]
    single = [rank for rank in bound if rank.gpus is None or len(rank.gpus) == 1]
    if len(single) < 2:
        return
    count = len(host.snapshot.gpus or ())
    yield AuditFinding(
        severity=Severity.WARNING,
        seen=f"{len(single)} ranks see only 1 of {count} GPUs each, because of --gpus-per-task",
        fix=f"srun --gpus-per-node={count} --gpu-bind=none ...  # instead of --gpus-per-task",
        certainty=Certainty.READ if all(rank.gpus is not None for rank in single) else Certainty.INFERRED,
        ranks=rank_numbers(single),
    )


def _sees_none(host: AuditedHost, rank: RankFacts) -> Iterator[AuditFinding]:
    if host.snapshot.kernel.nvidia_driver == "" and "amdgpu" not in (host.snapshot.kernel.modules or {}):
        return  # no driver is loaded, so no rank is meant to use them
    yield AuditFinding(
        severity=Severity.FAIL,
        place=rank_place(rank),
        seen=f"sees none of the {len(host.snapshot.gpus or ())} GPUs of its node",
        fix=_visible_fix(host, rank),
        certainty=gpu_certainty(rank),
        ranks=(rank.rank,),
    )


def _another_order(host: AuditedHost, rank: RankFacts, address: str) -> Iterator[AuditFinding]:
    order = [gpu.address for gpu in host.snapshot.gpus or ()]
    if address not in order or order.index(address) == rank.local_rank or rank.local_rank < 0:
        return
    yield AuditFinding(
        severity=Severity.INFORMATION,
        place=rank_place(rank),
        seen=f"uses GPU {order.index(address)} of the node ({address}), not that of its local rank",
        cost="nothing by itself, but bindings that assume the order of local ranks are wrong",
        fix="torch.cuda.set_device(local_rank)  # unless this order is intended",
        certainty=gpu_certainty(rank),
        ranks=(rank.rank,),
    )


def _one_for_many(host: AuditedHost, address: str, ranks: list[RankFacts]) -> AuditFinding:
    gpu = next((gpu for gpu in host.snapshot.gpus or () if gpu.address == address), None)
    has_mps = all(any(name.startswith("CUDA_MPS_") for name in rank.variables) for rank in ranks)
    has_mig = bool(gpu and gpu.nvml and gpu.nvml.is_mig)
    return AuditFinding(
        severity=Severity.INFORMATION if has_mps or has_mig else Severity.FAIL,
        place=f"GPU {address}",
        seen=f"is used by local ranks {listed(rank.local_rank for rank in ranks)}"
        + (", through MPS" if has_mps else ", partitioned by MIG" if has_mig else ""),
        cost="they take turns, and NCCL refuses two ranks of one communicator on a GPU",
        fix=_distinct_fix(host, ranks[0]),
        certainty=gpu_certainty(ranks[0]),
        ranks=rank_numbers(ranks),
    )


def _visible_fix(host: AuditedHost, rank: RankFacts) -> str:
    """Return what shows the GPUs to a rank: a variable may hide them, or the job or container may have none."""
    hiding = [name for name in _HIDING if name in rank.variables]
    if hiding:
        return f"unset {' '.join(hiding)}  # and srun --gpus-per-node, if the job has none"
    if rank.launcher == "slurm":
        return f"srun --gpus-per-node={len(host.snapshot.gpus or ())} ..."
    return "docker run --gpus all ...  # or sbatch --gpus-per-node; the job or container has no GPU"


def _distinct_fix(host: AuditedHost, rank: RankFacts) -> str:
    count = len(host.snapshot.gpus or ())
    if len(host.ranks) > count:
        return f"{fewer_ranks_fix(rank, count)}  # the node has {count} GPUs for {len(host.ranks)} ranks"
    if rank.launcher == "slurm":
        return f"srun --gpus-per-node={count} ...  # and torch.cuda.set_device(local_rank)"
    return "torch.cuda.set_device(local_rank)  # each rank has to choose its own"


_BUSY_PERCENT = 50
_REDIRECT = 0x0C
# ACS control: bit 2 P2P Request Redirect, bit 3 P2P Completion Redirect (PCI Express Base Specification 7.7.11.3).


def p01_width(job: AuditedJob, host: AuditedHost, device: PciDevice) -> Iterator[AuditFinding]:
    """Find a link with fewer lanes than both of its ends support."""
    width, most = _link(host, device, "width", "width")
    if width < most:
        yield AuditFinding(
            severity=Severity.FAIL,
            seen=f"its link has {width} lanes of {most}",
            cost=f"it has at most {width / most:.0%} of its bandwidth, and NCCL reads only the maximum",
            fix="# admin: reseat the card; check riser and bifurcation",
        )


def p02_speed(job: AuditedJob, host: AuditedHost, device: PciDevice) -> Iterator[AuditFinding]:
    """Find a link that runs slower than both of its ends support; for a GPU only while it is busy."""
    speed, most = _link(host, device, "speed", "speed_gts")
    if speed >= most:
        return
    if device.kind == "gpu" and (_nvml(host, device.address, "utilization_percent") or 0) < _BUSY_PERCENT:
        raise Unreadable(f"the speed of its link under load: now {speed:g} of {most:g} GT/s, and idle GPUs slow down")
    yield AuditFinding(
        severity=Severity.WARNING if device.kind == "gpu" else Severity.FAIL,
        seen=f"its link runs at {speed:g} of {most:g} GT/s",
        cost=f"it has at most {speed / most:.0%} of its bandwidth",
        fix="# admin: reseat the card; check riser, BIOS link speed and retimers",
    )


def _link(host: AuditedHost, device: PciDevice, name: str, field: str) -> tuple[float, float]:
    """Return width or speed of a device's link, and what both of its ends support; (0, 0) if it has no link."""
    port = host.hardware.port_of(device)
    now, most = getattr(device, field), getattr(device, f"max_{field}")
    if port is None and now is None and device.kind == "nic":
        return 0, 0  # on-chip or virtual
    fact = f"pci/{device.address}"
    for known in (now, most):
        host.known(known, f"the {name} of its link", f"{fact}/{name}", f"{fact}/max_{name}")
    if port is not None:
        limit = host.known(getattr(port, f"max_{field}"), f"the {name} of its slot", f"pci/{port.address}/max_{name}")
        most = min(most, limit or most)
    return now, most


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
                        yield unknown(host.explain(error), host.name, device_place(device))
                    continue
                if width:
                    kinds.setdefault((device.kind, device.vendor, device.device), []).append(
                        (host, device, width, speed)
                    )
        if host.hardware.hardware.pci is None:
            yield unknown(f"the PCI devices: {host.reason('pci')}", host.name)
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
            severity=Severity.WARNING,
            seen=f"+{grown} corrected PCIe errors in {counters.window_s:g} s"
            if grown
            else f"{count} corrected PCIe errors",
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
            severity=Severity.WARNING,
            seen=f"its numa_node is {device.numa_node} on a machine with {len(view.numa_cpus)} NUMA nodes",
            fix="export NCCL_TOPO_FILE=/path/to/topo.xml  # for this type of machine; or a firmware fix, admin",
        )


def _possible(host: AuditedHost, device: PciDevice) -> tuple[int, float]:
    """Return the lanes and speed in GT/s that a device and its slot both support."""
    ends = [(device, "what its link supports")]
    if (port := host.hardware.port_of(device)) is not None:
        ends.append((port, "what its slot supports"))
    widths, speeds = [], []
    for end, what in ends:
        facts = f"pci/{end.address}/max_width", f"pci/{end.address}/max_speed"
        widths.append(host.known(end.max_width, what, *facts))
        speeds.append(host.known(end.max_speed_gts, what, *facts))
    return min(widths), min(speeds)


def _unequal(entries: list[tuple[AuditedHost, PciDevice, int, float]]) -> Iterator[AuditFinding]:
    widest, fastest = max(width for _, _, width, _ in entries), max(speed for *_, speed in entries)
    for host, device, width, speed in entries:
        severity = Severity.WARNING
        if width < widest or speed < fastest:
            seen = f"its slot offers x{width} at {speed:g} GT/s, others of its kind have x{widest} at {fastest:g}"
            cost = "it has less bandwidth than the others, and they wait for it"
        elif device.max_width is not None and width < device.max_width:
            seen = f"is an x{device.max_width} card in an x{width} slot"
            cost = f"it has at most {width / device.max_width:.0%} of its bandwidth"
            severity = Severity.INFORMATION if len(entries) > 1 else Severity.WARNING
        else:
            continue
        yield AuditFinding(
            severity=severity,
            hosts=(host.name,),
            place=device_place(device),
            seen=seen,
            cost=cost,
            fix="# admin: move the card to a full-width slot; check riser and bifurcation",
        )


def _acs(host: AuditedHost, severity: Severity, seen: str, certainty: Certainty) -> AuditFinding:
    return AuditFinding(
        severity=severity,
        seen=seen,
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


_NEARNESS = ("PIX", "PXB", "PHB", "NODE", "SYS")
_MAX_NAMED = 8  # display: pairs of GPUs in one finding


def p09_topology(job: AuditedJob) -> Iterator[AuditFinding]:
    """Find GPUs far from all adapters, NVLinks that are missing, and ranks away from their GPU."""
    if not job.topo:
        raise Skip("no matrix was given: add --topo")
    for matrix in job.topo:
        yield from _far(job, matrix)
        yield from _missing_links(job, matrix)
        yield from _without_cpus(job, matrix)
    for matrix in job.topo:
        yield from _away(job, matrix)


def _finding(job: AuditedJob, matrix: TopoMatrix, gpu: str, seen: str, *, cost: str, fix: str) -> AuditFinding:
    return AuditFinding(
        severity=Severity.WARNING,
        place=gpu,
        seen=seen,
        cost=cost,
        fix=fix,
        evidence=matrix.lines.get(gpu, ""),
        hosts=(job.name_of(matrix.host),) if matrix.host else (),
    )


def _far(job: AuditedJob, matrix: TopoMatrix) -> Iterator[AuditFinding]:
    for gpu in matrix.gpus:
        paths = {nic: matrix.paths[gpu][nic] for nic in matrix.nics if matrix.paths[gpu].get(nic) in _NEARNESS}
        if not paths:
            continue
        best = min(paths, key=lambda nic: _NEARNESS.index(paths[nic]))
        if paths[best] == "SYS":
            names = ", ".join(matrix.names.get(nic, nic) for nic in list(paths)[:4])
            yield _finding(
                job,
                matrix,
                gpu,
                f"all adapters ({names}) are on another NUMA node (SYS)",
                cost="its traffic crosses the interconnect of the processors, without GPUDirect RDMA",
                fix="check slots and BIOS; hpcpace audit explain N01",
            )


def _missing_links(job: AuditedJob, matrix: TopoMatrix) -> Iterator[AuditFinding]:
    """Find GPUs with fewer NVLinks than most: machines that join only some pairs join each GPU alike."""
    gpus = matrix.gpus
    links = {gpu: {other: matrix.num_links(gpu, other) for other in gpus if other != gpu} for gpu in gpus}
    kinds = Counter(tuple(sorted(own.values())) for own in links.values())
    if len(gpus) < 3 or not kinds:
        return
    usual = max(kinds, key=lambda kind: (kinds[kind], sum(kind)))
    count = kinds[usual]
    if count < min(len(gpus) // 2 + 1, len(gpus) - 2) or not sum(usual):
        return
    fewer = [gpu for gpu in gpus if sum(links[gpu].values()) < sum(usual)]
    most = max(usual)
    pairs = [
        (one, other)
        for place, one in enumerate(fewer)
        for other in fewer[place + 1 :]
        if links[one][other] < most and min(usual) == most
    ]
    for gpu in fewer if not pairs else []:
        yield _links_finding(job, matrix, gpu, _fewer_links(list(links[gpu].values()), usual, count))
    if pairs:
        named = ", ".join(f"{one}-{other} {matrix.paths[one].get(other, '')}" for one, other in pairs[:_MAX_NAMED])
        seen = f"NVLinks are missing between {named}: other pairs have NV{most}"
        if matrix.paths[pairs[0][0]].get(pairs[0][1]) == "PCIE":
            seen = f"XGMI is missing between {named}"
        yield _links_finding(job, matrix, pairs[0][0], seen)


def _fewer_links(own: Sequence[int], usual: Sequence[int], count: int) -> str:
    joined, usually = (sum(number > 0 for number in numbers) for numbers in (own, usual))
    if joined < usually:
        return f"has NVLinks to {joined or 'no'} GPUs, {count} others to {usually}"
    if max(own) < max(usual):
        return f"is joined by NV{max(own)}, {count} others by NV{max(usual)}"
    return f"has {sum(own)} NVLinks, {count} others have {sum(usual)}"


def _links_finding(job: AuditedJob, matrix: TopoMatrix, gpu: str, seen: str) -> AuditFinding:
    return _finding(
        job,
        matrix,
        gpu,
        seen,
        cost="collectives within the node run at the rate of the slowest pair",
        fix="nvidia-smi nvlink -s; systemctl status nvidia-fabricmanager  # then reseat or replace; AMD: rocm-smi",
    )


def _without_cpus(job: AuditedJob, matrix: TopoMatrix) -> Iterator[AuditFinding]:
    """Find GPUs without a CPU nearby where others have some: a container or cgroup has only those of other nodes."""
    if not any(matrix.cpus.values()):
        return
    for gpu, cpus in matrix.cpus.items():
        if cpus == 0:
            yield _finding(
                job,
                matrix,
                gpu,
                "no CPU that this job or container may use is near it",
                cost="all its copies and kernel launches cross the NUMA interconnect",
                fix="taskset -pc $$; srun --exclusive -c N ...  # or docker run --cpuset-cpus with CPUs of all nodes",
            )


def _away(job: AuditedJob, matrix: TopoMatrix) -> Iterator[AuditFinding]:
    """Find ranks of the audited host with no CPU, or only some, near their GPU as the matrix has it."""
    host = _audited(job, matrix)
    if host is None:
        return
    for rank in host.ranks if len(host.ranks) > 1 or job.has_many_hosts else ():
        index = _gpu_index(host, rank)
        near = matrix.cpus.get(f"GPU{index}")
        if index < 0 or not near:
            continue
        mask = host.mask(rank)
        if mask & near:
            continue
        yield AuditFinding(
            severity=Severity.FAIL,
            place=rank_place(rank),
            seen=f"runs on CPUs {cpusets.format_list(mask)}, but those near its GPU{index} "
            f"are {cpusets.format_list(near)}",
            evidence=matrix.lines.get(f"GPU{index}", ""),
            certainty=Certainty.INFERRED,
            cost="every copy and every kernel launch crosses the NUMA interconnect",
            fix="srun --gpu-bind=closest ...  # or --cpu-bind=mask_cpu with these CPUs; see A02",
            hosts=(host.name,),
            ranks=(rank.rank,),
        )


def _audited(job: AuditedJob, matrix: TopoMatrix) -> AuditedHost | None:
    """Return the audited host of a matrix: by name, else the only one."""
    if matrix.host:
        return next((host for host in job.hosts if host.name == job.name_of(matrix.host)), None)
    return job.hosts[0] if len(job.hosts) == len(job.topo) == 1 else None


def _gpu_index(host: AuditedHost, rank: RankFacts) -> int:
    """Return the number that nvidia-smi gives the GPU of a rank, in the order of PCI addresses; -1 if not known."""
    addresses: Sequence[str] = sorted(gpu.address for gpu in host.snapshot.gpus or ())
    if rank.gpus and 0 <= rank.gpu < len(rank.gpus) and rank.gpus[rank.gpu].address in addresses:
        return addresses.index(rank.gpus[rank.gpu].address)
    visible = rank.variables.get("CUDA_VISIBLE_DEVICES", "")
    numbers = [word.strip() for word in visible.split(",") if word.strip()]
    if not visible:
        return rank.local_rank
    chosen = (
        numbers[0 if len(numbers) == 1 else rank.local_rank]
        if 0 <= rank.local_rank < len(numbers) or len(numbers) == 1
        else ""
    )
    return int(chosen) if chosen.isdigit() and len(chosen) < 4 else -1
