"""Encoding snapshots as JSON and decoding them with every value checked: a file may be truncated, old or foreign.

Parts that are equal on many hosts are created once: 2,048 identical nodes share one `Hardware`. Ranks are written as
columns, and values that all ranks of a host share are written once, so that 192 ranks fit.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from hpcpace.audit.facts import SCHEMA, Snapshot
from hpcpace.core.errors import SnapshotError
from hpcpace.core.text import printable, shown

MOST_BYTES = 65_536
"""Every snapshot is smaller than this."""

_MOST_RANKS = 4_096
_MOST_SAME = 1 << 17  # shared values times ranks: a short text must not expand into a lot of memory
_MOST_SHARED = 32
_NESTED = "variables"
_SHARED = ("hardware", "kernel", "net", "rdma")

_Decode = Callable[[Any, str], Any]


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
    document = json_from(content)
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(schema, str) or not schema.startswith("hpcpace-audit-snapshot/"):
        raise SnapshotError("not a snapshot of hpcpace audit: its `schema` is missing or another one")
    if schema != SCHEMA:
        raise SnapshotError(f"a snapshot with schema {printable(schema[:60])}: this version of hpcpace reads {SCHEMA}")
    document["ranks"] = _rows(document.get("ranks"), "ranks")
    snapshot: Snapshot = _decoded(Snapshot, document, "")
    return snapshot


def json_from(content: str | bytes) -> Any:
    """Return the values of a JSON text.

    Raises:
        SnapshotError: it is truncated, nested too deeply, has NaN or Infinity, or a name twice in one object.
    """
    try:
        return json.loads(content, parse_constant=_no_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"not complete JSON ({printable(str(error))[:100]}): take the snapshot again") from None


def decoded(kind: type, value: Any) -> Any:
    """Return a dataclass of facts from JSON values.

    Raises:
        SnapshotError: a value is missing, or of the wrong type.
    """
    return _decoded(kind, value, kind.__name__)


def plain(value: Any) -> Any:
    """Return a dataclass, and everything in it, as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in _field_names(type(value))}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object has a name twice")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _decoded(kind: type, value: Any, where: str) -> Any:
    try:
        return _of_dataclass(kind)(value, where)
    except RecursionError:  # the json module accepts slightly less deep nesting
        raise SnapshotError(f"{where or 'the snapshot'} is nested too deeply") from None


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
        or not 0 <= num <= _MOST_RANKS
        or not isinstance(same, dict)
        or not isinstance(each, dict)
    ):
        raise _wrong(columns, where, f"columns of at most {_MOST_RANKS} ranks")
    if num * sum(1 + (len(value) if isinstance(value, (dict, list)) else 0) for value in same.values()) > _MOST_SAME:
        raise _wrong(columns, where, f"columns with at most {_MOST_SAME} shared values")
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


@lru_cache(maxsize=64)
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(item.name for item in dataclasses.fields(kind))


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


@lru_cache(maxsize=64)
def _of_dataclass(kind: type) -> _Decode:
    hints = typing.get_type_hints(kind)
    decoders: dict[str, _Decode] = {}
    optional: set[str] = set()
    for item in dataclasses.fields(kind):
        decoder = _of(hints[item.name])
        shared = kind is Snapshot and item.name in _SHARED
        decoders[item.name] = _shared(decoder) if shared else decoder
        if item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING:
            optional.add(item.name)

    def decode(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        made = {}
        for name, decoder in decoders.items():
            if name in value:
                made[name] = decoder(value[name], f"{where}.{name}" if where else name)
            elif name not in optional:
                raise SnapshotError(f"{where or 'the snapshot'} has no {name!r}: it is truncated or damaged")
        return kind(**made)

    return decode


def _shared(decode: _Decode) -> _Decode:
    # Comparing with recent values is several times faster than hashing them.
    seen: list[tuple[Any, Any]] = []

    def decode_once(value: Any, where: str) -> Any:
        for number, (known, made) in enumerate(seen):
            if known == value:
                if number:
                    seen.insert(0, seen.pop(number))
                return made
        made = decode(value, where)
        seen.insert(0, (value, made))
        del seen[_MOST_SHARED:]
        return made

    return decode_once


def _of(hint: Any) -> _Decode:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _of_dataclass(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        (other,) = (argument for argument in arguments if argument is not types.NoneType)
        return _optional(_of(other))
    if origin is tuple:
        return _tuple(_of(arguments[0]))
    if origin is dict:
        return _mapping(_of(arguments[1]))
    return _SIMPLE[hint]


def _optional(decode: _Decode) -> _Decode:
    return lambda value, where: None if value is None else decode(value, where)


def _tuple(decode: _Decode) -> _Decode:
    def decode_all(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise _wrong(value, where, "a list")
        return tuple([decode(item, where) for item in value])

    return decode_all


def _mapping(decode: _Decode) -> _Decode:
    def decode_all(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise _wrong(value, where, "an object")
        return {key: decode(item, where) for key, item in value.items()}

    return decode_all


def _text(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        raise _wrong(value, where, "a text")
    return value


def _whole_number(value: Any, where: str) -> Any:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 63:
        raise _wrong(value, where, "an integer")
    return value


def _number(value: Any, where: str) -> Any:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not -1e18 < value < 1e18:
        raise _wrong(value, where, "a number")
    return float(value)


def _truth(value: Any, where: str) -> Any:
    if not isinstance(value, bool):
        raise _wrong(value, where, "true or false")
    return value


_SIMPLE: dict[Any, _Decode] = {str: _text, int: _whole_number, float: _number, bool: _truth}


def _wrong(value: Any, where: str, expected: str) -> SnapshotError:
    return SnapshotError(f"{where} is {shown(value)}: expected {expected}")
