"""The `--cpu-bind=mask_cpu:...` that the audit proposes: each rank near its GPU, on whole cores of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache

from hpcpace.audit import cpusets
from hpcpace.audit.facts import RankFacts, Snapshot
from hpcpace.audit.hardware import HardwareView, parsed, sum_of
from hpcpace.audit.job import AuditedHost
from hpcpace.audit.tree import Unreadable


def bind_masks(host: AuditedHost, num_tasks: int | None = None, *, near_gpus: bool = True) -> tuple[int, ...]:
    """Return the masks proposed for the ranks of a node, in order of local rank.

    A rank gets cores of the NUMA node of its GPU. All ranks of a NUMA node get equally many, and neighbouring cores, so
    that they do not share caches. Ranks without a GPU are distributed over the NUMA nodes in blocks. CPUs outside the
    job's cgroup are not used, nor are the slow cores of a hybrid processor if the fast ones are enough.

    Args:
        host: the node.
        num_tasks: ranks to plan for, local rank i on the i-th GPU; by default the ranks of the snapshot.
        near_gpus: whether ranks follow their GPUs; without, they are distributed as ranks without a GPU.

    Raises:
        Unreadable: a fact that this needs is missing, or there are fewer cores than ranks.
    """
    key = (num_tasks, near_gpus)
    if key not in host.masks:
        host.masks[key] = _bind_masks(host, num_tasks, near_gpus)
    return host.masks[key]


def gpu_nodes(host: AuditedHost, num_tasks: int | None = None) -> tuple[int | None, ...]:
    """Return the NUMA node of the GPU of each rank that `bind_masks` plans for; None for a rank without a GPU.

    Raises:
        Unreadable: it is not known which GPU a rank uses, or where a GPU is.
    """
    view = host.hardware
    if num_tasks is None:
        return tuple(_home(host, rank) for rank in _by_local_rank(host))
    gpus = view.of_kind("gpu") if host.has_gpus else []
    return tuple(view.node_of(gpus[index % len(gpus)].address) if gpus else None for index in range(num_tasks))


def _bind_masks(host: AuditedHost, num_tasks: int | None, near_gpus: bool) -> tuple[int, ...]:
    ranks = _by_local_rank(host)
    allowed = sum_of(_cgroup(host, rank) for rank in ranks) or host.hardware.online
    count = len(ranks) if num_tasks is None else num_tasks
    homes = gpu_nodes(host, num_tasks) if near_gpus else (None,) * count
    return _planned(host.hardware, allowed & host.hardware.online, homes)


def _by_local_rank(host: AuditedHost) -> list[RankFacts]:
    return sorted(host.ranks, key=lambda rank: rank.local_rank)


def bind_option(masks: Sequence[int]) -> str:
    """Return the srun option for some masks."""
    return "--cpu-bind=mask_cpu:" + ",".join(map(cpusets.format_mask, masks))


def with_masks(snapshot: Snapshot, masks: Sequence[int]) -> Snapshot:
    """Return a snapshot whose ranks have the given masks, in order of local rank."""
    ranks = sorted(snapshot.ranks, key=lambda rank: rank.local_rank)
    bound = [dataclasses.replace(rank, cpus=cpusets.format_list(mask)) for rank, mask in zip(ranks, masks, strict=True)]
    return dataclasses.replace(snapshot, ranks=tuple(sorted(bound, key=lambda rank: rank.rank)))


def _cgroup(host: AuditedHost, rank: RankFacts) -> int:
    if rank.cgroup_cpus is None:
        raise host.unreadable("which CPUs the job has", f"rank/{rank.rank}/cgroup_cpus")
    return parsed(rank.cgroup_cpus, "which CPUs the job has")


def _home(host: AuditedHost, rank: RankFacts) -> int | None:
    address = host.gpu_address(rank)
    return None if address is None else host.hardware.node_of(address)


@lru_cache(maxsize=1024)
def _planned(view: HardwareView, allowed: int, homes: tuple[int | None, ...]) -> tuple[int, ...]:
    cores = [core & allowed for core in view.cores if core & allowed]
    fast = [core for core in cores if core & view.fast]
    cores = sorted(fast if len(fast) >= len(homes) else cores, key=lambda core: core & -core)
    if None in homes:
        homes = _distributed(view, cores, len(homes))
    masks: dict[int, int] = {}
    for node in sorted({home for home in homes if home is not None}):
        own = [core for core in cores if core & view.numa_cpus.get(node, 0)]
        tasks = [task for task, home in enumerate(homes) if home == node]
        each = len(own) // len(tasks)
        if not each:
            raise Unreadable(f"masks for {len(tasks)} ranks on NUMA node {node}: it has {len(own)} cores")
        for index, task in enumerate(tasks):
            masks[task] = sum_of(own[index * each : (index + 1) * each])
    return tuple(masks[task] for task in range(len(homes)))


def _distributed(view: HardwareView, cores: Sequence[int], num_tasks: int) -> tuple[int, ...]:
    """Return a NUMA node for each of some ranks without a GPU: in blocks, in proportion to the nodes' cores."""
    sizes: Mapping[int, int] = {
        node: sum(1 for core in cores if core & cpus) for node, cpus in sorted(view.numa_cpus.items())
    }
    total = sum(sizes.values())
    if total < num_tasks:
        raise Unreadable(f"masks for {num_tasks} ranks: the job has {total} cores")
    homes: list[int] = []
    before = 0
    for node, size in sizes.items():
        before += size
        homes += [node] * (before * num_tasks // total - len(homes))
    return tuple(homes)
