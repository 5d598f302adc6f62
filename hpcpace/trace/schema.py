"""The tables and the header of trace format 1, which recorder, writer and readers follow.

docs/trace-format.md describes the format; the newest of tests/golden/trace-*.h5 freezes it.

Chunks are made here and not by HDF5, because zlib gives up Python's global lock while it works and HDF5 does not.
"""

from __future__ import annotations

import operator
import re
import struct
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, asdict, field, fields
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.detail import MAX_RANKS
from hpcpace.core.errors import TraceError
from hpcpace.core.records import dataclass

FORMAT = "hpcpace-trace"
FORMAT_VERSION = "1.7"
CLOCK = "CLOCK_MONOTONIC"
CHUNK_ROWS = 8192
# For tables that get about one row per second: a chunk of 8,192 rows would leave them in the journal for hours.
SLOW_CHUNK_ROWS = 1024
NO_STEP = -1
OTHER_CONNECTIONS = -1
"""In `flows`, the number of all connections of the rank together that have no rows of their own."""
NUMBER_BITS = 31
"""Operations that are observed from a later step on, and were not before, are numbered from `step << NUMBER_BITS`."""

FIRST_ROW, FIRST_STEP = "first_row", "first_step"
"""Attributes of a table whose first rows were dropped: how many, and of `steps` the first step of which none was."""


class Phase(IntEnum):
    """What a rank does during part of its step.

    IDLE is of a device: it had nothing to do, and its host had issued nothing. Only imported profiles have it, which
    know all work of a device; elsewhere it is found from the marks in the device's stream.
    """

    DATA = 0
    FORWARD = 1
    BACKWARD = 2
    GRAD_SYNC = 3
    OPTIMIZER = 4
    PACE = 5
    CHECKPOINT = 6
    EVAL = 7
    GC = 8
    OTHER = 9
    IDLE = 10


RECORDED_PHASES = tuple(phase for phase in Phase if phase is not Phase.IDLE)
"""What a rank can name while it runs."""
PHASES_ON_CORES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER)
"""The phases of own work in which a rank reads what its thread had of its core; OTHER is the time in no phase."""


