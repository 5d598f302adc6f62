"""Rules H01, H02, S01 to S04, S06 and C01: differing nodes, placement, kernel, limits, NCCL's variables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from hpcpace.audit.findings import AuditFinding, Certainty, Severity, Skip, fewer_ranks_fix, unknown
from hpcpace.audit.hardware import sum_of
from hpcpace.audit.job import AuditedHost, AuditedJob, rank_place
from hpcpace.audit.tree import Unreadable
from hpcpace.core.hostlist import exclude_option
from hpcpace.core.text import format_bytes, printable, shell_word

_FAST_WITH_POWERSAVE = ("intel_pstate", "amd-pstate-epp")
# These drivers choose frequencies themselves; their "powersave" is the default governor, not the lowest clock
# (Documentation/admin-guide/pm/intel_pstate.rst, amd-pstate.rst).

_DEBUG_VARIABLES = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_NET_GDR_LEVEL"),
    *("NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NTHREADS", "NCCL_CHECKS_DISABLE"),
)
"""Variables that NCCL's manual describes for debugging, not for production."""


def s01_governor(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find CPUs whose governor keeps clocks low."""
    cpus = host.snapshot.hardware.cpus
    governors = host.known(cpus.governors, "the frequency governors", "cpus/governors", "cpus/online")
    fine = {"performance"} | ({"powersave"} if cpus.driver in _FAST_WITH_POWERSAVE else set())
    for governor in (name for name in governors if name not in fine):
        yield AuditFinding(
            severity=Severity.WARNING,
            place=f"CPUs {printable(governors[governor])}",
            seen=f"use governor {printable(governor)}" + (f" of {printable(cpus.driver)}" if cpus.driver else ""),
            fix="cpupower frequency-set -g performance  # admin; or srun --cpu-freq=performance ...",
        )


def s02_numa_balancing(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find GPU nodes on which the kernel migrates pages between NUMA nodes."""
    if not host.has_gpus:
        raise Skip("no GPU")
    value = host.known(host.snapshot.kernel.numa_balancing, "numa_balancing", "kernel/numa_balancing")
    if value > 0:
        yield AuditFinding(
            severity=Severity.WARNING,
            seen=f"numa_balancing is {value}",
            fix="echo 0 > /proc/sys/kernel/numa_balancing  # admin; NVIDIA and ROCm both recommend it",
        )


def s03_huge_pages(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Report the setting of transparent huge pages unless it is the usual madvise."""
    facts = "kernel/huge_pages_enabled", "kernel/huge_pages_defrag"
    kernel = host.snapshot.kernel
    pages, defrag = (
        host.known(fact, "transparent huge pages", *facts) for fact in (kernel.huge_pages, kernel.huge_pages_defrag)
    )
    if pages in ("never", "always") or defrag == "always":
        yield AuditFinding(
            severity=Severity.INFORMATION,
            seen=f"transparent huge pages are set to {pages}, defrag to {defrag}",
            fix="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled  # admin, if measurements support it",
        )


def s04_threads(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find ranks that together start more OpenMP threads than they have CPUs."""
    if not host.ranks:
        return
    masks = [host.mask(rank) for rank in host.ranks]
    cpus = sum_of(masks).bit_count()
    set_by = [_threads(rank.variables) for rank in host.ranks]
    threads = sum(count or mask.bit_count() for count, mask in zip(set_by, masks, strict=True))
    each = max(1, cpus // len(host.ranks))
    is_unset = any(count is None for count in set_by)
    if threads <= cpus and not (is_unset and len(host.ranks) > 1):
        return
    is_crowded = threads > cpus
    yield AuditFinding(
        severity=Severity.WARNING if is_crowded else Severity.INFORMATION,
        seen=("OMP_NUM_THREADS is not set" if is_unset else "OMP_NUM_THREADS is set")
        + f", and {len(host.ranks)} ranks start up to {threads} threads on {cpus} CPUs",
        cost="threads wait for each other" if is_crowded else "each rank uses all CPUs of its mask",
        fix=_threads_fix(host, cpus, each),
        certainty=Certainty.INFERRED,
        ranks=tuple(rank.rank for rank in host.ranks),
    )


def s06_limits(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find a small /dev/shm, and ranks that may open only a few files."""
    shm = host.snapshot.kernel.shm_bytes
    if shm is not None and shm < job.settings.least_shm:
        yield AuditFinding(
            severity=Severity.WARNING,
            place="/dev/shm",
            seen=f"has only {format_bytes(shm)}",
            fix="docker run --shm-size=8g ...  # or --ipc=host; enroot and Singularity use the host's, where an admin "
            "can mount -o remount,size=8g /dev/shm",
        )
    for rank in host.ranks:
        fact = f"rank/{rank.rank}"
        files = host.known(rank.open_files, "its open-files limit", f"{fact}/open_files", f"{fact}/limits")
        if 0 <= files < job.settings.least_open_files:
            yield AuditFinding(
                severity=Severity.WARNING,
                place=rank_place(rank),
                seen=f"may open only {files} files",
                cost="connections to many ranks, and files of data loaders, run out of descriptors",
                fix=f"ulimit -n {max(65536, job.settings.least_open_files)}",
                ranks=(rank.rank,),
            )
    host.known(shm, "the size of /dev/shm", "kernel/shm")


def c01_debug_variables(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find debug variables that were left behind."""
    sources: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, value in host.snapshot.kernel.nccl_conf.items():
        if name in _DEBUG_VARIABLES:
            sources.setdefault("/etc/nccl.conf", {})[f"{name}={value}"] = ()
    for rank in host.ranks:
        for source, variables in (("environment", rank.variables), ("~/.nccl.conf", rank.user_conf)):
            for name in variables.keys() & set(_DEBUG_VARIABLES):
                users = sources.setdefault(source, {})
                users[f"{name}={variables[name]}"] = (*users.get(f"{name}={variables[name]}", ()), rank.rank)
    for source, settings in sources.items():
        for setting, ranks in sorted(settings.items()):
            name = setting.partition("=")[0]
            yield AuditFinding(
                severity=Severity.WARNING,
                place=source,
                seen=printable(setting),
                fix=f"unset {name}" if source == "environment" else f"sed -i '/^{name} *=/d' {source}",
                ranks=ranks,
            )
    if "etc/nccl.conf" in host.snapshot.unreadable:
        raise host.unreadable("/etc/nccl.conf", "etc/nccl.conf")


def _threads_fix(host: AuditedHost, cpus: int, each: int) -> str:
    """Return what keeps the threads apart; a thread per rank is too much if there are more ranks than CPUs."""
    if len(host.ranks) > cpus:
        return f"{fewer_ranks_fix(host.ranks[0], cpus)}  # {len(host.ranks)} ranks on {cpus} CPUs"
    has_mkl = any("MKL_NUM_THREADS" in rank.variables for rank in host.ranks)
    return f"export OMP_NUM_THREADS={each}" + (f" MKL_NUM_THREADS={each}" if has_mkl else "")


def _threads(variables: Mapping[str, str]) -> int | None:
    """Return how many threads a rank's variables ask for, None if they do not say."""
    # OMP_NUM_THREADS may be a list with one number per nesting level.
    counts = [variables.get(name, "").split(",")[0].strip() for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")]
    numbers = [int(count) for count in counts if count.isdigit() and len(count) < 6]
    return max(numbers) if numbers else None


_MAX_SHOWN = 60


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
                    yield unknown(host.explain(error), host.name, key)
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
            severity=Severity.WARNING if size else Severity.INFORMATION,
            seen=f"{len(job.hosts)} nodes are spread over {len(counts)} leaf switches ({listed})"
            + (f", {least} would be enough" if size else ""),
            fix=f"sbatch --switches={least} ...  # or --segment={max(counts.values())}",
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
    expected: list[tuple[str, object, Callable[[AuditedHost], object]]] = [
        ("GPUs", settings.expect_gpus, lambda host: len(host.snapshot.gpus or ()) if host.has_gpus else 0),
        (
            "active ports",
            settings.expect_nics,
            lambda host: [port.state for _, port in host.rdma_ports].count("ACTIVE"),
        ),
        ("NVIDIA driver", settings.expect_driver, _driver),
        ("kernel", settings.expect_kernel, _kernel),
    ]
    for key, wanted, read in expected:
        if wanted is None:
            continue
        try:
            seen = read(host)
        except Unreadable as error:
            yield unknown(host.explain(error), host.name, key)
            continue
        if seen != wanted:
            text = f"{key}: {_short(str(seen))}, the site expects {_short(str(wanted))}"
            fix = f"scontrol update nodename={shell_word(host.name)} state=drain reason=H01"
            yield _finding(Severity.FAIL, host.name, key, text, fix)


def _finding(severity: Severity, host: str, key: str, seen: str, fix: str) -> AuditFinding:
    cost = "a job runs as fast as its slowest node, and mixed versions hang or fail"
    return AuditFinding(severity=severity, hosts=(host,), place=key, seen=seen, cost=cost, fix=fix)


def _short(text: str) -> str:
    shown = printable(text) or "none"
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[: _MAX_SHOWN - 3]}..."


def _driver(host: AuditedHost) -> str:
    return host.known(host.snapshot.kernel.nvidia_driver, "the NVIDIA driver", "kernel/nvidia_driver")


def _kernel(host: AuditedHost) -> str:
    return host.known(host.snapshot.kernel.release, "the kernel release", "kernel/release")


def _cpu(host: AuditedHost) -> str:
    return host.known(host.snapshot.hardware.cpus.model, "the processor model", "cpus/model")


def _numa(host: AuditedHost) -> str:
    nodes = host.known(host.snapshot.hardware.numa, "the NUMA nodes", "numa")
    return " ".join(f"{node.number}:{node.cpus}" for node in nodes)


def _gpus(host: AuditedHost) -> str:
    gpus = host.known(host.snapshot.gpus, "the GPUs", "gpus", "pci")
    return _counted(f"{gpu.name or 'GPU'} VBIOS {gpu.vbios or '?'}" for gpu in gpus)


def _nccl(host: AuditedHost) -> str:
    return ",".join(sorted({rank.nccl_version for rank in host.ranks if rank.nccl_version}))


def _firmware(host: AuditedHost) -> str:
    return _counted(f"{device.board} firmware {device.firmware}" for device in host.rdma)


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{count}x {name}" for name, count in sorted(Counter(names).items()))


def _pci_map(host: AuditedHost) -> str:
    return " ".join(
        f"{device.address}/{device.vendor}:{device.device}/{'>'.join(device.parents or ())}"
        for device in host.known(host.snapshot.hardware.pci, "the PCI devices", "pci")
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
