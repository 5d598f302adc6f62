"""Hosts of a lab: processes with their own network, clock, /tmp and control group.

All processes of a host descend from its first process, a shell that runs slurmd. If that ends, the kernel ends
everything on the host at once and silently, like a power cut. All of this is called from inside the lab's namespaces.
A host may also run processes besides those of its job, which take cores or memory bandwidth.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path

from hpcpace.core.errors import HpcpaceError
from hpcpace.core.records import dataclass
from hpcpace.lab.emulated import STEPS_BYTES, STEPS_FILE
from hpcpace.lab.fabric import connect, host_command, lab_environ, set_up, shape, unplug
from hpcpace.lab.plan import (
    CONTROLLER_ADDRESS,
    PREFIX_LENGTH,
    SLURMD_PORT,
    LabFiles,
    LabHost,
    LabPlan,
    hardware_address,
)

_CONTROLLERS = ("cpu", "freezer")
# Short, so that a limited host runs slowly instead of being stopped for most of a training step.
_PERIOD_US = 10_000
_MIN_QUOTA_US = 1_000
_REMOVE_TIMEOUT_S = 10.0
# Larger than the last level of any cache, so that every copy goes to memory.
_COPIED_BYTES = 256 << 20


def _trees(mounts: Path = Path("/proc/mounts")) -> dict[str, tuple[Path, bool]]:
    """Return the mount point of each controller's tree, and whether it is cgroup v2."""
    found: dict[str, tuple[Path, bool]] = {}
    unified: Path | None = None
    for line in mounts.read_text().splitlines():
        _, place, kind, options, *_ = line.split(" ")
        if kind == "cgroup":
            found |= {name: (Path(place), False) for name in _CONTROLLERS if name in options.split(",")}
        elif kind == "cgroup2":
            unified = unified or Path(place)
    if unified is not None:
        found = {name: found.get(name, (unified, True)) for name in _CONTROLLERS}
    return found


