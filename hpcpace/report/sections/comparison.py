"""A comparison of runs: the verdict, where the difference comes from, by part, host and role, and what else changed."""

from __future__ import annotations

from collections.abc import Iterator
from math import expm1
from statistics import fmean

import numpy as np

from hpcpace.core.change import Outcome, signed, signed_interval
from hpcpace.core.rundir import json_text
from hpcpace.core.text import (
    NS_PER_MS,
    first_few,
    format_count,
    format_duration,
    milliseconds,
    percent,
    plural,
    printable,
)
from hpcpace.report.document import (
    NONE,
    PAGE,
    TERMINAL,
    Cell,
    Document,
    Facts,
    Notes,
    Plot,
    Row,
    Section,
    SideBySide,
    Table,
    Verdict,
)
from hpcpace.report.drawing import axis, bars, intervals, line, marker, names_axis, plot_text, unique
from hpcpace.runs.compare import Comparison, Judged
from hpcpace.runs.measured import MeasuredRun
from hpcpace.runs.units import UnitChanges, UnitRow

AGAINST_OTHERS = "* against the ranks of its role in the same run: its own work in A and B is not the same"
_STYLES = {Outcome.SLOWER: "bad", Outcome.FASTER: "good", Outcome.SAME: "strong"}
_BEFORE, _AFTER = "@c1", "@c2"
_MAX_NAMED, _MAX_PARTS = 4, 3
_MAX_RUNS, _MAX_HOSTS, _MAX_CHANGES = 8, (12, 200), 24
_MAX_DRAWN = 40
_LABEL = 34
_MIN_SHARE = 0.1  # of the difference, for a part to be a reason for it


def comparison_document(comparison: Comparison) -> Document:
    """Return all that there is to say of a comparison; the same comparison gives the same document."""
    reason = reason_sentence(comparison)
    places = comparison.places
    remarks = [*other_work_sentences(comparison), *comparison.remarks]
    sections = [
        Section(
            "The runs",
            (
                SideBySide(
                    [
                        Notes(first_few(runs, _MAX_RUNS, words=run_sentence), title=side)
                        for side, runs in (("A", comparison.before), ("B", comparison.after))
                    ],
                    is_even=True,
                ),
                _blocks(comparison),
            ),
        ),
        Section(
            "Where the difference comes from",
            (_parts_plot(comparison), *_parts(comparison)),
            lead="ms per step, means over the runs of each side; the parts add up to the mean step",
        ),
    ]
    if places is not None:
        sections += [_hosts(places), _roles(places)]
    return Document(
        heading="hpcpace compare",
        title=f"B is {comparison.outcome}: comparison",
        verdict=Verdict(
            headline=headline(comparison),
            tag=str(comparison.outcome),
            kind="" if comparison.outcome is Outcome.SLOWER else "healthy",
            style=_STYLES[comparison.outcome],
            has_terms=False,
            lines=(
                ("Why", [reason] if reason else []),
                ("Where", place_sentences(comparison) if comparison.parts else []),
                ("Noise", [noise_sentence(comparison)]),
            ),
        ),
        warnings=[("remark", sentence) for sentence in remarks],
        sections=[*sections, _changes(comparison)],
        data=json_text(comparison.to_json()),
        data_name="comparison.json",
        rest="--json",
    )


def headline(comparison: Comparison) -> str:
    """Return the verdict in one line, without the word verdict."""
    interval = signed_interval(comparison.judged)
    per = f" for a batch of {format_count(comparison.per_batch)}" if comparison.per_batch is not None else ""
    by = ""
    if comparison.judged_by is Judged.MEAN:
        median = signed(comparison.difference.share)
        by = f" by its mean step, which throughput follows; the median step changed by {median}"
    if comparison.outcome is Outcome.SAME:
        return f"no difference beyond noise{per} ({interval}){by}"
    return f"B is {percent(abs(comparison.share))} {comparison.outcome} than A{per} ({interval}){by}"


def _rounded(share: float) -> float:
    """Return a share as `signed` writes it, to a tenth of a percent."""
    return round(100 * share, 1) / 100


