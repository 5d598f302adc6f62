"""A model on this rank's place of the mesh, by torch's own tensor parallelism, pipelining and DDP.

Whatever the mesh, the gradient is that of the mean over the global batch: microbatches of equal size are averaged
within a replica, replicas of equal size by DDP.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from hpcpace.train.gpt2 import GPT2, build_gpt2
from hpcpace.train.mesh import DIMENSIONS, Mesh
from hpcpace.train.presets import GPT2Shape


@dataclass(frozen=True, kw_only=True)
class Replica:
    """What this rank has of the model, and how it goes once forward and backward.

    Attributes:
        model: this rank's stage and slice; its parameters are plain tensors.
        watched: the object that a session watches.
        forward_backward: maps inputs and targets of the replica's batch, int64, (num_sequences, seq_len), to the
            mean loss of the replica (on its last stage; None on the others), and leaves gradients in the parameters.
        tied_group: the group of first and last stage, where the tied weight stands on both; None elsewhere.
    """

    model: GPT2
    watched: nn.Module | PipelineStage
    forward_backward: Callable[[Tensor, Tensor], Tensor | None]
    tied_group: dist.ProcessGroup | None

    def sync_tied_gradients(self) -> None:
        """Add up the gradients of the tied weight, of which the first stage has one part and the last one the other.

        Collective: the first and the last stage of each pipeline call this, after backward.
        """
        layer = self.model.vocabulary_layer()
        if self.tied_group is not None and layer is not None:
            dist.all_reduce(next(layer.parameters()).grad, group=self.tied_group)

    def pieces(self) -> Iterator[nn.Module]:
        """Yield the parts that make up nearly all of the computation: the blocks and the head."""
        yield from self.model.blocks.values()
        if self.model.head is not None:
            yield self.model.head


def build_replica(
    shape: GPT2Shape,
    *,
    mesh: Mesh,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    num_microbatches: int,
    sequences_per_replica: int,
    seq_len: int,
) -> Replica:
    """Build this rank's part of a GPT-2.

    Collective: every rank of the default process group calls this.
    """
    place = mesh.coordinates(rank)
    device_mesh = init_device_mesh(device.type, (mesh.dp, mesh.pp, mesh.tp), mesh_dim_names=DIMENSIONS)
    model = build_gpt2(shape, seed=seed, dtype=dtype, device=device, stage=place.pp, num_stages=mesh.pp)
    if mesh.tp > 1:
        _cut(model, device_mesh["tp"])
    module: nn.Module = model
    if mesh.dp > 1:
        module = DistributedDataParallel(model, process_group=device_mesh.get_group("dp"), gradient_as_bucket_view=True)
    # The backward pass of a loss over a cut vocabulary must run inside the context, too.
    context = loss_parallel if mesh.tp > 1 else nullcontext
    if mesh.pp == 1:
        return Replica(model=model, watched=module, forward_backward=_whole(module, context), tied_group=None)
    stage = _stage(
        module,
        shape=shape,
        place=place,
        mesh=mesh,
        group=device_mesh.get_group("pp"),
        device=device,
        dtype=dtype,
        tokens=(sequences_per_replica // num_microbatches, seq_len),
    )
    return Replica(
        model=model,
        watched=stage,
        forward_backward=_pipelined(stage, num_microbatches, context),
        tied_group=_tied_group(mesh),
    )


def _cut(model: GPT2, mesh: DeviceMesh) -> None:
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
    _keep_local_parameters(model)


def _keep_local_parameters(model: nn.Module) -> None:
    """Hold local pieces as the parameters, and give each module its DTensor when it asks.

    DDP and fused optimizers take plain tensors. DDP's own conversion makes new parameters in each forward pass, which
    breaks ties and the accumulation over microbatches.
    """
    pieces: dict[DTensor, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                piece = pieces.setdefault(parameter, nn.Parameter(parameter.to_local()))
                setattr(module, name, piece)
                parametrize.register_parametrization(module, name, _AsDTensor(parameter), unsafe=True)


class _AsDTensor(nn.Module):
    def __init__(self, like: DTensor) -> None:
        super().__init__()
        self._mesh, self._placements = like.device_mesh, like.placements
        self._shape, self._stride = like.shape, like.stride()

    def forward(self, local: Tensor) -> Tensor:
        return DTensor.from_local(
            local, self._mesh, self._placements, run_check=False, shape=self._shape, stride=self._stride
        )


def _stage(
    module: nn.Module,
    *,
    shape: GPT2Shape,
    place: Mesh,
    mesh: Mesh,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    tokens: tuple[int, int],
) -> PipelineStage:
    # With the shapes given, torch need not find them out by running the model and sending them about.
    hidden = torch.empty(*tokens, shape.width, dtype=dtype, device="meta", requires_grad=True)
    loss = torch.empty((), dtype=torch.promote_types(dtype, torch.float32), device="meta", requires_grad=True)
    return PipelineStage(
        module,
        place.pp,
        mesh.pp,
        device,
        input_args=torch.empty(tokens, dtype=torch.int64, device="meta") if place.pp == 0 else hidden,
        output_args=loss if place.pp == mesh.pp - 1 else hidden,
        group=group,
    )


def _whole(
    module: nn.Module, context: Callable[[], AbstractContextManager[None]]
) -> Callable[[Tensor, Tensor], Tensor | None]:
    def forward_backward(inputs: Tensor, targets: Tensor) -> Tensor | None:
        with context():
            loss: Tensor = module(inputs, targets)
            torch.autograd.backward(loss)
        return loss.detach()

    return forward_backward


def _pipelined(
    stage: PipelineStage, num_microbatches: int, context: Callable[[], AbstractContextManager[None]]
) -> Callable[[Tensor, Tensor], Tensor | None]:
    # The last stage computes the loss itself, so that it counts as forward; here it only gets its share of the mean.
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=lambda loss, _: loss / num_microbatches, scale_grads=False)

    def forward_backward(inputs: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        with context():
            if stage.is_first:
                schedule.step(inputs, return_outputs=False)
            elif stage.is_last:
                schedule.step(target=targets, targets=targets, losses=losses, return_outputs=False)
            else:
                schedule.step(return_outputs=False)
        return torch.stack(losses).detach().sum() if losses else None

    return forward_backward


def _tied_group(mesh: Mesh) -> dist.ProcessGroup | None:
    own_group = None
    for dp, tp in itertools.product(range(mesh.dp), range(mesh.tp)):
        ends = [mesh.rank(Mesh(dp=dp, pp=pp, tp=tp)) for pp in (0, mesh.pp - 1)]
        group = dist.new_group(ends, group_desc="tied_weight")
        if dist.get_rank() in ends:
            own_group = group
    return own_group
