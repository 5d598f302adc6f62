"""A history of runs, job by job and host by host, and how a job scales: what stops it, and larger sizes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from math import exp
from statistics import median

import numpy as np

from hpcpace.core.hostlist import short_list
from hpcpace.core.rundir import json_text
from hpcpace.core.text import (
    NS_PER_MS,
    NS_PER_S,
    first_few,
    format_count,
    format_duration,
    listed,
    percent,
    plural,
    printable,
    shortened,
)
from hpcpace.report.document import NONE, PAGE, TERMINAL, Cell, Document, Notes, Plot, Row, Section, Table, Verdict
from hpcpace.report.drawing import COLOURS, axis, line, plot_text
from hpcpace.runs.history import LASTS_NS, MIN_CHANGE, Event, History, JobRuns
from hpcpace.runs.history_row import HistoryRow
from hpcpace.runs.scaling.result import PredictedSize, Scaling, SizeFigures, stop_words
from hpcpace.runs.scaling.sizes import ScalingKind

_MAX_EVENTS, _MAX_JOBS, _MAX_PLOTS, _MAX_RUNS = 20, 20, 8, 500
_MAX_NAMES = 3
# Of a job, a run or its hosts: a run on hosts of many names must not fill the screen.
_MAX_NAME = 120
_BLOCKS, _WIDTH = "▁▂▃▄▅▆▇█", 30
_LASTING = ("lasting", "chronic", "drift")
_MARKS = {"lasting": "changed", "recent": "recent", "one-off": "one-off", "chronic": "chronic", "drift": "drift"}
_RANK_0 = {
    "always": "; it always has rank 0, which may have more to do than the others",
    "gained": "; it has rank 0 since then, which may have more to do than the others",
    "lost": "; it had rank 0 before, which may have more to do than the others",
}
_DAY_NS = 86_400 * NS_PER_S


def history_document(history: History, *, num_runs: int = 20) -> Document:
    """Return all that there is to say of a history; `num_runs` is how many of the newest runs a terminal shows."""
    events = history.events
    more = [f"{len(events) - _MAX_EVENTS} more: see --json"] if len(events) > _MAX_EVENTS else []
    return Document(
        heading="hpcpace history",
        subject=history.folder,
        title=f"{headline(history)}: history",
        verdict=Verdict(
            label="Changes",
            headline=headline(history),
            tag="history",
            kind="" if any(event.duration in _LASTING for event in events) else "healthy",
            has_terms=False,
            lines=(
                ("What", [*(event_sentence(event) for event in events[:_MAX_EVENTS]), *more]),
                ("Runs", [counts_sentence(history)]),
            ),
        ),
        warnings=[("index", history.index)] if history.index.startswith("cannot") else [],
        sections=(
            _events_section(history),
            _jobs_section(history),
            Section(
                "Own work by host",
                (_host_plot(history),),
                lead="how much longer a host takes for its own work than the others of its role in the same run",
            ),
            _runs_section(history, num_runs),
            _problems_section("Incomplete", "used; what is not known of them", history.problems),
            _problems_section("Not used", "broken, without steps to use, or without a date", history.broken),
        ),
        data=json_text(history.to_json()),
        data_name="history.json",
        rest="--json",
    )


def _problems_section(title: str, lead: str, problems: Mapping[str, str]) -> Section:
    return Section(title, (Notes([f"{name}: {why}" for name, why in problems.items()], is_folded=True),), lead=lead)


def _events_section(history: History) -> Section:
    rows = []
    for event in history.events:
        share = f"{'+' if event.share > 0 else '-'}{percent(abs(event.share))}"
        names = (event.name, event.kind, event.duration, date(event.begun_unix_ns))
        rows.append((*names, share, str(event.num_runs), f"{event.deviations:.1f}", event.run))
    head = ("what", "kind", "duration", "since", "change", "runs", "deviations", "first run")
    table = Table(head, rows, text=(0, 1, 2, 3, 7), limits=(0, _MAX_RUNS), on=PAGE)
    return Section("Changes", (table,), lead="lasting and recent ones first, the latest first")


def _jobs_section(history: History) -> Section:
    """Return the median steps of the runs of each job, as a line of blocks on a terminal and as a plot on a page."""
    rows: list[Row] = []
    for series in history.series:
        times = [row.p50_ns for row in series.rows]
        ends = [_day(series.rows[0]), _day(series.rows[-1])]
        extremes = [format_duration(min(times)), format_duration(max(times))]
        name = Cell(series.name, shortened(series.name, max_letters=_MAX_NAME))
        rows.append(Row((name, str(len(times)), *ends, *extremes, sparkline(times))))
    head = ("job", "runs", "from", "to", "shortest", "longest", "steps")
    return Section(
        "Step time by job",
        (
            Table(head, rows, limits=(_MAX_JOBS, 0), which="most run", text=(0, 6), on=TERMINAL),
            *(_job_plot(number, series) for number, series in enumerate(history.series[:_MAX_PLOTS])),
        ),
        lead="the median step of each run, the oldest first",
    )


def _day(row: HistoryRow) -> str:
    return date(row.begun_unix_ns, with_time=False) if row.begun_unix_ns else NONE


def sparkline(values: Sequence[float]) -> str:
    """Return a line of at most 30 blocks, each the median of some neighbours, from the smallest to the largest."""
    edges = [len(values) * at // min(_WIDTH, len(values)) for at in range(min(_WIDTH, len(values)) + 1)]
    binned = [median(values[start:stop]) for start, stop in pairwise(edges)]
    low, high = min(binned), max(binned)
    # Less than a tenth is shown as less than all blocks, so that noise looks small.
    span = max(high - low, 0.1 * high)
    return "".join(_BLOCKS[min(int((value - low) / span * len(_BLOCKS)), len(_BLOCKS) - 1)] for value in binned)


def _time_curve(
    rows: Iterable[tuple[int, HistoryRow]], values: Sequence[float], color: str, hover: str
) -> dict[str, object]:
    """Return the trace of one value a run, over dates; `rows` have the number of each run, for those without a date."""
    rows = list(rows)
    # Dates as plotly.js takes them, in local time as in tables.
    x = [
        datetime.fromtimestamp(row.begun_unix_ns / NS_PER_S, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        if row.begun_unix_ns
        else number
        for number, row in rows
    ]
    return {
        **line(x, np.array(values), color, hover=hover),
        "mode": "lines+markers",
        "line": {"color": color, "width": 1},
        "marker": {"color": color, "size": 5},
        "text": [plot_text(row.run, 80) for _, row in rows],
    }


def _job_plot(number: int, series: JobRuns) -> Plot:
    rows = series.rows
    marked = {event.run for event in series.events}
    times = [row.p50_ns / NS_PER_MS for row in rows]
    look = {
        "color": ["@wait" if row.run in marked else "@busy" for row in rows],
        "size": [11 if row.run in marked else 5 for row in rows],
    }
    return Plot(
        name=f"job-{number}",
        title=series.name,
        label=f"Step times of the runs of {series.name}",
        caption="One point a run; where a change or a drift begins it is larger.",
        height_px=240,
        traces=[{**_time_curve(enumerate(rows), times, "@busy", "%{text}: %{y:.4~g} ms"), "marker": look}],
        layout={"xaxis": axis(""), "yaxis": axis("ms", rangemode="tozero")},
    )


def _host_plot(history: History) -> Plot | None:
    """Return the own work of hosts over time: of those that changed, else none."""
    names = list(dict.fromkeys(event.name for event in history.events if event.kind == "host"))[: len(COLOURS)]
    rows = sorted((row for series in history.series for row in series.rows), key=lambda row: row.begun_unix_ns)
    if not names:
        return None
    traces = []
    for name, color in zip(names, COLOURS, strict=False):
        of_host = [(at, row) for at, row in enumerate(rows) if name in row.slowness]
        slowness = [100 * (exp(row.slowness[name]) - 1) for _, row in of_host]
        shown = plot_text(name)
        traces.append({**_time_curve(of_host, slowness, color, f"{shown}, %{{text}}: %{{y:+.1f}} %"), "name": shown})
    return Plot(
        name="hosts",
        label="Own work of the hosts that changed",
        caption="The hosts that are named above, one point a run.",
        height_px=300,
        traces=traces,
        layout={"xaxis": axis(""), "yaxis": axis("% against the others", zeroline=True)},
        legend=[(name, color, "") for name, color in zip(names, COLOURS, strict=False)],
    )


def _runs_section(history: History, num_runs: int) -> Section:
    rows = []
    for row, series in history.newest_first():
        hosts = shortened(short_list(row.hosts), max_letters=_MAX_NAME) if row.hosts else ""
        begins = [event for event in series.events if event.run == row.run]
        labels = [event.kind if event.kind == "long steps" else _MARKS[event.duration] for event in begins]
        began = date(row.begun_unix_ns)
        rows.append(
            (
                Cell(began, began[4:] if row.begun_unix_ns else NONE),
                Cell(row.run, shortened(row.run, max_letters=_MAX_NAME)),
                series.name,
                format_duration(row.p50_ns),
                f"{format_count(row.samples_per_s)}/s" if row.samples_per_s else NONE,
                Cell(str(row.num_nodes or NONE), hosts or str(row.num_nodes or NONE)),
                row.mode,
                ", ".join(f"{label} {100 * event.share:+.0f} %" for label, event in zip(labels, begins, strict=True)),
            )
        )
    head = ("began", "run", "job", "step", "speed", "hosts", "verdict", "change")
    older = [f"{plural(len(rows) - num_runs, 'older run')}: see --runs and --json"] if len(rows) > num_runs else []
    shown = [tuple(row[at] for at in (0, 1, 3, 4, 5, 7)) for row in rows[:num_runs]]
    return Section(
        "Runs",
        (
            Table([head[at] for at in (0, 1, 3, 4, 5, 7)], shown, text=(0, 1, 4, 5), on=TERMINAL),
            Notes(older if shown else [], on=TERMINAL),
            Table(head, rows, text=(0, 1, 2, 6, 7), limits=(0, _MAX_RUNS), on=PAGE),
        ),
        lead="the newest first",
    )


def event_sentence(event: Event) -> str:
    """Return what changed, by how much, since when or when, in which jobs, and what else may explain it."""
    return f"{_change_sentence(event)}{_RANK_0.get(event.rank_0, '')}"


def _change_sentence(event: Event) -> str:
    name = printable(event.name)
    if event.kind == "long steps":
        size = f"{percent(abs(event.share))} {'more' if event.share > 0 else 'less'}"
        levels = f"mean over median step {event.before:.2f} to {event.after:.2f}"
        return f"long steps of {name} cost {size} since {_begin(event)} ({levels}), {_in_runs(event)}"
    size = f"{percent(abs(event.share))} {'slower' if event.share > 0 else 'faster'}"
    than = " than the others of its runs" if event.kind == "host" else ""
    runs = plural(event.num_runs, "run")
    if event.duration == "chronic":
        of_all = (
            f"{event.num_runs} of its {event.num_runs + event.num_before} runs"
            if event.num_before
            else f"all its {runs}"
        )
        return f"{name} has been {size}{than} in {of_all}{_jobs(event)}"
    if event.duration == "one-off":
        when = f"in {runs} from" if event.num_runs > 1 else "on" if event.begun_unix_ns else "in"
        return f"{name} was {size}{than} {when} {_begin(event)} for once{_levels(event)}"
    if event.duration == "drift":
        came = f"{name} got {size}{than} gradually, from {_begin(event)} to {_end(event)}"
        return f"{came}{_levels(event)}, over {runs}{_jobs(event)}"
    since = f"{name} is {size}{than} since {_begin(event)}{_levels(event)}"
    if event.duration == "recent":
        return f"{since}, in {runs} so far: {_needed(event)} are needed to tell a lasting change from a one-off"
    return f"{since}, {_in_runs(event)}{_jobs(event)}{_of_mean(event)}"


def _of_mean(event: Event) -> str:
    """Return what the mean step did, where that is something else than the median did."""
    if event.mean_share is None or abs(event.mean_share - event.share) <= max(MIN_CHANGE, abs(event.share) / 2):
        return ""
    return f"; its mean step, which throughput follows, changed by {100 * event.mean_share:+z.1f} %"


def _begin(event: Event) -> str:
    """Return when its first run began, or the run itself where dates are not known."""
    return date(event.begun_unix_ns) if event.begun_unix_ns else f"run {printable(event.run)}"


def _end(event: Event) -> str:
    """Return when its last run began."""
    return date(event.last_unix_ns) if event.last_unix_ns else "the last one"


def _needed(event: Event) -> str:
    """Return how many runs show that a recent change lasts; more where as many as that are not enough."""
    if event.has_enough_runs or event.last_unix_ns - event.begun_unix_ns >= LASTS_NS:
        return "more"
    return "3, or 2 a week apart that agree," if event.begun_unix_ns else "3"


def _in_runs(event: Event) -> str:
    """Return in how many runs, and how far apart they are where that is why they count as lasting."""
    runs = f"in {plural(event.num_runs, 'run')}"
    if event.has_enough_runs:
        return runs
    return f"{runs} {(event.last_unix_ns - event.begun_unix_ns) // _DAY_NS} days apart"


def _levels(event: Event) -> str:
    if event.kind == "host":
        return ""
    return f" ({format_duration(event.before * NS_PER_S)} to {format_duration(event.after * NS_PER_S)})"


def _jobs(event: Event) -> str:
    if event.kind != "host":
        return ""
    if len(event.jobs) == event.num_jobs:
        return f", in {'the one job' if event.num_jobs == 1 else f'all {event.num_jobs} jobs'} that used it"
    names = listed(first_few(event.jobs, _MAX_NAMES, words=printable))
    return f", in {len(event.jobs)} of {event.num_jobs} jobs that used it: {names}"


def date(unix_ns: int, *, with_time: bool = True) -> str:
    """Return a date in local time with its day of the week; `an unknown date` for 0."""
    if not unix_ns:
        return "an unknown date"
    try:
        return time.strftime("%a %Y-%m-%d %H:%M" if with_time else "%Y-%m-%d", time.localtime(unix_ns // NS_PER_S))
    except (OverflowError, OSError, ValueError):
        return "an unknown date"


def headline(history: History) -> str:
    """Return the result in one line."""
    num = Counter(event.duration for event in history.events)
    if not history.events:
        return "nothing changed beyond noise"
    counts = [
        ("lasting", "lasting change"),
        ("drift", "drift"),
        ("chronic", "chronically slow host"),
        ("recent", "recent change"),
        ("one-off", "one-off"),
    ]
    return listed([plural(num[duration], words) for duration, words in counts if num[duration]])


def counts_sentence(history: History) -> str:
    """Return what the history is of."""
    hosts = f"{plural(history.num_hosts, 'host')} compared" if history.num_hosts else "no host can be compared"
    parts = [f"{plural(history.num_runs, 'run')} in {len(history.series)} series (job, layout and work)", hosts]
    if history.broken:
        parts.append(f"{len(history.broken)} not used")
    if history.copies:
        parts.append(f"{len(history.copies)} left out as copies")
    if history.num_running:
        parts.append(f"{history.num_running} still running")
    return ", ".join([*parts, *passed_over_words(history)])


def passed_over_words(history: History) -> list[str]:
    """Return what was not searched for runs; nothing where all was."""
    found = history.passed_over
    links = f"{plural(found.num_links, 'link')} to folders elsewhere not followed"
    deep = f"{plural(found.num_deep, 'folder')} more than three deep not searched"
    return [words for words, num in ((links, found.num_links), (deep, found.num_deep)) if num]


_MIN_SHOWN_CHANCE = 0.01  # display: a probability below it is not shown


def scaling_document(scaling: Scaling) -> Document:
    """Return all that is known of a series of sizes."""
    return Document(
        heading="",
        title="scaling",
        warnings=scaling_headline(scaling),
        sections=(
            _sizes_section(scaling),
            _parts_section(scaling),
            _predictions_section(scaling),
            Section("Left out", (Notes(scaling.left_out, is_folded=True),)),
        ),
        rest="--json",
    )


def scaling_headline(scaling: Scaling) -> list[tuple[str, str]]:
    """Return what matters most: how far the job scales, what stops it, and what larger sizes would give."""
    largest = scaling.sizes[-1]
    found = [
        (
            "Scaling",
            f"{scaling.kind} ({scaling.why}): {largest.speedup:.2f} times as fast on {largest.num_units} "
            f"{scaling.unit}s as on {scaling.sizes[0].num_units}, scaling factor {largest.scaling_factor:.2f}",
        ),
        ("Knee", _knee_words(scaling)),
    ]
    if scaling.stop is not None:
        lost = scaling.stop.lost.get(scaling.stop.part, 0.0)
        what = (
            f"{stop_words(scaling.stop.part, scaling.kind)}: {percent(lost)} of the step on {largest.num_units} "
            f"{scaling.unit}s"
            if scaling.stop.part
            else "nothing yet: no part costs 3 % of the step more than on the smallest size"
        )
        found.append(("Stopped by", what))
    elif scaling.no_parts:
        found.append(("Stopped by", f"not known: {scaling.no_parts}"))
    return found


def _knee_words(scaling: Scaling) -> str:
    knee, unit = scaling.knee, scaling.unit
    if scaling.kind is ScalingKind.UNKNOWN:
        return "not known: neither weak nor strong scaling"
    if knee is None:
        return "not known: no size was measured together with twice that size"
    if knee.num_units is None:
        what = "measured" if knee.is_measured else "measured or predicted"
        doubt = " (95 %)" if knee.low is None else f", but it may be from {plural(knee.low, unit)} on (95 %)"
        return (
            f"none found: every doubling up to {2 * knee.searched} {unit}s, as {what}, gives at least half of its "
            f"ideal gain{doubt}{_unseen(scaling)}"
        )
    ends = [f"more than {knee.searched}" if end is None else str(end) for end in (knee.low, knee.high)]
    interval = f" (95 %: {' to '.join(dict.fromkeys(ends))})" if set(ends) != {str(knee.num_units)} else ""
    verb = "stops paying" if knee.is_measured else "is expected to stop paying"
    return (
        f"{verb} at {plural(knee.num_units, unit)}{interval}: each {unit} beyond gives less than 50 %{_unseen(scaling)}"
    )


def _unseen(scaling: Scaling) -> str:
    """Return what a predicted knee does not know, if there is anything."""
    if scaling.is_overlap_known or scaling.knee is None or scaling.knee.is_measured:
        return ""
    return "; communication hidden behind work cannot be seen in these runs, and may bring the knee forward"


def _sizes_section(scaling: Scaling) -> Section:
    head = (
        f"{scaling.unit}s",
        "runs",
        "speed",
        "S_n",
        "(95 %)",
        "further",
        "step",
        "CV",
        "busy",
        "wait",
        "trf",
        "band",
    )
    return Section(
        "Sizes",
        (Table(head, [_cells(size) for size in scaling.sizes]), Notes(scaling.remarks)),
        lead=f"{scaling.sample_unit}/s; means over repeats; further: what each {scaling.unit} beyond gave",
    )


def _cells(size: SizeFigures) -> list[str]:
    low, high = size.scaling_interval
    return [
        str(size.num_units),
        str(len(size.runs)),
        NONE if size.samples_per_s is None else format_count(size.samples_per_s),
        f"{size.scaling_factor:.2f}",
        _interval(low, high) if low != high else "",
        "" if size.further_gain is None else f"{100 * size.further_gain:.0f} %",
        _duration(size.step_ns),
        NONE if size.cv is None else f"{size.cv:.2f}",
        *(NONE if share is None else f"{100 * share:.0f}%" for share in (size.busy, size.wait, size.transfer)),
        str(size.band),
    ]


def _interval(low: float, high: float) -> str:
    """Return an interval with two digits behind the point, or three where two show no width."""
    digits = 2 if round(low, 2) < round(high, 2) else 3
    return f"{low:.{digits}f}-{high:.{digits}f}"


def _duration(step_ns: float | None) -> str:
    return NONE if step_ns is None else format_duration(step_ns)


def _parts_section(scaling: Scaling) -> Section:
    is_known = all(size.parts_ns for size in scaling.sizes)
    names = list(scaling.sizes[0].parts_ns)
    sizes: list[tuple[str, SizeFigures | PredictedSize]] = [(str(size.num_units), size) for size in scaling.sizes]
    sizes += [(f"{size.num_units}*", size) for size in scaling.predictions]
    rows = [
        (label, *(format_duration(size.parts_ns[name]) for name in names), _duration(size.step_ns))
        for label, size in sizes
        if is_known
    ]
    return Section(
        "Where the step goes",
        (
            Table((f"{scaling.unit}s", *names, "step"), rows),
            Notes(["* predicted"] if rows and scaling.predictions else []),
        ),
        lead="means over ranks; the parts add up to the step",
    )


def _predictions_section(scaling: Scaling) -> Section:
    if scaling.no_law:
        lines = [f"not predicted: {scaling.no_law}"]
    else:
        lines = [_predicted(size, scaling.unit) for size in scaling.predictions]
        lines += _knee_by_size(scaling)
        lines.append(f"rests on {'; '.join(scaling.rests_on)}")
        if scaling.backtest is not None:
            lines.append(
                f"the law of the smaller sizes is {100 * scaling.backtest:+.1f} % off at {scaling.sizes[-1].num_units} "
                f"{scaling.unit}s, which the intervals include"
            )
        lines.append(f"beyond {scaling.predictions[-1].num_units} {scaling.unit}s nothing is predicted")
    return Section("Larger sizes", (Notes(lines),), lead="mean step time of one more run, with its 95 % interval")


def _knee_by_size(scaling: Scaling) -> list[str]:
    if scaling.knee is None or scaling.knee.is_measured:
        return []
    doubtful = [(size, share) for size, share in scaling.knee.by_size if share >= _MIN_SHOWN_CHANCE]
    if not doubtful:
        return []
    shares = ", ".join(f"{100 * share:.0f} % at {size} {scaling.unit}s" for size, share in doubtful)
    return [f"probability that the knee is there or before: {shares}"]


def _predicted(size: PredictedSize, unit: str) -> str:
    low, high = (format_duration(value) for value in size.step_interval_ns)
    fast, slow = size.speedup_interval[1], size.speedup_interval[0]
    return (
        f"{size.num_units} {unit}s ({size.factor} times): {format_duration(size.step_ns)} ({low} to {high}), "
        f"{size.speedup:.2f} times as fast as the smallest size ({slow:.2f} to {fast:.2f}), scaling factor "
        f"{size.scaling_factor:.2f}"
    )
