"""A pipeline over the ranks of a replica, by the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

_SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "interleaved": ScheduleInterleaved1F1B}


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The stages of a rank and the order in which they take microbatches.

    Attributes:
        stages: this rank's stages, from the front of the model to its back.
        schedule: one of torch's.
        context: what forward and backward run in.
    """

    stages: tuple[PipelineStage, ...]
    schedule: Any
    context: Callable[[], AbstractContextManager[None]]

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Train on the replica's batch; return its mean loss on the rank of the last stage."""
        return self._run(self.schedule.step, inputs, targets)

    def forward_only(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return the mean loss of the replica's batch on the rank of the last stage, and leave no gradients."""
        return self._run(self.schedule.eval, inputs, targets)

    def _run(self, run: Callable[..., Any], inputs: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        ends: dict[str, Any] = {}
        if self.stages[-1].is_last:
            # The last stage computes the loss itself, so that it counts as forward: `targets` is an argument of it.
            ends = {"target": targets, "targets": targets, "losses": losses}
        with self.context():
            run(*([inputs] if self.stages[0].is_first else []), return_outputs=False, **ends)
        return torch.stack(losses).detach().sum() if losses else None


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """What passes through a pipeline for one microbatch, as tensors on the meta device.

    Attributes:
        tokens: what the first stage takes.
        hidden: what goes from stage to stage.
        loss: what the last stage gives.
    """

    tokens: Tensor
    hidden: Tensor
    loss: Tensor


def build_pipeline(
    modules: Sequence[nn.Module],
    *,
    indices: Sequence[int],
    num_stages: int,
    schedule: str,
    num_microbatches: int,
    group: dist.ProcessGroup,
    device: torch.device,
    microbatch: Microbatch,
    context: Callable[[], AbstractContextManager[None]],
) -> Pipeline:
    """Put this rank's stages into a schedule.

    Args:
        modules: this rank's stages.
        indices: the place of each among all stages.
        num_stages: of the whole pipeline; more than the ranks of `group` with the interleaved schedule.
        schedule: `1f1b`, `gpipe` or `interleaved`.
        num_microbatches: pieces of the replica's batch.
        group: the ranks of the pipeline.
        device: of this rank.
        microbatch: the shapes and types of what passes through.
        context: what forward and backward run in.
    """
    # With the shapes given, torch need not find them out by running the model and sending them about.
    stages = tuple(
        PipelineStage(
            module,
            index,
            num_stages,
            device,
            input_args=microbatch.tokens if index == 0 else microbatch.hidden,
            output_args=microbatch.loss if index == num_stages - 1 else microbatch.hidden,
            group=group,
        )
        for module, index in zip(modules, indices, strict=True)
    )
    built = _SCHEDULES[schedule](
        list(stages) if schedule == "interleaved" else stages[0],
        num_microbatches,
        loss_fn=lambda loss, _: loss / num_microbatches,
        scale_grads=False,
    )
    return Pipeline(stages=stages, schedule=built, context=context)
