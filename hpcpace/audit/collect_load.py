"""How busy a node is and with whose processes, its memory and swap, and whether its clock is synchronised.

CPU times are differences between two readings of /proc, which the caller spaces by a second. Of processes only user,
name, CPUs and CPU time are kept, and only of those outside the job: what the job itself does is no finding.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Mapping
from dataclasses import field

from hpcpace.audit import cpusets
from hpcpace.audit.facts import Load, Memory, OtherProcesses, TimeSync
from hpcpace.audit.tree import Tree, Unreadable
from hpcpace.core.records import dataclass
from hpcpace.core.redaction import Redaction
from hpcpace.core.text import printable

WINDOW_S = 1.0
"""How long a busy node is watched: at 100 ticks a second, CPU time is then known to a hundredth of a CPU."""

_BUSY_LOAD = 0.5
_MAX_PROCESSES = 65_536
_MAX_READ_S = 0.5  # timing: for the processes of one reading
_MIN_CPUS = 0.05  # of processes that are kept: less disturbs nobody
_MAX_KEPT = 8
_KTHREADD = 2
_DAEMONS = frozenset(("chronyd", "ntpd", "systemd-timesyn", "ptp4l", "phc2sys", "openntpd", "ntpsec"))


@dataclass(frozen=True)
class _Process:
    """One process as /proc/N/stat has it: `ticks` is its CPU time; `start` differs if its number was used again."""

    name: str
    state: str
    parent: int
    ticks: int
    start: int


@dataclass(frozen=True, kw_only=True)
class LoadReading:
    """One reading of what the rates are computed from."""

    time_s: float
    cpu_ticks: tuple[int, ...] | None
    swapped_pages: int | None
    processes: dict[int, _Process] = field(default_factory=dict)
    is_complete: bool = True


def is_busy(tree: Tree) -> bool:
    """Return whether a node has enough to do that it is worth watching: a quiet one need not wait."""
    try:
        words = tree.text("proc/loadavg").split()
        return float(words[0]) >= _BUSY_LOAD or int(words[3].partition("/")[0]) > 1
    except (Unreadable, ValueError, IndexError):
        return False


def read_load(tree: Tree, *, with_processes: bool) -> LoadReading:
    """Return the counters of CPUs, swap and, if asked, all processes."""
    begin_s = time.monotonic()
    processes: dict[int, _Process] = {}
    is_complete = True
    for pid in _pids(tree) if with_processes else ():
        if time.monotonic() - begin_s > _MAX_READ_S:
            is_complete = False
            break
        try:
            processes[pid] = _process(tree.beginning(f"proc/{pid}/stat", most_bytes=4096) or "")
        except (Unreadable, ValueError, IndexError):  # it has ended
            continue
    ticks, pages = tree.fact("load/cpu", _cpu_ticks, tree), tree.fact("memory/swap", _swapped_pages, tree)
    return LoadReading(
        time_s=time.monotonic(), cpu_ticks=ticks, swapped_pages=pages, processes=processes, is_complete=is_complete
    )


def collect_load(
    tree: Tree, before: LoadReading | None, after: LoadReading | None, environ: Mapping[str, str], *, has_siblings: bool
) -> Load | None:
    """Return the load of a node; None if it has no load averages, with the reason in `tree.unreadable` if they exist.

    Args:
        tree: where to read.
        before, after: two readings; without, only averages and pressure are known.
        environ: of this process, whose job is the one that is audited.
        has_siblings: whether what started this process has started the other ranks of the job as well.
    """
    if not tree.exists("proc/loadavg"):
        return None
    averages = tree.fact("load", _averages, tree)
    if averages is None:
        return None
    pressure = _pressure(tree)
    if before is None or after is None or after.time_s <= before.time_s:
        return Load(
            averages=averages,
            pressure=pressure,
            window_s=0.0,
            used_cpus=None,
            job_cpus=0.0,
            stolen_cpus=0.0,
            num_blocked=0,
            others=None,
        )
    window_s = after.time_s - before.time_s
    scale = 1 / (os.sysconf("SC_CLK_TCK") * window_s)
    used = {pid: scale * _grown(before, pid, process) for pid, process in after.processes.items()}
    own = _own(tree, after.processes, {pid for pid, cpus in used.items() if cpus > 0}, environ, has_siblings)
    busy, stolen = _used_cpus(before, after, scale)
    blocked = [pid for pid, one in after.processes.items() if one.state == "D" and pid not in own]
    is_complete = before.is_complete and after.is_complete
    if not is_complete:
        tree.unreadable["load/processes"] = f"more than could be read in {_MAX_READ_S:g} s"
    return Load(
        averages=averages,
        pressure=pressure,
        window_s=round(window_s, 2),
        used_cpus=busy,
        job_cpus=round(sum(cpus for pid, cpus in used.items() if pid in own), 3),
        stolen_cpus=stolen,
        num_blocked=sum(pid in before.processes and before.processes[pid].state == "D" for pid in blocked),
        others=_others(tree, after.processes, used, own) if is_complete else None,
    )


def collect_memory(tree: Tree, before: LoadReading | None, after: LoadReading | None) -> Memory | None:
    """Return memory and swap of a node; None if the kernel does not say what is available."""
    # Copied trees have a part of it at most.
    if not tree.is_live and not _says_available(tree):
        return None
    swapped = None
    if before and after and before.swapped_pages is not None and after.swapped_pages is not None:
        swapped = max(0, after.swapped_pages - before.swapped_pages) * os.sysconf("SC_PAGE_SIZE")
    return tree.fact("memory", _memory, tree, swapped)


def _says_available(tree: Tree) -> bool:
    try:
        return "MemAvailable" in tree.beginning("proc/meminfo")
    except Unreadable:
        return False


def collect_time_sync(tree: Tree) -> TimeSync | None:
    """Return what the kernel knows of its clock; None for a copied tree."""
    return tree.fact("time_sync", _time_sync, tree) if tree.is_live else None


def _pids(tree: Tree) -> list[int]:
    # Tree.names keeps the first thousands by name, which are not those that were started first.
    try:
        names = os.listdir(tree.root / "proc")
    except OSError:
        return []
    return [int(name) for name in names if name.isdigit() and len(name) < 10][:_MAX_PROCESSES]


def _process(text: str) -> _Process:
    # The name stands in parentheses and may itself have some (proc_pid_stat(5)).
    begin, end = text.index("("), text.rindex(")")
    fields = text[end + 2 :].split()
    return _Process(
        text[begin + 1 : end], fields[0], int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19])
    )


def _grown(before: LoadReading, pid: int, process: _Process) -> int:
    known = before.processes.get(pid)
    return max(0, process.ticks - (known.ticks if known is not None and known.start == process.start else 0))


def _cpu_ticks(tree: Tree) -> tuple[int, ...]:
    found = re.match(r"cpu +((?:\d{1,19} ?){7,10})", tree.beginning("proc/stat", most_bytes=65_536))
    if not found:
        raise Unreadable("no line of all CPUs in /proc/stat")
    return tuple(map(int, found[1].split()))


def _used_cpus(before: LoadReading, after: LoadReading, scale: float) -> tuple[float | None, float]:
    """Return how many CPUs were busy, and how many the hypervisor took: user, nice, system, irq, softirq; steal."""
    if before.cpu_ticks is None or after.cpu_ticks is None:
        return None, 0.0
    grown = [max(0, now - then) for then, now in zip(before.cpu_ticks, after.cpu_ticks, strict=False)]
    stolen = grown[7] if len(grown) > 7 else 0
    return round(scale * (sum(grown[:3]) + sum(grown[5:7])), 3), round(scale * stolen, 3)


def _swapped_pages(tree: Tree) -> int:
    counts = re.findall(r"^pswp(?:in|out) (\d{1,19})$", tree.beginning("proc/vmstat", most_bytes=65_536), re.MULTILINE)
    if len(counts) != 2:
        raise Unreadable("no pswpin and pswpout in /proc/vmstat")
    return sum(map(int, counts))


def _averages(tree: Tree) -> tuple[float, ...]:
    words = tree.text("proc/loadavg").split()[:3]
    if len(words) != 3 or not all(re.fullmatch(r"\d{1,9}\.\d\d", word) for word in words):
        raise Unreadable(f"{' '.join(words)[:40]!r} are no load averages")
    return tuple(map(float, words))


def _pressure(tree: Tree) -> dict[str, float]:
    """Return the pressures of the last 10 s; empty for a kernel without them (Documentation/accounting/psi.rst)."""
    found = {}
    for name in ("cpu", "memory", "io"):
        try:
            text = tree.beginning(f"proc/pressure/{name}", most_bytes=4096)
        except Unreadable:
            continue
        for kind, value in re.findall(r"^(some|full) avg10=(\d{1,3}\.\d\d) ", text, re.MULTILINE):
            found[f"{name} {kind}"] = float(value)
    return found


def _own(
    tree: Tree,
    processes: Mapping[int, _Process],
    active: set[int],
    environ: Mapping[str, str],
    has_siblings: bool,
) -> set[int]:
    """Return the processes of the job: what started this one, what it has started, and what Slurm counts to the job."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    own, parent = {os.getpid()}, os.getpid()
    while parent in processes and (parent := processes[parent].parent) > 1 and parent not in own:
        own.add(parent)
    waiting = [os.getppid() if has_siblings and os.getppid() > 1 else os.getpid()]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            own.add(child)
            waiting.append(child)
    job_id = environ.get("SLURM_JOB_ID", "")
    if re.fullmatch(r"\d{1,12}", job_id):
        own |= {pid for pid in active - own if _is_of_job(tree, pid, job_id)}
    return own


