"""Which places and links hold a run up, with intervals, and the nodes to leave out of the next job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcpace.core.hostlist import exclusion
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_MS
from hpcpace.core.thresholds import ThresholdValues
from hpcpace.diagnosis.figures.overview import place_excess
from hpcpace.diagnosis.finding import Panels
from hpcpace.diagnosis.incomplete import suspect_line
from hpcpace.diagnosis.judged import hotspots_of
from hpcpace.diagnosis.measure import Measured, own_excess_ns
from hpcpace.diagnosis.settings import DiagnosisConfig
from hpcpace.diagnosis.topics.straggler import search_stragglers, work_excess
from hpcpace.metrics.hotspots import Hotspot
from hpcpace.metrics.links import LinkCulprit, TransferMatrix, leaf_matrix, locate_links, node_matrix
from hpcpace.metrics.roles import ExcessThresholds
from hpcpace.metrics.topology import Topology

COLUMNS = (
    *("run", "position", "kind", "id", "effect_ms", "effect_low_ms", "effect_high_ms", "effect_share"),
    *("effect_low_share", "effect_high_share", "loss_share", "p_value", "link_ends", "aliases", "exclude"),
)
Row = dict[str, Any]
"""A value for each of `COLUMNS`."""
_MAX_NODES = 512  # display: of a matrix of transfers


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
    settings, places, groups = settings or DiagnosisConfig(), measured.places, measured.operations.transfers
    wrong = suspect_line(measured.clocks)
    # What a wrong clock makes of transfers would blame the innocent.
    found = locate_links([] if wrong else groups, places, floor_share=settings.link_share, level=settings.level)
    spots, work_ns = hotspots_of(measured, panels), max(float(panels.work_ns.mean()), 1.0)
    is_compared = own_excess_ns(panels) is not None
    excess = work_excess(panels, search_stragglers(panels, settings, ThresholdValues()).slow, ExcessThresholds())
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
        exclude=exclude_line(spots, found.culprits, places, settings.straggler_share * work_ns),
        reasons=tuple(reasons),
    )


def exclude_line(spots: Sequence[Hotspot], links: Sequence[LinkCulprit], places: Topology, floor_ns: float) -> str:
    """Return the line against slow nodes, and those of slow ranks and of host links, with an effect that counts."""
    of_host = dict(zip(places.node_names, places.slurm_names, strict=True))
    of_rank = {str(rank): places.slurm_names[node] for rank, node in zip(places.ranks, places.node, strict=True)}
    names = {"node": of_host, "rank": of_rank}
    faulty = {names[spot.kind][spot.id] for spot in spots if spot.kind in names and spot.effect_ns >= floor_ns}
    faulty |= {of_host[link.ids[0]] for link in links if len(link.ids) == 1 and link.ids[0] in of_host}
    return exclusion(faulty, places.slurm_names)


def rows_of(run: str, figures: HotspotFigures) -> list[Row]:
    """Return a row per hotspot: ranks, nodes and leaves first, then links, each by their effect."""
    rows = list[tuple[Any, ...]]()
    for spot, (share, interval) in zip(figures.spots, figures.excess, strict=True):
        effects_ns = np.array([spot.effect_ns, *spot.interval_ns])
        values = [*(effects_ns / NS_PER_MS).tolist(), share, *interval]
        rows.append((spot.kind, spot.id, *values, spot.loss_share, spot.p_value, None, "; ".join(spot.aliases)))
    for link in figures.links:
        values = [None, None, None, link.effect.value, *link.effect.interval]
        ends = "; ".join(figures.link_ends[name] for name in link.ids)
        rows.append(("link", " or ".join(link.ids), *values, None, link.p_value, ends, "; ".join(link.aliases)))
    whole = [(run, position, *row, figures.exclude) for position, row in enumerate(rows, start=1)]
    return [dict(zip(COLUMNS, row, strict=True)) for row in whole]
