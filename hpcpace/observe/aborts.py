"""Has what a rank has in memory saved when the process aborts, as gloo and NCCL do in threads of their own.

The handler of SIGABRT must be compiled, aborts.cpp: Python's handlers run when the main thread reaches the next
bytecode, which a process that aborts never does. Without a C++ compiler at installation an abort costs the rows since
the last flush, as SIGKILL does.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hpcpace.core.compiled import load_compiled

_TIMEOUT_MS = 5000
"""timing: an abort is held up no longer, also where a disk hangs."""


class AbortTrap:
    """Calls `rescue` in a thread of its own when this process aborts, and then lets it.

    Args:
        rescue: brings to disk what is in memory.
    """

    def __init__(self, rescue: Callable[[], object]) -> None:
        self._rescue = rescue
        self._tell_fd = self._told_fd = -1

    def install(self) -> bool:
        """Set the trap; return whether that worked."""
        library = _library()
        if library is None:
            return False
        asked_fd, self._tell_fd = os.pipe2(os.O_CLOEXEC)
        self._told_fd, answer_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._tell_fd, False)
        check = ctypes.cast(ctypes.pythonapi.PyGILState_Check, ctypes.c_void_p)
        if library.hold_aborts(self._tell_fd, self._told_fd, _TIMEOUT_MS, check):
            return False
        threading.Thread(target=self._watch, args=[asked_fd, answer_fd], name="hpcpace-abort", daemon=True).start()
        return True

    def remove(self) -> None:
        """Remove the trap; the thread ends."""
        library = _library()
        if library is not None and self._tell_fd >= 0:
            library.release_aborts()
            os.close(self._tell_fd)
            self._tell_fd = self._told_fd = -1

    def _watch(self, asked_fd: int, answer_fd: int) -> None:
        try:
            if os.read(asked_fd, 1):
                with suppress(Exception):  # the process aborts for a reason of its own
                    self._rescue()
        finally:
            os.close(answer_fd)  # the other end of the pipe is ready then
            os.close(asked_fd)


@cache
def _library() -> Any | None:
    library = load_compiled(Path(__file__).with_suffix(".cpp"))
    if library is not None:
        library.hold_aborts.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        library.release_aborts.restype = None
    return library
