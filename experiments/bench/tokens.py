"""Measures GPT-2 small tokens/s in one process: hpcpace's model against Hugging Face transformers' GPT2LMHeadModel.

Both have the same weights, attention kernel (sdpa), loss, optimizer, data, dtype and threads, and no dropout; they
take turns in one process. That both do the same work is checked first: from the same weights they give the same loss
and the same gradients. Run it with `python -m experiments.bench.tokens`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from experiments.bench.pairs import median_interval
from experiments.bench.vision import load_torchvision
from hpcpace.train.data import open_text
from hpcpace.train.gpt2 import GPT2, build_gpt2
from hpcpace.train.optimizer import build_optimizer
from hpcpace.train.presets import GPT2_PRESETS, GPT2Shape

Step = Callable[[Tensor, Tensor], Tensor]
Pair = tuple[nn.Parameter, nn.Parameter, Callable[[Tensor], Tensor]]


def peer_model(shape: GPT2Shape, dtype: torch.dtype) -> transformers.GPT2LMHeadModel:
    """Return transformers' model of the same shape."""
    load_torchvision()
    config = transformers.GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.context,
        n_embd=shape.width,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = transformers.GPT2LMHeadModel(config).to(dtype).train()
    assert model.config._attn_implementation == "sdpa"
    return model


def copy_weights(ours: GPT2, peer: transformers.GPT2LMHeadModel) -> list[Pair]:
    """Copy our weights into the peer; return pairs of parameters and how one of ours is laid out in the peer."""
    width, head = ours.blocks["0"].attn.proj.in_features, ours.blocks["0"].attn.head_width

    def same(tensor: Tensor) -> Tensor:
        return tensor

    def transposed(tensor: Tensor) -> Tensor:
        return tensor.t()

    def qkv(tensor: Tensor) -> Tensor:  # rows by (head, q/k/v) here, columns by (q/k/v, head) there
        return tensor.view(-1, 3, head, *tensor.shape[1:]).transpose(0, 1).reshape(3 * width, -1).squeeze(-1).t()

    body = peer.transformer
    pairs = [(ours.embedding.wte.weight, body.wte.weight, same), (ours.embedding.wpe.weight, body.wpe.weight, same)]
    norms = [(ours.head.ln_f, body.ln_f)]
    for block, other in zip(ours.blocks.values(), body.h, strict=True):
        norms += [(block.ln_1, other.ln_1), (block.ln_2, other.ln_2)]
        for linear, conv, layout in (
            (block.attn.qkv, other.attn.c_attn, qkv),
            (block.attn.proj, other.attn.c_proj, transposed),
            (block.mlp.fc, other.mlp.c_fc, transposed),
            (block.mlp.proj, other.mlp.c_proj, transposed),
        ):
            pairs += [(linear.weight, conv.weight, layout), (linear.bias, conv.bias, layout if layout is qkv else same)]
    for norm, other in norms:
        pairs += [(norm.weight, other.weight, same), (norm.bias, other.bias, same)]
    assert len(pairs) == len(list(ours.parameters())) == len(list(peer.parameters()))
    with torch.no_grad():
        for mine, theirs, layout in pairs:
            theirs.copy_(layout(mine))
    return pairs


def ours_step(model: GPT2, optimizer: torch.optim.Optimizer) -> Step:
    """Return a training step of our model."""

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def peer_step(model: transformers.GPT2LMHeadModel, optimizer: torch.optim.Optimizer) -> Step:
    """Return a training step of the peer, with its own loss, over the same positions."""

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        # transformers shifts labels itself unless it is given shifted ones.
        loss = model(input_ids=inputs, labels=inputs, shift_labels=targets).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def check_same_work(
    ours: GPT2, peer: transformers.GPT2LMHeadModel, inputs: Tensor, targets: Tensor, tolerance: float
) -> float:
    """Refuse to compare models that compute different things; return the loss of both."""
    pairs = copy_weights(ours, peer)
    mine = ours(inputs, targets)
    theirs = peer(input_ids=inputs, labels=inputs, shift_labels=targets).loss
    mine.backward()
    theirs.backward()
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=0, check_dtype=False)
    for parameter, other, layout in pairs:
        difference = (layout(parameter.grad) - other.grad).norm() / other.grad.norm().clamp_min(1e-12)
        assert difference < 100 * tolerance, f"gradients differ by {difference:.2e}"
    ours.zero_grad()
    peer.zero_grad()
    return float(mine.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--preset", choices=tuple(GPT2_PRESETS), default="small")
    args = parser.parse_args()
    shape, dtype = GPT2_PRESETS[args.preset], getattr(torch, args.dtype)
    text = open_text(None, args.seq_len)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        rows = text.batch(step, seed=0, batch_size=args.batch_size, seq_len=args.seq_len, rows=slice(None))
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1], tokens[:, 1:].contiguous()

    ours, peer = build_gpt2(shape, seed=0, dtype=dtype), peer_model(shape, dtype)
    loss = check_same_work(ours, peer, *batch(0), tolerance=1e-5 if dtype == torch.float32 else 1e-2)
    print(f"same work: both losses {loss:.6f}, gradients agree")
    steps = {
        "hpcpace": ours_step(ours, build_optimizer(ours.parameters(), learning_rate=3e-4)),
        "transformers": peer_step(peer, build_optimizer(peer.parameters(), learning_rate=3e-4)),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for pair in range(args.pairs + 1):
        order = list(steps.items())[:: 1 if pair % 2 else -1]
        losses = {}
        for name, step in order:
            inputs, targets = batch(pair)
            begin = time.perf_counter()
            losses[name] = float(step(inputs, targets))
            if pair:  # the first pair is warm-up
                times[name].append(time.perf_counter() - begin)
        assert abs(losses["hpcpace"] / losses["transformers"] - 1) < (1e-2 if dtype == torch.float32 else 5e-2), losses
    ratios = np.array(times["transformers"]) / np.array(times["hpcpace"])
    ratio, low, high = median_interval(ratios)
    tokens = args.batch_size * args.seq_len
    print(
        f"GPT-2 {args.preset}, {args.dtype}, batch {args.batch_size} x {args.seq_len}, "
        f"{torch.get_num_threads()} threads, {args.pairs} pairs, "
        f"last losses {losses['hpcpace']:.4f} and {losses['transformers']:.4f}"
    )
    for name, values in times.items():
        print(f"  {name:13} {tokens / float(np.median(values)):8.1f} tokens/s (median of steps)")
    print(f"  ratio of tokens/s, hpcpace to transformers: {ratio:.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
