"""What pacing needs to send between ranks; `hpcpace.observe.exchange` does it over torch or MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Exchange(Protocol):
    """Messages between all ranks, apart from those of the training. Collective: every rank calls each method."""

    def allgather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in order of rank.

        Raises:
            RuntimeError: a rank did not answer in time.
        """

    def start(self, values: Sequence[float]) -> None:
        """Start to take the minimum of each value over the ranks."""

    def finish(self) -> list[float]:
        """Wait for the minimum that was started, up to a timeout, and return it.

        Raises:
            RuntimeError: a rank did not answer in time.
        """

    def close(self) -> None:
        """Free all resources."""
