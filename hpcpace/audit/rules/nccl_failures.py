"""Rule C06: the failures, retries and warnings in NCCL's log, each with what it means and where to look."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpcpace.audit.findings import AuditFinding, Severity, Skip
from hpcpace.audit.job import AuditedJob
from hpcpace.audit.nccl_log import LogProcess, NcclLog, Seen
from hpcpace.audit.nccl_messages import Topic
from hpcpace.audit.tree import Unreadable

_MAX_RETRIES = 20  # peers that start seconds later cost a few


def c06_failures(job: AuditedJob) -> Iterator[AuditFinding]:
    """Report errors, timeouts, retries and other warnings."""
    log = given_log(job)
    yield from _failures(job, log)
    if log.problems:
        raise Unreadable(f"all failures: {log.problems[0]}")


def given_log(job: AuditedJob) -> NcclLog:
    """Return NCCL's log of a job; skip the rule without one."""
    if job.nccl_log is None:
        raise Skip("no NCCL log was given: add --nccl-log")
    return job.nccl_log


def process_finding(
    job: AuditedJob,
    process: LogProcess,
    seen: Seen,
    *,
    text: str,
    cost: str,
    fix: str,
    host: str = "",
    place: str = "",
    severity: Severity = Severity.WARNING,
) -> AuditFinding:
    """Return a finding on one process."""
    name = host or process.host
    times = f" ({seen.count} lines)" if seen.count > 1 else ""
    return AuditFinding(
        severity=severity,
        place=place or (f"GPU {process.device}" if process.device >= 0 else ""),
        seen=text + times,
        cost=cost,
        fix=fix,
        evidence=seen.evidence,
        hosts=(job.name_of(name),) if name else (),
        ranks=(process.rank,) if process.rank >= 0 else (),
    )


def _failures(job: AuditedJob, log: NcclLog) -> Iterator[AuditFinding]:
    for process in log.processes:
        for value, seen in process.values(Topic.ERROR).items():
            failure = next((one for one in _FAILURES if re.match(one.pattern, value)), _OTHER_FAILURE)
            yield process_finding(
                job,
                process,
                seen,
                host="" if process.host else log.host_of(process.rank),
                text=failure.text.format(value=value),
                cost=failure.cost,
                fix=failure.fix,
                severity=failure.severity,
            )
        for value, seen in process.values(Topic.RETRY).items():
            is_often = seen.count > _MAX_RETRIES
            yield process_finding(
                job,
                process,
                seen,
                text=f"{value}: {'retried often' if is_often else 'retried'}",
                cost="the other end was not there yet, or cannot be reached",
                fix="look at the rank at that address: did it start?",
                severity=Severity.WARNING if is_often else Severity.INFORMATION,
            )
        for value, seen in process.values(Topic.SETTING).items():
            fix = "echo 0 > /proc/sys/kernel/numa_balancing  # admin" if "NUMA" in value else "add iommu=pt  # admin"
            what = "NUMA balancing is on" if "NUMA" in value else f"the kernel's command line lacks {value}"
            yield process_finding(job, process, seen, text=what, cost="RCCL warns of hangs and varying speed", fix=fix)
        for value, seen in process.values(Topic.WARNING).items():
            yield process_finding(
                job, process, seen, text=f"NCCL warns: {value}", cost="", fix="", severity=Severity.INFORMATION
            )


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """What a kind of error is, where the pattern matches its text."""

    pattern: str
    text: str
    cost: str
    fix: str
    severity: Severity = Severity.FAIL


_NETWORK_COST = "the job stops with an error or hangs"
_LINK_FIX = "ibdiagnet; mlxlink; ib_write_bw between the two hosts  # RoCE: the GID index and the routes of both"
_FAILURES = (
    _Failure(
        pattern="completion (12|13)$",
        text="an RDMA transfer got no answer in time ({value})",
        cost=_NETWORK_COST,
        fix=f"{_LINK_FIX}; NCCL_IB_TIMEOUT=22 only waits longer",
    ),
    _Failure(
        pattern="completion 5$",
        text="RDMA transfers were flushed (status 5): another error came before",
        cost=_NETWORK_COST,
        fix="look at the first error of the other ranks",
        severity=Severity.WARNING,
    ),
    _Failure(pattern="completion ", text="an RDMA transfer failed ({value})", cost=_NETWORK_COST, fix=_LINK_FIX),
    _Failure(
        pattern="async .*(port (error|active)|fatal|PORT_ERR|device)",
        text="an adapter reports: {value}",
        cost="connections over it stop",
        fix="dmesg | grep mlx5; mlxlink  # cable, transceiver, switch port",
    ),
    _Failure(
        pattern="async ",
        text="an adapter reports: {value}",
        cost="the fabric was changed or restarted while the job ran",
        fix="ask the administrators of the fabric",
        severity=Severity.WARNING,
    ),
    _Failure(
        pattern="no socket interface",
        text="NCCL found no network interface to use",
        cost="the job does not start",
        fix="ip -br link; unset NCCL_SOCKET_IFNAME  # or name an interface of this host",
    ),
    _Failure(
        pattern="Mismatched",
        text="ranks have different versions of NCCL",
        cost="the job does not start, or hangs",
        fix="python -c 'import torch; print(torch.cuda.nccl.version())'  # on each host",
    ),
    _Failure(
        pattern="Duplicate GPU",
        text="two ranks use the same GPU",
        cost="the job does not start",
        fix="torch.cuda.set_device(local_rank)  # and --gpus-per-node as many as ranks; see A08",
    ),
    _Failure(
        pattern="failed to|Could not map",
        text="shared memory for NCCL could not be had ({value})",
        cost="the job does not start",
        fix="df -h /dev/shm  # container: --shm-size=8g or --ipc=host; see S06",
    ),
    _Failure(pattern="Cuda failure", text="{value}", cost="the job stops", fix="nvidia-smi; dmesg | grep -i xid"),
    _Failure(
        pattern="timeout",
        text="torch's watchdog: {value}",
        cost="the job stops; this rank waited for others",
        fix="hpcpace hang RUN  # which rank did not come; or the stack of each rank (py-spy dump)",
    ),
    _Failure(
        pattern="Call to ibv_(reg|create)",
        text="memory for RDMA could not be pinned ({value})",
        cost="the job stops",
        fix="ulimit -l  # in the job: unlimited; slurm.conf: PropagateResourceLimitsExcept=MEMLOCK; container:"
        " --ulimit memlock=-1",
    ),
    _Failure(
        pattern="Call to ibv_modify_qp",
        text="an RDMA connection could not be made ({value})",
        cost=_NETWORK_COST,
        fix=f"show_gids  # NCCL_IB_GID_INDEX, NCCL_IB_HCA; then {_LINK_FIX}",
    ),
    _Failure(
        pattern="Call to|.*[cC]onnection closed",
        text="a connection broke ({value})",
        cost="usually because the rank at the other end has ended",
        fix="look at the log of the rank that ended first",
        severity=Severity.WARNING,
    ),
)
_OTHER_FAILURE = _Failure(pattern="", text="{value}", cost=_NETWORK_COST, fix="look at the lines around this one")
