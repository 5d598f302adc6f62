"""The batch scripts through a real Slurm: they complete, leave readable traces, and end with the report."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import pytest
from cases import ALL_SEEDS, only_nightly

from experiments.labs import JobQueue, SlurmJob
from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import RunDirectory, open_run
from hpcpace.lab.lab import Lab
from hpcpace.trace.reader import read_trace
from hpcpace.trace.tables import RankTrace

SBATCH = Path(__file__).parents[2] / "sbatch"
JOB_TIMEOUT_S = 120
REPORT = "Phases by rank"
OVER_FOUR_HOSTS = ("-N4", "--ntasks-per-node=1")
OPEN_MPI = {"HPCPACE_MPI": "pmix", "MPI4PY_MPIABI": "openmpi"}


def submit(queue: JobQueue, name: str, *arguments: str, cwd: Path, **environ: str) -> int:
    return queue.submit(*OVER_FOUR_HOSTS, SBATCH / f"{name}.sh", *arguments, cwd=cwd, environ=environ)


def log_of(job: SlurmJob) -> str:
    return job.output.read_text()


@pytest.mark.parametrize(
    ("name", "mesh", "mpi"),  # MPICH under pmi2, and Open MPI under pmix
    only_nightly(
        [("gpt2_pp", "dp=2,pp=2,tp=1", {})],
        [
            ("gpt2_dp", "dp=4,pp=1,tp=1", OPEN_MPI),
            ("gpt2_pp", "dp=2,pp=2,tp=1", OPEN_MPI),
            ("gpt2_dp", "dp=4,pp=1,tp=1", {}),
        ],
    ),
)
def test_job_over_four_hosts_completes_with_four_traces_and_the_report_in_its_log(
    queue: JobQueue, tmp_path: Path, name: str, mesh: str, mpi: dict[str, str]
) -> None:
    job_id = submit(queue, name, "--steps", "8", cwd=tmp_path, **mpi)
    job = queue.wait(job_id, timeout_s=JOB_TIMEOUT_S)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), log_of(job)
    assert job.output == tmp_path / f"{name}-{job_id}.out"
    assert REPORT in log_of(job)
    run = tmp_path / "runs" / f"{job_id}-{name}"
    traces = traces_of(run)
    assert [(trace.header.rank, trace.header.host) for trace in traces] == list(enumerate(["n1", "n2", "n3", "n4"]))
    assert [trace.header.topology_addr for trace in traces] == [
        *("spine.leaf1.n1", "spine.leaf1.n2", "spine.leaf2.n3", "spine.leaf2.n4")
    ]
    assert {trace.header.mesh for trace in traces} == {mesh}
    assert {trace.header.job_id for trace in traces} == {str(job_id)}
    assert [len(trace.tables["steps"]) for trace in traces] == [8] * 4
    assert all(trace.closed_cleanly for trace in traces)
    library = json.loads(RunDirectory(run).attempt(0).run_json.read_text())["versions"]["mpi"]
    assert ("Open MPI" in library) == bool(mpi), library
    assert "ranks share cores" in log_of(job)


@pytest.mark.nightly
def test_output_of_ranks_is_labelled(queue: JobQueue, tmp_path: Path) -> None:
    job_id = submit(queue, "gpt2_dp", "--steps", "4", "--no-trace", cwd=tmp_path)
    log = log_of(queue.wait(job_id, timeout_s=JOB_TIMEOUT_S))
    assert re.search(r"^0: .*loss \d", log, flags=re.MULTILINE), log


def test_job_whose_rank_is_killed_fails_soon_and_still_reports(lab: Lab, queue: JobQueue, tmp_path: Path) -> None:
    job_id = submit(queue, "gpt2_pp", "--steps", "100000", cwd=tmp_path)
    wait_for_steps(queue, job_id, tmp_path / "runs" / f"{job_id}-gpt2_pp")
    killed = lab.run("hpcpace", "lab", "fault", "kill-rank", str(job_id), "2")
    assert killed.returncode == 0, killed.stderr
    job = queue.wait(job_id, timeout_s=JOB_TIMEOUT_S)
    assert job.state in ("FAILED", "CANCELLED")
    assert job.exit_code != 0
    assert REPORT in log_of(job)
    assert "rank 2 on n3" in log_of(job)


@pytest.mark.parametrize(
    ("command", "state"),
    only_nightly(
        [
            # A limit that is over now, for Slurm counts limits in minutes.
            (("scontrol", "update", "JobId={job}", "EndTime=now"), "TIMEOUT"),
        ],
        [
            # What `sbatch --signal=B:TERM@60` does a minute before the limit.
            (("scancel", "--batch", "--signal=TERM", "{job}"), "FAILED"),
            (("scancel", "{job}"), "CANCELLED"),
        ],
    ),
    ids=["time limit", "signal to the script", "scancel"][: 3 if ALL_SEEDS.get() else 1],
)
def test_job_that_is_told_to_end_reports_first(
    queue: JobQueue, tmp_path: Path, command: tuple[str, ...], state: str
) -> None:
    job_id = submit(queue, "gpt2_pp", "--steps", "100000", cwd=tmp_path, HPCPACE_TRACE_FLUSH_INTERVAL_S="3")
    run = tmp_path / "runs" / f"{job_id}-gpt2_pp"
    wait_for_steps(queue, job_id, run)
    told = tell(queue, *(word.format(job=job_id) for word in command))
    assert told.returncode == 0, told.stderr
    job = queue.wait(job_id, timeout_s=JOB_TIMEOUT_S)
    log = log_of(job)
    assert (job.state, job.exit_code) == (state, 143), log
    assert log.count("gpt2_pp: cancelled, out of time, or a node has failed (SIGTERM)") == 1
    assert REPORT in log and "summary.json" in log
    traces = traces_of(run)
    assert [trace.header.rank for trace in traces] == [0, 1, 2, 3]
    # Nothing of a flush interval's steps is lost: the ranks of a pipeline are a few steps apart at most.
    last_steps = [int(trace.tables["steps"]["step"][-1]) for trace in traces]
    assert max(last_steps) - min(last_steps) <= 2, last_steps


def tell(queue: JobQueue, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm, again where it refuses a time because the second of `now` has passed meanwhile."""
    told = queue.run(*command)
    for _ in range(5):
        if "Invalid time" not in told.stderr:
            break
        told = queue.run(*command)
    return told


