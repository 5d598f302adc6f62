"""Read and write files in folders that may belong to somebody else, even as root.

A folder is opened once and held. Names are looked up in it by descriptor and links in it are not followed, so its owner
cannot redirect reads or writes, whatever is swapped meanwhile. Every file that hpcpace writes, except traces, is
written here: under a temporary name, with the mode that the umask allows, and then renamed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import socket
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Opening a FIFO would wait for its writer; for a regular file the flag changes nothing.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK_BYTES = 1 << 20
_REASONS = {
    errno.ELOOP: "it is a symbolic link, which is not followed here",
    errno.ENOTDIR: "it is no folder, or a symbolic link to one, which is not followed here",
    errno.ENXIO: "it is no regular file",
}


_FIRST_ASIDE = 512
"""A program that has closed descriptors gets their numbers for its next files, the lowest first."""


def set_aside(descriptor: int) -> int:
    """Return a descriptor of the same file with a high number, and close the one given.

    For what stays open in somebody else's process: a program that closes descriptors that it does not know, as daemons
    do, would else find us writing to its next files, or closing them.
    """
    try:
        aside: int = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_ASIDE)
    except OSError:  # the process may have no more descriptors, or none so high
        return descriptor
    os.close(descriptor)
    return aside


def socket_aside(made: socket.socket) -> socket.socket:
    """Return a socket with the descriptor of another one `set_aside`; the other one is detached."""
    return socket.socket(made.family, made.type, fileno=set_aside(made.detach()))


def close_own(descriptor: int) -> None:
    """Close a descriptor, unless the program has done so."""
    try:
        os.close(descriptor)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise


@contextmanager
def opening_aside() -> Iterator[None]:
    """Give high numbers also to descriptors that somebody else's code opens in the block."""
    taken = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    try:
        with contextlib.suppress(OSError):  # as above
            while taken[-1] < _FIRST_ASIDE:
                taken.append(os.dup(taken[0]))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)