def _is_of_job(tree: Tree, pid: int, job_id: str) -> bool:
    try:
        groups = tree.beginning(f"proc/{pid}/cgroup")
    except Unreadable:
        groups = ""
    if re.search(rf"/job_{job_id}(/|$)", groups, re.MULTILINE):
        return True
    try:  # Slurm without cgroups; only one's own processes can be read
        content = tree.content(f"proc/{pid}/environ", most_bytes=1 << 18)
    except Unreadable:
        return False
    return f"SLURM_JOB_ID={job_id}".encode() in content.split(b"\0")


def _others(
    tree: Tree, processes: Mapping[int, _Process], used: Mapping[int, float], own: set[int]
) -> tuple[OtherProcesses, ...]:
    users = _users(tree)
    found: dict[tuple[str, str, str], list[float]] = {}
    by_use = sorted((pid for pid in used if used[pid] > 0 and pid not in own), key=lambda pid: -used[pid])
    for pid in by_use[: 64 * _MAX_KEPT]:
        process = processes[pid]
        if _KTHREADD in (pid, process.parent):
            continue
        key = _user(tree, pid, users), _name(process.name), _allowed(tree, pid)
        found.setdefault(key, []).append(used[pid])
    kept = [
        OtherProcesses(user=user, name=name, count=len(each), used_cpus=round(sum(each), 3), cpus=cpus)
        for (user, name, cpus), each in found.items()
        if sum(each) >= _MIN_CPUS
    ]
    return tuple(sorted(kept, key=lambda other: -other.used_cpus)[:_MAX_KEPT])


