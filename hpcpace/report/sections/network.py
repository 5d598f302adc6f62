"""The network: what interfaces carried, who sent how much to whom and how fast, and what stands out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcpace.core.text import NS_PER_S, few, format_bytes, format_duration, format_rate, listed, plural, printable
from hpcpace.diagnosis.network_summary import DirectionUse, HostRetransmissions, InterfaceRow, NetworkFigures, PairRow
from hpcpace.diagnosis.plot_data import InterfaceLine, NetworkPlots, Values
from hpcpace.diagnosis.summary import Summary
from hpcpace.report.document import (
    NONE,
    PAGE,
    TERMINAL,
    UNKNOWN,
    Cell,
    Notes,
    Plot,
    Row,
    Section,
    SideBySide,
    Table,
    Text,
)
from hpcpace.report.drawing import (
    LABEL_WIDTH,
    axis,
    binned,
    bins,
    heat_map,
    host_map,
    plot_text,
    rounded,
    unique,
)

MAX_LINES, MAX_ROWS, MAX_COLUMNS = 6, 128, 300
_MAX_ON_PAGE, _MAX_COUNTERS, _MAX_OPEN = 256, 64, 16
_MAX_INTERFACES, _MAX_PAIRS, _SHOWN_OF_MANY = 8, 6, 4
"""On a terminal: all up to so many, of more the first four."""
_MAX_NAMES = 4
_NAME_WIDTH = 12
_MAX_POINTS = 400
_LANE_PX, _GAP = 92, 0.16
_PER_MEGA = 1e6
_MIN_DRAWN = 0.02  # of the most that an interface carried, for foreign traffic to be drawn
_MIN_PART = 0.01  # of the bytes of the pair with most, for a pair to be shown on a terminal
_MIN_SHARE = 1e-5
_SLOW_RATIO, _LONG, _MUCH = 2.0, 0.5, 0.1
_ZEROS = re.compile(r"\.0+ ")
_NOUNS = {"errors": "frames with errors", "drops": "dropped frames", "pauses": "pauses", "marks": "congestion marks"}
_FOREIGN = (
    "foreign: bytes that no TCP connection of this job's ranks carried; other jobs, but also files, checkpoints and "
    "MPI of this one"
)


def network_section(summary: Summary, plots: NetworkPlots | None) -> Section:
    """Return what interfaces and connections carried during the used steps; empty where none was recorded."""
    network = summary.network
    if network is None or not (network.interfaces or network.pairs):
        return Section("Network", ())
    drawn = {} if plots is None else network_drawn(plots)
    span = format_duration(network.duration_s * NS_PER_S)
    return Section(
        "Network",
        (
            drawn.get("interfaces"),
            drawn.get("interface_map"),
            _interfaces_table(network),
            _counters_table(network),
            SideBySide([drawn.get("host_bytes"), drawn.get("host_rates")], is_even=True),
            *_pairs_tables(network),
            Notes(network_notes(network)),
        ),
        lead=f"{span} of used steps; mean and {network.peak_s:g} s peak of the line rate",
    )


def _interfaces_table(network: NetworkFigures) -> Table:
    rows = network.interfaces
    is_many = len(rows) > _MAX_INTERFACES
    uses = ("line rate", Cell("sent", "sent\na step"), Cell("mean out", "mean"), Cell("peak out", "peak"))
    back = (Cell("received", "received\na step"), Cell("mean in", "mean"), Cell("peak in", "peak"))
    return Table(
        ("interface", *uses, *back, Cell("foreign out", "foreign\nsent"), Cell("foreign in", "received")),
        [Row(_interface_cells(row), hosts=row.host) for row in rows],
        "by interface, bytes a step",
        limits=(_SHOWN_OF_MANY if is_many else 0, _MAX_ON_PAGE),
        which="busiest",
        foot=_medians(rows) if is_many else (),
        details=f"{len(rows)} interfaces in figures" if len(rows) > _MAX_OPEN else "",
    )


def _interface_cells(row: InterfaceRow) -> list[Text]:
    name, narrow = interface_name(row), " ".join(printable(part) for part in (row.host, row.interface))
    first = Cell(name)
    if len(narrow) > _NAME_WIDTH:
        first = Cell(name, _cut(row.host), below=_cut(row.interface))
    cells: list[Text] = [first, line_rate(row)]
    for use in (row.sent, row.received):
        cells += [format_bytes(use.bytes_per_step), *map(_narrow, use_cells(use))]
    return [*cells, *(_narrow(foreign_cell(use)) for use in (row.sent, row.received))]


def _narrow(cell: str) -> Cell:
    """Return a cell that is `38%` for `38 %`, and `251M` for `251 Mb/s` on a terminal."""
    return Cell(cell, cell.replace(" ", "").removesuffix("b/s"))


def _cut(name: str) -> str:
    shown = printable(name)
    return shown if len(shown) <= _NAME_WIDTH else f"{shown[: _NAME_WIDTH - 3]}..."


def _medians(rows: Sequence[InterfaceRow]) -> list[Text]:
    cells: list[Text] = [f"median of {len(rows)}", ""]
    for uses in ([row.sent for row in rows], [row.received for row in rows]):
        known = [(use.utilisation, use.peak_utilisation) for use in uses]
        columns = ([one for one in column if one is not None] for column in zip(*known, strict=True))
        cells.append(format_bytes(float(np.median([use.bytes_per_step for use in uses]))))
        cells += [_narrow(share(float(np.median(column)) if column else None)) for column in columns]
    return [*cells, "", ""]


def interface_name(row: InterfaceRow) -> str:
    """Return `n4 eth0`."""
    return f"{row.host} {row.interface}"


def line_rate(row: InterfaceRow) -> str:
    """Return the line rate, with a mark where tc set it; `?` where it is not known."""
    if row.line_rate_bps is None:
        return UNKNOWN
    return _ZEROS.sub(" ", format_rate(row.line_rate_bps)) + ("*" if row.rate_source == "tc" else "")


def share(value: float | None) -> str:
    """Return a share in percent with two digits; a dash where it is not known."""
    if value is None:
        return NONE
    return f"{100 * value:.0f} %" if value >= 0.0995 or value < _MIN_SHARE else f"{100 * value:.2g} %"


def use_cells(use: DirectionUse) -> tuple[str, str]:
    """Return mean and peak of a direction: of the line rate, or in bit/s where that is not known."""
    if use.utilisation is None or use.peak_utilisation is None:
        return format_rate(use.mean_bps), format_rate(use.peak_bps)
    return share(use.utilisation), share(use.peak_utilisation)


def foreign_cell(use: DirectionUse) -> str:
    """Return foreign traffic: of the line rate, or of the bytes where that is not known."""
    return share(use.foreign_share if use.foreign_utilisation is None else use.foreign_utilisation)


def _counters_table(network: NetworkFigures) -> Table:
    """Return the counters of interfaces that have any, those that stand out first, and what hosts sent again."""
    again = {row.host: share(row.share) for row in network.retransmissions if row.share > 0}
    counts = [(row, (row.errors, row.drops, row.pauses, row.marks)) for row in network.interfaces]
    first = {row.host: row for row, _ in reversed(counts) if row.carries_job}
    meant = [(row, of) for row, of in counts if any(of) or (row.host in again and first.get(row.host) is row)]
    meant.sort(key=lambda pair: (not pair[0].raised, -sum(pair[1])))
    rows = []
    for row, of in meant:
        sent_again = again.get(row.host, NONE) if first.get(row.host) is row else NONE
        rows.append(Row((row.host, row.interface, *map(str, of), sent_again), hosts=row.host))
    return Table(
        ("host", "interface", "errors", "drops", "pauses", "congestion marks", "sent again"),
        rows,
        "Counters that are not 0",
        text=(0, 1),
        limits=(0, _MAX_COUNTERS),
        on=PAGE,
    )


def _pairs_tables(network: NetworkFigures) -> Iterator[Table | Notes]:
    """Yield the pairs of ranks: a terminal has few of them, and of these no pair that carries next to nothing."""
    if not network.pairs:
        return
    head = ("from rank", "to rank", "payload a step", "achieved rate", "sending", "sent again")
    most = max(row.bytes_per_step for row in network.pairs)
    large = [row for row in network.pairs if row.bytes_per_step >= _MIN_PART * most]
    shown = large if len(large) <= _MAX_PAIRS else large[:_SHOWN_OF_MANY]
    which = f"the {len(shown)} of {network.num_pairs} pairs of ranks that send longest"
    cut = which if len(shown) < len(large) else f"{which}; the others carry little"
    yield Table(head, [_pair_cells(row) for row in shown], "by pair of ranks, over TCP", text=(0, 1), on=TERMINAL)
    yield Notes([cut] * (len(shown) < network.num_pairs), on=TERMINAL)
    num_shown = min(len(network.pairs), _MAX_ON_PAGE)
    every = f"{num_shown} of {network.num_pairs}" if network.num_pairs > num_shown else f"All {num_shown}"
    yield Table(
        head,
        [
            Row(_pair_cells(row), ranks=str(row.source), hosts=f"{row.source_host} {row.destination_host}".strip())
            for row in network.pairs[:num_shown]
        ],
        "From rank to rank, over TCP, those busy longest first",
        text=(0, 1),
        details=f"{every} pairs of ranks in figures",
        on=PAGE,
    )


def _pair_cells(row: PairRow) -> tuple[str, ...]:
    """Return both ends, bytes, rate, busy share and retransmitted share of a pair."""
    ends = ((row.source, row.source_host), (row.destination, row.destination_host))
    rate = NONE if row.rate_bps is None else format_rate(row.rate_bps)
    shares = (share(row.busy_share), share(row.retransmitted_share))
    return (*(f"{rank} {host}".rstrip() for rank, host in ends), format_bytes(row.bytes_per_step), rate, *shares)


def network_notes(network: NetworkFigures) -> list[str]:
    """Return what a reader must know of the network, one sentence each, the most telling first."""
    found = [sentence for row in network.interfaces for sentence in _foreign_sentences(row)]
    found = [*_limited(found, "interfaces have foreign traffic"), *_raised_sentences(network)]
    found += _slow_pair(network)
    if any(use.foreign_share is not None for row in network.interfaces for use in (row.sent, row.received)):
        found.append(_FOREIGN)
    return [*found, *_unknown_sentences(network)]


def _foreign_sentences(row: InterfaceRow) -> Iterable[str]:
    for name, use in (("sent", row.sent), ("received", row.received)):
        if not use.is_foreign or use.foreign_bps is None or use.foreign_share is None:
            continue
        part = use.foreign_utilisation if use.foreign_utilisation is not None else use.foreign_share
        whole = "line rate" if use.foreign_utilisation is not None else "bytes"
        of_it = f"{share(part)} of the {whole} of {printable(interface_name(row))}"
        yield f"{of_it} was foreign traffic: it {name} {format_rate(use.foreign_bps)} that was not this job's"


def _raised_sentences(network: NetworkFigures) -> list[str]:
    found = []
    for row in network.interfaces:
        counts = [f"{getattr(row, kind)} {_NOUNS[kind]}" for kind in row.raised]
        if counts:
            found.append(f"{printable(interface_name(row))} had {listed(counts)}, far more than the other hosts")
    for host in network.retransmissions:
        if host.is_raised:
            found.append(f"{printable(host.host)} {_again(host)}")
    return _limited(found, "counters are far above those of the other hosts")


def _again(host: HostRetransmissions) -> str:
    usual = "" if host.usual_share is None else f", the others {100 * host.usual_share:.2g} %"
    return f"sent {100 * host.share:.2g} % of its bytes again{usual}"


def _slow_pair(network: NetworkFigures) -> list[str]:
    """Return the slowest of the pairs that are busy for half of the time, where it is far below the median."""
    most = max((row.bytes_per_step for row in network.pairs), default=0.0)
    timed = [
        (row.rate_bps, row)
        for row in network.pairs
        if row.rate_bps and (row.busy_share or 0.0) >= _LONG and row.bytes_per_step >= _MUCH * most
    ]
    if not timed or not network.median_rate_bps:
        return []
    rate_bps, row = min(timed, key=lambda pair: pair[0])
    if rate_bps * _SLOW_RATIO > network.median_rate_bps:
        return []
    ends = f"rank {row.source} on {printable(row.source_host)} to rank {row.destination}"
    return [
        f"slowest pair: {ends} on {printable(row.destination_host)} with {format_rate(rate_bps)}, sending for "
        f"{share(row.busy_share)} of the time; the median of pairs is {format_rate(network.median_rate_bps)}"
    ]


def _unknown_sentences(network: NetworkFigures) -> list[str]:
    found = []
    if any(row.rate_source == "tc" for row in network.interfaces):
        found.append("*: tc shapes what is sent to this rate; what is received is shown as a share of the same")
    no_rate = [interface_name(row) for row in network.interfaces if row.line_rate_bps is None]
    if no_rate:
        found.append(
            f"the line rate of {_names(no_rate)} is not known (virtual interfaces report none): mean and peak are in "
            "bit/s, foreign traffic is a share of the bytes"
        )
    reasons = Counter(row.why_unknown for row in network.interfaces if row.why_unknown)
    for reason, _ in reasons.most_common():
        names = [interface_name(row) for row in network.interfaces if row.why_unknown == reason]
        which = "" if len(names) == len(network.interfaces) else f" of {_names(names)}"
        found.append(f"foreign traffic{which} is not known: {reason}")
    return found


def _names(names: Sequence[str]) -> str:
    return few(names, _MAX_NAMES, printable)


def _limited(sentences: list[str], noun: str) -> list[str]:
    more = len(sentences) - _MAX_NAMES
    return [*sentences[:_MAX_NAMES], *([f"{more} more {noun}"] if more > 0 else [])]


def network_drawn(plots: NetworkPlots) -> dict[str, Plot]:
    """Return the plots of the network that have data, by name."""
    drawn: dict[str, Plot] = {}
    if plots.lines and len(plots.time_s):
        drawn["interfaces"] = interfaces_over_time(plots)
        if len(plots.lines) > MAX_LINES:
            drawn["interface_map"] = interface_map(plots)
    if np.isfinite(plots.step_mb).any():
        drawn["host_bytes"] = host_map(
            plots.hosts,
            plots.step_mb,
            name="host-bytes",
            title="Payload",
            label="Payload from host to host",
            caption="Payload in a step, from the host of a row to that of a column; empty where none was sent.",
            unit="MB",
            is_rate=False,
        )
    if np.isfinite(plots.rate_mbps).any():
        usual = format_rate(float(np.nanmedian(plots.rate_mbps)) * _PER_MEGA)
        drawn["host_rates"] = host_map(
            plots.hosts,
            plots.rate_mbps,
            name="host-rates",
            title="Achieved rate",
            label="Achieved rate from host to host",
            caption=f"Payload for each second in which data was outstanding: blue is the median of {usual} or more, "
            "orange is slower.",
            unit="Mb/s",
            is_rate=True,
        )
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
            if what and not (found.high > _MIN_DRAWN * np.nanmax(one.total_mbps) * scale).any():
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
    return heat_map(
        rounded(time_s[::by_column]),
        names,
        values,
        name="interface-map",
        title="All interfaces",
        label=f"Utilisation of {plural(len(known), 'interface')} over time",
        caption=f"{what} in the busier direction, the busiest interfaces at the top.{thinned}{left}",
        height_px=110 + min(max(14 * len(values), 160), 560),
        scale=("@amount", 0.0, 100.0 if is_share else float(np.nanmax(values, initial=1.0))),
        unit=unit,
        hover=f"%{{y}} at %{{x}} s: %{{z:.3~g}} {unit}",
        xaxis=axis("s since the first used step"),
        rows=[
            (name, "", " ".join(dict.fromkeys(one.host for one in known[by_row * place : by_row * (place + 1)])))
            for place, name in enumerate(names)
        ],
    )
