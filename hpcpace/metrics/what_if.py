"""Steps replayed from their graph, as they were or with one thing changed, such as all work even on every rank.

A replay takes the longest paths through local work, transfers and waits. All steps are replayed at once but
independently; in each, a rank starts when its last wait of the previous step ended. The answer includes the error of
rebuilding: ignore smaller gains.

The ratio of the step time to that with even work is the slowdown S of "Understanding Stragglers in Large Model Training
Using What-if Analysis" (OSDI 2025, equation 1): each forward pass takes the mean of all forward passes, each backward
pass that of all backward passes, and so on; a transfer takes its usual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from hpcpace.core.pool import map_threads
from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.kernels import checked, library, ordinals
from hpcpace.metrics.resampling import Estimate
from hpcpace.metrics.special import UPPER_95, stdtrit

START, WORK, GATE, TRANSFER, WAIT = range(5)  # format: kinds of nodes


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
        has_free_senders: whether the time of some senders is kept whatever their receivers do: whether these hold them
            is not known.
        placing_ns: how wrong the places of waits that blocked nobody are together, nanoseconds of a step.
        are_steps_apart: whether time passes between the steps of a rank.
        batch: the transfer that has the time of all of its batch, for each node, which is itself where it is in none;
            int64, (num_nodes,). None where there are no batches.
    """

    step: Ints
    kind: Ints
    rank: Ints
    position: Ints
    weight_ns: Floats
    source: Ints
    target: Ints
    bounds: Ints
    end: Ints
    role: Ints
    measured_ns: Floats
    num_left_out: int
    work_begin_ns: Ints
    has_free_senders: bool = False
    placing_ns: float = 0.0
    are_steps_apart: bool = False
    batch: Ints | None = None

    @cached_property
    def targets(self) -> tuple[Ints, Ints]:
        """The nodes with predecessors, those of a level before those of the next one, and where their edges begin.

        int64, (num_targets,) and (num_targets + 1,).
        """
        starts = np.flatnonzero(np.diff(self.target, prepend=-1))
        return self.target[starts], np.append(starts, len(self.target))


@dataclass(frozen=True, kw_only=True)
class IssuedNodes:
    """What hosts issue to their devices; both float64, (num_nodes, num_steps).

    Attributes:
        issue_ns: when the host had issued a node, as a value of it; -inf where that is not known.
        lead_ns: how far the host was ahead of its device there.
    """

    issue_ns: Floats
    lead_ns: Floats

    @classmethod
    def of(cls, graph: StepGraph, lead_ns: Floats) -> IssuedNodes:
        """Return what is known from leads.

        Args:
            graph: the steps.
            lead_ns: at the enter of each operation, float64, (num_ranks, num_positions, num_steps); 0 if not known.
        """
        work, starts = np.flatnonzero(graph.kind == WORK), np.flatnonzero(graph.kind == START)
        places = np.stack([graph.rank[work], graph.position[work]])
        enters = np.unique(places, axis=1, return_index=True)[1]  # the work up to an enter precedes that up to its wait
        enters = enters[places[1, enters] >= 0]
        begin_ns = np.full((len(graph.role), graph.weight_ns.shape[1]), np.iinfo(np.int64).max)
        np.minimum.at(begin_ns, graph.rank[work], graph.work_begin_ns)
        origin_ns = begin_ns[graph.rank[starts[0]]] - graph.weight_ns[starts[0]]
        nodes, lead = work[enters], np.zeros(graph.weight_ns.shape)
        lead[nodes] = lead_ns[tuple(places[:, enters])]
        issue_ns = np.full(graph.weight_ns.shape, -np.inf)
        end_ns = graph.work_begin_ns[enters] + graph.weight_ns[nodes] - origin_ns
        issue_ns[nodes] = np.where(lead[nodes] > 0, end_ns - lead[nodes], -np.inf)
        return cls(issue_ns=issue_ns, lead_ns=lead)


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """Nodes that take something else than they did.

    Attributes:
        nodes: their numbers, int64, (num_replaced,).
        weight_ns: what they take instead, float64, (num_replaced, num_steps).
    """

    nodes: Ints
    weight_ns: Floats


