"""A training, or the runs of a study, as a batch job: audit, run, collect, report, requeue.

A failed start is repeated once. A study goes on with its next run after one that ended its ranks.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcpace.batch.job import BatchJob, audit_first, check_length, snapshot_folder
from hpcpace.batch.launch import succeeds
from hpcpace.core.errors import (
    EXIT_CANNOT_TELL,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    EXIT_WARNING,
    ConfigError,
    UsageError,
)
from hpcpace.core.rundir import RunDirectory
from hpcpace.core.settings import load_config
from hpcpace.core.text import printable
from hpcpace.observe.settings import SUMMARY_VARIABLE, TraceConfig
from hpcpace.train.settings import parse_mesh

# Sequences or images of a task in each step; four sequences divide into four microbatches on every mesh.
_SAMPLES_PER_TASK = {"gpt2": 4, "resnet18": 32}


def training_options(layout: str, workload: str, num_tasks: int, environ: Mapping[str, str]) -> list[str]:
    """Return the options of `hpcpace train WORKLOAD` for a layout; those of the user, behind them, win.

    Args:
        layout: `data`, `pipeline` (two stages; as many as tasks if their number is odd), `tensor` (four slices, or two,
            or none, whichever divides the number of tasks) or `zero` (data, with everything sharded).
        workload: `gpt2` or `resnet18`.
        num_tasks: number of ranks.
        environ: environment; HPCPACE_TRAIN_MESH, _BATCH_SIZE and _ZERO replace what is chosen here.
    """
    stages = (num_tasks if num_tasks % 2 else 2) if layout == "pipeline" else 1
    slices = next(n for n in (4, 2, 1) if num_tasks % n == 0) if layout == "tensor" else 1
    mesh = f"dp={num_tasks // (stages * slices)},pp={stages},tp={slices}"
    batch_size = _SAMPLES_PER_TASK.get(workload, 1) * num_tasks
    options = ["--mesh", environ.get("HPCPACE_TRAIN_MESH") or mesh]
    options += ["--batch-size", environ.get("HPCPACE_TRAIN_BATCH_SIZE") or str(batch_size)]
    if layout == "zero":
        # A single task has nothing to shard.
        options += ["--zero", environ.get("HPCPACE_TRAIN_ZERO") or ("3" if num_tasks > 1 else "0")]
    return options


_MAX_FAILURES = 2


def run_series(job: BatchJob, words: Sequence[str]) -> int:
    """Do all open runs of this job's layout, and return the exit status of the job.

    A run that ends the ranks, for example out of memory, costs one start; the study then continues with the next run.

    Args:
        job: the job.
        words: folder of the study.

    Raises:
        UsageError: tasks are not equally many on each node, or new starts make no progress.
    """
    from hpcpace.studies.setups import (
        StudyFolder,  # only studies need it
        parse_layout,
    )

    if job.allocation is None or len(words) != 1:
        raise UsageError("hpcpace batch -- study series STUDY runs in a Slurm job: sbatch/nano_cluster.sh submits it")
    study, num_nodes = StudyFolder(Path(words[0])), job.allocation.num_nodes
    if job.num_tasks % num_nodes:
        raise UsageError(f"{job.num_tasks} tasks on {num_nodes} nodes: ask for as many on each (--ntasks-per-node)")
    name = f"{num_nodes}x{job.num_tasks // num_nodes}"
    layout = parse_layout(name)
    command = job.launch.command(["study", "series", words[0], "--layout", name], "--kill-on-bad-exit=1")
    before = len(study.open_runs(layout))
    if before and (ended := audit_first(job, study.path / "audit" / name)) is not None:
        return ended
    failures = 0
    while before:
        status = job.control.run_ranks(command, job.launch.environ(job.environ))
        # Another start does not help after a wrong launch or a signal that ends the job.
        if job.control.ended_by or status in (EXIT_WARNING, EXIT_USAGE):
            return job.control.ended_by or status
        after = len(study.open_runs(layout))
        failures = 0 if after < before else failures + 1
        if failures > _MAX_FAILURES:
            raise UsageError(f"layout {name}: {after} runs are left, but new starts make no progress (status {status})")
        before = after
    job.control.run_untold([*job.launch.program, "study", "status", words[0]], job.environ)
    return EXIT_OK


_TERMINATED = 143
# A node that has died must not hold up the report.
_COLLECT_STARTS_IN_S = 60.0
_FIRST_OF_SHELL, _LAST_OF_SHELL = 126, 128


def train(job: BatchJob, layout: str, words: Sequence[str]) -> int:
    """Train, report, and return the exit status of the job.

    That is the status of the training, or 128 plus the number of the signal that ended the job.

    Args:
        job: the job.
        layout: how ranks are laid out if the user gives no mesh; one of `hpcpace.batch.job.LAYOUTS`.
        words: the workload, and options of `hpcpace train WORKLOAD`.

    Raises:
        UsageError: the folder of the run belongs to another one, or its name is too long.
        MeshError: the mesh of the user does not fit the tasks of the job.
    """
    run_dir = Path(option_of(words, "--run-dir") or job.run_dir())
    check_length(run_dir)
    # Before the audit, which takes longer, and in one line instead of one of each rank.
    mesh = option_of(words, "--mesh") or job.environ.get("HPCPACE_TRAIN_MESH")
    if mesh:
        parse_mesh(mesh, _num_ranks(job, words))
    # A requeued job continues in its folder with another attempt; other jobs must not use it.
    if run_dir.exists() and not job.num_restarts:
        raise UsageError(f"{printable(str(run_dir))} exists already: name another folder with HPCPACE_RUN_DIR")
    audits = Path(f"{_no_option(run_dir)}-audit")
    ended = audit_first(job, audits)
    if ended is not None:
        return ended
    unbound, job = job, job.rebound(snapshot_folder(job, audits))
    started_s = time.monotonic()
    status = _train_ranks(job, run_dir, _train_words(job, layout, run_dir, words))
    if status not in (EXIT_OK, EXIT_WARNING):
        _collect(unbound, run_dir, words)
    _report(job, run_dir)
    if job.control.is_early and not job.control.ended_by and status == EXIT_WARNING and job.allocation is not None:
        _requeue(job, job.allocation.job, time.monotonic() - started_s)
    return job.control.ended_by or status


def option_of(words: Sequence[str], name: str) -> str | None:
    """Return the value of an option in a command line, the last one if it is given several times."""
    value = None
    for word, following in zip(words, (*words[1:], None), strict=True):
        if word == name:
            value = following
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def _train_words(job: BatchJob, layout: str, run_dir: Path, words: Sequence[str]) -> list[str]:
    num_ranks = _num_ranks(job, words)
    line = ["train", words[0], "--run-dir", _no_option(run_dir)]
    if job.allocation is None:
        line += ["--ranks", str(num_ranks)]
    return [*line, *training_options(layout, words[0], num_ranks, job.environ), *words[1:]]


def _num_ranks(job: BatchJob, words: Sequence[str]) -> int:
    """Return the number of ranks: the tasks of a Slurm job, elsewhere also from `--ranks`."""
    given = option_of(words, "--ranks")
    return int(given) if job.allocation is None and given and given.isdecimal() else job.num_tasks


def _no_option(run_dir: Path) -> str:
    """Return a folder as an argument; its name may begin with a dash and must not be taken for an option."""
    return f"./{run_dir}" if str(run_dir).startswith("-") else str(run_dir)


def _train_ranks(job: BatchJob, run_dir: Path, words: Sequence[str]) -> int:
    """Run the training, once more if its ranks did not start, and return its status."""
    control, run = job.control, RunDirectory(run_dir)
    command = job.launch.command(words, "--label", "--kill-on-bad-exit=1")
    timeout_s = job.settings.start_timeout_s
    environ = {
        **job.launch.environ(job.environ),
        "HPCPACE_WORLD_START_TIMEOUT_S": f"{timeout_s:g}",
        SUMMARY_VARIABLE: "false",
    }
    num_before = len(run.attempts())
    started_s = time.monotonic()
    status = control.run_ranks(command, environ)
    # Ranks that fail in MPI startup have lost nothing. Slurm's pmi2 takes the first 1,024 bytes that it reads for a
    # whole line, but MPICH may send a longer line: then ranks hang or abort.
    is_failed_start = _may_have_failed_to_start(status, time.monotonic() - started_s, timeout_s)
    if is_failed_start and not control.ended_by and not control.is_early and len(run.attempts()) == num_before:
        control.say("the ranks did not get through the start of MPI; starting them again")
        status = control.run_ranks(command, environ)
    # Status 1 is a training that stopped with a checkpoint. When its first rank exited, srun may have ended others
    # that were about to exit.
    if status == _TERMINATED and len(run.attempts()) > num_before and _has_stopped(run):
        return EXIT_WARNING
    return status


def _may_have_failed_to_start(status: int, seconds: float, timeout_s: float) -> bool:
    """Return whether ranks that ended so after some seconds, and created no folder, may have failed in MPI startup.

    hpcpace exits with 0 to 4, or with 143 if srun ended ranks before they had refused as well; 126 and 127 mean that
    the command cannot run; MPI aborts with others. Ranks that a signal ended after the startup timeout have hung.
    """
    return EXIT_FAILED < status < _FIRST_OF_SHELL or (status > _LAST_OF_SHELL and seconds >= int(timeout_s))


def _has_stopped(run: RunDirectory) -> bool:
    """Return whether the last attempt of a run stopped early, with a checkpoint: ranks record that before they exit."""
    try:
        return bool(json.loads(run.last_attempt().result_json.read_text())["outcome"] == "stopped")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _collect(job: BatchJob, run_dir: Path, words: Sequence[str]) -> None:
    """Bring home what killed ranks have left on disks of the nodes, where traces are kept there while the job runs."""
    file, given = option_of(words, "--config"), {"trace": {"trace_dir": option_of(words, "--trace-dir")}}
    try:
        trace = load_config(file=None if file is None else Path(file), environ=job.environ, options=given).of(
            TraceConfig
        )
    except ConfigError:  # the training has said so
        return
    if trace.trace_dir is None or not RunDirectory(run_dir).attempts():
        return
    command = job.launch.command(["collect", "--quiet", _no_option(run_dir)], "--kill-on-bad-exit=0", per_node=True)
    timeout_s = trace.copy_timeout_s + _COLLECT_STARTS_IN_S
    status = job.control.run_ranks(command, job.launch.environ(job.environ), timeout_s=timeout_s)
    if status and not job.control.ended_by:
        job.control.say(f"traces may be left on disks of nodes: 'hpcpace collect' ended with status {status}")


def _report(job: BatchJob, run_dir: Path) -> None:
    status = job.control.run_untold([*job.launch.program, "report", _no_option(run_dir)], job.environ)
    # Status 1 is a report that found something, 3 one that is not sure.
    if status not in (EXIT_OK, EXIT_WARNING, EXIT_CANNOT_TELL):
        job.control.say(f"no report, 'hpcpace report' ended with status {status}")


def _requeue(job: BatchJob, name: str, trained_s: float) -> None:
    """Requeue the job, which then resumes from its checkpoint."""
    if trained_s < job.settings.requeue_after_s:
        job.control.say(f"not requeued: trained for only {int(trained_s)} s; request a longer time limit (-t)")
        return
    # Slurm ends the batch script along with the job that it requeues.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if succeeds(["scontrol", "requeue", name]):
        job.control.say("requeued, resumes from its checkpoint")
    else:
        job.control.say("not requeued: submit a job with --resume and the folder of this run")
