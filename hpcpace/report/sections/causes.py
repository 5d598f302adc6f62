"""Causes: where waiting began, what determines the step time, what jitter costs, and what would shorten the step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from hpcpace.core.text import first_few, format_duration, listed, percent, plural, rank_list
from hpcpace.diagnosis.plot_data import PlotData
from hpcpace.diagnosis.summary import (
    Causes,
    GainRow,
    Growth,
    Jitter,
    Mode,
    OriginRow,
    PacingFigures,
    PathRow,
    Summary,
    sum_of,
)
from hpcpace.report.document import PAGE, TERMINAL, Bar, Block, Facts, Notes, Part, Plot, Section, Table
from hpcpace.report.drawing import (
    LABEL_WIDTH,
    NAMED,
    axis,
    band,
    bars,
    intervals,
    line,
    marked,
    names_axis,
    plot_text,
    unique,
)
from hpcpace.report.sections.phases import UNKNOWN_WAITS

_MIN_POINTS = 3  # of a curve that begins at 1
_MAX_PACED = 4
_READINGS = {
    "above": "the measured A is above it: events avoid each other, as in a rotation",
    "below": "the measured A is below it: ranks share the cause",
    "within": "the measured A is within its interval",
}
# To remove the reason why pacing could help gains more than pacing.
_REMEDIES = {
    "polling on shared cores": "give each rank a core of its own, or let MPI leave the core while it waits "
    "(MPICH: MPIR_CVAR_ENABLE_HEAVY_YIELD=1 MPIR_CVAR_POLLS_BEFORE_YIELD=1; Open MPI: --mca mpi_yield_when_idle 1)",
}
_EXPLAINED = (
    "A: mean time of the slowest rank over the mean of all. Intensity: a rank's mean over its best steps. Exponent: "
    "slope of ln(A - 1) over ln(ranks), lasting differences taken out: 0 is bounded, 1 proportional to size. Loss at "
    "scale: if new nodes are like these."
)


def jitter_section(summary: Summary, plots: PlotData) -> Section:
    """Return what waiting for the slowest costs, against independent noise, and at larger scales."""
    jitter = summary.jitter
    content: list[Block | None] = [Notes([summary.unknown])]
    lead = ""
    if jitter is not None:
        lead = f"{plural(len(jitter.ranks), 'rank')} that wait for each other, "
        lead += f"{plural(jitter.num_segments, 'segment')} per step"
        content = [Facts(list(_jitter_facts(jitter)), has_terms=True)]
    if plots.growth is not None and len(plots.growth.k) >= _MIN_POINTS:
        content.append(growth(plots.growth, "node" if jitter is not None and jitter.is_node_unit else "rank"))
    if jitter is not None:
        content += [_predictions(jitter), Notes([_EXPLAINED])]
    return Section("Jitter and scale", content, lead=lead)


def _jitter_facts(jitter: Jitter) -> Iterator[tuple[str, str]]:
    noise = f" (noise alone {jitter.persistent_null:.3f})" if jitter.persistent_null is not None else ""
    yield (
        "amplified",
        f"{percent(jitter.loss_share)} of the step time is lost to waiting for the slowest: "
        f"A {jitter.amplification:.3f}{_interval(jitter.interval)} = persistent {jitter.persistent:.3f}{noise} "
        f"x transient {jitter.transient:.3f}",
    )
    if jitter.null is not None:
        unit = "nodes" if jitter.is_node_unit else "ranks"
        null = f"A {jitter.null:.3f}{_interval(jitter.null_interval)}"
        reading = _READINGS.get(jitter.comparison, jitter.comparison)
        yield "null model", f"independent {unit} with the same lasting differences: {null}; {reading}"
    yield "noise", "; ".join(_noise(jitter)) or "none"
    growth, predictions = jitter.growth, jitter.predictions
    scale = [f"exponent {growth.exponent:.2f}"] if growth is not None and growth.exponent is not None else []
    scale += [f"not extrapolated: {predictions.refused}"] if predictions.refused else []
    yield "at scale", "; ".join(scale)


def _interval(bounds: tuple[float, float] | None) -> str:
    return f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else ""


def _noise(jitter: Jitter) -> Iterator[str]:
    if jitter.common_share is not None and jitter.rank_share is not None and jitter.residual_share is not None:
        yield (
            f"variance: {percent(jitter.common_share)} common to all ranks, {percent(jitter.rank_share)} between "
            f"ranks, {percent(jitter.residual_share)} in single steps of single ranks"
        )
    if jitter.noise_intensity is not None:
        yield f"intensity {percent(jitter.noise_intensity)}"
    if (alpha := jitter.noise_amplification) is not None:
        yield f"{percent(alpha)} of it reaches the step time ({'amplified' if alpha > 1 else 'absorbed'})"


def _predictions(jitter: Jitter) -> Table:
    predictions = jitter.predictions
    rows = [
        (
            str(point.num_nodes),
            percent(point.loss_share),
            f"{percent(point.interval[0])} to {percent(point.interval[1])}",
            "yes" if point.is_speculative else "no",
        )
        for point in predictions.points
    ]
    return Table(
        ("nodes", "loss", "95 % interval", "speculative"),
        [] if predictions.refused else rows,
        f"loss at larger scales, of the present step time ({predictions.label})",
    )


def growth(curve: Growth, unit: str) -> Plot:
    """Return A(k), measured with its 95 % interval, and if units, `rank` or `node`, were independent."""
    k, curves = list(curve.k), (curve.low, curve.high, curve.null, curve.amplification)
    low, high, null, measured = (np.array(values) for values in curves)
    traces = [
        *band(k, null, null, "@null-band"),
        *band(k, low, high, "@busy-band"),
        line(k, null, "@null", dash="dash", hover="independent: %{y:.3f} at %{x}"),
        {**line(k, measured, "@busy", hover="measured: %{y:.3f} at %{x}"), "mode": "lines+markers"},
    ]
    return Plot(
        name="growth",
        title="Growth with scale",
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


def _powers(k: Sequence[int]) -> list[int]:
    top = max(k, default=1)
    powers = [2**n for n in range(max(top, 1).bit_length())]
    return powers if top in powers or not k else [*(p for p in powers if p < 0.75 * top), top]


def pacing_section(summary: Summary) -> Section:
    """Return what became of pacing; empty where the run was not paced."""
    pacing = summary.pacing
    return Section(
        "Pacing",
        [] if pacing is None else [Facts(list(pacing_lines(pacing)))],
        lead="" if pacing is None else f"whether holding early ranks back helped; policy {pacing.policy}",
    )


def pacing_lines(pacing: PacingFigures) -> Iterator[tuple[str, str]]:
    """Yield names and values: the outcome, both arms, where ranks were paced, and what could help."""
    yield "outcome", pacing.sentence
    if pacing.step_off_ns is not None:
        on = "not tried" if pacing.step_on_ns is None else _arm(pacing.step_on_ns, pacing.cv_on)
        yield "mean step", f"off {_arm(pacing.step_off_ns, pacing.cv_off)}; on {on}; a lower CV alone is not a gain"
    if pacing.num_pairs:
        yield "trial", f"{plural(pacing.num_pairs, 'pair')} of blocks, policy {pacing.tried}"
    if pacing.points:
        yield "paced at", listed(first_few(pacing.points, _MAX_PACED))
    if pacing.waits_on_device:
        yield "slack", _slack(pacing)
    yield "could help", listed(pacing.mechanisms) if pacing.mechanisms else "no mechanism found: ranks only wait"
    for mechanism in pacing.mechanisms:
        if mechanism in _REMEDIES:
            yield "try first", _REMEDIES[mechanism]


def _slack(pacing: PacingFigures) -> str:
    """Return what could be gained on devices, where ranks are only observed."""
    if pacing.slack_ns is None or pacing.most_slack_ns is None or pacing.most_gain is None:
        return "not known: phases are host times of ranks with a device"
    return (
        f"{format_duration(pacing.slack_ns)} a step and rank on its device, at most "
        f"{format_duration(pacing.most_slack_ns)} (rank {pacing.most_slack_rank}); a trial could gain at most "
        f"{percent(pacing.most_gain)} of the step time, all exposed wait, and gains nothing if ranks only wait"
    )


def _arm(step_ns: float, cv: float | None) -> str:
    return format_duration(step_ns) + (f" (CV {cv:.3f})" if cv is not None else "")


# If all transfers are slow, that is their usual time: to reset one of them to it shows no gain.
_NOT_RESET = (Mode.COMMUNICATION, Mode.CONTENTION, Mode.LOCALITY)
_MIN_SHOWN = 0.0005  # less is 0.0 % in every table
_NOTABLE_SHARE = 0.1
_MOSTLY = 0.5
_MAX_ORIGINS, _MAX_GAINS = (4, 12), (5, 12)
"""The most rows on a terminal and on a page."""
_WORK = tuple((color, is_hatched) for is_hatched in (False, True) for color in ("@busy-2", "@busy-1", "@busy-3"))
_TRANSFER = tuple((color, is_hatched) for color in ("@transfer", "@c5", "@wait") for is_hatched in (False, True))


def causes_section(summary: Summary) -> Section:
    """Return the section; empty where causes are not known."""
    causes = summary.causes
    content: list[Block | None] = []
    if causes is not None and len(summary.world.ranks) > 1:
        unknown = UNKNOWN_WAITS if summary.shares.exposed_wait is None else ""
        gains = significant_gains(summary)
        content = [
            Notes([summary.unknown or unknown], on=TERMINAL),
            *_origins(summary),
            _path(causes),
            _gains_plot(gains[: _MAX_GAINS[1]], causes.rebuild_error or 0.0) if gains else None,
            Table(
                ("if this took its usual time", "step shorter by", "95 % interval"),
                [(gain.name, percent(gain.gain_share), _causes_interval(gain)) for gain in gains],
                "One change at a time",
                limits=_MAX_GAINS,
                details="The same in figures",
            ),
            Notes([gains_remark(summary)]),
        ]
    return Section(
        "Causes",
        content,
        lead="whose delays the others waited for, what determines the step time, and what would shorten it",
    )


def _causes_interval(gain: GainRow) -> str:
    return f"{percent(gain.interval[0])} to {percent(gain.interval[1])}"


def significant_gains(summary: Summary) -> tuple[GainRow, ...]:
    """Return the what-if gains beyond chance and beyond the error of rebuilding, the largest first."""
    causes = summary.causes
    if causes is None or summary.verdict.mode in _NOT_RESET:
        return ()
    least = max(causes.rebuild_error or 0.0, _MIN_SHOWN)
    return tuple(gain for gain in causes.gains if gain.gain_share >= least and gain.interval[0] > 0)


def gains_remark(summary: Summary) -> str:
    """Return how far the what-if gains can be trusted, or why there are none; empty if nothing was found at all."""
    causes = summary.causes
    if causes is None or causes.traced_share is None:
        return ""
    if causes.rebuild_error is None:
        return "no what-if: the steps could not be rebuilt from their operations"
    if summary.verdict.mode in _NOT_RESET:
        mode = summary.verdict.mode
        return f"no what-if: it resets one thing to its usual time, and here the usual time is slow ({mode})"
    size = percent(causes.rebuild_error) if causes.rebuild_error >= _MIN_SHOWN else "less than 0.1 %"
    steps = summary.steps
    some = f" ({steps.num_apart} of {steps.num_used})" if steps.num_apart < steps.num_used else ""
    error = f"steps rebuilt from their operations{some} are wrong by {size}"
    if not significant_gains(summary):
        return f"no single change would shorten the step: everything takes its usual time ({error})"
    return f"{error}: ignore smaller gains; gains are not additive"


def _gains_plot(gains: tuple[GainRow, ...], error_share: float) -> Plot:
    """Return the gain of each change with its interval, and the error of rebuilding steps."""
    gain, low, high = 100 * np.array([(row.gain_share, *row.interval) for row in gains]).T
    names = unique([plot_text(row.name, 2 * LABEL_WIDTH) for row in gains])
    band = " The grey band is what rebuilding the steps gets wrong." * (error_share >= _MIN_SHOWN)
    wrong = {"type": "rect", "xref": "x", "yref": "paper", "x0": 0, "x1": 100 * error_share, "y0": 0, "y1": 1}
    return Plot(
        name="gains",
        title="What if",
        label="How much single changes would shorten the step",
        caption=f"How much shorter the step would be if one thing took its usual time, with 95 % intervals.{band}",
        height_px=74 + 28 * max(len(gains), 2),
        traces=[intervals(names, gain, low, high, "@good", "%{y}: %{x:.2f} % of the step")],
        layout={
            "xaxis": axis("% of the step", zeroline=True, rangemode="tozero"),
            "yaxis": names_axis(len(gains)),
            "shapes": [{**wrong, "line": {"width": 0}, "fillcolor": "@null-band", "layer": "below"}],
        },
    )


def _origins(summary: Summary) -> list[Block | None]:
    """Return where waiting began, as a line and as a plot, and why the verdict names others."""
    rows = significant_origins(summary, _MAX_ORIGINS[0])
    is_chained = any(row.propagated_share >= _MIN_SHOWN for row in rows)
    passed = " (in brackets: passed on by other ranks)" if is_chained else ""
    shares = [
        f"rank {row.rank} {percent(row.share_of_waits)}" + (f" ({percent(row.propagated_share)})" * is_chained)
        for row in rows
    ]
    began = f"share of exposed wait, {origins_coverage(summary)} traced{passed}: {', '.join(shares)}" if rows else ""
    remark = origins_remark(summary)
    return [
        Facts([("began at", began), ("", remark)], on=TERMINAL),
        _origins_plot(summary) if rows else None,
        Notes([remark], on=PAGE),
    ]


def significant_origins(summary: Summary, max_rows: int) -> tuple[OriginRow, ...]:
    """Return the ranks at which most waiting began, without those at which hardly any did.

    None where most of the exposed wait cannot be traced to a rank: the rest may have begun elsewhere.
    """
    causes, whole = summary.causes, summary.shares.exposed_wait
    if causes is None or whole is None or causes.traced_share is None or whole < _MIN_SHOWN:
        return ()
    if causes.traced_share < _MOSTLY * whole:
        return ()
    return tuple(row for row in causes.origins[:max_rows] if row.share_of_waits >= _MIN_SHOWN)


def origins_coverage(summary: Summary) -> str:
    """Return how much of the exposed wait is traced to ranks, as `19.6 of 19.9 % of the step`; empty without any."""
    causes, whole = summary.causes, summary.shares.exposed_wait
    if causes is None or causes.traced_share is None or whole is None or whole < _MIN_SHOWN:
        return ""
    return f"{100 * causes.traced_share:.1f} of {percent(whole)} of the step"


def origins_remark(summary: Summary) -> str:
    """Return why most waiting began at a rank that the verdict does not name, or why that is not shown.

    Empty where both agree.
    """
    coverage, origins = origins_coverage(summary), significant_origins(summary, 1)
    if summary.causes is not None and summary.causes.origins and coverage and not origins:
        return f"where waiting began is not shown: only {coverage} could be traced to a rank"
    named = named_ranks_of(summary)
    if not origins or not named or origins[0].rank in named or origins[0].share_of_waits < _NOTABLE_SHARE:
        return ""
    first = origins[0]
    return (
        f"most waiting began at rank {first.rank}, although the verdict names {rank_list(sorted(named))}: "
        f"{_reason(summary, first, named)}"
    )


def named_ranks_of(summary: Summary) -> set[int]:
    """Return the ranks that the verdict names in any finding, those of named nodes, stages and slots included."""
    culprits = summary.verdict.culprits
    nodes = {culprit.id for culprit in culprits if culprit.kind == "node"}
    stages = {culprit.id for culprit in culprits if culprit.kind == "slot"}
    late = {
        row.rank
        for row in summary.ranks
        if row.host in nodes or row.role.partition(" ")[0] in stages or (row.excess and row.excess.is_marked)
    }
    return late | {int(culprit.id) for culprit in culprits if culprit.kind == "rank"}


def _reason(summary: Summary, first: OriginRow, named: Collection[int]) -> str:
    rows = {row.rank: row for row in summary.ranks}
    own, others = rows[first.rank], [rows[rank] for rank in sorted(named) if rank in rows]
    if summary.clocks.num_wrong or (summary.causes is not None and first.rank in summary.causes.suspected_ranks):
        return "its clock may be wrong, and the verdict on own work needs no common clock"
    if others and all(row.role != own.role for row in others):
        return (
            f"it has another role ({own.role}); ranks are compared with others of their own role, and roles with each "
            "other under pipeline imbalance"
        )
    away_ns = (sum_of(own.parts_ns, "checkpoint", "eval") or 0.0) if own.parts_ns is not None else 0.0
    if away_ns > own.step_ns * _MIN_SHOWN:
        return f"the others wait for its checkpoints and evaluations ({percent(away_ns / own.step_ns)} of its steps)"
    if first.propagated_share >= _MOSTLY:
        return f"{percent(first.propagated_share)} of that reached the others through ranks that had waited for it"
    excess = f", on average {100 * own.excess.share:+.1f} % own work against its role" if own.excess else ""
    return f"it is last in some steps but not longer again and again{excess}"


def _origins_plot(summary: Summary) -> Plot:
    """Return the waiting that began at each rank, divided by how it reached those who waited."""
    rows, named = significant_origins(summary, _MAX_ORIGINS[1]), named_ranks_of(summary)
    hosts = {row.rank: row.host for row in summary.ranks}
    names = unique(
        marked(plot_text(f"rank {row.rank} {hosts.get(row.rank, '')}".strip(), LABEL_WIDTH), row.rank in named)
        for row in rows
    )
    passed = np.array([100 * row.step_share * row.propagated_share for row in rows])
    whole = np.array([100 * row.step_share for row in rows])
    of_waits = [percent(row.share_of_waits) for row in rows]
    columns = [("direct", "@wait", whole - passed)]
    columns += [("passed on by others", "@late-soft", passed)] if passed.any() else []
    chain = " Passed on: waiting of ranks that waited not for that rank itself, but for others that had waited for it."
    is_passed = len(columns) > 1
    return Plot(
        name="origins",
        title="Where waiting began",
        label="Waiting by the rank where it began",
        caption=(
            "Exposed wait of all ranks, mean share of the step, by the rank whose delay began it: "
            f"{origins_coverage(summary)} could be traced.{chain * is_passed}{NAMED * bool(named)}"
        ),
        height_px=74 + 28 * max(len(rows), 2),
        traces=[
            {
                **bars(
                    names,
                    values,
                    {"color": color, "line": {"width": 1, "color": "@paper"}},
                    f"%{{y}}: {name} %{{x:.2f}} % of the step (%{{customdata}} of waiting)",
                    data=of_waits,
                ),
                "name": name,
            }
            for name, color, values in columns
        ],
        layout={
            "barmode": "stack",
            "bargap": 0.25,
            "xaxis": axis("% of the step", rangemode="tozero"),
            "yaxis": names_axis(len(rows)),
        },
        legend=[(name, color, "") for name, color, _ in columns] if is_passed else (),
        rows=[(name, str(row.rank), hosts.get(row.rank, "")) for name, row in zip(names, rows, strict=True)],
    )


def significant_path(causes: Causes, max_rows: int) -> tuple[PathRow, ...]:
    """Return the largest parts of the critical path, without negligible ones."""
    return tuple(row for row in causes.path[:max_rows] if row.share >= _MIN_SHOWN)


def _path(causes: Causes) -> Bar:
    """Return what the critical path consists of; what is not among its largest parts is the rest."""
    rows = significant_path(causes, len(_WORK))
    colours = {"work": iter(_WORK), "transfer": iter(_TRANSFER)}
    parts = [
        Part(row.name, row.share, *next(colours["work" if row.name.startswith("work") else "transfer"])) for row in rows
    ]
    rest = max(1.0 - sum(part.share for part in parts), 0.0)
    return Bar(
        "path",
        [*parts, *([Part("the rest", rest, "@other")] if parts and rest >= _MIN_SHOWN else [])],
        title="Critical path",
        remark="this chain of work and transfers without a wait determines the step time: the step gets shorter only "
        "if this path does",
    )
