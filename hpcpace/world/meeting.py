"""What the ranks tell each other before torch connects them, so that a world that cannot be ends with one message.

Each rank says on which host it is, what it computes on, and what keeps it from taking part. Rank 0 decides, and every
rank learns the decision: a rank that is there twice, a missing one, or a host without the GPU that others have would
otherwise be a hang of all.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from hpcpace.core.environment import RankInfo, host_identity
from hpcpace.core.errors import ImpossibleWorld, WorldError
from hpcpace.core.hostlist import exclude_option, short_list
from hpcpace.world.deadline import Deadline
from hpcpace.world.interfaces import HostAddresses, Route, choose_route

# How much longer the other ranks wait for the decision than rank 0, which decides, waits for them.
_GRACE_S = 2.0
_POLL_S = 0.01
_MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Attendee:
    """What a rank tells the others.

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

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Attendee:
        """Return what to_json made text."""
        values = json.loads(text)
        return cls(**{**values, "addresses": HostAddresses.from_json(values["addresses"])})


def introduce(info: RankInfo, *, device: str, backend: str, problem: str, addresses: HostAddresses) -> Attendee:
    """Return what this rank tells the others; the arguments are attributes of `Attendee`."""
    return Attendee(
        rank=info.rank,
        world_size=info.world_size,
        pid=os.getpid(),
        host_key=host_identity().host_key,
        device=device,
        backend=backend,
        problem=problem,
        addresses=addresses,
    )


def meet_over_mpi(comm: Any, own: Attendee) -> Route:
    """Return this rank's route. Collective: every rank of `comm` calls this.

    Raises:
        ImpossibleWorld: the ranks cannot work together; the same on all of them.
    """
    # Each rank decides the same from the same list, so a refusal is the same on all of them.
    attendees = [Attendee.from_json(text) for text in comm.allgather(own.to_json())]
    return _decided(attendees, is_told=own.rank > 0)[own.host_key]


def meet_over_store(store: Any, own: Attendee, info: RankInfo, hosts: Sequence[str], deadline: Deadline) -> Route:
    """Return this rank's route. Every rank calls this; if one does not, the others wait no longer than the deadline.

    Args:
        store: torch's store of these ranks, and no others.
        own: what this rank tells.
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
    meeting.set(f"rank/{own.rank}", own.to_json())
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
    return Route.from_json(json.loads(meeting.get(f"route/{own.host_key}")))


def _decide(meeting: Any, world_size: int, hosts: Sequence[str], deadline: Deadline) -> None:
    """Wait for all ranks, and tell every host its route, or why there is none."""
    keys = [f"rank/{rank}" for rank in range(world_size)]
    # A wait of torch would print a warning of its own where it ends without all ranks.
    while (num_came := meeting.add("num-came", 0)) < world_size and not deadline.is_over:
        time.sleep(_POLL_S)
    came = keys if num_came == world_size else [key for key in keys if meeting.check([key])]
    attendees = [Attendee.from_json(text) for text in meeting.multi_get(came)]
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
        meeting.set(f"route/{host}", json.dumps(routes[host].to_json()) if host in routes else "")


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
    named = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"
