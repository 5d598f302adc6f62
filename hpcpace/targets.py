"""Files that a command is told to write, held against those that it reads."""

from __future__ import annotations

from collections.abc import Iterable
from os.path import samefile
from pathlib import Path

from hpcpace.errors import UsageError
from hpcpace.quoting import printable
from hpcpace.rundir import is_recorded


def check_target(target: Path | None, read: Iterable[Path | None], option: str) -> None:
    """Refuse what is no file, and a file that would replace what is read, named in any way, or what a run has recorded.

    Args:
        target: the file; None where none is asked for.
        read: files and folders that are read; None counts for none.
        option: that names the target.

    Raises:
        UsageError: it is none, or would.
    """
    if target is None or not target.exists():
        return
    shown = printable(str(target))
    if not target.is_file():
        kind = "folder" if target.is_dir() else "device, pipe or socket"
        raise UsageError(f"cannot write {shown}: it is a {kind}; name a file with {option}")
    if any(path is not None and path.exists() and samefile(target, path) for path in read):
        raise UsageError(f"{shown} is read by this command and would be lost: name another file with {option}")
    if is_recorded(target.resolve()):
        raise UsageError(f"{shown} is what a run has recorded and would be lost: name another file with {option}")
