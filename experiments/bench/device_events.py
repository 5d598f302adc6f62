"""Counts the events that sessions take of a device: marks of phases and steps, and those of operations.

Counting takes longer than making an event, so it belongs to a block of steps that is not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hpcpace.observe.device.clock import MOST_EVENTS, DeviceClock, Event


@dataclass
class EventUse:
    """What was taken while `counted` was open.

    Attributes:
        num_marks: events of phases and steps.
        num_of_operations: events of operations and of waits for them.
        num_refused: events that could not be had.
        most_in_use: events of the pool that were in use at a time.
        anchors_s: how long each anchor took, most of which it waited for the device.
    """

    num_marks: int = 0
    num_of_operations: int = 0
    num_refused: int = 0
    most_in_use: int = 0
    anchors_s: list[float] = field(default_factory=list)

    def words(self, num_steps: int) -> str:
        """Return the events of a step and the use of the pool, in words."""
        return (
            f"events per step: {self.num_marks / num_steps:.1f} of phases and steps, "
            f"{self.num_of_operations / num_steps:.1f} of operations; "
            f"at most {self.most_in_use} of {MOST_EVENTS} in use, {self.num_refused} refused"
        )


@contextmanager
def counted() -> Iterator[EventUse]:
    """Count the events that are taken by this process while the block runs."""
    use, mark, anchor = EventUse(), DeviceClock.mark, DeviceClock.anchor

    def counted_mark(clock: DeviceClock, *, is_reserved: bool = False) -> Event | None:
        event = mark(clock, is_reserved=is_reserved)
        if event is None:
            use.num_refused += 1
        elif is_reserved:
            use.num_of_operations += 1
        else:
            use.num_marks += 1
        use.most_in_use = max(use.most_in_use, MOST_EVENTS - clock._num_unmade - len(clock._free))
        return event

    def timed_anchor(clock: DeviceClock, resolve: Callable[[], None] = lambda: None) -> None:
        begin_s = time.perf_counter()
        anchor(clock, resolve)
        use.anchors_s.append(time.perf_counter() - begin_s)

    DeviceClock.mark, DeviceClock.anchor = counted_mark, timed_anchor
    try:
        yield use
    finally:
        DeviceClock.mark, DeviceClock.anchor = mark, anchor
