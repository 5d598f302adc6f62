"""What test_supported_runs.py starts on several ranks: one combination after another trains into a run of its own."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch

from hpcpace.core.config import Config
from hpcpace.core.environment import host_identity, process_environ, rank_info
from hpcpace.observe.settings import ClockConfig
from hpcpace.train.data import open_data
from hpcpace.train.loop import TrainJob, train
from hpcpace.train.plan import plan_training
from hpcpace.train.settings import TrainConfig
from hpcpace.world.mpi import abort_guard, locate_ranks, mpi_world


def main(folder):
    # A C++ compiler would take minutes for all of them; one test beside this program has it.
    torch.compile = partial(torch.compile, backend="eager")
    info = rank_info(process_environ())
    comm = mpi_world(info)
    with abort_guard(comm, info):
        info, _ = locate_ranks(info, comm, host_identity())
        for case in sorted(Path(folder).glob("*.json")):
            config = Config(ClockConfig(enabled=False), TrainConfig(**json.loads(case.read_text())))
            plan = plan_training(config.of(TrainConfig), info.world_size)
            run_dir = case.with_suffix("")
            train(
                TrainJob(
                    plan=plan,
                    config=config,
                    info=info,
                    comm=comm,
                    data=open_data(plan),
                    run_dir=run_dir,
                    progress="off",
                )
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
