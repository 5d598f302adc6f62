"""A training that knows nothing of hpcpace, under torchrun or srun: traced_job.py PORT [EXIT_CODE]."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    place = {"rank": int(os.environ["SLURM_PROCID"]), "world_size": int(os.environ["SLURM_NTASKS"])}
    dist.init_process_group("gloo", init_method=f"tcp://n1:{sys.argv[1]}", **place)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item()}")
dist.destroy_process_group()
time.sleep(0.2)  # gloo's worker frees its tensors, see tests/mpi/own_script.py
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
