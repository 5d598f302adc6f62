"""The lab's network and namespaces: bridges as switches, connected by veth pairs shaped at both ends.

All of it is in the lab's own network namespace. A token bucket (tc-tbf) limits each rate, and its counters show what
went over the wire. Unlike the device's counters, they include the headers of every segment, because a packet that the
kernel has not segmented yet is charged as its segments (qdisc_pkt_len in the kernel's net/core/dev.c).

All of a lab descends from one process, its anchor. The lab's switches are in the anchor's network namespace and its
processes in the anchor's PID namespace. So ending the anchor ends them all, and nothing in the lab can reach a process
or an interface of the machine.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

from hpcpace.core.environment import process_environ
from hpcpace.core.errors import HpcpaceError, UsageError
from hpcpace.core.records import dataclass
from hpcpace.lab.emulated import preloading
from hpcpace.lab.plan import (
    CONTROLLER_ADDRESS,
    PREFIX_LENGTH,
    SPINE,
    LabFiles,
    LabHost,
    LabPlan,
    Link,
    hardware_address,
    read_config,
)

Way = Literal["up", "down"]
"""A direction of a link: towards the spine, and back."""
WAYS: tuple[Way, ...] = get_args(Way)

_MIN_BURST_BYTES = 128 << 10
_QUEUE_LATENCY_MS = 50
_LARGEST_MTU = 65535
_MAX_SEGMENTS = 65535
"""The kernel's default of gso_max_segs (GSO_MAX_SEGS in include/linux/netdevice.h)."""


@dataclass(frozen=True, kw_only=True)
class LinkCounters:
    """Traffic over a link since the lab came up, including Ethernet, IP and TCP headers.

    Attributes:
        name: name of the link.
        rate_bps: current rate in each direction, in bits per second.
        is_up: whether it has a carrier.
        tx_bytes: sent upwards, by the host or by the leaf.
        rx_bytes: sent downwards.
        dropped: packets that the full queues of both ends dropped.
    """

    name: str
    rate_bps: int
    is_up: bool
    tx_bytes: int
    rx_bytes: int
    dropped: int


