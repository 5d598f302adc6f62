"""An sqlite export of Nsight Systems as a run: ranks are GPUs of processes, steps and phases are NVTX ranges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hpcpace.core.errors import TraceError
from hpcpace.core.text import NS_PER_S, plural, printable, shown
from hpcpace.runs.imports.imported_run import Import, ImportedRank, Source, date_of
from hpcpace.runs.imports.kineto_profile import Profile, add_call, device_notes
from hpcpace.runs.imports.kineto_rows import first_ns, rows_of_profile, shift_times
from hpcpace.runs.imports.nsys_export import (
    COPIES,
    KERNELS,
    NVTX,
    PLAIN,
    RUNTIME,
    SESSION,
    Export,
    Meaning,
    open_export,
    text_column,
)
from hpcpace.runs.imports.plain_values import MAX_NUMBER, is_whole
from hpcpace.trace.schema import DEVICE_TABLES, TraceHeader

_PROCESS = ~0xFFFFFF
_MAX_RANKS, _MAX_DEVICES = 128, 16
"""Of an export, which is of one host, and of a process: each of them gets the ranges and launches of its process."""
_MAX_SHOWN = 16
_TOLD_EVERY = 1 << 16
_MAX_FACTS = 1024


@dataclass(frozen=True)
class _Place:
    """A GPU as a process uses it."""

    process: int
    device: int


def import_nsys(path: Path, *, told: Callable[[int, int], None] = lambda *_: None) -> Import:
    """Read an export.

    Args:
        path: what `nsys export --type sqlite` wrote.
        told: takes how much is done, of how much.

    Raises:
        TraceError: it cannot be read, is no database, or has no kernels.
    """
    with open_export(path) as export:
        return _import(export, path, told)


def _import(export: Export, path: Path, told: Callable[[int, int], None]) -> Import:
    if not export.has(KERNELS, "start", "end", "deviceId", "correlationId"):
        raise TraceError(f"{path} has no kernels ({KERNELS}): record with nsys profile --trace cuda,nvtx")
    profiles = _kernels(export, path, told)
    _launches(export, profiles)
    num_inside = _ranges(export, profiles)
    meta = _facts(export, "META_DATA_EXPORT")
    host = _facts(export, "TARGET_INFO_SYSTEM_ENV").get("Hostname", "") or "unknown"
    ranks, origin_ns = _ranks(profiles, host)
    version = meta.get("EXPORT_PRODUCT_VERSION", "")
    places = [f"{rank} = GPU {place.device}" for rank, place in enumerate(sorted_places(profiles))]
    others = [f"and {len(places) - _MAX_SHOWN} more"] if len(places) > _MAX_SHOWN else []
    source = Source(
        tool=f"Nsight Systems {version}".strip(),
        files=[(path.name, export.size)],
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
            f"a rank is a GPU of a process: {', '.join([*places[:_MAX_SHOWN], *others])}",
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


def _kernels(export: Export, path: Path, told: Callable[[int, int], None]) -> dict[_Place, Profile]:
    """Return a profile for each GPU of a process, with its kernels and copies."""
    found: dict[_Place, Profile] = {}
    name = export.column(KERNELS, "shortName", "demangledName")
    process = export.column(KERNELS, "globalPid")
    rows = export.rows(KERNELS, "start", "end", "deviceId", "correlationId", f"coalesce({process}, 0)", name)
    for number, (start, end, device, correlation, pid, text) in enumerate(rows):
        _check_numbers(start, end, device, correlation, pid)
        profile = _of_place(found, _Place(pid, device), path)
        meaning = export.meanings.get(text) if isinstance(text, int) else None
        if meaning is not None and meaning.op is not None:
            add_call(profile.nccl, meaning.op, start, end, link=correlation)
        elif meaning is not None and meaning.is_nccl:
            profile.num_unnamed += 1
        else:
            profile.num_nameless += meaning is None
            _append(profile, start, end, correlation)
        if number % _TOLD_EVERY == 0:
            told(number, number + 1)
    for table in COPIES:
        if not export.has(table, "start", "end", "deviceId", "correlationId"):
            continue
        pid_column = export.column(table, "globalPid")
        for row in export.rows(table, "start", "end", "deviceId", "correlationId", f"coalesce({pid_column}, 0)"):
            _check_numbers(*row)
            start, end, device, correlation, pid = row
            if (profile_there := found.get(_Place(pid, device))) is not None:
                _append(profile_there, start, end, correlation)
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


def _by_process(profiles: dict[_Place, Profile]) -> dict[int, list[Profile]]:
    found: dict[int, list[Profile]] = {}
    for place, profile in profiles.items():
        found.setdefault(place.process, []).append(profile)
    return found


def _append(profile: Profile, start: int, end: int, correlation: int) -> None:
    for column, value in zip(profile.kernels, (start, end, correlation), strict=True):
        column.append(value)


def _launches(export: Export, profiles: dict[_Place, Profile]) -> None:
    """Add when the host launched what ran on the device."""
    if not export.has(RUNTIME, "start", "correlationId"):
        return
    by_process = _by_process(profiles)
    thread = export.column(RUNTIME, "globalTid")
    for start, correlation, tid in export.rows(RUNTIME, "start", "correlationId", f"coalesce({thread}, 0)"):
        _check_numbers(start, correlation, tid)
        for profile in by_process.get(tid & _PROCESS, ()) or by_process.get(0, ()):
            profile.launches[0].append(start)
            profile.launches[1].append(correlation)


@dataclass(frozen=True)
class _Step:
    """A range with the name of a step: what stands before its number, which is that of a level where ranges nest."""

    level: str
    number: int
    start: int
    end: int


def _ranges(export: Export, profiles: dict[_Place, Profile]) -> int:
    """Add NVTX ranges that are steps or phases to the ranks of their process; return how many named so are no steps."""
    if not export.has(NVTX, "start", "end", "globalTid"):
        return 0
    steps: dict[int, list[_Step]] = {}
    by_process = _by_process(profiles)
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
