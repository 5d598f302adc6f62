"""What a failed rank wrote to stderr last, where that is a regular file: CUDA's asserts, NCCL's warnings, C++'s aborts.

Nothing is redirected: the file is read back at the end, a few KiB and only what was written since the session began. Of
a pipe, a socket or a terminal nothing can be read back.
"""

from __future__ import annotations

import hashlib
import os
import stat

from hpcpace.core.log_text import plain_text
from hpcpace.core.redaction import Redaction
from hpcpace.world.deadline import in_time

_STDERR = 2
_MAX_BYTES = 4096
"""memory: read back at most; a C++ stack of torch alone takes 3 KiB."""
_MAX_LETTERS = 2000
"""format: recorded of them, as of the message of an exception."""
_TIMEOUT_S = 1.0
"""timing: the file system may hang, and a rank that ends at SIGTERM has few seconds."""
_NAME_DIGITS = 16
# The beginning of a key may be before what is read.
_END_OF_KEY = "PRIVATE KEY-----"
_OURS = "hpcpace: "


class StderrTail:
    """The file that stderr of this process is when this is made, and how long it is then.

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
        begin, content = in_time(self._read, _TIMEOUT_S, "the file system of stderr")
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
            begin = max(self._begin, status.st_size - _MAX_BYTES)
            return begin, os.pread(reader, max(status.st_size - begin, 0), begin)
        finally:
            os.close(reader)
