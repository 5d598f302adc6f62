"""A model on this rank's place in the mesh, with all kinds of parallelism, and its losses over all replicas.

All three are torch's own; a pipeline follows the schedules of torch.distributed.pipelining over a replica's ranks.
Whatever the mesh, the gradient is that of the mean over the global batch: microbatches of equal size are averaged
within a replica, replicas of equal size by DDP or fully_shard.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from hpcpace.core.records import dataclass
from hpcpace.train.data import TrainingData
from hpcpace.train.data_parallel import HostGroups, average_replicas, host_groups, replicate, shard
from hpcpace.train.models import (
    GPT2,
    ResNet,
    autocast,
    build_gpt2,
    build_resnet,
    compute_dtype,
    cut,
    master_dtype,
    sharding_policy,
)
from hpcpace.train.plan import TrainPlan, groups_along
from hpcpace.train.settings import DIMENSIONS, GPT2Shape, Mesh, ModelShape, ResNetShape

Model = GPT2 | ResNet
"""A model, or a stage of it: takes inputs and, for the loss, targets; `pieces()` are its parts of equal work."""


def build_stage(
    shape: ModelShape,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    stage: int = 0,
    num_stages: int = 1,
) -> Model:
    """Build a pipeline stage of a model with its initial parameters; the whole model is stage 0 of 1.

    Raises:
        ValueError: a stage of a model that has none.
    """
    if isinstance(shape, ResNetShape):
        if num_stages != 1:
            raise ValueError(f"resnet18 has one stage, not {num_stages}")
        return build_resnet(shape, seed=seed, dtype=dtype, device=device)
    return build_gpt2(shape, seed=seed, dtype=dtype, device=device, stage=stage, num_stages=num_stages)


Context = Callable[[], AbstractContextManager[None]]
"""Makes what forward and backward run in."""
_SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "interleaved": ScheduleInterleaved1F1B}


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The stages of a rank and the order in which they take microbatches.

    Attributes:
        stages: this rank's stages, from the front of the model to its back.
        schedule: one of torch's.
        context: what forward and backward run in.
    """

    stages: tuple[PipelineStage, ...]
    schedule: Any
    context: Context

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Train on the replica's batch; return its mean loss on the rank of the last stage."""
        return self._run(self.schedule.step, inputs, targets)

    def forward_only(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return the mean loss of the replica's batch on the rank of the last stage, and leave no gradients."""
        return self._run(self.schedule.eval, inputs, targets)

    def _run(self, run: Callable[..., Any], inputs: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        ends: dict[str, Any] = {}
        if self.stages[-1].is_last:
            # The last stage computes the loss itself, so that it counts as forward: `targets` is an argument of it.
            ends = {"target": targets, "targets": targets, "losses": losses}
        with self.context():
            run(*([inputs] if self.stages[0].is_first else []), return_outputs=False, **ends)
        return torch.stack(losses).detach().sum() if losses else None


Compute = Callable[[Tensor, Tensor], Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A rank's part of a replica of the model, and its forward and backward pass.

    Attributes:
        stages: this rank's stages; one, or several with the interleaved schedule. Their parameters are plain tensors,
            or DTensors with ZeRO 3.
        watched: the objects that a session watches.
        forward_backward: maps inputs and targets of the replica's batch to the mean loss of the replica (on the rank of
            its last stage; None on the others), and leaves gradients in the parameters.
        forward_only: the same without gradients.
        replicas: the group of the ranks that hold the same stage and slice; None with a single replica.
        tied_group: the group of first and last stage if both hold the tied weight; None otherwise.
    """

    stages: tuple[Model, ...]
    watched: tuple[Any, ...]
    forward_backward: Compute
    forward_only: Compute
    replicas: dist.ProcessGroup | None
    tied_group: dist.ProcessGroup | None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters, stage by stage."""
        for stage in self.stages:
            yield from stage.parameters()

    def pieces(self) -> Iterator[nn.Module]:
        """Yield the parts that make up nearly all of the computation."""
        for stage in self.stages:
            yield from stage.pieces()

    def sync_tied_gradients(self) -> None:
        """Add up the gradients of the tied weight, of which the first stage has one part and the last one the other.

        Collective: the first and the last stage of each pipeline call this, after backward.
        """
        if self.tied_group is None:
            return
        for stage in self.stages:
            layer = stage.vocabulary_layer() if isinstance(stage, GPT2) else None
            if layer is not None:
                gradient = next(layer.parameters()).grad
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                dist.all_reduce(local, group=self.tied_group)

    def average(self) -> None:
        """Set the parameters to their mean over the replicas.

        Collective: all ranks call this.
        """
        if self.replicas is not None:
            average_replicas(self.parameters(), self.replicas)


def build_replica(plan: TrainPlan, *, rank: int, device: torch.device, host: str = "") -> Replica:
    """Build this rank's part of the planned model.

    Collective: every rank of the default process group calls this.

    Args:
        plan: the training.
        rank: this rank.
        device: where the parameters go.
        host: this rank's host, for `--hierarchical`.

    Raises:
        WorldError: replicas cannot be averaged host by host.
    """
    mesh, place = plan.mesh, plan.mesh.coordinates(rank)
    device_mesh = init_device_mesh(device.type, (mesh.dp, mesh.pp, mesh.tp), mesh_dim_names=DIMENSIONS)
    stages = tuple(_build_stage(plan, index, device_mesh, device) for index in plan.stages_of(place))
    hosts = _host_groups(plan, host) if plan.settings.hierarchical else None
    modules = [_join_replicas(stage, plan, device_mesh, hosts) for stage in stages]
    # The backward pass of a loss over a cut vocabulary must run inside the context, too.
    context = loss_parallel if mesh.tp > 1 else nullcontext
    replicas = device_mesh.get_group("dp") if mesh.dp > 1 else None
    if mesh.pp == 1:
        return Replica(
            stages=stages,
            watched=tuple(modules),
            forward_backward=_trained(modules[0], context),
            forward_only=_evaluated(modules[0], context),
            replicas=replicas,
            tied_group=None,
        )
    pipeline = _build_pipeline(plan, modules, place, device_mesh.get_group("pp"), device, context)
    return Replica(
        stages=stages,
        watched=pipeline.stages,
        forward_backward=pipeline.forward_backward,
        forward_only=pipeline.forward_only,
        replicas=replicas,
        tied_group=_tied_group(mesh),
    )


def _build_stage(plan: TrainPlan, index: int, device_mesh: DeviceMesh, device: torch.device) -> Model:
    settings = plan.settings
    stage = build_stage(
        plan.shape,
        seed=settings.seed,
        dtype=master_dtype(settings.dtype),
        device=device,
        stage=index,
        num_stages=plan.num_stages,
    )
    if plan.mesh.tp > 1:
        assert isinstance(stage, GPT2)
        cut(stage, device_mesh["tp"])
    if settings.compile:
        compile_pieces(stage)
    autocast(stage, settings.dtype, device)
    return stage


def compile_pieces(stage: Model) -> None:
    """Let torch compile each of a stage's pieces when it first runs."""
    # Dynamo would cut what runs inside DDP into pieces of a bucket, which ours are already, and cannot cut DTensors.
    torch._dynamo.config.optimize_ddp = False
    for piece in stage.pieces():
        # Not the module: the hooks of fully_shard and of injected faults stay outside of what is compiled.
        piece.forward = torch.compile(piece.forward)


def _host_groups(plan: TrainPlan, host: str) -> HostGroups | None:
    hosts: list[Any] = [None] * plan.mesh.size
    dist.all_gather_object(hosts, host)
    return host_groups([ranks for _, ranks in groups_along(plan.mesh, "dp")], hosts)


def _join_replicas(stage: Model, plan: TrainPlan, device_mesh: DeviceMesh, hosts: HostGroups | None) -> nn.Module:
    if plan.mesh.dp == 1 or plan.settings.sync_every > 1:
        return stage
    if plan.settings.zero == 3:
        shard(
            stage,
            stage.pieces(),
            mesh=device_mesh["dp"],
            is_pipelined=plan.mesh.pp > 1,
            policy=sharding_policy(plan.settings.dtype),
        )
        return stage
    return replicate(stage, group=device_mesh.get_group("dp"), settings=plan.settings, hosts=hosts)


def _build_pipeline(
    plan: TrainPlan,
    modules: list[nn.Module],
    place: Mesh,
    group: dist.ProcessGroup,
    device: torch.device,
    context: Context,
) -> Pipeline:
    """Put this rank's stages into a schedule."""
    assert isinstance(plan.shape, GPT2Shape)
    settings, num_stages = plan.settings, plan.num_stages
    # With the shapes given, torch need not find them out by running the model and sending them about.
    shape = (plan.sequences_per_replica // settings.microbatches, plan.seq_len)
    empty = partial(torch.empty, device="meta", requires_grad=True)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    hidden = empty(*shape, plan.shape.width, dtype=compute_dtype(settings.dtype))
    loss = empty((), dtype=master_dtype(settings.dtype))
    stages = [
        PipelineStage(
            module,
            index,
            num_stages,
            device,
            input_args=tokens if index == 0 else hidden,
            output_args=loss if index == num_stages - 1 else hidden,
            group=group,
        )
        for module, index in zip(modules, plan.stages_of(place), strict=True)
    ]
    schedule = _SCHEDULES[settings.schedule](
        stages if settings.schedule == "interleaved" else stages[0],
        settings.microbatches,
        loss_fn=lambda loss, _: loss / settings.microbatches,
        scale_grads=False,
    )
    return Pipeline(stages=tuple(stages), schedule=schedule, context=context)


def _trained(module: nn.Module, context: Context) -> Compute:
    def forward_backward(inputs: Tensor, targets: Tensor) -> Tensor | None:
        with context():
            loss: Tensor = module(inputs, targets)
            torch.autograd.backward(loss)
        return loss.detach()

    return forward_backward


def _evaluated(module: nn.Module, context: Context) -> Compute:
    # DDP sends buffers before each forward pass, for which there is no need here.
    inner = module.module if isinstance(module, DistributedDataParallel) else module

    def forward_only(inputs: Tensor, targets: Tensor) -> Tensor | None:
        with torch.no_grad(), context():
            loss: Tensor = inner(inputs, targets)
        return loss

    return forward_only


def _tied_group(mesh: Mesh) -> dist.ProcessGroup | None:
    own_group = None
    for dp, tp in itertools.product(range(mesh.dp), range(mesh.tp)):
        ends = [mesh.rank(Mesh(dp=dp, pp=pp, tp=tp)) for pp in (0, mesh.pp - 1)]
        group = dist.new_group(ends, group_desc="tied_weight")
        if dist.get_rank() in ends:
            own_group = group
    return own_group


class LossLog:
    """Collects the losses of a job.

    Only the last stage of a replica knows its loss. Losses wait on their rank until `gather`, which starts one small
    all-reduce of those of several steps and does not wait for it.

    Args:
        weight: what this rank's losses count in the mean over the global batch: 1 / dp on one rank of each replica's
            last stage, 0 elsewhere.
        device: where the collective takes place.

    Attributes:
        losses: the mean losses known so far, in order of the steps.
    """

    def __init__(self, *, weight: float, device: torch.device) -> None:
        self.losses: list[float] = []
        self._weight = weight
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._waiting: list[Tensor] = []
        self._sum: Tensor | None = None
        self._work: dist.Work | None = None

    def add(self, loss: Tensor | None) -> None:
        """Take the replica's loss of a step; None on a rank that does not know it."""
        self._waiting.append(self._zero if loss is None or not self._weight else loss.double() * self._weight)

    def gather(self) -> None:
        """Start to bring together the losses taken since the last time, if there are any.

        Collective: every rank of the default process group calls this, after the same steps.
        """
        if not self._waiting:
            return
        self._finish()
        self._sum = torch.stack(self._waiting)
        self._waiting = []
        self._work = dist.all_reduce(self._sum, async_op=True)

    def poll(self) -> list[float]:
        """Return the losses that are known, without waiting for any."""
        if self._work is not None and self._work.is_completed():
            self._finish()
        return self.losses

    def finish(self) -> list[float]:
        """Bring together what is left and return the losses of all steps.

        Collective: every rank of the default process group calls this, after the same steps.
        """
        if self._waiting:
            self.gather()
        self._finish()
        return self.losses

    def _finish(self) -> None:
        if self._work is not None and self._sum is not None:
            self._work.wait()
            self.losses.extend(self._sum.tolist())
            self._work = self._sum = None


_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The model after some steps.

    Attributes:
        num_steps: steps trained before.
        loss: mean over the held-out batches.
        metric: `perplexity`, exp(loss), per token of the data; or `accuracy`, the share of images classified rightly.
        value: that figure.
    """

    num_steps: int
    loss: float
    metric: str
    value: float

    def facts(self) -> dict[str, Any]:
        """Return what a run records of it."""
        return {"num_steps": self.num_steps, "loss": self.loss, self.metric: self.value}

    def __str__(self) -> str:
        value = f"{self.value:.2f}" if self.metric == "perplexity" else f"{100 * self.value:.1f} %"
        return f"after {self.num_steps} steps  held-out loss {self.loss:.4f}  {self.metric} {value}"


class Evaluator:
    """Evaluates a replica on the same batches each time, spread evenly over what is held out.

    Args:
        plan: the run.
        data: what it trains on and holds out.
        replica: this rank's part of the model.
        place: this rank's place in the mesh.
        device: where it computes.
    """

    def __init__(
        self, plan: TrainPlan, *, data: TrainingData, replica: Replica, place: Mesh, device: torch.device
    ) -> None:
        self._plan, self._data, self._replica, self._place, self._device = plan, data, replica, place, device
        settings = plan.settings
        num_batches = min(settings.eval_batches, data.num_held_out() // settings.batch_size)
        total = num_batches * settings.batch_size
        self._rows = (np.arange(total) * data.num_held_out() // max(total, 1)).reshape(num_batches, -1)

    def evaluate(self, num_steps: int) -> Evaluation:
        """Return loss and metric after so many steps.

        Collective: every rank of the default process group calls this.
        """
        plan = self._plan
        is_text = isinstance(plan.shape, GPT2Shape)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        with torch.no_grad():
            for rows in self._rows:
                batch = self._data.held_out_batch(rows[plan.rows(self._place)])
                inputs, targets = to_device(batch, self._device, master_dtype(plan.settings.dtype))
                sums += self._text_sums(inputs, targets) if is_text else self._image_sums(inputs, targets)
        dist.all_reduce(sums)
        loss, num_right = sums.tolist()
        loss /= len(self._rows)
        if is_text:
            metric, value = "perplexity", math.exp(min(loss, _LARGEST_EXPONENT))
        else:
            metric, value = "accuracy", num_right / self._rows.size
        return Evaluation(num_steps=num_steps, loss=loss, metric=metric, value=value)

    def _text_sums(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's share of the loss of a global batch, and 0: float64, (2,)."""
        loss = self._replica.forward_only(inputs, targets)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        # All ranks of tensor parallelism know the loss; one of them reports it.
        if loss is not None and self._place.tp == 0:
            sums[0] = loss.double() / self._plan.mesh.dp
        return sums

    def _image_sums(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return this rank's share of the loss of a global batch, and how many images are right: float64, (2,)."""
        (model,) = self._replica.stages
        self._share_buffers()
        model.eval()
        logits = model(images).float()
        model.train()
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return torch.stack([loss.double() / self._plan.mesh.dp, (logits.argmax(dim=1) == labels).sum().double()])

    def _share_buffers(self) -> None:
        """Give all replicas the running statistics of the first one, as DDP does before each forward pass."""
        if self._replica.replicas is not None and self._plan.settings.sync_every == 1:
            for buffer in self._replica.stages[0].buffers():
                dist.broadcast(buffer, group=self._replica.replicas, group_src=0)


def to_device(batch: tuple[Any, Any], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return inputs and targets on a device; images in the type of the parameters, tokens as they are."""
    inputs, targets = (torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in batch)
    return (inputs.to(dtype) if inputs.is_floating_point() else inputs), targets
