"""The page of a comparison: the verdict, both groups side by side, and what else changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.core.rundir import json_text
from hpcpace.core.text import NS_PER_MS, milliseconds
from hpcpace.report.document import Plot
from hpcpace.report.drawing import axis, marker, names_axis, plot_text, rounded, unique
from hpcpace.report.html.frame import framed, tools
from hpcpace.report.html.text import (
    contents,
    escape,
    facts,
    figure,
    notes,
    prose,
    section,
    side_by_side,
    table,
    terms,
    warning,
)
from hpcpace.report.words.comparison import (
    AGAINST_OTHERS,
    change_cells,
    change_ms,
    headline,
    median_cells,
    names_of,
    noise_sentence,
    other_work_sentences,
    place_sentences,
    reason_sentence,
    run_sentence,
    signed,
)
from hpcpace.runs.compare import ComparedRun, Comparison, Outcome

_KINDS = {Outcome.SLOWER: "", Outcome.FASTER: "healthy", Outcome.SAME: "healthy"}
_BEFORE, _AFTER = "@c1", "@c2"
_NONE = "\N{EN DASH}"
_MOST_HOSTS, _MOST_RUNS, _LABEL = 200, 8, 34


def comparison_page(comparison: Comparison) -> str:
    """Return the whole page; the same comparison gives the same page."""
    plots = [plot for plot in (_blocks(comparison), _parts(comparison), _hosts(comparison)) if plot is not None]
    drawn = {plot.name: plot for plot in plots}
    return framed(
        f"B is {comparison.outcome}: comparison · hpcpace",
        _body(comparison, drawn),
        plots,
        json_text(comparison.to_json()),
    )


def _body(comparison: Comparison, drawn: dict[str, Plot]) -> str:
    made = [
        (title, section(title, lead, *content))
        for title, lead, content in (
            ("The runs", "", (_sides(comparison), _figure(drawn, "blocks"))),
            (
                "Where the difference comes from",
                "Parts of the mean step, means over the runs of each side; they add up to it.",
                (_figure(drawn, "parts"), _parts_table(comparison)),
            ),
            (
                "Own work by host",
                "What ranks do by themselves, and the waits of all ranks that began at each host.",
                (_figure(drawn, "hosts"), _hosts_table(comparison)),
            ),
            ("Own work by role", "", (_roles_table(comparison),)),
            (
                "What else changed",
                "Any of it may be a cause; that it changed as well proves nothing.",
                (_changes_table(comparison),),
            ),
            ("Terms", "", (terms(),)),
        )
    ]
    head = (
        f'<header class="run">hpcpace compare: A is <b>{escape(names_of(comparison.before))}</b>, '
        f"B is <b>{escape(names_of(comparison.after))}</b></header>"
    )
    parts = (
        f'<div class="head">{head}{tools("comparison.json")}</div>',
        _verdict(comparison),
        *(warning(sentence, "Other work") for sentence in other_work_sentences(comparison)),
        *(warning(sentence, "Remark") for sentence in comparison.remarks),
        contents([title for title, content in made if content]),
        "<noscript><p>The plots need JavaScript; the tables do not.</p></noscript>",
        *(content for _, content in made),
    )
    return "\n".join(part for part in parts if part)


def _verdict(comparison: Comparison) -> str:
    reasons = reason_sentence(comparison)
    rows = [
        ("Why", [reasons] if reasons else []),
        ("Where", place_sentences(comparison) if comparison.parts else []),
        ("Noise", [noise_sentence(comparison)]),
    ]
    inside = "".join(
        f"<dt>{name}</dt><dd>{''.join(f'<p>{prose(line)}</p>' for line in lines)}</dd>" for name, lines in rows if lines
    )
    line = headline(comparison)
    return (
        f'<div class="verdict {_KINDS[comparison.outcome]}">\n<p class="mode">{escape(str(comparison.outcome))}</p>\n'
        f"<h1>{prose(line[:1].upper() + line[1:])}</h1>\n<dl>{inside}</dl>\n</div>"
    )


def _figure(drawn: dict[str, Plot], name: str) -> str:
    return figure(drawn[name]) if name in drawn else ""


def _sides(comparison: Comparison) -> str:
    sides = (("A", comparison.before), ("B", comparison.after))
    left, right = (
        f"<div><h3>{label}</h3>{notes([run_sentence(run) for run in runs[:_MOST_RUNS]])}"
        + (notes([f"{len(runs) - _MOST_RUNS} more"]) if len(runs) > _MOST_RUNS else "")
        + "</div>"
        for label, runs in sides
    )
    return side_by_side(left, right, is_even=True)


def _blocks(comparison: Comparison) -> Plot | None:
    """Return median step times over the course of the runs."""
    traces = [
        trace
        for label, runs, color in (("A", comparison.before, _BEFORE), ("B", comparison.after, _AFTER))
        for trace in _curves(label, runs, color)
    ]
    if not traces:
        return None
    return Plot(
        name="blocks",
        label="Median step times over the course of the runs",
        caption="Medians of up to 20 blocks of consecutive steps, from the begin of each run to its end.",
        height_px=280,
        traces=traces,
        layout={"xaxis": axis("% of the run", range=[0, 100]), "yaxis": axis("ms", rangemode="tozero")},
        legend=[("A", _BEFORE, ""), ("B", _AFTER, "")],
    )


def _curves(label: str, runs: Sequence[ComparedRun], color: str) -> list[dict[str, object]]:
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": rounded(100 * (np.arange(len(run.block_p50_ns)) + 0.5) / len(run.block_p50_ns)),
            "y": rounded(np.array(run.block_p50_ns) / NS_PER_MS),
            "line": {"color": color, "width": 1.6},
            "marker": {"color": color, "size": 4},
            "hovertemplate": f"{label} {plot_text(run.path, 60)}: %{{y:.4~g}} ms<extra></extra>",
        }
        for run in runs[:_MOST_RUNS]
        if run.block_p50_ns
    ]


def _parts(comparison: Comparison) -> Plot | None:
    rows = [row for row in comparison.parts if row.before_ns or row.after_ns]
    if not rows:
        return None
    names = unique(plot_text(f"{row.kind}: {row.name}", _LABEL) for row in rows)
    sides = (
        ("B", _AFTER, "/", [row.after_ns for row in rows]),
        ("A", _BEFORE, "", [row.before_ns for row in rows]),
    )
    return Plot(
        name="parts",
        label="Parts of the step in A and B",
        caption="Milliseconds per step of each part.",
        height_px=90 + 34 * len(rows),
        traces=[_bars(label, names, values, color, pattern) for label, color, pattern, values in sides],
        layout={"barmode": "group", "bargap": 0.25, "xaxis": axis("ms"), "yaxis": names_axis(len(rows))},
        legend=[("A", _BEFORE, ""), ("B", _AFTER, "/")],
    )


def _bars(label: str, names: Sequence[str], values_ns: Sequence[float], color: str, pattern: str) -> dict[str, object]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": label,
        "x": rounded(np.array(values_ns) / NS_PER_MS),
        "y": names,
        "marker": marker(color, pattern),
        "hovertemplate": f"{label}: %{{y}} %{{x:.4~g}} ms<extra></extra>",
    }


def _hosts(comparison: Comparison) -> Plot | None:
    """Return the change of own work of each host with its interval."""
    hosts = comparison.places.hosts if comparison.places is not None else ()
    rows = [(row, row.change) for row in hosts[:40] if row.change is not None and row.is_in_both]
    if len(rows) < 2:
        return None
    names = unique(plot_text(row.name, _LABEL) for row, _ in rows)
    low = np.array([100 * np.expm1(change.low) for _, change in rows])
    high = np.array([100 * np.expm1(change.high) for _, change in rows])
    middle = np.array([100 * row.change_share for row, _ in rows])
    return Plot(
        name="hosts",
        label="Change of own work by host",
        caption="Change of own work from A to B with its 95 % interval, of all hosts together; where a host does other "
        "work in B, against the others of its run.",
        height_px=90 + 22 * len(rows),
        traces=[
            {
                "type": "scatter",
                "mode": "markers",
                "x": rounded(middle),
                "y": names,
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": rounded(high - middle),
                    "arrayminus": rounded(middle - low),
                    "color": "@muted",
                },
                "marker": {"color": ["@wait" if row.is_named else "@busy" for row, _ in rows], "size": 9},
                "hovertemplate": "%{y}: %{x:+.2f} %<extra></extra>",
            }
        ],
        layout={"xaxis": axis("% from A to B", zeroline=True), "yaxis": names_axis(len(rows))},
    )


def _parts_table(comparison: Comparison) -> str:
    total = sum(row.before_ns for row in comparison.parts)
    rows = [
        (
            f"{row.kind}: {row.name}",
            milliseconds(row.before_ns),
            milliseconds(row.after_ns),
            change_ms(row.change_ns),
            signed(row.change_ns / total),
        )
        for row in comparison.parts
    ]
    if rows:
        after = sum(row.after_ns for row in comparison.parts)
        rows.append(
            (
                "mean step",
                milliseconds(total),
                milliseconds(after),
                change_ms(after - total),
                signed((after - total) / total),
            )
        )
        rows.append(("median step", *median_cells(comparison)))
    return table("Parts of the step", ["part", "A, ms", "B, ms", "change, ms", "of A's step"], rows)


def _hosts_table(comparison: Comparison) -> str:
    if comparison.places is None:
        return ""
    rows = [
        (
            row.name,
            *(_NONE if value is None else milliseconds(value) for value in (row.before_ns, row.after_ns)),
            *change_cells(row, _NONE),
            milliseconds(row.caused_before_ns),
            milliseconds(row.caused_after_ns),
        )
        for row in (*comparison.places.hosts[:_MOST_HOSTS], *comparison.places.ranks)
    ]
    head = ["host", "A, ms", "B, ms", "change", "interval, %", "waits A, ms", "waits B, ms"]
    is_marked = any("*" in row[3] for row in rows)
    return table("Own work by host", head, rows) + (notes([AGAINST_OTHERS]) if is_marked else "")


def _roles_table(comparison: Comparison) -> str:
    if comparison.places is None or len(comparison.places.roles) < 2:
        return ""
    rows = [
        (role, milliseconds(before), milliseconds(after), signed(after / before - 1))
        for role, before, after in comparison.places.roles
    ]
    return table("Own work by role", ["role", "A, ms", "B, ms", "change"], rows)


def _changes_table(comparison: Comparison) -> str:
    if not comparison.changes:
        return facts((("changes", "nothing that the runs record"),))
    rows = [(change.kind, change.name, change.before, change.after) for change in comparison.changes]
    return table("What else changed", ["kind", "what", "A", "B"], rows, text=(0, 1, 2, 3))
