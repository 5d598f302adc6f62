"""The loss of each step over all replicas, brought together without holding a step up."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


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
