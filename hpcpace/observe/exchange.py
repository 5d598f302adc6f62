"""The messages of pacing between all ranks: separate from those of the training, and below torch's dispatcher.

Over torch they use a separate gloo group and gloo's threads; if torch does not connect the ranks, they use MPI. No rank
waits longer than a timeout for another.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcpace.core.errors import WorldError
from hpcpace.pace.exchange import Exchange
from hpcpace.world.gloo import gloo_group

_POLL_INTERVAL_S = 0.0001


class TorchExchange:
    """Over a gloo group of all ranks of torch's default group. Collective: every rank makes one."""

    def __init__(self, timeout_s: float) -> None:
        # The operators of torch.distributed would be observed as part of the training.
        self._backend: Any = gloo_group("pace", timeout_s)
        self._num_ranks = self._backend.size()
        self._pending: tuple[Any, Any] | None = None

    def allgather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in order of rank."""
        import torch

        text = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        length = torch.tensor([-float(len(text))], dtype=torch.float64)
        self.start(length.tolist())
        size = round(-self.finish()[0])
        own = torch.zeros(size, dtype=torch.uint8)
        own[: len(text)] = torch.from_numpy(text.copy())
        parts = [torch.zeros(size, dtype=torch.uint8) for _ in range(self._num_ranks)]
        self._backend.allgather([parts], [own]).wait()
        return [pickle.loads(part.numpy().tobytes()) for part in parts]

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


class MpiExchange:
    """Over a duplicate of an MPI communicator. Collective: every rank makes and closes one."""

    def __init__(self, comm: Any, timeout_s: float) -> None:
        from mpi4py import MPI

        self._min = MPI.MIN
        self._timeout_s = timeout_s
        self._pending: tuple[Any, Any, Any] | None = None
        self._comm, request = comm.Idup()
        self._wait(request)

    def allgather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in order of rank."""
        text = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        self.start([-float(len(text))])
        size = round(-self.finish()[0])
        own = np.zeros(size, dtype=np.uint8)
        own[: len(text)] = text
        parts = np.zeros((self._comm.Get_size(), size), dtype=np.uint8)
        self._wait(self._comm.Iallgather(own, parts))
        return [pickle.loads(part.tobytes()) for part in parts]

    def start(self, values: Sequence[float]) -> None:
        """Start to take the minimum of each value over the ranks."""
        own = np.array(values, dtype=np.float64)
        least = np.empty_like(own)
        self._pending = self._comm.Iallreduce(own, least, op=self._min), own, least

    def finish(self) -> list[float]:
        """Wait for the minimum that was started, up to the timeout, and return it."""
        assert self._pending is not None, "finish follows start"
        (request, _, least), self._pending = self._pending, None
        self._wait(request)
        values: list[float] = least.tolist()
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
