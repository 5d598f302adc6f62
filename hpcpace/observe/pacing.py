"""The hooks by which a session is paced: before a wait, after it, and between two steps.

Observation knows no policy. Whoever starts a session hands in what opens the pacer; `hpcpace.session` hands in that of
`hpcpace.pace`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from hpcpace.core.environment import RankInfo
from hpcpace.core.rundir import Attempt
from hpcpace.trace.schema import StepFlag

if TYPE_CHECKING:
    from hpcpace.observe.recording import Recording

Arrival = Any
"""Stands for one wait, from `arrive` to `leave`: the pacer's own note, or None where the wait does not matter to it."""


class Pacer(Protocol):
    """Delays one rank. No method raises, but `close`."""

    def start(self) -> None:
        """Start, just before the first step."""

    def arrive(self, kind: str, *, on_device: bool = False) -> Arrival:
        """Delay this rank if that is wanted, just before it is blocked.

        Args:
            kind: of operation, like `all_reduce`.
            on_device: whether only a GPU waits, and not the host.
        """

    def leave(self, arrival: Arrival, ranks: tuple[int, ...], size_bytes: int = 0) -> None:
        """Note that the rank is released.

        Args:
            arrival: what `arrive` returned.
            ranks: global ranks of those who met here; empty if unknown.
            size_bytes: of the message.
        """

    def begin_step(self) -> StepFlag:
        """Do what is due at the start of a step; return its flags."""

    def end_step(self, step: int, duration_ns: int, flags: int) -> None:
        """Take a step that has ended, between it and the next. Collective at times that all ranks know."""

    def close(self, *, in_order: bool) -> object:
        """End, and save the result. Collective if `in_order`."""


class OpenPacing(Protocol):
    """Connects the ranks for pacing, and returns what makes the pacer of this rank. Collective: every rank calls it."""

    def __call__(
        self,
        settings: Any,
        *,
        comm: Any,
        world: RankInfo,
        host_key: str,
        attempt: Attempt,
        first_step: int,
        warn: Callable[[str], None],
    ) -> Callable[[Recording], Pacer]:
        """Open pacing.

        Args:
            settings: section `[pace]` of the configuration.
            comm: an MPI communicator of all ranks, or None.
            world: this rank's place.
            host_key: equal on ranks of one host.
            attempt: the folder of this attempt.
            first_step: the first step after the warm-up.
            warn: takes a warning.
        """
