"""Traces a loop of Accelerate: `with hpcpace.callbacks.accelerate.trace(accelerator): ...`."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from hpcpace.callbacks import TracedLoop, log_words, numbers_of, traced, words_of
from hpcpace.observe.card import CardVerdict


def trace(
    accelerator: Any, *, optimizer: Any = None, log: bool = True, **settings: Any
) -> AbstractContextManager[TracedLoop]:
    """Trace the loop in this block: a step per update of the parameters, its samples, and checkpoints.

    Enter it after `accelerator.prepare`. Accumulated gradients are one step. Samples are the batch size of the loader
    that is running, per rank, times the backward passes, also where the last batch of an epoch is smaller.

    Args:
        accelerator: with a prepared optimizer.
        optimizer: the prepared optimizer whose steps count; by default the first.
        log: whether the main process adds its figures (`Session.metrics`) to what `accelerator.log` logs, and logs the
            verdict at the end: where this block ends, or at `accelerator.end_training` in it.
        settings: the arguments of `hpcpace.session`.

    Raises:
        TypeError: `hpcpace.session` has no such argument.
    """
    return traced(settings, lambda loop: _attach(loop, accelerator, optimizer, logs=log))


def _attach(loop: TracedLoop, accelerator: Any, optimizer: Any, *, logs: bool) -> None:
    counted = accelerator._optimizers[0] if optimizer is None else optimizer
    loop.replace(counted, "step", partial(_stepping, loop, accelerator))
    loop.replace(accelerator, "backward", partial(_counting, loop, accelerator))
    loop.replace(accelerator, "save_state", loop.timed("checkpoint"))
    # It closes the trackers and the process group.
    loop.replace(accelerator, "end_training", partial(_ending, loop))
    if logs and getattr(accelerator, "is_main_process", False):
        figures = _Figures(loop, accelerator)
        loop.replace(accelerator, "log", figures.adding)
        loop.log_verdict = figures.log_verdict


class _Figures:
    """Logs our figures with the trackers of a job, at the steps of its own values."""

    def __init__(self, loop: TracedLoop, accelerator: Any) -> None:
        self._loop, self._accelerator = loop, accelerator
        self._step: int | None = None

    def adding(self, log: Any) -> Any:
        """Return a method that logs our figures as well."""

        def adding(values: Any, *args: Any, **kwargs: Any) -> Any:
            with self._loop.guarded():
                values = {**values, **self._loop.metrics()}
                self._step = kwargs.get("step", args[0] if args else None)
            return log(values, *args, **kwargs)

        return adding

    def log_verdict(self, verdict: CardVerdict) -> None:
        """Log the verdict with each tracker, at the step of the last values."""
        for tracker in self._accelerator.trackers:
            with self._loop.guarded():
                tracker.log(numbers_of(verdict), step=self._step)
                log_words(sys.modules.get("mlflow") if tracker.name == "mlflow" else tracker.tracker, words_of(verdict))


def _ending(loop: TracedLoop, end_training: Any) -> Any:
    """Return a method that ends the session first."""

    def ending(*args: Any, **kwargs: Any) -> Any:
        loop.end()
        return end_training(*args, **kwargs)

    return ending


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
