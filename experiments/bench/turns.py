"""Two training steps that take turns in one process, on the same data: samples a second of each, and their ratio."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from experiments.bench.pairs import alternate, median_interval

Step = Callable[[Tensor, Tensor], Tensor]
Batch = Callable[[int], tuple[Tensor, Tensor]]


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


def compare(steps: Mapping[str, Step], batch: Batch, *, num_pairs: int, samples_per_step: int, unit: str) -> None:
    """Let two steps take turns, and print samples a second of each and the ratio of the first to the second.

    Args:
        steps: two, by name; they see the same batches in the same order.
        batch: inputs and targets of a step.
        num_pairs: how often each is measured, behind three warm-ups.
        samples_per_step: that a step trains.
        unit: of the samples.
    """
    (first, a), (second, b) = steps.items()
    losses: dict[str, float] = {}
    counts = dict.fromkeys(steps, 0)

    def timed(name: str, step: Step) -> Callable[[], float]:
        def measure() -> float:
            inputs, targets = batch(counts[name])
            begin_s = time.perf_counter()
            losses[name] = float(step(inputs, targets))
            counts[name] += 1
            return time.perf_counter() - begin_s

        return measure

    pairs = alternate(timed(first, a), timed(second, b), num_pairs=num_pairs, num_warmups=3)
    ratio, low, high = median_interval(pairs.b / pairs.a)
    last = " and ".join(f"{losses[name]:.4f}" for name in steps)
    print(f"  {num_pairs} pairs, {torch.get_num_threads()} threads, last losses {last}")
    for name, values in ((first, pairs.a), (second, pairs.b)):
        print(f"  {name:14} {samples_per_step / float(np.median(values)):8.1f} {unit}/s (median of steps)")
    print(f"  ratio of {unit}/s, {first} to {second}: {ratio:.3f} [{low:.3f}, {high:.3f}]")
