"""A training script that makes its ranks and its process group in one of several ways: see WAYS at its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

warnings.simplefilter("ignore")


def train(num_steps: int = 4) -> None:
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(8, 8)
    if dist.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.stdout.write(f"loss {loss.item()}\n")
    sys.stdout.flush()


def leave() -> None:
    dist.destroy_process_group()
    time.sleep(0.2)  # see own_script.py


def rank_of_spawn(rank: int, world_size: int) -> None:
    store = dist.TCPStore("127.0.0.1", 20_000 + os.getppid() % 9000, world_size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    train()
    leave()


def spawn() -> None:
    mp.spawn(rank_of_spawn, args=(2,), nprocs=2)


def rank_that_fails(rank: int, world_size: int) -> None:
    store = dist.TCPStore("127.0.0.1", 20_000 + os.getppid() % 9000, world_size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    train()
    if rank == 1:
        raise ValueError("no batch from /data, password=a-secret-7")
    train()
    leave()


# Ports are below those that the system gives to connections of other tests, 32768 and above.
def spawn_fails() -> None:
    mp.start_processes(rank_that_fails, args=(2,), nprocs=2, start_method=sys.argv[2])


def relaunch() -> None:
    """As Lightning does: the first rank starts the script once more for each other one."""
    child = None
    if "RANK" not in os.environ:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 9000), "WORLD_SIZE": "2"}
        os.environ.update(place)
        child = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "1"})
        os.environ["RANK"] = "0"
    mesh_only()
    if child is not None and child.wait():
        sys.exit(1)


def mesh_only() -> None:
    dist.device_mesh.init_device_mesh("cpu", (2,))
    train()
    leave()


def twice() -> None:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for num_steps in (2, 3):
        # Groups made twice over one store without a prefix read what the first has left there.
        place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        dist.init_process_group("gloo", store=dist.PrefixStore(f"group {num_steps}", store), **place)
        train(num_steps)
        dist.barrier()
        leave()


def fail_once() -> None:
    dist.init_process_group("gloo")
    train()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        raise RuntimeError("the first start fails")
    dist.barrier()
    leave()


def smaller() -> None:
    """A training of three ranks does not come through, and one of two does."""
    dist.init_process_group("gloo")
    train()
    if dist.get_world_size() == 3:
        os._exit(1)
    leave()


def fork() -> None:
    mp.start_processes(rank_of_spawn, args=(2,), nprocs=2, start_method="fork")


def only_launch() -> None:
    subprocess.run([sys.executable, "-c", "import torch; print('no rank')"], check=True)


def own_session() -> None:
    import hpcpace

    dist.device_mesh.init_device_mesh("cpu", (2,))
    with hpcpace.session(run_dir="own") as session:
        for _ in range(2):
            train(2)
            session.step()
    leave()


def own_world() -> None:
    """As Lightning sets a world up: all variables but RANK, and a session of its own in each rank."""
    world = {"WORLD_SIZE": "2", "NODE_RANK": "0", "LOCAL_RANK": "0"}
    os.environ.update(world, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20_000 + os.getpid() % 9000))
    mp.spawn(rank_with_session, args=(2,), nprocs=2)


def rank_with_session(rank: int, world_size: int) -> None:
    import hpcpace

    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    with hpcpace.session(run_dir=sys.argv[2]) as session:
        for _ in range(2):
            train(2)
            session.step()
    leave()


def exits() -> None:
    train()
    sys.exit(3)


def leaves_at_once() -> None:
    train()
    os._exit(5)


WAYS = (
    spawn,
    spawn_fails,
    relaunch,
    mesh_only,
    twice,
    fail_once,
    smaller,
    fork,
    only_launch,
    own_session,
    own_world,
    exits,
    leaves_at_once,
    train,
)

if __name__ == "__main__":
    {way.__name__: way for way in WAYS}[sys.argv[1]]()
