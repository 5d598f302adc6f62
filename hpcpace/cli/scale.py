"""`hpcpace scale RUN...`: how a job scales over nodes, what stops it, and what larger sizes would give."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import click
from rich.console import Console

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, option
from hpcpace.cli.progress import shown_progress
from hpcpace.errors import EXIT_WARNING, UsageError
from hpcpace.files import write_file
from hpcpace.plots.csv_text import csv_bytes
from hpcpace.quoting import printable
from hpcpace.report.terminal.scale import print_scaling
from hpcpace.rundir import json_text
from hpcpace.runs.csv_form import read_csv
from hpcpace.runs.load import load_runs
from hpcpace.runs.scaling.result import Scaling, scaling_of
from hpcpace.runs.scaling.samples import Sample, sample_of_line, sample_of_run
from hpcpace.runs.scaling.sizes import Kind
from hpcpace.runs.scaling.table import COLUMNS, rows_of

_WIDTH = 80


@click.command(cls=Command)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=PATH)
@option(
    "--scaling",
    type=click.Choice([Kind.WEAK, Kind.STRONG]),
    help="Take the work as growing with the size (weak) or staying the same (strong).",
    show_default="as the batches tell",
)
@option(
    "--csv", "target", type=PATH, help="Write the table of sizes and predictions to this file.", show_default="none"
)
@option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(runs: tuple[Path, ...], scaling: Kind | None, target: Path | None, as_json: bool) -> None:
    """Say how a job scales: throughput, scaling factor, what stops it, and what 2 and 4 times the nodes would give.

    RUN are runs of the same work on different numbers of nodes, repeats included, or one CSV file of runs that another
    tool has measured (docs/scale.md).

    Exit codes: 0 fine; 1 some runs were left out; 2 bad input; 3 the runs have one size, or no speeds to compare.
    """
    samples, problems = _samples(runs)
    found = scaling_of(samples, kind=None if scaling is None else Kind(scaling))
    for problem in problems:
        click.echo(f"hpcpace: warning: {printable(problem)}", err=True)
    if target is not None:
        _write(target, found)
    if as_json:
        click.echo(json_text(found.to_json()), nl=False)
    else:
        print_scaling(_console(), found)
        if target is not None:
            click.echo(f"\nwritten: {printable(str(target))}")
    if problems or found.left_out:
        raise SystemExit(EXIT_WARNING)


def _samples(paths: tuple[Path, ...]) -> tuple[list[Sample], list[str]]:
    """Return the runs of a call, and why others of it cannot be read.

    Raises:
        UsageError: CSV files and runs are mixed, several CSV files are named, or no run can be read.
    """
    tables = [path for path in paths if path.suffix == ".csv"]
    if tables and len(paths) > 1:
        raise UsageError(f"{tables[0]} is a CSV file: name it alone, its speeds were measured in another way")
    if tables:
        return [sample_of_line(line, str(tables[0])) for line in read_csv(tables[0])], []
    with shown_progress() as begin_stage:
        loaded = load_runs(paths, progress=begin_stage("reading runs"))
    problems = [run.problem for run in loaded if run.problem]
    samples = [sample_of_run(run.measured) for run in loaded if run.measured is not None]
    if not samples:
        raise UsageError(f"no run can be read: {'; '.join(problems[:3])}")
    return samples, problems


def _write(target: Path, found: Scaling) -> None:
    try:
        write_file(target, csv_bytes(COLUMNS, rows_of(found)))
    except OSError as error:
        raise UsageError(f"cannot write {target} ({error.strerror}): name another file with --csv") from error


def _console() -> Console:
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    if isinstance(sys.stdout, io.TextIOWrapper):  # a job's locale may be ASCII, and names of runs more
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(width=max(columns, _WIDTH), highlight=False, emoji=False, markup=False)
