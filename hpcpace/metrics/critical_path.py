"""The critical path of a step, and the bubble of a pipeline: time without work or transfers.

It is walked backwards from the last end: along a rank's own time to its last wait, then on to the rank it waited for.
After the critical-path analysis of Scalasca (Boehme, Wolf, de Supinski, Schulz, Geimer, IPDPS 2012, section III).

A bubble is not a straggler: with p stages and m microbatches, p - 1 of m + p - 1 slots are idle on every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.kernels import bytes_of, library
from hpcpace.metrics.matching import Matching
from hpcpace.metrics.operations import Operations
from hpcpace.metrics.phases import CoveredTime
from hpcpace.metrics.propagation import last_partner
from hpcpace.metrics.segments import ROUNDING_NS, Blocking, LocalWork
from hpcpace.metrics.steps import StepPanel
from hpcpace.metrics.waits import NO_BLOCKS, Blocks, blocks_of
from hpcpace.trace.schema import Op


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
    return CoveredTime.of(begin[some], end[some]).inside_ns(step_begin_ns, step_end_ns).astype(np.float64)


def pipeline_bubble(message_wait_ns: Floats, step_ns: Floats, stage: Ints) -> Floats | None:
    """Return the time that ranks wait for messages, relative to the steps, mean over the ranks of each stage.

    Args:
        message_wait_ns: exposed wait for messages, from `covered_by_waits`, (num_ranks, num_steps).
        step_ns: time of each step, (num_steps,).
        stage: pipeline stage of each rank, int64, (num_ranks,).

    Returns:
        float64, (num_stages,); None with one stage, or if no step takes any time.
    """
    stages = np.unique(stage)
    total_ns = float(np.sum(step_ns))
    if len(stages) < 2 or total_ns <= 0:
        return None
    by_rank = np.asarray(message_wait_ns, np.float64).sum(axis=1) / total_ns
    return np.array([by_rank[stage == of].mean() for of in stages])


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
MAX_ROUNDS = 10_000  # speed: more waits than a sound step has
_NO_ROW = -1
_MAX_SCATTERED = 4  # speed: rows that a search goes through, of each row
_KEY_BITS = 62  # format: of rank, step and time in one number
_PIECE = ("step", "rank", "kind", "row", "begin_ns", "end_ns")


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
    """The pieces of the critical paths of all steps, each int64, (num_pieces,).

    Attributes:
        step: index of the step in the panel.
        rank: index of the rank.
        kind: `WORK`, or the operation's `hpcpace.trace.schema.Op` where the piece is its transfer.
        row: of the operation that ended where its transfer did, -1 for work.
        begin_ns, end_ns: on the common clock.
    """

    step: Ints
    rank: Ints
    kind: Ints
    row: Ints
    begin_ns: Ints
    end_ns: Ints


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
    if not steps.begin_ns.size:
        return CriticalPath(**{name: np.zeros(0, np.int64) for name in _PIECE})
    last_waits = _compiled_last_waits(operations, work, steps, names, blocks)
    if last_waits is None:
        is_wait = work.is_known & (work.is_blocking | _ends_in_block(operations, blocks, names))
        last_waits = _sorted_last_waits(operations, steps, names, np.flatnonzero(is_wait))
    partner = last_partner(operations, matching) if partner is None else partner
    partner = np.where(np.isin(operations.rank, names)[partner], partner, _NO_ROW)
    pieces = list(_pieces(operations, steps, names, partner, last_waits))
    columns = dict(zip(_PIECE, (np.concatenate(column) for column in zip(*pieces, strict=True)), strict=True))
    kept = columns["end_ns"] > columns["begin_ns"]
    return CriticalPath(**{name: values[kept] for name, values in columns.items()})


_LastWaits = Callable[[Ints, Ints, Ints, Ints], tuple[Ints, Bools]]
"""A function that returns the last wait of each rank in a step that ends by a time, and whether there is one.

Args:
    rank, step: their indices, (num_lookups,).
    time_ns: latest end, (num_lookups,).
    before: a row that it comes before if that ends a wait, too, (num_lookups,); -1 for none. Waits are ordered by rank,
        step, time and row.

Returns:
    rows of operations, int64, and bool, each (num_lookups,).
