"""`hpcpace batch` runs the ranks of a job; `hpcpace sbatch` writes job scripts."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from hpcpace.batch.job import LAYOUTS, BatchJob, audit_only, prepare_job, run_series, train
from hpcpace.batch.launch import program_path
from hpcpace.cli.commands import Command
from hpcpace.cli.options import option
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import UsageError
from hpcpace.core.text import shown

_FOLDER = Path(__file__).parents[1] / "batch" / "scripts"
# This line of a script is filled in with where hpcpace is.
_PLACE = "\nhpcpace=\n"


@click.command(cls=Command)
@click.argument("name", required=False)
def sbatch_command(name: str | None) -> None:
    """Print the job script NAME, or list the scripts.

    hpcpace sbatch gpt2_pp > job.sh writes one that runs as it is, with sbatch or with bash.
    """
    if name is None:
        scripts = job_scripts()
        width = max(map(len, scripts))
        click.echo("\n".join(f"{script:{width}}  {sentence}" for script, sentence in scripts.items()))
        return
    click.echo(filled_in(job_script(name), program_path()), nl=False)


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


_COMMANDS = "train gpt2, train resnet18, audit, study series"


@click.command(cls=Command, context_settings={"allow_interspersed_args": False})
@option(
    "--name", metavar="NAME", help="Call the run runs/JOB-NAME.", show_default="the last word of the command's name"
)
@option(
    "--layout",
    type=click.Choice(LAYOUTS),
    default="data",
    help="Lay the ranks of a training out like this, unless it has a --mesh.",
)
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def command(name: str | None, layout: str, words: tuple[str, ...]) -> None:
    """Run COMMAND, such as `train gpt2 --steps 200`, as all ranks of a batch job.

    In a Slurm job it audits the nodes, starts the ranks with srun, passes on the signals of a job that is cancelled or
    near its time limit, requeues the job and prints the report; elsewhere it starts ranks on this machine.
    `hpcpace help slurm` lists the environment variables that it reads.

    The exit code is that of COMMAND, or 128 plus the number of the signal that ended the job.
    """
    environ = process_environ()
    kind, rest = _kind(words)
    if name is not None and (not name or "/" in name):
        raise UsageError(f"--name is {shown(name)}: it is part of a folder's name and must have no slash")
    job = prepare_job(name or kind.split()[-1], environ)
    with job.control:
        raise SystemExit(_run(job, kind, rest, layout))


def _kind(words: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the command, and its arguments."""
    for kind in _COMMANDS.split(", "):
        length = len(kind.split())
        if " ".join(words[:length]) == kind:
            return kind, words[length:]
    raise UsageError(f"hpcpace batch cannot run {shown(' '.join(words[:2]))}: it runs {_COMMANDS}")


def _run(job: BatchJob, kind: str, rest: tuple[str, ...], layout: str) -> int:
    if kind == "audit":
        return audit_only(job, rest)
    if kind == "study series":
        return run_series(job, rest)
    return train(job, layout, [kind.split()[1], *rest])
