"""A daemon of the lab: started in the foreground with a log, watched, and stopped by the id of its own process group.

Nothing outlives the process that started it: the kernel ends a daemon when its parent dies (PR_SET_PDEATHSIG), and what
a daemon in namespaces of its own starts ends with it, because a PID namespace ends with its first process.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcpace.errors import HpcpaceError

# slurmd of Slurm 22.05 refuses a host that mounts cgroup v1 and v2 side by side. In a mount namespace of its own it
# sees a plain v1 tree, while the one of the machine stays as it is. /dev/shm is its own because MPICH names its shared
# memory after job and step ("1.0"): what a killed rank of an earlier cluster's job 1 left hangs MPI_Init of this one's.
_ISOLATED = """
mount -t tmpfs -o mode=1777 lab-shm /dev/shm
mount -t tmpfs lab-cgroup /sys/fs/cgroup
for controller in cpu cpuacct cpuset memory devices freezer; do
    mkdir "/sys/fs/cgroup/$controller"
    mount -t cgroup -o "$controller" lab-cgroup "/sys/fs/cgroup/$controller"
done
"$@" &
wait $!
"""
_NUM_LOG_LINES = 15


class Daemon:
    """A running daemon. Make it with `start`, and call `stop` in the end."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @classmethod
    def start(cls, command: Sequence[str], *, log: Path, environ: Mapping[str, str], isolated: bool = False) -> Daemon:
        """Start a daemon that stays in the foreground.

        Args:
            command: the program and its arguments.
            log: file that takes its output.
            environ: its environment.
            isolated: give it PID and mount namespaces and a cgroup v1 tree of its own; needs root.
        """
        name = Path(command[0]).name
        namespaces = ["unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child=KILL"]
        prefix = [*namespaces, "sh", "-ec", _ISOLATED, name] if isolated else []
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                # One process group for the daemon and the shell around it, so that one signal reaches both.
                start_new_session=True,
            )
        return cls(name, process, log)

    def check(self) -> None:
        """Refuse to go on without the daemon.

        Raises:
            HpcpaceError: it has ended; the message has the end of its log.
        """
        status = self._process.poll()
        if status is not None:
            raise HpcpaceError(f"{self.name} ended with status {status}; its log ends with\n{self.log_tail()}")

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_NUM_LOG_LINES:])

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """Ask the daemon to end, and end it when it has not after `timeout_s`."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                return
            os.killpg(self._process.pid, number)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                continue
