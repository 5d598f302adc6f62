"""A job near its time limit, through a real Slurm: checkpoint, requeue, and the same losses as without the stop.

The pipeline stands for all workloads, unless HPCPACE_ALL_REQUEUES is 1, as `make drills` sets it: each takes a minute.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.labs import JobQueue, SlurmJob
from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.trace.reader import read_trace

SBATCH = Path(__file__).parents[2] / "sbatch"
JOB_TIMEOUT_S = 200
OVER_FOUR_HOSTS = ("-N4", "--ntasks-per-node=1")
NUM_STEPS = 60
SETTINGS = ("--steps", str(NUM_STEPS), "--warmup-steps", "1", "--batch-size", "8")
TEXT = ("--seq-len", "32")
# Up to two replicas go on bit for bit. With four, sums of gradients are rounded in another order after a start: 6e-8 of
# a loss, which GPT-2 leaves as small, and ResNet-18 with four images a replica makes five times larger with each step.
WORKLOADS = {
    "gpt2_pp": (TEXT, 0.0),
    "gpt2_tp": (TEXT, 0.0),
    "gpt2_zero": (TEXT, 1e-5),
    "gpt2_dp": (TEXT, 1e-5),
    "resnet18_dp": ((), 1e-5),
}
"""Options of each workload, and by how much its losses may differ, relative to them."""
NUM_COMPARED = {"resnet18_dp": 3}
"""Steps after the stop whose losses are compared; all of them if not given."""
CHOSEN = list(WORKLOADS) if os.environ.get("HPCPACE_ALL_REQUEUES") == "1" else ["gpt2_pp"]
REQUEUE_SOON = {"HPCPACE_REQUEUE_AFTER_S": "0"}
# Ranks that end so long after rank 0 that srun, which has seen it end with status 1, ends them by SIGTERM.
ENDS_LATE = """
import atexit, os, time

if os.environ.get("SLURM_PROCID", "0") != "0":
    atexit.register(time.sleep, 3)
"""


def submit(queue: JobQueue, name: str, *arguments: str, cwd: Path, **environ: str) -> int:
    return queue.submit(*OVER_FOUR_HOSTS, SBATCH / f"{name}.sh", *arguments, cwd=cwd, environ=environ)


def log_of(job: SlurmJob) -> str:
    return job.output.read_text()


def result_of(attempt: Attempt) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(attempt.result_json.read_text())
    return content


@pytest.mark.nightly
@pytest.mark.parametrize("name", CHOSEN)
def test_requeued_job_goes_on_with_the_losses_of_one_that_was_never_stopped(
    name: str, queue: JobQueue, tmp_path: Path
) -> None:
    options, tolerance = WORKLOADS[name]
    whole_id = submit(queue, name, *SETTINGS, *options, "--no-trace", cwd=tmp_path)
    whole = queue.wait(whole_id, timeout_s=JOB_TIMEOUT_S)
    assert whole.state == "COMPLETED", log_of(whole)
    job_id = submit(queue, name, *SETTINGS, *options, cwd=tmp_path, **REQUEUE_SOON)
    run = RunDirectory(tmp_path / "runs" / f"{job_id}-{name}")
    wait_for_steps(queue, job_id, run)
    # What `#SBATCH --signal=B:USR1@120` does two minutes before the limit.
    told = queue.run("scancel", "--batch", "--signal=USR1", str(job_id))
    assert told.returncode == 0, told.stderr
    start_again_soon(queue, job_id)
    job = queue.wait(job_id, timeout_s=JOB_TIMEOUT_S)
    log = log_of(job)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), log
    assert log.count("the time limit is near (SIGUSR1)") == 1
    assert "requeued, resumes from its checkpoint" in log
    first, second = (result_of(attempt) for attempt in run.attempts())
    assert (first["outcome"], first["stopped_by"], second["outcome"]) == ("stopped", "SIGUSR1", "finished")
    assert 0 < second["first_step"] == len(first["losses"]) < NUM_STEPS
    assert len(second["losses"]) == NUM_STEPS
    expected = result_of(RunDirectory(tmp_path / "runs" / f"{whole_id}-{name}").attempt(0))["losses"]
    stop = second["first_step"] + NUM_COMPARED.get(name, NUM_STEPS)
    pairs = list(zip(second["losses"], expected, strict=True))[:stop]
    difference = max(abs(loss / other - 1) for loss, other in pairs)
    print(f"{name}: losses differ by at most {difference:.2g} of themselves")
    assert difference <= tolerance


def test_time_limit_that_comes_too_soon_leaves_a_checkpoint_and_no_requeue(queue: JobQueue, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ENDS_LATE)
    settings = ("--steps", "100000", "--batch-size", "4")
    job_id = submit(queue, "resnet18_dp", *settings, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    run = RunDirectory(tmp_path / "runs" / f"{job_id}-resnet18_dp")
    wait_for_steps(queue, job_id, run)
    # Less is left than the two minutes ahead of the limit at which Slurm sends the signal: it sends it now.
    told = queue.run("scontrol", "update", f"JobId={job_id}", "TimeLimit=2")
    assert told.returncode == 0, told.stderr
    job = queue.wait(job_id, timeout_s=JOB_TIMEOUT_S)
    log = log_of(job)
    assert (job.state, job.exit_code) == ("FAILED", 1), log
    assert "not requeued: trained for only" in log
    assert result_of(run.attempt(0))["outcome"] == "stopped"
    assert len(list(run.checkpoint_dir.glob("step-*"))) == 1


def start_again_soon(queue: JobQueue, job_id: int) -> None:
    """Wait until a job is requeued, and spare it most of the two minutes after which Slurm would start it again.

    Not all of them: what is left of the step before on the nodes would take away the PMI sockets of one by its name.
    """
    deadline_s = time.monotonic() + JOB_TIMEOUT_S
    while (job := queue.job(job_id)).state != "PENDING":
        assert time.monotonic() < deadline_s, log_of(job)
        assert not job.finished, log_of(job)
        time.sleep(0.05)
    queue.run("scontrol", "update", f"JobId={job_id}", "StartTime=now+10")


def wait_for_steps(queue: JobQueue, job_id: int, run: RunDirectory) -> None:
    """Wait until every rank of a job has steps on disk."""
    deadline_s = time.monotonic() + JOB_TIMEOUT_S
    while num_steps_on_disk(run) <= 2:
        assert time.monotonic() < deadline_s, f"no traces after {JOB_TIMEOUT_S} s: {log_of(queue.job(job_id))}"
        time.sleep(0.2)


def num_steps_on_disk(run: RunDirectory) -> int:
    """Return the steps that each of the four ranks has on disk, while they go on writing."""
    files = run.attempt(0).trace_files().values()
    if len(files) < 4:
        return 0
    try:
        return min(len(read_trace(path).tables["steps"]) for path in files)
    except TraceError:  # a file that is just being made
        return 0
