"""Replay steps from their graph: the longest paths through local work, transfers and waits.

With changed weights, the same graph shows how long a step would take with other work or transfers. All steps are
replayed at once but independently; in each, a rank starts when its last wait of the previous step ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Int64Array = NDArray[np.int64]

START, WORK, GATE, TRANSFER, WAIT = range(5)


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """The graph of a step, the same shape in all steps: value(node) = largest value of its predecessors + its weight.

    Attributes:
        step: step numbers, int64, (num_steps,).
        kind: START of a rank, WORK of a rank up to an event, GATE (the last enter that others wait for), TRANSFER of a
            rank's operation or of a message to it, or WAIT (the end of a wait), int64, (num_nodes,).
        rank: index of the rank, -1 for a gate, int64, (num_nodes,).
        position: position of the operation as in `LocalWork`, -1 without an operation, int64, (num_nodes,).
        weight_ns: what a node takes, for a START when it is; float64, (num_nodes, num_steps).
        source, target: edges, ordered by the level of the target, then by target; int64, (num_edges,).
        bounds: where each level begins among the edges, int64, (num_levels + 1,).
        end: last node of each rank, int64, (num_ranks,).
        role: role of each rank, int64, (num_ranks,).
        measured_ns: time from the last rank's start to the last rank's end, float64, (num_steps,).
        num_left_out: steps of the panel that are not in the graph: their operations differ from those of most steps.
    """

    step: Int64Array
    kind: Int64Array
    rank: Int64Array
    position: Int64Array
    weight_ns: FloatArray
    source: Int64Array
    target: Int64Array
    bounds: Int64Array
    end: Int64Array
    role: Int64Array
    measured_ns: FloatArray
    num_left_out: int


def replay(graph: StepGraph, weight_ns: FloatArray | None = None) -> FloatArray:
    """Return the value of each node, float64, (num_nodes, num_steps).

    Args:
        graph: the steps.
        weight_ns: used instead of the graph's weights, float64, (num_nodes, any number of steps).
    """
    weight = graph.weight_ns if weight_ns is None else weight_ns
    value = weight.copy()
    for first, stop in zip(graph.bounds[:-1].tolist(), graph.bounds[1:].tolist(), strict=True):
        target = graph.target[first:stop]
        starts = np.flatnonzero(np.diff(target, prepend=-1))
        value[target[starts]] += np.maximum.reduceat(value[graph.source[first:stop]], starts, axis=0)
    return value


def rebuilt_ns(graph: StepGraph, value_ns: FloatArray) -> FloatArray:
    """Return the step times of a replay, from the last start to the last end, float64, (num_steps,)."""
    starts = graph.weight_ns[graph.kind == START]
    return np.asarray(value_ns[graph.end].max(axis=0) - starts.max(axis=0), np.float64)
