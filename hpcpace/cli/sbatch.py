"""`hpcpace sbatch`: write a job script, also from an installed package."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import click

from hpcpace.cli.commands import Command
from hpcpace.core.errors import UsageError
from hpcpace.core.text import shown

_FOLDER = Path(__file__).parents[1] / "batch" / "scripts"
# This line of a script is filled in with where hpcpace is.
_PLACE = "\nhpcpace=\n"


def job_scripts() -> dict[str, str]:
    """Return the first sentence of each script that runs from any folder, by its name."""
    found = {path.stem: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.sh"))}
    return {name: _sentence(text) for name, text in found.items() if _PLACE in text and "\nsource " not in text}


def job_script(name: str) -> str:
    """Return the text of a script, whose name may have its ending.

    Raises:
        UsageError: there is no such script.
    """
    scripts = job_scripts()
    stem = name.removesuffix(".sh")
    if stem not in scripts:
        raise UsageError(f"there is no job script {shown(name)}: choose from {', '.join(scripts)}")
    return (_FOLDER / f"{stem}.sh").read_text(encoding="utf-8")


def filled_in(text: str, program: str) -> str:
    """Return the text of a script that takes hpcpace from a path where PATH has none."""
    return text.replace(_PLACE, f"\nhpcpace={shlex.quote(program)}\n", 1)


def _sentence(text: str) -> str:
    """Return the first sentence of a script's comment."""
    comment = (line.removeprefix("#").strip() for line in text.splitlines()[1:])
    words: list[str] = []
    for line in comment:
        words += line.split()
        if line.endswith(".") or not line:
            break
    return " ".join(words)


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
