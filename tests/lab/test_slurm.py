"""The one-host Slurm itself: it runs MPI and torch jobs, tells how they ended, and leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from hpcpace.errors import HpcpaceError
from hpcpace.lab.slurm import OneHostSlurm

SUM_OVER_MPI = "from mpi4py import MPI; w = MPI.COMM_WORLD; print(w.size, w.allreduce(w.rank))"
SUM_OVER_GLOO = """
import os
import torch
import torch.distributed as dist
from mpi4py import MPI
store = f"file://{os.environ['STORE']}"
dist.init_process_group("gloo", init_method=store, rank=MPI.COMM_WORLD.rank, world_size=MPI.COMM_WORLD.size)
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
print(int(total))
dist.destroy_process_group()
"""


def test_mpi_ranks_form_one_world(slurm: OneHostSlurm) -> None:
    done = slurm.run("srun", "--mpi=pmi2", "-n", "4", sys.executable, "-c", SUM_OVER_MPI)
    assert done.stdout.splitlines() == ["4 6"] * 4, done.stderr


def test_without_pmi_each_task_is_a_world_of_its_own(slurm: OneHostSlurm) -> None:
    done = slurm.run("srun", "--mpi=none", "-n", "2", sys.executable, "-c", SUM_OVER_MPI)
    assert done.stdout.splitlines() == ["1 0"] * 2, done.stderr


def test_torch_reduces_over_gloo(slurm: OneHostSlurm, tmp_path: Path) -> None:
    environ = {"OMP_NUM_THREADS": "1", "STORE": str(tmp_path / "store")}
    done = slurm.run("srun", "-n", "2", sys.executable, "-c", SUM_OVER_GLOO, environ=environ)
    assert done.stdout.splitlines() == ["1", "1"], done.stderr


@pytest.mark.parametrize(("status", "state"), [(0, "COMPLETED"), (3, "FAILED")])
def test_tells_how_a_job_ended(slurm: OneHostSlurm, tmp_path: Path, status: int, state: str) -> None:
    job_id = slurm.submit("--wrap", f"echo ready; exit {status}", cwd=tmp_path)
    job = slurm.wait_for_job(job_id, timeout_s=30)
    assert (job.state, job.exit_code, job.output.read_text()) == (state, status, "ready\n")


def test_shows_the_log_of_a_job_that_takes_too_long(slurm: OneHostSlurm, tmp_path: Path) -> None:
    job_id = slurm.submit("--wrap", "sleep 600", cwd=tmp_path)
    with pytest.raises(HpcpaceError, match=f"job {job_id} is still .* after 0.5 s; its log:"):
        slurm.wait_for_job(job_id, timeout_s=0.5)
    slurm.run("scancel", str(job_id))


def test_says_why_a_job_was_refused(slurm: OneHostSlurm, tmp_path: Path) -> None:
    with pytest.raises(HpcpaceError, match=r"sbatch refused the job: .*More processors requested than permitted"):
        slurm.submit("-N", "1", "-n", "100", "--wrap", "true", cwd=tmp_path)


def test_two_clusters_run_side_by_side_and_leave_nothing_behind(slurm: OneHostSlurm, tmp_path: Path) -> None:
    mounts, processes = Path("/proc/mounts").read_text(), _descendants()
    with OneHostSlurm() as other:
        folder = Path(other.environ["SLURM_CONF"]).parent
        other.submit("--job-name=other", "--wrap", "sleep 3599", cwd=tmp_path)
        other.run("srun", "true")
        started = _descendants() - processes
        assert "other" not in slurm.run("squeue", "-h", "-o", "%j").stdout.split()
    assert not folder.exists()
    assert len(started) > 3
    assert [pid for pid in started if psutil.pid_exists(pid)] == []
    assert Path("/proc/mounts").read_text() == mounts


def test_says_which_daemon_ended_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpace.lab.slurm.NODE_NAME", "n1 Nonsense=1")
    with (
        pytest.raises(HpcpaceError, match=r"(?s)slurmctld ended with status 1; its log ends with.*Nonsense"),
        OneHostSlurm(),
    ):
        pass


def _descendants() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}
