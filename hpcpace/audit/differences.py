"""The differences between two snapshots of a node.

A machine that nobody has changed has no differences: counters, loads and clocks change by themselves and are compared
on request only, and sizes of memory count as equal up to the few pages that a kernel keeps for itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcpace.audit.facts import Snapshot
from hpcpace.core.codec import plain
from hpcpace.core.text import printable

_KEYS = ("address", "name", "number", "rank", "index")
# Facts that are new in every snapshot, or only say how it was taken.
_IGNORED = ("taken_unix_ns", "schema", "hpcpace_version", "unreadable", "is_live", "counters/window_s")
_MISSING = "-"
_MEMORY = ("memory_kb", "memory_bytes", "shm_bytes")
_MEMORY_TOLERANCE = 0.01
"""Less than the smallest memory module of a node with 64 of them; kernels of one version differ by 0.1 %."""

_CHANGING = re.compile(r"boot_id|counters/.*|gpus/.*/nvml/(replays|throttle_reasons|utilization_percent)")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One fact that differs; `-` means that a snapshot lacks it."""

    host: str
    fact: str
    before: str
    after: str


def differences(before: Snapshot, after: Snapshot, *, with_counters: bool = False) -> list[Difference]:
    """Return the facts in which two snapshots differ, sorted by name.

    Args:
        before, after: the snapshots.
        with_counters: whether to compare counters and what else changes by itself, and memory to the byte.
    """
    old, new = dict(_facts(plain(before), "")), dict(_facts(plain(after), ""))
    found = []
    idle = set() if with_counters else {*_idle_speeds(before), *_idle_speeds(after)}
    for fact in sorted({*old, *new} - idle):
        one, other = old.get(fact, _MISSING), new.get(fact, _MISSING)
        if fact.startswith(_IGNORED) or one == other:
            continue
        if not with_counters and (_CHANGING.fullmatch(fact) or (fact.endswith(_MEMORY) and _is_close(one, other))):
            continue
        found.append(Difference(host=after.host, fact=fact, before=_text(one), after=_text(other)))
    return found


def _idle_speeds(snapshot: Snapshot) -> Iterator[str]:
    """Yield the speeds of links that an idle GPU lowers."""
    for device in snapshot.hardware.pci or ():
        if device.kind != "nic":
            yield f"hardware/pci/{device.address}/speed_gts"


def _is_close(before: Any, after: Any) -> bool:
    if not isinstance(before, int) or not isinstance(after, int):
        return False
    return abs(before - after) <= _MEMORY_TOLERANCE * max(before, after)


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
