"""What test_losses.py starts on several ranks: it trains on one mesh after another and prints the losses."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hpcpace.core.config import Config
from hpcpace.core.environment import host_identity, process_environ, rank_info
from hpcpace.observe.settings import ClockConfig, TraceConfig
from hpcpace.train.data import TextData, TokenText, open_data, open_text
from hpcpace.train.data_parallel import build_optimizer
from hpcpace.train.loop import TrainJob, train
from hpcpace.train.parallel import build_replica
from hpcpace.train.plan import plan_training
from hpcpace.train.settings import TrainConfig
from hpcpace.world.mpi import abort_guard, locate_ranks, mpi_world
from hpcpace.world.process_group import init_process_group


def losses(info, comm, folder, mesh, is_text_shared=True, **settings):
    # Two ranks a host, as far as the ranks know.
    info = replace(info, host=f"n{info.rank // 2}") if settings.get("hierarchical") else info
    config = Config(
        TraceConfig(enabled=False),
        ClockConfig(enabled=False),
        TrainConfig(**{"mesh": mesh, "steps": 20, "warmup_steps": 0, "log_every": 7, **settings}),
    )
    plan = plan_training(config.of(TrainConfig), info.world_size)
    data = open_data(plan)
    if not is_text_shared:
        own = TokenText(source="own", tokens=open_text(None, plan.seq_len).tokens[info.rank :])
        data = TextData(training=own, held_out=None, seq_len=plan.seq_len)
    job = TrainJob(plan=plan, config=config, info=info, comm=comm, data=data, run_dir=Path(folder), progress="off")
    return train(job).losses


def losses_of_case(info, comm, folder, case, dtype):
    """Train a case like `dp=2 zero=1`: a mesh, then further settings."""
    mesh, *options = case.split()
    settings = dict(option.split("=") for option in options)
    numbers = {name: json.loads(value) for name, value in settings.items() if value[0].isdigit()}
    return losses(info, comm, folder, mesh, dtype=dtype, **{**settings, **numbers})


def tied_weights(info, comm):
    """Return the tied weight of first and last stage, and what it was at first, after three steps on two stages."""
    plan = plan_training(TrainConfig(mesh="pp=2"), 2)
    with init_process_group(info, comm, device=torch.device("cpu"), timeout_s=60):
        replica = build_replica(plan, rank=info.rank, device=torch.device("cpu"))
        (stage,) = replica.stages
        part = stage.embedding.wte if info.rank == 0 else stage.head.vocabulary
        first, text = part.weight.detach().clone(), open_text(None, plan.seq_len)
        optimizer = build_optimizer(replica.parameters(), learning_rate=1e-3)
        for step in range(3):
            tokens = torch.from_numpy(text.batch(step, seed=0, batch_size=8, seq_len=plan.seq_len, rows=slice(None)))
            replica.forward_backward(tokens[:, :-1], tokens[:, 1:])
            replica.sync_tied_gradients()
            optimizer.step()
            optimizer.zero_grad()
        seen = [None, None]
        dist.all_gather_object(seen, (first, part.weight.detach()))
    return seen


def main(case, *arguments):
    info = rank_info(process_environ())
    comm = mpi_world(info)
    with abort_guard(comm, info):
        info, _ = locate_ranks(info, comm, host_identity())
        if case == "tied":
            (first, last), (other_first, other_last) = tied_weights(info, comm)
            result = {
                "same_at_first": torch.equal(first, other_first),
                "same_at_last": torch.equal(last, other_last),
                "moved": float((last - first).abs().max()),
            }
        elif case == "own_text":
            result = losses(info, comm, arguments[0], "", is_text_shared=False)
        else:
            folder, dtype, *cases = arguments
            result = {case: losses_of_case(info, comm, folder, case, dtype) for case in cases}
        if info.rank == 0:
            print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
