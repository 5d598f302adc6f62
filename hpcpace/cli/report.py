"""`hpcpace report RUN`: read the traces of a run, print where its steps went, and write RUN/summary.json."""

from __future__ import annotations

import io
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console

from hpcpace.cli.commands import Command
from hpcpace.cli.foreign import warn_of_old_hdf5
from hpcpace.cli.options import PATH, Whole, headed, option
from hpcpace.cli.progress import Tell, shown_progress
from hpcpace.cli.runs import rows_in, show_runs
from hpcpace.config import Config
from hpcpace.config_sources import load_config
from hpcpace.diagnosis.analyze import Analysis, analyze
from hpcpace.diagnosis.diagnose import Mode
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.records.result import read_result_record
from hpcpace.diagnosis.run_list import newest_run
from hpcpace.diagnosis.run_state import progress_words
from hpcpace.diagnosis.summary import Summary
from hpcpace.diagnosis.verdict import main_verdict
from hpcpace.errors import (
    EXIT_CANNOT_TELL,
    EXIT_WARNING,
    CannotTell,
    HpcpaceError,
    NotEnoughMemory,
    ReportError,
    TraceError,
    UsageError,
)
from hpcpace.memory import keep_freed_memory
from hpcpace.quoting import printable
from hpcpace.report.html.page import page
from hpcpace.report.terminal.page import MAX_WIDTH, MIN_WIDTH, print_report
from hpcpace.run_search import find_runs, open_named_run
from hpcpace.rundir import RUNS, Attempt, RunDirectory, json_text
from hpcpace.world.environment import process_environ
from hpcpace.world.team import Team, team


def _step_range(_: click.Context, __: click.Parameter, value: str) -> tuple[int | None, int | None]:
    found = re.fullmatch(r"(\d{0,9}):(\d{0,9})", value)
    if not found:
        raise click.BadParameter(f"{value!r} is not a range of steps: write A:B, like 10:50, 10: or :50")
    first, stop = (int(part) if part else None for part in found.groups())
    if first is not None and stop is not None and stop <= first:
        raise click.BadParameter(f"{value!r} is an empty range: B must be larger than A")
    return first, stop


def _rank_list(_: click.Context, __: click.Parameter, value: str | None) -> frozenset[int] | None:
    if value is None:
        return None
    ranks: set[int] = set()
    for item in value.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", item)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise click.BadParameter(f"{item!r} is not a rank or a range of ranks: write a list like 0,4-7")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


@click.command(cls=Command)
@click.argument("run", type=PATH, required=False)
@headed(
    "What to report",
    option(
        "--attempt",
        "attempt_number",
        type=Whole(0),
        help="Report this attempt of the run.",
        show_default="the last one",
    ),
    option(
        "--steps",
        metavar="A:B",
        default=":",
        callback=_step_range,
        help="Use only the steps from A to B - 1.",
        show_default="all",
    ),
    option("--include-warmup", is_flag=True, help="Use the warm-up steps, too."),
)
@headed(
    "How to read it",
    option(
        "--memory",
        metavar="SIZE",
        help="Use at most this much memory for the tables of the run, like 8GiB; leave out the largest files beyond "
        "it.",
        show_default="2GiB",
    ),
    option(
        "--config",
        "config_file",
        type=PATH,
        help="Read thresholds from the tables [diagnosis] and [report] of this TOML file.",
        show_default="none",
    ),
)
@headed(
    "Output",
    option(
        "--ranks",
        metavar="LIST",
        callback=_rank_list,
        help="Show only these ranks, like 0,4-7; the figures still use all of them.",
        show_default="those that matter",
    ),
    option("--json", "as_json", is_flag=True, help="Print the summary as JSON."),
)
def command(
    run: Path | None,
    attempt_number: int | None,
    steps: tuple[int | None, int | None],
    include_warmup: bool,
    ranks: frozenset[int] | None,
    as_json: bool,
    memory: str | None,
    config_file: Path | None,
) -> None:
    """Say why RUN is slow, and write RUN/summary.json and RUN/report.html.

    Without RUN it takes the newest run in runs. RUN/attempt-0 is the first attempt of RUN.

    Under srun or mpiexec, the processes share the work.

    Exit codes: 0 healthy; 1 something is wrong with the run or with its traces (missing, damaged, not closed); 2 bad
    input; 3 cannot tell.
    """
    selection = Selection(include_warmup=include_warmup, first=steps[0], stop=steps[1])
    with team() as processes:
        settings = load_config(file=config_file, environ=process_environ(), options={"report": {"memory": memory}})
        directory, attempt = _chosen(run, attempt_number, is_shown=_is_first(processes) and not as_json)
        if _is_first(processes):
            warn_of_old_hdf5(directory.path)
        with shown_progress(is_shown=_is_first(processes)) as stage, _with_outcome(attempt):
            analysis = _analyzed(directory, attempt, selection, settings, stage, processes)
    assert analysis is not None  # only the first process comes here
    summary = analysis.summary
    shown = sorted(ranks & set(summary.world.ranks)) if ranks is not None else None
    if shown == []:
        raise UsageError(
            f"--ranks names no rank of this run, which has {len(summary.world.ranks)}, up to {summary.world.ranks[-1]}"
        )
    progress = _progress(attempt, summary)
    written = _write(directory, analysis, progress)
    if as_json:
        click.echo(json_text(summary.to_json()), nl=False)
    else:
        print_report(_console(), summary, ranks=shown, progress=progress)
        if written:
            click.echo(f"\nwritten: {printable(' '.join(map(str, written)))}")
    if not summary.is_whole or summary.verdict.findings:
        raise SystemExit(EXIT_WARNING)
    if summary.verdict.mode == Mode.CANNOT_TELL:
        raise SystemExit(EXIT_CANNOT_TELL)


