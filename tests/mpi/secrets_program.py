"""A training whose threads, steps and errors have secrets in their names and messages, given by variables."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

FAULTY_STEP = 12

warnings.simplefilter("ignore")
token, password = os.environ["SHAPED"], os.environ["UPLOAD_PASSWORD"]
threading.Thread(target=time.sleep, args=(60,), name=f"upload {token} as {password}", daemon=True).start()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    if step == FAULTY_STEP:
        time.sleep(float(sys.argv[2]))  # longer than a step may last: the watchdog writes a notice
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    dist.all_reduce(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)


def make_error() -> BaseException:
    """Return an error whose message has secrets, of a class that has one in its name."""
    return type(f"Refused_{token}", (ValueError,), {})(f"the password is {password}, the token is {token}")


Path("metrics.txt").write_text("".join(path.read_text() for path in Path().glob("*.prom")))
raise make_error()