def _name(name: str) -> str:
    return printable(Redaction().text(name))[:16]


def _allowed(tree: Tree, pid: int) -> str:
    try:
        text = tree.beginning(f"proc/{pid}/status")
        found = re.search(r"^Cpus_allowed_list:[ \t]*([0-9,-]*)$", text, re.MULTILINE)
        return cpusets.format_list(cpusets.parse_list(found[1])) if found else ""
    except (Unreadable, ValueError):
        return ""


def _user(tree: Tree, pid: int, users: Mapping[int, str]) -> str:
    try:
        uid = os.stat(tree.root / "proc" / str(pid)).st_uid
    except OSError:
        return "?"
    return users.get(uid, str(uid))


def _users(tree: Tree) -> dict[int, str]:
    """Return the names of local users: a directory service might not answer."""
    try:
        lines = tree.beginning("etc/passwd", most_bytes=262_144).split("\n")
    except Unreadable:
        return {}
    rows = [line.split(":") for line in lines]
    return {int(row[2]): printable(row[0])[:32] for row in rows if len(row) > 2 and re.fullmatch(r"\d{1,10}", row[2])}


def _memory(tree: Tree, swapped: int | None) -> Memory:
    pairs = re.findall(r"^(\w+): +(\d{1,15})(?: kB)?$", tree.beginning("proc/meminfo"), re.MULTILINE)
    values = {name: int(value) for name, value in pairs}
    if "MemAvailable" not in values or "MemTotal" not in values:
        raise Unreadable("no MemAvailable in /proc/meminfo")
    try:
        overcommit: int | None = tree.number("proc/sys/vm/overcommit_memory")
    except Unreadable:
        overcommit = None
    kilo = 1024
    return Memory(
        total_bytes=kilo * values["MemTotal"],
        available_bytes=kilo * values["MemAvailable"],
        swap_total_bytes=kilo * values.get("SwapTotal", 0),
        swap_free_bytes=kilo * values.get("SwapFree", 0),
        committed_bytes=kilo * values.get("Committed_AS", 0),
        commit_limit_bytes=kilo * values.get("CommitLimit", 0),
        overcommit=overcommit,
        huge_free_bytes=kilo * values.get("HugePages_Free", 0) * values.get("Hugepagesize", 0),
        swapped_bytes=swapped,
    )


class _Timex(ctypes.Structure):
    """struct timex of sys/timex.h, up to the status; the rest is room for what the kernel writes."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 48),
    )


_STA_UNSYNC = 0x40


def _time_sync(tree: Tree) -> TimeSync:
    timex = _Timex(modes=0)
    try:
        code = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        raise Unreadable("this system has no adjtimex") from None
    if code < 0:
        raise Unreadable(f"adjtimex: {os.strerror(ctypes.get_errno()).lower()}")
    is_synchronised = not timex.status & _STA_UNSYNC
    # Thousands of names are read only where they explain something: a session starts with this.
    names = set() if is_synchronised else {tree.word_or_empty(f"proc/{pid}/comm") for pid in _pids(tree)}
    return TimeSync(
        is_synchronised=is_synchronised,
        error_s=timex.esterror / 1e6,
        max_error_s=timex.maxerror / 1e6,
        daemons=tuple(sorted(names & _DAEMONS)),
    )
