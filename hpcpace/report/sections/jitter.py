"""Jitter and pacing: the cost of waiting for the slowest, now and at scale, and whether holding early ranks helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hpcpace.core.text import format_duration, listed, percent, plural
from hpcpace.diagnosis.plot_data import PlotData
from hpcpace.diagnosis.summary import Growth, Jitter, PacingFigures, Summary
from hpcpace.report.document import Block, Facts, Notes, Plot, Section, Table
from hpcpace.report.drawing import axis, band, line

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
        f"A {jitter.amplification:.3f}{_interval(jitter.interval)} = persistent {jitter.persistent:.3f}{noise} x "
        f"transient {jitter.transient:.3f}; {percent(jitter.loss_share)} of the step time is lost to waiting for the "
        "slowest",
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
        more = [f"{len(pacing.points) - _MAX_PACED} more"] if len(pacing.points) > _MAX_PACED else []
        yield "paced at", listed([*pacing.points[:_MAX_PACED], *more])
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
