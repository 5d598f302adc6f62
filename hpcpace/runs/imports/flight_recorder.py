"""Dumps of PyTorch's Flight Recorder: what one rank called, and how far each operation got.

A dump is a pickle or JSON, one file a rank. Its fields are those of torch/csrc/distributed/c10d/FlightRecorder.hpp in
format versions 2.x. It does not say whose it is: the rank is in the name of the file, and in the groups of which the
process is a member. Nothing in a file is believed before it is checked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcpace.files import read_file
from hpcpace.inert_pickle import MAX_VALUES, read_pickle
from hpcpace.quoting import printable

MOST_RANKS = 1 << 20
MOST_BYTES = 32 << 20
"""Of one file: some 100,000 operations; PyTorch keeps 2,000 unless told otherwise."""
_MOST_NUMBER = 1 << 62
_MOST_SHOWN = 60
_PICKLE = b"\x80"
_MESSAGE = re.compile(r"(send|recv) (\d+)(->|<-)(\d+)")
_ITEM_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16", "UInt16"), 2),
    **dict.fromkeys(("Int", "Float", "UInt32"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat", "UInt64"), 8),
    "ComplexDouble": 16,
}
# Names of torch's layers for one and the same operation.
_SAME_OPERATION = re.compile(r"^_|_base$|_oop$|_coalesced$|_single$|_into_tensor|_tensor(?=_|$)|_v$")
_OTHER_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "all_reduce_barrier": "barrier"}


@dataclass(frozen=True, kw_only=True)
class DumpGroup:
    """A process group as a dump describes it; `ranks` is empty where it does not say who is in it, as with gloo."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An operation of a dump.

    Attributes:
        group, description: of its process group.
        group_id: number of that group in its process.
        backend, op: such as `nccl` and `all_reduce`; `op` is the same for all names that torch has for an operation.
        source, destination: members of a message by their place in the group; -1 for collectives.
        seq: place in the order of the group's collectives, or that of its messages; entries that torch put together
            share one.
        is_p2p: whether `seq` is that of the messages.
        is_open: whether it had not finished.
        is_whole: whether it stands for all entries of its `seq`, which were put together.
        created_ns, started_ns, completed_ns: Unix times; None where unknown.
        size_bytes: the largest of what goes in and comes out; -1 where unknown.
        where: `file:line in function` of the code that called it; empty where unknown.
    """

    group: str
    description: str
    group_id: int
    backend: str
    op: str
    source: int
    destination: int
    seq: int
    is_p2p: bool
    is_open: bool
    is_whole: bool
    created_ns: int
    started_ns: int | None
    completed_ns: int | None
    size_bytes: int
    where: str

    @property
    def is_message(self) -> bool:
        """Whether it is a message from one rank to another."""
        return self.source >= 0


@dataclass(frozen=True, kw_only=True)
class Dump:
    """What one file holds.

    Attributes:
        path: the file.
        version: of the format, such as `2.10`.
        library: of communication, such as `NCCL 2.27.3`; empty where unknown.
        groups: the process groups of the rank, by name.
        entries: its operations, the oldest first.
        enqueued: last operation called in each group, by the group's number; what that counts depends on the backend.
        is_from_start: whether the first operation of the process is among the entries, so that none is missing.
    """

    path: Path
    version: str
    library: str
    groups: Mapping[str, DumpGroup]
    entries: tuple[Entry, ...]
    enqueued: Mapping[int, int]
    is_from_start: bool


def read_dump(path: Path) -> Dump:
    """Return what a file holds.

    Raises:
        ValueError: it is no dump, or damaged; the message says what is wrong.
        OSError: it cannot be read.
    """
    data = read_file(path, most_bytes=MOST_BYTES)
    if not data:
        raise ValueError("it is empty: the job ended before PyTorch wrote it")
    if data.startswith(_PICKLE):
        content = read_pickle(data)
    elif data.lstrip()[:1] in (b"{", b"["):
        content = _json(data)
    else:
        raise ValueError("it is neither a pickle nor JSON")
    if not isinstance(content, dict) or not {"version", "pg_config"} <= content.keys():
        raise ValueError("it is no dump of the Flight Recorder: it has no version and pg_config")
    return _dump(path, content)


def _json(data: bytes) -> Any:
    if (num_values := sum(data.count(sign) for sign in (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"it has {num_values} values, more than {MAX_VALUES}")
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError:
        raise ValueError("it is no JSON: not in UTF-8") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        if error.pos >= len(error.doc.rstrip()) - 1 or "Unterminated" in error.msg:
            raise ValueError("it is cut off") from None
        raise ValueError(f"it is no JSON: {error.msg} in line {error.lineno}") from None
    except ValueError as error:  # a number with thousands of digits
        raise ValueError(f"it is no JSON: {error}") from None


def _dump(path: Path, content: dict[str, Any]) -> Dump:
    version = _text(content, "version")
    if version.split(".")[0] != "2":
        raise ValueError(f"its format is version {_shown(version)}, and only 2.x is known")
    nccl = content.get("nccl_version", content.get("comm_lib_version", ""))
    entries = content.get("entries", [])
    if not isinstance(entries, list):
        raise ValueError(f"entries is {_shown(entries)}, not a list")
    read = []
    for number, entry in enumerate(entries):
        try:
            read.append(_entry(entry))
        except ValueError as error:
            raise ValueError(f"entry {number}: {error}") from None
    first = entries[0].get("record_id") if entries else None
    return Dump(
        path=path,
        version=version,
        library=f"NCCL {nccl}" if isinstance(nccl, str) and nccl else "",
        groups={group.name: group for group in _groups(content["pg_config"])},
        entries=_finished_together(read),
        enqueued=_enqueued(content.get("pg_status", {})),
        is_from_start=first == 0,
    )


def _groups(content: Any) -> list[DumpGroup]:
    if not isinstance(content, dict):
        raise ValueError(f"pg_config is {_shown(content)}, not a table of groups")
    groups = []
    for key, value in content.items():
        if not isinstance(value, dict):
            raise ValueError(f"group {_shown(key)} is {_shown(value)}, not a table")
        name = _text(value, "name") if "name" in value else key
        groups.append(DumpGroup(name=name, description=_text(value, "desc", ""), ranks=_ranks(name, value)))
    return groups


def _ranks(name: str, group: dict[str, Any]) -> tuple[int, ...]:
    ranks = group.get("ranks", "[]")
    if isinstance(ranks, str):
        try:
            ranks = json.loads(ranks)
        except (ValueError, RecursionError):
            raise ValueError(f"group {_shown(name)} has the ranks {_shown(ranks)}, which are no list") from None
    if not isinstance(ranks, list) or not all(type(rank) is int and 0 <= rank < MOST_RANKS for rank in ranks):
        raise ValueError(f"group {_shown(name)} has the ranks {_shown(ranks)}; ranks are 0 to {MOST_RANKS - 1}")
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"group {_shown(name)} has a rank twice")
    return tuple(ranks)


def _enqueued(content: Any) -> dict[int, int]:
    """Return the last operation called in each group; JSON has texts where a pickle has numbers."""
    if not isinstance(content, dict):
        raise ValueError(f"pg_status is {_shown(content)}, not a table of groups")
    found = {}
    for key, status in content.items():
        if not isinstance(status, dict) or not str(key).isdecimal() or len(str(key)) > 9:
            raise ValueError(f"pg_status has {_shown(key)}: {_shown(status)}, which is no status of a group")
        last = status.get("last_enqueued_collective", -1)
        last = int(last) if isinstance(last, str) and re.fullmatch(r"-?\d{1,18}", last) else last
        found[int(key)] = _number({"last_enqueued_collective": last}, "last_enqueued_collective", least=-1)
    return found


def _entry(content: Any) -> Entry:
    if not isinstance(content, dict):
        raise ValueError(f"it is {_shown(content)}, not a table")
    group = content.get("process_group")
    if not isinstance(group, (tuple, list)) or len(group) != 2 or not all(isinstance(part, str) for part in group):
        raise ValueError(f"process_group is {_shown(group)}, not a name and a description")
    backend, _, called = _text(content, "profiling_name").rpartition(":")
    message = _MESSAGE.fullmatch(called)
    if message:
        first, second = int(message[2]), int(message[4])
        source, destination = (first, second) if message[3] == "->" else (second, first)
    state = _text(content, "state")
    is_p2p = bool(message) or content.get("is_p2p") is True
    return Entry(
        group=group[0],
        description=group[1],
        group_id=_number(content, "pg_id", default=-1, least=-1),
        backend=backend,
        op=message[1] if message else operation_name(called),
        source=source if message else -1,
        destination=destination if message else -1,
        seq=_number(content, "p2p_seq_id" if is_p2p else "collective_seq_id"),
        is_p2p=is_p2p,
        # gloo does not report the state of its operations; those that are over are retired.
        is_open=state != "completed" and not (backend == "gloo" and content.get("retired") is True),
        is_whole=called == "coalesced",
        created_ns=_number(content, "time_created_ns"),
        started_ns=_time(content, "time_discovered_started_ns"),
        completed_ns=_time(content, "time_discovered_completed_ns"),
        size_bytes=max(_size(content, "input"), _size(content, "output")),
        where=_where(content.get("frames", [])),
    )


def operation_name(called: str) -> str:
    """Return the name of an operation in torch.distributed, whichever of torch's layers named it."""
    name = called.lower()
    if name not in _OTHER_NAMES:
        while (shorter := _SAME_OPERATION.sub("", name)) != name:
            name = shorter
    return _OTHER_NAMES.get(name, name) or called


