"""Answers `hpcpace hang` on the host of a rank: where it is now, with its stack, before any step has lasted too long.

A thread sleeps on a socket until somebody asks. It writes no file, and the rank does nothing for it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from hpcpace.core.files import socket_aside
from hpcpace.core.rundir import Attempt
from hpcpace.hang.notices import TIMEOUT_S, Notice, address, is_own_user, notice_text

_MAX_WAITING = 4


class Answers:
    """Answers processes of this user on this host, from `start` to `stop`.

    Args:
        attempt: in which the rank records.
        rank: its number.
        notice: returns what it says of itself, in any thread.
        warn: takes a warning that nobody is answered.
    """

    def __init__(
        self, attempt: Attempt, rank: int, *, notice: Callable[[], Notice], warn: Callable[[str], None]
    ) -> None:
        self._attempt, self._rank, self._notice, self._warn = attempt, rank, notice, warn
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Begin to listen."""
        listener = socket_aside(socket.socket(socket.AF_UNIX))
        try:
            listener.bind(address(self._attempt, self._rank))
            listener.listen(_MAX_WAITING)
        except OSError as error:
            listener.close()
            self._warn(f"`hpcpace hang` cannot ask this rank for its stack: {error.strerror or error}")
            return
        self._listener = listener
        threading.Thread(target=self._run, args=[listener], name="hpcpace-answers", daemon=True).start()

    def stop(self) -> None:
        """End; who asks from here on is refused."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread up
                listener.close()

    def _run(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                connection, _ = listener.accept()
            except OSError:  # it was closed
                return
            with connection, suppress(OSError):
                connection.settimeout(TIMEOUT_S)
                if is_own_user(connection):
                    connection.sendall(self._text())

    def _text(self) -> bytes:
        try:
            return notice_text(self._notice()).encode()
        except Exception as error:  # the boundary of this thread: the job does not depend on it
            self._warn(f"`hpcpace hang` is not answered: {type(error).__name__}: {error}")
            return b""
