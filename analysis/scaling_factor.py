"""The scaling factor S_n over the number of nodes, in bands of ideal, overhead and detrimental.

`python analysis/scaling_factor.py RUN... [--scaling weak|strong] [--throughput total|gpu|node] [--out DIR]`
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcpace import plots
from hpcpace.core.errors import EXIT_WARNING
from hpcpace.report.terminal import console_for_tables, notes, table, title
from hpcpace.runs.load import Per
from hpcpace.runs.scaling.result import COLUMNS, IDEAL, Scaling, rows_of, scaling_of
from hpcpace.runs.scaling.samples import read_samples
from hpcpace.runs.scaling.sizes import ScalingKind
from library import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "scaling_factor"
NUM_POINTS = 100


def draw(scaling: Scaling) -> Figure:
    figure = plots.new_figure(7.0, 4.5)
    axes = figure.subplots()
    draw_bands(axes, scaling)
    draw_factors(axes, scaling)
    return figure


def units_of(scaling: Scaling) -> list[int]:
    """Return all sizes, those that are predicted included."""
    return [size.num_units for size in scaling.sizes] + [size.num_units for size in scaling.predictions]


def highest(scaling: Scaling) -> float:
    """Return where the axis ends: factors may be above 1."""
    return max(1.05, 1.05 * max(size.scaling_interval[1] for size in scaling.sizes))


def draw_bands(axes: Axes, scaling: Scaling) -> None:
    """Shade what is ideal, what scales with overhead, and what is slower than the smallest size."""
    import numpy as np

    first = scaling.sizes[0].num_units
    last = max(units_of(scaling))
    across = np.geomspace(first, last, NUM_POINTS)
    slower = first / across
    axes.fill_between(across, IDEAL, highest(scaling), color=plots.GREEN, alpha=0.15, linewidth=0, label="ideal")
    axes.fill_between(
        across, np.minimum(slower, IDEAL), IDEAL, color=plots.YELLOW, alpha=0.25, linewidth=0, label="overhead"
    )
    axes.fill_between(
        across, 0, np.minimum(slower, IDEAL), color=plots.VERMILION, alpha=0.15, linewidth=0, label="detrimental"
    )


def draw_factors(axes: Axes, scaling: Scaling) -> None:
    """Draw measured factors with their intervals, and predicted ones."""
    import numpy as np

    units = np.array([size.num_units for size in scaling.sizes])
    factors = np.array([size.scaling_factor for size in scaling.sizes])
    ends = np.array([size.scaling_interval for size in scaling.sizes])
    axes.vlines(units, ends[:, 0], ends[:, 1], color=plots.BLUE, linewidth=1.5)
    axes.plot(units, factors, color=plots.BLUE, marker="o", linewidth=1.8, label="measured")
    if scaling.predictions:
        later = [size.num_units for size in scaling.predictions]
        ratio = np.array(later) / units[0]
        low, high = np.array([size.speedup_interval for size in scaling.predictions]).T / ratio
        axes.vlines(later, low, high, color=plots.BLACK, linewidth=1.5)
        label = "predicted (95 %)"
        axes.plot(later, [size.scaling_factor for size in scaling.predictions], "s", color=plots.BLACK, label=label)
    axes.set_xscale("log", base=2)
    ticks = units_of(scaling)
    axes.set_xticks(ticks, [str(count) for count in ticks])
    axes.set_xlabel(f"{scaling.unit}s", fontsize=9)
    axes.set_ylim(0, highest(scaling))
    axes.set_title(
        f"scaling factor, relative to {units[0]} {scaling.unit}{'s' * int(units[0] > 1)}", loc="left", fontsize=10
    )
    plots.plain(axes)
    axes.legend(frameon=True, fontsize=8, ncols=2, loc="lower left")


@files.figure_command
@files.scaling_options
def command(runs: Sequence[Path], out: Path, scaling: str | None, throughput: str | None) -> None:
    """Show the scaling factors of RUN...: a table, and NAME.csv, .png and .svg in a folder."""
    samples, problems = read_samples(runs, per=None if throughput is None else Per(throughput))
    found = scaling_of(samples, kind=None if scaling is None else ScalingKind(scaling))
    console = console_for_tables()
    title(console, "Scaling factors", f"{found.kind}: {found.why}")
    shown = files.rows_from_the_top(table(f"{found.unit}s", ["S_n", "95 %", "band"]))
    for size in found.sizes:
        low, high = size.scaling_interval
        shown.add_row(str(size.num_units), f"{size.scaling_factor:.3f}", f"{low:.3f} to {high:.3f}", str(size.band))
    console.print(shown)
    notes(console, [*found.left_out, *problems], rest="hpcpace scale --verbose")
    written = files.write_files(out, NAME, columns=COLUMNS, rows=rows_of(found), figure=draw(found), read=runs)
    console.print(f"\n{written}", markup=False)
    if problems or found.left_out:
        raise SystemExit(EXIT_WARNING)


if __name__ == "__main__":
    files.run_script(command)
