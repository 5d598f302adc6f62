"""Stopping early on a signal: all ranks stop after the same step, so that they can write a checkpoint.

Slurm sends a signal before the time limit (`sbatch --signal`), to each rank at a different moment. The ranks vote about
once a second on whether to stop. The vote uses a separate gloo group below torch's dispatcher, so that neither GPUs nor
the trace see it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from hpcpace.core.text import NS_PER_S

_VOTE_INTERVAL_NS = NS_PER_S
_MOST_STEPS_BETWEEN_VOTES = 1000


class EarlySignal:
    """Notes a signal whose default action would end the process.

    Attributes:
        name: the first signal received, such as SIGUSR1; empty before that.
    """

    def __init__(self) -> None:
        self.name = ""

    @contextmanager
    def listening(self, number: signal.Signals) -> Iterator[None]:
        """Note this signal inside; for the main thread."""
        before = signal.signal(number, self._note)
        # Else the signal fails system calls under torch and MPI.
        signal.siginterrupt(number, False)
        try:
            yield
        finally:
            signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name


class StopVote:
    """Lets the ranks agree on the step after which they stop.

    Collective: every rank makes one, and asks after each step.

    Args:
        group: all ranks, of backend gloo; None in a world of one.
        clock: replaced in tests.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        # The operators of torch.distributed would be observed as part of the training.
        self._backend: Any = None if group is None else group._get_backend(torch.device("cpu"))
        self._num_ranks = 1 if group is None else group.size()
        self._clock = clock
        self._steps_left = 0
        self._window = 1
        self._began_ns = clock()
        self._ballot = torch.zeros(2, dtype=torch.float64)
        self._work: Any = None

    def stops(self, wants_to_stop: bool) -> bool:
        """Return whether all ranks stop after this step; the same answer on every rank.

        A wish is answered about two seconds later, because a vote is waited for only when the next one begins.
        """
        if self._backend is None:
            return wants_to_stop
        self._steps_left -= 1
        if self._steps_left > 0:
            return False
        num_steps, self._window = self._window, 1
        if self._work is not None:
            self._work.wait()
            num_wishes, sum_step_ns = self._ballot.tolist()
            if num_wishes:
                return True
            # All ranks divide the same sum, and so vote after the same step again.
            wanted = _VOTE_INTERVAL_NS / max(sum_step_ns / self._num_ranks, 1.0)
            self._window = min(max(round(wanted), 1), _MOST_STEPS_BETWEEN_VOTES)
        now_ns = self._clock()
        self._ballot = torch.tensor([float(wants_to_stop), (now_ns - self._began_ns) / num_steps], dtype=torch.float64)
        self._began_ns = now_ns
        self._work = self._backend.allreduce([self._ballot])
        self._steps_left = self._window
        return False

    def close(self) -> None:
        """Wait for a vote that is on its way."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def side_group(timeout_s: float) -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks for messages that are not training; None in a world of one.

    Collective: every rank of the default process group calls this.
    """
    if dist.get_world_size() == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(
        backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="hpcpace_side"
    )
    return group