def replay(graph: StepGraph, weight_ns: Floats | None = None, least_ns: Floats | None = None) -> Floats:
    """Return the value of each node, float64, (num_nodes, num_steps).

    Args:
        graph: the steps.
        weight_ns: used instead of the graph's weights, float64, (num_nodes, any number of steps).
        least_ns: the least value of each node, likewise, as where a host issues its work; None if there is none.
    """
    weight = graph.weight_ns if weight_ns is None else weight_ns
    kernels = library() if least_ns is None else None
    if kernels is not None:
        values = np.empty(weight.shape)
        _replay_compiled(kernels, graph, weight, values=values)
        return values
    value = weight.copy()
    for first, stop in pairwise(graph.bounds.tolist()):
        target = graph.target[first:stop]
        starts = np.flatnonzero(np.diff(target, prepend=-1))
        nodes = target[starts]
        value[nodes] += np.maximum.reduceat(value[graph.source[first:stop]], starts, axis=0)
        if least_ns is not None:
            value[nodes] = np.maximum(value[nodes], least_ns[nodes])
    return value


def replayed_ns(graph: StepGraph, replaced: Replaced | None = None) -> Floats:
    """Return the times of rebuilt steps, from the last start to the last end, float64, (num_steps,).

    Args:
        graph: the steps.
        replaced: what is otherwise than measured.
    """
    starts_ns = graph.weight_ns[graph.kind == START]
    return np.asarray(_ends_ns(graph, replaced).max(axis=0) - starts_ns.max(axis=0), np.float64)


def settled_ns(graph: StepGraph, replaced: Replaced | None = None) -> Floats:
    """Return what `replayed_ns` does, with each rank starting a step when it ends the one before in the replay.

    Who starts how much later than others may be due to what is replaced, such as a slow stage of a pipeline. Where time
    passes between steps, something that the trace lacks decides when they start, and they start as measured.
    """
    if graph.are_steps_apart:
        return replayed_ns(graph, replaced)
    starts, follows = np.flatnonzero(graph.kind == START), np.flatnonzero(np.diff(graph.step) == 1) + 1
    starts = starts[np.argsort(graph.rank[starts])]
    starts_ns, nothing = graph.weight_ns[starts], Replaced(nodes=starts[:0], weight_ns=graph.weight_ns[:0])
    other = nothing if replaced is None else replaced
    least_ns = _SETTLED_SHARE * float(graph.measured_ns.mean()) if len(graph.measured_ns) else 0.0
    for _ in range(_MAX_SETTLING):
        both = np.concatenate([other.nodes, starts]), np.concatenate([other.weight_ns, starts_ns])
        ends_ns = _ends_ns(graph, Replaced(nodes=both[0], weight_ns=both[1]))
        after_ns = ends_ns[:, follows - 1] - ends_ns[:, follows - 1].min(axis=0)
        if np.abs(after_ns - starts_ns[:, follows]).max(initial=0.0) <= least_ns:
            break
        # Of steps that follow none, starts move as those of others do.
        starts_ns = starts_ns + np.median(after_ns - starts_ns[:, follows], axis=1, keepdims=True)
        starts_ns[:, follows] = after_ns
    return np.asarray(ends_ns.max(axis=0) - both[1][-len(starts) :].max(axis=0), np.float64)


def rebuilt_ns(graph: StepGraph, value_ns: Floats) -> Floats:
    """Return the step times of a replay, from the last start to the last end, float64, (num_steps,)."""
    return np.asarray(value_ns[graph.end].max(axis=0) - graph.weight_ns[graph.kind == START].max(axis=0), np.float64)


def _ends_ns(graph: StepGraph, replaced: Replaced | None = None) -> Floats:
    """Return when each rank ends each step of a replay, float64, (num_ranks, num_steps)."""
    kernels = library()
    if kernels is not None:
        ends_ns = np.empty((len(graph.end), graph.weight_ns.shape[1]))
        _replay_compiled(kernels, graph, graph.weight_ns, replaced, ends_ns=ends_ns)
        return ends_ns
    weight_ns = graph.weight_ns
    if replaced is not None:
        weight_ns = weight_ns.copy()
        weight_ns[replaced.nodes] = replaced.weight_ns
    return np.asarray(replay(graph, weight_ns)[graph.end])


