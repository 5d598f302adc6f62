"""torch's default process group, made without a race for a port and on an interface that all hosts share.

Over MPI rank 0 opens the store on a port that the kernel picks and tells the others; under torchrun the agent's store
is used. One host talks over its loopback; several over an interface whose subnet they have in common.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hpcpace.errors import WorldError
from hpcpace.world.environment import RankInfo, process_environ, set_environ_default
from hpcpace.world.interfaces import HostAddresses, Route, choose_route, host_addresses, interface_of_user

if TYPE_CHECKING:
    import torch

# A worker of gloo releases Python objects of an operation after it has ended. Where Python ends before that, torch
# aborts the process (2.13: pytorch/pytorch#179291); while this thread sleeps the worker gets the interpreter's lock.
_WORKERS_END_S = 0.05


def choose_device(name: str, local_rank: int) -> torch.device:
    """Return the device of a rank.

    Args:
        name: `auto`, `cpu` or `cuda`.
        local_rank: number among the ranks of the host; it picks the GPU, unless the launcher shows this rank only one.

    Raises:
        WorldError: cuda was requested, and there is no GPU, or not one for each rank.
    """
    import torch

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if num_devices == 0:
        raise WorldError("device is cuda, but torch sees no GPU here: request GPUs (`--gpus-per-node`), or use cpu")
    if num_devices == 1:
        return torch.device("cuda", 0)
    if not 0 <= local_rank < num_devices:
        raise WorldError(
            f"local rank {local_rank} has no GPU: torch sees {num_devices}; start at most {num_devices} "
            "ranks per host, or use cpu"
        )
    return torch.device("cuda", local_rank)


@contextmanager
def init_process_group(
    info: RankInfo,
    comm: Any | None,
    *,
    device: torch.device,
    backend: str = "auto",
    interface: str | None = None,
    timeout_s: float = 600.0,
) -> Iterator[None]:
    """Make torch's default process group, and end it on leaving.

    The chosen interface stays in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, which is the only way in which torch
    takes it, also for groups made later. Values set by the user stay, and win.

    Collective: every rank of the job enters and leaves this.

    Args:
        info: this rank's place.
        comm: all ranks, from mpi_world; None for a single process or under torchrun.
        device: where this rank computes.
        backend: `auto` (nccl on GPUs, gloo on CPUs), or a backend of torch.
        interface: network interface; chosen from the hosts' addresses when not given.
        timeout_s: time after which a collective that does not complete fails.

    Raises:
        WorldError: no usable interface, or no way for the ranks to find each other.
    """
    import torch.distributed as dist

    chosen = ("nccl" if device.type == "cuda" else "gloo") if backend == "auto" else backend
    if chosen == "nccl" and device.type != "cuda":
        raise WorldError("backend is nccl, but there is no GPU: use gloo, or request GPUs")
    dist.init_process_group(
        chosen,
        store=_open_store(info, comm, interface, timedelta(seconds=timeout_s)),
        rank=info.rank,
        world_size=info.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" and "nccl" in chosen else None,
    )
    try:
        yield
    except BaseException:
        # Ending nccl waits for operations that the other ranks may never join; the process ends anyway.
        if chosen == "gloo":
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
    if "gloo" in chosen:
        time.sleep(_WORKERS_END_S)


def _open_store(info: RankInfo, comm: Any | None, interface: str | None, timeout: timedelta) -> Any:
    import torch.distributed as dist

    if info.world_size == 1:
        return dist.HashStore()
    if comm is not None:
        return _store_over_mpi(comm, interface, timeout)
    if info.launcher == "torchrun":
        return _store_of_torchrun(info, interface, timeout)
    raise WorldError(
        f"{info.world_size} ranks started by {info.launcher} have no MPI communicator: pass that of mpi_world()"
    )


def _store_over_mpi(comm: Any, interface: str | None, timeout: timedelta) -> Any:
    import torch.distributed as dist

    # Each rank computes the same routes from the same list, so a refusal is the same on all of them.
    route = _route(comm.allgather(_own_addresses(interface)), comm.rank)
    _set_interface(route)
    store = None
    if comm.rank == 0:
        store = dist.TCPStore(route.address, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    address, port = comm.bcast((route.address, store.port) if store is not None else None, root=0)
    if store is None:
        store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    return store


def _store_of_torchrun(info: RankInfo, interface: str | None, timeout: timedelta) -> Any:
    import torch.distributed as dist

    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in process_environ()]
    if missing:
        raise WorldError(
            f"RANK={info.rank} and WORLD_SIZE={info.world_size} are set, {' and '.join(missing)} not: start the ranks "
            "by torchrun, or set all four"
        )
    store, _, _ = next(dist.rendezvous("env://", info.rank, info.world_size, timeout=timeout))
    exchange = dist.PrefixStore("hpcpace/addresses", store)
    exchange.set(str(info.rank), json.dumps(_own_addresses(interface).to_json()))
    gathered = exchange.multi_get([str(rank) for rank in range(info.world_size)])
    _set_interface(_route([HostAddresses.from_json(json.loads(text)) for text in gathered], info.rank))
    return store


def _own_addresses(interface: str | None) -> HostAddresses:
    return host_addresses(interface_of_user(process_environ(), interface))


def _route(hosts: list[HostAddresses], rank: int) -> Route:
    routes = choose_route({host.host: host for host in hosts})
    return routes[hosts[rank].host]


def _set_interface(route: Route) -> None:
    set_environ_default("GLOO_SOCKET_IFNAME", route.interface)
    # NCCL takes a plain name for a prefix: eth1 would also match eth10.
    set_environ_default("NCCL_SOCKET_IFNAME", f"={route.interface}")
