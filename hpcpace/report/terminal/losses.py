"""The parts of a report on a terminal that say what is lost and why: verdict, jitter, hotspots, causes, attempts."""

from __future__ import annotations

from rich.console import Console

from hpcpace.core.text import NS_PER_MS, alias_name, format_duration, percent, place_name, plural, printable
from hpcpace.diagnosis.summary import Jitter, Summary
from hpcpace.report.terminal.layout import line, note, table, title
from hpcpace.report.words.attempts import ATTEMPT_HEAD, attempt_cells, attempts_differ
from hpcpace.report.words.causes import (
    gains_remark,
    origins_coverage,
    origins_remark,
    significant_gains,
    significant_origins,
    significant_path,
    skew_reading,
)
from hpcpace.report.words.jitter import comparison_reading
from hpcpace.report.words.run import UNKNOWN_WAITS, message_size

_MOST_HOTSPOTS = 8
_MOST_NAMED = 4
_MOST_GAINS = 5


def print_verdict(console: Console, summary: Summary) -> None:
    """Print the verdict: what is wrong, why, what to do, and what else shares the loss."""
    verdict = summary.verdict
    sure = f" (confidence {100 * verdict.confidence:.0f} %)" if verdict.confidence else ""
    line(console, "Verdict", f"{verdict.headline}{sure}", style="bold")
    for label, sentences in (("Why", verdict.why), ("Next", verdict.next), ("Also", verdict.also)):
        for number, sentence in enumerate(sentences):
            line(console, "" if number else label, sentence)


def print_jitter(console: Console, summary: Summary) -> None:
    """Print what waiting for the slowest costs, against independent noise, and at larger scales."""
    jitter = summary.jitter
    if jitter is None:
        if summary.unknown:
            title(console, "Jitter")
            note(console, summary.unknown)
        return
    segments = plural(jitter.num_segments, "segment")
    title(console, "Jitter", f"{plural(len(jitter.ranks), 'rank')} that wait for each other, {segments} per step")
    noise = f" (noise alone {jitter.persistent_null:.3f})" if jitter.persistent_null is not None else ""
    line(
        console,
        "amplified",
        f"A {jitter.amplification:.3f}{_interval(jitter.interval)} = persistent {jitter.persistent:.3f}{noise} x "
        f"transient {jitter.transient:.3f}; {percent(jitter.loss_share)} of the step time",
    )
    if jitter.null is not None:
        unit = "nodes" if jitter.is_node_unit else "ranks"
        text = f"independent {unit} with the same lasting differences: A {jitter.null:.3f}"
        text += _interval(jitter.null_interval)
        line(console, "null model", f"{text}; {comparison_reading(jitter)}")
    line(console, "noise", _noise(jitter))
    line(console, "at scale", _scale(jitter))
    note(
        console,
        "A: mean time of the slowest rank over the mean of all. Intensity: a rank's mean over its best steps. "
        "Exponent: slope of ln(A - 1) over ln(ranks), lasting differences taken out. "
        "At scale: share of the step lost if new nodes are like these.",
    )


def _interval(bounds: tuple[float, float] | None) -> str:
    return f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else ""


def _noise(jitter: Jitter) -> str:
    parts = []
    if jitter.common_share is not None and jitter.rank_share is not None and jitter.residual_share is not None:
        parts.append(
            f"variance: {percent(jitter.common_share)} common to all, {percent(jitter.rank_share)} between ranks, "
            f"{percent(jitter.residual_share)} in single steps"
        )
    if jitter.noise_intensity is not None:
        parts.append(f"intensity {percent(jitter.noise_intensity)}")
    if jitter.noise_amplification is not None:
        parts.append(f"{percent(jitter.noise_amplification)} of it reaches the step time")
    return "; ".join(parts) or "none"


def _scale(jitter: Jitter) -> str:
    growth, predictions = jitter.growth, jitter.predictions
    exponent = ""
    if growth is not None and growth.exponent is not None:
        exponent = f"exponent {growth.exponent:.2f}; "
    if predictions.refused:
        return f"{exponent}not extrapolated: {predictions.refused}"
    points = [
        f"{plural(point.num_nodes, 'node')} {percent(point.loss_share)}{'?' if point.is_speculative else ''}"
        for point in predictions.points
    ]
    return f"{exponent}{predictions.label}: {', '.join(points)}"


