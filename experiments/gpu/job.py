"""The job that first light traces: without a line of hpcpace in it, started by torchrun.

Layers of matrix products under DDP, or FSDP2; many tiny layers make it host-bound. Rank `--work` does more products in
its forward pass, rank `--absent` never comes to a step. `--foreign` only multiplies, in no group, until it is killed.
`--stuck SECONDS` is another job, of one rank: an operation that does not end in time, of which NCCL's watchdog writes
its record and ends the process. On CPUs the record of gloo is written by hand.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

_CYCLES_PER_S = 2_000_000_000
"""About what the clock of a GPU does: the wait need not be exact."""
_TIMES_AS_LONG = 6
"""As the timeout; the watchdog needs some seconds more to write."""


class Layer(nn.Linear):
    """A matrix product, and `num_extra` more that nobody needs."""

    num_extra = 0

    def forward(self, batch: Tensor) -> Tensor:
        """Return the product."""
        with torch.no_grad():
            for _ in range(self.num_extra):
                batch @ self.weight
        return super().forward(batch)


def main() -> None:
    """Train."""
    args = _arguments()
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if args.foreign:
        _multiply(device, args.width)
    if args.stuck:
        _get_stuck(device, args.stuck)
        return
    dist.init_process_group(
        args.backend, device_id=device if args.backend == "nccl" else None, timeout=timedelta(seconds=120)
    )
    rank = dist.get_rank()
    Layer.num_extra = args.extra if rank == args.work else 0
    torch.manual_seed(7)
    layers = nn.Sequential(*(Layer(args.width, args.width) for _ in range(args.layers))).to(device)
    model = _sharded(layers) if args.shard else DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with _profiler(args, rank) as profiler:
        for step in range(args.steps):
            if (rank, step) == (args.absent, args.steps - 1):
                time.sleep(3600)
            batch = torch.randn(args.rows, args.width, device=device)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if profiler is not None:
                profiler.step()
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    for size in ("steps", "width", "layers", "rows"):
        parser.add_argument(f"--{size}", type=int, default=1)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--work", type=int, metavar="RANK")
    parser.add_argument("--extra", type=int, default=2)
    parser.add_argument("--absent", type=int, metavar="RANK")
    parser.add_argument("--profile", type=Path, metavar="FOLDER")
    parser.add_argument("--profiled-steps", type=int, default=20, help="the last ones")
    parser.add_argument("--foreign", action="store_true")
    parser.add_argument("--stuck", type=int, metavar="SECONDS", help="timeout of an operation that does not end")
    return parser.parse_args()


def _sharded(layers: nn.Sequential) -> nn.Module:
    for layer in layers:
        fully_shard(layer)
    return fully_shard(layers)


def _profiler(args: argparse.Namespace, rank: int) -> Any:
    if args.profile is None:
        return nullcontext()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if args.device == "cuda" else [])]
    return profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=args.steps - args.profiled_steps, active=args.profiled_steps, repeat=1),
        on_trace_ready=lambda found: found.export_chrome_trace(str(args.profile / f"rank-{rank}.json.gz")),
    )


def _get_stuck(device: torch.device, timeout_s: int) -> None:
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", 0) if is_cuda else None,
    )
    value = torch.ones(1024, device=device)
    dist.all_reduce(value)
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda._sleep(_TIMES_AS_LONG * timeout_s * _CYCLES_PER_S)
        dist.all_reduce(value)
        time.sleep(_TIMES_AS_LONG * timeout_s)
    else:
        from torch._C._distributed_c10d import _dump_fr_trace

        path = Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}0")
        path.write_bytes(_dump_fr_trace(includeCollectives=True, includeStackTraces=True, onlyActive=False))
    dist.destroy_process_group()


def _multiply(device: torch.device, width: int) -> None:
    matrix = torch.randn(width, width, device=device)
    while True:
        for _ in range(20):
            matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
