"""Traces a loop of Accelerate: `with hpcpace.callbacks.accelerate.trace(accelerator): ...`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from hpcpace.callbacks import TracedLoop, traced


def trace(accelerator: Any, *, optimizer: Any = None, **settings: Any) -> AbstractContextManager[TracedLoop]:
    """Trace the loop in this block: a step per update of the parameters, its samples, and checkpoints.

    Enter it after `accelerator.prepare`. Accumulated gradients are one step. Samples are the batch size of the loader
    that is running, per rank, times the backward passes, also where the last batch of an epoch is smaller.

    Args:
        accelerator: with a prepared optimizer.
        optimizer: the prepared optimizer whose steps count; by default the first.
        settings: the arguments of `hpcpace.session`.

    Raises:
        TypeError: `hpcpace.session` has no such argument.
    """
    return traced(settings, lambda loop: _attach(loop, accelerator, optimizer))


def _attach(loop: TracedLoop, accelerator: Any, optimizer: Any) -> None:
    counted = accelerator._optimizers[0] if optimizer is None else optimizer
    loop.replace(counted, "step", partial(_stepping, loop, accelerator))
    loop.replace(accelerator, "backward", partial(_counting, loop, accelerator))
    loop.replace(accelerator, "save_state", loop.timed("checkpoint"))


def _stepping(loop: TracedLoop, accelerator: Any, step: Any) -> Any:
    def stepping(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        # Accelerate calls the optimizer's own step only where gradients are synchronised.
        if accelerator.sync_gradients:
            loop.step()
        return result

    return stepping


def _counting(loop: TracedLoop, accelerator: Any, backward: Any) -> Any:
    def counting(*args: Any, **kwargs: Any) -> Any:
        with loop.guarded():
            loader = accelerator.gradient_state.active_dataloader
            loop.add_samples(loader.total_batch_size // accelerator.num_processes if loader is not None else 0)
        return backward(*args, **kwargs)

    return counting
