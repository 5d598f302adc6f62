"""Rules A01 to A07, A10 and S05: MPI worlds of one, and the CPUs and memory of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations

from hpcpace.audit import cpusets
from hpcpace.audit.facts import RankFacts, parsed, sum_of
from hpcpace.audit.findings import (
    AuditFinding,
    Certainty,
    Severity,
    Skip,
    binding_fix,
    fewer_ranks_fix,
    memory_fix,
    more_cpus_fix,
    near_gpu_fix,
)
from hpcpace.audit.job import AuditedHost, AuditedJob
from hpcpace.audit.tree import Unreadable
from hpcpace.core.text import printable

_BINDING_POLICIES = frozenset({"true", "close", "spread", "master", "primary"})
"""Values of OMP_PROC_BIND that bind threads (OpenMP 5.1, section 6.4)."""

_BINDING_TYPES = frozenset({"balanced", "compact", "explicit", "logical", "physical", "scatter"})
"""Types in KMP_AFFINITY that bind threads; `none` and `disabled` do not."""


def a01_mpi_singletons(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find ranks that each see a world of one."""
    checked = [rank for rank in host.ranks if rank.mpi_size is not None]
    if not checked:
        raise Skip("MPI was not checked: add --mpi")
    if any(rank.mpi_size == -1 for rank in checked):
        raise Unreadable("the size of MPI_COMM_WORLD: mpi4py or its MPI library cannot be loaded")
    alone = [rank for rank in checked if rank.mpi_size == 1 and rank.world_size > 1]
    if alone:
        yield AuditFinding(
            severity=Severity.FAIL,
            seen=f"{alone[0].world_size} ranks each see an MPI world of 1: "
            "the MPI library does not support this srun's PMI",
            fix="srun --mpi=pmix ...  # or another of `srun --mpi=list`; or pip install --no-binary=mpi4py mpi4py",
            ranks=rank_numbers(alone),
        )


def a02_far_from_gpu(job: AuditedJob, host: AuditedHost, rank: RankFacts) -> Iterator[AuditFinding]:
    """Find a rank none of whose CPUs is on the NUMA node of its GPU."""
    address = host.gpu_address(rank)
    if address is None:
        return
    view = host.hardware
    node, mask = view.node_of(address), host.mask(rank)
    if mask & view.numa_cpus[node]:
        return
    yield AuditFinding(
        severity=Severity.FAIL,
        seen=f"runs on NUMA {listed(view.nodes_of(mask))}, but its GPU {address} is on NUMA {node}",
        fix=near_gpu_fix(host, rank, node),
        certainty=gpu_certainty(rank),
    )


def a03_partly_near(job: AuditedJob, host: AuditedHost, rank: RankFacts) -> Iterator[AuditFinding]:
    """Find a rank whose CPUs are on several NUMA nodes, or only partly on that of its GPU."""
    view, mask = host.hardware, host.mask(rank)
    nodes = view.nodes_of(mask)
    if len(nodes) < 2:
        return
    address = host.gpu_address(rank)
    where = "" if address is None else f", its GPU {address} is on NUMA {view.node_of(address)}"
    if address is not None and view.node_of(address) not in nodes:
        return  # A02
    whole = mask == view.online
    yield AuditFinding(
        severity=Severity.INFORMATION if whole else Severity.WARNING,
        seen=f"{'is not bound: it' if whole else 'its mask'} spans NUMA {listed(nodes)}{where}",
        cost="NCCL narrows its own threads; data loaders and others may allocate memory on the far node"
        if whole
        else "data loaders and other threads may run, and allocate memory, on the far node",
        fix=_spanning_fix(host, rank),
        certainty=Certainty.READ if address is None else gpu_certainty(rank),
    )


