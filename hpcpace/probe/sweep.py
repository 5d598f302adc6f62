"""The sweep of a probe: timed operations over sizes and hosts, and the rows of its record.

A round passes all operations, sizes and groups; so samples of one point are apart in time, and what drifts shows as a
difference between rounds. How often an operation is called follows from the time that its calls took, as agreed by all
members of its group.

Durations are those of the host's clock or, for NCCL, of the device's. Nothing observes these groups, and no group of a
job changes: only members call, while `torch.distributed.new_group` would need every rank of the job.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpace.core.compat import c10d
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, format_bytes
from hpcpace.metrics import Floats
from hpcpace.metrics.communication import bus_factors
from hpcpace.probe.laws import fit_law
from hpcpace.probe.record import LatencyLaw, ProbedHost, ProbeRecord, RankSkew, SweepRow
from hpcpace.probe.start import bus_limit
from hpcpace.probe.world import ProbeWorld
from hpcpace.trace.schema import Op
from hpcpace.world.deadline import Deadline

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Times:
    """What one rank measured.

    Attributes:
        duration_ns: from the end of one call to the end of the next, float64, (num_calls,): calls follow each other
            without a pause, as in nccl-tests.
        gap_ns: from the end of one call to the begin of the next on the host, float64, (num_calls,).
    """

    duration_ns: Floats
    gap_ns: Floats


def timed_calls(issue: Callable[[], list[Any]], num_calls: int, device: torch.device) -> Times:
    """Call an operation once more than asked for, and time all calls but the first.

    Args:
        issue: begins the operation; returns what is waited for, in order.
        num_calls: how many are timed, at least 1.
        device: of the buffers.

    Raises:
        RuntimeError: the operation failed.
    """
    with _without_collections():
        return _on_device(issue, num_calls) if device.type == "cuda" else _on_host(issue, num_calls)


def _on_host(issue: Callable[[], list[Any]], num_calls: int) -> Times:
    begin_ns = np.empty(num_calls + 1, np.int64)
    end_ns = np.empty(num_calls + 1, np.int64)
    clock = time.perf_counter_ns
    for call in range(num_calls + 1):
        begin_ns[call] = clock()
        for work in issue():
            work.wait()
        end_ns[call] = clock()
    return Times(duration_ns=np.diff(end_ns).astype(np.float64), gap_ns=(begin_ns[1:] - end_ns[:-1]).astype(np.float64))


def _on_device(issue: Callable[[], list[Any]], num_calls: int) -> Times:
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls + 1)]
    gap_ns = np.empty(num_calls + 1)
    clock = time.perf_counter_ns
    ended_ns = clock()
    for call, event in enumerate(events):
        gap_ns[call] = clock() - ended_ns
        for work in issue():
            work.wait()  # lets the stream wait, not the host
        event.record()
        ended_ns = clock()
    torch.cuda.synchronize()
    milliseconds = [before.elapsed_time(after) for before, after in pairwise(events)]
    return Times(duration_ns=np.array(milliseconds) * 1e6, gap_ns=gap_ns[1:])


@contextmanager
def _without_collections() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class ProbeGroup:
    """Some ranks of a probe and a backend of torch that connects them.

    Collective: all `ranks` make it with the same arguments.

    Args:
        world: the ranks of the probe.
        name: of the group; each is used once.
        ranks: its members, ascending, with this one.

    Raises:
        RuntimeError: a member did not come within the world's timeout.
    """

    def __init__(self, world: ProbeWorld, name: str, ranks: Sequence[int]) -> None:
        import torch.distributed as dist

        self.ranks = tuple(ranks)
        self.own = self.ranks.index(world.rank)
        self.device = world.device
        store = dist.PrefixStore(f"group/{name}", world.board.store)
        self.backend = _backend(world.backend, store, self.own, len(self.ranks), world.timeout_s)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def close(self) -> None:
        """End the group, also where members have failed."""
        if self.device.type == "cuda":
            self.backend.abort()  # a shutdown would wait for operations that may never end

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all members, the same on all of them.

        Collective: every member calls this with as many values.

        Raises:
            RuntimeError: a member did not take part within the timeout.
        """
        return self._reduced(values, "MAX")

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all members; see `maxima`."""
        return self._reduced(values, "SUM")

    def _reduced(self, values: Sequence[float], op: str) -> list[float]:
        import torch

        options = c10d().AllreduceOptions()
        options.reduceOp = getattr(c10d().ReduceOp, op)
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        self.backend.allreduce([tensor], options).wait()
        reduced: list[float] = tensor.tolist()
        return reduced


def _backend(name: str, store: Any, rank: int, num_ranks: int, timeout_s: float) -> Any:
    timeout = timedelta(seconds=timeout_s)
    if name == "gloo":
        return c10d().ProcessGroupGloo(store, rank, num_ranks, timeout=timeout)
    nccl = c10d().ProcessGroupNCCL  # torch without CUDA has none
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, num_ranks, options)


ITEM_BYTES = 4  # float32
_MAX_VALUE = 64
"""Ranks put values of up to this into their buffers, so that sums over thousands of ranks are exact in float32."""


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """What one rank sends and receives."""

    send: torch.Tensor
    receive: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class SweptOperation:
    """One operation.

    Attributes:
        name: as in the record.
        issue: begins it; returns what is waited for, in order.
        expected: what each rank's received value is, by rank, number of ranks and place in n parts.
        sent_parts, received_parts: whether a rank sends, or receives, 1/n of the size; all of it otherwise.
    """

    name: str
    issue: Callable[[Any, Buffers, int, int], list[Any]]
    expected: Callable[[int, int, int], float]
    sent_parts: bool = False
    received_parts: bool = False

    def bus_factor(self, num_ranks: int) -> float:
        """Return busbw over algbw; see `hpcpace.metrics.communication`."""
        op = Op.SEND if self.name == "send_recv" else Op[self.name.upper()]
        return float(bus_factors(np.array([op], np.uint8), np.array([num_ranks]))[0])

    def rounded(self, size_bytes: int, num_ranks: int) -> int:
        """Return the nearest size, from below where there is one, whose parts are whole numbers."""
        unit = ITEM_BYTES * (num_ranks if self.sent_parts or self.received_parts or self.name == "all_to_all" else 1)
        return max(size_bytes // unit, 1) * unit

    def buffers(self, size_bytes: int, group: ProbeGroup) -> Buffers:
        """Return buffers in which all that is sent is this rank's value."""
        import torch

        count = size_bytes // ITEM_BYTES
        parts = count // group.size
        value = _value(group.own)
        return Buffers(
            send=torch.full((parts if self.sent_parts else count,), value, device=group.device),
            receive=torch.zeros(parts if self.received_parts else count, device=group.device),
        )

    def is_right(self, buffers: Buffers, group: ProbeGroup) -> bool:
        """Return whether this rank received what it should have, after one call on fresh buffers."""
        received = buffers.send if self.name in ("all_reduce", "broadcast") else buffers.receive
        places = received.tensor_split(group.size)
        return all(
            bool((part == self.expected(group.own, group.size, place)).all()) for place, part in enumerate(places)
        )