def _is_first(processes: Team | None) -> bool:
    return processes is None or processes.rank == 0


@contextmanager
def _with_outcome(attempt: Attempt) -> Iterator[None]:
    """Add to an error why there is nothing to report, if the training itself recorded that."""
    try:
        yield
    except (TraceError, CannotTell) as error:
        result = read_result_record(attempt, [])
        if not result.cause:
            raise
        who = ", ".join(f"rank {row.rank}" for row in result.memory)
        raise type(error)(f"{who}: {result.outcome} ({result.cause}); {error}") from error


def _analyzed(
    directory: RunDirectory,
    attempt: Attempt,
    selection: Selection,
    settings: Config,
    begin_stage: Callable[[str], Tell],
    processes: Team | None,
) -> Analysis | None:
    """Analyse a run; a bug in hpcpace becomes one sentence that no script can take for a finding.

    Raises:
        NotEnoughMemory: the steps of the selection take more memory than there is.
        ReportError: hpcpace itself is at fault.
    """
    keep_freed_memory()
    try:
        return analyze(directory, attempt, selection, settings, begin_stage=begin_stage, team=processes)
    except (MemoryError, NotEnoughMemory) as error:
        raise _of_memory(error, directory, selection, processes) from error
    except HpcpaceError:
        raise
    except Exception as error:  # the boundary of everything that is computed from files
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ReportError(
            f"a bug in hpcpace ended the report on {directory.path} ({type(error).__name__}: {error}; "
            f"{Path(place.filename).name}:{place.lineno}): please report it, with the run if you can"
        ) from error


def _of_memory(
    error: MemoryError | NotEnoughMemory, directory: RunDirectory, selection: Selection, processes: Team | None
) -> NotEnoughMemory:
    """Return what says how to report a run that takes more memory than there is."""
    reason = str(error) or "memory ran out"
    bounds = ("" if bound is None else str(bound) for bound in (selection.first, selection.stop))
    what = "its steps" if (steps := ":".join(bounds)) == ":" else f"its steps {steps}"
    more = (
        "several nodes, `srun -N M -n N" if processes is None else "more nodes or fewer processes each, `srun -N M -n N"
    )
    return NotEnoughMemory(
        f"not enough memory to report {directory.path} with {what} ({reason}): report fewer steps at a time with "
        f"`--steps A:B`, share them out over {more} hpcpace report RUN`, or allow more memory (ulimit -v, --mem)"
    )


def _progress(attempt: Attempt, summary: Summary) -> str:
    """Return how far an attempt is if it runs; empty if not. The summary has none of it: it is the same at any time."""
    if summary.end is not None or not summary.cut_off.not_closed:
        return ""
    return progress_words(attempt, max(summary.steps.num_seen, summary.steps.last + 1))


def _write(directory: RunDirectory, analysis: Analysis, progress: str) -> list[Path]:
    """Write the summary and the page into the run that was read, and return the files that were written."""
    summary, verdict = analysis.summary, main_verdict(analysis.summary.verdict)
    contents: list[tuple[Path, Callable[[], str]]] = [
        (directory.summary_json, lambda: json_text(summary.to_json())),
        (
            directory.report_html,
            lambda: page(summary, verdict, analysis.plots, progress=progress),
        ),
    ]
    written = []
    for path, content in contents:
        try:
            directory.write(path.name, content())
        except OSError as error:
            place = printable(str(path))
            click.echo(f"hpcpace: warning: cannot write {place} ({error.strerror}): the run stays without it", err=True)
        else:
            written.append(path)
    return written


def _chosen(path: Path | None, number: int | None, *, is_shown: bool) -> tuple[RunDirectory, Attempt]:
    """Return the run and the attempt to report; of a folder of runs, list them if `is_shown`.

    Raises:
        TraceError: there is no such run or attempt, or the path is a folder of runs.
    """
    if path is None:
        try:
            path = newest_run(find_runs(RUNS))
        except OSError:
            path = None
        if path is None:
            raise TraceError(f"no run in {RUNS}: name a run directory, the folder that holds attempt-0")
    try:
        named = open_named_run(path)
    except TraceError:
        if is_shown and path.is_dir() and (rows := rows_in(path)):
            show_runs(rows, path)
            raise TraceError(f"{path} is a folder of runs: name one of them") from None
        raise
    if named.attempt is not None and number not in (None, named.attempt):
        raise UsageError(f"{path} is attempt {named.attempt}, and --attempt is {number}: give one of them")
    return named.directory, _attempt(named.directory, named.attempt if number is None else number)


def _attempt(directory: RunDirectory, number: int | None) -> Attempt:
    if number is None:
        return directory.last_attempt()
    attempts = directory.attempts()
    if number not in [attempt.number for attempt in attempts]:
        raise TraceError(
            f"no attempt {number} in {directory.path}: it has {', '.join(str(a.number) for a in attempts)}"
        )
    return directory.attempt(number)


def _console() -> Console:
    # A fixed width in logs keeps two reports comparable line by line.
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else MAX_WIDTH
    if isinstance(sys.stdout, io.TextIOWrapper):  # a job's locale may be ASCII, and names of hosts and folders more
        sys.stdout.reconfigure(errors="backslashreplace")
    # Without markup, since names of hosts come from files and may have brackets.
    return Console(width=min(max(columns, MIN_WIDTH), MAX_WIDTH), highlight=False, emoji=False, markup=False)
