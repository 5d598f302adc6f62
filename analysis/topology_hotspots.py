"""Which ranks, nodes, leaf switches and links hold a run up: ranked, with intervals, and the nodes to leave out.

`python analysis/topology_hotspots.py RUN... [--out DIR]`
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpcpace import plots
from hpcpace.core.text import NS_PER_MS, alias_name, format_duration, percent, place_name, printable
from hpcpace.report.terminal import console_for_tables, note, table, title
from library import drawing, files
from library.hotspots import COLUMNS, HotspotFigures, Row, hotspot_figures, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "topology_hotspots"
COLORS = {"rank": plots.BLUE, "node": plots.VERMILION, "leaf": plots.GREEN, "link": plots.PURPLE}
MAX_BARS, MAX_ALIASES = 12, 4
ENDS = ("", "_low", "_high")
Found = tuple[str, HotspotFigures, tuple[str, ...]]  # a run, its hotspots, and remarks on it


def print_table(results: Sequence[Found], rows: Sequence[Row]) -> None:
    console = console_for_tables()
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
    for run, figures, remarks in results:
        for text in (*figures.reasons, *remarks, *filter(None, [figures.exclude])):
            note(console, f"{run}: {text}")


def place_of(row: Row) -> str:
    """Return a place in the field's words; a link by both of its ends, and links that nothing tells apart together."""
    if row["kind"] != "link":
        return place_name(row["kind"], row["id"])
    ends = [printable(one) for one in row["link_ends"].split("; ")]
    return f"link {ends[0]}" if len(ends) == 1 else "\n".join(["one of the links", *ends])


def draw(results: Sequence[Found]) -> Figure:
    figure = plots.new_figure(11.5, 4.2 * len(results))
    width = 1 + max(len(figures.matrices) for _, figures, _ in results)
    for (run, figures, _), part in zip(results, figure.subfigures(len(results), 1, squeeze=False)[:, 0], strict=True):
        part.suptitle(plots.plot_label(run), x=0.01, ha="left", fontsize=11, fontweight="bold")
        grid, matrices, found = part.add_gridspec(1, width), figures.matrices, rows_of(run, figures)
        for column, (unit, matrix) in enumerate(matrices):
            axes = part.add_subplot(grid[0, column])
            drawing.draw_matrix(part, axes, matrix.labels, matrix.relative)
            axes.set_title(f"transfer, {unit} by {unit}", fontsize=9)
        of_places, of_links = ([row for row in found if (row["kind"] == "link") == of] for of in (False, True))
        bars = [("own work beyond its peers\n(ms a step)", of_places)] * bool(of_places or not of_links)
        bars += [("transfers beyond their like\n(%)", of_links)] * bool(of_links)
        below = grid[0, len(matrices) :].subgridspec(len(bars), 1)
        for index, (label, rows) in enumerate(bars):
            empty = "none beyond noise" if figures.is_compared else "nothing to compare"
            draw_bars(part.add_subplot(below[index, 0]), rows[:MAX_BARS], label, empty)
    return figure


def draw_bars(axes: Axes, rows: Sequence[Row], label: str, empty: str) -> None:
    bars = np.empty((len(rows), len(ENDS)))
    for place, row in enumerate(rows):
        unit, factor = ("share", 100) if row["kind"] == "link" else ("ms", 1)
        bars[place] = [factor * row[f"effect{end}_{unit}"] for end in ENDS]
    names, colors = [place_of(row).replace("\n", " ") for row in rows], [COLORS[row["kind"]] for row in rows]
    drawing.draw_bars(axes, names, bars[:, 0], bars[:, 1:], colors, label, empty=empty)
    axes.set_title("hotspots, with 95 % intervals", fontsize=9)


@files.figure_command
@files.topology_option
def command(runs: tuple[Path, ...], out: Path, topology: Path | None) -> None:
    """Rank the places and links that hold each RUN up: a table, the matrices of transfers, and the hotspots."""
    examined = files.examined(runs, topology)
    results = [(run.name, hotspot_figures(run.measured, run.panels), run.remarks) for run in examined]
    rows = [row for run, figures, _ in results for row in rows_of(run, figures)]
    values = [tuple(row.values()) for row in rows]
    written = files.write_files(out, NAME, columns=COLUMNS, rows=values, figure=draw(results), read=[*runs, topology])
    print_table(results, rows)
    print(written)


if __name__ == "__main__":
    files.run_script(command)
