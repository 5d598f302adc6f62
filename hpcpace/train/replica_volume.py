"""What replicas send each other in a step: gradients, compressed or not, shares of the model, or parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hpcpace.train.compression import int8_message_bytes, powersgd_elements
from hpcpace.train.mesh import Mesh
from hpcpace.train.operations import Operation, compute_itemsize, groups_along, master_itemsize
from hpcpace.train.parameters import Shape, parameter_sizes, sharded_units, stage_parameters
from hpcpace.train.plan import TrainPlan

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
        size = sum(parameter_sizes(plan, place)) * itemsize
        yield Operation(kind="all_reduce", cause="averaged parameters", ranks=ranks, size_bytes=size, itemsize=itemsize)


def startup_operations(plan: TrainPlan) -> list[Operation]:
    """Return what happens once, before the first step: DDP sends the parameters of each replica 0 to the others.

    Where there is no DDP, nothing does: all replicas draw the same parameters.
    """
    if plan.settings.sync_every > 1 or plan.settings.zero == 3:
        return []
    itemsize = master_itemsize(plan)
    return [
        Operation(kind="broadcast", cause="parameters", ranks=ranks, size_bytes=size, itemsize=itemsize)
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
        yield Operation(
            kind="all_reduce",
            cause="gradients",
            ranks=ranks,
            size_bytes=size // full_itemsize * itemsize,
            itemsize=itemsize,
        )


def _quantized(shapes: list[Shape], ranks: tuple[int, ...]) -> Iterator[Operation]:
    """Yield the two operations of the 8-bit average, both of whose messages are bytes."""
    size = int8_message_bytes(sum(map(math.prod, shapes)), len(ranks))
    yield Operation(kind="all_to_all", cause="gradients", ranks=ranks, size_bytes=size, itemsize=1)
    yield Operation(kind="all_gather", cause="gradients", ranks=ranks, size_bytes=size, itemsize=1)


def _factorised(plan: TrainPlan, shapes: list[Shape], ranks: tuple[int, ...]) -> Iterator[Operation]:
    """Yield PowerSGD's all-reduces: of what is not compressed, of all P, of all Q."""
    itemsize = master_itemsize(plan)
    for num_elements in powersgd_elements(shapes):
        yield Operation(
            kind="all_reduce",
            cause="gradients",
            ranks=ranks,
            size_bytes=num_elements * itemsize,
            itemsize=itemsize,
        )


def _sharded(plan: TrainPlan, units: list[list[Shape]], ranks: tuple[int, ...]) -> Iterator[Operation]:
    """Yield fully_shard's all-gathers of parameters and reduce-scatters of gradients, unit by unit.

    Each parameter is cut along its first dimension, and filled up so that all shares are alike. Without a pipeline, all
    units but the first are let go after forward and gathered again for backward. They are gathered in the type of the
    computation, and their gradients are added up in that of the parameters.
    """
    gathered, reduced, num_ranks = compute_itemsize(plan), master_itemsize(plan), len(ranks)
    for index, unit in enumerate(units):
        size = sum(-(-shape[0] // num_ranks) * num_ranks * math.prod(shape[1:]) for shape in unit)
        yield Operation(
            kind="all_gather",
            cause="parameters",
            ranks=ranks,
            size_bytes=size * gathered,
            itemsize=gathered,
            count=2 if plan.mesh.pp == 1 and index > 0 else 1,
        )
        yield Operation(
            kind="reduce_scatter", cause="gradients", ranks=ranks, size_bytes=size * reduced, itemsize=reduced
        )


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
        yield Operation(
            kind="broadcast",
            cause="updated parameters",
            ranks=ranks[index:] + ranks[:index],
            size_bytes=num_elements * itemsize,
            itemsize=itemsize,
        )


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
