"""All rules of the audit in the order in which they run, and running them over a job.

A rule names what it checks, from which facts, why, and the fix. It raises Unreadable if a fact that it needs is
missing: that becomes a finding of severity U, never a silent pass. It raises Skip if it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpcpace.audit.findings import AuditFinding, Severity, Skip, unknown
from hpcpace.audit.job import AuditedHost, AuditedJob, rank_place
from hpcpace.audit.rules import affinity, devices, hosts, network
from hpcpace.audit.tree import Unreadable
from hpcpace.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        id: what `--rules`, `--ignore`, `--fail-on` and `explain` take, like `A02`.
        scope: what the rule runs on, once for each: `job`, `host`, `rank`, `gpu` or `link` (GPUs and adapters).
        title: what it checks.
        severities: letters that its findings can have, besides U.
        reads: where its facts come from.
        why: what goes wrong where it finds something, and when it is how severe.
        fix: what to do.
        check: the function that yields the findings.
    """

    id: str
    scope: str
    title: str
    severities: str
    reads: str
    why: str
    fix: str
    check: Callable[..., Iterator[AuditFinding]]


RULES: tuple[Rule, ...] = (
    Rule(
        id="A01",
        scope="host",
        title="MPI singletons",
        severities="F",
        reads="the launcher's variables, and the size of MPI_COMM_WORLD (with --mpi)",
        why="The MPI library does not support the process-management interface (PMI) of this srun, so each rank "
        "starts as a world of one: every rank computes the whole job and overwrites the others' files.",
        fix="srun --mpi=pmix, or an mpi4py built against the site's MPI",
        check=affinity.a01_mpi_singletons,
    ),
    Rule(
        id="H01",
        scope="job",
        title="nodes that differ",
        severities="FW",
        reads="driver, NCCL, GPUs, processor, NUMA, kernel, NIC firmware, PCI map and CPU masks of all hosts; [audit] "
        "expect_*",
        why="A synchronous job runs as fast as its slowest node, and mixed driver or NCCL versions hang or fail.",
        fix="#SBATCH --exclude=NODES, and have them brought in line with the others",
        check=hosts.h01_differing,
    ),
    Rule(
        id="A02",
        scope="rank",
        title="rank far from its GPU",
        severities="F",
        reads="the rank's CPU mask; numa_node of its GPU, or its local_cpus",
        why="No CPU of the rank is on the NUMA node of its GPU, so every copy and every kernel launch crosses the "
        "NUMA interconnect.",
        fix="srun --cpu-bind=mask_cpu:... as printed by the audit, --gpu-bind=closest or --distribution=block:block",
        check=affinity.a02_far_from_gpu,
    ),
    Rule(
        id="A03",
        scope="rank",
        title="rank only partly near its GPU",
        severities="WI",
        reads="the rank's CPU mask; NUMA nodes",
        why="Threads may run on the far NUMA node and allocate memory there. A mask that covers the whole node is "
        "information only, because NCCL narrows the affinity of its own threads.",
        fix="torchrun --numa-binding=node, or the mask printed by the audit",
        check=affinity.a03_partly_near,
    ),
    Rule(
        id="A04",
        scope="host",
        title="ranks that share cores",
        severities="FW",
        reads="CPU masks of all ranks of a node; thread_siblings_list",
        why="Two ranks that compute on one core delay each other, at different moments in each step: jitter. "
        "Identical masks (W) leave the choice of core to the kernel; a partial overlap (F) is always a mistake. "
        "Masks that cover the whole node are ignored.",
        fix="srun -c N on the srun line itself, or the mask printed by the audit",
        check=affinity.a04_overlap,
    ),
    Rule(
        id="A05",
        scope="rank",
        title="too few CPUs",
        severities="F",
        reads="the rank's CPU mask; SLURM_CPUS_PER_TASK; [audit] dataloader_workers",
        why="srun of Slurm 22.05 to 23.02 does not inherit -c from sbatch, so each rank gets one CPU for itself and "
        "its data loaders.",
        fix="export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
        check=affinity.a05_too_few_cpus,
    ),
    Rule(
        id="A06",
        scope="rank",
        title="CPU quota and cgroup",
        severities="W",
        reads="cpu.max (or cfs_quota_us) and cpuset.cpus.effective, from the rank's cgroup up",
        why="When the quota is smaller than the mask, the kernel stops all threads for the rest of each period, and "
        "step times jump by up to 100 ms.",
        fix="raise the limit of the container, pod or systemd slice that sets cpu.max; no option of srun does",
        check=affinity.a06_quota,
    ),
    Rule(
        id="A07",
        scope="rank",
        title="memory on the far NUMA node",
        severities="W",
        reads="Mems_allowed_list; the memory policy in numa_maps",
        why="The memory that the rank copies to its GPU is on the other side of the NUMA interconnect.",
        fix="srun --mem-bind=local or numactl --membind=N; the container's cpuset.mems where that excludes the node",
        check=affinity.a07_memory,
    ),
    Rule(
        id="A08",
        scope="host",
        title="which rank uses which GPU",
        severities="FI",
        reads="NVML, or the driver's list and CUDA_VISIBLE_DEVICES",
        why="Two ranks on one GPU take turns, and NCCL refuses them; a rank without a GPU trains on the CPU. Sharing "
        "through MPS or MIG is intended (I), and so may be another order of GPUs (I).",
        fix="srun --gpus-per-node=N, and torch.cuda.set_device(local_rank)",
        check=devices.a08_shared_gpu,
    ),
    Rule(
        id="A09",
        scope="host",
        title="GPUs hidden from each other",
        severities="W",
        reads="the GPUs that each rank sees; SLURM_GPUS_PER_TASK, SLURM_TRES_PER_TASK",
        why="With --gpus-per-task each rank sees only its own GPU, so CUDA IPC and P2P between ranks can fail.",
        fix="srun --gpus-per-node=N --gpu-bind=none",
        check=devices.a09_ipc,
    ),
    Rule(
        id="A10",
        scope="rank",
        title="OpenMP variables that narrow the mask",
        severities="WI",
        reads="OMP_PROC_BIND, OMP_PLACES, GOMP_CPU_AFFINITY, KMP_AFFINITY; the rank's CPU mask; "
        "cpuset.cpus.effective of its cgroup; sockets and NUMA nodes",
        why="When torch is imported, they make OpenMP bind the main thread to one place, often one CPU, and data "
        "loader workers and other threads that it starts inherit that mask. A rank that has one CPU already is "
        "information only: OpenMP may have narrowed its mask, or its launcher.",
        fix="unset them, or export OMP_PROC_BIND=false",
        check=affinity.a10_openmp_binding,
    ),
    Rule(
        id="N01",
        scope="gpu",
        title="GPU far from every adapter",
        severities="FW",
        reads="the PCI tree in sysfs; active ports",
        why="NCCL uses GPUDirect RDMA only up to PXB. Beyond that, every message goes through host memory, and "
        "between NUMA nodes (SYS, F) it also crosses the NUMA interconnect. On GPUs attached by NVLink-C2C this "
        "is normal and not reported.",
        fix="check BIOS settings and slot map; set NCCL_NET_GDR_LEVEL only after measuring",
        check=network.n01_far_nic,
    ),
    Rule(
        id="N02",
        scope="host",
        title="adapters shared unevenly",
        severities="W",
        reads="the PCI tree in sysfs; NCCL_IB_HCA",
        why="GPUs that map to the same adapter share its rate while others idle. An adapter far from all GPUs "
        "(storage, management) slows down whatever NCCL sends over it.",
        fix="NCCL_IB_HCA=^NAME, or a different slot map",
        check=network.n02_shared_nic,
    ),
    Rule(
        id="N03",
        scope="rank",
        title="variables that choose adapters",
        severities="FW",
        reads="NCCL_IB_HCA, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, UCX_NET_DEVICES and /etc/nccl.conf; /sys/class; "
        "/proc/net/route, ipv6_route",
        why="A setting from another cluster overrides NCCL's own choice: it matches nothing (F), selects an interface "
        "without a route (F), or selects the management network (W).",
        fix="unset it, or name the fast adapter",
        check=network.n03_selections,
    ),
    Rule(
        id="N04",
        scope="rank",
        title="sockets despite RDMA",
        severities="F",
        reads="NCCL_IB_DISABLE, NCCL_NET, /dev/infiniband, the locked-memory limit",
        why="NCCL silently falls back to NET/Socket, at a fraction of the rate.",
        fix="unset the variable; give the container access to /dev/infiniband; ulimit -l unlimited",
        check=network.n04_sockets,
    ),
    Rule(
        id="N05",
        scope="job",
        title="ports down or slow",
        severities="FW",
        reads="state, phys_state and rate of RDMA ports; speed and shaping (netlink) of interfaces; all hosts",
        why="One slow port holds up every collective. A port that is down on all hosts may be unused on purpose (W).",
        fix="ibdiagnet, mlxlink; reseat or replace the cable",
        check=network.n05_ports,
    ),
    Rule(
        id="N06",
        scope="job",
        title="MTU",
        severities="FW",
        reads="mtu of interfaces that are up, link_layer; all hosts",
        why="Where hosts differ (F), large packets are dropped and NCCL hangs (nccl#1524, #1957). RDMA over Ethernet "
        "needs an MTU of about 4200 to send 4096 bytes at once (W below that).",
        fix="ip link set dev NAME mtu N, the same on all hosts and switches",
        check=network.n06_mtu,
    ),
    Rule(
        id="N07",
        scope="rank",
        title="RoCE address index",
        severities="W",
        reads="NCCL_IB_GID_INDEX; gid_attrs/types",
        why="NCCL_IB_GID_INDEX selects a RoCE v1 address, which is not routed, or an empty entry.",
        fix="unset NCCL_IB_GID_INDEX: NCCL 2.21 and newer choose the index themselves",
        check=network.n07_gid,
    ),
    Rule(
        id="N08",
        scope="host",
        title="errors on ports and interfaces",
        severities="WF",
        reads="counters, hw_counters and statistics; twice with --probe",
        why="A bad cable or a congested fabric shows in counters long before a link drops. Counts since boot above "
        "the thresholds in [audit] are W; an RDMA port's count that grows during the probe window is F.",
        fix="ibdiagnet, mlxlink, ethtool -S; reseat or replace the cable",
        check=network.n08_errors,
    ),
    Rule(
        id="N09",
        scope="host",
        title="no GPUDirect RDMA",
        severities="FW",
        reads="/sys/module, the holders of ib_core, /proc/driver/nvidia/version, the kernel release, the NCCL version",
        why="Without nvidia_peermem or dma-buf, every message between nodes goes through host memory: W on one node, "
        "F on several.",
        fix="modprobe nvidia-peermem, or NVIDIA's open kernel module with Linux 5.12 or newer",
        check=network.n09_gpudirect,
    ),
    Rule(
        id="P01",
        scope="link",
        title="PCIe link with too few lanes",
        severities="F",
        reads="current_link_width and max_link_width of the device and of its slot",
        why="NCCL reads the maximum width, so it never notices a link that trained at half of it. P03 reports slots "
        "that are narrower than their card.",
        fix="reseat the card; check riser and bifurcation",
        check=devices.p01_width,
    ),
    Rule(
        id="P02",
        scope="link",
        title="PCIe link that is too slow",
        severities="FW",
        reads="current_link_speed and max_link_speed of the device and of its slot; NVML's utilization",
        why="A NIC link below its speed is F. An idle GPU lowers its link speed on its own, so a GPU below the "
        "maximum is W while it is busy and U while it is idle.",
        fix="reseat the card; check riser, BIOS and retimers",
        check=devices.p02_speed,
    ),
    Rule(
        id="P03",
        scope="job",
        title="devices of one kind in unequal slots",
        severities="WI",
        reads="max_link_width and max_link_speed of devices and slots; all hosts",
        why="An x16 card in an x8 slot trains at x8 without any message, and the other ranks wait for it. Where all "
        "cards of a kind are in such slots, it is information only.",
        fix="move the card to a full-width slot",
        check=devices.p03_unequal,
    ),
    Rule(
        id="P04",
        scope="link",
        title="corrected PCIe errors",
        severities="W",
        reads="aer_dev_correctable; NVML's replay counter",
        why="Retransmitted packets are the sign of a marginal link.",
        fix="reseat the card; swap riser or slot",
        check=devices.p04_replays,
    ),
    Rule(
        id="P05",
        scope="host",
        title="ACS routes peer-to-peer traffic through the processor",
        severities="WI",
        reads="the bridges' ACS control (root only); IOMMU groups otherwise",
        why="With request redirect on, traffic from a GPU to an adapter on the same switch is routed through the root "
        "complex. Without root, separate IOMMU groups of neighbours are W, and missing groups are U. In virtual "
        "machines ACS must stay on (I).",
        fix="lspci -vvv | grep ACSCtl must show SrcValid- and ReqRedir-; rdma_topo check",
        check=devices.p05_acs,
    ),
    Rule(
        id="P06",
        scope="link",
        title="hidden NUMA node",
        severities="W",
        reads="numa_node, local_cpus; the number of NUMA nodes",
        why="The firmware or the virtual machine does not report where a device is attached; -1 means unknown and is "
        "never taken for node 0. Where local_cpus has the CPUs of one NUMA node, the device is there.",
        fix="NCCL_TOPO_FILE for this type of machine",
        check=devices.p06_hidden_numa,
    ),
    Rule(
        id="P07",
        scope="job",
        title="NVLinks",
        severities="F",
        reads="NVML: the state of each link and of the fabric manager's registration; all GPUs of the same model",
        why="One GPU with fewer active links slows down every collective within the node. Behind NVLink switches, a "
        "GPU can compute only after the fabric manager has registered it.",
        fix="nvidia-smi nvlink -s; check the fabric manager",
        check=devices.p07_nvlink,
    ),
    Rule(
        id="P08",
        scope="host",
        title="GPU clocks, power and state",
        severities="FW",
        reads="NVML: throttle reasons, power limit, application clocks, ECC, persistence",
        why="All ranks wait for a GPU that its hardware slows down (F), or that is capped (W).",
        fix="check cooling and power; nvidia-smi -rac, -pl, -pm",
        check=devices.p08_state,
    ),
    Rule(
        id="S01",
        scope="host",
        title="frequency governor",
        severities="W",
        reads="scaling_governor, scaling_driver",
        why="Governors other than performance raise the clock only after load has arrived. powersave with "
        "intel_pstate or amd-pstate-epp is fine, because there the processor chooses.",
        fix="cpupower frequency-set -g performance, or srun --cpu-freq=performance",
        check=hosts.s01_governor,
    ),
    Rule(
        id="S02",
        scope="host",
        title="NUMA balancing on a GPU node",
        severities="W",
        reads="/proc/sys/kernel/numa_balancing",
        why="The kernel unmaps pages to find out who uses them, which stalls copies from those pages.",
        fix="echo 0 > /proc/sys/kernel/numa_balancing",
        check=hosts.s02_numa_balancing,
    ),
    Rule(
        id="S03",
        scope="host",
        title="transparent huge pages",
        severities="I",
        reads="/sys/kernel/mm/transparent_hugepage",
        why="Reports the state only: the best setting depends on the job.",
        fix="madvise, if measurements support it",
        check=hosts.s03_huge_pages,
    ),
    Rule(
        id="S04",
        scope="host",
        title="threads",
        severities="WI",
        reads="OMP_NUM_THREADS, MKL_NUM_THREADS; CPU masks",
        why="When all ranks together start more threads than they have CPUs, the threads wait for each other (W). "
        "Unless OMP_NUM_THREADS is set, each rank starts one thread per CPU of its mask (I where they fit).",
        fix="export OMP_NUM_THREADS=N",
        check=hosts.s04_threads,
    ),
    Rule(
        id="S05",
        scope="host",
        title="ranks on hardware threads of one core",
        severities="W",
        reads="CPU masks; thread_siblings_list",
        why="Two ranks on one core each get about half of it.",
        fix="srun --hint=nomultithread",
        check=affinity.s05_siblings,
    ),
    Rule(
        id="S06",
        scope="host",
        title="shared memory and open files",
        severities="W",
        reads="the mount of /dev/shm; limits of the ranks",
        why="Containers start with 64 MB of /dev/shm, which is too little for NCCL and data loaders. N04 checks "
        "locked memory.",
        fix="--shm-size or --ipc=host; ulimit -n",
        check=hosts.s06_limits,
    ),
    Rule(
        id="C01",
        scope="host",
        title="debug variables",
        severities="W",
        reads="the ranks' environment, /etc/nccl.conf, ~/.nccl.conf",
        why="NCCL's manual describes them for debugging: they override what NCCL would choose for the message size "
        "and topology.",
        fix="unset them",
        check=hosts.c01_debug_variables,
    ),
    Rule(
        id="C02",
        scope="job",
        title="transports that NCCL chose",
        severities="W",
        reads="an NCCL_DEBUG=INFO log (--nccl-log)",
        why="Connections over shared memory within a node, or over sockets between nodes despite RDMA, are slower "
        "than the hardware allows.",
        fix="unset the variables that disable P2P or RDMA",
        check=hosts.c02_log,
    ),
    Rule(
        id="H02",
        scope="job",
        title="placement in the network",
        severities="WI",
        reads="SLURM_TOPOLOGY_ADDR; [audit] nodes_per_leaf",
        why="Traffic between leaf switches shares their uplinks. W where fewer leaves would be enough, I where that "
        "is not known.",
        fix="sbatch --switches=N or --segment=N",
        check=hosts.h02_placement,
    ),
)


