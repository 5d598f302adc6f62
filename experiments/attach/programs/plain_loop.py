"""A loop of one's own around DDP, FSDP or a compiled model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from experiments.attach.programs.parts import BATCH, STEPS, Layers, Model, batches, loss_of, options
from experiments.attach.witness import Witness


def wrap(kind: str, model: Model) -> torch.nn.Module:
    """Make a model parallel."""
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if kind == "fsdp2":
        for layer in model.net.layers:
            fully_shard(layer)
        return fully_shard(model)
    return DistributedDataParallel(model)


def main() -> None:
    parser = options()
    parser.add_argument("--kind", choices=("ddp", "compile", "fsdp1", "fsdp2"), required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    args = parser.parse_args()
    witness = Witness()
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers: torch.nn.Module = Layers()
    if args.kind == "compile":
        layers = torch.compile(layers)
    model = wrap(args.kind, Model(layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, (x, y) in enumerate(batches(rank, num_ranks, steps=STEPS * args.accumulate), 1):
        loss = loss_of(model(x), y) / args.accumulate
        loss.backward()
        if number % args.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            witness.step(loss, BATCH * args.accumulate)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
