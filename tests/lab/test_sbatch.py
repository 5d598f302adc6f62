"""The batch scripts through a real Slurm: they complete, leave readable traces, and end with the report."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from hpcpace.errors import TraceError
from hpcpace.lab.slurm import Job, OneHostSlurm
from hpcpace.rundir import RunDirectory, open_run
from hpcpace.trace.reader import read_trace

SBATCH = Path(__file__).parents[2] / "sbatch"
JOB_TIMEOUT_S = 120
REPORT = "Where the step went"


def submit(slurm: OneHostSlurm, name: str, *arguments: str, cwd: Path, **environ: str) -> int:
    return slurm.submit(SBATCH / f"{name}.sh", *arguments, cwd=cwd, environ=environ)


def log_of(job: Job) -> str:
    return job.output.read_text()


@pytest.mark.parametrize(("name", "mesh"), [("gpt2_pp", "dp=2,pp=2,tp=1"), ("gpt2_dp", "dp=4,pp=1,tp=1")])
def test_job_completes_with_four_traces_and_the_report_in_its_log(
    slurm: OneHostSlurm, tmp_path: Path, name: str, mesh: str
) -> None:
    job_id = submit(slurm, name, "--steps", "8", cwd=tmp_path)
    job = slurm.wait_for_job(job_id, timeout_s=JOB_TIMEOUT_S)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), log_of(job)
    assert job.output == tmp_path / f"{name}-{job_id}.out"
    assert REPORT in log_of(job)
    (attempt,) = open_run(tmp_path / "runs" / f"{job_id}-{name}").attempts()
    traces = [read_trace(path) for path in attempt.trace_files().values()]
    assert [trace.header.rank for trace in traces] == [0, 1, 2, 3]
    assert {trace.header.mesh for trace in traces} == {mesh}
    assert {trace.header.job_id for trace in traces} == {str(job_id)}
    assert [len(trace.tables["steps"]) for trace in traces] == [8] * 4


def test_output_of_ranks_is_labelled(slurm: OneHostSlurm, tmp_path: Path) -> None:
    job_id = submit(slurm, "gpt2_dp", "--steps", "4", "--no-trace", cwd=tmp_path)
    log = log_of(slurm.wait_for_job(job_id, timeout_s=JOB_TIMEOUT_S))
    assert re.search(r"^0: .*loss \d", log, flags=re.MULTILINE), log


def test_job_whose_rank_is_killed_fails_soon_and_still_reports(slurm: OneHostSlurm, tmp_path: Path) -> None:
    job_id = submit(slurm, "gpt2_pp", "--steps", "100000", cwd=tmp_path)
    run = tmp_path / "runs" / f"{job_id}-gpt2_pp"
    victim = wait_for_rank(slurm, job_id, run, rank=2)
    victim.send_signal(signal.SIGKILL)
    job = slurm.wait_for_job(job_id, timeout_s=JOB_TIMEOUT_S)
    assert job.state in ("FAILED", "CANCELLED")
    assert job.exit_code != 0
    assert REPORT in log_of(job)


def test_refuses_ranks_that_do_not_find_each_other(slurm: OneHostSlurm, tmp_path: Path) -> None:
    job_id = submit(slurm, "gpt2_dp", cwd=tmp_path, HPCPACE_MPI="none")
    job = slurm.wait_for_job(job_id, timeout_s=JOB_TIMEOUT_S)
    # Which status depends on whether a task is ended, by --kill-on-bad-exit, before it has refused by itself.
    assert job.state == "FAILED", log_of(job)
    assert "--mpi=pmi2" in log_of(job)


def test_takes_the_number_of_tasks_from_sbatch(slurm: OneHostSlurm, tmp_path: Path) -> None:
    script = SBATCH / "gpt2_pp.sh"
    job_id = slurm.submit("--ntasks-per-node", "2", script, "--steps", "4", cwd=tmp_path)
    job = slurm.wait_for_job(job_id, timeout_s=JOB_TIMEOUT_S)
    assert job.state == "COMPLETED", log_of(job)
    (attempt,) = open_run(tmp_path / "runs" / f"{job_id}-gpt2_pp").attempts()
    assert {read_trace(path).header.mesh for path in attempt.trace_files().values()} == {"dp=1,pp=2,tp=1"}


def wait_for_rank(slurm: OneHostSlurm, job_id: int, run: Path, *, rank: int) -> psutil.Process:
    """Wait until every rank of a job has steps to report on disk, and return the process of one."""
    deadline_s = time.monotonic() + JOB_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if num_steps_on_disk(run) > 10:
            return process_of_rank(job_id, rank)
        time.sleep(0.2)
    raise AssertionError(f"no traces after {JOB_TIMEOUT_S} s: {log_of(slurm.job(job_id))}")


def num_steps_on_disk(run: Path) -> int:
    """Return the steps that each of the four ranks has on disk, while they go on writing."""
    files = RunDirectory(run).attempt(0).trace_files().values()
    if len(files) < 4:
        return 0
    try:
        return min(len(read_trace(path).tables["steps"]) for path in files)
    except TraceError:  # a file that is just being made
        return 0


def process_of_rank(job_id: int, rank: int) -> psutil.Process:
    wanted = {"SLURM_JOB_ID": str(job_id), "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank)}
    (found,) = (
        process
        for process in psutil.Process().children(recursive=True)
        if "hpcpace" in " ".join(process.cmdline()) and wanted.items() <= process.environ().items()
    )
    return found