class Op(IntEnum):
    """The kinds of communication operations."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    BROADCAST = 3
    REDUCE = 4
    GATHER = 5
    SCATTER = 6
    ALL_TO_ALL = 7
    SEND = 8
    RECV = 9
    BARRIER = 10


class ExitKind(IntEnum):
    """How the end of an operation became known; a failed one ended with an error or ran out of time."""

    COMPLETION = 0
    WAIT = 1
    NEVER = 2
    FAILED = 3


class PacePolicy(IntEnum):
    """The pacing policies."""

    OBSERVE = 0
    PUBLISHED_WINDOW = 1
    PUBLISHED_SPREAD = 2
    SLACK = 3
    COSCHEDULE = 4
    STAGGER = 5
    AUTO = 6


class PaceArm(IntEnum):
    """The arm of the pacing trial that a step belongs to."""

    OFF = 0
    ON = 1
    AA = 2


class EventKind(IntEnum):
    """The kinds of rare facts about a rank."""

    STEP_SOURCE = 0
    PHASE_SOURCE = 1
    SAMPLES_SOURCE = 2
    EXCEPTION = 3
    EXIT = 4
    SIGNAL = 5
    DEVICE_SOURCE = 6
    SWITCH = 7
    CPU_QUOTA = 8
    ERROR_TEXT = 9


class ErrorCode(IntEnum):
    """What an exception says of communication, the code of its event."""

    OTHER = 0
    TIMEOUT = 1
    DISCONNECTED = 2


OTHER_WITHOUT_GRADIENTS = "other those without that show no evaluation"
"""In the text of PHASE_SOURCE, where rows of phase OTHER are outermost calls of modules without gradients."""


class ErrorPart(IntEnum):
    """What a piece of text says of the end of a rank by an error, the code of its event.

    STDERR is what it wrote to stderr last, and STDERR_FILE names the file of that, on ranks that have just begun.
    """

    MESSAGE = 0
    PLACE = 1
    FRAMES = 2
    STDERR = 3
    STDERR_FILE = 4


class LinkState(IntEnum):
    """Whether a network interface has a link."""

    UNKNOWN = 0
    DOWN = 1
    UP = 2


DRIFT_PPM = 200.0
"""How far two clocks may drift apart between synchronisations: crystal plus NTP slewing. Half-widths include it."""

MILLICORES = 1000
"""The code of an event CPU_QUOTA is in thousandths of a core."""


class StepFlag(IntFlag):
    """Marks of special steps; one with less than full detail is marked as a warm-up, too, which readers leave out."""

    NONE = 0
    WARMUP = 1
    CHECKPOINT = 2
    EVAL = 4
    GC = 8
    PLAIN = 16
    UNPHASED = 32


@dataclass(frozen=True, kw_only=True)
class TableSchema:
    """One group of equally long 1-D columns.

    Attributes:
        dtype: packed little-endian structured dtype, one field per column, in file order.
        device: the columns that follow these on ranks with a device, all or none of them.
        enums: the enumeration behind a u1 column, by column name.
        required: whether a file must hold the group; a missing other group means no rows.
        optional: columns that a file may lack, which are zeros then.
        chunk_rows: rows of a chunk in the HDF5 file.
    """

    name: str
    dtype: np.dtype
    device: np.dtype
    enums: dict[str, type[IntEnum]] = field(hash=False)
    required: bool
    optional: frozenset[str]
    chunk_rows: int


_COLUMNS = {
    "steps": "step:i4 begin_ns:i8 end_ns:i8 samples:i8 flags:u1",
    "phases": "step:i4 phase:u1 begin_ns:i8 end_ns:i8 microbatch:i2",
    "collectives": "step:i4 group:u2 seq:i8 op:u1 bytes:i8 peer:i4 enter_ns:i8 exit_ns:i8 blocked_ns:i8 exit_kind:u1",
    "groups": "id:u2 rank:i4 name:S64 backend:S16",
    "clock": "ref_rank:i4 local_ns:i8 offset_ns:i8 rtt_ns:i8 halfwidth_ns:i8 count:i4",
    "pacing": "step:i4 policy:u1 arm:u1 ready_ns:i8 delay_ns:i8 slack_ns:i8 harm_ns:i8",
    "network": "time_ns:i8 interface:u1 tx_bytes:i8 rx_bytes:i8",
    "host": "time_ns:i8 involuntary_switches:i8 major_faults:i8 cpu_throttled_ns:i8 rss_bytes:i8 gpu_memory_bytes:i8 "
    "gpu_clock_mhz:i4 gpu_throttle_reasons:i8 tcp_retransmits:i8 nic_drops:i8",
    "account": "time_ns:i8 events:i8 dropped:i8 cost_ns:i8",
    "events": "time_ns:i8 step:i4 kind:u1 code:i8 text:S240",
    "connections": "connection:i4 peer_rank:i4 peer_host:S64 local:S64 remote:S64 interface:S16",
    "flows": "time_ns:i8 connection:i4 sent_bytes:i8 acked_bytes:i8 received_bytes:i8 retransmitted_bytes:i8 "
    "busy_ns:i8 receiver_limited_ns:i8 sender_limited_ns:i8 rtt_ns:i8 least_rtt_ns:i8 delivery_bytes_per_s:i8 "
    "unsent_bytes:i8 marked_packets:i8 segment_bytes:i4 flags:u1",
}
_OPTIONAL = {
    "flows": "duplicate_segments:i8",
    "network": "errors:i8 drops:i8 pauses:i8 marks:i8 retransmits:i8 out_of_order:i8 link_downs:i8 rate_bps:i8 "
    "state:u1",
    "host": "cpu_time_ns:i8 run_wait_ns:i8 cpu_pressure_ns:i8 gpu_max_clock_mhz:i4 gpu_temperature_c:i4 "
    "gpu_power_mw:i4 gpu_power_limit_mw:i4 gpu_ecc_corrected:i8 gpu_ecc_uncorrected:i8 gpu_pcie_replays:i8 "
    "gpu_alloc_retries:i8 gpu_out_of_memory:i8 sampler_wakeups:i8 rss_file_bytes:i8 nice:i4 read_steps:i8 read_ns:i8 "
    + " ".join(f"{p}_ns:i8 {p}_cpu_ns:i8 {p}_wait_ns:i8" for p in (phase.name.lower() for phase in PHASES_ON_CORES)),
}
_OF_DEVICE = {
    **dict.fromkeys(("steps", "phases"), "device_begin_ns:i8 device_end_ns:i8"),
    "collectives": "enqueue_ns:i8",
}
_ENUMS: dict[str, type[IntEnum]] = {
    "phase": Phase, "op": Op, "policy": PacePolicy, "arm": PaceArm, "state": LinkState, "kind": EventKind,
}  # fmt: skip
_REQUIRED = ("steps", "collectives", "groups", "account")
_SLOW = ("clock", "network", "host", "account", "events", "connections", "flows")


def table_of(name: str, columns: str) -> TableSchema:
    """Return the schema of a table whose columns are given like `step:i4 begin_ns:i8`."""
    optional = _OPTIONAL.get(name, "")
    dtype = _dtype(f"{columns} {optional}")
    return TableSchema(
        name=name,
        dtype=dtype,
        device=_dtype(_OF_DEVICE.get(name, "")),
        enums={column: _ENUMS[column] for column in dtype.names or () if column in _ENUMS},
        required=name in _REQUIRED,
        optional=frozenset(_dtype(optional).names or ()),
        chunk_rows=SLOW_CHUNK_ROWS if name in _SLOW else CHUNK_ROWS,
    )


def _dtype(columns: str) -> np.dtype:
    fields = [tuple(column.split(":")) for column in columns.split()]
    return np.dtype([(column, "<" + kind if kind[0] in "iuf" else kind) for column, kind in fields])


TABLES = {name: table_of(name, columns) for name, columns in _COLUMNS.items()}

DEVICE_TABLES = tuple(name for name, table in TABLES.items() if table.device.names)
"""The tables with columns that only ranks with a device have."""


@dataclass(frozen=True, kw_only=True)
class TraceHeader:
    """The root attributes of a trace file; they are written once, before the first row."""

    run_id: str
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node: int
    host: str
    topology_addr: str = ""
    job_id: str = ""
    boot_id: str = ""
    host_key: str = ""
    cpus: str = ""
    mesh: str = ""
    dp: int = -1
    pp: int = -1
    tp: int = -1
    samples_unit: str = "samples"
    interfaces: tuple[str, ...] = ()
    created_unix_ns: int = 0
    hpcpace_version: str = ""
    clock: str = CLOCK
    format: str = FORMAT
    format_version: str = FORMAT_VERSION


_VERSION = re.compile(r"([0-9]{1,6})\.[0-9]{1,6}")
# Largest place or coordinate; a time of day is int64.
_MAX_NUMBER = (1 << 31) - 1


class OtherVersion(TraceError):
    """The file has another major version of the trace format."""


def header_values(header: TraceHeader) -> dict[str, Any]:
    """Return every field of a header by name, `interfaces` as a list and bytes that are not UTF-8 as escapes."""
    values = {**asdict(header), "interfaces": list(header.interfaces)}
    return {name: _encodable(value) if isinstance(value, str) else value for name, value in values.items()}


def parse_header(values: Mapping[str, Any], place: str) -> TraceHeader:
    """Return the header of a file; names that this version does not know are ignored.

    Args:
        values: attributes by name, from HDF5 or JSON.
        place: the file, for error messages.

    Raises:
        OtherVersion: the file has another major version of the format.
        TraceError: not an hpcpace trace, or a value is missing or of the wrong type.
    """
    found = {name: _text(value) for name, value in values.items() if isinstance(value, (str, bytes))}
    if found.get("format") != FORMAT:
        raise TraceError(f"{place} is not an hpcpace trace: its format is {values.get('format')!r}, not {FORMAT!r}")
    _check_version(found.get("format_version", ""), place)
    known: dict[str, Any] = {}
    for name, convert, is_required in _FIELDS:
        if name not in values:
            if is_required:
                raise TraceError(f"{place}: attribute {name} is missing; the file is damaged, leave it out")
            continue
        try:
            known[name] = convert(values[name])
        except (TypeError, ValueError) as error:
            message = f"{place}: attribute {name} is {values[name]!r} ({error}); the file is damaged, leave it out"
            raise TraceError(message) from error
    header = TraceHeader(**known)
    if not 0 <= header.rank < header.world_size <= MAX_RANKS:
        raise TraceError(
            f"{place}: rank {header.rank} of {header.world_size} ranks is impossible; the file is damaged, leave it out"
        )
    for name, value in known.items():
        if isinstance(value, int) and name != "created_unix_ns" and abs(value) > _MAX_NUMBER:
            raise TraceError(
                f"{place}: attribute {name} is {value}, which is impossible; the file is damaged, leave it out"
            )
    return header


def _check_version(version: str, place: str) -> None:
    match = _VERSION.fullmatch(version)
    if match is None:
        raise TraceError(f"{place}: format_version is {version!r}, not like {FORMAT_VERSION!r}; the file is damaged")
    if match.group(1) != FORMAT_VERSION.partition(".")[0]:
        raise OtherVersion(
            f"{place} has trace format {version}; this hpcpace reads {FORMAT_VERSION} and later minor versions: "
            "read it with the hpcpace that wrote it"
        )


def _encodable(text: str) -> str:
    # Python reads a path or environment variable with such bytes as surrogates, which HDF5 does not accept.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_text(entry) for entry in value)


_CONVERT: dict[str, Callable[[Any], Any]] = {"str": _text, "int": operator.index, "tuple[str, ...]": _texts}
# Name, conversion, and whether it must be there; as a table because thousands of headers are read.
_FIELDS = tuple((item.name, _CONVERT[str(item.type)], item.default is MISSING) for item in fields(TraceHeader))


DEFLATE_LEVEL = 6
# Reading the clock in Python and recording an operation take some hundreds of nanoseconds, and device events have a
# resolution of half a microsecond: finer digits are noise, which does not compress (experiments/bench/trace_size.py).
RESOLUTION_NS = {
    "steps": {"device_begin_ns": 256, "device_end_ns": 256},
    "phases": {"device_begin_ns": 256, "device_end_ns": 256},
    "collectives": {"enter_ns": 256, "exit_ns": 256, "blocked_ns": 1024, "enqueue_ns": 256},
}
ENQUEUE_COLUMN = "enqueue_ns"
DEVICE_BEGIN_COLUMN, DEVICE_END_COLUMN = "device_begin_ns", "device_end_ns"

_STRUCT_CODES = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "i1": "b", "i2": "h", "i4": "i", "i8": "q"}


def row_dtype(table: TableSchema, *, has_device: bool = False) -> np.dtype:
    """Return the packed dtype of a table's rows, with the columns of ranks with a device at the end if asked for."""
    if has_device and table.device.names:
        return np.dtype(table.dtype.descr + table.device.descr)
    return table.dtype


