"""torch.distributed.pipelining: a stage per rank, four microbatches."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from experiments.attach.programs.parts import BATCH, Layers, Model, batches, loss_of
from experiments.attach.witness import Witness


def main() -> None:
    witness = Witness()
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = Model(Layers(depth=4))
    stage = PipelineStage(model, rank, num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches(0, 1):
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == num_ranks - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        witness.step(torch.stack(losses) if losses else next(model.parameters()), BATCH)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
