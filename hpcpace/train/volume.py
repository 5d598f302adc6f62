"""Which collectives and messages a training run consists of, and how large they are, before it runs.

Everything follows from the plan: nothing is measured, and nothing here needs torch. docs/network-volume.md has the
same in words. `gloo_messages` turns operations into messages, and `packet_overhead` turns messages into bytes on links.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from hpcpace.train.compression import POWERSGD_START
from hpcpace.train.operations import Operation, compute_itemsize, groups_along, master_itemsize
from hpcpace.train.parameters import gpt2_shape, parameter_sizes, stage_parameters
from hpcpace.train.plan import TrainPlan
from hpcpace.train.replica_volume import averaging_operations, replica_operations, startup_operations

__all__ = [
    "Operation", "averaging_operations", "loss_operations", "parameter_sizes", "run_operations", "startup_operations",
    "step_operations",
]  # fmt: skip

_LOSS_LOG_ITEMSIZE = 8
"""Losses of several steps travel together as float64."""


def step_operations(plan: TrainPlan) -> list[Operation]:
    """Return what one step consists of, on all ranks.

    The first step differs in how DDP cuts its gradients into buckets, though not in the sum of their sizes, and
    PowerSGD compresses nothing in the first two. Averaging of local SGD comes on top after every `sync_every` steps.

    Raises:
        ConfigError: there is no formula for the model.
    """
    return [*replica_operations(plan), *_other_operations(plan)]


def loss_operations(plan: TrainPlan) -> list[Operation]:
    """Return how the losses of all steps of a run are brought together, `log_every` steps at a time."""
    every, ranks = plan.settings.log_every, tuple(range(plan.mesh.size))
    full, rest = divmod(plan.settings.steps, every)
    if len(ranks) == 1:
        return []
    return [
        Operation(
            kind="all_reduce",
            cause="losses",
            ranks=ranks,
            size_bytes=num_losses * _LOSS_LOG_ITEMSIZE,
            itemsize=_LOSS_LOG_ITEMSIZE,
            count=count,
        )
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
        *_times(_other_operations(plan), settings.steps),
        *loss_operations(plan),
    ]


def _times(operations: Iterator[Operation], count: int) -> list[Operation]:
    return [replace(operation, count=operation.count * count) for operation in operations if count]


def _other_operations(plan: TrainPlan) -> Iterator[Operation]:
    yield from _pipeline_operations(plan)
    yield from _tied_operations(plan)
    yield from _tensor_operations(plan)


def _pipeline_operations(plan: TrainPlan) -> Iterator[Operation]:
    """Yield the hidden state of each microbatch to the next stage, and its gradient back."""
    for _, ranks in groups_along(plan.mesh, "pp"):
        stages = [ranks[stage % len(ranks)] for stage in range(plan.num_stages)]
        for pair in itertools.pairwise(stages):
            for cause, ends in (("activations", pair), ("activation gradients", pair[::-1])):
                yield Operation(
                    kind="send",
                    cause=cause,
                    ranks=ends,
                    size_bytes=_hidden_size(plan) * compute_itemsize(plan),
                    itemsize=compute_itemsize(plan),
                    count=_num_microbatches(plan),
                )


def _tied_operations(plan: TrainPlan) -> Iterator[Operation]:
    """Yield the all-reduce of the tied weight's gradient between first and last stage."""
    num_shares = plan.mesh.dp if plan.settings.zero == 3 else 1
    for place, ranks in groups_along(plan.mesh, "pp"):
        rows, width = stage_parameters(plan, 0, place.tp)[0]
        # fully_shard cuts like torch.chunk: the last share may be smaller, or empty.
        most = math.ceil(rows / num_shares)
        index = place.dp if num_shares > 1 else 0
        share = min(most, max(0, rows - index * most))
        yield Operation(
            kind="all_reduce",
            cause="tied weight",
            ranks=(ranks[0], ranks[-1]),
            size_bytes=share * width * master_itemsize(plan),
            itemsize=master_itemsize(plan),
        )


def _tensor_operations(plan: TrainPlan) -> Iterator[Operation]:
    """Yield the all-reduces of tensor parallelism (Shoeybi et al. 2019, section 3).

    A block adds up its attention and its MLP forward, and the gradients of their inputs backward. The embedding adds
    up forward, the head backward. The loss needs the largest logit, the sum of exponentials and the target's term.
    What is looked up has the type of the table: autocast rounds only what is multiplied.
    """
    mesh, shape = plan.mesh, gpt2_shape(plan)
    looked_up = compute_itemsize(plan) if plan.settings.zero == 3 else master_itemsize(plan)
    for place, ranks in groups_along(mesh, "tp"):
        stages = plan.stages_of(place)
        is_last = stages[-1] == plan.num_stages - 1
        num_layers = sum(len(shape.stage_layers(stage, plan.num_stages)) for stage in stages)
        counts = Counter({compute_itemsize(plan): 4 * num_layers + is_last})
        counts[looked_up] += stages[0] == 0
        for itemsize, count in counts.items():
            yield Operation(
                kind="all_reduce",
                cause="tensor parallelism",
                ranks=ranks,
                size_bytes=_hidden_size(plan) * itemsize,
                itemsize=itemsize,
                count=count * _num_microbatches(plan),
            )
        if is_last:
            yield Operation(
                kind="all_reduce",
                cause="loss over a cut vocabulary",
                ranks=ranks,
                size_bytes=_tokens_per_microbatch(plan) * master_itemsize(plan),
                itemsize=master_itemsize(plan),
                count=3 * _num_microbatches(plan),
            )


def _num_microbatches(plan: TrainPlan) -> int:
    return plan.settings.microbatches if plan.mesh.pp > 1 else 1


def _tokens_per_microbatch(plan: TrainPlan) -> int:
    return plan.sequences_per_replica // _num_microbatches(plan) * plan.seq_len


def _hidden_size(plan: TrainPlan) -> int:
    return _tokens_per_microbatch(plan) * gpt2_shape(plan).width
