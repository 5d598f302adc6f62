"""Labs for measurements, and jobs of their Slurm, also for tests: submit one, query it, wait for it, cancel all."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcpace.core.errors import HpcpaceError
from hpcpace.lab.hosts import weigh_hosts
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig

_WEIGHT_OF_HOSTS = 256
_POLL_INTERVAL_S = 0.25
_MAX_QUERIES = 5
_UNFINISHED = {
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "SIGNALING", "STAGE_OUT",
    "STOPPED",
}  # fmt: skip


@contextmanager
def heavy_lab(config: LabConfig) -> Iterator[Lab]:
    """Boot a lab with so much weight on its machine that other work takes only the time in which its ranks wait."""
    with Lab.up(config) as lab:
        weigh_hosts(config.name, _WEIGHT_OF_HOSTS)
        yield lab


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """The state of a job in Slurm."""

    job_id: int
    state: str
    """Slurm's state, such as COMPLETED or FAILED."""
    exit_code: int
    """Exit status of the batch script."""
    output: Path
    """The job's log."""

    @property
    def finished(self) -> bool:
        """Whether the job has ended, successfully or not."""
        return self.state not in _UNFINISHED


class JobQueue:
    """The jobs of a lab's Slurm.

    Attributes:
        run: runs a command in the lab, such as srun; see `Lab.run`.
    """

    def __init__(self, lab: Lab) -> None:
        self.run = lab.run

    def submit(self, *arguments: str | os.PathLike[str], cwd: Path, environ: Mapping[str, str] | None = None) -> int:
        """Submit a batch job and return its id.

        Args:
            arguments: arguments of sbatch: options, the script, and the script's own arguments.
            cwd: folder to submit from, which is also the job's working folder.
            environ: additional variables for sbatch and the job.

        Raises:
            HpcpaceError: sbatch refused the job.
        """
        done = self.run("sbatch", "--parsable", *arguments, cwd=cwd, environ=environ)
        if done.returncode:
            raise HpcpaceError(f"sbatch refused the job: {done.stderr.strip()}")
        return int(done.stdout)

    def job(self, job_id: int) -> SlurmJob:
        """Return the state of a job.

        Raises:
            HpcpaceError: Slurm does not know the job.
        """
        for _ in range(_MAX_QUERIES):
            done = self.run("scontrol", "--oneliner", "show", "job", str(job_id))
            # With a load of 20 on 2 cores, one query of many failed without a word, which says nothing of the job.
            if done.returncode == 0 or "Invalid job id" in done.stderr:
                break
            time.sleep(_POLL_INTERVAL_S)
        if done.returncode:
            said = done.stderr.strip() or f"scontrol ended with status {done.returncode}"
            raise HpcpaceError(f"the lab's Slurm does not know job {job_id}: {said}")
        fields = dict(re.findall(r"(?:^| )(JobState|ExitCode|StdOut)=(\S+)", done.stdout))
        return SlurmJob(
            job_id=job_id,
            state=fields["JobState"],
            exit_code=int(fields["ExitCode"].partition(":")[0]),
            output=Path(fields["StdOut"]),
        )

    def wait(self, job_id: int, *, timeout_s: float) -> SlurmJob:
        """Wait until a job has finished and return it.

        Raises:
            HpcpaceError: it has not finished after `timeout_s`; the message has the log so far.
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

    def cancel_all(self) -> None:
        """Cancel every job, and wait until none is left."""
        self.run("scancel", "--user=root")
        while self.run("squeue", "-h", "-o", "%i").stdout:
            time.sleep(_POLL_INTERVAL_S)
