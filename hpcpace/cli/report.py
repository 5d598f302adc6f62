"""`hpcpace report RUN`: read the traces of a run, print where its steps went, and write RUN/summary.json."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from hpcpace.errors import EXIT_WARNING, TraceError, UsageError
from hpcpace.report.analysis import Selection, summarize
from hpcpace.report.layout import printable
from hpcpace.report.summary import Summary
from hpcpace.report.terminal import MAX_WIDTH, MIN_WIDTH, print_report
from hpcpace.rundir import Attempt, RunDirectory, open_run, write_json
from hpcpace.trace.reader import AttemptTraces, read_attempt


def _step_range(_: click.Context, __: click.Parameter, value: str) -> tuple[int | None, int | None]:
    found = re.fullmatch(r"(\d{0,9}):(\d{0,9})", value)
    if not found:
        raise click.BadParameter(f"{value!r} is no range of steps: write A:B, like 10:50, 10: or :50")
    first, stop = (int(part) if part else None for part in found.groups())
    if first is not None and stop is not None and stop <= first:
        raise click.BadParameter(f"{value!r} is empty: B must be larger than A")
    return first, stop


def _rank_list(_: click.Context, __: click.Parameter, value: str | None) -> frozenset[int] | None:
    if value is None:
        return None
    ranks: set[int] = set()
    for item in value.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", item)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise click.BadParameter(f"{item!r} is no rank or range of ranks: write a list like 0,4-7")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--attempt", "attempt_number", type=click.IntRange(min=0), help="Which start of the run; the last one otherwise."
)
@click.option(
    "--steps", metavar="A:B", default=":", callback=_step_range, help="Use only steps from A up to, and without, B."
)
@click.option("--include-warmup", is_flag=True, help="Use the warm-up steps too.")
@click.option(
    "--ranks", metavar="LIST", callback=_rank_list, help="Show only these ranks, like 0,4-7; all are still used."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(
    run: Path,
    attempt_number: int | None,
    steps: tuple[int | None, int | None],
    include_warmup: bool,
    ranks: frozenset[int] | None,
    as_json: bool,
) -> None:
    """Show where the steps of RUN went, and write RUN/summary.json.

    Exit codes: 0 fine, 1 when traces are missing or something was cut off, 2 bad input, 3 when no step is left to
    tell from.
    """
    directory = open_run(run)
    attempt = _attempt(directory, attempt_number)
    found = _load(attempt)
    selection = Selection(include_warmup=include_warmup, first=steps[0], stop=steps[1])
    summary = summarize(directory, attempt, found.traces, found.problems, selection)
    shown = sorted(ranks & set(summary.world.ranks)) if ranks is not None else None
    if shown == []:
        raise UsageError(
            f"--ranks names no rank of this run: it has {len(summary.world.ranks)}, up to {summary.world.ranks[-1]}"
        )
    is_written = _write(directory, summary)
    if as_json:
        click.echo(json.dumps(summary.to_json(), indent=2, sort_keys=True))
    else:
        print_report(_console(), summary, ranks=shown)
        if is_written:
            click.echo(f"\nwritten: {printable(str(directory.summary_json))}")
    if not summary.is_whole:
        raise SystemExit(EXIT_WARNING)


def _write(directory: RunDirectory, summary: Summary) -> bool:
    try:
        write_json(directory.summary_json, summary.to_json())
    except OSError as error:
        place = printable(str(directory.summary_json))
        click.echo(f"hpcpace: warning: cannot write {place} ({error.strerror}); the report is not kept", err=True)
        return False
    return True


def _attempt(directory: RunDirectory, number: int | None) -> Attempt:
    attempts = directory.attempts()
    if number is None:
        return attempts[-1]
    if number not in [attempt.number for attempt in attempts]:
        raise TraceError(
            f"no attempt {number} in {directory.path}: it has {', '.join(str(a.number) for a in attempts)}"
        )
    return directory.attempt(number)


def _load(attempt: Attempt) -> AttemptTraces:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading traces", total=None)
        return read_attempt(attempt, progress=lambda done, total: bar.update(task, completed=done, total=total))


def _console() -> Console:
    # A fixed width in logs keeps two reports comparable line by line.
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else MAX_WIDTH
    if isinstance(sys.stdout, io.TextIOWrapper):  # a job's locale may be ASCII, and names of hosts and folders more
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(width=min(max(columns, MIN_WIDTH), MAX_WIDTH), highlight=False, emoji=False)
