"""The operations of torch.distributed: what each operator means, and one until its row.

Positions of arguments are looked up by name in torch's own schemas, so that another release may add or move arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpcpace.core.compat import backend_name
from hpcpace.core.environment import process_redaction
from hpcpace.observe.pacing import Arrival
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import ExitKind, Op

# The argument that holds the whole message: what NCCL's own benchmarks call the size of an operation. Of gather and
# scatter a rank holds its own part only, and the message is that part times the size of the group.
_PAYLOADS: dict[str, tuple[Op, str]] = {
    "allreduce_": (Op.ALL_REDUCE, "tensors"),
    "allreduce_coalesced_": (Op.ALL_REDUCE, "tensors"),
    "allgather_": (Op.ALL_GATHER, "output_tensors"),
    "_allgather_base_": (Op.ALL_GATHER, "output_tensor"),
    "allgather_coalesced_": (Op.ALL_GATHER, "output_lists"),
    "allgather_into_tensor_coalesced_": (Op.ALL_GATHER, "outputs"),
    "reduce_scatter_": (Op.REDUCE_SCATTER, "input_tensors"),
    "_reduce_scatter_base_": (Op.REDUCE_SCATTER, "input_tensor"),
    "reduce_scatter_tensor_coalesced_": (Op.REDUCE_SCATTER, "inputs"),
    "broadcast_": (Op.BROADCAST, "tensors"),
    "reduce_": (Op.REDUCE, "tensors"),
    "gather_": (Op.GATHER, "input_tensors"),
    "gather_into_tensor_": (Op.GATHER, "input_tensor"),
    "scatter_": (Op.SCATTER, "output_tensors"),
    "alltoall_": (Op.ALL_TO_ALL, "input_tensors"),
    "alltoall_base_": (Op.ALL_TO_ALL, "input"),
    "send": (Op.SEND, "tensors"),
    "recv_": (Op.RECV, "tensors"),
    "recv_any_source_": (Op.RECV, "tensors"),
    "barrier": (Op.BARRIER, ""),
    "monitored_barrier_": (Op.BARRIER, ""),
}
_PEERS = ("root_rank", "dst", "src")
_RESULTS = ("output", "output_tensor", "output_tensors", "outputs", "output_lists", "tensors")


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator of torch's c10d namespace.

    Attributes:
        name: like `allreduce_`.
        overload: torch's operator itself.
        op: its kind in the trace.
        group: position of the process group.
        payload: position of the tensors that count as the message, -1 for none.
        result: position of the tensors that the operation fills, -1 for none.
        peer: position of the root or the peer as a rank of the group, -1 for none.
        async_op: position of the flag that is False where the caller blocks at once, -1 for none.
        per_member: whether the payload is one member's part of the message.
        has_work: whether the operator returns a Work; without one it has blocked until the end.
    """

    name: str
    overload: Any
    op: Op
    group: int
    payload: int
    result: int
    peer: int
    async_op: int
    per_member: bool
    has_work: bool

    def is_blocking(self, args: Sequence[Any]) -> bool:
        """Return whether the caller waits for the operation at once."""
        return self.async_op >= 0 and len(args) > self.async_op and args[self.async_op] is False

    def group_peer(self, args: Sequence[Any]) -> int:
        """Return the root or peer as a rank of the group, -1 for none."""
        return args[self.peer] if self.peer >= 0 else -1

    def size_bytes(self, args: Sequence[Any], group_size: int) -> int:
        """Return the size of the message."""
        if self.payload < 0:
            return 0
        size = _size_bytes(args[self.payload])
        return size * group_size if self.per_member else size

    def result_address(self, args: Sequence[Any]) -> int:
        """Return the memory address of the first tensor that the operation fills, 0 for none."""
        filled: Any = args[self.result] if self.result >= 0 else None
        while isinstance(filled, (list, tuple)):
            filled = filled[0] if filled else None
        return filled.data_ptr() if filled is not None and not filled.is_sparse else 0


def operators() -> list[Operator]:
    """Return the operators of this torch release that hpcpace observes."""
    return [_describe(name) for name in _PAYLOADS if hasattr(torch.ops.c10d, name)]


def _describe(name: str) -> Operator:
    op, payload = _PAYLOADS[name]
    overload = getattr(torch.ops.c10d, name).default
    schema = overload._schema
    names = [argument.name for argument in schema.arguments]

    def position(*candidates: str) -> int:
        return next((names.index(candidate) for candidate in candidates if candidate in names), -1)

    return Operator(
        name=name,
        overload=overload,
        op=op,
        group=names.index("process_group"),
        payload=position(payload),
        result=position(*_RESULTS),
        peer=position(*_PEERS),
        async_op=position("async_op"),
        per_member=op in (Op.GATHER, Op.SCATTER),
        has_work=len(schema.returns) > 0,
    )


def _size_bytes(payload: Any) -> int:
    if isinstance(payload, (list, tuple)):
        return sum(map(_size_bytes, payload))
    # A sparse tensor has neither an address nor a size of its own: gloo sends its indices and its values.
    size: int = payload._indices().nbytes + payload._values().nbytes if payload.is_sparse else payload.nbytes
    return size


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
    backend = backend_name(process_group)
    name = process_redaction().text(process_group.group_name)
    for rank in ranks:
        recorder.add_group(group_id, rank, name.encode()[:64], backend.encode()[:16])
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

    def begin(self, op: Op, peer: int, size_bytes: int, step: int, enter_ns: int) -> OpenOperation:
        """Return an operation of the group with the next number.

        Collectives of a group are called in one order on all members; send and recv only between two ranks.
        """
        channel: object = (op, peer) if op in MESSAGES else None
        number = self.sequences[channel]
        self.sequences[channel] = number + 1
        return OpenOperation(
            op, self.group_id, self.ranks[peer] if peer >= 0 else -1, number, size_bytes, step, enter_ns
        )


@dataclass(slots=True, eq=False)
class OpenOperation:
    """An operation that has started and is not recorded yet; the first fields, and some others, are columns of its row.

    Attributes:
        kind: how it ends.
        waiting: whether its caller waits for it.
        work, future: of torch, as far as it has them.
        key: of the work among the open operations.
        address: of its result.
        arrival: of its caller at the pacer.
    """

    op: Op
    group: int
    peer: int
    seq: int
    size_bytes: int
    step: int
    enter_ns: int
    exit_ns: int = 0
    blocked_ns: int = 0
    kind: ExitKind = ExitKind.COMPLETION
    waiting: bool = False
    work: Any = None
    future: Any = None
    key: int = 0
    address: int = 0
    arrival: Arrival = None

    @property
    def has_failed(self) -> bool:
        """Whether the work's future ended with an error; False without one."""
        if self.future is None or not self.future.done():
            return False
        try:
            self.future.value()  # raises it; the work itself reports it only with a warning that this is deprecated
        except Exception:
            return True
        return False

    def row(self) -> tuple[int, ...]:
        """Return the columns of the trace's `collectives` table, without `enqueue_ns`."""
        return (
            self.step, self.group, self.seq, self.op, self.size_bytes, self.peer,
            self.enter_ns, self.exit_ns, self.blocked_ns, self.kind,
        )  # fmt: skip
