"""`hpcpace hang`: which ranks hold up which others, in what, and since when."""

from __future__ import annotations

from pathlib import Path

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.hang_dumps import DumpOptions, dump_options, report_dumps
from hpcpace.cli.hang_run import report_run
from hpcpace.cli.options import PATH
from hpcpace.errors import TraceError, UsageError
from hpcpace.run_search import open_named_run


@click.command(cls=Command)
@click.argument("paths", metavar="RUN|DUMPS...", nargs=-1, required=True, type=PATH)
@dump_options
def command(paths: tuple[Path, ...], ras: Path | None, span_s: float, timeline: Path | None, as_json: bool) -> None:
    """Say which ranks hold up a job that no longer moves, in which operation, and since when.

    RUN is a run of hpcpace, also one that goes on. DUMPS are Flight Recorder dumps of PyTorch: a folder of them, or
    files, one a rank. Exit codes: 0 nothing hangs; 1 the job hangs, or a file was left out; 2 bad input; 3 cannot tell
    why it hangs, or ranks left no record.
    """
    if _is_run(paths):
        if ras is not None or timeline is not None:
            raise UsageError(f"{paths[0]} is a run of hpcpace: --ras and --timeline go with Flight Recorder dumps")
        raise SystemExit(report_run(paths[0], as_json=as_json))
    options = DumpOptions(ras=ras, timeline=timeline, span_s=span_s, as_json=as_json)
    raise SystemExit(report_dumps(paths, options))


def _is_run(paths: tuple[Path, ...]) -> bool:
    if len(paths) != 1:
        return False
    try:
        open_named_run(paths[0])
    except TraceError:
        return False
    return True
