"""All rules in the order in which they run: what each checks, why, from which facts, and the fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpcpace.audit.findings import AuditFinding
from hpcpace.audit.rules import adapters, affinity, choices, gpu_state, gpus, hosts, pcie, ports, system


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        id: by which it is ignored, failed on and explained.
        scope: what it is asked about, once each: `job`, `host`, `rank`, `gpu` or `link` (GPUs and adapters).
        title: what it checks.
        severities: letters that its findings can have, besides U.
        reads: where its facts come from.
        why: what goes wrong where it finds something, and how that is known.
        fix: what to do.
        check: the function.
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
        reads="the launcher's variables, and the size of MPI's world (--mpi)",
        why="The MPI library does not speak the process management of this srun, so each rank starts a world of its "
        "own; all of them compute the whole job and overwrite each other's files.",
        fix="srun --mpi=pmix, or an mpi4py built with the site's MPI",
        check=affinity.a01_mpi_singletons,
    ),
    Rule(
        id="H01",
        scope="job",
        title="nodes that differ",
        severities="FW",
        reads="driver, NCCL, GPUs, processor, NUMA, kernel, NIC firmware, PCI map and masks of all hosts; "
        "[audit] expect_*",
        why="A synchronous job runs as fast as its slowest node; mixed drivers and NCCL versions hang or fail.",
        fix="#SBATCH --exclude=NODES, and have them brought to the state of the others",
        check=hosts.h01_differing,
    ),
    Rule(
        id="A02",
        scope="rank",
        title="rank far from its GPU",
        severities="F",
        reads="the rank's mask; numa_node of its GPU",
        why="No CPU of the rank is on the NUMA node of its GPU: every copy and launch crosses the processor's link.",
        fix="srun --cpu-bind=mask_cpu:... as the audit prints it, --gpu-bind=closest or --distribution=block:block",
        check=affinity.a02_far_from_gpu,
    ),
    Rule(
        id="A03",
        scope="rank",
        title="rank only partly near its GPU",
        severities="WI",
        reads="the rank's mask; NUMA nodes",
        why="Threads may run on, and take memory of, the far node. A mask of the whole node is information only: NCCL "
        "narrows its own threads itself.",
        fix="torchrun --numa-binding=node, or the mask that the audit prints",
        check=affinity.a03_partly_near,
    ),
    Rule(
        id="A04",
        scope="host",
        title="ranks that share cores",
        severities="FW",
        reads="masks of all ranks of a node; thread_siblings_list",
        why="Two ranks that compute on one core delay each other, at other moments in each step: jitter. "
        "Identical masks "
        "(W) leave the choice to the kernel; a partial overlap (F) is always a mistake. Masks of the whole node do not "
        "count.",
        fix="srun -c N, given to srun itself, or the mask that the audit prints",
        check=affinity.a04_overlap,
    ),
    Rule(
        id="A05",
        scope="rank",
        title="too few CPUs",
        severities="F",
        reads="the rank's mask; SLURM_CPUS_PER_TASK; [audit] dataloader_workers",
        why="srun of Slurm 22.05 to 23.02 does not inherit -c from sbatch: each rank gets one CPU, for itself and its "
        "data loaders.",
        fix="export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
        check=affinity.a05_too_few_cpus,
    ),
    Rule(
        id="A06",
        scope="rank",
        title="CPU quota and cgroup",
        severities="W",
        reads="cpu.max (or cfs_quota_us) and cpuset.cpus.effective, from the rank's cgroup up",
        why="With a quota below the mask, the kernel stops all threads for the rest of each period; the step time gets "
        "jumps of up to 100 ms.",
        fix="ask for as many CPUs as the mask has, or have the quota lifted",
        check=affinity.a06_quota,
    ),
    Rule(
        id="A07",
        scope="rank",
        title="memory of the far node",
        severities="W",
        reads="Mems_allowed_list; the policy in numa_maps",
        why="Memory that the rank copies to its GPU lies beyond the processor's link.",
        fix="srun --mem-bind=local, or numactl --membind=N",
        check=affinity.a07_memory,
    ),
    Rule(
        id="A08",
        scope="host",
        title="which rank uses which GPU",
        severities="FI",
        reads="NVML, or the driver's list and CUDA_VISIBLE_DEVICES",
        why="Two ranks on a GPU take turns, and NCCL refuses them; a rank without one trains on the CPU. MPS and "
        "MIG are "
        "meant (I), and so may another order be (I).",
        fix="srun --gpus-per-node=N, and torch.cuda.set_device(local_rank)",
        check=gpus.a08_shared_gpu,
    ),
    Rule(
        id="A09",
        scope="host",
        title="GPUs hidden from each other",
        severities="W",
        reads="GPUs that each rank sees; SLURM_GPUS_PER_TASK, SLURM_TRES_PER_TASK",
        why="--gpus-per-task lets each rank see its own GPU only; CUDA IPC and P2P between them then fail.",
        fix="srun --gpus-per-node=N --gpu-bind=none",
        check=gpus.a09_ipc,
    ),
    Rule(
        id="N01",
        scope="gpu",
        title="GPU far from every adapter",
        severities="FW",
        reads="the PCI tree of sysfs; active ports",
        why="NCCL uses GPUDirect RDMA up to PXB only; beyond it every message passes the host's memory, and "
        "between NUMA "
        "nodes (SYS, F) the processor's link too. Over NVLink-C2C this is as it should be.",
        fix="check BIOS and slot map; NCCL_NET_GDR_LEVEL only after measuring",
        check=adapters.n01_far_nic,
    ),
    Rule(
        id="N02",
        scope="host",
        title="adapters shared unevenly",
        severities="W",
        reads="the PCI tree of sysfs; NCCL_IB_HCA",
        why="GPUs that fall on one adapter share its rate while others idle; an adapter far from all GPUs (storage, "
        "management) slows down what NCCL sends over it.",
        fix="NCCL_IB_HCA=^NAME, or another slot map",
        check=adapters.n02_shared_nic,
    ),
    Rule(
        id="N03",
        scope="rank",
        title="variables that choose adapters",
        severities="FW",
        reads="NCCL_IB_HCA, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, UCX_NET_DEVICES and /etc/nccl.conf; /sys/class; "
        "/proc/net/route, ipv6_route",
        why="A setting from another cluster overrides what NCCL would find by itself: it names nothing (F), an "
        "interface without any route (F), or the management network (W).",
        fix="unset it, or name the fast one",
        check=choices.n03_names_nothing,
    ),
    Rule(
        id="N04",
        scope="rank",
        title="sockets although there is RDMA",
        severities="F",
        reads="NCCL_IB_DISABLE, NCCL_NET, /dev/infiniband, the limit of locked memory",
        why="NCCL silently takes NET/Socket, at a fraction of the rate.",
        fix="unset the variable; give the container /dev/infiniband; ulimit -l unlimited",
        check=choices.n04_sockets,
    ),
    Rule(
        id="N05",
        scope="job",
        title="ports down or slow",
        severities="FW",
        reads="state, phys_state and rate of RDMA ports; speed and shaping (netlink) of interfaces; all hosts",
        why="One slow port holds up every collective. A port that is down on all hosts may be meant (W).",
        fix="ibdiagnet, mlxlink; reseat or replace the cable",
        check=ports.n05_ports,
    ),
    Rule(
        id="N06",
        scope="job",
        title="MTU",
        severities="FW",
        reads="mtu of interfaces that are up, link_layer; all hosts",
        why="Where hosts differ (F) large packets vanish, and NCCL hangs (nccl#1524, #1957). RDMA over Ethernet needs "
        "about 4200 to send 4096 bytes at once (W below it).",
        fix="ip link set dev NAME mtu N, the same on all hosts and switches",
        check=ports.n06_mtu,
    ),
    Rule(
        id="N07",
        scope="rank",
        title="address of RDMA over Ethernet",
        severities="W",
        reads="NCCL_IB_GID_INDEX; gid_attrs/types",
        why="The index is of RoCE v1, which is not routed, or of no address at all.",
        fix="unset NCCL_IB_GID_INDEX: NCCL 2.21 and newer choose it",
        check=choices.n07_gid,
    ),
    Rule(
        id="N08",
        scope="host",
        title="errors of ports and interfaces",
        severities="WF",
        reads="counters, hw_counters and statistics, twice with --probe",
        why="A bad cable or a congested fabric shows in counters long before a link drops. Counts since the boot above "
        "the thresholds of [audit] are W; a port's count that grows within the probe window is F.",
        fix="ibdiagnet, mlxlink, ethtool -S; reseat or replace the cable",
        check=ports.n08_errors,
    ),
    Rule(
        id="N09",
        scope="host",
        title="no GPUDirect RDMA",
        severities="FW",
        reads="/sys/module, who holds ib_core, /proc/driver/nvidia/version, the kernel's release, NCCL's version",
        why="Without nvidia_peermem or dma-buf every message between nodes passes the host's memory: W on one "
        "node, F on "
        "several.",
        fix="modprobe nvidia-peermem, or NVIDIA's open kernel module with Linux 5.12 or newer",
        check=adapters.n09_gpudirect,
    ),
    Rule(
        id="P01",
        scope="link",
        title="PCIe link with too few lanes",
        severities="F",
        reads="current_link_width and max_link_width of the device and of its port",
        why="NCCL reads the maximum, and so never sees a link that trained at half of it. A slot that is narrower than "
        "the card is P03's.",
        fix="reseat the card; check riser and bifurcation",
        check=pcie.p01_width,
    ),
    Rule(
        id="P02",
        scope="link",
        title="PCIe link that is too slow",
        severities="FW",
        reads="current_link_speed and max_link_speed of the device and of its port; NVML's utilization",
        why="A NIC below its speed is F. A GPU that idles lowers its speed by itself: below the maximum it is W "
        "while it "
        "works, and U while it idles.",
        fix="reseat the card; check riser, BIOS and retimers",
        check=pcie.p02_speed,
    ),
    Rule(
        id="P03",
        scope="job",
        title="devices of one kind with unequal slots",
        severities="WI",
        reads="max_link_width and max_link_speed of devices and ports; all hosts",
        why="An x16 card in an x8 slot trains at x8 and nothing complains; the others wait for it. Where all "
        "cards of a "
        "kind are in such slots it is information.",
        fix="move the card to a full slot",
        check=pcie.p03_unequal,
    ),
    Rule(
        id="P04",
        scope="link",
        title="corrected PCIe errors",
        severities="W",
        reads="aer_dev_correctable; NVML's replay counter",
        why="Packets that are sent again tell of a marginal link.",
        fix="reseat the card; swap riser or slot",
        check=pcie.p04_replays,
    ),
    Rule(
        id="P05",
        scope="host",
        title="ACS sends neighbours' traffic through the processor",
        severities="WI",
        reads="ACS control of the bridges (root); IOMMU groups otherwise",
        why="With request redirect on, what goes from a GPU to an adapter on the same switch turns round in the root "
        "complex. Without root it is W where neighbours have IOMMU groups of their own, and U without groups. In "
        "virtual machines it must stay on (I).",
        fix="lspci -vvv | grep ACSCtl must show SrcValid- and ReqRedir-; rdma_topo check",
        check=pcie.p05_acs,
    ),
    Rule(
        id="P06",
        scope="link",
        title="hidden NUMA node",
        severities="W",
        reads="numa_node; the number of NUMA nodes",
        why="The firmware or the virtual machine does not tell where a device is; -1 is unknown and never node 0.",
        fix="NCCL_TOPO_FILE for this kind of machine",
        check=pcie.p06_hidden_numa,
    ),
    Rule(
        id="P07",
        scope="job",
        title="NVLinks",
        severities="F",
        reads="NVML: state of each link, and of the fabric manager's registration; all GPUs of a name",
        why="One GPU with fewer links slows down every collective within the node. Behind NVLink switches a GPU "
        "computes only once the fabric manager has registered it.",
        fix="nvidia-smi nvlink -s; the fabric manager",
        check=gpu_state.p07_nvlink,
    ),
    Rule(
        id="P08",
        scope="host",
        title="clocks, power and state of GPUs",
        severities="FW",
        reads="NVML: throttle reasons, power limit, application clocks, ECC, persistence",
        why="One GPU that its hardware slows down (F), or that is capped (W), is waited for by all.",
        fix="cooling and power; nvidia-smi -rac, -pl, -pm",
        check=gpu_state.p08_state,
    ),
    Rule(
        id="S01",
        scope="host",
        title="frequency governor",
        severities="W",
        reads="scaling_governor, scaling_driver",
        why="Other governors than performance raise clocks only after load has come. powersave of intel_pstate and "
        "amd-pstate-epp is fine: the processor chooses.",
        fix="cpupower frequency-set -g performance, or srun --cpu-freq=performance",
        check=system.s01_governor,
    ),
    Rule(
        id="S02",
        scope="host",
        title="NUMA balancing on a GPU node",
        severities="W",
        reads="/proc/sys/kernel/numa_balancing",
        why="The kernel unmaps pages to see who uses them, and stalls what copies from them.",
        fix="echo 0 > /proc/sys/kernel/numa_balancing",
        check=system.s02_numa_balancing,
    ),
    Rule(
        id="S03",
        scope="host",
        title="transparent huge pages",
        severities="I",
        reads="/sys/kernel/mm/transparent_hugepage",
        why="The state only: what is best depends on the job.",
        fix="madvise, where measured",
        check=system.s03_huge_pages,
    ),
    Rule(
        id="S04",
        scope="host",
        title="threads",
        severities="WI",
        reads="OMP_NUM_THREADS, MKL_NUM_THREADS; masks",
        why="Threads of all ranks together beyond the CPUs they may use wait for each other's turns (W). Unset, "
        "each rank "
        "starts one a CPU of its mask (I where that fits).",
        fix="export OMP_NUM_THREADS=N",
        check=system.s04_threads,
    ),
    Rule(
        id="S05",
        scope="host",
        title="ranks on threads of one core",
        severities="W",
        reads="masks; thread_siblings_list",
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
        why="Containers start with 64 MB of /dev/shm, which NCCL and data loaders overrun. Locked memory is N04's.",
        fix="--shm-size or --ipc=host; ulimit -n",
        check=system.s06_limits,
    ),
    Rule(
        id="C01",
        scope="host",
        title="debug variables",
        severities="W",
        reads="the ranks' environment, /etc/nccl.conf, ~/.nccl.conf",
        why="NCCL's manual gives them for debugging: they override what it would choose for size and topology.",
        fix="unset them",
        check=system.c01_debug_variables,
    ),
    Rule(
        id="C02",
        scope="job",
        title="ways that NCCL took",
        severities="W",
        reads="a log of NCCL_DEBUG=INFO (--nccl-log)",
        why="Connections within a node over shared memory, or between nodes over sockets although there is RDMA, are "
        "slower than the hardware.",
        fix="unset what forbids P2P or RDMA",
        check=system.c02_log,
    ),
    Rule(
        id="H02",
        scope="job",
        title="placement in the network",
        severities="WI",
        reads="SLURM_TOPOLOGY_ADDR; [audit] nodes_per_leaf",
        why="What passes between leaf switches shares their uplinks. W where fewer leaves would do, I where that "
        "is not "
        "known.",
        fix="sbatch --switches=N or --segment=N",
        check=hosts.h02_placement,
    ),
)
