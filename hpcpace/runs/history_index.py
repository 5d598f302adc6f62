"""The index beside the runs of a folder, so that a history of thousands of them opens no run that has not changed.

A run is known by the times at which its folder, its last attempt and its traces changed. One that could not be used is
tried again with other memory or another version of hpcpace, too. Runs that still record are not in the index. It is
replaced in one piece, so that users may update it at the same time. Where the folder cannot be written to, there is
none and each history reads all runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcpace import __version__
from hpcpace.config import Config
from hpcpace.errors import TraceError
from hpcpace.files import Folder
from hpcpace.run_search import find_runs
from hpcpace.rundir import HISTORY_INDEX
from hpcpace.runs.history_row import HistoryRow, row_from_json, row_of
from hpcpace.runs.load import LoadedRun, NotLoaded, load_runs

SCHEMA = "hpcpace-history-index/3"
_MOST_BYTES = 1 << 29
_FOREIGN = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class IndexedRuns:
    """What is known of the runs of a folder.

    Attributes:
        rows: those that can be used.
        broken: why others cannot, by path below the folder.
        num_running: runs that still record.
        num_read: runs that were opened, because the index did not have them.
        index: whether there is an index now, or why not.
    """

    rows: tuple[HistoryRow, ...]
    broken: Mapping[str, str]
    num_running: int
    num_read: int
    index: str


@dataclass(frozen=True)
class _Entry:
    """One run in the index: what its files were, and its line or why it has none.

    The stamp of a run without a line also has what it was read with.
    """

    stamp: str
    row: HistoryRow | None
    problem: str


def indexed_runs(
    folder: Path, config: Config | None = None, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> IndexedRuns:
    """Return the runs of a folder, and update its index.

    Args:
        folder: the folder.
        config: memory for reading, and thresholds.
        progress: called with the number of runs read and of those to read.

    Raises:
        TraceError: the folder cannot be read.
    """
    try:
        paths = {os.path.relpath(path, folder): path for path in find_runs(folder)}
    except OSError as error:
        raise TraceError(f"cannot read {folder}: {error.strerror}; name a folder of runs") from error
    known = _read(folder)
    stamps = {name: _stamp(path) for name, path in paths.items()}
    means = f" {__version__} {(config or Config()).report.memory_bytes}"
    current = {name: entry for name, entry in known.items() if _is_current(entry, stamps.get(name), means)}
    missing = [name for name in paths if name not in current]
    loaded = load_runs([paths[name] for name in missing], config, takes_running=False, progress=progress)
    num_running = 0
    for name, run in zip(missing, loaded, strict=True):
        if run.why_not is NotLoaded.RUNNING:
            num_running += 1
        else:
            current[name] = _entry(name, paths[name], stamps[name], means, run)
    index = "kept" if current == known else _write(folder, current)
    ordered = [current[name] for name in paths if name in current]
    return IndexedRuns(
        rows=tuple(sorted((entry.row for entry in ordered if entry.row), key=lambda row: (row.begun_unix_ns, row.run))),
        broken={name: entry.problem for name, entry in current.items() if entry.row is None},
        num_running=num_running,
        num_read=len(missing),
        index=index,
    )


def _is_current(entry: _Entry, stamp: str | None, means: str) -> bool:
    return stamp is not None and entry.stamp == (stamp if entry.row else f"{stamp}{means}")


def _entry(name: str, path: Path, stamp: str, means: str, run: LoadedRun) -> _Entry:
    if run.measured is None:
        return _Entry(f"{stamp}{means}", None, run.problem)
    try:
        changed_ns = os.stat(path, follow_symlinks=False).st_mtime_ns
    except OSError:
        changed_ns = 0
    return _Entry(stamp, row_of(run.measured, name, changed_ns), "")


def _stamp(path: Path) -> str:
    """Return what changes when a run does: the names and times of its folder, last attempt, traces and summary."""
    try:
        attempts = [name for name in os.listdir(path) if name.startswith("attempt-") and name[8:].isdigit()]
        last = max(attempts, key=lambda name: int(name[8:]), default="")
        places = (path, path / last, path / last / "trace", path / "summary.json")
        times = [_changed(place) for place in places]
    except OSError:
        return ""
    return f"{last} {' '.join(times)}"


def _changed(place: Path) -> str:
    try:
        found = os.stat(place, follow_symlinks=False)
    except OSError:
        return "-"
    return f"{found.st_ctime_ns:x}"  # unlike st_mtime, it moves when permissions or owners change, too


def _read(folder: Path) -> dict[str, _Entry]:
    """Return what the index holds; nothing where it is missing, damaged or of another version."""
    try:
        with Folder.open(folder) as opened:
            content = json.loads(opened.read(HISTORY_INDEX, most_bytes=_MOST_BYTES))
        if content["schema"] != SCHEMA:
            return {}
        return {str(name): _from_json(entry) for name, entry in content["runs"].items()}
    except (OSError, *_FOREIGN):
        return {}


def _from_json(content: Any) -> _Entry:
    row = content["row"]
    return _Entry(str(content["stamp"]), None if row is None else row_from_json(row), str(content["problem"]))


def _write(folder: Path, entries: Mapping[str, _Entry]) -> str:
    runs = {
        name: {
            "stamp": entry.stamp,
            "row": None if entry.row is None else entry.row.to_json(),
            "problem": entry.problem,
        }
        for name, entry in sorted(entries.items())
    }
    text = json.dumps({"schema": SCHEMA, "runs": runs}, separators=(",", ":"))
    try:
        with Folder.open(folder) as opened:
            opened.write(HISTORY_INDEX, text)
    except OSError as error:
        return f"cannot be written ({error.strerror}): each history reads all runs"
    return "updated"
