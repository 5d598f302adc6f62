"""How the program of a rank ends, as a row of its trace, and what it saves at SIGTERM and when it aborts.

Of an exception, the name of its type is recorded, whether it is of a timeout or a lost connection, and, unless
`trace.error_text` is off, the ends of its message and of its traceback, both short and without secrets, values of
variables and lines of code, and what it wrote to stderr last. A rank that is killed or calls os._exit leaves no row.
Slurm sends SIGTERM to every rank at scancel and at the time limit, and SIGKILL after KillWait seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import signal
import socket
import stat
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

from hpcpace.core.compat import load_compiled
from hpcpace.core.environment import process_redaction
from hpcpace.core.files import close_own, set_aside, socket_aside
from hpcpace.core.log_text import plain_text
from hpcpace.core.redaction import Redaction
from hpcpace.core.text import own_frame
from hpcpace.trace.schema import TABLES, ErrorCode, ErrorPart, EventKind
from hpcpace.world.deadline import in_time

EndEvent = tuple[EventKind, int, bytes]
"""Kind, code and text of a row of the table `events`."""

# The words of gloo, NCCL, MPI and the kernel.
_TIMEOUT = re.compile(r"time[ds]?[ -]?out", re.IGNORECASE)
_DISCONNECTED = re.compile(
    r"connection (closed|reset|refused|was lost)|closed by peer|broken pipe|remote process|ncclSystemError|socket",
    re.IGNORECASE,
)
# How long a thread waits for the end of the process that it has brought about.
_ENDS_WITHIN_S = 5.0
_MAX_BYTES = TABLES["events"].dtype["text"].itemsize
# Together at most 5 kB a rank. Secrets are looked for in more than is kept: one that is cut off may not be recognised.
_MAX_MESSAGE, _MAX_TEXT, _MAX_REDACTED = 2000, 2400, 1 << 16
_MAX_CAUSES, _MAX_FRAMES, _MAX_PASSED = 4, 12, 1000
_PACKAGE = Path(__file__).parents[1]
_OBSERVERS = tuple(f"{_PACKAGE / folder}/" for folder in ("observe", "callbacks"))


def error_in_flight(known: BaseException | None) -> BaseException | None:
    """Return the exception that is being handled here, as in a `finally` block; None if it is the known one."""
    error = sys.exc_info()[1]
    return None if error is known else error


def error_of_program() -> BaseException | None:
    """Return what ends this program, as far as is known: an exception that passes here, or that Python has printed."""
    error = error_in_flight(None)
    # At a prompt, the last one that was printed has ended nothing.
    return error or (None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))


def end_by(error: BaseException) -> EndEvent | None:
    """Return the end of a program by an exception, which sys.exit raises as well; None if it does not end by it."""
    if isinstance(error, GeneratorExit):
        return None
    if isinstance(error, SystemExit):
        return EventKind.EXIT, _exit_code(error.code), b""
    name = process_redaction().text(type(error).__qualname__)
    return EventKind.EXCEPTION, _error_code(error), name.encode(errors="replace")[:_MAX_BYTES]


def error_text(error: BaseException) -> list[EndEvent]:
    """Return message, place and frames of the exception that ends a program, in pieces that fit a row.

    The place is the innermost line of the job's own code, the frames are the last ones, the innermost last. Nothing is
    read from files. SystemExit has no more to say than its message.
    """
    message = _shortened(process_redaction().text(_message(error)[:_MAX_REDACTED]))
    frames = [] if isinstance(error, SystemExit) else _frames(error)
    return [*pieces_of(ErrorPart.MESSAGE, message), *places_of(frames)]


def places_of(frames: Sequence[str]) -> list[EndEvent]:
    """Return where a program ended, the innermost line of its own code and the last frames, in pieces that fit a row.

    Args:
        frames: `FILE:LINE in FUNCTION`, the innermost last.
    """
    if not frames:
        return []
    redaction = process_redaction()
    parts = {ErrorPart.PLACE: own_frame(frames), ErrorPart.FRAMES: "\n".join(frames[-_MAX_FRAMES:])}
    return [piece for part, text in parts.items() for piece in pieces_of(part, redaction.text(text))]


def pieces_of(part: ErrorPart, text: str) -> list[EndEvent]:
    """Return a text in pieces that fit a row."""
    content = text.replace("\0", "\\0").encode(errors="replace")
    return [
        (EventKind.ERROR_TEXT, part, content[first : first + _MAX_BYTES])
        for first in range(0, min(len(content), _MAX_TEXT), _MAX_BYTES)
    ]


def _message(error: BaseException) -> str:
    """Return the message of an exception and of those that caused it, each with its type."""
    words: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(words) < _MAX_CAUSES:
        try:
            said = str(cause.code) if isinstance(cause, SystemExit) else str(cause)
        except Exception:  # the class is the job's own
            said = ""
        words.append(f"caused by {type(cause).__qualname__}: {said}" if words else said)
        if isinstance(cause, SystemExit) and not isinstance(cause.code, str):
            return ""
        cause = cause.__cause__
    return "\n".join(words).strip()


def _shortened(text: str) -> str:
    """Return a text without its middle, if it is long: errors of workers and libraries say most at either end."""
    if len(text) <= _MAX_MESSAGE:
        return text
    return f"{text[: _MAX_MESSAGE // 4]} [...] {text[-_MAX_MESSAGE * 3 // 4 :]}"


def _frames(error: BaseException) -> list[str]:
    """Return where an exception passed, as `FILE:LINE in FUNCTION`, the innermost last, without what observes."""
    passed = deque(walk_tb(error.__traceback__), maxlen=_MAX_PASSED)
    places = [(frame.f_code, line) for frame, line in passed]
    return [
        f"{code.co_filename}:{line} in {code.co_name}"
        for code, line in places
        if not code.co_filename.startswith(_OBSERVERS)
    ]


def end_by_signal(number: signal.Signals) -> EndEvent:
    """Return the end of a program by a signal."""
    return EventKind.SIGNAL, int(number), b""


def _error_code(error: BaseException) -> ErrorCode:
    """Return whether an exception is of communication that ran out of time, or that another rank has left."""
    try:
        message = str(error)
    except Exception:  # the class is the job's own
        message = ""
    if isinstance(error, TimeoutError) or _TIMEOUT.search(message):
        return ErrorCode.TIMEOUT
    return ErrorCode.DISCONNECTED if _DISCONNECTED.search(message) else ErrorCode.OTHER


def _exit_code(code: object) -> int:
    """Return the exit code of the process, as Python takes it from the argument of sys.exit."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


