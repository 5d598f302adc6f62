"""When this rank arrives at the pacing point and leaves it: a step counts only if it does so exactly once."""

from __future__ import annotations

import math
from typing import NamedTuple


class Arrival(NamedTuple):
    """A rank that is about to be blocked, from `Pacer.arrive` to `Pacer.leave`.

    Attributes:
        name: of the operation, like `all_reduce 0`.
        ready_ns: when the rank was ready.
        released_ns: when a delay ended; `ready_ns` without one.
        thread_ns: processor time of the thread when it was ready; 0 once the point is chosen.
    """

    name: str
    ready_ns: int
    released_ns: int
    thread_ns: int


class PointTiming(NamedTuple):
    """How long a rank worked and waited at the pacing point in one step.

    Attributes:
        ready_ns: when it was ready, on its own clock.
        work_ns: how long it had worked since it left the point in the step before; NaN if it did not meet it there.
        own_ns: exit - ready; NaN unless it met the point exactly once.
        delayed_ns: by how much it was delayed.
    """

    ready_ns: int = 0
    work_ns: float = math.nan
    own_ns: float = math.nan
    delayed_ns: int = 0


class ArrivalLog:
    """The arrivals in the step that is running, and the exit in the one before."""

    def __init__(self) -> None:
        self._of_step: list[PointTiming] = []
        self._last_exit_ns: int | None = None

    def __len__(self) -> int:
        return len(self._of_step)

    def work_ns(self, ready_ns: int) -> float:
        """Return how long this rank has worked since it left the point in the step before; NaN if it did not."""
        return math.nan if self._last_exit_ns is None else ready_ns - self._last_exit_ns

    def add(self, arrival: Arrival, exit_ns: int) -> None:
        """Take a wait that has ended."""
        self._of_step.append(
            PointTiming(
                ready_ns=arrival.ready_ns,
                work_ns=self.work_ns(arrival.ready_ns),
                own_ns=exit_ns - arrival.ready_ns,
                delayed_ns=arrival.released_ns - arrival.ready_ns,
            )
        )

    def end_step(self) -> PointTiming:
        """Return the timing of the step that has ended; an empty one if there was no wait or several."""
        timing = self._of_step[0] if len(self._of_step) == 1 else None
        self._of_step.clear()
        self._last_exit_ns = None if timing is None else timing.ready_ns + round(timing.own_ns)
        return timing or PointTiming()
