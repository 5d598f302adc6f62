"""torch's default process group, made without a race for a port and on an interface that all hosts share.

Over MPI rank 0 opens the store on a port that the kernel picks and tells the others; under torchrun the agent's store
is used; elsewhere the ranks have a rendezvous. One host talks over its loopback; several over an interface whose
subnet they have in common. All of that ends within one limit, whatever keeps a rank from taking part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hpcpace.core.environment import RankInfo, process_environ, set_environ_default
from hpcpace.core.errors import ImpossibleWorld, WorldError
from hpcpace.core.hostlist import expand
from hpcpace.world.deadline import Deadline
from hpcpace.world.interfaces import Route, host_addresses, interface_of_user
from hpcpace.world.meeting import Attendee, introduce, meet_over_mpi, meet_over_store
from hpcpace.world.rendezvous import Rendezvous, open_store, rendezvous_of_torchrun, wait_until_listening

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
    device: torch.device | str,
    backend: str = "auto",
    interface: str | None = None,
    rendezvous: Rendezvous | None = None,
    timeout_s: float = 600.0,
    start_timeout_s: float = 120.0,
) -> Iterator[torch.device]:
    """Make torch's default process group, yield the device of this rank, and end the group on leaving.

    The chosen interfaces stay in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, which is the only way in which torch
    takes them, also for groups made later; over InfiniBand and RoCE NCCL finds its own. Values set by the user stay,
    and win.

    Collective: every rank of the job enters and leaves this.

    Args:
        info: this rank's place.
        comm: all ranks, from mpi_world; None for a single process, under torchrun, and with a rendezvous.
        device: where this rank computes, or what `choose_device` takes.
        backend: `auto` (nccl on GPUs, gloo on CPUs), or a backend of torch.
        interface: network interface; chosen from the hosts' addresses when not given.
        rendezvous: where ranks without MPI or torchrun meet.
        timeout_s: time after which a collective that does not complete fails.
        start_timeout_s: time after which ranks that do not find or reach each other fail.

    Raises:
        WorldError: no usable interface, or no way for the ranks to find each other.
        ImpossibleWorld: the ranks that came cannot work together, or one did not come.
    """
    import torch
    import torch.distributed as dist

    own, chosen_device = _introduction(info, device, backend, interface)
    if own.problem and (info.world_size == 1 or (comm is None and rendezvous is None and info.launcher != "torchrun")):
        raise WorldError(own.problem)
    deadline = Deadline(start_timeout_s)
    store = _open_store(info, comm, own, rendezvous, deadline)
    if chosen_device.type == "cuda":
        torch.cuda.set_device(chosen_device)
    try:
        dist.init_process_group(
            own.backend,
            store=store,
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=deadline.left_s if info.world_size > 1 else timeout_s),
            device_id=chosen_device if chosen_device.type == "cuda" and "nccl" in own.backend else None,
        )
    except RuntimeError as error:
        raise ImpossibleWorld(_cannot_connect(own, start_timeout_s, error), is_told=info.local_rank > 0) from error
    _set_timeouts(store, timeout_s)
    try:
        yield chosen_device
    except BaseException:
        # Ending nccl waits for operations that the other ranks may never join; the process ends anyway.
        if own.backend == "gloo":
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
    if "gloo" in own.backend:
        time.sleep(_WORKERS_END_S)


def _introduction(
    info: RankInfo, device: torch.device | str, backend: str, interface: str | None
) -> tuple[Attendee, torch.device]:
    """Return what this rank tells the others, and its device; a problem is told as well, so that all ranks end."""
    import torch

    problem, chosen = "", torch.device("cpu")
    try:
        chosen = choose_device(device, info.local_rank) if isinstance(device, str) else device
    except WorldError as error:
        problem = str(error)
    if backend == "auto":
        backend = "nccl" if chosen.type == "cuda" else "gloo"
    if backend == "nccl" and chosen.type != "cuda" and not problem:
        problem = "backend is nccl, but there is no GPU: use gloo, or request GPUs"
    addresses = host_addresses(interface_of_user(process_environ(), interface), process_environ())
    return introduce(info, device=chosen.type, backend=backend, problem=problem, addresses=addresses), chosen


def _set_timeouts(store: Any, timeout_s: float) -> None:
    """Give collectives, and the store that makes further groups, their own time, after the start had another one."""
    import torch.distributed as dist

    store.set_timeout(timedelta(seconds=timeout_s))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))


def _cannot_connect(own: Attendee, start_timeout_s: float, error: RuntimeError) -> str:
    interfaces = process_environ().get("GLOO_SOCKET_IFNAME", "")
    return (
        f"{own.host} has not connected to all other ranks over {interfaces or 'the network'} within "
        f"{start_timeout_s:g} s: see whether a firewall or route is between the hosts, and name another interface "
        f"(--interface) if they have one ({str(error).partition(chr(10))[0][:200]})"
    )


def _open_store(
    info: RankInfo, comm: Any | None, own: Attendee, rendezvous: Rendezvous | None, deadline: Deadline
) -> Any:
    import torch.distributed as dist

    if info.world_size == 1:
        return dist.HashStore()
    if comm is not None:
        return _store_over_mpi(comm, own, deadline)
    if info.launcher == "torchrun":
        store = _store_of_torchrun(info, deadline)
    elif rendezvous is not None:
        store = _told_once(info, lambda: open_store(rendezvous, deadline))
    else:
        raise WorldError(
            f"{info.world_size} ranks started by {info.launcher} have no MPI communicator: pass that of mpi_world()"
        )
    # The agent of torchrun may keep its store over restarts of the ranks.
    attempt = process_environ().get("TORCHELASTIC_RESTART_COUNT", "")
    meeting = dist.PrefixStore(f"hpcpace/meeting/{info.job_id}.{info.step_id}/{attempt}", store)
    _set_interface(meet_over_store(meeting, own, info, _hosts_of_step(), deadline))
    return store


def _store_over_mpi(comm: Any, own: Attendee, deadline: Deadline) -> Any:
    import torch.distributed as dist

    route = meet_over_mpi(comm, own)
    _set_interface(route)
    store = None
    timeout = timedelta(seconds=deadline.left_s)
    if comm.rank == 0:
        store = dist.TCPStore(route.address, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    address, port = comm.bcast((route.address, store.port) if store is not None else None, root=0)
    if store is None:
        place = Rendezvous(
            host=route.reach(address), port=port, is_here=False, named_by="--interface, which chooses the network,"
        )
        store = open_store(place, deadline)
    return store


def _store_of_torchrun(info: RankInfo, deadline: Deadline) -> Any:
    import torch.distributed as dist

    place = rendezvous_of_torchrun(info, process_environ())

    def opened() -> Any:
        if not place.is_here:
            wait_until_listening(place, deadline)
        timeout = timedelta(seconds=deadline.left_s)
        try:
            store, _, _ = next(dist.rendezvous("env://", info.rank, info.world_size, timeout=timeout))
        except RuntimeError as error:
            raise WorldError(place.refusal(error)) from error
        return store

    return _told_once(info, opened)


def _told_once(info: RankInfo, opened: Callable[[], Any]) -> Any:
    """Return the store; of the ranks of a host, which all fail alike, one speaks."""
    try:
        return opened()
    except WorldError as error:
        raise ImpossibleWorld(str(error), is_told=info.local_rank > 0) from error


def _hosts_of_step() -> list[str]:
    try:
        return expand(process_environ().get("SLURM_STEP_NODELIST", ""))
    except ValueError:
        return []


def _set_interface(route: Route) -> None:
    # torch makes a device of gloo for each, and spreads operations over them; NCCL spreads each operation.
    interfaces = ",".join(route.interfaces)
    set_environ_default("GLOO_SOCKET_IFNAME", interfaces)
    if not route.is_left_to_nccl:
        # NCCL takes a plain name for a prefix: eth1 would also match eth10.
        set_environ_default("NCCL_SOCKET_IFNAME", f"={interfaces}")
