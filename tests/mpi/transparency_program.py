"""What a torch program can notice of an observer: run by ranks, with a session, with one for a device, and without.

Prints on rank 0 one JSON object of findings; the test compares those of the runs. Losses are written as hex floats.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forced_device import force_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hpcpace

WIDTH = 16


def _model(num_layers: int = 4) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(layer for _ in range(num_layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def _batch(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def _losses(model: nn.Module, session: Any, steps: int = 3) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = model(_batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        if session is not None:
            session.step()
    return losses


def ddp(session: Any) -> Any:
    return _losses(DistributedDataParallel(_model(), bucket_cap_mb=0.001), session)


def ddp_with_a_hook(session: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(_model())
    model.register_comm_hook(None, fp16_compress_hook)
    return _losses(model, session)


def dtensor(session: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {str(i): ColwiseParallel() if i % 4 == 0 else RowwiseParallel() for i in range(0, 8, 2)}
    return _losses(parallelize_module(_model(), mesh, plan), session)


def sharded(session: Any) -> Any:
    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return _losses(model, session)


def pipeline(session: Any) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return "a pipeline has two stages or more"
    layers = list(_model(num_layers=2 * size))
    share = len(layers) // size
    part = nn.Sequential(*layers[rank * share : (rank + 1) * share])
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    losses: list[torch.Tensor] = []
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean())
    if session is not None:
        session.watch(stage)
    for step in range(2):
        if rank == 0:
            schedule.step(_batch(step))
        else:
            schedule.step(target=_batch(step), losses=losses)
    gradient = sum(p.grad.abs().sum().item() for p in part.parameters() if p.grad is not None)
    return [loss.item().hex() for loss in losses] + [gradient.hex()]


def compiled(session: Any) -> Any:
    model = torch.compile(_model(), backend="eager", fullgraph=True)
    return _losses(DistributedDataParallel(model), session)


def checkpoint(session: Any) -> Any:
    import tempfile

    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model = _model()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder[0])
    return [float(value.sum()).hex() for value in state["model"].values()]


def batched_send_recv(session: Any) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return "gloo does not send to itself"
    received = torch.zeros(4)
    operations = [
        dist.P2POp(dist.isend, torch.full((4,), float(rank)), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    works = dist.batch_isend_irecv(operations)
    for work in works:
        work.wait()
    return [len(works), type(works[0]).__name__, received.tolist()]


def groups(session: Any) -> Any:
    group = dist.new_group(list(range(dist.get_world_size())))
    world = dist.group.WORLD
    value = torch.ones(2)
    work = dist.all_reduce(value, group=group, async_op=True)
    work.wait()
    return {
        "backend": dist.get_backend(),
        "group backend": dist.get_backend(group),
        "type": type(world).__name__,
        "work": type(work).__name__,
        "completed": work.is_completed(),
        "supports coalescing": world._get_backend(torch.device("cpu")).supports_coalescing,
        "value": value.tolist(),
    }


def coalescing(session: Any) -> Any:
    values = [torch.ones(2), torch.ones(3)]
    try:
        with dist._coalescing_manager():
            for value in values:
                dist.all_reduce(value)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return [value.tolist() for value in values]


def barriers(session: Any) -> Any:
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    return "passed"


def inference(session: Any) -> Any:
    with torch.inference_mode():
        value = torch.ones(3)
        dist.all_reduce(value)
        return [value.tolist(), value.is_inference()]


def wrong_call(session: Any) -> Any:
    try:
        dist.all_gather_into_tensor(torch.zeros(3), torch.ones(5))
    except Exception as error:
        return type(error).__name__
    return "no error"


CASES: list[Callable[[Any], Any]] = [
    ddp, ddp_with_a_hook, dtensor, sharded, pipeline, compiled, checkpoint,
    batched_send_recv, groups, coalescing, barriers, inference, wrong_call,
]  # fmt: skip


def main() -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    store_path = comm.bcast(f"/tmp/hpcpace-transparency-{os.getpid()}")
    dist.init_process_group(
        "gloo", init_method=f"file://{store_path}", rank=comm.rank, world_size=comm.size, timeout=timedelta(seconds=60)
    )
    observe = sys.argv[1] != "plain"
    if sys.argv[1] == "device":
        force_device()
    context = hpcpace.session(name="transparency", run_dir=Path(sys.argv[2]), comm=comm) if observe else nullcontext()
    with context as session:
        findings = {case.__name__: case(session) for case in CASES}
    # The last stage alone knows the losses of the pipeline.
    findings = comm.allgather(findings)
    if comm.rank == 0:
        print(json.dumps(findings))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
