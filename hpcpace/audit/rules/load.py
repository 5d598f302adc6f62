"""Rules S07 to S10: load of others, their processes on the job's cores, memory and swap, and the clock."""

from __future__ import annotations

from collections.abc import Iterator

from hpcpace.audit import cpusets
from hpcpace.audit.facts import Load, OtherProcesses, RankFacts
from hpcpace.audit.findings import AuditFinding, Certainty, Severity, Skip, unknown
from hpcpace.audit.job import AuditedHost, AuditedJob
from hpcpace.core.text import format_bytes, plural, printable, shell_word

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
            f"{_counted(other.count, other.name)} of {printable(other.user)} {other.used_cpus:.1f}"
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
            seen=f"{_counted(other.count, other.name)} of {printable(other.user)}, not of this job, use "
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


def _counted(count: int, name: str) -> str:
    return f"{count} {printable(name)}"
