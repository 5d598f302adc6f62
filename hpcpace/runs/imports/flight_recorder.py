"""Dumps of PyTorch's Flight Recorder: what one rank called, and how far each operation got.

A dump is a pickle or JSON, one file a rank. Its fields are those of torch/csrc/distributed/c10d/FlightRecorder.hpp in
format versions 2.x. It does not say whose it is: the rank is in the name of the file, and in the groups of which the
process is a member. Nothing in a file is believed before it is checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hpcpace.core.codec import convert, read_pickle
from hpcpace.core.files import read_file
from hpcpace.core.records import dataclass
from hpcpace.core.text import shown
from hpcpace.runs.imports.input_files import MAX_LETTERS, MAX_NUMBER, Name, WholeNumber, is_whole, json_value

MAX_RANKS = 1 << 17
"""Of a job, eight times the largest ones: a dump of a few bytes can name one, and all below it are looked at."""
MAX_BYTES = 32 << 20
"""Of one file: some 100,000 operations; PyTorch keeps 2,000 by default."""
# A table of a pickle may be in many places; an operation that is written down takes three times these.
_MIN_ENTRY_BYTES = 32
_MAX_MEMBERS_PER_BYTE, _MAX_MEMBERS = (
    4,
    1 << 20,
)  # of all groups: twenty that each have all of 16,384 ranks have a third
_MAX_DIMS = 64  # of torch's tensors
_MAX_PATH_LETTERS = 4096
_MAX_WHERE = 300
_MAX_FRAMES = 128
_MAX_VERSION = 40
_PICKLE = b"\x80"
_MESSAGE = re.compile(r"(send|recv) (\d{1,7})(->|<-)(\d{1,7})")
# By c10's name of a type: torch's own name, and bytes of an element.
_TYPES = {
    "Byte": ("uint8", 1),
    "Char": ("int8", 1),
    "Bool": ("bool", 1),
    "Short": ("int16", 2),
    "Int": ("int32", 4),
    "Long": ("int64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "ComplexHalf": ("complex32", 4),
    "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
    **{f"UInt{bits}": (f"uint{bits}", bits // 8) for bits in (16, 32, 64)},
    **{f"Float8_{kind}": (f"float8_{kind}", 1) for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
}
# Names of torch's layers for one and the same operation.
_SAME_OPERATION = re.compile(r"^_+|(?:_base|_oop|_coalesced|_single|_v)+$|_into_tensor|_tensor(?=_|$)")
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
        part_bytes: what goes into an all_gather, and comes out of a reduce_scatter; -1 where unknown, and of others.
        dtype: the type of its elements as torch names it, such as `bfloat16`; empty where unknown, and of several.
        frames: `file:line in function` of the code that called it without torch's own, the innermost first; empty where
            unknown.
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
    part_bytes: int
    dtype: str
    frames: tuple[str, ...]

    @property
    def where(self) -> str:
        """The innermost frame that is not torch's own; empty where unknown."""
        return self.frames[0] if self.frames else ""

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
        enqueued, completed: last operation called and finished in each group, by the group's number; what that counts
            depends on the backend.
        is_from_start: whether the first operation of the process is among the entries, so that none is missing.
        is_counted: whether `Entry.seq` of all its collectives is their place in their group.
    """

    path: Path
    version: str
    library: str
    groups: Mapping[str, DumpGroup]
    entries: tuple[Entry, ...]
    enqueued: Mapping[int, int]
    completed: Mapping[int, int]
    is_from_start: bool
    is_counted: bool = True


def read_dump(path: Path) -> Dump:
    """Return what a file holds.

    Raises:
        ValueError: it is no dump, or damaged; the message says what is wrong.
        OSError: it cannot be read.
    """
    data = read_file(path, most_bytes=MAX_BYTES)
    if not data:
        raise ValueError("it is empty: the job ended before PyTorch wrote it")
    if data.startswith(_PICKLE):
        content = read_pickle(data)
    elif data.lstrip()[:1] in (b"{", b"["):
        content = json_value(data)
    else:
        raise ValueError("it is neither a pickle nor JSON")
    if not isinstance(content, dict) or not {"version", "pg_config"} <= content.keys():
        raise ValueError("it is no dump of the Flight Recorder: it has no version and pg_config")
    entries, max_entries = content.get("entries"), len(data) // _MIN_ENTRY_BYTES
    if isinstance(entries, list) and len(entries) > max_entries:
        raise ValueError(f"entries has {len(entries)} entries, more than {max_entries}")
    return _dump(path, convert(content, _Content), len(data))


_Text = Annotated[str, Meta(max_length=_MAX_VERSION)]
_Shapes = list[Annotated[list[WholeNumber], Meta(max_length=_MAX_DIMS)]]


class _Operation(msgspec.Struct):
    """An operation as a file has it; versions of the format differ in what is there."""

    process_group: tuple[Name, Name]
    profiling_name: Name
    state: Name
    time_created_ns: WholeNumber
    pg_id: Annotated[int, Meta(ge=-1, le=MAX_NUMBER)] = -1
    collective_seq_id: WholeNumber | None = None
    p2p_seq_id: WholeNumber | None = None
    is_p2p: Any = False
    retired: Any = False
    record_id: Any = None
    time_discovered_started_ns: WholeNumber | None = None
    time_discovered_completed_ns: WholeNumber | None = None
    input_sizes: _Shapes = []
    output_sizes: _Shapes = []
    input_dtypes: list[Any] = []
    output_dtypes: list[Any] = []
    frames: Any = ()


class _Group(msgspec.Struct):
    name: Name | None = None
    desc: Name = ""
    ranks: Any = "[]"


class _Content(msgspec.Struct):
    """A dump as a file has it."""

    version: _Text
    pg_config: dict[Name, _Group]
    nccl_version: _Text = ""
    comm_lib_version: _Text = ""
    pg_status: dict[str, Any] = {}
    entries: list[_Operation] = []


def _dump(path: Path, content: _Content, num_bytes: int) -> Dump:
    if content.version.split(".")[0] != "2":
        raise ValueError(f"its format is version {shown(content.version)}, and only 2.x is known")
    library = content.nccl_version or content.comm_lib_version
    entries, sites = content.entries, _CallSites()
    return Dump(
        path=path,
        version=content.version,
        library=f"NCCL {library}" if library else "",
        groups={group.name: group for group in _groups(content.pg_config, num_bytes)},
        entries=_finished_together([_entry(entry, sites) for entry in entries]),
        enqueued=_last(content.pg_status, "last_enqueued_collective"),
        completed=_last(content.pg_status, "last_completed_collective"),
        is_from_start=bool(entries) and is_whole(entries[0].record_id, highest=0),
    )


def _groups(content: Mapping[str, _Group], num_bytes: int) -> list[DumpGroup]:
    """Return the groups. In a pickle several may have the same text of ranks, but not any number of them."""
    groups = []
    of_text: dict[str, tuple[int, ...]] = {}
    num_left = max_members = min(_MAX_MEMBERS_PER_BYTE * num_bytes, _MAX_MEMBERS)
    for key, group in content.items():
        name, ranks = key if group.name is None else group.name, group.ranks
        if not isinstance(ranks, str):
            members = _ranks(name, ranks)
        elif (known := of_text.get(ranks)) is not None:
            members = known
        else:
            members = of_text[ranks] = _ranks(name, _listed(name, ranks))
        num_left -= len(members)
        if num_left < 0:
            raise ValueError(f"its groups have more than {max_members} members")
        groups.append(DumpGroup(name=name, description=group.desc, ranks=members))
    return groups


def _listed(name: str, text: str) -> list[int]:
    """Return the ranks of a text like `[0, 1]`."""
    parts = text[1:-1].split(",") if text.count(",") < MAX_RANKS and text[:1] + text[-1:] == "[]" else [text]
    try:
        return [int(part[:20]) for part in parts] if parts != [""] else []
    except ValueError:
        raise ValueError(f"group {shown(name)} has the ranks {shown(text)}, which are no list of ranks") from None


def _ranks(name: str, ranks: Any) -> tuple[int, ...]:
    if not isinstance(ranks, list) or not all(is_whole(rank, highest=MAX_RANKS - 1) for rank in ranks):
        raise ValueError(f"group {shown(name)} has the ranks {shown(ranks)}; ranks are 0 to {MAX_RANKS - 1}")
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"group {shown(name)} has a rank twice")
    return tuple(ranks)


def _last(content: Mapping[str, Any], name: str) -> dict[int, int]:
    """Return the number of an operation in the status of each group; JSON has texts where a pickle has numbers."""
    found = {}
    for key, status in content.items():
        if not isinstance(status, dict) or not re.fullmatch(r"[0-9]{1,9}", key):
            raise ValueError(f"pg_status has {shown(key)}: {shown(status)}, which is no status of a group")
        last = status.get(name, -1)
        if isinstance(last, str) and re.fullmatch(r"-?[0-9]{1,18}", last):
            last = int(last)
        if not is_whole(last, lowest=-1):
            raise ValueError(f"{name} is {shown(last)}, not a number from -1 to {MAX_NUMBER}")
        found[int(key)] = last
    return found


def _entry(content: _Operation, sites: _CallSites) -> Entry:
    backend, _, called = content.profiling_name.rpartition(":")
    message = _MESSAGE.fullmatch(called)
    if message:
        first, second = int(message[2]), int(message[4])
        source, destination = (first, second) if message[3] == "->" else (second, first)
    is_p2p = bool(message) or content.is_p2p is True
    op = message[1] if message else operation_name(called)
    in_bytes = _size(content.input_sizes, content.input_dtypes)
    out_bytes = _size(content.output_sizes, content.output_dtypes)
    seq = content.p2p_seq_id if is_p2p else content.collective_seq_id
    if seq is None:
        raise ValueError(f"an operation has no {'p2p_seq_id' if is_p2p else 'collective_seq_id'}")
    return Entry(
        group=content.process_group[0],
        description=content.process_group[1],
        group_id=content.pg_id,
        backend=backend,
        op=op,
        source=source if message else -1,
        destination=destination if message else -1,
        seq=seq,
        is_p2p=is_p2p,
        # gloo does not report the state of its operations; those that are over are retired.
        is_open=content.state != "completed" and not (backend == "gloo" and content.retired is True),
        is_whole=called == "coalesced",
        created_ns=content.time_created_ns,
        # JSON writes 0 for a time that is not known.
        started_ns=content.time_discovered_started_ns or None,
        completed_ns=content.time_discovered_completed_ns or None,
        size_bytes=max(in_bytes, out_bytes),
        part_bytes={"all_gather": in_bytes, "reduce_scatter": out_bytes}.get(op, -1),
        dtype=_dtype([*content.input_dtypes, *content.output_dtypes]),
        frames=sites.frames(content.frames),
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
        whole = wholes.get((entry.group, entry.is_p2p, entry.seq), entry)
        if not entry.is_whole:
            over = {"is_open": whole.is_open, "started_ns": whole.started_ns, "completed_ns": whole.completed_ns}
            kept.append(Entry(**{**vars(entry), **over}))
    return tuple(kept)


def _size(sizes: _Shapes, dtypes: list[Any]) -> int:
    total = 0
    for number, shape in enumerate(sizes):
        dtype = dtypes[min(number, len(dtypes) - 1)] if dtypes else None
        if not isinstance(dtype, str) or dtype not in _TYPES:
            return -1
        total += _TYPES[dtype][1] * math.prod(shape)
    return total if sizes and total <= MAX_NUMBER else -1


def _dtype(dtypes: list[Any]) -> str:
    """Return the type of all tensors of an operation; empty where that is not one, or unknown."""
    names = {_TYPES[dtype][0] if isinstance(dtype, str) and dtype in _TYPES else "" for dtype in dtypes}
    return names.pop() if len(names) == 1 else ""


class _CallSites:
    """The frames of the operations of one dump; in a pickle many operations may have the same list or frames."""

    def __init__(self) -> None:
        self._of_list: dict[int, tuple[str, ...]] = {}
        self._of_frame: dict[int, str] = {}
        self._once: dict[tuple[str, ...], tuple[str, ...]] = {}

    def frames(self, frames: Any) -> tuple[str, ...]:
        """Return the frames that are not torch's own, the innermost first; of a content that is kept meanwhile."""
        if not isinstance(frames, list):
            return ()
        if (known := self._of_list.get(id(frames))) is None:
            texts = tuple(text for frame in frames[:_MAX_FRAMES] if (text := self._text(frame)))
            known = self._of_list[id(frames)] = self._once.setdefault(texts, texts)
        return known

    def _text(self, frame: Any) -> str:
        if id(frame) not in self._of_frame:
            self._of_frame[id(frame)] = _frame_text(frame) if isinstance(frame, dict) else ""
        return self._of_frame[id(frame)]


def _frame_text(frame: Mapping[Any, Any]) -> str:
    file, name, number = (frame.get(key) for key in ("filename", "name", "line"))
    if not isinstance(file, str) or len(file) > _MAX_PATH_LETTERS or "/torch/" in file:
        return ""
    function = name if _is_name(name) else "?"
    return f"{file}:{number if is_whole(number) else '?'} in {function}"[-_MAX_WHERE:]


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_LETTERS
