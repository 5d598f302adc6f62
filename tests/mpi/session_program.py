"""A job with a session, which dies or loses its folder where the test says."""

from __future__ import annotations

import contextlib
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
from hpcpace.core.environment import process_environ, rank_info
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


def leave_without_the_last(run_dir: Path, how: str) -> None:
    """Let the last rank swallow an error, with which it falls out of the session and never meets the others there."""
    comm = MPI.COMM_WORLD
    with (
        init_process_group(rank_info(process_environ()), comm, device=torch.device("cpu"), timeout_s=60),
        contextlib.suppress(KeyError),
        hpcpace.session(run_dir=run_dir, comm=comm if how == "mpi" else None) as session,
    ):
        session.step()
        if comm.rank == comm.size - 1:
            raise KeyError("swallowed")
    print("went on", flush=True)


def wait_for_sigterm(run_dir: Path, what: str) -> None:
    """Get SIGTERM on rank 0 within the flush interval of the last step, inside a collective."""
    comm = MPI.COMM_WORLD
    pids = comm.allgather(os.getpid())
    if what == "own handler":
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
    with (
        init_process_group(rank_info(process_environ()), comm, device=torch.device("cpu"), timeout_s=60),
        hpcpace.session(run_dir=run_dir, comm=comm) as session,
    ):
        for _ in range(NUM_STEPS):
            session.step()
        comm.Barrier()
        if comm.rank == 1:
            os.kill(pids[0], signal.SIGTERM)
            time.sleep(60)
        while what == "own handler":
            time.sleep(0.01)
        dist.barrier()


if __name__ == "__main__":
    programs = {"leave": leave_without_the_last, "sigterm": wait_for_sigterm}
    programs.get(sys.argv[3] if len(sys.argv) > 3 else "", main)(Path(sys.argv[1]), sys.argv[2])
