"""A set-up as a plan of hpcpace.train: its settings, and its model with widths scaled down if the study says so.

Scaled by s, a GPT-2 has 1/s of the width, the vocabulary and the context, and all of its layers. Then parameters of
blocks and of the vocabulary, and activations of a step at the same batch in sequences, all go down by s^2 and keep
their ratio, and so do the volumes of data, tensor and pipeline parallelism.
"""

from __future__ import annotations

from dataclasses import replace

from hpcpace.config import TrainConfig
from hpcpace.core.errors import ConfigError
from hpcpace.studies.setups import Setup
from hpcpace.train.plan import TrainPlan, plan_training
from hpcpace.train.presets import GPT2Shape, ModelShape


def settings_of(setup: Setup, base: TrainConfig) -> TrainConfig:
    """Return the settings of a set-up's training.

    Args:
        setup: what is trained.
        base: what a set-up does not say, such as data and type of numbers.
    """
    return replace(
        base,
        model=setup.model,
        preset=setup.preset or base.preset,
        mesh=setup.mesh,
        batch_size=setup.global_batch,
        microbatches=setup.microbatches,
        steps=setup.steps,
        warmup_steps=setup.warmup_steps,
        seq_len=None,
        resume="never",
    )


def planned(setup: Setup, base: TrainConfig | None = None) -> TrainPlan:
    """Return the plan of a set-up's training.

    Raises:
        ConfigError: the model cannot be scaled down that far.
        MeshError: model, mesh and batch do not fit.
    """
    plan = plan_training(settings_of(setup, base or TrainConfig()), setup.layout.num_ranks)
    if setup.shrink == 1:
        return plan
    shape = shrunk(plan.shape, setup.shrink)
    seq_len = shape.context if isinstance(shape, GPT2Shape) else plan.seq_len
    return replace(plan, shape=shape, shrink=setup.shrink, seq_len=seq_len)


def shrunk(shape: ModelShape, divisor: int) -> ModelShape:
    """Return a model with all widths divided, for GPT-2 also vocabulary and context; layers and heads stay.

    Raises:
        ConfigError: a width cannot be divided.
    """
    if isinstance(shape, GPT2Shape):
        if shape.width % (divisor * shape.num_heads):
            raise ConfigError(
                f"a width of {shape.width} over {shape.num_heads} heads cannot be divided by {divisor}: "
                f"take a divisor of {shape.width // shape.num_heads}"
            )
        return replace(
            shape,
            width=shape.width // divisor,
            context=shape.context // divisor,
            vocabulary=shape.vocabulary // divisor,
        )
    if any(width % divisor for width in shape.widths):
        raise ConfigError(
            f"widths of {shape.widths} cannot be divided by {divisor}: take a divisor of {shape.widths[0]}"
        )
    return replace(shape, widths=tuple(width // divisor for width in shape.widths))
