"""Measures what a mark on the device costs the host, beside the clock that a rank without a device reads in its place.

On a GPU the events are CUDA's; elsewhere an event that does nothing stands for them, so that the figure is what Python
costs. Blocks of plain clock reads, of events alone, and of marks (made, read later and mapped) take turns on one core.
`python -m experiments.bench.device_marks`

Options:
  --rounds N  [60]
  --marks N  [1000]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from experiments.bench.pairs import interval, on_one_core, take_turns
from experiments.options import command_line
from hpcpace.observe.device.clock import MAX_EVENTS, DeviceClock, DeviceMarks, Event
from hpcpace.observe.device.layer import find_device


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
            f"at most {self.most_in_use} of {MAX_EVENTS} in use, {self.num_refused} refused"
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
        use.most_in_use = max(use.most_in_use, MAX_EVENTS - clock._num_unmade - len(clock._free))
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


class FreeEvent:
    """An event that costs nothing but its calls."""

    def record(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return that the device has passed."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return a time."""
        return 1.0


def anchored_clock() -> DeviceClock:
    """Return the clock of the device, or one of events that do nothing, tied to the host's."""
    clock = find_device(print) or DeviceClock(FreeEvent)
    clock.anchor()
    time.sleep(1.0)  # the second anchor says how fast the device's clock is
    clock.anchor()
    return clock


def main() -> None:
    """Measure and print."""
    args = command_line(__doc__)
    on_one_core()
    if torch.cuda.is_available():
        torch.ones(1, device="cuda")  # without a context there are no marks
    device = anchored_clock()
    event = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else FreeEvent()
    marks = DeviceMarks(device)

    def marked() -> None:
        for _ in range(args.marks):
            marks.now()
        marks.resolve()

    def recorded() -> None:
        for _ in range(args.marks):
            event.record()

    def read() -> None:
        clock = time.monotonic_ns
        for _ in range(args.marks):
            clock()

    measures = {"clock": read, "event": recorded, "mark": marked}
    times = take_turns(
        {name: _timed(measure, args.marks) for name, measure in measures.items()}, num_rounds=args.rounds, num_warmups=2
    )
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no device, events that do nothing"
    print(f"{name}; {args.rounds} rounds of {args.marks} marks, processor time of the thread:")
    print(
        f"  reading the clock {interval(times['clock'], '.2f')} us, an event alone {interval(times['event'], '.2f')} us"
    )
    print(
        f"  a mark, read later: +{interval(times['mark'] - times['clock'] - times['event'], '.2f')} us besides both; "
        f"{marks.num_unknown} of {args.marks * (args.rounds + 2)} not made"
    )


def _timed(measure: Callable[[], None], num_calls: int) -> Callable[[], float]:
    def timed() -> float:
        begin_ns = time.thread_time_ns()
        measure()
        return (time.thread_time_ns() - begin_ns) / 1e3 / num_calls

    return timed


if __name__ == "__main__":
    main()
