"""An sqlite export of Nsight Systems as a run: ranks are GPUs, steps are NVTX ranges.

SQLite believes a file: tables may share a page, rows a text, and a view may never end. So only plain tables are read,
row by row, no value is long, and there are no more rows than a file of its size can have.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, first_few, plural, printable, shown
from hpcpace.runs.imports.imported_run import Import, ImportedRank, Source, date_of, headers_of
from hpcpace.runs.imports.input_files import MAX_NUMBER, is_whole
from hpcpace.runs.imports.kineto_profile import Profile, device_notes, is_of_nccl, kernel_op, op_of, phase_of
from hpcpace.runs.imports.kineto_rows import first_ns, rows_of_profile, shift_times
from hpcpace.trace.schema import DEVICE_TABLES, Op, Phase

SESSION = "TARGET_INFO_SESSION_START_TIME"
KERNELS, RUNTIME, NVTX, STRINGS = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "NVTX_EVENTS",
    "StringIds",
)
COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
MAX_ROWS = 50_000_000
_MAGIC = b"SQLite format 3\x00"
_STEP = re.compile(r"(?:^|[^a-z])(?:step|iteration|iter)[ _#:=]*([0-9]{1,9})$", re.IGNORECASE)
_MAX_NAME = 200
"""Letters of a name that are read; one that is longer says neither a step nor a phase."""
_MAX_VALUE_BYTES = 1 << 20
"""Of a text, a row and a statement: names of C++ templates have up to some ten thousand letters."""
_MIN_ROW_BYTES = 4
"""A file with more rows than that leads back to the same pages; SQLite would read them without end."""
_STEPS_PER_BYTE, _FREE_STEPS = 64, 10_000_000
"""Instructions of SQLite's machine: a row of a plain query takes some 15."""
_LOOK_EVERY = 1 << 16


@dataclass(frozen=True)
class Meaning:
    """What the name of a kernel or range says.

    Attributes:
        op: the operation of a kernel of NCCL; None where it does not say one.
        is_nccl: whether it is a kernel of NCCL.
        step: the number of a step, and what is before it, which is that of a level where ranges nest.
        phase: of a range.
    """

    op: Op | None
    is_nccl: bool
    step: tuple[str, int] | None
    phase: Phase | None

    @classmethod
    def of(cls, name: str) -> Meaning:
        """Return what a name says."""
        is_nccl = is_of_nccl(name)
        is_range = len(name) <= _MAX_NAME and ", op_id" not in name
        step = _STEP.search(name) if is_range else None
        return cls(
            op=op_of(kernel_op(name)) if is_nccl else None,
            is_nccl=is_nccl,
            step=(name[: step.start(1)], int(step.group(1))) if step else None,
            phase=phase_of(name) if is_range and step is None else None,
        )


PLAIN = Meaning.of("")
"""That of a name that says nothing."""


