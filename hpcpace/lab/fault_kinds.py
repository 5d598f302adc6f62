"""Faults of hosts and ranks, and all kinds of faults by their names. Called from inside the lab."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpcpace.errors import UsageError
from hpcpace.files import Folder
from hpcpace.lab.environment import lab_environ
from hpcpace.lab.fault import HostFault, InsideLab, LabFault
from hpcpace.lab.hosts import host_pid, kill_host, start_hosts
from hpcpace.lab.link_faults import ChangeMtu, FlapLink, LossyLink, SlowLink, Traffic

FILLER = ".hpcpace-lab-filler"


@dataclass(frozen=True, kw_only=True)
class SlowHost(HostFault):
    """Limits the CPU time of a host to a number of cores."""

    kind = "slow-host"
    cores: float

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown host, and limits that leave nothing or change nothing."""
        super().check(lab)
        most = lab.plan.config.cpu_quota or float(os.cpu_count() or 1)
        if not 0 < self.cores < most:
            raise UsageError(
                f"--cores is {self.cores:g}: it must be more than 0 and less than the {most:g} that the host has now"
            )

    def apply(self, lab: InsideLab) -> None:
        """Set the CPU quota."""
        lab.pid(self.host)
        lab.cgroup(self.host).limit_cpu(self.cores)

    def undo(self, lab: InsideLab) -> None:
        """Restore the quota that the lab was started with."""
        lab.cgroup(self.host).limit_cpu(lab.plan.config.cpu_quota)


@dataclass(frozen=True, kw_only=True)
class PauseHost(HostFault):
    """Stops every process of a host, like heavy swapping or a busy hypervisor."""

    kind = "pause-host"

    def apply(self, lab: InsideLab) -> None:
        """Freeze the host."""
        lab.pid(self.host)
        lab.cgroup(self.host).freeze(True)

    def undo(self, lab: InsideLab) -> None:
        """Let the host continue."""
        lab.cgroup(self.host).freeze(False)


@dataclass(frozen=True, kw_only=True)
class KillHost(HostFault):
    """Ends everything on a host and its network at once and silently, like a power cut."""

    kind = "kill-host"

    def apply(self, lab: InsideLab) -> None:
        """Kill the first process of the host; a host that is dead already only loses its link."""
        kill_host(lab.plan, lab.files, lab.plan.host(self.host))

    def undo(self, lab: InsideLab) -> None:
        """Boot the host again, with an empty /tmp, the same clock offset, and slurmd as its only process."""
        host = lab.plan.host(self.host)
        if host_pid(lab.files, host) is None:
            start_hosts(lab.plan, lab.files, [host], lab_environ(lab.files))


@dataclass(frozen=True, kw_only=True)
class KillRank(LabFault):
    """Sends a signal, by default SIGKILL, to one rank of a running job."""

    kind = "kill-rank"
    is_instant = True
    job: int
    rank: int
    signal: str

    @property
    def target(self) -> str:
        """The rank."""
        return f"{self.job}/{self.rank}"

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown signal."""
        if f"SIG{self.signal}" not in signal.Signals.__members__:
            raise UsageError(f"--signal {self.signal}: no such signal; name one like KILL, TERM or STOP")

    def apply(self, lab: InsideLab) -> None:
        """Send the signal to the process of the rank."""
        rank_process(self.job, self.rank).send_signal(signal.Signals[f"SIG{self.signal}"])

    def undo(self, lab: InsideLab) -> None:
        """Do nothing: a dead rank stays dead."""


def rank_process(job: int, rank: int) -> psutil.Process:
    """Return the process of a rank of the job's last step: the oldest process of that task.

    Raises:
        UsageError: no such rank is running.
    """
    wanted = {"SLURM_JOB_ID": str(job), "SLURM_PROCID": str(rank)}
    found: list[tuple[int, float, psutil.Process]] = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            step = environ.get("SLURM_STEP_ID", "")
            if wanted.items() <= environ.items() and step.isdigit() and int(step) < 1 << 31:
                found.append((-int(step), process.create_time(), process))
        except psutil.Error:
            continue
    if not found:
        raise UsageError(f"no rank {rank} of job {job} is running: `hpcpace lab status` lists the jobs")
    return min(found, key=lambda entry: entry[:2])[2]


@dataclass(frozen=True, kw_only=True)
class FillDisk(HostFault):
    """Fills the /tmp of a host."""

    kind = "fill-disk"
    left_bytes: int

    def apply(self, lab: InsideLab) -> None:
        """Allocate a file of the free size, three times, in case others free some space meanwhile."""
        # Everybody on the host may write to its /tmp, so this name may be a link to a file of the machine.
        with Folder.open(self._tmp(lab)) as tmp:
            with suppress(FileNotFoundError):
                os.unlink(FILLER, dir_fd=tmp.descriptor)
            filler = tmp.create_file(FILLER, mode=0o600)
        try:
            size = 0
            for _ in range(3):
                state = os.fstatvfs(filler)
                free = state.f_bavail * state.f_frsize - self.left_bytes
                if free <= 0:
                    return
                size += free
                os.posix_fallocate(filler, 0, size)
        finally:
            os.close(filler)

    def undo(self, lab: InsideLab) -> None:
        """Remove the file."""
        (self._tmp(lab) / FILLER).unlink(missing_ok=True)

    def _tmp(self, lab: InsideLab) -> Path:
        return Path(f"/proc/{lab.pid(self.host)}/root/tmp")


KINDS: dict[str, Callable[..., LabFault]] = {
    kind.kind: kind
    for kind in (SlowHost, SlowLink, FlapLink, LossyLink, Traffic, PauseHost, KillHost, KillRank, FillDisk, ChangeMtu)
}