_ORDER = {severity: index for index, severity in enumerate(Severity)}


@dataclass(frozen=True, kw_only=True)
class RuleRun:
    """The outcome of running rules.

    Attributes:
        num_rules: rules that were to run.
        findings: the most severe first.
        skipped: by rule id, why the rule applies to no host of the job.
    """

    num_rules: int
    findings: tuple[AuditFinding, ...]
    skipped: dict[str, str]


def run_rules(job: AuditedJob, ids: Collection[str] | None = None) -> RuleRun:
    """Run rules over all hosts of a job.

    Args:
        job: the hosts.
        ids: rules to run; all by default. Those in `settings.ignore` never run.

    Raises:
        UsageError: an id is unknown.
    """
    check_ids([*(ids or ()), *job.settings.ignore])
    chosen = [rule for rule in RULES if (ids is None or rule.id in ids) and rule.id not in job.settings.ignore]
    findings: list[AuditFinding] = []
    skipped: dict[str, str] = {}
    for rule in chosen:
        applied = False
        for outcome in _run(rule, job):
            if isinstance(outcome, str):
                skipped[rule.id] = outcome
            else:
                applied = True
                findings += outcome
        if applied:
            skipped.pop(rule.id, None)
    return RuleRun(num_rules=len(chosen), findings=tuple(sorted(findings, key=_rank_of)), skipped=skipped)


