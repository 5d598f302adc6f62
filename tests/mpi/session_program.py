"""A job with a session, which dies or loses its folder where the test says."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI

import hpcpace
from hpcpace.world.environment import process_environ, rank_info
from hpcpace.world.process_group import init_process_group

NUM_STEPS = 12


def main(run_dir: Path, what: str) -> None:
    comm = MPI.COMM_WORLD
    pids = comm.allgather(os.getpid())
    with (
        init_process_group(rank_info(process_environ()), comm, device=torch.device("cpu"), timeout_s=20),
        hpcpace.session(run_dir=run_dir, comm=comm, samples_unit="images", warmup_steps=2) as session,
    ):
        for step in range(NUM_STEPS):
            with session.phase("data"):
                batch = torch.ones(1000) * step
            if what != "terminate":
                dist.all_reduce(batch)
            if step == NUM_STEPS // 2 and comm.rank == 1:
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "terminate":
                    time.sleep(2)  # until rank 0 waits for this one inside torch
                    os.kill(pids[0], signal.SIGTERM)
                    time.sleep(60)
                if what == "remove folder":
                    shutil.rmtree(run_dir)
            if what == "terminate":
                dist.all_reduce(batch)
            session.step(samples=3 + comm.rank)
    if comm.rank == 0:
        print("recorded", session.run.path if session.run else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
