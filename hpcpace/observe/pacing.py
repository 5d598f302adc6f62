"""The hooks by which a session is paced: before a wait, after it, and between two steps.

Observation knows no policy. Whoever starts a session hands in what opens the pacer; `hpcpace.session` hands in that of
`hpcpace.pace`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hpcpace.trace.schema import StepFlag

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


OpenPacing = Callable[..., Callable[[Any], Pacer]]
"""Connects the ranks for pacing, and returns what makes the pacer of this rank for its recording; see `open_pacing` of
`hpcpace.pace.job`. Collective: every rank calls it."""
