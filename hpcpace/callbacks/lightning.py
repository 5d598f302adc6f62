"""Traces Lightning: `Trainer(callbacks=[hpcpace.callbacks.lightning.TraceCallback()])`."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from hpcpace.callbacks import TracedLoop, count_samples, log_words, needs, numbers_of, words_of
from hpcpace.observe.card import CardVerdict

# Lightning has two packages with the same classes; a Trainer of the one takes no callbacks of the other.
if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    with needs("Lightning", "lightning"):
        from lightning.pytorch import Callback


class TraceCallback(Callback):
    """Traces `Trainer.fit`: a step per update of the parameters, its samples, validation and checkpoints.

    A step ends at the end of the batch in which `trainer.global_step` grew, so that accumulated gradients, and several
    optimizers in one batch, are one step. Samples are the first dimension of each batch.

    Args:
        log: whether rank 0 logs its figures (`Session.metrics`) with the Trainer's loggers, every `log_every_n_steps`,
            and the verdict at the end.
        settings: the arguments of `hpcpace.session`.

    Raises:
        TypeError: `hpcpace.session` has no such argument.
    """

    def __init__(self, *, log: bool = True, **settings: Any) -> None:
        super().__init__()
        self._loop = TracedLoop(settings)
        self._logs = log
        self._num_updates = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the session."""
        self._loop.begin(pl_module)
        self._num_updates = trainer.global_step
        self._loop.replace(trainer, "save_checkpoint", self._loop.timed("checkpoint"))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch, and end a step if it updated the parameters."""
        with self._loop.guarded():
            self._loop.add_samples(count_samples(batch))
        if trainer.global_step != self._num_updates:
            self._num_updates = trainer.global_step
            self._loop.step()
        if self._logs:
            with self._loop.guarded():
                self._log_figures(trainer)

    def _log_figures(self, trainer: Any) -> None:
        """Log as Lightning's own DeviceStatsMonitor does: past `log`, which would synchronise ranks and the device."""
        loggers = getattr(trainer, "loggers", None)
        if loggers and trainer.is_global_zero and trainer._logger_connector.should_update_logs:
            figures = self._loop.metrics()
            for logger in loggers if figures else ():
                logger.log_metrics(figures, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an evaluation."""
        self._loop.begin_phase("eval")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End an evaluation."""
        self._loop.end_phase("eval")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the session."""
        is_logging = self._logs and getattr(trainer, "loggers", None) and trainer.is_global_zero
        self._loop.log_verdict = partial(self._log_verdict, trainer) if is_logging else None
        self._loop.end()

    def _log_verdict(self, trainer: Any, verdict: CardVerdict) -> None:
        for logger in trainer.loggers:
            with self._loop.guarded():
                logger.log_metrics(numbers_of(verdict), step=trainer.fit_loop.epoch_loop._batches_that_stepped)
                log_words(logger.experiment, words_of(verdict), run_id=getattr(logger, "run_id", None) or "")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the session on this rank alone."""
        self._loop.abandon()
