"""`hpcpace timeline RUN`: some steps of a run as a file for Perfetto."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path

import click

from hpcpace.cli.chosen_run import chosen_run
from hpcpace.cli.commands import Command
from hpcpace.cli.foreign import warn_of_old_hdf5
from hpcpace.cli.options import PATH, Whole, headed, option, rank_set, step_range, verbose
from hpcpace.cli.problems import warn
from hpcpace.cli.progress import shown_progress
from hpcpace.config import ReportConfig
from hpcpace.core.errors import EXIT_WARNING, UsageError
from hpcpace.core.rundir import check_target
from hpcpace.core.text import format_bytes, plural, printable
from hpcpace.report.terminal import MAX_WIDTH, MIN_WIDTH
from hpcpace.runs.timeline.run_file import WrittenTimeline, write_timeline
from hpcpace.runs.timeline.steps import MOST_SLICES, Wanted


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
        "--attempt",
        "attempt_number",
        type=Whole(0),
        help="Show this attempt of the run.",
        show_default="the last one",
    ),
)
@headed(
    "Output",
    option("-o", "--output", "target", type=PATH, help="Write this file.", show_default="RUN/timeline.pftrace"),
    option(
        "--slices",
        "most_slices",
        type=Whole(1, 100_000_000),
        default=MOST_SLICES,
        show_default=True,
        help="Write at most about this many slices.",
    ),
    option("--memory", metavar="SIZE", default="2GiB", show_default=True, help="Use about this much memory."),
    verbose,
)
def command(
    run: Path | None,
    steps: tuple[int | None, int | None] | None,
    ranks: frozenset[int] | None,
    attempt_number: int | None,
    target: Path | None,
    most_slices: int,
    memory: str,
    is_verbose: bool,
) -> None:
    """Write some steps of RUN as a file for Perfetto, https://ui.perfetto.dev, to look at them in a browser.

    Each rank is a process, with its phases, its collectives and its waits on the common clock; arrows lead from the
    rank that came last to those that waited for it. Without RUN it takes the newest run in runs.

    Exit codes: 0 fine; 1 the file lacks something, such as ranks without a trace; 2 bad input; 3 there is no step.
    """
    check_target(target, [run], "-o")
    first, stop = steps or (None, None)
    directory, attempt = chosen_run(run, attempt_number, is_shown=True)
    warn_of_old_hdf5(directory.path)
    wanted = Wanted(first=first, stop=stop, is_range=steps is not None, ranks=ranks, most_slices=most_slices)
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


def fitted(sentence: str) -> str:
    """Return a sentence in lines as wide as the terminal; in a log it is one line."""
    if not sys.stdout.isatty():
        return sentence
    columns = min(max(shutil.get_terminal_size().columns, MIN_WIDTH), MAX_WIDTH)
    return textwrap.fill(sentence, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


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
