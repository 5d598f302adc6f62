"""What each c10d operator means and where its arguments are, read from torch's own operator schemas.

Argument positions are looked up by name, so that another torch release may add or move arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpcpace.trace.schema import Op

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
        return filled.data_ptr() if filled is not None else 0


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
    size: int = payload.nbytes
    return size
