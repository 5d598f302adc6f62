"""Asks the ranks of a job on this host where they are, while it runs, also before any of them has noticed a hang.

Each rank listens on a socket in Linux's abstract namespace, named after the folder of its attempt, and answers with
what its notice of a hang would have; see `hpcpace.observe.answers`. Both sides let the kernel say who is at the other
end: whoever asks and whoever answers must be the same user. A job without such a socket is not disturbed.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress

from hpcpace.core.codec import FOREIGN_ERRORS, parse_json
from hpcpace.core.rundir import Attempt
from hpcpace.hang.notices import MAX_BYTES, Notice, notice_of

MAX_ASKED = 9
"""display: as many ranks as a verdict has words for, and one of those that wait."""
TIMEOUT_S = 3.0
"""timing: a rank whose Python lock is held in C does not answer; all are waited for together."""
_CREDENTIALS = struct.Struct("3i")
_PIECE = 1 << 16


def address(attempt: Attempt, rank: int) -> str:
    """Return the name of the socket on which a rank answers.

    Raises:
        OSError: the folder of the attempt cannot be looked at.
    """
    status = attempt.path.stat()
    return f"\0hpcpace-asked-{status.st_dev:x}-{status.st_ino:x}-{rank}"


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket is of this user."""
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(content)
    return bool(user == os.geteuid())


def ask_ranks(attempt: Attempt, ranks: Iterable[int], *, timeout_s: float = TIMEOUT_S) -> dict[int, Notice]:
    """Return what ranks on this host say of themselves; those that do not answer in time, or at all, are left out."""
    until_s = time.monotonic() + timeout_s
    answers: dict[int, Notice] = {}
    with ExitStack() as opened:
        asked: dict[int, socket.socket] = {}
        for rank in ranks:
            connection = opened.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(timeout_s)
            with suppress(OSError):
                connection.connect(address(attempt, rank))
                if is_own_user(connection):
                    asked[rank] = connection
        for rank, connection in asked.items():
            with suppress(OSError, *FOREIGN_ERRORS):
                answers[rank] = notice_of(parse_json(_read(connection, until_s)), rank)
    return answers


def _read(connection: socket.socket, until_s: float) -> bytes:
    """Return all that the other end sends.

    Raises:
        OSError: it takes too long, or sends too much.
    """
    content = b""
    while len(content) <= MAX_BYTES:
        connection.settimeout(max(until_s - time.monotonic(), 1e-3))
        piece = connection.recv(_PIECE)
        if not piece:
            return content
        content += piece
    raise OSError("the answer is too long")
