"""`hpcpace list [DIR]`: the runs in a folder, the newest first, as a table of 80 columns."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcpace.cli.commands import Command
from hpcpace.cli.options import MIN_WIDTH, PATH, collect_less_garbage, option, text_console, verbose
from hpcpace.core.environment import process_redaction
from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import RUNS, find_runs
from hpcpace.core.text import NS_PER_S, format_count, printable
from hpcpace.diagnosis.run_state import RunRow, RunState, progress_line, run_rows
from hpcpace.report.terminal import notes

_STYLES = {RunState.RUNNING: "cyan", RunState.HUNG: "red", RunState.FAILED: "red", RunState.CANNOT_TELL: "yellow"}
_MAX_WORD, _MAX_SPEED = 20, 14


def print_runs(console: Console, rows: Sequence[RunRow], folder: Path, *, is_verbose: bool = False) -> None:
    """Print a table of runs, with their paths below a folder, and what cannot be read."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    widths = {
        "state": _longest_word(["state", *map(_state, rows)]),
        "verdict": _longest_word(["verdict", *(row.verdict for row in rows)]),
        "speed": max(len("speed"), *(min(len(_speed(row)), _MAX_SPEED) for row in rows)),
        "ranks": 5,
        "begun": 11,
    }
    longest = max(len("run"), *(len(printable(_name(row, folder))) for row in rows))
    room = console.width - sum(widths.values()) - len(widths) - 1
    if longest > room:  # names are to be copied, and default ones have the date
        room += widths.pop("begun") + 1
    table.add_column("run", overflow="fold", width=min(longest, room))
    widths["verdict"] += max(0, min(room - longest, _MAX_WORD // 2))
    for name, width in widths.items():
        table.add_column(name, justify="right" if name in ("speed", "ranks") else "left", width=width)
    for row in rows:
        cells = (
            Text(printable(_name(row, folder))),
            Text(_state(row), style=_STYLES.get(row.state, "")),
            Text(printable(row.verdict), style="dim" if not row.headline else ""),
            Text(printable(_speed(row))),
            Text(str(row.num_ranks) if row.num_ranks else "-"),
            Text(_date(row.created_unix_ns)),
        )
        table.add_row(*cells[: 1 + len(widths)])
    console.print(table)
    problems = (problem for row in rows for problem in row.problems)
    notes(console, problems, rest="--verbose", is_verbose=is_verbose)


def _longest_word(texts: Iterable[str]) -> int:
    """Return the width below which a column would break a word, but no more than 20."""
    return min(max((len(word) for text in texts for word in text.split()), default=0), _MAX_WORD)


def _name(row: RunRow, folder: Path) -> str:
    name = os.path.relpath(row.path, folder) if Path(row.path) != folder else row.path
    return f"{name} ({row.num_attempts} attempts)" if row.num_attempts > 1 else name


def _state(row: RunRow) -> str:
    if row.num_steps is None:
        return row.state
    return progress_line(row.state, row.num_steps, row.planned_steps)


def _speed(row: RunRow) -> str:
    return f"{format_count(row.speed)} {row.speed_unit}/s" if row.speed is not None else "-"


def _date(unix_ns: int) -> str:
    """Return when a run began, in local time: without the year where that is the present one."""
    try:
        begun = time.localtime(unix_ns // NS_PER_S)
    except (OverflowError, OSError, ValueError):
        return "-"
    if not unix_ns:
        return "-"
    is_this_year = begun.tm_year == time.localtime().tm_year
    return time.strftime("%m-%d %H:%M" if is_this_year else "%Y-%m-%d", begun)


_MAX_WIDTH = 140


@click.command(cls=Command)
@click.argument("folder", metavar="[DIR]", type=PATH, default=RUNS)
@option("--json", "as_json", is_flag=True, help="Print one JSON list instead of a table.")
@verbose
def command(folder: Path, as_json: bool, is_verbose: bool) -> None:
    """List the runs in DIR (default: runs) and in folders in it, the newest first.

    It shows the last attempt of each run: whether it runs, has finished, was stopped, hangs or failed, the verdict of
    its report, its speed, its ranks and when it began. Exit codes: 0 fine, 2 DIR cannot be read.
    """
    collect_less_garbage()
    rows = rows_in(folder)
    if as_json:
        content = process_redaction().content([row.to_json() for row in rows])
        click.echo(json.dumps(content, indent=2))
    else:
        show_runs(rows, folder, is_verbose=is_verbose)


def rows_in(folder: Path) -> list[RunRow]:
    """Return a row for each run in a folder, the newest first.

    Raises:
        TraceError: the folder cannot be read.
    """
    try:
        return run_rows(find_runs(folder))
    except OSError as error:
        raise TraceError(f"cannot list runs in {folder}: {error.strerror}; name a folder of runs") from error


def show_runs(rows: list[RunRow], folder: Path, *, is_verbose: bool = False) -> None:
    """Print the runs of a folder as a table, or that there are none."""
    console = text_console(log_width=MIN_WIDTH, max_width=_MAX_WIDTH)
    if not rows:
        click.echo(f"no runs in {printable(str(folder))}")
        return
    print_runs(console, rows, folder, is_verbose=is_verbose)
    click.echo(f"\nhpcpace report {printable(rows[0].path)}")
