"""Fixes that depend on the launcher and on the state found: a line that cannot help costs more than none.

srun binds the ranks that it starts, and none of those of torchrun, mpiexec or the script itself; `unset` changes the
environment, and no file; no option moves a rank out of the CPUs that its container has.
"""

from __future__ import annotations

from hpcpace.audit import cpusets
from hpcpace.audit.facts import RankFacts
from hpcpace.audit.hardware import parsed
from hpcpace.audit.job import AuditedHost
from hpcpace.audit.masks import bind_masks, bind_option
from hpcpace.audit.tree import Unreadable


def binding_fix(host: AuditedHost, rank: RankFacts, otherwise: str, *, apart: bool = False) -> str:
    """Return the line that binds ranks near their GPUs, on cores of their own, for the launcher that started them.

    Args:
        host: the node.
        rank: one of its ranks.
        otherwise: options of srun where no masks can be proposed.
        apart: whether the problem is that ranks share cores, not that they are far from their GPUs.
    """
    if rank.launcher == "torchrun":
        return f"torchrun --numa-binding={'exclusive' if apart else 'node'} ..."
    if rank.launcher == "pmi":
        place = "core" if apart else "numa"
        return f"mpiexec --map-by {place} --bind-to {place} ...  # Open MPI; MPICH: -bind-to {place}"
    try:
        masks = bind_masks(host)
    except Unreadable:
        masks = ()
    if rank.launcher == "slurm":
        return f"srun {bind_option(masks) if masks else otherwise} ..."
    cpus = "; ".join(map(cpusets.format_list, masks)) or "cores near its GPU"
    if rank.world_size == 1:
        return f"taskset --cpu-list {cpus} ..." if masks else f"numactl --cpunodebind=NODE ...  # {cpus}"
    return f"os.sched_setaffinity(0, ...)  # in each rank, by local rank: {cpus}"


def near_gpu_fix(host: AuditedHost, rank: RankFacts, node: int) -> str:
    """Return the line that moves a rank to the NUMA node of its GPU, or gives the job CPUs there if it has none."""
    if rank.cgroup_cpus is not None:
        allowed = parsed(rank.cgroup_cpus, "the CPUs of its cgroup")
        if not allowed & host.hardware.numa_cpus[node]:
            if rank.launcher == "slurm":
                return f"sbatch --exclusive ...  # the job has no CPU on NUMA {node}, so no binding can help"
            own = cpusets.format_list(host.hardware.numa_cpus[node])
            return f"docker update --cpuset-cpus={own} CONTAINER  # or whatever set cpuset.cpus: no CPU on NUMA {node}"
    return binding_fix(host, rank, "--gpu-bind=closest, or --distribution=block:block")


def more_cpus_fix(host: AuditedHost, rank: RankFacts, needed: int) -> str:
    """Return the line that gives each rank some CPUs, if the node has as many."""
    num_ranks = max(1, len(host.ranks))
    try:
        online = host.hardware.online.bit_count()
    except Unreadable:
        online = needed * num_ranks
    if needed * num_ranks > online:
        return f"# fewer data loader workers or ranks: {num_ranks} x {needed} processes, and the node has {online} CPUs"
    if rank.launcher == "slurm":
        return f"srun -c {needed} ..."
    return f"sbatch -c {needed * num_ranks} ...  # or whatever restricts the CPUs of {rank.launcher}'s ranks"


def fewer_ranks_fix(rank: RankFacts, most: int) -> str:
    """Return the line that starts at most some ranks per node."""
    if rank.launcher == "slurm":
        return f"srun --ntasks-per-node={most} ..."
    if rank.launcher == "torchrun":
        return f"torchrun --nproc-per-node={most} ..."
    return f"mpiexec -n {most} ...  # per node"


def memory_fix(rank: RankFacts, home: int, allowed: int) -> str:
    """Return the line that lets a rank allocate on a NUMA node.

    Args:
        rank: the rank.
        home: number of the node.
        allowed: set of the nodes that its cgroup allows.
    """
    if not allowed >> home & 1:
        wanted = cpusets.format_list(allowed | 1 << home)
        return (
            f"docker update --cpuset-mems={wanted} CONTAINER  # or whatever set cpuset.mems; srun --mem-bind and "
            "numactl stay inside it"
        )
    if rank.launcher == "slurm":
        return f"srun --mem-bind=local ...  # or numactl --membind={home}"
    return f"numactl --membind={home} ..."


def unset_fix(rank: RankFacts, name: str) -> str:
    """Return the line that removes a variable from where NCCL takes it: the environment, or one of NCCL's files."""
    if name in rank.variables:
        return f"unset {name}"
    if name in rank.user_conf:
        return f"sed -i '/^{name} *=/d' ~/.nccl.conf"
    return f"sed -i '/^{name} *=/d' /etc/nccl.conf  # admin"
