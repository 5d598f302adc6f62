"""How training time, network volume and memory grow with the size of the model, compared with the published line.

`python analysis/model_size.py STUDY [--out DIR]`, for a study of `HPCPACE_STUDY=model-size sbatch/nano_cluster.sh`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcpace.core.text import format_bytes, format_count
from hpcpace.plots import charts as plots
from hpcpace.plots import files
from hpcpace.report.terminal import note, table, title
from hpcpace.studies.figures import SetupFigures, Spread, straight_line, study_figures
from hpcpace.studies.published import PEAK_MEMORY_GBYTE, published_volume_gbyte
from hpcpace.studies.setups import OUT_OF_MEMORY, StudyFolder, planned
from hpcpace.train.presets import GPT2Shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "model_size"
TOKENS = 1_000_000
COLUMNS = (
    *("preset", "shrink", "num_layers", "width", "num_parameters", "num_finished"),
    *("s_per_million_tokens", "s_per_million_tokens_low", "s_per_million_tokens_high"),
    *("network_bytes_per_token", "network_bytes_per_token_low", "network_bytes_per_token_high"),
    *("volume_relative", "published_volume_relative", "peak_memory_bytes_of_one_rank", "outcome_of_one_rank"),
    "published_peak_memory_gbyte",
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of the family: as a pipeline over several servers, and on one rank where that was run."""

    shape: GPT2Shape
    pipeline: SetupFigures
    single: SetupFigures | None

    @property
    def preset(self) -> str:
        """Name of the size."""
        return self.pipeline.setup.preset

    @property
    def time_s(self) -> Spread | None:
        """Seconds a million tokens; the fastest repetition is its least."""
        found = self.pipeline.spreads["samples_per_s"]
        if found is None:
            return None
        return Spread(median=TOKENS / found.median, low=TOKENS / found.high, high=TOKENS / found.low, num=found.num)

    @property
    def volume(self) -> Spread | None:
        """Bytes a token on a server's link, both directions."""
        return self.pipeline.spreads["network_bytes_per_sample"]


def sizes_of(rows: Sequence[SetupFigures]) -> list[Size]:
    """Return the sizes of a study, from the smallest to the largest."""
    found = []
    for row in rows:
        shape = planned(row.setup).shape
        if row.setup.parallelism == "pipeline" and isinstance(shape, GPT2Shape):
            alone = [
                other for other in rows if other.setup.preset == row.setup.preset and other.setup.parallelism == "none"
            ]
            found.append(Size(shape=shape, pipeline=row, single=alone[0] if alone else None))
    return sorted(found, key=lambda size: size.shape.num_parameters)


def values_of(size: Size, first: Size) -> list[Any]:
    shape, setup = size.shape, size.pipeline.setup
    time_s, volume = size.time_s, size.volume
    base = published_volume_gbyte(first.shape.num_layers)
    return [
        *(size.preset, setup.shrink, shape.num_layers, shape.width, shape.num_parameters, len(size.pipeline.runs)),
        *((time_s.median, time_s.low, time_s.high) if time_s else (None,) * 3),
        *((volume.median, volume.low, volume.high) if volume else (None,) * 3),
        volume.median / first.volume.median if volume and first.volume else None,
        published_volume_gbyte(shape.num_layers) / base,
        size.single.median("peak_memory_bytes") if size.single else None,
        ", ".join(size.single.states) if size.single else None,
        PEAK_MEMORY_GBYTE.get(size.preset),
    ]


