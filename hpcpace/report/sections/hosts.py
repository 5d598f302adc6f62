"""Hosts: how well their times compare, what the audit found on them, their devices, and their cores.

Then all places: ranks, nodes and switches with more own work than others, and transfer between them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from hpcpace.core.text import NS_PER_MS, alias_name, first_few, format_duration, percent, place_name, plural, printable
from hpcpace.diagnosis.plot_data import CoreTimes, HostClock, Matrix, PlotData, Values
from hpcpace.diagnosis.summary import AuditFigures, Clocks, HostCores, HostPair, RankCores, Summary
from hpcpace.report.document import (
    NONE,
    PAGE,
    TERMINAL,
    Block,
    Cell,
    Command,
    Facts,
    Notes,
    Plot,
    Row,
    Section,
    SideBySide,
    Table,
)
from hpcpace.report.drawing import (
    COLOURS,
    LABEL_WIDTH,
    MAX_POINTS,
    MAX_UNITS,
    NAMED,
    axis,
    bars,
    binned,
    bins,
    intervals,
    line,
    marked,
    marker,
    names_axis,
    plot_text,
    rounded,
    unique,
    unit_map,
)
from hpcpace.report.sections.phases import BROKEN

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


_MAX_HOSTS = (8, 64)
"""The most rows on a terminal and on a page."""
_MAX_RANKS = (16, 256)
_MAX_BARS = 24
_MIN_WAIT_NS = 1e5  # display: waiting for a core in a phase of a step
_MIN_DRAWN = 0.01  # display: share of a rank's own work that waits for a core, for waiting to be drawn by rank
_HEAD_PX, _ROW_PX = 76, 30

# (name, colour, pattern), in the order of `_uses`
_USES = (
    ("running on a core", "@busy", ""),
    ("ready, without a core", "@wait", ""),
    ("neither: I/O, locks, sleep", "@other", ""),
    ("not known", "@other", "/"),
)


def cores_section(summary: Summary, times: CoreTimes | None, named: Collection[int]) -> Section:
    """Return the hosts on which ranks wait for cores, and what each rank had of its cores; empty without any.

    Args:
        summary: the figures.
        times: what plots show of them; None where that is not known.
        named: the ranks that the verdict names, which are marked.
    """
    drawn = [] if times is None else [times_by_phase(times), *waiting_by_rank(times, named)]
    rows = [Row(core_cells(row), hosts=row.host) for row in summary.cores]
    head = ("host", "ranks", "CPUs", "threads running", "or ready", "waiting", "CPU pressure", "throttled")
    waiting = "waiting: share of the time for which a rank was ready to run and had no core, of the worst rank"
    return Section(
        "Cores",
        (
            SideBySide(drawn, is_even=True),
            Table(head, rows, limits=_MAX_HOSTS, which="worst"),
            Notes([waiting] * bool(rows)),
            *_rank_cores(summary.rank_cores),
        ),
        lead="hosts on which ranks were ready to run and had no core for a part of the time" if rows else "",
    )


def _rank_cores(found: Sequence[RankCores]) -> tuple[Block, ...]:
    """Return the table of ranks, with the phases in which one of them waits for a core."""
    phases = list(dict.fromkeys(name for row in found for name, queued_ns in row.phases if queued_ns >= _MIN_WAIT_NS))
    rows = [
        Row(
            (
                str(row.rank),
                row.host,
                str(row.nice),
                str(row.num_cpus) if row.num_cpus else "not known",
                NONE if row.waiting is None else percent(row.waiting),
                *(NONE if ns is None else format_duration(ns) for ns in (row.work_ns, row.running_ns)),
                *(format_duration(dict(row.phases)[name]) if name in dict(row.phases) else NONE for name in phases),
            ),
            hosts=row.host,
            ranks=str(row.rank),
        )
        for row in found
    ]
    head: tuple[str | Cell, ...] = (
        "rank",
        "host",
        "nice",
        "CPUs",
        Cell("waiting", "wait-\ning"),
        Cell("own work", "own\nwork"),
        "runs",
        *(Cell(f"waits in {name}", f"waits in\n{BROKEN.get(name, name)}") for name in phases),
    )
    work = "own work, runs and waits in are times of a step; the rest of own work is neither: I/O, locks, sleep"
    is_known = any(row.work_ns is not None for row in found)
    return (
        Table(head, rows, "Ranks and their cores", text=(1,), limits=_MAX_RANKS, which="worst"),
        Notes([work] * is_known),
    )


def core_cells(row: HostCores) -> tuple[str, ...]:
    """Return the cells of a host."""
    counts = (str(row.num_ranks), str(row.num_cpus) if row.num_cpus else "not known")
    shares = (percent(share) for share in (row.waiting, row.pressure, row.throttled))
    return (row.host, *counts, f"{row.running:.1f}", f"{row.ready:.1f}", *shares)


def _uses(times: CoreTimes) -> tuple[Values, ...]:
    return times.running_ms, times.queued_ms, times.idle_ms, times.unknown_ms


def times_by_phase(times: CoreTimes) -> Plot:
    """Return how own work was spent in each phase, mean over ranks; phases without own work are left out."""
    means = np.array([use.mean(axis=0) for use in _uses(times)])
    rows = np.flatnonzero(means.sum(axis=0) > 0).tolist()
    return _stacked(
        [times.phases[row] for row in rows],
        means[:, rows],
        name="core-phases",
        title="On and off a core",
        label="Own work on and off a core, by phase",
        caption="Own work of a step, mean over ranks.",
    )


def waiting_by_rank(times: CoreTimes, named: Collection[int] = ()) -> Iterator[Plot]:
    """Yield how each rank spent its own work, of many those that wait longest for a core; nothing where none waits."""
    sums = np.array([use.sum(axis=1) for use in _uses(times)])
    waiting = sums[1] / np.maximum(sums.sum(axis=0), 1e-9)
    if len(times.ranks) < 2 or waiting.max() < _MIN_DRAWN:
        return
    rows = np.arange(len(times.ranks))
    if len(rows) > _MAX_BARS:
        rows = np.argsort(-sums[1], kind="stable")[:_MAX_BARS]
    about = [(times.ranks[row], times.hosts[row]) for row in rows.tolist()]
    names = unique(marked(plot_text(f"{rank} {host}", LABEL_WIDTH), rank in named) for rank, host in about)
    some = f" The {len(rows)} of {len(times.ranks)} ranks that wait longest." * (len(rows) < len(times.ranks))
    is_named = any(rank in named for rank, _ in about)
    yield _stacked(
        names,
        sums[:, rows],
        name="core-ranks",
        title="Waiting for cores",
        label="Own work of ranks on and off a core",
        caption=f"Own work of a step, by rank.{some}{NAMED * is_named}",
        rows=[(name, str(rank), host) for name, (rank, host) in zip(names, about, strict=True)],
    )


def _stacked(
    names: Sequence[str],
    values_ms: Values,
    *,
    name: str,
    title: str,
    label: str,
    caption: str,
    rows: Sequence[tuple[str, str, str]] = (),
) -> Plot:
    """Return stacked bars of what `_USES` has, values of (num_uses, num_names)."""
    shown = [(look, of) for look, of in zip(_USES, values_ms, strict=True) if of.any()]
    return Plot(
        name=name,
        title=title,
        label=label,
        caption=caption,
        height_px=_HEAD_PX + _ROW_PX * len(names),
        traces=[
            bars(names, of, marker(color, pattern), f"%{{y}}: {what} %{{x:.3~g}} ms") | {"name": what}
            for (what, color, pattern), of in shown
        ],
        layout={
            "barmode": "stack",
            "bargap": 0.25,
            "xaxis": axis("ms of a step", rangemode="tozero"),
            "yaxis": names_axis(len(names)),
        },
        legend=[look for look, _ in shown],
        rows=rows,
    )
