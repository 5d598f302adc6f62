"""Writes docs/results/studies-lab.md from the studies in the lab: every figure comes from the runs that write it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.studies.lab_set_up import REPOSITORY, SetUp
from hpcpace.core.text import format_bytes, format_count, format_rate
from hpcpace.studies.figures import SetupFigures, Spread, straight_line
from hpcpace.studies.published import BATCH, PublishedRow, compute_spread, orders, published_of, published_volume_gbyte
from hpcpace.studies.setups import StudyFolder, planned

SCALING_HEADING = "## The scaling study"
_PROSE = Path(__file__).with_name("prose.md")
_TITLE = "# The studies in the lab"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """When the runs began and ended, in seconds since 1970, and what those of each study took, without stops."""

    begin_s: float
    end_s: float
    busy_s: Mapping[str, float]

    def dates(self) -> str:
        """Return the day, or the first and the last one, in UTC."""
        days = [time.strftime("%Y-%m-%d", time.gmtime(second)) for second in (self.begin_s, self.end_s)]
        return " to ".join(dict.fromkeys(days))


def draw_plots(studies: Mapping[str, StudyFolder], folder: Path) -> None:
    """Write the plots, and the CSV of all figures, of each study into a folder, by the scripts of analysis/."""
    with TemporaryDirectory() as out:
        for name, study in studies.items():
            script = REPOSITORY / "analysis" / f"{name.replace('-', '_')}.py"
            subprocess.run([sys.executable, script, study.path, "--out", out], check=True, stdout=subprocess.DEVNULL)
        folder.mkdir(exist_ok=True)
        for path in Path(out).iterdir():
            if path.suffix in (".csv", ".svg"):
                shutil.copyfile(path, folder / path.name)


def write_document(
    path: Path,
    figures: Mapping[str, Sequence[SetupFigures]],
    found: SetUp,
    *,
    published: Sequence[PublishedRow],
    when: Measured,
) -> None:
    """Write the document; a section of the scaling study stays in it.

    Args:
        path: where to.
        figures: of the nano-cluster and the model-size study.
        found: the lab's link and how it was computed.
        published: the published table.
        when: they were measured.
    """
    scaling = path.read_text().partition(f"\n{SCALING_HEADING}\n") if path.exists() else ("", "", "")
    path.write_text(document(figures, found, published=published, when=when) + "".join(scaling[1:]))


def write_scaling(path: Path, section: str) -> None:
    """Put the section of the scaling study at the end of the document, in place of an earlier one.

    Args:
        path: of the document.
        section: from its heading on.
    """
    before = path.read_text().partition(f"\n{SCALING_HEADING}\n")[0] if path.exists() else _TITLE
    path.write_text(f"{before.rstrip()}\n\n{section.strip()}\n")


def document(
    figures: Mapping[str, Sequence[SetupFigures]],
    found: SetUp,
    *,
    published: Sequence[PublishedRow],
    when: Measured,
) -> str:
    """Return the document; arguments as of `write_document`."""
    head, differences = _PROSE.read_text().split("\n---\n")
    rows, sizes = figures["nano-cluster"], figures["model-size"]
    took = " and ".join(
        f"{sum(len(row.runs) for row in some)} runs of the {name} study in {when.busy_s[name] / 60:.0f} minutes"
        for name, some in figures.items()
    )
    parts = [
        head,
        f"Measured by `make nano-cluster` on {when.dates()}: {took}; {versions()}.",
        "## Set-up",
        "```\n" + "\n".join(found.lines()) + "\n```",
        f"## GPT-2 at batch {BATCH} and the published values",
        beside_table(rows, published),
        _listed([*orders(rows, published), *compute_spread(rows)]),
        "![Scaling factors and network volume, with the published values, and throughput over the batch]"
        "(studies-lab/nano_cluster.svg)",
        "All figures of all set-ups: [nano_cluster.csv](studies-lab/nano_cluster.csv) and "
        "[model_size.csv](studies-lab/model_size.csv).",
        "## GPT-2, all batches",
        setup_table([row for row in rows if row.setup.model == "gpt2"], "tokens"),
        "## ResNet-18",
        setup_table([row for row in rows if row.setup.model == "resnet18"], "images"),
        "## Model sizes",
        size_table(sizes),
        _listed(growth(sizes)),
        "![Time and network volume over the number of layers](studies-lab/model_size.svg)",
        differences,
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def versions() -> str:
    """Return what the figures depend on."""
    slurm = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=False).stdout.strip()
    return (
        f"hpcpace {version('hpcpace')}, {slurm or 'no Slurm'}, torch {version('torch')}, Python "
        f"{platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores for all ranks"
    )


def beside_table(rows: Sequence[SetupFigures], published: Sequence[PublishedRow]) -> str:
    """Return the set-ups of the published table with its values, as ratios, which compare over machines."""
    by_setup = {(row.layout, row.parallelism): row for row in published}
    base = _value(rows, by_setup, "2x1", "data", "network_bytes_per_sample")
    lines = []
    for row in rows:
        beside = published_of(row, by_setup)
        if beside is None:
            continue
        volume = row.median("network_bytes_per_sample")
        theirs = beside.network_bytes_per_sample
        lines.append(
            [
                f"{row.setup.layout} {row.setup.parallelism}",
                _range(row.spreads["scaling_factor"], lambda value: f"{value:.3f}"),
                f"{beside.scaling_factor:.2f}",
                f"{volume / base[0]:.2f}" if volume and base[0] else "",
                f"{theirs / base[1]:.2f}" if theirs and base[1] else "",
                _range(row.spreads["network_bps"], format_rate),
                format_rate(beside.network_bps) if beside.network_bps else "",
            ]
        )
    head = [
        *("set-up", "scaling factor", "published", "volume per token, relative to 2x1 data", "published"),
        *("network throughput", "published"),
    ]
    return markdown(head, lines)


def _value(
    rows: Sequence[SetupFigures], published: Mapping[object, PublishedRow], layout: str, parallelism: str, name: str
) -> tuple[float | None, float | None]:
    for row in rows:
        beside = published_of(row, published)
        if beside is not None and (str(row.setup.layout), row.setup.parallelism) == (layout, parallelism):
            return row.median(name), getattr(beside, name)
    return None, None


def setup_table(rows: Sequence[SetupFigures], unit: str) -> str:
    """Return all set-ups of a model: median, and least to most over repetitions."""
    lines = [
        [
            f"{row.setup.layout} {row.setup.parallelism}",
            f"{row.setup.batch}" + (f" for {row.setup.stands_for}" if row.setup.stands_for != row.setup.batch else ""),
            str(len(row.runs)),
            _range(row.spreads["samples_per_s"], format_count),
            _range(row.spreads["scaling_factor"], lambda value: f"{value:.3f}"),
            _range(row.spreads["network_bps"], format_rate),
            _range(row.spreads["network_bytes_per_sample"], format_bytes),
            _range(row.spreads["peak_memory_bytes"], format_bytes),
            _range(row.spreads["forward_ms"], lambda value: f"{value:.3g} ms"),
        ]
        for row in rows
    ]
    head = ["set-up", "batch", "runs", f"{unit}/s", "scaling factor", "network", f"bytes per {unit[:-1]}"]
    return markdown([*head, "peak memory", "forward of a microbatch"], lines)


def size_table(rows: Sequence[SetupFigures]) -> str:
    """Return the pipelines of the model-size study with the published line."""
    pipelines = [row for row in rows if row.setup.parallelism == "pipeline"]
    alone = {row.setup.preset: row for row in rows if row.setup.parallelism == "none"}
    first = pipelines[0].median("network_bytes_per_sample") if pipelines else None
    lines = []
    for row in pipelines:
        shape = planned(row.setup).shape
        num_layers, volume = getattr(shape, "num_layers", 0), row.median("network_bytes_per_sample")
        lines.append(
            [
                *(row.setup.preset, str(num_layers), format_count(shape.num_parameters)),
                _range(row.spreads["samples_per_s"], format_count),
                _range(row.spreads["network_bytes_per_sample"], format_bytes),
                f"{volume / first:.2f}" if volume and first else "",
                f"{published_volume_gbyte(num_layers) / published_volume_gbyte(12):.2f}",
                _range(alone[row.setup.preset].spreads["peak_memory_bytes"], format_bytes),
            ]
        )
    head = ["preset", "layers", "parameters", "tokens/s at 2x2", "bytes a token", "relative", "published line"]
    return markdown([*head, "peak memory of one rank"], lines)


def growth(rows: Sequence[SetupFigures]) -> Iterator[str]:
    """Yield how straight time and volume grow over layers."""
    pipelines = [row for row in rows if row.setup.parallelism == "pipeline"]
    for what, name, of in (
        ("time a token", "samples_per_s", lambda value: 1 / value),
        ("volume a token", "network_bytes_per_sample", float),
    ):
        points = [
            (float(getattr(planned(row.setup).shape, "num_layers", 0)), of(value))
            for row in pipelines
            if (value := row.median(name)) is not None
        ]
        line = straight_line([x for x, _ in points], [y for _, y in points])
        if line is not None:
            yield f"{what} over layers: a straight line explains {100 * line.r_squared:.1f} % of the variance"


def _range(found: Spread | None, of: Callable[[float], str]) -> str:
    if found is None:
        return ""
    return of(found.median) if found.num == 1 else f"{of(found.median)} ({of(found.low)} to {of(found.high)})"


def _listed(lines: Sequence[str] | Iterator[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
