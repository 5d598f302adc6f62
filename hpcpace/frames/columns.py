"""The columns of each frame (names, types and meanings, as in docs/frames.md), and frames as Parquet or CSV.

Times are nanoseconds on the common clock since the first of the loaded steps began on any rank. What cannot be known is
NaN, so a column of times or durations that may lack some is float64, which is exact below 104 days.

Files are made with pyarrow, straight from arrays. A file gets its name when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import UsageError, check_package
from hpcpace.core.exposition import text_cell
from hpcpace.core.files import Folder
from hpcpace.core.rundir import check_target
from hpcpace.metrics import Ints
from hpcpace.metrics.phases import Part

if TYPE_CHECKING:
    from pandas import DataFrame


class Kind(StrEnum):
    """The type of a column as pandas names it; `text` is a category in frames and a string in files."""

    INT = "int64"
    FLOAT = "float64"
    BOOL = "bool"
    TEXT = "category"


@dataclass(frozen=True)
class Column:
    """One column of a frame."""

    name: str
    kind: Kind
    meaning: str


@dataclass(frozen=True)
class Texts:
    """A column of texts, each text only once.

    Attributes:
        names: the texts.
        code: index into `names` of each row, -1 for none, int64, (num_rows,).
    """

    names: tuple[str, ...]
    code: Ints

    def __len__(self) -> int:
        return len(self.code)


Values = NDArray[Any] | Texts
Columns = Mapping[str, Values]
"""The values of a frame by column, all of one length."""


def _columns(**of: tuple[Kind, str]) -> tuple[Column, ...]:
    return tuple(Column(name, kind, meaning) for name, (kind, meaning) in of.items())


_STEP = (Kind.INT, "number of the step")
_RANK = (Kind.INT, "rank that recorded the row")
_HOST = (Kind.TEXT, "host")
_BEGIN = (Kind.FLOAT, "begin; NaN of a rank whose clock is unknown")
_END = (Kind.FLOAT, "end; NaN likewise")
_FROM, _UNTIL = (Kind.INT, "begin of the interval"), (Kind.INT, "end of the interval")


def _counted(words: str) -> tuple[Kind, str]:
    return Kind.INT, f"{words} in the interval"


def _grown(words: str) -> tuple[Kind, str]:
    return Kind.FLOAT, f"{words} in the interval; NaN where the host does not count it"


def _gauge(words: str) -> tuple[Kind, str]:
    return Kind.FLOAT, f"{words} at the end of the interval; NaN where not known"


GROWN = {
    "cpu_time_ns": "time on cores of all threads",
    "run_wait_ns": "time in which threads were ready to run and had no core",
    "cpu_throttled_ns": "time stopped by a CPU quota",
    "cpu_pressure_ns": "time in which some task of the cgroup had no core",
    "involuntary_switches": "involuntary context switches",
    "major_faults": "major page faults",
    "tcp_retransmits": "TCP segments sent again by the host",
    "nic_drops": "packets dropped by the host's interfaces",
    "gpu_ecc_corrected": "corrected memory errors of the GPU",
    "gpu_ecc_uncorrected": "uncorrected memory errors of the GPU",
    "gpu_pcie_replays": "PCIe replays of the GPU",
}
"""Counters of the table `host` of a trace: a frame has what they grew by."""
GAUGES = {
    "rss_bytes": "resident memory",
    "gpu_memory_bytes": "memory of torch's tensors on the GPU",
    "gpu_clock_mhz": "clock of the GPU",
    "gpu_max_clock_mhz": "its highest clock",
    "gpu_temperature_c": "temperature of the GPU",
    "gpu_power_mw": "power of the GPU",
    "gpu_power_limit_mw": "its power limit",
}
"""What that table has as of a time."""
_PART_WORDS = {
    Part.OTHER: "time in no phase, and in the phase of that name",
    Part.HOST: "time in which the device waited for its host to issue work",
    Part.SYNC_WAIT: "waiting for gradients inside torch",
    Part.SYNC_TRANSFER: "transferring gradients inside torch",
    Part.WAIT: "other blocked communication, until the last partner has entered",
    Part.TRANSFER: "other blocked communication, from then on",
}

FRAMES: Mapping[str, tuple[Column, ...]] = {
    "ranks": _columns(
        rank=(Kind.INT, "rank"),
        host=_HOST,
        node=(Kind.INT, "number of the node"),
        local_rank=(Kind.INT, "number of the rank on its node"),
        dp=(Kind.INT, "place among data-parallel replicas, -1 unknown"),
        pp=(Kind.INT, "pipeline stage, -1 unknown"),
        tp=(Kind.INT, "tensor-parallel slot, -1 unknown"),
        role=(Kind.INT, "ranks of one role do the same work"),
        is_clock_known=(Kind.BOOL, "whether its times can be compared with those of others"),
    ),
    "steps": _columns(
        step=_STEP,
        rank=_RANK,
        begin_ns=_BEGIN,
        end_ns=_END,
        duration_ns=(Kind.INT, "length of the step on this rank"),
        step_time_ns=(Kind.INT, "time of the step for the whole job, the same on all ranks; these add up to wall time"),
        samples=(Kind.INT, "samples of the global batch"),
        is_warmup=(Kind.BOOL, "marked as warm-up by any rank"),
        is_checkpoint=(Kind.BOOL, "with a checkpoint on any rank"),
        is_eval=(Kind.BOOL, "with an evaluation on any rank"),
    ),
    "parts": _columns(
        step=_STEP,
        rank=_RANK,
        **{
            f"{part.name.lower()}_ns": (Kind.FLOAT, _PART_WORDS.get(part, f"in phase {part.name.lower()}"))
            for part in Part
        },
        work_ns=(Kind.FLOAT, "own work: all of these but waits, transfers, checkpoints, evaluations and pacing"),
        excess_ns=(Kind.FLOAT, "own work beyond that of others of the role; NaN where no two ranks are compared"),
        exposed_wait_ns=(Kind.FLOAT, "sync_wait_ns + wait_ns"),
        exposed_transfer_ns=(Kind.FLOAT, "sync_transfer_ns + transfer_ns"),
    ),
    "phases": _columns(
        step=_STEP,
        rank=_RANK,
        phase=(Kind.TEXT, "phase; they nest, so their durations do not add up to the step"),
        microbatch=(Kind.INT, "number of the microbatch, -1 for none"),
        begin_ns=(Kind.FLOAT, "begin, on the device where its times are known; NaN of a rank whose clock is unknown"),
        end_ns=_END,
        duration_ns=(Kind.INT, "length"),
    ),
    "collectives": _columns(
        step=_STEP,
        rank=_RANK,
        op=(Kind.TEXT, "operation, such as all_reduce or send"),
        group=(Kind.TEXT, "name of the process group; groups of one name differ in `group_id`"),
        group_id=(Kind.INT, "number of the process group, the same on all ranks; -1 unknown"),
        group_size=(Kind.INT, "members of the group; 0 unknown"),
        seq=(Kind.INT, "number of the operation in its group, or of the message between two ranks"),
        size_bytes=(Kind.INT, "content of the whole operation"),
        peer=(Kind.INT, "other rank of a message, or root; -1 for none"),
        end=(Kind.TEXT, "how its end became known: completion, wait or failed"),
        enter_ns=_BEGIN,
        exit_ns=_END,
        duration_ns=(Kind.INT, "exit - enter"),
        blocked_ns=(Kind.INT, "time in which the caller was blocked on it"),
        is_matched=(Kind.BOOL, "whether every member recorded it, with a known clock and without an error"),
        wait_ns=(Kind.FLOAT, "waiting for the last partner to enter; NaN unless matched"),
        exposed_wait_ns=(Kind.FLOAT, "the part of it that held the rank up; NaN unless matched"),
        transfer_ns=(Kind.FLOAT, "from then on; NaN unless matched"),
        operation_transfer_ns=(
            Kind.FLOAT,
            "the longest transfer of its ranks; NaN unless matched, and for a message whose receiver came late",
        ),
        late_rank=(Kind.INT, "the last partner to enter; -1 where it waits for nobody, or is not matched"),
        algorithm_bytes_per_s=(
            Kind.FLOAT,
            "size_bytes over operation_transfer_ns; NaN where that is not known, or within the clocks' error",
        ),
        bus_bytes_per_s=(Kind.FLOAT, "the same by what passes the slowest link, as nccl-tests has it (busbw)"),
    ),
    "connections": _columns(
        rank=(Kind.INT, "rank whose TCP connection it is"),
        peer_rank=(Kind.INT, "rank at the other end; -1 unknown"),
        host=_HOST,
        peer_host=(Kind.TEXT, "host at the other end"),
        interface=(Kind.TEXT, "interface that it leaves by"),
        local=(Kind.TEXT, "own address and port; empty for all further connections of the rank together"),
        remote=(Kind.TEXT, "address and port of the other end"),
        begin_ns=_FROM,
        end_ns=_UNTIL,
        sent_bytes=_counted("payload sent, repetitions included,"),
        acked_bytes=_counted("payload that the peer has acknowledged"),
        received_bytes=_counted("payload received"),
        retransmitted_bytes=_counted("payload sent again"),
        busy_ns=_counted("time with data outstanding"),
        receiver_limited_ns=_counted("part of it limited by the receiver's window"),
        sender_limited_ns=_counted("part of it limited by the send buffer"),
        rtt_ns=(Kind.INT, "smoothed round trip at the end of the interval"),
        least_rtt_ns=(Kind.INT, "the least round trip so far"),
        unsent_bytes=(Kind.INT, "waiting in the send buffer at the end of the interval"),
    ),
    "network": _columns(
        host=_HOST,
        interface=(Kind.TEXT, "network interface, such as eth0 or mlx5_0/1"),
        line_rate_bps=(Kind.FLOAT, "line rate, bit/s; NaN where not known"),
        begin_ns=_FROM,
        end_ns=_UNTIL,
        sent_bytes=_counted("bytes sent, headers included,"),
        received_bytes=_counted("bytes received"),
        errors=_counted("frames with errors"),
        drops=_counted("dropped frames"),
        pauses=_counted("pause frames (RDMA: ticks in which the port could not send)"),
        marks=_counted("congestion marks"),
    ),
    "hosts": _columns(
        rank=_RANK,
        host=_HOST,
        begin_ns=_FROM,
        end_ns=_UNTIL,
        **{name: _grown(words) for name, words in GROWN.items()},
        **{name: _gauge(words) for name, words in GAUGES.items()},
    ),
    "clocks": _columns(
        rank=(Kind.INT, "rank"),
        host=_HOST,
        is_known=(Kind.BOOL, "whether its times can be compared with those of others"),
        is_reference=(Kind.BOOL, "whether it is the reference"),
        num_samples=(Kind.INT, "its synchronisations"),
        halfwidth_ns=(Kind.FLOAT, "bound of the error of its step ends, median; NaN where the clock is unknown"),
        max_halfwidth_ns=(Kind.FLOAT, "the same, largest"),
        extrapolated_share=(Kind.FLOAT, "share of its step ends outside of the synchronised time"),
        residual_ns=(Kind.FLOAT, "largest leave-one-out residual; NaN with fewer than 3 samples"),
        drift_ppm=(Kind.FLOAT, "drift against the reference; NaN with fewer than 2 samples"),
    ),
    "audit": _columns(
        rule=(Kind.TEXT, "id of the rule: `hpcpace audit explain ID`"),
        severity=(Kind.TEXT, "F failure, W warning, or what else the rule says"),
        host=_HOST,
        place=(Kind.TEXT, "what it is about on that host"),
        ranks=(Kind.TEXT, "ranks that it concerns, such as 0-3; empty for all of the host"),
        seen=(Kind.TEXT, "what was seen"),
        cost=(Kind.TEXT, "what it costs"),
        fix=(Kind.TEXT, "what to do"),
    ),
}
"""The columns of each frame, in their order; rows have the index 0, 1, 2 ..."""
TABLES = tuple(FRAMES)


def texts_of(values: list[str]) -> Texts:
    """Return a column of texts."""
    names, code = np.unique(np.array(values, dtype=object), return_inverse=True) if values else ((), np.zeros(0, int))
    return Texts(tuple(str(name) for name in names), np.asarray(code, np.int64))


def nothing(table: str) -> dict[str, Values]:
    """Return the columns of a frame without rows."""
    empty = np.zeros(0, np.int64)
    return {c.name: Texts((), empty) if c.kind is Kind.TEXT else empty.astype(c.kind) for c in FRAMES[table]}


def joined(table: str, blocks: Iterable[Columns]) -> Columns:
    """Return the rows of all blocks of a frame."""
    parts = [nothing(table), *blocks]
    return {column.name: _joined([part[column.name] for part in parts], column) for column in FRAMES[table]}


def _joined(parts: Sequence[Values], column: Column) -> Values:
    texts = [part for part in parts if isinstance(part, Texts)]
    if not texts:
        return np.concatenate([np.asarray(part, column.kind) for part in parts])
    number: dict[str, int] = {}
    codes = []
    for part in texts:
        of_part = np.array([*(number.setdefault(name, len(number)) for name in part.names), -1], np.int64)
        codes.append(of_part[part.code])
    return Texts(tuple(number), np.concatenate(codes))


def frame_of(table: str, columns: Columns) -> DataFrame:
    """Return columns as a frame of pandas with the types and the order of `FRAMES`.

    Raises:
        UsageError: pandas is not installed.
    """
    check_package("pandas", extra="frames")
    import pandas as pd

    made: dict[str, Any] = {}
    for column in FRAMES[table]:
        values = columns[column.name]
        if isinstance(values, Texts):
            made[column.name] = pd.Categorical.from_codes(values.code, list(values.names))
        else:
            made[column.name] = np.asarray(values, column.kind)
    return pd.DataFrame(made)


class Format(StrEnum):
    """The format of files."""

    PARQUET = "parquet"
    CSV = "csv"


@dataclass(frozen=True, kw_only=True)
class WrittenTable:
    """A file that was written."""

    path: Path
    num_rows: int


def write_tables(
    folder: Path,
    kind: Format,
    tables: Mapping[str, Callable[[], Iterator[Columns]]],
    *,
    step: Ints,
    about: Mapping[str, str],
    begin_stage: Callable[[str], Callable[[int, int], None]],
) -> list[WrittenTable]:
    """Write frames as FOLDER/TABLE.parquet or FOLDER/TABLE.csv; files of these names are replaced.

    Args:
        folder: is made.
        kind: the format.
        tables: by name, what returns the columns block by block.
        step: numbers of the steps, ascending, by which progress is shown.
        about: what Parquet files say of their origin, by key.
        begin_stage: takes the name of a stage that begins, and returns what is called as it advances.

    Raises:
        UsageError: a file cannot be written, or has the name of a device or of what a run has recorded.
    """
    for name in tables:
        check_target(folder / f"{name}.{kind}", (), "-o")
    written = []
    try:
        with Folder.open(folder, make=True) as opened:
            for name, blocks in tables.items():
                advance = begin_stage(f"writing {name}")
                with opened.writing(f"{name}.{kind}") as file:
                    num_rows = _write(file, kind, name, _with_progress(blocks(), step, advance), about)
                written.append(WrittenTable(path=folder / f"{name}.{kind}", num_rows=num_rows))
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder} ({error.strerror or error}): name another folder with -o"
        ) from error
    return written


def _with_progress(blocks: Iterator[Columns], step: Ints, advance: Callable[[int, int], None]) -> Iterator[Columns]:
    """Yield blocks, and report how many of the steps are done."""
    for block in blocks:
        yield block
        last = np.asarray(block["step"]).max(initial=-1) if "step" in block else np.iinfo(np.int64).max
        advance(int(np.searchsorted(step, last, side="right")), len(step))


class _Writer(Protocol):
    def write_table(self, table: Any) -> None: ...

    def close(self) -> None: ...


def _write(file: BinaryIO, kind: Format, name: str, blocks: Iterator[Columns], about: Mapping[str, str]) -> int:
    """Write a frame and return its number of rows."""
    schema, num_rows = _schema(name, kind), 0
    schema = schema.with_metadata({f"hpcpace.{key}": value for key, value in about.items()})
    writer = _writer(file, kind, schema)
    try:
        for columns in blocks:
            table = _table(name, kind, columns, schema)
            if len(table):
                writer.write_table(table)
            num_rows += len(table)
        if not num_rows and kind is Format.CSV:
            writer.write_table(_table(name, kind, nothing(name), schema))
    finally:
        writer.close()
    return num_rows


def _writer(file: BinaryIO, kind: Format, schema: Any) -> _Writer:
    from pyarrow import csv, parquet

    made: _Writer
    if kind is Format.CSV:
        made = csv.CSVWriter(file, schema)
    else:
        made = parquet.ParquetWriter(file, schema, compression="zstd")
    return made


def _schema(name: str, kind: Format) -> Any:
    import pyarrow as pa

    text = pa.string() if kind is Format.CSV else pa.dictionary(pa.int32(), pa.string())
    types = {Kind.INT: pa.int64(), Kind.FLOAT: pa.float64(), Kind.BOOL: pa.bool_(), Kind.TEXT: text}
    return pa.schema([pa.field(column.name, types[column.kind]) for column in FRAMES[name]])


def _table(name: str, kind: Format, columns: Columns, schema: Any) -> Any:
    """Return a block as a table; what is not known is null there, and an empty cell in CSV."""
    import pyarrow as pa

    arrays = []
    for column in FRAMES[name]:
        values = columns[column.name]
        if not isinstance(values, Texts):
            arrays.append(pa.array(np.asarray(values, column.kind), from_pandas=column.kind is Kind.FLOAT))
            continue
        names = [text_cell(text) for text in values.names] if kind is Format.CSV else list(values.names)
        codes = pa.array(values.code.astype(np.int32), mask=values.code < 0)
        array = pa.DictionaryArray.from_arrays(codes, pa.array(names, pa.string()))
        arrays.append(array.cast(pa.string()) if kind is Format.CSV else array)
    return pa.Table.from_arrays(arrays, schema=schema)
