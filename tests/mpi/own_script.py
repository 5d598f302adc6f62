"""A training script that knows nothing of hpcpace, as `hpcpace trace` finds it: DDP under torchrun, or alone."""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
torch.manual_seed(0)
model: torch.nn.Module = torch.nn.Linear(8, 8)
connected = "RANK" in os.environ
if connected:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
sys.stdout.write(f"loss {loss.item()}\n")
if "--fail" in sys.argv:
    raise ValueError("the script's own error")
if connected:
    dist.destroy_process_group()
