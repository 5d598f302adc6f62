"""What benchmarks of training share: where and in which type they compute, peers of our models, and steps in turns.

Other GPT-2s call their parts as OpenAI's code did, so that one table pairs the parameters of either with ours. The
lines for GPUs have not been run on one yet.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.bench.pairs import median_interval, on_one_core, take_turns
from hpcpace.core.errors import WorldError
from hpcpace.train.models import GPT2
from hpcpace.train.settings import GPT2Shape
from hpcpace.world.process_group import choose_device

# Dense bfloat16 with float32 sums, in TFLOPS, from NVIDIA's data sheets; a slice of a card (MIG) has another name.
_PEAK_TFLOPS = (
    (r"NVIDIA H100 80GB HBM3|NVIDIA H200", 989.0),
    (r"NVIDIA H100 PCIe", 756.0),
    (r"NVIDIA A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe", 312.0),
)


def open_device(name: str) -> torch.device:
    """Return the device of a bench that has one rank; ends the program if there is none."""
    try:
        device = choose_device(name, local_rank=0)
    except WorldError as error:
        sys.exit(str(error))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def require_gpus(num_ranks: int) -> None:
    """End the program unless each rank of this host can have a GPU; makes no context on one."""
    num_gpus = torch.cuda.device_count()
    if num_gpus < num_ranks:
        sys.exit(f"ranks on GPUs need one each: {num_ranks} wanted, and torch sees {num_gpus}")


def words(device: torch.device) -> str:
    """Return what computes, in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"


def flops_per_token(shape: GPT2Shape, seq_len: int) -> float:
    """Return the operations that training takes for a token (Chowdhery et al. 2022, appendix B).

    Two for each parameter of a matrix product forward and four backward, and 12 layers width tokens in attention, which
    counts what a causal mask leaves out. The position embedding multiplies nothing.
    """
    num_multiplied = shape.num_parameters - shape.context * shape.width
    return 6.0 * num_multiplied + 12.0 * shape.num_layers * shape.width * seq_len


def peak_tflops(device_name: str) -> float | None:
    """Return the TFLOPS of a GPU in bfloat16 by its data sheet; None if it is not in the table."""
    return next((peak for names, peak in _PEAK_TFLOPS if re.fullmatch(names, device_name)), None)


Step = Callable[[Tensor, Tensor], Tensor]
Batch = Callable[[int], tuple[Tensor, Tensor]]
CPU = torch.device("cpu")


def training_step(loss: Step, optimizer: torch.optim.Optimizer) -> Step:
    """Return a training step of a model whose loss is given as a function of inputs and targets."""

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        value = loss(inputs, targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def compare(
    steps: Mapping[str, Step],
    batch: Batch,
    *,
    num_pairs: int,
    samples_per_step: int,
    unit: str,
    steps_per_turn: int = 1,
    loss_tolerance: float = math.inf,
    device: torch.device = CPU,
) -> dict[str, float]:
    """Let training steps take turns; print samples a second of each and the first one's ratio to the others.

    Args:
        steps: two or more, by name; they see the same batches in the same order.
        batch: inputs and targets of a step, on the device.
        num_pairs: how often each has its turn, behind three warm-ups.
        samples_per_step: that a step trains.
        unit: of the samples.
        steps_per_turn: on a GPU several, so that the host can run ahead as in a training.
        loss_tolerance: how much the last losses may differ from the first one's, relative to it.
        device: where the steps compute.

    Returns:
        Samples a second, by name.
    """
    losses: dict[str, float] = {}
    counts = dict.fromkeys(steps, 0)

    def timed(name: str, step: Step) -> Callable[[], float]:
        def measure() -> float:
            batches = [batch(counts[name] + index) for index in range(steps_per_turn)]
            counts[name] += steps_per_turn
            begin_s = time.perf_counter()
            for inputs, targets in batches:
                loss = step(inputs, targets)
            losses[name] = float(loss)  # waits for all that the stream has to do
            return (time.perf_counter() - begin_s) / steps_per_turn

        return measure

    times = take_turns({name: timed(name, step) for name, step in steps.items()}, num_rounds=num_pairs, num_warmups=3)
    first, *others = steps
    print(f"  {num_pairs} pairs, {words(device)}, last losses {' and '.join(f'{losses[name]:.4f}' for name in steps)}")
    assert all(abs(losses[name] / losses[first] - 1) < loss_tolerance for name in others), losses
    rates = {name: samples_per_step / float(np.median(values)) for name, values in times.items()}
    for name, rate in rates.items():
        print(f"  {name:14} {rate:8.1f} {unit}/s (median of {'steps' if steps_per_turn == 1 else 'turns'})")
    for name in others:
        ratio, low, high = median_interval(times[name] / times[first])
        print(f"  ratio of {unit}/s, {first} to {name}: {ratio:.3f} [{low:.3f}, {high:.3f}]")
    return rates


_MISSING = re.compile(r"operator (torchvision::\w+) does not exist")


def load_torchvision() -> ModuleType:
    """Return torchvision, with its missing operators declared; call it before other packages look for torchvision."""
    while True:
        try:
            import torchvision

            return torchvision
        except RuntimeError as error:
            missing = _MISSING.search(str(error))
            if missing is None:
                raise
            torch.library.define(missing[1], "(Tensor boxes) -> Tensor")


Loss = Callable[[Tensor, Tensor], Tensor]
Pair = tuple[nn.Parameter, nn.Parameter, Callable[[Tensor], Tensor]]


def same(tensor: Tensor) -> Tensor:
    """Return a tensor as it is: the layout of a parameter that both have alike."""
    return tensor


def check_same_gradients(pairs: Sequence[Pair], *, tolerance: float) -> None:
    """Refuse to compare models that compute different things.

    Args:
        pairs: of parameters with gradients of the same batch.
        tolerance: norm of the difference over the norm of the peer's gradient.
    """
    for mine, theirs, layout in pairs:
        assert mine.grad is not None and theirs.grad is not None
        difference = float((layout(mine.grad) - theirs.grad).norm() / theirs.grad.norm().clamp_min(1e-12))
        assert difference < tolerance, f"gradients of shape {tuple(theirs.shape)} differ by {difference:.2e}"


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
    import transformers  # of the group `bench`, and slow

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
    check_same_gradients(pairs, tolerance=100 * tolerance)
    ours.zero_grad()
    peer.model.zero_grad()
    return float(mine.detach())


@contextmanager
def alone_on_a_core() -> Iterator[None]:
    """Be a world of one over gloo, on one core and with one thread."""
    on_one_core()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
