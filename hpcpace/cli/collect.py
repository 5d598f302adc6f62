"""`hpcpace collect`: bring the traces of killed ranks home from the node-local disk of this node."""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, option, verbose
from hpcpace.config_sources import load_config
from hpcpace.core.codec import read_json
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import EXIT_WARNING, UsageError
from hpcpace.core.rundir import Attempt, open_named_run
from hpcpace.core.text import folded, plural, printable
from hpcpace.observe.node_local import AUTO, LeftTrace, bring_left_traces_home, candidates


@click.command(cls=Command)
@option(
    "--trace-dir",
    type=PATH,
    help="Look in this folder.",
    show_default="that of the run's settings, SLURM_TMPDIR, TMPDIR, /tmp and /var/tmp",
)
@option("--config", "config_file", type=PATH, help="Read settings from this TOML file.", show_default="none")
@option("--quiet", is_flag=True, help="Say nothing where no trace is left.")
@verbose
@click.argument("run", type=PATH)
def command(trace_dir: Path | None, config_file: Path | None, quiet: bool, is_verbose: bool, run: Path) -> None:
    """Bring traces of RUN home from the disk of this node, whose ranks were killed.

    A rank that ends in any other way does that itself. Call it once per node, after the ranks:
    srun --ntasks-per-node=1 hpcpace collect RUN
    """
    config = load_config(file=config_file, environ=process_environ())
    attempts = open_named_run(run).directory.attempts()
    folders = [trace_dir] if trace_dir is not None else _folders(attempts)
    homes = [attempt.trace_dir for attempt in attempts]
    passed_over: Counter[str] = Counter()
    found = [
        trace
        for folder in folders
        if trace_dir is not None or folder.is_dir()
        for trace in _collected(folder, homes, config.trace.copy_timeout_s, passed_over)
    ]
    brought = [f"{trace.path} -> {trace.destination}" for trace in found if not trace.problem]
    left = [f"{trace.path} stays: {trace.problem}" for trace in found if trace.problem]
    for sentences in (brought, left):
        for line in folded(sentences, rest="--verbose", is_verbose=is_verbose):
            click.echo(line, err=sentences is left)
    if not found and not quiet:
        click.echo(printable(f"no trace of {run} is left on {socket.gethostname()}"))
    if not quiet:
        for reason, count in sorted(passed_over.items()):
            click.echo(f"left alone: {plural(count, 'trace')}: {printable(reason)}")
    if left:
        click.echo(f"hpcpace: {plural(len(left), 'trace')} could not be copied", err=True)
        raise click.exceptions.Exit(EXIT_WARNING)


def _folders(attempts: list[Attempt]) -> list[Path]:
    """Return the folders in which ranks of a run may have left traces on this node."""
    named = [Path(folder) for attempt in attempts if (folder := _trace_dir(attempt))]
    found = [*named, *(folder for _, folder in candidates(process_environ()))]
    return list(dict.fromkeys(folder for folder in found if folder != AUTO))


def _trace_dir(attempt: Attempt) -> str:
    """Return trace.trace_dir of an attempt; empty where it is not set, or run.json cannot be read."""
    named = read_json(attempt, attempt.run_json.name, lambda record: record["config"]["trace"]["trace_dir"], [])
    return named if isinstance(named, str) and "\0" not in named else ""


def _collected(folder: Path, homes: list[Path], timeout_s: float, passed_over: Counter[str]) -> list[LeftTrace]:
    try:
        return bring_left_traces_home(folder, homes, timeout_s=timeout_s, passed_over=passed_over)
    except OSError as error:
        raise UsageError(f"cannot look for traces in {folder}: {error.strerror}; name another --trace-dir") from error
