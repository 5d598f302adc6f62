"""`hpcpace list [DIR]`: the runs in a folder, the newest first."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import MIN_WIDTH, PATH, collect_less_garbage, option, text_console, verbose
from hpcpace.core.environment import process_redaction
from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import RUNS, find_runs
from hpcpace.core.text import printable
from hpcpace.diagnosis.run_state import RunRow, run_rows
from hpcpace.report.sections.run_list import print_runs

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
