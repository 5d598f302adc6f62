"""The plots of the HTML report, heat maps apart: step times, shares by phase, communication, growth, places, clocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import NS_PER_MS, plural, printable
from hpcpace.diagnosis.plot_data import Growth, HostClock, HotspotRow, Values
from hpcpace.diagnosis.summary import Kind, RankRow, RoleRow, Summary, Throughput
from hpcpace.report.html.figure import (
    LABEL_WIDTH,
    NAMED,
    Plot,
    axis,
    band,
    line,
    mark,
    marked,
    names_axis,
    plot_text,
    series,
    unique,
)
from hpcpace.report.html.parts import PARTS, drawn_parts, marker
from hpcpace.report.html.thinning import MAX_POINTS, bins, rounded

MAX_BARS, MAX_HOTSPOTS, MAX_HOSTS = 64, 20, 8
_EXTREMES = 12

_HOST_COLOURS = ("@c1", "@c2", "@c3", "@c4", "@c5", "@c6", "@c7", "@c8")
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "cross")


def step_times(step: NDArray[np.int64], step_ms: Values, speed: Throughput) -> Plot:
    """Return step times over steps: a line, and beyond MAX_POINTS steps a median and range of each bin."""
    traces, remark = series(step, step_ms, "@busy", "ms")
    marks = [mark("y", speed.p50_ns / NS_PER_MS, "p50", "top"), mark("y", speed.p95_ns / NS_PER_MS, "p95")]
    return Plot(
        name="step-times",
        label=f"Step times over {plural(len(step), 'step')}",
        caption=f"Time of each step; dotted lines mark the median and the 95th percentile.{remark}",
        height_px=300,
        traces=traces,
        layout={
            "xaxis": axis("step"),
            "yaxis": axis("ms", rangemode="tozero"),
            "shapes": [each["shape"] for each in marks],
            "annotations": [each["annotation"] for each in marks],
        },
    )


def step_distribution(step_ms: Values) -> Plot:
    """Return the histogram of step times; what is beyond five interquartile ranges is counted in the last bar."""
    known = step_ms[np.isfinite(step_ms)]
    low, middle, high = np.percentile(known, (25, 50, 75)) if len(known) else (0.0, 0.0, 0.0)
    limit = float(min(known.max(initial=0.0), middle + 5 * max(high - low, 0.02 * middle)))
    num_beyond = int((known > limit).sum())
    counts, edges = np.histogram(np.minimum(known, limit), bins=min(60, max(8, int(np.sqrt(len(known))))))
    beyond = f" {plural(num_beyond, 'step')} beyond {limit:.4g} ms count in the last bar." if num_beyond else ""
    return Plot(
        name="step-distribution",
        label="Distribution of step times",
        caption=f"How often each step time occurred.{beyond}",
        height_px=300,
        traces=[
            {
                "type": "bar",
                "x": rounded((edges[:-1] + edges[1:]) / 2),
                "y": [int(count) for count in counts],
                "width": float(edges[1] - edges[0]),
                "marker": {"color": "@busy", "line": {"width": 1, "color": "@paper"}},
                "hovertemplate": "%{x:.4~g} ms: %{y} steps<extra></extra>",
            }
        ],
        layout={"xaxis": axis("ms"), "yaxis": axis("steps"), "bargap": 0},
    )


def phase_shares(summary: Summary, named: Collection[int] = ()) -> Plot:
    """Return the stacked shares of the step: of ranks up to MAX_BARS, beyond that of roles and of extreme ranks.

    Args:
        summary: the figures.
        named: the ranks that the verdict names, which are marked.
    """
    is_few = len(summary.ranks) <= MAX_BARS
    known = [row for row in summary.ranks if row.parts_ns is not None]
    ranks = known if is_few else _extremes(known)
    roles = [role for role in summary.roles if role.parts_ns is not None][: MAX_BARS - len(ranks)] if not is_few else []
    rows: list[RankRow | RoleRow] = [*roles, *ranks]
    names = [f"{plot_text(role.role, LABEL_WIDTH)} ({len(role.ranks)} ranks)" for role in roles]
    names += [marked(plot_text(f"{row.rank} {row.host}", LABEL_WIDTH), row.rank in named) for row in ranks]
    names = unique(names)
    about = [("", "") for _ in roles] + [(str(row.rank), row.host) for row in ranks]
    parts_ns = [drawn_parts(row.parts_ns) for row in rows if row.parts_ns is not None]
    shares = [drawn_parts(row.shares) for row in rows if row.shares is not None]
    shown = [bar for bar in PARTS if any(of.get(part) for of in parts_ns for part in bar[1])]
    dropped = len(summary.roles) - len(roles)
    some = f" Roles first, then the {len(ranks)} of {len(summary.ranks)} ranks with the largest and smallest excess"
    some += f"; {dropped} roles are not shown." if dropped else "."
    return Plot(
        name="phase-shares",
        label="Shares of the step by phase",
        caption="Means over the used steps; hover for milliseconds." + ("" if is_few else some) + NAMED * bool(named),
        height_px=70 + max(min(34, 760 // max(len(rows), 1)), 15) * len(rows),
        traces=[
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "x": rounded(np.array([100 * sum(of.get(part, 0.0) for part in parts) for of in shares])),
                "y": names,
                "customdata": rounded(
                    np.array([sum(of.get(part, 0.0) for part in parts) / NS_PER_MS for of in parts_ns])
                ),
                "marker": marker(color, pattern),
                "hovertemplate": f"%{{y}}: {name} %{{x:.1f}} %, %{{customdata:.4~g}} ms<extra></extra>",
            }
            for name, parts, color, pattern in shown
        ],
        layout={
            "barmode": "stack",
            "bargap": 0.2,
            "xaxis": axis("% of the step", range=[0, 100]),
            "yaxis": names_axis(len(rows)),
        },
        legend=[(name, color, pattern) for name, _, color, pattern in shown],
        rows=[(name, *of) for name, of in zip(names, about, strict=True)],
    )


def wait_and_transfer(kinds: Sequence[Kind]) -> Plot:
    """Return mean wait against mean transfer of each kind of operation that has counterparts."""
    rows = [kind for kind in kinds if kind.mean_wait_ns is not None][:MAX_HOTSPOTS]
    names = unique([f"{plot_text(kind.op)} of {kind.group_size or '?'}" for kind in rows])
    columns = (
        ("wait for the last partner", "@wait", [(kind.mean_wait_ns or 0.0) / NS_PER_MS for kind in rows], ""),
        ("transfer", "@transfer", [(kind.mean_transfer_ns or 0.0) / NS_PER_MS for kind in rows], ""),
    )
    return Plot(
        name="wait-transfer",
        label="Mean wait against mean transfer of an operation, by kind",
        caption="Mean of one operation. Much wait and little transfer: the network is not the cause.",
        height_px=80 + 46 * max(len(rows), 1),
        traces=[
            {
                "type": "bar",
                "orientation": "h",
                "x": rounded(np.array(values)),
                "y": names,
                "marker": {"color": color},
                "hovertemplate": f"%{{y}}: {name} %{{x:.3~g}} ms<extra></extra>",
            }
            for name, color, values, _ in columns
        ],
        layout={
            "barmode": "group",
            "bargap": 0.25,
            "xaxis": axis("ms", rangemode="tozero"),
            "yaxis": names_axis(len(rows)),
        },
        legend=[(name, color, pattern) for name, color, _, pattern in columns],
    )


def regime(step: NDArray[np.int64], share: Values) -> Plot:
    """Return transfer over work and transfer in each step: above one half a step is bound by communication."""
    traces, remark = series(step, 100 * share, "@transfer", "%")
    half = mark("y", 50, "half")
    return Plot(
        name="regime",
        label="Transfer over own work and transfer, by step",
        caption=(
            "Exposed transfer as a share of own work and transfer; waiting for others is neither. Above the dotted "
            f"line a step is bound by communication, below it by computation.{remark}"
        ),
        height_px=240,
        traces=traces,
        layout={
            "xaxis": axis("step"),
            "yaxis": axis("% of work and transfer", range=[0, 100]),
            "shapes": [half["shape"]],
        },
    )


def growth(curve: Growth) -> Plot:
    """Return A(k), measured and if units were independent, each with its 95 % interval."""
    k = [int(value) for value in curve.k]
    traces = [
        *band(k, curve.null_low, curve.null_high, "@null-band"),
        *band(k, curve.low, curve.high, "@busy-band"),
        line(k, curve.null, "@null", dash="dash", hover="independent: %{y:.3f} at %{x}"),
        {**line(k, curve.measured, "@busy", hover="measured: %{y:.3f} at %{x}"), "mode": "lines+markers"},
    ]
    unit = plot_text(curve.unit)
    return Plot(
        name="growth",
        label=f"Amplification over the number of {unit}s that wait for each other",
        caption=(
            f"Work of the slowest of k {unit}s over the mean, lasting differences included: the last point is the "
            "amplification A above, 1 is no loss, bands are 95 % intervals. On the dashed line jitter is independent; "
            "above it events avoid each other, below it they share a cause."
        ),
        height_px=320,
        traces=traces,
        layout={
            "xaxis": axis(f"{unit}s", type="log", tickvals=_powers(k), ticktext=[str(v) for v in _powers(k)]),
            "yaxis": axis("A(k)"),
        },
        legend=[("measured", "@busy", ""), (f"if {unit}s were independent", "@null", "")],
    )


def hotspots(rows: Sequence[HotspotRow]) -> Plot:
    """Return the largest effects with their intervals."""
    shown = rows[:MAX_HOTSPOTS]
    effect, low, high = (np.array([getattr(row, name) for row in shown]) for name in ("effect_ms", "low_ms", "high_ms"))
    sure = [bool(row.low_ms > 0 or row.high_ms < 0) for row in shown]
    more = f" The first {len(shown)} of {len(rows)}." if len(rows) > len(shown) else ""
    return Plot(
        name="hotspots",
        label="Effects of places with their intervals",
        caption=f"Time per step that a place adds, with its 95 % interval; grey if the interval contains zero.{more}",
        height_px=70 + 26 * max(len(shown), 2),
        traces=[
            {
                "type": "scatter",
                "mode": "markers",
                "x": rounded(effect),
                "y": unique([plot_text(f"{row.kind} {row.name}", LABEL_WIDTH) for row in shown]),
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": rounded(np.maximum(high - effect, 0)),
                    "arrayminus": rounded(np.maximum(effect - low, 0)),
                    "color": "@muted",
                    "thickness": 1.5,
                    "width": 4,
                },
                "marker": {"size": 10, "color": ["@wait" if is_sure else "@other" for is_sure in sure]},
                "customdata": [[f"{row.low_ms:.3g}", f"{row.high_ms:.3g}"] for row in shown],
                "hovertemplate": "%{y}: %{x:.3~g} ms (%{customdata[0]} to %{customdata[1]})<extra></extra>",
            }
        ],
        layout={
            "xaxis": axis("ms per step", zeroline=True, rangemode="tozero"),
            "yaxis": names_axis(len(shown)),
        },
    )


def clock_error(clocks: Sequence[HostClock]) -> Plot:
    """Return half-width and residual of the hosts with the widest bounds over time."""
    widest = sorted(clocks, key=lambda clock: -float(np.fmax.reduce(clock.halfwidth_us, initial=0.0)))[:MAX_HOSTS]
    shown = sorted(widest, key=lambda clock: clock.host)
    traces: list[dict[str, Any]] = []
    for index, clock in enumerate(shown):
        color, style = _HOST_COLOURS[index], index % 4
        bound, found = bins(clock.halfwidth_us, MAX_POINTS), bins(np.abs(clock.residual_us), MAX_POINTS)
        time_s = rounded(clock.time_s[bound.first])
        name = {"name": plot_text(clock.host, LABEL_WIDTH)}
        marker = {"color": color, "size": 6, "symbol": _SYMBOLS[style]}
        traces += [
            {**line(time_s, bound.high, color, dash=_DASHES[style], hover="half-width %{y:.3~g} us"), **name},
            {
                **line(time_s, found.high, color, hover="residual %{y:.3~g} us"),
                "mode": "markers",
                "marker": marker,
                **name,
            },
        ]
    more = f" The {len(shown)} hosts with the widest bounds of {len(clocks)}." if len(clocks) > len(shown) else ""
    return Plot(
        name="clock-error",
        label="Error of the clocks over time",
        caption=(
            "Lines: certified bound of each host's clock error. Markers: how far a synchronisation is from the line "
            "between its neighbours. That spans two intervals and holds the errors of three synchronisations, so that "
            f"it may be above its line. {_beyond(shown)}{more}"
        ),
        height_px=300,
        traces=[{**trace, "hovertemplate": trace["hovertemplate"].replace("<extra></extra>", "")} for trace in traces],
        layout={"xaxis": axis("s since the start"), "yaxis": axis("us", rangemode="tozero")},
        legend=[(printable(clock.host), _HOST_COLOURS[index], "") for index, clock in enumerate(shown)],
    )


def _beyond(clocks: Sequence[HostClock]) -> str:
    """Return how many residuals are larger than the synchronisations' errors can make them, as a sentence."""
    known = [np.isfinite(clock.residual_us) & np.isfinite(clock.allowed_us) for clock in clocks]
    total = sum(int(of.sum()) for of in known)
    beyond = sum(
        int((np.abs(clock.residual_us) > clock.allowed_us)[of].sum()) for clock, of in zip(clocks, known, strict=True)
    )
    if not beyond:
        return "None is larger than those errors allow."
    return f"{beyond} of {total} are larger than those errors allow: there the rate of a clock changed."


def _powers(k: Sequence[int]) -> list[int]:
    top = max(k, default=1)
    powers = [2**n for n in range(max(top, 1).bit_length())]
    return powers if top in powers or not k else [*(p for p in powers if p < 0.75 * top), top]


def _extremes(rows: Sequence[RankRow]) -> tuple[RankRow, ...]:
    ordered = sorted(rows, key=lambda row: row.excess.share if row.excess else row.busy_share or 0.0)
    return (*reversed(ordered[-_EXTREMES:]), *reversed(ordered[:_EXTREMES]))
