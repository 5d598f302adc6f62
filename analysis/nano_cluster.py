"""What parallelism, batch and the number of servers make of throughput, traffic and memory, against published ones.

`python analysis/nano_cluster.py STUDY [--out DIR]`, for a study that sbatch/nano_cluster.sh has run
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcpace.core.text import format_bytes, format_count, format_rate, plural
from hpcpace.plots import charts as plots
from hpcpace.plots import files
from hpcpace.report.terminal import note, table, title
from hpcpace.studies.figures import SetupFigures, Spread, study_figures
from hpcpace.studies.published import BATCH, Published, compute_spread, orders, published_of, read_published
from hpcpace.studies.setups import DONE, Layout, StudyFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "nano_cluster"
PUBLISHED = Path(__file__).parents[1] / "tests" / "data" / "published" / "nano_cluster_gpt2_small.csv"
FIGURES = (
    *("samples_per_s", "scaling_factor", "network_bps", "network_bytes_per_sample"),
    *("peak_memory_bytes", "step_ms", "forward_ms", "communication_share"),
)
COLUMNS = (
    *("model", "preset", "servers", "ranks_per_server", "parallelism", "batch", "stands_for_batch", "shrink"),
    *("num_finished", "num_out_of_memory"),
    *(f"{name}{end}" for name in FIGURES for end in ("", "_low", "_high")),
    *("published_samples_per_s", "published_scaling_factor", "published_network_bps"),
    "published_network_bytes_per_sample",
)
COLORS = {"none": plots.GREY, "data": plots.BLUE, "tensor": plots.VERMILION, "pipeline": plots.GREEN}


def values_of(row: SetupFigures, published: Published) -> list[Any]:
    setup, theirs = row.setup, published_of(row, published)
    values: list[Any] = [setup.model, setup.preset, setup.layout.servers, setup.layout.ranks_per_server]
    values += [setup.parallelism, setup.batch, setup.stands_for, setup.shrink]
    values += [row.states.get(DONE, 0), row.states.get("out of memory", 0)]
    for name in FIGURES:
        found = row.spreads[name]
        values += [None] * 3 if found is None else [found.median, found.low, found.high]
    if theirs is None:
        return [*values, None, None, None, None]
    return [*values, theirs.tokens_per_s, theirs.scaling_factor, theirs.network_bps, theirs.network_bytes_per_sample]


def print_tables(rows: Sequence[SetupFigures], published: Published, remarks: Sequence[str]) -> None:
    console = files.console_for_tables()
    for model, unit in (("gpt2", "tokens"), ("resnet18", "images")):
        of_model = [row for row in rows if row.setup.model == model]
        if not of_model:
            continue
        title(console, f"Nano-cluster study, {model}", f"{unit} of all ranks; median, least and most over repetitions")
        head = [
            f"{unit}/s\n(range)",
            "scaling\n(published)",
            "network\n(range)",
            f"bytes a\n{unit[:-1]}",
            "peak\nmemory",
        ]
        shown = files.rows_from_the_top(table("set-up", ["batch", *head, "forward of a\nmicrobatch"]))
        for row in of_model:
            setup, theirs = row.setup, published_of(row, published)
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


def spelled(found: Spread | None, of: Any, *, is_ranged: bool = True) -> str:
    """Return a spread as text: the median, and below it the range where there are several repetitions."""
    if found is None:
        return ""
    between = f"\n{of(found.low)}-{of(found.high)}" if is_ranged and found.num > 1 else ""
    return f"{of(found.median)}{between}"


def draw(rows: Sequence[SetupFigures], published: Published) -> Figure:
    figure = plots.new_figure(11.0, 8.0)
    scaling, volume, texts, images = figure.subplots(2, 2).ravel()
    of_batch = [row for row in rows if row.setup.model == "gpt2" and row.setup.stands_for == BATCH]
    draw_both(scaling, of_batch, published, "scaling_factor", f"GPT-2, batch {BATCH}: scaling factor")
    draw_both(volume, of_batch, published, "network_bytes_per_sample", "network volume, relative to data at 2x1")
    draw_over_batch(texts, [row for row in rows if row.setup.model == "gpt2"], "tokens/s", "sequences of a replica")
    draw_over_batch(images, [row for row in rows if row.setup.model == "resnet18"], "images/s", "images of a replica")
    return figure


def draw_both(axes: Axes, rows: Sequence[SetupFigures], published: Published, name: str, heading: str) -> None:
    """Draw bars with the range of repetitions, and the published values as diamonds."""
    reference = {"ours": 1.0, "published": 1.0}
    if name == "network_bytes_per_sample":
        base = next((row for row in rows if (str(row.setup.layout), row.setup.parallelism) == ("2x1", "data")), None)
        theirs = published_of(base, published) if base else None
        reference["ours"] = (base.median(name) if base else None) or 1.0
        reference["published"] = (theirs.network_bytes_per_sample if theirs else None) or 1.0
    shown = [row for row in rows if row.spreads[name] is not None and row.setup.parallelism != "none"]
    labels = [f"{row.setup.layout} {row.setup.parallelism}" for row in shown]
    for height, row in enumerate(shown):
        found = row.spreads[name]
        assert found is not None
        low, median, high = (value / reference["ours"] for value in (found.low, found.median, found.high))
        axes.barh(height, median, color=COLORS[row.setup.parallelism], height=0.6)
        axes.plot([low, high], [height, height], color=plots.BLACK, linewidth=1.5, marker="|", markersize=8)
        theirs = published_of(row, published)
        value = getattr(theirs, name) if theirs else None
        if value is not None:
            axes.plot(value / reference["published"], height, "D", color=plots.ORANGE, markeredgecolor=plots.BLACK)
    axes.set_yticks(range(len(shown)), labels, fontsize=9)
    axes.set_ylim(max(len(shown), 4) - 0.5, -0.5)
    axes.set_title(f"{heading} (diamonds: published)", loc="left", fontsize=10)
    axes.grid(axis="x", alpha=0.25)
    plots.plain(axes)


def draw_over_batch(axes: Axes, rows: Sequence[SetupFigures], unit: str, across: str) -> None:
    """Draw throughput over the batch, a curve for each layout and parallelism, with the range of repetitions."""
    import numpy as np

    curves = dict.fromkeys((row.setup.layout, row.setup.parallelism) for row in rows)
    for index, (layout, parallelism) in enumerate(curves):
        of_curve = _points(rows, layout, parallelism)
        if of_curve:
            x = np.array([batch for batch, _ in of_curve])
            median, low, high = (
                np.array([getattr(found, end) for _, found in of_curve]) for end in ("median", "low", "high")
            )
            plots.draw_curve(axes, x, median, (low, high), None, f"{layout} {parallelism}", index)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    batches = sorted({row.setup.stands_for for row in rows})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    axes.grid(alpha=0.25)
    plots.plain(axes)
    if curves:
        axes.legend(frameon=False, fontsize=8)


def _points(rows: Sequence[SetupFigures], layout: Layout, parallelism: str) -> list[tuple[int, Spread]]:
    found = [
        (row.setup.stands_for, row.spreads["samples_per_s"])
        for row in rows
        if (row.setup.layout, row.setup.parallelism) == (layout, parallelism)
    ]
    return sorted(((batch, one) for batch, one in found if one is not None), key=lambda point: point[0])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("study", type=click.Path(path_type=Path))
@files.out_option
def command(study: Path, out: Path) -> None:
    """Show a nano-cluster STUDY and the published values: tables, and NAME.csv, .png and .svg in a folder."""
    rows, problems = study_figures(StudyFolder(study))
    theirs = read_published(PUBLISHED)
    published = {(row.layout, row.parallelism): row for row in theirs}
    values = [values_of(row, published) for row in rows]
    written = files.write_files(out, NAME, columns=COLUMNS, rows=values, figure=draw(rows, published))
    unfinished = sum(count for row in rows for state, count in row.states.items() if state != DONE)
    remarks = [*orders(rows, theirs), *compute_spread(rows)]
    remarks += [f"{plural(unfinished, 'run')} not finished"] if unfinished else []
    print_tables(rows, published, [*remarks, *problems])
    print(written)


if __name__ == "__main__":
    files.run_script(command)
