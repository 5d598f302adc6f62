"""How much of the communication is hidden behind work, by the phase that it begins in, and how much could be.

What is hidden costs nothing, until it takes longer than the work beside it. So a job that grows needs to know how much
more could be hidden: the work of a phase from its first hidden operation on, since operations of a phase are needed at
its end at the latest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.operations import MESSAGES, Operations, is_one_of, op_name
from hpcpace.metrics.pass_work import Passes
from hpcpace.metrics.phases import CoveredTime
from hpcpace.metrics.steps import columns_of
from hpcpace.trace.schema import Phase

NO_PHASE = -1
"""Of operations that begin in none of the passes."""
LEAST_HIDDEN = 0.1
"""Statistics: share of a transfer from which it counts as hidden, as times are kept to 256 ns."""
_OP_BITS = 8  # format: of a number that combines phase, place and operation


def union_ns(begins_ns: NDArray[Any], ends_ns: NDArray[Any]) -> float:
    """Return the length of the union of intervals, (num_intervals,) each."""
    order = np.argsort(begins_ns, kind="stable")
    begins_ns, ends_ns = begins_ns[order], np.maximum.accumulate(ends_ns[order])
    free_from_ns = np.concatenate([begins_ns[:1], ends_ns[:-1]])
    return float(np.maximum(ends_ns - np.maximum(begins_ns, free_from_ns), 0).sum())


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Transfers of one kind that begin in one phase; times are means of a rank's step in nanoseconds.

    Attributes:
        phase: name of the phase, lower case; empty for what begins in none.
        op: name of the operation.
        is_across: whether the members of its groups are on several nodes.
        transfer_ns: all transfers.
        exposed_ns: of these, what blocked its rank.
        window_ns: own work of the phase from its first operation on of which something was hidden, the same for all
            operations of a phase; 0 where nothing was.
    """

    phase: str
    op: str
    is_across: bool
    transfer_ns: float
    exposed_ns: float
    window_ns: float


def overlap_of(
    operations: Operations,
    transfer_ns: Ints,
    passes: Sequence[Passes],
    held_up: Sequence[tuple[Ints, Ints]],
    *,
    ranks: Sequence[int],
    step: Ints,
    node: Ints,
) -> list[Overlap]:
    """Return how much of the transfers of each phase and kind was hidden, the longest first.

    A transfer is the end of its operation: transfer_ns before its exit. It blocks its rank in the last `blocked`
    nanoseconds before the exit, and in `held_up`; the rest is hidden. Messages of pipelines are left out.

    Args:
        operations: rows of all ranks, ordered by rank.
        transfer_ns: of each row, int64, (num_operations,).
        passes: of each of `ranks`, on the clock of the operations.
        held_up: begin and end of the waits of each rank that no operation has, as inside torch, on the same clock.
        ranks: ascending; others are left out.
        step: numbers of the steps, ascending, int64, (num_steps,).
        node: of each of `ranks`, int64, (num_ranks,).
    """
    is_used = (columns_of(step, operations.step) >= 0) & ~is_one_of(operations.op, MESSAGES)
    node_of = dict(zip(ranks, node.tolist(), strict=True))
    across = np.array([len({node_of.get(rank, -1) for rank in group.ranks}) > 1 for group in operations.groups], bool)
    across = np.append(across, False)  # of an unknown group, -1
    sums: dict[int, Floats] = defaultdict(lambda: np.zeros(2))
    windows: dict[int, float] = defaultdict(float)
    edges = np.searchsorted(operations.rank, ranks, side="left"), np.searchsorted(operations.rank, ranks, side="right")
    for index, (low, high) in enumerate(zip(*(edge.tolist() for edge in edges), strict=True)):
        rows = low + np.flatnonzero(is_used[low:high])
        if not len(rows):
            continue
        one = _RankRows.of(operations, transfer_ns, rows, passes[index], held_up[index])
        code = (one.phase + 1) << (_OP_BITS + 1) | across[operations.group[rows]] << _OP_BITS | operations.op[rows]
        for number in np.unique(code).tolist():
            own = code == number
            sums[number] += [float(transfer_ns[rows[own]].sum()), float(one.exposed_ns[own].sum())]
        for kind, window_ns in one.windows(passes[index], operations.enter_ns[rows], transfer_ns[rows]):
            windows[kind] += window_ns
    num_cells = max(len(ranks) * len(step), 1)
    found = [
        Overlap(
            phase=Phase(kind).name.lower() if (kind := (number >> (_OP_BITS + 1)) - 1) >= 0 else "",
            op=op_name(number & ((1 << _OP_BITS) - 1)),
            is_across=bool(number >> _OP_BITS & 1),
            transfer_ns=float(total) / num_cells,
            exposed_ns=float(exposed) / num_cells,
            window_ns=windows[kind] / num_cells,
        )
        for number, (total, exposed) in sums.items()
    ]
    return sorted(found, key=lambda one: -one.transfer_ns)


def _outermost(passes: Passes) -> Ints:
    """Return the passes that lie in no other one, ascending: a forward pass may be computed again in backward."""
    order = np.lexsort((-passes.end_ns, passes.begin_ns))
    until_ns = np.maximum.accumulate(np.append(np.iinfo(np.int64).min, passes.end_ns[order]))[:-1]
    return np.asarray(order[passes.end_ns[order] > until_ns], np.int64)


@dataclass(frozen=True, kw_only=True)
class _RankRows:
    """Rows of one rank: the pass that each begins in or -1, the kind of that pass, and what of it blocked the rank."""

    number: Ints
    phase: Ints
    exposed_ns: Ints
    blocked: CoveredTime

    @classmethod
    def of(
        cls, operations: Operations, transfer_ns: Ints, rows: Ints, passes: Passes, held_up: tuple[Ints, Ints]
    ) -> _RankRows:
        enter_ns, exit_ns = operations.enter_ns[rows], operations.exit_ns[rows]
        blocked_ns = np.maximum(exit_ns - operations.blocked_ns[rows], enter_ns)
        blocked = CoveredTime.of(np.append(blocked_ns, held_up[0]), np.append(exit_ns, held_up[1]))
        exposed_ns = blocked.inside_ns(exit_ns - transfer_ns[rows], exit_ns)
        order = _outermost(passes)
        place = np.searchsorted(passes.begin_ns[order], enter_ns, side="right") - 1
        number = np.append(order, -1)[place] if len(order) else np.full(len(rows), -1)
        number = np.where((place >= 0) & (enter_ns <= np.append(passes.end_ns, 0)[number]), number, -1)
        phase = np.append(passes.kind, NO_PHASE)[number]
        return cls(number=number, phase=phase, exposed_ns=exposed_ns, blocked=blocked)

    def windows(self, passes: Passes, enter_ns: Ints, transfer_ns: Ints) -> list[tuple[int, float]]:
        """Return the kind of each pass that hides something, and its own work from there on."""
        is_hidden: Bools = (self.exposed_ns < (1 - LEAST_HIDDEN) * transfer_ns) & (self.number >= 0)
        if not is_hidden.any():
            return []
        first_ns = np.full(len(passes.kind), np.iinfo(np.int64).max)
        np.minimum.at(first_ns, self.number[is_hidden], enter_ns[is_hidden])
        used = np.unique(self.number[is_hidden])
        begin_ns, end_ns = first_ns[used], passes.end_ns[used]
        window_ns = np.maximum(end_ns - begin_ns - self.blocked.inside_ns(begin_ns, end_ns), 0)
        return list(zip(passes.kind[used].tolist(), window_ns.tolist(), strict=True))
