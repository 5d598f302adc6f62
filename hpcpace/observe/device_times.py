"""Start and end of collectives on the GPU, from CUDA events that are read later, without synchronising a step.

The start of an operation is the point in the caller's stream at which it was issued; it ends where its work's future
is complete on the device. Events are mapped to CLOCK_MONOTONIC over an anchor event whose host time is known.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from hpcpace.trace.schema import ExitKind

Row = tuple[int, ...]
_ENTER, _EXIT, _KIND = 6, 7, 9


class Event(Protocol):
    """What is used of torch.cuda.Event."""

    def record(self) -> None:
        """Mark the current point of the current stream."""

    def query(self) -> bool:
        """Return whether the device has passed the mark."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds between two passed marks."""

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""


class DeviceTimes:
    """Follows operations on one device, in the order of their issue.

    Not measured on a GPU yet.

    Args:
        new_event: makes a timing event, on GPUs `lambda: torch.cuda.Event(enable_timing=True)`.
        clock: host clock in nanoseconds.
    """

    def __init__(self, new_event: Callable[[], Event], *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._new_event = new_event
        self._clock = clock
        self._pending: deque[tuple[Row, Event, Event, int]] = deque()
        self._anchor: Event | None = None
        self._anchor_ns = 0

    def anchor(self, add: Callable[..., None]) -> None:
        """Tie device time to host time again; waits for the device, so call it between steps only.

        CUDA returns elapsed times as float32 milliseconds: 30 s after an anchor their grain is 2 us. Operations
        that are complete by then are recorded over the former anchor.
        """
        event = self._new_event()
        event.record()
        event.synchronize()
        now_ns = self._clock()
        self.resolve(add)
        self._anchor, self._anchor_ns = event, now_ns

    @property
    def has_pending(self) -> bool:
        """Whether an operation is not known to be complete."""
        return bool(self._pending)

    def mark(self) -> Event:
        """Return an event at the current point of the caller's stream."""
        event = self._new_event()
        event.record()
        return event

    def follow(self, row: Row, begin: Event, work: Any) -> None:
        """Note when the device completes `work`; its row is recorded by a later `resolve`.

        The future of an NCCL work counts as complete once it is enqueued: its callback runs at once, on a stream
        that waits for the operation, which is where the end event belongs.
        """
        end = self._new_event()

        def enqueued(_: Any) -> None:
            end.record()

        work.get_future().then(enqueued)
        self._pending.append((row, begin, end, row[_ENTER]))

    def resolve(self, add: Callable[..., None]) -> None:
        """Pass the rows of all operations that the device has completed to `add`, oldest first."""
        while self._anchor is not None and self._pending and self._pending[0][2].query():
            row, begin, end, enqueue_ns = self._pending.popleft()
            enter_ns, exit_ns = self._host_time(begin), self._host_time(end)
            add(*row[:_ENTER], enter_ns, exit_ns, row[8], ExitKind.COMPLETION, enqueue_ns)

    def open_rows(self) -> list[Row]:
        """Return the rows of operations that the device has not completed, with the host's time of their issue."""
        return [
            (*row[:_ENTER], row[_ENTER], 0, row[8], ExitKind.NEVER, enqueue_ns)
            for row, _, _, enqueue_ns in list(self._pending)
        ]

    def _host_time(self, event: Event) -> int:
        assert self._anchor is not None
        return self._anchor_ns + round(self._anchor.elapsed_time(event) * 1e6)
