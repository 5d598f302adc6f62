"""A simulated rank with a device: host queue, streams, events, and a clock of the device with its own rate and drift.

The host issues work and runs ahead, the device does it. What the host issues takes its place in a stream at once, and
its times follow as soon as those of everything before it are known. So the model needs no time steps, and code that
observes CUDA events runs on it unchanged. `device_job` has collectives and runs programs.

All times are int64 nanoseconds of the host's clock; only `SimulatedEvent.elapsed_time` shows the device's own one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcpace.errors import UsageError
from hpcpace.simulation.device_work import Work

Program = Generator["Work | None", None, None]
"""A rank's program: it yields what the host waits for, or None to let the other ranks catch up."""


class SimulatedStream:
    """A queue of work on a rank's device; its pieces run one after the other.

    Args:
        rank: the rank.
    """

    def __init__(self, rank: SimulatedRank) -> None:
        self._rank = rank
        self.last: Work | None = None

    def add(self, **how: Any) -> Work:
        """Append work that the host issues now; see `Work` for the arguments."""
        self._rank.check_not_capturing()
        self.last = Work(self.last, self._rank.now_ns, **how)
        self._rank.note(self.last)
        return self.last

    def wait_event(self, event: SimulatedEvent) -> None:
        """Let the stream wait until the device has passed an event."""
        if event.work is not None:
            self.add(awaited=event.work, label="wait")

    def wait_stream(self, stream: SimulatedStream) -> None:
        """Let the stream wait until the device has done what another one has been given so far."""
        if stream.last is not None:
            self.add(awaited=stream.last, label="wait")


class SimulatedEvent:
    """What is used of torch.cuda.Event: a mark in a stream, with the time of the device's own clock."""

    def __init__(self, rank: SimulatedRank) -> None:
        self._rank = rank
        self.work: Work | None = None

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Mark the current point of a stream, by default the rank's current one."""
        rank = self._rank
        rank.compute(rank.costs.record_ns)
        self.work = (stream or rank.current_stream).add(is_mark=True)

    def query(self) -> bool:
        """Return whether the device has passed the mark; an event that was never recorded counts as passed."""
        self._rank.check_not_capturing()
        return self.work is None or (self.work.end_ns is not None and self.work.end_ns <= self._rank.now_ns)

    def synchronize(self) -> None:
        """Let the host wait until the device has passed the mark.

        Raises:
            UsageError: that depends on other ranks, so the program has to yield before: `yield from
                rank.synchronize()`.
        """
        rank = self._rank
        rank.check_not_capturing()
        if self.work is not None:
            if self.work.end_ns is None:
                raise UsageError("an event waits for other ranks: let the program yield from rank.synchronize() first")
            rank.now_ns = max(rank.now_ns, self.work.end_ns) + rank.costs.synchronize_ns

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds between two marks on the device's clock, rounded to float32 as CUDA does."""
        begin, end = (None if event.work is None else event.work.end_ns for event in (self, end_event))
        if begin is None or end is None or max(begin, end) > self._rank.now_ns:
            raise UsageError("the time between two events is asked for before the device has passed both")
        device_clock = self._rank.device_clock
        return float(np.float32((device_clock.at_ns(end) - device_clock.at_ns(begin)) / 1e6))


@dataclass(frozen=True, kw_only=True)
class DeviceClock:
    """The clock of a device as seen from its host.

    Attributes:
        offset_ns: what it shows at time 0 of the host.
        rate_ppm: how much faster it is, in millionths.
        drift_ppm_per_s: how much faster that gets each second.
        resolution_ns: its steps; those of CUDA events are about 500 ns.
    """

    offset_ns: int = 0
    rate_ppm: float = 0.0
    drift_ppm_per_s: float = 0.0
    resolution_ns: int = 500

    def at_ns(self, host_ns: int) -> int:
        """Return what the clock shows at a time of the host."""
        host_s = host_ns / 1e9
        ahead_ns = host_s * (self.rate_ppm + self.drift_ppm_per_s * host_s / 2) * 1e3
        return (self.offset_ns + host_ns + round(ahead_ns)) // self.resolution_ns * self.resolution_ns


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """The time that the host needs for what it does with its device, in nanoseconds.

    Attributes:
        launch_ns: to issue a kernel or a collective.
        record_ns: to record an event.
        synchronize_ns: to notice that the device has passed an event for which it waits.
    """

    launch_ns: int = 5_000
    record_ns: int = 1_000
    synchronize_ns: int = 5_000


@dataclass(eq=False, kw_only=True)
class SimulatedRank:
    """A host with its device.

    Attributes:
        now_ns: the host's clock.
        costs: of the host.
        device_clock: the device's own clock, which only events show.
        queue_size: pieces of work that fit between host and device, see `wait_for_room`.
        done: all that was issued but for marks, in the order of issue.
        is_capturing: whether a CUDA graph is being captured: then neither work nor events are allowed.
        current_stream: what the host issues goes there.
    """

    now_ns: int = 1_000_000_000
    costs: HostCosts = field(default_factory=HostCosts)
    device_clock: DeviceClock = field(default_factory=DeviceClock)
    queue_size: int = 1024
    done: list[Work] = field(default_factory=list)
    is_capturing: bool = False

    def __post_init__(self) -> None:
        self.default_stream = self.current_stream = SimulatedStream(self)
        self._streams = [self.default_stream]
        self._queue: deque[Work] = deque()

    def clock(self) -> int:
        """Return the host's time."""
        return self.now_ns

    def new_stream(self) -> SimulatedStream:
        """Return another stream of the device."""
        self._streams.append(SimulatedStream(self))
        return self._streams[-1]

    def new_event(self) -> SimulatedEvent:
        """Return an event of the device."""
        return SimulatedEvent(self)

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        """Make a stream the current one during the block."""
        former, self.current_stream = self.current_stream, stream
        try:
            yield
        finally:
            self.current_stream = former

    def compute(self, duration_ns: int) -> None:
        """Let the host be busy."""
        self.now_ns += duration_ns

    def launch(self, duration_ns: int, *, label: Any = "kernel") -> Work:
        """Issue a kernel to the current stream."""
        self.compute(self.costs.launch_ns)
        return self.current_stream.add(duration_ns=duration_ns, label=label)

    def synchronize(self) -> Program:
        """Let the host wait until the device has done everything: `yield from rank.synchronize()`."""
        self.check_not_capturing()
        for stream in self._streams:
            if stream.last is not None:
                yield stream.last
        self.compute(self.costs.synchronize_ns)

    def wait_for(self, event: SimulatedEvent) -> Program:
        """Let the host wait until the device has passed an event: `yield from rank.wait_for(event)`."""
        if event.work is not None:
            yield event.work
        self.compute(self.costs.synchronize_ns)

    def wait_for_room(self) -> Program:
        """Let the host wait while the queue to the device is full: `yield from rank.wait_for_room()`."""
        while self._queue and self._is_over(self._queue[0]):
            self._queue.popleft()
        while len(self._queue) > self.queue_size:
            yield self._queue.popleft()

    def note(self, work: Work) -> None:
        """Take work that was issued."""
        self._queue.append(work)
        if not work.is_mark:
            self.done.append(work)

    def check_not_capturing(self) -> None:
        """Raise if a graph is being captured, as CUDA does for what may not be called then.

        Raises:
            UsageError: it is.
        """
        if self.is_capturing:
            raise UsageError("a graph is being captured: the capture is broken")

    def _is_over(self, work: Work) -> bool:
        return work.end_ns is not None and work.end_ns <= self.now_ns
