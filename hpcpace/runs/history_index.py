"""The index beside the runs of a folder, so that a history opens only runs that changed.

A run is known by the times at which its folder, its last attempt, its traces and its record changed. One that could
not be used is tried again with other memory or another version of hpcpace, too. Runs that still record are not in it.
It is replaced in one piece, so that users may update it at the same time. Where the folder cannot be written to, there
is none and each history reads all runs.

Whoever writes an index can make it say anything of runs: it is used as it was written by this user or root, and if
nobody else can write to it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from hpcpace import __version__
from hpcpace.core.codec import FOREIGN_ERRORS, MIN_VALUE_BYTES, check_values, convert, plain
from hpcpace.core.config import Config
from hpcpace.core.errors import HpcpaceError, TraceError
from hpcpace.core.files import Folder, other_writers, read_most
from hpcpace.core.rundir import HISTORY_INDEX, Attempt, PassedOver, RunDirectory, find_runs
from hpcpace.core.text import folded_message, one_line
from hpcpace.diagnosis.settings import ReportConfig
from hpcpace.runs.history_row import HistoryRow, row_of, without_a_place
from hpcpace.runs.load import LoadedRun, NotLoaded, load_runs
from hpcpace.runs.measured import is_to_come


def traced_begin(attempt: Attempt) -> int:
    """Return when the first rank with a trace began to record; 0 where no trace says it."""
    from hpcpace.trace.reader import stream_trace  # loads HDF5, which runs that say when they began do not need

    try:
        header = stream_trace(attempt.trace_file(next(iter(attempt.trace_files()), 0))).trace.header
    except (HpcpaceError, OSError, MemoryError):
        return 0
    return header.created_unix_ns if header.created_unix_ns > 0 and not is_to_come(header.created_unix_ns) else 0


def oldest_trace(attempt: Attempt) -> int:
    """Return when the trace file was changed that is the oldest; 0 without any.

    Nothing but recording, packing and copying changes trace files: the times of the folders above move with reports.
    """
    try:
        with attempt.open() as folder, folder.folder(attempt.trace_dir.name) as traces:
            return max(min((traces.status(name).st_mtime_ns for name in attempt.trace_sizes()), default=0), 0)
    except OSError:
        return 0


SCHEMA = "hpcpace-history-index/5"
# Two kilobytes for each of 65,536 runs on 16 hosts.
_MAX_BYTES = 1 << 27
# Of what is said of a run: an error in its own lines of 480 letters, and a few kinds of reasons of 300.
_MAX_PROBLEM_LETTERS = 1 << 14
_MODE = 0o644
_RUNS = b'"runs":'
_NO_DATE = "when it began is not known"
_DATE_OF_FILES = "when it began is not recorded, so that it has the date of its oldest trace file"
_NO_PLACE = "when it began is not known, so that it has no place among the runs of its series"


@dataclass(frozen=True, kw_only=True)
class ReadRuns:
    """What became of the runs of a folder.

    Attributes:
        broken: why some cannot be used, by path below the folder.
        num_running: runs that still record.
        num_read: runs that were opened, because the index did not have them.
        index: whether there is an index now, or why not.
        problems: what could not be read of runs that can be used, by path.
        copies: of runs that are there more than once, the paths that are left out, and the one that is used.
        passed_over: what was not searched.
    """

    broken: Mapping[str, str]
    num_running: int
    num_read: int
    index: str
    problems: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    passed_over: PassedOver = field(default_factory=PassedOver)


@dataclass(frozen=True, kw_only=True)
class IndexedRuns(ReadRuns):
    """The runs of a folder: in `rows` those that can be used, each once."""

    rows: tuple[HistoryRow, ...]


@dataclass(frozen=True)
class _Entry:
    """One run in the index: what its files were, and its line or why it has none, or what could not be read of it.

    The stamp of a run without a line also has what it was read with.
    """

    stamp: str
    row: HistoryRow | None
    problem: Annotated[str, Meta(max_length=_MAX_PROBLEM_LETTERS)]


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
        passed_over = PassedOver()
        paths = {os.path.relpath(path, folder): path for path in find_runs(folder, passed_over=passed_over)}
    except OSError as error:
        raise TraceError(f"cannot read {folder}: {error.strerror}; name a folder of runs") from error
    known, objection = _read(folder)
    stamps = {name: _stamp(path) for name, path in paths.items()}
    means = f" {__version__} {(config or Config()).of(ReportConfig).memory_bytes}"
    current = {name: entry for name, entry in known.items() if _is_current(entry, stamps.get(name), means)}
    missing = [name for name in paths if name not in current]
    loaded = load_runs([paths[name] for name in missing], config, takes_running=False, progress=progress)
    num_running = 0
    for name, run in zip(missing, loaded, strict=True):
        if run.why_not is NotLoaded.RUNNING:
            num_running += 1
        else:
            current[name] = _entry(name, stamps[name], means, run)
    index = "kept" if current == known and not objection else _write(folder, current) + objection
    rows = [entry.row for entry in current.values() if entry.row]
    copies = _copies(rows)
    once = sorted((row for row in rows if row.run not in copies), key=lambda row: (row.begun_unix_ns, row.run))
    nowhere = {row.run for row in without_a_place(once)}
    used = [row for row in once if row.run not in nowhere]
    broken = {name: entry.problem for name, entry in current.items() if entry.row is None}
    return IndexedRuns(
        rows=tuple(used),
        broken=broken | dict.fromkeys(sorted(nowhere), _NO_PLACE),
        num_running=num_running,
        num_read=len(missing),
        index=index,
        problems={row.run: problem for row in used if (problem := current[row.run].problem)},
        copies=copies,
        passed_over=passed_over,
    )


def _copies(rows: Sequence[HistoryRow]) -> dict[str, str]:
    """Return the paths of copies, and of the run that each is one of: that nearest to the folder."""
    first: dict[str, str] = {}
    copies = {}
    for row in sorted(rows, key=lambda row: (row.run.count(os.sep), row.run)):
        if row.identity and first.setdefault(row.identity, row.run) != row.run:
            copies[row.run] = first[row.identity]
    return copies


def _is_current(entry: _Entry, stamp: str | None, means: str) -> bool:
    return stamp is not None and entry.stamp == (stamp if entry.row else f"{stamp}{means}")


def _entry(name: str, stamp: str, means: str, run: LoadedRun) -> _Entry:
    if run.measured is None:
        return _Entry(f"{stamp}{means}", None, one_line(folded_message(run.message)))
    attempt = RunDirectory(run.path).attempt(run.measured.attempt)
    recorded_ns = run.measured.conditions.begun_unix_ns or traced_begin(attempt)
    row = row_of(run.measured, name, recorded_ns or oldest_trace(attempt))
    said = "" if recorded_ns else _DATE_OF_FILES if row.begun_unix_ns else _NO_DATE
    return _Entry(stamp, row, "; ".join(filter(None, (one_line(folded_message(run.message)), said))))


def _stamp(path: Path) -> str:
    """Return what changes when a run does: names and times of its folder, last attempt, traces, record and summary."""
    run = RunDirectory(path)
    attempts = run.attempts()
    if not attempts:
        return ""
    last = attempts[-1]
    places = (path, last.path, last.trace_dir, last.run_json, run.summary_json)
    return " ".join([last.path.name, *map(_changed, places)])


def _changed(place: Path) -> str:
    try:
        found = os.stat(place, follow_symlinks=False)
    except OSError:
        return "-"
    return f"{found.st_ctime_ns:x}"  # unlike st_mtime, it moves when permissions or owners change, too


def _read(folder: Path) -> tuple[dict[str, _Entry], str]:
    """Return what the index holds, and why all runs are read although there is one.

    There is nothing in it where it is missing, damaged, or of another version.
    """
    try:
        with Folder.open(folder) as opened:
            descriptor = opened.open_file(HISTORY_INDEX)
            try:
                if writers := other_writers(os.fstat(descriptor)):
                    return {}, f" (all runs were read: the index before {writers})"
                content = read_most(descriptor, _MAX_BYTES)
            finally:
                os.close(descriptor)
        begin, _, rest = content.partition(_RUNS)
        if begin != _begin(rest):
            return {}, ""
        check_values(content, _MAX_BYTES // MIN_VALUE_BYTES)
        entries = convert(json.loads(content)["runs"], dict[str, _Entry])
        if any(entry.row is not None and entry.row.run != name for name, entry in entries.items()):
            return {}, ""  # a line of another run
        return entries, ""
    except (OSError, *FOREIGN_ERRORS):
        return {}, ""


def sealed(runs: Mapping[str, Any]) -> bytes:
    """Return an index with some entries, by path, as a file has it."""
    rest = json.dumps(runs, separators=(",", ":")).encode() + b"}"
    return _begin(rest) + _RUNS + rest


def _begin(rest: bytes) -> bytes:
    """Return how an index begins that ends with some text: by its version and the digest of that text."""
    return f'{{"schema":"{SCHEMA}","digest":"{hashlib.sha256(rest).hexdigest()}",'.encode()


def _write(folder: Path, entries: Mapping[str, _Entry]) -> str:
    content = sealed(plain(dict(sorted(entries.items()))))
    if len(content) > _MAX_BYTES:
        return "too large to be kept: each history reads all runs"
    try:
        with Folder.open(folder) as opened:
            opened.write(HISTORY_INDEX, content, mode=_MODE)
    except OSError as error:
        return f"cannot be written ({error.strerror}): each history reads all runs"
    return "updated"
