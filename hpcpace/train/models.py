"""The models: GPT-2 (Radford et al. 2019) and ResNet-18 (He et al. 2016), in mixed precision.

GPT-2 is whole or one pipeline stage. Parameters are drawn by seed and name alone, so that every stage, replica and
mesh starts from the same model. Query, key and value of a head are next to each other in one matrix, so that a cut by
rows is a cut by heads; torch's DTensor does the cut, and parameters stay plain tensors. ResNet-18 is for images of 32
x 32 pixels, in the form usual for CIFAR-10.

A stage computes in the type of `--dtype` and keeps its parameters in a master type. With bfloat16 the masters are
float32, as in Micikevicius et al. 2018: torch's autocast rounds what a matrix product or a convolution takes, and
gradients arrive in the type of the parameters. The hidden state between the layers is bfloat16, too, so that a
pipeline and tensor parallelism send it in two bytes.

A process also has Python, torch and caches of allocators, which say little about a model. Activations are the tensors
that autograd saves for the backward pass: the most bytes of them at a time, each storage once, parameters left out.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, RowwiseParallel, parallelize_module
from torch.nn import functional

from hpcpace.core.records import dataclass
from hpcpace.train.plan import MASTER_DTYPES
from hpcpace.train.settings import GPT2Shape, ResNetShape


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


@dataclass(kw_only=True)
class TensorMemory:
    """Bytes of the tensors of a rank, by what they are for."""

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0

    def facts(self) -> dict[str, int]:
        """Return what a run records of it."""
        return asdict(self)


def tensor_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of some tensors' storages, each once; of a DTensor, of this rank's part."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = _storage(tensor)
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of what an optimizer keeps on this rank from step to step."""
    local = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer has the one of its own share
    return tensor_bytes(
        value for state in local.state.values() for value in state.values() if isinstance(value, Tensor)
    )


class _Saved:
    """A tensor that autograd has saved; its end is that of the graph, or of its use in backward."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class ActivationMeter:
    """Measures what autograd saves for backward.

    Attributes:
        peak_bytes: the most at a time.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.peak_bytes = 0
        self._parameters = {_storage(parameter).data_ptr() for parameter in parameters}
        self._uses: Counter[int] = Counter()
        self._live_bytes = 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the forward and backward passes inside, of this thread."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield

    def _pack(self, tensor: Tensor) -> _Saved:
        saved, storage = _Saved(tensor), _storage(tensor)
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._parameters:
            if not self._uses[address]:
                self._live_bytes += size
                self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            self._uses[address] += 1
            weakref.finalize(saved, self._drop, address, size).atexit = False
        return saved

    def _drop(self, address: int, size: int) -> None:
        self._uses[address] -= 1
        if not self._uses[address]:
            self._live_bytes -= size


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
