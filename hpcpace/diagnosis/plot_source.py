"""The arrays behind the plots of the page, with its slowest step rank by rank, and bandwidths of operations.

A lane of a step is exact where it has few stretches; else it is cut into equal cells, so that its size does not grow
with the number of operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np

from hpcpace.core.errors import CannotTell
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_MS, NS_PER_S
from hpcpace.diagnosis.evidence import TimedTraces
from hpcpace.diagnosis.finding import Panels
from hpcpace.diagnosis.judged import JudgedRun
from hpcpace.diagnosis.measure import Measured, own_excess_ns
from hpcpace.diagnosis.plot_data import Bandwidth, CoreTimes, HostClock, Lane, Matrix, PlotData, SlowStep
from hpcpace.diagnosis.summary import Jitter
from hpcpace.diagnosis.within_steps import divide_operations
from hpcpace.metrics import Bools, Bytes, Floats, Ints
from hpcpace.metrics.common_clock import CommonClock
from hpcpace.metrics.communication import bus_factors, bytes_per_s
from hpcpace.metrics.links import GroupTransfers, TransferMatrix, leaf_matrix, node_matrix
from hpcpace.metrics.phase_cores import PARTS
from hpcpace.metrics.phases import Part, parts_of_steps, without_waits
from hpcpace.trace.schema import Op, StepFlag
from hpcpace.trace.tables import Table

MAX_RANKS, _MAX_LANE_CELLS = 16, 1600  # display: lanes of a step, and the cells of each


Stretch = tuple[Part, float, float]
"""Part, begin and end, in nanoseconds since the first of the ranks shown began the step."""
_MAX_HOSTS, _MAX_NODES = 64, 512  # display: of plots of clocks and of matrices
_MAX_CELLS = 6400  # display: of all lanes together, so that a browser draws them at once
_NS_PER_US = 1000  # format: units
_OF_PHASES = (
    "own_delay_ms",
    "phases",
    "parts_ms",
    "core_times",
    "bandwidths",
    "communication_share",
    "origins",
    "growth",
    "hotspots",
    "slow_step",
)


@dataclass(frozen=True, kw_only=True)
class StepDetail:
    """One step of a run, rank by rank.

    Attributes:
        step: its number.
        time_ns, median_ns: its time, and the median of the regular steps.
        work_ns, excess_ns: own work in the step, and what of it is beyond the others of the role, or the median of all
            where roles are unknown, float64, (num_ranks,).
        parts_ns, mean_ns: parts of the step, and of the mean regular step, float64, (num_ranks, num_parts).
        rows: the ranks that represent all, int64, (num_lanes,).
        lanes: the stretches of each of those, in order, (num_lanes,).
    """

    step: int
    time_ns: float
    median_ns: float
    work_ns: Floats
    excess_ns: Floats
    parts_ns: Floats
    mean_ns: Floats
    rows: Ints
    lanes: tuple[tuple[Stretch, ...], ...]


def step_detail(measured: Measured, panels: Panels, step: int | None = None) -> StepDetail:
    """Return a step of a run.

    Args:
        measured: what was measured.
        panels: its panels.
        step: its number; the representative one if None.

    Raises:
        CannotTell: it is none of the used steps.
    """
    if step is not None:
        columns = np.flatnonzero(measured.chosen.step == step)
        if not len(columns):
            used = measured.chosen.step
            raise CannotTell(f"step {step} is none of the {len(used)} used steps, {used[0]} to {used[-1]}")
        return _detail(measured, panels, int(columns[0]))
    regular = regular_steps(measured.chosen.flags)
    column = representative_step(panels.times_ns, _taken_apart(measured, regular))
    return _detail(measured, panels, column)


def slowest_step(measured: Measured, panels: Panels, *, named: Collection[int], most_cells: int) -> StepDetail:
    """Return the slowest regular step of a run, of those that are taken apart operation by operation.

    Args:
        measured: what was measured.
        panels: its panels.
        named: rows of ranks to show, of which at most half of `MAX_RANKS`.
        most_cells: of all lanes together, at least; see `lanes_of`.
    """
    apart = _taken_apart(measured, regular_steps(measured.chosen.flags))
    column = int(np.argmax(np.where(apart, panels.times_ns, -np.inf)))
    return _detail(measured, panels, column, named=named, most_cells=most_cells)


def _detail(
    measured: Measured, panels: Panels, column: int, *, named: Collection[int] = (), most_cells: int = 0
) -> StepDetail:
    regular = regular_steps(measured.chosen.flags)
    compared, work_ns = own_excess_ns(panels), panels.work_ns[:, column]
    excess_ns = compared[:, column] if compared is not None else work_ns - np.median(work_ns)
    rows = representative_ranks(excess_ns, panels.role, named=named)
    return StepDetail(
        step=int(measured.chosen.step[column]),
        time_ns=float(panels.times_ns[column]),
        median_ns=float(np.median(panels.times_ns[regular])),
        work_ns=work_ns,
        excess_ns=excess_ns,
        parts_ns=measured.parts[:, column],
        mean_ns=measured.parts[:, regular].mean(axis=1),
        rows=rows,
        lanes=lanes_of(measured, column, rows, max(most_cells // len(rows), 1) if most_cells else _MAX_LANE_CELLS),
    )


def _taken_apart(measured: Measured, regular: Bools) -> Bools:
    """Return which regular steps are taken apart, or all of them where none is, bool, (num_steps,)."""
    if measured.close_up is None:
        return regular
    some = regular & np.isin(measured.chosen.step, measured.close_up.steps.step)
    return some if some.any() else regular


def regular_steps(flags: Bytes) -> Bools:
    """Return which steps have neither checkpoint nor evaluation, or all where no step is without, (num_steps,).

    Args:
        flags: `hpcpace.trace.schema.StepFlag` of each step, (num_steps,).
    """
    regular = (flags & (StepFlag.CHECKPOINT | StepFlag.EVAL)) == 0
    return regular if regular.any() else np.ones(len(flags), np.bool_)


def representative_step(times_ns: Floats, regular: Bools) -> int:
    """Return the column of the regular step whose time is closest to their median; the first of equals.

    Args:
        times_ns: step times, at least one, (num_steps,).
        regular: which of them count, at least one, bool, (num_steps,).
    """
    distance = np.abs(times_ns - np.median(times_ns[regular]))
    return int(np.argmin(np.where(regular, distance, np.inf)))


def representative_ranks(excess_ns: Floats, role: Ints, *, named: Collection[int] = ()) -> Ints:
    """Return the rows that represent all ranks, ascending: all of at most `MAX_RANKS` ranks.

    Of more, the most typical rank of each role (of half as many roles as ranks fit), the one with the least excess,
    and those named or with the largest.

    Args:
        excess_ns: work beyond that of the role, (num_ranks,).
        role: index of each rank's role, (num_ranks,).
        named: rows to prefer to others with a large excess.
    """
    if len(excess_ns) <= MAX_RANKS:
        return np.arange(len(excess_ns))
    roles = np.unique(role)[: MAX_RANKS // 2]
    typical = [int(np.argmin(np.where(role == one, np.abs(excess_ns), np.inf))) for one in roles]
    order = [row for row in np.argsort(-excess_ns, kind="stable").tolist() if row not in typical]
    least = order[-1]
    order.sort(key=lambda row: row not in named)
    return np.array(
        sorted({*typical, least, *[row for row in order if row != least][: MAX_RANKS - len(typical) - 1]}), np.int64
    )


def lanes_of(
    measured: Measured, column: int, rows: Ints, most_cells: int = _MAX_LANE_CELLS
) -> tuple[tuple[Stretch, ...], ...]:
    """Return what ranks did during one step, stretch by stretch, (num_lanes,).

    Args:
        measured: what was measured.
        column: of the step among the used ones.
        rows: of the ranks, (num_lanes,).
        most_cells: of each lane; one with more edges gets so many equal cells, each of the part that takes most of it.
    """
    chosen, timed = measured.chosen, measured.timed
    length_ns = chosen.end_ns[rows, column] - chosen.begin_ns[rows, column]
    begin_ns, end_ns = measured.common.begin_ns[rows, column], measured.common.end_ns[rows, column]
    is_known = np.array([timed.ranks[row] not in timed.unknown_clocks for row in rows.tolist()])
    if is_known.any():
        # A rank whose clock is unknown has no place in common time: its step is shown as ending with the last one.
        begin_ns = np.where(is_known, begin_ns, end_ns[is_known].max() - length_ns)
    late_ns = (begin_ns - begin_ns.min()).tolist()
    return tuple(
        _lane(measured, column, row, late, most_cells) for row, late in zip(rows.tolist(), late_ns, strict=True)
    )


def _lane(measured: Measured, column: int, row: int, late_ns: int, most_cells: int) -> tuple[Stretch, ...]:
    begin_ns, end_ns = (int(times[row, column]) for times in (measured.chosen.begin_ns, measured.chosen.end_ns))
    phases, table = measured.timed.traces[row].tables["phases"], _operations_of(measured, row)
    near = (phases["end_ns"] > begin_ns) & (phases["begin_ns"] < end_ns)
    met = (table["exit_ns"] > begin_ns) & (table["enter_ns"] < end_ns)
    spans = (phases["phase"][near], phases["begin_ns"][near], phases["end_ns"][near])
    wait_ns = table["wait_ns"][met]
    operations = (table["enter_ns"][met], table["exit_ns"][met], table["blocked_ns"][met], wait_ns)
    enter_ns, exit_ns, blocked_ns, _ = operations
    edges_ns = np.concatenate([*spans[1:], enter_ns, exit_ns, exit_ns - blocked_ns, enter_ns + wait_ns])
    edges_ns = np.unique(np.clip(np.append(edges_ns, [begin_ns, end_ns]), begin_ns, end_ns))
    if len(edges_ns) > most_cells + 1:
        edges_ns = np.rint(np.linspace(0, end_ns - begin_ns, most_cells + 1)).astype(np.int64) + begin_ns
    # Each cell is treated as a step, so that the rules of the parts stay in one place.
    part = parts_of_steps((edges_ns[:-1], edges_ns[1:]), spans, operations).argmax(axis=1)
    starts = np.flatnonzero(np.diff(part, prepend=-1))
    bounds = (edges_ns[np.append(starts, len(part))] - begin_ns + late_ns).astype(np.float64).tolist()
    return tuple(zip(map(Part, part[starts].tolist()), bounds[:-1], bounds[1:], strict=True))


def _operations_of(measured: Measured, row: int) -> Table:
    """Return the operations of a rank in the steps that are taken apart, with their waits."""
    close_up = measured.close_up
    if close_up is None:
        return Table(dict.fromkeys(("enter_ns", "exit_ns", "blocked_ns", "wait_ns"), np.zeros(0, np.int64)))
    return divide_operations(close_up.evidence, row)


def plot_data(run: JudgedRun, jitter: Jitter | None) -> PlotData:
    """Return what the plots of a page show, but for those of the network.

    Args:
        run: the run.
        jitter: its figures; None where they are not known.
    """
    measured, panels = run.measured, run.panels
    headers = [trace.header for trace in measured.timed.traces]
    excess_ns = own_excess_ns(panels)
    places, groups = measured.places, measured.operations.transfers
    transfer_ns = panels.transfer_ns.mean(axis=0)
    reasons = {}
    if panels.host_timed:
        reasons = dict.fromkeys(_OF_PHASES, measured.unknown)
    elif excess_ns is None:
        reasons["own_delay_ms"] = "no two ranks are known to do the same work"
    if not measured.are_waits_known:
        reasons.setdefault("communication_share", "operations have no counterpart, so that transfers are not known")
    growth = jitter.growth if jitter is not None else None
    few = 2 <= places.num_nodes <= _MAX_NODES
    return PlotData(
        step=measured.chosen.step,
        step_ms=panels.times_ns / NS_PER_MS,
        parts_ms=None if panels.host_timed else _mean_parts_ms(measured),
        own_delay_ms=excess_ns / NS_PER_MS if excess_ns is not None else None,
        rank_labels=tuple(f"{header.rank} {header.host}" for header in headers) if excess_ns is not None else (),
        delay_remark=_delay_remark(panels),
        communication_share=None
        if panels.host_timed or not measured.are_waits_known
        else transfer_ns / np.maximum(panels.work_ns.mean(axis=0) + transfer_ns, 1.0),
        slow_step=None if panels.host_timed else _slow_step(measured, panels, run.diagnosis.late_ranks),
        core_times=None if panels.host_timed else _core_times(panels),
        bandwidths=() if panels.host_timed else bandwidths(measured),
        growth=growth if growth is not None and growth.low and growth.null else None,
        leaf_matrix=_matrix(leaf_matrix(groups, places)) if places.num_leaves > 1 else None,
        node_matrix=_matrix(node_matrix(groups, places)) if few else None,
        clocks=_clocks(measured.timed),
        versions=run.records.run.versions,
        reasons=reasons,
    )


def _mean_parts_ms(measured: Measured) -> dict[str, Floats | None]:
    parts = measured.parts.mean(axis=0) / NS_PER_MS
    if not measured.are_waits_known:
        parts = without_waits(parts)
    return {part.name.lower(): None if np.isnan(parts[:, part]).all() else parts[:, part] for part in Part}


def _core_times(panels: Panels) -> CoreTimes | None:
    """Return how ranks spend their own work; None where that is known of no rank."""
    work = panels.cores.work if panels.cores is not None else None
    if work is None or not work.is_any_known.any():
        return None
    return CoreTimes(
        ranks=tuple(panels.rank.tolist()),
        hosts=panels.host,
        phases=tuple(part.name.lower() for part in PARTS),
        running_ms=work.running_ns / NS_PER_MS,
        queued_ms=work.queued_ns / NS_PER_MS,
        idle_ms=work.idle_ns / NS_PER_MS,
        unknown_ms=np.where(work.is_part_known, 0.0, work.own_ns) / NS_PER_MS,
    )


def _slow_step(measured: Measured, panels: Panels, late: Collection[int]) -> SlowStep:
    timed = measured.timed
    named = [row for row, rank in enumerate(timed.ranks) if rank in late]
    detail = slowest_step(measured, panels, named=named, most_cells=_MAX_CELLS)
    regular = regular_steps(measured.chosen.flags)
    slowest = int(np.argmax(np.where(regular, panels.times_ns, -np.inf)))
    lanes = []
    for row, stretches in zip(detail.rows.tolist(), detail.lanes, strict=True):
        part, begin_ns, end_ns = zip(*stretches, strict=True)
        lanes.append(
            Lane(
                rank=timed.ranks[row],
                host=timed.traces[row].header.host,
                part=tuple(one.name.lower() for one in part),
                begin_ms=np.array(begin_ns) / NS_PER_MS,
                end_ms=np.array(end_ns) / NS_PER_MS,
                are_waits_known=timed.ranks[row] not in measured.unknown_waits,
            )
        )
    return SlowStep(
        step=detail.step,
        time_ms=detail.time_ns / NS_PER_MS,
        median_ms=detail.median_ns / NS_PER_MS,
        slowest=int(measured.chosen.step[slowest]),
        slowest_ms=float(panels.times_ns[slowest]) / NS_PER_MS,
        num_ranks=len(timed.ranks),
        lanes=tuple(lanes),
    )


def _delay_remark(panels: Panels) -> str:
    """Return which rows of own delay are blank, and why; empty where none is."""
    sizes = np.unique(panels.role, return_counts=True)[1]
    of_pairs = "Of two ranks of a role both are compared with the faster one, so that its own row is blank."
    alone = "A rank alone in its role is compared with nobody, and its row is blank."
    return " ".join([of_pairs] * bool((sizes == 2).any()) + [alone] * bool((sizes == 1).any()))


def _matrix(found: TransferMatrix | None) -> Matrix | None:
    return Matrix(labels=found.labels, ratio=found.relative) if found is not None else None


def _clocks(timed: TimedTraces) -> tuple[HostClock, ...] | None:
    """Return the samples of one rank of each host, but for the host of the reference."""
    of_node: dict[int, tuple[str, CommonClock]] = {}
    for trace, clock in zip(timed.traces, timed.clocks, strict=True):
        if clock.num_samples and not clock.is_reference:
            of_node.setdefault(trace.header.node, (trace.header.host, clock))
    return tuple(_host_clock(*found) for found in list(of_node.values())[:_MAX_HOSTS]) or None


def _host_clock(host: str, clock: CommonClock) -> HostClock:
    time_s: Floats = (clock.local_ns - clock.local_ns[0]) / NS_PER_S
    residual_us, allowed_us = np.full((2, clock.num_samples), np.nan)
    inner = clock.residuals_ns()
    residual_us[1 : 1 + len(inner)] = inner / _NS_PER_US
    allowed_us[1 : 1 + len(inner)] = clock.residual_bounds_ns() / _NS_PER_US
    return HostClock(
        host=host,
        time_s=time_s,
        halfwidth_us=clock.halfwidth_ns / _NS_PER_US,
        residual_us=residual_us,
        allowed_us=allowed_us,
    )


_MAX_KINDS = 64  # display: rows of the table
_QUANTILES = (0.05, 0.5, 0.95)  # statistics: most steps, without their extremes


def clock_errors_ns(measured: Measured) -> Floats:
    """Return the error of each rank's times by which transfers between hosts are judged, float64, (num_ranks,).

    That is the half-width of its clock, and infinite where that clock may be wrong.
    """
    clocks = measured.clocks
    wrong = {suspect.node for suspect in clocks.suspects}
    are_all = clocks.num_suspects > len(wrong)
    nodes = (trace.header.node for trace in measured.timed.traces)
    return np.where([are_all or node in wrong for node in nodes], np.inf, measured.halfwidth_ns)


def bandwidths(measured: Measured) -> tuple[Bandwidth, ...]:
    """Return what operations achieve, by kind, number of ranks and size; of very many, those that take longest.

    Transfers within the error of two clocks are left out, as everywhere.
    """
    found = defaultdict[tuple[str, int, int], list[Floats]](list)
    errors_ns = dict(zip(measured.timed.ranks, clock_errors_ns(measured).tolist(), strict=True))
    nodes = {trace.header.rank: trace.header.node for trace in measured.timed.traces}
    for group in measured.operations.transfers:
        if len(group.members) > 1 and group.size_bytes > 0:
            sound_ns = _beyond_error(group, errors_ns, nodes)
            if len(sound_ns):
                found[group.op, len(group.members), group.size_bytes].append(sound_ns)
    longest = sorted(found.items(), key=lambda item: -sum(float(part.sum()) for part in item[1]))[:_MAX_KINDS]
    return tuple(_bandwidth(*kind, np.concatenate(parts)) for kind, parts in sorted(longest, key=lambda item: item[0]))


def _beyond_error(group: GroupTransfers, errors_ns: dict[int, float], nodes: dict[int, int]) -> Floats:
    """Return the transfers of a group that are longer than their error, float64, (num_known,)."""
    members = [rank for rank in group.members if rank in nodes]
    is_one_host = len({nodes[rank] for rank in members}) == 1
    error_ns = 0.0 if is_one_host else 2 * max((errors_ns[rank] for rank in members), default=np.inf)
    return group.transfer_ns[group.transfer_ns > error_ns]


def _bandwidth(op: str, group_size: int, size_bytes: int, transfer_ns: Floats) -> Bandwidth:
    rates = bytes_per_s(np.full(len(transfer_ns), size_bytes), transfer_ns)
    low, median, high = np.quantile(rates, _QUANTILES).tolist()
    code = Op.__members__.get(op.upper())
    factor = np.nan if code is None else float(bus_factors(np.array([code], np.uint8), np.array([group_size]))[0])
    return Bandwidth(
        op=op,
        group_size=group_size,
        size_bytes=size_bytes,
        low=low,
        median=median,
        high=high,
        bus_factor=factor if np.isfinite(factor) else None,
    )