def place_sentences(comparison: Comparison) -> list[str]:
    """Return who does its own work slower or faster than before, the largest changes first."""
    places = comparison.places
    if places is None:
        return ["own work is not known of all ranks: no place can be named"]
    found = [_place_sentence(row, places) for row in places.named[:_MAX_NAMED]]
    if len(places.named) > _MAX_NAMED:
        found.append(f"{len(places.named) - _MAX_NAMED} more places changed")
    if places.is_common:
        common = _common_sentence(places)
        if comparison.outcome is Outcome.SAME:
            common += ", though steps do not differ beyond noise"
        found.insert(0, common)
    if not found:
        found.append("no host or rank changed against the others beyond noise")
    if any(run.num_missing for run in (*comparison.before, *comparison.after)):
        found.append("of ranks without a trace this is not known")
    return found


def _common_sentence(places: UnitChanges) -> str:
    change, where, host = places.common, "most hosts", places.hosts[0]
    if len(places.hosts) == 1:
        where = printable(host.name)
        if places.named and places.common_kind == "rank":
            where = f"most ranks of {where}"
        elif host.change is not None:
            change = host.change.value
    direction = "more" if change > 0 else "less"
    return f"own work takes {percent(abs(expm1(change)))} {direction} time on {where}"


def _place_sentence(row: UnitRow, places: UnitChanges) -> str:
    assert row.beyond is not None
    name = printable(row.name if row.kind == "host" else f"rank {row.name}")
    if not row.is_in_both:
        return f"{name} {_against_others(row)}"
    if places.is_common and row.against == "itself" and row.change is not None and row.beyond.value * places.common < 0:
        own = f"{signed(row.change.share)} ({signed_interval(row.change)})"
        return f"{name} did not change as most others did: its own work by {own}"
    direction = "slower" if row.beyond.value > 0 else "faster"
    against = ""
    if row.against == "others":
        against = ", against the ranks of its role in the same run"
    elif signed(expm1(places.common)) != signed(0):
        against = ", beyond what most others changed by"
    by = f"by its own work ({signed_interval(row.beyond)}){against}"
    return f"{name} is {percent(abs(row.beyond_share))} {direction} in B {by}"


def _against_others(row: UnitRow) -> str:
    """Return what a place that one group lacks is in the other one."""
    beyond = row.beyond
    assert beyond is not None
    sign, here, there = (1, "B", "A") if row.before_ns is None else (-1, "A", "B")
    value = expm1(sign * beyond.value)
    low, high = sorted(expm1(sign * end) for end in (beyond.low, beyond.high))
    direction = "slower" if value > 0 else "faster"
    return (
        f"is {percent(abs(value))} {direction} by its own work than the ranks of its role in {here} (95 %: "
        f"{signed(low)} to {signed(high)}); not all runs of {there} have it"
    )


def change_cells(row: UnitRow) -> tuple[str, str]:
    """Return the change of a place from A to B and its interval in percent; dashes where a group lacks it.

    That against the others of its run has a star, which `AGAINST_OTHERS` explains.
    """
    if row.change is None or not row.is_in_both:
        return NONE, NONE
    star = "*" if row.against == "others" else ""
    low, high = (f"{100 * end:+.1f}" for end in row.change.interval)
    return f"{signed(row.change_share)}{star}", f"{low} to {high}"


def noise_sentence(comparison: Comparison) -> str:
    """Return what the interval rests on, and what it could have missed."""
    difference = comparison.difference
    sides = f"{len(comparison.before)} and {len(comparison.after)} runs"
    mean = comparison.mean_difference
    seen = f"a difference below {percent(difference.half_width)} would not be seen"
    spread = f"that differ by {percent(difference.spread)}"
    if mean is not None:
        seen = (
            f"a difference of the median step below {percent(difference.half_width)} would not be seen, nor one of the "
            f"mean step below {percent(mean.half_width)}"
        )
        spread = f"whose median steps differ by {percent(difference.spread)} and mean steps by {percent(mean.spread)}"
    if difference.from_repeats:
        return f"{sides} {spread} (standard deviation); {seen}"
    taken = f"{percent(comparison.prior_cv)} (--run-cv)"
    if difference.spread > comparison.prior_cv:
        taken = f"{percent(difference.spread)}, as these repeats differ by more than {taken}"
    return (
        f"{plural(len(comparison.before), 'run')} of A and {len(comparison.after)} of B: runs of the same thing are "
        f"taken to differ by {taken}, because 3 repeats a side are needed to measure "
        f"that; {seen}"
    )


