"""Bytes that ranks send to each other in a step, from the operations of a recorded run.

Messages are as recorded. Of a collective a trace has the size and the members but not the algorithm, so each one is
counted along the edges that gloo uses, and NCCL for large tensors: rings in the order of the ranks, trees for
broadcasts, and direct messages where each pair of ranks has data of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from hpcpace.core.errors import CannotTell
from hpcpace.core.records import dataclass
from hpcpace.frames.columns import Columns, Texts
from hpcpace.metrics import Floats, Ints

MAX_RANKS = 4096
"""memory: the search for a placement of as many ranks takes 1.2 GB, and 51 s on one core."""
_RING_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
_UNKNOWN = -1


@dataclass(frozen=True)
class _Sent:
    """What makes operations one sum: their name, group, the rank that recorded them, and its peer or root."""

    op: str
    group: int
    rank: int
    peer: int


def traffic_per_step(blocks: Iterable[Columns], num_ranks: int, num_steps: int) -> Floats:
    """Return the bytes that each rank (row) sends to each other one in a step, float64, (num_ranks, num_ranks).

    Args:
        blocks: the table `collectives` of a run, range by range of steps.
        num_ranks: ranks of the run, 0 to num_ranks - 1, all of which have rows.
        num_steps: steps in the blocks.

    Raises:
        CannotTell: there are no steps, more ranks than fit into memory, or no bytes between ranks.
    """
    if num_ranks > MAX_RANKS:
        raise CannotTell(f"the run has {num_ranks} ranks: placements are known of up to {MAX_RANKS}")
    if not num_steps:
        raise CannotTell("the run has no steps that can be used: trace more of it")
    sums: dict[_Sent, float] = defaultdict(float)
    for block in blocks:
        _add(sums, block)
    traffic = np.zeros((num_ranks, num_ranks))
    for sent, size_bytes in sums.items():
        if sent.op == "send" and 0 <= sent.peer < num_ranks:
            traffic[sent.rank, sent.peer] += size_bytes
    for op, members, root, size_bytes in _collectives(sums):
        source, destination, share = edges(op, members, root)
        np.add.at(traffic, (source, destination), share * size_bytes)
    np.fill_diagonal(traffic, 0.0)
    if not traffic.any():
        raise CannotTell("the run recorded no bytes between ranks: trace it with its collectives")
    return traffic / num_steps


def _add(sums: dict[_Sent, float], block: Columns) -> None:
    op, size_bytes = block["op"], block["size_bytes"]
    assert isinstance(op, Texts) and isinstance(size_bytes, np.ndarray)
    keys = np.column_stack([op.code, *(np.asarray(block[name]) for name in ("group_id", "rank", "peer"))])
    found, index = np.unique(keys, axis=0, return_inverse=True)
    total = np.bincount(index.ravel(), weights=size_bytes, minlength=len(found))
    for (code, group, rank, peer), size in zip(found.tolist(), total.tolist(), strict=True):
        sums[_Sent(op.names[code], group, rank, peer)] += size


def _collectives(sums: dict[_Sent, float]) -> Iterator[tuple[str, Ints, int, float]]:
    """Yield operation, members, root and bytes of all collectives of one kind; members record the same size."""
    members: dict[int, set[int]] = defaultdict(set)
    by_kind: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for sent, size_bytes in sums.items():
        if sent.op not in ("send", "recv", "barrier") and sent.group != _UNKNOWN:
            members[sent.group].add(sent.rank)
            by_kind[sent.op, sent.group, sent.peer].append(size_bytes)
    for (op, group, root), sizes in by_kind.items():
        yield op, np.array(sorted(members[group]), np.int64), root, sum(sizes) / len(sizes)


def edges(op: str, members: Ints, root: int) -> tuple[Ints, Ints, Floats]:
    """Return who sends to whom in a collective, and the share of its size that passes there.

    Args:
        op: name of the operation; of one that is not known here, nothing is sent.
        members: ranks of the group in its order, int64, (num_members,).
        root: the root; where none of the members is, the first one.

    Returns:
        Sender, receiver (int64) and share of the size (float64) of each edge, (num_edges,).
    """
    num = len(members)
    first = int(np.flatnonzero(members == root)[0]) if root in members else 0
    others = np.delete(members, first)
    if num < 2:
        return members[:0], members[:0], np.zeros(0)
    if op in _RING_ROUNDS:
        return members, np.roll(members, -1), np.full(num, _RING_ROUNDS[op] * (num - 1) / num)
    if op == "all_to_all":
        source, destination = np.nonzero(~np.eye(num, dtype=np.bool_))
        return members[source], members[destination], np.full(num * (num - 1), 1 / num)
    if op in ("broadcast", "reduce"):
        child = np.arange(1, num)
        parent = child - (1 << np.frexp(child)[1].astype(np.int64) - 1)
        order = np.roll(members, -first)
        down, up = order[parent], order[child]
        return (down, up, np.ones(num - 1)) if op == "broadcast" else (up, down, np.ones(num - 1))
    if op in ("gather", "scatter"):
        center, share = np.full(num - 1, members[first]), np.full(num - 1, 1 / num)
        return (others, center, share) if op == "gather" else (center, others, share)
    return members[:0], members[:0], np.zeros(0)
