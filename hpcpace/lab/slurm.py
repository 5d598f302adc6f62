"""A Slurm of one node on this machine: munged, slurmctld and slurmd, all below a temporary folder, on loopback.

Several can run at once, beside a Slurm that the machine belongs to. The node claims more CPUs than there are, so that
jobs of several tasks start on a laptop. Needs root: slurmd runs in a mount namespace.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hpcpace.errors import HpcpaceError, UsageError
from hpcpace.lab.daemon import Daemon
from hpcpace.lab.slurm_conf import CGROUP_CONF, ClusterFiles, Node, slurm_conf
from hpcpace.world.environment import process_environ

PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
"""The Debian package of each program that the lab calls."""

NODE_NAME = "n1"

_POLL_INTERVAL_S = 0.1
# Set by whoever runs us inside another cluster's job; none of it may reach this one.
_FOREIGN = re.compile(r"(SLURM|SRUN|SBATCH|SALLOC|PMI|PMIX)_?")
_UNFINISHED = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What Slurm knows of a job."""

    job_id: int
    state: str
    """Slurm's word, such as COMPLETED or FAILED."""
    exit_code: int
    """Exit status of the batch script."""
    output: Path
    """The job's log."""

    @property
    def finished(self) -> bool:
        """Whether the job has come to its end, good or bad."""
        return self.state not in _UNFINISHED


