"""Ranks, roles and places: parts of the step, excess over the role, slow places, cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.config import DiagnosisConfig
from hpcpace.core.hostlist import exclusion
from hpcpace.diagnosis.finding import Panels
from hpcpace.diagnosis.judged import JudgedRun, hotspots_of
from hpcpace.diagnosis.measure import Measured, own_excess_ns
from hpcpace.diagnosis.sentences import suspect_line
from hpcpace.diagnosis.summary import RankRow, RoleRow
from hpcpace.diagnosis.topics.straggler import StragglerThresholds, search_stragglers, work_excess
from hpcpace.metrics.hotspots import Hotspot
from hpcpace.metrics.links import LinkCulprit, TransferMatrix, leaf_matrix, locate_links, node_matrix
from hpcpace.metrics.phases import BUSY, EXPOSED_TRANSFER, EXPOSED_WAIT, Part
from hpcpace.metrics.roles import WorkExcess
from hpcpace.metrics.topology import Topology
from hpcpace.trace.reader import RankTrace

_MAX_NODES = 512  # display: of a matrix of nodes


def rank_rows(run: JudgedRun) -> tuple[RankRow, ...]:
    """Return a row per rank; only the excess of ranks that the verdict names as late is marked."""
    measured, excess, totals = run.measured, run.excess, run.measured.operations.totals
    mean, num_steps = measured.parts.mean(axis=1), measured.parts.shape[1]
    found = []
    for index, trace in enumerate(measured.timed.traces):
        rank = trace.header.rank
        own, is_late = excess.of_rank(index) if excess is not None else None, rank in run.diagnosis.late_ranks
        is_known = rank not in measured.unknown_waits
        found.append(
            RankRow(
                rank=rank,
                host=trace.header.host,
                role=_role(trace),
                step_ns=float(mean[index].sum()),
                **_parts(mean[index], {rank}, measured),
                excess=replace(own, is_marked=is_late) if own is not None else None,
                num_operations=float(totals.num_operations[index] / num_steps),
                size_bytes=float(totals.size_bytes[index] / num_steps),
                wait_ns=float(totals.wait_ns[index] / num_steps) if is_known else None,
                transfer_ns=float(totals.transfer_ns[index] / num_steps) if is_known else None,
            )
        )
    return tuple(found)


def role_rows(run: JudgedRun) -> tuple[RoleRow, ...]:
    """Return a row per role."""
    measured, mean = run.measured, run.measured.parts.mean(axis=1)
    members: dict[str, list[int]] = {}
    for index, trace in enumerate(measured.timed.traces):
        members.setdefault(_role(trace), []).append(index)
    found = []
    for role, indices in members.items():
        mean_ns = mean[indices].mean(axis=0)
        ranks = tuple(measured.timed.ranks[index] for index in indices)
        known = _parts(mean_ns, set(ranks), measured)
        found.append(RoleRow(role=role, ranks=ranks, step_ns=float(mean_ns.sum()), **known))
    return tuple(found)


def _role(trace: RankTrace) -> str:
    slots = [f"{name}{value}" for name, value in (("pp", trace.header.pp), ("tp", trace.header.tp)) if value >= 0]
    return " ".join(slots) or "all"


class _Parts(TypedDict):
    parts_ns: dict[str, float | None] | None
    shares: dict[str, float | None] | None
    busy_share: float | None


def _parts(mean_ns: NDArray[np.float64], ranks: set[int], measured: Measured) -> _Parts:
    if not ranks.isdisjoint(measured.host_timed):
        return {"parts_ns": None, "shares": None, "busy_share": None}
    shares = mean_ns / max(float(mean_ns.sum()), 1.0)
    busy = float(shares[list(BUSY)].sum())
    if not ranks.isdisjoint(measured.unknown_waits):
        return {"parts_ns": _without_waits(mean_ns), "shares": _without_waits(shares), "busy_share": busy}
    return {"parts_ns": {**_named(mean_ns)}, "shares": {**_named(shares)}, "busy_share": busy}


def _without_waits(values: NDArray[np.float64]) -> dict[str, float | None]:
    """Return the parts with the waits that are known, of some operations only, in the transfers."""
    moved = values.copy()
    moved[list(EXPOSED_TRANSFER)] += values[list(EXPOSED_WAIT)]
    return {**_named(moved), **dict.fromkeys([part.name.lower() for part in EXPOSED_WAIT])}


def _named(values: NDArray[np.float64]) -> dict[str, float]:
    return {part.name.lower(): float(values[part]) for part in Part}


@dataclass(frozen=True, kw_only=True)
class HotspotFigures:
    """The hotspots of a run.

    Attributes:
        spots: slow ranks, nodes and leaves, by what they add to their own work; the largest effect first.
        links: slow links, by what they add to the transfers that pass them; the largest effect first.
        excess: mean excess of the own work of each of `spots` over the roles, with its 95 % interval.
        link_ends: both ends of each link, by its id.
        matrices: transfers between nodes (of at most 512) and between leaf switches, where there are two or more.
        is_compared: whether any two ranks are known to do the same work.
        exclude: the line that keeps the slow nodes out of the next job; empty without any, or where that is all.
        reasons: why nothing is named, or what cannot be distinguished, as sentences.
    """

    spots: tuple[Hotspot, ...]
    links: tuple[LinkCulprit, ...]
    excess: tuple[tuple[float, tuple[float, float]], ...]
    link_ends: Mapping[str, str]
    matrices: tuple[tuple[str, TransferMatrix], ...]
    is_compared: bool
    exclude: str
    reasons: tuple[str, ...]


def hotspot_figures(measured: Measured, panels: Panels, settings: DiagnosisConfig | None = None) -> HotspotFigures:
    """Return where a run is held up.

    Args:
        measured: what was measured.
        panels: its panels.
        settings: the thresholds of the diagnosis.
    """
    settings, places, groups = settings or DiagnosisConfig(), measured.places, measured.groups
    wrong = suspect_line(measured.clocks)
    # What a wrong clock makes of transfers would blame the innocent.
    found = locate_links([] if wrong else groups, places, floor_share=settings.link_share, level=settings.level)
    spots, work_ns = hotspots_of(measured, panels), max(float(panels.work_ns.mean()), 1.0)
    is_compared = own_excess_ns(panels) is not None
    excess = work_excess(panels, search_stragglers(panels, settings, StragglerThresholds()).slow)
    matrices = [("node", node_matrix(groups, places))] if 2 <= places.num_nodes <= _MAX_NODES else []
    matrices += [("leaf switch", leaf_matrix(groups, places))] if places.num_leaves > 1 else []
    reasons = []
    if not is_compared:
        reasons.append("no two ranks are known to do the same work: places are not compared")
    elif not spots:
        reasons.append("no rank, node or leaf is slower than its peers beyond noise")
    if wrong:
        reasons.append(f"{wrong}; links are not judged")
    elif found.reason or not found.culprits:
        reasons.append(found.reason or "no link is slower than its peers")
    return HotspotFigures(
        spots=spots,
        links=found.culprits,
        excess=tuple(place_excess(excess, places, spot) for spot in spots),
        link_ends=places.link_ends,
        matrices=tuple(matrices),
        is_compared=is_compared,
        exclude=_exclude(spots, found.culprits, places, settings.straggler_share * work_ns),
        reasons=tuple(reasons),
    )


def place_excess(excess: WorkExcess, places: Topology, spot: Hotspot) -> tuple[float, tuple[float, float]]:
    """Return the mean excess of a place's ranks over their roles, with its 95 % interval; `excess` by `work_excess`."""
    return excess.of(places.rows_of(spot.kind, spot.id).tolist()) or (0.0, (0.0, 0.0))


def _exclude(spots: Sequence[Hotspot], links: Sequence[LinkCulprit], places: Topology, floor_ns: float) -> str:
    """Return the line against slow nodes, and those of slow ranks and of host links, with an effect that counts."""
    of_host = dict(zip(places.node_names, places.slurm_names, strict=True))
    of_rank = {str(rank): places.slurm_names[node] for rank, node in zip(places.ranks, places.node, strict=True)}
    names = {"node": of_host, "rank": of_rank}
    faulty = {names[spot.kind][spot.id] for spot in spots if spot.kind in names and spot.effect_ns >= floor_ns}
    faulty |= {of_host[link.ids[0]] for link in links if len(link.ids) == 1 and link.ids[0] in of_host}
    return exclusion(faulty, places.slurm_names)
