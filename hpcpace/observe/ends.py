"""How the program of a rank ends, as a row of its trace: by an exception, by an exit code, or by a signal.

Of an exception, only the name of its type is recorded, and whether it is of a timeout or a lost connection: messages
hold paths, addresses and data of the job. A rank that is killed or calls os._exit leaves no row.
"""

from __future__ import annotations

import re
import signal
import sys

from hpcpace.core.environment import process_redaction
from hpcpace.trace.schema import TABLES, ErrorCode, EventKind

EndEvent = tuple[EventKind, int, bytes]
"""Kind, code and text of a row of the table `events`."""

# The words of gloo, NCCL, MPI and the kernel.
_TIMEOUT = re.compile(r"time[ds]?[ -]?out", re.IGNORECASE)
_DISCONNECTED = re.compile(
    r"connection (closed|reset|refused|was lost)|closed by peer|broken pipe|remote process|ncclSystemError|socket",
    re.IGNORECASE,
)
_MOST_BYTES = TABLES["events"].dtype["text"].itemsize


def error_in_flight(known: BaseException | None) -> BaseException | None:
    """Return the exception that is being handled here, as in a `finally` block; None if it is the known one."""
    error = sys.exc_info()[1]
    return None if error is known else error


def end_by(error: BaseException) -> EndEvent | None:
    """Return the end of a program by an exception, which sys.exit raises as well; None if it does not end by it."""
    if isinstance(error, GeneratorExit):
        return None
    if isinstance(error, SystemExit):
        return EventKind.EXIT, _exit_code(error.code), b""
    name = process_redaction().text(type(error).__qualname__)
    return EventKind.EXCEPTION, _error_code(error), name.encode(errors="replace")[:_MOST_BYTES]


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
