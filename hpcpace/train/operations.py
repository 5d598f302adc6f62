"""The operations that a training run consists of, as the formula of its network volume counts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hpcpace.train.mesh import Mesh
from hpcpace.train.plan import TrainPlan

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