def _replay_compiled(
    kernels: Any,
    graph: StepGraph,
    weight_ns: Floats,
    replaced: Replaced | None = None,
    *,
    values: Floats | None = None,
    ends_ns: Floats | None = None,
) -> None:
    """Replay steps into `values`, as `replay` returns them, and those of the ranks' last nodes into `ends_ns`."""
    where, rows = np.full(len(weight_ns), -1), np.zeros((0, 0))
    if replaced is not None:
        where[replaced.nodes] = np.arange(len(replaced.nodes))
        rows = np.ascontiguousarray(replaced.weight_ns)
    targets, firsts = graph.targets
    checked(
        kernels.replay(
            *(*weight_ns.shape, weight_ns, where, rows, len(targets), targets, firsts),
            *(graph.source, len(graph.end), graph.end),
            *(None if values is None else values.ctypes.data, None if ends_ns is None else ends_ns.ctypes.data),
        )
    )


_LONG = 0.9  # statistics: the share of transfers that the longest ones exceed
_MAX_SETTLING = 5  # speed: replays until starts of steps agree with the ends before; they differ less with each
_SETTLED_SHARE = 1e-4  # speed: of a step, by which starts may differ from these
_NAME_BITS = 40  # statistics: of random numbers, of which no two sums are equal by chance
_MAX_BLOCKS = 20  # statistics: blocks of steps, from which intervals come
_MIN_HALVED, _NUM_HALVES = 16, 16  # statistics: steps from which halves of them show a bias, and how many


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is set back to its usual time.

    Attributes:
        kind, id: its name, e.g. "rank" and 3.
        ranks: indices of the ranks whose local work or transfers are as usual; all if empty.
        positions: the only positions (`LocalWork.position`) concerned; all if empty.
        is_transfer: whether transfers are as usual, not local work.
        longest_ns: the most that transfers take, by rank and position, (num_ranks, num_positions), in place of their
            usual time. Those over a slow link, for instance, are usual for their position.
        share: share of the excess that is removed, e.g. the share that one phase contributes.
        removed_ns: local work to remove from each rank, whether it is beyond usual or not, float64, (num_ranks,
            num_steps) or (num_ranks, 1). A slow stage, for instance, is usual for its role. It is removed in proportion
            to all work of the step.
        is_at_begin: whether it is removed from the begin of the step instead, as for time spent waiting for data.
    """

    kind: str
    id: int
    ranks: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    is_transfer: bool = False
    longest_ns: Floats | None = None
    share: float = 1.0
    removed_ns: Floats | None = None
    is_at_begin: bool = False


def links_change(graph: StepGraph, passes: Bools, kind: Ints, factor: float, usual: float = _LONG) -> Change:
    """Return the change that makes transfers over slow links no longer than other transfers that are alike.

    A message that its receiver came late for shows less than its transfer, so the longest tenth of the others counts.
    A batch passes what any of its messages passes, and is like batches of messages of the same kinds.

    Args:
        graph: the steps.
        passes: which transfers pass the links, bool, (num_ranks, num_positions).
        kind: transfers of one kind are alike, int64, likewise.
        factor: the part that is left where no others are alike.
        usual: the quantile of the others that counts.
    """
    nodes = np.flatnonzero((graph.kind == TRANSFER) & (graph.rank >= 0))
    at = graph.rank[nodes], graph.position[nodes]
    whole, part_of = np.unique(nodes if graph.batch is None else graph.batch[nodes], return_inverse=True)
    is_slow, mixture = np.zeros(len(whole), np.bool_), np.zeros(len(whole), np.int64)
    np.logical_or.at(is_slow, part_of, passes[at])
    # A sum of random numbers, one for each kind, names the kinds of a batch.
    names = np.random.default_rng(0).integers(1 << _NAME_BITS, size=int(kind.max(initial=0)) + 2)
    np.add.at(mixture, part_of, names[kind[at]])
    weight_ns = np.median(graph.weight_ns[whole], axis=1)
    longest_ns = np.full(passes.shape, np.inf)
    for value in np.unique(mixture[is_slow]).tolist():
        slow, others = is_slow & (mixture == value), weight_ns[~is_slow & (mixture == value)]
        usual_ns = np.quantile(others, usual) if len(others) else factor * np.quantile(weight_ns[slow], usual)
        longest_ns[graph.rank[whole[slow]], graph.position[whole[slow]]] = usual_ns
    return Change(kind="links", id=0, is_transfer=True, longest_ns=longest_ns)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What a change would bring.

    Attributes:
        change: the change.
        share: gain relative to the measured mean; its interval is from blocks of steps, with the error of rebuilding,
            though no more than the gain itself.
    """

    change: Change
    share: Estimate


