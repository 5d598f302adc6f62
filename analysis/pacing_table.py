"""How pacing policies change throughput and variation at each number of nodes, and the published table.

`python analysis/pacing_table.py RUN... [--out DIR]`, for runs of sbatch/pacing_trial.sh or any others;
`python analysis/pacing_table.py --simulate [--out DIR]` shows what the published table would require
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

import hpcpace
from hpcpace import plots
from hpcpace.core.config import NO_POLICY
from hpcpace.core.errors import CannotTell, UsageError
from hpcpace.core.text import format_count, plural, printable
from hpcpace.report.terminal import console_for_tables, note, table, title
from library import drawing, files
from library.paced_jobs import Target
from library.pacing import (
    MODEL_COLUMNS,
    PacingRow,
    draw_model,
    interval_text,
    model_rows,
    pacing_rows,
    pacing_values,
    print_model,
    read_paced_run,
    read_published_pacing,
    simulations,
)
from library.pacing import PACING_COLUMNS as COLUMNS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, MODEL = "pacing_table", "pacing_table_model"
PUBLISHED = Path(__file__).parents[1] / "tests" / "data" / "published" / "pacing_table.csv"


def print_table(rows: Sequence[PacingRow], published: Sequence[Target]) -> None:
    console = console_for_tables()
    title(console, "Pacing", "means over repetitions, or over the steps of a single run, with 95 % intervals")
    head = ["policy", "runs", "samples/s\n(95 %)", "gain\n(95 %)", "published\ngain", "CV of the step\n(95 %)"]
    shown = files.rows_from_the_top(table("nodes", [*head, "published\nCV"]), left=(1,))
    for row in rows:
        of = dict(zip(COLUMNS, pacing_values(row, published), strict=True))
        shown.add_row(
            *(str(row.nodes), printable(row.policy), str(row.num_runs), interval_text(row.samples_per_s, format_count)),
            interval_text(row.gain, lambda value: f"{100 * value:+.1f} %"),
            "" if of["published_gain"] is None else f"{100 * of['published_gain']:+.1f} %",
            interval_text(row.variation, lambda value: f"{value:.3f}"),
            "" if of["published_variation"] is None else f"{of['published_variation']:.2f}",
        )
    console.print(shown)
    for row in rows:
        for sentence in row.sentences:
            note(console, f"{plural(row.nodes, 'node')}, {row.policy}: {sentence}")
    note(console, "A lower CV alone is no gain. The published table has no intervals, no runs and no mechanism.")
    nodes = {row.nodes for row in rows}
    if not nodes & {target.nodes for target in published}:
        note(console, f"Nothing was published for {', '.join(map(str, sorted(nodes)))} nodes.")


def draw(rows: Sequence[PacingRow], published: Sequence[Target]) -> Figure:
    figure = plots.new_figure(9.5, 4.2)
    gains, variations = figure.subplots(1, 2)
    for index, policy in enumerate(dict.fromkeys(row.policy for row in rows)):
        label = plots.plot_label("baseline" if policy == NO_POLICY else policy)
        for axes, name, factor in ((gains, "gain", 100.0), (variations, "variation", 1.0)):
            found = [(row.nodes, one) for row in rows if row.policy == policy and (one := getattr(row, name))]
            points = [(nodes, *(factor * end for end in (one.value, one.low, one.high))) for nodes, one in found]
            drawing.draw_points(axes, points, label, index)
    nodes = [target.nodes for target in published]
    for axes, values, style, label in (
        (gains, [100 * target.gain for target in published], "--", "published"),
        (variations, [target.variation for target in published], "--", "published, baseline"),
        (variations, [target.paced_variation for target in published], ":", "published, paced"),
    ):
        axes.plot(nodes, values, color=plots.GREY, linestyle=style, label=label)
    gains.axhline(0, color=plots.BLACK, linewidth=0.8)
    ticks = sorted({*nodes, *(row.nodes for row in rows)})
    drawing.label_curves(gains, "nodes", "gain of throughput, %", ticks)
    drawing.label_curves(variations, "nodes", "coefficient of variation of the step time", ticks)
    return figure


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("runs", metavar="[RUN...]", nargs=-1, type=click.Path(path_type=Path))
@click.option("--simulate", is_flag=True, help="Show what the published table would require: a minute, no RUN needed.")
@files.out_option
def command(runs: tuple[Path, ...], simulate: bool, out: Path) -> None:
    """Show throughput and variation of paced RUNs and the published table, or what that table would require."""
    published = read_published_pacing(PUBLISHED)
    if not runs and not simulate:
        raise UsageError("name runs, as sbatch/pacing_trial.sh makes them, or give --simulate")
    if runs:
        opened = [hpcpace.load(path, warns=False) for path in runs]
        rows = pacing_rows([read_paced_run(run) for run in opened])
        if all(row.samples_per_s is None for row in rows):
            raise CannotTell("no run has credited samples to its steps: throughput is unknown")
        values = [pacing_values(row, published) for row in rows]
        written = files.write_files(out, NAME, columns=COLUMNS, rows=values, figure=draw(rows, published))
        print_table(rows, published)
        print(written)
    if simulate:
        found = simulations(published)
        figure = draw_model(found, published)
        values = model_rows(found, published)
        written = files.write_files(out, MODEL, columns=MODEL_COLUMNS, rows=values, figure=figure)
        print_model(found, published)
        print(written)


if __name__ == "__main__":
    files.run_script(command)
