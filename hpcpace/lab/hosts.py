"""One host of a lab: processes with a network, clock, host name, /tmp, /dev/shm and control group of their own.

A host lives below its first process, a shell that runs slurmd: without it the kernel ends everything on the host at
once, as a power cut does, with no word to anybody. All of this is called from inside the lab's namespaces.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hpcpace.errors import HpcpaceError
from hpcpace.lab.cgroups import HostCgroup
from hpcpace.lab.fabric import connect, set_up, shape, unplug
from hpcpace.lab.files import LabFiles
from hpcpace.lab.namespaces import host_command
from hpcpace.lab.plan import PREFIX_LENGTH, SLURMD_PORT, LabHost, LabPlan

_TMP_SOURCE = "lab-tmp"
_END_TIMEOUT_S = 10.0
_LISTENING = "0A"  # TCP_LISTEN in the kernel's include/net/tcp_states.h
# Facts behind the lines:
# - /proc is still that of the lab when the shell reads its own number.
# - A host sees its own devices in /sys only when it mounts that itself.
# - slurmd of Slurm 22.05 refuses a tree that mixes cgroup v1 and v2, so it gets a plain v1 one. Where the machine has
#   v2 only, empty folders take its place: none of the plugins in use looks into them.
# - /dev/shm is its own because MPICH names its shared memory after job and step: of two hosts of a job one would find
#   the other's. /tmp is its own because Slurm's pmix plugin keeps folders there that bear only the step's name.
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
    """Start hosts: their namespaces, then their links, then their slurmd.

    Args:
        plan: of the lab.
        files: of the lab.
        hosts: those to start.
        environ: of the hosts' processes.
        progress: called with the number of hosts that have come so far.

    Raises:
        HpcpaceError: a host could not be set up.
    """
    starting = [_start(plan, files, host, environ) for host in hosts]
    pids = []
    for number, (host, process) in enumerate(zip(hosts, starting, strict=True), start=1):
        assert process.stdout is not None
        answer = process.stdout.readline().strip()
        if not answer:
            raise HpcpaceError(f"host {host.name} was not set up: {files.log(host.name).read_text().strip()}")
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
        "LAB_SHAPE": shape(plan.links[host.name].rate_bps),
        "LAB_CGROUPS": " ".join(map(str, groups)),
        "LAB_TMP": str(own_tmp),
        "LAB_TMP_SOURCE": _TMP_SOURCE,
        "LAB_TMP_SIZE": str(plan.tmp_size_bytes),
        "LAB_SHARED": "\n".join(plan.config.share),
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


def is_lab_host(mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Return whether the calling process is on a host of a lab, rather than on the machine or with the controller."""
    return f"{_TMP_SOURCE} /tmp " in mounts.read_text()


def host_pid(files: LabFiles, host: LabHost) -> int | None:
    """Return the first process of a host by its number in the lab, None where the host is dead."""
    try:
        pid = int(files.pid(host.name).read_text())
        # What tells the host's first process from another one of the same number: the host's own name in its command.
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
            f"host {host.name} is dead: undo the fault that killed it (`hpcpace lab fault list`), or, where none did, "
            f"let `hpcpace lab fault kill-host {host.name}` and its undo boot it again"
        )
    return pid


def has_slurmd(pid: int) -> bool:
    """Return whether slurmd takes calls on the host of this first process, which it does some time after the boot."""
    try:
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False
    sockets = (line.split()[1:4] for line in lines)
    return any(local.endswith(f":{SLURMD_PORT:04X}") and state == _LISTENING for local, _, state in sockets)


def kill_host(plan: LabPlan, files: LabFiles, host: LabHost) -> None:
    """End everything on a host at once and without a word, as a power cut does.

    Where it is dead already, only its link is removed, so that it can be booted again.

    Raises:
        HpcpaceError: it does not end.
    """
    pid, link = host_pid(files, host), plan.links[host.name]
    if pid is None:
        with suppress(HpcpaceError):  # the kernel has removed it by itself
            unplug(link)
        return
    # First of all: else the kernel takes leave of every peer while it closes the connections of the dead.
    set_up(link, False)
    HostCgroup(files.name, host.name).freeze(False)
    os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + _END_TIMEOUT_S
    while host_pid(files, host) is not None:
        if time.monotonic() > deadline_s:
            raise HpcpaceError(f"host {host.name} does not end within {_END_TIMEOUT_S:g} s")
        time.sleep(0.01)
    # Connections that nobody answers would keep the host's end of the link for minutes. Without any the kernel may have
    # removed both ends already.
    with suppress(HpcpaceError):
        unplug(link)


def command_on(files: LabFiles, host: LabHost, command: Sequence[str], *, folder: Path = Path("/")) -> list[str]:
    """Return the command line that runs a command on a host, as one of its processes.

    Raises:
        HpcpaceError: the host is dead.
    """
    groups = HostCgroup(files.name, host.name).paths()
    return host_command(living_pid(files, host), command, folder=folder, cgroups=groups)
