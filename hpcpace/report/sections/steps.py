"""Steps over time: their durations, the slowest one rank by rank, and the own delay of each rank in each step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import NS_PER_MS, format_duration, milliseconds, plural, shell_word
from hpcpace.diagnosis.plot_data import Lane, PlotData, SlowStep, Values
from hpcpace.diagnosis.summary import Summary, Throughput
from hpcpace.report.document import Link, Plot, Section, SideBySide
from hpcpace.report.drawing import (
    LABEL_WIDTH,
    NAMED,
    axis,
    bars,
    binned,
    heat_map,
    mark,
    marked,
    marker,
    names_axis,
    plot_text,
    rounded,
    series,
    unique,
)
from hpcpace.report.sections.phases import PARTS, drawn_names, drawn_parts

_MAX_ROWS, _MAX_COLUMNS = 512, 1000  # a heat map then has a cell for every pixel of a wide screen
_MAX_AREAS = 400
_HOW = " Time begins with the first of these ranks. A rank that works long makes others wait until it arrives."


def times_section(summary: Summary, plots: PlotData) -> Section:
    """Return how long steps took."""
    drawn: list[Plot] = []
    if plots.step is not None and len(plots.step) and plots.step_ms is not None:
        drawn = [step_times(plots.step, plots.step_ms, summary.throughput), step_distribution(plots.step_ms)]
    parts_ms, is_many = plots.parts_ms, plots.step is not None and len(plots.step) > 1
    over_steps = phases_over_steps(plots.step, parts_ms) if is_many and plots.step is not None and parts_ms else None
    return Section("Step times", (SideBySide(drawn), over_steps))


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


def phases_over_steps(step: NDArray[np.int64], parts_ms: Mapping[str, Values | None]) -> Plot:
    """Return where steps went, one after the other, as stacked areas; beyond _MAX_AREAS steps as means of some.

    Args:
        step: numbers of the steps, (num_steps,).
        parts_ms: as `PlotData` has them.
    """
    drawn = drawn_parts(parts_ms)
    size = -(-len(step) // _MAX_AREAS)
    first = np.arange(0, len(step), size)
    num = np.diff(np.append(first, len(step)))
    shown = [(entry, [drawn[part] for part in entry[1] if part in drawn]) for entry in PARTS]
    shown = [(entry, parts) for entry, parts in shown if any(part.any() for part in parts)]
    thinned = f" Each point is the mean of {size} steps." * (size > 1)
    return Plot(
        name="phases-over-steps",
        title="Phases over steps",
        label=f"Where {plural(len(step), 'step')} went, by phase",
        caption=f"Mean over ranks; the parts add up to the step.{thinned}",
        height_px=320,
        traces=[
            _area(step[first], np.add.reduceat(np.sum(parts, axis=0), first) / num, name, color, pattern)
            for (name, _, color, pattern), parts in shown
        ],
        layout={"xaxis": axis("step"), "yaxis": axis("ms", rangemode="tozero"), "hovermode": "x unified"},
        legend=[(name, color, pattern) for (name, _, color, pattern), _ in shown],
    )


def _area(step: NDArray[np.int64], values_ms: Values, name: str, color: str, pattern: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "stackgroup": "parts",
        "name": name,
        "x": [int(value) for value in step],
        "y": rounded(values_ms),
        "line": {"width": 0, "color": color},
        "fillcolor": color,
        "fillpattern": marker(color, pattern)["pattern"],
        "hovertemplate": "%{y:.3~g} ms",
    }


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
                "x": [float(f"{middle:.4g}") for middle in (edges[:-1] + edges[1:]) / 2],
                "y": [int(count) for count in counts],
                "width": float(edges[1] - edges[0]),
                "marker": {"color": "@busy", "line": {"width": 1, "color": "@paper"}},
                "hovertemplate": "%{x:.4~g} ms: %{y} steps<extra></extra>",
            }
        ],
        layout={"xaxis": axis("ms"), "yaxis": axis("steps"), "bargap": 0},
    )


def slowest_section(plots: PlotData, run: str, timeline: str, named: Collection[int]) -> Section:
    """Return the slowest step as lanes.

    Args:
        plots: what it shows.
        run: the path of the run.
        timeline: name of the file for Perfetto beside the page; empty without one.
        named: the ranks that the verdict names.
    """
    slow = plots.slow_step
    if slow is None:
        return Section("Slowest step", ())
    steps = f"{max(slow.step - 2, 0)}:{slow.step + 3}"
    sentence = (
        f"`hpcpace timeline {shell_word(run)} --steps {steps}` writes every operation of the steps around it to a file"
    )
    if timeline:
        sentence = "Every operation of every rank in the steps around it: {}"
    viewer = ", which `https://ui.perfetto.dev` opens in the browser."
    return Section("Slowest step", (slow_step(slow, named), Link(sentence + viewer, timeline)))


def slow_step(slow: SlowStep, named: Collection[int] = ()) -> Plot:
    """Return what each rank did when in a step, so that it shows who held up the others; `named` ranks are marked."""
    lanes = [replace(lane, part=drawn_names(lane.part, are_waits_known=lane.are_waits_known)) for lane in slow.lanes]
    names = unique(marked(plot_text(f"{lane.rank} {lane.host}", LABEL_WIDTH), lane.rank in named) for lane in lanes)
    shown = [entry for entry in PARTS if any(part in lane.part for lane in lanes for part in entry[1])]
    is_named = any(lane.rank in named for lane in lanes)
    return Plot(
        name="slow-step",
        label=f"What {len(lanes)} ranks did in step {slow.step}",
        caption=_slow_caption(slow) + NAMED * is_named,
        height_px=70 + max(min(44, 480 // max(len(lanes), 1)), 20) * len(lanes),
        traces=[_stretches(lanes, names, *entry) for entry in shown],
        layout={
            "barmode": "overlay",
            "bargap": 0.25,
            "xaxis": axis("ms", rangemode="tozero"),
            "yaxis": names_axis(len(lanes)),
        },
        legend=[(name, color, pattern) for name, _, color, pattern in shown],
        rows=[(name, str(lane.rank), lane.host) for name, lane in zip(names, lanes, strict=True)],
    )


def _stretches(
    lanes: Sequence[Lane], names: list[str], name: str, parts: tuple[str, ...], color: str, pattern: str
) -> dict[str, Any]:
    """Return the bars of one part in all lanes."""
    mine = [np.array([part in parts for part in lane.part], np.bool_) for lane in lanes]
    begin_ms, end_ms = (
        np.concatenate([times[is_mine] for times, is_mine in zip(columns, mine, strict=True)])
        for columns in ([lane.begin_ms for lane in lanes], [lane.end_ms for lane in lanes])
    )
    rows = [row for row, is_mine in zip(names, mine, strict=True) for _ in range(int(is_mine.sum()))]
    hover = f"%{{y}}: {name} %{{customdata}} ms, from %{{base:.4~g}} ms"
    return {
        **bars(
            rows,
            end_ms - begin_ms,
            marker(color, pattern, edge_px=0),
            hover,
            data=[milliseconds(value * NS_PER_MS) for value in end_ms - begin_ms],
        ),
        "name": name,
        "base": [round(float(value), 4) for value in begin_ms],
    }


def _shown(time_ms: float) -> str:
    return format_duration(time_ms * NS_PER_MS)


def _slow_caption(slow: SlowStep) -> str:
    which = f"Step {slow.step} took {_shown(slow.time_ms)}, the median of steps is {_shown(slow.median_ms)}."
    if slow.slowest != slow.step:
        which = (
            f"{which[:-1]}. It is the slowest of those taken apart operation by operation; the slowest of all is step "
            f"{slow.slowest} ({_shown(slow.slowest_ms)})."
        )
    some = (
        f" {len(slow.lanes)} of {slow.num_ranks} ranks are shown: those that the verdict names, those with most work "
        "beyond their role in this step and the one with least, and a typical one of each role."
    )
    return f"{which}{some * (len(slow.lanes) < slow.num_ranks)}{_HOW}"


def own_delay_section(summary: Summary, plots: PlotData, named: Collection[int]) -> Section:
    """Return each rank's delay beyond its role in each step; `named` are the ranks that the verdict names."""
    drawn = None
    if plots.step is not None and plots.own_delay_ms is not None and np.isfinite(plots.own_delay_ms).any():
        rows = [at for at, row in enumerate(summary.ranks) if row.rank in named]
        drawn = own_delay(plots.step, plots.own_delay_ms, plots.rank_labels, plots.delay_remark, rows)
    return Section("Own delay by rank and step", (drawn,))


