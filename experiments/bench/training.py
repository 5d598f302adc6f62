"""Measures training steps in one process against those of a peer: `python -m experiments.bench.training WHAT`.

WHAT is `tokens`: GPT-2 against Hugging Face transformers', and nanoGPT's if given; `images`: ResNet-18 against
torchvision's, in its form for 32 x 32 pixels; or `compiled`: GPT-2 with and without `--compile`, which needs a C++
compiler. All have the same weights, optimizer, data, dtype and threads, GPT-2 the same attention kernel (sdpa) and no
dropout, and take turns in one process. That they do the same work is checked first: from the same weights they give the
same loss and the same gradients in float32. On a GPU, which this has not run on yet, the use of its peak (MFU) is
printed, too.

Options:
  what tokens|images|compiled  what is compared
  --pairs N         [20]
  --block-steps N   steps of a turn [1]
  --batch-size N    default: 1, of images 32
  --seq-len N       [512]
  --preset NAME     [small]
  --nanogpt PATH    compare with nanoGPT, from a checkout of it
  --peak-tflops X   peak of the device, for the MFU; default: of known GPUs
  --device cpu|cuda  compute on the CPU, or on one GPU [cpu]
  --dtype float32|bfloat16|fp32|bf16  compute in float32, or in bf16 by autocast with parameters in float32 [float32]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.bench import models
from experiments.options import command_line
from hpcpace.train.data import open_images, open_text
from hpcpace.train.data_parallel import build_optimizer
from hpcpace.train.models import ResNet, autocast, build_gpt2, build_resnet
from hpcpace.train.parallel import compile_pieces
from hpcpace.train.settings import GPT2_PRESETS, RESNET18, SHORT_DTYPES, GPT2Shape

# Losses of models that train alike stay as close as that.
_LOSS_TOLERANCES = {"float32": 1e-2, "bfloat16": 5e-2}
_NUM_CHECKED = 2
_LEARNING_RATE = 3e-4
_PARTS = {"conv_1": "conv1", "bn_1": "bn1", "conv_2": "conv2", "bn_2": "bn2", "shortcut": "downsample"}


def main() -> None:
    args = command_line(__doc__, preset=GPT2_PRESETS)
    args.batch_size = args.batch_size or (32 if args.what == "images" else 1)
    args.device, args.dtype = models.open_device(args.device), SHORT_DTYPES.get(args.dtype, args.dtype)
    {"tokens": _tokens, "images": _images, "compiled": _compiled}[args.what](args)


def _text(args: argparse.Namespace) -> models.Batch:
    """Return what makes the batch of tokens of a step."""
    text = open_text(None, args.seq_len)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        rows = text.batch(step, seed=0, batch_size=args.batch_size, seq_len=args.seq_len, rows=slice(None))
        tokens = torch.from_numpy(rows).to(args.device)
        return tokens[:, :-1], tokens[:, 1:].contiguous()

    return batch


def _stepping(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return models.training_step(loss, build_optimizer(model.parameters(), learning_rate=_LEARNING_RATE))


def _tokens(args: argparse.Namespace) -> None:
    shape, batch = GPT2_PRESETS[args.preset], _text(args)
    ours = build_gpt2(shape, seed=0, device=args.device)
    inputs, targets = (part[:_NUM_CHECKED] for part in batch(0))
    losses: dict[str, tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]] = {"hpcpace": (ours, ours)}
    for peer in _peers(args, shape):
        peer.model.to(args.device)
        loss = models.check_same_work(ours, peer, inputs, targets)
        print(f"same work as {peer.name}: loss {loss:.6f}, gradients agree")
        losses[peer.name] = (peer.model, peer.loss)
    for model, _ in losses.values():
        autocast(model, args.dtype, args.device)
    print(f"GPT-2 {args.preset}, {args.dtype}, batch {args.batch_size} x {args.seq_len}")
    rates = models.compare(
        {name: _stepping(*pair) for name, pair in losses.items()},
        batch,
        num_pairs=args.pairs,
        samples_per_step=args.batch_size * args.seq_len,
        unit="tokens",
        steps_per_turn=args.block_steps,
        loss_tolerance=_LOSS_TOLERANCES[args.dtype],
        device=args.device,
    )
    is_known = args.device.type == "cuda" and args.dtype == "bfloat16"
    peak = args.peak_tflops or (models.peak_tflops(torch.cuda.get_device_name(args.device)) if is_known else None)
    if peak is not None:
        tflops = {name: rate * models.flops_per_token(shape, args.seq_len) / 1e12 for name, rate in rates.items()}
        shares = ", ".join(f"{name} {100 * value / peak:.1f} %" for name, value in tflops.items())
        print(f"  MFU at a peak of {peak:g} TFLOPS: {shares}")


def _peers(args: argparse.Namespace, shape: GPT2Shape) -> list[models.Peer]:
    nanogpt = [] if args.nanogpt is None else [models.nanogpt_peer(shape, args.nanogpt)]
    return [models.transformers_peer(shape), *nanogpt]


def _compiled(args: argparse.Namespace) -> None:
    batch = _text(args)
    compiled, plain = (build_gpt2(GPT2_PRESETS[args.preset], seed=0) for _ in range(2))
    compile_pieces(compiled)
    begin_s = time.perf_counter()
    mine = compiled(*batch(0))
    mine.backward()
    print(f"the first step with --compile took {time.perf_counter() - begin_s:.1f} s")
    theirs = plain(*batch(0))
    theirs.backward()
    named = dict(plain.named_parameters())
    pairs = [(parameter, named[name], models.same) for name, parameter in compiled.named_parameters()]
    _check_same(compiled, mine, theirs, pairs, plain)
    print(f"GPT-2 {args.preset}, float32, batch {args.batch_size} x {args.seq_len}")
    steps = {"--compile": _stepping(compiled, compiled), "without": _stepping(plain, plain)}
    models.compare(steps, batch, num_pairs=args.pairs, samples_per_step=args.batch_size * args.seq_len, unit="tokens")


def _check_same(
    ours: nn.Module, mine: Tensor, theirs: Tensor, pairs: list[models.Pair], peer: nn.Module, slack: int = 1
) -> None:
    """Refuse to compare models of different losses or gradients, and forget the gradients."""
    torch.testing.assert_close(mine, theirs, rtol=slack * 1e-5, atol=0)
    models.check_same_gradients(pairs, tolerance=slack * 1e-3)
    for model in (ours, peer):
        model.zero_grad()
    print(f"same work: both losses {float(mine.detach()):.6f}, gradients agree")


def _images(args: argparse.Namespace) -> None:
    images = open_images(None)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        found, labels = images.batch(step, seed=0, batch_size=args.batch_size, rows=slice(None))
        return torch.from_numpy(found).to(args.device), torch.from_numpy(labels).to(args.device)

    ours, peer = build_resnet(RESNET18, seed=0, device=args.device), _torchvision_model().to(args.device)

    def peer_loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(peer(inputs), targets)

    pairs = _copy_weights(ours, peer)
    # On a GPU cuDNN would round to TF32, and sums are in another order.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        mine, theirs = ours(*batch(0)), peer_loss(*batch(0))
        mine.backward()
        theirs.backward()
    _check_same(ours, mine, theirs, pairs, peer, slack=10 if args.device.type == "cuda" else 1)
    for model in (ours, peer):
        autocast(model, args.dtype, args.device)
    print(f"ResNet-18, {args.dtype}, batch {args.batch_size} of 32 x 32")
    models.compare(
        {"hpcpace": _stepping(ours, ours), "torchvision": _stepping(peer, peer_loss)},
        batch,
        num_pairs=args.pairs,
        samples_per_step=args.batch_size,
        unit="images",
        steps_per_turn=args.block_steps,
        device=args.device,
    )


def _torchvision_model() -> nn.Module:
    """Return torchvision's model with the stem that is usual for CIFAR-10, as ours has it: 3 x 3, and no pooling."""
    model: nn.Module = models.load_torchvision().models.resnet18(num_classes=RESNET18.num_classes)
    model.conv1 = nn.Conv2d(3, RESNET18.widths[0], 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model.train()


def _peer_name(name: str) -> str:
    """Return how torchvision calls a parameter of ours: `blocks.3.conv_1.weight` is `layer2.1.conv1.weight`."""
    first, *rest = name.split(".")
    if first != "blocks":
        return ".".join([{"conv": "conv1", "bn": "bn1", "classes": "fc"}[first], *rest])
    stage, block = divmod(int(rest[0]), RESNET18.blocks_per_stage)
    return ".".join([f"layer{1 + stage}", str(block), _PARTS[rest[1]], *rest[2:]])


def _copy_weights(ours: ResNet, peer: nn.Module) -> list[models.Pair]:
    """Copy our weights into the peer, and return the parameters of both, pair by pair."""
    theirs = dict(peer.named_parameters())
    pairs = [(parameter, theirs.pop(_peer_name(name)), models.same) for name, parameter in ours.named_parameters()]
    assert not theirs
    with torch.no_grad():
        for mine, other, _ in pairs:
            other.copy_(mine)
    return pairs


if __name__ == "__main__":
    main()
