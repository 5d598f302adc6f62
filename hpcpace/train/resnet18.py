"""ResNet-18 (He et al. 2016) for images of 32 x 32 pixels, in the form that is usual for CIFAR-10.

Parameters are drawn by name like those of GPT-2, so that all replicas start from the same model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpace.train.precision import BatchNorm2d, generator_of
from hpcpace.train.presets import ResNetShape


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a residual connection, which is a 1 x 1 convolution where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn_1 = BatchNorm2d(width)
        self.conv_2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn_2 = BatchNorm2d(width)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(channels, width, 1, stride=stride, bias=False), BatchNorm2d(width))
            if stride != 1 or channels != width
            else nn.Identity()
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to the block's own channels, with the image divided by its stride."""
        hidden = functional.relu(self.bn_1(self.conv_1(images)))
        return functional.relu(self.bn_2(self.conv_2(hidden)) + self.shortcut(images))


class ResNet(nn.Module):
    """A ResNet of basic blocks for small images."""

    def __init__(self, shape: ResNetShape) -> None:
        super().__init__()
        stem = shape.widths[0]
        self.conv = nn.Conv2d(3, stem, 3, padding=1, bias=False)
        self.bn = BatchNorm2d(stem)
        blocks, channels = [], stem
        for stage, width in enumerate(shape.widths):
            for block in range(shape.blocks_per_stage):
                blocks.append(BasicBlock(channels, width, stride=2 if block == 0 and stage > 0 else 1))
                channels = width
        self.blocks = nn.ModuleList(blocks)
        self.classes = nn.Linear(channels, shape.num_classes)

    def pieces(self) -> Iterator[nn.Module]:
        """Yield the parts that make up nearly all of the computation: the blocks."""
        yield from self.blocks

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute the loss or the logits.

        Args:
            images: (batch, 3, 32, 32), in the type of the parameters.
            labels: int64, (batch,).

        Returns:
            The mean cross-entropy in float32 at least (scalar), or (batch, num_classes) logits without labels.
        """
        hidden = functional.relu(self.bn(self.conv(images)))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.classes(hidden.mean(dim=(2, 3)))
        if labels is None:
            return logits
        return functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def build_resnet(
    shape: ResNetShape, *, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> ResNet:
    """Build the model with its initial parameters.

    Convolutions are normal with a standard deviation of sqrt(2 / (k k channels out)) (He et al. 2015, section 2.2),
    as in the ResNet paper; the last layer is uniform within 1 / sqrt(inputs), its bias 0, norms are the identity.

    Args:
        shape: the model's shape.
        seed: what the parameters follow from.
        dtype: type of parameters and gradients; also of the computation, unless `precision.autocast` changes that.
        device: where the parameters go, after they were drawn on the CPU.
    """
    model = ResNet(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 4:
                std = math.sqrt(2 / (parameter.shape[0] * parameter.shape[2] * parameter.shape[3]))
                parameter.normal_(0.0, std, generator=generator_of(seed, name))
            elif parameter.dim() == 2:
                bound = 1 / math.sqrt(parameter.shape[1])
                parameter.uniform_(-bound, bound, generator=generator_of(seed, name))
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
    return model.to(device=device, dtype=dtype)
