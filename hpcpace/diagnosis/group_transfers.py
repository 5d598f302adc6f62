"""The transfers of each process group, step by step: what comparing links rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.evidence import Evidence
from hpcpace.metrics.network.transfers import GroupTransfers
from hpcpace.metrics.operations.communication import op_name
from hpcpace.metrics.operations.matching import shares
from hpcpace.metrics.operations.table import ProcessGroup
from hpcpace.metrics.steps import columns_of
from hpcpace.parallel import map_threads
from hpcpace.trace.schema import Op

_MOST_CELLS = 40_000_000  # of the matrix of series and steps
_MOST_NUMBERS = 1 << 22  # of a table that numbers combinations without sorting them


@dataclass(frozen=True, kw_only=True)
class TransferSums:
    """Sums of transfers of some steps.

    Attributes:
        groups: what the first key indexes.
        keys: group, operation, size, and both ranks of a message or -1, ascending, int64, (num_series, 5).
        first: position of the first of the steps among the used ones.
        total_ns: sum of the transfers, float64, (num_series, num_steps).
        count: how many there are, int64, (num_series, num_steps).
        is_whole: whether all fitted into memory.
    """

    groups: tuple[ProcessGroup, ...]
    keys: NDArray[np.int64]
    first: int
    total_ns: NDArray[np.float64]
    count: NDArray[np.int64]
    is_whole: bool = True


def transfer_sums(evidence: Evidence, step: NDArray[np.int64]) -> TransferSums:
    """Return the sums of a part of a run: of each group, operation and size, the transfers of each step.

    The transfer of an operation is the largest of its ranks. Messages count as operations of the pair.

    Args:
        evidence: the operations.
        step: numbers of the steps to use, ascending, (num_steps,).
    """
    done, matching = evidence.operations, evidence.matching
    transfer_ns, has_waited = _of_operations(evidence)
    first = matching.first
    op, column = done.op[first], columns_of(step, done.step[first])
    is_message = (op == Op.SEND) | (op == Op.RECV)
    # Only a receiver that waits sees how long a message takes: for a late one it has arrived before.
    usable = np.flatnonzero(
        (column >= 0) & matching.is_matched[first] & (op != Op.BARRIER) & (~is_message | has_waited)
    )
    if not len(usable):
        none = np.zeros((0, 0))
        return TransferSums(
            groups=done.groups, keys=np.zeros((0, 5), np.int64), first=0, total_ns=none, count=none.astype(np.int64)
        )
    first, transfer_ns, column = first[usable], transfer_ns[usable], column[usable]
    keys, kind = _kinds(evidence, first)
    begin = int(column.min())
    num_steps = int(column.max()) + 1 - begin
    size = len(keys) * num_steps
    is_whole = size <= _MOST_CELLS
    if not is_whole:
        keys, kind, num_steps, size = keys[:0], kind[:0], 0, 0
        column, transfer_ns = column[:0], transfer_ns[:0]
    cell = kind * num_steps + (column - begin)
    return TransferSums(
        groups=done.groups,
        keys=keys,
        first=begin,
        total_ns=np.bincount(cell, transfer_ns, size).astype(np.float64).reshape(len(keys), num_steps),
        count=np.bincount(cell, minlength=size).reshape(len(keys), num_steps),
        is_whole=is_whole,
    )


def transfer_series(parts: Sequence[TransferSums], num_steps: int) -> list[GroupTransfers]:
    """Return a series for each group, operation and size: the mean transfer of its operations in each step.

    NaN in steps without an operation; no series where they would not fit into memory.

    Args:
        parts: sums, all with the same groups.
        num_steps: number of the used steps.
    """
    keys = np.unique(np.concatenate([np.zeros((0, 5), np.int64), *(part.keys for part in parts)]), axis=0)
    if len(keys) * num_steps > _MOST_CELLS or not all(part.is_whole for part in parts):
        return []
    total_ns, count = np.zeros((len(keys), num_steps)), np.zeros((len(keys), num_steps), np.int64)
    row = {tuple(key): index for index, key in enumerate(keys.tolist())}
    for part in parts:
        rows = np.array([row[tuple(key)] for key in part.keys.tolist()], np.int64)
        columns = slice(part.first, part.first + part.count.shape[1])
        total_ns[rows, columns] += part.total_ns
        count[rows, columns] += part.count
    mean_ns = np.where(count > 0, total_ns / np.maximum(count, 1), np.nan)
    return [
        GroupTransfers(
            members=(low, high) if low >= 0 else parts[0].groups[group].ranks,
            op=op_name(op),
            size_bytes=size_bytes,
            transfer_ns=series,
        )
        for (group, op, size_bytes, low, high), series in zip(keys.tolist(), mean_ns, strict=True)
    ]


def _of_operations(evidence: Evidence) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the transfer of each operation, and whether its receiver waited, each (num_instances,)."""
    done, matching, waits = evidence.operations, evidence.matching, evidence.waits
    num_instances = len(matching.num_rows)

    def of_share(share: Sequence[slice]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        largest_ns, has_waited = np.zeros(num_instances, np.int64), np.zeros(num_instances, np.bool_)
        for rows in share:
            op, instance = done.op[rows], matching.instance[rows]
            np.maximum.at(largest_ns, instance, np.where(op == Op.SEND, 0, waits.transfer_ns[rows]))
            has_waited[instance[(op == Op.RECV) & (waits.wait_ns[rows] > 0)]] = True
        return largest_ns, has_waited

    found = list(map_threads(of_share, shares(done.slices or [slice(0, len(done))])))
    return np.maximum.reduce([ns for ns, _ in found]), np.logical_or.reduce([waited for _, waited in found])


def _kinds(evidence: Evidence, first: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the keys of series, ascending, and the number of the series of each operation.

    Args:
        evidence: the traces.
        first: a row of each operation, (num_operations,).
    """
    done = evidence.operations
    op, size_bytes, group = done.op[first].astype(np.int64), done.size_bytes[first], done.group[first]
    is_message = (op == Op.SEND) | (op == Op.RECV)
    op[is_message] = int(Op.SEND)
    sizes = np.unique(size_bytes)
    ranks, peers = done.rank[first[is_message]], done.peer[first[is_message]]
    ends, of_message = np.unique(np.minimum(ranks, peers) << 32 | np.maximum(ranks, peers), return_inverse=True)
    pair = np.zeros(len(first), np.int64)
    pair[is_message] = of_message + 1
    kind = _numbered(group << 8 | op, len(done.groups) << 8)
    for values, most in ((np.searchsorted(sizes, size_bytes), len(sizes)), (pair, len(ends) + 1)):
        kind = _numbered(kind * most + values, (int(kind.max()) + 1) * most)
    one = np.empty(int(kind.max()) + 1, np.int64)
    one[kind] = np.arange(len(kind))
    low, high = np.append(-1, ends >> 32)[pair[one]], np.append(-1, ends & 0xFFFFFFFF)[pair[one]]
    return np.stack([group[one], op[one], size_bytes[one], low, high], axis=1), kind


def _numbered(codes: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return the rank of each code, from 0 to below `most`, among those that occur."""
    if most > _MOST_NUMBERS:
        return np.unique(codes, return_inverse=True)[1]
    occurs = np.zeros(most, np.int64)
    occurs[codes] = 1
    numbers: NDArray[np.int64] = (np.cumsum(occurs) - 1)[codes]
    return numbers
