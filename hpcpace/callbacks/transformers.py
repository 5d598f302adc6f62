"""Traces Hugging Face's Trainer by a callback: `Trainer(callbacks=[TraceCallback()])`."""

from __future__ import annotations

from typing import Any

from hpcpace.callbacks import TracedLoop, needs

with needs("Transformers", "transformers"):
    from transformers import TrainerCallback


class TraceCallback(TrainerCallback):
    """Traces `Trainer.train`: a step per update of the parameters, its samples, evaluations and checkpoints.

    A callback does not see batches: samples are the batch size per rank times the accumulated microbatches, also where
    the last batch of an epoch is smaller.

    Args:
        settings: the arguments of `hpcpace.session`.

    Raises:
        TypeError: `hpcpace.session` has no such argument.
    """

    def __init__(self, **settings: Any) -> None:
        self._loop = TracedLoop(settings)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the session."""
        self._loop.begin(kwargs.get("model"))

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
        self._loop.end()

    def _await(self, control: Any) -> None:
        """Begin the evaluation or checkpoint that the Trainer does next: it says only when they are over."""
        if control.should_evaluate:
            self._loop.begin_phase("eval")
        elif control.should_save:
            self._loop.begin_phase("checkpoint")
