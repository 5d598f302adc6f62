"""The network on the page: interfaces over time, who sent how much to whom and how fast, and both in tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcpace.core.text import format_bytes, format_rate, plural
from hpcpace.diagnosis.network_summary import InterfaceRow, NetworkFigures, PairRow
from hpcpace.diagnosis.plot_data import InterfaceLine, NetworkPlots, Values
from hpcpace.report.html.figure import LABEL_WIDTH, Plot, axis, names_axis, plot_text, unique
from hpcpace.report.html.maps import colorbar, host_map
from hpcpace.report.html.text import figure, notes, side_by_side, table
from hpcpace.report.html.thinning import binned, bins, packed, rounded
from hpcpace.report.words.network import (
    NONE,
    end_name,
    foreign_cell,
    interface_name,
    line_rate,
    network_notes,
    pair_cells,
    share,
    use_cells,
)

MAX_LINES, MAX_ROWS, MAX_COLUMNS, MAX_HOSTS = 6, 128, 300, 256
_LANE_PX, _GAP = 92, 0.16
_LEAST_SHOWN = 0.02  # of the most that an interface carried, for foreign traffic to be drawn
_MAX_POINTS = 400
_PER_MEGA = 1e6
_MOST_INTERFACES, _MOST_PAIRS, _MOST_COUNTERS, _MOST_OPEN = 256, 256, 64, 16

INTERFACE_HEAD = (
    "interface",
    "line rate",
    "sent",
    "mean out",
    "peak out",
    "received",
    "mean in",
    "peak in",
    "foreign out",
    "foreign in",
)
PAIR_HEAD = ("from rank", "to rank", "payload a step", "achieved rate", "sending", "sent again")
COUNTER_HEAD = ("host", "interface", "errors", "drops", "pauses", "congestion marks", "sent again")


def network_drawn(plots: NetworkPlots | None) -> dict[str, Plot]:
    """Return the plots of the network that have data, by name."""
    drawn: dict[str, Plot] = {}
    if plots is None:
        return drawn
    if plots.lines and len(plots.time_s):
        drawn["interfaces"] = interfaces_over_time(plots)
        if len(plots.lines) > MAX_LINES:
            drawn["interface_map"] = interface_map(plots)
    if np.isfinite(plots.step_mb).any():
        drawn["host_bytes"] = host_bytes(plots)
    if np.isfinite(plots.rate_mbps).any():
        drawn["host_rates"] = host_rates(plots)
    return drawn


def interfaces_over_time(plots: NetworkPlots) -> Plot:
    """Return what the busiest interfaces sent, above, and received, below, with what was foreign."""
    time_s, shown, number_of_all = plots.time_s, plots.lines[:MAX_LINES], plots.num_interfaces
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"margin": {"t": 24, "b": 44}, "annotations": []}
    height = (1 - _GAP * (len(shown) - 1) / len(shown)) / len(shown) if len(shown) > 1 else 1.0
    size = max(-(-len(time_s) // _MAX_POINTS), 1)
    for place, one in enumerate(shown):
        top = 1 - place * (1 - height) / max(len(shown) - 1, 1)
        number = "" if place == 0 else str(place + 1)
        traces += _lane(time_s, one, f"y{number}")
        layout[f"yaxis{number}"] = _lane_axis(one, (top - height, top))
        layout["annotations"].append(_lane_name(one, top))
    layout["xaxis"] = axis("s since the first used step", anchor=f"y{len(shown)}" if len(shown) > 1 else "y")
    more = f" The {len(shown)} busiest of {number_of_all} interfaces." if number_of_all > len(shown) else ""
    thinned = f" Each point is the busiest of {size} intervals." if size > 1 else ""
    return Plot(
        name="interfaces",
        label=f"What {plural(len(shown), 'interface')} carried over time",
        caption=(
            "Sent above the line and received below it, in percent of the line rate, or in Mb/s where that is not "
            f"known.{thinned}{more}"
        ),
        height_px=68 + int(_LANE_PX * len(shown) * (1 + _GAP)),
        traces=traces,
        layout=layout,
        legend=[("all bytes", "@busy", ""), ("foreign", "@wait", "")],
    )


def _lane(time_s: Values, one: InterfaceLine, yaxis: str) -> list[dict[str, Any]]:
    scale = 100 / one.line_mbps if one.line_mbps else 1.0
    unit = "% of the line rate" if one.line_mbps else "Mb/s"
    name = plot_text(f"{one.host} {one.interface}", LABEL_WIDTH)
    made = []
    for what, values, color in (("", one.total_mbps, "@busy"), ("foreign ", one.foreign_mbps, "@wait")):
        for sign, word, direction in ((1, "sent", 0), (-1, "received", 1)):
            found = bins(values[direction] * scale, _MAX_POINTS)
            if what and not (found.high > _LEAST_SHOWN * np.nanmax(one.total_mbps) * scale).any():
                continue
            made.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": rounded(time_s[found.first]),
                    "y": rounded(sign * found.high),
                    "yaxis": yaxis,
                    "line": {"color": color, "width": 1.2},
                    "fill": "tozeroy",
                    "fillcolor": "@busy-band" if color == "@busy" else "@wait",
                    "customdata": rounded(found.high),
                    "hovertemplate": f"{name}: {what}{word} %{{customdata:.3~g}} {unit} at %{{x}} s<extra></extra>",
                }
            )
    return made


def _lane_axis(one: InterfaceLine, domain: tuple[float, float]) -> dict[str, Any]:
    """Return the axis of an interface: up to its line rate, or to twice what it needs where that is far less."""
    most = float(np.nanmax(np.where(np.isfinite(one.total_mbps), one.total_mbps, 0.0), initial=0.0))
    scale = 100 / one.line_mbps if one.line_mbps else 1.0
    top = max(most * scale * 1.06, 100.0 if one.line_mbps and most * scale > 25 else 0.0) or 1.0
    tick = 100.0 if one.line_mbps and top >= 100 else float(f"{most * scale:.2g}")  # at most 5 % more, so within reach
    text = f"{tick:g} %" if one.line_mbps else format_rate(tick * _PER_MEGA)
    return {
        "domain": [round(domain[0], 4), round(domain[1], 4)],
        "range": [-top, top],
        "tickvals": [-tick, 0, tick],
        "ticktext": ["", "0", text],
        "zeroline": True,
        "zerolinecolor": "@muted",
        "gridcolor": "@rule",
        "automargin": True,
    }


def _lane_name(one: InterfaceLine, top: float) -> dict[str, Any]:
    rate = f", {format_rate(one.line_mbps * _PER_MEGA)}" if one.line_mbps else ", line rate not known"
    return {
        "text": plot_text(f"{one.host} {one.interface}{rate}", 2 * LABEL_WIDTH),
        "showarrow": False,
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": round(top, 4),
        "xanchor": "left",
        "yanchor": "bottom",
    }


def interface_map(plots: NetworkPlots) -> Plot:
    """Return the utilisation of many interfaces over time, in the busier direction."""
    time_s, lines = plots.time_s, plots.lines
    known = [one for one in lines if one.line_mbps] or list(lines)
    is_share = known[0].line_mbps is not None
    busier = [np.fmax(*one.total_mbps) * (100 / one.line_mbps if one.line_mbps else 1.0) for one in known]
    values, by_row, by_column = binned(np.stack(busier), MAX_ROWS, MAX_COLUMNS)
    more = " …" * (by_row > 1)
    names = unique(plot_text(f"{one.host} {one.interface}", LABEL_WIDTH - 2) + more for one in known[::by_row])
    parts = [plural(by_row, "interface")] * (by_row > 1) + [f"{by_column} intervals"] * (by_column > 1)
    thinned = f" Each cell is the busiest of {' and '.join(parts)}." if parts else ""
    unit = "%" if is_share else "Mb/s"
    what = "Share of the line rate" if is_share else "Rate"
    left = f" The first {len(known)} of {plots.num_interfaces} that can be compared." * (
        len(known) < plots.num_interfaces
    )
    return Plot(
        name="interface-map",
        label=f"Utilisation of {plural(len(known), 'interface')} over time",
        caption=f"{what} in the busier direction, the busiest interfaces at the top.{thinned}{left}",
        height_px=110 + min(max(14 * len(values), 160), 560),
        traces=[
            {
                "type": "heatmap",
                "packed": packed(values),
                "x": rounded(time_s[::by_column]),
                "y": names,
                "zmin": 0,
                "zmax": 100 if is_share else float(np.nanmax(values, initial=1.0)),
                "colorscale": "@amount",
                "colorbar": colorbar(unit),
                "hovertemplate": f"%{{y}} at %{{x}} s: %{{z:.3~g}} {unit}<extra></extra>",
            }
        ],
        layout={
            "xaxis": axis("s since the first used step"),
            "yaxis": names_axis(len(values)),
            "margin": {"t": 46, "b": 44},
        },
        rows=[
            (name, "", " ".join(dict.fromkeys(one.host for one in known[by_row * place : by_row * (place + 1)])))
            for place, name in enumerate(names)
        ],
    )


def host_bytes(plots: NetworkPlots) -> Plot:
    """Return the heat map of payload from host to host."""
    values, by_host, _ = binned(plots.step_mb, MAX_HOSTS, MAX_HOSTS)
    thinned = f" Each cell is the most of {by_host} by {by_host} hosts." if by_host > 1 else ""
    return host_map(
        plots.hosts,
        values,
        by_host,
        name="host-bytes",
        label="Payload from host to host",
        caption=f"Payload in a step, from the host of a row to that of a column; empty where none was sent.{thinned}",
        unit="MB",
        scale={"zmin": 0, "zmax": float(np.nanmax(values)), "colorscale": "@amount"},
    )


def host_rates(plots: NetworkPlots) -> Plot:
    """Return the heat map of achieved rates from host to host."""
    # The slowest of a block is what a reader looks for.
    slowness, by_host, _ = binned(1.0 / np.maximum(plots.rate_mbps, 1e-9), MAX_HOSTS, MAX_HOSTS)
    usual = float(np.nanmedian(plots.rate_mbps))
    thinned = f" Each cell is the slowest of {by_host} by {by_host} hosts." if by_host > 1 else ""
    return host_map(
        plots.hosts,
        1.0 / slowness,
        by_host,
        name="host-rates",
        label="Achieved rate from host to host",
        caption=(
            "Payload for each second in which data was outstanding: blue is the median of "
            f"{format_rate(usual * _PER_MEGA)} or more, orange is slower.{thinned}"
        ),
        unit="Mb/s",
        scale={"zmin": 0, "zmax": usual, "colorscale": "@rate"},
    )


def network_content(network: NetworkFigures | None, drawn: Mapping[str, Plot]) -> tuple[str, ...]:
    """Return the section: what must be known of the network, its plots, and its figures in tables; empty without any.

    Args:
        network: the figures.
        drawn: all plots of the page, those of `network_drawn` among them.
    """
    if network is None:
        return ()

    def of(name: str, title: str = "") -> str:
        return figure(drawn[name], title) if name in drawn else ""

    return (
        notes(network_notes(network)),
        of("interfaces"),
        of("interface_map", "All interfaces"),
        _interfaces_table(network),
        _counters_table(network),
        side_by_side(of("host_bytes", "Payload"), of("host_rates", "Achieved rate"), is_even=True),
        _pairs_table(network),
    )


def _interfaces_table(network: NetworkFigures) -> str:
    shown = network.interfaces[:_MOST_INTERFACES]
    which = f", the busiest {len(shown)} of {len(network.interfaces)}" if len(network.interfaces) > len(shown) else ""
    caption = f"By interface: bytes a step, mean and {network.peak_s:g} s peak as shares of the line rate{which}"
    about = [("", row.host) for row in shown]
    inside = table(caption, INTERFACE_HEAD, [_interface_cells(row) for row in shown], about=about)
    if len(shown) <= _MOST_OPEN:
        return inside
    return f"<details><summary>{len(network.interfaces)} interfaces in figures</summary>{inside}</details>"


def _interface_cells(row: InterfaceRow) -> tuple[str, ...]:
    uses = (cell for use in (row.sent, row.received) for cell in (format_bytes(use.bytes_per_step), *use_cells(use)))
    return (interface_name(row), line_rate(row), *uses, foreign_cell(row.sent), foreign_cell(row.received))


def _pairs_table(network: NetworkFigures) -> str:
    shown = network.pairs[:_MOST_PAIRS]
    which = f"{len(shown)} of {network.num_pairs}" if network.num_pairs > len(shown) else f"All {len(shown)}"
    inside = table(
        "From rank to rank, over TCP, those busy longest first",
        PAIR_HEAD,
        [(*_ends(row), *pair_cells(row)) for row in shown],
        text=(0, 1),
        about=[(str(row.source), f"{row.source_host} {row.destination_host}".strip()) for row in shown],
    )
    return f"<details><summary>{which} pairs of ranks in figures</summary>{inside}</details>" if shown else ""


def _ends(row: PairRow) -> tuple[str, str]:
    return end_name(row.source, row.source_host), end_name(row.destination, row.destination_host)


def _counters_table(network: NetworkFigures) -> str:
    """Return the counters of interfaces that have any, those that stand out first, and what hosts sent again."""
    again = {row.host: share(row.share) for row in network.retransmissions if row.share > 0}
    counts = [(row, (row.errors, row.drops, row.pauses, row.marks)) for row in network.interfaces]
    first = {row.host: row for row, _ in reversed(counts) if row.carries_job}
    meant = [(row, of) for row, of in counts if any(of) or (row.host in again and first.get(row.host) is row)]
    meant.sort(key=lambda pair: (not pair[0].raised, -sum(pair[1])))
    rows = [
        (row.host, row.interface, *map(str, of), again.get(row.host, NONE) if first.get(row.host) is row else NONE)
        for row, of in meant[:_MOST_COUNTERS]
    ]
    about = [("", row.host) for row, _ in meant[:_MOST_COUNTERS]]
    return table("Counters that are not 0", COUNTER_HEAD, rows, text=(0, 1), about=about)
