"""Losses over all replicas, without holding a step up, and held-out perplexity or accuracy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpcpace.train.data import TrainingData
from hpcpace.train.models import master_dtype
from hpcpace.train.parallel import Replica
from hpcpace.train.plan import TrainPlan
from hpcpace.train.presets import GPT2Shape, Mesh


class LossLog:
    """Collects the losses of a job.

    Only the last stage of a replica knows its loss. Losses wait on their rank until `gather`, which starts one small
    all-reduce of those of several steps and does not wait for it.

    Args:
        weight: what this rank's losses count in the mean over the global batch: 1 / dp on one rank of each replica's
            last stage, 0 elsewhere.
        device: where the collective takes place.

    Attributes:
        losses: the mean losses known so far, in order of the steps.
    """

    def __init__(self, *, weight: float, device: torch.device) -> None:
        self.losses: list[float] = []
        self._weight = weight
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._waiting: list[Tensor] = []
        self._sum: Tensor | None = None
        self._work: dist.Work | None = None

    def add(self, loss: Tensor | None) -> None:
        """Take the replica's loss of a step; None on a rank that does not know it."""
        self._waiting.append(self._zero if loss is None or not self._weight else loss.double() * self._weight)

    def gather(self) -> None:
        """Start to bring together the losses taken since the last time, if there are any.

        Collective: every rank of the default process group calls this, after the same steps.
        """
        if not self._waiting:
            return
        self._finish()
        self._sum = torch.stack(self._waiting)
        self._waiting = []
        self._work = dist.all_reduce(self._sum, async_op=True)

    def poll(self) -> list[float]:
        """Return the losses that are known, without waiting for any."""
        if self._work is not None and self._work.is_completed():
            self._finish()
        return self.losses

    def finish(self) -> list[float]:
        """Bring together what is left and return the losses of all steps.

        Collective: every rank of the default process group calls this, after the same steps.
        """
        if self._waiting:
            self.gather()
        self._finish()
        return self.losses

    def _finish(self) -> None:
        if self._work is not None and self._sum is not None:
            self._work.wait()
            self.losses.extend(self._sum.tolist())
            self._work = self._sum = None


_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The model after some steps.

    Attributes:
        num_steps: steps trained before.
        loss: mean over the held-out batches.
        metric: `perplexity`, exp(loss), per token of the data; or `accuracy`, the share of images classified rightly.
        value: that figure.
    """

    num_steps: int
    loss: float
    metric: str
    value: float

    def facts(self) -> dict[str, Any]:
        """Return what a run records of it."""
        return {"num_steps": self.num_steps, "loss": self.loss, self.metric: self.value}

    def __str__(self) -> str:
        value = f"{self.value:.2f}" if self.metric == "perplexity" else f"{100 * self.value:.1f} %"
        return f"after {self.num_steps} steps  held-out loss {self.loss:.4f}  {self.metric} {value}"


class Evaluator:
    """Evaluates a replica on the same batches each time, spread evenly over what is held out.

    Args:
        plan: the run.
        data: what it trains on and holds out.
        replica: this rank's part of the model.
        place: this rank's place in the mesh.
        device: where it computes.
    """

    def __init__(
        self, plan: TrainPlan, *, data: TrainingData, replica: Replica, place: Mesh, device: torch.device
    ) -> None:
        self._plan, self._data, self._replica, self._place, self._device = plan, data, replica, place, device
        settings = plan.settings
        num_batches = min(settings.eval_batches, data.num_held_out() // settings.batch_size)
        total = num_batches * settings.batch_size
        self._rows = (np.arange(total) * data.num_held_out() // max(total, 1)).reshape(num_batches, -1)

    def evaluate(self, num_steps: int) -> Evaluation:
        """Return loss and metric after so many steps.

        Collective: every rank of the default process group calls this.
        """
        plan = self._plan
        is_text = isinstance(plan.shape, GPT2Shape)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        with torch.no_grad():
            for rows in self._rows:
                batch = self._data.held_out_batch(rows[plan.rows(self._place)])
                inputs, targets = to_device(batch, self._device, master_dtype(plan.settings.dtype))
                sums += self._text_sums(inputs, targets) if is_text else self._image_sums(inputs, targets)
        dist.all_reduce(sums)
        loss, num_right = sums.tolist()
        loss /= len(self._rows)
        if is_text:
            metric, value = "perplexity", math.exp(min(loss, _LARGEST_EXPONENT))
        else:
            metric, value = "accuracy", num_right / self._rows.size
        return Evaluation(num_steps=num_steps, loss=loss, metric=metric, value=value)

    def _text_sums(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's share of the loss of a global batch, and 0: float64, (2,)."""
        loss = self._replica.forward_only(inputs, targets)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        # All ranks of tensor parallelism know the loss; one of them reports it.
        if loss is not None and self._place.tp == 0:
            sums[0] = loss.double() / self._plan.mesh.dp
        return sums

    def _image_sums(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return this rank's share of the loss of a global batch, and how many images are right: float64, (2,)."""
        (model,) = self._replica.stages
        self._share_buffers()
        model.eval()
        logits = model(images).float()
        model.train()
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return torch.stack([loss.double() / self._plan.mesh.dp, (logits.argmax(dim=1) == labels).sum().double()])

    def _share_buffers(self) -> None:
        """Give all replicas the running statistics of the first one, as DDP does before each forward pass."""
        if self._replica.replicas is not None and self._plan.settings.sync_every == 1:
            for buffer in self._replica.stages[0].buffers():
                dist.broadcast(buffer, group=self._replica.replicas, group_src=0)


def to_device(batch: tuple[Any, Any], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return inputs and targets on a device; images in the type of the parameters, tokens as they are."""
    inputs, targets = (torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in batch)
    return (inputs.to(dtype) if inputs.is_floating_point() else inputs), targets
