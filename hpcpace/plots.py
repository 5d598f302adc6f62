"""Plots of runs on axes of matplotlib: `hpcpace.plots.lateness(hpcpace.load(RUN))`; see docs/python.md.

Each draws on given axes or on new ones; no figure is shown, no state is kept. People with any common colour blindness
can distinguish the colours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpcpace.core.errors import CannotTell, check_package
from hpcpace.core.text import NS_PER_MS, format_duration, printable
from hpcpace.diagnosis.plot_source import StepDetail, step_detail
from hpcpace.frames.run import Run
from hpcpace.metrics.phases import EXPOSED_TRANSFER, EXPOSED_WAIT, Part

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame


__all__ = ["lateness", "parts", "scaling", "timeline"]

# Okabe and Ito (2008), Color Universal Design.
BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, VERMILION, PURPLE, BLACK, GREY = "#E69F00", "#D55E00", "#CC79A7", "#222222", "#9A9A9A"
PLUM, BROWN, LIGHT = "#6A3D80", "#7F6A4F", "#D0D0D0"

_MAX_LABEL = 28

Stretch = tuple[str, float, float]
"""Colour, begin and end."""


def plot_label(text: str) -> str:
    """Return a name as a plot can show it: short, and without what matplotlib takes for a formula or leaves out."""
    shown = printable(text).lstrip("_") or "?"
    return (shown if len(shown) <= _MAX_LABEL else shown[: _MAX_LABEL - 1] + "…").replace("$", r"\$")


def new_figure(width_in: float, height_in: float) -> Figure:
    """Return an empty figure of a size in inches; it needs no display, and no state is left behind."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained")


def plain(axes: Axes) -> None:
    """Take the frame's upper and right lines away."""
    axes.spines[["top", "right"]].set_visible(False)


def draw_lanes(axes: Axes, names: Sequence[str], lanes: Sequence[Sequence[Stretch]], *, marked: int) -> None:
    """Draw lanes of coloured stretches of time, the first on top.

    Args:
        axes: empty axes.
        names: of the lanes, (num_lanes,).
        lanes: the stretches of each.
        marked: the lane whose name is printed bold.
    """
    for height, stretches in enumerate(lanes):
        spans = [(begin, end - begin) for _, begin, end in stretches]
        # Without an outline, a stretch narrower than a pixel is drawn or not as rounding has it.
        colors = [color for color, *_ in stretches]
        axes.broken_barh(spans, (height - 0.4, 0.8), facecolors=colors, edgecolors=colors, linewidth=0.3, snap=False)
    axes.set_yticks(range(len(names)), [plot_label(name) for name in names], fontsize=8)
    axes.get_yticklabels()[marked].set_fontweight("bold")
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, max((end for stretches in lanes for *_, end in stretches), default=1.0))
    plain(axes)


KINDS: Mapping[str, tuple[tuple[Part, ...], str]] = {
    "data": ((Part.DATA,), YELLOW),
    "forward": ((Part.FORWARD,), SKY),
    "backward": ((Part.BACKWARD,), BLUE),
    "optimizer": ((Part.OPTIMIZER,), GREEN),
    "gc": ((Part.GC,), PURPLE),
    "pace": ((Part.PACE,), PLUM),
    "ckpt, eval": ((Part.CHECKPOINT, Part.EVAL), BROWN),
    "wait": (EXPOSED_WAIT, VERMILION),
    "transfer": (EXPOSED_TRANSFER, ORANGE),
    "other": ((Part.OTHER, Part.HOST), LIGHT),
}
"""The parts of a step as plots show them, with their colours."""
_HUES = {part: color for parts, color in KINDS.values() for part in parts}
_MAX_COLUMNS = 1000  # display: of a heat map or a stack; more steps are put together
_HIGHEST = 99.0  # display: percentile of the excess that has the darkest colour
_FEW_RANKS = 16  # display: rows of a heat map that all have their number


def _axes(axes: Axes | None, width_in: float, height_in: float) -> Axes:
    if axes is not None:
        return axes
    check_package("matplotlib", extra="analysis")
    return new_figure(width_in, height_in).subplots()


