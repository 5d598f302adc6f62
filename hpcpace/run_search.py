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
_MOST_ENTRIES, _MOST_ENTRIES_TO_NAME = 200_000, 20_000
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


@dataclass
class PassedOver:
    """What a search for runs does not look into.

    Attributes:
        num_links: links to folders outside of the one that is searched.
        num_deep: folders in folders that are the last ones looked into.
    """

    num_links: int = 0
    num_deep: int = 0


@dataclass
class _Search:
    """How many more runs, folders and other files a search looks at before it gives up, and what it passed over."""

    folder: Path
    left: int
    passed_over: PassedOver

    def count(self) -> None:
        """Count one of them."""
        self.left -= 1
        if self.left < 0:
            raise TraceError(f"{self.folder} has too many runs, folders and other files to find all: name one in it")


def find_runs(
    folder: Path, *, most_entries: int = _MOST_ENTRIES, passed_over: PassedOver | None = None
) -> Iterator[Path]:
    """Yield the runs in a folder and in folders in it, or the folder itself if it is one; links are not followed.

    Hidden folders are left out. What cannot be read is skipped.

    Args:
        folder: the folder.
        most_entries: runs, other folders, and files outside of runs that are looked at.
        passed_over: takes what was not looked into.

    Raises:
        OSError: the folder itself cannot be read.
        TraceError: there are more entries, so that some runs would not be found.
    """
    with Folder.open(folder) as opened:
        yield from _runs_in(opened, _Search(folder, most_entries, passed_over or PassedOver()), _MOST_NESTED)


def _runs_in(folder: Folder, search: _Search, levels: int) -> Iterator[Path]:
    names = folder.names()
    if any(_ATTEMPT.fullmatch(name) and folder.has_folder(name) for name in names):
        yield folder.path
        return
    visible = [name for name in names if not name.startswith(".")]
    if not levels:
        search.passed_over.num_deep += sum(folder.has_folder(name) for name in visible)
        return
    for name in visible:
        search.count()
        try:
            with folder.folder(name) as inner:
                yield from _runs_in(inner, search, levels - 1)
        except OSError:  # a file, a link, or a folder of somebody else
            search.passed_over.num_links += _leads_out(folder.path / name, search.folder)


def _leads_out(path: Path, folder: Path) -> bool:
    """Return whether a path is a link to a folder that is not below another one."""
    return path.is_symlink() and path.is_dir() and not path.resolve().is_relative_to(folder.resolve())


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
            runs = sorted(find_runs(folder, most_entries=_MOST_ENTRIES_TO_NAME))
        except (OSError, TraceError):
            continue
        if runs:
            names = [printable(str(run)) for run in runs[:_MOST_NAMED]]
            more = [f"{len(runs) - _MOST_NAMED} more"] if len(runs) > _MOST_NAMED else []
            what = f"{plural(len(runs), 'run')} in {printable(str(folder))}"
            return f"; {what}: {listed([*names, *more])}; see `hpcpace list {shell_word(str(folder))}`"
        if folder.is_dir():
            break
    return ""
