"""Traces Hugging Face's Trainer by a callback: `Trainer(callbacks=[TraceCallback()])`."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from hpcpace.callbacks import TracedLoop, log_words, needs, numbers_of, words_of
from hpcpace.observe.card import CardVerdict

with needs("Transformers", "transformers"):
    from transformers import TrainerCallback

_INTEGRATIONS = "transformers.integrations"


class TraceCallback(TrainerCallback):
    """Traces `Trainer.train`: a step per update of the parameters, its samples, evaluations and checkpoints.

    A callback does not see batches: samples are the batch size per rank times the accumulated microbatches, also where
    the last batch of an epoch is smaller.

    Args:
        log: whether rank 0 adds its figures (`Session.metrics`) to what the Trainer's integrations log, such as
            TensorBoard, MLflow or W&B, whenever it logs, and the verdict at the end; the Trainer's own output and its
            log history stay as they are.
        settings: the arguments of `hpcpace.session`.

    Raises:
        TypeError: `hpcpace.session` has no such argument.
    """

    def __init__(self, *, log: bool = True, **settings: Any) -> None:
        self._loop = TracedLoop(settings)
        self._logs = log
        self._loggers: list[Any] = []
        self._logged: tuple[int, dict[str, float]] = (-1, {})

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the session."""
        self._loggers.clear()
        self._loop.begin(kwargs.get("model"))
        if self._logs and state is not None and state.is_world_process_zero:
            # No event hands a callback the others: whoever calls this has them.
            handler = sys._getframe(1).f_locals.get("self")
            for other in getattr(handler, "callbacks", ()):
                if type(other).__module__.startswith(_INTEGRATIONS):
                    self._loggers.append(other)
                    self._loop.replace(other, "on_log", self._adding)
                    self._loop.replace(other, "on_train_end", self._ending)

    def _ending(self, on_train_end: Any) -> Any:
        """Return a method that ends the session first: an integration closes its logger where training ends."""

        def ending(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self.on_train_end(args, state, control)
            return on_train_end(args, state, control, **kwargs)

        return ending

    def _log_verdict(self, args: Any, state: Any, control: Any, verdict: CardVerdict) -> None:
        for logger in self._loggers:
            with self._loop.guarded():
                logger.on_log(args, state, control, logs=numbers_of(verdict))
                # A SummaryWriter, the run of W&B's module, and the module of MLflow.
                writer, wandb, mlflow = (getattr(logger, name, None) for name in ("tb_writer", "_wandb", "_ml_flow"))
                for target in (writer, getattr(wandb, "run", None), mlflow):
                    log_words(target, words_of(verdict))

    def _adding(self, on_log: Any) -> Any:
        """Return a method that logs our figures as well, the same ones for all that log at one step, once a step."""
        logged_step = -1

        def adding(args: Any, state: Any, control: Any, *more: Any, **kwargs: Any) -> Any:
            nonlocal logged_step
            with self._loop.guarded():
                if kwargs.get("logs") is not None and logged_step != state.global_step:
                    logged_step = state.global_step
                    if self._logged[0] != logged_step:
                        self._logged = logged_step, self._loop.metrics()
                    kwargs["logs"] = {**kwargs["logs"], **self._logged[1]}
            return on_log(args, state, control, *more, **kwargs)

        return adding

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a microbatch."""
        self._loop.add_samples(args.train_batch_size)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a step."""
        self._loop.add_samples(args.train_batch_size)
        self._loop.step()
        self._await(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin what may follow an epoch."""
        self._await(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End an evaluation; a checkpoint may follow it."""
        self._loop.end_phase("eval")
        if control.should_save:
            self._loop.begin_phase("checkpoint")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a checkpoint."""
        self._loop.end_phase("checkpoint")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the session."""
        self._loop.log_verdict = partial(self._log_verdict, args, state, control) if self._loggers else None
        self._loop.end()

    def _await(self, control: Any) -> None:
        """Begin the evaluation or checkpoint that the Trainer does next: it says only when they are over."""
        if control.should_evaluate:
            self._loop.begin_phase("eval")
        elif control.should_save:
            self._loop.begin_phase("checkpoint")
