"""`hpcpace history DIR`: what changed over weeks of runs, by job and by host."""

from __future__ import annotations

from pathlib import Path

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, Whole, headed, option, verbose
from hpcpace.cli.progress import shown_progress
from hpcpace.config_sources import load_config
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import CannotTell, UsageError
from hpcpace.core.files import write_file
from hpcpace.core.rundir import RUNS, check_target, json_text
from hpcpace.core.text import listed
from hpcpace.report.html import html_page
from hpcpace.report.sections.history import history_document, passed_over_words
from hpcpace.report.terminal import new_console, print_document
from hpcpace.runs.history import history
from hpcpace.runs.history_csv import rows_of_csv
from hpcpace.runs.history_index import IndexedRuns, indexed_runs


@click.command(cls=Command)
@click.argument("folder", metavar="[DIR]", type=PATH, default=RUNS)
@headed(
    "What to look at",
    option("--job", default="", help="Look only at jobs of this name.", show_default="all"),
    option("--host", default="", help="Look only at runs on this host.", show_default="all"),
)
@headed(
    "How to read it",
    option(
        "--memory", metavar="SIZE", help="Use at most this much memory for the tables of a run.", show_default="2GiB"
    ),
)
@headed(
    "Output",
    option("--runs", "num_runs", type=Whole(0), default=20, help="Show this many of the newest runs."),
    option("--json", "as_json", is_flag=True, help="Print the history as JSON."),
    option("--html", "html", metavar="FILE", type=PATH, help="Write a page with plots.", show_default="none"),
    verbose,
)
def command(
    folder: Path,
    job: str,
    host: str,
    memory: str | None,
    num_runs: int,
    as_json: bool,
    html: Path | None,
    is_verbose: bool,
) -> None:
    """Say what changed over the runs in DIR (default: runs), for good or for once, by job and by host.

    Instead of DIR, a file that ends in .csv may hold the runs of other tools. What was read of runs is kept in
    DIR/hpcpace-history.json.

    Exit codes: 0 fine, whatever changed; 2 DIR cannot be read; 3 it has no run that can be used.
    """
    check_target(html, [folder], "--html")
    if folder.suffix.lower() == ".csv" and not folder.is_dir():
        rows = rows_of_csv(folder)
        runs = IndexedRuns(rows=tuple(rows), broken={}, num_running=0, num_read=len(rows), index="none of a file")
    else:
        settings = load_config(file=None, environ=process_environ(), options={"report": {"memory": memory}})
        with shown_progress() as stage:
            runs = indexed_runs(folder, settings, progress=stage("reading runs"))
    found = history(str(folder), runs, job=job, host=host)
    document = history_document(found, num_runs=num_runs) if found.num_runs else None
    if html is not None and document is not None:
        try:
            write_file(html, html_page(document))
        except OSError as error:
            raise UsageError(f"cannot write {html}: {error.strerror}") from error
    if as_json:
        click.echo(json_text(found.to_json()), nl=False)
    elif document is not None:
        print_document(new_console(), document, is_verbose=is_verbose)
        if html is not None:
            click.echo(f"\nwritten: {html}")
    if not found.num_runs:
        which = " of that job or host" if job or host else ""
        why = listed(
            [
                f"{len(found.broken)} are broken or without steps",
                f"{found.num_running} still run",
                *passed_over_words(found),
            ]
        )
        raise CannotTell(f"{folder} has no run{which} that can be used: {why}")
