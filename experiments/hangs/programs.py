"""Small training programs for several ranks, each with places at which a fault can strike; gloo, without a model.

What hangs are made of is real: process groups, their operations, blocked threads, signals. Computing takes a few
milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpcpace import Session

WORK_S = 0.01
At = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a program is: its session, the step, and what to call at each place where a fault may strike."""

    session: Session
    step: int
    at: At

    def work(self, phase: str, work_s: float = WORK_S) -> None:
        """Compute for a moment."""
        with self.session.phase(phase):
            self.at(phase)
            time.sleep(work_s)


class Groups:
    """The process groups of a layout, made on all ranks in one order."""

    def __init__(self, width: int) -> None:
        """Make groups of neighbours (`inner`, of that width) and those across them (`outer`)."""
        rank, size = dist.get_rank(), dist.get_world_size()
        inner = [dist.new_group(list(range(first, first + width))) for first in range(0, size, width)]
        outer = [dist.new_group(list(range(first, size, width))) for first in range(width)]
        self.inner, self.outer = inner[rank // width], outer[rank % width]
        self.twin = dist.new_group(list(range(size)))
        self.rank, self.size, self.width = rank, size, width


def _data_parallel(place: Place, groups: Groups) -> None:
    place.work("data", 0.002)
    place.work("forward")
    with place.session.phase("backward"):
        place.at("reduce")
        dist.all_reduce(torch.ones(1000))


def _two_groups(place: Place, groups: Groups) -> None:
    place.work("data", 0.002)
    place.work("forward")
    with place.session.phase("backward"):
        place.at("reduce")
        dist.all_reduce(torch.ones(1000))
        dist.all_reduce(torch.ones(10), group=groups.twin)


def _tensor_parallel(place: Place, groups: Groups) -> None:
    place.work("data", 0.002)
    for _ in range(2):
        place.work("forward")
        dist.all_reduce(torch.ones(1000), group=groups.inner)
    with place.session.phase("backward"):
        place.at("reduce")
        dist.all_reduce(torch.ones(1000), group=groups.outer)


def _pipeline(place: Place, groups: Groups, *, stage: int, stages: int, first: int) -> None:
    place.work("data", 0.002)
    message = torch.ones(1000)
    for _ in range(2):
        if stage:
            dist.recv(message, first + stage - 1)
        place.work("forward")
        if stage < stages - 1:
            dist.send(message, first + stage + 1)
    for _ in range(2):
        if stage < stages - 1:
            dist.recv(message, first + stage + 1)
        place.work("backward")
        if stage:
            dist.send(message, first + stage - 1)


def _pipeline_parallel(place: Place, groups: Groups) -> None:
    _pipeline(place, groups, stage=groups.rank, stages=groups.size, first=0)


def _data_and_pipeline(place: Place, groups: Groups) -> None:
    stage = groups.rank % groups.width
    _pipeline(place, groups, stage=stage, stages=groups.width, first=groups.rank - stage)
    place.at("reduce")
    dist.all_reduce(torch.ones(1000), group=groups.outer)


def _rare_barrier(place: Place, groups: Groups) -> None:
    _data_parallel(place, groups)
    if place.step % 4 == 0:
        place.at("barrier")
        dist.barrier()


def _checkpointing(place: Place, groups: Groups) -> None:
    _data_parallel(place, groups)
    if place.step % 4 == 3 and groups.rank == 0:
        place.work("checkpoint", 0.1)


def _evaluating(place: Place, groups: Groups) -> None:
    _data_parallel(place, groups)
    if place.step % 4 == 3 and groups.rank == 0:
        place.work("eval", 0.1)


class _Sharded:
    """A model of two layers in FSDP2."""

    def __init__(self) -> None:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
        for layer in self.model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def __call__(self, place: Place, groups: Groups) -> None:
        place.work("data", 0.002)
        with place.session.phase("forward"):
            place.at("forward")
            loss = self.model(torch.ones(4, 32)).sum()
        with place.session.phase("backward"):
            place.at("reduce")
            loss.backward()
        with place.session.phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()


Program = Callable[[Place, Groups], None]

PROGRAMS: Mapping[str, Callable[[], Program]] = {
    "dp": lambda: _data_parallel,
    "tp": lambda: _tensor_parallel,
    "pp": lambda: _pipeline_parallel,
    "dp x pp": lambda: _data_and_pipeline,
    "FSDP2": _Sharded,
    "dp with a barrier": lambda: _rare_barrier,
    "dp with checkpoints": lambda: _checkpointing,
    "dp with evaluations": lambda: _evaluating,
    "dp in two groups": lambda: _two_groups,
}
"""By group layout: what makes the function that does one step."""
