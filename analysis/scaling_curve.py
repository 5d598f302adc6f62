"""How throughput grows with the number of nodes, next to the ideal, and what the step consists of at each size.

`python analysis/scaling_curve.py RUN... [--scaling weak|strong] [--throughput total|gpu|node] [--out DIR]`
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcpace import plots
from hpcpace.core.errors import EXIT_WARNING
from hpcpace.report.sections.history import scaling_document
from hpcpace.report.terminal import console_for_tables, notes, print_document
from hpcpace.runs.load import Per
from hpcpace.runs.scaling.result import COLUMNS, Scaling, rows_of, scaling_of
from hpcpace.runs.scaling.samples import PARTS, read_samples
from hpcpace.runs.scaling.sizes import ScalingKind
from library import drawing, files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "scaling_curve"
COLORS = dict(zip(PARTS, (plots.BLUE, plots.PURPLE, plots.VERMILION, plots.ORANGE, plots.GREY), strict=True))


def draw(scaling: Scaling) -> Figure:
    figure = plots.new_figure(11.0, 4.5)
    speed, parts = figure.subplots(1, 2)
    draw_speed(speed, scaling)
    draw_parts(parts, scaling)
    return figure


def draw_speed(axes: Axes, scaling: Scaling) -> None:
    """Draw measured and predicted speeds with their intervals, the ideal, and the knee."""
    import numpy as np

    units = [size.num_units for size in scaling.sizes]
    later = [size.num_units for size in scaling.predictions]
    ideal = [count / units[0] for count in (*units, *later)]
    axes.plot([*units, *later], ideal, color=plots.GREY, linestyle="--", linewidth=1.3, label="ideal")
    low, high = np.array([size.speedup_interval for size in scaling.sizes]).T
    measured = np.array([size.speedup for size in scaling.sizes])
    drawing.draw_curve(axes, np.array(units), measured, (low, high), None, "measured", 0)
    if later:
        ends = np.array([size.speedup_interval for size in scaling.predictions])
        predicted = np.array([size.speedup for size in scaling.predictions])
        axes.fill_between(
            [units[-1], *later],
            [measured[-1], *ends[:, 0]],
            [measured[-1], *ends[:, 1]],
            color=plots.VERMILION,
            alpha=0.2,
            linewidth=0,
        )
        label = "predicted (95 %)"
        axes.plot([units[-1], *later], [measured[-1], *predicted], color=plots.VERMILION, marker="s", label=label)
    if scaling.knee is not None and scaling.knee.num_units is not None:
        label = "stops paying" if scaling.knee.is_measured else "expected to stop paying"
        axes.axvline(scaling.knee.num_units, color=plots.BLACK, linestyle=":", linewidth=1.2, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks([*units, *later], [str(count) for count in (*units, *later)])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(f"{scaling.unit}s", fontsize=9)
    axes.set_title(f"speed relative to {units[0]} {scaling.unit}{'s' * (units[0] > 1)}", loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    plots.plain(axes)
    axes.legend(frameon=False, fontsize=9)


def draw_parts(axes: Axes, scaling: Scaling) -> None:
    """Draw the step of each size as a bar of its parts; those of predicted sizes are paler."""
    rows = [(str(size.num_units), size.parts_ns, 1.0) for size in scaling.sizes if size.parts_ns]
    rows += [(f"{size.num_units}*", size.parts_ns, 0.55) for size in scaling.predictions if "work" in size.parts_ns]
    axes.set_title(
        "mean step, ms" + " (* predicted)" * any(name.endswith("*") for name, *_ in rows), loc="left", fontsize=10
    )
    plots.plain(axes)
    if not rows:
        axes.text(0.5, 0.5, f"not known: {scaling.no_parts}", transform=axes.transAxes, ha="center", color=plots.GREY)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    for place, (_, parts, alpha) in enumerate(rows):
        bottom = 0.0
        for name in PARTS:
            label = name if place == 0 else None
            axes.bar(place, parts[name] / 1e6, bottom=bottom, color=COLORS[name], alpha=alpha, width=0.7, label=label)
            bottom += parts[name] / 1e6
    axes.set_xticks(range(len(rows)), [name for name, *_ in rows])
    axes.set_xlabel(f"{scaling.unit}s", fontsize=9)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, fontsize=9)


@files.figure_command
@files.scaling_options
def command(runs: Sequence[Path], out: Path, scaling: str | None, throughput: str | None) -> None:
    """Show how throughput grows over RUN...: a table, and NAME.csv, .png and .svg in a folder."""
    samples, problems = read_samples(runs, per=None if throughput is None else Per(throughput))
    found = scaling_of(samples, kind=None if scaling is None else ScalingKind(scaling))
    console = console_for_tables()
    print_document(console, scaling_document(found))
    notes(console, problems, rest="hpcpace scale --verbose")
    written = files.write_files(out, NAME, columns=COLUMNS, rows=rows_of(found), figure=draw(found), read=runs)
    console.print(f"\n{written}", markup=False)
    if problems or found.left_out:
        raise SystemExit(EXIT_WARNING)


if __name__ == "__main__":
    files.run_script(command)