def row_dtypes(device_tables: Collection[str] = ()) -> dict[str, np.dtype]:
    """Return the dtype of every table's rows, by table, in the order of the tables' numbers.

    Args:
        device_tables: the tables that have the columns of ranks with a device.
    """
    return {name: row_dtype(table, has_device=name in device_tables) for name, table in TABLES.items()}


def has_device_columns(table: TableSchema, names: Collection[str]) -> bool:
    """Return whether columns with these names hold all that only ranks with a device have; False if there are none."""
    columns = table.device.names or ()
    return bool(columns) and all(name in names for name in columns)


def row_struct(dtype: np.dtype, whole: np.dtype | None = None) -> struct.Struct:
    """Return the struct that packs one row into the bytes that `dtype` reads.

    Args:
        dtype: the columns that are packed.
        whole: the row's dtype, if it has more columns after these; they are zeros.
    """
    kinds = (dtype[name] for name in dtype.names or ())
    codes = (f"{kind.itemsize}s" if kind.kind == "S" else _STRUCT_CODES[kind.str[1:]] for kind in kinds)
    num_zeros = 0 if whole is None else whole.itemsize - dtype.itemsize
    return struct.Struct("<" + "".join(codes) + f"{num_zeros}x")


def round_times(table_name: str, rows: NDArray[np.void]) -> None:
    """Round the times of rows to the nearest multiple of their columns' resolution, a power of two, in place."""
    for column, resolution_ns in RESOLUTION_NS.get(table_name, {}).items():
        if column in (rows.dtype.names or ()):
            rows[column] = (rows[column] + resolution_ns // 2) & -resolution_ns


def compress_chunk(values: NDArray[np.generic], chunk_rows: int, *, library: Any = zlib) -> bytes:
    """Return one chunk of a column after HDF5's shuffle and deflate filters.

    Args:
        values: at most `chunk_rows` values; the rest of the chunk is zeros.
        chunk_rows: rows of a chunk.
        library: compresses; with `zlib_ng` a chunk is 1 % larger and takes a third of the time, for files that are
            rewritten after the job.
    """
    deflate = library.compressobj(DEFLATE_LEVEL, library.DEFLATED, library.MAX_WBITS, 9)
    chunk = np.zeros(chunk_rows, dtype=values.dtype)
    chunk[: len(values)] = values
    planes = np.ascontiguousarray(chunk.view(np.uint8).reshape(chunk_rows, -1).T)
    # The lowest bytes of times are nearly noise and the highest nearly constant: a block with a Huffman code of its own
    # for each plane of bytes makes times a tenth smaller than zlib's own division does.
    blocks = (deflate.compress(plane.data) + deflate.flush(library.Z_BLOCK) for plane in planes)
    content: bytes = b"".join(blocks) + deflate.flush()
    return content
