"""`hpcpace list [DIR]`: the runs in a folder, the newest first."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import click
from rich.console import Console

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, option, verbose
from hpcpace.core.environment import process_redaction
from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import RUNS, find_runs
from hpcpace.core.text import printable
from hpcpace.diagnosis.run_state import RunRow, run_rows
from hpcpace.report.sections.run_list import print_runs

_LEAST_WIDTH, _MOST_WIDTH = 80, 140


@click.command(cls=Command)
@click.argument("folder", metavar="[DIR]", type=PATH, default=RUNS)
@option("--json", "as_json", is_flag=True, help="Print one JSON list instead of a table.")
@verbose
def command(folder: Path, as_json: bool, is_verbose: bool) -> None:
    """List the runs in DIR (default: runs) and in folders in it, the newest first.

    It shows the last attempt of each run: whether it runs, has finished, was stopped, hangs or failed, the verdict of
    its report, its speed, its ranks and when it began. Exit codes: 0 fine, 2 DIR cannot be read.
    """
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
    if isinstance(sys.stdout, io.TextIOWrapper):  # a job's locale may be ASCII, and names of folders more
        sys.stdout.reconfigure(errors="backslashreplace")
    if not rows:
        click.echo(f"no runs in {printable(str(folder))}")
        return
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _LEAST_WIDTH
    width = min(max(columns, _LEAST_WIDTH), _MOST_WIDTH)
    print_runs(Console(width=width, highlight=False, emoji=False, markup=False), rows, folder, is_verbose=is_verbose)
    click.echo(f"\nhpcpace report {printable(rows[0].path)}")
