"""Slurm in the lab: it runs MPI and torch jobs over all hosts, and tells how they ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from experiments.labs import JobQueue
from hpcpace.core.errors import HpcpaceError

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


@pytest.mark.parametrize(
    ("mpi", "environ"), [("pmi2", {}), ("pmix", {"MPI4PY_MPIABI": "openmpi"})], ids=["MPICH", "Open MPI"]
)
def test_mpi_ranks_of_all_hosts_form_one_world(queue: JobQueue, mpi: str, environ: dict[str, str]) -> None:
    command = ("srun", f"--mpi={mpi}", "-N4", "--ntasks-per-node=2", sys.executable, "-c", SUM_OVER_MPI)
    # mpi4py by itself: pmi2 may misread its start, as docs/slurm.md tells.
    for _ in range(2):
        done = queue.run("timeout", "--signal=KILL", "25", *command, environ=environ)
        if done.returncode != 137:
            break
        queue.cancel_all()
    assert done.stdout.splitlines() == ["8 28"] * 8, done.stderr


# A heap of dense data with holes in it: without a heap of its own MPI does not start in it, whatever the seed.
START_IN_A_FULL_HEAP = """
import os, random

random.seed(1)
data = [bytes([random.randrange(1, 256)]) * random.randrange(600, 3000) for _ in range(20000)]
data = [each for each in data if random.random() < 0.7]

from hpcpace.core.environment import rank_info
from hpcpace.world.mpi import mpi_world

comm = mpi_world(rank_info(os.environ), timeout_s=20)
print(comm.Get_size(), comm.allreduce(comm.Get_rank()))
"""


def test_mpi_starts_whatever_lies_in_memory(queue: JobQueue) -> None:
    done = queue.run("srun", "-N4", "--ntasks-per-node=2", sys.executable, "-c", START_IN_A_FULL_HEAP)
    assert done.stdout.splitlines() == ["8 28"] * 8, done.stderr


def test_without_pmi_each_task_is_a_world_of_its_own(queue: JobQueue) -> None:
    done = queue.run("srun", "--mpi=none", "-n", "2", sys.executable, "-c", SUM_OVER_MPI)
    assert done.stdout.splitlines() == ["1 0"] * 2, done.stderr


def test_torch_reduces_over_gloo(queue: JobQueue, tmp_path: Path) -> None:
    environ = {"OMP_NUM_THREADS": "1", "STORE": str(tmp_path / "store")}
    done = queue.run("srun", "-n", "2", sys.executable, "-c", SUM_OVER_GLOO, environ=environ)
    assert done.stdout.splitlines() == ["1", "1"], done.stderr


@pytest.mark.parametrize(("status", "state"), [(0, "COMPLETED"), (3, "FAILED")])
def test_tells_how_a_job_ended(queue: JobQueue, tmp_path: Path, status: int, state: str) -> None:
    job_id = queue.submit("--wrap", f"echo ready; exit {status}", cwd=tmp_path)
    job = queue.wait(job_id, timeout_s=30)
    assert (job.state, job.exit_code, job.output.read_text()) == (state, status, "ready\n")


def test_shows_the_log_of_a_job_that_takes_too_long(queue: JobQueue, tmp_path: Path) -> None:
    job_id = queue.submit("--wrap", "sleep 600", cwd=tmp_path)
    with pytest.raises(HpcpaceError, match=f"job {job_id} is still .* after 0.5 s; its log:"):
        queue.wait(job_id, timeout_s=0.5)
    queue.run("scancel", str(job_id))


def test_says_why_a_job_was_refused(queue: JobQueue, tmp_path: Path) -> None:
    with pytest.raises(HpcpaceError, match=r"sbatch refused the job: .*More processors requested than permitted"):
        queue.submit("-N", "1", "-n", "100", "--wrap", "true", cwd=tmp_path)
