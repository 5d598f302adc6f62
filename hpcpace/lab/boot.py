"""Boot a lab from inside its namespaces, until every node accepts jobs.

`hpcpace lab up` runs this as a separate program in the lab's namespaces. It prints one line of JSON for each bit of
progress, and an error, if there is one, on standard error.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpcpace.core.errors import HpcpaceError
from hpcpace.core.files import Folder
from hpcpace.lab.fabric import build_switches, lab_environ
from hpcpace.lab.hosts import host_pid, start_hosts
from hpcpace.lab.plan import (
    CGROUP_CONF,
    CONTROLLER,
    CONTROLLER_ADDRESS,
    LabFiles,
    LabPlan,
    read_config,
    slurm_conf,
    topology_conf,
    writable_to_owner_only,
)

Progress = Callable[[str, int, int], None]

_READY_TIMEOUT_S = 60.0
_READY_TIMEOUT_PER_HOST_S = 3.0
_POLL_INTERVAL_S = 0.1
_NUM_LOG_LINES = 15


def boot(plan: LabPlan, files: LabFiles, progress: Progress) -> None:
    """Bring a lab up and wait until every node accepts jobs.

    Raises:
        HpcpaceError: a daemon ended, or a node did not become ready in time; the message has the end of the log.
    """
    environ = lab_environ(files)
    num_hosts = len(plan.hosts)
    write_files(plan, files)
    subprocess.run(["mount", "--bind", str(files.hosts_file), "/etc/hosts"], check=True)
    subprocess.run(["hostname", CONTROLLER], check=True)
    build_switches(plan)
    munged = _Daemon(_munged_command(files), files, environ)
    _wait_until("munged did not answer", files.munge_socket.is_socket, [munged], files)
    slurmctld = _Daemon(["slurmctld", "-D", "-c", "-f", str(files.slurm_conf)], files, environ)
    start_hosts(plan, files, plan.hosts, environ, lambda done: progress("hosts", done, num_hosts))

    def all_idle() -> bool:
        done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=environ, capture_output=True, text=True)
        num_idle = done.stdout.split().count("idle")
        progress("nodes ready for jobs", num_idle, num_hosts)
        return num_idle == num_hosts

    _wait_until("some nodes did not become idle", all_idle, [munged, slurmctld], files, plan)


def write_files(plan: LabPlan, files: LabFiles) -> None:
    """Write all files that the daemons read."""
    for folder in (files.state_dir, files.pids_dir, files.faults_dir, files.mounts_dir):
        folder.mkdir()
    with Folder.open(files.munge_key.parent) as secret:
        secret.write(files.munge_key.name, secrets.token_bytes(128), mode=0o400)
    files.cgroup_conf.write_text(CGROUP_CONF)
    files.slurm_conf.write_text(slurm_conf(plan, files, first_job_id=_first_job_id(time.time())))
    files.topology_conf.write_text(topology_conf(plan))
    names = [("127.0.0.1", "localhost"), (CONTROLLER_ADDRESS, CONTROLLER)]
    names += [(host.address, host.name) for host in plan.hosts]
    # torch also looks up the name of an IPv4 address in its IPv6 form.
    lines = [f"{address} {name}\n::ffff:{address} {name}\n" for address, name in names]
    files.hosts_file.write_text("".join(lines))


def _first_job_id(time_s: float) -> int:
    """Return a job id that no earlier or concurrent lab has used: logs and runs are named after jobs.

    Ten ids per second, below Slurm's limit (MAX_JOB_ID, 0x03FFFFFF).
    """
    return 1 + int(time_s * 10) % 60_000_000


def _munged_command(files: LabFiles) -> list[str]:
    # --force: otherwise munged refuses to run as root, or in a folder below one that others may write to.
    options = {
        "--socket": files.munge_socket,
        "--key-file": files.munge_key,
        "--pid-file": files.daemon_pid("munged"),
        "--seed-file": files.folder / "munged.seed",
        "--log-file": files.folder / "munged-own.log",
    }
    return ["munged", "--foreground", "--force", *(f"{name}={value}" for name, value in options.items())]


class _Daemon:
    """A daemon in the foreground of its own session, with a log; it ends with the lab."""

    def __init__(self, command: list[str], files: LabFiles, environ: dict[str, str]) -> None:
        self.name = command[0]
        self.log = files.log(self.name)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
            )

    def check(self) -> None:
        """Raise an error with the end of its log if the daemon has ended."""
        status = self._process.poll()
        if status is not None:
            raise HpcpaceError(f"{self.name} ended with status {status}; the end of its log:\n{_log_tail(self.log)}")


def _wait_until(
    problem: str, happened: Callable[[], bool], daemons: list[_Daemon], files: LabFiles, plan: LabPlan | None = None
) -> None:
    hosts = plan.hosts if plan else ()
    timeout_s = _READY_TIMEOUT_S + _READY_TIMEOUT_PER_HOST_S * len(hosts)
    deadline_s = time.monotonic() + timeout_s
    while not happened():
        for daemon in daemons:
            daemon.check()
        for host in hosts:
            if host_pid(files, host) is None:
                raise HpcpaceError(
                    f"slurmd on {host.name} ended; the end of its log:\n{_log_tail(files.log(host.name))}"
                )
        if time.monotonic() > deadline_s:
            raise HpcpaceError(f"{problem} within {timeout_s:g} s; the logs are in {files.folder}")
        time.sleep(_POLL_INTERVAL_S)


def _log_tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-_NUM_LOG_LINES:])


def _print_progress(what: str, done: int, total: int) -> None:
    print(json.dumps([what, done, total]), flush=True)


def main(name: str) -> int:
    """Boot the lab with this name; return an exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command outside gets it as well, and ends the whole lab
    files = LabFiles.of(name)
    try:
        with writable_to_owner_only():
            boot(LabPlan(read_config(files)), files, _print_progress)
    except HpcpaceError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