@dataclass(frozen=True, kw_only=True)
class GainPrediction:
    """What several changes would bring, one at a time.

    Attributes:
        measured_ns: mean measured time of the steps rebuilt, from last wait to last wait.
        error_share: how wrong rebuilt and changed steps are, as of `Rebuilt`.
        num_steps: steps rebuilt.
        num_left_out: steps whose operations differ from those of most steps.
        gains: largest first.
    """

    measured_ns: float
    error_share: float
    num_steps: int
    num_left_out: int
    gains: tuple[Gain, ...]


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """Steps that were rebuilt once, with which changes are compared.

    Attributes:
        graph: the steps.
        usual_ns: what transfers usually take, and other nodes as measured, float64, (num_nodes, num_steps).
        apart_ns: part of local work that stays where a rank works like the others, likewise; None where there is none.
        base_ns: the rebuilt step times, float64, (num_steps,).
        when_ns: when each node is done, on average over steps, float64, (num_nodes,).
        measured_ns: their mean measured time, above 0.
    """

    graph: StepGraph
    usual_ns: Floats
    base_ns: Floats
    when_ns: Floats
    measured_ns: float
    apart_ns: Floats | None = None

    @cached_property
    def error_share(self) -> float:
        """How wrong rebuilt and changed steps are, relative to measured ones.

        The median of |rebuilt - measured| / measured, and what a rank that got faster would be held up wrongly, as its
        waits are placed by those of others.
        """
        measured_ns, valid = self.graph.measured_ns, self.graph.measured_ns > 0
        wrong = np.abs(self.base_ns - measured_ns)[valid] / measured_ns[valid]
        return float(np.hypot(np.median(wrong), self.graph.placing_ns / self.measured_ns))

    @cached_property
    def settled_ns(self) -> Floats:
        """The step times that changed ones are held against, as of `settled_ns`, float64, (num_steps,)."""
        return settled_ns(self.graph)

    def gain(self, change: Change, without: Replaced | None = None) -> Gain:
        """Return what a change would bring; this replays all steps a few times.

        Args:
            change: the change.
            without: what is otherwise than measured before it.
        """
        if without is None:
            return self.gain_of(change, _replaced(self, change))
        both = self.replaced(without, change)
        return self._gain(change, settled_ns(self.graph, without) - settled_ns(self.graph, both))

    def replaced(self, *changes: Change | Replaced) -> Replaced:
        """Return what nodes take with some changes, all at once."""
        found = [each if isinstance(each, Replaced) else _replaced(self, each) for each in changes]
        weight_ns, nodes = self.graph.weight_ns.copy(), np.unique(np.concatenate([each.nodes for each in found]))
        for each in found:
            weight_ns[each.nodes] += each.weight_ns - self.graph.weight_ns[each.nodes]
        return Replaced(nodes=nodes, weight_ns=np.maximum(weight_ns[nodes], 0.0))

    def gain_beside_hosts(self, change: Change, issued: IssuedNodes) -> Gain:
        """Return what a change would bring at least if no operation comes before its host has issued it.

        How much of the work before an operation is left then is not known: here, all of it, up to the lead.
        """
        replaced, weight_ns = _replaced(self, change), self.graph.weight_ns.copy()
        weight_ns[replaced.nodes] = replaced.weight_ns
        least_ns = issued.issue_ns + np.minimum(issued.lead_ns, weight_ns)
        return self._gain(change, self.base_ns - rebuilt_ns(self.graph, replay(self.graph, weight_ns, least_ns)))

    def transfer_ns(self, change: Change) -> float:
        """Return what transfers would cost the mean step once a change is made, nanoseconds; two replays."""
        weight_ns, replaced = self.graph.weight_ns.copy(), _replaced(self, change)
        weight_ns[replaced.nodes] = replaced.weight_ns
        with_ns = rebuilt_ns(self.graph, replay(self.graph, weight_ns))
        weight_ns[self.graph.kind == TRANSFER] = 0.0
        return float((with_ns - rebuilt_ns(self.graph, replay(self.graph, weight_ns))).mean())

    def gain_of(self, change: Change, replaced: Replaced) -> Gain:
        """Return what a change would bring that makes some nodes take something else."""
        return self._gain(change, self.settled_ns - settled_ns(self.graph, replaced))

    def _gain(self, change: Change, gain_ns: Floats) -> Gain:
        blocks = np.array([block.mean() for block in np.array_split(gain_ns, min(_MAX_BLOCKS, len(gain_ns)))])
        mean = replace(Estimate.of_mean(blocks), value=float(gain_ns.mean()))
        share = mean.through(lambda ns: ns / self.measured_ns)
        error = min(self.error_share, abs(share.value))
        below, above = (float(np.hypot(end - share.value, error)) for end in share.interval)
        return Gain(change=change, share=replace(share, low=share.value - below, high=share.value + above))


