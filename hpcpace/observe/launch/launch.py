"""How a process of a traced job knows that it is one, and which run it records into.

It knows by a variable of the environment and a folder on PYTHONPATH. `hpcpace trace` sets both and then becomes the
program that it traces. Whatever that starts inherits them, over any launcher, until a process records: what that one
starts from then on does not train. Nothing of hpcpace is left around the program: its exit code, signals, arguments,
search path and tracebacks are those that it has without hpcpace.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hpcpace.core.codec import json_object, read_json
from hpcpace.core.environment import change_environ, process_environ, rank_info
from hpcpace.core.errors import DataError, WorldError
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import RunDirectory, default_run_path
from hpcpace.core.settings import OPTED_OUT_LINE
from hpcpace.observe.launch.last_line import open_teller

_VARIABLE = "HPCPACE_LAUNCH"
_PYTHONPATH = "PYTHONPATH"
_SITE_WARMUP_STEPS = 2
_MAX_LETTERS = 4096
"""Of a text in the record, as Linux has it for paths."""
_MAX_NUMBER = (1 << 31) - 1
_STARTUP = str(Path(__file__).parent / "startup")


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a user asked `hpcpace trace` for.

    Attributes:
        config_file: a TOML file with settings, absolute; None without one.
        pace: the policy of pacing; None for that of the settings.
        trace_dir: the folder for traces while the job runs; None for that of the settings.
        steps: the steps to record in detail; None for those of the settings.
        detail: what is recorded of them; None for that of the settings.
        keep_last: how many of the last steps to keep at least; None for that of the settings.
        summary: whether a card is printed at the end; None for that of the settings.
        warmup_steps: number of first steps that the report leaves out.
        samples_unit: what a step's samples are.
        step_from: what ends a step.
    """

    config_file: str | None = None
    pace: str | None = None
    trace_dir: str | None = None
    steps: str | None = None
    detail: str | None = None
    keep_last: int | None = None
    summary: bool | None = None
    warmup_steps: int = _SITE_WARMUP_STEPS
    samples_unit: str = "samples"
    step_from: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Launch(Wishes):
    """One call of `hpcpace trace`, as the processes that it starts know it.

    Attributes:
        run_dir: the run directory of all ranks, absolute.
        is_new_run: whether it is named after the time, so that what another launch left there is another run.
        identity: of the launch; restarts by the same launcher have the same.
        name: names the run.
        pid: the process that `hpcpace trace` became; it is the last of the job that ends.
        teller: where the last line is written, see the module last_line; empty if this process writes none.
        had_python_path: whether PYTHONPATH was set before.
        is_requested: whether a user has started it, and not the site.
    """

    run_dir: str
    is_new_run: bool
    identity: str
    name: str
    pid: int
    teller: str
    had_python_path: bool
    is_requested: bool = True

    def changes(self, environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return the variables that make the processes started in an environment follow this launch."""
        others = [entry for entry in _entries(environ) if entry != _STARTUP]
        return {
            _VARIABLE: json.dumps(asdict(self)),
            _PYTHONPATH: os.pathsep.join([_STARTUP, *others]),
        }

    def changes_back(self, environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return the variables as they are without this launch; None for one that is not set."""
        others = [entry for entry in _entries(environ) if entry != _STARTUP]
        path = os.pathsep.join(others) if others or self.had_python_path else None
        return {_VARIABLE: None, _PYTHONPATH: path}


def site_launch(run_dir: Path, name: str, environ: Mapping[str, str]) -> Launch:
    """Return a launch for a task of which the site, and not its user, wants a trace; it says nothing."""
    return Launch(
        run_dir=str(run_dir),
        is_new_run=False,
        identity="",
        name=name,
        pid=0,
        teller="",
        had_python_path=has_python_path(environ),
        is_requested=False,
        summary=False,
    )


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch that an environment belongs to; None outside of one."""
    try:
        content = json.loads(environ.get(_VARIABLE, ""))
        launch = Launch(**content)
    except (ValueError, TypeError, RecursionError):  # also of another version of hpcpace
        return None
    return launch if all(_is_usable(value, _kinds()[name]) for name, value in vars(launch).items()) else None


@cache
def _kinds() -> Mapping[str, tuple[type, ...]]:
    """Return the types that each value of the record may have."""
    return {name: get_args(hint) or (hint,) for name, hint in get_type_hints(Launch).items()}


def _is_usable(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a value has one of some types, and can be used as a path, a number or in a variable."""
    if type(value) not in kinds:
        return False
    if isinstance(value, str):
        return len(value) <= _MAX_LETTERS and "\0" not in value and _is_writable(value)
    return not isinstance(value, int) or 0 <= value <= _MAX_NUMBER


def _is_writable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def has_launch(environ: Mapping[str, str]) -> bool:
    """Return whether an environment says that it belongs to a launch, which may be damaged or of another version."""
    return bool(environ.get(_VARIABLE))


def has_python_path(environ: Mapping[str, str]) -> bool:
    """Return whether PYTHONPATH is set."""
    return _PYTHONPATH in environ


def _entries(environ: Mapping[str, str]) -> list[str]:
    path = environ.get(_PYTHONPATH, "")
    return path.split(os.pathsep) if path else []


def run_place(launch: Launch, command: Sequence[str], replica: str = "") -> str:
    """Return the run directory for this rank's job; that of rank 0 counts.

    Restarts of the same command under the same launch are attempts of one run. A launch that runs several commands, as
    a shell script may, gives each its own run directory, and so do replicas that run at the same time.

    Args:
        launch: the launch that this process belongs to.
        command: sys.argv of this process, without secrets.
        replica: the number of this replica of the job, as torchft counts them; empty without any.
    """
    base = place = f"{launch.run_dir}-replica-{replica}" if replica.isdecimal() else launch.run_dir
    for number in count(2):
        if _takes(RunDirectory(Path(place)), launch, list(command)):
            break
        place = f"{base}-{number}"
    return place


def _takes(run: RunDirectory, launch: Launch, command: list[str]) -> bool:
    attempts = run.attempts()
    if not attempts:
        return True
    record = read_json(attempts[-1], attempts[-1].run_json.name, json_object, []) or {}
    if record.get("launch") == launch.identity and "command" in record:
        return bool(record["command"] == command)
    # A requeued job comes back to its run, and so does who names one.
    return not launch.is_new_run


OF_PYTHON = ("-m", "-c")
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
    _become(program)


def become_untraced(command: Sequence[str]) -> None:
    """Replace this process by a program that knows nothing of hpcpace, as its user wants; see `become_traced`."""
    environ = process_environ()
    program = program_of(command, sys.orig_argv, sys.argv)
    outer = find_launch(environ)
    if outer is not None:
        change_environ(outer.changes_back(environ))
    tell_opted_out(environ)
    _become(program)


def tell_opted_out(environ: Mapping[str, str]) -> None:
    """Say once a job that hpcpace stays out of it; without a launcher's variables, each process is the first rank."""
    with suppress(WorldError, OSError, ValueError):
        if rank_info(environ).rank == 0:
            print(f"hpcpace: {OPTED_OUT_LINE}", file=sys.stderr, flush=True)


def _become(program: list[str]) -> None:
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
    if first not in OF_PYTHON and not path.exists() and shutil.which(first) is None:
        raise DataError(
            f"no script at {first}, and no program of that name: give a training script, -m and a module, or a program"
        )
    found = shutil.which(first)
    is_script = first in OF_PYTHON or path.suffix in (".py", ".pyw") or path.is_dir() or found is None
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
