"""Where the time of a representative step goes: what each rank does when, and how that differs from its mean step.

`python analysis/bottleneck_timeline.py RUN... [--out DIR]`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpcpace import plots
from hpcpace.core.text import NS_PER_MS, format_duration, milliseconds, printable
from hpcpace.diagnosis.plot_source import StepDetail, step_detail
from hpcpace.metrics.phases import Part
from hpcpace.plots import KINDS, draw_step
from hpcpace.report.terminal import console_for_tables, note, table, title
from library import drawing, files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "bottleneck_timeline"
PARTS = tuple(f"{part.name.lower()}{suffix}_ms" for part in Part for suffix in ("", "_mean"))
COLUMNS = ("run", "step", "step_time_ms", "median_time_ms", "rank", "host", "role", "work_ms", "excess_ms", *PARTS)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The representative step of one run; `ranks` has number, host and role of each of its rows."""

    run: str
    detail: StepDetail
    ranks: tuple[tuple[int, str, str], ...]
    remarks: tuple[str, ...]


def find(run: files.ExaminedRun) -> Found:
    detail, ranks = step_detail(run.measured, run.panels), run.run.ranks
    varying = [name for name in ("pp", "tp") if ranks[name].nunique() > 1]
    roles = [" ".join(map("{}{}".format, varying, slots)) for slots in ranks[varying].itertuples(index=False)]
    places = tuple(zip(ranks["rank"], ranks.host, roles, strict=True))
    return Found(run=run.name, detail=detail, ranks=places, remarks=run.remarks)


def rows_of(found: Found) -> list[tuple[Any, ...]]:
    """Return a row per rank, those with most work beyond their role first: the others wait for them."""
    detail = found.detail
    parts = np.stack([detail.parts_ns, detail.mean_ns], axis=2).reshape(len(found.ranks), -1)
    values = np.column_stack([detail.work_ns, detail.excess_ns, parts]) / NS_PER_MS
    first = (found.run, detail.step, detail.time_ns / NS_PER_MS, detail.median_ns / NS_PER_MS)
    order = np.argsort(-detail.excess_ns, kind="stable").tolist()
    return [(*first, *found.ranks[row], *values[row].tolist()) for row in order]


def of_kind(name: str, parts_ns: NDArray[np.float64]) -> float:
    return float(parts_ns[..., list(KINDS[name][0])].sum())


def print_table(found: Found) -> None:
    console, detail = console_for_tables(), found.detail
    below = "ms of each part, and below it those of the rank's mean regular step"
    title(console, f"{found.run}: step {detail.step}", below)
    names = [name for name in KINDS if of_kind(name, detail.parts_ns) or of_kind(name, detail.mean_ns)]
    shown = table("rank", ["step", "own\nwork", *(name.replace(", ", "\n") for name in names)])
    rows = detail.rows.tolist()
    most = max(rows, key=lambda row: detail.excess_ns[row])
    for row in rows:
        step_ns, mean_ns = detail.parts_ns[row], detail.mean_ns[row]
        cells = [step_ns.sum(), detail.work_ns[row], *(of_kind(name, step_ns) for name in names)]
        rank, host, role = found.ranks[row]
        shown.add_row(f"{rank} {printable(host)}", *map(milliseconds, cells), style="bold" * (row == most))
        means = [milliseconds(of_kind(name, mean_ns)) for name in names]
        shown.add_row(role, milliseconds(mean_ns.sum()), "", *means, style="dim")
    console.print(shown)
    usual = format_duration(detail.median_ns)
    note(console, f"the step took {format_duration(detail.time_ns)}, nearest to the median {usual} of regular steps")
    note(console, "regular steps are those without checkpoint and evaluation; a report's means are over all steps")
    note(console, f"most work beyond its role: rank {found.ranks[most][0]}, {format_duration(detail.excess_ns[most])}")
    if len(rows) < len(found.ranks):
        note(console, f"{len(rows)} of {len(found.ranks)} ranks shown, typical and extreme ones; the CSV has all")
    for remark in found.remarks:
        note(console, f"{found.run}: {remark}")


def draw(results: Sequence[Found]) -> Figure:
    heights = [1.1 + 0.27 * len(found.detail.rows) for found in results]
    figure, drawn = plots.new_figure(10.0, sum(heights) + 0.5), set[str]()
    panels = figure.subplots(len(results), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, found in zip(panels, results, strict=True):
        detail, rows = found.detail, found.detail.rows.tolist()
        drawn.update(draw_step(axes, detail, ["rank {} {} {}".format(*found.ranks[row]) for row in rows]))
        times = f"{format_duration(detail.time_ns)}, median {format_duration(detail.median_ns)}"
        axes.set_title(f"{plots.plot_label(found.run)}: step {detail.step} ({times})", loc="left", fontsize=10)
    used = [name for name in KINDS if name in drawn]
    drawing.legend_above(figure, panels[0], used, [KINDS[name][1] for name in used])
    return figure


@files.figure_command
def command(runs: tuple[Path, ...], out: Path) -> None:
    """Show where a representative step of each RUN goes: a table of its parts, and a lane for each rank."""
    results = [find(run) for run in files.examined(runs)]
    rows = [row for found in results for row in rows_of(found)]
    written = files.write_files(out, NAME, columns=COLUMNS, rows=rows, figure=draw(results), read=runs)
    for found in results:
        print_table(found)
    print(written)


if __name__ == "__main__":
    files.run_script(command)
