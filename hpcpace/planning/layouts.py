"""Layouts of a job, thousands at once: how its ranks share the model, the batch and the state of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import IntEnum
from functools import cache
from itertools import product
from math import isqrt

import numpy as np

from hpcpace.core.errors import ConfigError
from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Ints
from hpcpace.planning.model import Model

_SHOWN = 6  # display: numbers to choose from


class Recompute(IntEnum):
    """Which activations the backward pass computes again (Korthikanti et al. 2023)."""

    NONE = 0
    SELECTIVE = 1
    FULL = 2


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Columns of one row for each layout, int64, (num_layouts,).

    Attributes:
        dp, pp, tp: sizes of data, pipeline and tensor parallelism.
        zero: stage of ZeRO, 0 to 3 (Rajbhandari et al. 2020).
        micro_batch: sequences of a microbatch of a replica.
        num_micro: microbatches of a replica in a step; without a pipeline their gradients are accumulated.
        recompute: a `Recompute`.
        element_bytes: of an activation or a gradient on its way, 2 or 4.
        is_sequence_split: whether tensor parallelism also splits what lies between its matrix products, 0 or 1.
        interleave: stages of the model that each rank of a pipeline has.
    """

    dp: Ints
    pp: Ints
    tp: Ints
    zero: Ints
    micro_batch: Ints
    num_micro: Ints
    recompute: Ints
    element_bytes: Ints
    is_sequence_split: Ints
    interleave: Ints

    @classmethod
    def of(cls, **columns: Ints | Sequence[int] | int) -> Layouts:
        """Return layouts of columns, of which single numbers hold for all; what is missing is the plainest.

        Raises:
            ConfigError: columns of different lengths, or numbers below 1 where that has no meaning.
        """
        plain = {"zero": 0, "recompute": 0, "is_sequence_split": 0}
        known = [field.name for field in fields(cls)]
        values = [np.asarray(columns.get(name, plain.get(name, 1 if name != "element_bytes" else 2))) for name in known]
        try:
            arrays = np.broadcast_arrays(*(np.atleast_1d(value).astype(np.int64) for value in values))
        except ValueError:
            raise ConfigError("columns of layouts have different lengths") from None
        for name, column in zip(known, arrays, strict=True):
            if column.size and column.min() < plain.get(name, 1):
                raise ConfigError(f"layouts: {name} is {column.min()}: it must be at least {plain.get(name, 1)}")
        return cls(**{name: np.array(column) for name, column in zip(known, arrays, strict=True)})

    def __len__(self) -> int:
        """Return the number of layouts."""
        return len(self.dp)

    def take(self, which: Ints | Bools) -> Layouts:
        """Return some of the layouts."""
        return Layouts(**{field.name: getattr(self, field.name)[which] for field in fields(self)})

    def row(self, index: int) -> dict[str, int]:
        """Return one layout by the names of its columns."""
        return {field.name: int(getattr(self, field.name)[index]) for field in fields(self)}

    @property
    def num_ranks(self) -> Ints:
        """Ranks of each layout."""
        return self.dp * self.pp * self.tp

    @property
    def sequences(self) -> Ints:
        """Sequences of a step, over all replicas."""
        return self.dp * self.micro_batch * self.num_micro