class OneHostSlurm:
    """A running Slurm of one node; use it in a `with` statement."""

    def __init__(self, *, num_cpus: int = 8, start_timeout_s: float = 30.0) -> None:
        """Describe the cluster; entering the `with` statement starts it.

        Args:
            num_cpus: CPUs that the node claims.
            start_timeout_s: seconds within which the node must take jobs.
        """
        self._num_cpus = num_cpus
        self._start_timeout_s = start_timeout_s
        self._daemons: list[Daemon] = []
        self._cleanup = ExitStack()
        self.environ: dict[str, str] = {}

    def __enter__(self) -> OneHostSlurm:
        """Start the daemons and wait until the node takes jobs.

        Raises:
            UsageError: no root rights, or programs are missing.
            HpcpaceError: a daemon ended, or the node did not become ready in time; with the end of the log.
        """
        check_requirements()
        with ExitStack() as cleanup:
            # Under /tmp whatever TMPDIR says: a socket's path may have 107 bytes.
            folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="hpcpace-slurm-", dir="/tmp"))
            self._boot(ClusterFiles(folder=Path(folder)), cleanup)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop every job and daemon, and remove the folder."""
        self._cleanup.close()
        self._daemons = []

    def run(
        self,
        *command: str | os.PathLike[str],
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command, such as srun, against this cluster and return its outcome.

        Args:
            command: the program and its arguments.
            cwd: folder to run it in.
            environ: variables to add to `self.environ`.
            timeout_s: seconds that it may take.

        Raises:
            subprocess.TimeoutExpired: it took longer.
        """
        return subprocess.run(
            command,
            cwd=cwd,
            env={**self.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def submit(self, *arguments: str | os.PathLike[str], cwd: Path, environ: Mapping[str, str] | None = None) -> int:
        """Submit a batch job and return its id.

        Args:
            arguments: of sbatch: options, the script, and the script's own arguments.
            cwd: folder to submit from, which becomes the job's.
            environ: variables to add for sbatch and the job.

        Raises:
            HpcpaceError: sbatch refused the job.
        """
        done = self.run("sbatch", "--parsable", *arguments, cwd=cwd, environ=environ)
        if done.returncode:
            raise HpcpaceError(f"sbatch refused the job: {done.stderr.strip()}")
        return int(done.stdout)

    def job(self, job_id: int) -> Job:
        """Return what Slurm knows of a job.

        Raises:
            HpcpaceError: Slurm does not know the job.
        """
        done = self.run("scontrol", "--oneliner", "show", "job", str(job_id))
        if done.returncode:
            raise HpcpaceError(f"no job {job_id} in the lab's Slurm: {done.stderr.strip()}")
        fields = dict(re.findall(r"(?:^| )(JobState|ExitCode|StdOut)=(\S+)", done.stdout))
        return Job(
            job_id=job_id,
            state=fields["JobState"],
            exit_code=int(fields["ExitCode"].partition(":")[0]),
            output=Path(fields["StdOut"]),
        )

    def wait_for_job(self, job_id: int, *, timeout_s: float) -> Job:
        """Wait until a job has finished and return it.

        Raises:
            HpcpaceError: it has not after `timeout_s`; the message has the log so far.
        """
        job = self.job(job_id)
        deadline_s = time.monotonic() + timeout_s
        while not job.finished:
            if time.monotonic() > deadline_s:
                log = job.output.read_text(errors="replace") if job.output.exists() else "(no log)"
                raise HpcpaceError(f"job {job_id} is still {job.state} after {timeout_s:g} s; its log:\n{log}")
            time.sleep(_POLL_INTERVAL_S)
            job = self.job(job_id)
        return job

    def _boot(self, files: ClusterFiles, cleanup: ExitStack) -> None:
        _write_files(files, num_cpus=self._num_cpus)
        self.environ = {key: value for key, value in process_environ().items() if not _FOREIGN.match(key)}
        self.environ["PATH"] = _search_path()
        self.environ["SLURM_CONF"] = str(files.slurm_conf)
        self._start(_munged_command(files), files, cleanup)
        self._wait_until("munged answers", files.munge_socket.is_socket)
        self._start(["slurmctld", "-D", "-c", "-f", str(files.slurm_conf)], files, cleanup)
        self._start(["slurmd", "-D", "-N", NODE_NAME, "-f", str(files.slurm_conf)], files, cleanup, isolated=True)
        self._wait_until("the node is idle", lambda: self.run("sinfo", "-h", "-o", "%T").stdout.strip() == "idle")

    def _start(
        self, command: Sequence[str], files: ClusterFiles, cleanup: ExitStack, *, isolated: bool = False
    ) -> None:
        daemon = Daemon.start(command, log=files.log(command[0]), environ=self.environ, isolated=isolated)
        cleanup.callback(daemon.stop)
        self._daemons.append(daemon)

    def _wait_until(self, what: str, happened: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + self._start_timeout_s
        while not happened():
            for daemon in self._daemons:
                daemon.check()
            if time.monotonic() > deadline_s:
                logs = "\n".join(f"{daemon.name}:\n{daemon.log_tail()}" for daemon in self._daemons)
                raise HpcpaceError(f"not within {self._start_timeout_s:g} s: {what}; the logs end with\n{logs}")
            time.sleep(_POLL_INTERVAL_S)


def check_requirements() -> None:
    """Refuse a machine that cannot run the lab.

    Raises:
        UsageError: no root rights, or programs are missing; the message names their packages.
    """
    if os.geteuid() != 0:
        raise UsageError(f"the lab needs root, for mounts; this is user {os.geteuid()}: start it with sudo")
    missing = [program for program in PACKAGES if shutil.which(program, path=_search_path()) is None]
    if missing:
        packages = " ".join(sorted({PACKAGES[program] for program in missing} | {"slurm-wlm-basic-plugins"}))
        raise UsageError(f"the lab needs {', '.join(missing)}: `apt-get install --no-install-recommends {packages}`")


def _search_path() -> str:
    # Daemons live in sbin, which is not on everybody's PATH.
    return os.pathsep.join([process_environ().get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _munged_command(files: ClusterFiles) -> list[str]:
    # --force: munged otherwise refuses a socket below a folder that all may write to, such as /tmp.
    options = {
        "--socket": files.munge_socket,
        "--key-file": files.munge_key,
        "--pid-file": files.folder / "munged.pid",
        "--seed-file": files.folder / "munged.seed",
        "--log-file": files.folder / "munged-own.log",
    }
    return ["munged", "--foreground", "--force", *(f"{name}={value}" for name, value in options.items())]


def _write_files(files: ClusterFiles, *, num_cpus: int) -> None:
    host_name = socket.gethostname().partition(".")[0]
    controller_port, node_port = _free_ports(2)
    node = Node(name=NODE_NAME, host_name=host_name, port=node_port, num_cpus=num_cpus)
    files.state_dir.mkdir()
    files.spool_dir(node.name).mkdir()
    files.munge_key.write_bytes(secrets.token_bytes(128))
    files.munge_key.chmod(0o400)
    files.cgroup_conf.write_text(CGROUP_CONF)
    files.slurm_conf.write_text(slurm_conf(files, controller=host_name, controller_port=controller_port, nodes=[node]))


def _free_ports(count: int) -> list[int]:
    # All are held until all are known, so that none is given twice.
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
