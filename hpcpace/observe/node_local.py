"""Traces on a disk of the node while the job runs, and how they get into the run.

A disk is usable if its file system is known to be on a local device, it takes files and has room. A file system in
memory, as /dev/shm is, does not count: what is written there is memory of the job, which could cost its life. The trace
of a rank that was killed is left on the disk: at its end every rank of the node brings home those of its own run that
nobody writes any more, and where no rank has lived on, `hpcpace collect` does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from hpcpace.core.codec import FOREIGN_ERRORS
from hpcpace.core.environment import process_environ
from hpcpace.core.files import Folder, copy_file, other_writers, read_most, write_all
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import NUM_OURS_OF_TRACES, rank_of
from hpcpace.trace.schema import TraceHeader
from hpcpace.world.deadline import Deadline, in_time

AUTO = Path("auto")
"""The value of `trace.trace_dir` that has a disk searched for."""

_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")
_FOLDERS = ("/tmp", "/var/tmp")
# Any other may be over the network, whatever it is called.
_LOCAL = frozenset(["ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "overlay"])
_IN_MEMORY = frozenset(("tmpfs", "ramfs"))
_MIN_BYTES_OF_RANK = 256 << 20
_MOUNTS = Path("/proc/self/mountinfo")


def find_node_local_disk(environ: Mapping[str, str], num_ranks: int, *, mounts: Path = _MOUNTS) -> Path:
    """Return a folder on a disk of this node.

    Args:
        environ: may name folders in SLURM_TMPDIR and TMPDIR; then come /tmp and /var/tmp.
        num_ranks: number of ranks on this node, which share the disk.
        mounts: the mounts of this process, as in proc(5).

    Raises:
        OSError: there is none; its text says why, folder by folder.
    """
    objections = []
    for name, folder in candidates(environ):
        objection = _objection(folder, num_ranks, mounts)
        if not objection:
            return folder
        objections.append(f"{name} {objection}")
    raise OSError("; ".join(objections))


def candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield the folders that may be on a disk of the node, each once, and what to call them."""
    seen = set()
    named = [(f"{name}={environ[name]}", environ[name]) for name in _VARIABLES if environ.get(name)]
    for name, text in (*named, *((folder, folder) for folder in _FOLDERS)):
        folder = Path(os.path.realpath(text))
        if folder not in seen:
            seen.add(folder)
            yield name, folder


def _objection(folder: Path, num_ranks: int, mounts: Path) -> str:
    try:
        if not folder.is_dir():
            return "is no folder"
        kind = file_system(folder, mounts.read_text(encoding="utf-8", errors="surrogateescape"))
        if kind in _IN_MEMORY:
            return f"is in memory ({kind})"
        if kind not in _LOCAL:
            return f"is on {kind or 'an unknown file system'}, not on a local disk"
        if not os.access(folder, os.W_OK | os.X_OK):
            return "takes no files of ours"
        room = os.statvfs(folder)
    except OSError as error:
        return f"cannot be used ({error.strerror})"
    free, least = room.f_bavail * room.f_frsize, num_ranks * _MIN_BYTES_OF_RANK
    if free < least or (room.f_files and not room.f_favail):
        return f"has {free >> 20} MiB free, which is less than the {least >> 20} MiB for {num_ranks} ranks"
    return "is read-only" if room.f_flag & os.ST_RDONLY else ""


def file_system(folder: Path, mounts: str) -> str:
    """Return the type of the file system that a folder is on; empty if no mount has it.

    Args:
        folder: its real path.
        mounts: the content of /proc/self/mountinfo.
    """
    found, longest = "", -1
    for line in mounts.splitlines():
        mount, separator, source = line.partition(" - ")
        fields = mount.split()
        if not separator or len(fields) < 5:
            continue
        # Blanks in a path are written as octal numbers.
        point = Path(fields[4].encode("latin-1", "backslashreplace").decode("unicode_escape"))
        # Of two mounts at one place, the later one is seen.
        if (point == folder or point in folder.parents) and len(point.parts) >= longest:
            found, longest = source.split()[0], len(point.parts)
    return found


_PLACE_TIMEOUT_S = 5.0


def place_on_node(
    trace_dir: Path | None, header: TraceHeader, path: Path, *, warn: Callable[[str], None]
) -> NodeLocalTrace | None:
    """Return where a rank's trace is on node-local disk while the job runs; None if that is the run itself.

    Args:
        trace_dir: the setting `trace.trace_dir`.
        header: of the trace.
        path: where it belongs in the run.
        warn: takes a warning that the disk cannot be used.
    """
    if trace_dir is None:
        return None
    try:
        return in_time(partial(_make_place, trace_dir, header, path), _PLACE_TIMEOUT_S, "the node-local disk")
    except OSError as error:
        # The ranks of a node have one disk. That a name is taken is a matter of one rank.
        if header.local_rank <= 0 or isinstance(error, FileExistsError):
            reason = error.strerror or str(error)
            warn(f"trace.trace_dir is {trace_dir}, but the trace is written into the run at once: {reason}")
        return None


