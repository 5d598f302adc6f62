"""Some steps taken apart operation by operation, with their forward and backward passes.

Jitter between synchronisations and predicted gains rest on them. All steps where they are few. Of a long run they are
stretches spread over it, and the report says how many; figures from them have intervals, which show how much is known
from so many steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from hpcpace.core.pool import map_threads
from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import ThresholdValues
from hpcpace.diagnosis.devices import LEAST_COLUMN, SINCE_COLUMN, is_on_device
from hpcpace.diagnosis.evidence import StepOperations, TimedTraces, blocks_of_steps, evidence_of
from hpcpace.metrics import Bools, Bytes, Floats, Ints
from hpcpace.metrics.arrivals import clock_offsets_ns
from hpcpace.metrics.common_clock import reference_times
from hpcpace.metrics.operations import MESSAGES, is_one_of
from hpcpace.metrics.pass_work import Passes, PassWork, stretches_gain, without_stretches
from hpcpace.metrics.roles import DataVariation, data_variation
from hpcpace.metrics.segments import BlockingThresholds, LocalWork, local_work
from hpcpace.metrics.step_graph import GraphThresholds, step_graph
from hpcpace.metrics.steps import StepPanel, columns_of
from hpcpace.metrics.topology import Topology
from hpcpace.metrics.waits import Blocks
from hpcpace.metrics.what_if import Gain, IssuedNodes, Rebuilt, StepGraph
from hpcpace.trace.schema import ENQUEUE_COLUMN, Phase
from hpcpace.trace.stream import TraceStream
from hpcpace.trace.tables import RankTrace, join_tables

MAX_OPERATIONS = 1_000_000
"""Memory: operations of all ranks together, about."""
_SLOT_BITS = 20  # format: of a number that combines the coordinates of a rank
_NUM_STRETCHES, _MIN_STEPS = 8, 4  # memory: stretches of a long run that are taken apart, and steps of each
_PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_BLOCKED = (Phase.GRAD_SYNC, Phase.PACE)
_OF_DATA = (Phase.FORWARD, Phase.BACKWARD)


@dataclass(frozen=True)
class PhaseStretches:
    """Stretches of a phase on each rank, such as those in which its device waited for its host.

    Attributes:
        passes: when they were, on the common clock.
        most_ns, least_ns: for how long at most and at least, each int64, (num_stretches,).
    """

    passes: Sequence[Passes]
    most_ns: Sequence[Ints]
    least_ns: Sequence[Ints]

    def gain(self, rebuilt: Rebuilt, rows: Bools | None = None, *, is_least: bool = False) -> Gain:
        """Return what it would bring without them, on some ranks or all; at least if `is_least`."""
        removed_ns = list(self.least_ns if is_least else self.most_ns)
        for row in np.flatnonzero(~rows).tolist() if rows is not None else ():
            removed_ns[row] = np.zeros_like(removed_ns[row])
        return stretches_gain(rebuilt, self.passes, removed_ns)

    def inside_ns(self, graph: StepGraph) -> Floats:
        """Return for how long each node of a graph is in them, float64, (num_nodes, num_steps)."""
        found = np.zeros(graph.weight_ns.shape)
        without = without_stretches(graph, self.passes, self.most_ns)
        found[without.nodes] = graph.weight_ns[without.nodes] - without.weight_ns
        return found


@dataclass(frozen=True, kw_only=True)
class CloseUp:
    """Some steps, taken apart.

    Attributes:
        evidence: their operations.
        aligned: the same on clocks that collectives on devices leave at one time, as the graph has them.
        steps: the steps, on the common clock.
        blocks: stretches in which ranks were blocked that no operation accounts for.
        work: own work before each operation.
        graph: the steps as a graph; None where they are not alike.
        ahead_ns: by how much the clock of each rank is ahead of what its samples say, int64, (num_ranks,).
    """

    evidence: StepOperations
    aligned: StepOperations
    ahead_ns: Ints
    steps: StepPanel
    blocks: Blocks
    work: LocalWork
    graph: StepGraph | None

    @cached_property
    def passes(self) -> list[Passes]:
        """The forward and backward passes and optimizer steps of each rank."""
        found = _phases(self.aligned, self.steps.step, _PASSES)
        return [
            Passes(kind=kind.astype(np.int64), begin_ns=begin_ns, end_ns=end_ns) for kind, begin_ns, end_ns in found
        ]

    def stretches(self, phase: Phase) -> PhaseStretches | None:
        """Return the stretches of a phase; None where no rank has one."""
        passes, most_ns, least_ns = [], [], []
        for trace, clock in zip(self.aligned.traces, self.aligned.clocks, strict=True):
            rows = trace.tables["phases"]
            is_used = columns_of(self.steps.step, np.asarray(rows["step"], np.int64)) >= 0
            rows = rows.select((rows["phase"] == phase) & (rows["end_ns"] > rows["begin_ns"]) & is_used)
            most = rows["end_ns"] - rows["begin_ns"]
            since = SINCE_COLUMN if is_on_device(trace) else "begin_ns"
            begin, end = (reference_times(clock, rows[name]) for name in (since, "end_ns"))
            passes.append(Passes(kind=np.zeros(len(begin), np.int64), begin_ns=begin, end_ns=end))
            most_ns.append(most)
            least_ns.append(rows[LEAST_COLUMN] if is_on_device(trace) else most)
        return PhaseStretches(passes, most_ns, least_ns) if any(len(one.kind) for one in passes) else None

    @cached_property
    def issued(self) -> IssuedNodes | None:
        """What hosts issued to their devices in the graph; None where that is not known."""
        tables = self.evidence.collectives
        if self.graph is None or not all(ENQUEUE_COLUMN in table for table in tables):
            return None
        done, rows = self.evidence.operations, np.flatnonzero(self.work.is_known)
        enqueued = [np.where(of[ENQUEUE_COLUMN], of["enter_ns"] - of[ENQUEUE_COLUMN], 0) for of in tables]
        column = columns_of(self.graph.step, done.step[rows])
        rows, column = rows[column >= 0], column[column >= 0]
        rank = np.searchsorted(np.asarray(self.evidence.ranks), done.rank[rows])
        lead_ns = np.zeros((len(tables), self.work.num_positions, len(self.graph.step)))
        lead_ns[rank, self.work.position[rows], column] = np.concatenate(enqueued)[rows]
        return IssuedNodes.of(self.graph, lead_ns)

    @cached_property
    def apart_ns(self) -> Floats | None:
        """The time of each node of the graph in checkpoints and evaluations; None where there are none."""
        found = [self.stretches(phase) for phase in (Phase.CHECKPOINT, Phase.EVAL)]
        parts = [one.inside_ns(self.graph) for one in found if one is not None and self.graph is not None]
        return np.sum(parts, axis=0) if parts else None

    @cached_property
    def pass_work(self) -> PassWork | None:
        """The work in these; None where steps are not alike, or a rank has no passes."""
        return PassWork.of(self.graph, self.passes) if self.graph is not None else None


def close_up_columns(num_steps: int, operations_per_step: float) -> Ints:
    """Return the positions of the steps to take apart, ascending, int64: all, or eight stretches spread over the run.

    Args:
        num_steps: how many there are.
        operations_per_step: of all ranks together, about.
    """
    num_close = int(max(MAX_OPERATIONS / max(operations_per_step, 1.0), _MIN_STEPS))
    if num_close >= num_steps:
        return np.arange(num_steps)
    num_stretches = min(_NUM_STRETCHES, max(num_close // _MIN_STEPS, 1))
    length = num_close // num_stretches
    first = np.rint(np.linspace(0, num_steps - length, num_stretches)).astype(np.int64)
    return np.unique(first[:, None] + np.arange(length))


def close_up_evidence(
    streams: Sequence[TraceStream], timed: TimedTraces, steps: StepPanel
) -> tuple[StepOperations, StepPanel]:
    """Return the operations of the steps to take apart, and these; arguments as of `take_close_up`.

    Raises:
        TraceError: a chunk of a file is damaged.
    """
    num_operations = sum(stream.num_collectives for stream in streams)
    columns = close_up_columns(len(steps), num_operations / max(steps.num_seen, 1))
    chosen = steps.select(columns)
    traces = list(map_threads(partial(with_steps, stretches=list(_stretches(chosen.step, columns))), streams))
    return evidence_of(traces, timed.clocks, timed.unknown_clocks), chosen


def take_close_up(
    streams: Sequence[TraceStream],
    timed: TimedTraces,
    steps: StepPanel,
    role: Ints,
    thresholds: ThresholdValues | None = None,
    *,
    seen: tuple[StepOperations, StepPanel] | None = None,
) -> CloseUp | None:
    """Return some steps of a run taken apart; None without any operation in them.

    Args:
        streams: the traces, ascending by rank; at least one.
        timed: the same with their clocks.
        steps: the used steps, on the common clock.
        role: role of each rank, int64, (num_ranks,).
        thresholds: the numbers that decide; the defaults if None.
        seen: what `close_up_evidence` returns, where that is known.

    Raises:
        TraceError: a chunk of a file is damaged.
    """
    thresholds = thresholds or ThresholdValues()
    evidence, chosen = close_up_evidence(streams, timed, steps) if seen is None else seen
    if not len(evidence.operations):
        return None
    done, ranks = evidence.operations, evidence.ranks
    blocks = _blocks(evidence, chosen.step)
    places: dict[str, Any] = {"ranks": ranks, "role": role, "blocks": blocks}
    work = local_work(done, chosen, limits=thresholds.of(BlockingThresholds), **places)
    ahead_ns = ahead_of_samples_ns(evidence)
    aligned, on_aligned = _aligned(evidence, chosen, ahead_ns)
    places["blocks"] = blocks if aligned is evidence else _blocks(aligned, chosen.step)
    limits = thresholds.of(GraphThresholds)
    graph = step_graph(aligned.operations, aligned.matching, aligned.waits, work, on_aligned, limits=limits, **places)
    return CloseUp(
        evidence=evidence, aligned=aligned, ahead_ns=ahead_ns, steps=chosen, blocks=blocks, work=work, graph=graph
    )


def ahead_of_samples_ns(evidence: StepOperations) -> Ints:
    """Return by how much the clock of each rank is ahead of what its samples say, as its operations show it."""
    keys = [trace.header.host_key or str(trace.header.rank) for trace in evidence.traces]
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    host = np.array([number[key] for key in keys])
    of_row = host[np.searchsorted(np.asarray(evidence.ranks), evidence.operations.rank)]
    found = clock_offsets_ns(evidence.operations, evidence.matching, of_row)
    return np.asarray(np.append(found, np.zeros(len(number) - len(found), np.int64))[host], np.int64)


def _aligned(evidence: StepOperations, steps: StepPanel, ahead_ns: Ints) -> tuple[StepOperations, StepPanel]:
    """Return evidence and steps on clocks that are not ahead."""
    if not ahead_ns.any():
        return evidence, steps
    clocks = [clock.ahead_by(ns) for clock, ns in zip(evidence.clocks, ahead_ns.tolist(), strict=True)]
    begin_ns, end_ns = (times - ahead_ns[:, None] for times in (steps.begin_ns, steps.end_ns))
    aligned = evidence_of(evidence.traces, clocks, evidence.unknown_clocks)
    return aligned, replace(steps, begin_ns=begin_ns, end_ns=end_ns)


def _stretches(step: Ints, columns: Ints) -> Iterator[tuple[int, int]]:
    """Yield the first step of each stretch and the first behind it."""
    ends = np.append(np.flatnonzero(np.diff(columns) > 1), len(columns) - 1) if len(columns) else columns
    first = 0
    for end in ends.tolist():
        yield int(step[first]), int(step[end]) + 1
        first = end + 1


def with_steps(stream: TraceStream, stretches: Sequence[tuple[int, int]]) -> RankTrace:
    """Return a trace with the operations of some stretches of steps."""
    rows = [stream.trace.tables["collectives"].select(slice(0))]
    for blocks in blocks_of_steps(stream, stretches):
        table = stream.blocks(*blocks)
        chosen = np.logical_or.reduce([(table["step"] >= first) & (table["step"] < stop) for first, stop in stretches])
        rows.append(table.select(chosen))
    trace = stream.trace
    return replace(trace, tables={**trace.tables, "collectives": join_tables(rows)})


def _blocks(evidence: StepOperations, step: Ints) -> Blocks:
    """Return the stretches of some steps in which ranks waited inside torch, or were paced, on the common clock."""
    found = zip(evidence.ranks, _phases(evidence, step, _BLOCKED), strict=True)
    parts = [
        (np.full(len(kind), rank), begin_ns, end_ns, kind == Phase.PACE) for rank, (kind, begin_ns, end_ns) in found
    ]
    rank, begin_ns, end_ns, is_pause = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Blocks(rank=rank, begin_ns=begin_ns, end_ns=end_ns, is_pause=is_pause)


def _phases(evidence: StepOperations, step: Ints, kinds: Sequence[Phase]) -> Iterator[tuple[Bytes, Ints, Ints]]:
    """Yield kind, begin and end of the phases of some kinds in some steps, of each rank, on the common clock."""
    for trace, clock in zip(evidence.traces, evidence.clocks, strict=True):
        phases = trace.tables["phases"]
        chosen = np.flatnonzero(is_one_of(phases["phase"], kinds) & (phases["end_ns"] > phases["begin_ns"]))
        chosen = chosen[columns_of(step, np.asarray(phases["step"][chosen], np.int64)) >= 0]
        begin_ns, end_ns = (reference_times(clock, phases[name][chosen]) for name in ("begin_ns", "end_ns"))
        yield phases["phase"][chosen], begin_ns, end_ns


def touching(close_up: CloseUp, places: Topology, links: Collection[str]) -> tuple[Bools, Ints]:
    """Return which operations of a step pass some links, and which are alike.

    Those are alike that have the same operation, size, and numbers of members and nodes.

    Both by rank and position, (num_ranks, num_positions), bool and int64.
    """
    done, work = close_up.evidence.operations, close_up.work
    rows = np.flatnonzero(work.is_known & (done.group >= 0))
    rank = np.searchsorted(np.asarray(close_up.evidence.ranks), done.rank[rows])
    cells, first = np.unique(rank * work.num_positions + work.position[rows], return_index=True)
    is_message, rows = is_one_of(done.op, MESSAGES), rows[first]
    members = [
        (int(done.rank[row]), int(done.peer[row])) if is_message[row] else done.groups[done.group[row]].ranks
        for row in rows.tolist()
    ]
    num_nodes = (places.members_by(members, places.node, places.num_nodes) > 0).sum(axis=1)
    num_members = np.array([len(group) for group in members], np.int64)
    keys = np.stack([done.op[rows].astype(np.int64), done.size_bytes[rows], num_members, num_nodes])
    passes = np.zeros((len(close_up.evidence.ranks), work.num_positions), np.bool_)
    kind = np.full(passes.shape, -1, np.int64)
    chosen = [index for index, link in enumerate(places.links) if link in links]
    passes.ravel()[cells] = places.touches(members)[:, chosen].any(axis=1)
    kind.ravel()[cells] = np.unique(keys, axis=1, return_inverse=True)[1].ravel()
    return passes, kind


def data_variation_of(close_up: CloseUp, min_passes: int) -> DataVariation | None:
    """Return how the work of microbatches varies; None where steps are not rebuilt, or passes are not alike in number.

    The n-th pass of a step is that of the same microbatch on all stages.

    Args:
        close_up: the steps.
        min_passes: of a rank; fewer do not show it.
    """
    headers = [trace.header for trace in close_up.evidence.traces]
    if len({header.pp for header in headers}) < 2 or close_up.pass_work is None:
        return None
    graph, passes, work = close_up.pass_work.graph, close_up.passes, close_up.pass_work
    panels = []
    for one, own_ns in zip(passes, work.own_ns, strict=True):
        of_rank = [own_ns[one.kind == kind][np.argsort(one.begin_ns[one.kind == kind])] for kind in _OF_DATA]
        panels.append(of_rank)
    num_steps = len(graph.step)
    counts = {len(own_ns) for of_rank in panels for own_ns in of_rank}
    if len(counts) != 1 or graph.num_left_out or counts.pop() % num_steps:
        return None
    return data_variation(
        np.array(panels).reshape(len(panels), len(_OF_DATA), num_steps, -1),
        np.array([header.pp for header in headers]),
        np.array([header.dp * (1 << _SLOT_BITS) + header.tp for header in headers]),
        min_passes,
    )
