"""Snapshots as JSON files, a folder with one HOST.json per host, and the differences between two of a host.

Folders may belong to another user: files that are not regular, too large or not snapshots are left out and named.
Parts that are equal on many hosts are created once: 2,048 identical nodes share one `Hardware`. Ranks are written as
columns, and values that all ranks of a host share are written once, so that 192 ranks fit.

A machine that nobody has changed has no differences: counters, loads and clocks change by themselves and are compared
on request only, and sizes of memory count as equal up to the few pages that a kernel keeps for itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcpace.audit.facts import SCHEMA, Snapshot
from hpcpace.core.change import FactChange, fact_changes, is_close
from hpcpace.core.codec import WrongValue, convert, parse_json, plain
from hpcpace.core.errors import SnapshotError, UsageError
from hpcpace.core.files import Folder
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.core.text import printable, shown

_KEYS = ("address", "name", "number", "rank", "index")
# Facts that are new in every snapshot, or only say how it was taken.
_IGNORED = ("taken_unix_ns", "schema", "hpcpace_version", "unreadable", "is_live", "counters/window_s")
_MEMORY = ("memory_kb", "memory_bytes", "shm_bytes")
_MEMORY_TOLERANCE = 0.01
"""Less than the smallest memory module of a node with 64 of them; kernels of one version differ by 0.1 %."""

_CHANGING = re.compile(
    r"boot_id|counters/.*|(load|memory|time_sync)(/.*)?|gpus/.*/nvml/(replays|throttle_reasons|utilization_percent)"
)


def differences(before: Snapshot, after: Snapshot, *, with_counters: bool = False) -> list[FactChange]:
    """Return the facts in which two snapshots of a host differ, sorted by name.

    Args:
        before, after: the snapshots.
        with_counters: whether to compare counters and what else changes by itself, and memory to the byte.
    """
    old, new = dict(_facts(plain(before), "")), dict(_facts(plain(after), ""))
    idle = set() if with_counters else {*_idle_speeds(before), *_idle_speeds(after)}

    def counts(change: FactChange) -> bool:
        fact = change.name
        if fact.startswith(_IGNORED) or fact in idle:
            return False
        is_memory = fact.endswith(_MEMORY) and is_close(old.get(fact), new.get(fact), _MEMORY_TOLERANCE)
        return with_counters or not (_CHANGING.fullmatch(fact) or is_memory)

    found = filter(counts, fact_changes(after.host, old, new, words=_text))
    return sorted(found, key=lambda change: change.name)


def _idle_speeds(snapshot: Snapshot) -> Iterator[str]:
    """Yield the speeds of links that an idle GPU lowers."""
    for device in snapshot.hardware.pci or ():
        if device.kind != "nic":
            yield f"hardware/pci/{device.address}/speed_gts"


def _facts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each single value with its path; rows are identified by a key field, not by their position."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _facts(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        for item in value:
            key = next((item[name] for name in _KEYS if isinstance(item, Mapping) and name in item), None)
            label = (
                "+".join(str(item[name]) for name in ("level", "kind", "cpus") if name in item) if key is None else key
            )
            yield from _facts(item, f"{path}/{label}")
    else:
        yield path, value


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        value = " ".join(map(str, value))
    return printable("unreadable" if value is None else str(value))[:120]


MAX_BYTES = 65_536
"""Every snapshot is smaller than this."""

_MAX_RANKS = 4_096
_MAX_SAME = 1 << 17  # shared values times ranks: a short text must not expand into a lot of memory
_MAX_SHARED = 32
_NESTED = "variables"
_SHARED = ("hardware", "kernel", "net", "rdma")

_RECENT: dict[str, list[tuple[Any, Any]]] = {name: [] for name in _SHARED}


def snapshot_text(snapshot: Snapshot) -> str:
    """Return a snapshot as JSON text of less than MAX_BYTES.

    If the facts of a host do not fit, reasons, counters and address tables are dropped first. `unreadable` names what
    was dropped, so that no rule takes it for clean.

    Raises:
        SnapshotError: the facts still do not fit.
    """
    text = _dumps(snapshot)
    for shorten in (_few_reasons, _few_gids, _without_pci):
        if len(text) < MAX_BYTES:
            break
        snapshot = shorten(snapshot)
        text = _dumps(snapshot)
    if len(text) < MAX_BYTES:
        return text
    raise SnapshotError(f"the facts of {printable(snapshot.host)} take {len(text)} bytes, the limit is {MAX_BYTES}")


def snapshot_from(content: str | bytes) -> Snapshot:
    """Return the snapshot that a JSON text encodes.

    Raises:
        SnapshotError: it is truncated, of another version, or has a value of the wrong type.
    """
    try:
        document = parse_json(content)
    except ValueError as error:
        raise SnapshotError(f"{error}: take the snapshot again") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(schema, str) or not schema.startswith("hpcpace-audit-snapshot/"):
        raise SnapshotError("not a snapshot of hpcpace audit: its `schema` is missing or another one")
    if schema != SCHEMA:
        raise SnapshotError(f"a snapshot with schema {printable(schema[:60])}: this version of hpcpace reads {SCHEMA}")
    document["ranks"] = _rows(document.get("ranks"), "ranks")
    try:
        snapshot = convert(document, Snapshot)
    except WrongValue as error:
        raise SnapshotError(str(error)) from None
    shared = {name: _shared(name, document[name], getattr(snapshot, name)) for name in _SHARED}
    return replace(snapshot, **shared)


def _dumps(snapshot: Snapshot) -> str:
    document = plain(snapshot)
    document["ranks"] = _columns(document["ranks"])
    return json.dumps(document, separators=(",", ":")) + "\n"


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return `{"num": n, "same": {field: value}, "each": {field: [value of each row]}}`; nested for variables."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
    same = {name: values[0] for name, values in columns.items() if all(value == values[0] for value in values)}
    each = {
        name: _columns(values) if name == _NESTED else values for name, values in columns.items() if name not in same
    }
    return {"num": len(rows), "same": same, "each": each}


def _rows(columns: Any, where: str) -> list[dict[str, Any]]:
    """Return the rows that `_columns` has turned into columns.

    Raises:
        SnapshotError: the columns are damaged.
    """
    if not isinstance(columns, dict) or not {"num", "same", "each"} <= set(columns):
        raise _wrong(columns, where, "an object with num, same and each")
    num, same, each = columns["num"], columns["same"], columns["each"]
    are_columns = isinstance(same, dict) and isinstance(each, dict)
    if not are_columns or not isinstance(num, int) or not 0 <= num <= _MAX_RANKS:
        raise _wrong(columns, where, f"columns of at most {_MAX_RANKS} ranks")
    if num * sum(1 + (len(value) if isinstance(value, (dict, list)) else 0) for value in same.values()) > _MAX_SAME:
        raise _wrong(columns, where, f"columns with at most {_MAX_SAME} shared values")
    rows = [dict(same) for _ in range(num)]
    for name, values in each.items():
        place = f"{where}.{printable(name[:60])}"
        if isinstance(values, dict):
            if name != _NESTED or where != "ranks":
                raise _wrong(values, place, f"a list of {num}")
            nested = _rows(values, place)
            values = [{key: value for key, value in row.items() if value is not None} for row in nested]
        if not isinstance(values, list) or len(values) != num:
            raise _wrong(values, place, f"a list of {num}")
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows


def _few_reasons(snapshot: Snapshot) -> Snapshot:
    unreadable = {name: reason[:24] for name, reason in list(snapshot.unreadable.items())[:200]}
    counters = replace(snapshot.counters, values=dict(list(snapshot.counters.values.items())[:200]))
    if len(counters.values) < len(snapshot.counters.values):
        unreadable["counters"] = "too many for a snapshot"
    return replace(snapshot, unreadable=unreadable, counters=counters)


def _few_gids(snapshot: Snapshot) -> Snapshot:
    rdma = tuple(
        replace(device, ports=tuple(replace(port, gids=port.gids[:4]) for port in device.ports))
        for device in snapshot.rdma or ()
    )
    return replace(snapshot, rdma=rdma if snapshot.rdma is not None else None)


def _without_pci(snapshot: Snapshot) -> Snapshot:
    """Drop PCI completely: half a tree would give wrong path classes."""
    hardware = replace(snapshot.hardware, pci=None)
    unreadable = snapshot.unreadable | {"pci": "too many devices for a snapshot"}
    return replace(snapshot, hardware=hardware, unreadable=unreadable)


def _shared(name: str, value: Any, made: Any) -> Any:
    """Return what an equal value of a recent snapshot has been made, else what this one has been made.

    Comparing with recent values is several times faster than hashing them.
    """
    seen = _RECENT[name]
    for number, (known, other) in enumerate(seen):
        if known == value:
            seen.insert(0, seen.pop(number))
            return other
    seen.insert(0, (value, made))
    del seen[_MAX_SHARED:]
    return made


def _wrong(value: Any, where: str, expected: str) -> SnapshotError:
    return SnapshotError(f"{where} is {shown(value)}: expected {expected}")


NUM_OURS_OF_RUN = 2
"""How many names at the end of an attempt's snapshot folder hpcpace has chosen, for `Folder.open`."""

