"""A data-parallel training in which rank 1 is stopped by a signal for two seconds."""

from __future__ import annotations

import os
import subprocess
import time

import torch
from torch import nn

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(160):
    if step == 80 and torch.distributed.get_rank() == 1:
        own = os.getpid()
        subprocess.Popen(["sh", "-c", f"kill -STOP {own}; sleep 2; kill -CONT {own}"])
    time.sleep(0.03)
    optimizer.zero_grad()
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
