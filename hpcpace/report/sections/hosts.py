"""Hosts: findings of the audit on the culprits, devices, and how well times compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcpace.core.text import format_duration, percent, plural, printable
from hpcpace.diagnosis.plot_data import HostClock, PlotData
from hpcpace.diagnosis.summary import AuditFigures, Clocks, HostPair, Summary
from hpcpace.report.document import PAGE, TERMINAL, Block, Command, Facts, Notes, Plot, Section, Table
from hpcpace.report.drawing import COLOURS, LABEL_WIDTH, MAX_POINTS, axis, bins, line, plot_text, rounded

_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "cross")


def clocks_section(summary: Summary, plots: PlotData) -> Section:
    """Return how far the clocks of different ranks agree; empty for a single rank."""
    clocks = summary.clocks
    unknown = f"{plural(clocks.num_unknown, 'rank')} without a usable clock comparison: not compared with other ranks"
    return Section(
        "Clock error",
        (
            clock_error(plots.clocks) if plots.clocks and any(len(one.time_s) for one in plots.clocks) else None,
            Notes([unknown] if clocks.num_unknown else []),
            Facts(list(_clock_facts(clocks)), has_terms=True),
            Notes([_early_exits(pair) for pair in clocks.pairs], is_folded=True, is_ranked=True),
        )
        if len(summary.world.ranks) > 1
        else (),
        lead="how well times of different hosts compare",
    )


def _clock_facts(clocks: Clocks) -> Iterator[tuple[str, str]]:
    if clocks.median_halfwidth_ns is not None and clocks.max_halfwidth_ns is not None:
        median, largest = format_duration(clocks.median_halfwidth_ns), format_duration(clocks.max_halfwidth_ns)
        yield "bound", f"half-width median {median}, max {largest}; {plural(clocks.num_samples, 'sample')} per rank"
        residual = "unknown" if clocks.residual_ns is None else format_duration(clocks.residual_ns)
        drift = "unknown" if clocks.drift_ppm is None else f"{clocks.drift_ppm:.3g} ppm"
        yield "measured", f"largest leave-one-out residual {residual}, largest drift {drift}"
    if clocks.extrapolated_share:
        yield "outside", f"{percent(clocks.extrapolated_share)} of the step ends are outside the synchronised time"
    exits, checked = plural(clocks.num_negative, "exit"), plural(clocks.num_checked, "synchronising operation")
    messages = clocks.num_negative_messages
    early = f"; {plural(messages, 'message')} received before being sent" if messages else ""
    yield "causality", f"{exits} before the last enter in {checked}{early}"


def _early_exits(pair: HostPair) -> str:
    exit_host, enter_host = printable(pair.exit_host), printable(pair.enter_host)
    left = f"{exit_host} left before {enter_host} entered"
    if pair.exit_node == pair.enter_node:
        left = f"ranks of {exit_host} left before others of {exit_host} entered"
    sizes = f"median {format_duration(pair.median_ns)}, max {format_duration(pair.max_ns)}"
    return f"{left}: {pair.num_violations} times, {sizes}, {pair.num_unexplained} beyond the half-widths"


def clock_error(clocks: Sequence[HostClock]) -> Plot:
    """Return half-width and residual of the hosts with the widest bounds over time."""
    widest = sorted(clocks, key=lambda clock: -float(np.fmax.reduce(clock.halfwidth_us, initial=0.0)))[: len(COLOURS)]
    shown = sorted(widest, key=lambda clock: clock.host)
    traces: list[dict[str, Any]] = []
    for index, (clock, color) in enumerate(zip(shown, COLOURS, strict=False)):
        look = index % len(_DASHES)
        bound, found = bins(clock.halfwidth_us, MAX_POINTS), bins(np.abs(clock.residual_us), MAX_POINTS)
        time_s = rounded(clock.time_s[bound.first])
        marker = {"color": color, "size": 6, "symbol": _SYMBOLS[look]}
        residual = line(time_s, found.high, color, hover="residual %{y:.3~g} us")
        traces += [
            {**trace, "name": plot_text(clock.host, LABEL_WIDTH)}
            for trace in (
                line(time_s, bound.high, color, dash=_DASHES[look], hover="half-width %{y:.3~g} us"),
                {**residual, "mode": "markers", "marker": marker},
            )
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
        # The name of the host, in what plotly.js calls extra, is shown beside the value.
        traces=[{**trace, "hovertemplate": trace["hovertemplate"].replace("<extra></extra>", "")} for trace in traces],
        layout={"xaxis": axis("s since the start"), "yaxis": axis("us", rangemode="tozero")},
        legend=[(clock.host, color, "") for clock, color in zip(shown, COLOURS, strict=False)],
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


_SEVERITIES = {"F": "fail", "W": "warning", "U": "unknown", "I": "note"}


def audit_section(summary: Summary) -> Section:
    """Return the audit's findings on the culprits, and what it could not read; empty without snapshots."""
    audit = summary.audit
    if audit is None:
        return Section("Audit", ())
    nothing = "" if audit.matches else "no finding on the culprits"
    findings: list[Block | None] = []  # a terminal has each fix in one piece, since it is to be pasted
    for match in audit.matches:
        findings += [
            Notes([match.told], on=TERMINAL),
            Command("fix", match.fix, on=TERMINAL) if match.fix else None,
        ]
    rows = [(match.who, f"{match.severity} {match.rule}", match.told, match.fix) for match in audit.matches]
    head = ("who", "rule", "seen", "fix")
    return Section(
        "Audit",
        (
            *findings,
            Table(head, rows, "Findings of the audit on the culprits", text=range(4), command=3, on=PAGE),
            Notes([nothing]),
            Notes(audit.problems, is_folded=True),
        ),
        lead=_audit_lead(audit),
    )


def _audit_lead(audit: AuditFigures) -> str:
    """Return how much the audit has found, and where to see it."""
    parts = [plural(audit.counts[letter], word) for letter, word in _SEVERITIES.items() if audit.counts.get(letter)]
    size = f"{plural(audit.num_hosts, 'node')}, {plural(audit.num_ranks, 'rank')}"
    return f"{', '.join(parts) or 'nothing found'} ({size}; `hpcpace audit --from RUN` shows all)"


def devices_section(summary: Summary) -> Section:
    """Return what hosts and devices did in each phase; empty without device times."""
    rows = [
        (
            row.phase,
            format_duration(row.host_ns),
            format_duration(row.device_ns),
            format_duration(row.lead_ns),
            percent(row.dry_share),
        )
        for row in summary.devices
    ]
    dry = "ran dry: share of begins at which the device had no work left and waited for the host"
    return Section(
        "Host and device",
        (
            Table(("phase", "on the host", "on the device", "host ahead at its begin", "ran dry"), rows),
            Notes([dry] * bool(rows)),
        ),
        lead="per step",
    )
