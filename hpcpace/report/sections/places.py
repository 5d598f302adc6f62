"""Places: the ranks, nodes and switches with more own work than others, and transfer between switches and nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.core.text import NS_PER_MS, alias_name, first_few, format_duration, percent, place_name
from hpcpace.diagnosis.plot_data import Matrix, PlotData
from hpcpace.diagnosis.summary import Summary
from hpcpace.report.document import NONE, Notes, Plot, Row, Section, SideBySide, Table
from hpcpace.report.drawing import (
    LABEL_WIDTH,
    MAX_UNITS,
    axis,
    binned,
    intervals,
    names_axis,
    plot_text,
    unique,
    unit_map,
)

_MAX_ON_TERMINAL, MAX_ON_PAGE = 8, 20
_MAX_ALIASES = 8
_TWICE, _ALIKE, _SAME = 100.0, 5.0, 0.05  # percent


def places_section(summary: Summary, plots: PlotData) -> Section:
    """Return the places whose ranks work more slowly than others of their role, and how transfers differ by place."""
    head = ("place", "effect", "95 % interval", "of lateness", "could also be")
    rows = [
        Row(
            (
                place_name(spot.kind, spot.id),
                format_duration(spot.effect_ns),
                " to ".join(format_duration(max(bound, 0.0)) for bound in spot.interval_ns),
                percent(spot.loss_share),
                could_also_be(spot.kind, spot.id, spot.aliases),
            ),
            ranks=spot.id if spot.kind == "rank" else "",
            hosts=spot.id if spot.kind == "node" else "",
        )
        for spot in summary.hotspots
    ]
    matrices = [
        transfer_matrix(matrix, unit, units)
        for matrix, unit, units in ((plots.leaf_matrix, "switch", "switches"), (plots.node_matrix, "node", "nodes"))
        if matrix is not None and np.isfinite(matrix.ratio).any()
    ]
    return Section(
        "Places",
        (
            Notes([summary.unknown]),
            hotspots(summary) if rows else None,
            Table(head, rows, text=(0, 4), limits=(_MAX_ON_TERMINAL, MAX_ON_PAGE)),
            SideBySide(matrices, is_even=True),
        ),
        lead="own work per step beyond that of other places of the same level" if rows else "",
    )


def could_also_be(kind: str, name: str, aliases: Sequence[str]) -> str:
    """Return what the data cannot separate from a place."""
    others = [alias_name(alias) for alias in aliases if alias != f"{kind} {name}"]
    return ", ".join(first_few(others, _MAX_ALIASES)) or NONE


def hotspots(summary: Summary) -> Plot:
    """Return the largest effects with their intervals."""
    spots = summary.hotspots
    shown = spots[:MAX_ON_PAGE]
    effect, low, high = np.array([(spot.effect_ns, *spot.interval_ns) for spot in shown]).T / NS_PER_MS
    is_sure = (low > 0) | (high < 0)
    more = f" The first {len(shown)} of {len(spots)}." if len(spots) > len(shown) else ""
    return Plot(
        name="hotspots",
        label="Effects of places with their intervals",
        caption=f"Time per step that a place adds, with its 95 % interval; grey if the interval contains zero.{more}",
        height_px=70 + 26 * max(len(shown), 2),
        traces=[
            intervals(
                unique([plot_text(f"{spot.kind} {spot.id}", LABEL_WIDTH) for spot in shown]),
                effect,
                low,
                high,
                ["@wait" if sure else "@other" for sure in is_sure],
                "%{y}: %{x:.3~g} ms (%{customdata[0]} to %{customdata[1]})",
                data=[[f"{from_ms:.3g}", f"{to_ms:.3g}"] for from_ms, to_ms in zip(low, high, strict=True)],
            )
        ],
        layout={"xaxis": axis("ms per step", zeroline=True, rangemode="tozero"), "yaxis": names_axis(len(shown))},
    )


def transfer_matrix(matrix: Matrix, unit: str, units: str) -> Plot:
    """Return the heat map of transfer between units of one level; `unit` and `units` are its name."""
    values, by_unit, _ = binned(100 * (matrix.ratio - 1), MAX_UNITS, MAX_UNITS)
    thinned = f" Each cell is the most unusual of {by_unit} by {by_unit} {units}." if by_unit > 1 else ""
    size = np.abs(values[np.isfinite(values)])
    # Even the smallest differences would take the last colours if these did not have a fixed meaning.
    limit = max(_TWICE, float(np.percentile(size, 99))) if len(size) else _TWICE
    largest = size.max(initial=0.0)
    beyond = f" by more than {largest:.2g} %" if largest >= _SAME else ""
    alike = f" No pair differs from it{beyond}." if largest < _ALIKE else ""
    return unit_map(
        unique([plot_text(label, LABEL_WIDTH) for label in matrix.labels[::by_unit]]),
        values,
        name=f"matrix-{unit}",
        title=units.capitalize(),
        label=f"Transfer between {units}",
        caption=(
            f"Mean transfer between two {units}, relative to the usual one of the same operation, size and number of "
            f"ranks: orange takes longer, blue is faster; empty where they never meet.{alike}{thinned}"
        ),
        scale=("@diverging", -limit, limit),
        unit="%",
        hover="%{y} and %{x}: %{z:+.3~g} % of the usual",
    )
