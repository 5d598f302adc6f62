"""The sweep of a probe: all operations over sizes and hosts, and the rows of its record.

A round passes all operations, sizes and groups; so samples of one point are apart in time, and what drifts shows as a
difference between rounds. How often an operation is called follows from the time that its calls took, as agreed by all
members of its group.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpcpace.core.text import NS_PER_S, format_bytes
from hpcpace.metrics import Floats
from hpcpace.probe.laws import fit_law
from hpcpace.probe.operations import OPERATIONS, Operation, ProbeGroup, timed_calls
from hpcpace.probe.record import LatencyLaw, ProbedHost, ProbeRecord, RankSkew, SweepRow
from hpcpace.probe.start import bus_limit
from hpcpace.probe.world import ProbeWorld
from hpcpace.world.deadline import Deadline


@dataclass(kw_only=True)
class Point:
    """One operation of one size in one group; the same on all its members.

    Attributes:
        operation, size_bytes: of the point.
        call_s: the longest mean time of a call so far, of all ranks; 0 before the first one.
        is_checked: whether its result has been compared with what it must be.
        is_available: whether the backend has the operation.
        rounds_ns: durations of each round, mean over ranks, float64, (num_calls,).
    """

    operation: Operation
    size_bytes: int
    call_s: float = 0.0
    is_checked: bool = False
    is_available: bool = True
    rounds_ns: list[Floats] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """All points of one number of hosts.

    Attributes:
        nodes: the hosts.
        ranks: their ranks, ascending.
        node_of_rank: host of each of these ranks.
        points: of each operation, in ascending order of size.
    """

    nodes: tuple[int, ...]
    ranks: tuple[int, ...]
    node_of_rank: tuple[int, ...]
    points: tuple[tuple[Point, ...], ...]


def sweep_rows(cells: Sequence[Cell], hosts: Sequence[ProbedHost], backend: str) -> tuple[SweepRow, ...]:
    """Return the rows of a sweep, in the order op, number of hosts, size."""
    rate_of_node = {node: host.limit for node, host in enumerate(hosts)}
    rows = []
    for cell in cells:
        for points in cell.points:
            limit = bus_limit(points[0].operation.name, backend, cell.node_of_rank, rate_of_node)
            rows += [_row(cell, point, limit) for point in points if point.rounds_ns]
    order = {point.operation.name: number for cell in cells for number, (point, *_) in enumerate(cell.points)}
    return tuple(sorted(rows, key=lambda row: (order[row.op], row.num_nodes, row.size_bytes)))


def sweep_laws(cells: Sequence[Cell]) -> tuple[LatencyLaw, ...]:
    """Return the law of each operation and number of hosts with enough sizes, in the order of `sweep_rows`."""
    laws = []
    num_operations = max((len(cell.points) for cell in cells), default=0)
    for number in range(num_operations):
        for cell in sorted(cells, key=lambda one: len(one.nodes)):
            points = [point for point in cell.points[number] if point.rounds_ns]
            law = fit_law(
                [point.size_bytes for point in points],
                [point.rounds_ns for point in points],
                op=cell.points[number][0].operation.name,
                num_nodes=len(cell.nodes),
                num_ranks=len(cell.ranks),
            )
            laws += [law] if law is not None else []
    return tuple(laws)


def rank_skews(gaps_ns: Mapping[int, tuple[float, float]], hosts: Sequence[ProbedHost]) -> tuple[RankSkew, ...]:
    """Return what each rank adds by itself.

    Args:
        gaps_ns: by rank, mean and 99 % quantile of the time between its calls.
        hosts: with their ranks.
    """
    if not gaps_ns:
        return ()
    usual_ns = float(np.median([mean for mean, _ in gaps_ns.values()]))
    host_of = {rank: host.name for host in hosts for rank in host.ranks}
    return tuple(
        RankSkew(rank=rank, host=host_of.get(rank, ""), mean_ns=mean - usual_ns, p99_ns=high - usual_ns)
        for rank, (mean, high) in sorted(gaps_ns.items())
    )


def _row(cell: Cell, point: Point, limit: float | None) -> SweepRow:
    times_ns = np.concatenate(point.rounds_ns)
    p50, p95, p99 = (float(value) for value in np.quantile(times_ns, (0.5, 0.95, 0.99)))
    algbw = point.size_bytes / p50 * NS_PER_S
    return SweepRow(
        op=point.operation.name,
        num_nodes=len(cell.nodes),
        num_ranks=len(cell.ranks),
        size_bytes=point.size_bytes,
        num_repetitions=len(times_ns),
        p50_ns=p50,
        p95_ns=p95,
        p99_ns=p99,
        rounds_ns=tuple(float(np.median(one)) for one in point.rounds_ns),
        algbw=algbw,
        busbw=algbw * point.operation.bus_factor(len(cell.ranks)),
        limit=limit,
    )


SIZES_BYTES = tuple(4**power for power in range(3, 14))
"""64 B to 64 MiB."""
_NUM_ROUNDS = 5
_MIN_CALLS, _MAX_CALLS = 2, 200
_FIRST_CALLS = 3  # a guess of the smallest size; its time is not known yet
_UNAVAILABLE = re.compile(r"Backend \S+ does not (support|implement)")
_MAX_REASON = 160


class Sweep:
    """The part that measures operations over sizes and numbers of hosts, and fits their laws.

    Args:
        sizes_bytes: ascending.
        operations: which.
    """

    name = "sweep"
    weight = 4.0

    def __init__(self, sizes_bytes: Sequence[int] = SIZES_BYTES, operations: Sequence[Operation] = OPERATIONS) -> None:
        self._sizes_bytes = tuple(sizes_bytes)
        self._operations = tuple(operations)
        self._measured: list[Cell] = []

    def measure(self, world: ProbeWorld, deadline: Deadline, record: ProbeRecord) -> ProbeRecord:
        """Measure; see `hpcpace.probe.world.Part`."""
        if len(world.alive) < 2:
            world.problems.append("one rank has nobody to send to: start the probe on several ranks for the sweep")
            return record
        survey = _Survey(world)
        share_s, number = deadline.left_s / _NUM_ROUNDS, 0
        while world.agree(number == 0 or deadline.left_s > share_s / 2):
            counts = node_counts(world)
            for count in counts:
                survey.visit(self._cell(survey, count), Deadline(share_s / len(counts)), deadline)
            number += 1
        survey.close()
        gaps_ns = survey.gathered_gaps()
        if not world.is_first:
            return record
        world.problems += _words_on_sizes(survey.cells.values())
        self._measured = list(survey.cells.values())
        rows = sweep_rows(self._measured, record.hosts, world.backend)
        return dataclasses.replace(record, sweep=rows, skews=rank_skews(gaps_ns, record.hosts))

    def conclude(self, record: ProbeRecord) -> ProbeRecord:
        """Return the record with the laws; see `hpcpace.probe.world.Concluding`."""
        return dataclasses.replace(record, laws=sweep_laws(self._measured))

    def _cell(self, survey: _Survey, count: int) -> Cell:
        world, nodes = survey.world, tuple(survey.world.nodes[:count])
        if nodes not in survey.cells:
            ranks = tuple(world.ranks_of(nodes))
            points = tuple(tuple(self._points(operation, len(ranks))) for operation in self._operations)
            node_of_rank = tuple(world.node_of_rank[rank] for rank in ranks)
            survey.cells[nodes] = Cell(nodes=nodes, ranks=ranks, node_of_rank=node_of_rank, points=points)
        return survey.cells[nodes]

    def _points(self, operation: Operation, num_ranks: int) -> Iterable[Point]:
        sizes = dict.fromkeys(operation.rounded(size, num_ranks) for size in self._sizes_bytes)
        return (Point(operation=operation, size_bytes=size) for size in sizes)


def node_counts(world: ProbeWorld) -> list[int]:
    """Return the numbers of hosts to measure, descending: all, then powers of 2, and 1 where a host has several ranks.

    Groups consist of the first hosts, so that rank 0 is in each.
    """
    most = len(world.nodes)
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    has_several = len(world.ranks_of(world.nodes[:1])) > 1
    return [count for count in sorted({*powers, most}, reverse=True) if count > 1 or has_several]


class _Survey:
    """What a sweep has measured so far, on one rank."""

    def __init__(self, world: ProbeWorld) -> None:
        self.world = world
        self.cells: dict[tuple[int, ...], Cell] = {}
        self._groups: dict[tuple[int, ...], ProbeGroup] = {}
        self._gaps_ns: list[Floats] = []

    def visit(self, cell: Cell, share: Deadline, deadline: Deadline) -> None:
        """Measure all points of a cell, if this rank is in it, and meet the others; a failure costs the round.

        Collective: every rank alive calls this.
        """
        world, problem = self.world, ""
        if world.rank in cell.ranks:
            try:
                if cell.nodes not in self._groups:
                    name = f"sweep/{world.num_meetings}"
                    self._groups[cell.nodes] = ProbeGroup(world, name, cell.ranks)
                self._pass(cell, self._groups[cell.nodes], share, deadline)
            except RuntimeError as error:
                problem = str(error).partition("\n")[0][:_MAX_REASON]
        failures = world.meet("the sweep", problem, wait_s=share.timeout_s)
        if failures:
            group = self._groups.pop(cell.nodes, None)
            if group is not None:
                group.close()
            world.problems += [] if world.lost_hosts else [f"the sweep over {len(cell.nodes)} hosts: {failures[0]}"]

    def close(self) -> None:
        """End all groups."""
        for group in self._groups.values():
            group.close()

    def gathered_gaps(self) -> dict[int, tuple[float, float]]:
        """Return mean and 99 % quantile of the time between calls of each rank; empty but on rank 0.

        Collective: every rank alive calls this.
        """
        world, gaps_ns = self.world, np.concatenate(self._gaps_ns) if self._gaps_ns else np.zeros(1)
        world.board.post(f"gaps/{world.rank}", [float(gaps_ns.mean()), float(np.quantile(gaps_ns, 0.99))])
        if not world.is_first:
            return {}
        found = world.board.gather("gaps", world.alive, world.timeout_s)
        return {rank: (mean, high) for rank, (mean, high) in found.items()}

    def _pass(self, cell: Cell, group: ProbeGroup, share: Deadline, deadline: Deadline) -> None:
        for number, points in enumerate(cell.points):
            # What is left is shared by the operations that are left.
            operation = Deadline(share.left_s / (len(cell.points) - number))
            self._pass_operation(group, points, operation, deadline)

    def _pass_operation(self, group: ProbeGroup, points: Sequence[Point], share: Deadline, deadline: Deadline) -> None:
        before = None
        share_s, all_s = self._left_s(group, share, deadline)
        for number, point in enumerate(points):
            if not point.is_available:
                return
            expected_s = point.call_s or (before.call_s * point.size_bytes / before.size_bytes if before else 0.0)
            num_calls = _num_calls(min(share_s / (len(points) - number), all_s), expected_s)
            if num_calls < _MIN_CALLS:
                if (1 + _MIN_CALLS) * expected_s > min(share_s, all_s):
                    return  # a later round may have more time left
                num_calls = _MIN_CALLS
            if all_s <= 0 or not self._measure(group, point, num_calls):
                return
            before, (share_s, all_s) = point, self._left_s(group, share, deadline, point)

    def _left_s(
        self, group: ProbeGroup, share: Deadline, deadline: Deadline, point: Point | None = None
    ) -> tuple[float, float]:
        """Return what is left of a share and of all by the member with the least, and agree on how long calls took."""
        left_s = [-(0.0 if one.is_over else one.left_s) for one in (share, deadline)]
        call_s, share_s, all_s = group.maxima([point.call_s if point else 0.0, *left_s])
        if point is not None:
            point.call_s = call_s
        return -share_s, -all_s

    def _measure(self, group: ProbeGroup, point: Point, num_calls: int) -> bool:
        """Measure a point; return False if the backend has no such operation."""
        operation = point.operation
        buffers = operation.buffers(point.size_bytes, group)
        if not point.is_checked:
            try:
                works = operation.issue(group.backend, buffers, group.own, group.size)
            except (RuntimeError, AttributeError) as error:
                if not _is_unavailable(error):
                    raise
                self._leave_out(point, str(error))
                return False
            for work in works:
                work.wait()
            self._check(group, point, is_right=operation.is_right(buffers, group))
        for tensor in (buffers.send, buffers.receive):
            tensor.zero_()  # sums of sums would overflow
        times = timed_calls(
            lambda: operation.issue(group.backend, buffers, group.own, group.size), num_calls, group.device
        )
        point.call_s = float(times.duration_ns.mean()) / NS_PER_S
        point.rounds_ns.append(np.array(group.sums(times.duration_ns.tolist())) / group.size)
        self._gaps_ns.append(times.gap_ns)
        return True

    def _leave_out(self, point: Point, reason: str) -> None:
        point.is_available = False
        reason = reason.partition("\n")[0][:_MAX_REASON]
        self.world.problems.append(f"{self.world.backend} has no {point.operation.name} here: {reason}")

    def _check(self, group: ProbeGroup, point: Point, *, is_right: bool) -> None:
        point.is_checked = True
        (num_wrong,) = group.sums([0.0 if is_right else 1.0])
        if num_wrong:
            size = format_bytes(point.size_bytes)
            self.world.problems.append(
                f"{point.operation.name} of {size} returned wrong data on {num_wrong:.0f} of {group.size} ranks: "
                "do not train on these hosts before memory and network are checked"
            )


def _num_calls(allowed_s: float, expected_s: float) -> int:
    """Return how many timed calls fit, one more for warming up; above the least only where the time is known."""
    if not expected_s:
        return _FIRST_CALLS
    return min(int(allowed_s / expected_s) - 1, _MAX_CALLS)


def _words_on_sizes(cells: Iterable[Cell]) -> list[str]:
    """Return a sentence on sizes that did not fit into the time."""
    left_out = [point.size_bytes for cell in cells for ops in cell.points for point in ops[1:] if not point.rounds_ns]
    has_any = any(point.rounds_ns for cell in cells for ops in cell.points for point in ops)
    if not left_out or not has_any:
        return []
    return [f"sizes from {format_bytes(min(left_out))} did not fit everywhere: allow more with --time"]


def _is_unavailable(error: Exception) -> bool:
    """Return whether a backend has no such operation: in torch that is no type of error, but a sentence."""
    return isinstance(error, NotImplementedError | AttributeError) or bool(_UNAVAILABLE.search(str(error)))
