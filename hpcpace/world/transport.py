"""Small fixed-size messages between two ranks, each wait with a timeout, for clock synchronisations.

They use MPI if it connects the ranks, otherwise a gloo group. Both are separate from the job's own messages.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from hpcpace.core.errors import ClockSyncError
from hpcpace.core.text import NS_PER_S
from hpcpace.world.gloo import gloo_group

NUM_VALUES = 6
_FORMAT = struct.Struct(f"={NUM_VALUES}q")
_TAG = 7
_SPIN_NS = 200_000
_MAKE_TIMEOUT_S = 30.0
_PAUSE_S = 20e-6


class Transport(Protocol):
    """Messages of `NUM_VALUES` int64 between two ranks, in order per pair of ranks."""

    def send(self, peer: int, values: tuple[int, ...], timeout_s: float) -> None:
        """Send to a rank.

        Raises:
            ClockSyncError: the message could not be handed over within the timeout.
        """

    def recv(self, peer: int, timeout_s: float) -> tuple[int, ...]:
        """Return the next message of a rank.

        Raises:
            ClockSyncError: none came within the timeout.
        """

    def close(self) -> None:
        """Free all resources."""


class MpiTransport:
    """Messages over a duplicate of an MPI communicator."""

    def __init__(self, comm: Any, timeout_s: float = _MAKE_TIMEOUT_S) -> None:
        """Duplicate the communicator. Collective: every rank of `comm` calls this.

        Raises:
            ClockSyncError: a rank did not answer within the timeout.
        """
        from mpi4py import MPI

        self._mpi_error = MPI.Exception
        self._buffer = bytearray(_FORMAT.size)
        self._abandoned: list[Any] = []
        self._comm, request = comm.Idup()
        self._wait(request, "not every rank took part in opening the transport", timeout_s)

    def send(self, peer: int, values: tuple[int, ...], timeout_s: float) -> None:
        """Send to a rank; see Transport."""
        with self._mapped_errors(peer):
            request = self._comm.Isend(_FORMAT.pack(*values), dest=peer, tag=_TAG)
            self._wait(request, f"rank {peer} took no message", timeout_s)

    def recv(self, peer: int, timeout_s: float) -> tuple[int, ...]:
        """Return the next message of a rank; see Transport."""
        with self._mapped_errors(peer):
            request = self._comm.Irecv(self._buffer, source=peer, tag=_TAG)
            self._wait(request, f"rank {peer} sent no message", timeout_s)
        return _FORMAT.unpack(self._buffer)

    def close(self) -> None:
        """Free the duplicate; after a failure leave it to MPI, because freeing needs all ranks.

        Collective: every rank of `comm` calls this.
        """
        if not self._abandoned:
            self._comm.Free()

    def _wait(self, request: Any, failure: str, timeout_s: float) -> None:
        # MPI's own Wait polls without end. Spinning is exact; after a while the core is given up between polls, so
        # that a rank on the same core can get here at all.
        start_ns = time.monotonic_ns()
        while not request.Test():
            waited_ns = time.monotonic_ns() - start_ns
            if waited_ns > timeout_s * NS_PER_S:
                # MPI may still use the buffer, which lives as long as the request.
                self._abandoned.append(request)
                raise ClockSyncError(f"{failure} within {timeout_s:.3g} s: it is stopped or very late")
            if waited_ns > _SPIN_NS:
                time.sleep(_PAUSE_S)

    @contextmanager
    def _mapped_errors(self, peer: int) -> Iterator[None]:
        try:
            yield
        except self._mpi_error as error:
            raise ClockSyncError(f"MPI could not exchange a message with rank {peer}: {error}") from error


class GlooTransport:
    """Messages over a separate gloo group below torch's dispatcher, so that nothing observes them."""

    def __init__(self, timeout_s: float = _MAKE_TIMEOUT_S, store: Any = None) -> None:
        """Create the group; `store` as of `gloo_group`. Collective: every rank of torch's default group calls this.

        Raises:
            ClockSyncError: a rank did not answer within the timeout.
        """
        import torch

        try:
            self._gloo: Any = gloo_group("clock", timeout_s, store)
        except RuntimeError as error:
            raise ClockSyncError(f"no gloo group within {timeout_s:.3g} s: {error}") from error
        self._out = torch.zeros(NUM_VALUES, dtype=torch.int64)
        self._in = torch.zeros(NUM_VALUES, dtype=torch.int64)
        # A view without a copy: reading an element of a tensor takes microseconds.
        self._out_values, self._in_values = self._out.numpy(), self._in.numpy()

    def send(self, peer: int, values: tuple[int, ...], timeout_s: float) -> None:
        """Send to a rank; see Transport."""
        self._out_values[:] = values
        self._wait(self._gloo.send, self._out, peer, timeout_s)

    def recv(self, peer: int, timeout_s: float) -> tuple[int, ...]:
        """Return the next message of a rank; see Transport."""
        self._wait(self._gloo.recv, self._in, peer, timeout_s)
        return tuple(self._in_values.tolist())

    def close(self) -> None:
        """End the group, and with it gloo's threads, before Python shuts down."""
        self._gloo = None

    def _wait(self, start: Any, tensor: Any, peer: int, timeout_s: float) -> None:
        try:
            # gloo takes 0 for its own default of half an hour.
            start([tensor], peer, _TAG).wait(timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError as error:
            raise ClockSyncError(f"no message with rank {peer} over gloo within {timeout_s:.3g} s: {error}") from error
