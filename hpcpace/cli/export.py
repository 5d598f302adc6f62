"""`hpcpace export` writes the data of a run as tables; `hpcpace import` reads what other tools recorded of a job."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcpace.cli.commands import Command, Group
from hpcpace.cli.hang import DumpOptions, dump_options, report_dumps
from hpcpace.cli.options import (
    PATH,
    Tell,
    Whole,
    headed,
    memory,
    opened_run,
    option,
    rank_set,
    shown_progress,
    step_range,
    verbose,
    warn,
)
from hpcpace.core.errors import EXIT_WARNING, UsageError, check_package
from hpcpace.core.rundir import default_run_path
from hpcpace.core.text import plural, printable, shortened

if TYPE_CHECKING:
    from hpcpace.frames.run import Run
    from hpcpace.runs.imports.imported_run import Import


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

    The tables have the steps and ranks that `hpcpace report` uses. `hpcpace help frames` describes their columns. Needs
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


@click.group(cls=Group)
def import_command() -> None:
    """Read what other tools recorded of a job."""


_MAX_NOTES, _MAX_NOTE_LETTERS = 12, 460
_STEPS = {
    "kineto": "prof.step() in the loop that is profiled",
    "wia": "none in the file",
    "nsys": "NVTX ranges named step 1, step 2, ...",
}

run_dir = option("--run-dir", type=PATH, help="Write the run into this new folder.", show_default="runs/TIME-TOOL")


@import_command.command("kineto", cls=Command, short_help="Read profiles of PyTorch's profiler.")
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


@import_command.command("wia", cls=Command, short_help="Read a trace of ByteDance's what-if analysis.")
@click.argument("path", metavar="FILE", type=PATH)
@run_dir
@verbose
def wia(path: Path, run_dir: Path | None, is_verbose: bool) -> None:
    """Make a run of FILE, a trace in the format of ByteDance-Seed/StragglerAnalysis.

    FILE is a parquet file, the folder of one, or the tool's timeline for Chrome. A rank of the run is a worker of the
    trace: a data-parallel rank and stage. Exit codes: 0 fine; 2 bad input.
    """
    try:
        from hpcpace.runs.imports.wia import import_wia
    except ImportError as error:
        raise UsageError(f"this needs a package ({error}): pip install 'hpcpace[import]'") from error

    _import("wia", run_dir, lambda progress: import_wia(path, progress=progress), is_verbose=is_verbose)


@import_command.command("nsys", cls=Command, short_help="Read an sqlite export of Nsight Systems.")
@click.argument("path", metavar="FILE", type=PATH)
@run_dir
@verbose
def nsys(path: Path, run_dir: Path | None, is_verbose: bool) -> None:
    """Make a run of FILE, which `nsys export --type sqlite` wrote. A rank of the run is a GPU of a process.

    Exit codes: 0 fine; 2 bad input.
    """
    from hpcpace.runs.imports.nsys import import_nsys

    _import("nsys", run_dir, lambda progress: import_nsys(path, progress=progress), is_verbose=is_verbose)


@import_command.command("flight-recorder", cls=Command, short_help="Read dumps of PyTorch's Flight Recorder.")
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
