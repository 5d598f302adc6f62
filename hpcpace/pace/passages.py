"""When this rank passes the pacing point: once in each step, or it does not count."""

from __future__ import annotations

import math
from typing import NamedTuple


class Ticket(NamedTuple):
    """A rank that is blocked, from `Pacer.arrive` to `Pacer.leave`."""

    name: str
    ready_ns: int
    released_ns: int
    thread_ns: int


class Passage(NamedTuple):
    """A rank that has passed the pacing point.

    Attributes:
        ready_ns: when it was ready, of its own clock.
        work_ns: how long it had worked then since it passed in the step before; NaN if it did not pass there.
        own_ns: exit - ready; NaN where it did not pass exactly once.
        delayed_ns: by how much it was delayed.
    """

    ready_ns: int = 0
    work_ns: float = math.nan
    own_ns: float = math.nan
    delayed_ns: int = 0


class Passages:
    """The passages of the step that is running, and what is left of the one before."""

    def __init__(self) -> None:
        self._of_step: list[Passage] = []
        self._last_exit_ns: int | None = None

    def __len__(self) -> int:
        return len(self._of_step)

    def work_ns(self, ready_ns: int) -> float:
        """Return for how long this rank has worked since it passed in the step before; NaN if it did not."""
        return math.nan if self._last_exit_ns is None else ready_ns - self._last_exit_ns

    def add(self, ticket: Ticket, exit_ns: int) -> None:
        """Take a passage that has ended."""
        self._of_step.append(
            Passage(
                ready_ns=ticket.ready_ns,
                work_ns=self.work_ns(ticket.ready_ns),
                own_ns=exit_ns - ticket.ready_ns,
                delayed_ns=ticket.released_ns - ticket.ready_ns,
            )
        )

    def end_step(self) -> Passage:
        """Return the one passage of the step that has ended; an empty one where there were none or several."""
        passage = self._of_step[0] if len(self._of_step) == 1 else None
        self._of_step.clear()
        self._last_exit_ns = None if passage is None else passage.ready_ns + round(passage.own_ns)
        return passage or Passage()