def rebuild(graph: StepGraph, apart_ns: Floats | None = None) -> Rebuilt | None:
    """Rebuild the steps of a graph; return None if they take no time.

    A usual transfer is the median of its position over the ranks of the role and over steps.

    Args:
        graph: the steps.
        apart_ns: part of local work that stays where a rank works like the others, such as checkpoints, float64,
            (num_nodes, num_steps); None where there is none.
    """
    measured_ns = float(graph.measured_ns.mean()) if len(graph.measured_ns) else 0.0
    if measured_ns <= 0:
        return None
    values_ns = replay(graph)
    return Rebuilt(
        graph=graph,
        usual_ns=_usual(graph),
        base_ns=rebuilt_ns(graph, values_ns),
        when_ns=values_ns.mean(axis=1),
        measured_ns=measured_ns,
        apart_ns=apart_ns,
    )


def what_if(rebuilt: Rebuilt, changes: Sequence[Change]) -> GainPrediction:
    """Return what each change alone would bring."""
    graph = rebuilt.graph
    gains = list(map_threads(rebuilt.gain, changes))
    return GainPrediction(
        measured_ns=rebuilt.measured_ns,
        error_share=rebuilt.error_share,
        num_steps=len(graph.step),
        num_left_out=graph.num_left_out,
        gains=tuple(sorted(gains, key=lambda gain: -gain.share.value)),
    )


def _replaced(rebuilt: Rebuilt, change: Change) -> Replaced:
    graph = rebuilt.graph
    if change.removed_ns is not None:
        ranks = np.asarray(change.removed_ns.any(axis=1))
        nodes = np.flatnonzero((graph.kind == WORK) & ranks[graph.rank])
        if change.is_at_begin:
            nodes = nodes[rebuilt.when_ns[nodes].argsort(kind="stable")]
        nodes = nodes[graph.rank[nodes].argsort(kind="stable")]
        weight_ns = graph.weight_ns[nodes]
        bounds = np.searchsorted(graph.rank[nodes], np.arange(len(ranks) + 1))
        for rank in np.flatnonzero(ranks).tolist():
            own = weight_ns[bounds[rank] : bounds[rank + 1]]
            own[:] = _without(own, change.removed_ns[rank], is_at_begin=change.is_at_begin)
        return Replaced(nodes=nodes, weight_ns=weight_ns)
    if change.longest_ns is not None:
        nodes = np.flatnonzero((graph.kind == TRANSFER) & (graph.rank >= 0))
        longest_ns = change.longest_ns[graph.rank[nodes], graph.position[nodes]]
        nodes, longest_ns = nodes[np.isfinite(longest_ns)], longest_ns[np.isfinite(longest_ns)]
        return Replaced(nodes=nodes, weight_ns=np.minimum(graph.weight_ns[nodes], longest_ns[:, None]))
    chosen = graph.kind == (TRANSFER if change.is_transfer else WORK)
    if change.ranks:
        chosen &= np.isin(graph.rank, change.ranks)
    if change.positions:
        chosen &= np.isin(graph.position, change.positions)
    nodes = np.flatnonzero(chosen)
    weight_ns = graph.weight_ns[nodes]
    usual_ns = rebuilt.usual_ns[nodes] if change.is_transfer else _like_others(rebuilt, nodes)
    weight_ns += change.share * (usual_ns - weight_ns)
    return Replaced(nodes=nodes, weight_ns=weight_ns)


