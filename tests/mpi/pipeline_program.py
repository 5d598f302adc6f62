"""Jobs with messages of their own: pipelines with random schedules, in 1F1B or interleaved, and a wait that fails.

pipeline SEED: each step has another number of microbatches, of uneven lengths; parameters change without an optimizer,
so that steps are found late, and not at the same place on all ranks.
interleaved SEED: the same with two stages on each rank, the second ones behind the first ones of all ranks.
leaving FILE: rank 0 ends torch's group, and then does what rank 1 waits for before it ends its own.
failing: rank 1 dies while rank 0 waits for it; rank 0 prints the traceback of its wait.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpcpace.world.clock import ClockSync

STEPS = 12
SHAPE = (4, 8)


def note_comparisons() -> list[str]:
    """Return a list that gets the thread of each comparison of the clocks."""
    threads, sync = list[str](), ClockSync.sync

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return sync(*args, **options)

    ClockSync.sync = noted
    return threads


class Stage:
    """A stage with a module without parameters, whose messages nothing of torch's pipelining sends.

    Args:
        turn: how many stages of this rank are before it.
        num_turns: how many stages each rank has.
    """

    def __init__(self, turn: int = 0, num_turns: int = 1) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.number, self.last = turn * num_ranks + rank, num_turns * num_ranks - 1
        self.before, self.behind = (rank - 1) % num_ranks, (rank + 1) % num_ranks
        self.module = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.criterion = nn.MSELoss()
        self.sent: list[Any] = []
        self.under_way: list[tuple[torch.Tensor, torch.Tensor]] = []

    def receive(self, peer: int) -> torch.Tensor:
        tensor = torch.empty(SHAPE)
        dist.recv(tensor, peer)
        return tensor

    def forward(self, length_s: float) -> None:
        x = torch.ones(SHAPE) if self.number == 0 else self.receive(self.before).requires_grad_()
        time.sleep(length_s)
        y = self.module(x)
        if self.number < self.last:
            self.sent.append(dist.isend(y.detach(), self.behind))
        self.under_way.append((x, y))

    def backward(self, length_s: float) -> None:
        x, y = self.under_way.pop(0)
        if self.number == self.last:
            self.criterion(y, torch.zeros(SHAPE)).backward()
        else:
            y.backward(self.receive(self.behind))
        time.sleep(length_s)
        if self.number:
            assert x.grad is not None
            self.sent.append(dist.isend(x.grad, self.before))

    def update(self) -> None:
        while self.sent:
            self.sent.pop().wait()
        with torch.no_grad():
            for parameter in self.module.parameters():
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad
                parameter.grad = None


def pipeline(seed: str) -> None:
    schedule, own = random.Random(seed), random.Random(f"{seed}/{dist.get_rank()}")
    threads, stage = note_comparisons(), Stage()
    for _ in range(STEPS):
        num_microbatches = schedule.randint(1, 6)
        num_ahead = min(stage.last - stage.number, num_microbatches)
        lengths_s = [own.choice([0.0, 0.002, 0.02]) for _ in range(2 * num_microbatches)]
        for _ in range(num_ahead):
            stage.forward(lengths_s.pop())
        for _ in range(num_microbatches - num_ahead):
            stage.forward(lengths_s.pop())
            stage.backward(lengths_s.pop())
        for _ in range(num_ahead):
            stage.backward(lengths_s.pop())
        stage.update()
    time.sleep(0.3)
    sys.stdout.write(f"rank {stage.number} compared in {' '.join(sorted(set(threads)))}\n")
    dist.destroy_process_group()


def interleaved(seed: str) -> None:
    schedule, own = random.Random(seed), random.Random(f"{seed}/{dist.get_rank()}")
    stages = [Stage(turn, 2) for turn in range(2)]
    for _ in range(STEPS):
        num_microbatches = schedule.randint(1, 6)
        for stage in stages:
            for _ in range(num_microbatches):
                stage.forward(own.choice([0.0, 0.002, 0.02]))
        for stage in reversed(stages):
            for _ in range(num_microbatches):
                stage.backward(own.choice([0.0, 0.002, 0.02]))
        for stage in stages:
            stage.update()
    dist.destroy_process_group()


def leaving(file: str) -> None:
    parameter = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([parameter])
    for _ in range(STEPS):
        parameter.sum().backward()
        dist.all_reduce(parameter.grad)
        optimizer.step()
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        Path(file).touch()
        return
    while not Path(file).exists():
        time.sleep(0.01)
    dist.destroy_process_group()


def failing() -> None:
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        time.sleep(0.5)
        os._exit(1)
    try:
        dist.all_reduce(tensor, async_op=True).wait()
    except RuntimeError:
        print(traceback.format_exc())
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](*sys.argv[2:])
