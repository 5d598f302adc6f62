"""Who owns a checkpoint, and who else can write to it.

A checkpoint decides what a training resumes from, so it must be the work of the user who resumes it, or of root. Owner
and mode are read from descriptors that are held, and what is read later is opened in the same folder: nothing can be
exchanged between the look and the use.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from hpcpace.errors import DataError
from hpcpace.files import Folder
from hpcpace.ownership import other_writers

WRITERS_FOLDER_MODE = 0o755
WRITERS_FILE_MODE = 0o644
_WRITE_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def open_checkpoint(path: Path) -> Folder:
    """Open the folder of a checkpoint.

    Raises:
        DataError: there is none, or somebody else could have written to it.
    """
    try:
        folder = Folder.open(path)
    except OSError as error:
        raise unreadable(path, error) from error
    check_access(folder.descriptor, path, checkpoint=path)
    return folder


def open_checkpoint_file(folder: Folder, name: str) -> int:
    """Return a descriptor that reads a file of a checkpoint.

    Raises:
        DataError: there is none, it is not a regular file, or somebody else could have written to it.
    """
    try:
        descriptor = folder.open_file(name)
    except OSError as error:
        raise unreadable(folder.path, error) from error
    try:
        check_access(descriptor, folder.path / name, checkpoint=folder.path)
    except DataError:
        os.close(descriptor)
        raise
    return descriptor


def check_files(folder: Folder) -> None:
    """Let a checkpoint pass if every file in it does.

    Raises:
        DataError: as `open_checkpoint_file`.
    """
    for name in folder.names():
        os.close(open_checkpoint_file(folder, name))


def check_access(descriptor: int, path: Path, *, checkpoint: Path) -> None:
    """Let a file or folder pass that only the user and root can have written to.

    Args:
        descriptor: the open file or folder.
        path: what messages call it.
        checkpoint: the checkpoint that it belongs to.

    Raises:
        DataError: somebody else could have written to it; says who, and what to do.
    """
    facts = os.fstat(descriptor)
    writers = other_writers(facts)
    if not writers:
        return
    if facts.st_uid == os.geteuid():
        folder = path if stat.S_ISDIR(facts.st_mode) else path.parent
        advice = f"if all in it is yours, chmod -R go-w {shlex.quote(str(folder))}"
    else:
        copied = shlex.quote(str(checkpoint))
        advice = (
            f"if you trust whoever made it, cp -r {copied} COPY, and give --resume COPY with a --run-dir of your own"
        )
    raise DataError(f"the checkpoint {checkpoint} is not loaded: {path} {writers}; {advice}, or --resume never")


def withhold_write(descriptor: int) -> None:
    """Take the right to write to a folder of the user's own from everybody else.

    Raises:
        OSError: the file system refuses that.
    """
    facts = os.fstat(descriptor)
    if facts.st_mode & _WRITE_OF_OTHERS and facts.st_uid == os.geteuid():
        os.fchmod(descriptor, stat.S_IMODE(facts.st_mode) & ~_WRITE_OF_OTHERS)


def unreadable(path: Path, reason: object) -> DataError:
    """Return the error for a checkpoint that cannot be read."""
    if isinstance(reason, OSError) and reason.strerror:
        name = f"{Path(os.fsdecode(reason.filename)).name}: " if reason.filename else ""
        reason = f"{name}{reason.strerror}"
    return DataError(
        f"cannot read the checkpoint {path} ({reason}): use another one, or start over with --resume never"
    )
