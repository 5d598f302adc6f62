"""A training script, DDP under torchrun or alone: for `hpcpace trace`, or by `--session` with a session of its own."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import hpcpace

warnings.simplefilter("ignore")
torch.manual_seed(0)
model: torch.nn.Module = torch.nn.Linear(8, 8)
connected = "RANK" in os.environ
session = None
if connected:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
if "--session" in sys.argv:
    session = hpcpace.session(run_dir=Path(sys.argv[-1])).__enter__()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if session is not None:
        session.step(samples=4)
sys.stdout.write(f"loss {loss.item()}\n")
if "--fail" in sys.argv:
    raise ValueError("the script's own error")
if connected:
    dist.destroy_process_group()
# gloo's worker releases Python objects of the last all-reduce after it has ended; where Python ends first,
# torch aborts the process (2.13: pytorch/pytorch#179291). Sleeping gives the worker the interpreter's lock.
time.sleep(0.2)
if session is not None:
    session.__exit__(None, None, None)  # after the group is gone, as careless scripts do
