"""Rule P09: what the matrix of `nvidia-smi topo -m` says of adapters, NVLinks and the CPUs of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hpcpace.audit import cpusets
from hpcpace.audit.facts import RankFacts
from hpcpace.audit.findings import AuditFinding, Certainty, Severity, Skip
from hpcpace.audit.job import AuditedHost, AuditedJob, rank_place
from hpcpace.audit.topo_matrix import TopoMatrix

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
            seen=f"runs on CPUs {cpusets.format_list(mask)}, but those near its GPU{index} are "
            f"{cpusets.format_list(near)}",
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