class Folder:
    """A folder that is held open until `close`, the end of a `with` block, or the end of the object.

    Attributes:
        path: what messages call it; only `open` looks it up.
        owner: files of this user alone are read in it and in folders that are opened in it; None: those of anybody.
    """

    def __init__(self, descriptor: int, path: Path, owner: int | None = None) -> None:
        self.path = path
        self.owner = owner
        self._descriptor = descriptor
        self._finalizer = weakref.finalize(self, close_own, descriptor)

    @classmethod
    def open(cls, path: Path, *, make: bool = False, num_ours: int = 0) -> Folder:
        """Open the folder at a path. Links in the path are followed, because the user chose it.

        Args:
            path: path of the folder.
            make: whether to make it and its parents if they do not exist.
            num_ours: number of names at the end of the path that hpcpace chose: links there are not followed.

        Raises:
            OSError: it does not exist and was not, or could not be, made.
        """
        if num_ours:
            with cls.open(path.parent, make=make, num_ours=num_ours - 1) as parent:
                return parent.make_folder(path.name) if make else parent.folder(path.name)
        if make:
            path.mkdir(parents=True, exist_ok=True)
        return cls(os.open(path, _FOLDER), path)

    def again(self) -> Folder:
        """Open the same folder once more, whatever has its path now."""
        return Folder(os.dup(self._descriptor), self.path, self.owner)

    def aside(self) -> Folder:
        """Open it once more, to stay open in somebody else's process; see `set_aside`."""
        return Folder(set_aside(os.dup(self._descriptor)), self.path, self.owner)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder."""
        self._finalizer()

    @property
    def descriptor(self) -> int:
        """The descriptor of the open folder."""
        return self._descriptor

    def names(self) -> list[str]:
        """Return the names in it, sorted.

        Raises:
            OSError: it cannot be read.
        """
        return sorted(os.listdir(self._descriptor))

    def folder(self, name: str) -> Folder:
        """Open a folder in it.

        Raises:
            OSError: there is no folder of this name; a link does not count as one.
        """
        with _named(self.path / name):
            descriptor = os.open(_checked(name), _FOLDER | os.O_NOFOLLOW, dir_fd=self._descriptor)
            return Folder(descriptor, self.path / name, self.owner)

    def has_folder(self, name: str) -> bool:
        """Return whether there is a folder of this name in it; a link does not count as one."""
        found = self._found(name)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def has(self, name: str) -> bool:
        """Return whether anything in it has this name, even a dangling link."""
        return self._found(name) is not None

    def size_bytes(self, name: str) -> int:
        """Return the size of a regular file in it; 0 if there is none of this name."""
        found = self._found(name)
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else 0

    def status(self, name: str) -> os.stat_result:
        """Return what the file system reports for a name in it; for a link, about the link itself.

        Raises:
            OSError: there is nothing of this name.
        """
        with _named(self.path / name):
            return os.stat(_checked(name), dir_fd=self._descriptor, follow_symlinks=False)

    def _found(self, name: str) -> os.stat_result | None:
        try:
            return self.status(name)
        except OSError:
            return None

    def open_file(self, name: str) -> int:
        """Return a descriptor that reads a regular file in it.

        Raises:
            OSError: there is no regular file of this name; links, FIFOs, sockets and devices do not count as one. Or it
                is not the owner's.
        """
        with _named(self.path / name):
            return _regular(os.open(_checked(name), _FILE, dir_fd=self._descriptor), self.owner)

    def read(self, name: str, *, most_bytes: int) -> bytes:
        """Return the content of a regular file in it.

        Raises:
            OSError: as for `open_file`, or it holds more than `most_bytes`.
        """
        descriptor = self.open_file(name)
        try:
            with _named(self.path / name):
                return read_most(descriptor, most_bytes)
        finally:
            os.close(descriptor)

    def make_folder(self, name: str, *, mode: int = 0o777) -> Folder:
        """Open a folder in it, and make it first if necessary; the umask applies to the mode.

        Raises:
            OSError: it cannot be made, or what has the name is not a folder; a link does not count as one.
        """
        with _named(self.path / name), contextlib.suppress(FileExistsError):
            os.mkdir(_checked(name), mode, dir_fd=self._descriptor)
        return self.folder(name)

    def new_folder(self, name: str, *, mode: int = 0o777) -> Folder:
        """Make a new folder in it and open it; the umask applies to the mode.

        Raises:
            OSError: it cannot be made, something has the name, or somebody replaced it by another folder.
        """
        with _named(self.path / name):
            os.mkdir(_checked(name), mode, dir_fd=self._descriptor)
        folder = self.folder(name)
        if os.fstat(folder.descriptor).st_uid != os.geteuid():
            folder.close()
            raise OSError(errno.EPERM, "somebody else has put a folder in its place", str(self.path / name))
        return folder

    def create_file(self, name: str, *, mode: int = 0o666) -> int:
        """Return a descriptor that reads and writes a new file in it; the umask applies to the mode.

        Raises:
            OSError: it cannot be made, or something has the name, even a link.
        """
        with _named(self.path / name):
            return os.open(_checked(name), _NEW_FILE, mode, dir_fd=self._descriptor)

    def write(self, name: str, content: str | bytes, *, mode: int = 0o666, is_exact: bool = False) -> Path:
        """Write a file atomically, so that nobody reads half of it, and return its path.

        Whatever has the name is replaced, and never followed or written to. The umask applies to the mode, unless that
        is to be exact.

        Raises:
            OSError: it cannot be written; what had the name before is still there.
        """
        data = content.encode() if isinstance(content, str) else content
        with (
            _named(self.path / name),
            self.replacing(name, mode=mode) as descriptor,
            os.fdopen(descriptor, "wb", closefd=False) as file,
        ):
            if is_exact:
                os.fchmod(descriptor, mode)
            file.write(data)
        return self.path / name

    @contextmanager
    def replacing(self, name: str, *, mode: int = 0o666) -> Iterator[int]:
        """Yield a descriptor of a new file, which gets the name if the block ends without an error.

        Whatever has the name is replaced, and never followed or written to. The descriptor is closed with the block;
        after an error the new file is removed. The umask applies to the mode.

        Raises:
            OSError: the file cannot be made, closed or renamed; what had the name before is still there.
        """
        temporary = f".{_checked(name)}.{os.urandom(8).hex()}"
        descriptor = self.create_file(temporary, mode=mode)
        try:
            try:
                yield descriptor
            finally:
                os.close(descriptor)  # some file systems report a full disk only now
            os.rename(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            with contextlib.suppress(OSError):  # the owner of the folder may have removed it
                self.remove(temporary)
            raise

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Yield a file to write piece by piece, which gets the name if the block ends without an error.

        Raises:
            OSError: as of `replacing`, or it cannot be written.
        """
        with (
            _named(self.path / name),
            self.replacing(name) as descriptor,
            os.fdopen(descriptor, "wb", closefd=False) as file,
        ):
            yield file

    def remove(self, name: str) -> None:
        """Remove a file from it; a link is removed, not followed.

        Raises:
            OSError: it cannot be removed, or does not exist.
        """
        with _named(self.path / name):
            os.unlink(_checked(name), dir_fd=self._descriptor)

    def remove_tree(self, name: str, *, most_nested: int = 32) -> None:
        """Remove a folder in it with everything inside; links and FIFOs there are removed without opening them.

        shutil.rmtree opens before it checks, and so waits for ever at a FIFO.

        Raises:
            OSError: there is no folder of this name (a link does not count as one), something cannot be removed, or
                folders are nested more than `most_nested` deep.
        """
        if not most_nested:
            raise OSError(errno.ENAMETOOLONG, "folders are nested too deep", str(self.path / name))
        with self.folder(name) as inner:
            for other in inner.names():
                if inner.has_folder(other):
                    inner.remove_tree(other, most_nested=most_nested - 1)
                else:
                    inner.remove(other)
        with _named(self.path / name):
            os.rmdir(name, dir_fd=self._descriptor)


