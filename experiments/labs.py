"""A lab as a drill needs it: a traced job on it, the exact moments at which its ranks end, and a fault at a known time.

Everything is called from outside of the lab, as a user would. Times are the machine's CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from experiments.jobs import MISREAD_START
from hpcpace.core.errors import HpcpaceError, TraceError
from hpcpace.core.rundir import RunDirectory
from hpcpace.core.text import NS_PER_S
from hpcpace.lab.fabric import NAME_VARIABLE
from hpcpace.lab.hosts import weigh_hosts
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig
from hpcpace.trace.reader import read_trace

SCRIPT = Path(__file__).parents[1] / "sbatch" / "gpt2_pp.sh"
START_TIMEOUT_S = 150.0
"""Seconds until every rank has steps on disk; importing torch on every rank of a busy machine takes most of it."""
_SMALL_MODEL = ("--seq-len", "32", "--batch-size", "8")
_WELL_TIMEOUT_S = 60.0
_STEPS_BEFORE_FAULT = 10


def inject(lab: Lab, *words: str) -> str:
    """Inject a fault by `hpcpace lab fault ...`, or undo one, and return its id.

    Raises:
        HpcpaceError: it was refused or did not work.
    """
    done = lab.run("hpcpace", "lab", "fault", *words)
    if done.returncode:
        raise HpcpaceError(f"lab fault {' '.join(words)} ended with status {done.returncode}: {done.stderr}")
    return done.stdout.split()[0]


def truth_of(lab: Lab) -> list[dict[str, Any]]:
    """Return the events in the lab's log of truth."""
    return [json.loads(line) for line in lab.files.truth.read_text().splitlines()]


class MisreadStart(HpcpaceError):
    """A job did not get through MPI_Init: Slurm's plugin misread MPICH's messages, and the ranks wait forever."""


class RankEnds:
    """Waits for the processes of a job's ranks, one thread each, and records when each one ended."""

    def __init__(self, lab_name: str, job_id: int, num_ranks: int) -> None:
        self._end_ns: dict[int, int] = {}
        processes = rank_processes(lab_name, job_id)
        if sorted(processes) != list(range(num_ranks)):
            raise HpcpaceError(f"job {job_id} runs ranks {sorted(processes)}, {num_ranks} are wanted: see its log")
        self._threads = [threading.Thread(target=self._watch, args=item, daemon=True) for item in processes.items()]
        for thread in self._threads:
            thread.start()

    def _watch(self, rank: int, pid: int) -> None:
        # A descriptor of a process becomes readable when it ends (pidfd_open(2)).
        descriptor = os.pidfd_open(pid)
        try:
            select.select([descriptor], [], [])
            self._end_ns[rank] = time.monotonic_ns()
        finally:
            os.close(descriptor)

    def times_ns(self, timeout_s: float = 10.0) -> dict[int, int]:
        """Return when each rank ended; ranks that still run after the time are missing."""
        for thread in self._threads:
            thread.join(timeout_s)
        return dict(self._end_ns)


def rank_processes(lab_name: str, job_id: int) -> dict[int, int]:
    """Return the process number of each rank of a job's step 0, seen from outside of the lab."""
    wanted = {NAME_VARIABLE: lab_name, "SLURM_JOB_ID": str(job_id), "SLURM_STEP_ID": "0"}
    found: dict[int, tuple[float, int]] = {}
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            if wanted.items() <= environ.items() and "train" in process.cmdline():
                rank, entry = int(environ["SLURM_PROCID"]), (process.create_time(), process.pid)
                found[rank] = min(found.get(rank, entry), entry)
        except (psutil.Error, OSError, KeyError):
            continue
    return {rank: pid for rank, (_, pid) in found.items()}


class DrillJob:
    """A traced training job in a lab."""

    def __init__(self, site: DrillSite, job_id: int, num_ranks: int) -> None:
        self._site = site
        self.job_id = job_id
        self.num_ranks = num_ranks
        self.run = RunDirectory(site.folder / "runs" / f"{job_id}-gpt2_pp")

    def wait_for_start(self) -> None:
        """Wait until the ranks have found each other, or the job has ended.

        Raises:
            MisreadStart: they never will; the job is cancelled.
            HpcpaceError: they have not in time; the message has the log so far.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self.run.path.is_dir():
            is_finished = self._site.queue.job(self.job_id).finished
            if MISREAD_START in self.log():
                self._site.queue.run("scancel", str(self.job_id))
                self._site.queue.wait(self.job_id, timeout_s=60)
                raise MisreadStart(f"job {self.job_id} did not start:\n{self.log()[:2000]}")
            if is_finished:
                return
            if time.monotonic() > deadline_s:
                raise HpcpaceError(f"job {self.job_id} has not started after {START_TIMEOUT_S:g} s:\n{self.log()}")
            time.sleep(0.3)

    def wait_for_steps(self) -> RankEnds:
        """Wait until every rank has steps on disk, and begin to watch the ranks.

        Raises:
            MisreadStart: the job was cancelled, because its ranks do not find each other.
            HpcpaceError: they have no steps in time; the message has the log so far.
        """
        self.wait_for_start()
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self._num_steps_on_disk() <= _STEPS_BEFORE_FAULT:
            if time.monotonic() > deadline_s or self._site.queue.job(self.job_id).finished:
                raise HpcpaceError(f"job {self.job_id} has no steps after {START_TIMEOUT_S:g} s:\n{self.log()}")
            time.sleep(0.3)
        return RankEnds(self._site.name, self.job_id, self.num_ranks)

    def _num_steps_on_disk(self) -> int:
        # Traces on a host's own disk cannot be seen from here: there rank 0's progress in the log has to do.
        if f"step {_STEPS_BEFORE_FAULT * 2}/" in self.log():
            return _STEPS_BEFORE_FAULT * 2
        files = self.run.attempt(0).trace_files().values()
        try:
            return min((len(read_trace(path).tables["steps"]) for path in files), default=0)
        except TraceError:  # a file that is just being made
            return 0

    def wait(self, timeout_s: float) -> tuple[SlurmJob, int]:
        """Wait for the end of the job, batch script and report included; return it and when that was.

        Raises:
            HpcpaceError: it has not ended in time.
        """
        job = self._site.queue.wait(self.job_id, timeout_s=timeout_s)
        return job, time.monotonic_ns()

    def log(self) -> str:
        """Return the job's log so far."""
        path = self._site.folder / f"gpt2_pp-{self.job_id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def summary(self) -> dict[str, Any]:
        """Return what the batch script's report wrote for programs.

        Raises:
            HpcpaceError: the job ended without a report.
        """
        try:
            content: dict[str, Any] = json.loads(self.run.summary_json.read_text())
        except FileNotFoundError as error:
            raise HpcpaceError(f"job {self.job_id} left no summary.json; its log:\n{self.log()[-2000:]}") from error
        return content

    def report_status(self) -> int:
        """Run `hpcpace report` on the run once more and return its exit status."""
        command = [sys.executable, "-m", "hpcpace", "report", str(self.run.path)]
        return subprocess.run(command, capture_output=True, timeout=60).returncode


