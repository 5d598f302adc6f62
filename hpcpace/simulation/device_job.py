"""Simulated ranks with devices that communicate: their collectives end when all have arrived, and their programs run.

Programs are generators in plain Python:

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
has the truth: every piece of work with its label, and begin, end, idle and held time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Any

from hpcpace.errors import UsageError
from hpcpace.simulation.device import Program, SimulatedRank, SimulatedStream
from hpcpace.simulation.device_work import Meeting, Work


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
