"""Training loops of kinds that no framework writes, of six steps; test_unusual_loops.py traces them on two ranks."""

from __future__ import annotations

import sys
import threading
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

STEPS = 6
WIDTH = 8


def gan() -> list[torch.Tensor]:
    """Two models that train in turn, with sharded optimizers, a static graph, and a loader that forks."""
    generator, critic = (DistributedDataParallel(nn.Linear(WIDTH, WIDTH), static_graph=static) for static in (0, 1))
    optimizers = [ZeroRedundancyOptimizer(each.parameters(), torch.optim.Adam) for each in (critic, generator)]
    numbers = torch.randn(4 * STEPS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for real in DataLoader(numbers, batch_size=4, num_workers=1, multiprocessing_context="fork"):
        fake = generator(torch.randn(4, WIDTH))
        for loss, optimizer in (
            (critic(fake.detach() - real).tanh().mean(), optimizers[0]),
            (fake.mean(), optimizers[1]),
        ):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
    return losses


class SumOverRanks(torch.autograd.Function):
    """Communicates in both directions, as tensor parallelism by hand does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient


def in_a_thread() -> list[torch.Tensor]:
    """An autograd function that communicates, and a loop in a thread beside the main one."""
    losses: list[torch.Tensor] = []

    def train() -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            loss = SumOverRanks.apply(model(torch.ones(4, WIDTH))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return losses


def accumulating() -> list[torch.Tensor]:
    """Three microbatches a step, two of them without synchronisation, and an optimizer for each half of the model."""
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)))
    optimizers = [torch.optim.Adagrad(model.module[0].parameters()), torch.optim.AdamW(model.module[1].parameters())]
    losses = []
    for microbatch in range(3 * STEPS):
        is_last = microbatch % 3 == 2
        with nullcontext() if is_last else model.no_sync():
            loss = model(torch.randint(20, (4,))).logsumexp(1).mean() / 3
            loss.backward()
        losses.append(loss)
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return losses


def parameter_server() -> list[torch.Tensor]:
    """Rank 0 keeps the parameters and the optimizers; each other rank asks for them and sends its gradients."""
    weight = torch.zeros(WIDTH, requires_grad=True)
    if dist.get_rank():
        losses = []
        for _ in range(STEPS):
            dist.recv(weight.detach(), 0)
            loss = nn.functional.linear(torch.randn(4, WIDTH), weight).cos().mean()
            (gradient,) = torch.autograd.grad(loss, [weight])
            dist.send(gradient, 0)
            losses.append(loss)
        return losses
    optimizers = {rank: torch.optim.SGD([weight], lr=0.1) for rank in range(1, dist.get_world_size())}
    weight.grad = torch.zeros(WIDTH)
    for _ in range(STEPS):
        for rank, optimizer in optimizers.items():
            dist.send(weight.detach(), rank)
            dist.recv(weight.grad, rank)
            optimizer.step()
    return [weight.sum()]


def evaluating_beside() -> list[torch.Tensor]:
    """The last rank evaluates what the first sends it; the others train without it."""
    last = dist.get_world_size() - 1
    trainers = dist.new_group(range(last))
    model, losses = nn.Linear(WIDTH, WIDTH), []
    if dist.get_rank() == last:
        model.eval()
        for _ in range(STEPS):
            for parameter in model.parameters():
                dist.recv(parameter.data, 0)
            with torch.no_grad():
                losses.append(model(torch.randn(4, WIDTH)).square().mean())
        return losses
    trained = DistributedDataParallel(model, process_group=trainers)
    optimizer = torch.optim.Adam(trained.parameters())
    for _ in range(STEPS):
        loss = trained(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        if dist.get_rank() == 0:
            for parameter in model.parameters():
                dist.send(parameter.data, last)
    return losses


_PLACES = (
    (torch.distributed, "all_reduce"),
    (torch.Tensor, "backward"),
    (torch.autograd, "backward"),
    (nn.Module, "__call__"),
    (torch.optim.Optimizer, "zero_grad"),
    (torch.optim.SGD, "step"),
)


def patch(calls: list[str]) -> dict[tuple[Any, str], Any]:
    """Put functions that count their calls in the place of torch's; return those that were there."""
    before = {(owner, name): getattr(owner, name) for owner, name in _PLACES}

    def counted(function: Any, name: str) -> Any:
        def counts(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*args, **options)

        return counts

    for (owner, name), function in before.items():
        setattr(owner, name, counted(function, name))
    return before


CALLS: list[str] = []


def patched() -> list[torch.Tensor]:
    """Torch's functions replaced before the group is made (see main) and after it, and put back in the middle."""
    patch(CALLS)
    model, losses = nn.Linear(WIDTH, WIDTH), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        if step == STEPS // 2:
            for (owner, name), function in ORIGINALS.items():
                setattr(owner, name, function)
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return [*losses, torch.tensor(float(len(CALLS)))]


ORIGINALS: dict[tuple[Any, str], Any] = {}


KINDS = {loop.__name__: loop for loop in (gan, in_a_thread, accumulating, parameter_server, evaluating_beside, patched)}


def main(kind: str) -> None:
    warnings.simplefilter("ignore")
    if kind == "patched":
        ORIGINALS.update(patch(CALLS))
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    losses = KINDS[kind]()
    words = [float(loss.detach()).hex() for loss in losses]
    sys.stdout.write(f"loss {dist.get_rank()}: {' '.join(words)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
