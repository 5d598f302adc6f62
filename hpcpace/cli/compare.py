"""`hpcpace compare A B`: whether B is slower than A, where that comes from, and what else changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, Real, headed, option, verbose
from hpcpace.cli.progress import shown_progress
from hpcpace.config_sources import load_config
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import EXIT_WARNING, CannotTell, TraceError, UsageError
from hpcpace.core.files import write_file
from hpcpace.core.rundir import check_target, json_text
from hpcpace.core.text import plural, printable
from hpcpace.metrics.run_difference import PRIOR_CV
from hpcpace.report.html import html_page
from hpcpace.report.sections.comparison import comparison_document
from hpcpace.report.terminal import new_console, print_document
from hpcpace.runs.compare import Outcome, compare
from hpcpace.runs.from_csv import runs_of_csv
from hpcpace.runs.load import LoadedRun, NotLoaded, load_runs
from hpcpace.runs.measured import MeasuredRun

_BETWEEN = "\0"
"""Stands for `--`, which click would swallow."""


class _Groups(Command):
    """A command whose arguments are two groups with `--` between them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; the first `--` separates the groups."""
        return super().parse_args(ctx, [_BETWEEN if word == "--" else word for word in args])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the usage with both of its forms."""
        return ["[OPTIONS]", "A B | A1 A2... -- B1 B2..."]


@click.command(cls=_Groups)
@click.argument("runs", nargs=-1, required=True, type=str, metavar="A B | A1 A2... -- B1 B2...")
@headed(
    "What to compare",
    option("--anyway", is_flag=True, help="Compare runs whose work differs, and say what that means."),
    option(
        "--run-cv",
        "prior_cv",
        type=Real(0.0, 1.0),
        default=PRIOR_CV,
        help="Take runs of the same thing to differ by this coefficient of variation where there are fewer than 3 "
        "repeats a side.",
    ),
)
@headed(
    "How to read it",
    option(
        "--memory", metavar="SIZE", help="Use at most this much memory for the tables of a run.", show_default="2GiB"
    ),
)
@headed(
    "Output",
    option("--json", "as_json", is_flag=True, help="Print the comparison as JSON."),
    option(
        "--html",
        "html",
        metavar="FILE",
        type=PATH,
        help="Write a page with both runs side by side.",
        show_default="none",
    ),
    verbose,
)
def command(
    runs: tuple[str, ...],
    anyway: bool,
    prior_cv: float,
    memory: str | None,
    as_json: bool,
    html: Path | None,
    is_verbose: bool,
) -> None:
    """Say whether run B is slower than run A beyond noise, by how much, and where that comes from.

    Give repeats of each as two groups with -- between them. A run is taken from its summary.json where that is of its
    traces as they are, else it is analysed. All runs of a file that ends in .csv are one group.

    Exit codes: 0 B is not slower; 1 B is slower beyond noise; 2 bad input, or different work; 3 cannot tell.
    """
    before, after = _groups(runs)
    check_target(html, [*before, *after], "--html")
    settings = load_config(file=None, environ=process_environ(), options={"report": {"memory": memory}})
    with shown_progress(is_shown=True) as stage:
        loaded = load_runs(
            [path for path in (*before, *after) if path.suffix.lower() != ".csv"],
            settings,
            progress=stage("reading runs"),
        )
    found = {run.path: run for run in loaded}
    comparison = compare(_measured(before, found), _measured(after, found), prior_cv=prior_cv, takes_other_work=anyway)
    document = comparison_document(comparison)
    if html is not None:
        _write(html, html_page(document))
    if as_json:
        click.echo(json_text(comparison.to_json()), nl=False)
    else:
        print_document(new_console(), document, is_verbose=is_verbose)
        if html is not None:
            click.echo(f"\nwritten: {printable(str(html))}")
    if comparison.outcome is Outcome.SLOWER:
        raise SystemExit(EXIT_WARNING)


def _groups(words: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Return the paths of both groups.

    Raises:
        UsageError: there are not two groups.
    """
    if _BETWEEN in words:
        at = words.index(_BETWEEN)
        before, after = list(words[:at]), list(words[at + 1 :])
        if _BETWEEN in after:
            raise UsageError("there are two -- and so three groups: compare two at a time")
    elif len(words) == 2:
        before, after = [words[0]], [words[1]]
    else:
        raise UsageError(
            f"{plural(len(words), 'run')} named: give two, A B, or two groups with -- between them, A1 A2 -- B1 B2"
        )
    if not before or not after:
        raise UsageError("a side of -- has no run: name at least one before and one behind it")
    return [Path(word) for word in before], [Path(word) for word in after]


def _measured(paths: Sequence[Path], found: dict[Path, LoadedRun]) -> list[MeasuredRun]:
    """Return the runs of a group.

    Raises:
        TraceError, CannotTell: one of them cannot be loaded.
    """
    runs: list[MeasuredRun] = []
    for path in paths:
        if path.suffix.lower() == ".csv":
            runs += runs_of_csv(path)
            continue
        loaded = found[path]
        if loaded.measured is None:
            raise (CannotTell if loaded.why_not is NotLoaded.NO_STEPS else TraceError)(loaded.message)
        runs.append(loaded.measured)
    return runs


def _write(path: Path, content: str) -> None:
    try:
        write_file(path, content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
