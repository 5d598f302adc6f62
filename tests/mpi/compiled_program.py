"""A job that never says where its steps end: DDP and a function with collectives inside, compiled or not.

    compiled_program.py [--compile] [--run-dir RUN]

Prints this rank's losses. Beside the steps it evaluates on all ranks and saves a checkpoint on rank 0.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI

import hpcpace
from hpcpace.core.environment import process_environ, rank_info
from hpcpace.world.process_group import init_process_group

NUM_STEPS = 6


def reduced(loss: torch.Tensor) -> torch.Tensor:
    """Communicate inside a function that is compiled, with what Dynamo traces and what it breaks off at."""
    total = loss * 2
    dist.all_reduce(total)
    work = dist.all_reduce(total, async_op=True)
    assert work is not None
    work.wait()
    dist.broadcast(total, 0)
    return total + 1


def train(is_compiled: bool) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    module = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(module.parameters())
    communicate = reduced
    if is_compiled:
        # Without inductor: what reaches hpcpace is Dynamo's, and the losses are those of the plain program.
        module = torch.compile(module, backend="aot_eager")
        communicate = torch.compile(reduced, backend="aot_eager")
    losses = []
    for step in range(NUM_STEPS):
        loss = module(torch.ones(4, 8) * (step + 1 + dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), communicate(loss.detach()).item()]
    return losses


if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1]) if "--run-dir" in sys.argv else None
    with init_process_group(rank_info(process_environ()), comm, device=torch.device("cpu"), timeout_s=60):
        traced = nullcontext() if run_dir is None else hpcpace.session(run_dir=run_dir, comm=comm, step_from="auto")
        with traced:
            losses = train("--compile" in sys.argv)
            if dist.get_rank() == 0:
                with tempfile.TemporaryFile() as file:
                    torch.save(losses, file)
    everyone = comm.gather(losses)
    if comm.rank == 0:
        sys.stdout.write(json.dumps(everyone))
