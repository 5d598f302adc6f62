"""Becomes the program that is to be traced, and so keeps its place under any launcher.

Nothing of hpcpace is left around the program. Its exit code, signals, arguments, search path and tracebacks are those
that it has without hpcpace.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from hpcpace.core.environment import change_environ, process_environ, rank_info
from hpcpace.core.errors import DataError, WorldError
from hpcpace.core.rundir import default_run_path
from hpcpace.observe.launch.last_line import open_teller
from hpcpace.observe.launch.launch import Launch, Wishes, find_launch, has_python_path

_OF_PYTHON = ("-m", "-c")
# Modules that start what follows, which names the run.
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed")
# Python ignores these signals; a program finds them as Python found them. As subprocess does it.
_IGNORED_BY_PYTHON = ("SIGPIPE", "SIGXFZ", "SIGXFSZ")


def become_traced(command: Sequence[str], wishes: Wishes, *, run_dir: Path | None) -> None:
    """Replace this process by a program whose training is traced; return never.

    Args:
        command: a script of Python, `-m` and a module, or any program, with its arguments.
        wishes: what the user asked for.
        run_dir: the run directory; None for one that is named after job or time.

    Raises:
        DataError: there is no such script or program.
        OSError: it cannot be started.
    """
    environ = process_environ()
    program = program_of(command, sys.orig_argv, sys.argv)
    name = run_name(command)
    launcher, launched_s = _launcher(environ)
    place = run_dir or default_run_path(name, environ, launched_s=launched_s)
    launch = Launch(
        **asdict(wishes),
        run_dir=str(place.absolute()),
        is_new_run=run_dir is None and "SLURM_JOB_ID" not in environ,
        identity=launcher,
        name=name,
        pid=os.getpid(),
        teller=_teller(environ),
        had_python_path=has_python_path(environ),
    )
    change_environ(launch.changes(environ))
    for number in (getattr(signal, name, None) for name in _IGNORED_BY_PYTHON):
        if number is not None:
            signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    os.execv(program[0], program)


def program_of(command: Sequence[str], orig_argv: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Return what to execute: a script of Python by this Python, a program by its path.

    Args:
        command: a script, `-m` and a module, or a program, with its arguments.
        orig_argv: how this process was started.
        argv: its arguments, without those of Python.

    Raises:
        DataError: there is no such script or program.
    """
    first, path = command[0], Path(command[0])
    if first not in _OF_PYTHON and not path.exists() and shutil.which(first) is None:
        raise DataError(
            f"no script at {first}, and no program of that name: give a training script, -m and a module, or a program"
        )
    found = shutil.which(first)
    is_script = first in _OF_PYTHON or path.suffix in (".py", ".pyw") or path.is_dir() or found is None
    if is_script:
        return [sys.executable, *python_options(orig_argv, argv), *command]
    assert found is not None
    return [found, *command[1:]]


def python_options(orig_argv: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Return the options of Python that a script is to have as well: all but those that protect hpcpace itself.

    -P, -E and -I keep strangers' modules from a command that is started in their folder. A script is to find its own.
    """
    options = list(orig_argv[1 : len(orig_argv) - len(argv) + 1])
    by_module = [index for index, option in enumerate(options) if re.fullmatch(r"-[a-zA-Z]*m(.+)?", option)]
    options = options[: by_module[-1]] if by_module else options[:-1]
    kept: list[str] = []
    takes_value = False
    for option in options:
        if not takes_value and re.fullmatch(r"-[A-VY-Za-z]+", option):
            option = re.sub("[PEI]", "", option)
        takes_value = not takes_value and option in ("-X", "-W")
        if option != "-":
            kept.append(option)
    return kept


def run_name(command: Sequence[str]) -> str:
    """Return the name of a run: that of the script or module, if there is one among the arguments of a launcher."""
    for before, word in zip(("", *command), command, strict=False):
        if word.endswith((".py", ".sh")):
            return Path(word).stem
        if before == "-m" and word not in _LAUNCHERS:
            return word.rpartition(".")[2]
    return Path(command[0]).stem


def _launcher(environ: Mapping[str, str]) -> tuple[str, float | None]:
    """Return the identity of what launches the ranks, and when it began; None for this process.

    torchrun starts its ranks, and each restart of them, as its children.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        with suppress(OSError, ValueError, IndexError):
            parent = os.getppid()
            ticks = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19])
            boot_s = int(re.findall(r"^btime (\d+)$", Path("/proc/stat").read_text(), flags=re.MULTILINE)[0])
            return f"{os.uname().nodename}/{parent}/{ticks}", boot_s + ticks / os.sysconf("SC_CLK_TCK")
    return f"{os.uname().nodename}/{os.getpid()}/{time.time_ns()}", None


def _teller(environ: Mapping[str, str]) -> str:
    """Return where the ranks tell what they record: one process of a job listens, on the host of rank 0."""
    outer = find_launch(environ)
    if outer is not None and outer.is_requested:
        return outer.teller
    try:
        is_first, problem = rank_info(environ).rank == 0, ""
    except WorldError as error:
        is_first, problem = True, str(error)
    return open_teller(problem, str(Path.cwd())) if is_first else ""