def shape(rate_bps: int) -> str:
    """Return the tc arguments that limit a rate: queues of 50 ms, bursts of at least a millisecond."""
    burst = max(_MIN_BURST_BYTES, rate_bps // 8 // 1000)
    return f"tbf rate {rate_bps}bit burst {burst}b latency {_QUEUE_LATENCY_MS}ms"


def build_switches(plan: LabPlan) -> None:
    """Create leaves, spine, uplinks and the controller's address in the caller's network namespace."""
    mtu = plan.config.mtu
    # A bridge takes the lowest address of its ports unless it has its own. The leaves share this namespace with the
    # controller and would answer for it: hosts would then lose the controller when a neighbour dies.
    links = ["link set lo up", f"link add {SPINE} address {hardware_address(CONTROLLER_ADDRESS)} type bridge"]
    links += [f"link add {leaf} type bridge" for leaf in plan.leaves]
    links += [f"link set {leaf} arp off" for leaf in plan.leaves]
    links += [f"link set {bridge} mtu {mtu} up" for bridge in (SPINE, *plan.leaves)]
    for leaf in plan.leaves:
        uplink = plan.links[leaf]
        links += [
            f"link add {uplink.lower} mtu {mtu} type veth peer name {uplink.upper} mtu {mtu}",
            f"link set {uplink.lower} master {leaf} up",
            f"link set {uplink.upper} master {SPINE} up",
        ]
    links.append(f"addr add {CONTROLLER_ADDRESS}/{PREFIX_LENGTH} dev {SPINE}")
    _batch("ip", links)
    uplinks = [plan.links[leaf] for leaf in plan.leaves]
    _batch("tc", (f"qdisc add dev {end} root {shape(up.rate_bps)}" for up in uplinks for end in (up.lower, up.upper)))


def connect(plan: LabPlan, hosts: Sequence[LabHost], pids: Sequence[int]) -> None:
    """Give each host its eth0 and connect the other end to its leaf; `pids` are the hosts' first processes."""
    mtu = plan.config.mtu
    links = []
    for host, pid in zip(hosts, pids, strict=True):
        link = plan.links[host.name]
        links += [
            f"link add {link.upper} mtu {mtu} type veth "
            f"peer name {link.lower} mtu {mtu} address {host.hardware_address} netns {pid}",
            f"link set {link.upper} master {host.leaf} up",
        ]
    _batch("ip", links)
    rates = ((plan.links[host.name].upper, plan.links[host.name].rate_bps) for host in hosts)
    _batch("tc", (f"qdisc add dev {upper} root {shape(rate_bps)}" for upper, rate_bps in rates))


def set_rate(link: Link, rate_bps: int, *, ways: Collection[Way] = WAYS, host_pid: int | None) -> None:
    """Change the rate of a link in some directions; `host_pid` is the first process of the host below it, if any."""
    for way, end, pid in (("up", link.lower, host_pid), ("down", link.upper, None)):
        if way in ways:
            _batch("tc", [f"qdisc change dev {end} root {shape(rate_bps)}"], host_pid=pid)


def set_up(link: Link, is_up: bool) -> None:
    """Bring a link up or down at the switch above it."""
    _batch("ip", [f"link set {link.upper} {'up' if is_up else 'down'}"])


def unplug(link: Link) -> None:
    """Remove a host's link; `connect` creates it again."""
    _batch("ip", [f"link delete {link.upper}"])


def set_mtu(host_pid: int, mtu: int) -> None:
    """Change the MTU of a host's eth0."""
    _batch("ip", [f"link set eth0 mtu {mtu}"], host_pid=host_pid)


def detour_devices(link: Link) -> tuple[str, str]:
    """Return the devices between which packets of a link on a detour are forwarded: below, and above."""
    return link.upper, f"{link.name}-out"


def detour(link: Link, switch: str) -> None:
    """Take a link off its switch, and connect a new device pair there: nothing passes until somebody forwards."""
    below, above = detour_devices(link)
    inside = f"{link.name}-in"
    if _has_device(above):
        raise HpcpaceError(f"{link.name} is on a detour already: undo the latency or reordering that it has")
    _batch(
        "ip",
        [
            f"link add {inside} type veth peer name {above}",
            # This namespace has the controller's address, for which nobody else must answer.
            *(f"link set {end} arp off addrgenmode none" for end in (inside, above, below)),
            f"link set {above} mtu {_LARGEST_MTU} up",
            f"link set {inside} mtu {_LARGEST_MTU} up",
            f"link set {below} nomaster",
            f"link set {inside} master {switch}",
        ],
    )


def end_detour(link: Link, switch: str) -> None:
    """Connect a link with its switch again, and remove the pair; also what a detour that failed halfway has left."""
    below, above = detour_devices(link)
    if _has_device(above):
        _batch("ip", [f"link delete {above}"])
    _batch("ip", [f"link set {below} master {switch}", f"link set {below} arp on"])


def lose_packets(link: Link, share: float, *, ways: Collection[Way] = WAYS, host_pid: int | None) -> None:
    """Lose a share of the packets that arrive at the ends of a link, at random; 0 loses none.

    Sent packets are cut to the MTU first (gso_max_segs): else the kernel would pass on up to 64 KiB as one packet, and
    a lost one would be a burst.

    Args:
        link: the link.
        share: from 0 to 1, in steps of 1/10,000.
        ways: directions in which packets are lost.
        host_pid: first process of the host below it, if any.
    """
    for way, end, pid in (("up", link.upper, None), ("down", link.lower, host_pid)):
        if way not in ways:
            continue
        table = f"hpcpace-loss-{end}"
        rules = [f"add table netdev {table}", f"delete table netdev {table}"]
        if share:
            hook = f"type filter hook ingress device {end} priority 0;"
            drop = f"numgen random mod 10000 < {max(1, round(share * 10000))} counter drop"
            rules += [f"add table netdev {table}", f"add chain netdev {table} arriving {{ {hook} }}"]
            rules += [f"add rule netdev {table} arriving {drop}"]
        _run([*_inside(pid), "nft", "-f", "-"], text="\n".join(rules) + "\n")
    cut_packets(link, bool(share), ways=ways, host_pid=host_pid)


def cut_packets(link: Link, is_on: bool, *, ways: Collection[Way] = WAYS, host_pid: int | None) -> None:
    """Cut what enters a link to its MTU, or let the kernel pass on up to 64 KiB as one packet again."""
    for way, end, pid in (("up", link.lower, host_pid), ("down", link.upper, None)):
        if way in ways:
            _batch("ip", [f"link set {end} gso_max_segs {1 if is_on else _MAX_SEGMENTS}"], host_pid=pid)


def read_counters(plan: LabPlan, pids: dict[str, int]) -> dict[str, LinkCounters]:
    """Return the counters of all links by name; `pids` are the first processes of the hosts that are alive."""
    shaped = _shapers(None)
    carrier = {device["ifname"]: device.get("operstate") for device in _json("ip", "link", "show")}
    counters = {}
    for link in plan.links.values():
        upper = shaped.get(link.upper)
        lower = _shapers(pids[link.name]).get("eth0") if link.name in pids else shaped.get(link.lower)
        ends = [end for end in (upper, lower) if end is not None]
        counters[link.name] = LinkCounters(
            name=link.name,
            rate_bps=min((int(end["options"]["rate"]) * 8 for end in ends), default=0),
            is_up=carrier.get(link.upper) == "UP",
            tx_bytes=int(lower["bytes"]) if lower else 0,
            rx_bytes=int(upper["bytes"]) if upper else 0,
            dropped=sum(int(end["drops"]) for end in ends),
        )
    return counters


def _shapers(host_pid: int | None) -> dict[str, Any]:
    queues = _json("tc", "-s", "qdisc", "show", host_pid=host_pid)
    return {queue["dev"]: queue for queue in queues if queue["kind"] == "tbf"}


def _has_device(name: str) -> bool:
    return any(device["ifname"] == name for device in _json("ip", "link", "show"))


def _json(tool: str, *arguments: str, host_pid: int | None = None) -> Any:
    return json.loads(_run([*_inside(host_pid), tool, "-j", *arguments]) or "[]")


def _batch(tool: str, lines: Iterable[str], *, host_pid: int | None = None) -> None:
    _run([*_inside(host_pid), tool, "-batch", "-"], text="\n".join(lines) + "\n")


def _inside(host_pid: int | None) -> list[str]:
    return [] if host_pid is None else ["nsenter", "--target", str(host_pid), "--net", "--"]


def _run(command: Sequence[str], *, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise HpcpaceError(f"{' '.join(command)} failed with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


_PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "setsid": "util-linux",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
    "tc": "iproute2",
}
"""The Debian package of each program that the lab calls."""

NAME_VARIABLE = "HPCPACE_LAB_NAME"
"""Names the lab that a command runs in."""

EMULATION_VARIABLE = "HPCPACE_LAB_EMULATION"
"""Says how computation is emulated; recorded with each run and shown in its report."""

# Set if the lab runs inside another cluster's job; none of these variables may reach the lab's own Slurm.
_FOREIGN = re.compile(r"SLURM|SRUN|SBATCH|SALLOC|PMI")


def lab_environ(files: LabFiles) -> dict[str, str]:
    """Return the environment for a lab's processes: the current one, the lab's Slurm, this Python first on PATH."""
    environ = {key: value for key, value in process_environ().items() if not _FOREIGN.match(key)}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), search_path()])
    environ["SLURM_CONF"] = str(files.slurm_conf)
    environ[NAME_VARIABLE] = files.name
    environ[EMULATION_VARIABLE] = LabPlan(read_config(files)).emulation
    return environ | preloading(files, environ)