def print_table(sizes: Sequence[Size], remarks: Sequence[str]) -> None:
    console = files.console_for_tables()
    title(console, "Model size", "a pipeline over 2x2, and memory of one rank alone; medians over repetitions")
    head = ["layers", "width", "parameters", "s a million\ntokens", "network\na token", "relative\n(published)"]
    shown = files.rows_from_the_top(table("preset", [*head, "memory of\none rank", "published"]))
    for size in sizes:
        values = dict(zip(COLUMNS, values_of(size, sizes[0]), strict=True))
        time_s, volume = size.time_s, size.volume
        memory = values["peak_memory_bytes_of_one_rank"]
        published = PEAK_MEMORY_GBYTE.get(size.preset)
        relative = values["volume_relative"]
        shown.add_row(
            *(size.preset, str(size.shape.num_layers), str(size.shape.width), format_count(size.shape.num_parameters)),
            f"{time_s.median:.4g}" if time_s else "",
            format_bytes(volume.median) if volume else "",
            ("" if relative is None else f"{relative:.2f}") + f"\n({values['published_volume_relative']:.2f})",
            format_bytes(memory) if memory else str(values["outcome_of_one_rank"] or ""),
            f"{published:.2f} GB" if published else OUT_OF_MEMORY,
        )
    console.print(shown)
    for remark in remarks:
        note(console, remark)


def remarks_of(sizes: Sequence[Size]) -> list[str]:
    """Return how straight the growth is, and how the family was scaled down."""
    remarks = []
    layers = [size.shape.num_layers for size in sizes]
    for what, values in (
        ("time", [size.time_s for size in sizes]),
        ("network volume", [size.volume for size in sizes]),
    ):
        points = [(x, found.median) for x, found in zip(layers, values, strict=True) if found is not None]
        line = straight_line([x for x, _ in points], [y for _, y in points])
        if line is not None:
            remarks.append(f"{what} over layers: a straight line explains {100 * line.r_squared:.1f} % of the variance")
    shrink = sizes[0].pipeline.setup.shrink
    if shrink > 1:
        remarks.append(
            "a family scaled down: the layers and heads of GPT-2, with width, vocabulary and context divided by "
            f"{shrink}; its memory does not compare with the published one"
        )
    return remarks


def draw(sizes: Sequence[Size]) -> Figure:
    figure = plots.new_figure(9.5, 4.2)
    times, volumes = figure.subplots(1, 2)
    draw_growth(times, [(size.shape.num_layers, size.time_s) for size in sizes], "s a million tokens", None)
    first = sizes[0]
    base = first.volume.median if first.volume else 1.0
    published = [
        base * published_volume_gbyte(size.shape.num_layers) / published_volume_gbyte(first.shape.num_layers)
        for size in sizes
    ]
    draw_growth(volumes, [(size.shape.num_layers, size.volume) for size in sizes], "network bytes a token", published)
    return figure


def draw_growth(
    axes: Axes, points: Sequence[tuple[int, Spread | None]], label: str, published: Sequence[float] | None
) -> None:
    """Draw a figure over the number of layers, and the published line, from the smallest model on."""
    import numpy as np

    known = [(x, found) for x, found in points if found is not None]
    if known:
        median, low, high = (np.array([getattr(found, end) for _, found in known]) for end in ("median", "low", "high"))
        plots.draw_curve(axes, np.array([x for x, _ in known]), median, (low, high), None, "median and range", 0)
    if published is not None:
        axes.plot(
            [x for x, _ in points],
            published,
            color=plots.GREY,
            linestyle="--",
            label="published line, scaled to the first",
        )
    axes.set_xticks([x for x, _ in points])
    axes.set_xlabel("layers", fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    plots.plain(axes)
    axes.legend(frameon=False, fontsize=9)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("study", type=click.Path(path_type=Path))
@files.out_option
def command(study: Path, out: Path) -> None:
    """Show how a model-size STUDY grows: a table, and NAME.csv, .png and .svg in a folder."""
    rows, problems = study_figures(StudyFolder(study))
    sizes = sizes_of(rows)
    if not sizes:
        raise click.UsageError(f"{study} has no pipeline runs of gpt2: plan it by HPCPACE_STUDY=model-size")
    values = [values_of(size, sizes[0]) for size in sizes]
    written = files.write_files(out, NAME, columns=COLUMNS, rows=values, figure=draw(sizes))
    print_table(sizes, [*remarks_of(sizes), *problems])
    print(written)


if __name__ == "__main__":
    files.run_script(command)
