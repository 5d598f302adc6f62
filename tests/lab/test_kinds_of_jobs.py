"""Job arrays, heterogeneous jobs, unequal tasks per node and salloc through a real Slurm."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.labs import JobQueue
from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import RunDirectory, open_run
from hpcpace.trace.reader import read_trace

SBATCH = Path(__file__).parents[2] / "sbatch"
JOB_TIMEOUT_S = 240
REPORT = "Phases by rank"
QUICK = {"HPCPACE_AUDIT": "off", "HPCPACE_REQUEUE_AFTER_S": "0"}


@pytest.mark.nightly
def test_elements_of_an_array_are_signalled_and_requeued_one_by_one(queue: JobQueue, tmp_path: Path) -> None:
    options = ("--array=0-2", "-N1", "--ntasks-per-node=1", SBATCH / "gpt2_dp.sh")
    array = queue.submit(*options, "--steps", "100000", cwd=tmp_path, environ=QUICK)
    runs = [RunDirectory(tmp_path / "runs" / f"{array}_{element}-gpt2_dp") for element in range(3)]
    wait_until(lambda: all(num_steps(run, 0) > 2 for run in runs), "steps of all elements")
    for element in range(3):
        told = queue.run("scancel", "--batch", "--signal=USR1", f"{array}_{element}")
        assert told.returncode == 0, told.stderr
        wait_until(lambda element=element: state(queue, array, element) == "PENDING", f"element {element} is requeued")
        # What is requeued stays away for a while; all others run on.
        queue.run("scontrol", "update", f"JobId={array}_{element}", "StartTime=now+3600")
        assert [state(queue, array, n) for n in range(3)] == ["PENDING"] * (element + 1) + ["RUNNING"] * (2 - element)
        outcomes = [run.attempt(0).result_json.exists() for run in runs]
        assert outcomes == [True] * (element + 1) + [False] * (2 - element)
    for run in runs:
        assert json.loads(run.attempt(0).result_json.read_text())["outcome"] == "stopped"
    queue.run("scontrol", "update", f"JobId={array}_1", "StartTime=now+10")
    wait_until(lambda: num_steps(runs[1], 1) > 2, "steps of the second attempt")
    assert [len(run.attempts()) for run in runs] == [1, 2, 1]
    queue.run("scancel", f"{array}_1")
    wait_until(lambda: state(queue, array, 1) == "CANCELLED", "element 1 is cancelled")
    assert [state(queue, array, n) for n in (0, 2)] == ["PENDING", "PENDING"]


@pytest.mark.nightly
def test_a_heterogeneous_job_is_one_training(queue: JobQueue, tmp_path: Path) -> None:
    components = ("-N1", "--ntasks-per-node=1", ":", "-N2", "--ntasks-per-node=1")
    job_id = queue.submit(*components, SBATCH / "gpt2_dp.sh", "--steps", "6", cwd=tmp_path)
    # What Slurm tells last is the state of the last component; only the first one has a log.
    job = queue.wait(job_id, timeout_s=JOB_TIMEOUT_S)
    log = (tmp_path / f"gpt2_dp-{job_id}.out").read_text()
    assert (job.state, job.exit_code) == ("COMPLETED", 0), log
    assert REPORT in log
    headers = [trace.header for trace in traces(tmp_path / "runs" / f"{job_id}-gpt2_dp")]
    assert [(header.rank, header.world_size) for header in headers] == [(0, 3), (1, 3), (2, 3)]
    assert len({header.host for header in headers}) == 3


@pytest.mark.nightly
def test_tasks_need_not_be_equally_many_on_each_node(queue: JobQueue, tmp_path: Path) -> None:
    job_id = queue.submit(
        "-N3", "-n5", "--ntasks-per-node=2", SBATCH / "gpt2_dp.sh", "--steps", "4", cwd=tmp_path, environ=QUICK
    )
    job = queue.wait(job_id, timeout_s=JOB_TIMEOUT_S)
    assert job.state == "COMPLETED", job.output.read_text()
    headers = [trace.header for trace in traces(tmp_path / "runs" / f"{job_id}-gpt2_dp")]
    assert {header.mesh for header in headers} == {"dp=5,pp=1,tp=1"}
    assert sorted(Counter(header.host for header in headers).values()) == [1, 2, 2]


def test_a_shell_of_salloc_trains_over_its_nodes(queue: JobQueue, tmp_path: Path) -> None:
    batch = ("hpcpace", "batch", "--name", "mine", "--", "train", "gpt2", "--steps", "4")
    done = queue.run(
        "salloc", "-N2", "--ntasks-per-node=1", *batch, cwd=tmp_path, environ=QUICK, timeout_s=JOB_TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert REPORT in done.stdout
    (run,) = (tmp_path / "runs").glob("*-mine")
    assert {trace.header.host for trace in traces(run)} == {"n1", "n2"}


def test_a_script_from_the_package_chooses_the_type_that_open_mpi_speaks(queue: JobQueue, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(queue.run("hpcpace", "sbatch", "gpt2_dp").stdout)
    environ = {**QUICK, "MPI4PY_MPIABI": "openmpi"}
    options = ("-N2", "--ntasks-per-node=1", "job.sh", "--steps", "4")
    job = queue.wait(queue.submit(*options, cwd=tmp_path, environ=environ), timeout_s=JOB_TIMEOUT_S)
    log = job.output.read_text()
    assert job.state == "COMPLETED", log
    assert "gpt2_dp: srun --mpi=pmix: it matches the MPI of the ranks, Open MPI" in log


def state(queue: JobQueue, array: int, element: int) -> str:
    """Return the state of one element of an array."""
    shown = queue.run("scontrol", "--oneliner", "show", "job", f"{array}_{element}").stdout
    return shown.partition("JobState=")[2].partition(" ")[0]


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + JOB_TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline_s, f"not after {JOB_TIMEOUT_S} s: {what}"
        time.sleep(0.2)


def num_steps(run: RunDirectory, attempt: int) -> int:
    """Return the steps that all ranks have on disk, while they go on writing."""
    try:
        return min(
            (len(read_trace(path).tables["steps"]) for path in run.attempt(attempt).trace_files().values()), default=0
        )
    except TraceError:  # a file that is just being made
        return 0


def traces(run: Path) -> list:
    (attempt,) = open_run(run).attempts()
    return [read_trace(path) for path in attempt.trace_files().values()]
