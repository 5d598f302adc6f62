"""The collectives and messages of a training with their sizes, before it runs, and as gloo's bytes on links.

Everything follows from the plan: nothing is measured, and nothing here needs torch. docs/measuring.md has the
same in words. `gloo_messages` turns operations into messages, and those into bytes on links.

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
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import ConfigError
from hpcpace.core.records import dataclass
from hpcpace.train.plan import (
    INT8_BLOCK,
    MASTER_DTYPES,
    POWERSGD_RANK,
    POWERSGD_START,
    SCALE_BYTES,
    TrainPlan,
    groups_along,
    next_multiple,
)
from hpcpace.train.settings import GPT2Shape, Mesh

Shape = tuple[int, ...]


def gpt2_shape(plan: TrainPlan) -> GPT2Shape:
    """Return the shape of the plan's GPT-2.

    Raises:
        ConfigError: the plan is one for another model.
    """
    if not isinstance(plan.shape, GPT2Shape):
        raise ConfigError(f"the network volume of {plan.settings.model} has no formula: use gpt2, or measure it")
    return plan.shape


def parameter_sizes(plan: TrainPlan, place: Mesh) -> list[int]:
    """Return the number of elements of each parameter that a rank holds before replicas share any out."""
    return [math.prod(shape) for stage in plan.stages_of(place) for shape in stage_parameters(plan, stage, place.tp)]


def stage_parameters(plan: TrainPlan, stage: int, tp: int) -> list[Shape]:
    """Return the shape of each parameter of a stage, or of the piece of it that a rank of tensor parallelism holds."""
    return [shape for piece in stage_pieces(plan, stage, tp) for shape in piece]


def stage_pieces(plan: TrainPlan, stage: int, tp: int) -> list[list[Shape]]:
    """Return the shapes of a stage's parameters by the part of the model: embedding, blocks, head.

    The head has no separate weight if it shares that of the embedding.
    """
    shape, num_tp = gpt2_shape(plan), plan.mesh.tp
    width, cut = shape.width, shape.width // num_tp
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(3 * cut, width), (3 * cut,), (width, cut), (width,)]
    mlp: list[Shape] = [(4 * cut, width), (4 * cut,), (width, 4 * cut), (width,)]
    # DTensor cuts like torch.chunk: the last piece of the vocabulary may be smaller, or empty.
    rows = math.ceil(shape.vocabulary / num_tp)
    vocabulary: Shape = (min(rows, max(0, shape.vocabulary - tp * rows)), width)
    is_first, is_last = stage == 0, stage == plan.num_stages - 1
    pieces: list[list[Shape]] = [[vocabulary, (shape.context, width)]] if is_first else []
    pieces += [[*norm, *attention, *norm, *mlp] for _ in shape.stage_layers(stage, plan.num_stages)]
    if is_last:
        pieces.append(norm if is_first else [*norm, vocabulary])
    return pieces


def sharded_units(plan: TrainPlan, stage: int, tp: int) -> list[list[Shape]]:
    """Return the parameters of a stage as `--zero 3` sends them: what belongs to no other unit, then each block.

    A head on a stage of its own is a unit, too; one that shares its weight with the embedding goes along with that.
    """
    pieces = stage_pieces(plan, stage, tp)
    is_first, is_last = stage == 0, stage == plan.num_stages - 1
    if is_first and is_last:
        return [[*pieces[0], *pieces[-1]], *pieces[1:-1]]
    return pieces


_MIB = 1024 * 1024
# torch.nn.parallel.DistributedDataParallel: dist._DEFAULT_FIRST_BUCKET_BYTES, then bucket_cap_mb=25.
_DDP_BUCKET_LIMITS = (_MIB, 25 * _MIB)
_DDP_BROADCAST_LIMITS = (250 * _MIB,)
_NEVER_FULL = math.inf


def replica_operations(plan: TrainPlan, *, is_compressed: bool = True) -> Iterator[Operation]:
    """Yield what replicas send each other in each step.

    Args:
        plan: the run.
        is_compressed: whether gradients are compressed already; PowerSGD begins after its first steps.
    """
    if plan.settings.sync_every > 1:
        return
    for place, ranks in groups_along(plan.mesh, "dp"):
        for stage in plan.stages_of(place):
            shapes = stage_parameters(plan, stage, place.tp)
            if plan.settings.zero == 3:
                yield from _sharded(plan, sharded_units(plan, stage, place.tp), ranks)
            elif plan.settings.hierarchical:
                yield from _hierarchical(plan, shapes, ranks)
            elif plan.settings.compress == "none" or not is_compressed:
                yield from _all_reduced(plan, shapes, ranks, master_itemsize(plan))
            elif plan.settings.compress in ("fp16", "bf16"):
                yield from _all_reduced(plan, shapes, ranks, 2)
            elif plan.settings.compress == "int8":
                yield from _quantized(shapes, ranks)
            else:
                yield from _factorised(plan, shapes, ranks)
        if plan.settings.zero == 1:
            yield from _updated(plan, place, ranks)


def averaging_operations(plan: TrainPlan) -> Iterator[Operation]:
    """Yield what the replicas of local SGD send each other after every `sync_every` steps: all parameters at once."""
    if plan.settings.sync_every == 1:
        return
    itemsize = master_itemsize(plan)
    for place, ranks in groups_along(plan.mesh, "dp"):
        size_bytes = sum(parameter_sizes(plan, place)) * itemsize
        yield Operation("all_reduce", "averaged parameters", ranks, size_bytes, itemsize)


def startup_operations(plan: TrainPlan) -> list[Operation]:
    """Return what happens once, before the first step: DDP sends the parameters of each replica 0 to the others.

    Where there is no DDP, nothing does: all replicas draw the same parameters.
    """
    if plan.settings.sync_every > 1 or plan.settings.zero == 3:
        return []
    itemsize = master_itemsize(plan)
    return [
        Operation("broadcast", "parameters", ranks, size, itemsize)
        for place, ranks in groups_along(plan.mesh, "dp")
        for stage in plan.stages_of(place)
        for size in _buckets(_sizes(stage_parameters(plan, stage, place.tp), itemsize), _DDP_BROADCAST_LIMITS)
    ]


def _all_reduced(plan: TrainPlan, shapes: list[Shape], ranks: tuple[int, ...], itemsize: int) -> Iterator[Operation]:
    """Yield DDP's all-reduces of gradients, which come once a step also where microbatches are accumulated.

    From the second step on, its buckets follow the order in which gradients are ready: backwards through the model.
    """
    full_itemsize = master_itemsize(plan)
    limits: tuple[float, ...] = _DDP_BUCKET_LIMITS
    if plan.settings.bucket_mb is not None:
        limits = (int(plan.settings.bucket_mb * _MIB),)
    elif plan.settings.has_one_bucket:
        limits = (_NEVER_FULL,)
    for size in _buckets(_sizes(shapes[::-1], full_itemsize), limits):
        yield Operation("all_reduce", "gradients", ranks, size // full_itemsize * itemsize, itemsize)


def _hierarchical(plan: TrainPlan, shapes: list[Shape], ranks: tuple[int, ...]) -> Iterator[Operation]:
    """Yield an average within hosts first: shares on each host, averages of shares between hosts, and gathers."""
    if plan.ranks_per_host is None:
        raise ConfigError("what --hierarchical sends depends on the hosts of the ranks: say how many each host has")
    by_host: dict[int, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(rank // plan.ranks_per_host, []).append(rank)
    num_local = len(ranks) // len(by_host)
    for plain in _all_reduced(plan, shapes, ranks, master_itemsize(plan)):
        if 1 in (len(by_host), num_local):
            yield plain
            continue
        share = -(-plain.size_bytes // (plain.itemsize * num_local)) * plain.itemsize
        for local in by_host.values():
            yield Operation("reduce_scatter", "gradients", tuple(local), share * num_local, plain.itemsize)
            yield Operation("all_gather", "gradients", tuple(local), share * num_local, plain.itemsize)
        for across in zip(*by_host.values(), strict=True):
            yield Operation("all_reduce", "gradients", across, share, plain.itemsize)


def _quantized(shapes: list[Shape], ranks: tuple[int, ...]) -> Iterator[Operation]:
    """Yield the two operations of the 8-bit average, both of whose messages are bytes."""
    size = int8_message_bytes(sum(map(math.prod, shapes)), len(ranks))
    yield Operation("all_to_all", "gradients", ranks, size, 1)
    yield Operation("all_gather", "gradients", ranks, size, 1)


def _factorised(plan: TrainPlan, shapes: list[Shape], ranks: tuple[int, ...]) -> Iterator[Operation]:
    """Yield PowerSGD's all-reduces: of what is not compressed, of all P, of all Q."""
    itemsize = master_itemsize(plan)
    for num_elements in powersgd_elements(shapes):
        yield Operation("all_reduce", "gradients", ranks, num_elements * itemsize, itemsize)


