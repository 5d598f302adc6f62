"""Commands under a limit on addresses (`ulimit -v`), as sites set it on login nodes.

Libraries (HDF5, OpenBLAS) crash or wait for ever where they get no memory. So a command does not start without room for
itself and its libraries, and it runs in a child process: its death is reported as a lack of memory. Without a
limit, Linux grants addresses that it does not have, and nothing here applies.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from hpcpace.core.environment import set_environ_default
from hpcpace.core.errors import EXIT_USAGE, NotEnoughMemory

# Python, its libraries and a small report take 0.6 GiB of addresses with two threads: `ulimit -v` in steps, by hand.
_MIN_FREE_BYTES = 1 << 30
# How a library dies of a call for memory that it did not check.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def limit_bytes() -> int | None:
    """Return the limit on this process's addresses in bytes, None for none."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)


def go_on_in_child() -> None:
    """Return in a child process, for which this one waits, and ends as it does; report a crash as a lack of memory.

    Raises:
        NotEnoughMemory: the limit leaves too little for any report.
    """
    limit = limit_bytes()
    own_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if limit is not None and limit - own_bytes < _MIN_FREE_BYTES:
        raise NotEnoughMemory(
            f"not enough memory: the limit of {limit >> 20} MiB on addresses leaves {max(limit - own_bytes, 0) >> 20} "
            f"MiB, and reading traces takes at least {_MIN_FREE_BYTES >> 20} MiB: allow more (ulimit -v)"
        )
    set_environ_default("OPENBLAS_NUM_THREADS", "1")  # each thread takes addresses of its own
    sys.stdout.flush()
    sys.stderr.flush()
    if (child := os.fork()) != 0:
        _end_like(child)
    sys.excepthook = _without_hdf5
    sys.unraisablehook = lambda _: None


def leave() -> NoReturn:
    """End this process with the exit code of bad input, without the libraries' own ends: they free what is damaged."""
    with contextlib.suppress(OSError, MemoryError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(EXIT_USAGE)


def _end_like(child: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to both
    for number in _FORWARDED:
        signal.signal(number, lambda received, _: os.kill(child, received))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code >= 0:
        os._exit(code)
    if -code in _CRASHES:
        os.write(2, _crash_line(signal.Signals(-code)).encode())
        os._exit(EXIT_USAGE)
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def _crash_line(number: signal.Signals) -> str:
    limit = limit_bytes()
    room = "" if limit is None else f" with a limit of {limit >> 20} MiB on addresses"
    return f"hpcpace: not enough memory ({number.name} in a library{room}): allow more (ulimit -v, --mem of the job)\n"


def _without_hdf5(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print a traceback, unless HDF5 could not close an object: that it has lost it is said once, as lack of memory."""
    last = traceback
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or Path(last.tb_frame.f_code.co_filename).parts[:1] != ("h5py",):
        sys.__excepthook__(kind, error, traceback)
