"""One job of some ranks that does a series of set-ups after each other, each as a run: program.py FOLDER SETUP...

Computation is a sleep: it takes time and no cores, of which a lab has fewer than ranks. Communication is real.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

import hpcpace
from experiments.scale_lab.judge import SETUPS, Setup
from hpcpace.core.environment import process_environ, rank_info
from hpcpace.world.process_group import init_process_group

NUM_WARMUP = 5
BATCH = 64
FOUR_BYTES = 4


def main(folder: Path, names: list[str]) -> None:
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
    generator = np.random.default_rng([comm.rank, comm.size])
    work_s = setup.host_ms(comm.size) / 1e3
    if comm.size > 1 and comm.rank == comm.size - 1:
        work_s += setup.slow_ms / 1e3
    events = setup.event_ms / 1e3 * (generator.random(NUM_WARMUP + setup.num_steps) < setup.event_share)
    gradients = torch.ones(setup.message_bytes // FOUR_BYTES)
    samples = BATCH if not setup.is_strong else BATCH // comm.size
    with hpcpace.session(
        run_dir=run_dir, comm=comm, samples_unit="tokens", warmup_steps=NUM_WARMUP, mesh={"dp": comm.size}
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
