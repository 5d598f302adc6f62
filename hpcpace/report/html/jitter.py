"""What waiting for the slowest costs, in figures next to the plot of growth: now, by noise alone, at larger scales."""

from __future__ import annotations

from hpcpace.core.text import percent, plural
from hpcpace.diagnosis.summary import Jitter, Prediction
from hpcpace.report.html.text import facts, notes, table
from hpcpace.report.words.jitter import comparison_reading


def jitter_tiles(jitter: Jitter | None) -> str:
    """Return what is lost to the slowest rank and how the loss divides; empty where it is not known."""
    if jitter is None:
        return ""
    alpha = jitter.noise_amplification
    effect = "" if alpha is None else f"{alpha:.2f} ({'amplified' if alpha > 1 else 'absorbed'})"
    return facts(
        (
            ("Lost to waiting for the slowest", percent(jitter.loss_share)),
            ("Amplification A", f"{jitter.amplification:.3f}"),
            ("A of lasting differences", f"{jitter.persistent:.3f}"),
            ("A of jitter proper", f"{jitter.transient:.3f}"),
            ("Noise intensity", percent(jitter.noise_intensity) if jitter.noise_intensity is not None else ""),
            ("Effect of noise on the step", effect),
        ),
        kind="tiles",
    )


def jitter_notes(jitter: Jitter | None) -> str:
    """Return the sentences below the tiles: intervals, the null model, shares of the variance."""
    if jitter is None:
        return ""
    lines = [
        f"{plural(len(jitter.ranks), 'rank')} that wait for each other, "
        f"{plural(jitter.num_segments, 'segment')} per step"
    ]
    if jitter.interval:
        noise = jitter.persistent_null
        biased = f"; noise alone would give slow ranks {noise:.3f}" if noise is not None else ""
        lines.append(f"A is between {_interval(jitter.interval)} (95 %){biased}")
    if jitter.null is not None:
        unit = "nodes" if jitter.is_node_unit else "ranks"
        lines.append(f"independent {unit} with this noise would have A {jitter.null:.3f}; {comparison_reading(jitter)}")
    if jitter.common_share is not None and jitter.rank_share is not None and jitter.residual_share is not None:
        lines.append(
            f"of the variance, {percent(jitter.common_share)} is common to all ranks, {percent(jitter.rank_share)} "
            f"is between ranks, {percent(jitter.residual_share)} is in single steps of single ranks"
        )
    if jitter.growth is not None and jitter.growth.exponent is not None:
        exponent = f"{jitter.growth.exponent:.2f}: 0 is bounded, 1 proportional to size"
        lines.append(f"lasting differences taken out, the loss grows with exponent {exponent}")
    if jitter.predictions.refused:
        lines.append(f"not extrapolated: {jitter.predictions.refused}")
    return notes(lines)


def predictions_table(jitter: Jitter | None) -> str:
    """Return the loss at larger scales; empty where it is not predicted."""
    if jitter is None or jitter.predictions.refused:
        return ""
    rows = [
        (
            str(point.num_nodes),
            percent(point.loss_share),
            _percent_interval(point),
            "yes" if point.is_speculative else "no",
        )
        for point in jitter.predictions.points
    ]
    head = ("nodes", "loss", "95 % interval", "speculative")
    return table(f"Loss at larger scales, of the present step time ({jitter.predictions.label})", head, rows)


def _percent_interval(point: Prediction) -> str:
    return f"{percent(point.interval[0])} to {percent(point.interval[1])}"


def _interval(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]:.3f} and {bounds[1]:.3f}"
