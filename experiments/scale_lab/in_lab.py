"""The set-ups in a lab of 32 hosts on leaf switches of their own: one job a size, which does all that are left.

Computation is a sleep: it takes time and no cores, of which a lab has fewer than ranks. Communication is real. Each
rank is `python -m experiments.scale_lab.in_lab FOLDER SETUP...`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.jobs import MISREAD_START
from experiments.labs import JobQueue
from experiments.pages import ROOT
from experiments.scale_lab.judge import HELD_OUT, SETUPS, SIZES, UPLINK_MBIT, Setup
from hpcpace.core.environment import process_environ, rank_info
from hpcpace.core.errors import HpcpaceError
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig
from hpcpace.world.process_group import init_process_group

if TYPE_CHECKING:
    from mpi4py import MPI

_NUM_HOSTS = max(HELD_OUT)
_MAX_STARTS, _MIN_S = 3, 30.0
_NUM_WARMUP, _BATCH, _FOUR_BYTES = 5, 64, 4


def run_open(folder: Path, setups: Sequence[Setup], *, timeout_s: float) -> None:
    """Do the runs that are not there yet, the smallest sizes first, until the time is over.

    Args:
        folder: of the runs; all hosts see it, so it is not below /tmp.
        setups: which ones.
        timeout_s: for all of them.
    """
    deadline_s = time.monotonic() + timeout_s
    left = [size for size in (*SIZES, *HELD_OUT) if open_names(folder, setups, size)]
    if not left or timeout_s < _MIN_S:
        return
    size = {"hosts": _NUM_HOSTS, "leaves": _NUM_HOSTS, "cpus_per_host": 1, "tmp_size": "8MiB"}
    config = LabConfig(name="scale", link="1gbit", uplink=f"{UPLINK_MBIT}mbit", **size)
    with Lab.up(config) as lab:
        queue = JobQueue(lab)
        for size in left:
            for _ in range(_MAX_STARTS):
                names, room_s = open_names(folder, setups, size), deadline_s - time.monotonic()
                if not names or room_s < _MIN_S:
                    break
                _run(queue, folder, names, size, room_s)
                _remove_unfinished(folder, names, size)
                print(f"  {size} hosts, left: {open_names(folder, setups, size)}", flush=True)


def open_names(folder: Path, setups: Sequence[Setup], size: int) -> list[str]:
    """Return the names of the set-ups that have no whole run of a size."""
    return [setup.name for setup in setups if not (folder / f"{setup.name}-{size}").exists()]


def _run(queue: JobQueue, folder: Path, names: Sequence[str], size: int, timeout_s: float) -> None:
    program = f"{sys.executable} -m experiments.scale_lab.in_lab {folder} {' '.join(names)}"
    environ = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HPCPACE_AUDIT": "off",
        "HPCPACE_WORLD_START_TIMEOUT_S": "120",
        "HPCPACE_CLOCK_INTERVAL_S": "5",
    }
    begin_s = time.monotonic()
    job_id = queue.submit(
        *(f"-N{size}", "--ntasks-per-node=1", "--no-requeue", "--output=%j.out"),
        f"--wrap=srun --mpi=pmi2 {program}",
        cwd=folder,
        environ=environ,
    )
    log = folder / f"{job_id}.out"
    while not queue.job(job_id).finished:
        said = log.read_text(errors="replace") if log.exists() else ""
        if MISREAD_START in said or time.monotonic() - begin_s > timeout_s:
            queue.run("scancel", str(job_id))
            break
        time.sleep(0.5)
    try:
        queue.wait(job_id, timeout_s=30)
    except HpcpaceError as error:
        print(f"  {error}", flush=True)


def _remove_unfinished(folder: Path, names: Sequence[str], size: int) -> None:
    """Put runs that a job left unfinished aside, so that the next one does them again."""
    for name in names:
        run = folder / f"{name}-{size}"
        if run.exists() and list(run.glob("attempt-0/trace/*.journal")):
            run.rename(folder / f"unfinished-{name}-{size}-{time.time_ns()}")


def main(folder: Path, names: list[str]) -> None:
    import torch
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    with init_process_group(rank_info(process_environ()), comm, device=torch.device("cpu"), timeout_s=120):
        for setup in [setup for setup in SETUPS if setup.name in names]:
            run_dir = folder / f"{setup.name}-{comm.size}"
            if not comm.bcast(run_dir.exists()):
                _train(setup, run_dir, comm)
                if comm.rank == 0:
                    print(f"{setup.name} on {comm.size}", flush=True)


def _train(setup: Setup, run_dir: Path, comm: MPI.Comm) -> None:
    import torch
    import torch.distributed as dist

    import hpcpace

    generator = np.random.default_rng([comm.rank, comm.size])
    work_s = setup.host_ms(comm.size) / 1e3
    if comm.size > 1 and comm.rank == comm.size - 1:
        work_s += setup.slow_ms / 1e3
    events = setup.event_ms / 1e3 * (generator.random(_NUM_WARMUP + setup.num_steps) < setup.event_share)
    gradients = torch.ones(setup.message_bytes // _FOUR_BYTES)
    samples = _BATCH if not setup.is_strong else _BATCH // comm.size
    with hpcpace.session(
        run_dir=run_dir, comm=comm, samples_unit="tokens", warmup_steps=_NUM_WARMUP, mesh={"dp": comm.size}
    ) as session:
        for event_s in events.tolist():
            with session.phase("forward"):
                time.sleep(work_s + event_s)
            with session.phase("backward"):
                if setup.message_bytes:
                    dist.all_reduce(gradients)
                    gradients.mul_(1 / comm.size)
                else:
                    dist.barrier()
            session.step(samples=samples)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
