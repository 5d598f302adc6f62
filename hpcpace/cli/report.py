"""`hpcpace report` says where the steps of a run went; `timeline` writes some for Perfetto."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import (
    PATH,
    Whole,
    collect_less_garbage,
    fitted,
    headed,
    option,
    rank_set,
    show,
    shown_progress,
    step_range,
    verbose,
    warn,
    warn_of_old_hdf5,
)
from hpcpace.core.config import Config
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import (
    EXIT_CANNOT_TELL,
    EXIT_WARNING,
    CannotTell,
    HpcpaceError,
    NotEnoughMemory,
    ReportError,
    TraceError,
    UsageError,
)
from hpcpace.core.rundir import RUNS, Attempt, RunDirectory, check_target, open_named_run
from hpcpace.core.settings import load_config
from hpcpace.core.text import format_bytes, one_line, plural, printable
from hpcpace.diagnosis.settings import ReportConfig
from hpcpace.world.team import Team, team

# What analyses a run loads within the functions that need it: a run that does not exist is refused without it.
if TYPE_CHECKING:
    from hpcpace.cli.options import Tell
    from hpcpace.diagnosis.analyze import Analysis
    from hpcpace.diagnosis.measure import Selection
    from hpcpace.diagnosis.records import ReadProbe
    from hpcpace.diagnosis.summary import Summary
    from hpcpace.report.document import Document
    from hpcpace.runs.timeline.run_file import WrittenTimeline


_MAX_ROWS = 16
_SMALL_BYTES = 1 << 21
"""Speed: the traces of a run that is analysed by one thread before others have started."""


def chosen_run(path: Path | None, number: int | None, *, is_shown: bool) -> tuple[RunDirectory, Attempt]:
    """Return the run and the attempt that a user means; of a folder of runs, list them if `is_shown`.

    Args:
        path: what the user named; None takes the newest run in runs.
        number: of the attempt; None takes the last one.
        is_shown: whether a list is printed.

    Raises:
        TraceError: there is no such run or attempt, or the path is a folder of runs.
    """
    if path is None:
        from hpcpace.diagnosis.run_state import newest_run

        path = newest_run(RUNS)
        if path is None:
            raise TraceError(f"no run in {RUNS}: name a run directory, the folder that holds attempt-0")
    try:
        named = open_named_run(path)
    except TraceError:
        if is_shown and path.is_dir():
            from hpcpace.cli.runs import rows_in, show_runs

            if rows := rows_in(path):
                show_runs(rows[:_MAX_ROWS], path)
                more = f"; `hpcpace list` shows all {len(rows)}" if len(rows) > _MAX_ROWS else ""
                raise TraceError(f"{path} is a folder of runs: name one of them{more}") from None
        raise
    return named.directory, named.chosen_attempt(number)


@click.command(cls=Command)
@click.argument("run", type=PATH, required=False)
@headed(
    "What to show",
    option(
        "--steps",
        metavar="A:B",
        callback=step_range,
        help="Show the steps from A to B - 1.",
        show_default="the slowest step and two on each side",
    ),
    option(
        "--ranks",
        metavar="LIST",
        callback=rank_set,
        help="Show only these ranks, like 0,4-7; waits are still known from all of them.",
        show_default="all, or those that matter if they are too many",
    ),
    option(
        "--attempt", "attempt_number", type=Whole(0), help="Show this attempt of the run.", show_default="the last one"
    ),
)
@headed(
    "Output",
    option("-o", "--output", "target", type=PATH, help="Write this file.", show_default="RUN/timeline.pftrace"),
    option(
        "--slices",
        "most_slices",
        type=Whole(1, 100_000_000),
        show_default="250000",
        help="Write at most about this many slices.",
    ),
    option("--memory", metavar="SIZE", default="2GiB", help="Use about this much memory."),
    verbose,
)
def timeline_command(
    run: Path | None,
    steps: tuple[int | None, int | None] | None,
    ranks: frozenset[int] | None,
    attempt_number: int | None,
    target: Path | None,
    most_slices: int | None,
    memory: str,
    is_verbose: bool,
) -> None:
    """Write some steps of RUN as a file for Perfetto, https://ui.perfetto.dev, to look at them in a browser.

    Each rank is a process, with its phases, its collectives and its waits on the common clock; arrows lead from the
    rank that came last to those that waited for it. Without RUN it takes the newest run in runs.

    Exit codes: 0 fine; 1 the file lacks something, such as ranks without a trace; 2 bad input; 3 there is no step.
    """
    from hpcpace.runs.timeline.run_file import write_timeline
    from hpcpace.runs.timeline.tracks import MAX_SLICES, Wanted

    check_target(target, [run], "-o")
    first, stop = steps or (None, None)
    directory, attempt = chosen_run(run, attempt_number, is_shown=True)
    warn_of_old_hdf5(directory.path)
    most = most_slices or MAX_SLICES
    wanted = Wanted(first=first, stop=stop, is_range=steps is not None, ranks=ranks, most_slices=most)
    try:
        with shown_progress() as begin_stage:
            made = write_timeline(
                directory,
                attempt,
                wanted,
                target=target,
                memory_bytes=ReportConfig(memory=memory).memory_bytes,
                begin_stage=begin_stage,
            )
    except OSError as error:
        place = target or directory.timeline_pftrace
        raise UsageError(f"cannot write {place} ({error.strerror}): name another file with -o") from error
    warn(made.shown.problems, is_verbose=is_verbose)
    written, *sentences = timeline_lines(made)
    click.echo(written)
    for sentence in sentences:
        click.echo(fitted(sentence))
    if made.shown.problems:
        raise SystemExit(EXIT_WARNING)


def timeline_lines(made: WrittenTimeline) -> list[str]:
    """Return what was written, and how to open it."""
    shown, written = made.shown, made.written
    first, last = int(shown.step[0]), int(shown.step[-1])
    what = f"step {first}" if first == last else f"steps {first} to {last}"
    if shown.slowest is not None:
        what += f", around step {shown.slowest}, the slowest,"
    unfinished = []
    if shown.slowest is not None and shown.unfinished is not None:
        before = f"--steps {max(shown.unfinished - 2, 0)}:"
        unfinished = [f"not shown: operations of step {shown.unfinished} that never completed ({before} shows them)"]
    return [
        f"written: {printable(str(made.path))} ({format_bytes(written.num_bytes)})",
        f"{what} of {plural(len(shown.ranks), 'rank')}: {plural(written.num_slices, 'slice')}, "
        f"{plural(written.num_arrows, 'arrow')} from late ranks to those that waited",
        *unfinished,
        "open it at https://ui.perfetto.dev, which reads it in your browser and sends it nowhere",
    ]


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
        callback=step_range,
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
        "--topology",
        type=PATH,
        metavar="FILE",
        help="Take the leaf switches of the hosts from topology.conf, topology.yaml, the saved output of `scontrol "
        "show topology`, or a file of your own with `host leaf spine` on each line.",
        show_default="what Slurm told the job",
    ),
    option(
        "--shared-cores/--no-shared-cores",
        default=None,
        help="Look for other causes where ranks share cores, as for more ranks than cores on purpose.",
        show_default="what the run says",
    ),
    option(
        "--probe",
        "probe_file",
        type=PATH,
        help="Compare transfers with the probe of the hosts in this file.",
        show_default="the one saved with the run",
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
        callback=rank_set,
        help="Show only these ranks, like 0,4-7; the figures still use all of them.",
        show_default="those that matter",
    ),
    option("--json", "as_json", is_flag=True, help="Print the summary as JSON."),
    option(
        "--timeline", "has_timeline", is_flag=True, help="Write the steps around the slowest one for Perfetto, too."
    ),
    verbose,
)
def command(
    run: Path | None,
    attempt_number: int | None,
    steps: tuple[int | None, int | None],
    include_warmup: bool,
    probe_file: Path | None,
    ranks: frozenset[int] | None,
    as_json: bool,
    has_timeline: bool,
    memory: str | None,
    topology: Path | None,
    shared_cores: bool | None,
    config_file: Path | None,
    is_verbose: bool,
) -> None:
    """Say why RUN is slow, and write RUN/summary.json and RUN/report.html.

    Without RUN it takes the newest run in runs. RUN/attempt-0 is the first attempt of RUN.

    Under srun or mpiexec, the processes share the work.

    Exit codes: 0 healthy; 1 something is wrong with the run or with its traces (missing, damaged, not closed); 2 bad
    input; 3 cannot tell.
    """
    collect_less_garbage()
    if has_timeline:
        from hpcpace.runs.timeline.tracks import check_perfetto

        check_perfetto()
    probe = None
    if probe_file is not None:
        from hpcpace.diagnosis.records import read_probe_file

        probe = read_probe_file(probe_file)
    with team() as processes:
        is_first = processes is None or processes.rank == 0
        given = {"memory": memory, "topology": topology and str(topology), "shared_cores": shared_cores}
        settings = load_config(file=config_file, environ=process_environ(), options={"report": given})
        directory, attempt = chosen_run(run, attempt_number, is_shown=is_first and not as_json)
        if is_first:
            warn_of_old_hdf5(directory.path)

        from hpcpace.diagnosis.measure import Selection

        selection = Selection(include_warmup=include_warmup, first=steps[0], stop=steps[1])
        with shown_progress(is_shown=is_first) as stage, _with_outcome(attempt):
            analysis = _analyzed(directory, attempt, selection, settings, stage, processes, probe)
    assert analysis is not None  # only the first process comes here
    summary = analysis.summary
    shown = sorted(ranks & set(summary.world.ranks)) if ranks is not None else None
    if shown == []:
        raise UsageError(
            f"--ranks names no rank of this run, which has {len(summary.world.ranks)}, up to {summary.world.ranks[-1]}"
        )
    timeline = _timeline(directory, attempt, analysis, settings, is_shown=not as_json) if has_timeline else None
    document = _document(analysis, shown, _progress(attempt, summary), timeline)
    written = [*_write(directory, document), *([timeline] if timeline else [])]
    show(document, document.data, as_json=as_json, is_verbose=is_verbose)
    if written and not as_json:
        click.echo(f"\nwritten: {printable(' '.join(map(str, written)))}")
    if exit_code := _exit_code(summary):
        raise SystemExit(exit_code)


def _document(analysis: Analysis, ranks: list[int] | None, progress: str, timeline: Path | None) -> Document:
    from hpcpace.diagnosis.verdict import main_verdict
    from hpcpace.report.run_report import run_document

    return run_document(
        analysis.summary,
        main_verdict(analysis.summary.verdict),
        analysis.plots,
        ranks=ranks,
        progress=progress,
        timeline=timeline.name if timeline else "",
    )


def _exit_code(summary: Summary) -> int:
    from hpcpace.diagnosis.summary import Mode

    if not summary.is_whole or summary.verdict.findings:
        return EXIT_WARNING
    return EXIT_CANNOT_TELL if summary.verdict.mode == Mode.CANNOT_TELL else 0


@contextmanager
def _with_outcome(attempt: Attempt) -> Iterator[None]:
    """Add to an error why there is nothing to report, if the training itself recorded that."""
    try:
        yield
    except (TraceError, CannotTell) as error:
        from hpcpace.diagnosis.records import read_result_record

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
    probe: ReadProbe | None,
) -> Analysis | None:
    """Analyse a run; a bug in hpcpace becomes one sentence that no script can take for a finding.

    Raises:
        NotEnoughMemory: the steps of the selection take more memory than there is.
        ReportError: hpcpace itself is at fault.
    """
    from hpcpace.core.pool import in_one_thread, keep_freed_memory
    from hpcpace.diagnosis.analyze import analyze

    keep_freed_memory()
    try:
        with in_one_thread(attempt.trace_bytes() < _SMALL_BYTES):
            return analyze(
                directory, attempt, selection, settings, begin_stage=begin_stage, team=processes, probe=probe
            )
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
    from hpcpace.diagnosis.run_state import progress_words

    return progress_words(attempt, max(summary.steps.num_seen, summary.steps.last + 1))


def _timeline(
    directory: RunDirectory, attempt: Attempt, analysis: Analysis, settings: Config, *, is_shown: bool
) -> Path | None:
    """Write the steps around the slowest one for Perfetto; None, and a warning, where they cannot be shown."""
    from hpcpace.runs.timeline.run_file import write_timeline
    from hpcpace.runs.timeline.tracks import Wanted

    slow = analysis.plots.slow_step
    wanted = Wanted(around=slow.step if slow is not None else None)
    try:
        with shown_progress(is_shown=is_shown) as stage:
            return write_timeline(
                directory,
                attempt,
                wanted,
                target=None,
                memory_bytes=settings.of(ReportConfig).memory_bytes,
                begin_stage=stage,
            ).path
    except (UsageError, CannotTell, OSError) as error:
        warn([f"no timeline: {one_line(str(error))}"], is_verbose=False)
        return None


def _write(directory: RunDirectory, document: Document) -> list[Path]:
    """Write the summary and the page into the run that was read, and return the files that were written."""
    from hpcpace.report.html import html_page

    contents: list[tuple[Path, Callable[[], str]]] = [
        (directory.summary_json, lambda: document.data),
        (directory.report_html, lambda: html_page(document)),
    ]
    written = []
    for path, content in contents:
        try:
            directory.write(path.name, content())
        except OSError as error:
            warn([f"cannot write {path} ({error.strerror}): the run stays without it"], is_verbose=False)
        else:
            written.append(path)
    return written