"""


def _pieces(
    operations: Operations, steps: StepPanel, names: Ints, partner: Ints, last_waits: _LastWaits
) -> Iterator[tuple[Ints, ...]]:
    """Yield step, rank, kind, row, begin and end of pieces, on the way back from the end of the rank that ends last."""
    step, now_ns, rank = np.arange(len(steps)), steps.end_ns.max(axis=0), steps.end_ns.argmax(axis=0)
    source = np.full(len(steps), _NO_ROW)
    for _ in range(MAX_ROUNDS):
        # Through local work to the rank's last wait, or to the begin of the step, where a path ends.
        row, has_waited = last_waits(rank, step, now_ns + ROUNDING_NS, source)
        begin_ns = np.minimum(steps.begin_ns[rank, step], now_ns)
        begin_ns[has_waited] = np.minimum(operations.exit_ns[row[has_waited]], now_ns[has_waited])
        yield step, rank, np.full(len(step), WORK), np.full(len(step), _NO_ROW), begin_ns, now_ns
        if not has_waited.any():
            return
        step, rank, row, exit_ns = (values[has_waited] for values in (step, rank, row, begin_ns))
        # Through the transfer to the enter of the last to arrive: a partner, or the rank itself.
        is_hop = (partner[row] >= 0) & (operations.enter_ns[partner[row]] < exit_ns)
        source = np.where(is_hop, partner[row], row)
        now_ns = np.minimum(operations.enter_ns[source], exit_ns)
        yield step, rank, operations.op[row].astype(np.int64), row, now_ns, exit_ns
        rank = np.searchsorted(names, operations.rank[source])


def _sorted_last_waits(operations: Operations, steps: StepPanel, names: Ints, rows: Ints) -> _LastWaits:
    """Return a search among the ends of waits, sorted.

    Args:
        operations: rows of all ranks.
        steps: the steps.
        names: what the rows of `steps` are, ascending, (num_ranks,).
        rows: rows that end a wait, (num_waits,).
    """
    time_bits = _time_bits(steps)

    def keys_of(rank: Ints, step: Ints, time_ns: Ints) -> Ints:
        """Return numbers that are in the order of rank, step and time within the step, int64, (num_times,)."""
        inside_ns = np.clip(time_ns - steps.begin_ns[rank, step], 0, (1 << time_bits) - 1)
        return np.asarray(((rank * len(steps) + step) << time_bits) + inside_ns, np.int64)

    column, index = np.searchsorted(steps.step, operations.step[rows]), np.searchsorted(names, operations.rank[rows])
    keys = keys_of(index, column, operations.exit_ns[rows])
    order = np.argsort(keys, kind="stable")
    keys, rows = keys[order], rows[order]
    # Where each row is among the waits, beyond the end if it is none; the last place is that of no row.
    place = np.full(len(operations) + 1, len(rows) + 1)
    place[rows] = np.arange(len(rows))

    def search(rank: Ints, step: Ints, time_ns: Ints, before: Ints) -> tuple[Ints, Bools]:
        found = np.searchsorted(keys, keys_of(rank, step, time_ns), side="right") - 1
        found = np.minimum(found, place[before] - 1)
        first = np.searchsorted(keys, keys_of(rank, step, steps.begin_ns[rank, step]))
        row = rows[np.maximum(found, 0)] if len(rows) else np.zeros(len(rank), np.int64)
        return row, (found >= first) & (found >= 0)

    return search


def _time_bits(steps: StepPanel) -> int:
    return _KEY_BITS - int(steps.begin_ns.size).bit_length()


def _compiled_last_waits(
    operations: Operations, work: Blocking, steps: StepPanel, names: Ints, blocks: Blocks
) -> _LastWaits | None:
    """Return a search by a kernel among the rows of a step.

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
    of_ranks = [
        (begin[order], end[order]) for begin, end in blocks_of(blocks, names.tolist()) for order in [begin.argsort()]
    ]
    ends = (
        *(operations.step, operations.exit_ns, bytes_of(work.is_known), bytes_of(work.is_blocking)),
        np.append(0, np.cumsum([len(begin) for begin, _ in of_ranks])),
        *(np.concatenate(side) for side in zip(*of_ranks, strict=True)),
    )

    def search(rank: Ints, step: Ints, time_ns: Ints, before: Ints) -> tuple[Ints, Bools]:
        row, has_found = np.empty(len(rank), np.int64), np.empty(len(rank), np.uint8)
        kernels.last_waits(
            *(len(rank), rank, step, time_ns, before, len(steps), steps.step, steps.begin_ns, first, stop, *ends),
            *((1 << _time_bits(steps)) - 1, row, has_found),
        )
        return row, has_found.view(np.bool_)

    return search


def _ends_in_block(operations: Operations, blocks: Blocks, names: Ints) -> Bools:
    """Return which rows end while their rank is in a block, bool, (num_operations,)."""
    return np.asarray(blocked_before_exit_ns(operations, blocks, names.tolist()) >= 0)


def blocked_before_exit_ns(operations: Operations, blocks: Blocks, ranks: Sequence[int]) -> Ints:
    """Return for how long the block in which a row ends had lasted, int64, (num_operations,); -1 outside of blocks.

    Args:
        operations: rows of all ranks.
        blocks: stretches in which ranks were blocked.
        ranks: ascending.
    """
    found = np.full(len(operations), -1)
    edges = np.searchsorted(operations.rank, ranks), np.searchsorted(operations.rank, ranks, side="right")
    for index, (begin, end) in enumerate(blocks_of(blocks, ranks)):
        own = slice(edges[0][index], edges[1][index])
        order = np.argsort(begin)
        exit_ns = operations.exit_ns[own]
        at = np.searchsorted(begin[order], exit_ns, side="right") - 1
        if len(order):
            is_inside = (at >= 0) & (exit_ns <= end[order][np.maximum(at, 0)])
            found[own] = np.where(is_inside, exit_ns - begin[order][np.maximum(at, 0)], -1)
    return found