def _finished_together(entries: list[Entry]) -> tuple[Entry, ...]:
    """Return the entries; where torch put several together, only that of the whole knows when they are over."""
    wholes = {(entry.group, entry.is_p2p, entry.seq): entry for entry in entries if entry.is_whole}
    kept = []
    for entry in entries:
        whole = wholes.get((entry.group, entry.is_p2p, entry.seq))
        if entry.is_whole or whole is None:
            kept += [] if entry.is_whole else [entry]
            continue
        known = {"is_open": whole.is_open, "started_ns": whole.started_ns, "completed_ns": whole.completed_ns}
        kept.append(Entry(**{**vars(entry), **known}))
    return tuple(kept)


def _size(content: dict[str, Any], side: str) -> int:
    sizes, dtypes = content.get(f"{side}_sizes", []), content.get(f"{side}_dtypes", [])
    if not isinstance(sizes, list) or not isinstance(dtypes, list):
        raise ValueError(f"{side}_sizes is {_shown(sizes)}, not a list of shapes")
    total = 0
    for number, shape in enumerate(sizes):
        if not isinstance(shape, list) or not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
            raise ValueError(f"{side}_sizes has {_shown(shape)}, not a shape")
        dtype = dtypes[min(number, len(dtypes) - 1)] if dtypes else None
        item = _ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
        if item is None:
            return -1
        total += item * math.prod(shape)
    return total if sizes and total < _MOST_NUMBER else -1


