"""A plot as page.js takes it, and the pieces that plots are made of.

A plot is plain dictionaries for plotly.js, so that no figure is checked twice. Colours are names that page.js looks up
in the style sheet (`@wait`), because light, dark and print differ.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import printable
from hpcpace.diagnosis.plot_data import Values
from hpcpace.report.html.thinning import MAX_POINTS, bins, rounded

LABEL_WIDTH = 22
_MOST_TICKS = 24
_MARK = "\N{BLACK LEFT-POINTING TRIANGLE}"
NAMED = f" {_MARK} is whom the verdict names."


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot.

    Attributes:
        name: unique in the page, the id of its element.
        label: what it shows, for those who cannot see it.
        caption: how to read it, and what was thinned out.
        height_px: its height.
        traces, layout: as plotly.js takes them; `packed` in a trace stands for its z.
        legend: names, colours and patterns.
        rows: names of its rows, with the ranks and hosts of each as of `hpcpace.report.html.text.About`, so that the
            reader can choose some; empty where rows are not about ranks.
    """

    name: str
    label: str
    caption: str
    height_px: int
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    legend: Sequence[tuple[str, str, str]] = ()
    rows: Sequence[tuple[str, str, str]] = ()


def plot_text(text: str, width: int = 200) -> str:
    """Return text from a file so that plotly.js, which takes `<b>` for a tag, shows it as it is."""
    shown = printable(text)
    return html.escape(shown if len(shown) <= width else f"{shown[: width - 1]}…", quote=False)


def marked(name: str, is_named: bool) -> str:
    """Return the name of a row with a mark where the verdict names it; `NAMED` explains it in the caption."""
    return f"{name} {_MARK}" if is_named else name


def series(step: NDArray[np.int64], values: Values, color: str, unit: str) -> tuple[list[dict[str, Any]], str]:
    """Return the traces of a series over steps, and a remark where it was thinned out."""
    found = bins(values, MAX_POINTS)
    x = [int(value) for value in step[found.first]]
    middle = line(x, found.middle, color, hover=f"step %{{x}}: %{{y:.4~g}} {unit}")
    if found.size == 1:
        return [middle], ""
    remark = f" Line: median of {found.size} steps; band: their smallest and largest."
    return [*band(x, found.low, found.high, f"{color}-band"), middle], remark


def band(x: Sequence[int], low: Values, high: Values, color: str) -> list[dict[str, Any]]:
    """Return the traces of a band between two curves."""
    edge = {"type": "scatter", "mode": "lines", "x": x, "line": {"width": 0}, "hoverinfo": "skip"}
    return [{**edge, "y": rounded(low)}, {**edge, "y": rounded(high), "fill": "tonexty", "fillcolor": color}]


def line(x: Sequence[Any], y: Values, color: str, *, hover: str, dash: str = "solid") -> dict[str, Any]:
    """Return the trace of a curve."""
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "x": x,
        "y": rounded(y),
        "line": {"color": color, "width": 1.6, "dash": dash},
        "marker": {"color": color},
        "hovertemplate": f"{hover}<extra></extra>",
    }


def mark(axis: str, value: float, name: str, side: str = "bottom") -> dict[str, Any]:
    """Return the shape of a dotted line across the plot at a value, and the annotation with its name."""
    at = {"xref": "paper", "yref": axis}
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    return {
        "shape": {"type": "line", "x0": 0, "x1": 1, "y0": value, "y1": value, "line": line, **at},
        "annotation": {
            "x": 1,
            "y": value,
            "text": name,
            "showarrow": False,
            "xanchor": "right",
            "yanchor": side,
            "bgcolor": "@paper",
            **at,
        },
    }


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis of numbers."""
    return {"title": {"text": title}, **more}


def names_axis(num_names: int) -> dict[str, Any]:
    """Return an axis of names, the first one at the top or left, with all of them shown if there is room."""
    ticks = {"nticks": _MOST_TICKS} if num_names > 2 * _MOST_TICKS else {}
    return {"type": "category", "showgrid": False, "range": [num_names - 0.5, -0.5], **ticks}


def unique(names: Iterable[str]) -> list[str]:
    """Return names with a number behind those that came before: equal ones would share one row of a plot."""
    seen: dict[str, int] = {}
    made = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        made.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return made
