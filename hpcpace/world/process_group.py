"""torch's default process group, made without a race for a port and on an interface that all hosts share.

Over MPI rank 0 opens the store on a port that the kernel picks and sends it to the others; under torchrun the agent's
store is used; elsewhere the ranks have a rendezvous. One host talks over its loopback; several over an interface whose
subnet they have in common. Before torch connects them, each rank says on which host it is, what it computes on, and
what keeps it from taking part, and rank 0 decides: a rank that is there twice, a missing one, or a host without a GPU
ends the job with one message instead of a hang. All of that ends within one limit.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hpcpace.core.codec import convert, plain
from hpcpace.core.compat import set_group_timeout
from hpcpace.core.environment import RankInfo, host_identity, process_environ, set_environ_default
from hpcpace.core.errors import ImpossibleWorld, WorldError
from hpcpace.core.hostlist import exclude_option, expand, short_list
from hpcpace.core.records import dataclass
from hpcpace.core.text import few
from hpcpace.world.connection import Rendezvous, open_store, rendezvous_of_torchrun, wait_until_listening
from hpcpace.world.deadline import Deadline
from hpcpace.world.interfaces import HostAddresses, Route, choose_route, host_addresses, interface_of_user

if TYPE_CHECKING:
    import torch


# How much longer the other ranks wait for the decision than rank 0, which decides, waits for them.
_GRACE_S = 2.0
_POLL_S = 0.01
_MAX_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Attendee:
    """A rank as it introduces itself to the others.

    Attributes:
        rank: its number.
        world_size: how many ranks it counts.
        pid: its process.
        host_key: distinguishes hosts, which may have the same name.
        device: `cpu` or `cuda`; empty if it found none.
        backend: the backend of its process group.
        problem: why it cannot take part; empty if it can.
        addresses: its host and the host's addresses.
    """

    rank: int
    world_size: int
    pid: int
    host_key: str
    device: str
    backend: str
    problem: str
    addresses: HostAddresses

    @property
    def host(self) -> str:
        """The name of its host."""
        return self.addresses.host

    @property
    def process(self) -> str:
        """The process in words, which distinguishes two that have the same rank."""
        return f"process {self.pid} on {self.host}"


def meet_over_mpi(comm: Any, own: Attendee) -> Route:
    """Return this rank's route. Collective: every rank of `comm` calls this.

    Raises:
        ImpossibleWorld: the ranks cannot work together; the same on all of them.
    """
    # Each rank decides the same from the same list, so a refusal is the same on all of them.
    return _decided(comm.allgather(own), is_told=own.rank > 0)[own.host_key]


def meet_over_store(store: Any, own: Attendee, info: RankInfo, hosts: Sequence[str], deadline: Deadline) -> Route:
    """Return this rank's route. Every rank calls this; if one does not, the others wait no longer than the deadline.

    Args:
        store: torch's store of these ranks, and no others.
        own: how this rank introduces itself.
        info: its place.
        hosts: names of the hosts that should come, as far as they are known.
        deadline: until when rank 0 waits for all, and the others a little longer for its answer.

    Raises:
        ImpossibleWorld: the ranks cannot work together, or a rank did not come.
    """
    try:
        return _met(store, own, hosts, deadline)
    except RuntimeError as error:
        raise ImpossibleWorld(
            f"{own.host}: rank 0 has not answered within {deadline.timeout_s:g} s, or has ended: see what it says, and "
            f"whether all {own.world_size} ranks run ({str(error).partition(chr(10))[0][:120]})",
            is_told=info.local_rank > 0,
        ) from error


def _met(store: Any, own: Attendee, hosts: Sequence[str], deadline: Deadline) -> Route:
    import torch.distributed as dist

    owner = store.compare_set(f"owner/{own.rank}", "", own.process).decode()
    if owner != own.process:
        raise ImpossibleWorld(
            f"rank {own.rank} is there twice: {owner} and {own.process}. Start each rank once; two jobs need two "
            "rendezvous",
            is_told=False,
        )
    # The same processes may meet more than once.
    meeting = dist.PrefixStore(str(store.add(f"round/{own.rank}", 1)), store)
    meeting.set(f"rank/{own.rank}", json.dumps(plain(own)))
    meeting.add("num-came", 1)
    if own.rank == 0:
        _decide(meeting, own.world_size, hosts, deadline)
    if not meeting.check(["refused"]):
        meeting.wait([f"route/{own.host_key}"], timedelta(seconds=deadline.left_s + _GRACE_S))
    refusal = meeting.get("refused").decode() if meeting.check(["refused"]) else ""
    meeting.add("num-told", 1)
    if refusal:
        if own.rank == 0:
            _let_others_read(meeting)
        raise ImpossibleWorld(refusal, is_told=own.rank > 0)
    return convert(json.loads(meeting.get(f"route/{own.host_key}")), Route)


def _decide(meeting: Any, world_size: int, hosts: Sequence[str], deadline: Deadline) -> None:
    """Wait for all ranks, and give every host its route, or the reason for having none."""
    keys = [f"rank/{rank}" for rank in range(world_size)]
    # A wait of torch would print a warning of its own where it ends without all ranks.
    while (num_came := meeting.add("num-came", 0)) < world_size and not deadline.is_over:
        time.sleep(_POLL_S)
    came = keys if num_came == world_size else [key for key in keys if meeting.check([key])]
    attendees = [convert(json.loads(text), Attendee) for text in meeting.multi_get(came)]
    routes, refusal = {}, ""
    try:
        if len(came) < world_size:
            refusal = _missing(attendees, world_size, hosts, deadline.timeout_s)
        else:
            routes = _decided(attendees, is_told=False)
    except WorldError as error:
        refusal = str(error)
    if refusal:
        meeting.set("refused", refusal)
    for host in {each.host_key for each in attendees}:
        meeting.set(f"route/{host}", json.dumps(plain(routes[host])) if host in routes else "")


def _let_others_read(meeting: Any) -> None:
    """Wait a little before the store ends, until the ranks that came have read why."""
    grace = Deadline(_GRACE_S)
    while meeting.add("num-told", 0) < meeting.add("num-came", 0) and not grace.is_over:
        time.sleep(_POLL_S)


def _missing(came: Sequence[Attendee], world_size: int, hosts: Sequence[str], timeout_s: float) -> str:
    absent = sorted(set(range(world_size)) - {each.rank for each in came})
    seen = {each.host.partition(".")[0] for each in came}
    silent = [host for host in hosts if host.partition(".")[0] not in seen]
    where = f" (nothing came from {short_list(silent)})" if silent else ""
    return (
        f"{_ranks(absent)} of {world_size} did not come within {timeout_s:g} s{where}: see what they say, and whether "
        f"their host reaches {came[0].host}; a slow start needs a larger world.start_timeout_s"
    )


def _decided(attendees: Sequence[Attendee], *, is_told: bool) -> dict[str, Route]:
    """Return the route of each host.

    Raises:
        ImpossibleWorld: there is none, or the ranks cannot work together.
    """
    problem = _problem(attendees)
    if problem:
        raise ImpossibleWorld(problem, is_told=is_told)
    try:
        return choose_route({each.host_key: each.addresses for each in attendees})
    except WorldError as error:
        raise ImpossibleWorld(str(error), is_told=is_told) from error


def _problem(attendees: Sequence[Attendee]) -> str:
    if any(each.problem for each in attendees):
        by_problem = _grouped(attendees, lambda each: each.problem)
        return "; ".join(f"{_who(ranks)}: {problem}" for problem, ranks in by_problem.items() if problem)
    by_size = _grouped(attendees, lambda each: each.world_size)
    if len(by_size) > 1:
        sizes = ", ".join(f"{_who(ranks)} to one of {size}" for size, ranks in by_size.items())
        return f"the ranks belong to different worlds: {sizes}: start all of them with one command"
    by_device = _grouped(attendees, lambda each: each.device)
    if "cpu" in by_device and len(by_device) > 1:
        without = by_device["cpu"]
        left_out = exclude_option({each.host for each in without})
        return (
            f"torch sees no GPU for {_who(without)}, and one for the other ranks: look at nvidia-smi there, leave the "
            f"host out ({left_out}), or set world.device to cpu for all"
        )
    by_backend = _grouped(attendees, lambda each: each.backend)
    if len(by_backend) > 1:
        backends = ", ".join(f"{backend} for {_who(ranks)}" for backend, ranks in by_backend.items())
        return f"the ranks have different backends: {backends}: set world.backend alike on all hosts"
    return ""


def _grouped(attendees: Sequence[Attendee], key: Callable[[Attendee], Any]) -> Mapping[Any, list[Attendee]]:
    groups: dict[Any, list[Attendee]] = {}
    for each in attendees:
        groups.setdefault(key(each), []).append(each)
    return groups


def _who(attendees: Sequence[Attendee]) -> str:
    """Return `n2 (ranks 2, 3)`."""
    return f"{short_list({each.host for each in attendees})} ({_ranks([each.rank for each in attendees])})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {few(ranks, _MAX_NAMED)}"


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
    """Return this rank's introduction to the others, and its device; it includes a problem, so that all ranks end."""
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
    own = Attendee(
        rank=info.rank,
        world_size=info.world_size,
        pid=os.getpid(),
        host_key=host_identity().host_key,
        device=chosen.type,
        backend=backend,
        problem=problem,
        addresses=addresses,
    )
    return own, chosen


def _set_timeouts(store: Any, timeout_s: float) -> None:
    """Give collectives, and the store that makes further groups, their own time, after the start had another one."""
    store.set_timeout(timedelta(seconds=timeout_s))
    set_group_timeout(timedelta(seconds=timeout_s))


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
