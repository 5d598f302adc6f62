"""A hostile owner of a folder: a process that keeps swapping its content for links, FIFOs and folders.

One kind waits for the temporary names of a writer and exchanges each as soon as it is there; the other exchanges names
that a reader or writer is known to use, forth and back, all the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
import shutil
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NOBODY = 65534
_IN_CREATE, _IN_ISDIR = 0x100, 0x40000000
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_EVENT = struct.Struct("iIII")
_MAX_PAUSE_S = 0.0005
_COUNTER = struct.Struct("Q")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Field:
    """Where a swapper works.

    Attributes:
        home: its own folder, from which it may rename into all the others.
        folders: where a writer makes temporary files.
        names: paths that a reader or a writer uses, which may be missing.
        targets: what its links lead to: files and folders of somebody else.
    """

    home: Path
    folders: tuple[Path, ...]
    names: tuple[Path, ...]
    targets: tuple[Path, ...]


class Signals:
    """What a swapper reports to its parent: that it has begun, and how often it has swapped something."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, _COUNTER.size)
        self._reader, self._writer = os.pipe()
        self._count = 0

    def ready(self) -> None:
        """Say that from now on whatever happens is seen."""
        os.write(self._writer, b"1")

    def exchanged(self) -> None:
        """Count one more thing put in the place of a name that was there."""
        self._count += 1
        self._shared[:] = _COUNTER.pack(self._count)

    def wait(self) -> None:
        """Wait until the process is ready, or ended."""
        os.close(self._writer)
        is_ready = os.read(self._reader, 1) == b"1"
        os.close(self._reader)
        if not is_ready:
            raise RuntimeError("the swapper could not begin")

    @property
    def num_exchanged(self) -> int:
        """How often something was exchanged, in the parent."""
        return int(_COUNTER.unpack(self._shared[:])[0])


Swap = Callable[[Field, random.Random, Signals], None]


@contextmanager
def swapping(swap: Swap, field: Field, *, seed: int, uid: int | None) -> Iterator[Signals]:
    """Let a process exchange things meanwhile.

    Args:
        swap: what it runs, one of the functions below.
        field: where it works.
        seed: of its choices.
        uid: whose rights it has; those of this process where it is None.
    """
    signals = Signals()
    pid = os.fork()
    if not pid:
        try:
            if uid is not None:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            swap(field, random.Random(seed), signals)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    try:
        signals.wait()
        yield signals
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def swap_temporaries(field: Field, choice: random.Random, signals: Signals) -> None:
    """Exchange each file as soon as it is made in one of the folders (inotify(7)), and count those that were there.

    A folder that is made there is exchanged as well, or watched from then on.
    """
    descriptor = _libc.inotify_init1(os.O_CLOEXEC)
    watched: dict[int, Path] = {}

    def watch(folder: Path) -> None:
        number = _libc.inotify_add_watch(descriptor, os.fsencode(folder), _IN_CREATE)
        if number >= 0:
            watched[number] = folder

    for folder in field.folders:
        watch(folder)
    bait = _bait(field, choice)
    signals.ready()
    while True:
        for number, mask, name in _events(os.read(descriptor, 1 << 16)):
            path = watched[number] / name
            if mask & _IN_ISDIR and choice.random() < 0.5:
                watch(path)
            elif _exchange(bait, path):
                signals.exchanged()
                bait = _bait(field, choice)


def _events(content: bytes) -> Iterator[tuple[int, int, str]]:
    place = 0
    while place < len(content):
        number, mask, _, size = _EVENT.unpack_from(content, place)
        place += _EVENT.size + size
        yield number, mask, os.fsdecode(content[place - size : place].rstrip(b"\0"))


def swap_names(field: Field, choice: random.Random, signals: Signals) -> None:
    """Exchange one or two of the names for something else and back, with pauses of up to half a millisecond."""
    names = choice.sample(field.names, min(len(field.names), choice.choice((1, 1, 2))))
    signals.ready()
    while True:
        path = choice.choice(names)
        bait = _bait(field, choice)
        if taken := _exchange(bait, path):
            signals.exchanged()
            time.sleep(choice.random() * _MAX_PAUSE_S)
            _exchange(taken, path)
            _remove(taken)
        else:
            with contextlib.suppress(OSError):
                os.rename(bait, path)
                time.sleep(choice.random() * _MAX_PAUSE_S)
                os.rename(path, bait)
        _remove(bait)
        time.sleep(choice.random() * _MAX_PAUSE_S)


TEMPORARY, NAMES = "temporary names", "names"
SWAPPERS = {TEMPORARY: swap_temporaries, NAMES: swap_names}


def _bait(field: Field, choice: random.Random) -> Path:
    """Make what is to be put in the place of something, and return its path."""
    path = field.home / f"bait-{choice.getrandbits(64):x}"
    kind = choice.randrange(6)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    else:
        path.symlink_to(choice.choice(field.targets))
    return path


def _exchange(bait: Path, path: Path) -> Path | None:
    """Exchange two names at once, and return where what had the second one is now; None where one is missing."""
    if _exchanged(bait, path):
        return bait
    if ctypes.get_errno() != errno.EACCES:
        return None
    # Somebody else's folder keeps its parent (rename(2)), so the bait has to be beside it.
    beside = path.with_name(bait.name)
    with contextlib.suppress(OSError):
        os.rename(bait, beside)
        if _exchanged(beside, path):
            return beside
        os.rename(beside, bait)
    return None


def _exchanged(one: Path, other: Path) -> bool:
    return not _libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