def _of_steps(frame: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return means by step, of several consecutive steps together where there are too many to draw."""
    step = frame["step"]
    width = -(-max(int(step.nunique()), 1) // _MAX_COLUMNS)
    place = np.unique(step, return_inverse=True)[1] // width
    return frame[[*names]].groupby([place, *([frame["rank"]] if "rank" in frame else [])]).mean()


def lateness(run: Run, axes: Axes | None = None) -> Axes:
    """Draw how much each rank's own work exceeds that of others of its role in each step, as a heat map.

    A slow rank is a dark row, a stall of all a dark column.

    Args:
        run: the run, or a part of it from `Run.between`.
        axes: to draw on; new ones if None.

    Raises:
        CannotTell: own work is not known, or no two ranks do the same.
        UsageError: matplotlib or pandas is not installed.
    """
    frame = run.parts
    if not frame.excess_ns.notna().any():
        raise CannotTell(f"{run.path}: {run.judged.measured.unknown or 'no two ranks are known to do the same work'}")
    axes = _axes(axes, 9.0, 3.5)
    excess = _of_steps(frame[["step", "rank", "excess_ns"]], ["excess_ns"]).excess_ns.unstack()
    values = excess.to_numpy().T / NS_PER_MS
    limit = max(float(np.nanpercentile(np.maximum(values, 0), _HIGHEST)), 1e-3)
    first, last = int(frame["step"].min()), int(frame["step"].max())
    extent = (first - 0.5, last + 0.5, len(values) - 0.5, -0.5)
    image = axes.imshow(
        values, aspect="auto", cmap="magma_r", vmin=0, vmax=limit, interpolation="nearest", extent=extent
    )
    axes.figure.colorbar(image, ax=axes, label="own work beyond its role, ms")
    ranks = excess.columns.tolist()
    shown = range(0, len(ranks), -(-len(ranks) // _FEW_RANKS))
    axes.set_yticks(list(shown), [str(ranks[row]) for row in shown], fontsize=8)
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel("rank", fontsize=9)
    axes.set_title(plot_label(run.path.name), loc="left", fontsize=10)
    return axes


def parts(run: Run, axes: Axes | None = None) -> Axes:
    """Draw where each step went, mean over ranks, as stacked areas.

    Args:
        run: the run, or a part of it; `run.between(ranks=[3])` draws one rank.
        axes: to draw on; new ones if None.

    Raises:
        CannotTell: the parts of no step are known.
        UsageError: matplotlib or pandas is not installed.
    """
    names = [f"{part.name.lower()}_ns" for part in Part]
    means = _of_steps(run.parts[["step", *names]], names)
    if not means.forward_ns.notna().any():
        raise CannotTell(f"{run.path}: {run.judged.measured.unknown or 'there is no step to draw'}")
    axes = _axes(axes, 9.0, 3.5)
    values = means.fillna(0.0).to_numpy() / NS_PER_MS
    of_kind = {name: values[:, list(of)].sum(axis=1) for name, (of, _) in KINDS.items()}
    drawn = [name for name, column in of_kind.items() if column.any()]
    step = np.linspace(run.parts["step"].min(), run.parts["step"].max(), len(values))
    axes.stackplot(
        step, [of_kind[name] for name in drawn], colors=[KINDS[name][1] for name in drawn], labels=drawn, linewidth=0
    )
    axes.set_xlim(step[0], max(step[-1], step[0] + 1))
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel("mean over ranks, ms", fontsize=9)
    axes.legend(frameon=False, fontsize=8, ncols=len(drawn), loc="lower left", bbox_to_anchor=(0, 1))
    plain(axes)
    return axes


def timeline(run: Run, step: int | None = None, axes: Axes | None = None) -> Axes:
    """Draw a step as a lane of time for each rank, or for at most 16 typical and extreme ones.

    Args:
        run: the run.
        step: its number; the step closest to the median if None.
        axes: to draw on; new ones if None.

    Raises:
        CannotTell: phases are not known, or the step is not one of those used.
        UsageError: matplotlib is not installed.
    """
    measured, panels = run.judged.measured, run.judged.panels
    if measured.host_timed:
        raise CannotTell(f"{run.path}: {measured.unknown}")
    detail = step_detail(measured, panels, step)
    axes = _axes(axes, 10.0, 1.1 + 0.27 * len(detail.rows))
    labels = [f"rank {panels.rank[row]} {panels.host[row]}" for row in detail.rows.tolist()]
    drawn = draw_step(axes, detail, labels)
    title = f"{plot_label(run.path.name)}: step {detail.step} ({format_duration(detail.time_ns)})"
    axes.set_xlabel(f"ms since the first rank began the step; {title}", fontsize=9)
    handles = [axes.bar([0], [0], color=KINDS[name][1]).patches[0] for name in drawn]
    axes.legend(handles, drawn, frameon=False, fontsize=8, ncols=len(drawn), loc="lower left", bbox_to_anchor=(0, 1))
    return axes


def draw_step(axes: Axes, detail: StepDetail, labels: Sequence[str]) -> list[str]:
    """Draw the lanes of a step, each with a label, and return the names of the kinds of parts in it."""
    lanes = [[(_HUES[part], begin / NS_PER_MS, end / NS_PER_MS) for part, begin, end in lane] for lane in detail.lanes]
    draw_lanes(axes, labels, lanes, marked=int(np.argmax(detail.excess_ns[detail.rows])))
    axes.set_xlabel("ms since the first rank began the step", fontsize=9)
    used = {color for lane in lanes for color, *_ in lane}
    return [name for name, (_, color) in KINDS.items() if color in used]


def scaling(runs: DataFrame, axes: Axes | None = None) -> Axes:
    """Draw throughput over the number of nodes, each run a point, with the ideal line through the smallest size.

    Args:
        runs: from `hpcpace.load_many`, of the same work; those without throughput or nodes are left out.
        axes: to draw on; new ones if None.

    Raises:
        CannotTell: no run has both.
        UsageError: matplotlib is not installed.
    """
    known = runs[runs.samples_per_s.notna() & (runs.num_nodes > 0)]
    if not len(known):
        raise CannotTell("no run has a throughput and a number of nodes")
    axes = _axes(axes, 6.0, 4.0)
    by_size = known.groupby("num_nodes").samples_per_s.median()
    ideal = by_size.iloc[0] / by_size.index[0] * by_size.index.to_numpy()
    axes.plot(by_size.index, ideal, color=GREY, linestyle="--", label="ideal")
    axes.plot(by_size.index, by_size, color=BLUE, linewidth=1.8, label="median")
    axes.plot(known.num_nodes, known.samples_per_s, "o", color=BLUE, alpha=0.6, label="runs")
    axes.set_xscale("log", base=2)
    axes.set_xticks(by_size.index.tolist(), [str(int(count)) for count in by_size.index])
    axes.set_xlabel("nodes", fontsize=9)
    units = known.samples_unit[known.samples_unit != ""].unique()
    axes.set_ylabel(f"{units[0] if len(units) == 1 else 'samples'} per second", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)
    plain(axes)
    return axes
