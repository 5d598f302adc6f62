"""Notices every way in which a Python process ends by itself, before it does."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

from hpcpace.observe.own_frames import leave_out_own_frame


class ProcessEnd:
    """Calls back once as the process ends: at its last line, by an exception, sys.exit, os._exit or os.execv.

    Of a child of multiprocessing, the end is that of the function which it runs.

    Args:
        ended: called with the exception that ends the process, if any; a SystemExit where the exit code is not 0, and
            where the process ends without waiting for anything.
    """

    def __init__(self, ended: Callable[[BaseException | None], None]) -> None:
        self._ended = ended
        self._pid = 0
        self._exit: BaseException | None = None
        self._cleanup = ExitStack()

    def watch(self) -> None:
        """Start to notice the end of this process; forked children have to call this again."""
        self._pid = os.getpid()
        atexit.register(self._at_exit)
        self._cleanup.callback(atexit.unregister, self._at_exit)
        processes = sys.modules.get("multiprocessing.process")
        if processes is not None and processes.parent_process() is not None:
            self._watch_child()
        self._replace(sys, "excepthook", self._around_excepthook)
        self._replace(sys, "exit", self._around_exit)
        for name in ("_exit", "execv", "execve"):
            self._replace(os, name, self._before)

    def forget(self) -> None:
        """Leave the process as it was."""
        self._cleanup.close()

    def _watch_child(self) -> None:
        """Notice the end of what this child of multiprocessing runs, which it ends by an exit code, whatever it was."""
        from multiprocessing.util import Finalize

        # Called before multiprocessing takes the exception that is on its way.
        self._cleanup.callback(Finalize(None, self._child_ends, exitpriority=sys.maxsize).cancel)

    def _child_ends(self) -> None:
        error = sys.exception()
        if isinstance(error, SystemExit):  # torch's spawn raises it where a rank's function has failed
            error = self._exit or (error if error.code else None)
        self._end(error)

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        wrapper = wrap(original)
        setattr(owner, name, wrapper)

        def restore() -> None:
            if getattr(owner, name) is wrapper:  # else somebody has wrapped ours, which from now on only passes on
                setattr(owner, name, original)

        self._cleanup.callback(restore)

    def _end(self, error: BaseException | None) -> None:
        # A forked child has these hooks as well, and nothing to end.
        if self._pid == os.getpid():
            self._pid = 0
            self._ended(error)

    def _at_exit(self) -> None:
        self._end(self._exit)

    def _around_excepthook(self, hook: Any) -> Any:
        def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            self._end(error)
            try:
                hook(kind, error, trace)
            except BaseException as of_hook:
                leave_out_own_frame(of_hook)
                raise

        return excepthook

    def _around_exit(self, exit_: Any) -> Any:
        @wraps(exit_)
        def noted(*args: Any) -> None:
            # Not the end yet: who calls this may be caught. The exception that is being handled says more.
            handled = sys.exception()
            try:
                exit_(*args)
            except BaseException as error:
                leave_out_own_frame(error)
                if isinstance(error, SystemExit):
                    self._exit = (handled or error) if _is_failure(error.code) else None
                raise

        return noted

    def _before(self, call: Any) -> Any:
        @wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            self._end(SystemExit(args[0] if call.__name__ == "_exit" and args else 0))
            return call(*args, **kwargs)

        return called


def _is_failure(code: object) -> bool:
    """Return whether Python ends with another exit code than 0 by a SystemExit of this code."""
    return not (code is None or (isinstance(code, int) and code == 0))
