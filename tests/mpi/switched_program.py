"""A job whose detail is switched: by its settings, or by the orders that rank 0 writes; it prints its losses."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

import hpcpace
from hpcpace.core.detail import Detail
from hpcpace.core.environment import process_environ, rank_info
from hpcpace.observe import switching
from hpcpace.world.process_group import init_process_group

NUM_STEPS = 20
MAX_STEPS = 20_000


class Job:
    """Data parallelism with all that a step can do with collectives, one of them in flight when the step ends."""

    def __init__(self) -> None:
        torch.manual_seed(dist.get_rank())
        self._model = DistributedDataParallel(torch.nn.Linear(32, 32), bucket_cap_mb=0.001)
        self._optimizer = torch.optim.SGD(self._model.parameters(), 0.01)
        self._half = dist.new_group([0])
        self._waiting: dist.Work | None = None
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def step(self) -> float:
        """Train one step and return its loss."""
        self._optimizer.zero_grad()
        loss = self._model(torch.rand(4, 32, generator=self._generator)).square().mean()
        loss.backward()
        self._optimizer.step()
        if self._waiting is not None:
            self._waiting.wait()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2), group=self._half)
        self._waiting = dist.all_reduce(torch.ones(8), async_op=True)
        return mean.item()


def by_settings(run_dir: Path, mode: str) -> list[float]:
    """Train with a session whose settings the environment has; `plain`: without one."""
    settings = {"step_from": "auto"} if mode == "found" else {}
    session = nullcontext() if mode == "plain" else hpcpace.session(run_dir=run_dir, comm=MPI.COMM_WORLD, **settings)
    job, losses = Job(), []
    with session as active:
        for _ in range(NUM_STEPS if mode != "found" else 2 * NUM_STEPS):
            losses.append(job.step())
            if mode == "session":
                active.step(samples=4)
    return losses


def by_orders(run_dir: Path) -> list[str]:
    """Write one order after the other, each once all ranks have followed the one before; return the levels seen."""
    switching._LOOK_EVERY_S = 0.02
    orders, seen = ["off", "on collectives", "steps 0:1", "on"], []
    job, comm = Job(), MPI.COMM_WORLD
    with hpcpace.session(run_dir=run_dir, comm=comm) as session:
        assert session._recording is not None
        live = session._recording._switching
        before = None
        for _ in range(MAX_STEPS):
            job.step()
            session.step(samples=4)
            levels = set(comm.allgather(live.live))
            assert len(levels) == 1, levels  # all ranks switch before the same step
            if levels != before:
                before = levels
                seen.append(Detail(live.live).name.lower())
                if not orders:
                    break
                if comm.rank == 0:
                    (run_dir / "switch").write_text(orders.pop(0))
                orders = comm.bcast(orders)
        for _ in range(5):
            job.step()
            session.step(samples=4)
    return seen


def main(run_dir: Path, mode: str) -> None:
    comm = MPI.COMM_WORLD
    with init_process_group(rank_info(process_environ()), comm, device=torch.device("cpu"), timeout_s=20):
        result = by_orders(run_dir) if mode == "orders" else by_settings(run_dir, mode)
    if comm.rank == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