class DrillSite:
    """A lab that is up, and a folder that all of its hosts see."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.queue = JobQueue(lab)

    @property
    def name(self) -> str:
        """The lab's name."""
        return self.lab.files.name

    def submit(
        self, *words: str, hosts: int = 4, steps: int = 100_000, environ: Mapping[str, str] | None = None
    ) -> DrillJob:
        """Submit a training job of one rank a host.

        Args:
            words: options of sbatch, then `--`, then further options of the training; the latter may be missing.
            hosts: how many.
            steps: to train; the default takes hours.
            environ: settings of hpcpace.
        """
        at = words.index("--") if "--" in words else len(words)
        options = [f"-N{hosts}", "--ntasks-per-node=1", "--no-requeue", *words[:at]]
        training = [*_SMALL_MODEL, "--steps", str(steps), *words[at + 1 :]]
        # So that the training is step 0 (rank_processes), and faults at the start hit it and not its audit.
        settings = {"HPCPACE_AUDIT": "off", **(environ or {})}
        job_id = self.queue.submit(*options, SCRIPT, *training, cwd=self.folder, environ=settings)
        return DrillJob(self, job_id, hosts)

    def fault(self, *words: str) -> str:
        """Inject a fault, and return its id; see `inject`."""
        return inject(self.lab, *words)

    def times_ns(self, fault_id: str, event: str) -> list[int]:
        """Return when an event of a fault happened, as the log of truth says."""
        of_fault = (entry for entry in truth_of(self.lab) if entry.get("fault_id") == fault_id)
        return [entry["monotonic_ns"] for entry in of_fault if entry["event"] == event]

    def clock_offsets_ns(self) -> dict[str, int]:
        """Return by host how far its clock is ahead of the machine's, as the log of truth says."""
        (lab,) = (entry for entry in truth_of(self.lab) if entry["event"] == "lab")
        return {host["name"]: host["clock_offset_s"] * NS_PER_S for host in lab["hosts"]}

    def wait_until_well(self) -> str:
        """Wait until `hpcpace lab status` ends with 0; return what is wrong where it does not, else nothing."""
        deadline_s = time.monotonic() + _WELL_TIMEOUT_S
        while (done := self.lab.run("hpcpace", "lab", "status")).returncode:
            if time.monotonic() > deadline_s:
                return f"the lab is not well {_WELL_TIMEOUT_S:g} s after the drill: {done.stdout}{done.stderr}"
            time.sleep(0.5)
        return ""

    def end_jobs(self) -> None:
        """Cancel what a drill that failed has left."""
        self.queue.run("scancel", "--user=root")


WEIGHT_OF_HOSTS = 256
"""As `weigh_hosts` takes it: with so much, other work of the machine takes only the time in which ranks wait."""
_POLL_INTERVAL_S = 0.25
_MAX_QUERIES = 5
_UNFINISHED = {
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "SIGNALING", "STAGE_OUT",
    "STOPPED",
}  # fmt: skip


ALONE = {
    **{"OMP_NUM_THREADS": "1", "HPCPACE_AUDIT": "off"},
    "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
}
"""The environment of a job whose ranks have a thread and no audit each, with the programs of this Python."""


@contextmanager
def heavy_lab(config: LabConfig) -> Iterator[Lab]:
    """Boot a lab whose hosts outweigh all other work of the machine."""
    with Lab.up(config) as lab:
        weigh_hosts(config.name, WEIGHT_OF_HOSTS)
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

    def run_ranks(self, words: str, *, nodes: int, per_node: int = 1, cwd: Path, timeout_s: float) -> SlurmJob:
        """Run a command on the hosts of a batch job, with this Python's programs and without the audit, and wait.

        Raises:
            HpcpaceError: sbatch refused the job, or it has not finished after `timeout_s`.
        """
        options = (f"-N{nodes}", f"--ntasks-per-node={per_node}", "--no-requeue", "--output=%j.out")
        job_id = self.submit(*options, f"--wrap=srun --mpi=pmi2 {words}", cwd=cwd, environ=ALONE)
        return self.wait(job_id, timeout_s=timeout_s)

    def cancel_all(self) -> None:
        """Cancel every job, and wait until none is left."""
        self.run("scancel", "--user=root")
        while self.run("squeue", "-h", "-o", "%i").stdout:
            time.sleep(_POLL_INTERVAL_S)