def other_work_sentences(comparison: Comparison) -> Iterator[str]:
    """Yield what a comparison of different work means."""
    if not comparison.other_work:
        return
    yield f"the work differs: {'; '.join(comparison.other_work)}"
    if comparison.per_batch is not None:
        yield "times are scaled to the batch of A: they say how fast samples are done, not how long a step of B takes"
    if comparison.differs_beyond_batch:
        yield "a longer step is then no slower run: the figures say how long steps take, and not which run is better"


def run_sentence(run: MeasuredRun) -> str:
    """Return what one run was."""
    rate = f", {format_count(run.samples_per_s)}/s" if run.samples_per_s else ""
    steps = f" ({plural(run.num_steps, 'step')})" if run.num_steps else ""
    cv = f", CV {run.cv:.3f}" if run.cv is not None else ""
    mean = f", mean {format_duration(run.mean_ns)}" if run.num_steps else ""
    what = "time of a sample" if run.is_per_sample else "median step"
    return f"{run.path}: {what} {format_duration(run.p50_ns)}{mean}{steps}{cv}{rate}"


def change_ms(change_ns: float) -> str:
    """Return a change in milliseconds with its sign; that of nothing has none."""
    size = milliseconds(abs(change_ns))
    return size if not float(size) else f"{'-' if change_ns < 0 else '+'}{size}"


def median_cells(comparison: Comparison) -> tuple[str, str, str, str]:
    """Return median step of A, of B, change, and that relative to A: means over the runs of a side."""
    before, after = (fmean(run.p50_ns for run in runs) for runs in (comparison.before, comparison.after))
    return milliseconds(before), milliseconds(after), change_ms(after - before), signed(after / before - 1)


def main_parts(comparison: Comparison) -> list[str]:
    """Return the parts that make most of the difference, the largest first; none of no difference beyond noise.

    Parts that changed the other way are no reason for it.
    """
    return [f"{name} {signed(share)}" for name, share in _main_shares(comparison)]


def reason_sentence(comparison: Comparison) -> str:
    """Return the parts that make most of the difference, and all others as one, so that they add up; "" without any."""
    found = _main_shares(comparison)
    if not found:
        return ""
    before, after = (sum(getattr(row, side) for row in comparison.parts) for side in ("before_ns", "after_ns"))
    rest = _rounded(after / before - 1) - sum(_rounded(share) for _, share in found)
    others = [f"all else {signed(rest)}"] if _rounded(rest) else []
    return f"of A's mean step: {', '.join([*main_parts(comparison), *others])}"


def _main_shares(comparison: Comparison) -> list[tuple[str, float]]:
    """Return the names of the main parts with their changes, as shares of A's mean step."""
    before = sum(row.before_ns for row in comparison.parts)
    if comparison.outcome is Outcome.SAME or not before:
        return []
    shares = [(f"{row.kind} {row.name}", row.change_ns / before) for row in comparison.parts]
    large = [(name, share) for name, share in shares if share / comparison.share > _MIN_SHARE]
    return sorted(large, key=lambda found: -abs(found[1]))[:_MAX_PARTS]


def _blocks(comparison: Comparison) -> Plot | None:
    """Return median step times over the course of the runs."""
    traces = []
    for side, runs, color in (("A", comparison.before, _BEFORE), ("B", comparison.after, _AFTER)):
        for run in runs[:_MAX_RUNS]:
            if num := len(run.block_p50_ns):
                x = [float(f"{100 * (place + 0.5) / num:.4g}") for place in range(num)]
                name = f"{side} {plot_text(run.path, 60)}"
                curve = line(x, np.array(run.block_p50_ns) / NS_PER_MS, color, hover=f"{name}: %{{y:.4~g}} ms")
                traces.append({**curve, "mode": "lines+markers", "marker": {"color": color, "size": 4}})
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


def _parts_plot(comparison: Comparison) -> Plot | None:
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
        traces=[
            {
                **bars(names, np.array(values) / NS_PER_MS, marker(color, pattern), f"{side}: %{{y}} %{{x:.4~g}} ms"),
                "name": side,
            }
            for side, color, pattern, values in sides
        ],
        layout={"barmode": "group", "bargap": 0.25, "xaxis": axis("ms"), "yaxis": names_axis(len(rows))},
        legend=[("A", _BEFORE, ""), ("B", _AFTER, "/")],
    )


