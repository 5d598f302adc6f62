"""Many jobs of an experiment: run in several processes or under mpiexec, with progress, kept and taken up again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Task = TypeVar("Task")
Result = TypeVar("Result")
Tell = Callable[[str], None]
_TASKS_AT_ONCE = 4
_LAUNCHER_VARIABLES = ("PMI", "SLURM_", "HYDI", "OMPI_", "RANK", "WORLD_SIZE", "LOCAL_")
MISREAD_START = "mpi/pmi2: invalid client request"
"""In the log of a job that did not get through MPI_Init: Slurm's plugin misread MPICH, and the ranks wait forever."""


class JobFailed(RuntimeError):
    """A job failed or took too long; its last output is the message."""


def teller(begin_s: float | None = None, *, name: str = "", file: Any = None) -> Tell:
    """Return what prints lines with the seconds since the begin."""
    since_s = time.monotonic() if begin_s is None else begin_s

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - since_s:5.0f} s] {name and f'{name}: '}{line}", file=file, flush=True)

    return tell


def in_processes(
    function: Callable[[Task], Result],
    todo: Sequence[Task],
    *,
    processes: int,
    said: Callable[[Result], str] = lambda _: "",
) -> Iterator[Result]:
    """Yield the result of each task, in their order, with a progress bar on a terminal.

    Args:
        function: runs one task, in another process.
        todo: the tasks.
        processes: at one time.
        said: a line to print of a result; none if it is empty.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar,
        # A progress bar runs a thread, and a process that has threads should not fork.
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
    ):
        shown = bar.add_task("examining", total=len(todo))
        for result in pool.map(function, todo, chunksize=_TASKS_AT_ONCE):
            bar.advance(shown)
            if line := said(result):
                bar.console.print(line, highlight=False, soft_wrap=True)
            yield result


class Rows:
    """Results as lines of JSON in a file: what was interrupted goes on there, and several processes can share it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """Return all rows; none where there is no file."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row at the end."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace all rows."""
        self.path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def fork(function: Callable[[], object], log: Path | None = None) -> int:
    """Run a function in a fork of this process and return its process id; its exit code is 1 after an exception.

    Args:
        function: what to run.
        log: file that gets its output; that of this process if not given.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if log is not None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        function()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # the boundary: this process must not go on with what the other one does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended_in_time(
    children: Sequence[subprocess.Popen[str]], *, timeout_s: float, with_signal: int = signal.SIGKILL
) -> list[str]:
    """Wait for processes that lead sessions of their own, and return what each printed.

    Raises:
        JobFailed: one ended with an error, or they took longer; then all processes of their sessions are killed.
    """
    try:
        said = [child.communicate(timeout=timeout_s) for child in children]
    except subprocess.TimeoutExpired as error:
        raise JobFailed(f"not done within {timeout_s:g} s: {(error.stderr or b'')[-800:]!r}") from None
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, with_signal)
                child.communicate()
    for child, (stdout, stderr) in zip(children, said, strict=True):
        if child.returncode:
            raise JobFailed(f"status {child.returncode}: {(stderr or stdout)[-800:]}")
    return [stdout for stdout, _ in said]


def started(command: Sequence[object], **options: Any) -> subprocess.Popen[str]:
    """Start a command as the leader of a session of its own, with its output in pipes."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([str(word) for word in command], text=True, start_new_session=True, **{**pipes, **options})


def mpiexec(num_ranks: int, *program: object) -> list[str]:
    """Return the command that runs a program of this Python on some ranks."""
    return [str(Path(sys.executable).with_name("mpiexec")), "-n", str(num_ranks), sys.executable, *map(str, program)]


def clean_environ(**more: str) -> dict[str, str]:
    """Return this process's environment without the variables of a launcher, with one thread a process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_VARIABLES)}
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **more}


def hpcpace(*words: object, timeout_s: float | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command of hpcpace in an interpreter of its own, whatever its exit code."""
    command = [sys.executable, "-m", "hpcpace", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **environ}, check=False
    )


def verdict_of(run: Path, **environ: str) -> dict[str, Any]:
    """Return the verdict of a run's report.

    Raises:
        JobFailed: there is no report.
    """
    done = hpcpace("report", run, "--json", timeout_s=120, **environ)
    if not done.stdout:
        raise JobFailed(f"no report, status {done.returncode}: {done.stderr[-800:]}")
    verdict: dict[str, Any] = json.loads(done.stdout)["verdict"]
    return verdict


def commit(folder: Path) -> str:
    """Return the commit of the code, with a + where files differ from it; empty outside of a repository."""
    done = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=folder, capture_output=True, text=True)
    return done.stdout.strip()


@contextmanager
def busy(number: int, *programs: str) -> Iterator[None]:
    """Run processes that take what they get of the cores: these programs in turn, or endless loops.

    Each is a session: the processes of one share the weight of one (sched(7), autogroup).
    """
    texts = [(programs or ("while True: pass",))[index % max(len(programs), 1)] for index in range(number)]
    running = [subprocess.Popen([sys.executable, "-S", "-c", text], start_new_session=True) for text in texts]
    try:
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def free_port() -> int:
    """Return a port of this host that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
