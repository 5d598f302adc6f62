"""Measures what a mark on the device costs the host, beside the clock that a rank without a device reads in its place.

On a GPU the events are CUDA's; elsewhere an event that does nothing stands for them, so that the figure is what Python
costs. Blocks of plain clock reads, of events alone, and of marks (made, read later and mapped) take turns on one core.
`python -m experiments.bench.device_marks`
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from experiments.bench.pairs import median_interval, take_turns
from hpcpace.observe.device.clock import DeviceClock, DeviceMarks
from hpcpace.observe.device.layer import find_device


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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--marks", type=int, default=1000)
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if torch.cuda.is_available():
        torch.ones(1, device="cuda")  # without a context there are no marks
    device = find_device(print) or DeviceClock(FreeEvent)
    event = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else FreeEvent()
    marks = DeviceMarks(device)
    device.anchor()
    time.sleep(1.0)  # the second anchor says how fast the device's clock is
    device.anchor()

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
    print(f"  reading the clock {_interval(times['clock'])} us, an event alone {_interval(times['event'])} us")
    print(
        f"  a mark, read later: +{_interval(times['mark'] - times['clock'] - times['event'])} us besides both; "
        f"{marks.num_unknown} of {args.marks * (args.rounds + 2)} not made"
    )


def _timed(measure: Callable[[], None], num_calls: int) -> Callable[[], float]:
    def timed() -> float:
        begin_ns = time.thread_time_ns()
        measure()
        return (time.thread_time_ns() - begin_ns) / 1e3 / num_calls

    return timed


def _interval(values_us: np.ndarray) -> str:
    median, low, high = median_interval(values_us)
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
