"""`hpcpace task-prolog`: have Slurm trace the jobs of a site's roll-out, without a line in any of them."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, option
from hpcpace.config_sources import SITE_FILE_VARIABLE, load_config
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import UsageError
from hpcpace.core.redaction import Redaction
from hpcpace.core.rundir import default_run_path
from hpcpace.core.text import printable
from hpcpace.observe.launch.launch import find_launch, has_launch, site_launch

# Names of jobs become names of folders, which users then type.
_NOT_IN_NAMES = re.compile(r"[^\w .,:+@=~-]")
_MAX_NAME, _MAX_WARNING = 100, 1000


class _NeverFails(Command):
    """A command whose wrong options do not end the task either."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; what is wrong with it is a warning."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            _say(_warning(error.format_message(), process_environ()))
            raise click.exceptions.Exit(0) from error


@click.command(cls=_NeverFails)
@option(
    "--run-dir",
    type=PATH,
    help="Write runs into this folder, as JOB.STEP-NAME.",
    show_default="runs in the job's folder",
)
def command(run_dir: Path | None) -> None:
    """Print the environment that traces a task, if the site's settings say that its job is traced.

    For Slurm's TaskProlog, which reads lines like "export NAME=VALUE". It prints nothing where trace.enabled does not
    hold for the job, or the user says no, and never fails: that would end the task.
    """
    environ = process_environ()
    try:
        lines = _lines(environ, Path("runs") if run_dir is None else run_dir)
    except Exception as error:  # the boundary to somebody else's task, which goes on untraced
        lines = _warning(str(error) or type(error).__name__, environ)
    _say(lines)


def _lines(environ: Mapping[str, str], base: Path) -> list[str]:
    """Return what Slurm is to put into the environment of the task; nothing where its job is not traced."""
    outer = find_launch(environ)
    # A record that cannot be read may be that of a user who traces the job by another version of hpcpace.
    is_somebody_elses = outer.is_requested if outer is not None else has_launch(environ)
    if is_somebody_elses or not load_config(environ=environ).trace.enabled:
        return []
    name = _NOT_IN_NAMES.sub("-", environ.get("SLURM_JOB_NAME", ""))[:_MAX_NAME].strip(".") or "job"
    launch = site_launch(default_run_path(name, environ, base=base).absolute(), name, environ)
    if outer is not None:  # of the batch script: each of its steps is a run
        launch = dataclasses.replace(launch, had_python_path=outer.had_python_path)
    # The settings of its file hold in the task, too.
    changes = {**launch.changes(environ), SITE_FILE_VARIABLE: environ.get(SITE_FILE_VARIABLE)}
    for variable, value in changes.items():
        if value is not None and "\n" in value:
            raise UsageError(f"{variable} has a line break, which a TaskProlog cannot hand on")
    return [f"export {variable}={value}" for variable, value in changes.items() if value is not None]


def _warning(message: str, environ: Mapping[str, str]) -> list[str]:
    """Return the line that tells the user why nothing is recorded; one task says it for all."""
    if environ.get("SLURM_PROCID", "0") != "0":
        return []
    message = Redaction.of(environ, sys.argv).text(" ".join(message[:_MAX_WARNING].split()))
    return [f"print hpcpace: warning: nothing is recorded: {printable(message)}"]


def _say(lines: list[str]) -> None:
    """Print lines as bytes, as which variables come and go: they need not be text in any encoding."""
    content = "".join(f"{line}\n" for line in lines)
    try:
        click.echo(content.encode(sys.getfilesystemencoding(), "surrogateescape"), nl=False)
    except UnicodeEncodeError:  # of a warning, in letters that the locale does not have
        click.echo(content.encode("ascii", "backslashreplace"), nl=False)
    except OSError:  # Slurm does not listen any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
