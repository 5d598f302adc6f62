"""How long the step would take if all work were even: the same on every rank and stage, in every microbatch and step.

The ratio of the step time to that is the slowdown S by uneven work of "Understanding Stragglers in Large Model Training
Using What-if Analysis" (OSDI 2025, equation 1): each forward pass takes the mean of all forward passes, each backward
pass that of all backward passes, and so on; a transfer takes its usual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcpace.metrics.causes.replay import TRANSFER, WORK, FloatArray, Int64Array, Replaced, StepGraph
from hpcpace.metrics.causes.what_if import Change, Gain, Rebuilt
from hpcpace.metrics.phases import innermost


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The passes of one rank, such as forward and backward, on the clock of the operations.

    Attributes:
        kind: what is done in each; passes of one kind would take equally long, int64, (num_passes,).
        begin_ns, end_ns: int64, (num_passes,).
    """

    kind: Int64Array
    begin_ns: Int64Array
    end_ns: Int64Array


def even_gain(rebuilt: Rebuilt, passes: Sequence[Passes]) -> Gain | None:
    """Return what even work would bring; None where a rank has no passes.

    Args:
        rebuilt: the steps.
        passes: those of each rank, in the order of the graph's ranks; what is outside of them stays as it was.
    """
    graph = rebuilt.graph
    if not all(len(one.kind) for one in passes):
        return None
    work, rows, lines = _lines(graph, passes)
    kinds = np.concatenate([line.kind for line in lines])
    own_ns = np.concatenate([line.own_ns for line in lines])
    num_kinds = int(kinds.max()) + 1
    is_done = own_ns > 0
    count = np.bincount(kinds[is_done], minlength=num_kinds)
    mean_ns = np.asarray(np.bincount(kinds[is_done], own_ns[is_done], num_kinds) / np.maximum(count, 1), np.float64)
    evened = np.concatenate([line.evened(mean_ns) for line in lines])
    transfers = np.flatnonzero(graph.kind == TRANSFER)
    replaced = Replaced(
        nodes=np.concatenate([*(work[own] for own in rows), transfers]),
        weight_ns=np.concatenate([evened, rebuilt.usual_ns[transfers]]),
    )
    return rebuilt.gain_of(Change(kind="even", id=0), replaced)


def own_work(graph: StepGraph, passes: Sequence[Passes]) -> list[FloatArray]:
    """Return the work in each pass of each rank, without what it waited, nanoseconds, each float64, (num_passes,).

    Args:
        graph: the steps.
        passes: those of each rank, at least one, in the order of the graph's ranks.
    """
    return [line.own_ns for line in _lines(graph, passes)[2]]


def _lines(graph: StepGraph, passes: Sequence[Passes]) -> tuple[Int64Array, list[Int64Array], list[_Line]]:
    """Return the nodes of work, which of them each rank has, and the work of each rank."""
    work = np.flatnonzero(graph.kind == WORK)
    order = np.argsort(graph.rank[work], kind="stable")
    rows = np.split(order, np.searchsorted(graph.rank[work][order], np.arange(1, len(passes))))
    lines = [_Line.of(graph, work[own], graph.work_begin_ns[own], one) for own, one in zip(rows, passes, strict=True)]
    return work, rows, lines


@dataclass(frozen=True, kw_only=True)
class _Line:
    """The work of a rank on its time line.

    Attributes:
        begin_ns, end_ns: of each node in each step, float64, (num_nodes, num_steps).
        edges_ns: begins and ends of passes, ascending, (num_edges,).
        of_pass: the pass between two edges, -1 outside of all, (num_edges - 1,).
        kind: of the passes, (num_passes,).
        own_ns: work in each pass, float64, (num_passes,).
    """

    begin_ns: FloatArray
    end_ns: FloatArray
    edges_ns: FloatArray
    of_pass: Int64Array
    kind: Int64Array
    own_ns: FloatArray

    @classmethod
    def of(cls, graph: StepGraph, nodes: Int64Array, begin_ns: Int64Array, passes: Passes) -> _Line:
        """Return the work of some nodes, all of one rank, which began when `begin_ns` says."""
        origin_ns = int(passes.begin_ns.min())
        begin = (begin_ns - origin_ns).astype(np.float64)
        end = begin + graph.weight_ns[nodes]
        edges = np.unique(np.concatenate([passes.begin_ns, passes.end_ns]))
        of_pass = innermost(passes.begin_ns, passes.end_ns, edges)
        # Work done until each edge: its slope is 1 where a node works, and nodes of a rank do not overlap.
        order = np.argsort(begin, axis=None, kind="stable")
        starts, stops = begin.ravel()[order], np.maximum.accumulate(end.ravel()[order])
        starts = np.maximum(starts, np.append(-np.inf, stops[:-1]))
        stops = np.maximum(stops, starts)
        times = np.stack([starts, stops], axis=1).ravel()
        done = np.repeat(np.cumsum(stops - starts), 2)
        done[::2] -= stops - starts
        between = np.diff(np.interp((edges - origin_ns).astype(np.float64), times, done))
        inside = of_pass >= 0
        own_ns = np.asarray(np.bincount(of_pass[inside], between[inside], len(passes.kind)), np.float64)
        return cls(
            begin_ns=begin,
            end_ns=end,
            edges_ns=(edges - origin_ns).astype(np.float64),
            of_pass=of_pass,
            kind=passes.kind,
            own_ns=own_ns,
        )

    def evened(self, mean_ns: FloatArray) -> FloatArray:
        """Return what the nodes take if each pass takes the mean of its kind, float64, (num_nodes, num_steps)."""
        factor = np.append(mean_ns[self.kind] / np.maximum(self.own_ns, 1.0), 1.0)  # the last is that of no pass
        stretched = np.append(0.0, np.cumsum(np.diff(self.edges_ns) * factor[self.of_pass]))
        before_ns, after_ns = (self._stretched(times, stretched) for times in (self.begin_ns, self.end_ns))
        return np.asarray(after_ns - before_ns, np.float64)

    def _stretched(self, times_ns: FloatArray, stretched: FloatArray) -> FloatArray:
        first, last = self.edges_ns[0], self.edges_ns[-1]
        outside = np.minimum(times_ns - first, 0.0) + np.maximum(times_ns - last, 0.0)
        return np.asarray(np.interp(times_ns, self.edges_ns, stretched) + outside, np.float64)
