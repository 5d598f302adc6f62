"""The page of a history: what changed, the step times of each job over time, and hosts over time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from math import exp

import numpy as np

from hpcpace.core.rundir import json_text
from hpcpace.core.text import NS_PER_MS, NS_PER_S, folded, format_count, milliseconds, percent
from hpcpace.report.document import Plot
from hpcpace.report.drawing import axis, plot_text, rounded
from hpcpace.report.html.frame import framed, tools
from hpcpace.report.html.text import contents, escape, figure, notes, prose, section, table, terms, warning
from hpcpace.report.words.history import counts_sentence, date, event_sentence, headline
from hpcpace.runs.history import Event, History, Series

_MOST_PLOTS, _MOST_HOSTS, _MOST_RUNS = 8, 8, 500
_COLOURS = ("@c1", "@c2", "@c3", "@c4", "@c5", "@c6", "@c7", "@c8")


def history_page(history: History) -> str:
    """Return the whole page; the same history gives the same page."""
    plots = [_job_plot(number, series) for number, series in enumerate(history.series[:_MOST_PLOTS])]
    hosts = _host_plot(history)
    drawn = [*plots, *([hosts] if hosts is not None else [])]
    return framed(
        f"{headline(history)}: history · hpcpace", _body(history, plots, hosts), drawn, json_text(history.to_json())
    )


def _body(history: History, plots: list[Plot], hosts: Plot | None) -> str:
    made = [
        (title, section(title, lead, *content))
        for title, lead, content in (
            ("Changes", "Lasting and recent ones first, the latest first.", (_events_table(history),)),
            (
                "Step time by job",
                "The median step of each run; the jobs with most runs first.",
                tuple(figure(plot, series.name) for plot, series in zip(plots, history.series, strict=False)),
            ),
            (
                "Own work by host",
                "How much longer a host takes for its own work than the others of its role in the same run.",
                (figure(hosts) if hosts is not None else "",),
            ),
            ("Runs", "The newest first.", (_runs_table(history),)),
            ("Incomplete", "Used; what is not known of them.", (_problems(history.problems),)),
            ("Not used", "", (_problems(history.broken),)),
            ("Terms", "", (terms(),)),
        )
    ]
    line = headline(history)
    kind = "" if any(event.duration in ("lasting", "chronic", "drift") for event in history.events) else "healthy"
    said = "".join(f"<p>{prose(event_sentence(event))}</p>" for event in history.events[:_MOST_PLOTS])
    inside = f"<dt>What</dt><dd>{said}</dd>" if said else ""
    parts = (
        f'<div class="head"><header class="run">hpcpace history of <b>{escape(history.folder)}</b></header>'
        f"{tools('history.json')}</div>",
        f'<div class="verdict {kind}">\n<p class="mode">history</p>\n<h1>{prose(line[:1].upper() + line[1:])}</h1>\n'
        f"<dl>{inside}<dt>Runs</dt><dd><p>{prose(counts_sentence(history))}</p></dd></dl>\n</div>",
        warning(history.index if history.index.startswith("cannot") else "", "Index"),
        contents([title for title, content in made if content]),
        "<noscript><p>The plots need JavaScript; the tables do not.</p></noscript>",
        *(content for _, content in made),
    )
    return "\n".join(part for part in parts if part)


def _problems(problems: Mapping[str, str]) -> str:
    return notes(folded((f"{name}: {why}" for name, why in problems.items()), rest="--json"))


def _x(unix_ns: int, number: int) -> str | int:
    """Return a date as plotly.js takes it, in local time as in tables; the number of the run without dates."""
    if not unix_ns:
        return number
    return datetime.fromtimestamp(unix_ns / NS_PER_S, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _job_plot(number: int, series: Series) -> Plot:
    rows = series.rows
    marked = {event.run: event for event in series.events}
    x = [_x(row.begun_unix_ns, at) for at, row in enumerate(rows)]
    return Plot(
        name=f"job-{number}",
        label=f"Step times of the runs of {plot_text(series.name)}",
        caption="One point a run; where a change or a drift begins it is larger.",
        height_px=240,
        traces=[
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": x,
                "y": rounded(np.array([row.p50_ns for row in rows]) / NS_PER_MS),
                "line": {"color": "@busy", "width": 1},
                "marker": {
                    "color": ["@wait" if row.run in marked else "@busy" for row in rows],
                    "size": [11 if row.run in marked else 5 for row in rows],
                },
                "text": [plot_text(row.run, 80) for row in rows],
                "hovertemplate": "%{text}: %{y:.4~g} ms<extra></extra>",
            }
        ],
        layout={"xaxis": axis(""), "yaxis": axis("ms", rangemode="tozero")},
    )


def _host_plot(history: History) -> Plot | None:
    """Return the own work of hosts over time: of those that changed, else none."""
    names = list(dict.fromkeys(event.name for event in history.events if event.kind == "host"))[:_MOST_HOSTS]
    rows = sorted((row for series in history.series for row in series.rows), key=lambda row: row.begun_unix_ns)
    if not names:
        return None
    traces = []
    for name, color in zip(names, _COLOURS, strict=False):
        of_host = [(at, row) for at, row in enumerate(rows) if name in row.slowness]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plot_text(name),
                "x": [_x(row.begun_unix_ns, at) for at, row in of_host],
                "y": rounded(np.array([100 * (exp(row.slowness[name]) - 1) for _, row in of_host])),
                "line": {"color": color, "width": 1},
                "marker": {"color": color, "size": 5},
                "text": [plot_text(row.run, 80) for _, row in of_host],
                "hovertemplate": f"{plot_text(name)}, %{{text}}: %{{y:+.1f}} %<extra></extra>",
            }
        )
    return Plot(
        name="hosts",
        label="Own work of the hosts that changed",
        caption="The hosts that are named above, one point a run.",
        height_px=300,
        traces=traces,
        layout={"xaxis": axis(""), "yaxis": axis("% against the others", zeroline=True)},
        legend=[(name, color, "") for name, color in zip(names, _COLOURS, strict=False)],
    )


def _events_table(history: History) -> str:
    rows = [_event_cells(event) for event in history.events[:_MOST_RUNS]]
    head = ["what", "kind", "duration", "since", "change", "runs", "deviations", "first run"]
    return table("Changes", head, rows, text=(0, 1, 2, 3, 7))


def _event_cells(event: Event) -> tuple[str, ...]:
    share = f"{'+' if event.share > 0 else '-'}{percent(abs(event.share))}"
    return (
        *(event.name, event.kind, event.duration, date(event.begun_unix_ns), share),
        *(str(event.num_runs), f"{event.deviations:.1f}", event.run),
    )


def _runs_table(history: History) -> str:
    cells = [
        (
            *(date(row.begun_unix_ns), row.run, series.name, milliseconds(row.p50_ns)),
            f"{format_count(row.samples_per_s)}/s" if row.samples_per_s else "",
            *(str(row.num_nodes or "-"), row.mode),
        )
        for row, series in history.newest_first()[:_MOST_RUNS]
    ]
    return table("Runs", ["began", "run", "job", "step, ms", "speed", "hosts", "verdict"], cells, text=(0, 1, 2, 6))
