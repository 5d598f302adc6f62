"""The slowest step as lanes: what each rank did when, so that who held up the others shows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpcpace.core.text import shell_word
from hpcpace.diagnosis.plot_data import Lane, SlowStep
from hpcpace.report.html.figure import LABEL_WIDTH, NAMED, Plot, axis, marked, names_axis, plot_text, unique
from hpcpace.report.html.parts import PARTS, drawn_names, marker
from hpcpace.report.html.text import escape, prose
from hpcpace.report.html.thinning import rounded

_VIEWER = "which <code>https://ui.perfetto.dev</code> opens in the browser"
_HOW = " Time begins with the first of these ranks. A rank that works long makes others wait until it arrives."


def slow_step(slow: SlowStep, named: Collection[int] = ()) -> Plot:
    """Return the lanes of a step.

    Args:
        slow: the step.
        named: the ranks that the verdict names, which are marked.
    """
    lanes = [replace(lane, part=drawn_names(lane.part, are_waits_known=lane.are_waits_known)) for lane in slow.lanes]
    names = unique(marked(plot_text(f"{lane.rank} {lane.host}", LABEL_WIDTH), lane.rank in named) for lane in lanes)
    shown = [entry for entry in PARTS if any(part in lane.part for lane in lanes for part in entry[1])]
    is_named = any(lane.rank in named for lane in lanes)
    return Plot(
        name="slow-step",
        label=f"What {len(lanes)} ranks did in step {slow.step}",
        caption=_caption(slow) + NAMED * is_named,
        height_px=70 + max(min(44, 480 // max(len(lanes), 1)), 20) * len(lanes),
        traces=[_trace(lanes, names, *entry) for entry in shown],
        layout={
            "barmode": "overlay",
            "bargap": 0.25,
            "xaxis": axis("ms", rangemode="tozero"),
            "yaxis": names_axis(len(lanes)),
        },
        legend=[(name, color, pattern) for name, _, color, pattern in shown],
        rows=[(name, str(lane.rank), lane.host) for name, lane in zip(names, lanes, strict=True)],
    )


def timeline_note(slow: SlowStep, run: str, timeline: str) -> str:
    """Return where the step is shown operation by operation.

    Args:
        slow: the step.
        run: the path of the run.
        timeline: name of the file for Perfetto beside the page; empty where there is none.
    """
    if timeline:
        link = f'<a href="{escape(timeline)}" download>{escape(timeline)}</a>'
        return f'<p class="lead">Every operation of every rank in the steps around it: {link}, {_VIEWER}.</p>'
    steps = f"{max(slow.step - 2, 0)}:{slow.step + 3}"
    text = (
        f"`hpcpace timeline {shell_word(run)} --steps {steps}` writes every operation of the steps around it to a file"
    )
    return f'<p class="lead">{prose(text)}, {_VIEWER}.</p>'


def _trace(
    lanes: Sequence[Lane], names: list[str], name: str, parts: tuple[str, ...], color: str, pattern: str
) -> dict[str, Any]:
    """Return the bars of one part in all lanes."""
    mine = [np.array([part in parts for part in lane.part], np.bool_) for lane in lanes]
    begin_ms, end_ms = (
        np.concatenate([times[is_mine] for times, is_mine in zip(columns, mine, strict=True)])
        for columns in ([lane.begin_ms for lane in lanes], [lane.end_ms for lane in lanes])
    )
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "base": [round(float(value), 4) for value in begin_ms],
        "x": rounded(end_ms - begin_ms),
        "y": [row for row, is_mine in zip(names, mine, strict=True) for _ in range(int(is_mine.sum()))],
        "marker": marker(color, pattern, edge_px=0),
        "hovertemplate": f"%{{y}}: {name} %{{customdata}} ms, from %{{base:.4~g}} ms<extra></extra>",
        "customdata": [f"{value:.3g}" for value in end_ms - begin_ms],
    }


def _caption(slow: SlowStep) -> str:
    which = f"Step {slow.step} took {slow.time_ms:.3g} ms, the median of steps is {slow.median_ms:.3g} ms."
    if slow.slowest != slow.step:
        which = (
            f"{which[:-1]}. It is the slowest of those taken apart operation by operation; the slowest of all is step "
            f"{slow.slowest} ({slow.slowest_ms:.3g} ms)."
        )
    some = (
        f" {len(slow.lanes)} of {slow.num_ranks} ranks are shown: those that the verdict names, those with most work "
        "beyond their role in this step and the one with least, and a typical one of each role."
    )
    return f"{which}{some * (len(slow.lanes) < slow.num_ranks)}{_HOW}"
