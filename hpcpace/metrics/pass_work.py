"""The work of ranks inside their passes, such as forward and backward, and steps replayed with other work there.

A change of passes knows where it happens: idle time leaves the pass that had it, and the excess of a pipeline stage
leaves the passes that exceed those of other stages, not the optimizer that is alike on all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.phases import innermost
from hpcpace.metrics.what_if import TRANSFER, WORK, Change, Gain, Rebuilt, Replaced, StepGraph

_EXPLAINED = 0.5  # of the excess of a stage: passes that exceed those of other stages by less do not hold it


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The passes of one rank, such as forward and backward, on the clock of the operations.

    Attributes:
        kind: what is done in each; passes of one kind would take equally long, int64, (num_passes,).
        begin_ns, end_ns: int64, (num_passes,).
    """

    kind: Ints
    begin_ns: Ints
    end_ns: Ints


@dataclass(frozen=True)
class PassWork:
    """What each rank works in its passes, without what it waited.

    Attributes:
        graph: the steps.
        lines: the work of each rank on its time line.
    """

    graph: StepGraph
    lines: tuple[_Line, ...]

    @classmethod
    def of(cls, graph: StepGraph, passes: Sequence[Passes]) -> PassWork | None:
        """Return the work in the passes of each rank, in the order of the graph's ranks; None where a rank has none."""
        if not all(len(one.kind) for one in passes):
            return None
        work = np.flatnonzero(graph.kind == WORK)
        order = np.argsort(graph.rank[work], kind="stable")
        rows = np.split(order, np.searchsorted(graph.rank[work][order], np.arange(1, len(passes))))
        lines = [
            _Line.of(graph, work[own], graph.work_begin_ns[own], one) for own, one in zip(rows, passes, strict=True)
        ]
        return cls(graph, tuple(lines))

    @property
    def own_ns(self) -> list[Floats]:
        """The work in each pass of each rank, nanoseconds, each float64, (num_passes,)."""
        return [line.own_ns for line in self.lines]

    def with_work(self, own_ns: Mapping[int, Floats]) -> Replaced:
        """Return what nodes take if passes take other work; time outside of passes stays.

        Args:
            own_ns: work in each pass of some ranks, by their index, at least one, each float64, (num_passes,).
        """
        lines = [(self.lines[rank], wanted_ns) for rank, wanted_ns in own_ns.items()]
        return Replaced(
            nodes=np.concatenate([line.nodes for line, _ in lines]),
            weight_ns=np.concatenate([line.with_work(wanted_ns) for line, wanted_ns in lines]),
        )

    def by_kind(self) -> Floats:
        """Return the work of each rank in passes of each kind, nanoseconds per step, (num_ranks, num_kinds)."""
        num_kinds = max(int(line.kind.max()) for line in self.lines) + 1
        sums = [np.bincount(line.kind, line.own_ns, num_kinds) for line in self.lines]
        return np.asarray(np.array(sums) / max(self.graph.weight_ns.shape[1], 1), np.float64)

    def without_excess(self, removed_ns: Floats, stage: Ints) -> Replaced | None:
        """Return what nodes take without the excess work of pipeline stages, which leaves the passes that hold it.

        Args:
            removed_ns: how much is removed from each rank, mean per step, float64, (num_ranks,).
            stage: of each rank, int64, (num_ranks,); some have ranks from which nothing is removed.

        Returns:
            None where the passes of these stages do not exceed those of the others by so much.
        """
        own_ns = self.by_kind()
        is_slow = np.isin(stage, stage[removed_ns > 0])
        others = [np.median(own_ns[stage == of], axis=0) for of in np.unique(stage[~is_slow]).tolist()]
        if not others:
            return None
        excess_ns = np.maximum(own_ns - np.median(others, axis=0), 0.0)
        chosen = np.flatnonzero(removed_ns > 0)
        total_ns = excess_ns[chosen].sum(axis=1)
        if (total_ns < _EXPLAINED * removed_ns[chosen]).any():
            return None
        part = excess_ns[chosen] * (removed_ns[chosen] / np.maximum(total_ns, 1.0))[:, None]
        left = np.clip(1 - part / np.maximum(own_ns[chosen], 1.0), 0.0, 1.0)
        return self.with_work(
            {
                rank: self.lines[rank].own_ns * left[row][self.lines[rank].kind]
                for row, rank in enumerate(chosen.tolist())
            }
        )


def even_stages(
    rebuilt: Rebuilt, work: PassWork | None, work_ns: Floats, stage: Ints, excess: Mapping[int, float]
) -> tuple[Change, Replaced]:
    """Return what nodes take if pipeline stages have no more work than the others, all at once.

    The excess leaves the passes that hold it, or all work of the step alike where these are not known.

    Args:
        rebuilt: the steps.
        work: of their ranks in their passes; None where that is not known.
        work_ns: local work, float64, (num_ranks, num_steps).
        stage: of each rank, int64, (num_ranks,).
        excess: of some stages relative to the others, above 0; at least one.
    """
    removed_ns = np.zeros(len(work_ns))
    for of, share in excess.items():
        removed_ns[stage == of] = work_ns[stage == of].mean(axis=1) * share / (1 + share)
    change = Change(kind="stage", id=min(excess), removed_ns=removed_ns[:, None])
    replaced = work.without_excess(removed_ns, stage) if work is not None else None
    return change, rebuilt.replaced(change) if replaced is None else replaced


