"""The operations and compressed sizes that the formula of the network volume counts; without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hpcpace.train.plan import TrainPlan
from hpcpace.train.presets import Mesh

INT8_BLOCK = 256
"""Elements with a scale of their own, as in Dettmers et al. 2022 (block-wise quantization)."""
SCALE_BYTES = 4
POWERSGD_RANK = 4
"""Rank of PowerSGD's matrices, the largest of the paper's (Vogels et al. 2019, table 3)."""
POWERSGD_START = 2
"""Steps before PowerSGD begins: DDP makes its buckets anew after the first step, which torch's hook cannot follow."""
_LEAST_SAVING = 2
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
        if (rows + columns) * rank * _LEAST_SAVING < rows * columns:
            left, right = left + rows * rank, right + columns * rank
        else:
            plain += rows * columns
    return plain, left, right


ITEMSIZES = {"float32": 4, "bfloat16": 2, "float64": 8}
MASTER_DTYPES = {"float32": "float32", "bfloat16": "float32", "float64": "float64"}
"""Type of parameters, gradients and the optimizer's state, by that of the computation."""
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


@dataclass(frozen=True, kw_only=True)
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
