"""The runs of one layout of a study as a batch job; the study goes on behind a run that ended its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcpace.batch.job import BatchJob, audit_first
from hpcpace.core.errors import EXIT_OK, EXIT_USAGE, EXIT_WARNING, UsageError
from hpcpace.studies.setups import StudyFolder, parse_layout

_MOST_FAILURES = 2


def run_series(job: BatchJob, words: Sequence[str]) -> int:
    """Do all open runs of this job's layout, and return the exit status of the job.

    A run that ends the ranks, for example out of memory, costs one start; the study then continues with the next run.

    Args:
        job: the job.
        words: folder of the study.

    Raises:
        UsageError: tasks are not equally many on each node, or new starts make no progress.
    """
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
        if failures > _MOST_FAILURES:
            raise UsageError(f"layout {name}: {after} runs are left, but new starts make no progress (status {status})")
        before = after
    job.control.run_untold([*job.launch.program, "study", "status", words[0]], job.environ)
    return EXIT_OK
