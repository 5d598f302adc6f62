"""A small model with checkpoints, in a world of one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from hpcpace.train.checkpoint import Checkpoints
from hpcpace.train.checkpoint_folder import TrainingHistory
from hpcpace.train.plan import plan_training
from hpcpace.train.settings import TrainConfig

DIGEST = "d"


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    """Set the umask, until the end of a test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


class SmallRun:
    """A run whose model is a layer and its statistics."""

    def __init__(self, path: Path, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.path = path
        self.plan = plan_training(TrainConfig(steps=9), 1)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        replica: Any = SimpleNamespace(stages=[self.model])
        self.checkpoints = Checkpoints(
            path / "checkpoints",
            plan=self.plan,
            place=self.plan.mesh.coordinates(0),
            replica=replica,
            optimizer=self.optimizer,
            group=None,
            data_digest=DIGEST,
        )

    def train(self) -> None:
        self.model(torch.rand(4, 3)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, num_steps: int = 1) -> Path:
        return self.checkpoints.save(TrainingHistory(num_steps=num_steps, losses=(1.0,) * num_steps))

    def state(self) -> dict[str, Any]:
        return self.checkpoints._state(is_saved=False)


@pytest.fixture(scope="session")
def saved_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a checkpoint after one step, which tests copy."""
    path = tmp_path_factory.mktemp("saved") / "run"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = os.umask(0o022)
    try:
        run = SmallRun(path, seed=0)
        run.train()
        run.save()
    finally:
        os.umask(before)
        dist.destroy_process_group()
    return path


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def small_run(tmp_path: Path, umask: Callable[[int], int], world_of_one: None) -> SmallRun:
    """A run without a checkpoint."""
    return SmallRun(tmp_path / "run", seed=1)


@pytest.fixture
def checkpoint(small_run: SmallRun, saved_checkpoint: Path) -> Path:
    """A sound checkpoint of `small_run`, with other values than the run has; the test may damage it."""
    shutil.copytree(saved_checkpoint, small_run.path)
    return small_run.path / "checkpoints" / "step-00000001"