@dataclass(frozen=True)
class HostCgroup:
    """The control group of one host, to limit its CPU time and to freeze its processes; `create` makes its folders.

    With cgroup v1 it has a folder in each controller's tree, with v2 a single folder. Control groups are the only part
    of a lab that the kernel does not remove with its processes.
    """

    lab: str
    host: str

    def folders(self) -> dict[str, tuple[Path, bool]]:
        """Return the folder of each controller, and whether it is cgroup v2."""
        return {name: (tree / f"hpcpace-lab-{self.lab}" / self.host, v2) for name, (tree, v2) in _trees().items()}

    def create(self) -> list[Path]:
        """Create the folders and return them."""
        places = self.folders()
        for folder, is_v2 in places.values():
            folder.mkdir(parents=True, exist_ok=True)
            if is_v2:
                _enable_cpu(folder)
        return self.paths()

    def paths(self) -> list[Path]:
        """Return the folders; a process joins by writing 0 to `cgroup.procs` in each."""
        return sorted({folder for folder, _ in self.folders().values()})

    def limit_cpu(self, cores: float | None) -> None:
        """Limit the host to this many cores' worth of CPU time; None removes the limit.

        Raises:
            HpcpaceError: the machine has no cpu controller.
        """
        folder, is_v2 = self._place("cpu", "limit CPU time")
        quota_us = -1 if cores is None else max(round(cores * _PERIOD_US), _MIN_QUOTA_US)
        try:
            if is_v2:
                (folder / "cpu.max").write_text(f"{'max' if quota_us < 0 else quota_us} {_PERIOD_US}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        except OSError as error:
            raise HpcpaceError(f"cannot limit CPU time in {folder}: {error.strerror}") from error

    def freeze(self, frozen: bool) -> None:
        """Stop all processes of the host, or let them continue.

        Raises:
            HpcpaceError: the machine has no freezer controller.
        """
        folder, is_v2 = self._place("freezer", "freeze processes")
        name, words = ("cgroup.freeze", ("0", "1")) if is_v2 else ("freezer.state", ("THAWED", "FROZEN"))
        (folder / name).write_text(words[frozen])

    def _place(self, controller: str, purpose: str) -> tuple[Path, bool]:
        places = self.folders()
        if controller not in places:
            raise HpcpaceError(f"cannot {purpose}: this machine mounts no cgroup tree with the {controller} controller")
        return places[controller]


def weigh_hosts(lab: str, num_hosts: int) -> None:
    """Give a lab as much weight on its machine as that many other processes, or control groups, have together.

    Else all hosts together would get as much processor time as one busy process of the machine. Control groups of the
    hosts exist already; a machine without the cpu controller has no weights.
    """
    for tree, is_v2 in {place for name, place in _trees().items() if name == "cpu"}:
        folder = tree / f"hpcpace-lab-{lab}"
        name, of_one, most = ("cpu.weight", 100, 10_000) if is_v2 else ("cpu.shares", 1024, 262_144)
        with suppress(OSError):  # a lab works without
            (folder / name).write_text(str(min(of_one * num_hosts, most)))


def remove_cgroups(lab: str) -> None:
    """Remove the folders that `HostCgroup.create` made for a lab, after its processes have ended.

    Raises:
        HpcpaceError: a folder still has processes.
    """
    deadline_s = time.monotonic() + _REMOVE_TIMEOUT_S
    for folder in _folders(lab):
        while folder.exists():
            try:
                folder.rmdir()
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise HpcpaceError(f"cannot remove {folder}: {error.strerror}") from error
                time.sleep(0.02)


def thaw_all(lab: str) -> None:
    """Let all frozen processes of a lab continue: with cgroup v1 a frozen process cannot die."""
    for folder in _folders(lab):
        if (folder / "freezer.state").exists() and os.access(folder / "freezer.state", os.W_OK):
            (folder / "freezer.state").write_text("THAWED")


def _folders(lab: str) -> Iterator[Path]:
    for tree in sorted({tree for tree, _ in _trees().values()}):
        parent = tree / f"hpcpace-lab-{lab}"
        if parent.is_dir():
            yield from sorted(path for path in parent.iterdir() if path.is_dir())
            yield parent


def _enable_cpu(folder: Path) -> None:
    for above in (folder.parent.parent, folder.parent):
        control = above / "cgroup.subtree_control"
        if "cpu" not in control.read_text().split():
            try:
                control.write_text("+cpu")
            except OSError:  # the lab works without; setting a limit fails later with the reason
                return


_TMP_SOURCE = "lab-tmp"
_END_TIMEOUT_S = 10.0
_MAX_LEARNED = 512  # gc_thresh2 of the kernel's Documentation/networking/ip-sysctl.rst
_LISTENING = "0A"  # TCP_LISTEN in the kernel's include/net/tcp_states.h
# Why the script does what it does:
# - /proc is still that of the lab when the shell reads its own PID.
# - A host sees its own devices in /sys only if it mounts /sys itself.
# - slurmd of Slurm 22.05 refuses a tree that mixes cgroup v1 and v2, so it gets a plain v1 tree. If the machine has v2
#   only, empty folders replace it: none of the plugins in use reads them.
# - Each host has its own /dev/shm because MPICH names shared memory after job and step: one of two hosts of a job would
#   find the other's. Each has its own /tmp because Slurm's pmix plugin names folders there after the step only.
# - All network namespaces of a machine share one table of neighbours, of 1,024 by default, from which learned ones are
#   removed beyond 512; connections then fail with "No buffer space available". Fixed ones do not count.
_FIRST_PROCESS = """
for group in $LAB_CGROUPS; do echo 0 > "$group/cgroup.procs"; done
read -r pid _ </proc/self/stat
mount -t proc proc /proc
mount -t sysfs sysfs /sys
hostname "$LAB_HOST"
mount -t tmpfs -o "mode=1777,size=$LAB_TMP_SIZE" $LAB_TMP_SOURCE "$LAB_TMP"
printf '%s\\n' "$LAB_SHARED" | while IFS= read -r path; do
    [ -n "$path" ] || continue
    mkdir -p "$LAB_TMP/${path#/tmp/}"
    mount --rbind "$path" "$LAB_TMP/${path#/tmp/}"
done
mount --rbind "$LAB_TMP" /tmp
mount -t tmpfs -o mode=1777 lab-shm /dev/shm
head -c "$LAB_STEPS_BYTES" /dev/zero >"/dev/shm/$LAB_STEPS"
mount -t tmpfs lab-cgroup /sys/fs/cgroup
for controller in cpu cpuacct cpuset memory devices freezer; do
    mkdir "/sys/fs/cgroup/$controller"
    mount -t cgroup -o "$controller" lab-cgroup "/sys/fs/cgroup/$controller" 2>/dev/null || :
done
echo "$pid"
read -r _
echo 1 2>/dev/null >/proc/sys/net/ipv6/conf/all/disable_ipv6 || :
ip link set lo up
ip addr add "$LAB_ADDRESS" dev eth0
ip link set eth0 up
printf '%s\\n' "$LAB_NEIGHBOURS" | ip -batch -
tc qdisc add dev eth0 root $LAB_SHAPE
exec </dev/null >>"$LAB_LOG" 2>&1
slurmd -D -N "$LAB_HOST" -f "$SLURM_CONF" &
wait $!
"""


def start_hosts(
    plan: LabPlan,
    files: LabFiles,
    hosts: Sequence[LabHost],
    environ: dict[str, str],
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Start hosts: their namespaces, then their links, then slurmd.

    Args:
        plan: plan of the lab.
        files: files of the lab.
        hosts: hosts to start.
        environ: environment of the hosts' processes.
        progress: called with the number of hosts started so far.

    Raises:
        HpcpaceError: a host could not be set up.
    """
    starting = [_start(plan, files, host, environ) for host in hosts]
    weigh_hosts(files.name, len(plan.hosts))
    pids = []
    for number, (host, process) in enumerate(zip(hosts, starting, strict=True), start=1):
        assert process.stdout is not None
        answer = process.stdout.readline().strip()
        if not answer:
            raise HpcpaceError(f"cannot set up host {host.name}: {files.log(host.name).read_text().strip()}")
        files.pid(host.name).write_text(answer)
        pids.append(int(answer))
        progress(number)
    connect(plan, hosts, pids)
    for process in starting:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.close()
        process.stdout.close()


def _start(plan: LabPlan, files: LabFiles, host: LabHost, environ: dict[str, str]) -> subprocess.Popen[str]:
    own_tmp = files.mounts_dir / host.name
    own_tmp.mkdir(parents=True, exist_ok=True)
    files.spool_dir(host.name).mkdir(exist_ok=True)
    cgroup = HostCgroup(files.name, host.name)
    groups = cgroup.create()
    if plan.config.cpu_quota is not None:
        cgroup.limit_cpu(plan.config.cpu_quota)
    settings = {
        "LAB_HOST": host.name,
        "LAB_ADDRESS": f"{host.address}/{PREFIX_LENGTH}",
        "LAB_NEIGHBOURS": "\n".join(_fixed_neighbours(plan, host)),
        "LAB_SHAPE": shape(plan.links[host.name].rate_bps),
        "LAB_CGROUPS": " ".join(map(str, groups)),
        "LAB_TMP": str(own_tmp),
        "LAB_TMP_SOURCE": _TMP_SOURCE,
        "LAB_TMP_SIZE": str(plan.tmp_size_bytes),
        "LAB_SHARED": "\n".join(plan.config.share),
        "LAB_STEPS": STEPS_FILE,
        "LAB_STEPS_BYTES": str(STEPS_BYTES),
        "LAB_LOG": str(files.log(host.name)),
    }
    namespaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--time", "--fork", "--kill-child=KILL"]
    clock = ["--monotonic", str(host.clock_offset_s), "--boottime", str(host.clock_offset_s)]
    with files.log(host.name).open("ab") as log:
        return subprocess.Popen(
            ["unshare", *namespaces, *clock, "sh", "-ec", _FIRST_PROCESS, host.name],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**environ, **settings},
            start_new_session=True,
        )


def _fixed_neighbours(plan: LabPlan, host: LabHost) -> list[str]:
    """Return the commands that give a host all Ethernet addresses; none where all hosts can learn them."""
    if len(plan.hosts) ** 2 <= _MAX_LEARNED:
        return []
    # Not "add": a host that was asked for its address meanwhile has learned who asked.
    addresses = [CONTROLLER_ADDRESS, *(other.address for other in plan.hosts if other != host)]
    return [f"neigh replace {one} lladdr {hardware_address(one)} dev eth0 nud permanent" for one in addresses]


def is_lab_host() -> bool:
    """Return whether the calling process is on a host of a lab, not on the machine or the lab's login node."""
    return f"{_TMP_SOURCE} /tmp " in Path("/proc/self/mounts").read_text()


def host_pid(files: LabFiles, host: LabHost) -> int | None:
    """Return the first process of a host by its PID in the lab; None if the host is dead."""
    try:
        pid = int(files.pid(host.name).read_text())
        # The PID may have been reused: only the host's first process has the host's name in its command line.
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return pid if host.name.encode() in words else None


def living_pid(files: LabFiles, host: LabHost) -> int:
    """Return the first process of a host.

    Raises:
        HpcpaceError: the host is dead.
    """
    pid = host_pid(files, host)
    if pid is None:
        raise HpcpaceError(
            f"host {host.name} is dead: undo the fault that killed it (`hpcpace lab fault list`); if no fault did, run "
            f"`hpcpace lab fault kill-host {host.name}` and undo that to boot it again"
        )
    return pid


def has_slurmd(pid: int) -> bool:
    """Return whether slurmd listens on the host with this first process; it starts to some time after the boot."""
    try:
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False
    sockets = (line.split()[1:4] for line in lines)
    return any(local.endswith(f":{SLURMD_PORT:04X}") and state == _LISTENING for local, _, state in sockets)


def kill_host(plan: LabPlan, files: LabFiles, host: LabHost) -> None:
    """End everything on a host at once and silently, like a power cut.

    If it is dead already, only remove its link, so that it can be booted again.

    Raises:
        HpcpaceError: the host does not end.
    """
    pid, link = host_pid(files, host), plan.links[host.name]
    if pid is None:
        with suppress(HpcpaceError):  # the kernel has removed it already
            unplug(link)
        return
    # Do this first: otherwise the kernel notifies every peer while it closes dead connections.
    set_up(link, False)
    HostCgroup(files.name, host.name).freeze(False)
    os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + _END_TIMEOUT_S
    while host_pid(files, host) is not None:
        if time.monotonic() > deadline_s:
            raise HpcpaceError(f"host {host.name} does not end within {_END_TIMEOUT_S:g} s")
        time.sleep(0.01)
    # Connections without an answer would keep the host's end of the link alive for minutes. Without connections, the
    # kernel may have removed both ends already.
    with suppress(HpcpaceError):
        unplug(link)


def command_on(files: LabFiles, host: LabHost, command: Sequence[str], *, folder: Path = Path("/")) -> list[str]:
    """Return the command line that runs a command on a host, as one of its processes.

    Raises:
        HpcpaceError: the host is dead.
    """
    groups = HostCgroup(files.name, host.name).paths()
    return host_command(living_pid(files, host), command, folder=folder, cgroups=groups)


class LoadKind(StrEnum):
    """The resource that another process on the host takes from a job."""

    CPU = "cpu"
    MEMORY = "memory"


def load_command(load: LoadKind, core: int | None) -> list[str]:
    """Return a command that never ends and takes a core, or memory bandwidth as well.

    Args:
        load: what it takes.
        core: the only core that it runs on; None for any.
    """
    pin = "" if core is None else f"import os; os.sched_setaffinity(0, {{{core}}})\n"
    work = "while True: pass"
    if load is LoadKind.MEMORY:
        work = f"a, b = bytearray({_COPIED_BYTES}), bytearray({_COPIED_BYTES})\nwhile True: b[:] = a"
    return [sys.executable, "-I", "-c", pin + work]


@contextmanager
def running_on(files: LabFiles, host: LabHost, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command on a host during the block, as one of its processes; its process group ends with the block."""
    environ, null = lab_environ(files), subprocess.DEVNULL
    line = command_on(files, host, command)
    process = subprocess.Popen(line, stdin=null, stdout=null, stderr=null, env=environ, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
