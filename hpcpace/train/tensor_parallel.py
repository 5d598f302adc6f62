"""Tensor parallelism: a stage shared out over ranks by torch's DTensor, with plain tensors as parameters."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from hpcpace.train.gpt2 import GPT2


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
