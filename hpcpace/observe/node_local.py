"""What a rank saves before it ends: its trace from node-local disk, and the rows in memory at SIGTERM.

Slurm sends SIGTERM to every rank at scancel and at the time limit, and SIGKILL after KillWait seconds. The trace of a
rank that was killed is left on the disk, from where another process of its user can bring it home.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType

from hpcpace.core.codec import FOREIGN_ERRORS
from hpcpace.core.files import Folder, copy_file, other_writers, read_most, write_all
from hpcpace.core.rundir import NUM_OURS_OF_TRACES
from hpcpace.observe.default_action import act_by_default
from hpcpace.world.deadline import Deadline, in_time

_ENDS_WITHIN_S = 5.0
# Of the time to copy a trace, what is kept for removing what was copied of one that takes longer.
_TIDYING_SHARE = 0.1


_CLAIM = "home.json"
_MOST_CLAIM_BYTES = 1 << 16
# Whoever else could write to the folder could put a link to any file of the user's in the place of the trace.
_MODE = 0o755


class NodeLocalTrace:
    """A trace that is on node-local disk while the job runs, and is copied into the run, whole or not at all.

    Everybody may be able to write to the disk, as to /tmp: the trace gets a new folder, which is held open, and no
    planted link is followed. Only its user can write to it. `home.json` in it says where the trace belongs. The process
    that writes the trace holds a lock on that file, which the kernel releases when the process ends, however that
    happens.

    Args:
        trace_dir: the folder on that disk; made if it does not exist.
        name: of the trace's own folder in it.
        destination: the HDF5 file in the run.

    Attributes:
        path: the HDF5 file on that disk.
        destination: the one in the run.
    """

    def __init__(self, trace_dir: Path, name: str, destination: Path) -> None:
        self.path = trace_dir / name / destination.name
        self._trace_dir = trace_dir
        self.destination = destination
        self._folder: Folder | None = None
        self._claim: int | None = None
        self._is_removed = False

    @classmethod
    def left_behind(cls, trace_dir: Folder, name: str) -> NodeLocalTrace | None:
        """Take a trace over that a process has left on the disk; None if that process still writes it.

        Args:
            trace_dir: the folder on that disk.
            name: of the trace's own folder in it.

        Raises:
            OSError: it is no such folder, belongs to somebody else, or can be written to by others.
        """
        with trace_dir.folder(name) as folder:
            status = os.fstat(folder.descriptor)
            _check_owner(status)
            if other_writers(status):
                raise OSError(errno.EPERM, "others can write to it")
            _check_owner(folder.status(_CLAIM))
            os.close(folder.open_file(_CLAIM))  # it is a regular file
            claim = os.open(_CLAIM, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.descriptor)
            try:
                fcntl.lockf(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                destination = _read_claim(claim)
            except BlockingIOError:
                os.close(claim)
                return None
            except BaseException:
                os.close(claim)
                raise
            trace = cls(trace_dir.path, name, destination)
            trace._folder, trace._claim = Folder(os.dup(folder.descriptor), folder.path), claim
            return trace

    def open_folder(self) -> Folder:
        """Open the trace's own folder; make it first, unless it is there.

        Raises:
            OSError: it cannot be made, something has its name, or the trace was brought home and removed.
        """
        if self._is_removed:
            raise OSError(errno.ESTALE, "the trace was brought home", str(self.path))
        if self._folder is None or not os.fstat(self._folder.descriptor).st_nlink:
            self._make_folder()
        assert self._folder is not None
        return Folder(os.dup(self._folder.descriptor), self._folder.path)

    def _make_folder(self) -> None:
        with Folder.open(self._trace_dir, make=True) as parent:
            folder = parent.new_folder(self.path.parent.name, mode=_MODE)
            try:
                claim = folder.create_file(_CLAIM)
                try:
                    write_all(claim, json.dumps({"destination": str(self.destination)}).encode(), 0)
                    fcntl.lockf(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BaseException:
                    os.close(claim)
                    raise
            except BaseException:
                with contextlib.suppress(OSError):
                    parent.remove_tree(self.path.parent.name)
                raise
        self._release()
        self._folder, self._claim = folder, claim

    def bring_home(self, timeout_s: float) -> None:
        """Copy HDF5 file and journal, as far as they exist, into the run; they get their names once both are there.

        Raises:
            OSError: one cannot be read or written, or it takes too long.
        """
        if self._folder is None:
            return
        # What was copied is removed within the time, too. Where the file system hangs, `in_time` ends the wait.
        deadline = Deadline((1 - _TIDYING_SHARE) * timeout_s)
        in_time(partial(self._copy, self._folder, deadline), timeout_s, "it")

    def remove(self) -> None:
        """Remove a trace that was copied into the run, and its folder."""
        self._is_removed = True
        if self._folder is None:
            return
        with contextlib.suppress(OSError), self._folder:  # what stays costs space, and nothing else
            for name in (*self._names(self._folder), _CLAIM):
                self._folder.remove(name)
            with Folder.open(self._trace_dir) as parent:
                os.rmdir(self.path.parent.name, dir_fd=parent.descriptor)
        self._release()

    def release(self) -> None:
        """Leave the trace where it is, to other processes."""
        self._release()
        if self._folder is not None:
            self._folder.close()

    def _release(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            os.close(claim)

    def _copy(self, source: Folder, deadline: Deadline) -> None:
        names = self._names(source)
        with Folder.open(self.destination.parent, num_ours=NUM_OURS_OF_TRACES) as target:
            with ExitStack() as copies:
                for name in names:
                    copy = copies.enter_context(target.replacing(name))
                    self._copy_file(source, name, copy, deadline)
            for name in {self._journal_name}.difference(names):
                # That of a copy at an earlier SIGTERM, which this rank has survived.
                with contextlib.suppress(FileNotFoundError):
                    target.remove(name)

    def _copy_file(self, source: Folder, name: str, copy: int, deadline: Deadline) -> None:
        origin = source.open_file(name)
        try:
            _check_owner(os.fstat(origin))
            copy_file(origin, copy, before_block=deadline.check)
        finally:
            os.close(origin)
        os.fsync(copy)
        deadline.check()

    @property
    def _journal_name(self) -> str:
        return self.path.with_suffix(".journal").name

    def _names(self, folder: Folder) -> list[str]:
        return [name for name in (self.path.name, self._journal_name) if folder.has(name)]


def _check_owner(status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "it belongs to somebody else")


def _read_claim(descriptor: int) -> Path:
    try:
        destination = json.loads(read_most(descriptor, _MOST_CLAIM_BYTES))["destination"]
        if "\0" not in destination:
            return Path(destination)
    except FOREIGN_ERRORS:
        pass
    raise OSError(errno.EINVAL, f"{_CLAIM} does not say where the trace belongs")


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
        if threading.current_thread() is not threading.main_thread() or not _is_free(signal.SIGTERM):
            return False
        reader, writer = self._sockets = socket.socketpair()
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
        writer.close()

    def _tell(self, number: int, frame: FrameType | None) -> None:
        # Once more, for an event loop of the job's may have taken the descriptor's place. A handler of the job's that
        # was set on top of ours may call this, or put it back, long after the trap is gone.
        if self._sockets is not None:
            with contextlib.suppress(BlockingIOError):
                self._sockets[1].send(bytes([number]))
        else:
            act_by_default(number, self._tell)

    def _watch(self, reader: socket.socket) -> None:
        with reader:
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


def _is_free(number: signal.Signals) -> bool:
    """Return whether a signal has no handler, and no event loop listens for signals."""
    listener = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(listener)
    # Handlers set in C, such as those of faulthandler, are unknown to Python.
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    is_caught = int(caught, 16) >> (number - 1) & 1
    return signal.getsignal(number) is signal.SIG_DFL and not is_caught and listener == -1


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