def _where(frames: Any) -> str:
    """Return the innermost frame that is not torch's own."""
    if not isinstance(frames, list):
        return ""
    for frame in frames:
        if isinstance(frame, dict) and isinstance(file := frame.get("filename"), str) and "/torch/" not in file:
            return f"{file}:{frame.get('line')} in {frame.get('name')}"[:500]
    return ""


def _text(content: dict[str, Any], key: str, default: str | None = None) -> str:
    value = content.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"{key} is {_shown(value)}, not a text" if key in content else f"it has no {key}")
    return value


def _number(content: dict[str, Any], key: str, *, default: int | None = None, least: int = 0) -> int:
    value = content.get(key, default)
    if type(value) is not int or not least <= value < _MOST_NUMBER:
        raise ValueError(f"{key} is {_shown(value)}, not a number" if key in content else f"it has no {key}")
    return value


def _time(content: dict[str, Any], key: str) -> int | None:
    """Return a time; None where it is unknown, which JSON writes as 0."""
    value = content.get(key)
    return None if value in (None, 0) else _number(content, key)


def _shown(value: Any) -> str:
    """Return a value of a file, short and printable."""
    if isinstance(value, (dict, list, tuple)):
        return "a table" if isinstance(value, dict) else "a list"
    text = repr(value)
    return printable(text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "...")