def print_hotspots(console: Console, summary: Summary) -> None:
    """Print the places whose ranks work more slowly than others of their role."""
    if summary.unknown:
        title(console, "Hotspots")
        note(console, summary.unknown)
    if not summary.hotspots:
        return
    title(console, "Hotspots", "own work per step beyond that of other places of the same level")
    rows = table("place", ("effect", "95 % interval", "of lateness", "could also be"))
    for spot in summary.hotspots[:_MOST_HOTSPOTS]:
        low, high = (format_duration(max(bound, 0.0)) for bound in spot.interval_ns)
        others = [alias_name(alias) for alias in spot.aliases if alias != f"{spot.kind} {spot.id}"]
        rows.add_row(
            place_name(spot.kind, spot.id),
            format_duration(spot.effect_ns),
            f"{low} to {high}",
            percent(spot.loss_share),
            ", ".join(others) or "-",
        )
    console.print(rows)
    if len(summary.hotspots) > _MOST_HOTSPOTS:
        note(console, f"{len(summary.hotspots) - _MOST_HOTSPOTS} more in summary.json")


def print_causes(console: Console, summary: Summary) -> None:
    """Print where waiting began, what the critical path consists of, and what single changes would gain."""
    causes = summary.causes
    if causes is None or len(summary.world.ranks) < 2:
        return
    title(console, "Causes", "where waiting began, and what determines the step time")
    if summary.unknown:
        note(console, summary.unknown)
    elif summary.shares.exposed_wait is None:
        note(console, UNKNOWN_WAITS)
    origins = significant_origins(summary, _MOST_NAMED)
    if origins:
        is_chained = any(row.propagated_share >= 0.0005 for row in origins)
        passed = " (in brackets: passed on by other ranks)" if is_chained else ""
        shares = [
            f"rank {row.rank} {percent(row.share_of_waits)}" + (f" ({percent(row.propagated_share)})" * is_chained)
            for row in origins
        ]
        whole = f"share of exposed wait, {origins_coverage(summary)} traced{passed}"
        line(console, "began at", f"{whole}: {', '.join(shares)}")
    if remark := origins_remark(summary):
        line(console, "", remark)
    if path := significant_path(causes, _MOST_NAMED):
        line(console, "path", "critical path: " + ", ".join(f"{row.name} {percent(row.share)}" for row in path))
    gains = significant_gains(summary)
    if gains:
        rows = table("if this took its usual time", ("step shorter by", "95 % interval"))
        for gain in gains[:_MOST_GAINS]:
            low, high = (percent(bound) for bound in gain.interval)
            rows.add_row(printable(gain.name), percent(gain.gain_share), f"{low} to {high}")
        console.print(rows)
    if remark := gains_remark(summary):
        note(console, remark)


def print_sensitivity(console: Console, summary: Summary) -> None:
    """Print whether collectives take longer when their ranks arrive together or at different times."""
    if not summary.sensitivity:
        return
    title(console, "Transfer against skew", "transfer added per ms between the first and the last arrival")
    rows = table("\noperation", ("group\nsize", "\nbytes", "per ms\nof skew", "\n95 % interval"))
    rows.add_column("\nreading")
    for row in summary.sensitivity:
        low, high = (format_duration(bound * NS_PER_MS) for bound in row.interval)
        slope = format_duration(row.slope * NS_PER_MS)
        size = message_size(row.size_bytes, row.op)
        rows.add_row(row.op, str(row.group_size), size, slope, f"{low} to {high}", skew_reading(row))
    console.print(rows)


def print_attempts(console: Console, summary: Summary) -> None:
    """Print all attempts of a run in one table, and how they differ."""
    if not summary.history:
        return
    title(console, "Attempts", f"all other figures are of attempt {summary.attempt}")
    first, *others, last = ATTEMPT_HEAD
    rows = table(first, others)
    rows.add_column(last)
    for row in summary.history:
        is_shown = row.attempt == summary.attempt
        rows.add_row(*attempt_cells(row), style="bold" if is_shown else "")
    console.print(rows)
    note(console, attempts_differ(summary.history, summary.attempt))
