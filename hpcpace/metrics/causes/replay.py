"""Replay steps from their graph: the longest paths through local work, transfers and waits.

With changed weights, the same graph shows how long a step would take with other work or transfers. All steps are
replayed at once but independently; in each, a rank starts when its last wait of the previous step ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.kernels import checked, library

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
        work_begin_ns: when each WORK node began as measured, on the clock of the operations; int64, (num_work,
            num_steps), in order of the nodes.
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
    work_begin_ns: Int64Array

    @cached_property
    def targets(self) -> tuple[Int64Array, Int64Array]:
        """The nodes with predecessors, those of a level before those of the next one, and where their edges begin.

        int64, (num_targets,) and (num_targets + 1,).
        """
        starts = np.flatnonzero(np.diff(self.target, prepend=-1))
        return self.target[starts], np.append(starts, len(self.target))

    @cached_property
    def rounds(self) -> list[list[tuple[Int64Array, Int64Array]]]:
        """For each level its nodes with equally many predecessors: nodes, (n,), and predecessors, (num_before, n)."""
        return [
            _by_count(self.source[first:stop], self.target[first:stop])
            for first, stop in zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """Nodes that take something else than they did.

    Attributes:
        nodes: their numbers, int64, (num_replaced,).
        weight_ns: what they take instead, float64, (num_replaced, num_steps).
    """

    nodes: Int64Array
    weight_ns: FloatArray


def replay(graph: StepGraph, weight_ns: FloatArray | None = None) -> FloatArray:
    """Return the value of each node, float64, (num_nodes, num_steps).

    Args:
        graph: the steps.
        weight_ns: used instead of the graph's weights, float64, (num_nodes, any number of steps).
    """
    weight = graph.weight_ns if weight_ns is None else weight_ns
    kernels = library()
    if kernels is not None:
        values = np.empty(weight.shape)
        _replay_compiled(kernels, graph, weight, values=values)
        return values
    value = weight.copy()
    for level in graph.rounds:
        for nodes, before in level:
            latest = value[before[0]]
            for other in before[1:]:
                np.maximum(latest, value[other], out=latest)
            value[nodes] += latest
    return value


def replayed_ns(graph: StepGraph, replaced: Replaced | None = None) -> FloatArray:
    """Return the times of rebuilt steps, from the last start to the last end, float64, (num_steps,).

    Args:
        graph: the steps.
        replaced: what is otherwise than measured.
    """
    kernels = library()
    if kernels is not None:
        last_ns = np.empty(graph.weight_ns.shape[1])
        _replay_compiled(kernels, graph, graph.weight_ns, replaced, last_ns=last_ns)
        return _after_starts(graph, last_ns)
    weight_ns = graph.weight_ns
    if replaced is not None:
        weight_ns = weight_ns.copy()
        weight_ns[replaced.nodes] = replaced.weight_ns
    return rebuilt_ns(graph, replay(graph, weight_ns))


def rebuilt_ns(graph: StepGraph, value_ns: FloatArray) -> FloatArray:
    """Return the step times of a replay, from the last start to the last end, float64, (num_steps,)."""
    return _after_starts(graph, value_ns[graph.end].max(axis=0))


def _after_starts(graph: StepGraph, last_ns: FloatArray) -> FloatArray:
    starts = graph.weight_ns[graph.kind == START]
    return np.asarray(last_ns - starts.max(axis=0), np.float64)


def _replay_compiled(
    kernels: Any,
    graph: StepGraph,
    weight_ns: FloatArray,
    replaced: Replaced | None = None,
    *,
    values: FloatArray | None = None,
    last_ns: FloatArray | None = None,
) -> None:
    """Replay steps into `values`, as `replay` returns them, and the largest of the ranks' last nodes into `last_ns`."""
    where, rows = np.full(len(weight_ns), -1), np.zeros((0, 0))
    if replaced is not None:
        where[replaced.nodes] = np.arange(len(replaced.nodes))
        rows = replaced.weight_ns
    targets, firsts = graph.targets
    checked(
        kernels.replay(
            *(*weight_ns.shape, weight_ns, where, rows, len(targets), targets, firsts),
            *(graph.source, len(graph.end), graph.end),
            *(None if values is None else values.ctypes.data, None if last_ns is None else last_ns.ctypes.data),
        )
    )


def _by_count(source: Int64Array, target: Int64Array) -> list[tuple[Int64Array, Int64Array]]:
    """Return the targets with one source, two, ... and their sources; edges are ordered by target."""
    starts = np.flatnonzero(np.diff(target, prepend=-1))
    count = np.diff(np.append(starts, len(target)))
    return [
        (target[starts[count == number]], source[starts[count == number] + np.arange(number)[:, None]])
        for number in np.unique(count).tolist()
    ]
