"""A hang on a terminal, and what the dumps of other tools showed of it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcpace.core.text import format_duration, plural, shortened
from hpcpace.hang.verdict import HangWords
from hpcpace.report.terminal import line, note, title
from hpcpace.runs.imports.dump_view import LastOfRank

_MAX_ROWS = 16
_MAX_LETTERS = 240
"""Of a sentence: only those with names that somebody chose to fill the screen are longer."""


def print_hang(console: Console, words: HangWords) -> None:
    """Print the verdict on a hang: headline, why, and what to do."""
    line(console, "Verdict", shortened(words.headline, max_letters=_MAX_LETTERS), style="bold")
    for number, why in enumerate(words.why):
        line(console, "Why" if not number else "", shortened(why, max_letters=_MAX_LETTERS))
    line(console, "Next", shortened(words.advice, max_letters=_MAX_LETTERS))


def print_last(console: Console, rows: Sequence[LastOfRank], span_ns: int, *, named: Sequence[int]) -> None:
    """Print the end of the record of each rank, of those that a verdict names first."""
    title(console, "The end of the records", f"the last {format_duration(span_ns)}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("rank", justify="right")
    table.add_column("finished", justify="right")
    table.add_column("open", justify="right")
    table.add_column("oldest open operation", overflow="ellipsis", no_wrap=True)
    table.add_column("called", justify="right", no_wrap=True)
    order = sorted(rows, key=lambda row: (row.rank not in named, row.rank))
    for row in order[:_MAX_ROWS]:
        since = "" if row.since_ns is None else f"-{format_duration(row.since_ns)}" if row.since_ns else "last"
        style = "bold" if row.rank in named else ""
        cells = (str(row.rank), str(row.num_finished), str(row.num_open), shortened(row.stands_in) or "none", since)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    console.print(table)
    if len(rows) > _MAX_ROWS:
        note(console, f"{plural(len(rows) - _MAX_ROWS, 'more rank')}; --json lists all")