_MAX_READ_BYTES = 1 << 20
_MAX_REASON = 200
# Limits for all snapshots of a folder: 16,384 files, and 256 MiB including what their ranks take in memory.
_MAX_WEIGHT, _MIN_WEIGHT, _WEIGHT_OF_VALUE = 1 << 28, 1 << 14, 32


def save_snapshots(folder: Path, snapshots: Sequence[Snapshot], *, num_ours: int = 0) -> list[Path]:
    """Write each snapshot as HOST.json.

    Args:
        folder: where to write; it is created if necessary.
        snapshots: snapshots of hosts with distinct names.
        num_ours: how many names at the end of `folder` hpcpace has chosen, for `Folder.open`.

    Raises:
        UsageError: the folder is not writable.
        SnapshotError: some snapshots are too large, or cannot replace what has their name; the others are saved.
    """
    paths, problems = [], []
    try:
        held = Folder.open(folder, make=True, num_ours=num_ours)
    except OSError as error:
        raise UsageError(f"cannot save snapshots in {folder}: {error.strerror}; name another folder") from error
    with held:
        for snapshot in snapshots:
            try:
                paths.append(held.write(f"{file_name(snapshot.host)}.json", snapshot_text(snapshot)))
            except SnapshotError as error:
                problems.append(str(error))
            except OSError as error:
                problems.append(f"{printable(snapshot.host)}: {error.strerror}")
    if problems:
        raise SnapshotError(f"cannot save snapshots in {folder}: {'; '.join(problems)[:_MAX_REASON]}")
    return paths


