"""The critical path of each step through all ranks: the chain of work and transfers that nothing else could shorten.

Walked back from the last end: along a rank's own time to its last wait, and from there to the rank it waited for.
After the critical-path analysis of Scalasca (Boehme, Wolf, de Supinski, Schulz, Geimer, IPDPS 2012, section III).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.causes.propagation import last_partner
from hpcpace.metrics.lateness.segments import ROUNDING_NS, LocalWork
from hpcpace.metrics.operations.blocked_time import NO_BLOCKS, Blocks, blocks_of
from hpcpace.metrics.operations.matching import Matching, Operations
from hpcpace.metrics.steps import StepPanel

FloatArray = NDArray[np.float64]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

WORK = -1
MOST_ROUNDS = 10_000


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
    """The pieces of the critical paths of all steps; columns of length num_pieces, and per-step figures.

    Attributes:
        step: index of the step in the panel, int64.
        rank: index of the rank, int64.
        kind: `WORK`, or the operation's `hpcpace.trace.schema.Op` where the piece is its transfer, int64.
        begin_ns, end_ns: on the common clock, int64.
        num_hops: changes from one rank to another, int64, (num_steps,).
        length_ns: sum of the pieces, float64, (num_steps,).
    """

    step: Int64Array
    rank: Int64Array
    kind: Int64Array
    begin_ns: Int64Array
    end_ns: Int64Array
    num_hops: Int64Array
    length_ns: FloatArray

    def work_by_rank(self, num_ranks: int) -> FloatArray:
        """Return each rank's local work on the path, summed over steps, float64, (num_ranks,)."""
        mine = self.kind == WORK
        length = (self.end_ns - self.begin_ns)[mine].astype(np.float64)
        return np.bincount(self.rank[mine], weights=length, minlength=num_ranks).astype(np.float64)

    def by_kind(self) -> dict[int, float]:
        """Return the nanoseconds of each kind on the path, summed over steps."""
        kinds, index = np.unique(self.kind, return_inverse=True)
        total = np.bincount(index, weights=(self.end_ns - self.begin_ns).astype(np.float64), minlength=len(kinds))
        return dict(zip(kinds.tolist(), total.tolist(), strict=True))


def critical_path(
    operations: Operations,
    matching: Matching,
    work: LocalWork,
    steps: StepPanel,
    *,
    ranks: Sequence[int],
    blocks: Blocks = NO_BLOCKS,
) -> CriticalPath:
    """Return the critical path of each step.

    From the end of the rank that ends last, back to the exit of its last blocking operation: local work. If the rank
    had waited in it, the path goes on with the enter of the last partner to arrive; what lies between that enter and
    the exit is transfer. If not, it goes on with the rank's own enter. It ends at the begin of the step on the rank
    that it has come to. All steps are walked at once, one operation per round.

    Args:
        operations: rows of all ranks, on the common clock.
        matching: which of them belong together.
        work: from `local_work` with the same arguments.
        steps: the steps that all ranks have, on the common clock.
        ranks: what the rows of `steps` are, ascending, (num_ranks,).
        blocks: further stretches in which ranks were blocked; an operation that ends in one ends a wait.
    """
    num_ranks, num_steps = steps.begin_ns.shape
    hops = np.zeros(num_steps, np.int64)
    if not num_ranks or not num_steps:
        none = np.zeros(0, np.int64)
        return CriticalPath(
            step=none, rank=none, kind=none, begin_ns=none, end_ns=none, num_hops=hops, length_ns=np.zeros(num_steps)
        )
    names = np.asarray(ranks, np.int64)
    partner = last_partner(operations, matching)
    rows = np.flatnonzero(work.is_known & (work.is_blocking | _ends_in_block(operations, blocks, names)))
    slot = np.searchsorted(names, operations.rank[rows])
    column = np.searchsorted(steps.step, operations.step[rows])
    bits = 62 - int(num_ranks * num_steps).bit_length()

    def key(rank: Int64Array, step: Int64Array, time_ns: Int64Array) -> Int64Array:
        inside = np.clip(time_ns - steps.begin_ns[rank, step], 0, (1 << bits) - 1)
        return np.asarray(((rank * num_steps + step) << bits) + inside, np.int64)

    keys = key(slot, column, operations.exit_ns[rows])
    order = np.argsort(keys, kind="stable")
    keys, rows = keys[order], rows[order]
    place = np.full(len(operations), len(rows) + 1)
    place[rows] = np.arange(len(rows))
    limit = np.full(num_steps, len(rows) + 1)
    rank, now = steps.end_ns.argmax(axis=0), steps.end_ns.max(axis=0)
    active = np.arange(num_steps)
    pieces: list[tuple[Int64Array, ...]] = []
    for _ in range(MOST_ROUNDS):
        here, at = rank[active], now[active]
        found = np.searchsorted(keys, key(here, active, at + ROUNDING_NS), side="right") - 1
        found = np.minimum(found, limit[active] - 1)
        row = rows[np.maximum(found, 0)] if len(rows) else np.zeros(len(active), np.int64)
        has_row = found >= np.searchsorted(keys, key(here, active, steps.begin_ns[here, active]))
        has_row &= found >= 0
        exit_ns = np.minimum(operations.exit_ns[row], at) if len(rows) else at
        begin = np.where(has_row, exit_ns, np.minimum(steps.begin_ns[here, active], at))
        pieces.append((active, here, np.full(len(active), WORK), begin, at))
        active, here, row, exit_ns = active[has_row], here[has_row], row[has_row], exit_ns[has_row]
        if not len(active):
            break
        has_waited = (partner[row] >= 0) & (operations.enter_ns[np.maximum(partner[row], 0)] < exit_ns)
        has_waited &= np.isin(operations.rank[np.maximum(partner[row], 0)], names)
        source = np.where(has_waited, partner[row], row)
        enter = np.minimum(operations.enter_ns[source], exit_ns)
        pieces.append((active, here, operations.op[row].astype(np.int64), enter, exit_ns))
        rank[active] = np.searchsorted(names, operations.rank[source])
        now[active], limit[active] = enter, place[source]
        hops[active] += has_waited
    step, of_rank, kind, begin_ns, end_ns = (np.concatenate(column) for column in zip(*pieces, strict=True))
    length = np.bincount(step, weights=(end_ns - begin_ns).astype(np.float64), minlength=num_steps)
    kept = end_ns > begin_ns
    return CriticalPath(
        step=step[kept],
        rank=of_rank[kept],
        kind=kind[kept],
        begin_ns=begin_ns[kept],
        end_ns=end_ns[kept],
        num_hops=hops,
        length_ns=length.astype(np.float64),
    )


def _ends_in_block(operations: Operations, blocks: Blocks, names: Int64Array) -> BoolArray:
    inside = np.zeros(len(operations), np.bool_)
    edges = np.searchsorted(operations.rank, names), np.searchsorted(operations.rank, names, side="right")
    for index, (begin, end) in enumerate(blocks_of(blocks, names.tolist())):
        own = slice(edges[0][index], edges[1][index])
        order = np.argsort(begin)
        at = np.searchsorted(begin[order], operations.exit_ns[own], side="right") - 1
        if len(order):
            inside[own] = (at >= 0) & (operations.exit_ns[own] <= end[order][np.maximum(at, 0)])
    return inside