def check_ids(ids: Iterable[str]) -> None:
    """Refuse unknown rule ids.

    Raises:
        UsageError: an id is unknown; the message lists the valid ones.
    """
    for rule_id in ids:
        if rule_id not in BY_ID:
            raise UsageError(f"there is no rule {rule_id!r}: the rules are {' '.join(BY_ID)}")


def _rank_of(finding: AuditFinding) -> tuple[int, int]:
    return _ORDER[finding.severity], _NUMBER[finding.rule]


def _run(rule: Rule, job: AuditedJob) -> Iterator[list[AuditFinding] | str]:
    """Yield, for each item of the rule's scope, its findings, or why the rule does not apply to it."""
    if rule.scope == "job":
        yield _guarded(rule, None, "", (), rule.check(job))
        return
    for host in job.hosts:
        try:
            items = _ITEMS[rule.scope](host)
        except Unreadable as error:
            yield [unknown(rule.id, host.name, "", host.explain(error))]
            continue
        for place, ranks, arguments in items:
            yield _guarded(rule, host, place, ranks, rule.check(job, host, *arguments))


def _guarded(
    rule: Rule, host: AuditedHost | None, place: str, ranks: tuple[int, ...], findings: Iterator[AuditFinding]
) -> list[AuditFinding] | str:
    made: list[AuditFinding] = []
    try:
        for finding in findings:
            made.append(finding)
    except Unreadable as error:
        text = str(error) if host is None else host.explain(error)
        made.append(unknown(rule.id, "" if host is None else host.name, place, text, ranks))
    except Skip as reason:
        return str(reason)
    return made


_Items = Sequence[tuple[str, tuple[int, ...], tuple[Any, ...]]]


def _of_host(host: AuditedHost) -> _Items:
    return [("", (), ())]


def _of_ranks(host: AuditedHost) -> _Items:
    return [(rank_place(rank), (rank.rank,), (rank,)) for rank in host.ranks]


def _of_gpus(host: AuditedHost) -> _Items:
    gpus = host.hardware.of_kind("gpu")
    return [(f"GPU {device.address}", (), (device,)) for device in gpus]


def _of_links(host: AuditedHost) -> _Items:
    nics = [(f"NIC {device.address}", (), (device,)) for device in host.hardware.of_kind("nic")]
    return [*_of_gpus(host), *nics]


_ITEMS: dict[str, Callable[[AuditedHost], _Items]] = {
    "host": _of_host,
    "rank": _of_ranks,
    "gpu": _of_gpus,
    "link": _of_links,
}

BY_ID = {rule.id: rule for rule in RULES}
_NUMBER = {rule.id: number for number, rule in enumerate(RULES)}
