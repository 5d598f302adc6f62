"""How the ranks of a session agree on shared facts: over MPI if the job has an MPI communicator, else over torch.

First every rank confirms that it takes part (`roll_call`); every exchange after that has a timeout.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any, Protocol

import numpy as np

from hpcpace.core.environment import RankInfo
from hpcpace.core.errors import WorldError
from hpcpace.observe.roll_call import Attendance, call_over_mpi, call_over_store
from hpcpace.world.deadline import Deadline
from hpcpace.world.gloo import gloo_group
from hpcpace.world.mpi_start import may_call_mpi
from hpcpace.world.transport import GlooTransport, MpiTransport, Transport

_POLL_INTERVAL_S = 0.001


class Coordinator(Protocol):
    """Agreement between all ranks of a job. Collective: every rank calls each method."""

    @property
    def name(self) -> str:
        """What carries the messages: `mpi`, `torch` or `alone`."""

    def allgather(self, value: Any, timeout_s: float) -> list[Any]:
        """Return the value of every rank, in order of rank; values are those of JSON.

        Raises:
            WorldError: a rank did not answer in time.
        """

    def meet(self, timeout_s: float) -> None:
        """Wait until every rank has called this; after it, only `close` may be called.

        Raises:
            WorldError: a rank did not answer in time.
        """

    def transport(self, timeout_s: float) -> Transport | None:
        """Return a new transport for clock synchronisations; None in a world of one.

        Raises:
            ClockSyncError: a rank did not answer in time.
        """

    def close(self) -> None:
        """Free all resources."""


class SingleCoordinator:
    """In a world of one."""

    name = "alone"

    def allgather(self, value: Any, timeout_s: float) -> list[Any]:
        """Return the only value."""
        return [value]

    def meet(self, timeout_s: float) -> None:
        """Return at once."""

    def transport(self, timeout_s: float) -> Transport | None:
        """Return None: there is no other rank."""
        return None

    def close(self) -> None:
        """Do nothing."""


class MpiCoordinator:
    """Over a duplicate of an MPI communicator, so that our messages never mix with those of the job."""

    name = "mpi"

    def __init__(self, comm: Any, timeout_s: float) -> None:
        """Duplicate the communicator. Collective: every rank of `comm` calls this.

        Raises:
            WorldError: a rank did not answer in time.
        """
        self._abandoned: list[Any] = []
        self._comm, request = comm.Idup()
        self._wait(request, Deadline(timeout_s))

    def allgather(self, value: Any, timeout_s: float) -> list[Any]:
        """Return the value of every rank, in order of rank."""
        deadline = Deadline(timeout_s)
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = np.zeros(self._comm.Get_size(), np.int64)
        self._wait(self._comm.Iallgather(np.array([len(text)]), sizes), deadline)
        texts = np.zeros(int(sizes.sum()), np.uint8)
        ends = np.cumsum(sizes)
        self._wait(self._comm.Iallgatherv(text, [texts, sizes, ends - sizes, _mpi_byte()]), deadline)
        parts = zip((ends - sizes).tolist(), ends.tolist(), strict=True)
        return [json.loads(texts[begin:end].tobytes()) for begin, end in parts]

    def meet(self, timeout_s: float) -> None:
        """Wait until every rank has called this; see Coordinator."""
        self._wait(self._comm.Ibarrier(), Deadline(timeout_s))

    def transport(self, timeout_s: float) -> Transport | None:
        """Return messages over MPI."""
        return MpiTransport(self._comm, timeout_s)

    def close(self) -> None:
        """Free the duplicate; if a rank did not come, leave it to MPI, because freeing needs all ranks."""
        if not self._abandoned:
            self._comm.Free()

    def _wait(self, request: Any, deadline: Deadline) -> None:
        # MPI's own calls wait for ever for a rank that has died.
        while not request.Test():
            if deadline.is_over:
                self._abandoned.append(request)  # MPI cannot take a collective back
                raise _not_all_came(deadline.timeout_s)
            time.sleep(_POLL_INTERVAL_S)


class TorchCoordinator:
    """Over a separate gloo group with all ranks of torch's default group, which must exist already."""

    name = "torch"

    def __init__(self, timeout_s: float, store: Any) -> None:
        """Make the group through a connection to torch's store. Collective: every rank calls this.

        Raises:
            WorldError: a rank did not answer in time.
        """
        self._store = store
        try:
            self._gloo: Any = gloo_group("session", timeout_s, store)
        except RuntimeError as error:
            raise _not_all_came(timeout_s) from error

    def allgather(self, value: Any, timeout_s: float) -> list[Any]:
        """Return the value of every rank, in order of rank."""
        import torch

        deadline = Deadline(timeout_s)
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = [int(size[0]) for size in self._gathered(torch.tensor([len(text)]), deadline)]
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(text)] = torch.from_numpy(text.copy())
        parts = self._gathered(own, deadline)
        return [json.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def _gathered(self, own: Any, deadline: Deadline) -> list[Any]:
        import torch
        from torch._C._distributed_c10d import AllgatherOptions

        options = AllgatherOptions()
        options.timeout = timedelta(seconds=deadline.left_s)
        parts = [torch.zeros_like(own) for _ in range(self._gloo.size())]
        try:
            self._gloo.allgather([parts], [own], options).wait()
        except RuntimeError as error:
            raise _not_all_came(deadline.timeout_s) from error
        return parts

    def meet(self, timeout_s: float) -> None:
        """Wait until every rank has called this; see Coordinator."""
        import torch.distributed as dist

        options = dist.BarrierOptions()
        options.timeout = timedelta(seconds=timeout_s)
        try:
            # torch's monitored_barrier keeps the time on rank 0 only: a rank that came after rank 0 had gone hung.
            self._gloo.barrier(options).wait()
        except RuntimeError as error:
            raise _not_all_came(timeout_s) from error

    def transport(self, timeout_s: float) -> Transport | None:
        """Return messages over a further gloo group."""
        return GlooTransport(timeout_s, self._store)

    def close(self) -> None:
        """End the group, and with it gloo's threads.

        A thread of gloo that frees a tensor while Python shuts down ends the process with SIGABRT.
        """
        self._gloo = self._store = None


def _mpi_byte() -> Any:
    from mpi4py import MPI

    return MPI.BYTE


def _not_all_came(timeout_s: float) -> WorldError:
    return WorldError(f"not every rank came within {timeout_s:.3g} s: one has died or is very late")


def coordinate(world: RankInfo | None, comm: Any, attendance: Attendance, *, timeout_s: float) -> Coordinator:
    """Return the coordinator of this job's ranks. Every rank calls this, even one that cannot take part.

    Args:
        world: this rank's place; None if its environment does not give it.
        comm: an MPI communicator of all ranks, or None.
        attendance: whether this rank can take part, and its settings.
        timeout_s: how long it waits for the others to come, and again to make the connection.

    Raises:
        NotEveryRank: a rank cannot take part, or did not come.
        WorldError: there are several ranks and neither MPI nor torch connects them yet.
    """
    if comm is not None and comm.Get_size() > 1:
        if not may_call_mpi(comm):
            told = "MPI was started below THREAD_MULTIPLE, and in another thread than this one"
            raise WorldError(f"{told}: enter the session in that thread, or leave comm out")
        call_over_mpi(comm, attendance, timeout_s)
        return MpiCoordinator(comm, timeout_s)
    if world is not None and world.world_size == 1:
        return SingleCoordinator()
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() > 1:
        if world is not None and dist.get_world_size() != world.world_size:
            told = f"{world.launcher} started {world.world_size} ranks, and torch connects {dist.get_world_size()}"
            attendance = Attendance(problem=attendance.problem or told, settings=attendance.settings)
        store = call_over_store(dist.get_rank(), dist.get_world_size(), attendance, timeout_s)
        return TorchCoordinator(timeout_s, store)
    if world is None:
        raise WorldError("this rank's place in the job is unknown, and neither MPI nor torch connects it to others")
    raise WorldError(
        f"{world.world_size} ranks started by {world.launcher} are not connected yet: enter the session after "
        "torch.distributed.init_process_group, or pass an MPI communicator as comm"
    )
