"""The one place that knows which module belongs to which shape."""

from __future__ import annotations

import torch

from hpcpace.train.gpt2 import GPT2, build_gpt2
from hpcpace.train.presets import ModelShape, ResNetShape
from hpcpace.train.resnet18 import ResNet, build_resnet

Model = GPT2 | ResNet
"""A model, or a stage of it: takes inputs and, for the loss, targets; `pieces()` are its parts of equal work."""


def build_stage(
    shape: ModelShape,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    stage: int = 0,
    num_stages: int = 1,
) -> Model:
    """Build a pipeline stage of a model with its initial parameters; the whole model is stage 0 of 1.

    Raises:
        ValueError: a stage of a model that has none.
    """
    if isinstance(shape, ResNetShape):
        if num_stages != 1:
            raise ValueError(f"resnet18 has one stage, not {num_stages}")
        return build_resnet(shape, seed=seed, dtype=dtype, device=device)
    return build_gpt2(shape, seed=seed, dtype=dtype, device=device, stage=stage, num_stages=num_stages)
