"""Which files a command may write, by its arguments, and which it has written or changed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from hpcpace.core.rundir import HISTORY_INDEX

_NAMES = {
    "report": r"(.*/)?(summary\.json|report\.html)",
    "timeline": r"(.*/)?timeline\.pftrace",
    "history": rf"(.*/)?{re.escape(HISTORY_INDEX)}",
    "pack": r"(.*/)?attempt-\d+/trace(/.*)?",
    "collect": r"(.*/)?attempt-\d+/trace(/.*)?",
    "switch": r"(.*/)?switch",
}
"""By command: names in the folder that was given to it. `SECURITY.md` lists them in words."""
_OPTIONS = frozenset({"--run-dir", "--timeline", "--html", "--csv", "--out", "--output", "-o", "--save", "--show"})
"""What follows them is written; the commands that are run here give `--json` no file."""

State = Mapping[Path, tuple[int, ...]]


def state_of(*folders: Path) -> State:
    """Return what files and folders are: mode, owner and group, and of files inode, size and times too."""
    found: dict[Path, tuple[int, ...]] = {}
    for folder in folders:
        for where, _, names in os.walk(folder):
            for path in (Path(where), *(Path(where, name) for name in names)):
                one = path.lstat()
                owned = (one.st_mode, one.st_uid, one.st_gid)
                is_folder = path == Path(where)
                found[path] = (
                    owned if is_folder else (*owned, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns)
                )
    return found


def wrongly_written(arguments: Sequence[str], before: State, after: State, place: Path) -> list[str]:
    """Return what a command has made, changed or removed and may not have.

    Args:
        arguments: of `hpcpace`, or a script and its own.
        before: as of `state_of`.
        after: likewise.
        place: the folder that names are shown relative to.
    """
    named = [Path(path) for option, path in pairwise(arguments) if option in _OPTIONS]
    pattern = re.compile(_NAMES.get(arguments[0], r"\0"), re.DOTALL)
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    return [
        f"{_what(path, before, after)} {os.path.relpath(path, place)!r}"
        for path in changed
        if not pattern.fullmatch(os.path.relpath(path, place)) and not any(path.is_relative_to(one) for one in named)
    ][:5]


def _what(path: Path, before: State, after: State) -> str:
    return "makes" if path not in before else "removes" if path not in after else "changes"