def _make_place(trace_dir: Path, header: TraceHeader, path: Path) -> NodeLocalTrace:
    """Make a folder for a rank's trace on node-local disk, by a name that no other rank and no earlier job has used."""
    if trace_dir == AUTO:
        trace_dir = find_node_local_disk(process_environ(), max(header.local_size, 1))
    if trace_dir.exists() and not trace_dir.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder", str(trace_dir))
    run_id = header.run_id[:_MAX_RUN_ID]
    name = f"{PREFIX}{run_id}-attempt-{header.attempt}-rank-{header.rank}-{header.created_unix_ns}"
    trace = NodeLocalTrace(trace_dir.absolute(), name, path)
    trace.open_folder().close()
    return trace


# Of the time to copy a trace, what is kept for removing what was copied of one that takes longer.
_TIDYING_SHARE = 0.1


_CLAIM = "home.json"
_MAX_CLAIM_BYTES = 1 << 16
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
        self._coming_home = threading.Lock()

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

    def come_home(self, timeout_s: float, *, is_last: bool, warn: Callable[[str], None]) -> None:
        """Copy this rank's trace into the run, and with it those of ranks of this node that were killed.

        Args:
            timeout_s: how long it may take.
            is_last: whether nothing is recorded after this, so that the trace is removed from the disk.
            warn: takes a warning that the trace stays on the disk.
        """
        # A rank that leaves by itself may be terminated meanwhile: the second to come waits for the first.
        with self._coming_home:
            if not self._is_removed:
                self._come_home(timeout_s, is_last=is_last, warn=warn)

    def _come_home(self, timeout_s: float, *, is_last: bool, warn: Callable[[str], None]) -> None:
        deadline = Deadline(timeout_s)
        try:
            self.bring_home(timeout_s)
        except OSError as error:
            reason = error.strerror or str(error)
            warn(
                f"the trace stays in {self.path}: copying it to {self.destination} failed: {reason}; "
                "copy it, and the journal next to it, before the disk is cleared"
            )
        else:
            if is_last:
                self.remove()
        with contextlib.suppress(OSError):  # `hpcpace collect` finds what is left
            homes, own = [self.destination.parent], self.path.parent
            bring_left_traces_home(own.parent, homes, timeout_s=deadline.left_s, own_name=own.name)

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
        destination = json.loads(read_most(descriptor, _MAX_CLAIM_BYTES))["destination"]
        if "\0" not in destination:
            return Path(destination)
    except FOREIGN_ERRORS:
        pass
    raise OSError(errno.EINVAL, f"{_CLAIM} does not say where the trace belongs")


PREFIX = "hpcpace-"
"""Beginning of the names of traces' folders on node-local disk."""

# File systems take names of 255 bytes.
_MAX_RUN_ID = 40
_NAME = re.compile(rf"{PREFIX}.+-attempt-[0-9]+-rank-[0-9]+-[0-9]+", re.DOTALL)

_Place = tuple[int, int]
"""Device and inode."""


@dataclass(frozen=True, kw_only=True)
class LeftTrace:
    """A trace that was found on node-local disk.

    Attributes:
        path: where it was found.
        destination: where it belongs.
        problem: why it is still there; empty if it was brought home.
    """

    path: Path
    destination: Path
    problem: str


def bring_left_traces_home(
    trace_dir: Path,
    homes: Iterable[Path],
    *,
    timeout_s: float,
    own_name: str = "",
    passed_over: Counter[str] | None = None,
) -> list[LeftTrace]:
    """Bring all traces home that belong into some folders and that nobody writes any more.

    Args:
        trace_dir: the folder on node-local disk.
        homes: folders of traces in a run.
        timeout_s: how long it may take, all together.
        own_name: folder of this process's own trace, which is left alone.
        passed_over: takes why others were left alone, and how many for each reason.

    Raises:
        OSError: the folder cannot be read.
    """
    deadline, found = Deadline(timeout_s), []
    passed_over = Counter() if passed_over is None else passed_over
    places = {place for home in homes if (place := _place(home))}
    with Folder.open(trace_dir) as folder:
        for name in folder.names():
            if not _NAME.fullmatch(name) or name == own_name:
                continue
            try:
                found.append(_bring_home(folder, name, places, deadline))
            except _PassedOver as reason:
                passed_over[str(reason)] += 1
    return found


class _PassedOver(Exception):
    """A folder is left alone; says why."""


def _bring_home(folder: Folder, name: str, places: Set[_Place], deadline: Deadline) -> LeftTrace:
    """Return the trace of a name, brought home if that works.

    Raises:
        _PassedOver: it was not left, or does not belong into one of the folders.
    """
    try:
        trace = NodeLocalTrace.left_behind(folder, name)
    except FileNotFoundError:
        raise _PassedOver("it does not say where it belongs") from None
    except OSError as error:  # somebody else's, or none
        raise _PassedOver(error.strerror or str(error)) from None
    if trace is None:
        raise _PassedOver("a process still writes it")
    try:
        if rank_of(trace.destination.name) is None or _place(trace.destination.parent) not in places:
            raise _PassedOver("it belongs to another run")
        trace.bring_home(deadline.left_s)
        trace.remove()
        problem = ""
    except OSError as error:
        problem = error.strerror or str(error)
    finally:
        trace.release()
    return LeftTrace(path=trace.path, destination=trace.destination, problem=problem)


def _place(folder: Path) -> _Place | None:
    """Return what identifies a folder of traces, whatever leads to it; None where there is none."""
    try:
        with Folder.open(folder, num_ours=NUM_OURS_OF_TRACES) as opened:
            found = os.fstat(opened.descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino
