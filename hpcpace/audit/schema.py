"""Encoding snapshots as JSON and decoding them with every value checked: a file may be truncated, old or foreign.

Parts that are equal on many hosts are created once: 2,048 identical nodes share one `Hardware`. Ranks are written as
columns, and values that all ranks of a host share are written once, so that 192 ranks fit.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hpcpace.audit.facts import SCHEMA, Snapshot
from hpcpace.core.codec import WrongValue, convert, parse_json, plain
from hpcpace.core.errors import SnapshotError
from hpcpace.core.text import printable, shown

MOST_BYTES = 65_536
"""Every snapshot is smaller than this."""

_MAX_RANKS = 4_096
_MAX_SAME = 1 << 17  # shared values times ranks: a short text must not expand into a lot of memory
_MAX_SHARED = 32
_NESTED = "variables"
_SHARED = ("hardware", "kernel", "net", "rdma")

_RECENT: dict[str, list[tuple[Any, Any]]] = {name: [] for name in _SHARED}


def snapshot_text(snapshot: Snapshot) -> str:
    """Return a snapshot as JSON text of less than MOST_BYTES.

    If the facts of a host do not fit, reasons, counters and address tables are dropped first. `unreadable` names what
    was dropped, so that no rule takes it for clean.

    Raises:
        SnapshotError: the facts still do not fit.
    """
    for shorten in (_whole, _few_reasons, _few_gids, _without_pci):
        snapshot = shorten(snapshot)
        text = _dumps(snapshot)
        if len(text) < MOST_BYTES:
            return text
    raise SnapshotError(f"the facts of {printable(snapshot.host)} take {len(text)} bytes, the limit is {MOST_BYTES}")


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
    return dataclasses.replace(
        snapshot, **{name: _shared(name, document[name], getattr(snapshot, name)) for name in _SHARED}
    )


def _dumps(snapshot: Snapshot) -> str:
    document = plain(snapshot)
    document["ranks"] = _columns(document["ranks"])
    return json.dumps(document, separators=(",", ":")) + "\n"


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return `{"num": n, "same": {field: value}, "each": {field: [value of each row]}}`; nested for variables."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    same: dict[str, Any] = {}
    each: dict[str, Any] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if all(value == values[0] for value in values):
            same[name] = values[0]
        elif all(isinstance(value, dict) for value in values) and name == _NESTED:
            each[name] = _columns([dict(value) for value in values if value is not None])
        else:
            each[name] = values
    return {"num": len(rows), "same": same, "each": each}


def _rows(columns: Any, where: str) -> list[dict[str, Any]]:
    """Return the rows that `_columns` has turned into columns.

    Raises:
        SnapshotError: the columns are damaged.
    """
    if not isinstance(columns, dict) or not {"num", "same", "each"} <= set(columns):
        raise _wrong(columns, where, "an object with num, same and each")
    num, same, each = columns["num"], columns["same"], columns["each"]
    if (
        not isinstance(num, int)
        or not 0 <= num <= _MAX_RANKS
        or not isinstance(same, dict)
        or not isinstance(each, dict)
    ):
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


def _whole(snapshot: Snapshot) -> Snapshot:
    return snapshot


def _few_reasons(snapshot: Snapshot) -> Snapshot:
    unreadable = {name: reason[:24] for name, reason in list(snapshot.unreadable.items())[:200]}
    counters = dataclasses.replace(snapshot.counters, values=dict(list(snapshot.counters.values.items())[:200]))
    if len(counters.values) < len(snapshot.counters.values):
        unreadable["counters"] = "too many for a snapshot"
    return dataclasses.replace(snapshot, unreadable=unreadable, counters=counters)


def _few_gids(snapshot: Snapshot) -> Snapshot:
    rdma = tuple(
        dataclasses.replace(device, ports=tuple(dataclasses.replace(port, gids=port.gids[:4]) for port in device.ports))
        for device in snapshot.rdma or ()
    )
    return dataclasses.replace(snapshot, rdma=rdma if snapshot.rdma is not None else None)


def _without_pci(snapshot: Snapshot) -> Snapshot:
    """Drop PCI completely: half a tree would give wrong path classes."""
    hardware = dataclasses.replace(snapshot.hardware, pci=None)
    unreadable = snapshot.unreadable | {"pci": "too many devices for a snapshot"}
    return dataclasses.replace(snapshot, hardware=hardware, unreadable=unreadable)


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
