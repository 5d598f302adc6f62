"""One line of a history, a run with its speed and that of its hosts, and the index that spares opening most runs.

A series has the runs of one job that do the same work in one layout.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

from msgspec import Meta

from hpcpace import __version__
from hpcpace.core.codec import FOREIGN_ERRORS, MIN_VALUE_BYTES, Count, Text, check_values, convert, plain
from hpcpace.core.config import Config
from hpcpace.core.errors import HpcpaceError, TraceError
from hpcpace.core.files import Folder, other_writers, read_most
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import HISTORY_INDEX, Attempt, PassedOver, RunDirectory, find_runs
from hpcpace.core.text import folded_message, one_line
from hpcpace.diagnosis.settings import ReportConfig
from hpcpace.runs.compare import compared_work, usual_batches
from hpcpace.runs.load import LoadedRun, NotLoaded, load_runs
from hpcpace.runs.measured import MeasuredRun, is_to_come

# Bounds of what an index may say: exponentials and differences of these stay finite.
_Speed = Annotated[float, Meta(gt=0, lt=1e300)]
_LogRatio = Annotated[float, Meta(gt=-20, lt=20)]
_LogTime = Annotated[float, Meta(gt=-50, lt=50)]
_Hosts = Annotated[tuple[Text, ...], Meta(max_length=100_000)]


@dataclass(frozen=True, kw_only=True)
class HistoryRow:
    """One run.

    Attributes:
        run: its path below the folder.
        begun_unix_ns: when it began; 0 where unknown.
        job: name of its job.
        kind: its layout: world, mesh and type of numbers.
        work: what was trained on what, by name: runs with other values cannot be compared.
        samples_per_step: the global batch; 0 where unknown.
        identity: what no other run has, and a copy has, too; empty where unknown.
        p50_ns, mean_ns: median and mean step time.
        samples_per_s: throughput; None where unknown.
        samples_unit: of that and of the batch.
        num_ranks, num_nodes: of the job; 0 where unknown.
        hosts: where it ran.
        slowness: by host, logarithm of own work over the median of the other hosts of its role in the run; of hosts
            that compare.
        own_work: by host, logarithm of the own work of a rank a step, in ns.
        first_host: of rank 0; empty where unknown.
        mode: of its verdict; empty where unknown.
    """

    run: Text
    begun_unix_ns: Count
    job: Text
    kind: Text
    p50_ns: _Speed
    mean_ns: _Speed
    work: Mapping[Text, Text] = field(default_factory=dict)
    samples_per_step: Annotated[float, Meta(ge=0, lt=1e300)] = 0.0
    identity: Text = ""
    samples_per_s: _Speed | None = None
    samples_unit: Text = ""
    num_ranks: Count = 0
    num_nodes: Count = 0
    hosts: _Hosts = ()
    slowness: Mapping[Text, _LogRatio] = field(default_factory=dict)
    own_work: Mapping[Text, _LogTime] = field(default_factory=dict)
    first_host: Text = ""
    mode: Text = ""


def row_of(measured: MeasuredRun, run: str, begun_unix_ns: int) -> HistoryRow:
    """Return the line of a run.

    Args:
        measured: the run.
        run: its path below the folder.
        begun_unix_ns: when it began; 0 where unknown.
    """
    parts = (f"{measured.world_size} ranks", measured.mesh, measured.conditions.dtype)
    own = _own_work(measured)
    return HistoryRow(
        run=run,
        begun_unix_ns=begun_unix_ns,
        job=measured.conditions.job_name or "unnamed",
        kind=", ".join(filter(None, parts)),
        work={**compared_work(measured), "emulation": measured.emulation or "none"},
        samples_per_step=measured.samples_per_step,
        identity=measured.identity,
        p50_ns=measured.p50_ns,
        mean_ns=measured.mean_ns,
        samples_per_s=measured.samples_per_s,
        samples_unit=measured.samples_unit,
        num_ranks=measured.world_size,
        num_nodes=len(set(measured.hosts)),
        hosts=tuple(sorted(set(measured.hosts))),
        slowness=_slowness(own),
        own_work={host: round(fmean(of_host.values()), 6) for host, of_host in own.items()},
        first_host=next((rank.host for rank in measured.ranks if rank.rank == 0), ""),
        mode=measured.mode,
    )


def _own_work(measured: MeasuredRun) -> dict[str, dict[str, float]]:
    """Return the mean logarithm of own work by host and role; empty where that of a rank is not known."""
    found: dict[str, dict[str, list[float]]] = {}
    for rank in measured.ranks:
        if rank.work_ns is None or rank.work_ns <= 0:
            return {}
        found.setdefault(rank.host, {}).setdefault(rank.role, []).append(log(rank.work_ns))
    return {host: {role: fmean(values) for role, values in of_host.items()} for host, of_host in found.items()}


def _slowness(own: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return how much longer each host takes than the others of its roles; of two, nobody knows which is unusual."""
    found = {}
    for host, of_host in own.items():
        others = [[own[other][role] for other in own if other != host and role in own[other]] for role in of_host]
        if min(map(len, others)) > 1:
            beyond = [value - median(of_role) for value, of_role in zip(of_host.values(), others, strict=True)]
            found[host] = round(fmean(beyond), 6)
    return found


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs whose step times can be compared, in the order that they were given in.

    Attributes:
        job: of all of them.
        kind: their layout and batch, and what sets their work apart from that of others in this layout.
    """

    job: str
    kind: str
    rows: tuple[HistoryRow, ...]


def grouped(rows: Iterable[HistoryRow]) -> list[Group]:
    """Return the series of some runs."""
    by_layout: dict[tuple[str, str, str], list[HistoryRow]] = {}
    for row in rows:
        by_layout.setdefault((row.job, row.kind, row.samples_unit), []).append(row)
    return [
        Group(job=job, kind=", ".join(filter(None, (kind, _batch(batch, unit), told))), rows=tuple(alike))
        for (job, kind, unit), of_layout in by_layout.items()
        for batch, of_batch in _by_batch(of_layout).items()
        for told, alike in _by_work(of_batch)
    ]


def without_a_place(rows: Iterable[HistoryRow]) -> list[HistoryRow]:
    """Return the runs without a date that are in a series with runs that have one."""
    return [
        row
        for group in grouped(rows)
        if any(one.begun_unix_ns for one in group.rows)
        for row in group.rows
        if not row.begun_unix_ns
    ]


def _batch(batch: float, unit: str) -> str:
    if not batch:
        return ""
    return f"{batch:g} {unit}" if unit else f"batch {batch:g}"


def _by_batch(rows: Sequence[HistoryRow]) -> dict[float, list[HistoryRow]]:
    usual = usual_batches(row.samples_per_step for row in rows)
    found: dict[float, list[HistoryRow]] = {}
    for row in rows:
        found.setdefault(usual[row.samples_per_step], []).append(row)
    return found


def _by_work(rows: Sequence[HistoryRow]) -> Iterator[tuple[str, list[HistoryRow]]]:
    """Yield what sets the work of runs apart, and the runs; names that one of two runs does not record do not.

    A run that agrees with several is taken to the one that came last.
    """
    works: list[dict[str, str]] = []
    found: list[list[HistoryRow]] = []
    known: dict[frozenset[tuple[str, str]], int] = {}
    for row in rows:
        same = frozenset(row.work.items())
        if same not in known:
            agrees = [
                at for at, work in enumerate(works) if all(work.get(name, value) == value for name, value in same)
            ]
            if not agrees:
                works.append({})
                found.append([])
            known[same] = agrees[-1] if agrees else len(works) - 1
            works[known[same]] |= row.work
        found[known[same]].append(row)
    names = _telling(works)
    for work, alike in zip(works, found, strict=True):
        yield ", ".join(f"{name} {work[name]}" for name in names if name in work), alike


def _telling(works: Sequence[Mapping[str, str]]) -> list[str]:
    """Return names by whose values some works can be distinguished, as few as needed in their order."""
    names: list[str] = []
    num_told = 1
    for name in sorted({name for work in works for name in work}):
        if num_told == len(works):
            break
        num = len({tuple(work.get(one) for one in (*names, name)) for work in works})
        if num > num_told:
            names.append(name)
            num_told = num
    return names


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
