"""What the programs share: a small model, and data of known values that can be slow to load."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from experiments.attach.witness import hold

WIDTH = 256
BATCH = 32
STEPS = 40


class Numbers(Dataset):
    """Random inputs and targets that follow from their index."""

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        hold("data", parts=BATCH)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), torch.randn(WIDTH, generator=generator)


def batches(rank: int, num_ranks: int, *, steps: int = STEPS, batch: int = BATCH) -> DataLoader:
    """Return a loader of this rank's batches."""
    dataset = Numbers(steps * batch * num_ranks)
    sampler = list(range(rank * steps * batch, (rank + 1) * steps * batch))
    return DataLoader(dataset, batch_size=batch, sampler=sampler)


def distributed_batches(*, steps: int = STEPS) -> DataLoader:
    """Return a loader that a framework divides among its ranks by itself."""
    return DataLoader(Numbers(steps * BATCH), batch_size=BATCH)


class Layers(nn.Module):
    """Some layers of a perceptron."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x


class Model(nn.Module):
    """The layers, and the place where slow compute waits."""

    def __init__(self, layers: nn.Module | None = None) -> None:
        super().__init__()
        self.net = layers if layers is not None else Layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hold("compute")
        return self.net(x)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error."""
    return torch.nn.functional.mse_loss(output, target)


def options() -> argparse.Namespace:
    """Return the options of a program that a framework runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--callback", action="store_true")
    return parser.parse_args()
