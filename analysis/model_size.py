"""How training time, network volume and memory grow with the size of the model, compared with the published line.

`python analysis/model_size.py STUDY [--out DIR]`, for a study of `HPCPACE_STUDY=model-size sbatch/nano_cluster.sh`
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from hpcpace import plots
from hpcpace.core.text import format_bytes, format_count
from hpcpace.report.terminal import console_for_tables, note, table, title
from hpcpace.studies.setups import OUT_OF_MEMORY, StudyFolder
from library import drawing, files
from library.figures import study_figures
from library.published import PEAK_MEMORY_GBYTE, Size, growth_sentences, published_volume_gbyte, sizes_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "model_size"
DASHED: dict[str, Any] = {"color": plots.GREY, "linestyle": "--"}
COLUMNS = (
    *("preset", "shrink", "num_layers", "width", "num_parameters", "num_finished"),
    *("s_per_million_tokens", "s_per_million_tokens_low", "s_per_million_tokens_high"),
    *("network_bytes_per_token", "network_bytes_per_token_low", "network_bytes_per_token_high"),
    *("volume_relative", "published_volume_relative", "peak_memory_bytes_of_one_rank", "outcome_of_one_rank"),
    "published_peak_memory_gbyte",
)


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
    console = console_for_tables()
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


def draw(sizes: Sequence[Size]) -> Figure:
    figure = plots.new_figure(9.5, 4.2)
    times, volumes = figure.subplots(1, 2)
    layers = [size.shape.num_layers for size in sizes]
    line = np.array([published_volume_gbyte(number) for number in layers])
    base = sizes[0].volume.median if sizes[0].volume else 1.0
    volumes.plot(layers, base * line / line[0], **DASHED, label="published line, scaled to the first")
    for axes, name, label in ((times, "time_s", "s a million tokens"), (volumes, "volume", "network bytes a token")):
        spreads = [(size.shape.num_layers, getattr(size, name)) for size in sizes]
        points = [(number, found.median, found.low, found.high) for number, found in spreads if found is not None]
        drawing.draw_points(axes, points, "median and range", 0)
        drawing.label_curves(axes, "layers", label)
        axes.set_xticks(layers)
        axes.set_ylim(bottom=0)
    return figure


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
    print_table(sizes, [*growth_sentences(sizes), *problems])
    print(written)


if __name__ == "__main__":
    files.run_script(command)
