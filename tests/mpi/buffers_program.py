"""DDP of a model with buffers on two ranks, in a session; rank 1 comes late to each step, and to an operation in it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

import hpcpace
from hpcpace.core.environment import process_environ, rank_info
from hpcpace.world.process_group import init_process_group

NUM_STEPS, LATE_S = 4, 0.2
BUFFERS_BYTES = (8, 32)
"""Of BatchNorm1d(4): the number of batches, then means and variances; DDP sends those of each type together."""

AWAITED_BYTES = 28
"""Of the operation whose future is waited for."""


def main(run_dir: Path) -> None:
    comm = MPI.COMM_WORLD
    with init_process_group(rank_info(process_environ()), comm, device=torch.device("cpu"), timeout_s=20):
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
        with hpcpace.session(run_dir=run_dir, comm=comm) as session:
            for _ in range(NUM_STEPS):
                time.sleep(LATE_S * comm.rank)
                model(torch.ones(2, 4)).sum().backward()
                time.sleep(LATE_S * comm.rank)
                torch.distributed.all_reduce(torch.ones(AWAITED_BYTES // 4), async_op=True).get_future().wait()
                session.step()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
