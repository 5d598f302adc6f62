"""Calls of torch.distributed of every kind on two ranks, in a session; test_layers.py knows the rows they leave."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

import hpcpace
from hpcpace.core.environment import process_environ, rank_info
from hpcpace.world.process_group import init_process_group


def collectives(group: dist.ProcessGroup) -> None:
    """Thirteen operations of the world and its copy, one of which nobody waits for."""
    value, both = torch.ones(4), [torch.zeros(4), torch.zeros(4)]
    dist.all_reduce(value)
    dist.all_reduce(value, group=group, async_op=True).wait()
    dist.broadcast(value, 1)
    dist.all_gather(both, value)
    dist.reduce(value, 1)
    dist.gather(value, both if dist.get_rank() == 0 else None, 0)
    dist.scatter(value, both if dist.get_rank() == 1 else None, 1)
    dist.barrier()
    functional.wait_tensor(functional.all_reduce(value, "sum", dist.group.WORLD))
    for part in functional.reduce_scatter_tensor_coalesced([value, value], "sum", [0, 0], dist.group.WORLD):
        functional.wait_tensor(part)
    dist.all_reduce(torch.ones(2), async_op=True)
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2)]
    for work in reversed(works):
        work.wait()


def messages() -> None:
    """Rank 0 sends, rank 1 receives: blocking, from anybody, and in a batch of both directions."""
    rank, value = dist.get_rank(), torch.ones(8)
    if rank == 0:
        dist.send(value, 1)
        dist.send(value, 1)
        dist.isend(value, 1)
    else:
        dist.recv(value, 0)
        dist.recv(value)
        dist.irecv(value, 0).wait()
    operations = [dist.P2POp(dist.isend, value, 1 - rank), dist.P2POp(dist.irecv, torch.zeros(8), 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def main(run_dir: Path) -> None:
    comm = MPI.COMM_WORLD
    with init_process_group(rank_info(process_environ()), comm, device=torch.device("cpu"), timeout_s=20):
        group = dist.new_group()
        model = DistributedDataParallel(torch.nn.Linear(4, 4, bias=False))
        with hpcpace.session(run_dir=run_dir, comm=comm) as session:
            collectives(group)
            session.step()
            messages()
            session.step()
            model(torch.ones(2, 4)).sum().backward()
            session.step()
            # A call that torch refuses must fail as ever; its row says that it failed.
            try:
                dist.all_gather_into_tensor(torch.zeros(3), torch.ones(4))
            except (RuntimeError, ValueError) as error:
                print(type(error).__name__)
            session.step()
        gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