def own_delay(
    step: NDArray[np.int64], delay_ms: Values, labels: Sequence[str], remark: str = "", named: Collection[int] = ()
) -> Plot:
    """Return the heat map of each rank's delay beyond its role, by rank and step.

    Args:
        step: numbers of the steps, (num_steps,).
        delay_ms: (num_ranks, num_steps).
        labels: names of its rows.
        remark: a sentence that ends its caption.
        named: rows of the ranks that the verdict names, which are marked.
    """
    values, by_row, by_column = binned(delay_ms, _MAX_ROWS, _MAX_COLUMNS)
    blocks = [labels[at : at + by_row] for at in range(0, len(labels), by_row)]
    names = [plot_text(block[0], LABEL_WIDTH) if by_row == 1 else f"{plot_text(block[0], 14)} …" for block in blocks]
    marks = {row // by_row for row in named}
    names = unique(marked(name, place in marks) for place, name in enumerate(names))
    remark = f" {remark}" * bool(remark) + NAMED * bool(named)
    parts = [plural(by_row, "rank")] * (by_row > 1) + [plural(by_column, "step")] * (by_column > 1)
    thinned = f" Each cell is the largest magnitude of {' and '.join(parts)}." if parts else ""
    limit = _color_limit(values)
    return heat_map(
        [int(value) for value in step[::by_column]],
        names,
        values,
        name="own-delay",
        label=f"Own delay of {plural(len(labels), 'rank')} over {plural(len(step), 'step')}",
        caption=(
            "Work of a rank in a step beyond the median of the others of its role: orange is later, blue earlier. A "
            f"line across is a slow rank, a line down a shared cause.{thinned} Colours end at {_shown(limit)}; larger "
            f"values have the last colour.{remark}"
        ),
        height_px=110 + min(max(14 * len(values), 30 * min(len(values), 8)), 560),
        scale=("@diverging", -limit, limit),
        unit="ms",
        hover="%{y}, step %{x}: %{z:.3~g} ms",
        xaxis=axis("step"),
        rows=[(name, *_about(block)) for name, block in zip(names, blocks, strict=True)],
    )


def _about(labels: Sequence[str]) -> tuple[str, str]:
    """Return the ranks and the hosts of some rows, whose labels are like `3 n1`."""
    parts = [label.partition(" ") for label in labels]
    first, last = parts[0][0], parts[-1][0]
    hosts = dict.fromkeys(host for *_, host in parts)
    return first if first == last else f"{first}-{last}", " ".join(hosts)


def _color_limit(values: Values) -> float:
    """Return where the colours end: above most cells, and not below the middle of any row or column."""
    known = np.abs(np.where(np.isfinite(values), values, 0.0))
    middles = (np.median(known, axis=axis).max(initial=0.0) for axis in (0, 1))
    limit = float(max(np.percentile(known, 99.5), *middles))
    return limit or float(known.max(initial=0.0)) or 1.0
