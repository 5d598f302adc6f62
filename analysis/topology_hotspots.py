"""Which ranks, nodes, leaf switches and links hold a run up: ranked, with intervals, and the nodes to leave out.

`python analysis/topology_hotspots.py RUN... [--out DIR]`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpace.core.config import DiagnosisConfig
from hpcpace.core.hostlist import exclusion
from hpcpace.core.text import NS_PER_MS, alias_name, format_duration, percent, place_name, printable
from hpcpace.diagnosis.figures.overview import place_excess
from hpcpace.diagnosis.finding import Panels
from hpcpace.diagnosis.incomplete import suspect_line
from hpcpace.diagnosis.judged import hotspots_of
from hpcpace.diagnosis.measure import Measured, own_excess_ns
from hpcpace.diagnosis.topics.straggler import StragglerThresholds, search_stragglers, work_excess
from hpcpace.metrics.hotspots import Hotspot
from hpcpace.metrics.links import LinkCulprit, TransferMatrix, leaf_matrix, locate_links, node_matrix
from hpcpace.metrics.topology import Topology
from hpcpace.plots import charts as plots
from hpcpace.plots import files
from hpcpace.report.terminal import note, table, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "topology_hotspots"
COLUMNS = (
    *("run", "position", "kind", "id", "effect_ms", "effect_low_ms", "effect_high_ms", "effect_share"),
    *("effect_low_share", "effect_high_share", "loss_share", "p_value", "link_ends", "aliases", "exclude"),
)
COLORS = {"rank": plots.BLUE, "node": plots.VERMILION, "leaf": plots.GREEN, "link": plots.PURPLE}
MAX_NODES = 512
MAX_BARS, MAX_ALIASES = 12, 4
ENDS = ("", "_low", "_high")
Row = dict[str, Any]


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
    excess = work_excess(panels, search_stragglers(panels, settings, StragglerThresholds()).slow)
    matrices = [("node", node_matrix(groups, places))] if 2 <= places.num_nodes <= MAX_NODES else []
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


@dataclass(frozen=True, kw_only=True)
class Found:
    """The hotspots of one run."""

    run: str
    figures: HotspotFigures
    remarks: tuple[str, ...]


def rows_of(found: Found) -> list[Row]:
    """Return a row per hotspot: ranks, nodes and leaves first, then links, each by their effect."""
    figures, rows = found.figures, []
    for spot, (share, interval) in zip(figures.spots, figures.excess, strict=True):
        effects_ns = np.array([spot.effect_ns, *spot.interval_ns])
        values = [*(effects_ns / NS_PER_MS).tolist(), share, *interval]
        rows.append((spot.kind, spot.id, *values, spot.loss_share, spot.p_value, None, "; ".join(spot.aliases)))
    for link in figures.links:
        values = [None, None, None, link.effect.value, *link.effect.interval]
        ends = "; ".join(figures.link_ends[name] for name in link.ids)
        rows.append(("link", " or ".join(link.ids), *values, None, link.p_value, ends, "; ".join(link.aliases)))
    whole = [(found.run, position, *row, figures.exclude) for position, row in enumerate(rows, start=1)]
    return [dict(zip(COLUMNS, row, strict=True)) for row in whole]


def print_table(results: Sequence[Found], rows: Sequence[Row]) -> None:
    console = files.console_for_tables()
    title(console, "Topology hotspots", "own work of ranks, nodes and leaves; transfers that pass a link")
    head = ["place", "adds\na step", "excess\n(95 %)", "of\nlateness", "could also be"]
    shown = files.rows_from_the_top(table("run", head), left=(1, 5))
    for row in rows:
        named = {f"{row['kind']} {one}" for one in row["id"].split(" or ")}
        others = [alias_name(alias) for alias in row["aliases"].split("; ") if alias not in named]
        many = [f"{len(others) - MAX_ALIASES} more"] * (len(others) > MAX_ALIASES)
        shown.add_row(
            *(printable(row["run"]), place_of(row)),
            "" if row["effect_ms"] is None else format_duration(row["effect_ms"] * NS_PER_MS),
            "{}\n{} to {}".format(*(percent(row[f"effect{end}_share"]) for end in ENDS)),
            "" if row["loss_share"] is None else percent(row["loss_share"]),
            ", ".join([*others[:MAX_ALIASES], *many]),
        )
    if rows:
        console.print(shown)
    for found in results:
        exclude = [found.figures.exclude] if found.figures.exclude else []
        for text in (*found.figures.reasons, *found.remarks, *exclude):
            note(console, f"{found.run}: {text}")


def place_of(row: Row) -> str:
    """Return a place in the field's words; a link by both of its ends, and links that nothing tells apart together."""
    if row["kind"] != "link":
        return place_name(row["kind"], row["id"])
    ends = [printable(one) for one in row["link_ends"].split("; ")]
    return f"link {ends[0]}" if len(ends) == 1 else "\n".join(["one of the links", *ends])


def draw(results: Sequence[Found]) -> Figure:
    figure = plots.new_figure(11.5, 4.2 * len(results))
    width = 1 + max(len(found.figures.matrices) for found in results)
    for found, part in zip(results, figure.subfigures(len(results), 1, squeeze=False)[:, 0], strict=True):
        part.suptitle(plots.plot_label(found.run), x=0.01, ha="left", fontsize=11, fontweight="bold")
        grid, matrices = part.add_gridspec(1, width), found.figures.matrices
        for column, (unit, matrix) in enumerate(matrices):
            axes = part.add_subplot(grid[0, column])
            plots.draw_matrix(part, axes, matrix.labels, matrix.relative)
            axes.set_title(f"transfer, {unit} by {unit}", fontsize=9)
        of_places, of_links = ([row for row in rows_of(found) if (row["kind"] == "link") == of] for of in (False, True))
        bars = [("own work beyond its peers\n(ms a step)", of_places)] * bool(of_places or not of_links)
        bars += [("transfers beyond their like\n(%)", of_links)] * bool(of_links)
        below = grid[0, len(matrices) :].subgridspec(len(bars), 1)
        for index, (label, rows) in enumerate(bars):
            empty = "none beyond noise" if found.figures.is_compared else "nothing to compare"
            draw_bars(part.add_subplot(below[index, 0]), rows[:MAX_BARS], label, empty)
    return figure


def draw_bars(axes: Axes, rows: Sequence[Row], label: str, empty: str) -> None:
    ends = [
        [100 * row[f"effect{end}_share"] if row["kind"] == "link" else row[f"effect{end}_ms"] for end in ENDS]
        for row in rows
    ]
    bars = np.array(ends, np.float64).reshape(-1, len(ENDS))
    names, colors = [place_of(row).replace("\n", " ") for row in rows], [COLORS[row["kind"]] for row in rows]
    plots.draw_bars(axes, names, bars[:, 0], bars[:, 1:], colors, label, empty=empty)
    axes.set_title("hotspots, with 95 % intervals", fontsize=9)


@files.figure_command
@files.topology_option
def command(runs: tuple[Path, ...], out: Path, topology: Path | None) -> None:
    """Rank the places and links that hold each RUN up: a table, the matrices of transfers, and the hotspots."""
    examined = files.examined(runs, topology)
    results = [
        Found(run=run.name, figures=hotspot_figures(run.measured, run.panels), remarks=run.remarks) for run in examined
    ]
    rows = [row for found in results for row in rows_of(found)]
    values = [tuple(row.values()) for row in rows]
    written = files.write_files(out, NAME, columns=COLUMNS, rows=values, figure=draw(results), read=[*runs, topology])
    print_table(results, rows)
    print(written)


if __name__ == "__main__":
    files.run_script(command)