def search_path() -> str:
    """Return PATH plus the folders of system daemons, which many users do not have on it."""
    return os.pathsep.join([process_environ().get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def check_requirements() -> None:
    """Refuse a machine that cannot run the lab.

    Raises:
        UsageError: not root, or programs are missing; the message names their packages.
    """
    if os.geteuid() != 0:
        raise UsageError(
            f"the lab needs root for namespaces and mounts, but this is user {os.geteuid()}: run it with sudo"
        )
    check_programs(_PACKAGES, also=["slurm-wlm-basic-plugins"])


def check_programs(packages: dict[str, str], *, also: list[str] | None = None) -> None:
    """Check that programs are installed; `packages` has the Debian package of each.

    Raises:
        UsageError: some are missing; the message has the line that installs them and the packages in `also`.
    """
    missing = [program for program in packages if shutil.which(program, path=search_path()) is None]
    if missing:
        wanted = " ".join(sorted({packages[program] for program in missing} | set(also or [])))
        raise UsageError(f"the lab needs {', '.join(missing)}: `apt-get install --no-install-recommends {wanted}`")


# util-linux's nsenter starts in the root folder, so a shell changes back to the caller's folder.
_IN_FOLDER = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh"]
_LAB_NAMESPACES = ["--net", "--mount", "--uts", "--ipc", "--pid"]
_HOST_NAMESPACES = [*_LAB_NAMESPACES, "--time"]
# The anchor runs without the package, because it lives as long as the lab and should cost next to nothing. As the first
# process of a PID namespace it inherits every orphan; ignoring SIGCHLD lets the kernel remove them.
_ANCHOR = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n    signal.pause()\n"
_START_TIMEOUT_S = 10.0
_ENDED = ("Z", "X")


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """The process that holds the namespaces of a lab; its PID alone could have been reused.

    Attributes:
        pid: its PID on the machine.
        started: when it started, in clock ticks since the machine's start (field 22 of /proc/PID/stat): unlike a time
            of day, it does not change when the machine's clock is set.
        pid_namespace: what /proc/PID/ns/pid links to.
    """

    pid: int
    started: int
    pid_namespace: str

    @property
    def is_alive(self) -> bool:
        """Whether it is still running."""
        state, started = _state(self.pid)
        return started == self.started and state not in _ENDED

    @property
    def is_here(self) -> bool:
        """Whether the calling process runs in the lab."""
        return os.readlink("/proc/self/ns/pid") == self.pid_namespace

    def kill(self) -> None:
        """End the lab's first process; the kernel then ends every process of the lab.

        Raises:
            HpcpaceError: it does not end.
        """
        if not self.is_alive:
            return
        os.kill(self.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while self.is_alive:
            if time.monotonic() > deadline_s:
                raise HpcpaceError(
                    f"process {self.pid}, the first one of the lab, did not end within {_START_TIMEOUT_S:g} s"
                )
            time.sleep(0.01)


def start_anchor(log: Path, environ: Mapping[str, str]) -> Anchor:
    """Start the first process of a lab in new namespaces.

    Args:
        log: file for errors.
        environ: environment of the process.

    Raises:
        HpcpaceError: the kernel does not allow it.
    """
    token = secrets.token_hex(8)
    unshare = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
    python = [sys.executable, "-I", "-S", "-c", _ANCHOR, token]
    with log.open("wb") as errors:
        # setsid detaches it at once: the lab does not belong to the command that starts it.
        subprocess.run(
            ["setsid", "--fork", *unshare, *python],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env=environ,
        )
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s and not log.stat().st_size:
        found = _first_process(token)
        if found is not None:
            return found
        time.sleep(0.01)
    reason = log.read_text(errors="replace").strip() or "no answer"
    raise HpcpaceError(
        f"cannot create namespaces ({reason}): the lab needs CAP_SYS_ADMIN, as in a privileged container"
    )


def _state(pid: int) -> tuple[str, int]:
    """Return the state of a process from /proc/PID/stat, and when it started; dead if there is no such process."""
    try:
        # The process name before these fields may contain blanks and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return "X", -1


def _first_process(token: str) -> Anchor | None:
    for process in psutil.process_iter():
        try:
            # unshare's command line ends with the same words; once Python runs, /proc and everything else is set up.
            words = process.cmdline()  # read once: a process that ends or execs meanwhile has none
            if words[-1:] == [token] and words[0] == sys.executable:
                namespace = os.readlink(f"/proc/{process.pid}/ns/pid")
                return Anchor(pid=process.pid, started=_state(process.pid)[1], pid_namespace=namespace)
        except (psutil.Error, OSError):
            continue
    return None


def lab_command(anchor: Anchor, command: Sequence[str], *, folder: Path) -> list[str]:
    """Return the command line that runs a command in a lab, in the given folder; called from outside."""
    return ["nsenter", "--target", str(anchor.pid), *_LAB_NAMESPACES, "--", *_IN_FOLDER, str(folder), *command]


def host_command(pid: int, command: Sequence[str], *, folder: Path, cgroups: Sequence[Path]) -> list[str]:
    """Return the command line that runs a command on a host; called from inside the lab.

    Args:
        pid: the host's first process.
        command: the program and its arguments.
        folder: where it runs.
        cgroups: the host's control groups, which the command joins.
    """
    join = "".join(f"echo 0 >{group}/cgroup.procs; " for group in cgroups) + 'exec "$@"'
    enter = ["nsenter", "--target", str(pid), *_HOST_NAMESPACES, "--", *_IN_FOLDER, str(folder)]
    return ["sh", "-ec", join, "sh", *enter, *command]
