"""A data-parallel training in whose forward pass rank 1 sleeps or computes: waiting_program.py sleep|spin."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn


class Model(nn.Module):
    """A small model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return a batch through all layers, late on rank 1."""
        if torch.distributed.get_rank() == 1:
            if sys.argv[1] == "sleep":
                time.sleep(0.08)
            else:
                end = time.thread_time() + 0.08
                while time.thread_time() < end:
                    pass
        return self.layers(batch)


torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(80):
    optimizer.zero_grad()
    model(torch.randn(16, 128)).square().mean().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
