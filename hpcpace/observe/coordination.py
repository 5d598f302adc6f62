"""How the ranks of a session agree on what they share: over MPI where there is a world of it, else over torch."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Protocol

from hpcpace.errors import WorldError
from hpcpace.world.environment import RankInfo
from hpcpace.world.transport import GlooTransport, MpiTransport, Transport

_POLL_INTERVAL_S = 0.001


class Coordinator(Protocol):
    """Agreement between all ranks of a job. Collective: every rank calls each method."""

    @property
    def name(self) -> str:
        """What carries the messages: `mpi`, `torch` or `alone`."""

    def allgather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in order of rank."""

    def meet(self, timeout_s: float) -> None:
        """Wait until every rank is here; afterwards only `close` may be called.

        Raises:
            WorldError: not every rank came in time.
        """

    def transport(self) -> Transport | None:
        """Return a new way for the messages of clock synchronisations, None in a world of one."""

    def close(self) -> None:
        """Free what was opened."""


class Alone:
    """A world of one."""

    name = "alone"

    def allgather(self, value: Any) -> list[Any]:
        """Return the only value."""
        return [value]

    def meet(self, timeout_s: float) -> None:
        """Return at once."""

    def transport(self) -> Transport | None:
        """Return nothing, since there is nobody to talk to."""
        return None

    def close(self) -> None:
        """Do nothing."""


class OverMpi:
    """A duplicate of an MPI communicator, so that our messages never meet those of the job."""

    name = "mpi"

    def __init__(self, comm: Any) -> None:
        self._comm = comm.Dup()
        self._abandoned: Any = None

    def allgather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in order of rank."""
        gathered: list[Any] = self._comm.allgather(value)
        return gathered

    def meet(self, timeout_s: float) -> None:
        """Wait until every rank is here; see Coordinator."""
        # MPI's own Barrier waits for ever for a rank that has died.
        request = self._comm.Ibarrier()
        deadline_s = time.monotonic() + timeout_s
        while not request.Test():
            if time.monotonic() > deadline_s:
                # MPI cannot take a collective back.
                self._abandoned = request
                raise _not_all_came(timeout_s)
            time.sleep(_POLL_INTERVAL_S)

    def transport(self) -> Transport | None:
        """Return messages over MPI."""
        return MpiTransport(self._comm)

    def close(self) -> None:
        """Free the duplicate; where a rank did not come to meet it is left to MPI, because freeing needs all ranks."""
        if self._abandoned is None:
            self._comm.Free()


class OverTorch:
    """A gloo group of its own over all ranks of torch's default group, which must exist already."""

    name = "torch"

    def __init__(self) -> None:
        import torch.distributed as dist

        self._group: Any = dist.new_group(backend="gloo", group_desc="hpcpace")

    def allgather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in order of rank."""
        import torch.distributed as dist

        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def meet(self, timeout_s: float) -> None:
        """Wait until every rank is here; see Coordinator."""
        import torch.distributed as dist

        options = dist.BarrierOptions()
        options.timeout = timedelta(seconds=timeout_s)
        try:
            # torch's monitored_barrier keeps the time on rank 0 only: a rank that came after rank 0 had gone hung.
            self._group.barrier(options).wait()
        except RuntimeError as error:
            raise _not_all_came(timeout_s) from error

    def transport(self) -> Transport | None:
        """Return messages over a further gloo group."""
        return GlooTransport()

    def close(self) -> None:
        """End the group, and with it gloo's threads.

        A thread of gloo that frees a tensor while Python shuts down ends the process with SIGABRT.
        """
        import torch.distributed as dist

        group, self._group = self._group, None
        if dist.is_initialized():
            dist.destroy_process_group(group)


def _not_all_came(timeout_s: float) -> WorldError:
    return WorldError(f"not every rank came within {timeout_s:g} s: one has died, or is very late")


def coordinate(world: RankInfo, comm: Any) -> Coordinator:
    """Return the way in which the ranks of this job agree. Collective: every rank calls this.

    Raises:
        WorldError: there are several ranks and neither MPI nor torch connects them yet.
    """
    if comm is not None and comm.Get_size() > 1:
        return OverMpi(comm)
    if world.world_size == 1:
        return Alone()
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() == world.world_size:
        return OverTorch()
    raise WorldError(
        f"{world.world_size} ranks started by {world.launcher} are not connected yet: enter the session after "
        "torch.distributed.init_process_group, or pass an MPI communicator as comm"
    )
