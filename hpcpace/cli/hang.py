"""`hpcpace hang`: which ranks hold up which others, in what, and since when."""

from __future__ import annotations

from pathlib import Path

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.hang_dumps import DumpOptions, dump_options, report_dumps
from hpcpace.cli.hang_run import report_run
from hpcpace.cli.options import PATH
from hpcpace.core.errors import TraceError, UsageError
from hpcpace.core.rundir import RUNS, find_runs, open_named_run
from hpcpace.diagnosis.run_state import newest_run


@click.command(cls=Command)
@click.argument("paths", metavar="[RUN | DUMPS...]", nargs=-1, type=PATH)
@dump_options
def command(
    paths: tuple[Path, ...],
    ras: Path | None,
    span_s: float,
    timeline: Path | None,
    as_json: bool,
    is_verbose: bool,
) -> None:
    """Say which ranks hold up a job that no longer moves, in which operation, and since when.

    RUN is a run of hpcpace, also one that goes on; without it, the newest run in runs. DUMPS are Flight Recorder dumps
    of PyTorch: a folder of them, or files, one a rank.

    Exit codes: 0 nothing hangs; 1 the job hangs, or a file was left out; 2 bad input; 3 cannot tell
    why it hangs, or ranks left no record.
    """
    paths = paths or (_newest(),)
    if _is_run(paths):
        if ras is not None or timeline is not None:
            raise UsageError(f"{paths[0]} is a run of hpcpace: --ras and --timeline go with Flight Recorder dumps")
        raise SystemExit(report_run(paths[0], as_json=as_json, is_verbose=is_verbose))
    options = DumpOptions(ras=ras, timeline=timeline, span_s=span_s, as_json=as_json, is_verbose=is_verbose)
    raise SystemExit(report_dumps(paths, options))


def _newest() -> Path:
    try:
        newest = newest_run(find_runs(RUNS))
    except OSError:
        newest = None
    if newest is None:
        raise TraceError(f"no run in {RUNS}: name a run, or a folder of Flight Recorder dumps")
    return newest


def _is_run(paths: tuple[Path, ...]) -> bool:
    if len(paths) != 1:
        return False
    try:
        open_named_run(paths[0])
    except TraceError:  # it names the runs in a folder, which has no dumps then
        if _has_runs(paths[0]):
            raise
        return False
    return True


def _has_runs(path: Path) -> bool:
    try:
        return next(find_runs(path), None) is not None
    except OSError:
        return False