def _value(rank: int) -> float:
    return float(rank % _MAX_VALUE + 1)


def _sum_of_values(num_ranks: int) -> float:
    return sum(_value(rank) for rank in range(num_ranks))


def _broadcast(backend: Any, buffers: Buffers, own: int, size: int) -> list[Any]:
    options = c10d().BroadcastOptions()
    options.rootRank = 0
    return [backend.broadcast([buffers.send], options)]


def _send_recv(backend: Any, buffers: Buffers, own: int, size: int) -> list[Any]:
    # NCCL's send and receive wait for each other unless they are one batch.
    is_batch = backend.name() == "nccl"
    if is_batch:
        backend._start_coalescing()
    sent = backend.send([buffers.send], (own + 1) % size, 0)
    received = backend.recv([buffers.receive], (own - 1) % size, 0)
    return [backend._end_coalescing()] if is_batch else [sent, received]


OPERATIONS = (
    SweptOperation(
        name="all_reduce",
        issue=lambda backend, buffers, own, n: [backend.allreduce([buffers.send])],
        expected=lambda own, n, place: _sum_of_values(n),
    ),
    SweptOperation(
        name="all_gather",
        issue=lambda backend, buffers, own, n: [backend._allgather_base(buffers.receive, buffers.send)],
        expected=lambda own, n, place: _value(place),
        sent_parts=True,
    ),
    SweptOperation(
        name="reduce_scatter",
        issue=lambda backend, buffers, own, n: [backend._reduce_scatter_base(buffers.receive, buffers.send)],
        expected=lambda own, n, place: _sum_of_values(n),
        received_parts=True,
    ),
    SweptOperation(name="broadcast", issue=_broadcast, expected=lambda own, n, place: _value(0)),
    SweptOperation(
        name="all_to_all",
        issue=lambda backend, buffers, own, n: [backend.alltoall_base(buffers.receive, buffers.send, [], [])],
        expected=lambda own, n, place: _value(place),
    ),
    SweptOperation(
        name="send_recv",
        issue=_send_recv,
        expected=lambda own, n, place: _value((own - 1) % n),
    ),
)


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

    operation: SweptOperation
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

    def __init__(
        self, sizes_bytes: Sequence[int] = SIZES_BYTES, operations: Sequence[SweptOperation] = OPERATIONS
    ) -> None:
        self._sizes_bytes = tuple(sizes_bytes)
        self._operations = tuple(operations)
        self._measured: list[Cell] = []

    def measure(self, world: ProbeWorld, deadline: Deadline, record: ProbeRecord) -> ProbeRecord:
        """Measure; see `hpcpace.probe.world.Measurement`."""
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

    def _points(self, operation: SweptOperation, num_ranks: int) -> Iterable[Point]:
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
