"""The operations of a sweep: how each is issued, what it must return, and how nccl-tests turn its time into a rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcpace.probe.groups import ProbeGroup

if TYPE_CHECKING:
    import torch

ITEM_BYTES = 4  # float32
_MOST_VALUE = 64
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
        sent_parts, received_parts: whether a rank sends, or receives, 1/n of the size; all of it otherwise.
        bus_factor: busbw over algbw on n ranks (nccl-tests, doc/PERFORMANCE.md).
        issue: begins it; returns what is waited for, in order.
        expected: what each rank's received value is, by rank, number of ranks and place in n parts.
    """

    name: str
    sent_parts: bool
    received_parts: bool
    bus_factor: Callable[[int], float]
    issue: Callable[[Any, Buffers, int, int], list[Any]]
    expected: Callable[[int, int, int], float]

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
    return float(rank % _MOST_VALUE + 1)


def _sum_of_values(num_ranks: int) -> float:
    return sum(_value(rank) for rank in range(num_ranks))


def _all_reduce(backend: Any, buffers: Buffers, own: int, size: int) -> list[Any]:
    return [backend.allreduce([buffers.send])]


def _all_gather(backend: Any, buffers: Buffers, own: int, size: int) -> list[Any]:
    return [backend._allgather_base(buffers.receive, buffers.send)]


def _reduce_scatter(backend: Any, buffers: Buffers, own: int, size: int) -> list[Any]:
    return [backend._reduce_scatter_base(buffers.receive, buffers.send)]


def _broadcast(backend: Any, buffers: Buffers, own: int, size: int) -> list[Any]:
    from torch._C._distributed_c10d import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = 0
    return [backend.broadcast([buffers.send], options)]


def _all_to_all(backend: Any, buffers: Buffers, own: int, size: int) -> list[Any]:
    return [backend.alltoall_base(buffers.receive, buffers.send, [], [])]


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
        sent_parts=False,
        received_parts=False,
        bus_factor=lambda n: 2 * (n - 1) / n,
        issue=_all_reduce,
        expected=lambda own, n, place: _sum_of_values(n),
    ),
    Operation(
        name="all_gather",
        sent_parts=True,
        received_parts=False,
        bus_factor=lambda n: (n - 1) / n,
        issue=_all_gather,
        expected=lambda own, n, place: _value(place),
    ),
    Operation(
        name="reduce_scatter",
        sent_parts=False,
        received_parts=True,
        bus_factor=lambda n: (n - 1) / n,
        issue=_reduce_scatter,
        expected=lambda own, n, place: _sum_of_values(n),
    ),
    Operation(
        name="broadcast",
        sent_parts=False,
        received_parts=False,
        bus_factor=lambda n: 1.0,
        issue=_broadcast,
        expected=lambda own, n, place: _value(0),
    ),
    Operation(
        name="all_to_all",
        sent_parts=False,
        received_parts=False,
        bus_factor=lambda n: (n - 1) / n,
        issue=_all_to_all,
        expected=lambda own, n, place: _value(place),
    ),
    Operation(
        name="send_recv",
        sent_parts=False,
        received_parts=False,
        bus_factor=lambda n: 1.0,
        issue=_send_recv,
        expected=lambda own, n, place: _value((own - 1) % n),
    ),
)
OPERATION_NAMES = tuple(operation.name for operation in OPERATIONS)
