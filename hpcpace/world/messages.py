"""Messages between all ranks of a job apart from its own: over a duplicate of an MPI communicator, or over gloo.

Nothing observes them, and every wait has an end. Groups of gloo are made without `torch.distributed.new_group`, which
counts the groups of a process, so that all ranks must call it equally often, and which waits for the other ranks
without a timeout.
"""

from __future__ import annotations

import json
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.compat import c10d, default_store
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import ClockSyncError, WorldError
from hpcpace.world.deadline import Deadline
from hpcpace.world.mpi import calls_from_any_thread

NUM_VALUES = 7
"""Integers in a message between two ranks."""
_FORMAT = struct.Struct(f"={NUM_VALUES}q")
_TAG = 7
# A message that takes longer comes from a rank that is late, or needs this core to come at all.
_SPIN_S = 200e-6
# A pause is a tenth of the wait so far, between these: exact for what comes soon, cheap for what does not.
_MIN_PAUSE_S, _MAX_PAUSE_S = 20e-6, 1e-3


class Messages(ABC):
    """Messages of one purpose between all ranks, which never mix with others; those between two ranks are in order.

    Collective, but for `send` and `recv`: every rank of the job calls each method equally often.

    Attributes:
        name: what carries them: `mpi` or `torch`.
        works_in_any_thread: whether another thread than the one that made them may send and receive.
    """

    name: str
    works_in_any_thread = True

    @abstractmethod
    def another(self, purpose: str, timeout_s: float) -> Messages:
        """Return messages of another purpose.

        Raises:
            WorldError: a rank did not answer in time.
        """

    def allgather(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Return the value of every rank, in order of rank; values are those of JSON.

        Args:
            value: of this rank.
            timeout_s: how long all may take; by default as for making the messages.

        Raises:
            WorldError: a rank did not answer in time.
        """
        deadline = Deadline(self._timeout_s if timeout_s is None else timeout_s)
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = np.ravel(self._gathered(np.array([len(text)]), deadline))
        own = np.zeros(sizes.max(), np.uint8)
        own[: len(text)] = text
        texts = self._gathered(own, deadline)
        return [json.loads(row[:size].tobytes()) for row, size in zip(texts, sizes, strict=True)]

    @abstractmethod
    def meet(self, timeout_s: float) -> None:
        """Wait until every rank has called this; after it, only `close` may be called.

        Raises:
            WorldError: a rank did not answer in time.
        """

    @abstractmethod
    def send(self, peer: int, values: tuple[int, ...], timeout_s: float) -> None:
        """Send `NUM_VALUES` int64 to a rank.

        Raises:
            ClockSyncError: the message could not be handed over within the timeout.
        """

    @abstractmethod
    def recv(self, peer: int, timeout_s: float) -> tuple[int, ...]:
        """Return the next message of a rank.

        Raises:
            ClockSyncError: none came within the timeout.
        """

    @abstractmethod
    def minimum(self, values: Sequence[float]) -> list[float]:
        """Return the minimum of each value over the ranks, within the timeout for making the messages.

        Raises:
            RuntimeError, WorldError: a rank did not answer in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all resources."""

    _timeout_s = 0.0

    @abstractmethod
    def _gathered(self, own: NDArray[Any], deadline: Deadline) -> Sequence[NDArray[Any]]:
        """Return arrays of equal length of all ranks."""


class NoMessages:
    """Takes the place of messages in a world of one."""

    name = "alone"

    def another(self, purpose: str, timeout_s: float) -> None:
        """Return None: there is no other rank."""

    def allgather(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Return the only value."""
        return [value]

    def meet(self, timeout_s: float) -> None:
        """Return at once."""

    def close(self) -> None:
        """Do nothing."""


class MpiMessages(Messages):
    """Over a duplicate of an MPI communicator; see Messages."""

    name = "mpi"

    def __init__(self, comm: Any, timeout_s: float) -> None:
        """Duplicate the communicator. Collective: every rank of `comm` calls this.

        Raises:
            WorldError: a rank did not answer in time.
        """
        from mpi4py import MPI

        self._mpi, self._timeout_s = MPI, timeout_s
        self.works_in_any_thread = calls_from_any_thread(comm)
        self._buffer = bytearray(_FORMAT.size)
        self._abandoned: list[Any] = []
        self._comm, request = comm.Idup()
        self._wait(request, timeout_s)

    def another(self, purpose: str, timeout_s: float) -> MpiMessages:
        """Return messages over a further duplicate."""
        return MpiMessages(self._comm, timeout_s)

    def meet(self, timeout_s: float) -> None:
        """Wait until every rank has called this; see Messages."""
        self._wait(self._comm.Ibarrier(), timeout_s)

    def send(self, peer: int, values: tuple[int, ...], timeout_s: float) -> None:
        """Send to a rank; see Messages."""
        with self._mapped_errors(peer):
            request = self._comm.Isend(_FORMAT.pack(*values), dest=peer, tag=_TAG)
            self._wait(request, timeout_s, f"rank {peer} took no message")

    def recv(self, peer: int, timeout_s: float) -> tuple[int, ...]:
        """Return the next message of a rank; see Messages."""
        with self._mapped_errors(peer):
            request = self._comm.Irecv(self._buffer, source=peer, tag=_TAG)
            self._wait(request, timeout_s, f"rank {peer} sent no message")
        return _FORMAT.unpack(self._buffer)

    def minimum(self, values: Sequence[float]) -> list[float]:
        """Return the minimum of each value over the ranks; see Messages."""
        own = np.array(values, dtype=np.float64)
        least = np.empty_like(own)
        self._wait(self._comm.Iallreduce(own, least, op=self._mpi.MIN), self._timeout_s)
        found: list[float] = least.tolist()
        return found

    def close(self) -> None:
        """Free the duplicate; if a rank did not come, leave it to MPI, because freeing needs all ranks."""
        if not self._abandoned:
            self._comm.Free()

    def _gathered(self, own: NDArray[Any], deadline: Deadline) -> Sequence[NDArray[Any]]:
        arrays = np.empty((self._comm.Get_size(), len(own)), own.dtype)
        self._wait(self._comm.Iallgather(own, arrays), deadline.left_s)
        return list(arrays)

    def _wait(self, request: Any, timeout_s: float, laggard: str = "") -> None:
        # MPI's own Wait polls without end, also for a rank that has died. Spinning is exact; after a while the core is
        # given up between polls, so that a rank on the same core can get here at all.
        begin_s = time.monotonic()
        while not request.Test():
            waited_s = time.monotonic() - begin_s
            if waited_s > timeout_s:
                self._abandoned.append(request)  # MPI may still use its buffers, which live as long as the request
                if laggard:
                    raise ClockSyncError(f"{laggard} within {timeout_s:.3g} s: it is stopped or very late")
                raise _not_all_came(timeout_s)
            if waited_s > _SPIN_S:
                time.sleep(min(max(waited_s / 10, _MIN_PAUSE_S), _MAX_PAUSE_S))

    @contextmanager
    def _mapped_errors(self, peer: int) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise ClockSyncError(f"MPI could not exchange a message with rank {peer}: {error}") from error


class GlooMessages(Messages):
    """Over a gloo group with all ranks of torch's default group, below torch's dispatcher; see Messages."""

    name = "torch"

    def __init__(self, purpose: str, timeout_s: float, store: Any = None) -> None:
        """Make the group. Collective: every rank of torch's default group calls this equally often for each purpose.

        Args:
            purpose: names the group; it may be used again.
            timeout_s: limit on making the group, and on its operations by default.
            store: as `own_store` returns it, if the caller has a connection of our own. For each connection torch's
                server looks up a name, one after another: with a slow DNS that takes seconds.

        Raises:
            WorldError: a rank did not answer in time.
        """
        import torch

        self._store, self._timeout_s = store, timeout_s
        try:
            self._gloo: Any = _gloo_group(purpose, timeout_s, store)
        except RuntimeError as error:
            raise _not_all_came(timeout_s) from error
        self._out, self._in = torch.zeros(2, NUM_VALUES, dtype=torch.int64)
        # Views without a copy: reading an element of a tensor takes microseconds.
        self._out_values, self._in_values = self._out.numpy(), self._in.numpy()

    def another(self, purpose: str, timeout_s: float) -> GlooMessages:
        """Return messages over a further group."""
        return GlooMessages(purpose, timeout_s, self._store)

    def meet(self, timeout_s: float) -> None:
        """Wait until every rank has called this; see Messages."""
        # torch's monitored_barrier keeps the time on rank 0 only: a rank that came after rank 0 had gone hung.
        options = c10d().BarrierOptions()
        options.timeout = timedelta(seconds=timeout_s)
        with _all_come_in(timeout_s):
            self._gloo.barrier(options).wait()

    def send(self, peer: int, values: tuple[int, ...], timeout_s: float) -> None:
        """Send to a rank; see Messages."""
        self._out_values[:] = values
        self._exchange(self._gloo.send, self._out, peer, timeout_s)

    def recv(self, peer: int, timeout_s: float) -> tuple[int, ...]:
        """Return the next message of a rank; see Messages."""
        self._exchange(self._gloo.recv, self._in, peer, timeout_s)
        return tuple(self._in_values.tolist())

    def minimum(self, values: Sequence[float]) -> list[float]:
        """Return the minimum of each value over the ranks; see Messages."""
        import torch

        options = c10d().AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.MIN
        tensor = torch.tensor(list(values), dtype=torch.float64)
        self._gloo.allreduce([tensor], options).wait()
        found: list[float] = tensor.tolist()
        return found

    def close(self) -> None:
        """End the group, and with it gloo's threads.

        A thread of gloo that frees a tensor while Python shuts down ends the process with SIGABRT.
        """
        self._gloo = self._store = None

    def _gathered(self, own: NDArray[Any], deadline: Deadline) -> Sequence[NDArray[Any]]:
        import torch

        options, tensor = c10d().AllgatherOptions(), torch.from_numpy(own)
        options.timeout = timedelta(seconds=deadline.left_s)
        parts = [torch.zeros_like(tensor) for _ in range(self._gloo.size())]
        with _all_come_in(deadline.timeout_s):
            self._gloo.allgather([parts], [tensor], options).wait()
        return [part.numpy() for part in parts]

    def _exchange(self, begin: Any, tensor: Any, peer: int, timeout_s: float) -> None:
        try:
            # gloo takes 0 for its own default of half an hour.
            begin([tensor], peer, _TAG).wait(timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError as error:
            # gloo says whether the time ran out, or the other rank has left.
            raise ClockSyncError(f"no message with rank {peer} over gloo: {error}") from error


@contextmanager
def _all_come_in(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _not_all_came(timeout_s) from error


def _not_all_came(timeout_s: float) -> WorldError:
    return WorldError(f"not every rank came within {timeout_s:.3g} s: one has died or is very late")


def _gloo_group(purpose: str, timeout_s: float, store: Any) -> Any:
    import torch.distributed as dist

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store, _ = own_store(timeout_s)
    else:
        store.set_timeout(timeout)
    number = store.add(f"{purpose}/made/{rank}", 1)
    numbered = dist.PrefixStore(f"{purpose}/{number}", store)
    return c10d().ProcessGroupGloo(numbered, rank, num_ranks, timeout=timeout)


def own_store(timeout_s: float) -> tuple[Any, bool]:
    """Return the store of torch's default group with a prefix of ours, and whether the connection is ours as well.

    If two threads share a connection, one waits for the other, and the timeout belongs to the connection.

    Raises:
        RuntimeError: the store does not answer.
    """
    import torch.distributed as dist

    store, timeout = default_store(), timedelta(seconds=timeout_s)
    if hasattr(store, "clone"):
        store = store.clone()
        store.set_timeout(timeout)
        return dist.PrefixStore("hpcpace", store), True
    # torch before 2.13 cannot copy a store.
    base = store
    while hasattr(base, "underlying_store"):
        base = base.underlying_store
    if not isinstance(base, dist.TCPStore):
        return dist.PrefixStore("hpcpace", store), False
    own = dist.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False, timeout=timeout)
    # The agent of torchrun keeps its store over restarts of the ranks.
    return dist.PrefixStore(f"hpcpace/{process_environ().get('TORCHELASTIC_RESTART_COUNT', '')}", own), True
