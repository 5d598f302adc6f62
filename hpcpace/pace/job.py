"""Pacing as part of a job: its messages between the ranks, and its result in trial.json.

The messages are separate from those of the training, and below torch's dispatcher. Over torch they use a separate gloo
group and gloo's threads; if torch does not connect the ranks, they use MPI. No rank waits longer than a timeout for
another.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.config import PaceSettings
from hpcpace.core.environment import RankInfo
from hpcpace.core.errors import WorldError
from hpcpace.core.rundir import Attempt
from hpcpace.pace.choice import RankProfile, core_names
from hpcpace.pace.pacer import Pacer
from hpcpace.pace.record import PacingRecord
from hpcpace.pace.rounds import Exchange, PacingTrace
from hpcpace.world.gloo import gloo_group

# Short against a window of steps, in which an exchange has to complete, and long against a call of MPI.
_POLL_INTERVAL_S = 0.0001


def open_pacing(
    settings: PaceSettings,
    *,
    comm: Any,
    world: RankInfo,
    host_key: str,
    attempt: Attempt,
    first_step: int,
    warn: Callable[[str], None],
) -> Callable[[PacingTrace], JobPacer]:
    """Connect the ranks, and return what makes the pacer of this rank. Collective: every rank of the job calls this.

    Args:
        settings: how; the policy is not `none`.
        comm: an MPI communicator of all ranks, or None.
        world: this rank's place.
        host_key: equal on ranks of one host.
        attempt: the folder that takes trial.json.
        first_step: the first step after the warm-up.
        warn: takes a warning.
    """
    exchange = open_exchange(comm, world.world_size, settings.timeout_s)
    profile = RankProfile(host_key=host_key, cores=core_names(sorted(os.sched_getaffinity(0))))
    return partial(
        JobPacer,
        settings,
        attempt,
        rank=world.rank,
        exchange=exchange,
        profile=profile,
        first_step=first_step,
        warn=warn,
    )


class JobPacer(Pacer):
    """Paces one rank of a job; see Pacer."""

    def __init__(self, settings: PaceSettings, attempt: Attempt, trace: PacingTrace, **facts: Any) -> None:
        super().__init__(settings, trace=trace, **facts)
        self._attempt = attempt

    def close(self, *, in_order: bool) -> PacingRecord:
        """End pacing; rank 0 prints the result and writes trial.json. Collective if `in_order`."""
        record = super().close(in_order=in_order)
        if self._rank == 0:
            print(f"hpcpace: {record.sentence()}", file=sys.stderr, flush=True)
            try:
                self._attempt.write_json(self._attempt.trial_json, record.to_json())
            except OSError as error:
                self._warn(f"cannot write {self._attempt.trial_json}: {error.strerror}")
        return record


def open_exchange(comm: Any, num_ranks: int, timeout_s: float) -> Exchange | None:
    """Return the exchange of pacing; None in a world of one. Collective: every rank of the job calls this.

    Args:
        comm: an MPI communicator of all ranks, or None.
        num_ranks: ranks of the job.
        timeout_s: time after which an exchange fails.
    """
    if num_ranks == 1:
        return None
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() == num_ranks:
        return TorchExchange(timeout_s)
    return MpiExchange(comm, timeout_s)


class _JobExchange(Exchange):
    """Gathers objects by means of the minimum that a subclass takes."""

    def allgather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in order of rank."""
        text = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        self.start([-float(len(text))])
        own = np.zeros(round(-self.finish()[0]), dtype=np.uint8)
        own[: len(text)] = text
        return [pickle.loads(part.tobytes()) for part in self._gathered(own)]

    @abstractmethod
    def _gathered(self, own: NDArray[np.uint8]) -> Sequence[NDArray[np.uint8]]: ...


class TorchExchange(_JobExchange):
    """Over a gloo group of all ranks of torch's default group. Collective: every rank makes one."""

    def __init__(self, timeout_s: float) -> None:
        # The operators of torch.distributed would be observed as part of the training.
        self._backend: Any = gloo_group("pace", timeout_s)
        self._pending: tuple[Any, Any] | None = None

    def _gathered(self, own: NDArray[np.uint8]) -> Sequence[NDArray[np.uint8]]:
        import torch

        parts = [torch.zeros(len(own), dtype=torch.uint8) for _ in range(self._backend.size())]
        self._backend.allgather([parts], [torch.from_numpy(own)]).wait()
        return [part.numpy() for part in parts]

    def start(self, values: Sequence[float]) -> None:
        """Start to take the minimum of each value over the ranks."""
        import torch
        import torch.distributed as dist

        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        tensor = torch.tensor(list(values), dtype=torch.float64)
        self._pending = self._backend.allreduce([tensor], options), tensor

    def finish(self) -> list[float]:
        """Wait for the minimum that was started, up to the timeout, and return it."""
        assert self._pending is not None, "finish follows start"
        (work, tensor), self._pending = self._pending, None
        work.wait()
        values: list[float] = tensor.tolist()
        return values

    def close(self) -> None:
        """End the group, and with it gloo's threads; see TorchCoordinator.close."""
        self._backend = None


class MpiExchange(_JobExchange):
    """Over a duplicate of an MPI communicator. Collective: every rank makes and closes one."""

    def __init__(self, comm: Any, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pending: tuple[Any, Any, Any] | None = None
        self._comm, request = comm.Idup()
        self._wait(request)

    def _gathered(self, own: NDArray[np.uint8]) -> Sequence[NDArray[np.uint8]]:
        parts = np.zeros((self._comm.Get_size(), len(own)), dtype=np.uint8)
        self._wait(self._comm.Iallgather(own, parts))
        return list(parts)

    def start(self, values: Sequence[float]) -> None:
        """Start to take the minimum of each value over the ranks."""
        from mpi4py import MPI

        own = np.array(values, dtype=np.float64)
        minimum = np.empty_like(own)
        self._pending = self._comm.Iallreduce(own, minimum, op=MPI.MIN), own, minimum

    def finish(self) -> list[float]:
        """Wait for the minimum that was started, up to the timeout, and return it."""
        assert self._pending is not None, "finish follows start"
        (request, _, minimum), self._pending = self._pending, None
        self._wait(request)
        values: list[float] = minimum.tolist()
        return values

    def close(self) -> None:
        """Free the communicator."""
        self._comm.Free()

    def _wait(self, request: Any) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while not request.Test():
            if time.monotonic() > deadline_s:
                raise WorldError(f"not every rank came within {self._timeout_s:g} s: one has died or is very late")
            time.sleep(_POLL_INTERVAL_S)
