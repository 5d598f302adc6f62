"""Work on foreign files by libraries that allocate what a file asks for, in a process with limited memory."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def call_bounded(function: Callable[[], _Result], *, max_bytes: int) -> _Result:
    """Return what a function returns in a forked process; what it raises is raised here. The results are pickled.

    Args:
        function: what to call.
        max_bytes: the memory that it may take beyond that of this process.

    Raises:
        MemoryError: it took more, or the process died.
    """
    fork = multiprocessing.get_context("fork")  # what is imported here does not have to be again
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_answer, args=(function, sender, max_bytes), daemon=True)
    process.start()
    sender.close()
    try:
        result, error = receiver.recv()
    except EOFError:
        result, error = None, MemoryError()
    finally:
        receiver.close()
        process.join()
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _answer(function: Callable[[], Any], sender: Connection, max_bytes: int) -> None:
    _silence()
    limit = _data_bytes() + max_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer: tuple[Any, Exception | None]
    try:
        answer = (function(), None)
    except Exception as error:
        answer = (None, error)
    try:
        sender.send(answer)
    finally:
        os._exit(0)  # without the ends of libraries that lack memory


def _silence() -> None:
    """Close what libraries write to when they lack memory."""
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)


def _data_bytes() -> int:
    """Return the memory of this process that RLIMIT_DATA counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
