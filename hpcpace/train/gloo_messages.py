"""How gloo cuts collectives into messages between ranks, as read in its source (facebookincubator/gloo, May 2025).

gloo/allreduce.cc and gloo/allgather.cc have the rings, gloo/broadcast.cc the tree, gloo/alltoall.cc the messages to
all, gloo/transport/tcp/pair.cc what goes before each message. torch's ProcessGroupGloo makes a reduce-scatter of an
all-reduce, and so sends twice what one needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from hpcpace.train.operations import Operation

Message = tuple[int, int, int]
"""Rank that sends, rank that receives, size in bytes without gloo's own header."""

_MAX_SEGMENT_BYTES = 1024 * 1024


def messages(operations: Iterable[Operation]) -> Counter[Message]:
    """Return how many messages of each size go from rank to rank."""
    counts: Counter[Message] = Counter()
    for operation in operations:
        for message in _SPLIT[operation.kind](operation):
            counts[message] += operation.count
    return counts


def payload_matrix(counts: Counter[Message], num_ranks: int) -> NDArray[np.int64]:
    """Return the bytes of tensors that each rank (row) sends to each other one: int64, (num_ranks, num_ranks)."""
    matrix = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for (source, destination, size), count in counts.items():
        matrix[source, destination] += size * count
    return matrix


def _ring(operation: Operation) -> Iterator[Message]:
    """Yield the messages of an all-reduce: reduce-scatter, then all-gather, each rank sending to the one before it.

    The tensor is cut into at least two segments a rank and at most 1 MiB a segment; segments at its end may be empty,
    and are not sent. Over both halves a rank sends about 2 (N-1)/N of the tensor.
    """
    size, num_ranks = operation.size_bytes, len(operation.ranks)
    max_segment = operation.itemsize * max(1, _MAX_SEGMENT_BYTES // operation.itemsize)
    num_segments = _round_up(max(-(-size // max_segment), 2 * num_ranks), num_ranks)
    segment = _round_up(-(-size // num_segments), operation.itemsize)
    per_rank = num_segments // num_ranks
    for index, source in enumerate(operation.ranks):
        destination = operation.ranks[index - 1]
        for first in ((index + 1) * per_rank, index * per_rank):
            for number in range(first, first + num_segments - per_rank):
                length = min(segment, size - number % num_segments * segment)
                if length > 0:
                    yield source, destination, length


def _gather_ring(operation: Operation) -> Iterator[Message]:
    """Yield the messages of an all-gather: each rank hands the shares on to the one after it, in two halves each."""
    num_ranks = len(operation.ranks)
    share = operation.size_bytes // num_ranks
    for index, source in enumerate(operation.ranks):
        destination = operation.ranks[(index + 1) % num_ranks]
        for _ in range(num_ranks - 1):
            yield source, destination, share // 2
            yield source, destination, share - share // 2


def _to_all(operation: Operation) -> Iterator[Message]:
    """Yield the messages of an all-to-all: a share from each rank to each other one."""
    share = operation.size_bytes // len(operation.ranks)
    for source in operation.ranks:
        for destination in operation.ranks:
            if source != destination:
                yield source, destination, share


def _tree(operation: Operation) -> Iterator[Message]:
    """Yield the messages of a broadcast: in round i the first 2**i ranks send the whole tensor 2**i ranks further."""
    ranks, distance = operation.ranks, 1
    while distance < len(ranks):
        for source, destination in zip(ranks[:distance], ranks[distance : 2 * distance], strict=False):
            yield source, destination, operation.size_bytes
        distance *= 2


def _one(operation: Operation) -> Iterator[Message]:
    source, destination = operation.ranks
    yield source, destination, operation.size_bytes


_SPLIT = {
    "all_reduce": _ring,
    "all_gather": _gather_ring,
    "reduce_scatter": _ring,
    "all_to_all": _to_all,
    "broadcast": _tree,
    "send": _one,
}


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
