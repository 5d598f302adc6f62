"""`hpcpace import`: read what other tools recorded of a job."""

from __future__ import annotations

from pathlib import Path

import click

from hpcpace.cli.commands import Command, Group
from hpcpace.cli.hang_dumps import DumpOptions, dump_options, report_dumps
from hpcpace.cli.options import PATH


@click.group(cls=Group)
def command() -> None:
    """Read what other tools recorded of a job."""


@command.command("flight-recorder", cls=Command, short_help="Read dumps of PyTorch's Flight Recorder.")
@click.argument("paths", metavar="DIR...", nargs=-1, required=True, type=PATH)
@dump_options
def flight_recorder(
    paths: tuple[Path, ...], ras: Path | None, span_s: float, timeline: Path | None, as_json: bool
) -> None:
    """Read the dumps of PyTorch's Flight Recorder in DIR: what they hold, what hangs, and the last second of the job.

    DIR is a folder with one file a rank, pickles or JSON, or such files. Exit codes: 0 nothing hangs; 1 the job hangs,
    or a file was left out; 2 bad input; 3 cannot tell why it hangs, or ranks left no dump.
    """
    options = DumpOptions(ras=ras, timeline=timeline, span_s=span_s, as_json=as_json)
    raise SystemExit(report_dumps(paths, options))