class Export:
    """An opened export; only plain tables of it are read, row by row, without joins and indices."""

    def __init__(self, connection: sqlite3.Connection, path: Path, size: int) -> None:
        self._connection, self._path = connection, path
        self.size = size
        self._max_rows, self._num_text_bytes = size // _MIN_ROW_BYTES, 0
        rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        self._columns = {
            name: {row[1] for row in connection.execute(f'PRAGMA table_xinfo("{name}")') if row[6] == 0}
            for name, sql in rows
            if name in (KERNELS, RUNTIME, NVTX, STRINGS, *COPIES, SESSION, "META_DATA_EXPORT", "TARGET_INFO_SYSTEM_ENV")
            # So SQLite writes it down, whatever the statement was; one of a virtual table goes on otherwise.
            and str(sql).startswith("CREATE TABLE ")
        }
        self.meanings = self._meanings()

    def has(self, table: str, *columns: str) -> bool:
        """Return whether a table has some columns."""
        return set(columns) <= self._columns.get(table, set())

    def column(self, table: str, *names: str) -> str:
        """Return the first of some names that a table has as a column, `NULL` without one."""
        return next((name for name in names if self.has(table, name)), "NULL")

    def rows(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield some columns of the rows of a table.

        Raises:
            TraceError: the table has more rows than `MAX_ROWS`, or than the file has bytes for.
        """
        for number, row in enumerate(self._connection.execute(f"SELECT {', '.join(columns)} FROM {table} NOT INDEXED")):
            if number >= MAX_ROWS:
                raise TraceError(f"{self._path}: {table} has more rows than {MAX_ROWS}: export a shorter range")
            if number >= self._max_rows:
                raise TraceError(f"{self._path}: {table} has more rows than its bytes can hold; is it damaged?")
            yield row

    def rows_with_text(self, table: str, text: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield some columns of the rows of a table, and behind them the begin of a text; None where it is no text.

        Raises:
            TraceError: as for `rows`, or texts have more bytes than the file, so that many rows have the same.
        """
        size = f"CASE typeof({text}) WHEN 'text' THEN length(CAST({text} AS BLOB)) ELSE 0 END"
        for *values, found, num_bytes in self.rows(table, *columns, text_column(text), size):
            self._num_text_bytes += num_bytes
            if self._num_text_bytes > self.size:
                raise TraceError(f"{self._path}: {table} has more text than the file has bytes; is it damaged?")
            yield *values, found

    def _meanings(self) -> dict[int, Meaning]:
        """Return what each text means to which rows refer, by its number."""
        if not self.has(STRINGS, "id", "value"):
            return {}
        found = {}
        for number, text in self.rows_with_text(STRINGS, "value", "id"):
            if isinstance(number, int) and text is not None:
                meaning = Meaning.of(text)
                found[number] = PLAIN if meaning == PLAIN else meaning
        return found


def text_column(column: str) -> str:
    """Return the begin of a text as a column of a query; NULL where it is no text."""
    return f"CASE typeof({column}) WHEN 'text' THEN substr({column}, 1, {_MAX_NAME + 1}) END"


@contextmanager
def open_export(path: Path) -> Iterator[Export]:
    """Yield an export.

    Raises:
        TraceError: it cannot be read, is no database, or what is read inside of the block is of a wrong kind.
    """
    size = _checked_size(path)
    # Immutable: whatever is beside it, such as a journal, is not looked at.
    address = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(address, uri=True)) as connection:
            for limit in (sqlite3.SQLITE_LIMIT_LENGTH, sqlite3.SQLITE_LIMIT_SQL_LENGTH):
                connection.setlimit(limit, _MAX_VALUE_BYTES)
            num_left = iter(range((_STEPS_PER_BYTE * size + _FREE_STEPS) // _LOOK_EVERY))
            connection.set_progress_handler(lambda: next(num_left, None) is None, _LOOK_EVERY)
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            yield Export(connection, path, size)
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise TraceError(f"cannot read {path}: {printable(str(error))[:160]}; is it damaged or cut off?") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{path} has values of a kind that no export has ({printable(str(error))[:120]})") from error


def _checked_size(path: Path) -> int:
    try:
        with Folder.open(path.parent) as folder:
            descriptor = folder.open_file(path.name)
            with os.fdopen(descriptor, "rb") as file:
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise TraceError(f"{path} is no sqlite database: write one with nsys export --type sqlite")
                return os.fstat(descriptor).st_size
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error


_PROCESS = ~0xFFFFFF
_MAX_RANKS, _MAX_DEVICES = 128, 16
"""Of an export, which is of one host, and of a process: each of them gets the ranges and launches of its process."""
_MAX_SHOWN = 16
_TOLD_EVERY = 1 << 16
_MAX_FACTS = 1024


class _Place(NamedTuple):
    """A GPU as a process uses it; ranks are in the order of places."""

    device: int
    process: int


def import_nsys(path: Path, *, progress: Callable[[int, int], None] = lambda *_: None) -> Import:
    """Read an export.

    Args:
        path: what `nsys export --type sqlite` wrote.
        progress: takes how much is done, of how much.

    Raises:
        TraceError: it cannot be read, is no database, or has no kernels.
    """
    with open_export(path) as export:
        return _import(export, path, progress)


def _import(export: Export, path: Path, progress: Callable[[int, int], None]) -> Import:
    if not export.has(KERNELS, "start", "end", "deviceId", "correlationId"):
        raise TraceError(f"{path} has no kernels ({KERNELS}): record with nsys profile --trace cuda,nvtx")
    profiles = _kernels(export, path, progress)
    by_process: dict[int, list[Profile]] = {}
    for place, profile in profiles.items():
        by_process.setdefault(place.process, []).append(profile)
    _launches(export, by_process)
    num_inside = _ranges(export, by_process)
    meta = _facts(export, "META_DATA_EXPORT")
    host = _facts(export, "TARGET_INFO_SYSTEM_ENV").get("Hostname", "") or "unknown"
    ranks, origin_ns = _ranks(profiles, host)
    version = meta.get("EXPORT_PRODUCT_VERSION", "")
    places = [f"{rank} = GPU {place.device}" for rank, place in enumerate(sorted(profiles))]
    is_known = {
        "steps": any(profile.steps or profile.optimizer for profile in profiles.values()),
        "phases": any(profile.marks for profile in profiles.values()),
        "what devices did": all(one.shows_device and not len(one.unnamed) for one in profiles.values()),
    }
    source = Source(
        tool=f"Nsight Systems {version}".strip(),
        files=[(path.name, export.size)],
        unknown=(
            "ranks and world of the job",
            "process groups, sizes and numbers of collectives",
            "direction and peers of messages (SendRecv kernels count as sends)",
            "network",
            "samples",
            *(what for what, is_one in is_known.items() if not is_one),
        ),
        notes=[
            f"a rank is a GPU of a process: {', '.join(first_few(places, _MAX_SHOWN, before='and '))}",
            "steps and phases are NVTX ranges named like step 12, forward, backward, optimizer",
            *([f"{plural(num_inside, 'range')} inside of steps, or around many, are no steps"] if num_inside else []),
            "one machine recorded all ranks: their clocks are one",
            *device_notes(profiles.values()),
        ],
        begun_unix_ns=_begun_unix_ns(export, origin_ns),
    )
    return Import(source=source, ranks=ranks)


def _kernels(export: Export, path: Path, progress: Callable[[int, int], None]) -> dict[_Place, Profile]:
    """Return a profile for each GPU of a process, with its kernels and copies."""
    found: dict[_Place, Profile] = {}
    name = export.column(KERNELS, "shortName", "demangledName")
    process = export.column(KERNELS, "globalPid")
    rows = export.rows(KERNELS, "start", "end", "deviceId", "correlationId", f"coalesce({process}, 0)", name)
    for number, (start, end, device, correlation, pid, text) in enumerate(rows):
        _check_numbers(start, end, device, correlation, pid)
        profile = _of_place(found, _Place(device, pid), path)
        meaning = export.meanings.get(text) if isinstance(text, int) else None
        if meaning is not None and meaning.op is not None:
            profile.nccl.add_call(meaning.op, start, end, link=correlation)
        elif meaning is not None and meaning.is_nccl:
            profile.unnamed.add(start, end, correlation, 0)
        else:
            profile.num_nameless += meaning is None
            profile.kernels.add(start, end, correlation)
        if number % _TOLD_EVERY == 0:
            progress(number, number + 1)
    for table in COPIES:
        if not export.has(table, "start", "end", "deviceId", "correlationId"):
            continue
        pid_column = export.column(table, "globalPid")
        for row in export.rows(table, "start", "end", "deviceId", "correlationId", f"coalesce({pid_column}, 0)"):
            _check_numbers(*row)
            start, end, device, correlation, pid = row
            if (profile_there := found.get(_Place(device, pid))) is not None:
                profile_there.kernels.add(start, end, correlation)
    if not found:
        raise TraceError(f"{path} has no kernels: nothing ran on a GPU while it was recorded")
    return found


def _check_numbers(*values: Any) -> None:
    """Refuse times, devices and processes that are none; differences of times must not overflow.

    Raises:
        ValueError: one is no whole number, or too large.
    """
    for value in values:
        if not is_whole(value, lowest=-MAX_NUMBER):
            raise ValueError(f"{shown(value)} is no time or number")


def _of_place(found: dict[_Place, Profile], place: _Place, path: Path) -> Profile:
    if place not in found:
        num_devices = sum(other.process == place.process for other in found)
        if len(found) >= _MAX_RANKS or num_devices >= _MAX_DEVICES:
            raise TraceError(
                f"{path} has more than {_MAX_RANKS} GPUs and processes, or {_MAX_DEVICES} GPUs of a process; is it "
                "damaged?"
            )
        found[place] = Profile(path=path)
    return found[place]


def _of_process(by_process: dict[int, list[Profile]], process: int) -> list[Profile]:
    """Return the profiles of a process, and those of which the process is not known."""
    return by_process.get(process, []) + (by_process.get(0, []) if process else [])


def _launches(export: Export, by_process: dict[int, list[Profile]]) -> None:
    """Add when the host launched what ran on the device."""
    if not export.has(RUNTIME, "start", "correlationId"):
        return
    thread = export.column(RUNTIME, "globalTid")
    for start, correlation, tid in export.rows(RUNTIME, "start", "correlationId", f"coalesce({thread}, 0)"):
        _check_numbers(start, correlation, tid)
        for profile in by_process.get(tid & _PROCESS, ()) or by_process.get(0, ()):
            profile.launches.add(start, correlation)


class _Step(NamedTuple):
    """A range with the name of a step: what stands before its number, which is that of a level where ranges nest."""

    level: str
    number: int
    start: int
    end: int


def _ranges(export: Export, by_process: dict[int, list[Profile]]) -> int:
    """Add NVTX ranges that are steps or phases to the ranks of their process; return how many named so are no steps."""
    if not export.has(NVTX, "start", "end", "globalTid"):
        return 0
    steps: dict[int, list[_Step]] = {}
    text = export.column(NVTX, "text")
    number = export.column(NVTX, "textId")
    columns = ("start", "end", "coalesce(globalTid, 0)", number)
    for start, end, tid, name_id, name in export.rows_with_text(NVTX, text, *columns):
        meaning = Meaning.of(name) if name is not None else export.meanings.get(name_id, PLAIN)
        if end is None or (meaning.step is None and meaning.phase is None):
            continue
        _check_numbers(start, end, tid)
        process = tid & _PROCESS
        if meaning.step is not None:
            steps.setdefault(process, []).append(_Step(*meaning.step, start, end))
        if meaning.phase is None:
            continue
        for profile in _of_process(by_process, process):
            profile.mark(meaning.phase, start, end)
    outermost = {process: _outermost(found) for process, found in steps.items()}
    for process, found in outermost.items():
        for profile in _of_process(by_process, process):
            profile.steps += [one[1:] for one in found]
    return sum(map(len, steps.values())) - sum(map(len, outermost.values()))


def _outermost(steps: list[_Step]) -> list[_Step]:
    """Return the ranges that lie in no other one, ascending, without those of a single name around several others."""
    count = Counter(step.level for step in steps)
    ordered = sorted(steps, key=lambda step: (step.start, -step.end))
    found: list[_Step] = []
    for step, second in zip_longest(ordered, ordered[2:]):
        is_around = count[step.level] == 1 and second is not None and second.end <= step.end
        if not is_around and (not found or step.end > found[-1].end):
            found.append(step)
    return found


def _facts(export: Export, table: str) -> dict[str, str]:
    if not export.has(table, "name", "value"):
        return {}
    pairs = islice(export.rows_with_text(table, "value", text_column("name")), _MAX_FACTS)
    return {name: printable(value)[:60] for name, value in pairs if name is not None and value is not None}


def _begun_unix_ns(export: Export, origin_ns: int) -> int:
    """Return when a time of the export was, which counts from the begin of its session; 0 where it does not say."""
    if not export.has(SESSION, "utcEpochNs"):
        return 0
    (begin,) = next(export.rows(SESSION, "utcEpochNs"), (None,))
    return date_of(begin + origin_ns) if type(begin) is int and begin else 0


def _ranks(profiles: dict[_Place, Profile], host: str) -> tuple[list[ImportedRank], int]:
    """Return the ranks, and the time of the export at which their first event begins."""
    ordered = [profiles[place] for place in sorted(profiles)]
    rows = [rows_of_profile(profile).tables for profile in ordered]
    origin_ns = min(
        first_ns(tables) or int(min(profile.kernels.rows["begin_ns"], default=0))
        for tables, profile in zip(rows, ordered, strict=True)
    )
    headers = headers_of(dict.fromkeys(range(len(ordered)), (host, host)), len(ordered))
    found = []
    for rank, tables in enumerate(rows):
        shift_times(tables, NS_PER_S - origin_ns)
        found.append(ImportedRank(header=headers[rank], tables=tables, device_tables=frozenset(DEVICE_TABLES)))
    return found, origin_ns
