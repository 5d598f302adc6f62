"""The heat maps of the HTML pages: own delay by rank and step, transfer between units of the network, host to host."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import plural
from hpcpace.diagnosis.plot_data import Matrix, Values
from hpcpace.report.document import Plot
from hpcpace.report.drawing import LABEL_WIDTH, NAMED, axis, binned, marked, names_axis, packed, plot_text, unique

MAX_ROWS, MAX_COLUMNS, MAX_UNITS = 512, 1000, 256
_TWICE, _ALIKE, _SAME = 100.0, 5.0, 0.05  # percent


def own_delay(
    step: NDArray[np.int64], delay_ms: Values, labels: Sequence[str], remark: str = "", named: Collection[int] = ()
) -> Plot:
    """Return the heat map of each rank's delay beyond its role, by rank and step.

    Args:
        step: numbers of the steps, (num_steps,).
        delay_ms: (num_ranks, num_steps).
        labels: names of its rows.
        remark: a sentence that ends its caption.
        named: rows of the ranks that the verdict names, which are marked.
    """
    values, by_row, by_column = binned(delay_ms, MAX_ROWS, MAX_COLUMNS)
    names = [plot_text(label, LABEL_WIDTH) for label in labels[::by_row]]
    if by_row > 1:
        names = [f"{plot_text(label, 14)} …" for label in labels[::by_row]]
    names = unique(
        marked(name, any(by_row * place <= row < by_row * (place + 1) for row in named))
        for place, name in enumerate(names)
    )
    remark = f" {remark}" * bool(remark) + NAMED * bool(named)
    parts = [plural(by_row, "rank")] * (by_row > 1) + [plural(by_column, "step")] * (by_column > 1)
    thinned = f" Each cell is the largest magnitude of {' and '.join(parts)}." if parts else ""
    limit = _limit(values)
    return Plot(
        name="own-delay",
        label=f"Own delay of {plural(len(labels), 'rank')} over {plural(len(step), 'step')}",
        caption=(
            "Work of a rank in a step beyond the median of the others of its role: orange is later, blue earlier. A "
            f"line across is a slow rank, a line down a shared cause.{thinned} Colours end at {limit:.3g} ms; larger "
            f"values have the last colour.{remark}"
        ),
        height_px=110 + min(max(14 * len(values), 30 * min(len(values), 8)), 560),
        traces=[
            {
                "type": "heatmap",
                "packed": packed(values),
                "x": [int(value) for value in step[::by_column]],
                "y": names,
                "zmin": -limit,
                "zmax": limit,
                "colorscale": "@diverging",
                "colorbar": colorbar("ms"),
                "hovertemplate": "%{y}, step %{x}: %{z:.3~g} ms<extra></extra>",
            }
        ],
        layout={"xaxis": axis("step"), "yaxis": names_axis(len(values)), "margin": {"t": 46, "b": 44}},
        rows=[(name, *_about(labels[by_row * place : by_row * (place + 1)])) for place, name in enumerate(names)],
    )


def _about(labels: Sequence[str]) -> tuple[str, str]:
    """Return the ranks and the hosts of some rows, whose labels are like `3 n1`."""
    parts = [label.partition(" ") for label in labels]
    first, last = parts[0][0], parts[-1][0]
    hosts = dict.fromkeys(host for *_, host in parts)
    return first if first == last else f"{first}-{last}", " ".join(hosts)


def transfer_matrix(matrix: Matrix, unit: str, units: str) -> Plot:
    """Return the heat map of transfer between units of one level; `unit` and `units` are its name."""
    values, by_unit, _ = binned(100 * (matrix.ratio - 1), MAX_UNITS, MAX_UNITS)
    names = unique([plot_text(label, LABEL_WIDTH) for label in matrix.labels[::by_unit]])
    thinned = f" Each cell is the most unusual of {by_unit} by {by_unit} {units}." if by_unit > 1 else ""
    size = np.abs(values[np.isfinite(values)])
    # Even the smallest differences would take the last colours if these did not have a fixed meaning.
    limit = max(_TWICE, float(np.percentile(size, 99))) if len(size) else _TWICE
    most = f" by more than {size.max():.2g} %" if size.max(initial=0.0) >= _SAME else ""
    alike = f" No pair differs from it{most}." if size.max(initial=0.0) < _ALIKE else ""
    return Plot(
        name=f"matrix-{unit}",
        label=f"Transfer between {units}",
        caption=(
            f"Mean transfer between two {units}, relative to the usual one of the same operation, size and number of "
            f"ranks: orange takes longer, blue is faster; empty where they never meet.{alike}{thinned}"
        ),
        height_px=int(min(max(170 + 20 * len(names), 260), 520)),
        traces=[
            {
                "type": "heatmap",
                "packed": packed(values),
                "x": names,
                "y": names,
                "zmin": -limit,
                "zmax": limit,
                "colorscale": "@diverging",
                "xgap": 1 if len(names) <= 64 else 0,
                "ygap": 1 if len(names) <= 64 else 0,
                "colorbar": colorbar("%"),
                "hovertemplate": "%{y} and %{x}: %{z:+.3~g} % of the usual<extra></extra>",
            }
        ],
        layout=matrix_axes(len(names)),
    )


def host_map(
    hosts: Sequence[str],
    values: Values,
    by_host: int,
    *,
    name: str,
    label: str,
    caption: str,
    unit: str,
    scale: dict[str, Any],
) -> Plot:
    """Return the heat map of what goes from the host of a row to that of a column.

    Args:
        hosts: their names.
        values: of blocks of so many hosts, by `binned`.
        by_host: hosts in a block.
        name, label, caption: of the plot.
        unit: of the values.
        scale: where the colours begin and end, and which they are.
    """
    names = unique(plot_text(host, LABEL_WIDTH) for host in hosts[::by_host])
    gap = 1 if len(names) <= 64 else 0
    return Plot(
        name=name,
        label=label,
        caption=caption,
        height_px=int(min(max(170 + 20 * len(names), 260), 520)),
        traces=[
            {
                "type": "heatmap",
                "packed": packed(values),
                "x": names,
                "y": names,
                "xgap": gap,
                "ygap": gap,
                "colorbar": colorbar(unit),
                "hovertemplate": f"%{{y}} to %{{x}}: %{{z:.3~g}} {unit}<extra></extra>",
                **scale,
            }
        ],
        layout=matrix_axes(len(names)),
        rows=[
            (one, "", " ".join(dict.fromkeys(hosts[by_host * place : by_host * (place + 1)])))
            for place, one in enumerate(names)
        ],
    )


def matrix_axes(num_names: int) -> dict[str, Any]:
    """Return the layout of a map whose rows and columns have the same names."""
    columns = {**names_axis(num_names), "range": [-0.5, num_names - 0.5], "tickangle": -45 if num_names > 6 else 0}
    return {"xaxis": columns, "yaxis": names_axis(num_names), "margin": {"t": 46, "b": 44}}


def _limit(values: Values) -> float:
    """Return where the colours end: above most cells, and not below the middle of any row or column."""
    known = np.abs(np.where(np.isfinite(values), values, 0.0))
    middles = (np.median(known, axis=axis).max(initial=0.0) for axis in (0, 1))
    limit = float(max(np.percentile(known, 99.5), *middles))
    return limit or float(known.max(initial=0.0)) or 1.0


def colorbar(unit: str) -> dict[str, Any]:
    """Return the scale of a heat map."""
    # Above the plot: to its right it would leave no room for the plot on a phone.
    place = {"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom", "ypad": 6, "xpad": 0}
    ticks = {"ticksuffix": f" {unit}", "nticks": 4, "tickangle": 0}
    return {"thickness": 8, "lenmode": "pixels", "len": 240, "outlinewidth": 0, **place, **ticks}
