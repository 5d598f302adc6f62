"""Training loops of one's own around torch's kinds of parallelism, DeepSpeed and Accelerate: loops.py KIND."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from experiments.attach.programs.parts import BATCH, STEPS, Layers, Model, batches, distributed_batches, loss_of
from experiments.attach.witness import Witness


def main() -> None:
    parser = argparse.ArgumentParser()
    programs = {
        **dict.fromkeys(("ddp", "compile", "fsdp1", "fsdp2", "recompute", "recompute-reentrant"), plain),
        "by-hand": by_hand,
        "async-checkpoint": async_checkpoint,
        "local-sgd": local_sgd,
        "tensor": tensor_parallel,
        "pipeline": pipeline,
        "zero": zero,
        "accelerate": accelerate,
    }
    parser.add_argument("kind", choices=programs)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--callback", action="store_true")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    programs[args.kind](args)
    if dist.is_initialized():
        dist.destroy_process_group()


def _optimizer(model: torch.nn.Module, **options: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def _joined() -> Witness:
    witness = Witness()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return witness


def _own_batches(steps: int = STEPS) -> DataLoader:
    return batches(dist.get_rank(), dist.get_world_size(), steps=steps)


def _train(
    witness: Witness,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    accumulate: int = 1,
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[int], None] = lambda number: None,
) -> None:
    """Train as a loop of one's own does; `before` runs before each step of the optimizer, `after` after it."""
    for number, (x, y) in enumerate(loader, 1):
        loss = loss_of(model(x), y) / accumulate
        loss.backward()
        if number % accumulate == 0:
            before()
            optimizer.step()
            optimizer.zero_grad()
            witness.step(loss, BATCH * accumulate)
            after(number)


def plain(args: argparse.Namespace) -> None:
    """Train under DDP or FSDP, with a compiled model, or with layers computed anew in the backward pass."""
    witness = _joined()
    model = _parallel(args.kind, _model(args.kind))
    _train(witness, model, _optimizer(model), _own_batches(STEPS * args.accumulate), args.accumulate)


class Recomputed(Layers):
    """Layers whose activations are not kept for the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self._reentrant)


def _model(kind: str) -> Model:
    if kind.startswith("recompute"):
        return Model(Recomputed(reentrant=kind == "recompute-reentrant"))
    return Model(torch.compile(Layers()) if kind == "compile" else Layers())


def _parallel(kind: str, model: Model) -> torch.nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if kind == "fsdp2":
        for layer in model.net.layers:
            fully_shard(layer)
        return fully_shard(model)
    return torch.nn.parallel.DistributedDataParallel(model)


def by_hand(args: argparse.Namespace) -> None:
    """Train a compiled model whose gradients the script itself averages."""
    witness = _joined()
    model = Model(torch.compile(Layers()))

    def average() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    _train(witness, model, _optimizer(model), _own_batches(), before=average)


def async_checkpoint(args: argparse.Namespace) -> None:
    """Train under DDP, and save every tenth step in the background."""
    from torch.distributed.checkpoint import async_save

    witness = _joined()
    saving = dist.new_group(backend="gloo")  # what is saved in another thread must not mix with gradients
    model = torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = _optimizer(model)
    saved = []

    def save(number: int) -> None:
        if number % 10 == 0:
            if saved:
                saved[-1].result()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            place = os.path.join(os.environ["ATTACH_FOLDER"], f"saved-{number}")
            saved.append(async_save(state, checkpoint_id=place, process_group=saving))

    _train(witness, model, optimizer, _own_batches(), after=save)
    saved[-1].result()


def local_sgd(args: argparse.Namespace) -> None:
    """Train under DDP whose ranks exchange parameters every fourth step, after ten steps with gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    witness = _joined()
    model = torch.nn.parallel.DistributedDataParallel(Model())
    alone, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=10)
    model.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(_optimizer(model), PeriodicModelAverager(period=4, warmup_steps=10))
    _train(witness, model, optimizer, _own_batches())


def tensor_parallel(args: argparse.Namespace) -> None:
    """Train layers whose columns are divided among the ranks, which share their batches."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    witness = Witness()
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    plan = {f"net.layers.{i}": ColwiseParallel(output_layouts=Replicate()) for i in range(8)}
    model = parallelize_module(Model(), mesh, plan)
    optimizer = _optimizer(model, foreach=True)
    _train(witness, model, optimizer, batches(0, 1))


def pipeline(args: argparse.Namespace) -> None:
    """Train one stage on each rank, in the order 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    witness = Witness()
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = Model(Layers(depth=4))
    stage = PipelineStage(model, rank, num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_of)
    optimizer = _optimizer(model)
    for x, y in batches(0, 1):
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == num_ranks - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        witness.step(torch.stack(losses) if losses else next(model.parameters()), BATCH)


@contextmanager
def _traced(args: argparse.Namespace, trained: object) -> Iterator[None]:
    """Open a session by our two lines for a framework, where they are asked for."""
    if not args.callback:
        yield
        return
    if args.kind == "zero":
        from hpcpace.callbacks.deepspeed import trace
    else:
        from hpcpace.callbacks.accelerate import trace
    with trace(trained, run_dir=os.environ["ATTACH_RUN"], warmup_steps=2):
        yield


def zero(args: argparse.Namespace) -> None:
    """Train with DeepSpeed's ZeRO, with two parameter groups."""
    import deepspeed

    witness = Witness()
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model()
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": args.accumulate,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    with _traced(args, engine):
        for x, y in _own_batches(STEPS * args.accumulate):
            loss = loss_of(engine(x), y)
            engine.backward(loss)
            is_last = engine.is_gradient_accumulation_boundary()
            engine.step()
            if is_last:
                witness.step(loss, BATCH * args.accumulate)


def accelerate(args: argparse.Namespace) -> None:
    """Train a loop prepared by Hugging Face Accelerate."""
    from accelerate import Accelerator

    witness = Witness()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    torch.manual_seed(0)
    model = Model()
    loader = distributed_batches(steps=4 * STEPS * args.accumulate)
    model, optimizer, loader = accelerator.prepare(model, _optimizer(model), loader)
    with _traced(args, accelerator):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                witness.step(loss, BATCH * args.accumulate)
    accelerator.end_training()


if __name__ == "__main__":
    main()
