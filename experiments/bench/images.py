"""Measures ResNet-18 images/s in one process: hpcpace's model against torchvision's, in its form for 32 x 32 pixels.

Both have the same weights, optimizer, data, type and threads, and take turns in one process; equal losses and gradients
are checked first, in float32. `--device cuda` has not been run on a GPU yet. `python -m experiments.bench.images`
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.bench.models import (
    Step,
    add_options,
    check_same_gradients,
    compare,
    load_torchvision,
    open_device,
    training_step,
)
from hpcpace.train.data import open_images
from hpcpace.train.data_parallel import build_optimizer
from hpcpace.train.models import ResNet, autocast, build_resnet
from hpcpace.train.presets import RESNET18

_PARTS = {"conv_1": "conv1", "bn_1": "bn1", "conv_2": "conv2", "bn_2": "bn2", "shortcut": "downsample"}


def peer_model() -> nn.Module:
    """Return torchvision's model with the stem that is usual for CIFAR-10, as ours has it: 3 x 3, and no pooling."""
    model: nn.Module = load_torchvision().models.resnet18(num_classes=RESNET18.num_classes)
    model.conv1 = nn.Conv2d(3, RESNET18.widths[0], 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model.train()


def peer_name(name: str) -> str:
    """Return how torchvision calls a parameter of ours: `blocks.3.conv_1.weight` is `layer2.1.conv1.weight`."""
    first, *rest = name.split(".")
    if first != "blocks":
        return ".".join([{"conv": "conv1", "bn": "bn1", "classes": "fc"}[first], *rest])
    stage, block = divmod(int(rest[0]), RESNET18.blocks_per_stage)
    return ".".join([f"layer{1 + stage}", str(block), _PARTS[rest[1]], *rest[2:]])


def copy_weights(ours: ResNet, peer: nn.Module) -> dict[str, nn.Parameter]:
    """Copy our weights into the peer, and return its parameters by our names."""
    theirs = dict(peer.named_parameters())
    pairs = {name: theirs[peer_name(name)] for name, _ in ours.named_parameters()}
    assert len(pairs) == len(theirs)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            pairs[name].copy_(parameter)
    return pairs


def check_same_work(ours: ResNet, peer: nn.Module, peer_loss: Step, inputs: Tensor, targets: Tensor) -> None:
    """Give the peer our weights, and refuse to compare models that compute different things in float32."""
    pairs = copy_weights(ours, peer)
    # On a GPU cuDNN would round to TF32, and sums are in another order.
    slack = 10 if inputs.is_cuda else 1
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        mine, theirs = ours(inputs, targets), peer_loss(inputs, targets)
        mine.backward()
        theirs.backward()
    torch.testing.assert_close(mine, theirs, rtol=slack * 1e-5, atol=0)
    check_same_gradients(ours, pairs, tolerance=slack * 1e-3)
    ours.zero_grad()
    peer.zero_grad()
    print(f"same work: both losses {float(mine.detach()):.6f}, gradients agree")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--block-steps", type=int, default=1, help="steps of a turn")
    parser.add_argument("--batch-size", type=int, default=32)
    add_options(parser)
    args = parser.parse_args()
    device = open_device(args.device)
    images = open_images(None)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        found, labels = images.batch(step, seed=0, batch_size=args.batch_size, rows=slice(None))
        return torch.from_numpy(found).to(device), torch.from_numpy(labels).to(device)

    ours, peer = build_resnet(RESNET18, seed=0, device=device), peer_model().to(device)

    def peer_loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(peer(inputs), targets)

    check_same_work(ours, peer, peer_loss, *batch(0))
    for model in (ours, peer):
        autocast(model, args.dtype, device)
    print(f"ResNet-18, {args.dtype}, batch {args.batch_size} of 32 x 32")
    optimizers = [build_optimizer(model.parameters(), learning_rate=3e-4) for model in (ours, peer)]
    compare(
        {
            "hpcpace": training_step(ours, optimizers[0]),
            "torchvision": training_step(peer_loss, optimizers[1]),
        },
        batch,
        num_pairs=args.pairs,
        samples_per_step=args.batch_size,
        unit="images",
        steps_per_turn=args.block_steps,
        device=device,
    )


if __name__ == "__main__":
    main()