def _sharded(plan: TrainPlan, units: list[list[Shape]], ranks: tuple[int, ...]) -> Iterator[Operation]:
    """Yield fully_shard's all-gathers of parameters and reduce-scatters of gradients, unit by unit.

    Each parameter is cut along its first dimension, and filled up so that all shares are alike. Without a pipeline, all
    units but the first are let go after forward and gathered again for backward. They are gathered in the type of the
    computation, and their gradients are added up in that of the parameters.
    """
    gathered, reduced, num_ranks = compute_itemsize(plan), master_itemsize(plan), len(ranks)
    for index, unit in enumerate(units):
        size = sum(-(-shape[0] // num_ranks) * num_ranks * math.prod(shape[1:]) for shape in unit)
        count = 2 if plan.mesh.pp == 1 and index > 0 else 1
        yield Operation("all_gather", "parameters", ranks, size * gathered, gathered, count)
        yield Operation("reduce_scatter", "gradients", ranks, size * reduced, reduced)


def _updated(plan: TrainPlan, place: Mesh, ranks: tuple[int, ...]) -> Iterator[Operation]:
    """Yield the broadcasts of the parameters that each replica has stepped.

    torch deals parameters out from the largest to the smallest, matrices before vectors, each to the replica that has
    least so far (ZeroRedundancyOptimizer).
    """
    itemsize, owned = master_itemsize(plan), [0] * len(ranks)
    shapes = [shape for stage in plan.stages_of(place) for shape in stage_parameters(plan, stage, place.tp)]
    for has_decay in (True, False):
        for size in sorted((math.prod(s) for s in shapes if (len(s) > 1) == has_decay), reverse=True):
            owned[owned.index(min(owned))] += size
    for index, num_elements in enumerate(owned):
        members = ranks[index:] + ranks[:index]
        yield Operation("broadcast", "updated parameters", members, num_elements * itemsize, itemsize)


def _sizes(shapes: Sequence[Shape], itemsize: int) -> list[int]:
    return [math.prod(shape) * itemsize for shape in shapes]


def _buckets(sizes: Sequence[int], limits: Sequence[float]) -> list[int]:
    """Return the sizes of DDP's buckets: each is closed once it reaches its limit, the last limit goes on for all."""
    buckets: list[int] = []
    open_size = 0
    for size in sizes:
        open_size += size
        if open_size >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(open_size)
            open_size = 0
    return [*buckets, open_size] if open_size else buckets


_LOSS_LOG_ITEMSIZE = 8
"""Losses of several steps travel together as float64."""


def step_operations(plan: TrainPlan) -> list[Operation]:
    """Return what one step consists of, on all ranks.

    The first step differs in how DDP cuts its gradients into buckets, though not in the sum of their sizes, and
    PowerSGD compresses nothing in the first two. Averaging of local SGD comes on top after every `sync_every` steps.

    Raises:
        ConfigError: there is no formula for the model.
    """
    return [*replica_operations(plan), *_operations_within_replicas(plan)]


def loss_operations(plan: TrainPlan) -> list[Operation]:
    """Return how the losses of all steps of a run are brought together, `log_every` steps at a time."""
    every, ranks = plan.settings.log_every, tuple(range(plan.mesh.size))
    full, rest = divmod(plan.settings.steps, every)
    if len(ranks) == 1:
        return []
    return [
        Operation("all_reduce", "losses", ranks, num_losses * _LOSS_LOG_ITEMSIZE, _LOSS_LOG_ITEMSIZE, count)
        for num_losses, count in ((every, full), (rest, 1))
        if num_losses * count
    ]


def run_operations(plan: TrainPlan) -> list[Operation]:
    """Return what a whole run consists of, evaluations and checkpoints apart.

    Raises:
        ConfigError: there is no formula for the model.
    """
    settings = plan.settings
    num_plain = min(POWERSGD_START, settings.steps) if settings.compress == "powersgd" else 0
    return [
        *startup_operations(plan),
        *_times(replica_operations(plan, is_compressed=False), num_plain),
        *_times(replica_operations(plan), settings.steps - num_plain),
        *_times(averaging_operations(plan), settings.steps // settings.sync_every),
        *_times(_operations_within_replicas(plan), settings.steps),
        *loss_operations(plan),
    ]


def _times(operations: Iterator[Operation], count: int) -> list[Operation]:
    return [replace(operation, count=operation.count * count) for operation in operations if count]


def _operations_within_replicas(plan: TrainPlan) -> Iterator[Operation]:
    return itertools.chain(_pipeline_operations(plan), _tied_operations(plan), _tensor_operations(plan))


def _pipeline_operations(plan: TrainPlan) -> Iterator[Operation]:
    """Yield the hidden state of each microbatch to the next stage, and its gradient back."""
    itemsize, count = compute_itemsize(plan), _num_microbatches(plan)
    for _, ranks in groups_along(plan.mesh, "pp"):
        stages = [ranks[stage % len(ranks)] for stage in range(plan.num_stages)]
        for pair in itertools.pairwise(stages):
            for cause, ends in (("activations", pair), ("activation gradients", pair[::-1])):
                yield Operation("send", cause, ends, _hidden_size(plan) * itemsize, itemsize, count)


def _tied_operations(plan: TrainPlan) -> Iterator[Operation]:
    """Yield the all-reduce of the tied weight's gradient between first and last stage."""
    num_shares = plan.mesh.dp if plan.settings.zero == 3 else 1
    for place, ranks in groups_along(plan.mesh, "pp"):
        rows, width = stage_parameters(plan, 0, place.tp)[0]
        # fully_shard cuts like torch.chunk: the last share may be smaller, or empty.
        most = math.ceil(rows / num_shares)
        index = place.dp if num_shares > 1 else 0
        share = min(most, max(0, rows - index * most))
        itemsize = master_itemsize(plan)
        yield Operation("all_reduce", "tied weight", (ranks[0], ranks[-1]), share * width * itemsize, itemsize)


def _tensor_operations(plan: TrainPlan) -> Iterator[Operation]:
    """Yield the all-reduces of tensor parallelism (Shoeybi et al. 2019, section 3).

    A block adds up its attention and its MLP forward, and the gradients of their inputs backward. The embedding adds
    up forward, the head backward. The loss needs the largest logit, the sum of exponentials and the target's term.
    What is looked up has the type of the table: autocast rounds only what is multiplied.
    """
    shape, master, num_microbatches = gpt2_shape(plan), master_itemsize(plan), _num_microbatches(plan)
    looked_up = compute_itemsize(plan) if plan.settings.zero == 3 else master
    for place, ranks in groups_along(plan.mesh, "tp"):
        stages = plan.stages_of(place)
        is_last = stages[-1] == plan.num_stages - 1
        num_layers = sum(len(shape.stage_layers(stage, plan.num_stages)) for stage in stages)
        counts = Counter({compute_itemsize(plan): 4 * num_layers + is_last})
        counts[looked_up] += stages[0] == 0
        for itemsize, count in counts.items():
            size_bytes = _hidden_size(plan) * itemsize
            yield Operation("all_reduce", "tensor parallelism", ranks, size_bytes, itemsize, count * num_microbatches)
        if is_last:
            size_bytes = _tokens_per_microbatch(plan) * master
            yield Operation("all_reduce", "loss over a cut vocabulary", ranks, size_bytes, master, 3 * num_microbatches)


def _num_microbatches(plan: TrainPlan) -> int:
    return plan.settings.microbatches if plan.mesh.pp > 1 else 1


def _tokens_per_microbatch(plan: TrainPlan) -> int:
    return plan.sequences_per_replica // _num_microbatches(plan) * plan.seq_len


def _hidden_size(plan: TrainPlan) -> int:
    return _tokens_per_microbatch(plan) * gpt2_shape(plan).width


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
