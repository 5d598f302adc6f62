"""From what a sweep measured to its record: quantiles and rates of each point, laws, and each rank's own skew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpcpace.probe.laws import fit_law
from hpcpace.probe.limits import bus_limit
from hpcpace.probe.operations import Operation
from hpcpace.probe.record import LatencyLaw, ProbedHost, RankSkew, SweepRow
from hpcpace.units import NS_PER_S


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
    rounds_ns: list[NDArray[np.float64]] = field(default_factory=list)


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
