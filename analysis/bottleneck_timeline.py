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

from hpcpace.core.text import NS_PER_MS, format_duration, milliseconds, printable
from hpcpace.diagnosis.plot_source import StepDetail, step_detail
from hpcpace.metrics.phases import EXPOSED_TRANSFER, EXPOSED_WAIT, Part
from hpcpace.plots import charts as plots
from hpcpace.plots import files
from hpcpace.report.terminal import note, table, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "bottleneck_timeline"
KINDS = {
    "data": ((Part.DATA,), plots.YELLOW),
    "forward": ((Part.FORWARD,), plots.SKY),
    "backward": ((Part.BACKWARD,), plots.BLUE),
    "optimizer": ((Part.OPTIMIZER,), plots.GREEN),
    "gc": ((Part.GC,), plots.PURPLE),
    "pace": ((Part.PACE,), plots.PLUM),
    "ckpt, eval": ((Part.CHECKPOINT, Part.EVAL), plots.BROWN),
    "wait": (EXPOSED_WAIT, plots.VERMILION),
    "transfer": (EXPOSED_TRANSFER, plots.ORANGE),
    "other": ((Part.OTHER,), plots.LIGHT),
}
HUES = {part: color for parts, color in KINDS.values() for part in parts}
PARTS = tuple(f"{part.name.lower()}{suffix}_ms" for part in Part for suffix in ("", "_mean"))
COLUMNS = ("run", "step", "step_time_ms", "median_time_ms", "rank", "host", "role", "work_ms", "excess_ms", *PARTS)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The representative step of one run; rank, host and role are those of its rows."""

    run: str
    detail: StepDetail
    rank: tuple[int, ...]
    host: tuple[str, ...]
    role: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def slowest(self) -> int:
        """The lane of the rank with most work beyond its role."""
        return int(np.argmax(self.detail.excess_ns[self.detail.rows]))


def find(run: files.ExaminedRun) -> Found:
    headers = [trace.header for trace in run.measured.timed.traces]
    slots = [{"pp": header.pp, "tp": header.tp} for header in headers]
    varying = [name for name in ("pp", "tp") if len({slot[name] for slot in slots}) > 1]
    return Found(
        run=run.name,
        detail=step_detail(run.measured, run.panels),
        rank=run.measured.timed.ranks,
        host=run.panels.host,
        role=tuple(" ".join(f"{name}{slot[name]}" for name in varying) for slot in slots),
        remarks=run.remarks,
    )


def rows_of(found: Found) -> list[tuple[Any, ...]]:
    """Return a row per rank, those with most work beyond their role first: the others wait for them."""
    detail = found.detail
    parts = np.stack([detail.parts_ns, detail.mean_ns], axis=2).reshape(len(found.rank), -1)
    values = np.column_stack([detail.work_ns, detail.excess_ns, parts]) / NS_PER_MS
    first = (found.run, detail.step, detail.time_ns / NS_PER_MS, detail.median_ns / NS_PER_MS)
    order = np.argsort(-detail.excess_ns, kind="stable").tolist()
    return [(*first, found.rank[row], found.host[row], found.role[row], *values[row].tolist()) for row in order]


def of_kind(name: str, parts_ns: NDArray[np.float64]) -> float:
    return float(parts_ns[..., list(KINDS[name][0])].sum())


def print_table(found: Found) -> None:
    console, detail = files.console_for_tables(), found.detail
    title(
        console,
        f"{found.run}: step {detail.step}",
        "ms of each part, and below it those of the rank's mean regular step",
    )
    names = [name for name in KINDS if of_kind(name, detail.parts_ns) or of_kind(name, detail.mean_ns)]
    shown = table("rank", ["step", "own\nwork", *(name.replace(", ", "\n") for name in names)])
    rows = detail.rows.tolist()
    for lane, row in enumerate(rows):
        step_ns, mean_ns = detail.parts_ns[row], detail.mean_ns[row]
        cells = [step_ns.sum(), detail.work_ns[row], *(of_kind(name, step_ns) for name in names)]
        label = f"{found.rank[row]} {printable(found.host[row])}"
        shown.add_row(label, *map(milliseconds, cells), style="bold" if lane == found.slowest else "")
        means = [milliseconds(of_kind(name, mean_ns)) for name in names]
        shown.add_row(found.role[row], milliseconds(mean_ns.sum()), "", *means, style="dim")
    console.print(shown)
    usual = format_duration(detail.median_ns)
    note(console, f"the step took {format_duration(detail.time_ns)}, nearest to the median {usual} of regular steps")
    note(console, "regular steps are those without checkpoint and evaluation; a report's means are over all steps")
    most = rows[found.slowest]
    note(console, f"most work beyond its role: rank {found.rank[most]}, {format_duration(detail.excess_ns[most])}")
    if len(rows) < len(found.rank):
        note(console, f"{len(rows)} of {len(found.rank)} ranks shown, typical and extreme ones; the CSV has all")
    for remark in found.remarks:
        note(console, f"{found.run}: {remark}")


def draw(results: Sequence[Found]) -> Figure:
    heights = [1.1 + 0.27 * len(found.detail.rows) for found in results]
    figure = plots.new_figure(10.0, sum(heights) + 0.5)
    panels = figure.subplots(len(results), 1, squeeze=False, height_ratios=heights)[:, 0]
    drawn: set[str] = set()
    for axes, found in zip(panels, results, strict=True):
        detail, rows = found.detail, found.detail.rows.tolist()
        lanes = [
            [(HUES[part], begin / NS_PER_MS, end / NS_PER_MS) for part, begin, end in lane] for lane in detail.lanes
        ]
        drawn |= {color for lane in lanes for color, *_ in lane}
        names = [f"rank {found.rank[row]} {found.host[row]} {found.role[row]}" for row in rows]
        plots.draw_lanes(axes, names, lanes, marked=found.slowest)
        axes.set_xlabel("ms since the first rank began the step", fontsize=9)
        times = f"{format_duration(detail.time_ns)}, median {format_duration(detail.median_ns)}"
        axes.set_title(f"{plots.plot_label(found.run)}: step {detail.step} ({times})", loc="left", fontsize=10)
    used = [(name, color) for name, (_, color) in KINDS.items() if color in drawn]
    plots.legend_above(figure, panels[0], [name for name, _ in used], [color for _, color in used])
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
