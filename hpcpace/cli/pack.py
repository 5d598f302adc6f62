"""`hpcpace pack RUN`: a few trace files in place of one per rank."""

from __future__ import annotations

import time
from pathlib import Path

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.foreign import warn_of_old_hdf5
from hpcpace.cli.options import PATH, Whole, headed, option, verbose
from hpcpace.cli.problems import warn
from hpcpace.cli.progress import shown_progress
from hpcpace.config import ReportConfig
from hpcpace.core.errors import EXIT_WARNING, ConfigError, TraceError
from hpcpace.core.rundir import open_named_run
from hpcpace.core.text import format_bytes, parse_size, plural, printable
from hpcpace.trace.packing import PackPlan, PackResult, pack_attempt


@click.command(cls=Command)
@click.argument("run", type=PATH)
@headed(
    "What to pack",
    option("--attempt", "attempt_number", type=Whole(0), help="Pack only this attempt.", show_default="all"),
    option("--ended", is_flag=True, help="Pack ranks that wrote a short time ago: the job has ended."),
    option("--keep", is_flag=True, help="Keep the files of the ranks."),
)
@headed(
    "Sizes",
    option(
        "--size",
        metavar="SIZE",
        default="1GiB",
        show_default=True,
        help="Begin another pack when the files of its ranks have this size together.",
    ),
    option(
        "--ranks-per-file",
        type=Whole(1),
        default=512,
        show_default=True,
        help="Put at most this many ranks into one pack.",
    ),
    option("--memory", metavar="SIZE", default="2GiB", show_default=True, help="Use about this much memory."),
)
@headed("Output", verbose)
def command(
    run: Path,
    attempt_number: int | None,
    size: str,
    ranks_per_file: int,
    keep: bool,
    ended: bool,
    memory: str,
    is_verbose: bool,
) -> None:
    """Put the trace files of all ranks of RUN into a few, and remove them when these are verified.

    All commands read packs like the files of the ranks. Exit codes: 0 fine; 1 some files could not be packed and stay
    as they are; 2 bad input, or the run is still being written.
    """
    plan = PackPlan(
        size_bytes=_size(size),
        most_ranks=ranks_per_file,
        keep=keep,
        has_ended=ended,
        memory_bytes=ReportConfig(memory=memory).memory_bytes,
    )
    directory = open_named_run(run).directory
    warn_of_old_hdf5(run)
    attempts = [one for one in directory.attempts() if attempt_number in (None, one.number)]
    if not attempts:
        raise TraceError(f"no attempt {attempt_number} in {run}")
    has_kept = False
    for attempt in attempts:
        begin_s = time.monotonic()
        with shown_progress() as begin_stage:
            result = pack_attempt(attempt, plan, begin_stage=begin_stage)
        warn(result.kept, is_verbose=is_verbose)
        click.echo(_line(printable(str(attempt.path)), result, time.monotonic() - begin_s))
        has_kept |= bool(result.kept)
    if has_kept:
        raise SystemExit(EXIT_WARNING)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--size: {error}") from error


def _line(path: str, result: PackResult, taken_s: float) -> str:
    if not result.packs and not result.removed:
        return f"{path}: nothing to pack: {plural(result.files_after, 'file')}, {format_bytes(result.bytes_after)}"
    ratio = result.bytes_after / result.bytes_before if result.bytes_before else 1.0
    return (
        f"{path}: {plural(result.num_ranks, 'rank')} in {plural(len(result.packs), 'pack')}: {result.files_before} to "
        f"{plural(result.files_after, 'file')}, {format_bytes(result.bytes_before)} to "
        f"{format_bytes(result.bytes_after)} ({ratio:.2f} times), {taken_s:.1f} s"
    )
