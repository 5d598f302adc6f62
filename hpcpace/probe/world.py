"""The ranks of a probe, the board on which they leave each other messages, and the parts that they measure.

A collective that lacks one rank fails on all of them. Results and decisions therefore travel as texts in torch's store,
which rank 0's process holds and which survives when ranks stop answering: a rank that does not answer in time is named,
and the others go on. Parts measure one thing each, one after the other, within a common time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import msgspec

from hpcpace.core.errors import HpcpaceError
from hpcpace.core.records import dataclass
from hpcpace.probe.record import ProbeRecord
from hpcpace.world.deadline import Deadline

if TYPE_CHECKING:
    import torch

_BATCH = 512


class Board:
    """Messages by name, each written once and read by any rank. Values are what JSON takes, and dataclasses of that.

    Args:
        store: of torch, a connection of our own.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    @property
    def store(self) -> Any:
        """The store, for groups that are made by way of it."""
        return self._store

    def post(self, name: str, value: Any) -> None:
        """Leave a message.

        Raises:
            RuntimeError: the store does not answer.
        """
        self._store.set(name, msgspec.json.encode(value))

    def read(self, name: str, timeout_s: float, kind: Any = Any) -> Any:
        """Return a message as what it was, and wait for it if it is not there yet.

        Raises:
            TimeoutError: it did not come in time, or the store does not answer.
        """
        try:
            self._store.wait([name], timedelta(seconds=max(timeout_s, 0.001)))
            return msgspec.json.decode(self._store.get(name), type=kind)
        except RuntimeError as error:
            raise TimeoutError(f"no answer within {timeout_s:.3g} s") from error

    def gather(self, name: str, ranks: Iterable[int], timeout_s: float, kind: Any = Any) -> dict[int, Any]:
        """Return the messages `NAME/RANK` of ranks as what they were; those that did not come in time are left out.

        Raises:
            RuntimeError: the store does not answer.
        """
        keys = {rank: f"{name}/{rank}" for rank in ranks}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=max(timeout_s, 0.001)))
            present = list(keys)
        except RuntimeError:
            present = [rank for rank, key in keys.items() if self._store.check([key])]
        found: dict[int, Any] = {}
        for begin in range(0, len(present), _BATCH):
            some = present[begin : begin + _BATCH]
            texts = self._store.multi_get([keys[rank] for rank in some])
            found.update((rank, msgspec.json.decode(text, type=kind)) for rank, text in zip(some, texts, strict=True))
        return found


_Value = TypeVar("_Value")

GRACE_S = 2.0
"""How much longer than an operation's timeout rank 0 waits for the word of a rank, and others for rank 0's."""


def nobody_listens() -> None:
    """Do nothing at a meeting."""


class RankZeroLost(HpcpaceError):
    """Rank 0, which keeps the results, does not answer."""