class TerminationTrap:
    """Calls `rescue` when SIGTERM arrives, also while the main thread is blocked inside torch, and then ends by it.

    Python runs signal handlers in the main thread between two bytecodes, which a rank that waits inside a collective
    never reaches. The C-level handler, though, writes to a descriptor at once, and a thread of ours reads it. A
    handler of the job, set before or after ours, is left alone and decides what SIGTERM means: with one set after
    ours, SIGTERM calls `rescue` and ends nothing. Forked children are as if there were no trap.
    """

    def __init__(self, rescue: Callable[[], object]) -> None:
        self._rescue = rescue
        self._sockets: tuple[socket.socket, socket.socket] | None = None

    def install(self) -> bool:
        """Set the trap; return whether that worked."""
        if threading.current_thread() is not threading.main_thread() or not has_default_action(signal.SIGTERM):
            return False
        listener = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(listener)
        if listener != -1:  # an event loop of the job's listens for signals
            return False
        reader, writer = self._sockets = _socket_pair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._tell)
        # Else the signal fails system calls under torch and MPI, whose errors would come before the end.
        signal.siginterrupt(signal.SIGTERM, False)
        threading.Thread(target=self._watch, args=[reader], name="hpcpace-sigterm", daemon=True).start()
        _hook_forks(weakref.ref(self))
        return True

    @property
    def is_decisive(self) -> bool:
        """Whether SIGTERM ends this process: no handler of the job's decides what it means."""
        # The default: the trap was removed since the signal came.
        return signal.getsignal(signal.SIGTERM) in (self._tell, signal.SIG_DFL)

    def remove(self) -> None:
        """Remove the trap; it stays if a thread other than the main one asks, as Python forbids that."""
        if self._sockets is None or threading.current_thread() is not threading.main_thread():
            return
        (_, writer), self._sockets = self._sockets, None
        if signal.getsignal(signal.SIGTERM) == self._tell:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        current = signal.set_wakeup_fd(-1)
        if current != writer.fileno():  # an event loop of the job's has taken its place
            signal.set_wakeup_fd(current)
        with suppress(OSError):
            writer.close()

    def _tell(self, number: int, frame: FrameType | None) -> None:
        # Once more, for an event loop of the job's may have taken the descriptor's place. A handler of the job's that
        # was set on top of ours may call this, or put it back, long after the trap is gone.
        if self._sockets is not None:
            with contextlib.suppress(OSError):  # it is full, or the job has closed it
                self._sockets[1].send(bytes([number]))
        else:
            act_by_default(number, self._tell)

    def _watch(self, reader: socket.socket) -> None:
        with suppress(OSError), reader:  # the job may close descriptors that it does not know
            while numbers := reader.recv(16):
                if signal.SIGTERM in numbers:
                    self._answer()

    def _answer(self) -> None:
        is_decisive = self.is_decisive
        try:
            self._rescue()
        finally:
            if is_decisive:
                _end_by_default(signal.SIGTERM)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    first, second = (socket_aside(one) for one in socket.socketpair())
    return first, second


