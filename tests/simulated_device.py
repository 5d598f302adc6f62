"""Simulated ranks with devices: host queue, streams, events, collectives, and a clock with its own rate and drift.

The host issues work and runs ahead, the device does it. What the host issues takes its place in a stream at once, and
its times follow as soon as those of everything before it are known. So the model needs no time steps, and code that
observes CUDA events runs on it unchanged. Programs are generators in plain Python:

    group = SimulatedGroup(2)
    ranks = [SimulatedRank(), SimulatedRank()]

    def program(rank):
        for _ in range(100):
            rank.compute(50_000)                      # the host is busy for 50 us
            rank.launch(2_000_000)                    # a kernel of 2 ms on the current stream
            work = group.all_reduce(rank, 300_000)    # takes 0.3 ms once all ranks are there
            work.wait()                               # the current stream waits for it, the host does not
            yield from rank.synchronize()             # the host waits for the device

    run({rank: program(rank) for rank in ranks})

A program yields what its host waits for: `yield from` `synchronize`, `wait_for` or `wait_for_room` of its rank, or a
plain `yield`, which lets ranks catch up whose hosts are behind; use one in each step. Afterwards `SimulatedRank.done`
has the truth: every piece of work with its label, and begin, end, idle and held time. All times are int64 nanoseconds
of the host's clock; only `SimulatedEvent.elapsed_time` shows the device's own one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcpace.core.errors import UsageError

Program = Generator["Work | None", None, None]
"""A rank's program: it yields what the host waits for, or None to let the other ranks catch up."""


class Work:
    """Something in a stream: a kernel, a wait, a mark, or this rank's part of a collective.

    Attributes:
        label: what the program calls it.
        is_mark: whether it is the mark of an event, which takes no time.
        issue_ns: when the host issued it.
        begin_ns: when the stream came to it; None until that is known.
        end_ns: when the stream went on; None until that is known.
        idle_ns: how long the stream had nothing to do before it, because the host had issued nothing; 0 of a mark.
        held_ns: how long it held the stream because it waited for another stream or another rank.
    """

    __slots__ = (
        "_awaited", "_before", "_busy_until_ns", "_dependents", "_duration_ns", "_meeting", "_num_missing",
        "begin_ns", "end_ns", "held_ns", "idle_ns", "is_mark", "issue_ns", "label",
    )  # fmt: skip

    def __init__(
        self,
        before: Work | None,
        issue_ns: int,
        *,
        duration_ns: int = 0,
        awaited: Work | None = None,
        meeting: Meeting | None = None,
        label: Any = None,
        is_mark: bool = False,
    ) -> None:
        self.label, self.issue_ns, self.is_mark = label, issue_ns, is_mark
        self.begin_ns: int | None = None
        self.end_ns: int | None = None
        self.idle_ns = self.held_ns = self._busy_until_ns = 0
        self._before, self._awaited = before, awaited
        self._duration_ns, self._meeting = duration_ns, meeting
        self._dependents: list[Work] = []
        missing = [work for work in (before, awaited) if work is not None and work.end_ns is None]
        self._num_missing = len(missing)
        for work in missing:
            work._dependents.append(self)
        if not missing:
            _advance(self)

    def _ready_ns(self) -> int:
        """Take the times of what came before; return when nothing is waited for any more."""
        before = self._before
        self.begin_ns = self.issue_ns if before is None else max(self.issue_ns, known(before.end_ns))
        self._busy_until_ns = self.begin_ns if before is None else before._busy_until_ns
        ready_ns = max(self.begin_ns, 0 if self._awaited is None else known(self._awaited.end_ns))
        self._before = self._awaited = None  # else a stream would keep all that it ever did
        return ready_ns

    def _end(self, ready_ns: int) -> list[Work]:
        """Take the moment at which nothing is waited for; return what only waited for this."""
        self.held_ns = ready_ns - known(self.begin_ns)
        self.end_ns = ready_ns + self._duration_ns
        if not self.is_mark:
            self.idle_ns = known(self.begin_ns) - self._busy_until_ns
            self._busy_until_ns = self.end_ns
        freed = []
        for dependent in self._dependents:
            dependent._num_missing -= 1
            if not dependent._num_missing:
                freed.append(dependent)
        self._dependents = []
        return freed


