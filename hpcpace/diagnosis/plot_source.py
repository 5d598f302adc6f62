"""The arrays behind the plots of the page, taken from what was examined."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.diagnose import Panels
from hpcpace.diagnosis.evidence import TimedTraces
from hpcpace.diagnosis.figures.step_timeline import regular_steps, slowest_step
from hpcpace.diagnosis.measure import Measured, own_excess_ns
from hpcpace.diagnosis.plot_data import Growth, HostClock, HotspotRow, Lane, Matrix, PlotData, SlowStep
from hpcpace.metrics.clocks.common_clock import CommonClock
from hpcpace.metrics.jitter.growth import GrowthCurve
from hpcpace.metrics.lateness.hotspots import Hotspot
from hpcpace.metrics.network.transfer_matrix import TransferMatrix, leaf_matrix, node_matrix
from hpcpace.units import NS_PER_MS, NS_PER_S

_MOST_HOSTS = 64
_MOST_NODES = 512
_MOST_CELLS = 6400
"""Of all lanes together, so that a browser draws them at once."""
_OF_PHASES = ("own_delay_ms", "phases", "communication_share", "origins", "growth", "hotspots", "slow_step")


def plot_data(
    measured: Measured,
    panels: Panels,
    *,
    curve: GrowthCurve | None,
    is_node_unit: bool,
    hotspots: Sequence[Hotspot],
    versions: tuple[tuple[str, str], ...],
    late: Collection[int] = (),
) -> PlotData:
    """Return what the plots of a page show.

    Args:
        measured, panels: the run.
        curve, is_node_unit, hotspots, versions: what else is drawn or listed.
        late: ranks that the verdict names, which lanes have before others.
    """
    headers = [trace.header for trace in measured.timed.traces]
    excess_ns = own_excess_ns(panels)
    places, groups = measured.places, measured.groups
    transfer_ns = panels.transfer_ns.mean(axis=0)
    reasons = {}
    if panels.host_timed:
        reasons = dict.fromkeys(_OF_PHASES, measured.unknown)
    elif excess_ns is None:
        reasons["own_delay_ms"] = "no two ranks are known to do the same work"
    if not measured.are_waits_known:
        reasons.setdefault("communication_share", "operations have no counterpart, so that transfers are not known")
    few = 2 <= places.num_nodes <= _MOST_NODES
    return PlotData(
        step=measured.chosen.step,
        step_ms=panels.times_ns / NS_PER_MS,
        own_delay_ms=excess_ns / NS_PER_MS if excess_ns is not None else None,
        rank_labels=tuple(f"{header.rank} {header.host}" for header in headers) if excess_ns is not None else (),
        delay_remark=_delay_remark(panels),
        communication_share=None
        if panels.host_timed or not measured.are_waits_known
        else transfer_ns / np.maximum(panels.work_ns.mean(axis=0) + transfer_ns, 1.0),
        slow_step=None if panels.host_timed else _slow_step(measured, panels, late),
        growth=_growth(curve, is_node_unit=is_node_unit),
        leaf_matrix=_matrix(leaf_matrix(groups, places)) if places.num_leaves > 1 else None,
        node_matrix=_matrix(node_matrix(groups, places)) if few else None,
        hotspots=tuple(_row(spot) for spot in hotspots),
        clocks=_clocks(measured.timed),
        versions=versions,
        reasons=reasons,
    )


def _slow_step(measured: Measured, panels: Panels, late: Collection[int]) -> SlowStep:
    timed = measured.timed
    named = [row for row, rank in enumerate(timed.ranks) if rank in late]
    detail = slowest_step(measured, panels, named=named, most_cells=_MOST_CELLS)
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


def _growth(curve: GrowthCurve | None, *, is_node_unit: bool) -> Growth | None:
    if curve is None or curve.low is None or curve.high is None or curve.null is None:
        return None
    return Growth(
        k=curve.k,
        unit="node" if is_node_unit else "rank",
        measured=curve.amplification,
        low=curve.low,
        high=curve.high,
        null=curve.null,
        null_low=curve.null,
        null_high=curve.null,
    )


def _matrix(found: TransferMatrix | None) -> Matrix | None:
    return Matrix(labels=found.labels, ratio=found.relative) if found is not None else None


def _row(spot: Hotspot) -> HotspotRow:
    low, high = spot.interval_ns
    return HotspotRow(
        kind=spot.kind,
        name=spot.id,
        effect_ms=spot.effect_ns / NS_PER_MS,
        low_ms=low / NS_PER_MS,
        high_ms=high / NS_PER_MS,
        loss_share=spot.loss_share,
        aliases=tuple(alias for alias in spot.aliases if alias != f"{spot.kind} {spot.id}"),
    )


def _clocks(timed: TimedTraces) -> tuple[HostClock, ...] | None:
    """Return the samples of one rank of each host, but for the host of the reference."""
    found, seen = [], set()
    for trace, clock in zip(timed.traces, timed.clocks, strict=True):
        if trace.header.node in seen or clock.is_reference or not clock.num_samples:
            continue
        seen.add(trace.header.node)
        found.append(_host_clock(trace.header.host, clock))
        if len(found) == _MOST_HOSTS:
            break
    return tuple(found) or None


def _host_clock(host: str, clock: CommonClock) -> HostClock:
    time_s: NDArray[np.float64] = (clock.local_ns - clock.local_ns[0]) / NS_PER_S
    residual_us, allowed_us = np.full((2, clock.num_samples), np.nan)
    inner = clock.residuals_ns()
    residual_us[1 : 1 + len(inner)] = inner / 1000
    allowed_us[1 : 1 + len(inner)] = clock.residual_bounds_ns() / 1000
    return HostClock(
        host=host,
        time_s=time_s,
        halfwidth_us=clock.halfwidth_ns / 1000,
        residual_us=residual_us,
        allowed_us=allowed_us,
    )
