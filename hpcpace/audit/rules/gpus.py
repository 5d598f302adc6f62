"""Rules A08, A09, P07 and P08: which rank uses which GPU, NVLinks, and states that slow a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from hpcpace.audit.collect_rank import is_gpu_bound_per_task
from hpcpace.audit.facts import Gpu, Nvml, RankFacts
from hpcpace.audit.findings import AuditFinding, Certainty, Severity, Skip, unknown
from hpcpace.audit.job import AuditedHost, AuditedJob, rank_place
from hpcpace.audit.rules.affinity import gpu_certainty, listed, rank_numbers
from hpcpace.audit.rules.fixes import fewer_ranks_fix
from hpcpace.audit.tree import Unreadable
from hpcpace.core.text import printable
from hpcpace.throttling import FAULTS, Throttle


def p07_nvlink(job: AuditedJob) -> Iterator[AuditFinding]:
    """Find GPUs with inactive NVLinks, with fewer than others of their model, or not registered with the fabric."""
    most: dict[str, int] = {}
    for host in job.hosts:
        for gpu in host.snapshot.gpus or ():
            if gpu.nvml is not None and gpu.nvml.links_active is not None:
                most[gpu.name or ""] = max(most.get(gpu.name or "", 0), gpu.nvml.links_active)
    for host in job.hosts:
        try:
            driven = host.has_nvidia
        except Unreadable as error:
            yield unknown("P07", host.name, "", host.explain(error))
            continue
        for gpu in host.snapshot.gpus or () if driven else ():
            yield from _check_links(host, gpu, most.get(gpu.name or "", 0))
            yield from _check_fabric(host, gpu)


def p08_state(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find GPUs that are throttled, capped, or in a state that costs time."""
    if not host.has_nvidia:
        raise Skip("no NVIDIA driver")
    for gpu in host.snapshot.gpus or ():
        if gpu.nvml is None:
            raise host.unreadable("the state of the GPUs", "nvml")
        for severity, seen, cost, fix in _states(gpu.address, gpu.nvml):
            yield AuditFinding(
                rule="P08",
                severity=severity,
                host=host.name,
                place=f"GPU {gpu.address}",
                seen=seen,
                cost=cost,
                fix=fix,
                certainty=Certainty.READ,
            )


def _states(address: str, nvml: Nvml) -> Iterator[tuple[Severity, str, str, str]]:
    reasons = nvml.throttle_reasons or 0
    if reasons & FAULTS:
        yield (
            Severity.FAIL,
            f"is throttled by its hardware (reasons {reasons:#x})",
            "every rank waits for this GPU",
            f"nvidia-smi -i {address} -q -d PERFORMANCE,TEMPERATURE  # then cooling and power, admin",
        )
    elif reasons & Throttle.SOFTWARE_THERMAL:
        seen = f"is throttled by its driver because of heat (reasons {reasons:#x})"
        yield Severity.WARNING, seen, "every rank waits for this GPU", "# admin: check cooling and fans"
    if nvml.power_limit_w and nvml.power_default_w and nvml.power_limit_w < 0.99 * nvml.power_default_w:
        yield (
            Severity.WARNING,
            f"is capped at {nvml.power_limit_w:g} W, the default is {nvml.power_default_w:g}",
            "its clock is lower under load",
            f"nvidia-smi -i {address} -pl {nvml.power_default_w:.0f}  # admin",
        )
    if nvml.sm_clock_limit_mhz and nvml.sm_clock_max_mhz and nvml.sm_clock_limit_mhz < 0.8 * nvml.sm_clock_max_mhz:
        seen = f"its clock is limited to {nvml.sm_clock_limit_mhz} of {nvml.sm_clock_max_mhz} MHz"
        yield Severity.WARNING, seen, "it runs slower than it could", f"nvidia-smi -i {address} -rac  # admin"
    if nvml.is_ecc_pending:
        seen = "its ECC mode will change at the next reset"
        yield Severity.WARNING, seen, "GPUs of one job may differ in memory and speed", "# admin: reboot the node"
    if nvml.is_persistent is False:
        seen = "persistence mode is off"
        yield Severity.WARNING, seen, "every job start takes seconds longer", f"nvidia-smi -i {address} -pm 1  # admin"


