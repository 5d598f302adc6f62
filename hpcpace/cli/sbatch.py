"""`hpcpace sbatch`: write a job script, also from an installed package."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from hpcpace.batch.scripts import filled_in, job_script, job_scripts
from hpcpace.cli.commands import Command
from hpcpace.core.errors import UsageError


@click.command(cls=Command)
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """Print the job script NAME, or list the scripts.

    hpcpace sbatch gpt2_pp > job.sh writes one that runs as it is, with sbatch or with bash.
    """
    if name is None:
        scripts = job_scripts()
        width = max(map(len, scripts))
        click.echo("\n".join(f"{script:{width}}  {sentence}" for script, sentence in scripts.items()))
        return
    click.echo(filled_in(job_script(name), _program()), nl=False)


def _program() -> str:
    """Return the path of this hpcpace, for jobs that do not have it on PATH.

    Raises:
        UsageError: it was started as a module, and has no program beside its Python.
    """
    started_as = Path(sys.argv[0])
    found = shutil.which(started_as) if started_as.suffix != ".py" else None
    program = Path(found).absolute() if found else Path(sys.executable).with_name("hpcpace")
    if not program.exists():
        raise UsageError(f"no program {program}: install hpcpace with pip, so that a job script can call it")
    return str(program)
