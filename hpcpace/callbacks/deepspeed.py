"""Traces an engine of DeepSpeed: `with hpcpace.callbacks.deepspeed.trace(engine): ...`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from hpcpace.callbacks import TracedLoop, traced


def trace(engine: Any, **settings: Any) -> AbstractContextManager[TracedLoop]:
    """Trace the loop in this block: a step per update of the parameters, its samples, evaluations and checkpoints.

    A step ends at `engine.step()` where gradients are not accumulated further, or with `train_batch` of an engine with
    pipeline stages. Samples are those of this rank by the engine's configuration.

    Args:
        engine: from `deepspeed.initialize`.
        settings: the arguments of `hpcpace.session`.

    Raises:
        TypeError: `hpcpace.session` has no such argument.
    """
    return traced(settings, lambda loop: _attach(loop, engine))


def _attach(loop: TracedLoop, engine: Any) -> None:
    has_pipeline = hasattr(engine, "train_batch")
    loop.replace(engine, "train_batch" if has_pipeline else "step", partial(_stepping, loop, engine, has_pipeline))
    if has_pipeline:
        loop.replace(engine, "eval_batch", loop.timed("eval"))
    loop.replace(engine, "save_checkpoint", loop.timed("checkpoint"))


def _stepping(loop: TracedLoop, engine: Any, has_pipeline: bool, step: Any) -> Any:
    def stepping(*args: Any, **kwargs: Any) -> Any:
        is_last = has_pipeline or engine.is_gradient_accumulation_boundary()
        result = step(*args, **kwargs)
        if is_last:
            with loop.guarded():
                num_microbatches = engine.gradient_accumulation_steps()
                loop.add_samples(engine.train_micro_batch_size_per_gpu() * num_microbatches)
            loop.step()
        return result

    return stepping
