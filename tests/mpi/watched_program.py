"""A training of which one rank goes wrong in a step: it sleeps in its own work, in its data, skips a barrier, or stops.

    watched_program.py FAULT [NUM_STEPS]

It prints its losses at the end, if it comes there. `hpcpace trace` runs it, and finds the steps. Under mpiexec, ranks
meet in the file HANG_PROGRAM_MEETING.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

VICTIM, FAULTY_STEP = 1, 8
FOREVER_S = 1000
# gloo's threads record that an operation is complete after the main thread has gone on. A signal that stops all of them
# earlier leaves an operation open that the rank has finished.
SETTLE_S = 0.5


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, fault: str) -> None:
        self._fault = fault

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._fault == "data" and index == FAULTY_STEP and dist.get_rank() == VICTIM:
            load_for_ever()
        return torch.full((4,), float(index))


def load_for_ever() -> None:
    time.sleep(FOREVER_S)


def compute_for_ever() -> None:
    time.sleep(FOREVER_S)


def spin_with_the_gil() -> None:
    sum(range(10**11))


def go_wrong(fault: str) -> None:
    if fault in ("stop", "pause"):
        time.sleep(SETTLE_S)
    if fault == "compute":
        compute_for_ever()
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "pause":
        waker = f"import os, signal, time; time.sleep(8); os.kill({os.getpid()}, signal.SIGCONT)"
        subprocess.Popen([sys.executable, "-S", "-c", waker])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "gil":
        spin_with_the_gil()
    elif fault == "slow":
        time.sleep(8)


def join(fault: str) -> None:
    environ = os.environ
    if "RANK" not in environ:
        environ |= {"RANK": environ["PMI_RANK"], "WORLD_SIZE": environ["PMI_SIZE"], "LOCAL_RANK": environ["PMI_RANK"]}
    if fault == "late" and int(environ["RANK"]) == VICTIM:
        time.sleep(8)
    meeting = environ.get("HANG_PROGRAM_MEETING")
    where = {} if meeting is None else {"init_method": f"file://{meeting}"}
    dist.init_process_group("gloo", rank=int(environ["RANK"]), world_size=int(environ["WORLD_SIZE"]), **where)


def main(fault: str, num_steps: int) -> None:
    torch.manual_seed(0)
    join(fault)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    losses = []
    num_workers = 0 if fault == "data" else 1  # forked beside the threads of the session
    batches = iter(DataLoader(Numbers(fault), batch_size=1, num_workers=num_workers))
    for step in range(num_steps):
        batch = next(batches)
        if step == FAULTY_STEP and dist.get_rank() == VICTIM:
            go_wrong(fault)
        if step == FAULTY_STEP and not (fault == "barrier" and dist.get_rank() == VICTIM):
            dist.barrier()
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        time.sleep(0.01)
    if dist.get_rank() == 0:
        print("losses", *losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
