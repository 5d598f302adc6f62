"""A comparison of runs on a terminal of 80 columns: the verdict, where it comes from, and what else changed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from hpcpace.core.text import milliseconds, plural, printable
from hpcpace.report.terminal import line, note, table, title
from hpcpace.report.words.comparison import (
    AGAINST_OTHERS,
    change_cells,
    change_ms,
    headline,
    median_cells,
    noise_sentence,
    other_work_sentences,
    place_sentences,
    reason_sentence,
    run_sentence,
    signed,
)
from hpcpace.runs.changes import Change
from hpcpace.runs.compare import Comparison, Outcome
from hpcpace.runs.units import UnitChanges

_STYLES = {Outcome.SLOWER: "bold red", Outcome.FASTER: "bold green", Outcome.SAME: "bold"}
_MOST_RUNS, _MOST_HOSTS, _MOST_CHANGES = 6, 12, 24


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print what was found."""
    title(console, "hpcpace compare")
    line(console, "Verdict", headline(comparison), style=_STYLES[comparison.outcome])
    if reasons := reason_sentence(comparison):
        line(console, "Why", reasons)
    for number, sentence in enumerate(place_sentences(comparison) if comparison.parts else ()):
        line(console, "" if number else "Where", sentence)
    line(console, "Noise", noise_sentence(comparison))
    for sentence in (*other_work_sentences(comparison), *comparison.remarks):
        line(console, "Remark", sentence)
    _print_runs(console, comparison)
    _print_parts(console, comparison)
    if comparison.places is not None:
        _print_places(console, comparison.places)
        _print_roles(console, comparison.places)
    _print_changes(console, comparison.changes)


def _print_runs(console: Console, comparison: Comparison) -> None:
    title(console, "The runs")
    for label, runs in (("A", comparison.before), ("B", comparison.after)):
        for number, run in enumerate(runs[:_MOST_RUNS]):
            line(console, "" if number else label, run_sentence(run))
        if len(runs) > _MOST_RUNS:
            line(console, "", f"{len(runs) - _MOST_RUNS} more")


def _print_parts(console: Console, comparison: Comparison) -> None:
    if not comparison.parts:
        note(console, "the parts of the step are not known of all runs: where the difference comes from is not told")
        return
    title(console, "Where the difference comes from", "ms per step, adding up to the mean step")
    made = table("part", ["A", "B", "change", "of A's step"])
    total = sum(row.before_ns for row in comparison.parts)
    for row in comparison.parts:
        change = signed(row.change_ns / total) if total else "-"
        cells = (milliseconds(row.before_ns), milliseconds(row.after_ns), change_ms(row.change_ns), change)
        made.add_row(Text(printable(f"{row.kind}: {row.name}")), *cells)
    after = sum(row.after_ns for row in comparison.parts)
    cells = (milliseconds(total), milliseconds(after), change_ms(after - total), signed((after - total) / total))
    made.add_row(Text("mean step", style="bold"), *(Text(cell, style="bold") for cell in cells))
    made.add_row(Text("median step", style="bold"), *(Text(cell, style="bold") for cell in median_cells(comparison)))
    console.print(made)


def _print_places(console: Console, places: UnitChanges) -> None:
    title(console, "Own work by host", "ms per step; waits of all ranks that began there")
    made = table("host", ["A", "B", "change", "95 %", "waits A", "waits B"])
    for row in places.hosts[:_MOST_HOSTS]:
        change, interval = change_cells(row, "-")
        work = ("-" if value is None else milliseconds(value) for value in (row.before_ns, row.after_ns))
        waits = (milliseconds(value) for value in (row.caused_before_ns, row.caused_after_ns))
        style = "bold" if row.is_named else ""
        made.add_row(Text(printable(row.name), style=style), *work, Text(change, style=style), interval, *waits)
    console.print(made)
    if any("*" in change_cells(row, "")[0] for row in places.hosts[:_MOST_HOSTS]):
        note(console, AGAINST_OTHERS)
    if len(places.hosts) > _MOST_HOSTS:
        note(console, f"{len(places.hosts) - _MOST_HOSTS} more hosts changed less: see --json")


def _print_roles(console: Console, places: UnitChanges) -> None:
    if len(places.roles) < 2:
        return
    title(console, "Own work by role", "ms per step")
    made = table("role", ["A", "B", "change"])
    for role, before, after in places.roles[:_MOST_HOSTS]:
        made.add_row(Text(printable(role)), milliseconds(before), milliseconds(after), signed(after / before - 1))
    console.print(made)


def _print_changes(console: Console, changes: Sequence[Change]) -> None:
    title(console, "What else changed", "what may be a cause; none of it is proven to be one")
    if not changes:
        note(console, "nothing that the runs record")
        return
    for kind, of_kind in groupby(changes[:_MOST_CHANGES], key=lambda change: change.kind):
        for number, change in enumerate(of_kind):
            line(console, "" if number else kind, f"{change.name}: {change.before} -> {change.after}")
    if len(changes) > _MOST_CHANGES:
        note(console, f"{plural(len(changes) - _MOST_CHANGES, 'more change')}: see --json")
