"""Ray Train's TorchTrainer, whose workers train with DistributedDataParallel in actors of a local cluster."""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig, get_context, report
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from experiments.attach.programs.parts import BATCH, Model, batches, loss_of
from experiments.attach.witness import Witness


def train(_: dict[str, Any]) -> None:
    """Train in one worker."""
    context = get_context()
    rank, num_ranks = context.get_world_rank(), context.get_world_size()
    witness = Witness(rank)
    torch.manual_seed(0)
    model = prepare_model(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, target in batches(rank, num_ranks):
        loss = loss_of(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        witness.step(loss, BATCH)
    report({"loss": loss.item()})


def main() -> None:
    num_ranks = int(os.environ["ATTACH_RANKS"])
    ray.init(num_cpus=num_ranks, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=num_ranks, use_gpu=False),
        run_config=RunConfig(storage_path=os.path.join(os.environ["ATTACH_FOLDER"], "output")),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
