"""GPT-2 (Radford et al. 2019), whole or one pipeline stage, and its cut for tensor parallelism.

Parameters are drawn by name, each from a generator of its own, so that every stage and every mesh starts from the same
model. Query, key and value of a head are next to each other in one matrix, so that a cut by rows is a cut by heads.
torch's DTensor does the cut; parameters stay plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from hpcpace.train.precision import LayerNorm, computed, generator_of
from hpcpace.train.presets import GPT2Shape

_INIT_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention.

    The number of heads follows from the width of the query-key-value projection, which tensor parallelism cuts.
    """

    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.num_heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        batch, tokens, _ = hidden.shape
        qkv = self.qkv(hidden).view(batch, tokens, -1, 3, self.head_width)
        query, key, value = qkv.transpose(1, 2).unbind(3)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    """The two linear layers of a block."""

    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(shape.width, 4 * shape.width)
        self.proj = nn.Linear(4 * shape.width, shape.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        output: Tensor = self.proj(functional.gelu(self.fc(hidden), approximate="tanh"))
        return output


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm and beside a residual connection."""

    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.ln_2 = LayerNorm(shape.width)
        self.mlp = MLP(shape)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        hidden = hidden + self.attn(self.ln_1(hidden))
        output: Tensor = hidden + self.mlp(self.ln_2(hidden))
        return output


class TokenEmbedding(nn.Embedding):
    """A token embedding that leaves the dense gradient to the head that it is tied to.

    With `is_sparse` its own part of the gradient is the rows of the tokens seen, which autograd adds to the head's
    dense part. A dense part of its own would be 154 MB of zeros in GPT-2 small, written, read and added: 9 % of a step
    of 512 tokens on 2 cores. The switch of nn.Embedding has another name because DDP takes that one for a promise that
    the whole gradient is sparse.
    """

    is_sparse = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, tokens) to (batch, tokens, width)."""
        return functional.embedding(tokens, self.weight, sparse=self.is_sparse)


class Embedding(nn.Module):
    """Token and position embedding."""

    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.wte = TokenEmbedding(shape.vocabulary, shape.width)
        self.wpe = nn.Embedding(shape.context, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, tokens) to (batch, tokens, width)."""
        return computed(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]])


class NextTokenLoss(nn.Module):
    """Mean cross-entropy of the next token over all positions, in float32 at least."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map (batch, tokens, vocabulary) and (batch, tokens) to a scalar."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Head(nn.Module):
    """The last layer norm, the projection onto the vocabulary with the weight of the token embedding, and the loss."""

    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.ln_f = LayerNorm(shape.width)
        self.vocabulary = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.loss = NextTokenLoss()

    def forward(self, hidden: Tensor, targets: Tensor | None) -> Tensor:
        """Map (batch, tokens, width) to the loss, or to (batch, tokens, vocabulary) logits without targets."""
        logits: Tensor = self.vocabulary(self.ln_f(hidden))
        return logits if targets is None else self.loss(logits, targets)


class GPT2(nn.Module):
    """GPT-2, or one pipeline stage of it; without dropout.

    The first stage takes token numbers and has the embedding, the last one has the head. A stage that has both ties
    them; where they are on two ranks, `sync_tied_gradients` of hpcpace.train.parallel keeps the two copies the same.
    """

    def __init__(self, shape: GPT2Shape, *, stage: int = 0, num_stages: int = 1) -> None:
        super().__init__()
        layers = shape.stage_layers(stage, num_stages)
        self.embedding = Embedding(shape) if stage == 0 else None
        self.blocks = nn.ModuleDict({str(layer): Block(shape) for layer in layers})
        self.head = Head(shape) if stage == num_stages - 1 else None
        self.tie()

    def tie(self) -> None:
        """Let head and embedding share their weight, if this stage has both."""
        if self.embedding is not None and self.head is not None:
            self.head.vocabulary.weight = self.embedding.wte.weight
            self.embedding.wte.is_sparse = True

    def vocabulary_layer(self) -> nn.Module | None:
        """Return a layer of this stage that holds the tied weight over the vocabulary, if there is one."""
        if self.embedding is not None:
            return self.embedding.wte
        return None if self.head is None else self.head.vocabulary

    def pieces(self) -> Iterator[nn.Module]:
        """Yield the parts that make up nearly all of the computation: the blocks and the head."""
        yield from self.blocks.values()
        if self.head is not None:
            yield self.head

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Compute this stage.

        Args:
            inputs: token numbers, int64, (batch, tokens), on the first stage; (batch, tokens, width) on the others.
            targets: the next tokens, int64, (batch, tokens), for the loss on the last stage.

        Returns:
            The hidden state, on the last stage the loss (scalar), or the logits where there are no targets.
        """
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        for block in self.blocks.values():
            hidden = block(hidden)
        output: Tensor = hidden if self.head is None else self.head(hidden, targets)
        return output


def build_gpt2(
    shape: GPT2Shape,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    stage: int = 0,
    num_stages: int = 1,
) -> GPT2:
    """Build a stage with its initial parameters, the same for a seed whatever the stages are.

    As in GPT-2, matrices are normal with a standard deviation of 0.02, those that end a residual branch with
    0.02 / sqrt(2 num_layers), biases are 0, and layer norms are the identity.

    Args:
        shape: the whole model's shape.
        seed: what the parameters follow from.
        dtype: type of parameters and gradients; also of the computation, unless `precision.autocast` changes that.
        device: where the parameters go, after they were drawn on the CPU.
        stage: index of the pipeline stage.
        num_stages: number of pipeline stages.
    """
    with torch.device("meta"):
        model = GPT2(shape, stage=stage, num_stages=num_stages)
    model.to_empty(device=torch.device("cpu"))
    model.tie()
    residual_std = _INIT_STD / math.sqrt(2 * shape.num_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if ".ln_" in name and name.endswith("weight") else 0.0)
                continue
            # A head on its own stage draws what the embedding on the first stage draws.
            generator = generator_of(seed, name.replace("head.vocabulary", "embedding.wte"))
            std = residual_std if name.endswith("proj.weight") else _INIT_STD
            parameter.normal_(0.0, std, generator=generator)
    return model.to(device=device, dtype=dtype)


def cut(model: GPT2, mesh: DeviceMesh) -> None:
    """Share a stage out over tensor parallelism, as in Megatron-LM (Shoeybi et al. 2019, section 3).

    Projections into heads and MLP are cut by rows, those out of them by columns, token embedding and head over the
    vocabulary, the loss along with it.
    """
    plan = {
        "blocks.*.attn.qkv": ColwiseParallel(),
        "blocks.*.attn.proj": RowwiseParallel(),
        "blocks.*.mlp.fc": ColwiseParallel(),
        "blocks.*.mlp.proj": RowwiseParallel(),
    }
    if model.embedding is not None:
        plan["embedding.wte"] = RowwiseParallel(input_layouts=Replicate())
    if model.head is not None:
        plan["head.vocabulary"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        plan["head.loss"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate())
    # Every rank has drawn the whole parameter and keeps its piece, so nothing is sent.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    model.tie()
    if model.embedding is not None:
        model.embedding.wte.is_sparse = False  # DTensor has no sparse gradients
    if model.head is not None:
        # fully_shard warns of a loss that is a view of a DTensor's own tensor.
        model.head.loss.register_forward_hook(lambda _, __, loss: loss.clone())
    _keep_local_parameters(model)


def _keep_local_parameters(model: nn.Module) -> None:
    """Hold local pieces as the parameters `local_NAME`, and give each module its DTensor when it asks for NAME.

    DDP and fused optimizers take plain tensors. DDP's own conversion makes new parameters in each forward pass, which
    breaks ties and the accumulation over microbatches. torch's parametrization makes a class for each module, so that
    torch.compile would compile each block by itself.
    """
    pieces: dict[DTensor, nn.Parameter] = {}
    for module in list(model.modules()):
        layouts = {}
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                delattr(module, name)
                piece = pieces.setdefault(parameter, nn.Parameter(parameter.to_local()))
                module.register_parameter(f"local_{name}", piece)
                layouts[name] = {
                    "device_mesh": parameter.device_mesh,
                    "placements": parameter.placements,
                    "shape": parameter.shape,
                    "stride": parameter.stride(),
                }
        if layouts:
            module.layouts = layouts  # type: ignore[assignment]
            kind: Any = type(module)
            module.__class__ = _cut_class(kind, tuple(layouts))


@cache
def _cut_class(kind: Any, names: tuple[str, ...]) -> Any:
    """Return a module class whose parameters of these names are DTensors made of the local ones."""
    properties = {name: property(partial(_whole_parameter, name=name)) for name in names}
    return type(f"Cut{kind.__name__}", (kind,), properties)


def _whole_parameter(module: Any, *, name: str) -> Tensor:
    local = getattr(module, f"local_{name}")
    return DTensor.from_local(local, run_check=False, **module.layouts[name])
