"""The operations of a training as gloo's messages, and their bytes on Ethernet links.

As read in gloo's source (facebookincubator/gloo, May 2025): gloo/allreduce.cc and gloo/allgather.cc have the rings,
gloo/broadcast.cc the tree, gloo/alltoall.cc the messages to all, gloo/transport/tcp/pair.cc the header of each
message. torch's ProcessGroupGloo makes a reduce-scatter from an all-reduce, and so sends twice the necessary bytes.
Bytes on links include acknowledgements and the headers of gloo and TCP; each term has its cause in a protocol, none is
fitted. Connection set-up, retransmissions and messages outside of torch's collectives are not counted.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import ConfigError
from hpcpace.train.plan import TrainPlan, next_multiple
from hpcpace.train.presets import Mesh

INT8_BLOCK = 256
"""Elements with a scale of their own, as in Dettmers et al. 2022 (block-wise quantization)."""
SCALE_BYTES = 4
POWERSGD_RANK = 4
"""Rank of PowerSGD's matrices, the largest of the paper's (Vogels et al. 2019, table 3)."""
POWERSGD_START = 2
"""Steps before PowerSGD begins: DDP makes its buckets anew after the first step, which torch's hook cannot follow."""
_MIN_SAVING = 2
"""torch's min_compression_rate: a matrix that would not shrink to a half is sent as it is."""


