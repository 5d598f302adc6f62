"""What test_resume.py and test_workloads.py start on several ranks; rank 0 prints a JSON object."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from hpcpace.core.config import Config
from hpcpace.core.environment import host_identity, process_environ, rank_info
from hpcpace.observe.settings import ClockConfig, TraceConfig
from hpcpace.train.data import open_data
from hpcpace.train.loop import TrainJob, train
from hpcpace.train.plan import plan_training
from hpcpace.train.settings import TrainConfig
from hpcpace.world.mpi import abort_guard, locate_ranks, mpi_world


class Signalled:
    """Data that send this process a signal with the batch of a step."""

    def __init__(self, data, step):
        self._data, self._step = data, step

    def __getattr__(self, name):
        return getattr(self._data, name)

    def batch(self, step, **options):
        if step == self._step:
            os.kill(os.getpid(), signal.SIGUSR1)
        return self._data.batch(step, **options)


def run(info, comm, folder, *, signal_at=None, **settings):
    config = Config(
        TraceConfig(enabled=False),
        ClockConfig(enabled=False),
        TrainConfig(**{"warmup_steps": 0, "log_every": 3, **settings}),
    )
    plan = plan_training(config.of(TrainConfig), info.world_size)
    data = open_data(plan)
    if signal_at is not None:
        data = Signalled(data, signal_at)
    return train(
        TrainJob(plan=plan, config=config, info=info, comm=comm, data=data, run_dir=Path(folder), progress="off")
    )


def resumed(info, comm, folder, cases):
    """Train without a stop, and with one that throws two steps away."""
    found = {}
    for name, settings in cases.items():
        whole = run(info, comm, f"{folder}/{name}-whole", steps=9, eval_every=3, **settings)
        run(info, comm, f"{folder}/{name}", steps=6, eval_every=3, checkpoint_every=4, **settings)
        again = run(info, comm, f"{folder}/{name}", steps=9, eval_every=3, checkpoint_every=4, **settings)
        found[name] = {
            "first_step": again.first_step,
            "whole": [whole.losses, whole.evaluations],
            "resumed": [again.losses, again.evaluations],
        }
    return found


def stopped(info, comm, folder):
    """Let the last rank alone get a signal; return what each rank came to, and how it went on."""
    settings = {"seq_len": 16, "steps": 100_000}
    is_last = info.rank == info.world_size - 1
    result = run(info, comm, folder, signal_at=2 if is_last else None, **settings)
    num_steps = [None] * info.world_size
    if comm is not None:
        num_steps = comm.allgather(len(result.losses))
    again = run(info, comm, folder, **{**settings, "steps": len(result.losses) + 1})
    return {"num_steps": num_steps, "first_step": again.first_step, "stopped_by": [result.stopped_by, again.stopped_by]}


def killed(info, comm, folder):
    """End rank 0 without warning in the middle of its second checkpoint."""
    write, num_calls = HuggingFaceStorageWriter.write_data, 0

    def write_data(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        future = write(*args, **kwargs)
        if num_calls == 2 and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return future

    HuggingFaceStorageWriter.write_data = write_data
    run(info, comm, folder, steps=9, checkpoint_every=3)


def evaluations(info, comm, folder, cases):
    return {name: run(info, comm, f"{folder}/{name}", **settings).evaluations for name, settings in cases.items()}


def losses(info, comm, folder, cases):
    results = {name: run(info, comm, f"{folder}/{name}", **settings) for name, settings in cases.items()}
    return {name: [result.losses, result.evaluations] for name, result in results.items()}


def main(case, folder, cases="{}"):
    info = rank_info(process_environ())
    comm = mpi_world(info)
    with abort_guard(comm, info):
        info, _ = locate_ranks(info, comm, host_identity())
        arguments = [json.loads(cases)] if cases != "{}" else []
        result = {
            "resumed": resumed,
            "stopped": stopped,
            "killed": killed,
            "evaluations": evaluations,
            "losses": losses,
        }[case](info, comm, folder, *arguments)
        if info.rank == 0:
            print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
