"""What plots are made of: arrays thinned out to what a page can hold, curves, bars, intervals and heat maps.

A delay in one step of one rank is what the reader looks for, so a block of cells keeps its largest magnitude, and a bin
of steps its range, and neither is averaged away.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.text import printable
from hpcpace.diagnosis.plot_data import Values
from hpcpace.report.document import Plot

MAX_POINTS = 1500
MAX_UNITS = 256
"""The rows and columns of a map of hosts or switches: a cell is then two pixels wide."""
COLOURS = ("@c1", "@c2", "@c3", "@c4", "@c5", "@c6", "@c7", "@c8")
LABEL_WIDTH = 22
_MAX_TICKS = 24
_MAX_CELLS_APART = 64  # more cells side by side have no room for a gap
_MARK = "\N{BLACK LEFT-POINTING TRIANGLE}"
NAMED = f" {_MARK} is whom the verdict names."
_NO_VALUE = -128


def rounded(values: NDArray[Any]) -> list[float | None]:
    """Return numbers with four significant digits; None for what is not finite."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in np.asarray(values, np.float64)]


def binned(values: Values, max_rows: int, max_columns: int) -> tuple[Values, int, int]:
    """Return a matrix thinned out to the largest magnitude of each block, and how many rows and columns a block has.

    Args:
        values: (num_rows, num_columns), at least one of each; what is not finite is ignored, NaN where nothing is left.
        max_rows, max_columns: of the result.
    """
    num_rows, num_columns = values.shape
    by_row, by_column = -(-num_rows // max_rows), -(-num_columns // max_columns)
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


def bins(values: Values, max_bins: int) -> Bins:
    """Return a series of any length, (num_values,), in at most so many bins."""
    size = max(-(-len(values) // max_bins), 1)
    first = np.arange(0, len(values), size)
    whole = np.full(len(first) * size, np.nan)
    whole[: len(values)] = np.where(np.isfinite(values), values, np.nan)
    ordered = np.sort(whole.reshape(len(first), size), axis=1)  # NaN last
    num_known = np.isfinite(ordered).sum(axis=1)
    rows = np.arange(len(first))
    last = np.maximum(num_known - 1, 0)
    return Bins(size=size, first=first, low=ordered[:, 0], middle=ordered[rows, last // 2], high=ordered[rows, last])


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
    ticks = {"nticks": _MAX_TICKS} if num_names > 2 * _MAX_TICKS else {}
    return {"type": "category", "showgrid": False, "range": [num_names - 0.5, -0.5], **ticks}


def unique(names: Iterable[str]) -> list[str]:
    """Return names with a number behind those that came before: equal ones would share one row of a plot."""
    seen: dict[str, int] = {}
    made = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        made.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return made


def marker(color: str, pattern: str, *, edge_px: int = 1) -> dict[str, Any]:
    """Return how plotly.js draws the bars of a part; `edge_px` is the gap between neighbours."""
    hatch = {"shape": pattern, "fillmode": "overlay", "fgcolor": "@paper", "size": 7, "solidity": 0.25}
    return {"color": color, "line": {"width": edge_px, "color": "@paper"}, "pattern": hatch}


def bars(
    names: Sequence[str], values: NDArray[Any], look: dict[str, Any], hover: str, *, data: Sequence[Any] = ()
) -> dict[str, Any]:
    """Return the trace of horizontal bars; `look` is of `marker`, `data` what `hover` calls %{customdata}."""
    return {
        "type": "bar",
        "orientation": "h",
        "x": rounded(values),
        "y": names,
        "marker": look,
        "hovertemplate": f"{hover}<extra></extra>",
        **({"customdata": data} if len(data) else {}),
    }


def intervals(
    names: Sequence[str],
    middle: Values,
    low: Values,
    high: Values,
    colors: str | Sequence[str],
    hover: str,
    *,
    data: Sequence[Any] = (),
) -> dict[str, Any]:
    """Return the trace of values with their intervals, one a row."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": rounded(middle),
        "y": names,
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": rounded(np.maximum(high - middle, 0)),
            "arrayminus": rounded(np.maximum(middle - low, 0)),
            "color": "@muted",
            "thickness": 1.5,
            "width": 4,
        },
        "marker": {"size": 10, "color": colors},
        "hovertemplate": f"{hover}<extra></extra>",
        **({"customdata": data} if len(data) else {}),
    }


def heat_map(
    x: Sequence[Any],
    names: Sequence[str],
    values: Values,
    *,
    scale: tuple[str, float, float],
    unit: str,
    hover: str,
    xaxis: dict[str, Any],
    **more: Any,
) -> Plot:
    """Return a heat map.

    Args:
        x: of the columns.
        names: of the rows.
        values: (num_rows, num_columns), thinned out.
        scale: the name of the colours, and the values at which they begin and end.
        unit: of the values.
        hover: what is shown of a cell.
        xaxis: of the columns.
        more: the other fields of `Plot`.
    """
    colors, least, largest = scale
    gap = 1 if len(x) <= _MAX_CELLS_APART and len(x) == len(names) else 0
    # Above the plot: to its right it would leave no room for the plot on a phone.
    place = {"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom", "ypad": 6, "xpad": 0}
    ticks = {"ticksuffix": f" {unit}", "nticks": 4, "tickangle": 0}
    trace = {
        "type": "heatmap",
        "packed": packed(values),
        "x": x,
        "y": names,
        "zmin": least,
        "zmax": largest,
        "colorscale": colors,
        "xgap": gap,
        "ygap": gap,
        "colorbar": {"thickness": 8, "lenmode": "pixels", "len": 240, "outlinewidth": 0, **place, **ticks},
        "hovertemplate": f"{hover}<extra></extra>",
    }
    layout = {"xaxis": xaxis, "yaxis": names_axis(len(names)), "margin": {"t": 46, "b": 44}}
    return Plot(traces=[trace], layout=layout, **more)


def unit_map(names: Sequence[str], values: Values, **more: Any) -> Plot:
    """Return a heat map whose rows and columns have the same names; the arguments are those of `heat_map`."""
    columns = {**names_axis(len(names)), "range": [-0.5, len(names) - 0.5], "tickangle": -45 if len(names) > 6 else 0}
    height_px = int(min(max(170 + 20 * len(names), 260), 520))
    return heat_map(names, names, values, xaxis=columns, height_px=height_px, **more)


def host_map(hosts: Sequence[str], values: Values, *, unit: str, is_rate: bool, caption: str, **more: Any) -> Plot:
    """Return the heat map of what goes from the host of a row to that of a column.

    Args:
        hosts: their names.
        values: (num_hosts, num_hosts); NaN where nothing went.
        unit: of the values.
        is_rate: whether little is bad: then of many hosts the slowest are kept, else those with most.
        caption: how to read it; what was thinned out is added.
        more: the other fields of `Plot`.
    """
    # The slowest of a block is what a reader looks for.
    kept, by_host, _ = binned(1.0 / np.maximum(values, 1e-9) if is_rate else values, MAX_UNITS, MAX_UNITS)
    thinned = f" Each cell is the {'slowest' if is_rate else 'most'} of {by_host} by {by_host} hosts."
    names = unique(plot_text(host, LABEL_WIDTH) for host in hosts[::by_host])
    scale = ("@rate", 0.0, float(np.nanmedian(values))) if is_rate else ("@amount", 0.0, float(np.nanmax(values)))
    return unit_map(
        names,
        1.0 / kept if is_rate else kept,
        scale=scale,
        unit=unit,
        hover=f"%{{y}} to %{{x}}: %{{z:.3~g}} {unit}",
        caption=caption + thinned * (by_host > 1),
        rows=[
            (one, "", " ".join(dict.fromkeys(hosts[by_host * place : by_host * (place + 1)])))
            for place, one in enumerate(names)
        ],
        **more,
    )
