"""A history of runs on a terminal of 80 columns: what changed, each job as a line of blocks, and a line a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcpace.core.hostlist import short_list
from hpcpace.core.text import format_count, format_duration, plural, shortened
from hpcpace.report.terminal import line, note, notes, table, title
from hpcpace.report.words.history import counts_sentence, date, event_sentence, headline
from hpcpace.runs.history import Event, History, Series
from hpcpace.runs.history_row import HistoryRow

_BLOCKS, _PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_WIDTH = 30
_MOST_EVENTS, _MOST_SERIES = 20, 20
# Of a job, a run or its hosts: a run on hosts of many names must not fill the screen.
_MAX_NAME = 120
_MARKS = {"lasting": "changed", "recent": "recent", "one-off": "one-off", "chronic": "chronic", "drift": "drift"}


def print_history(console: Console, history: History, *, num_runs: int, is_verbose: bool = False) -> None:
    """Print what was found, with the newest runs."""
    title(console, f"hpcpace history {history.folder}")
    line(console, "Changes", headline(history), style="bold")
    for number, event in enumerate(history.events[:_MOST_EVENTS]):
        line(console, "" if number else "What", event_sentence(event))
    if len(history.events) > _MOST_EVENTS:
        line(console, "", f"{len(history.events) - _MOST_EVENTS} more: see --json")
    line(console, "Runs", counts_sentence(history))
    if history.index.startswith("cannot"):
        line(console, "Index", history.index)
    _print_series(console, history)
    _print_runs(console, history, num_runs)
    _print_problems(console, "Incomplete", "used; what is not known of them", history.problems, is_verbose=is_verbose)
    _print_problems(
        console, "Not used", "broken, without steps to use, or without a date", history.broken, is_verbose=is_verbose
    )


def _print_series(console: Console, history: History) -> None:
    title(console, "Step time by job", "oldest to newest run, from the shortest to the longest median step")
    blocks = _BLOCKS if console.encoding.startswith("utf") else _PLAIN
    made = table("job", ["runs", "from", "to", "shortest", "longest"])
    for column in made.columns[1:]:  # a long name of a job is folded, and nothing else
        column.no_wrap = True
    made.columns[0].overflow = "fold"
    made.add_column("steps", justify="left", vertical="bottom", no_wrap=True)
    for series in history.series[:_MOST_SERIES]:
        times = [row.p50_ns for row in series.rows]
        made.add_row(
            Text(shortened(series.name, max_letters=_MAX_NAME)),
            str(len(times)),
            _day(series.rows[0]),
            _day(series.rows[-1]),
            format_duration(min(times)),
            format_duration(max(times)),
            sparkline(times, blocks),
        )
    console.print(made)
    if len(history.series) > _MOST_SERIES:
        note(console, f"{plural(len(history.series) - _MOST_SERIES, 'more job')} with fewer runs: see --json")


def _day(row: HistoryRow) -> str:
    return date(row.begun_unix_ns, with_time=False) if row.begun_unix_ns else "-"


def sparkline(values: Sequence[float], blocks: str = _BLOCKS) -> str:
    """Return a line of at most 30 blocks, each the median of some neighbours, from the smallest to the largest."""
    edges = [len(values) * at // min(_WIDTH, len(values)) for at in range(min(_WIDTH, len(values)) + 1)]
    binned = [median(values[start:stop]) for start, stop in pairwise(edges)]
    low, high = min(binned), max(binned)
    # Less than a tenth is shown as less than all blocks, so that noise looks small.
    span = max(high - low, 0.1 * high)
    return "".join(blocks[min(int((value - low) / span * len(blocks)), len(blocks) - 1)] for value in binned)


def _print_runs(console: Console, history: History, num_runs: int) -> None:
    rows = history.newest_first()[:num_runs]
    if not rows:
        return
    title(console, "Runs", "the newest first")
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("began", "run", "step", "speed", "hosts", ""):
        made.add_column(name, justify="right" if name in ("step", "speed") else "left", overflow="fold")
    for row, series in rows:
        made.add_row(
            date(row.begun_unix_ns)[4:] if row.begun_unix_ns else "-",
            Text(shortened(row.run, max_letters=_MAX_NAME)),
            format_duration(row.p50_ns),
            f"{format_count(row.samples_per_s)}/s" if row.samples_per_s else "-",
            Text(shortened(short_list(row.hosts), max_letters=_MAX_NAME) if row.hosts else str(row.num_nodes or "-")),
            _mark(row, series),
        )
    console.print(made)
    if history.num_runs > num_runs:
        note(console, f"{plural(history.num_runs - num_runs, 'older run')}: see --runs and --json")


def _mark(row: HistoryRow, series: Series) -> str:
    """Return what begins with a run."""
    found: list[Event] = [event for event in series.events if event.run == row.run]
    return ", ".join(f"{_label(event)} {100 * event.share:+.0f} %" for event in found)


def _label(event: Event) -> str:
    return "long steps" if event.kind == "long steps" else _MARKS[event.duration]


def _print_problems(
    console: Console, heading: str, what: str, problems: Mapping[str, str], *, is_verbose: bool
) -> None:
    if not problems:
        return
    title(console, heading, what)
    said = (f"{name}: {problem}" for name, problem in problems.items())
    notes(console, said, rest="--verbose", is_verbose=is_verbose)
