"""Commands for several runs: `hpcpace compare`, `history` and `scale`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import (
    PATH,
    Real,
    Whole,
    collect_less_garbage,
    config_file,
    headed,
    memory,
    option,
    show,
    shown_progress,
    text_console,
    verbose,
    warn,
    write_target,
)
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import EXIT_WARNING, CannotTell, TraceError, UsageError
from hpcpace.core.rundir import RUNS, check_target, json_text
from hpcpace.core.settings import load_config
from hpcpace.core.text import listed, plural
from hpcpace.core.thresholds import ThresholdValues
from hpcpace.metrics.run_difference import PRIOR_CV, SeriesThresholds
from hpcpace.runs.load import LoadedRun, NotLoaded, load_runs, runs_of_csv

# What one of the commands alone needs is imported in it.
if TYPE_CHECKING:
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
@headed("How to read it", memory)
@headed(
    "Output",
    option("--json", "as_json", is_flag=True, help="Print the comparison as JSON."),
    option("--html", metavar="FILE", type=PATH, help="Write a page with both runs side by side.", show_default="none"),
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
    collect_less_garbage()
    from hpcpace.core.change import Outcome
    from hpcpace.report.html import html_page
    from hpcpace.report.sections.comparison import comparison_document
    from hpcpace.runs.compare import compare

    before, after = _groups(runs)
    check_target(html, [*before, *after], "--html")
    settings = load_config(file=None, environ=process_environ(), options={"report": {"memory": memory}})
    paths = [path for path in (*before, *after) if path.suffix.lower() != ".csv"]
    with shown_progress() as stage:
        found = {run.path: run for run in load_runs(paths, settings, progress=stage("reading runs"))}
    comparison = compare(_measured(before, found), _measured(after, found), prior_cv=prior_cv, takes_other_work=anyway)
    document = comparison_document(comparison)
    if html is not None:
        write_target(html, html_page(document), "--html")
    show(document, document.data, as_json=as_json, is_verbose=is_verbose, written=html)
    if comparison.outcome is Outcome.SLOWER:
        raise SystemExit(EXIT_WARNING)


def _groups(words: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Return the paths of both groups.

    Raises:
        UsageError: there are not two groups.
    """
    if _BETWEEN in words:
        at = words.index(_BETWEEN)
        before, after = words[:at], words[at + 1 :]
        if _BETWEEN in after:
            raise UsageError("there are two -- and so three groups: compare two at a time")
    elif len(words) == 2:
        before, after = words[:1], words[1:]
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


@click.command(cls=Command)
@click.argument("folder", metavar="[DIR]", type=PATH, default=RUNS)
@headed(
    "What to look at",
    option("--job", default="", help="Look only at jobs of this name.", show_default="all"),
    option("--host", default="", help="Look only at runs on this host.", show_default="all"),
)
@headed("How to read it", config_file, memory)
@headed(
    "Output",
    option("--runs", "num_runs", type=Whole(0), default=20, help="Show this many of the newest runs."),
    option("--json", "as_json", is_flag=True, help="Print the history as JSON."),
    option("--html", metavar="FILE", type=PATH, help="Write a page with plots.", show_default="none"),
    verbose,
)
def history_command(
    folder: Path,
    job: str,
    host: str,
    config_file: Path | None,
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
    collect_less_garbage()
    from hpcpace.report.html import html_page
    from hpcpace.report.sections.history import history_document, passed_over_words
    from hpcpace.runs.history import history, rows_of_csv
    from hpcpace.runs.history_row import IndexedRuns, indexed_runs

    check_target(html, [folder], "--html")
    settings = load_config(file=config_file, environ=process_environ(), options={"report": {"memory": memory}})
    if folder.suffix.lower() == ".csv" and not folder.is_dir():
        rows = rows_of_csv(folder)
        runs = IndexedRuns(rows=tuple(rows), broken={}, num_running=0, num_read=len(rows), index="none of a file")
    else:
        with shown_progress() as stage:
            runs = indexed_runs(folder, settings, progress=stage("reading runs"))
    found = history(str(folder), runs, job=job, host=host, limits=settings.of(ThresholdValues).of(SeriesThresholds))
    document = history_document(found, num_runs=num_runs) if found.num_runs else None
    if html is not None and document is not None:
        write_target(html, html_page(document), "--html")
    if document is not None:
        show(document, document.data, as_json=as_json, is_verbose=is_verbose, written=html)
    elif as_json:
        click.echo(json_text(found.to_json()), nl=False)
    if not found.num_runs:
        which = " of that job or host" if job or host else ""
        why = [f"{len(found.broken)} are broken or without steps", f"{found.num_running} still run"]
        raise CannotTell(f"{folder} has no run{which} that can be used: {listed([*why, *passed_over_words(found)])}")


@click.command(cls=Command)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=PATH)
@headed(
    "How to read it",
    option(
        "--scaling",
        type=click.Choice(["weak", "strong"]),
        help="Take the work as growing with the size (weak) or staying the same (strong).",
        show_default="as the batches tell",
    ),
    option(
        "--throughput",
        type=click.Choice(["total", "gpu", "node"]),
        help="Take the throughput of a CSV file as that of all ranks, of one GPU or of one node.",
        show_default="as its column says",
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
def scale_command(
    runs: tuple[Path, ...],
    scaling: str | None,
    throughput: str | None,
    probe: Path | None,
    target: Path | None,
    as_json: bool,
    is_verbose: bool,
) -> None:
    """Say how a job scales: throughput, scaling factor, what stops it, and what 2 and 4 times the nodes would give.

    RUN are runs of the same work on different numbers of nodes, repeats included, or one CSV file of runs that another
    tool has measured (hpcpace help scale).

    Exit codes: 0 fine; 1 some runs were left out; 2 bad input; 3 the runs have one size, no speeds to compare,
    or a throughput that may be that of one GPU.
    """
    collect_less_garbage()
    from hpcpace.core.exposition import csv_bytes
    from hpcpace.probe.record import read_probe
    from hpcpace.report.sections.history import scaling_document
    from hpcpace.runs.load import Per
    from hpcpace.runs.scaling.result import COLUMNS, rows_of, scaling_of
    from hpcpace.runs.scaling.samples import read_samples
    from hpcpace.runs.scaling.sizes import ScalingKind

    check_target(target, [*runs, probe], "--csv")
    with shown_progress() as begin_stage:
        per = None if throughput is None else Per(throughput)
        samples, problems = read_samples(runs, per=per, progress=begin_stage("reading runs"))
    warn(problems, is_verbose=is_verbose)  # before the law, which may say that too few runs are left
    laws = None if probe is None else read_probe(probe)
    found = scaling_of(samples, kind=None if scaling is None else ScalingKind(scaling), probe=laws)
    if target is not None:
        write_target(target, csv_bytes(COLUMNS, rows_of(found)), "--csv")
    data, console = json_text(found.to_json()), text_console(log_width=80, max_width=1 << 16)
    show(scaling_document(found), data, as_json=as_json, is_verbose=is_verbose, written=target, console=console)
    if problems or found.left_out:
        raise SystemExit(EXIT_WARNING)
