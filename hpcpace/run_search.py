"""Which run a user means: the run itself, an attempt or a file in it, or one of those in a folder of runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcpace.errors import TraceError
from hpcpace.files import Folder
from hpcpace.quoting import printable, shell_word
from hpcpace.rundir import RunDirectory, open_run
from hpcpace.wording import listed, plural

_ATTEMPT = re.compile(r"attempt-(\d{1,9})")
# A study keeps its runs in STUDY/runs, and a folder of runs may sort them by topic.
_MOST_NESTED = 3
_MOST_FOLDERS = 20_000
_MOST_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class NamedRun:
    """A run that a user has named, and the attempt of it if that was named, too."""

    directory: RunDirectory
    attempt: int | None


def open_named_run(path: Path) -> NamedRun:
    """Open the run that a path means: that of a run, of an attempt in it, of its traces, or of its report.

    Raises:
        TraceError: there is no run; the message names the runs below the path, or beside it.
    """
    place, attempt = _place(path)
    try:
        return NamedRun(directory=open_run(place), attempt=attempt)
    except TraceError as error:
        raise TraceError(f"{error}{_runs_there(place)}") from None


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the runs in a folder and in folders in it, or the folder itself if it is one; links are not followed.

    Hidden folders are left out. What cannot be read is skipped.

    Raises:
        OSError: the folder itself cannot be read.
    """
    budget = [_MOST_FOLDERS]
    with Folder.open(folder) as opened:
        yield from _runs_in(opened, budget, _MOST_NESTED)


def _runs_in(folder: Folder, budget: list[int], levels: int) -> Iterator[Path]:
    names = folder.names()
    if any(_ATTEMPT.fullmatch(name) and folder.has_folder(name) for name in names):
        yield folder.path
        return
    for name in names if levels else ():
        if name.startswith(".") or not budget[0]:
            continue
        budget[0] -= 1
        try:
            with folder.folder(name) as inner:
                yield from _runs_in(inner, budget, levels - 1)
        except OSError:  # a file, a link, or a folder of somebody else
            continue


def _place(path: Path) -> tuple[Path, int | None]:
    """Return the folder of the run that a path means, and the number of the attempt that it names."""
    place = path.absolute()
    if place.suffix in (".html", ".json", ".h5", ".journal") and not place.is_dir():
        place = place.parent
    if place.name in ("trace", "snapshot") and _ATTEMPT.fullmatch(place.parent.name):
        place = place.parent
    if found := _ATTEMPT.fullmatch(place.name):
        return place.parent if path.is_absolute() else _relative(place.parent), int(found[1])
    return (path if place == path.absolute() else path.parent), None


def _relative(place: Path) -> Path:
    """Return a path as seen from the working folder where it is below that, as the user wrote it."""
    return place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place


def _runs_there(place: Path) -> str:
    """Return which runs are in a folder or, if it does not exist, beside it; empty without any."""
    for folder in (place, place.parent):
        try:
            runs = sorted(find_runs(folder))
        except OSError:
            continue
        if runs:
            names = [printable(str(run)) for run in runs[:_MOST_NAMED]]
            more = [f"{len(runs) - _MOST_NAMED} more"] if len(runs) > _MOST_NAMED else []
            what = f"{plural(len(runs), 'run')} in {printable(str(folder))}"
            return f"; {what}: {listed([*names, *more])}; see `hpcpace list {shell_word(str(folder))}`"
        if folder.is_dir():
            break
    return ""
