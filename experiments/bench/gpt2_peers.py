"""Other GPT-2s to compare ours with: Hugging Face transformers', and nanoGPT's from a checkout of it.

Both call their parts as OpenAI's code did, so that one table pairs the parameters of either with ours.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.bench.vision import load_torchvision
from hpcpace.train.models import GPT2
from hpcpace.train.presets import GPT2Shape

Loss = Callable[[Tensor, Tensor], Tensor]
Pair = tuple[nn.Parameter, nn.Parameter, Callable[[Tensor], Tensor]]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another GPT-2.

    Attributes:
        name: of its project.
        model: with the parts `transformer.wte`, `wpe`, `h` and `ln_f`.
        loss: maps inputs and targets to the mean loss.
        has_conv: whether its matrices are (inputs, outputs), as OpenAI's are.
        tolerance: relative difference of its loss from ours in float32; gradients may differ by 100 times that.
    """

    name: str
    model: Any
    loss: Loss
    has_conv: bool
    tolerance: float


def transformers_peer(shape: GPT2Shape) -> Peer:
    """Return transformers' model, without dropout, with its own loss."""
    load_torchvision()
    import transformers  # of the extra `bench`, and slow

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
    model = transformers.GPT2LMHeadModel(config).train()
    assert model.config._attn_implementation == "sdpa"

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        # transformers shifts labels itself unless it is given shifted ones.
        found: Tensor = model(input_ids=inputs, labels=inputs, shift_labels=targets).loss
        return found

    return Peer(name="transformers", model=model, loss=loss, has_conv=True, tolerance=1e-5)


def nanogpt_peer(shape: GPT2Shape, checkout: Path) -> Peer:
    """Return nanoGPT's model, without dropout, from the model.py of a checkout, which is run.

    Its GELU is exact, that of ours and of transformers is the approximation of OpenAI's code: hence the tolerance.
    """
    path = checkout / "model.py"
    if not path.is_file():
        sys.exit(f"{path} does not exist: --nanogpt takes a checkout of nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks for its module there
    spec.loader.exec_module(module)
    model = module.GPT(
        module.GPTConfig(
            block_size=shape.context,
            vocab_size=shape.vocabulary,
            n_layer=shape.num_layers,
            n_head=shape.num_heads,
            n_embd=shape.width,
            dropout=0.0,
            bias=True,
        )
    ).train()

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = model(inputs, targets)[1]
        return found

    return Peer(name="nanoGPT", model=model, loss=loss, has_conv=False, tolerance=1e-4)


def copy_weights(ours: GPT2, peer: Peer) -> list[Pair]:
    """Copy our weights into the peer; return pairs of parameters and how one of ours is laid out in the peer."""
    width, head = ours.blocks["0"].attn.proj.in_features, ours.blocks["0"].attn.head_width

    def same(tensor: Tensor) -> Tensor:
        return tensor

    def turned(tensor: Tensor) -> Tensor:
        return tensor.t() if peer.has_conv else tensor

    def qkv(tensor: Tensor) -> Tensor:  # rows by (head, q/k/v) here, by (q/k/v, head) there
        found = tensor.view(-1, 3, head, *tensor.shape[1:]).transpose(0, 1).reshape(3 * width, -1).squeeze(-1)
        return turned(found) if found.dim() > 1 else found

    body = peer.model.transformer
    pairs: list[Pair] = [
        (ours.embedding.wte.weight, body.wte.weight, same),
        (ours.embedding.wpe.weight, body.wpe.weight, same),
    ]
    norms = [(ours.head.ln_f, body.ln_f)]
    for block, other in zip(ours.blocks.values(), body.h, strict=True):
        norms += [(block.ln_1, other.ln_1), (block.ln_2, other.ln_2)]
        for linear, conv, layout in (
            (block.attn.qkv, other.attn.c_attn, qkv),
            (block.attn.proj, other.attn.c_proj, turned),
            (block.mlp.fc, other.mlp.c_fc, turned),
            (block.mlp.proj, other.mlp.c_proj, turned),
        ):
            pairs += [(linear.weight, conv.weight, layout), (linear.bias, conv.bias, layout if layout is qkv else same)]
    for norm, other in norms:
        pairs += [(norm.weight, other.weight, same), (norm.bias, other.bias, same)]
    assert len(pairs) == len(list(ours.parameters())) == len(list(peer.model.parameters()))
    with torch.no_grad():
        for mine, theirs, layout in pairs:
            theirs.copy_(layout(mine))
    return pairs


def check_same_work(ours: GPT2, peer: Peer, inputs: Tensor, targets: Tensor) -> float:
    """Give the peer our weights, and refuse one that computes something else; return our loss.

    All in float32: on a GPU sums are in another order, so that ten times the tolerance is allowed.
    """
    tolerance = peer.tolerance * (10 if inputs.is_cuda else 1)
    pairs = copy_weights(ours, peer)
    mine = ours(inputs, targets)
    mine.backward()
    theirs = peer.loss(inputs, targets)
    theirs.backward()
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=0)
    for parameter, other, layout in pairs:
        assert parameter.grad is not None and other.grad is not None
        difference = (layout(parameter.grad) - other.grad).norm() / other.grad.norm().clamp_min(1e-12)
        assert difference < 100 * tolerance, f"gradients of {peer.name} differ by {difference:.2e}"
    ours.zero_grad()
    peer.model.zero_grad()
    return float(mine.detach())
