"""Rules P07 and P08: NVLinks, and states that slow a GPU down."""

from __future__ import annotations

from collections.abc import Iterator

from hpcpace.audit.facts import Gpu, Nvml
from hpcpace.audit.findings import AuditFinding, Certainty, Severity, Skip, unknown
from hpcpace.audit.job import AuditedHost, AuditedJob
from hpcpace.audit.tree import Unreadable
from hpcpace.quoting import printable
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
