"""A data-parallel training in whose forward pass rank 1 is late: waiting_program.py sleep|lock|read|spin."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import nn

LATE_S = 0.08


def sleep() -> None:
    """Sleep."""
    time.sleep(LATE_S)


def lock() -> None:
    """Wait for a lock that another thread holds."""
    held = threading.Lock()
    held.acquire()
    threading.Timer(LATE_S, held.release).start()
    with held:
        pass


def read() -> None:
    """Read a file whose bytes come late."""
    source, sink = os.pipe()
    threading.Timer(LATE_S, os.write, (sink, b"late")).start()
    os.read(source, 4)
    os.close(source)
    os.close(sink)


def spin() -> None:
    """Compute."""
    end = time.thread_time() + LATE_S
    while time.thread_time() < end:
        pass


WAYS: dict[str, Callable[[], None]] = {way.__name__: way for way in (sleep, lock, read, spin)}
be_late = WAYS[sys.argv[1]]


class Model(nn.Module):
    """A small model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return a batch through all layers, late on rank 1."""
        if torch.distributed.get_rank() == 1:
            be_late()
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