def _parts(comparison: Comparison) -> tuple[Notes, Table]:
    unknown = "the parts of the step are not known of all runs, so neither is where the difference comes from"
    total, after = (sum(getattr(row, side) for row in comparison.parts) for side in ("before_ns", "after_ns"))

    def cells(before_ns: float, after_ns: float) -> tuple[str, str, str, str]:
        change = after_ns - before_ns
        return (
            milliseconds(before_ns),
            milliseconds(after_ns),
            change_ms(change),
            signed(change / total) if total else NONE,
        )

    rows: list[Row] = [
        Row((f"{row.kind}: {row.name}", *cells(row.before_ns, row.after_ns))) for row in comparison.parts
    ]
    if rows:
        rows.append(Row(("mean step", *cells(total, after)), style="strong"))
        rows.append(Row(("median step", *median_cells(comparison)), style="strong"))
    return Notes([] if rows else [unknown]), Table(("part", "A", "B", "change", "of A's step"), rows)


def _hosts(places: UnitChanges) -> Section:
    """Return the own work of hosts, and of ranks that changed otherwise than their host; of one host, all ranks.

    A host has its name, and a rank that of its host, too.
    """
    rows, shown = [], (*places.hosts, *(places.of_only_host or places.ranks))
    for row in shown:
        change, interval = change_cells(row)
        work = [NONE if value is None else milliseconds(value) for value in (row.before_ns, row.after_ns)]
        waits = [milliseconds(value) for value in (row.caused_before_ns, row.caused_after_ns)]
        style = "strong" if row.is_named else ""
        name = row.name if row.kind == "host" else f"rank {row.name}"
        rows.append(Row((Cell(name, style=style), *work, Cell(change, style=style), interval, *waits)))
    is_marked = any("*" in change_cells(row)[0] for row in shown)
    return Section(
        "Own work by rank" if places.of_only_host else "Own work by host",
        (
            _hosts_plot(places),
            Table(
                ("rank" if places.of_only_host else "host", "A", "B", "change", "95 %", "waits A", "waits B"),
                rows,
                limits=_MAX_HOSTS,
                which="most changed",
            ),
            Notes([AGAINST_OTHERS] if is_marked else []),
        ),
        lead="ms per step that ranks do by themselves; waits of all ranks that began there",
    )


def _hosts_plot(places: UnitChanges) -> Plot | None:
    """Return the change of own work of each host with its interval."""
    rows = [(row, row.change) for row in places.hosts[:_MAX_DRAWN] if row.change is not None and row.is_in_both]
    if len(rows) < 2:
        return None
    return Plot(
        name="hosts",
        label="Change of own work by host",
        caption="Change of own work from A to B with its 95 % interval, of all hosts together; where a host does other "
        "work in B, against the others of its run.",
        height_px=90 + 22 * len(rows),
        traces=[
            intervals(
                unique(plot_text(row.name, _LABEL) for row, _ in rows),
                np.array([100 * row.change_share for row, _ in rows]),
                np.array([100 * change.interval[0] for _, change in rows]),
                np.array([100 * change.interval[1] for _, change in rows]),
                ["@wait" if row.is_named else "@busy" for row, _ in rows],
                "%{y}: %{x:+.2f} %",
            )
        ],
        layout={"xaxis": axis("% from A to B", zeroline=True), "yaxis": names_axis(len(rows))},
    )


def _roles(places: UnitChanges) -> Section:
    rows = [
        (role, milliseconds(before), milliseconds(after), signed(after / before - 1))
        for role, before, after in places.roles
    ]
    table = Table(("role", "A", "B", "change"), rows if len(rows) > 1 else [], limits=(_MAX_HOSTS[0], 0))
    return Section("Own work by role", (table,), lead="ms per step")


def _changes(comparison: Comparison) -> Section:
    rows = [(change.kind, change.name, change.before, change.after) for change in comparison.changes]
    facts = [
        ("" if place and comparison.changes[place - 1].kind == change.kind else change.kind, str(change))
        for place, change in enumerate(comparison.changes[:_MAX_CHANGES])
    ]
    more = [f"{plural(len(rows) - _MAX_CHANGES, 'more change')}: see --json"] * (len(rows) > _MAX_CHANGES)
    return Section(
        "What else changed",
        (
            Notes([] if rows else ["nothing that the runs record"]),
            Facts(facts, on=TERMINAL),
            Notes(more, on=TERMINAL),
            Table(("kind", "what", "A", "B"), rows, text=(0, 1, 2, 3), on=PAGE),
        ),
        lead="any of it may be a cause; that it changed as well proves nothing",
    )
