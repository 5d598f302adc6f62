"""A batch job that hpcpace controls: its allocation, its settings, and the audit that comes before everything else."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcpace.batch.allocation import Allocation, read_allocation
from hpcpace.batch.control import TIMED_OUT, JobControl
from hpcpace.batch.launch import Launch, gpu_options
from hpcpace.batch.mpi_type import mpi_option
from hpcpace.batch.settings import BatchSettings, read_settings
from hpcpace.core.errors import EXIT_CANNOT_TELL, EXIT_FAILED, EXIT_OK, EXIT_WARNING, UsageError
from hpcpace.core.text import shown

# An audit takes seconds; one that hangs, as on a dead node, must not hold up the job.
_AUDIT_TIMEOUT_S = 120.0
# Linux takes 255 bytes; the audit is in the folder NAME-audit.
_MAX_NAME_BYTES = 249


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """What every command of a batch job needs.

    Attributes:
        settings: settings of the job.
        allocation: the job in Slurm; None without Slurm.
        control: runs commands, and knows which signals have come.
        launch: starts ranks.
        environ: environment of the job.
    """

    settings: BatchSettings
    allocation: Allocation | None
    control: JobControl
    launch: Launch
    environ: Mapping[str, str]

    @property
    def num_tasks(self) -> int:
        """Number of ranks."""
        return self.settings.num_ranks if self.allocation is None else self.allocation.num_tasks

    @property
    def num_restarts(self) -> int:
        """How often Slurm has requeued the job."""
        return 0 if self.allocation is None else self.allocation.num_restarts

    def run_dir(self) -> Path:
        """Return the folder of the run: an array's elements have one each, and a requeued job keeps its own."""
        if self.settings.run_dir:
            element = "" if self.allocation is None else self.allocation.element
            return Path(f"{self.settings.run_dir}-{element}" if element else self.settings.run_dir)
        job = time.strftime("%Y%m%d-%H%M%S") if self.allocation is None else self.allocation.job
        return Path("runs", f"{job}-{self.control.name}")

    def rebound(self, snapshots: Path) -> BatchJob:
        """Return the job with the binding that HPCPACE_BIND asks for, and say which one that is."""
        if self.settings.bind == "off":
            return self
        # The rules of the audit take longer to load than all of the job control.
        from hpcpace.batch.binding import choose_binding

        chosen = choose_binding(self.launch, snapshots, self.environ)
        self.control.say(chosen.line)
        return dataclasses.replace(self, launch=self.launch.with_option(chosen.option)) if chosen.option else self


def prepare_job(name: str, environ: Mapping[str, str]) -> BatchJob:
    """Return the job that this process controls, and say what was chosen for it.

    Raises:
        UsageError: a variable is wrong, srun is missing, or this process is itself one of several tasks.
    """
    settings = read_settings(environ)
    allocation = read_allocation(environ)
    if allocation is not None:
        _check_place(allocation, environ)
    control = JobControl(name, None if allocation is None else allocation.job)
    launch = Launch(program=settings.program, allocation=allocation)
    if allocation is not None:
        launch = dataclasses.replace(launch, options=_srun_options(settings, environ, control))
    return BatchJob(settings=settings, allocation=allocation, control=control, launch=launch, environ=environ)


def audit_ranks(job: BatchJob, snapshots: Path, options: Sequence[str] = ()) -> int:
    """Audit the ranks of a job with the training's options of srun, and return the status of the audit.

    Args:
        job: the job.
        snapshots: folder to save snapshots in.
        options: further options of `hpcpace audit`.
    """
    # Rank 0 exits with the code of the findings, which must not end the other ranks.
    command = job.launch.command(["audit", "--save", str(snapshots), *options], "--kill-on-bad-exit=0")
    return job.control.run_ranks(command, job.launch.environ(job.environ), timeout_s=_AUDIT_TIMEOUT_S)


