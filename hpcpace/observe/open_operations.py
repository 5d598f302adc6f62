"""An operation of c10d between its start and its row in the trace, and the process group that it belongs to."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch.distributed as dist

from hpcpace.core.environment import process_redaction
from hpcpace.pace.arrivals import Arrival
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import ExitKind, Op

MESSAGES = (Op.SEND, Op.RECV)
"""Operations between two ranks, which have sequence numbers of their own."""

FORGET_AFTER_STEPS = 10
"""Steps after which a message that nobody waits for is recorded as never completed."""


def record_group(recorder: Recorder, group_id: int, process_group: Any) -> list[int]:
    """Record the members of a process group under a number; return their global ranks in the order of the group."""
    try:
        ranks: list[int] = dist.get_process_group_ranks(process_group)
    except (KeyError, ValueError):  # made without torch's registry; its members have no other names
        ranks = list(range(process_group.size()))
    backend = dist.get_backend(process_group) if process_group in dist.distributed_c10d._world.pg_map else "unknown"
    name = process_redaction().text(process_group.group_name)
    for rank in ranks:
        recorder.add_group(group_id, rank, name.encode()[:64], str(backend).encode()[:16])
    return ranks


class GroupNumbers:
    """The numbers that process groups have in a trace, for all observers that record into it one after the other."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[str, tuple[int, list[int]]] = {}

    @property
    def named(self) -> dict[int, tuple[str, tuple[int, ...]]]:
        """Name and global ranks of each group by its number; safe in any thread."""
        return {number: (name, tuple(ranks)) for name, (number, ranks) in list(self._known.items())}

    def find(self, process_group: Any) -> tuple[int, list[int]]:
        """Return a group's number and the global ranks of its members; record a group that is new."""
        name = process_group.group_name
        if name not in self._known:
            number = len(self._known)
            self._known[name] = number, record_group(self._recorder, number, process_group)
        return self._known[name]


class ObservedGroup:
    """A process group as the trace knows it, with the sequence numbers of its operations.

    Args:
        group_id: its number in the trace.
        ranks: global ranks of its members.
        first_number: of its operations, and of its messages with each peer in each direction.
    """

    __slots__ = ("group_id", "members", "ranks", "sequences")

    def __init__(self, group_id: int, ranks: list[int], first_number: int = 0) -> None:
        self.group_id = group_id
        self.ranks = ranks
        self.members = tuple(ranks)
        self.sequences: dict[object, int] = defaultdict(lambda: first_number)


class OpenOperation:
    """An operation that has started and is not recorded yet."""

    __slots__ = (
        "address",
        "arrival",
        "blocked_ns",
        "enter_ns",
        "exit_ns",
        "future",
        "group",
        "key",
        "kind",
        "op",
        "peer",
        "seq",
        "size_bytes",
        "step",
        "waiting",
        "work",
    )  # fmt: skip

    def __init__(self, op: Op, group: ObservedGroup, peer: int, size_bytes: int, step: int, enter_ns: int) -> None:
        # Collectives of a group are called in one order on all members; send and recv only between two ranks.
        channel: object = (op, peer) if op in MESSAGES else None
        self.op = op
        self.group = group.group_id
        self.peer = group.ranks[peer] if peer >= 0 else -1
        self.seq = group.sequences[channel]
        group.sequences[channel] += 1
        self.size_bytes = size_bytes
        self.step = step
        self.enter_ns = enter_ns
        self.exit_ns = 0
        self.blocked_ns = 0
        self.kind = ExitKind.COMPLETION
        self.waiting = False
        self.work: Any = None
        self.future: Any = None
        self.key = 0
        self.address = 0
        self.arrival: Arrival | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the work's future ended with an error; False without one."""
        if self.future is None or not self.future.done():
            return False
        try:
            self.future.value()  # raises it; the work itself only tells with a warning that this is deprecated
        except Exception:
            return True
        return False

    def row(self) -> tuple[int, ...]:
        """Return the columns of the trace's `collectives` table, without `enqueue_ns`."""
        return (
            self.step, self.group, self.seq, self.op, self.size_bytes, self.peer,
            self.enter_ns, self.exit_ns, self.blocked_ns, self.kind,
        )  # fmt: skip
