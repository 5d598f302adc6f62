"""The namespaces of a lab, how to enter them, and the environment of its processes.

All of a lab descends from one process, its anchor. The lab's switches are in the anchor's network namespace and its
processes in the anchor's PID namespace. So ending the anchor ends them all, and nothing in the lab can reach a process
or an interface of the machine.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpcpace.core.environment import process_environ
from hpcpace.core.errors import HpcpaceError, UsageError
from hpcpace.lab.plan import LabFiles, LabPlan, read_config

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
    return environ


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