def audit_only(job: BatchJob, options: Sequence[str]) -> int:
    """Audit the ranks of a job, with nothing behind it, and return the exit status of the job."""
    check_length(job.run_dir())
    status = audit_ranks(job, snapshot_folder(job, _beside(job.run_dir())), options)
    if status == TIMED_OUT:
        job.control.say(f"not finished after {_AUDIT_TIMEOUT_S:g} s: a node may be dead")
    return job.control.ended_by or status


def audit_first(job: BatchJob, folder: Path) -> int | None:
    """Audit a job before its training, as HPCPACE_AUDIT says.

    Args:
        job: the job.
        folder: where to keep snapshots, by attempts.

    Returns:
        The exit status of the job if it ends here: a signal came, or the audit has found a failure under `strict`.
    """
    if job.settings.audit == "off":
        return None
    status = audit_ranks(job, snapshot_folder(job, folder))
    if job.control.ended_by:
        return job.control.ended_by
    if job.control.is_early:
        job.control.say("not trained: the time limit came near before training began; request a longer one (-t)")
        return EXIT_WARNING
    if status == EXIT_FAILED and job.settings.audit == "strict":
        job.control.say("not trained: the audit has found a failure (F), see above; HPCPACE_AUDIT=warn trains anyway")
        return EXIT_FAILED
    if status not in (EXIT_OK, EXIT_WARNING, EXIT_CANNOT_TELL, EXIT_FAILED):
        job.control.say(f"no audit: 'hpcpace audit' ended with status {status}")
    return None


def check_length(run_dir: Path) -> None:
    """Refuse a run directory that no file system takes, before the job waits for nodes, audits, and fails.

    Raises:
        UsageError: a name in it is too long.
    """
    longest = max(run_dir.parts, key=lambda part: len(os.fsencode(part)), default="")
    if len(os.fsencode(longest)) > _MAX_NAME_BYTES:
        raise UsageError(
            f"a folder of the run is called {shown(longest)}: a name has at most {_MAX_NAME_BYTES} bytes; choose "
            "another with HPCPACE_RUN_DIR or --name"
        )


def snapshot_folder(job: BatchJob, folder: Path) -> Path:
    """Return where the audit of this attempt keeps its snapshots."""
    return folder / f"attempt-{job.num_restarts}" / "snapshot"


def _beside(run_dir: Path) -> Path:
    """Return a folder that `hpcpace audit --save` does not take for an option."""
    return Path(f"./{run_dir}") if str(run_dir).startswith("-") else run_dir


def _check_place(allocation: Allocation, environ: Mapping[str, str]) -> None:
    if environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        raise UsageError(
            f"hpcpace batch starts the ranks by itself, but srun has started it as {environ['SLURM_STEP_NUM_TASKS']} "
            "tasks: leave srun out"
        )
    if shutil.which("srun", path=environ.get("PATH")) is None:
        raise UsageError(
            f"this is Slurm job {allocation.job}, but there is no srun on PATH: load the site's module of Slurm in "
            "HPCPACE_PRELUDE; with containers install hpcpace on the host as well (docs/site.md)"
        )


def _srun_options(settings: BatchSettings, environ: Mapping[str, str], control: JobControl) -> tuple[str, ...]:
    gpu = gpu_options(environ, settings.srun_args)
    for option in gpu:
        control.say(f"srun {option}: each rank gets its own slice of a GPU (MIG)")
    return (*_mpi_options(settings, environ, control), *settings.srun_args, *gpu)


def _mpi_options(settings: BatchSettings, environ: Mapping[str, str], control: JobControl) -> tuple[str, ...]:
    if settings.mpi:
        return (f"--mpi={settings.mpi}",)
    # The image of a container that srun enters has a library of its own.
    if any(option.startswith(("--mpi", "--container-image")) for option in settings.srun_args):
        return ()
    option, library = mpi_option(environ, settings.python or (sys.executable,))
    if not option:
        return ()
    control.say(f"srun {option}: it matches the MPI of the ranks, {library.split(',')[0].strip()}")
    return (option,)
