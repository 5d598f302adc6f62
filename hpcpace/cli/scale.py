"""`hpcpace scale RUN...`: how a job scales over nodes, what stops it, and what larger sizes would give."""

from __future__ import annotations

from pathlib import Path

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, headed, option, verbose
from hpcpace.cli.problems import warn
from hpcpace.cli.progress import shown_progress
from hpcpace.core.errors import EXIT_WARNING, UsageError
from hpcpace.core.files import write_file
from hpcpace.core.rundir import check_target, json_text
from hpcpace.core.text import printable
from hpcpace.plots.csv_text import csv_bytes
from hpcpace.probe.record import read_probe
from hpcpace.report.sections.scaling import scaling_document
from hpcpace.report.terminal import MIN_WIDTH, new_console, print_document
from hpcpace.runs.scaling.read import read_samples
from hpcpace.runs.scaling.result import Scaling, scaling_of
from hpcpace.runs.scaling.sizes import Kind
from hpcpace.runs.scaling.table import COLUMNS, rows_of


@click.command(cls=Command)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=PATH)
@headed(
    "How to read it",
    option(
        "--scaling",
        type=click.Choice([Kind.WEAK.value, Kind.STRONG.value]),
        help="Take the work as growing with the size (weak) or staying the same (strong).",
        show_default="as the batches tell",
    ),
    option(
        "--probe",
        type=PATH,
        help="Let transfers grow by the laws in this file of `hpcpace probe --json`, too.",
        show_default="as the runs tell",
    ),
)
@headed(
    "Output",
    option(
        "--csv", "target", type=PATH, help="Write the table of sizes and predictions to this file.", show_default="none"
    ),
    option("--json", "as_json", is_flag=True, help="Print everything as JSON."),
    verbose,
)
def command(
    runs: tuple[Path, ...],
    scaling: str | None,
    probe: Path | None,
    target: Path | None,
    as_json: bool,
    is_verbose: bool,
) -> None:
    """Say how a job scales: throughput, scaling factor, what stops it, and what 2 and 4 times the nodes would give.

    RUN are runs of the same work on different numbers of nodes, repeats included, or one CSV file of runs that another
    tool has measured (docs/scale.md).

    Exit codes: 0 fine; 1 some runs were left out; 2 bad input; 3 the runs have one size, or no speeds to compare.
    """
    check_target(target, [*runs, probe], "--csv")
    with shown_progress() as begin_stage:
        samples, problems = read_samples(runs, progress=begin_stage("reading runs"))
    warn(problems, is_verbose=is_verbose)  # before the law, which may say that too few runs are left
    laws = None if probe is None else read_probe(probe)
    found = scaling_of(samples, kind=None if scaling is None else Kind(scaling), probe=laws)
    if target is not None:
        _write(target, found)
    if as_json:
        click.echo(json_text(found.to_json()), nl=False)
    else:
        print_document(new_console(width_in_log=MIN_WIDTH), scaling_document(found), is_verbose=is_verbose)
        if target is not None:
            click.echo(f"\nwritten: {printable(str(target))}")
    if problems or found.left_out:
        raise SystemExit(EXIT_WARNING)


def _write(target: Path, found: Scaling) -> None:
    try:
        write_file(target, csv_bytes(COLUMNS, rows_of(found)))
    except OSError as error:
        raise UsageError(f"cannot write {target} ({error.strerror}): name another file with --csv") from error
