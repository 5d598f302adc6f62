"""DTensor: one model over all ranks; the process group is never made by name."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from experiments.attach.programs.parts import BATCH, Model, batches, loss_of
from experiments.attach.witness import Witness


def main() -> None:
    witness = Witness()
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    model = Model()
    plan = {f"net.layers.{i}": ColwiseParallel(output_layouts=Replicate()) for i in range(8)}
    model = parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for x, y in batches(0, 1):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        witness.step(loss, BATCH)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
