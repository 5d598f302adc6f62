"""Paced jobs for test_pacing.py: what each of them does is its first argument."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

import hpcpace
from hpcpace.core.config import Config
from hpcpace.core.environment import host_identity, process_environ, rank_info
from hpcpace.observe.settings import ClockConfig, TraceConfig
from hpcpace.pace.settings import PaceSettings
from hpcpace.train.data import open_data
from hpcpace.train.loop import TrainJob, train
from hpcpace.train.plan import plan_training
from hpcpace.train.settings import TrainConfig
from hpcpace.world.mpi import locate_ranks, mpi_world
from hpcpace.world.process_group import init_process_group

NUM_STEPS = 90
_QUICK: dict[str, Any] = {"find_steps": 5, "window_steps": 5, "block_steps": 10, "dropped_steps": 2, "aa_pairs": 1}


def _config(policy: str, *, is_traced: bool = True, **settings: Any) -> Config:
    return Config(
        TraceConfig(enabled=is_traced, snapshot=False, counters=False, summary=False),
        ClockConfig(enabled=False),
        PaceSettings(policy=policy, guard_us=0, engage_share=0.0001, **(_QUICK | settings)),
    )


def reference(folder: Path, policy: str, mesh: str) -> None:
    """Train the reference workload and print its losses as hex floats."""
    info = rank_info(process_environ())
    comm = mpi_world(info)
    info, _ = locate_ranks(info, comm, host_identity()) if comm is not None else (info, 0)
    settings = TrainConfig(mesh=mesh, steps=60, warmup_steps=1, seq_len=16, batch_size=8)
    base = _config(policy)
    config = Config(base.of(TraceConfig), base.of(ClockConfig), base.of(PaceSettings), settings)
    plan = plan_training(settings, info.world_size)
    job = TrainJob(plan=plan, config=config, info=info, comm=comm, data=open_data(plan), run_dir=folder, progress="off")
    losses = train(job).losses
    if info.rank == 0:
        print(json.dumps([loss.hex() for loss in losses]))


def torch_steps(folder: Path, policy: str, what: str) -> None:
    """Reduce a tensor each step, with rank 1 late; or kill rank 1 in the middle."""
    comm = MPI.COMM_WORLD
    config = _config("none", trial=what != "untried", is_traced=what != "untraced", gc_steps=5 * (what == "untried"))
    with (
        init_process_group(rank_info(process_environ()), comm, device=torch.device("cpu"), timeout_s=20),
        hpcpace.session(run_dir=folder, comm=comm, config=config, pace=policy) as session,
    ):
        for step in range(NUM_STEPS):
            spin = torch.ones(200, 200)
            for _ in range(20 if comm.rank == 1 else 2):
                spin = spin @ spin / 200
            if what == "killed" and step == NUM_STEPS // 2 and comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(spin)
            session.step(samples=1)


def messages(folder: Path, policy: str, what: str) -> None:
    """Send a tensor back and forth each step, and nothing else."""
    comm = MPI.COMM_WORLD
    with (
        init_process_group(rank_info(process_environ()), comm, device=torch.device("cpu"), timeout_s=20),
        hpcpace.session(run_dir=folder, comm=comm, config=_config("none"), pace=policy) as session,
    ):
        tensor = torch.ones(10)
        for _ in range(NUM_STEPS):
            first, second = (dist.send, dist.recv) if comm.rank == 0 else (dist.recv, dist.send)
            first(tensor, 1 - comm.rank)
            second(tensor, 1 - comm.rank)
            session.step(samples=1)


def mpi_steps(folder: Path, policy: str, what: str) -> None:
    """The same without torch's process group, at a point that the script names."""
    comm = MPI.COMM_WORLD
    values, total = np.ones(1000), np.zeros(1000)
    with hpcpace.session(run_dir=folder, comm=comm, config=_config("none"), pace=policy) as session:
        for _ in range(NUM_STEPS):
            work = np.ones((150, 150))
            for _ in range(20 if comm.rank == 1 else 2):
                work = work @ work / 150
            with session.pacing_point("exchange"):
                comm.Allreduce(values, total)
            session.step(samples=1)


if __name__ == "__main__":
    programs = {"reference": reference, "torch": torch_steps, "messages": messages, "mpi": mpi_steps}
    programs[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
