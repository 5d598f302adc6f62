"""The signals of a batch job: what ends or stops its ranks, and which exit status it ends with.

At scancel and at the time limit Slurm sends SIGTERM to every task, to the batch script and to srun, and SIGKILL
KillWait seconds later (30 by default); the report must be done by then. `--signal=B:USR1@120` sends SIGUSR1 to the
script alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from hpcpace.core.environment import process_redaction
from hpcpace.core.text import printable

TIMED_OUT = 124
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_KILL_AFTER_S = 10.0
_ENDS = {signal.SIGTERM: "cancelled, out of time, or a node has failed", signal.SIGINT: "interrupted"}


class JobControl:
    """Runs the commands of a job one after the other, and passes signals on to the one that runs.

    Attributes:
        name: name of the job, in front of all that it says.
        job: the job as scancel takes it; None without Slurm.
        ended_by: 128 plus the number of the signal that ends the job; 0 without one.
        is_early: whether SIGUSR1 has told the job that its time limit is near.
    """

    def __init__(self, name: str, job: str | None) -> None:
        self.name = name
        self.job = job
        self.ended_by = 0
        self.is_early = False
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> JobControl:
        for number in (*_ENDS, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def say(self, text: str) -> None:
        """Print one line about the job to stderr."""
        text = process_redaction().text(text)
        # A signal may interrupt any write, and its handler must not write to the same buffer.
        with suppress(OSError):
            os.write(2, f"{printable(self.name)}: {printable(text)}\n".encode(errors="backslashreplace"))

    def run_ranks(self, command: Sequence[str], environ: Mapping[str, str], *, timeout_s: float | None = None) -> int:
        """Run a command that gets the signals of the job, and return its exit status, as a shell would give it.

        A job that a signal has ended starts nothing more, and the status is that of the signal. After `timeout_s`
        seconds the command is ended, and the status is 124.
        """
        if self.ended_by:
            return self.ended_by
        sys.stdout.flush()
        try:
            # Ctrl-C reaches all processes of a terminal, and srun would ask for another one: this process handles it.
            self._process = _start(command, environ, ignored=signal.SIGINT)
        except OSError as error:
            self.say(f"cannot run {command[0]}: {error.strerror}")
            return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        try:
            # Signals that arrived while it started.
            self._pass_on()
            return _status(self._process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self._process.wait(_KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            return TIMED_OUT
        finally:
            self._process = None

    def run_untold(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run a command to its end whatever signals say, and return its exit status, as a shell would give it.

        Slurm repeats SIGTERM, and srun may have ended before this process received the first one.
        """
        sys.stdout.flush()
        try:
            return _status(_start(command, environ, ignored=signal.SIGTERM).wait())
        except OSError as error:
            self.say(f"cannot run {command[0]}: {error.strerror}")
            return _NOT_FOUND

    def _note(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number)
        if name == signal.SIGUSR1:
            if not self.is_early:
                self.say("the time limit is near (SIGUSR1): writing a checkpoint and stopping")
            self.is_early = True
        else:
            if not self.ended_by:
                self.say(f"{_ENDS[name]} ({name.name})")
            self.ended_by = 128 + number
            name = signal.SIGTERM
        self._unsent = name
        self._pass_on()

    def _pass_on(self) -> None:
        """Send a signal that is not sent yet to the ranks, if they run."""
        if self._process is None or self._unsent is None:
            return
        name, self._unsent = self._unsent, None
        # srun would answer SIGTERM with SIGKILL to the ranks.
        scancel = ["scancel", f"--signal={name.name.removeprefix('SIG')}"]
        if self.job is None or not succeeds([*scancel, self.job], is_quiet=True):
            self._process.send_signal(name)


def ignore_termination() -> None:
    """Let SIGTERM no longer end this process: Slurm ends the batch script along with the job that it requeues."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def succeeds(command: Sequence[str], *, is_quiet: bool = False) -> bool:
    """Run one of Slurm's commands, and return whether it ended with status 0."""
    errors = subprocess.DEVNULL if is_quiet else None
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, stderr=errors).returncode == 0
    except OSError:
        return False


def _start(command: Sequence[str], environ: Mapping[str, str], *, ignored: signal.Signals) -> subprocess.Popen[bytes]:
    def ignore() -> None:
        signal.signal(ignored, signal.SIG_IGN)

    return subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, preexec_fn=ignore)


def _status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode
