"""How the ranks of a session agree on what they share: over MPI where there is a world of it, else over torch."""

from __future__ import annotations

from typing import Any, Protocol

from hpcpace.errors import WorldError
from hpcpace.world.environment import RankInfo
from hpcpace.world.transport import GlooTransport, MpiTransport, Transport


class Coordinator(Protocol):
    """Agreement between all ranks of a job. Collective: every rank calls each method."""

    @property
    def name(self) -> str:
        """What carries the messages: `mpi`, `torch` or `alone`."""

    def allgather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in order of rank."""

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

    def allgather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in order of rank."""
        gathered: list[Any] = self._comm.allgather(value)
        return gathered

    def transport(self) -> Transport | None:
        """Return messages over MPI."""
        return MpiTransport(self._comm)

    def close(self) -> None:
        """Free the duplicate."""
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

    def transport(self) -> Transport | None:
        """Return messages over a further gloo group."""
        return GlooTransport()

    def close(self) -> None:
        """End the group, and with it gloo's threads.

        A thread of gloo that frees a tensor while Python shuts down ends the process with SIGABRT.
        """
        import torch.distributed as dist

        group, self._group = self._group, None
        dist.destroy_process_group(group)


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