def _like_others(rebuilt: Rebuilt, nodes: Ints) -> Floats:
    """Return what local work takes if its ranks work like the other ranks of their roles, (num_nodes, num_steps).

    Up to the same event, it is as long as theirs and varies as much: in its i-th shortest step it takes the mean of the
    i-th shortest of theirs, all with the median of their medians. A rank whose work is taken as the median of others
    would have no noise either. If nobody else has the role, it is the rank's own median over steps.

    Args:
        rebuilt: the steps.
        nodes: all local work of some ranks, or of some positions on them, int64, (num_nodes,).
    """
    graph, apart_ns = rebuilt.graph, rebuilt.apart_ns
    work_ns = graph.weight_ns if apart_ns is None else graph.weight_ns - apart_ns
    usual_ns = np.repeat(np.median(work_ns[nodes], axis=1), work_ns.shape[1]).reshape(len(nodes), -1)
    cell = _cells(graph, np.flatnonzero(graph.kind == WORK))
    own, own_cell = np.unique(cell[nodes], return_inverse=True)
    others = np.flatnonzero((cell >= 0) & np.isin(cell, own) & ~np.isin(graph.rank, graph.rank[nodes]))
    others = others[cell[others].argsort(kind="stable")]
    first, stop = (np.searchsorted(cell[others], own, side) for side in ("left", "right"))
    sorted_ns = np.zeros((len(own), work_ns.shape[1]))
    for count in np.unique(stop - first)[np.unique(stop - first) > 0].tolist():
        rows = np.flatnonzero(stop - first == count)
        theirs_ns = work_ns[others[first[rows, None] + np.arange(count)]]
        middle_ns = np.median(theirs_ns, axis=2, keepdims=True)
        theirs_ns += np.median(middle_ns, axis=1, keepdims=True) - middle_ns
        sorted_ns[rows] = np.sort(theirs_ns.reshape(len(rows), -1), axis=1).reshape(len(rows), -1, count).mean(axis=2)
    has_others = (stop > first)[own_cell]
    order = work_ns[nodes[has_others]].argsort(axis=1, kind="stable").argsort(axis=1)
    usual_ns[has_others] = np.maximum(np.take_along_axis(sorted_ns[own_cell[has_others]], order, axis=1), 0.0)
    return usual_ns if apart_ns is None else usual_ns + apart_ns[nodes]


def _without(work_ns: Floats, removed_ns: Floats, *, is_at_begin: bool) -> Floats:
    """Return one rank's pieces of local work in order of time, (num_nodes, num_steps), less some work of each step."""
    if is_at_begin:
        return np.diff(np.maximum(work_ns.cumsum(axis=0) - removed_ns, 0.0), axis=0, prepend=0.0)
    return np.asarray(work_ns * (1 - np.minimum(removed_ns / np.maximum(work_ns.sum(axis=0), 1.0), 1.0)))


def _usual(graph: StepGraph) -> Floats:
    """Return the weights of nodes with those of transfers as they usually are, float64, (num_nodes, num_steps)."""
    usual = graph.weight_ns.copy()
    nodes = np.flatnonzero((graph.kind == TRANSFER) & (graph.rank >= 0))
    cell = _cells(graph, nodes)[nodes]
    order = nodes[np.argsort(cell, kind="stable")]
    for alike in np.split(order, np.cumsum(np.bincount(cell))[:-1]):
        usual[alike] = np.median(graph.weight_ns[alike]) if len(alike) else 0.0
    return usual


