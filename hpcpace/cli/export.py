"""`hpcpace export`: write the data of a run as tables for pandas, R, Julia or a spreadsheet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import (
    PATH,
    Whole,
    headed,
    memory,
    opened_run,
    option,
    rank_set,
    step_range,
    verbose,
    warn,
)
from hpcpace.core.errors import EXIT_WARNING, UsageError, check_package
from hpcpace.core.text import plural, printable

if TYPE_CHECKING:
    from hpcpace.frames.run import Run

_TABLES = (
    *("ranks", "steps", "parts", "phases", "collectives", "connections", "network", "hosts", "clocks", "audit"),
)  # as of hpcpace.frames.columns, which loads numpy


@click.command(cls=Command)
@click.argument("run", type=PATH)
@headed(
    "What to write",
    option(
        "--only",
        "only",
        multiple=True,
        type=click.Choice(_TABLES),
        metavar="TABLE",
        help=f"Write only this table, given once or more: {', '.join(_TABLES)}.",
        show_default="all",
    ),
    option(
        "--steps",
        metavar="A:B",
        default=":",
        callback=step_range,
        help="Write the steps from A to B - 1.",
        show_default="all",
    ),
    option(
        "--ranks",
        metavar="LIST",
        callback=rank_set,
        help="Write only these ranks, like 0,4-7; waits are still known from all of them.",
        show_default="all",
    ),
    option("--include-warmup", is_flag=True, help="Write the warm-up steps, too."),
    option("--attempt", "attempt_number", type=Whole(0), help="Write this attempt.", show_default="the last one"),
)
@headed("How to read it", memory)
@headed(
    "Output",
    option("--format", "kind", type=click.Choice(["parquet", "csv"]), default="parquet", help="Write this format."),
    option("-o", "--output", "folder", type=PATH, metavar="FOLDER", required=True, help="Write into this folder."),
    verbose,
)
def command(
    run: Path,
    only: tuple[str, ...],
    steps: tuple[int | None, int | None],
    ranks: frozenset[int] | None,
    include_warmup: bool,
    attempt_number: int | None,
    memory: str | None,
    kind: str,
    folder: Path,
    is_verbose: bool,
) -> None:
    """Write the data of RUN as FOLDER/TABLE.parquet or .csv: steps, phases, collectives with waits, network, hosts.

    The tables have the steps and ranks that `hpcpace report` uses. `hpcpace help python` describes their columns. Needs
    hpcpace[frames].

    Exit codes: 0 fine; 1 the run lacks something, such as ranks without a trace; 2 bad input; 3 there is no step.
    """
    from hpcpace.frames.columns import TABLES, Format

    check_package("pyarrow", extra="frames")
    with opened_run(run, attempt_number, memory=memory, include_warmup=include_warmup) as opened:
        chosen = _chosen(opened, steps, ranks)
        written = chosen.write(folder, Format(kind), only or TABLES)
    warn(opened.problems, is_verbose=is_verbose)
    for table in written:
        click.echo(f"written: {printable(str(table.path))} ({plural(table.num_rows, 'row')})")
    if opened.problems:
        raise SystemExit(EXIT_WARNING)


def _chosen(run: Run, steps: tuple[int | None, int | None], ranks: frozenset[int] | None) -> Run:
    """Return the steps and ranks of a run that a user means.

    Raises:
        UsageError: it has none of these steps, or lacks one of these ranks.
    """
    chosen, used = run.between(*steps, ranks=ranks), run.judged.measured.chosen.step
    if not chosen.num_steps:
        raise UsageError(f"--steps names none of the {len(used)} steps that a report uses, {used[0]} to {used[-1]}")
    return chosen