def _check_fabric(host: AuditedHost, gpu: Gpu) -> Iterator[AuditFinding]:
    if gpu.nvml is None:
        return  # _check_links has reported it
    fabric = gpu.nvml.fabric
    if fabric is None and host.snapshot.hardware.num_nvswitches:
        yield unknown(
            "P07", host.name, f"GPU {gpu.address}", "whether the fabric manager has registered it: NVML does not say"
        )
    if fabric in (None, "none", "completed"):
        return
    shown = printable(fabric).replace("failed ", "failed with NVML error ")
    words = {"not started": "has not been started", "in progress": "has not finished"}
    yield AuditFinding(
        rule="P07",
        severity=Severity.FAIL,
        host=host.name,
        place=f"GPU {gpu.address}",
        seen=f"its fabric registration {words.get(fabric, shown)}",
        cost="CUDA does not start on it, or works without NVLink",
        fix="systemctl status nvidia-fabricmanager  # admin: restart it; its version must match the driver's",
        certainty=Certainty.READ,
    )


def _check_links(host: AuditedHost, gpu: Gpu, most: int) -> Iterator[AuditFinding]:
    if gpu.nvml is None:
        yield unknown("P07", host.name, f"GPU {gpu.address}", f"its NVLinks: {host.reason('nvml')}")
        return
    active, inactive = gpu.nvml.links_active, gpu.nvml.links_inactive
    if active is None or (not active and not most):
        return  # it has no NVLinks, or they are off on all GPUs of this model
    missing = max(inactive or 0, most - active)
    if missing:
        yield AuditFinding(
            rule="P07",
            severity=Severity.FAIL,
            host=host.name,
            place=f"GPU {gpu.address}",
            seen=f"{missing} of {active + missing} NVLinks are inactive",
            cost="collectives within the node run at the rate of the slowest GPU, or over PCIe",
            fix=f"nvidia-smi nvlink -s -i {gpu.address}; systemctl status nvidia-fabricmanager  # admin",
            certainty=Certainty.READ,
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
        rule="A09",
        severity=Severity.WARNING,
        host=host.name,
        place="",
        seen=f"{len(single)} ranks see only 1 of {count} GPUs each, because of --gpus-per-task",
        cost="CUDA IPC and P2P between ranks can fail; NCCL then copies through shared memory",
        fix=f"srun --gpus-per-node={count} --gpu-bind=none ...  # instead of --gpus-per-task",
        certainty=Certainty.READ if all(rank.gpus is not None for rank in single) else Certainty.INFERRED,
        ranks=rank_numbers(single),
    )


def _sees_none(host: AuditedHost, rank: RankFacts) -> Iterator[AuditFinding]:
    if host.snapshot.kernel.nvidia_driver == "" and "amdgpu" not in (host.snapshot.kernel.modules or {}):
        return  # no driver is loaded, so no rank is meant to use them
    yield AuditFinding(
        rule="A08",
        severity=Severity.FAIL,
        host=host.name,
        place=rank_place(rank),
        seen=f"sees none of the {len(host.snapshot.gpus or ())} GPUs of its node",
        cost="it trains on the CPU, or fails",
        fix=_visible_fix(host, rank),
        certainty=gpu_certainty(rank),
        ranks=(rank.rank,),
    )


def _another_order(host: AuditedHost, rank: RankFacts, address: str) -> Iterator[AuditFinding]:
    order = [gpu.address for gpu in host.snapshot.gpus or ()]
    if address not in order or order.index(address) == rank.local_rank or rank.local_rank < 0:
        return
    yield AuditFinding(
        rule="A08",
        severity=Severity.INFORMATION,
        host=host.name,
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
        rule="A08",
        severity=Severity.INFORMATION if has_mps or has_mig else Severity.FAIL,
        host=host.name,
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
