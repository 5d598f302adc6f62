"""Mixed precision, and initial weights that depend on the seed and their name alone.

A stage computes in the type of `--dtype` and keeps its parameters in a master type. With bfloat16 the masters are
float32, as in Micikevicius et al. 2018: torch's autocast rounds what a matrix product or a convolution takes, and
gradients arrive in the type of the parameters. The hidden state between the layers is bfloat16, too, so that a pipeline
and tensor parallelism send it in two bytes.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hpcpace.train.operations import MASTER_DTYPES


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return a generator on the CPU that draws the same for a seed and a parameter's name on every rank."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def compute_dtype(dtype: str) -> torch.dtype:
    """Return the type of activations for a setting of `--dtype`."""
    found: torch.dtype = getattr(torch, dtype)
    return found


def master_dtype(dtype: str) -> torch.dtype:
    """Return the type of parameters, gradients and losses for a setting of `--dtype`."""
    return compute_dtype(MASTER_DTYPES[dtype])


def is_mixed(dtype: str) -> bool:
    """Return whether a setting of `--dtype` computes in another type than that of the parameters."""
    return MASTER_DTYPES[dtype] != dtype


def autocast(module: nn.Module, dtype: str, device: torch.device) -> None:
    """Let a module compute in a type, whoever calls it; its backward pass follows the types of its forward pass."""
    if is_mixed(dtype):
        # Around forward alone: torch advises against a backward pass under autocast, and a pipeline interleaves both.
        module.forward = torch.autocast(device.type, compute_dtype(dtype))(module.forward)


def sharding_policy(dtype: str) -> MixedPrecisionPolicy:
    """Return how fully_shard sends a model: parameters as they are used, gradients as they are kept."""
    if not is_mixed(dtype):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute_dtype(dtype), reduce_dtype=master_dtype(dtype))


def computed(values: Tensor) -> Tensor:
    """Return values in the type that autocast computes in here; as they are where it does not."""
    kind = values.device.type
    return values.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else values


class LayerNorm(nn.LayerNorm):
    """A layer norm that hands the hidden state on in the type in which it came, on GPUs as well.

    Autocast computes it in float32 on GPUs and returns that.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (..., width) to the same shape and type."""
        return super().forward(hidden).to(hidden.dtype)


class BatchNorm2d(nn.BatchNorm2d):
    """A batch norm whose weights have the type of its statistics, which fully_shard does not bring to bfloat16."""

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to the same shape."""
        assert self.running_mean is not None
        assert self.num_batches_tracked is not None
        if self.training:
            self.num_batches_tracked.add_(1)
        weight, bias = (parameter.to(self.running_mean.dtype) for parameter in (self.weight, self.bias))
        return nn.functional.batch_norm(
            images, self.running_mean, self.running_var, weight, bias, self.training, self.momentum or 0.0, self.eps
        )
