"""What parallelism, batch and the number of servers make of throughput, traffic and memory, against published ones.

`python analysis/nano_cluster.py STUDY [--out DIR]`, for a study that sbatch/nano_cluster.sh has run
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from hpcpace import plots
from hpcpace.core.text import format_bytes, format_count, format_rate, plural
from hpcpace.report.terminal import console_for_tables, note, table, title
from hpcpace.studies.setups import DONE, StudyFolder
from library import drawing, files
from library import published as paper
from library.figures import SetupFigures, spelled, study_figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "nano_cluster"
Published = paper.Published
PUBLISHED = Path(__file__).parents[1] / "tests" / "data" / "published" / "nano_cluster_gpt2_small.csv"
COLORS = {"none": plots.GREY, "data": plots.BLUE, "tensor": plots.VERMILION, "pipeline": plots.GREEN}


def print_tables(rows: Sequence[SetupFigures], published: Published, remarks: Sequence[str]) -> None:
    console = console_for_tables()
    for model, unit in (("gpt2", "tokens"), ("resnet18", "images")):
        if not (of_model := [row for row in rows if row.setup.model == model]):
            continue
        title(console, f"Nano-cluster study, {model}", f"{unit} of all ranks; median, least and most over repetitions")
        head = [f"{unit}/s\n(range)", "scaling\n(published)", "network\n(range)", f"bytes a\n{unit[:-1]}"]
        columns = ["batch", *head, "peak\nmemory", "forward of a\nmicrobatch"]
        shown = files.rows_from_the_top(table("set-up", columns))
        for row in of_model:
            setup, theirs = row.setup, paper.published_of(row, published)
            scaling = spelled(row.spreads["scaling_factor"], lambda value: f"{value:.2f}", is_ranged=False)
            stands = f"\n(for {setup.stands_for})" if setup.stands_for not in (0, setup.batch) else ""
            shown.add_row(
                f"{setup.layout} {setup.parallelism}",
                f"{setup.batch}{stands}",
                spelled(row.spreads["samples_per_s"], format_count) or ", ".join(row.states),
                scaling + (f"\n({theirs.scaling_factor:.2f})" if theirs else ""),
                spelled(row.spreads["network_bps"], format_rate),
                spelled(row.spreads["network_bytes_per_sample"], format_bytes, is_ranged=False),
                spelled(row.spreads["peak_memory_bytes"], format_bytes, is_ranged=False),
                spelled(row.spreads["forward_ms"], lambda value: f"{value:.3g} ms", is_ranged=False),
            )
        console.print(shown)
    for remark in remarks:
        note(console, remark)


def draw(rows: Sequence[SetupFigures], published: Published) -> Figure:
    figure = plots.new_figure(11.0, 8.0)
    scaling, volume, texts, images = figure.subplots(2, 2).ravel()
    of_batch = [row for row in rows if row.setup.model == "gpt2" and row.setup.stands_for == paper.BATCH]
    draw_both(scaling, of_batch, published, "scaling_factor", f"GPT-2, batch {paper.BATCH}: scaling factor", (1, 1))
    name, bases = "network_bytes_per_sample", paper.bases_of(of_batch, published)
    draw_both(volume, of_batch, published, name, "network volume, relative to data at 2x1", bases)
    draw_over_batch(texts, [row for row in rows if row.setup.model == "gpt2"], "tokens/s", "sequences of a replica")
    draw_over_batch(images, [row for row in rows if row.setup.model == "resnet18"], "images/s", "images of a replica")
    return figure


def draw_both(
    axes: Axes, rows: Sequence[SetupFigures], published: Published, name: str, label: str, bases: tuple[float, float]
) -> None:
    """Draw bars with the range of repetitions, and the published values as diamonds, each relative to its base."""
    pairs = [(row, row.spreads[name]) for row in rows if row.setup.parallelism != "none"]
    known = [(row, found) for row, found in pairs if found is not None]
    spreads = np.array([(found.median, found.low, found.high) for _, found in known]).reshape(-1, 3) / bases[0]
    names = [f"{row.setup.layout} {row.setup.parallelism}" for row, _ in known]
    colors = [COLORS[row.setup.parallelism] for row, _ in known]
    drawing.draw_bars(axes, names, spreads[:, 0], spreads[:, 1:], colors, f"{label} (diamonds: published)")
    for height, (row, _) in enumerate(known):
        value = getattr(paper.published_of(row, published), name, None)
        if value is not None:
            axes.plot(value / bases[1], height, "D", color=plots.ORANGE, markeredgecolor=plots.BLACK)


def draw_over_batch(axes: Axes, rows: Sequence[SetupFigures], unit: str, across: str) -> None:
    """Draw throughput over the batch, a curve for each layout and parallelism, with the range of repetitions."""
    curves: dict[str, list[tuple[float, ...]]] = {}
    for row in rows:
        found = row.spreads["samples_per_s"]
        if found is not None:
            points = curves.setdefault(f"{row.setup.layout} {row.setup.parallelism}", [])
            points.append((row.setup.stands_for, found.median, found.low, found.high))
    for index, name in enumerate(curves):
        drawing.draw_points(axes, curves[name], name, index)
    axes.set_yscale("log")
    drawing.label_curves(axes, across, unit, sorted({row.setup.stands_for for row in rows}))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("study", type=click.Path(path_type=Path))
@files.out_option
def command(study: Path, out: Path) -> None:
    """Show a nano-cluster STUDY and the published values: tables, and NAME.csv, .png and .svg in a folder."""
    rows, problems = study_figures(StudyFolder(study))
    published = {(row.layout, row.parallelism): row for row in paper.read_published(PUBLISHED)}
    values = [paper.values_of(row, published) for row in rows]
    written = files.write_files(out, NAME, columns=paper.COLUMNS, rows=values, figure=draw(rows, published))
    unfinished = sum(count for row in rows for state, count in row.states.items() if state != DONE)
    remarks = [*paper.orders(rows, published.values()), *paper.compute_spread(rows)]
    remarks += [f"{plural(unfinished, 'run')} not finished"] if unfinished else []
    print_tables(rows, published, [*remarks, *problems])
    print(written)


if __name__ == "__main__":
    files.run_script(command)
