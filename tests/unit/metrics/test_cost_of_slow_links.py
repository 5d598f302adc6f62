"""What steps gain where a link is no longer slow: batches of messages, and ranks that then start otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from hpcpace.metrics.what_if import GATE, START, TRANSFER, WAIT, WORK, StepGraph, links_change, rebuild

NUM_STEPS = 20
WITHOUT_LINKS = np.zeros((2, 2), np.bool_)


def graph_of(nodes, weights, edges, *, end, measured_ns, batch=None) -> StepGraph:
    """Return steps that are all alike; nodes are (kind, rank, position), edges (level, source, target)."""
    kind, rank, position = (np.array(column) for column in zip(*nodes, strict=True))
    level, source, target = (np.array(column) for column in zip(*edges, strict=True))
    return StepGraph(
        step=np.arange(NUM_STEPS),
        kind=kind,
        rank=rank,
        position=position,
        weight_ns=np.repeat(np.array(weights, np.float64)[:, None], NUM_STEPS, axis=1),
        source=source,
        target=target,
        bounds=np.searchsorted(level, np.arange(1, level.max() + 2)),
        end=np.array(end),
        role=np.zeros(2, np.int64),
        measured_ns=np.full(NUM_STEPS, measured_ns),
        num_left_out=0,
        work_begin_ns=np.zeros((int((kind == WORK).sum()), NUM_STEPS), np.int64),
        batch=batch,
    )


def test_a_batch_is_as_fast_as_others_where_any_of_its_messages_passes_the_link():
    """The time of a batch is that of its last message, which may go another way than the one that is slow."""
    nodes = [(START, 0, -1), (START, 1, -1)]
    nodes += [(TRANSFER, rank, position) for rank in (0, 1) for position in (0, 1)]
    edges = [(1, 0, 2), (1, 0, 3), (1, 1, 4), (1, 1, 5)]
    weights = [0, 0, 0, 100, 0, 30]
    graph = graph_of(nodes, weights, edges, end=[3, 5], measured_ns=100.0, batch=np.array([0, 1, 3, 3, 5, 5]))
    passes, kind = WITHOUT_LINKS.copy(), np.array([[0, 1], [0, 1]])
    passes[0, 0] = True
    longest_ns = links_change(graph, passes, kind, 0.5).longest_ns
    assert longest_ns[0, 1] == 30
    assert np.isinf(np.delete(longest_ns.ravel(), 1)).all()


def test_ranks_start_their_steps_when_they_end_those_before_without_the_slow_link():
    """Rank 1 has a slow transfer of its own behind what both wait for, and so starts each step 20 after rank 0.

    A step takes 24: 20, and rank 1's work of 4. With a transfer of 1 it takes the 10 that rank 0 works.
    """
    nodes = [(START, 0, -1), (START, 1, -1), (WORK, 0, 0), (WORK, 1, 0), (GATE, -1, -1), (TRANSFER, 1, 1)]
    nodes += [(WAIT, 0, 0), (WAIT, 1, 1)]
    edges = [(1, 0, 2), (1, 1, 3), (2, 2, 4), (2, 3, 4), (3, 4, 5), (3, 4, 6), (4, 5, 7)]
    graph = graph_of(nodes, [0, 20, 10, 4, 0, 20, 0, 0], edges, end=[6, 7], measured_ns=24.0)
    passes = WITHOUT_LINKS.copy()
    passes[1, 1] = True
    rebuilt = rebuild(graph)
    assert rebuilt is not None
    gain = rebuilt.gain(links_change(graph, passes, np.zeros((2, 2), np.int64), 1 / 20))
    assert gain.share.value * 24 == pytest.approx(14)
