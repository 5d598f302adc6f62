"""Measures GPT-2 tokens/s in one process: hpcpace's model against Hugging Face transformers', and nanoGPT's if given.

All have the same weights, attention kernel (sdpa), loss, optimizer, data, dtype and threads, and no dropout; they take
turns in one process. That they do the same work is checked first: from the same weights they give the same loss and the
same gradients in float32. On a GPU, which this has not run on yet, the use of its peak (MFU) is printed, too.
`python -m experiments.bench.tokens`
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from experiments.bench.models import (
    Peer,
    add_options,
    check_same_work,
    compare,
    flops_per_token,
    nanogpt_peer,
    open_device,
    peak_tflops,
    training_step,
    transformers_peer,
)
from hpcpace.train.data import open_text
from hpcpace.train.data_parallel import build_optimizer
from hpcpace.train.models import autocast, build_gpt2
from hpcpace.train.presets import GPT2_PRESETS, GPT2Shape

# Losses of models that train alike stay as close as that.
_LOSS_TOLERANCES = {"float32": 1e-2, "bfloat16": 5e-2}
_NUM_CHECKED = 2


def main() -> None:
    args = _arguments()
    device = open_device(args.device)
    shape = GPT2_PRESETS[args.preset]
    text = open_text(None, args.seq_len)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        rows = text.batch(step, seed=0, batch_size=args.batch_size, seq_len=args.seq_len, rows=slice(None))
        tokens = torch.from_numpy(rows).to(device)
        return tokens[:, :-1], tokens[:, 1:].contiguous()

    ours, peers = build_gpt2(shape, seed=0, device=device), _peers(args, shape)
    inputs, targets = (part[:_NUM_CHECKED] for part in batch(0))
    for peer in peers:
        peer.model.to(device)
        loss = check_same_work(ours, peer, inputs, targets)
        print(f"same work as {peer.name}: loss {loss:.6f}, gradients agree")
    losses = {"hpcpace": (ours, ours)} | {peer.name: (peer.model, peer.loss) for peer in peers}
    for model, _ in losses.values():
        autocast(model, args.dtype, device)
    print(f"GPT-2 {args.preset}, {args.dtype}, batch {args.batch_size} x {args.seq_len}")
    rates = compare(
        {
            name: training_step(loss, build_optimizer(model.parameters(), learning_rate=3e-4))
            for name, (model, loss) in losses.items()
        },
        batch,
        num_pairs=args.pairs,
        samples_per_step=args.batch_size * args.seq_len,
        unit="tokens",
        steps_per_turn=args.block_steps,
        loss_tolerance=_LOSS_TOLERANCES[args.dtype],
        device=device,
    )
    peak = args.peak_tflops or _peak_tflops(device, args.dtype)
    if peak is not None:
        shares = (
            f"{name} {rate * flops_per_token(shape, args.seq_len) / peak / 1e10:.1f} %" for name, rate in rates.items()
        )
        print(f"  MFU at a peak of {peak:g} TFLOPS: {', '.join(shares)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--block-steps", type=int, default=1, help="steps of a turn")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--preset", choices=tuple(GPT2_PRESETS), default="small")
    parser.add_argument("--nanogpt", type=Path, metavar="PATH", help="compare with nanoGPT, from a checkout of it")
    parser.add_argument(
        "--peak-tflops", type=float, help="peak of the device, for the MFU; default: that of known GPUs"
    )
    add_options(parser)
    return parser.parse_args()


def _peers(args: argparse.Namespace, shape: GPT2Shape) -> list[Peer]:
    return [transformers_peer(shape)] + ([] if args.nanogpt is None else [nanogpt_peer(shape, args.nanogpt)])


def _peak_tflops(device: torch.device, dtype: str) -> float | None:
    is_known = device.type == "cuda" and dtype == "bfloat16"
    return peak_tflops(torch.cuda.get_device_name(device)) if is_known else None


if __name__ == "__main__":
    main()