class Meeting:
    """A collective: it begins when the last member is there."""

    def __init__(self, num_members: int) -> None:
        self._num_members = num_members
        self._arrived: list[tuple[Work, int]] = []

    def arrive(self, work: Work, ready_ns: int) -> list[tuple[Work, int]]:
        """Return who can go on, and when: everybody, once everybody is there."""
        self._arrived.append((work, ready_ns))
        if len(self._arrived) < self._num_members:
            return []
        last_ns = max(ready_ns for _, ready_ns in self._arrived)
        return [(member, last_ns) for member, _ in self._arrived]


def _advance(work: Work) -> None:
    """Work out the times of a piece of work that nothing is missing for, and of all that follows from them."""
    waiting = [work]
    while waiting:
        work = waiting.pop()
        ready_ns = work._ready_ns()
        ready = [(work, ready_ns)] if work._meeting is None else work._meeting.arrive(work, ready_ns)
        for member, member_ready_ns in ready:
            waiting += member._end(member_ready_ns)


def known(time_ns: int | None) -> int:
    """Return a time that must be known by now."""
    assert time_ns is not None
    return time_ns


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


class SimulatedWork:
    """What a collective returns to a rank: as much of torch's Work as the observing code uses."""

    def __init__(self, rank: SimulatedRank, part: Work) -> None:
        self.part = part
        self._rank = rank

    def wait(self, *, label: Any = "wait") -> None:
        """Let the current stream wait for the collective; the host goes on at once."""
        self._rank.current_stream.add(awaited=self.part, label=label)

    def get_future(self) -> SimulatedWork:
        """Return the future, which is complete at once, as that of NCCL."""
        return self

    def then(self, callback: Callable[[Any], Any]) -> None:
        """Call back at once, on a stream that waits for the collective."""
        stream = SimulatedStream(self._rank)  # torch takes one from a pool
        stream.last = self.part
        with self._rank.stream(stream):
            callback(self)


class SimulatedGroup:
    """Ranks that communicate over a stream that each of them has for it, like a communicator of NCCL.

    Args:
        num_ranks: its members; which ones, show their calls.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._streams: dict[int, SimulatedStream] = {}
        self._num_calls: dict[int, int] = {}
        self._meetings: dict[int, Meeting] = {}

    def all_reduce(
        self, rank: SimulatedRank, transfer_ns: int, *, label: Any = "collective", on_current_stream: bool = False
    ) -> SimulatedWork:
        """Issue a collective, which begins after what the current stream has been given so far.

        Args:
            rank: the member that calls.
            transfer_ns: how long it takes once all members are there.
            label: what the truth calls it.
            on_current_stream: whether it runs there and not on the group's own stream, as NCCL's synchronous ones do.
        """
        rank.compute(rank.costs.launch_ns)
        number = self._num_calls[id(rank)] = self._num_calls.get(id(rank), 0) + 1
        meeting = self._meetings.setdefault(number, Meeting(self._num_ranks))
        stream = rank.current_stream
        if not on_current_stream:
            if id(rank) not in self._streams:
                self._streams[id(rank)] = rank.new_stream()
            stream = self._streams[id(rank)]
            stream.wait_stream(rank.current_stream)
        return SimulatedWork(rank, stream.add(duration_ns=transfer_ns, meeting=meeting, label=label))


def run(programs: Mapping[SimulatedRank, Program]) -> None:
    """Run the programs of all ranks to their ends, always that of the rank whose host is behind.

    Raises:
        UsageError: ranks wait for each other.
    """
    ranks, bodies = list(programs), list(programs.values())
    ready = [(rank.now_ns, number) for number, rank in enumerate(ranks)]
    heapq.heapify(ready)
    waiting: dict[int, Work] = {}
    while ready or waiting:
        for number, work in list(waiting.items()):
            if work.end_ns is not None:
                ranks[number].now_ns = max(ranks[number].now_ns, work.end_ns)
                heapq.heappush(ready, (ranks[number].now_ns, number))
                del waiting[number]
        if not ready:
            raise UsageError(f"the simulated ranks {sorted(waiting)} wait for collectives that others never issue")
        _, number = heapq.heappop(ready)
        try:
            work_or_none = next(bodies[number])
        except StopIteration:
            continue
        if work_or_none is None:
            heapq.heappush(ready, (ranks[number].now_ns, number))
        else:
            waiting[number] = work_or_none
