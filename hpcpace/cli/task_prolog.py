"""`hpcpace task-prolog`: have Slurm trace the jobs of a site's roll-out, without a line in any of them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, option
from hpcpace.config_sources import SITE_FILE_VARIABLE, load_config
from hpcpace.errors import HpcpaceError
from hpcpace.observe.launch import find_launch, site_launch
from hpcpace.quoting import printable
from hpcpace.redaction import Redaction
from hpcpace.rundir import default_run_path
from hpcpace.world.environment import process_environ


@click.command(cls=Command)
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
        outer = find_launch(environ)
        if not load_config(environ=environ).trace.enabled or (outer is not None and outer.is_requested):
            return
        base = Path("runs") if run_dir is None else run_dir
        name = environ.get("SLURM_JOB_NAME", "").replace("/", "-").strip(".") or "job"
        launch = site_launch(default_run_path(name, environ, base=base).absolute(), name, environ)
        if outer is not None:  # of the batch script: each of its steps is a run
            launch = dataclasses.replace(launch, had_python_path=outer.had_python_path)
        # The settings of its file hold in the task, too.
        changes = {**launch.changes(environ), SITE_FILE_VARIABLE: environ.get(SITE_FILE_VARIABLE)}
        for variable, value in changes.items():
            if value is not None and "\n" not in value:
                click.echo(f"export {variable}={value}")
    except (HpcpaceError, OSError) as error:
        if environ.get("SLURM_PROCID", "0") == "0":
            message = Redaction.of(environ, sys.argv).text(" ".join(str(error).split()))
            click.echo(f"print hpcpace: warning: nothing is recorded: {printable(message)}")
