"""Rules H01, H02, S01 to S04, S06 to S10, C01: differing nodes, placement, kernel, limits, and the load of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from hpcpace.audit import cpusets
from hpcpace.audit.facts import Load, OtherProcesses, RankFacts, sum_of
from hpcpace.audit.findings import AuditFinding, Certainty, Severity, Skip, fewer_ranks_fix, unknown
from hpcpace.audit.job import AuditedHost, AuditedJob, rank_place
from hpcpace.audit.tree import Unreadable
from hpcpace.core.hostlist import exclude_option
from hpcpace.core.text import format_bytes, plural, printable, shell_word

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


_MAX_NAMED = 3  # display: programs in one finding
_MIN_SWAP_SHARE = 0.02  # of memory: less is what every node has put away since boot
_MIN_HUGE_SHARE = 0.1  # of memory: less is a usual reserve
_MAX_COMMITTED = 0.95  # of the limit: what is left is too little for a fork
_MIN_STALLED = 1.0  # percent of 10 s: a node with memory to spare has 0.00


def s07_load(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find CPU time that others use, or tasks that wait for I/O; the job's own load is none."""
    load, cpus = _load(host), host.hardware.online.bit_count()
    average = f"load average {load.averages[0]:g} (1 min) on {plural(cpus, 'CPU')}"
    if not load.window_s:
        if load.averages[0] > cpus:
            yield AuditFinding(
                severity=Severity.INFORMATION,
                seen=f"{average}; whose it is was not watched",
                cost="if it is not the job's, its ranks wait for cores",
                fix="hpcpace audit  # on the node, without the job: it watches for a second",
            )
        return
    others, foreign, hidden = _foreign(host, load)
    if foreign >= max(job.settings.foreign_share * cpus, job.settings.stray_cpus):
        names = [
            f"{_processes(other.count, other.name)} of {printable(other.user)} {other.used_cpus:.1f}"
            for other in others[:_MAX_NAMED]
        ]
        if hidden >= job.settings.stray_cpus and load.others is not None:
            names.append(f"{hidden:.1f} by short-lived, kernel or hidden ones")
        waited = load.pressure.get("cpu some")
        yield AuditFinding(
            severity=Severity.WARNING,
            seen=f"processes outside the job use {foreign:.1f} of {plural(cpus, 'CPU')} (in {load.window_s:g} s)"
            + (f": {', '.join(names)}" if names else "")
            + f"; {average}"
            + ("" if waited is None else f", tasks waited for a CPU {waited:.0f} % of 10 s"),
            fix=f"ps -eo user,pid,psr,pcpu,comm --sort=-pcpu | head; squeue -w {shell_word(host.name)}",
            certainty=Certainty.MEASURED,
        )
    if load.stolen_cpus >= job.settings.stray_cpus:
        yield AuditFinding(
            severity=Severity.WARNING,
            seen=f"the hypervisor gave {load.stolen_cpus:.1f} of {plural(cpus, 'CPU')} to other machines "
            f"(in {load.window_s:g} s)",
            cost="all ranks of this node wait for its processors",
            fix="ask the cloud or its admin for dedicated processors  # top: st",
            certainty=Certainty.MEASURED,
        )
    if load.num_blocked >= max(2, cpus // 2):
        yield AuditFinding(
            severity=Severity.WARNING,
            seen=f"{load.num_blocked} processes outside the job wait for I/O and cannot be interrupted (state D)",
            cost="a file system or disk of this node may hang",
            fix="ps -eo state,user,pid,wchan:30,comm | grep ^D; dmesg | tail",
            certainty=Certainty.MEASURED,
        )


def s08_strays(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find processes of others that use CPUs which ranks of the job may run on."""
    load, ranks = _load(host), _ranks(host)
    if not ranks:
        raise Skip("no ranks of a job run here")
    if not load.window_s:
        raise Skip("the processes of this node were not watched")
    others = host.known(load.others, "the processes outside the job", "load/processes")
    for other in others:
        allowed = cpusets.parse_list(other.cpus) if other.cpus else host.hardware.online
        near = [rank for rank in ranks if host.mask(rank) & allowed]
        if other.used_cpus < job.settings.stray_cpus or not near:
            continue
        shared = cpusets.format_list(allowed & sum_masks(host, near))
        yield AuditFinding(
            severity=Severity.WARNING,
            place=f"CPUs {shared}",
            seen=f"{_processes(other.count, other.name)} of {printable(other.user)}, not of this job, use "
            f"{other.used_cpus:.1f} CPUs (in {load.window_s:g} s)",
            fix=f"ps -u {shell_word(other.user)} -o pid,psr,pcpu,lstart,comm; squeue -u {shell_word(other.user)} -w "
            f"{shell_word(host.name)}  # in no job: left behind",
            certainty=Certainty.MEASURED,
            ranks=tuple(rank.rank for rank in near),
        )


def s09_memory(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find nodes that swap, have little memory left, or may not promise more."""
    memory = host.snapshot.memory
    if memory is None and "memory" not in host.snapshot.unreadable:
        raise Skip("the snapshot has no memory: it is older, or a copied tree")
    memory = host.known(memory, "the memory", "memory")
    load = host.snapshot.load
    used = memory.swap_total_bytes - memory.swap_free_bytes
    window_s = load.window_s if load else 0.0
    rate = (memory.swapped_bytes or 0) / window_s if window_s else 0.0
    stalled = load.pressure.get("memory full", 0.0) if load else 0.0
    fix = "ps -eo user,pid,rss,comm --sort=-rss | head  # whose memory it is"
    if rate >= job.settings.swap_bytes_per_s:
        yield AuditFinding(
            severity=Severity.WARNING,
            seen=f"swaps {format_bytes(int(rate))}/s (in {window_s:g} s)",
            fix=fix,
            certainty=Certainty.MEASURED,
        )
    elif used >= _MIN_SWAP_SHARE * memory.total_bytes:
        yield AuditFinding(
            severity=Severity.INFORMATION,
            seen=f"{format_bytes(used)} are in swap"
            + (f", none moved in {window_s:g} s" if memory.swapped_bytes == 0 and window_s else ""),
            cost="whoever needs them waits for the disk once",
            fix=f"{fix}; swapoff -a && swapon -a  # admin, with memory to spare",
        )
    if memory.available_bytes < job.settings.available_share * memory.total_bytes:
        yield AuditFinding(
            severity=Severity.WARNING,
            seen=f"only {format_bytes(memory.available_bytes)} of {format_bytes(memory.total_bytes)} are available",
            cost="the kernel reclaims and swaps, and may end a rank",
            fix=fix,
        )
    elif stalled >= _MIN_STALLED:
        yield AuditFinding(
            severity=Severity.WARNING,
            seen=f"all tasks stood still for memory {stalled:.0f} % of the last 10 s",
            fix=fix,
            certainty=Certainty.MEASURED,
        )
    if memory.overcommit == 2 and memory.committed_bytes >= _MAX_COMMITTED * memory.commit_limit_bytes:
        yield AuditFinding(
            severity=Severity.WARNING,
            seen=f"{format_bytes(memory.committed_bytes)} of {format_bytes(memory.commit_limit_bytes)} are promised "
            "(vm.overcommit_memory is 2)",
            cost="allocations and fork fail although memory is free",
            fix="sysctl vm.overcommit_memory=0  # admin; or a larger vm.overcommit_ratio",
        )
    if memory.huge_free_bytes >= _MIN_HUGE_SHARE * memory.total_bytes:
        yield AuditFinding(
            severity=Severity.INFORMATION,
            seen=f"{format_bytes(memory.huge_free_bytes)} are reserved as huge pages that nobody uses",
            cost="no program can have this memory unless it asks for such pages",
            fix="sysctl vm.nr_hugepages=0  # admin, if no job needs them",
        )


def s10_clock(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find clocks that are not synchronised, or only badly."""
    clock = host.snapshot.time_sync
    if clock is None and "time_sync" not in host.snapshot.unreadable:
        raise Skip("the snapshot does not say whether the clock is synchronised")
    clock = host.known(clock, "whether the clock is synchronised", "time_sync")
    running = ", ".join(map(printable, clock.daemons))
    if not clock.is_synchronised and "chronyd" in clock.daemons:
        # Without rtcsync, chronyd leaves the kernel's flag alone (chrony.conf(5)).
        yield unknown("whether the clock is synchronised: chronyd runs, but the kernel does not know: chronyc tracking")
    elif not clock.is_synchronised:
        yield AuditFinding(
            severity=Severity.WARNING,
            seen="the clock is not synchronised (adjtimex: unsynchronised, maximum error "
            f"{clock.max_error_s:g} s); {f'{running} runs' if running else 'no time daemon can be seen here'}",
            fix="timedatectl; systemctl enable --now chronyd  # admin; a container shows it on its host",
        )
    elif clock.error_s > job.settings.clock_error_s:
        yield AuditFinding(
            severity=Severity.WARNING,
            seen=f"the clock is off by an estimated {clock.error_s:.3g} s (adjtimex)",
            fix="chronyc tracking; chronyc sources  # or ntpq -p, timedatectl timesync-status",
        )


def sum_masks(host: AuditedHost, ranks: list[RankFacts]) -> int:
    """Return the CPUs of some ranks together."""
    total = 0
    for rank in ranks:
        total |= host.mask(rank)
    return total


def _load(host: AuditedHost) -> Load:
    load = host.snapshot.load
    if load is None and "load" not in host.snapshot.unreadable:
        raise Skip("the snapshot has no load: it is older, or a copied tree")
    return host.known(load, "the load", "load")


def _ranks(host: AuditedHost) -> list[RankFacts]:
    """Return the ranks of a job: a single process that nothing has launched is the audit itself."""
    return [rank for rank in host.ranks if rank.launcher != "single" or rank.world_size > 1]


def _foreign(host: AuditedHost, load: Load) -> tuple[list[OtherProcesses], float, float]:
    """Return the processes of others, the CPUs that they use, and how many of these nobody can be named for.

    On a node that a job shares, only those count that may use its ranks' CPUs.
    """
    others, ranks = list(load.others or ()), _ranks(host)
    mask = sum_masks(host, ranks) if ranks else host.hardware.online
    if mask != host.hardware.online:
        others = [other for other in others if not other.cpus or cpusets.parse_list(other.cpus) & mask]
    known = sum(other.used_cpus for other in others)
    unnamed = 0.0 if mask != host.hardware.online else (load.used_cpus or 0.0) - load.job_cpus - known
    return others, known + max(unnamed, 0.0), max(unnamed, 0.0)


def _processes(count: int, name: str) -> str:
    return f"{count} {printable(name)}"
