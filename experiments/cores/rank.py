"""A data-parallel training whose last rank waits, or computes more, in its forward pass: rank.py CASE FOLDER STEPS.

All ranks need the same processor time in forward, counted as such, so that it is the same on a busy machine.
"""

from __future__ import annotations

import atexit
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

WORK_S, FAULT_S = 0.008, 0.025
_FILE_BYTES, _READ_BYTES = 1 << 28, 1 << 25


def compute(processor_s: float) -> None:
    """Use processor time."""
    end_s = time.thread_time() + processor_s
    while time.thread_time() < end_s:
        pass


def wait_for_lock(lock: threading.Lock, wanted: threading.Event) -> None:
    """Wait for a lock that another thread has."""
    wanted.set()
    while not lock.locked():
        time.sleep(0.0001)
    with lock:
        pass


def hold_lock(lock: threading.Lock, wanted: threading.Event) -> None:
    """Hold a lock for a time whenever somebody wants it."""
    while True:
        wanted.wait()
        with lock:
            wanted.clear()
            time.sleep(FAULT_S)


def read_file(path: Path) -> Callable[[], None]:
    """Return what reads a part of a large file from the disk."""
    with path.open("wb") as file:
        for _ in range(_FILE_BYTES >> 20):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    room, place = mmap.mmap(-1, _READ_BYTES), [0]

    def read() -> None:
        os.preadv(descriptor, [room], place[0])
        place[0] = (place[0] + _READ_BYTES) % _FILE_BYTES

    return read


def fault_of(case: str, folder: Path) -> Callable[[], None]:
    """Return what the last rank does beyond the others."""
    if case == "compute":
        return lambda: compute(FAULT_S)
    if case == "sleep":
        return lambda: time.sleep(FAULT_S)
    if case == "file":
        return read_file(folder / "large")
    if case == "nice":
        # In one session with the rank: nice values mean nothing between sessions (sched(7), autogroup).
        for _ in range(os.cpu_count() or 1):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            atexit.register(busy.kill)
        os.nice(19)
    if case == "lock":
        lock, wanted = threading.Lock(), threading.Event()
        threading.Thread(target=hold_lock, args=(lock, wanted), daemon=True).start()
        return lambda: wait_for_lock(lock, wanted)
    return lambda: None


class Model(nn.Module):
    """A small model with a fault."""

    def __init__(self, fault: Callable[[], None], has_threads: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
        self.matrix = torch.ones(384, 384)
        self.fault, self.has_threads = fault, has_threads

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return a batch through all layers."""
        if self.has_threads:
            for _ in range(6):
                torch.mm(self.matrix, self.matrix)
        else:
            compute(WORK_S)
        self.fault()
        return self.layers(batch)


def main() -> None:
    case, folder, num_steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.distributed.init_process_group("gloo")
    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    fault = fault_of(case, folder) if is_last else lambda: None
    torch.distributed.barrier()
    model = nn.parallel.DistributedDataParallel(Model(fault, case == "mask"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(16, 128)).square().mean().backward()
        optimizer.step()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
