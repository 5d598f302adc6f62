"""The pipeline bubble: how long a stage neither computes nor transfers, and how much of that the schedule itself costs.

A bubble is not a straggler: with p stages and m microbatches, p - 1 of m + p - 1 slots are idle on every stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.lateness.segments import LocalWork
from hpcpace.metrics.operations.matching import Operations
from hpcpace.metrics.phases import innermost
from hpcpace.trace.schema import Op

FloatArray = NDArray[np.float64]
Times = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """The bubble of a pipeline.

    Attributes:
        share: mean over ranks and steps of the time spent waiting for messages, relative to the step.
        by_stage: the same for each stage, float64, (num_stages,).
        ideal_share: what the schedule costs with equal stages; None if the number of microbatches is unknown.
    """

    share: float
    by_stage: FloatArray
    ideal_share: float | None


def ideal_bubble(num_stages: int, num_microbatches: int) -> float:
    """Return (p - 1) / (m + p - 1), the idle share of GPipe's and 1F1B's schedules (Huang et al. 2019, section 2.3).

    Raises:
        ValueError: fewer than one stage or microbatch.
    """
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(f"stages and microbatches must be at least 1, not {num_stages} and {num_microbatches}")
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def covered_by_waits(operations: tuple[Times, Times, Times, Times], steps: tuple[Times, Times]) -> FloatArray:
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
    message_wait_ns: FloatArray,
    step_ns: FloatArray,
    stage: NDArray[np.int64],
    *,
    num_microbatches: int | None = None,
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
    return Bubble(
        share=share,
        by_stage=by_stage,
        ideal_share=ideal,
    )


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
