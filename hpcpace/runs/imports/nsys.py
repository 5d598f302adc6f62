"""An sqlite export of Nsight Systems as a run: ranks are GPUs of processes, steps and phases are NVTX ranges."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hpcpace.errors import TraceError
from hpcpace.quoting import printable
from hpcpace.runs.imports.imported_run import Import, ImportedRank, Source, date_of
from hpcpace.runs.imports.kineto_names import kernel_op, op_of, phase_of
from hpcpace.runs.imports.kineto_profile import Profile, add_call, device_notes
from hpcpace.runs.imports.kineto_rows import first_ns, rows_of_profile, shift_times
from hpcpace.runs.imports.opened import size_of
from hpcpace.trace.schema import DEVICE_TABLES, TraceHeader
from hpcpace.units import NS_PER_S
from hpcpace.wording import plural

SESSION = "TARGET_INFO_SESSION_START_TIME"
KERNELS, RUNTIME, NVTX, STRINGS = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "NVTX_EVENTS",
    "StringIds",
)
COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
MOST_ROWS = 50_000_000
_MAGIC = b"SQLite format 3\x00"
_PROCESS = ~0xFFFFFF
_STEP = re.compile(r"(?:^|[^a-z])(?:step|iteration|iter)[ _#:=]*(\d{1,9})$", re.IGNORECASE)
_MOST_RANKS = 4096
_TOLD_EVERY = 1 << 16


@dataclass(frozen=True)
class _Place:
    """A GPU as a process uses it."""

    process: int
    device: int


class _Export:
    """An opened export; only plain tables of it are read."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self._path = connection, path
        rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        self._columns = {
            name: {row[1] for row in connection.execute(f'PRAGMA table_xinfo("{name}")') if row[6] == 0}
            for name, sql in rows
            if name in (KERNELS, RUNTIME, NVTX, STRINGS, *COPIES, SESSION, "META_DATA_EXPORT", "TARGET_INFO_SYSTEM_ENV")
            and not str(sql).upper().startswith("CREATE VIRTUAL")
        }

    def has(self, table: str, *columns: str) -> bool:
        """Return whether a table has some columns."""
        return set(columns) <= self._columns.get(table, set())

    def column(self, table: str, *names: str) -> str:
        """Return the first of some names that a table has as a column, `NULL` without one."""
        return next((name for name in names if self.has(table, name)), "NULL")

    def rows(self, table: str, select: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query.

        Raises:
            TraceError: the table has more rows than `MOST_ROWS`.
        """
        (count,) = self._connection.execute(f'SELECT count(*) FROM "{table}"').fetchone()
        if count > MOST_ROWS:
            raise TraceError(f"{self._path}: {table} has {count} rows, more than {MOST_ROWS}: export a shorter range")
        yield from self._connection.execute(select)


def import_nsys(path: Path, *, told: Callable[[int, int], None] = lambda *_: None) -> Import:
    """Read an export.

    Args:
        path: what `nsys export --type sqlite` wrote.
        told: takes how much is done, of how much.

    Raises:
        TraceError: it cannot be read, is no database, or has no kernels.
    """
    size = size_of(path)
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise TraceError(f"{path} is no sqlite database: write one with nsys export --type sqlite")
    address = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(address, uri=True)) as connection:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            return _import(_Export(connection, path), path, size, told)
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise TraceError(f"cannot read {path}: {printable(str(error))[:160]}; is it damaged or cut off?") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{path} has values of a kind that no export has ({printable(str(error))[:80]})") from error


def _import(export: _Export, path: Path, size: int, told: Callable[[int, int], None]) -> Import:
    if not export.has(KERNELS, "start", "end", "deviceId", "correlationId"):
        raise TraceError(f"{path} has no kernels ({KERNELS}): record with nsys profile --trace cuda,nvtx")
    profiles = _kernels(export, path, told)
    _launches(export, profiles)
    num_inside = _ranges(export, profiles)
    meta = _facts(export, "META_DATA_EXPORT")
    host = _facts(export, "TARGET_INFO_SYSTEM_ENV").get("Hostname", "") or "unknown"
    ranks, origin_ns = _ranks(profiles, host)
    version = meta.get("EXPORT_PRODUCT_VERSION", "")
    places = ", ".join(f"{rank} = GPU {place.device}" for rank, place in enumerate(sorted_places(profiles)))
    source = Source(
        tool=f"Nsight Systems {version}".strip(),
        files=[(path.name, size)],
        unknown=(
            "ranks and world of the job",
            "process groups, sizes and numbers of collectives",
            "direction and peers of messages (SendRecv kernels count as sends)",
            "network",
            "samples",
            *([] if any(profile.steps or profile.optimizer for profile in profiles.values()) else ["steps"]),
            *([] if any(profile.marks for profile in profiles.values()) else ["phases"]),
            *([] if all(profile.shows_device for profile in profiles.values()) else ["what devices did"]),
        ),
        notes=[
            f"a rank is a GPU of a process: {places}",
            "steps and phases are NVTX ranges named like step 12, forward, backward, optimizer",
            *([f"{plural(num_inside, 'range')} inside of steps, or around many, are no steps"] if num_inside else []),
            "one machine recorded all ranks: their clocks are one",
            *device_notes(profiles.values()),
        ],
        begun_unix_ns=_begun_unix_ns(export, origin_ns),
    )
    return Import(source=source, ranks=ranks)


def sorted_places(profiles: dict[_Place, Profile]) -> list[_Place]:
    """Return the places in order of GPU and process, which is that of their ranks."""
    return sorted(profiles, key=lambda place: (place.device, place.process))


def _kernels(export: _Export, path: Path, told: Callable[[int, int], None]) -> dict[_Place, Profile]:
    """Return a profile for each GPU of a process, with its kernels and copies."""
    found: dict[_Place, Profile] = {}
    name = export.column(KERNELS, "shortName", "demangledName")
    has_names = name != "NULL" and export.has(STRINGS, "id", "value")
    names = f"LEFT JOIN {STRINGS} s ON s.id = k.{name}" if has_names else ""
    process = export.column(KERNELS, "globalPid")
    select = f"SELECT k.start, k.end, k.deviceId, k.correlationId, {process}, {'s.value' if has_names else 'NULL'}"
    for number, row in enumerate(export.rows(KERNELS, f"{select} FROM {KERNELS} k {names}")):
        start, end, device, correlation, pid, kernel = row
        profile = _of_place(found, _Place(int(pid or 0), int(device)), path)
        is_nccl = isinstance(kernel, str) and kernel[:4].lower() == "nccl"
        op = op_of(kernel_op(kernel)) if is_nccl else None
        if op is not None:
            add_call(profile.nccl, op, start, end, link=int(correlation))
        elif is_nccl:
            profile.num_unnamed += 1
        else:
            profile.num_nameless += not isinstance(kernel, str)
            _append(profile, start, end, correlation)
        if number % _TOLD_EVERY == 0:
            told(number, number + 1)
    for table in COPIES:
        if not export.has(table, "start", "end", "deviceId", "correlationId"):
            continue
        pid_column = export.column(table, "globalPid")
        for start, end, device, correlation, pid in export.rows(
            table, f"SELECT start, end, deviceId, correlationId, {pid_column} FROM {table}"
        ):
            place = _Place(int(pid or 0), int(device))
            if place in found:
                _append(found[place], start, end, correlation)
    if not found:
        raise TraceError(f"{path} has no kernels: nothing ran on a GPU while it was recorded")
    return found


def _of_place(found: dict[_Place, Profile], place: _Place, path: Path) -> Profile:
    if place not in found:
        if len(found) >= _MOST_RANKS:
            raise TraceError(f"{path} has more than {_MOST_RANKS} GPUs and processes; is it damaged?")
        found[place] = Profile(path=path)
    return found[place]


def _append(profile: Profile, start: int, end: int, correlation: int) -> None:
    for column, value in zip(profile.kernels, (start, end, correlation), strict=True):
        column.append(value)


def _launches(export: _Export, profiles: dict[_Place, Profile]) -> None:
    """Add when the host launched what ran on the device."""
    if not export.has(RUNTIME, "start", "correlationId"):
        return
    by_process: dict[int, list[Profile]] = {}
    for place, profile in profiles.items():
        by_process.setdefault(place.process, []).append(profile)
    thread = export.column(RUNTIME, "globalTid")
    for start, correlation, tid in export.rows(RUNTIME, f"SELECT start, correlationId, {thread} FROM {RUNTIME}"):
        for profile in by_process.get(int(tid or 0) & _PROCESS, ()) or by_process.get(0, ()):
            profile.launches[0].append(start)
            profile.launches[1].append(correlation)


@dataclass(frozen=True)
class _Step:
    """A range with the name of a step: what stands before its number, which is that of a level where ranges nest."""

    level: str
    number: int
    start: int
    end: int


def _ranges(export: _Export, profiles: dict[_Place, Profile]) -> int:
    """Add NVTX ranges that are steps or phases to the ranks of their process; return how many named so are no steps."""
    if not export.has(NVTX, "start", "end", "globalTid"):
        return 0
    steps: dict[int, list[_Step]] = {}
    text = export.column(NVTX, "text")
    has_ids = export.has(NVTX, "textId") and export.has(STRINGS, "id", "value")
    value, names = (f"coalesce(n.{text}, s.value)", f"LEFT JOIN {STRINGS} s ON s.id = n.textId")
    if text == "NULL":
        value = "s.value"
    if not has_ids:
        value, names = text, ""
    for start, end, tid, name in export.rows(
        NVTX, f"SELECT n.start, n.end, n.globalTid, {value} FROM {NVTX} n {names} WHERE n.end IS NOT NULL"
    ):
        if not isinstance(name, str) or ", op_id" in name:
            continue
        step, phase = _STEP.search(name), phase_of(name)
        if step is None and phase is None:
            continue
        process = int(tid or 0) & _PROCESS
        if step is not None:
            level = name[: step.start(1)]
            steps.setdefault(process, []).append(_Step(level, int(step.group(1)), int(start), int(end)))
            continue
        for place, profile in profiles.items():
            if phase is not None and place.process in (process, 0):
                profile.mark(phase, int(start), int(end))
    outermost = {process: _outermost(found) for process, found in steps.items()}
    for place, profile in profiles.items():
        for process, found in outermost.items():
            if place.process in (process, 0):
                profile.steps += [(one.number, one.start, one.end) for one in found]
    return sum(map(len, steps.values())) - sum(map(len, outermost.values()))


def _outermost(steps: list[_Step]) -> list[_Step]:
    """Return the ranges that lie in no other one, ascending, without those of a single name around several others."""
    count = Counter(step.level for step in steps)
    ordered = sorted(steps, key=lambda step: (step.start, -step.end))
    second_inside = [*ordered[2:], None, None]
    found: list[_Step] = []
    for step, second in zip(ordered, second_inside, strict=False):
        is_around = count[step.level] == 1 and second is not None and second.end <= step.end
        if not is_around and (not found or step.end > found[-1].end):
            found.append(step)
    return found


def _facts(export: _Export, table: str) -> dict[str, str]:
    if not export.has(table, "name", "value"):
        return {}
    pairs = export.rows(table, f"SELECT name, value FROM {table} LIMIT 4096")
    return {str(name): printable(str(value))[:60] for name, value in pairs}


def _begun_unix_ns(export: _Export, origin_ns: int) -> int:
    """Return when a time of the export was, which counts from the begin of its session; 0 where it does not say."""
    if not export.has(SESSION, "utcEpochNs"):
        return 0
    begins = [begin for (begin,) in export.rows(SESSION, f"SELECT utcEpochNs FROM {SESSION} LIMIT 1")]
    return date_of(int(begins[0]) + origin_ns) if begins and begins[0] else 0


def _ranks(profiles: dict[_Place, Profile], host: str) -> tuple[list[ImportedRank], int]:
    """Return the ranks, and the time of the export at which their first event begins."""
    ordered = [profiles[place] for place in sorted_places(profiles)]
    rows = [rows_of_profile(profile).tables for profile in ordered]
    origin_ns = min(
        first_ns(tables) or min(profile.kernels[0], default=0) for tables, profile in zip(rows, ordered, strict=True)
    )
    found = []
    for rank, tables in enumerate(rows):
        shift_times(tables, NS_PER_S - origin_ns)
        header = TraceHeader(
            run_id="",
            attempt=0,
            rank=rank,
            world_size=len(ordered),
            local_rank=rank,
            local_size=len(ordered),
            node=0,
            host=host,
            host_key=host,
        )
        found.append(ImportedRank(header=header, tables=tables, device_tables=frozenset(DEVICE_TABLES)))
    return found, origin_ns
