"""Rules H01 and H02: nodes that differ from the others of the job, and the job's placement in the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from hpcpace.audit.findings import AuditFinding, Certainty, Severity, Skip, unknown
from hpcpace.audit.job import AuditedHost, AuditedJob
from hpcpace.audit.tree import Unreadable
from hpcpace.hostlist import exclude_option
from hpcpace.quoting import printable, shell_word

_MOST_SHOWN = 60


def h01_differing(job: AuditedJob) -> Iterator[AuditFinding]:
    """Find nodes that differ from the majority, or from what the site expects."""
    for key, (severity, read) in _KEYS.items():
        values: dict[str, str] = {}
        for host in job.hosts:
            try:
                value = read(host)
            except Unreadable as error:
                # A fact that one node lacks is usually missing on all nodes of its kind; compare the others.
                if len(job.hosts) > 1:
                    yield unknown("H01", host.name, key, host.explain(error))
                continue
            values[host.name] = value
        yield from _minority(values, key, severity)
    for host in job.hosts:
        yield from _unexpected(job, host)


def h02_placement(job: AuditedJob) -> Iterator[AuditFinding]:
    """Find jobs that are spread over more leaf switches than they need."""
    leaves: dict[str, str] = {}
    for host in job.hosts:
        for rank in host.ranks[:1]:
            parts = rank.variables.get("SLURM_TOPOLOGY_ADDR", "").split(".")
            # Without a topology plugin the address is the node alone.
            if len(parts) > 1 and parts[-2]:
                leaves[host.name] = parts[-2]
    if len(job.hosts) < 2 or not leaves:
        raise Skip("only one host, or SLURM_TOPOLOGY_ADDR names no switches")
    if len(leaves) < len(job.hosts):
        raise Unreadable(f"the leaf switch of {len(job.hosts) - len(leaves)} of {len(job.hosts)} nodes")
    counts = Counter(leaves.values())
    size = job.settings.nodes_per_leaf
    least = -(-len(job.hosts) // size) if size else 1
    if len(counts) > least:
        listed = ", ".join(f"{printable(leaf)} {count}" for leaf, count in sorted(counts.items())[:6])
        yield AuditFinding(
            rule="H02",
            severity=Severity.WARNING if size else Severity.INFORMATION,
            host="",
            place="",
            seen=f"{len(job.hosts)} nodes are spread over {len(counts)} leaf switches ({listed})"
            + (f", {least} would be enough" if size else ""),
            cost="traffic between leaves shares their uplinks with other jobs",
            fix=f"sbatch --switches={least} ...  # or --segment={max(counts.values())}",
            certainty=Certainty.READ,
        )


def _minority(values: dict[str, str], key: str, severity: Severity) -> Iterator[AuditFinding]:
    counts = Counter(values.values())
    if len(counts) < 2:
        return
    usual, others = counts.most_common(1)[0]
    for name, value in values.items():
        if value != usual:
            seen = f"{key} differs: {_short(value)} vs {_short(usual)} on {others} of {len(values)} nodes"
            yield _finding(severity, name, key, seen, f"#SBATCH {exclude_option([name])}")


def _unexpected(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    settings = job.settings
    expected: list[tuple[str, object, Callable[[], object]]] = [
        ("GPUs", settings.expect_gpus, lambda: len(host.snapshot.gpus or ()) if host.has_gpus else 0),
        ("active ports", settings.expect_nics, lambda: sum(port.state == "ACTIVE" for _, port in host.rdma_ports)),
        ("NVIDIA driver", settings.expect_driver, lambda: _driver(host)),
        ("kernel", settings.expect_kernel, lambda: _kernel(host)),
    ]
    for key, wanted, read in expected:
        if wanted is None:
            continue
        try:
            seen = read()
        except Unreadable as error:
            yield unknown("H01", host.name, key, host.explain(error))
            continue
        if seen != wanted:
            text = f"{key}: {_short(str(seen))}, the site expects {_short(str(wanted))}"
            yield _finding(
                Severity.FAIL,
                host.name,
                key,
                text,
                f"scontrol update nodename={shell_word(host.name)} state=drain reason=H01",
            )


def _finding(severity: Severity, host: str, key: str, seen: str, fix: str) -> AuditFinding:
    return AuditFinding(
        rule="H01",
        severity=severity,
        host=host,
        place=key,
        seen=seen,
        cost="a job runs as fast as its slowest node, and mixed versions hang or fail",
        fix=fix,
        certainty=Certainty.READ,
    )


def _short(text: str) -> str:
    shown = printable(text) or "none"
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[: _MOST_SHOWN - 3]}..."


def _needed(host: AuditedHost, value: str | None, what: str, *facts: str) -> str:
    if value is None:
        raise host.unreadable(what, *facts)
    return value


def _driver(host: AuditedHost) -> str:
    return _needed(host, host.snapshot.kernel.nvidia_driver, "the NVIDIA driver", "kernel/nvidia_driver")


def _kernel(host: AuditedHost) -> str:
    return _needed(host, host.snapshot.kernel.release, "the kernel release", "kernel/release")


def _cpu(host: AuditedHost) -> str:
    return _needed(host, host.snapshot.hardware.cpus.model, "the processor model", "cpus/model")


def _numa(host: AuditedHost) -> str:
    if host.snapshot.hardware.numa is None:
        raise host.unreadable("the NUMA nodes", "numa")
    return " ".join(f"{node.number}:{node.cpus}" for node in host.snapshot.hardware.numa)


def _gpus(host: AuditedHost) -> str:
    if host.snapshot.gpus is None:
        raise host.unreadable("the GPUs", "gpus", "pci")
    counts = Counter(f"{gpu.name or 'GPU'} VBIOS {gpu.vbios or '?'}" for gpu in host.snapshot.gpus)
    return ", ".join(f"{count}x {name}" for name, count in sorted(counts.items()))


def _nccl(host: AuditedHost) -> str:
    return ",".join(sorted({rank.nccl_version for rank in host.ranks if rank.nccl_version}))


def _firmware(host: AuditedHost) -> str:
    counts = Counter(f"{device.board} firmware {device.firmware}" for device in host.rdma)
    return ", ".join(f"{count}x {name}" for name, count in sorted(counts.items()))


def _pci_map(host: AuditedHost) -> str:
    if host.snapshot.hardware.pci is None:
        raise host.unreadable("the PCI devices", "pci")
    return " ".join(
        f"{device.address}/{device.vendor}:{device.device}/{'>'.join(device.parents or ())}"
        for device in host.snapshot.hardware.pci
        if device.kind != "bridge"
    )


def _masks(host: AuditedHost) -> str:
    return " ".join(f"{rank.local_rank}:{rank.cpus}" for rank in host.ranks)


_KEYS: dict[str, tuple[Severity, Callable[[AuditedHost], str]]] = {
    "NVIDIA driver": (Severity.FAIL, _driver),
    "NCCL": (Severity.FAIL, _nccl),
    "GPUs": (Severity.FAIL, _gpus),
    "processor": (Severity.WARNING, _cpu),
    "NUMA nodes": (Severity.WARNING, _numa),
    "kernel": (Severity.WARNING, _kernel),
    "NIC firmware": (Severity.WARNING, _firmware),
    "PCI map": (Severity.WARNING, _pci_map),
    "masks": (Severity.WARNING, _masks),
}
"""What is compared, how severe a difference is, and how the value is read; N06 compares MTUs."""
