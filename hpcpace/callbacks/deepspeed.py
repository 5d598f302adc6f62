"""Traces an engine of DeepSpeed: `with hpcpace.callbacks.deepspeed.trace(engine): ...`."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from hpcpace.callbacks import TracedLoop, log_words, numbers_of, traced, words_of
from hpcpace.observe.card import CardVerdict


def trace(engine: Any, *, log: bool = True, **settings: Any) -> AbstractContextManager[TracedLoop]:
    """Trace the loop in this block: a step per update of the parameters, its samples, evaluations and checkpoints.

    A step ends at `engine.step()` where gradients are not accumulated further, or with `train_batch` of an engine with
    pipeline stages. Samples are those of this rank by the engine's configuration.

    Args:
        engine: from `deepspeed.initialize`.
        log: whether rank 0 logs its figures (`Session.metrics`) with the engine's monitor, every `steps_per_print`
            steps, at the number of samples as DeepSpeed itself does, and the verdict at the end.
        settings: the arguments of `hpcpace.session`.

    Raises:
        TypeError: `hpcpace.session` has no such argument.
    """
    return traced(settings, lambda loop: _attach(loop, engine, logs=log))


def _attach(loop: TracedLoop, engine: Any, *, logs: bool) -> None:
    has_pipeline = hasattr(engine, "train_batch")
    is_logging = logs and getattr(getattr(engine, "monitor", None), "enabled", False) and engine.global_rank == 0
    loop.log_verdict = partial(_log_verdict, engine) if is_logging else None
    stepping = partial(_stepping, loop, engine, has_pipeline, is_logging)
    loop.replace(engine, "train_batch" if has_pipeline else "step", stepping)
    if has_pipeline:
        loop.replace(engine, "eval_batch", loop.timed("eval"))
    loop.replace(engine, "save_checkpoint", loop.timed("checkpoint"))


def _stepping(loop: TracedLoop, engine: Any, has_pipeline: bool, is_logging: bool, step: Any) -> Any:
    def stepping(*args: Any, **kwargs: Any) -> Any:
        is_last = has_pipeline or engine.is_gradient_accumulation_boundary()
        result = step(*args, **kwargs)
        if is_last:
            with loop.guarded():
                num_microbatches = engine.gradient_accumulation_steps()
                loop.add_samples(engine.train_micro_batch_size_per_gpu() * num_microbatches)
            loop.step()
            if is_logging:
                with loop.guarded():
                    _log(loop, engine)
        return result

    return stepping


def _log(loop: TracedLoop, engine: Any) -> None:
    interval = engine.steps_per_print()
    if interval and not engine.global_steps % interval and (figures := loop.metrics()):
        engine.monitor.write_events([(name, value, engine.global_samples) for name, value in figures.items()])


def _log_verdict(engine: Any, verdict: CardVerdict) -> None:
    monitor = engine.monitor
    monitor.write_events([(name, value, engine.global_samples) for name, value in numbers_of(verdict).items()])
    if (writer := getattr(getattr(monitor, "tb_monitor", None), "summary_writer", None)) is not None:
        log_words(writer, words_of(verdict))
    if getattr(getattr(monitor, "wandb_monitor", None), "enabled", False):
        log_words(getattr(sys.modules.get("wandb"), "run", None), words_of(verdict))
