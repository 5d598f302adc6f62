"""Runs one report in a separate process, forked after all imports, and measures it against its limits.

A fresh interpreter takes longer to import than a small report takes; `fresh=True` uses one nevertheless.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pkgutil
import resource
import runpy
import select
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, Protocol

from hpcpace.core.text import parse_size

TIME_LIMIT_S = 10.0
"""Where cores are free; where other work takes its part of them, as many times longer."""
MEMORY_LIMIT_BYTES = 1 << 30
_BASE_BYTES, _MEMORY_FACTOR = 1280 << 20, 3
_ADDRESSES_BYTES = 6 << 30
"""Of address space beyond what is mapped already, which the libraries' threads alone take a good part of; it keeps the
machine alive."""
KILL_AFTER_S = 60.0
_CPU_S = 20
"""Of each process: a busy machine makes nobody late, and a loop without end stops."""
_OF_FIGURES = ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg")
_READERS = ("report", "trace_files", "audit", "export", "hang", "compare", "runs", "watch", "batch", "commands")
_PARTS = ("hpcpace.runs", "hpcpace.hang", "hpcpace.topology", "hpcpace.watch", "hpcpace.report")
_DROP_BOUND, _VERSION_3 = 24, 0x20080522
"""PR_CAPBSET_DROP of prctl(2), _LINUX_CAPABILITY_VERSION_3 of capset(2)."""
_LAST_CAPABILITY = 40


def memory_limit_bytes(memory: str) -> int:
    """Return the memory limit of a command with this value of `--memory`, or without the option.

    `--memory` is for the tables: what is computed of them takes up to one and a half times as much again, of operations
    in memory six times, and these are four million at most (hpcpace.trace.stream.MAX_ROWS).
    """
    return _BASE_BYTES + _MEMORY_FACTOR * parse_size(memory) if memory else MEMORY_LIMIT_BYTES


_PRELOADED_BYTES = 200 << 20
"""Of the imports, which a command has in a process of its own as well. What this process has beyond, such as what other
tests have left in it, is in the resident set of a child, too, and not the command's."""

