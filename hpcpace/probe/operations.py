"""Timed operations of a probe, in groups of ranks below torch's dispatcher.

Durations are those of the host's clock or, for NCCL, of the device's. Nothing observes these groups, and no group of a
job changes: only members call, while `torch.distributed.new_group` would need every rank of the job.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpace.core.compat import c10d
from hpcpace.metrics import Floats
from hpcpace.metrics.bandwidth import bus_factors
from hpcpace.probe.world import ProbeWorld
from hpcpace.trace.schema import Op

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Times:
    """What one rank measured.

    Attributes:
        duration_ns: from the end of one call to the end of the next, float64, (num_calls,): calls follow each other
            without a pause, as in nccl-tests.
        gap_ns: from the end of one call to the begin of the next on the host, float64, (num_calls,).
    """

    duration_ns: Floats
    gap_ns: Floats


def timed_calls(issue: Callable[[], list[Any]], num_calls: int, device: torch.device) -> Times:
    """Call an operation once more than asked for, and time all calls but the first.

    Args:
        issue: begins the operation; returns what is waited for, in order.
        num_calls: how many are timed, at least 1.
        device: of the buffers.

    Raises:
        RuntimeError: the operation failed.
    """
    with _without_collections():
        return _on_device(issue, num_calls) if device.type == "cuda" else _on_host(issue, num_calls)


def _on_host(issue: Callable[[], list[Any]], num_calls: int) -> Times:
    begin_ns = np.empty(num_calls + 1, np.int64)
    end_ns = np.empty(num_calls + 1, np.int64)
    clock = time.perf_counter_ns
    for call in range(num_calls + 1):
        begin_ns[call] = clock()
        for work in issue():
            work.wait()
        end_ns[call] = clock()
    return Times(duration_ns=np.diff(end_ns).astype(np.float64), gap_ns=(begin_ns[1:] - end_ns[:-1]).astype(np.float64))


def _on_device(issue: Callable[[], list[Any]], num_calls: int) -> Times:
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls + 1)]
    gap_ns = np.empty(num_calls + 1)
    clock = time.perf_counter_ns
    ended_ns = clock()
    for call, event in enumerate(events):
        gap_ns[call] = clock() - ended_ns
        for work in issue():
            work.wait()  # lets the stream wait, not the host
        event.record()
        ended_ns = clock()
    torch.cuda.synchronize()
    milliseconds = [before.elapsed_time(after) for before, after in pairwise(events)]
    return Times(duration_ns=np.array(milliseconds) * 1e6, gap_ns=gap_ns[1:])


@contextmanager
def _without_collections() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class ProbeGroup:
    """Some ranks of a probe and a backend of torch that connects them.

    Collective: all `ranks` make it with the same arguments.

    Args:
        world: the ranks of the probe.
        name: of the group; each is used once.
        ranks: its members, ascending, with this one.

    Raises:
        RuntimeError: a member did not come within the world's timeout.
    """

    def __init__(self, world: ProbeWorld, name: str, ranks: Sequence[int]) -> None:
        import torch.distributed as dist

        self.ranks = tuple(ranks)
        self.own = self.ranks.index(world.rank)
        self.device = world.device
        store = dist.PrefixStore(f"group/{name}", world.board.store)
        self.backend = _backend(world.backend, store, self.own, len(self.ranks), world.timeout_s)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def close(self) -> None:
        """End the group, also where members have failed."""
        if self.device.type == "cuda":
            self.backend.abort()  # a shutdown would wait for operations that may never end

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all members, the same on all of them.

        Collective: every member calls this with as many values.

        Raises:
            RuntimeError: a member did not take part within the timeout.
        """
        return self._reduced(values, "MAX")

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all members; see `maxima`."""
        return self._reduced(values, "SUM")

    def _reduced(self, values: Sequence[float], op: str) -> list[float]:
        import torch

        options = c10d().AllreduceOptions()
        options.reduceOp = getattr(c10d().ReduceOp, op)
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        self.backend.allreduce([tensor], options).wait()
        reduced: list[float] = tensor.tolist()
        return reduced


def _backend(name: str, store: Any, rank: int, num_ranks: int, timeout_s: float) -> Any:
    timeout = timedelta(seconds=timeout_s)
    if name == "gloo":
        return c10d().ProcessGroupGloo(store, rank, num_ranks, timeout=timeout)
    nccl = c10d().ProcessGroupNCCL  # torch without CUDA has none
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, num_ranks, options)


ITEM_BYTES = 4  # float32
_MAX_VALUE = 64
"""Ranks put values of up to this into their buffers, so that sums over thousands of ranks are exact in float32."""


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """What one rank sends and receives."""

    send: torch.Tensor
    receive: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation.

    Attributes:
        name: as in the record.
        issue: begins it; returns what is waited for, in order.
        expected: what each rank's received value is, by rank, number of ranks and place in n parts.
        sent_parts, received_parts: whether a rank sends, or receives, 1/n of the size; all of it otherwise.
    """

    name: str
    issue: Callable[[Any, Buffers, int, int], list[Any]]
    expected: Callable[[int, int, int], float]
    sent_parts: bool = False
    received_parts: bool = False

    def bus_factor(self, num_ranks: int) -> float:
        """Return busbw over algbw; see `hpcpace.metrics.bandwidth`."""
        op = Op.SEND if self.name == "send_recv" else Op[self.name.upper()]
        return float(bus_factors(np.array([op], np.uint8), np.array([num_ranks]))[0])

    def rounded(self, size_bytes: int, num_ranks: int) -> int:
        """Return the nearest size, from below where there is one, whose parts are whole numbers."""
        unit = ITEM_BYTES * (num_ranks if self.sent_parts or self.received_parts or self.name == "all_to_all" else 1)
        return max(size_bytes // unit, 1) * unit

    def buffers(self, size_bytes: int, group: ProbeGroup) -> Buffers:
        """Return buffers in which all that is sent is this rank's value."""
        import torch

        count = size_bytes // ITEM_BYTES
        parts = count // group.size
        value = _value(group.own)
        return Buffers(
            send=torch.full((parts if self.sent_parts else count,), value, device=group.device),
            receive=torch.zeros(parts if self.received_parts else count, device=group.device),
        )

    def is_right(self, buffers: Buffers, group: ProbeGroup) -> bool:
        """Return whether this rank received what it should have, after one call on fresh buffers."""
        received = buffers.send if self.name in ("all_reduce", "broadcast") else buffers.receive
        places = received.tensor_split(group.size)
        return all(
            bool((part == self.expected(group.own, group.size, place)).all()) for place, part in enumerate(places)
        )


def _value(rank: int) -> float:
    return float(rank % _MAX_VALUE + 1)


def _sum_of_values(num_ranks: int) -> float:
    return sum(_value(rank) for rank in range(num_ranks))


def _broadcast(backend: Any, buffers: Buffers, own: int, size: int) -> list[Any]:
    options = c10d().BroadcastOptions()
    options.rootRank = 0
    return [backend.broadcast([buffers.send], options)]


def _send_recv(backend: Any, buffers: Buffers, own: int, size: int) -> list[Any]:
    # NCCL's send and receive wait for each other unless they are one batch.
    is_batch = backend.name() == "nccl"
    if is_batch:
        backend._start_coalescing()
    sent = backend.send([buffers.send], (own + 1) % size, 0)
    received = backend.recv([buffers.receive], (own - 1) % size, 0)
    return [backend._end_coalescing()] if is_batch else [sent, received]


OPERATIONS = (
    Operation(
        name="all_reduce",
        issue=lambda backend, buffers, own, n: [backend.allreduce([buffers.send])],
        expected=lambda own, n, place: _sum_of_values(n),
    ),
    Operation(
        name="all_gather",
        issue=lambda backend, buffers, own, n: [backend._allgather_base(buffers.receive, buffers.send)],
        expected=lambda own, n, place: _value(place),
        sent_parts=True,
    ),
    Operation(
        name="reduce_scatter",
        issue=lambda backend, buffers, own, n: [backend._reduce_scatter_base(buffers.receive, buffers.send)],
        expected=lambda own, n, place: _sum_of_values(n),
        received_parts=True,
    ),
    Operation(name="broadcast", issue=_broadcast, expected=lambda own, n, place: _value(0)),
    Operation(
        name="all_to_all",
        issue=lambda backend, buffers, own, n: [backend.alltoall_base(buffers.receive, buffers.send, [], [])],
        expected=lambda own, n, place: _value(place),
    ),
    Operation(
        name="send_recv",
        issue=_send_recv,
        expected=lambda own, n, place: _value((own - 1) % n),
    ),
)
