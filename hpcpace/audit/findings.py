"""Findings of rules, equal findings of hosts as one, and fixes that suit the launcher and the state found.

A fix that cannot help costs more than none: srun binds only the ranks that it starts, not those of torchrun, mpiexec
or the script itself; `unset` changes the environment, and no file; no option moves a rank out of the CPUs that its
container has. The masks for `--cpu-bind=mask_cpu` put each rank near its GPU, on whole cores of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from hpcpace.audit import cpusets
from hpcpace.audit.facts import HardwareView, RankFacts, Snapshot, parsed, sum_of
from hpcpace.audit.job import AuditedHost
from hpcpace.audit.tree import Unreadable
from hpcpace.core.hostlist import short_list
from hpcpace.core.text import few


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
    what = "which CPUs the job has"
    return parsed(host.known(rank.cgroup_cpus, what, f"rank/{rank.rank}/cgroup_cpus"), what)


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
    return f"mpiexec --map-by ppr:{most}:node ...  # Open MPI; MPICH: -ppn {most}"


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


CANNOT_DETERMINE = "cannot determine "
"""How every finding of severity U begins; what could not be read, and why, follows."""


class Severity(StrEnum):
    """How bad a finding is, in the order in which findings are printed."""

    FAIL = "F"
    WARNING = "W"
    UNKNOWN = "U"
    INFORMATION = "I"

    @property
    def word(self) -> str:
        """What a finding is called."""
        return {"F": "fail", "W": "warning", "U": "unknown", "I": "note"}[self]


class Certainty(StrEnum):
    """How the audit knows what a finding says."""

    MEASURED = "measured"
    """Counted or timed while the audit ran."""
    READ = "read"
    """Read from the kernel, the driver or the environment."""
    INFERRED = "inferred"
    """Concluded from what was read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditFinding:
    """One problem that a rule found, or a fact that it could not read.

    A rule leaves out its id and, unless they are others, its usual cost and the host, place and ranks that it runs on.

    Attributes:
        rule: id of the rule, like `A02`.
        place: where on the host: `local rank 3`, `GPU 0000:17:00.0`, `mlx5_0 port 1`; empty for the whole host.
        seen: what was read there; the same problem has the same text on every host.
        cost: what the problem costs.
        fix: a line to paste, or to hand to an administrator.
        hosts: names; one until findings are grouped, none if the finding concerns the job as a whole.
        ranks: the affected ranks of the job.
        evidence: the line of a log or file that shows it, with file and line number; empty for what was read elsewhere.
    """

    rule: str = ""
    severity: Severity
    place: str = ""
    seen: str
    cost: str = ""
    fix: str
    certainty: Certainty = Certainty.READ
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    evidence: str = ""

    @property
    def host(self) -> str:
        """Name of the first host; empty if the finding concerns the job as a whole."""
        return self.hosts[0] if self.hosts else ""


def unknown(reason: str, host: str = "", place: str = "") -> AuditFinding:
    """Return the finding for a fact that could not be read; `reason` names the fact, then says why."""
    return AuditFinding(
        severity=Severity.UNKNOWN,
        hosts=(host,) if host else (),
        place=place,
        seen=CANNOT_DETERMINE + reason,
        cost="the problem that this rule looks for may or may not be there",
        fix="",
    )


class Skip(Exception):
    """A rule does not apply to this host or job; the message is the reason."""


_MAX_PLACES = 8
_WITH_DIGITS = re.compile(r"\S*\d\S*")
_MAX_ODD = 4


def grouped(findings: Iterable[AuditFinding]) -> list[AuditFinding]:
    """Return findings in the same order, equal ones of several hosts merged."""
    alike: dict[tuple[str, ...], list[AuditFinding]] = {}
    for finding in findings:
        key = (finding.rule, finding.severity, finding.place, finding.seen, finding.fix)
        alike.setdefault(key, []).append(finding)
    return [
        dataclasses.replace(
            same[0],
            hosts=tuple(dict.fromkeys(host for finding in same for host in finding.hosts)),
            ranks=tuple(sorted({rank for finding in same for rank in finding.ranks})),
        )
        for same in alike.values()
    ]


def blocks(groups: Iterable[AuditFinding]) -> list[list[AuditFinding]]:
    """Return blocks of groups with the same rule, severity and kind of problem, those of most hosts first.

    Two GPUs whose nearest adapters are both NODE have the same kind of problem; a port that is down and one that is
    slow do not.
    """
    made: dict[tuple[Severity, str, str], list[AuditFinding]] = {}
    for group in groups:
        made.setdefault((group.severity, *kind_of(group)), []).append(group)
    return [sorted(block, key=lambda group: -len(group.hosts)) for block in made.values()]


def kind_of(finding: AuditFinding) -> tuple[str, str]:
    """Return the kind of problem of a finding: its rule, and what was seen with every word that has digits masked."""
    return finding.rule, _WITH_DIGITS.sub("#", finding.seen)


def hosts_text(hosts: Sequence[str], all_hosts: Sequence[str]) -> str:
    """Return hosts as a short text: `n3`, `all 16 nodes`, `14 of 16 nodes; odd ones out: n[03,07]`."""
    if len(all_hosts) < 2 or not hosts:
        return ""
    if len(hosts) == len(all_hosts):
        return f"all {len(all_hosts)} nodes"
    others = sorted(set(all_hosts) - set(hosts))
    if len(hosts) > len(all_hosts) / 2 and len(others) <= _MAX_ODD:
        return f"{len(hosts)} of {len(all_hosts)} nodes; odd ones out: {short_list(others)}"
    if len(hosts) == 1:
        return short_list(hosts)
    return f"{len(hosts)} of {len(all_hosts)} nodes: {_cut(short_list(hosts))}"


def place_text(block: Sequence[AuditFinding]) -> str:
    """Return the places of a block: `local rank 0`, `local rank 0, 1, 2`, at most eight and how many more."""
    places = list(dict.fromkeys(group.place for group in block if group.place))
    if len(places) <= 1:
        return "".join(places)
    prefix = _common_words(places)
    return few([places[0], *(place[len(prefix) :] for place in places[1:])], _MAX_PLACES)


def _common_words(places: Sequence[str]) -> str:
    first = places[0].split(" ")
    for length in range(len(first) - 1, 0, -1):
        prefix = " ".join(first[:length]) + " "
        if all(place.startswith(prefix) for place in places):
            return prefix
    return ""


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
