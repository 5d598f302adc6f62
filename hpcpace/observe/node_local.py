"""Traces on node-local disk: they are copied into the run at the end, and when the job is told to end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path


def copy_trace(source: Path, destination: Path) -> None:
    """Copy a trace file and its journal, where there is one, each by a temporary name.

    Raises:
        OSError: a file cannot be read or written.
    """
    for suffix in (".journal", ".h5"):
        origin, target = source.with_suffix(suffix), destination.with_suffix(suffix)
        if origin.exists():
            temporary = target.with_name(f".{target.name}.copying")
            shutil.copyfile(origin, temporary)
            os.replace(temporary, target)


class TerminationTrap:
    """Calls `rescue` when SIGTERM arrives, also while the main thread is blocked inside torch, and then ends as before.

    Python runs signal handlers in the main thread between two bytecodes, which a rank that waits inside a collective
    never reaches. The C-level handler, though, writes to a descriptor at once, and a thread of ours reads it. A
    handler that the job has set itself is left alone.
    """

    def __init__(self, rescue: Callable[[], None]) -> None:
        self._rescue = rescue
        self._reader, self._writer = socket.socketpair()
        self._installed = False

    def install(self) -> bool:
        """Set the trap and return whether it could be set."""
        free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if not free or threading.current_thread() is not threading.main_thread():
            return False
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        threading.Thread(target=self._watch, name="hpcpace-sigterm", daemon=True).start()
        self._installed = True
        return True

    def remove(self) -> None:
        """Take the trap away."""
        if self._installed:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._writer.close()

    def _watch(self) -> None:
        while True:
            numbers = self._reader.recv(16)
            if not numbers:
                self._reader.close()
                return
            if signal.SIGTERM in numbers:
                self._rescue()
                # 128 + the signal's number is how shells and Slurm report such an end.
                os._exit(128 + signal.SIGTERM)
