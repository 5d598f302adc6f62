"""The section on causes: where waiting began and spread, what determines the step time, and what would shorten it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpcpace.core.text import percent
from hpcpace.diagnosis.summary import Causes, GainRow, Summary
from hpcpace.report.html.figure import LABEL_WIDTH, NAMED, Plot, axis, marked, names_axis, plot_text, unique
from hpcpace.report.html.text import figure, notes, stacked_bar, table
from hpcpace.report.html.thinning import rounded
from hpcpace.report.words.causes import (
    gains_remark,
    named_ranks_of,
    origins_coverage,
    origins_remark,
    significant_gains,
    significant_origins,
    significant_path,
)

_MOST_ROWS = 12
_WORK = (("@busy-2", ""), ("@busy-1", ""), ("@busy-3", ""), ("@busy-2", "/"), ("@busy-1", "/"), ("@busy-3", "/"))
_TRANSFER = (("@transfer", ""), ("@transfer", "/"), ("@c5", ""), ("@c5", "/"), ("@wait", ""), ("@wait", "/"))


def cause_plots(summary: Summary) -> dict[str, Plot]:
    """Return the plots that have data, by name."""
    causes, drawn = summary.causes, {}
    if causes is None or len(summary.world.ranks) < 2:
        return {}
    if significant_origins(summary, _MOST_ROWS):
        drawn["origins"] = _origins(summary, {row.rank: row.host for row in summary.ranks})
    if gains := significant_gains(summary):
        drawn["gains"] = _gains(gains[:_MOST_ROWS], causes.rebuild_error or 0.0)
    return drawn


def cause_content(summary: Summary, drawn: Mapping[str, Plot]) -> tuple[str, ...]:
    """Return the pieces of the section; none where causes are not known."""
    causes = summary.causes
    if causes is None or len(summary.world.ranks) < 2:
        return ()
    return (
        figure(drawn["origins"], "Where waiting began") if "origins" in drawn else "",
        notes([remark] if (remark := origins_remark(summary)) else []),
        _path(causes),
        figure(drawn["gains"], "What if") if "gains" in drawn else "",
        _gains_table(significant_gains(summary)),
        notes([remark] if (remark := gains_remark(summary)) else []),
    )


def _origins(summary: Summary, hosts: Mapping[int, str]) -> Plot:
    """Return the waiting that began at each rank, divided by how it reached those who waited."""
    rows = significant_origins(summary, _MOST_ROWS)
    named = named_ranks_of(summary)
    names = unique(
        [
            marked(plot_text(f"rank {row.rank} {hosts.get(row.rank, '')}".strip(), LABEL_WIDTH), row.rank in named)
            for row in rows
        ]
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
        label="Waiting by the rank where it began",
        caption=(
            "Exposed wait of all ranks, mean share of the step, by the rank whose delay began it: "
            f"{origins_coverage(summary)} could be traced.{chain * is_passed}{NAMED * bool(named)}"
        ),
        height_px=74 + 28 * max(len(rows), 2),
        traces=[
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "x": rounded(values),
                "y": names,
                "customdata": of_waits,
                "marker": {"color": color, "line": {"width": 1, "color": "@paper"}},
                "hovertemplate": f"%{{y}}: {name} %{{x:.2f}} % of the step (%{{customdata}} of waiting)<extra></extra>",
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


def _gains(gains: tuple[GainRow, ...], error_share: float) -> Plot:
    """Return the gain of each change with its interval, and the error of rebuilding steps."""
    gain, low, high = 100 * np.array([(row.gain_share, *row.interval) for row in gains]).T
    band = " The grey band is what rebuilding the steps gets wrong." * (error_share >= 0.0005)
    return Plot(
        name="gains",
        label="How much single changes would shorten the step",
        caption=f"How much shorter the step would be if one thing took its usual time, with 95 % intervals.{band}",
        height_px=74 + 28 * max(len(gains), 2),
        traces=[
            {
                "type": "scatter",
                "mode": "markers",
                "x": rounded(gain),
                "y": unique([plot_text(row.name, 2 * LABEL_WIDTH) for row in gains]),
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": rounded(np.maximum(high - gain, 0)),
                    "arrayminus": rounded(np.maximum(gain - low, 0)),
                    "color": "@muted",
                    "thickness": 1.5,
                    "width": 4,
                },
                "marker": {"size": 10, "color": "@good"},
                "hovertemplate": "%{y}: %{x:.2f} % of the step<extra></extra>",
            }
        ],
        layout={
            "xaxis": axis("% of the step", zeroline=True, rangemode="tozero"),
            "yaxis": names_axis(len(gains)),
            "shapes": [
                {
                    "type": "rect",
                    "xref": "x",
                    "yref": "paper",
                    "x0": 0,
                    "x1": 100 * error_share,
                    "y0": 0,
                    "y1": 1,
                    "line": {"width": 0},
                    "fillcolor": "@null-band",
                    "layer": "below",
                }
            ],
        },
    )


def _path(causes: Causes) -> str:
    """Return what the critical path consists of as one bar; what is not among its largest parts is the rest."""
    rows = significant_path(causes, len(_WORK))
    if not rows:
        return ""
    colours = {"work": iter(_WORK), "transfer": iter(_TRANSFER)}
    entries = [(row.name, *next(colours["work" if row.name.startswith("work") else "transfer"])) for row in rows]
    shares = [row.share for row in rows]
    rest = max(1.0 - sum(shares), 0.0)
    if rest >= 0.0005:
        entries, shares = [*entries, ("the rest", "@other", "")], [*shares, rest]
    remark = (
        "The critical path, a chain of work and transfers without a wait: the step gets shorter only if this path does."
    )
    head = f"<h3>What determines the step time</h3>\n<figcaption>{remark}</figcaption>"
    return f"<figure>\n{head}\n{stacked_bar(entries, shares)}</figure>"


def _gains_table(gains: tuple[GainRow, ...]) -> str:
    rows = [
        (gain.name, percent(gain.gain_share), f"{percent(gain.interval[0])} to {percent(gain.interval[1])}")
        for gain in gains[:_MOST_ROWS]
    ]
    made = table("One change at a time", ("if this took its usual time", "step shorter by", "95 % interval"), rows)
    return f"<details><summary>The same in figures</summary>{made}</details>" if made else ""