def a04_overlap(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find ranks of one node that share cores; ranks that are not bound share the whole node and are not reported."""
    if len(host.ranks) < 2:
        return
    view = host.hardware
    for first, second, cores in _sharing(host):
        one, other = host.mask(first), host.mask(second)
        if one == other == view.online:
            continue
        shared = one & other
        what = f"CPUs {cpusets.format_list(shared)}" if shared else f"the cores of CPUs {cpusets.format_list(cores)}"
        yield AuditFinding(
            severity=Severity.WARNING if one == other else Severity.FAIL,
            place=f"local ranks {first.local_rank},{second.local_rank}",
            seen=f"share {what}" + (", which is all they have" if one == other else ""),
            fix=_overlap_fix(host, first, max(1, view.online.bit_count() // len(host.ranks))),
            ranks=(first.rank, second.rank),
        )


def a05_too_few_cpus(job: AuditedJob, host: AuditedHost, rank: RankFacts) -> Iterator[AuditFinding]:
    """Find a rank with fewer CPUs than its processes need, or than the job requested."""
    count = host.mask(rank).bit_count()
    needed = 1 + job.settings.dataloader_workers
    requested = rank.variables.get("SLURM_CPUS_PER_TASK", "")
    wanted = int(requested) if requested.isdigit() and len(requested) < 6 else 0
    if count >= max(needed, wanted):
        return
    lacks_requested = wanted > count
    has = f"has {count} CPU" + ("" if count == 1 else "s")
    yield AuditFinding(
        severity=Severity.FAIL,
        seen=f"{has} although SLURM_CPUS_PER_TASK={wanted}" if lacks_requested else f"{has} for {needed} processes",
        fix="export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun 22.05 to 23.02 does not inherit sbatch -c"
        if lacks_requested
        else more_cpus_fix(host, rank, needed),
    )


def a06_quota(job: AuditedJob, host: AuditedHost, rank: RankFacts) -> Iterator[AuditFinding]:
    """Find a cgroup whose quota is smaller than the mask, or that lacks CPUs of the mask."""
    mask = host.mask(rank)
    fact = f"rank/{rank.rank}"
    quota = host.known(rank.quota_cpus, "its CPU quota", f"{fact}/quota_cpus")
    if 0 < quota < mask.bit_count():
        yield AuditFinding(
            severity=Severity.WARNING,
            seen=f"has a CPU quota of {quota:g} cores but {mask.bit_count()} CPUs in its mask",
            fix=f"docker update --cpus={mask.bit_count()} CONTAINER  # or resources.limits.cpu of the pod, or "
            f"systemctl set-property SLICE CPUQuota={100 * mask.bit_count()}%: whatever set cpu.max; no option of srun",
        )
    what = "the CPUs of its cgroup"
    outside = mask & ~parsed(host.known(rank.cgroup_cpus, what, f"{fact}/cgroup_cpus"), what)
    if outside:
        yield AuditFinding(
            severity=Severity.WARNING,
            seen=f"its mask has CPUs {cpusets.format_list(outside)}, which its cgroup lacks",
            cost="it runs on fewer CPUs than its mask says",
            fix="srun --cpu-bind=cores ...  # bind within the CPUs of the job",
        )


def a07_memory(job: AuditedJob, host: AuditedHost, rank: RankFacts) -> Iterator[AuditFinding]:
    """Find a rank that may not, or does not, allocate memory on the NUMA node of its GPU or CPUs."""
    view = host.hardware
    if len(view.numa_cpus) < 2:
        return
    address = host.gpu_address(rank)
    homes = [view.node_of(address)] if address is not None else view.nodes_of(host.mask(rank))
    what = f"of its GPU ({homes[0]})" if address is not None else f"of its CPUs ({listed(homes)})"
    fact = f"rank/{rank.rank}"
    nodes = host.known(rank.memory_nodes, "its memory nodes", f"{fact}/memory_nodes", f"{fact}/status")
    allowed = bound = parsed(nodes, "its memory nodes")
    if rank.memory_policy is not None and rank.memory_policy.startswith("bind"):
        bound &= parsed(rank.memory_policy.partition(":")[2], "its memory policy")
    if any(bound >> home & 1 for home in homes):
        host.known(rank.memory_policy, "its memory policy", f"{fact}/memory_policy")
        return
    how = "" if bound == allowed else f" (memory policy {printable(rank.memory_policy or '')})"
    yield AuditFinding(
        severity=Severity.WARNING,
        seen=f"allocates memory only on NUMA {cpusets.format_list(bound) or 'none'}{how}, not on that {what}",
        fix=memory_fix(rank, homes[0] if homes else 0, allowed),
    )


def a10_openmp_binding(job: AuditedJob, host: AuditedHost, rank: RankFacts) -> Iterator[AuditFinding]:
    """Find a rank whose main thread OpenMP binds when torch is imported, which narrows its mask."""
    names = binding_variables(rank.variables)
    if not names:
        return
    mask = host.mask(rank)
    if "KMP_AFFINITY" not in names and _is_within_place(host, mask, rank.variables.get("OMP_PLACES", "")):
        return
    count = mask.bit_count()
    if count < 2 and rank.cgroup_cpus is not None and parsed(rank.cgroup_cpus, "the CPUs of its cgroup") == mask:
        return
    settings = ", ".join(f"{name}={printable(rank.variables[name])}" for name in names)
    yield AuditFinding(
        severity=Severity.INFORMATION if count < 2 else Severity.WARNING,
        seen=f"has 1 CPU, and importing torch may be what narrowed its mask: {settings}"
        if count < 2
        else f"importing torch narrows its mask of {count} CPUs to one place: {settings}",
        fix=unbound_fix(names),
        certainty=Certainty.INFERRED,
    )


def s05_siblings(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find ranks that run on different hardware threads of one core."""
    if len(host.ranks) < 2:
        return
    for first, second, cores in _sharing(host):
        if host.mask(first) & host.mask(second):
            continue  # A04
        yield AuditFinding(
            severity=Severity.WARNING,
            place=f"local ranks {first.local_rank},{second.local_rank}",
            seen=f"run on hardware threads of the same cores (CPUs {cpusets.format_list(cores)})",
            fix=_siblings_fix(host, first),
            ranks=(first.rank, second.rank),
        )


def _sharing(host: AuditedHost) -> Iterator[tuple[RankFacts, RankFacts, int]]:
    """Yield the pairs of ranks that share cores, with the CPUs of those cores."""
    view = host.hardware
    whole = [view.whole_cores(host.mask(rank)) for rank in host.ranks]
    if sum(cores.bit_count() for cores in whole) == sum_of(whole).bit_count():
        return
    for (first, one), (second, other) in combinations(zip(host.ranks, whole, strict=True), 2):
        if one & other:
            yield first, second, one & other


def binding_variables(variables: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that make OpenMP bind threads."""
    # OMP_PROC_BIND may be a list with one policy per nesting level; false switches the other two off.
    policy = variables.get("OMP_PROC_BIND", "").split(",")[0].strip().lower()
    names = ["OMP_PROC_BIND"] if policy in _BINDING_POLICIES else []
    if policy != "false":
        names += [name for name in ("OMP_PLACES", "GOMP_CPU_AFFINITY") if variables.get(name, "").strip()]
    types = {word.strip() for word in variables.get("KMP_AFFINITY", "").lower().split(",")}
    return [*names, "KMP_AFFINITY"] if types & _BINDING_TYPES else names


def _is_within_place(host: AuditedHost, mask: int, places: str) -> bool:
    """Return whether a mask lies within one place; places smaller than sockets and NUMA nodes are not looked at."""
    name = places.strip().lower()
    if name.startswith("numa_domains"):
        return len(host.hardware.nodes_of(mask)) < 2
    if not name.startswith("sockets"):
        return False
    what = "the sockets of the CPUs"
    packages = host.known(host.snapshot.hardware.cpus.packages, what, "cpus/packages")
    return any(not mask & ~parsed(cpus, what) for cpus in packages.values())


def gpu_certainty(rank: RankFacts) -> Certainty:
    """Return how the audit knows which GPU a rank uses."""
    return Certainty.INFERRED if rank.gpu_source == "environment" else Certainty.READ


def _spanning_fix(host: AuditedHost, rank: RankFacts) -> str:
    fix = binding_fix(host, rank, "--distribution=block:block")
    return f"{fix}  # or torchrun --numa-binding=node" if rank.launcher == "slurm" else fix


def _overlap_fix(host: AuditedHost, rank: RankFacts, cpus: int) -> str:
    fix = binding_fix(host, rank, "--cpu-bind=cores", apart=True)
    return f"{fix}  # or -c {cpus} on the srun line itself" if rank.launcher == "slurm" else fix


def unbound_fix(names: list[str]) -> str:
    """Return the line that keeps OpenMP from binding threads by these variables."""
    if names == ["KMP_AFFINITY"]:
        return "unset KMP_AFFINITY  # or export KMP_AFFINITY=none"
    # Intel's and LLVM's OpenMP follow KMP_AFFINITY whatever OMP_PROC_BIND says.
    otherwise = "" if "KMP_AFFINITY" in names else "  # or export OMP_PROC_BIND=false"
    return f"unset {' '.join(names)}{otherwise}"


def _siblings_fix(host: AuditedHost, rank: RankFacts) -> str:
    if len(host.ranks) > len(host.hardware.cores):
        return f"{fewer_ranks_fix(rank, len(host.hardware.cores))}  # the node has {len(host.hardware.cores)} cores"
    if rank.launcher == "slurm":
        return "srun --hint=nomultithread ..."
    return binding_fix(host, rank, "", apart=True)


def listed(numbers: Iterable[int]) -> str:
    """Return numbers separated by commas; `none` for no numbers."""
    return ",".join(map(str, numbers)) or "none"


def rank_numbers(ranks: list[RankFacts]) -> tuple[int, ...]:
    """Return the numbers of some ranks."""
    return tuple(rank.rank for rank in ranks)