def stretches_gain(rebuilt: Rebuilt, stretches: Sequence[Passes], spent_ns: Sequence[Ints]) -> Gain:
    """Return what it would bring without some of the time in stretches, such as those in which devices were idle.

    Args:
        rebuilt: the steps.
        stretches: those of each rank, disjoint; some rank has one.
        spent_ns: the time to remove from each, spread over its work, each int64, (num_stretches,).
    """
    return rebuilt.gain_of(Change(kind="stretches", id=0), without_stretches(rebuilt.graph, stretches, spent_ns))


def without_stretches(graph: StepGraph, stretches: Sequence[Passes], spent_ns: Sequence[Ints]) -> Replaced:
    """Return what nodes take without some of the time in stretches; arguments as of `stretches_gain`."""
    nodes, weight_ns = [], []
    work = np.flatnonzero(graph.kind == WORK)
    for rank, (one, removed_ns) in enumerate(zip(stretches, spent_ns, strict=True)):
        if len(one.kind):
            own = np.flatnonzero(graph.rank[work] == rank)
            line = _Line.of(graph, work[own], graph.work_begin_ns[own], one)
            nodes.append(line.nodes)
            weight_ns.append(line.with_work(np.maximum(line.own_ns - removed_ns, 0.0)))
    return Replaced(nodes=np.concatenate(nodes), weight_ns=np.concatenate(weight_ns))


def even_gain(rebuilt: Rebuilt, work: PassWork) -> Gain:
    """Return what even work would bring: each pass takes the mean of its kind; what is outside of passes stays."""
    kinds, own_ns = (np.concatenate([getattr(line, name) for line in work.lines]) for name in ("kind", "own_ns"))
    num_kinds, is_done = int(kinds.max()) + 1, own_ns > 0
    count = np.bincount(kinds[is_done], minlength=num_kinds)
    mean_ns = np.asarray(np.bincount(kinds[is_done], own_ns[is_done], num_kinds) / np.maximum(count, 1), np.float64)
    transfers = np.flatnonzero(rebuilt.graph.kind == TRANSFER)
    evened = work.with_work({rank: mean_ns[line.kind] for rank, line in enumerate(work.lines)})
    replaced = Replaced(
        nodes=np.concatenate([evened.nodes, transfers]),
        weight_ns=np.concatenate([evened.weight_ns, rebuilt.usual_ns[transfers]]),
    )
    return rebuilt.gain_of(Change(kind="even", id=0), replaced)


@dataclass(frozen=True)
class _Line:
    """The work of a rank on its time line.

    Attributes:
        nodes: of its work, (num_nodes,).
        begin_ns, end_ns: of each node in each step, float64, (num_nodes, num_steps).
        edges_ns: begins and ends of passes, ascending, (num_edges,).
        of_pass: the pass between two edges, -1 outside of all, (num_edges - 1,).
        kind: of the passes, (num_passes,).
        own_ns: work in each pass, float64, (num_passes,).
    """

    nodes: Ints
    begin_ns: Floats
    end_ns: Floats
    edges_ns: Floats
    of_pass: Ints
    kind: Ints
    own_ns: Floats

    @classmethod
    def of(cls, graph: StepGraph, nodes: Ints, begin_ns: Ints, passes: Passes) -> _Line:
        """Return the work of some nodes, all of one rank, which began when `begin_ns` says."""
        origin_ns = int(passes.begin_ns.min())
        begin = (begin_ns - origin_ns).astype(np.float64)
        end = begin + graph.weight_ns[nodes]
        edges = np.unique(np.concatenate([passes.begin_ns, passes.end_ns]))
        of_pass, edges_ns = innermost(passes.begin_ns, passes.end_ns, edges), (edges - origin_ns).astype(np.float64)
        # Work done until each edge: its slope is 1 where a node works, and nodes of a rank do not overlap.
        order = np.argsort(begin, axis=None, kind="stable")
        starts, stops = begin.ravel()[order], np.maximum.accumulate(end.ravel()[order])
        starts = np.maximum(starts, np.append(-np.inf, stops[:-1]))
        stops = np.maximum(stops, starts)
        times = np.stack([starts, stops], axis=1).ravel()
        done = np.repeat(np.cumsum(stops - starts), 2)
        done[::2] -= stops - starts
        between = np.diff(np.interp(edges_ns, times, done))
        inside = of_pass >= 0
        own_ns = np.asarray(np.bincount(of_pass[inside], between[inside], len(passes.kind)), np.float64)
        return cls(nodes, begin, end, edges_ns, of_pass, passes.kind, own_ns)

    def with_work(self, own_ns: Floats) -> Floats:
        """Return what the nodes take if each pass takes other work, float64, (num_nodes, num_steps)."""
        factor = np.append(own_ns / np.maximum(self.own_ns, 1.0), 1.0)  # the last is that of no pass
        stretched = np.append(0.0, np.cumsum(np.diff(self.edges_ns) * factor[self.of_pass]))
        before_ns, after_ns = (self._stretched(times, stretched) for times in (self.begin_ns, self.end_ns))
        return np.asarray(after_ns - before_ns, np.float64)

    def _stretched(self, times_ns: Floats, stretched: Floats) -> Floats:
        first, last = self.edges_ns[0], self.edges_ns[-1]
        outside = np.minimum(times_ns - first, 0.0) + np.maximum(times_ns - last, 0.0)
        return np.asarray(np.interp(times_ns, self.edges_ns, stretched) + outside, np.float64)
