"""`hpcpace import`: read what other tools recorded of a job."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcpace.cli.commands import Command, Group
from hpcpace.cli.hang import DumpOptions, dump_options, report_dumps
from hpcpace.cli.options import PATH, Tell, option, shown_progress, verbose, warn
from hpcpace.core.errors import EXIT_WARNING, UsageError
from hpcpace.core.rundir import default_run_path
from hpcpace.core.text import plural, printable, shortened

if TYPE_CHECKING:
    from hpcpace.runs.imports.imported_run import Import


@click.group(cls=Group)
def command() -> None:
    """Read what other tools recorded of a job."""


_MAX_NOTES, _MAX_NOTE_LETTERS = 12, 460
_STEPS = {
    "kineto": "prof.step() in the loop that is profiled",
    "wia": "none in the file",
    "nsys": "NVTX ranges named step 1, step 2, ...",
}

run_dir = option("--run-dir", type=PATH, help="Write the run into this new folder.", show_default="runs/TIME-TOOL")


@command.command("kineto", cls=Command, short_help="Read profiles of PyTorch's profiler.")
@click.argument("paths", metavar="DIR...", nargs=-1, required=True, type=PATH)
@run_dir
@verbose
def kineto(paths: tuple[Path, ...], run_dir: Path | None, is_verbose: bool) -> None:
    """Make a run of the profiles in DIR that torch.profiler wrote, one file a rank, .json or .json.gz.

    DIR is a folder, or single files. What a profile does not say is listed in run.json and in reports. Exit codes: 0
    fine; 1 a file was left out; 2 bad input.
    """
    from hpcpace.runs.imports.kineto import import_kineto

    _import("kineto", run_dir, lambda progress: import_kineto(paths, progress=progress), is_verbose=is_verbose)


@command.command("wia", cls=Command, short_help="Read a trace of ByteDance's what-if analysis.")
@click.argument("path", metavar="FILE", type=PATH)
@run_dir
@verbose
def wia(path: Path, run_dir: Path | None, is_verbose: bool) -> None:
    """Make a run of FILE, a trace in the format of ByteDance-Seed/StragglerAnalysis.

    FILE is a parquet file, the folder of one, or the tool's timeline for Chrome. A rank of the run is a worker of the
    trace: a data-parallel rank and stage. Exit codes: 0 fine; 2 bad input.
    """
    try:
        from hpcpace.runs.imports.wia_ranks import import_wia
    except ImportError as error:
        raise UsageError(f"this needs a package ({error}): pip install 'hpcpace[import]'") from error

    _import("wia", run_dir, lambda progress: import_wia(path, progress=progress), is_verbose=is_verbose)


@command.command("nsys", cls=Command, short_help="Read an sqlite export of Nsight Systems.")
@click.argument("path", metavar="FILE", type=PATH)
@run_dir
@verbose
def nsys(path: Path, run_dir: Path | None, is_verbose: bool) -> None:
    """Make a run of FILE, which `nsys export --type sqlite` wrote. A rank of the run is a GPU of a process.

    Exit codes: 0 fine; 2 bad input.
    """
    from hpcpace.runs.imports.nsys import import_nsys

    _import("nsys", run_dir, lambda progress: import_nsys(path, progress=progress), is_verbose=is_verbose)


@command.command("flight-recorder", cls=Command, short_help="Read dumps of PyTorch's Flight Recorder.")
@click.argument("paths", metavar="DIR...", nargs=-1, required=True, type=PATH)
@dump_options
def flight_recorder(
    paths: tuple[Path, ...], ras: Path | None, span_s: float, timeline: Path | None, as_json: bool, is_verbose: bool
) -> None:
    """Read the dumps of PyTorch's Flight Recorder in DIR: what they hold, what hangs, and the last second of the job.

    DIR is a folder with one file a rank, pickles or JSON, or such files. Exit codes: 0 nothing hangs; 1 the job hangs,
    or a file was left out; 2 bad input; 3 cannot tell why it hangs, or ranks left no dump.
    """
    options = DumpOptions(ras=ras, timeline=timeline, span_s=span_s, as_json=as_json, is_verbose=is_verbose)
    raise SystemExit(report_dumps(paths, options))


def _import(tool: str, run_dir: Path | None, read: Callable[[Tell], Import], *, is_verbose: bool) -> None:
    from hpcpace.runs.imports.imported_run import check_target, write_run

    path = run_dir or default_run_path(tool, {})
    check_target(path)
    begin_s = time.monotonic()
    with shown_progress() as begin_stage:
        found = read(begin_stage(f"reading {tool}"))
        try:
            attempt = write_run(path, found)
        except OSError as error:
            raise UsageError(
                f"cannot write {path}: {error.strerror or error}; choose another folder with --run-dir"
            ) from error
    shown = printable(str(path))
    warn(found.problems, is_verbose=is_verbose)
    facts = f"{plural(len(found.ranks), 'rank')}, {plural(found.num_steps, 'step')}, {plural(found.num_rows, 'row')}"
    click.echo(f"{shown}: {facts} in {time.monotonic() - begin_s:.1f} s, recorded by {printable(found.source.tool)}")
    if found.source.unknown:
        click.echo(f"unknown: {shortened(', '.join(found.source.unknown), max_letters=_MAX_NOTE_LETTERS)}")
    for note in found.source.notes[:_MAX_NOTES]:
        click.echo(f"note: {shortened(note, max_letters=_MAX_NOTE_LETTERS)}")
    if len(found.source.notes) > _MAX_NOTES:
        click.echo(f"note: {plural(len(found.source.notes) - _MAX_NOTES, 'more note')} in run.json")
    if found.num_steps:
        click.echo(f"next: hpcpace report {shown}")
    else:
        file = attempt.trace_file(found.ranks[0].header.rank)
        click.echo(f"next: hpcpace dump {printable(str(file))}; reports need steps ({_STEPS[tool]})")
    if found.problems:
        raise SystemExit(EXIT_WARNING)
