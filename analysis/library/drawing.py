"""Bars, matrices and curves of the figures of analysis/, each on axes that the caller made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpcpace.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, plain, plot_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_CURVES = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)
_MARKERS = "osD^vPX*"
_DASHED = (0, (4, 2))
_NOWHERE = "#B8B8B8"
_MAX_TICKS, _MIN_BARS = 16, 4
_EQUAL = 0.02  # of the logarithm to base 2


def draw_bars(
    axes: Axes,
    names: Sequence[str],
    values: NDArray[np.float64],
    intervals: NDArray[np.float64],
    colors: Sequence[str],
    label: str,
    *,
    empty: str = "none beyond noise",
) -> None:
    """Draw horizontal bars with their intervals, the first on top.

    Args:
        axes: empty axes.
        names: of the bars, (num_bars,).
        values: their lengths, (num_bars,).
        intervals: low and high ends, (num_bars, 2).
        colors: of the bars, (num_bars,).
        label: what the lengths are, with their unit.
        empty: the text in place of bars if there are none.
    """
    heights = np.arange(len(names))
    if len(names):
        axes.barh(heights, values, color=colors, height=0.6)
        axes.hlines(heights, intervals[:, 0], intervals[:, 1], color=BLACK, linewidth=1.5)
        axes.plot(intervals, np.column_stack([heights, heights]), "|", color=BLACK, markersize=9)
        axes.grid(axis="x", alpha=0.25)
    else:
        axes.set_xticks([])
        axes.text(0.5, 0.5, empty, transform=axes.transAxes, ha="center", color=GREY)
    axes.set_yticks(heights.tolist(), [plot_label(name) for name in names], fontsize=9)
    axes.set_ylim(max(len(names), _MIN_BARS) - 0.5, -0.5)
    axes.set_xlabel(label, fontsize=9)
    plain(axes)


def draw_matrix(figure: Figure | SubFigure, axes: Axes, names: Sequence[str], ratio: NDArray[np.float64]) -> None:
    """Draw ratios to what is usual: orange is more, purple less, grey is where there is none.

    Args:
        figure: what the axes belong to.
        axes: empty axes.
        names: of the units, (num_units,).
        ratio: NaN where there is none, (num_units, num_units).
    """
    factor = np.log2(np.maximum(ratio, 1e-3))
    largest = float(np.abs(factor[np.isfinite(factor)]).max(initial=0.0))
    limit = max(largest, 1.0)
    image = axes.imshow(factor, cmap="PuOr_r", vmin=-limit, vmax=limit, interpolation="nearest")
    axes.set_facecolor(_NOWHERE)
    ticks = list(range(0, len(names), -(-len(names) // _MAX_TICKS)))
    shown = [plot_label(names[tick]) for tick in ticks]
    axes.set_xticks(ticks, shown, rotation=90 if len("".join(shown)) > 24 else 0, fontsize=8)
    axes.set_yticks(ticks, shown, fontsize=8)
    if largest < _EQUAL:
        said = axes.text(0.5, 0.5, "no pair differs", transform=axes.transAxes, ha="center", va="center", fontsize=9)
        said.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.9})
    marks = np.linspace(-limit, limit, 5).tolist()
    bar = figure.colorbar(image, ax=axes, shrink=0.75, label="times the usual")
    bar.set_ticks(marks, labels=[f"{2.0**mark:.2g}" for mark in marks])


def legend_above(figure: Figure, axes: Axes, names: Sequence[str], colors: Sequence[str]) -> None:
    """Draw a legend of colours above all of a figure; `axes` are any of its axes, with fixed limits."""
    handles = [axes.bar([0], [0], color=color).patches[0] for color in colors]
    figure.legend(handles, names, loc="outside upper center", ncols=10, frameon=False, fontsize=9)


def draw_curve(
    axes: Axes,
    x: NDArray[np.generic],
    values: NDArray[np.float64],
    interval: tuple[NDArray[np.float64], NDArray[np.float64]] | None,
    null: NDArray[np.float64] | None,
    label: str,
    index: int,
) -> None:
    """Draw one of several curves, with its interval, and what it is held against as a dashed line.

    Args:
        axes: for all curves.
        x: ascending, (num_points,).
        values: (num_points,).
        interval: low and high ends, each (num_points,).
        null: what it is held against, (num_points,).
        label: for the legend.
        index: which curve: each has its own colour and marker.
    """
    color = _CURVES[index % len(_CURVES)]
    if interval is not None:
        axes.fill_between(x, *interval, color=color, alpha=0.2, linewidth=0)
    if null is not None:
        axes.plot(x, null, color=color, linestyle=_DASHED, linewidth=1.3)
    marker = _MARKERS[index % len(_MARKERS)]
    axes.plot(x, values, color=color, marker=marker, markersize=4, linewidth=1.8, label=label)


def explain_curves(axes: Axes, null: str) -> None:
    """Draw the legend of curves; `null` says what the dashed lines are."""
    axes.plot([], [], color=GREY, linestyle=_DASHED, label=null)
    axes.fill_between([], [], color=GREY, alpha=0.3, linewidth=0, label="95 % interval")
    axes.grid(alpha=0.25)
    plain(axes)
    axes.legend(frameon=False, fontsize=9)


def draw_points(axes: Axes, points: Sequence[tuple[float, ...]], label: str, index: int) -> None:
    """Draw one of several curves from points of x, value, low and high, in any order; nothing without a point.

    The interval is left out where an end of it is not known.

    Args:
        axes: for all curves.
        points: each of four numbers.
        label: for the legend.
        index: which curve, as of `draw_curve`.
    """
    if points:
        x, value, low, high = np.array(sorted(points)).T
        is_known = bool(np.isfinite([low, high]).all())
        draw_curve(axes, x, value, (low, high) if is_known else None, None, label, index)


def label_curves(axes: Axes, across: str, label: str, ticks: Sequence[float] = ()) -> None:
    """Name both axes of curves, and draw the legend; with ticks, x is logarithmic and has these.

    Args:
        axes: with all curves.
        across: what x is.
        label: what the values are, with their unit.
        ticks: of x.
    """
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks])
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    axes.grid(alpha=0.25)
    plain(axes)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)