def enumerate_layouts(
    model: Model,
    num_ranks: int,
    batch: int,
    choices: Mapping[str, Sequence[int]] | None = None,
    *,
    gpus_per_node: int = 1,
) -> Layouts:
    """Return all layouts of a number of ranks that a model and a batch can be cut into.

    Groups and replicas that begin on one node and end in the middle of another one are left out: some of them would
    cross more links than others.

    Args:
        model: layers bound the stages, heads the tensor parallelism.
        num_ranks: of the job.
        batch: sequences of a step.
        choices: values of some columns; without them, every divisor of the ranks for `pp` and `tp`, every divisor of a
            replica's sequences for `micro_batch`, ZeRO 0, 1 and 3, and all recomputation.
        gpus_per_node: ranks that a node takes.

    Raises:
        ConfigError: no layout fits.
    """
    allowed = dict(choices or {})
    divisors = _divisors(num_ranks)
    rows = []
    for tp, pp in product(allowed.get("tp", divisors), allowed.get("pp", divisors)):
        if num_ranks % (tp * pp) or model.num_heads % tp or pp > model.num_layers:
            continue
        if num_ranks > gpus_per_node and not all(_is_aligned(size, gpus_per_node) for size in (tp, tp * pp)):
            continue
        dp = num_ranks // (tp * pp)
        if batch % dp or dp not in allowed.get("dp", [dp]):
            continue
        for micro in allowed.get("micro_batch", _divisors(batch // dp)):
            num_micro, rest = divmod(batch // dp, micro)
            if rest or (num_micro < pp and pp > 1) or num_micro not in allowed.get("num_micro", [num_micro]):
                continue
            # ZeRO shares nothing out without replicas, and stage 3 would gather each stage again for each microbatch.
            zeros = [zero for zero in allowed.get("zero", (0, 1, 3)) if zero == 0 or (dp > 1 and (zero < 3 or pp == 1))]
            for zero, recompute in product(zeros, allowed.get("recompute", tuple(Recompute))):
                rows.append((dp, pp, tp, zero, micro, num_micro, int(recompute)))
    if not rows:
        raise ConfigError(
            f"no layout of {num_ranks} ranks fits {model.name} ({model.num_layers} layers, {model.num_heads} heads) "
            f"and a batch of {batch}: {_why_none(model, num_ranks, batch, allowed)}"
        )
    names = ("dp", "pp", "tp", "zero", "micro_batch", "num_micro", "recompute")
    columns = dict(zip(names, np.array(rows, np.int64).T, strict=True))
    return Layouts.of(**columns, element_bytes=allowed.get("element_bytes", (2,))[0])


def _why_none(model: Model, num_ranks: int, batch: int, allowed: Mapping[str, Sequence[int]]) -> str:
    """Return what no layout fits, and what to do about it."""
    divided = [
        *((name, num_ranks, "ranks") for name in ("dp", "pp", "tp")),
        ("tp", model.num_heads, "heads"),
        ("dp", batch, "sequences of a step"),
        ("micro_batch", batch, "sequences of a step"),
    ]
    for name, number, what in divided:
        values = allowed.get(name, ())
        if values and not any(number % value == 0 for value in values):
            return f"{name}={','.join(map(str, values))} does not divide {number} {what}: choose from {_shown(number)}"
    if min(allowed.get("pp", (1,))) > model.num_layers:
        return f"a pipeline has at most {model.num_layers} stages, one for each layer"
    divisors = _divisors(num_ranks)
    cuts = [
        tp * pp
        for tp, pp in product(allowed.get("tp", divisors), allowed.get("pp", divisors))
        if num_ranks % (tp * pp) == 0 and model.num_heads % tp == 0 and pp <= model.num_layers
    ]
    replicas = sorted({num_ranks // cut for cut in cuts} & {*allowed.get("dp", divisors)})
    if replicas and not any(batch % dp == 0 for dp in replicas):
        return f"choose a --batch that is a multiple of {' or '.join(map(str, replicas[:_SHOWN]))}, its replicas"
    return "restrict dp, pp, tp and micro_batch less, or choose a larger --batch"


def _shown(number: int) -> str:
    divisors = _divisors(number)
    return ", ".join(map(str, divisors[:_SHOWN])) + (", ..." if len(divisors) > _SHOWN else "")


def _is_aligned(size: int, gpus_per_node: int) -> bool:
    return gpus_per_node % size == 0 or size % gpus_per_node == 0


@cache
def _divisors(number: int) -> list[int]:
    low = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return sorted({*low, *(number // one for one in low)})