@dataclass(kw_only=True)
class ProbeWorld:
    """All ranks of a probe, the same on each but for `rank`.

    Attributes:
        rank: of this process.
        node_of_rank: index into `hosts` of every rank.
        hosts: names of the hosts, distinct, in the order of their first rank.
        topology_addrs: Slurm's address of each host; empty if unknown.
        device: of this rank.
        backend: `gloo` or `nccl`.
        board: where ranks leave each other messages.
        timeout_s: time after which an operation of which a rank is missing fails.
        alive: ranks that still answer, ascending; the same on all of them.
        problems: what went wrong so far, a sentence each; rank 0's are saved.
        num_meetings: how often all ranks have met or agreed so far.
        on_meeting: called whenever they do, when nothing is being measured, such as to show progress.
    """

    rank: int
    node_of_rank: tuple[int, ...]
    hosts: tuple[str, ...]
    topology_addrs: tuple[str, ...]
    device: torch.device
    backend: str
    board: Board
    timeout_s: float
    alive: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_meetings: int = 0
    on_meeting: Callable[[], None] = nobody_listens

    def __post_init__(self) -> None:
        if not self.alive:
            self.alive = list(range(len(self.node_of_rank)))

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which collects and returns results."""
        return self.rank == 0

    @property
    def nodes(self) -> list[int]:
        """Hosts all of whose ranks answer, as indices into `hosts`."""
        silent = {self.node_of_rank[rank] for rank in range(len(self.node_of_rank)) if rank not in set(self.alive)}
        return [node for node in range(len(self.hosts)) if node not in silent]

    @property
    def lost_hosts(self) -> list[str]:
        """Hosts with a rank that has stopped answering."""
        present = set(self.nodes)
        return [name for node, name in enumerate(self.hosts) if node not in present]

    def ranks_of(self, nodes: Sequence[int]) -> list[int]:
        """Return the ranks on some hosts, ascending."""
        wanted = set(nodes)
        return [rank for rank, node in enumerate(self.node_of_rank) if node in wanted]

    def leader_of(self, node: int) -> int:
        """Return the first rank of a host."""
        return self.node_of_rank.index(node)

    def meet(self, what: str, problem: str = "", *, wait_s: float = 0.0) -> list[str]:
        """Wait for all ranks that are alive, drop those that do not answer, and return what went wrong for others.

        Collective: every rank alive calls this, equally often. A host with a rank that does not answer is left out from
        then on, with all its ranks.

        Args:
            what: was just done, for the sentence on a host that is lost.
            problem: of this rank; empty if all is well.
            wait_s: how much earlier than another this rank may be here, beyond the timeout of an operation.

        Returns:
            distinct problems, each with the host of the first rank that had it.

        Raises:
            RankZeroLost: rank 0 does not answer.
        """
        name = f"meet/{self.num_meetings}"
        self.num_meetings += 1
        self.on_meeting()
        limit_s = self.timeout_s + wait_s + GRACE_S
        try:
            self.board.post(f"{name}/{self.rank}", problem)
            if self.is_first:
                self.board.post(f"{name}/decision", self._decide(name, what, limit_s))
            decision = self.board.read(f"{name}/decision", limit_s + GRACE_S)
        except (TimeoutError, RuntimeError) as error:
            raise self._without_rank_zero() from error
        lost = set(decision["lost"])
        self.alive = [rank for rank in self.alive if self.node_of_rank[rank] not in lost]
        self.problems += [one for one in decision["sentences"] if one not in self.problems]
        if self.node_of_rank[self.rank] in lost:
            raise HpcpaceError(f"{self.hosts[self.node_of_rank[self.rank]]} answered too late; the others went on")
        failures: list[str] = decision["failures"]
        return failures

    def agree(self, value: _Value, kind: Any = Any) -> _Value:
        """Return rank 0's value on all ranks, as what it was; a board must take it.

        Collective: every rank alive calls this, equally often, and within the timeout of an operation.

        Raises:
            RankZeroLost: rank 0 does not answer.
        """
        name = f"agree/{self.num_meetings}"
        self.num_meetings += 1
        self.on_meeting()
        try:
            if self.is_first:
                self.board.post(name, value)
                return value
            agreed: _Value = self.board.read(name, self.timeout_s + GRACE_S, kind)
        except (TimeoutError, RuntimeError) as error:
            raise self._without_rank_zero() from error
        return agreed

    def _without_rank_zero(self) -> RankZeroLost:
        return RankZeroLost(
            f"{self.hosts[0]} does not answer: rank 0 runs there and keeps the results, which are lost; check the host "
            "and probe without it"
        )

    def _decide(self, name: str, what: str, limit_s: float) -> dict[str, list[str] | list[int]]:
        answers = self.board.gather(name, self.alive, limit_s)
        lost = sorted({self.node_of_rank[rank] for rank in self.alive if rank not in answers})
        sentences = [f"{self.hosts[node]} stopped answering during {what}; the others went on" for node in lost]
        failures: dict[str, str] = {}
        for rank, text in sorted(answers.items()):
            if text:
                failures.setdefault(text, f"{self.hosts[self.node_of_rank[rank]]}: {text}")
        return {"lost": lost, "sentences": sentences, "failures": list(failures.values())}


Tell = Callable[[int, int], None]
"""Takes what is done and the total."""


class Measurement(Protocol):
    """One thing that a probe measures."""

    @property
    def name(self) -> str:
        """A word, which `--only` takes."""

    @property
    def weight(self) -> float:
        """Its share of the time, relative to the other parts."""

    def measure(self, world: ProbeWorld, deadline: Deadline, record: ProbeRecord) -> ProbeRecord:
        """Measure, and return the record with what was found.

        Collective: every rank alive calls this; rank 0 returns the record with the results, the others what they were
        given. Failures of an operation, or ranks that are lost, become sentences of `world.problems` by `world.meet`.

        Args:
            world: the ranks.
            deadline: when to be done, the same for all ranks within their start; no operation may begin later.
            record: what was found so far.

        Raises:
            RankZeroLost: rank 0 does not answer any more.
        """


@runtime_checkable
class Concluding(Protocol):
    """A part that computes something when all time is over."""

    def conclude(self, record: ProbeRecord) -> ProbeRecord:
        """Return the record with what follows from what was measured; rank 0 alone calls this."""


_MS_PER_S = 1000

PART_NAMES = ("sweep", "pairs", "noise", "copies")
"""The parts of a probe, in their order."""


def measure_parts(
    world: ProbeWorld,
    parts: Sequence[Measurement],
    record: ProbeRecord,
    *,
    clock: Callable[[], float] = time.monotonic,
    begin_stage: Callable[[str], Tell] | None = None,
) -> ProbeRecord:
    """Run all parts within record.time_s, and return the record with what they found.

    A part that needs less than its share leaves the rest to those behind it.

    Collective: every rank calls this with the same parts.

    Args:
        world: the ranks.
        parts: what to measure.
        record: with the time that all parts may take.
        clock: a monotonic clock, in seconds.
        begin_stage: takes the name of a part, and returns a function that takes its progress in ms at each meeting of
            the ranks.

    Raises:
        RankZeroLost: rank 0 does not answer any more.
    """
    began_s = clock()
    for number, part in enumerate(parts):
        world.meet(f"the start of {part.name}")
        left_s = record.time_s - (clock() - began_s)
        share = part.weight / sum(one.weight for one in parts[number:])
        part_began_s = clock()
        deadline = Deadline(max(left_s * share, 0.001), clock)
        with _shown(world, part, deadline, begin_stage):
            record = part.measure(world, deadline, record)
        took_s = clock() - part_began_s
        record = dataclasses.replace(record, part_s={**record.part_s, part.name: took_s})
    took_s = clock() - began_s
    for part in parts:
        if world.is_first and isinstance(part, Concluding):
            record = part.conclude(record)
    return dataclasses.replace(
        record, took_s=took_s, problems=(*record.problems, *world.problems), lost_hosts=tuple(world.lost_hosts)
    )


@contextmanager
def _shown(
    world: ProbeWorld, part: Measurement, deadline: Deadline, begin_stage: Callable[[str], Tell] | None
) -> Iterator[None]:
    """Tell how much of a part's time has passed, at meetings; the noise of cores is measured between two of them."""
    if begin_stage is None:
        yield
        return
    tell, total_ms = begin_stage(part.name), max(int(_MS_PER_S * deadline.timeout_s), 1)
    world.on_meeting = lambda: tell(max(total_ms - int(_MS_PER_S * deadline.left_s), 0), total_ms)
    try:
        yield
    finally:
        world.on_meeting = nobody_listens
        tell(total_ms, total_ms)