def load_snapshots(path: Path) -> tuple[list[Snapshot], list[str]]:
    """Return the snapshots in a folder, a run or a file, and a sentence for each one that cannot be read.

    Raises:
        UsageError: there are no snapshots at all.
    """
    try:
        folder = Folder.open(path)
    except OSError:
        snapshots, problems = _read_file(path)
    else:
        with folder:
            attempts = RunDirectory(path, folder).attempts()
            snapshots, problems = read_attempt(attempts[-1]) if attempts else _read_all(folder)
    if not snapshots:
        raise UsageError(problems[0] if problems else f"no snapshots in {path}: `hpcpace audit --save DIR` writes them")
    return snapshots, problems


def read_attempt(attempt: Attempt) -> tuple[list[Snapshot], list[str]]:
    """Return the snapshots of an attempt, and a sentence for each invalid file; both empty without a folder."""
    try:
        with attempt.open() as folder, folder.folder(attempt.snapshot_dir.name) as held:
            return _read_all(held)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [_unread(attempt.snapshot_dir, error)]


def with_distinct_names(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return snapshots with a number added to repeated host names: containers may share a name."""
    seen: dict[str, int] = {}
    made = []
    for snapshot in snapshots:
        seen[snapshot.host] = seen.get(snapshot.host, 0) + 1
        count = seen[snapshot.host]
        made.append(snapshot if count == 1 else replace(snapshot, host=f"{snapshot.host}#{count}"))
    return made


def file_name(host: str) -> str:
    """Return a host name as a safe file name."""
    return re.sub(r"[^A-Za-z0-9_.#-]", "_", host).lstrip(".")[:120] or "host"


def _read_file(path: Path) -> tuple[list[Snapshot], list[str]]:
    try:
        with Folder.open(path.parent) as folder:
            return _read(folder, [path.name])
    except OSError as error:
        return [], [_unread(path, error)]


def _read_all(folder: Folder) -> tuple[list[Snapshot], list[str]]:
    return _read(folder, [name for name in folder.names() if name.endswith(".json") and not name.startswith(".")])


def _read(folder: Folder, names: Sequence[str]) -> tuple[list[Snapshot], list[str]]:
    snapshots, problems, weight = [], [], 0
    for number, name in enumerate(names):
        if weight >= _MAX_WEIGHT:
            problems.append(
                f"{len(names) - number} more files of {printable(str(folder.path))} are left out: too much data"
            )
            break
        weight += _MIN_WEIGHT
        try:
            content = folder.read(name, most_bytes=_MAX_READ_BYTES)
            weight += len(content)
            snapshots.append(snapshot_from(content))
        except OSError as error:
            problems.append(_unread(folder.path / name, error))
        except SnapshotError as error:
            problems.append(f"{printable(str(folder.path / name))}: {error}")
        else:
            weight += _WEIGHT_OF_VALUE * _num_values(snapshots[-1])
    return with_distinct_names(snapshots), problems


def _num_values(snapshot: Snapshot) -> int:
    """Return roughly how many values the ranks hold; the text has each value that all ranks share only once."""
    return sum(32 + len(rank.variables) + len(rank.user_conf) + len(rank.gpus or ()) for rank in snapshot.ranks)


def _unread(path: Path, error: OSError) -> str:
    return f"cannot read {printable(str(path))}: {error.strerror}"
