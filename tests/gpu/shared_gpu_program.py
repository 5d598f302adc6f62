"""Trains on one GPU that all ranks share, over gloo; rank 1 has further kernels in its forward pass. Arguments: run."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import hpcpace

WIDTH, NUM_STEPS, SLOW_RANK, NUM_EXTRA = 2048, 60, 1, 30


class Slowed(nn.Module):
    """A model whose forward pass has as many further matrix products as it is told."""

    def __init__(self, num_extra: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
        self.num_extra = num_extra

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(self.num_extra):
                batch @ batch.T
        return self.layers(batch)


def main() -> None:
    dist.init_process_group("gloo")
    torch.cuda.set_device(0)
    model = Slowed(NUM_EXTRA if dist.get_rank() == SLOW_RANK else 0).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(2048, WIDTH, device="cuda")
    with hpcpace.session(run_dir=sys.argv[1]) as session:
        for _ in range(NUM_STEPS):
            model(batch).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            session.step(samples=2048)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
