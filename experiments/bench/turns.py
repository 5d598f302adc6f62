"""Compares training steps that alternate in one process, on the same data: samples per second, and their ratios."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from experiments.bench.computing import words
from experiments.bench.pairs import median_interval, take_turns

Step = Callable[[Tensor, Tensor], Tensor]
Batch = Callable[[int], tuple[Tensor, Tensor]]
CPU = torch.device("cpu")


def training_step(loss: Step, optimizer: torch.optim.Optimizer) -> Step:
    """Return a training step of a model whose loss is given as a function of inputs and targets."""

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        value = loss(inputs, targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def check_same_gradients(ours: nn.Module, pairs: Mapping[str, nn.Parameter], *, tolerance: float) -> None:
    """Refuse to compare models that compute different things.

    Args:
        ours: a model with gradients.
        pairs: by the name of its parameter, that of the peer, with a gradient of the same batch.
        tolerance: norm of the difference over the norm of the peer's gradient.
    """
    named = dict(ours.named_parameters())
    assert named.keys() == pairs.keys()
    for name, other in pairs.items():
        mine, theirs = named[name].grad, other.grad
        assert mine is not None and theirs is not None, name
        difference = float((mine - theirs).norm() / theirs.norm().clamp_min(1e-12))
        assert difference < tolerance, f"gradients of {name} differ by {difference:.2e}"


def compare(
    steps: Mapping[str, Step],
    batch: Batch,
    *,
    num_pairs: int,
    samples_per_step: int,
    unit: str,
    steps_per_turn: int = 1,
    loss_tolerance: float = math.inf,
    device: torch.device = CPU,
) -> dict[str, float]:
    """Let training steps take turns; print samples a second of each and the first one's ratio to the others.

    Args:
        steps: two or more, by name; they see the same batches in the same order.
        batch: inputs and targets of a step, on the device.
        num_pairs: how often each has its turn, behind three warm-ups.
        samples_per_step: that a step trains.
        unit: of the samples.
        steps_per_turn: on a GPU several, so that the host can run ahead as in a training.
        loss_tolerance: how much the last losses may differ from the first one's, relative to it.
        device: where the steps compute.

    Returns:
        Samples a second, by name.
    """
    losses: dict[str, float] = {}
    counts = dict.fromkeys(steps, 0)

    def timed(name: str, step: Step) -> Callable[[], float]:
        def measure() -> float:
            batches = [batch(counts[name] + index) for index in range(steps_per_turn)]
            counts[name] += steps_per_turn
            begin_s = time.perf_counter()
            for inputs, targets in batches:
                loss = step(inputs, targets)
            losses[name] = float(loss)  # waits for all that the stream has to do
            return (time.perf_counter() - begin_s) / steps_per_turn

        return measure

    times = take_turns({name: timed(name, step) for name, step in steps.items()}, num_rounds=num_pairs, num_warmups=3)
    first, *others = steps
    print(f"  {num_pairs} pairs, {words(device)}, last losses {' and '.join(f'{losses[name]:.4f}' for name in steps)}")
    assert all(abs(losses[name] / losses[first] - 1) < loss_tolerance for name in others), losses
    rates = {name: samples_per_step / float(np.median(values)) for name, values in times.items()}
    for name, rate in rates.items():
        print(f"  {name:14} {rate:8.1f} {unit}/s (median of {'steps' if steps_per_turn == 1 else 'turns'})")
    for name in others:
        ratio, low, high = median_interval(times[name] / times[first])
        print(f"  ratio of {unit}/s, {first} to {name}: {ratio:.3f} [{low:.3f}, {high:.3f}]")
    return rates
