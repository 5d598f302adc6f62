"""Arrays thinned out to what a screen can show and a page can hold.

A delay in one step of one rank is what the reader looks for, so a block of cells keeps its largest magnitude, and a bin
of steps its range, and neither is averaged away.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.plot_data import Values
from hpcpace.diagnosis.summary import WAIT_OR_TRANSFER
from hpcpace.quoting import printable

MAX_POINTS = 1500
_NO_VALUE = -128


def rounded(values: NDArray[Any]) -> list[float | None]:
    """Return numbers with four significant digits; None for what is not finite."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in np.asarray(values, np.float64)]


def binned(values: Values, most_rows: int, most_columns: int) -> tuple[Values, int, int]:
    """Return a matrix thinned out to the largest magnitude of each block, and how many rows and columns a block has.

    Args:
        values: (num_rows, num_columns), at least one of each; what is not finite is ignored, NaN where nothing is left.
        most_rows, most_columns: of the result.
    """
    num_rows, num_columns = values.shape
    by_row, by_column = -(-num_rows // most_rows), -(-num_columns // most_columns)
    finite = np.where(np.isfinite(values), values, np.nan)
    rows, columns = np.arange(0, num_rows, by_row), np.arange(0, num_columns, by_column)
    high = np.fmax.reduceat(np.fmax.reduceat(finite, rows, axis=0), columns, axis=1)
    low = np.fmin.reduceat(np.fmin.reduceat(finite, rows, axis=0), columns, axis=1)
    return np.where(-low > high, low, high), by_row, by_column


def packed(values: Values) -> dict[str, Any]:
    """Return a matrix as one signed byte per value: the root of its share of the largest magnitude, -128 for NaN.

    The root spends the 127 levels on small values: one at 1 % of the largest is still known to within 8 %.
    """
    known = np.isfinite(values)
    scale = float(np.abs(values, where=known, out=np.zeros(values.shape)).max(initial=0.0))
    share = np.where(known, values, 0.0) / (scale or 1.0)
    codes = np.where(known, np.rint(127 * np.sign(share) * np.sqrt(np.abs(share))), _NO_VALUE).astype(np.int8)
    return {
        "bytes": base64.b64encode(codes.tobytes()).decode(),
        "columns": values.shape[1],
        "scale": float(f"{scale:.6g}"),
    }


@dataclass(frozen=True, kw_only=True)
class Bins:
    """A series in bins of consecutive values; each array (num_bins,).

    Attributes:
        size: values in a bin, 1 where nothing was thinned out.
        first: index of the first value of a bin, int64.
        low, middle, high: smallest, median and largest finite value; NaN where there is none.
    """

    size: int
    first: NDArray[np.int64]
    low: Values
    middle: Values
    high: Values


def bins(values: Values, most: int) -> Bins:
    """Return a series of any length, (num_values,), in at most so many bins."""
    size = max(-(-len(values) // most), 1)
    first = np.arange(0, len(values), size)
    whole = np.full(len(first) * size, np.nan)
    whole[: len(values)] = np.where(np.isfinite(values), values, np.nan)
    ordered = np.sort(whole.reshape(len(first), size), axis=1)  # NaN last
    num_known = np.isfinite(ordered).sum(axis=1)
    rows = np.arange(len(first))
    last = np.maximum(num_known - 1, 0)
    return Bins(size=size, first=first, low=ordered[:, 0], middle=ordered[rows, last // 2], high=ordered[rows, last])


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


# (name, parts, colour, pattern): busy is blue, wait vermilion, transfer yellow; patterns tell equal hues apart.
PARTS = (
    ("data", ("data",), "@data", ""),
    ("forward", ("forward",), "@busy-1", ""),
    ("backward", ("backward",), "@busy-2", ""),
    ("optimizer", ("optimizer",), "@busy-3", ""),
    ("waiting for the host", ("host",), "@other", "/"),
    ("garbage collection", ("gc",), "@gc", ""),
    ("pacing", ("pace",), "@pace", ""),
    ("checkpoint, evaluation", ("checkpoint", "eval"), "@checkpoint", ""),
    ("gradient sync: wait", ("sync_wait",), "@wait", "/"),
    ("wait", ("wait",), "@wait", ""),
    ("gradient sync: transfer", ("sync_transfer",), "@transfer", "/"),
    ("transfer", ("transfer",), "@transfer", ""),
    ("gradient sync: wait or transfer", ("sync_either",), "@transfer", "/"),
    (WAIT_OR_TRANSFER, ("either",), "@transfer", ""),
    ("other", ("other",), "@other", ""),
)


_EITHER = {"transfer": "either", "sync_transfer": "sync_either"}


def drawn_parts(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the parts of a step as they are drawn: those without waits that are known have `either`."""
    names = {} if values["wait"] is not None else _EITHER
    return {names.get(name, name): value for name, value in values.items() if value is not None}


def drawn_names(parts: Sequence[str], *, are_waits_known: bool) -> tuple[str, ...]:
    """Return what parts of a lane are drawn as, as `drawn_parts` names them."""
    if are_waits_known:
        return tuple(parts)
    return tuple(_EITHER.get(name.replace("wait", "transfer"), name) for name in parts)


def marker(color: str, pattern: str, *, edge_px: int = 1) -> dict[str, Any]:
    """Return how plotly.js draws the bars of a part; `edge_px` is the gap between neighbours."""
    hatch = {"shape": pattern, "fillmode": "overlay", "fgcolor": "@paper", "size": 7, "solidity": 0.25}
    return {"color": color, "line": {"width": edge_px, "color": "@paper"}, "pattern": hatch}
