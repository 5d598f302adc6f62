"""What even work would bring, against steps of known truth."""

from __future__ import annotations

import numpy as np
import pytest

from hpcpace.metrics.pass_work import Passes, PassWork, even_gain
from hpcpace.metrics.what_if import START, TRANSFER, WAIT, WORK, StepGraph, rebuild

FORWARD, BACKWARD = 1, 2


def two_ranks(work_ns: np.ndarray) -> StepGraph:
    """Return steps of two ranks that each work, then meet; `work_ns` is (2, num_steps)."""
    num_steps = work_ns.shape[1]
    zero = np.zeros(num_steps)
    begin_ns = np.arange(num_steps, dtype=np.int64) * 1_000_000
    return StepGraph(
        step=np.arange(num_steps),
        kind=np.array([START, START, WORK, WORK, TRANSFER, TRANSFER, WAIT, WAIT]),
        rank=np.array([0, 1] * 4),
        position=np.array([-1, -1, 0, 0, 0, 0, 0, 0]),
        weight_ns=np.stack([zero, zero, *work_ns, zero + 10, zero + 10, zero, zero]).astype(np.float64),
        source=np.array([0, 1, 2, 3, 2, 3, 4, 5]),
        target=np.array([2, 3, 4, 4, 5, 5, 6, 7]),
        bounds=np.array([0, 2, 6, 8]),
        end=np.array([6, 7]),
        role=np.zeros(2, np.int64),
        measured_ns=work_ns.max(axis=0) + 10.0,
        num_left_out=0,
        work_begin_ns=np.stack([begin_ns, begin_ns]),
    )


def passes(work_ns: np.ndarray, forward_ns: np.ndarray) -> list[Passes]:
    """Return a forward pass of some length at the begin of the work of each step, and a backward pass after it."""
    found = []
    for own, first in zip(work_ns, forward_ns, strict=True):
        begin = np.arange(len(own), dtype=np.int64) * 1_000_000
        edges = np.stack([begin, begin + first.astype(np.int64), begin + own.astype(np.int64)])
        found.append(
            Passes(
                kind=np.repeat([FORWARD, BACKWARD], len(own)),
                begin_ns=np.concatenate([edges[0], edges[1]]),
                end_ns=np.concatenate([edges[1], edges[2]]),
            )
        )
    return found


def of(graph: StepGraph, own: list[Passes]) -> PassWork:
    found = PassWork.of(graph, own)
    assert found is not None
    return found


def test_the_step_of_even_work_has_the_mean_of_each_kind_of_pass() -> None:
    forward = np.array([[100.0, 300.0, 200.0], [200.0, 200.0, 200.0]])
    backward = np.array([[400.0, 200.0, 900.0], [300.0, 600.0, 0.0]])
    work = forward + backward
    rebuilt = rebuild(two_ranks(work))
    assert rebuilt is not None
    gain = even_gain(rebuilt, of(rebuilt.graph, passes(work, forward)))
    assert gain is not None
    even_ns = forward.mean() + backward[backward > 0].mean() + 10
    # The step in which rank 1 has no backward pass waits for rank 0's all the same.
    assert rebuilt.measured_ns * (1 - gain.share.value) == pytest.approx(even_ns)


def test_time_outside_of_passes_stays_as_it_was() -> None:
    forward, outside = np.full((2, 4), 100.0), np.array([[50.0] * 4, [0.0] * 4])
    work = forward + outside
    rebuilt = rebuild(two_ranks(work))
    assert rebuilt is not None
    own = [Passes(kind=one.kind[:4], begin_ns=one.begin_ns[:4], end_ns=one.end_ns[:4]) for one in passes(work, forward)]
    gain = even_gain(rebuilt, of(rebuilt.graph, own))
    assert gain is not None and gain.share.value == pytest.approx(0.0, abs=1e-9)


def test_a_rank_without_passes_leaves_the_question_open() -> None:
    work = np.full((2, 3), 100.0)
    nothing = np.zeros(0, np.int64)
    assert PassWork.of(two_ranks(work), [Passes(kind=nothing, begin_ns=nothing, end_ns=nothing)] * 2) is None
