"""The critical path of a step, and the bubble of a pipeline: time without work or transfers.

It is walked backwards from the last end: along a rank's own time to its last wait, then on to the rank it waited for.
After the critical-path analysis of Scalasca (Boehme, Wolf, de Supinski, Schulz, Geimer, IPDPS 2012, section III).

A bubble is not a straggler: with p stages and m microbatches, p - 1 of m + p - 1 slots are idle on every stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.kernels import bytes_of, library
from hpcpace.metrics.matching import Matching
from hpcpace.metrics.operations import Operations
from hpcpace.metrics.phases import innermost
from hpcpace.metrics.propagation import last_partner
from hpcpace.metrics.segments import ROUNDING_NS, Blocking, LocalWork
from hpcpace.metrics.steps import StepPanel
from hpcpace.metrics.waits import NO_BLOCKS, Blocks, blocks_of
from hpcpace.trace.schema import Op


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """The bubble of a pipeline.

    Attributes:
        share: mean over ranks and steps of the time spent waiting for messages, relative to the step.
        by_stage: the same for each stage, float64, (num_stages,).
        ideal_share: what the schedule costs with equal stages; None if the number of microbatches is unknown.
    """

    share: float
    by_stage: Floats
    ideal_share: float | None


def ideal_bubble(num_stages: int, num_microbatches: int) -> float:
    """Return (p - 1) / (m + p - 1), the idle share of GPipe's and 1F1B's schedules (Huang et al. 2019, section 2.3).

    Raises:
        ValueError: fewer than one stage or microbatch.
    """
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(f"stages and microbatches must be at least 1, not {num_stages} and {num_microbatches}")
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def covered_by_waits(operations: tuple[Ints, Ints, Ints, Ints], steps: tuple[Ints, Ints]) -> Floats:
    """Return how long a rank was blocked waiting in each step, nanoseconds, float64, (num_steps,).

    This is the exposed wait of its operations: of the last `blocked` nanoseconds before the exit, the part before
    enter + wait. Overlapping waits count once. All times are of one clock.

    Args:
        operations: enter, exit, blocked and wait of its operations, such as its messages, each (num_operations,).
        steps: begin and end of the steps, ascending, each (num_steps,).
    """
    enter_ns, exit_ns, blocked_ns, wait_ns = operations
    step_begin_ns, step_end_ns = steps
    end = np.minimum(enter_ns + wait_ns, exit_ns)
    begin = np.maximum(exit_ns - blocked_ns, enter_ns)
    some = end > begin
    begin, end = begin[some], end[some]
    edges = np.unique(np.concatenate([begin, end, step_begin_ns, step_end_ns]))
    waited = innermost(begin, end, edges) >= 0
    step = np.searchsorted(step_begin_ns, edges[:-1], side="right") - 1
    inside = waited & (step >= 0) & (edges[:-1] < step_end_ns[np.maximum(step, 0)])
    length = np.diff(edges).astype(np.float64)
    return np.bincount(step[inside], weights=length[inside], minlength=len(step_begin_ns)).astype(np.float64)


def pipeline_bubble(
    message_wait_ns: Floats, step_ns: Floats, stage: Ints, *, num_microbatches: int | None = None
) -> Bubble | None:
    """Return the bubble of a pipeline; None with one stage, or if no step takes any time.

    Args:
        message_wait_ns: exposed wait for messages, from `covered_by_waits`, (num_ranks, num_steps).
        step_ns: time of each step, (num_steps,).
        stage: pipeline stage of each rank, int64, (num_ranks,).
        num_microbatches: of a step; see `microbatches`.
    """
    stages = np.unique(stage)
    total_ns = float(np.sum(step_ns))
    if len(stages) < 2 or total_ns <= 0:
        return None
    by_rank = np.asarray(message_wait_ns, np.float64).sum(axis=1) / total_ns
    by_stage = np.array([by_rank[stage == of].mean() for of in stages])
    share = float(by_stage.mean())
    ideal = ideal_bubble(len(stages), num_microbatches) if num_microbatches else None
    return Bubble(share=share, by_stage=by_stage, ideal_share=ideal)


def microbatches(operations: Operations, work: LocalWork) -> int | None:
    """Return the usual number of messages from a rank to one peer in a step: its microbatches; None without messages.

    A stage sends one activation per microbatch to the next stage and one gradient to the previous one. With v model
    chunks per rank there are v times as many, and `ideal_bubble` still holds (Narayanan et al. 2021, section 2.2.2),
    except on two ranks, where wrap-around messages go to the same peer.
    """
    rows = np.flatnonzero((operations.op == Op.SEND) & work.is_known)
    if not len(rows):
        return None
    key = np.stack([operations.rank[rows], operations.peer[rows], operations.step[rows]])
    _, counts = np.unique(key, axis=1, return_counts=True)
    return int(np.bincount(counts).argmax())


WORK = -1
MAX_ROUNDS = 10_000
_NO_ROW = -1
_MAX_SCATTERED = 4  # rows that a search goes through, of each row
_NEVER_NS = np.iinfo(np.int64).min


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

    step: Ints
    rank: Ints
    kind: Ints
    begin_ns: Ints
    end_ns: Ints
    num_hops: Ints
    length_ns: Floats

    def work_by_rank(self, num_ranks: int) -> Floats:
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
    work: Blocking,
    steps: StepPanel,
    *,
    ranks: Sequence[int],
    blocks: Blocks = NO_BLOCKS,
    partner: Ints | None = None,
) -> CriticalPath:
    """Return the critical path of each step.

    The path starts at the end of the rank that ends last and goes back to the exit of its last blocking operation:
    local work. If the rank waited there, the path continues at the enter of the last partner to arrive; between that
    enter and the exit lies the transfer. Otherwise it continues at the rank's own enter. It ends where the step begins
    on the rank that it has reached. All steps are walked at once, one operation per round.

    Args:
        operations: rows of all ranks, on the common clock.
        matching: which of them belong together.
        work: which rows block, such as from `local_work` with the same arguments.
        steps: the steps that all ranks have, on the common clock.
        ranks: what the rows of `steps` are, ascending, (num_ranks,).
        blocks: further stretches in which ranks were blocked; an operation that ends in one ends a wait.
        partner: from `last_partner`, if it is known already.
    """
    names = np.asarray(ranks, np.int64)
    walk = _Walk(steps)
    if steps.begin_ns.size:
        waits: _WaitEnds | None = _compiled_wait_ends(operations, work, steps, names, blocks)
        if waits is None:
            is_wait = work.is_known & (work.is_blocking | _ends_in_block(operations, blocks, names))
            waits = _SortedWaitEnds(operations, steps, names, np.flatnonzero(is_wait))
        partner = _among(operations, last_partner(operations, matching) if partner is None else partner, names)
        for _ in range(MAX_ROUNDS):
            row = walk.to_last_wait(operations, waits)
            if not len(row):
                break
            walk.to_last_enter(operations, names, row, partner[row])
    return walk.path()


class _WaitEnds(Protocol):
    """The ends of all waits, so that the last one before a time is looked up; ordered by rank, step, time and row."""

    def last_before(self, rank: Ints, step: Ints, time_ns: Ints, before: Ints) -> tuple[Ints, Bools]:
        """Return the last wait of each rank in a step that ends by a time, and whether there is one.

        Args:
            rank: index of the rank, (num_lookups,).
            step: index of the step, (num_lookups,).
            time_ns: latest end, (num_lookups,); rounding is allowed for.
            before: a row that it comes before if that ends a wait, too, (num_lookups,); -1 for none.

        Returns:
            rows of operations, int64, and bool, each (num_lookups,).
        """


def _time_bits(steps: StepPanel) -> int:
    return 62 - int(steps.begin_ns.size).bit_length()


class _SortedWaitEnds:
    """The ends of all waits, sorted."""

    def __init__(self, operations: Operations, steps: StepPanel, names: Ints, rows: Ints) -> None:
        """Order the waits.

        Args:
            operations: rows of all ranks.
            steps: the steps.
            names: what the rows of `steps` are, ascending, (num_ranks,).
            rows: rows that end a wait, (num_waits,).
        """
        self._begin_ns, self._time_bits = steps.begin_ns, _time_bits(steps)
        index = np.searchsorted(names, operations.rank[rows])
        keys = self._keys(index, np.searchsorted(steps.step, operations.step[rows]), operations.exit_ns[rows])
        order = np.argsort(keys, kind="stable")
        self._sorted_keys, self._rows = keys[order], rows[order]
        # Where each row is among the waits, beyond the end if it is none; the last place is that of no row.
        self._place = np.full(len(operations) + 1, len(rows) + 1)
        self._place[self._rows] = np.arange(len(rows))

    def last_before(self, rank: Ints, step: Ints, time_ns: Ints, before: Ints) -> tuple[Ints, Bools]:
        """Return the last waits, as `_WaitEnds` says."""
        found = np.searchsorted(self._sorted_keys, self._keys(rank, step, time_ns + ROUNDING_NS), side="right") - 1
        found = np.minimum(found, self._place[before] - 1)
        first = np.searchsorted(self._sorted_keys, self._keys(rank, step, self._begin_ns[rank, step]))
        row = self._rows[np.maximum(found, 0)] if len(self._rows) else np.zeros(len(rank), np.int64)
        return row, (found >= first) & (found >= 0)

    def _keys(self, rank: Ints, step: Ints, time_ns: Ints) -> Ints:
        """Return numbers that are in the order of rank, step and time within the step, int64, (num_times,)."""
        inside_ns = np.clip(time_ns - self._begin_ns[rank, step], 0, (1 << self._time_bits) - 1)
        return np.asarray(((rank * self._begin_ns.shape[1] + step) << self._time_bits) + inside_ns, np.int64)


def _compiled_wait_ends(
    operations: Operations, work: Blocking, steps: StepPanel, names: Ints, blocks: Blocks
) -> _CompiledWaitEnds | None:
    """Return the ends of all waits, not sorted, where a kernel finds the last ones among the rows of a step.

    None without kernels, and where the rows of a step are so scattered that each search would take long.
    """
    kernels, bounds = library(), operations.bounds
    if kernels is None or operations.slices is None:
        return None
    rank = operations.rank[bounds[:-1]]
    index = np.minimum(np.searchsorted(names, rank), len(names) - 1)
    first, stop = (np.empty(steps.begin_ns.shape, np.int64) for _ in range(2))
    num_rows = kernels.rows_of_steps(
        *(len(bounds) - 1, bounds, np.where(names[index] == rank, index, -1), operations.step),
        *(*steps.begin_ns.shape, steps.step, first, stop),
    )
    if num_rows > _MAX_SCATTERED * len(operations):
        return None
    return _CompiledWaitEnds(kernels, operations, work, steps, (first, stop), blocks_of(blocks, names.tolist()))


class _CompiledWaitEnds:
    """The ends of all waits, found among the rows of a step."""

    def __init__(
        self,
        kernels: Any,
        operations: Operations,
        work: Blocking,
        steps: StepPanel,
        rows: tuple[Ints, Ints],
        blocks: list[tuple[Ints, Ints]],
    ) -> None:
        self._kernels, self._rows = kernels, rows
        self._steps = (len(steps), steps.step, steps.begin_ns)
        orders = [np.argsort(begin) for begin, _ in blocks]
        self._ends = (
            *(operations.step, operations.exit_ns, bytes_of(work.is_known), bytes_of(work.is_blocking)),
            np.append(0, np.cumsum([len(order) for order in orders])),
            *(np.concatenate([of[side][order] for of, order in zip(blocks, orders, strict=True)]) for side in (0, 1)),
        )
        self._most_inside_ns = (1 << _time_bits(steps)) - 1

    def last_before(self, rank: Ints, step: Ints, time_ns: Ints, before: Ints) -> tuple[Ints, Bools]:
        """Return the last waits, as `_WaitEnds` says."""
        row, has_found = np.empty(len(rank), np.int64), np.empty(len(rank), np.uint8)
        self._kernels.last_waits(
            *(len(rank), rank, step, time_ns + ROUNDING_NS, before, *self._steps, *self._rows, *self._ends),
            *(self._most_inside_ns, row, has_found),
        )
        return row, has_found.view(np.bool_)


class _Walk:
    """Where the paths of all steps have got to on their way back."""

    def __init__(self, steps: StepPanel) -> None:
        """Begin at the end of the rank that ends last."""
        num_ranks, num_steps = steps.begin_ns.shape
        self._begin_ns = steps.begin_ns
        self._rank = steps.end_ns.argmax(axis=0) if num_ranks else np.zeros(num_steps, np.int64)
        self._now_ns = steps.end_ns.max(axis=0, initial=_NEVER_NS)
        self._source = np.full(num_steps, _NO_ROW)
        self._num_hops = np.zeros(num_steps, np.int64)
        self._active = np.arange(num_steps)
        self._pieces: list[tuple[Ints, ...]] = [(np.zeros(0, np.int64),) * 5]

    def to_last_wait(self, operations: Operations, waits: _WaitEnds) -> Ints:
        """Walk through local work to the rank's last wait, or to the begin of the step, where a path ends.

        Returns:
            rows of the operations that were waited for, int64, (num_active_steps,).
        """
        step, rank, now_ns = self._active, self._rank[self._active], self._now_ns[self._active]
        row, has_waited = waits.last_before(rank, step, now_ns, self._source[step])
        begin_ns = np.minimum(self._begin_ns[rank, step], now_ns)
        begin_ns[has_waited] = np.minimum(operations.exit_ns[row[has_waited]], now_ns[has_waited])
        self._pieces.append((step, rank, np.full(len(step), WORK), begin_ns, now_ns))
        self._active, self._now_ns[step] = step[has_waited], begin_ns
        return row[has_waited]

    def to_last_enter(self, operations: Operations, names: Ints, row: Ints, partner: Ints) -> None:
        """Walk through the transfers to the enter of the last to arrive: a partner, or the rank itself.

        Args:
            operations: rows of all ranks.
            names: what the rows of the panel are, ascending, (num_ranks,).
            row: the operation that was waited for, (num_active_steps,).
            partner: row of its last partner to arrive, -1 without one, (num_active_steps,).
        """
        step, exit_ns = self._active, self._now_ns[self._active]
        is_hop = (partner >= 0) & (operations.enter_ns[partner] < exit_ns)
        source = np.where(is_hop, partner, row)
        enter_ns = np.minimum(operations.enter_ns[source], exit_ns)
        self._pieces.append((step, self._rank[step], operations.op[row].astype(np.int64), enter_ns, exit_ns))
        self._rank[step] = np.searchsorted(names, operations.rank[source])
        self._now_ns[step], self._source[step] = enter_ns, source
        self._num_hops[step] += is_hop

    def path(self) -> CriticalPath:
        """Return the pieces that have a length."""
        step, rank, kind, begin_ns, end_ns = (np.concatenate(column) for column in zip(*self._pieces, strict=True))
        length_ns = (end_ns - begin_ns).astype(np.float64)
        kept = end_ns > begin_ns
        return CriticalPath(
            step=step[kept],
            rank=rank[kept],
            kind=kind[kept],
            begin_ns=begin_ns[kept],
            end_ns=end_ns[kept],
            num_hops=self._num_hops,
            length_ns=np.bincount(step, weights=length_ns, minlength=len(self._num_hops)).astype(np.float64),
        )


def _among(operations: Operations, partner: Ints, names: Ints) -> Ints:
    """Return the partners, -1 for those whose rank is not among `names`."""
    return np.where(np.isin(operations.rank, names)[partner], partner, -1)


def _ends_in_block(operations: Operations, blocks: Blocks, names: Ints) -> Bools:
    """Return which rows end while their rank is in a block, bool, (num_operations,)."""
    inside = np.zeros(len(operations), np.bool_)
    edges = np.searchsorted(operations.rank, names), np.searchsorted(operations.rank, names, side="right")
    for index, (begin, end) in enumerate(blocks_of(blocks, names.tolist())):
        own = slice(edges[0][index], edges[1][index])
        order = np.argsort(begin)
        at = np.searchsorted(begin[order], operations.exit_ns[own], side="right") - 1
        if len(order):
            inside[own] = (at >= 0) & (operations.exit_ns[own] <= end[order][np.maximum(at, 0)])
    return inside