Command = Sequence[str] | Callable[[], int]


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a report ended; `signal` is 0 unless one killed it, `is_late` says that it had to be killed for its time."""

    code: int
    signal: int
    is_late: bool
    wall_s: float
    cpu_s: float
    memory_bytes: int
    stdout: bytes
    stderr: bytes


class Child:
    """A running command.

    Args:
        command: arguments of `hpcpace`, the path of a script and its own, or a call that returns the exit code.
        place: prefix of the names of the files that take its output.
        without_rights: whether it gives up root's rights to read and write what its modes forbid.
        fresh: whether it starts a fresh interpreter.
    """

    def __init__(self, command: Command, place: Path, *, without_rights: bool = False, fresh: bool = False) -> None:
        self._stdout, self._stderr = place.with_suffix(".stdout"), place.with_suffix(".stderr")
        self._begin_s = time.monotonic()
        self._inherited_bytes = max(_own_bytes(_RESIDENT) - _PRELOADED_BYTES, 0)
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            _be_child(command, self._stdout, self._stderr, without_rights=without_rights, fresh=fresh)
        self._descriptor = os.pidfd_open(self._pid)

    @property
    def descriptor(self) -> int:
        """Becomes readable when the process ends (pidfd_open(2))."""
        return self._descriptor

    @property
    def left_s(self) -> float:
        """Time until it is to be killed."""
        return max(KILL_AFTER_S - (time.monotonic() - self._begin_s), 0.0)

    def end(self, *, is_ended: bool) -> Result:
        """Return how it ended; it is killed if it has not."""
        wall_s = time.monotonic() - self._begin_s
        if not is_ended:
            os.killpg(self._pid, signal.SIGKILL)  # commands that limit their memory do the work in a child
        _, status, usage = os.wait4(self._pid, 0)
        os.close(self._descriptor)
        cpu_s = usage.ru_utime + usage.ru_stime
        is_signalled = os.WIFSIGNALED(status)
        return Result(
            code=-1 if is_signalled else os.WEXITSTATUS(status),
            signal=os.WTERMSIG(status) if is_signalled and is_ended else 0,
            is_late=not is_ended or wall_s > TIME_LIMIT_S * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))),
            wall_s=wall_s,
            cpu_s=cpu_s,
            memory_bytes=usage.ru_maxrss * 1024 - self._inherited_bytes,
            stdout=self._stdout.read_bytes(),
            stderr=self._stderr.read_bytes(),
        )


_MAPPED, _RESIDENT = 0, 1


def _own_bytes(column: int) -> int:
    """Return what a column of statm has of this process (proc(5)), bytes."""
    return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()


def wait_for_one(children: Sequence[Child]) -> tuple[int, Result]:
    """Wait until one of several children ends, or has to be killed; return its index and how it ended."""
    ready, _, _ = select.select([child.descriptor for child in children], [], [], min(c.left_s for c in children))
    for index, child in enumerate(children):
        if child.descriptor in ready:
            return index, child.end(is_ended=True)
    index = min(range(len(children)), key=lambda index: children[index].left_s)
    return index, children[index].end(is_ended=False)


class Job(Protocol):
    """An input and the command that looks at it now."""

    child: Child

    def ended(self, result: Result) -> Any:
        """Judge how the command ended, and return the outcome; None if another command was started."""


def each_outcome(jobs: Iterable[Job], at_once: int) -> Iterator[Any]:
    """Start jobs, some at one time, and yield their outcomes in the order in which they end."""
    jobs, running = iter(jobs), list[Job]()
    while running := [*running, *islice(jobs, at_once - len(running))]:
        index, result = wait_for_one([job.child for job in running])
        if (outcome := running[index].ended(result)) is not None:
            del running[index]
            yield outcome


def _be_child(command: Command, stdout: Path, stderr: Path, *, without_rights: bool, fresh: bool) -> NoReturn:
    code = 70
    try:
        os.setpgid(0, 0)
        for number, path in ((1, stdout), (2, stderr)):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(descriptor, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # A torch with CUDA that the parent has loaded takes more than the limit alone.
        most_bytes = _ADDRESSES_BYTES + (0 if fresh else _own_bytes(_MAPPED))
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S + 1))
        if without_rights:
            _give_up_rights()
        if fresh and not callable(command):
            program = list(command) if _is_script(command) else ["-m", "hpcpace", *command]
            os.execv(sys.executable, [sys.executable, *program])
        code = _run(command)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def _give_up_rights() -> None:
    """Let modes bind root, too, also in a program that it becomes."""
    library = ctypes.CDLL(None, use_errno=True)
    for capability in range(_LAST_CAPABILITY + 1):
        library.prctl(_DROP_BOUND, capability, 0, 0, 0)
    header, none = struct.pack("Ii", _VERSION_3, 0), struct.pack("6I", *[0] * 6)
    if library.capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def _is_script(command: Sequence[str]) -> bool:
    return command[0].endswith(".py")


def _run(command: Command) -> int:
    """Run the command as a separate interpreter would, and return its exit code."""
    from hpcpace.cli import main

    if not callable(command):
        sys.argv = list(command) if _is_script(command) else ["hpcpace", *command]
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    warnings.resetwarnings()
    warnings.simplefilter("default", RuntimeWarning)
    code = 0
    try:
        if callable(command):
            code = command()
        elif _is_script(command):
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
        else:
            main()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def preload() -> None:
    """Import what a report, and the other commands, import, so that each child finds it there."""
    readers = [f"hpcpace.cli.{name}" for name in _READERS]
    parts = [module.name for name in _PARTS for module in pkgutil.walk_packages(_paths(name), f"{name}.")]
    for name in (*readers, *parts, "importlib.readers", *_OF_FIGURES):
        importlib.import_module(name)


def _paths(package: str) -> Sequence[str]:
    return importlib.import_module(package).__path__