def _cells(graph: StepGraph, nodes: Ints) -> Ints:
    """Number some nodes, all of one kind: those that do the same on ranks of a role have one; -1 for all others."""
    cell = np.full(len(graph.kind), -1)
    keys = np.stack([graph.role[graph.rank[nodes]], graph.position[nodes], _ordinals(graph, nodes)])
    cell[nodes] = np.unique(keys, axis=1, return_inverse=True)[1].ravel()
    return cell


def _ordinals(graph: StepGraph, nodes: Ints) -> Ints:
    """Number the nodes of each rank, kind and position from 0: the work up to an enter precedes that up to its wait."""
    order = np.lexsort((nodes, graph.position[nodes], graph.kind[nodes], graph.rank[nodes]))
    chosen = nodes[order]
    differs = np.any([np.diff(of[chosen], prepend=-2) != 0 for of in (graph.rank, graph.kind, graph.position)], axis=0)
    ordinal = np.empty(len(order), np.int64)
    ordinal[order] = ordinals(differs)
    return ordinal


def transient_loss_ns(graph: StepGraph, apart_ns: Floats | None = None) -> Estimate:
    """Return what the mean step loses because work varies from step to step, nanoseconds; 0 without steps.

    This is the mean of the rebuilt steps, less the step rebuilt from mean local work, both with mean transfers
    and starts: E[f(c)] - f(E[c]). For one synchronisation that is E[max c] - max E[c]. Steps that were rebuilt too long
    count as measured.

    The mean over n steps is noisy itself, and the largest of noisy means is too large, by c / sqrt(n) where all ranks
    are alike and by nothing where one is always slowest. Two halves of the steps show by how much: f(E) = f(n) -
    (f(n / 2) - f(n)) / (sqrt(2) - 1). The interval holds both, and as much as f differs between random halves of the
    steps, which is as much as it would differ between runs.

    Args:
        graph: the steps.
        apart_ns: part of local work without which it is judged, as of `rebuild`.
    """
    if not graph.weight_ns.size:
        return Estimate.around(0.0, 0.0)
    changing = graph.weight_ns.copy()
    starts = graph.kind == START
    changing[starts] -= changing[starts].max(axis=0)
    fixed = graph.kind != WORK
    changing[fixed] = changing[fixed].mean(axis=1, keepdims=True)
    measured_ns = float(graph.measured_ns.mean())
    if apart_ns is not None:
        with_ns = replay(graph, changing)[graph.end].max(axis=0)
        changing -= apart_ns
        measured_ns -= float((with_ns - replay(graph, changing)[graph.end].max(axis=0)).mean())
    num_steps = changing.shape[1]
    random, halves = np.random.default_rng(0), [np.arange(num_steps)]
    if num_steps >= _MIN_HALVED:
        halves += [random.permutation(num_steps)[: num_steps // 2] for _ in range(_NUM_HALVES)]
    by_step = np.ascontiguousarray(changing.T)  # rows that are copied whole, not value by value
    columns = np.stack([by_step[half].mean(axis=0) for half in halves], axis=1)
    steady = replay(graph, np.ascontiguousarray(columns))[graph.end].max(axis=0)
    rebuilt = replay(graph, changing)[graph.end].max(axis=0)
    loss_ns = float(rebuilt.mean() - steady[0])
    bias = width = 0.0
    if len(halves) > 1:
        bias = max(float(steady[1:].mean() - steady[0]), 0.0) / (np.sqrt(2.0) - 1)
        width = float(stdtrit(_NUM_HALVES - 1, UPPER_95)) * float(steady[1:].std(ddof=1))
    least = min(loss_ns, max(measured_ns - float(steady[0]), 0.0))
    return Estimate(value=max(least + bias, 0.0), low=max(least - width, 0.0), high=max(loss_ns + bias + width, 0.0))