@contextlib.contextmanager
def termination_held() -> Iterator[None]:
    """Hold back a SIGTERM that would end this process at once, and end by it afterwards; in the main thread only.

    The launcher ends a rank some milliseconds after another one has died, while it may already be leaving by itself.
    """
    if threading.current_thread() is not threading.main_thread() or not has_default_action(signal.SIGTERM):
        yield
        return
    has_come = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: has_come.set())
    signal.siginterrupt(signal.SIGTERM, False)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if has_come.is_set():
            _end_by_default(signal.SIGTERM)


def _end_by_default(number: signal.Signals) -> None:
    """End this process by a signal's default action, from any thread; signal.signal is for the main thread only."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    set_handler(number, int(signal.SIG_DFL))
    os.kill(os.getpid(), number)
    # Here it ends, whichever threads block the signal; only process 1 of a container goes on, as without a trap.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    # Where the same signal is on its way to another thread already, the kernel takes both for one: it ends with that.
    time.sleep(_ENDS_WITHIN_S)


def has_default_action(number: signal.Signals) -> bool:
    """Return whether a signal has no handler."""
    # Handlers set in C, such as those of faulthandler, are unknown to Python.
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    return signal.getsignal(number) is signal.SIG_DFL and not int(caught, 16) >> (number - 1) & 1


def _hook_forks(reference: weakref.ref[TerminationTrap]) -> None:
    """Take the trap away in every forked child, before SIGTERM can reach it there.

    A child writes to the same descriptor: its SIGTERM would end the parent.
    """
    before = threading.local()

    def hold() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def remove() -> None:
        trap = reference()
        if trap is not None:
            trap.remove()
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=remove)


def act_by_default(number: int, handler: Callable[..., Any]) -> None:
    """Do what a signal does by default if it still comes to a handler, which is over.

    A script may keep a handler of ours as the one before its own, and put it back after we have removed it. Where the
    handler of the script only calls ours, nothing is done: without us, it would have had none to call.
    """
    if signal.getsignal(number) == handler:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


_STDERR = 2
_MAX_STDERR_BYTES = 4096
"""memory: read back at most; a C++ stack of torch alone takes 3 KiB."""
_MAX_LETTERS = 2000
"""format: recorded of them, as of the message of an exception."""
_STDERR_TIMEOUT_S = 1.0
"""timing: the file system may hang, and a rank that ends at SIGTERM has few seconds."""
_NAME_DIGITS = 16
# The beginning of a key may be before what is read.
_END_OF_KEY = "PRIVATE KEY-----"
_OURS = "hpcpace: "


class StderrTail:
    """The end of stderr, where that is a regular file: CUDA's asserts, NCCL's warnings, C++'s aborts.

    Nothing is redirected: the file is read back at the end, a few KiB and only what was written since this was made.

    Attributes:
        name: the same on all ranks that share the file, and no more than that; empty where stderr is no regular file.
    """

    def __init__(self) -> None:
        self.name = ""
        self._place, self._begin = (0, 0), 0
        try:
            status = os.fstat(_STDERR)
            if stat.S_ISREG(status.st_mode):
                self._place, self._begin = (status.st_dev, status.st_ino), status.st_size
                path = os.readlink(f"/proc/self/fd/{_STDERR}")
                self.name = hashlib.sha256(f"{status.st_ino} {path}".encode()).hexdigest()[:_NAME_DIGITS]
        except OSError:  # stderr is closed, or there is no /proc
            pass

    def last_lines(self, redaction: Redaction) -> str:
        """Return the last lines without secrets and without our own; empty where there are none, or none to be read.

        Raises:
            OSError: the file cannot be read, as this process may only write to it, or its file system hangs.
        """
        if not self.name:
            return ""
        begin, content = in_time(self._read, _STDERR_TIMEOUT_S, "the file system of stderr")
        # Of a line whose beginning is missing, secrets may not be recognised.
        whole = content if begin == self._begin else content.partition(b"\n")[2]
        lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in plain_text(whole).split("\n"))
        text = redaction.text("\n".join(line for line in lines if line and not line.startswith(_OURS)))
        return text.rpartition(_END_OF_KEY)[2].strip()[-_MAX_LETTERS:]

    def _read(self) -> tuple[int, bytes]:
        """Return from where on the end of the file was read, and what is there."""
        reader = os.open(f"/proc/self/fd/{_STDERR}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(reader)
            if (status.st_dev, status.st_ino) != self._place:  # the job has put another file in its place
                return self._begin, b""
            begin = max(self._begin, status.st_size - _MAX_STDERR_BYTES)
            return begin, os.pread(reader, max(status.st_size - begin, 0), begin)
        finally:
            os.close(reader)


_ABORT_TIMEOUT_MS = 5000
"""timing: an abort is held up no longer, also where a disk hangs."""


class AbortTrap:
    """Calls `rescue` in a thread when this process aborts, as gloo and NCCL do in their threads, and then lets it.

    The handler of SIGABRT must be compiled, aborts.cpp: Python's handlers run when the main thread reaches the next
    bytecode, which a process that aborts never does. Without a C++ compiler at installation an abort costs the rows
    since the last flush, as SIGKILL does.

    Args:
        rescue: brings to disk what is in memory.
    """

    def __init__(self, rescue: Callable[[], object]) -> None:
        self._rescue = rescue
        self._tell_fd = self._told_fd = -1

    def install(self) -> bool:
        """Set the trap; return whether that worked."""
        library = _abort_library()
        if library is None:
            return False
        asked_fd, self._tell_fd = map(set_aside, os.pipe2(os.O_CLOEXEC))
        self._told_fd, answer_fd = map(set_aside, os.pipe2(os.O_CLOEXEC))
        os.set_blocking(self._tell_fd, False)
        check = ctypes.cast(ctypes.pythonapi.PyGILState_Check, ctypes.c_void_p)
        if library.hold_aborts(self._tell_fd, self._told_fd, _ABORT_TIMEOUT_MS, check):
            return False
        threading.Thread(target=self._watch, args=[asked_fd, answer_fd], name="hpcpace-abort", daemon=True).start()
        return True

    def remove(self) -> None:
        """Remove the trap; the thread ends."""
        library = _abort_library()
        if library is not None and self._tell_fd >= 0:
            library.release_aborts()
            close_own(self._tell_fd)
            self._tell_fd = self._told_fd = -1

    def _watch(self, asked_fd: int, answer_fd: int) -> None:
        try:
            with suppress(Exception):  # the process aborts for a reason of its own, or has closed the descriptor
                if os.read(asked_fd, 1):
                    self._rescue()
        finally:
            close_own(answer_fd)  # the other end of the pipe is ready then
            close_own(asked_fd)


@cache
def _abort_library() -> Any | None:
    library = load_compiled(Path(__file__).with_name("aborts.cpp"))
    if library is not None:
        library.hold_aborts.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        library.release_aborts.restype = None
    return library