def write_file(path: Path, content: str | bytes) -> None:
    """Write the file that a user has named, atomically; see `Folder.write`.

    Raises:
        OSError: as of `target_folder`, or the file cannot be written.
    """
    with target_folder(path) as folder:
        folder.write(path.name, content)


def target_folder(path: Path) -> Folder:
    """Open the folder of a file that a user has named, to replace or remove the file there.

    A rename over /dev/null, or over the link /dev/stdout, would leave a file in its place for everybody.

    Raises:
        OSError: the folder does not exist, or what has the name, or a link of the name leads to, is no regular file.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        mode = stat.S_IFREG
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a folder, device, pipe or socket is not replaced by a file", str(path))
    return Folder.open(path.parent)


def read_file(path: Path, *, most_bytes: int) -> bytes:
    """Return the content of the regular file at a path; see `Folder.read`.

    Raises:
        OSError: it does not exist, or holds more than `most_bytes`.
    """
    with Folder.open(path.parent) as folder:
        return folder.read(path.name, most_bytes=most_bytes)


def read_most(descriptor: int, most_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: it cannot be read, or holds more than `most_bytes`; no more than that is read.
    """
    size = os.fstat(descriptor).st_size
    if size <= most_bytes:
        blocks = []
        left = most_bytes + 1  # the file may grow while it is read
        while left and (block := os.read(descriptor, min(_BLOCK_BYTES, left))):
            blocks.append(block)
            left -= len(block)
        if left:
            return b"".join(blocks)
    raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes")


def write_some(descriptor: int, content: bytes, offset: int) -> tuple[int, OSError | None]:
    """Write as much as the disk takes; return the number of bytes, and why it did not take the rest."""
    view, num_taken = memoryview(content), 0
    try:
        while num_taken < len(view):
            num_taken += os.pwrite(descriptor, view[num_taken:], offset + num_taken)
    except OSError as error:
        return num_taken, error
    return num_taken, None


def write_all(descriptor: int, content: bytes, offset: int) -> None:
    """Write at an offset of a file.

    Raises:
        OSError: the disk did not take all of it.
    """
    _, problem = write_some(descriptor, content, offset)
    if problem is not None:
        raise problem


def copy_file(source: int, target: int, *, before_block: Callable[[], None] = lambda: None) -> None:
    """Copy the content of a file into an empty one.

    Args:
        before_block: called before each block of one mebibyte is read; an exception from it ends the copy.

    Raises:
        OSError: the one cannot be read, or the other cannot be written.
    """
    offset = 0
    before_block()
    while block := os.pread(source, _BLOCK_BYTES, offset):
        write_all(target, block, offset)
        offset += len(block)
        before_block()


def _checked(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise OSError(errno.EINVAL, "not the name of a file in this folder", name)
    return name


def _regular(descriptor: int, owner: int | None) -> int:
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and owner in (None, status.st_uid):
        return descriptor
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        raise OSError(errno.EPERM, f"it is a file of user {status.st_uid}, and only those of user {owner} count here")
    raise OSError(errno.EINVAL, "it is no regular file")


@contextmanager
def closing_descriptor(descriptor: int) -> Iterator[int]:
    """Yield a descriptor, which is closed with the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Make errors name the file, and say why it is not opened."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise OSError(error.errno, reason, str(path)) from error


def other_writers(facts: os.stat_result) -> str:
    """Return who else than this user and root can have written to a file or folder, as what it does; empty if nobody.

    A group counts also if it is named after the user: who else is in it cannot be found out for certain. Where a file
    has an access list, the mode of its group is the most that the list gives to anybody (acl(5)).

    Args:
        facts: of fstat(2) of what is open, so that nothing else can be put in its place.
    """
    if facts.st_uid not in (os.geteuid(), 0):
        return f"belongs to {user_name(facts.st_uid)}, not to you"
    mode = stat.S_IMODE(facts.st_mode)
    if mode & stat.S_IWOTH:
        return f"can be written to by everybody (mode {mode:04o})"
    if mode & stat.S_IWGRP:
        return f"can be written to by the group {_group_name(facts.st_gid)} (mode {mode:04o})"
    return ""


def user_name(number: int) -> str:
    """Return a user's name and number; the number alone where the name is not known."""
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(number).pw_name} (uid {number})"
    return f"uid {number}"


def _group_name(number: int) -> str:
    with contextlib.suppress(KeyError):
        return f"{grp.getgrgid(number).gr_name} (gid {number})"
    return f"gid {number}"