def test_refuses_ranks_that_do_not_find_each_other_over_the_mpi_asked_for(queue: JobQueue, tmp_path: Path) -> None:
    wishes = {"HPCPACE_MPI": "none", "HPCPACE_WORLD_COORDINATION": "mpi"}
    job_id = submit(queue, "gpt2_dp", cwd=tmp_path, **wishes)
    job = queue.wait(job_id, timeout_s=JOB_TIMEOUT_S)
    # Which status depends on whether a task is ended, by --kill-on-bad-exit, before it has refused by itself.
    assert job.state == "FAILED", log_of(job)
    assert "--mpi=pmi2" in log_of(job)


HANGING_MPI = """
import os, sys, threading

class Hanging:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py.MPI" and os.environ.get("SLURM_STEP_ID") == "0":
            threading.Event().wait()

sys.meta_path.insert(0, Hanging())
"""


@pytest.mark.nightly
def test_ranks_that_hang_in_the_start_of_mpi_are_started_once_more(queue: JobQueue, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGING_MPI)
    # Without the audit the training is step 0, and its second start step 1.
    settings = {"PYTHONPATH": str(tmp_path), "HPCPACE_WORLD_START_TIMEOUT_S": "12", "HPCPACE_AUDIT": "off"}
    job_id = submit(queue, "gpt2_dp", "--steps", "4", cwd=tmp_path, **settings)
    job = queue.wait(job_id, timeout_s=JOB_TIMEOUT_S)
    assert job.state == "COMPLETED", log_of(job)
    assert log_of(job).count("the ranks did not get through the start of MPI; starting them again") == 1
    assert REPORT in log_of(job)


def test_takes_the_number_of_tasks_from_sbatch(queue: JobQueue, tmp_path: Path) -> None:
    script = SBATCH / "gpt2_pp.sh"
    job_id = queue.submit("--ntasks-per-node", "2", script, "--steps", "4", cwd=tmp_path)
    job = queue.wait(job_id, timeout_s=JOB_TIMEOUT_S)
    assert job.state == "COMPLETED", log_of(job)
    assert {trace.header.mesh for trace in traces_of(tmp_path / "runs" / f"{job_id}-gpt2_pp")} == {"dp=1,pp=2,tp=1"}


def traces_of(run: Path) -> list[RankTrace]:
    """Return the traces of a run's only attempt, in order of the ranks."""
    (attempt,) = open_run(run).attempts()
    return [read_trace(path) for path in attempt.trace_files().values()]


def wait_for_steps(queue: JobQueue, job_id: int, run: Path) -> None:
    """Wait until every rank of a job has steps to report on disk."""
    deadline_s = time.monotonic() + JOB_TIMEOUT_S
    while num_steps_on_disk(run) <= 10:
        assert time.monotonic() < deadline_s, f"no traces after {JOB_TIMEOUT_S} s: {log_of(queue.job(job_id))}"
        time.sleep(0.2)


def num_steps_on_disk(run: Path) -> int:
    """Return the steps that each of the four ranks has on disk, while they go on writing."""
    files = RunDirectory(run).attempt(0).trace_files().values()
    if len(files) < 4:
        return 0
    try:
        return min(len(read_trace(path).tables["steps"]) for path in files)
    except TraceError:  # a file that is just being made
        return 0