def int8_message_bytes(num_elements: int, num_ranks: int) -> int:
    """Return the bytes that stand for a bucket in 8 bits: of what each replica sends, and of what each gets."""
    num_blocks = -(-num_elements // (num_ranks * INT8_BLOCK)) * num_ranks
    return num_blocks * (INT8_BLOCK + SCALE_BYTES)


def powersgd_elements(shapes: Iterable[tuple[int, ...]]) -> tuple[int, int, int]:
    """Return the elements that PowerSGD sends of gradients: those sent as they are, of all P, and of all Q.

    A gradient of n x m becomes P of n x r and Q of m x r, if that is less than half of it (Vogels et al. 2019).
    """
    plain, left, right = 0, 0, 0
    for shape in shapes:
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(rows, columns, POWERSGD_RANK)
        if (rows + columns) * rank * _MIN_SAVING < rows * columns:
            left, right = left + rows * rank, right + columns * rank
        else:
            plain += rows * columns
    return plain, left, right


ITEMSIZES = {"float32": 4, "bfloat16": 2, "float64": 8}
MASTER_DTYPES = {"float32": "float32", "bfloat16": "float32", "float64": "float64"}
"""Type of parameters, gradients and the optimizer's state, by that of the computation."""
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


@dataclass(frozen=True)
class Operation:
    """A collective or a message between two ranks, done `count` times.

    Attributes:
        kind: what is done. A send goes from the first of two ranks to the second, a broadcast starts at the first.
        cause: which part of the training it belongs to.
        ranks: the members, as ranks of the job, in the order of their group.
        size_bytes: the tensor on each rank; the whole one, where a rank has a share of it before or afterwards.
        itemsize: bytes of one element of it.
        count: how often it is done.
    """

    kind: Kind
    cause: str
    ranks: tuple[int, ...]
    size_bytes: int
    itemsize: int
    count: int = 1


def master_itemsize(plan: TrainPlan) -> int:
    """Return the bytes of an element of parameters, gradients and losses."""
    return ITEMSIZES[MASTER_DTYPES[plan.settings.dtype]]


def compute_itemsize(plan: TrainPlan) -> int:
    """Return the bytes of an element of activations, their gradients, and parameters that `--zero 3` gathers."""
    return ITEMSIZES[plan.settings.dtype]


def groups_along(mesh: Mesh, dimension: Literal["dp", "pp", "tp"]) -> Iterator[tuple[Mesh, tuple[int, ...]]]:
    """Yield the groups along a dimension, with the place of their first member; none where the dimension is 1."""
    size = mesh.as_dict()[dimension]
    if size == 1:
        return
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    for first in places:
        if first.as_dict()[dimension] == 0:
            ranks = [mesh.rank(Mesh(**{**first.as_dict(), dimension: index})) for index in range(size)]
            yield first, tuple(ranks)


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


def _ring(operation: Operation) -> Iterator[Message]:
    """Yield the messages of an all-reduce: reduce-scatter, then all-gather, each rank sending to the one before it.

    The tensor is cut into at least two segments a rank and at most 1 MiB a segment; segments at its end may be empty,
    and are not sent. Over both halves a rank sends about 2 (N-1)/N of the tensor.
    """
    size, num_ranks = operation.size_bytes, len(operation.ranks)
    max_segment = operation.itemsize * max(1, _MAX_SEGMENT_BYTES // operation.itemsize)
    num_segments = next_multiple(max(-(-size // max_segment), 2 * num_ranks), num_ranks)
    segment = next_multiple(-(-size // num_segments), operation.itemsize)
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
    for source, destination in zip(operation.ranks, (*operation.ranks[1:], operation.ranks[0]), strict=True):
        for _ in range(num_ranks - 1):
            yield source, destination, share // 2
            yield source, destination, share - share // 2


def _to_all(operation: Operation) -> Iterator[Message]:
    """Yield the messages of an all-to-all: a share from each rank to each other one."""
    share = operation.size_bytes // len(operation.ranks)
    for source, destination in itertools.permutations(operation.ranks, 2):
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


_GLOO_HEADER_BYTES = 48
"""gloo/transport/tcp/pair.h: the preamble of six 8-byte numbers."""


@dataclass(frozen=True, kw_only=True)
class PacketOverhead:
    """How TCP over IPv4 over Ethernet wraps data; preamble, checksum and gap of Ethernet are not counted by Linux."""

    mtu: int = 1500
    """Largest IP packet of the interface, in bytes."""
    acknowledged_bytes: int = 65536
    """Data covered by one acknowledgement. Linux joins segments of up to 64 KiB before TCP sees them (GRO) and
    acknowledges them as one; the most there can be is one for every second full segment (RFC 5681, section 4.2)."""
    ethernet_bytes: int = 14
    """Two addresses and the type."""
    ip_bytes: int = 20
    """An IPv4 header without options."""
    tcp_bytes: int = 32
    """A TCP header with timestamps, which Linux uses unless net.ipv4.tcp_timestamps is 0."""

    def __post_init__(self) -> None:
        if self.segment_bytes < 1:
            raise ConfigError(f"an mtu of {self.mtu} bytes leaves no room for data: give that of the interface")
        if self.acknowledged_bytes < self.segment_bytes:
            raise ConfigError(
                f"acknowledged_bytes is {self.acknowledged_bytes}, less than a segment: give at least "
                f"{self.segment_bytes}"
            )

    @property
    def segment_bytes(self) -> int:
        """Data of a full segment."""
        return self.mtu - self.ip_bytes - self.tcp_bytes

    @property
    def segments_per_ack(self) -> int:
        """Segments covered by one acknowledgement, if no data goes back that could carry it."""
        return self.acknowledged_bytes // self.segment_bytes

    @property
    def header_bytes(self) -> int:
        """What comes before the data of each segment, and is all of an acknowledgement."""
        return self.ethernet_bytes + self.ip_bytes + self.tcp_bytes


@dataclass(frozen=True, kw_only=True)
class LinkVolume:
    """Bytes on a link in both directions: of a host from and to the host, of an uplink from and to its leaf."""

    tx_bytes: int
    rx_bytes: int


def wire_matrix(counts: Counter[Message], num_ranks: int, overhead: PacketOverhead) -> NDArray[np.int64]:
    """Return the bytes of frames that each rank (row) sends to each other one: int64, (num_ranks, num_ranks).

    The sender announces a message, the receiver says that it is ready, and the message follows with a header of its
    own; each of the three starts a segment, because gloo switches Nagle's algorithm off. What is shorter than
    `acknowledged_bytes` is acknowledged along with the data that goes back soon.
    """
    matrix = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    notice_bytes = overhead.header_bytes + _GLOO_HEADER_BYTES
    for (source, destination, size), count in counts.items():
        data_bytes = size + _GLOO_HEADER_BYTES
        num_segments = -(-data_bytes // overhead.segment_bytes)
        num_acks = num_segments // overhead.segments_per_ack
        matrix[source, destination] += count * (notice_bytes + data_bytes + num_segments * overhead.header_bytes)
        matrix[destination, source] += count * (notice_bytes + num_acks * overhead.header_bytes)
    return matrix


def link_volumes(
    wire_bytes: NDArray[np.int64], hosts: Sequence[str], leaf_of_host: Mapping[str, str] | None = None
) -> dict[str, LinkVolume]:
    """Return what crosses the link of each host, and the uplink of each leaf switch.

    Ranks of one host talk over its loopback, hosts of one leaf through that leaf.

    Args:
        wire_bytes: bytes from rank (row) to rank: int64, (num_ranks, num_ranks).
        hosts: the host of each rank.
        leaf_of_host: the leaf of each host; without it, only hosts are returned.

    Raises:
        ConfigError: the placement does not name a host for each rank, a leaf for each host, or uses one name for both.
    """
    if len(hosts) != len(wire_bytes):
        raise ConfigError(f"the placement names {len(hosts)} hosts for {len(wire_bytes)} ranks: name one a rank")
    volumes = _crossing(wire_bytes, hosts)
    if leaf_of_host is None:
        return volumes
    missing = [host for host in volumes if host not in leaf_of_host]
    if missing:
        raise ConfigError(f"no leaf is given for {', '.join(missing)}: name the leaf of each host")
    leaves = _crossing(wire_bytes, [leaf_of_host[host] for host in hosts])
    ambiguous = sorted(volumes.keys() & leaves.keys())
    if ambiguous:
        raise ConfigError(f"{', '.join(ambiguous)} is both a host and a leaf: give leaves different names")
    return volumes | leaves


def _crossing(wire_bytes: NDArray[np.int64], unit_of_rank: Sequence[str]) -> dict[str, LinkVolume]:
    units = np.array(unit_of_rank)
    between = np.where(units[:, None] != units[None, :], wire_bytes, 0)
    return {
        unit: LinkVolume(tx_bytes=int(between[units == unit].sum()), rx_bytes=int(between[:, units == unit].sum()))
        for unit in dict.fromkeys(unit_of_rank)
    }
