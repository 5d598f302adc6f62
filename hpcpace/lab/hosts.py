"""Hosts of a lab: processes with their own network, clock, host name, /tmp, /dev/shm and control group.

All processes of a host descend from its first process, a shell that runs slurmd. If that ends, the kernel ends
everything on the host at once and silently, like a power cut. All of this is called from inside the lab's namespaces.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hpcpace.core.errors import HpcpaceError
from hpcpace.lab.cgroups import HostCgroup
from hpcpace.lab.fabric import connect, set_up, shape, unplug
from hpcpace.lab.files import LabFiles
from hpcpace.lab.namespaces import host_command
from hpcpace.lab.plan import CONTROLLER_ADDRESS, PREFIX_LENGTH, SLURMD_PORT, LabHost, LabPlan, hardware_address

_TMP_SOURCE = "lab-tmp"
_END_TIMEOUT_S = 10.0
_MOST_LEARNED = 512  # gc_thresh2 of the kernel's Documentation/networking/ip-sysctl.rst
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
    """Return the commands that tell a host all Ethernet addresses; none where all hosts can learn them."""
    if len(plan.hosts) ** 2 <= _MOST_LEARNED:
        return []
    addresses = [CONTROLLER_ADDRESS, *(other.address for other in plan.hosts if other != host)]
    return [f"neigh add {one} lladdr {hardware_address(one)} dev eth0 nud permanent" for one in addresses]


def is_lab_host(mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Return whether the calling process is on a host of a lab, not on the machine or the lab's login node."""
    return f"{_TMP_SOURCE} /tmp " in mounts.read_text()


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
