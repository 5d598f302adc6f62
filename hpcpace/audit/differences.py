"""What changed on a node between two snapshots, as after a firmware update, a reboot or a repair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcpace.audit.facts import Snapshot
from hpcpace.audit.schema import plain
from hpcpace.quoting import printable

_KEYS = ("address", "name", "number", "rank", "index")
# Facts that are new in every snapshot, or only say how it was taken.
_IGNORED = ("taken_unix_ns", "schema", "hpcpace_version", "unreadable", "is_live", "counters/window_s")
_MISSING = "-"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One fact that differs; `-` means that a snapshot lacks it."""

    host: str
    fact: str
    before: str
    after: str


def differences(before: Snapshot, after: Snapshot) -> list[Difference]:
    """Return the facts in which two snapshots differ, sorted by name; counters that grew are among them."""
    old, new = dict(_facts(plain(before), "")), dict(_facts(plain(after), ""))
    found = []
    for fact in sorted({*old, *new}):
        if fact.startswith(_IGNORED) or old.get(fact, _MISSING) == new.get(fact, _MISSING):
            continue
        found.append(
            Difference(
                host=after.host, fact=fact, before=_text(old.get(fact, _MISSING)), after=_text(new.get(fact, _MISSING))
            )
        )
    return found


def _facts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each single value with its path; rows are identified by a key field, not by their position."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _facts(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for item in value:
            key = next((item[name] for name in _KEYS if isinstance(item, Mapping) and name in item), None)
            label = (
                "+".join(str(item[name]) for name in ("level", "kind", "cpus") if name in item) if key is None else key
            )
            yield from _facts(item, f"{path}/{label}")
    else:
        yield path, value


def _text(value: Any) -> str:
    text = "unreadable" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return printable(text)[:120]
