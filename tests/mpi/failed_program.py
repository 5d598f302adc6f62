"""Operations that fail on rank 0 in every way, because rank 1 does not come: failed_program.py RUN_DIR."""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from mpi4py import MPI

import hpcpace
from hpcpace.core.environment import process_environ, rank_info
from hpcpace.world.process_group import init_process_group

SHORT = timedelta(seconds=1)


def main(run_dir: str) -> None:
    comm = MPI.COMM_WORLD
    with init_process_group(rank_info(process_environ()), comm, device=torch.device("cpu"), timeout_s=60):
        groups = [dist.new_group(timeout=SHORT) for _ in range(5)]
        store = dist.distributed_c10d._get_default_store()
        with hpcpace.session(run_dir=run_dir, comm=comm) as session:
            if comm.rank == 0:
                fail(groups)
                store.set("failed", "yes")
            else:
                store.wait(["failed"])
            # A call that is refused has not taken a number: both ranks count this one alike.
            dist.all_reduce(torch.ones(4))
            session.step()


def fail(groups: list[dist.ProcessGroup]) -> None:
    """Let an operation fail in each group, and one in the world."""
    tensor = torch.ones(4)
    with suppress(RuntimeError):
        dist.all_reduce(tensor, group=groups[0])
    with suppress(RuntimeError):
        dist.all_reduce(tensor, group=groups[1], async_op=True).wait()
    work = dist.all_reduce(tensor, group=groups[2], async_op=True)
    with suppress(RuntimeError):
        work.get_future().wait()
    with suppress(RuntimeError):
        functional.wait_tensor(functional.all_reduce(tensor, "sum", groups[3]))
    with suppress(RuntimeError):
        dist.recv(tensor, 1, group=groups[4])
    with suppress(RuntimeError, ValueError):  # refused by the call: the output is too small
        dist.all_gather_into_tensor(tensor, tensor)


if __name__ == "__main__":
    main(sys.argv[1])
