"""Traces of ByteDance's what-if analysis ("Understanding Stragglers", 2025) as a table, and as ranks of a run.

One row is an operation of a worker, which is a data-parallel rank and a pipeline stage: a parquet file with the
columns of `COLUMNS`, or the timeline that the tool writes for Chrome. The timeline has operations without their waits,
so there an operation begins once the worker's previous one has ended.

A parquet file of some kilobytes can ask for any amount of memory: texts in a dictionary are repeated in every row,
pages of zeros shrink to nothing, and sizes in the metadata may be wrong. So texts stay in their dictionary, and a
process with limited memory decodes the file.

With one model chunk a stage, stages exchange messages with their neighbours. With several, interleaved ones ("virtual"
stages: Narayanan et al. 2021, section 2.2), the last stage sends on to the first, too, and the recorder also listed
calls that sent nothing; the work that a message belongs to shows which those are.

A worker of the file stands for all GPUs that share its data-parallel rank and stage. Work becomes phases. Collectives
are of the workers that the published dependency model synchronises, and the n-th send of a stage is the n-th receive of
the next one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hpcpace.core.detail import MAX_RANKS
from hpcpace.core.errors import TraceError, check_package
from hpcpace.core.files import read_file
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, format_duration, plural, printable, shown
from hpcpace.runs.imports.imported_run import (
    UNKNOWN_GROUP,
    UNKNOWN_HOST,
    Import,
    ImportedRank,
    Rows,
    Source,
    group_rows,
    headers_of,
    rows_of,
)
from hpcpace.runs.imports.input_files import ChromeEvents, InputFile, call_bounded, json_bytes
from hpcpace.trace.schema import Op, Phase


class WiaArgs(msgspec.Struct, gc=False, frozen=True):
    """Arguments of an operation, and the name of a track."""

    step: Any = None
    microbatch: Any = msgspec.field(default=None, name="mb_id")
    seq: Any = msgspec.field(default=None, name="seq_id")
    chunk: Any = msgspec.field(default=None, name="model_chunk")
    name: Any = None


class WiaEvent(msgspec.Struct, gc=False):
    """One event; times in microseconds, `pid` is the data-parallel rank."""

    ph: str = ""
    name: str = ""
    pid: int = -1
    tid: int = -1
    ts: float = 0.0
    dur: float = 0.0
    args: WiaArgs = WiaArgs()


MAX_ROWS = 1_200_000
"""Each takes up to 700 bytes until the run is written."""
MAX_KINDS = 1024
MAX_NAME_LETTERS = 60
_MAX_BYTES = 640 << 20
_TEXT = "optype"


def parquet_table(file: InputFile, columns: tuple[str, ...]) -> pd.DataFrame:
    """Return columns of a parquet file, of numbers but for `optype`, whose texts are cut to `MAX_NAME_LETTERS`.

    Raises:
        UsageError: pyarrow is not installed.
        TraceError: the file cannot be read, is no such trace, or takes more memory than it may.
    """
    check_package("pyarrow", extra="import")
    try:
        numbers, codes, names = call_bounded(lambda: _read(file, columns), max_bytes=_MAX_BYTES)
    except MemoryError:
        raise TraceError(
            f"{file.path} has {file.size_bytes} bytes and takes more than {_MAX_BYTES >> 20} MiB to decode, or is"
            " damaged: refused; split it by steps if it is sound"
        ) from None
    # The last name is that of what has none, whose code is -1.
    return pd.DataFrame({**numbers, _TEXT: np.array([*names, None], object)[codes]})


def _read(file: InputFile, columns: tuple[str, ...]) -> tuple[dict[str, Any], Any, list[str | None]]:
    import pyarrow
    from pyarrow import parquet

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    try:
        with file.open() as opened:
            metadata = parquet.read_metadata(opened)
            _check_schema(file.path, metadata.schema.to_arrow_schema(), columns)
            _check_rows(file.path, metadata.num_rows)
            table = parquet.ParquetFile(opened, read_dictionary=[_TEXT]).read(columns=list(columns), use_threads=False)
        _check_rows(file.path, table.num_rows)
        text = table.column(_TEXT).unify_dictionaries().combine_chunks()
        if isinstance(text, pyarrow.ChunkedArray):  # of no row
            text = pyarrow.array([], pyarrow.string()).dictionary_encode()
        if len(text.dictionary) > MAX_KINDS:
            raise TraceError(f"{file.path} has {len(text.dictionary)} kinds of operations, more than {MAX_KINDS}")
        names = [name if name is None else name[:MAX_NAME_LETTERS] for name in text.dictionary.to_pylist()]
        codes = text.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
        numbers = {name: table.column(name).to_numpy() for name in columns if name != _TEXT}
    except MemoryError:
        raise MemoryError from None  # that of pyarrow would have to be imported to be raised
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"cannot read {file.path}: {shown(str(error))}") from None
    return numbers, codes, names


def _check_rows(path: Path, num_rows: int) -> None:
    if num_rows > MAX_ROWS:
        raise TraceError(f"{path} has {num_rows} rows, more than {MAX_ROWS}: split it by steps")


def _check_schema(path: Path, schema: Any, columns: tuple[str, ...]) -> None:
    import pyarrow
    from pyarrow import types

    names = schema.names
    missing = [name for name in columns if name not in names]
    if missing:
        raise TraceError(f"{path} lacks the columns {', '.join(missing)}: it is no trace of the what-if analysis")
    for name in columns:
        kind: Any = schema.field(name).type if names.count(name) == 1 else pyarrow.null()
        if name == _TEXT:
            of_text = kind.value_type if types.is_dictionary(kind) else kind
            is_right = types.is_string(of_text) or types.is_large_string(of_text)
        else:
            is_right = types.is_integer(kind) or types.is_floating(kind)
        if not is_right:
            raise TraceError(
                f"{path} has a column {name} of {shown(str(kind))}, not of {'texts' if name == _TEXT else 'numbers'}:"
                " it is no trace of the what-if analysis"
            )


DIRECTIONS = {"forward": 1, "backward": -1}
"""What is added to a stage to get the one that its messages go to."""
_WORKER_STEP = ["worker", "step"]
_CLOCK_ERROR_NS = 50_000  # 5e-5 s, as the analysis has it: setup_pp_dependency of its dependency_model.py


def real_messages(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the messages of a trace.

    Args:
        rows: as of `WiaTrace.rows`.

    Returns:
        The rows that are messages, with `direction`, `is_send`, the stages `source` and `target`, and `is_known`:
        whether it shows which message of the other end it is. It does not where calls do not fit the work, or where one
        end of a channel has more of them than the other in that step: all that follows a lost one is shifted.
    """
    num_stages = int(rows.stage.max()) + 1
    num_chunks = max(int(rows.chunk.max()), 0) + 1  # none where chunks are not named
    parts = []
    for direction, delta in DIRECTIONS.items():
        for kind in ("send", "recv"):
            calls = rows[rows.optype == f"{direction}-{kind}"].assign(is_known=True)
            if num_chunks > 1:
                work = rows[rows.optype == f"{direction}-compute"]
                calls = _with_chunks(calls, work, is_send=kind == "send")
            towards = delta if kind == "send" else -delta
            place = calls.chunk.clip(lower=0) * num_stages + calls.stage + towards
            calls = calls[~calls.is_known | ((place >= 0) & (place < num_stages * num_chunks))]
            here, other = calls.stage, (calls.stage + towards) % num_stages
            source, target = (here, other) if kind == "send" else (other, here)
            parts.append(calls.assign(direction=direction, is_send=kind == "send", source=source, target=target))
    found = pd.concat(parts)
    of_channel = found.groupby(["direction", "dp", "source", "target", "step"])
    is_even = of_channel.is_send.transform("mean") == 0.5
    return found.assign(is_known=is_even & of_channel.is_known.transform("all"))


def _with_chunks(calls: pd.DataFrame, work: pd.DataFrame, *, is_send: bool) -> pd.DataFrame:
    """Return calls with the chunk of the work that each belongs to, without those before or after all work.

    `is_known` becomes false for the calls of a worker in a step in which they do not fit the work.
    """
    order = [*_WORKER_STEP, "begin_ns", "seq"]
    work = work.sort_values(order)
    work = work.assign(number=work.groupby(_WORKER_STEP).cumcount())
    of_step = work.groupby(_WORKER_STEP).agg(
        num_work=("seq", "size"), first_end_ns=("end_ns", "min"), last_begin_ns=("begin_ns", "max")
    )
    calls = calls.join(of_step, on=_WORKER_STEP)
    is_unused = (
        calls.end_ns < calls.first_end_ns - _CLOCK_ERROR_NS
        if is_send
        else calls.begin_ns > calls.last_begin_ns + _CLOCK_ERROR_NS
    )
    calls = calls[~is_unused].sort_values(order)
    of_calls = calls.groupby(_WORKER_STEP)
    missing = calls.num_work.fillna(0).astype(int) - of_calls.seq.transform("size")
    # Of the first receive, which is none, the call may not be listed, either.
    number = of_calls.cumcount() + (0 if is_send else missing)
    index = pd.MultiIndex.from_frame(calls.assign(number=number)[[*_WORKER_STEP, "number"]])
    chunks = work.set_index([*_WORKER_STEP, "number"]).chunk.reindex(index).fillna(-1).astype(int).to_numpy()
    return calls.assign(chunk=chunks, is_known=missing.isin([0, 1])).drop(columns=list(of_step.columns))


COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc", "mb_id")
"""Columns of the parquet file; times are float seconds from the begin of each step."""

MAX_WORKERS = 2048
"""Each becomes a rank with a file, which takes some milliseconds however small it is."""
_MAX_FILES = 16_384
_MAX_META_BYTES = 1 << 16
_MAX_NUMBER = MAX_RANKS * 1024
_MAX_TIME_NS = 1 << 60
_WORLD_SIZE = re.compile(rb"^world_size: *(\d{1,7}) *$", re.MULTILINE)
_TRACK = re.compile(r"PP rank (\d{1,6}), TP rank (\d{1,6})\b")
_MIN_STEP_NS = 1
_MAX_NEGATIVE_US = 200.0


@dataclass(frozen=True, kw_only=True)
class WiaTrace:
    """One trace.

    Attributes:
        rows: `worker` (a number from 0), `dp`, `stage`, `step` (from 0), `optype`, `begin_ns`, `end_ns` (steps follow
            each other), `seq`, `microbatch` and `chunk`.
        steps: number of each step in the file.
        source_ranks: the rank that the file names for each worker.
        num_gpus: GPUs of the job; None where no file says so.
        has_waits: whether operations include the time in which they waited.
        files: what was read: name and size.
    """

    rows: pd.DataFrame
    steps: tuple[int, ...]
    source_ranks: tuple[int, ...]
    num_gpus: int | None
    has_waits: bool
    files: tuple[tuple[str, int], ...]


def read_wia(path: Path, *, progress: Callable[[int, int], None] = lambda *_: None) -> WiaTrace:
    """Read a trace, a folder with one, or a timeline for Chrome.

    Args:
        path: a file, or a folder with one `trace-NAME.parquet`.
        progress: takes how many bytes are read, of how many.

    Raises:
        TraceError: it cannot be read, or is no such trace.
    """
    file = _one_file(path)
    path = file.path
    is_parquet = path.suffix == ".parquet"
    table = parquet_table(file, COLUMNS) if is_parquet else _timeline(file, progress)
    num_gpus, files = None, [(path.name, file.size_bytes)]
    if is_parquet:
        meta = path.with_name(f"meta-{path.stem.removeprefix('trace-')}.yaml")
        try:
            content = read_file(meta, most_bytes=_MAX_META_BYTES)
        except OSError:  # there is none, or it is a link
            content = b""
        found = _WORLD_SIZE.search(content)
        num_gpus = int(found.group(1)) if found else None
        files += [(meta.name, len(content))] if content else []
    return _checked(table, path, num_gpus=num_gpus, has_waits=is_parquet, files=tuple(files))


def _one_file(path: Path) -> InputFile:
    if not path.is_dir():
        return InputFile.at(path)
    found = InputFile.all_in(path, (".parquet",), max_files=_MAX_FILES)
    if len(found) == 1:
        return found[0]
    names = ", ".join(printable(one.path.name) for one in found[:8])
    raise TraceError(
        f"{path} holds {len(found)} parquet files{f' ({names})' if names else ''}, and one is a run: name the file"
    )


def _timeline(file: InputFile, progress: Callable[[int, int], None]) -> pd.DataFrame:
    """Return the operations of a timeline for Chrome."""
    path = file.path
    stages: dict[tuple[float, float], int] = {}
    names: dict[str, str] = {}
    rows: list[tuple[Any, ...]] = []
    events = ChromeEvents(json_bytes(file, progress), path, WiaEvent)
    for batch in events:
        for event in batch:
            args, place = event.args, (_number(event.pid), _number(event.tid))
            if event.ph == "X":
                name = event.name[:MAX_NAME_LETTERS]
                numbers = map(_number, (args.step, args.microbatch, args.seq, args.chunk))
                rows.append((*place, names.setdefault(name, name), event.ts, event.dur, *numbers))
            elif event.name == "thread_name" and isinstance(args.name, str) and (found := _TRACK.match(args.name)):
                stages[place] = int(found.group(1))
        if len(rows) > MAX_ROWS:
            raise TraceError(f"{path} has more than {MAX_ROWS} operations: split it by steps")
        if len(names) > MAX_KINDS or len(stages) > MAX_WORKERS:
            raise TraceError(
                f"{path} has more than {MAX_KINDS} kinds of operations, or {MAX_WORKERS} tracks: it is no timeline of"
                " the what-if analysis"
            )
    if events.problem:
        raise TraceError(f"{events.problem}; a trace in part shows waits that are none, so it is refused")
    if not stages or not rows:
        raise TraceError(f"{path} names no pipeline stages in its tracks: it is no timeline of the what-if analysis")
    columns = ["dp_rank", "tid", "optype", "ts", "dur", "step", "mb_id", "seq_id", "mc"]
    table = pd.DataFrame(rows, columns=columns)
    table["stage"] = [stages.get(place, -1) for place in zip(table.dp_rank, table.tid, strict=True)]
    table["rank"] = table.stage * (table.dp_rank.max() + 1) + table.dp_rank
    table["gmc"] = -1
    # A transfer is what the tool computes of 32-bit times: down to some negative microseconds, it is none.
    is_none = table.dur.between(-_MAX_NEGATIVE_US, 0)
    table["start_ts"] = (table.ts + table.dur.where(is_none, 0)) / 1e6
    table["duration"] = table.dur.mask(is_none, 0) / 1e6
    table["start_ts"] -= table.groupby("step").start_ts.transform("min")
    return table[list(COLUMNS)]


def _number(value: Any) -> float:
    """Return a number of an event; NaN for what is none, or none that a trace has."""
    return value if type(value) in (int, float) and abs(value) <= _MAX_NUMBER else math.nan


def _checked(table: pd.DataFrame, path: Path, **facts: Any) -> WiaTrace:
    """Return a table as a trace, its steps one after the other.

    Raises:
        TraceError: it has no rows, or values that no trace has.
    """
    if not len(table):
        raise TraceError(f"{path} has no rows: there is nothing to import")
    needed = ["dp_rank", "stage", "rank", "step", "seq_id"]
    whole = table[[*needed, "mc", "mb_id"]]
    times = table[["start_ts", "duration"]].astype(np.float64)
    is_wrong = ~(whole[needed] >= 0).all(axis=1) | (whole.abs() > _MAX_NUMBER).any(axis=1) | table.optype.isna()
    is_wrong |= ~np.isfinite(times).all(axis=1) | (times.duration < 0) | (times.abs() > 1e6).any(axis=1)
    if is_wrong.any():
        raise TraceError(
            f"{path}: row {int(is_wrong.to_numpy().argmax())} has values that no trace has; is it damaged?"
        )
    whole = whole.fillna(-1).astype(np.int64)
    workers = whole[["dp_rank", "stage", "rank"]].drop_duplicates().sort_values("rank")
    if workers.duplicated(["dp_rank", "stage"]).any() or workers.duplicated("rank").any():
        raise TraceError(f"{path}: a worker (dp_rank and stage) has several ranks, or a rank several workers")
    if len(workers) > MAX_WORKERS:
        raise TraceError(f"{path} has {len(workers)} workers (dp_rank and stage), more than {MAX_WORKERS}")
    source, worker = np.unique(whole["rank"].to_numpy(), return_inverse=True)
    steps, step = np.unique(whole.step.to_numpy(), return_inverse=True)
    begin_ns = (times.start_ts.to_numpy() * NS_PER_S).round().astype(np.int64)
    end_ns = begin_ns + (times.duration.to_numpy() * NS_PER_S).round().astype(np.int64)
    first_ns, last_ns = np.zeros((2, len(steps)), np.int64)
    np.minimum.at(first_ns, step, begin_ns)
    np.maximum.at(last_ns, step, end_ns)
    length_ns = np.maximum(last_ns - first_ns, _MIN_STEP_NS)
    if (total_ns := length_ns.sum(dtype=np.float64)) > _MAX_TIME_NS:
        raise TraceError(f"{path}: its steps take {format_duration(total_ns)} in all; is it damaged?")
    # The begin of the job is 1 s, because times of 0 mean nothing known.
    origin_ns = NS_PER_S + np.cumsum(length_ns) - length_ns - first_ns
    rows = pd.DataFrame(
        {
            "worker": worker.astype(np.int64),
            "dp": whole.dp_rank.to_numpy(),
            "stage": whole.stage.to_numpy(),
            "step": step.astype(np.int64),
            "optype": table.optype.astype(str).to_numpy(),
            "begin_ns": begin_ns + origin_ns[step],
            "end_ns": end_ns + origin_ns[step],
            "seq": whole.seq_id.to_numpy(),
            "microbatch": whole.mb_id.to_numpy(),
            "chunk": whole.mc.to_numpy(),
        }
    )
    rows = rows.sort_values(["worker", "begin_ns", "end_ns"], kind="stable", ignore_index=True)
    return WiaTrace(rows=rows, steps=tuple(steps.tolist()), source_ranks=tuple(source.tolist()), **facts)


TOOL = "what-if analysis of ByteDance-Seed/StragglerAnalysis"
_PHASES = {
    "forward-compute": Phase.FORWARD,
    "backward-compute": Phase.BACKWARD,
    "optimizer": Phase.OPTIMIZER,
    "gc": Phase.GC,
    "layernorm-grads-all-reduce": Phase.OTHER,  # among the GPUs of one worker, of which one was recorded
}
# Of a collective the members: "stage" those of one stage, "ends" first and last stage of one replica, "all" everybody.
_COLLECTIVES = {
    "params-all-gather": (Op.ALL_GATHER, "stage"),
    "grads-reduce-scatter": (Op.REDUCE_SCATTER, "stage"),
    "separate-grads-all-reduce": (Op.ALL_REDUCE, "stage"),
    "embedding-grads-all-reduce": (Op.ALL_REDUCE, "ends"),
    "optimizer-clip-main-grad": (Op.ALL_REDUCE, "all"),
}
_MESSAGES = {"forward-send": Op.SEND, "forward-recv": Op.RECV, "backward-send": Op.SEND, "backward-recv": Op.RECV}
_WAITS = {"wait-stage": Op.BARRIER, "wait-replica": Op.BARRIER}
_OPS = {name: op for name, (op, _) in _COLLECTIVES.items()} | _MESSAGES | _WAITS
_COMPUTE = ("forward-compute", "backward-compute")
_AFTER_WORK = (
    "layernorm-grads-all-reduce",
    *(name for name in _COLLECTIVES if name != "params-all-gather"),
    "optimizer",
)
_ALWAYS, _TOGETHER = 0.95, 0.05
_NO_GROUP = ""
_MAX_NAMES = 400
_MAX_GROUP_ROWS = 1 << 21
# An operation that still runs so shortly after work began held that work: in the published traces what overlaps at all
# does so for at most 131 us, or for as long as it takes.
_GRAIN_NS = 200_000
Int64Array = NDArray[np.int64]


def import_wia(path: Path, *, progress: Callable[[int, int], None] = lambda *_: None) -> Import:
    """Read a trace as ranks of a run; arguments and errors as of `read_wia`."""
    trace = read_wia(path, progress=progress)
    if not trace.rows.optype.isin([*_PHASES, *_OPS]).any():
        raise TraceError(f"{path} has none of the operations of the what-if analysis, such as forward-compute")
    messages = real_messages(trace.rows)
    return Import(source=source_of(trace, messages), ranks=tuple(ranks_of(trace, messages)))


def source_of(trace: WiaTrace, messages: pd.DataFrame) -> Source:
    """Return what run.json says about the source of a trace; `messages` as of `real_messages`."""
    num_workers = len(trace.source_ranks)
    gpus = f", which stand for {trace.num_gpus} GPUs" if trace.num_gpus else ""
    steps = ", ".join(map(str, trace.steps[:50])) + (", ..." if len(trace.steps) > 50 else "")
    notes = [
        f"ranks are the {num_workers} workers (data-parallel rank and stage) of the file{gpus}; "
        f"their ranks there: {', '.join(map(str, trace.source_ranks[:64]))}",
        f"the file has single steps ({steps}); here they are numbered from 0 and follow each other",
        "times are 32-bit seconds, exact to some microseconds",
        "the half-width of clocks is the largest difference between the two ends of a message",
    ]
    if other := sorted(set(trace.rows.optype) - set(_PHASES) - set(_OPS)):
        names = printable(", ".join(other)[:_MAX_NAMES])
        notes.append(f"operations of other kinds count as time outside all phases: {names}")
    if not trace.has_waits:
        notes.append(
            "the timeline leaves waits out: an operation begins once the worker's last work before it has ended"
        )
    return Source(
        tool=TOOL,
        files=trace.files,
        unknown=(
            "hosts and network",
            "bytes of operations",
            "samples",
            "what runs between the ranks of a worker (tensor parallelism)",
            "time between steps",
            "waits for data",
            *([] if messages.is_known.all() else [f"the other end of {_unknown_part(messages)} between stages"]),
        ),
        notes=notes,
    )


def _unknown_part(messages: pd.DataFrame) -> str:
    num_unknown = int((~messages.is_known).sum())
    return f"{num_unknown} of {plural(len(messages), 'message')}" if num_unknown < len(messages) else "messages"


def ranks_of(trace: WiaTrace, messages: pd.DataFrame) -> Iterator[ImportedRank]:
    """Yield the ranks of a trace; `messages` as of `real_messages`."""
    rows = _after_each_other(trace.rows)
    places = rows.groupby("worker")[["dp", "stage"]].first()
    worker_at = {(dp, stage): worker for worker, (dp, stage) in enumerate(places.itertuples(index=False))}
    operations = _operations(rows, messages, worker_at, has_waits=trace.has_waits)
    members = {name: np.sort(found) for name, found in operations.groupby("group").worker.unique().items()}
    # The trace of each member lists all members.
    if (num_rows := sum(len(found) ** 2 for found in members.values())) > _MAX_GROUP_ROWS:
        raise TraceError(f"the trace has {num_rows} members of groups over all ranks, more than {_MAX_GROUP_ROWS}")
    halfwidth_ns = _halfwidth_ns(operations)
    num_dp, num_pp = len(places.dp.unique()), len(places.stage.unique())
    begin_ns = rows.groupby("step").begin_ns.min()
    clocks = {worker: (UNKNOWN_HOST, f"imported-{worker}") for worker in range(len(places))}
    headers = headers_of(clocks, len(places))
    for worker, (dp, stage) in enumerate(places.itertuples(index=False)):
        own = rows[rows.worker == worker]
        yield ImportedRank(
            header=replace(headers[worker], mesh=f"dp={num_dp},pp={num_pp},tp=1", dp=int(dp), pp=int(stage), tp=0),
            tables={
                "steps": _step_rows(own, begin_ns),
                "phases": _phase_rows(own),
                **_operation_rows(operations[operations.worker == worker], own, members),
                "clock": _clock_rows(own, halfwidth_ns),
            },
        )


def _after_each_other(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows that begin when another one of the worker ended, where they seemed to begin shortly before that."""
    begin_ns = rows.begin_ns.to_numpy().copy()
    for at in rows.groupby("worker").indices.values():
        own, own_end_ns = begin_ns[at], rows.end_ns.to_numpy()[at]
        ends = np.sort(own_end_ns)
        found = ends[np.maximum(np.searchsorted(ends, own + _GRAIN_NS, side="right") - 1, 0)]
        begin_ns[at] = np.where((found > own) & (found < own_end_ns), found, own)
    return rows.assign(begin_ns=begin_ns)


def _operations(
    rows: pd.DataFrame, messages: pd.DataFrame, worker_at: dict[tuple[int, int], int], *, has_waits: bool
) -> pd.DataFrame:
    """Return the communication of all workers: the rows with `op`, `peer`, `group` (a name), `number`."""
    found = rows[rows.optype.isin(_OPS)].copy()
    found["op"] = found.optype.map(_OPS).astype(np.int64)
    found["peer"] = -1
    replica = found.dp.astype(str)
    scope = found.optype.map({name: members for name, (_, members) in _COLLECTIVES.items()})
    found["group"] = "all"
    found.loc[scope == "stage", "group"] = "stage " + found.stage.astype(str)
    found.loc[scope == "ends", "group"] = "ends of replica " + replica
    is_message = found.optype.isin(_MESSAGES)
    found.loc[messages.index, "group"] = _NO_GROUP
    ends = messages[messages.is_known]
    found.loc[ends.index, "group"] = (
        ends.direction + " " + ends.source.astype(str) + " to " + ends.target.astype(str)
    ) + (" of replica " + ends.dp.astype(str))
    other = ends.target.where(ends.is_send, ends.source)
    found.loc[ends.index, "peer"] = [worker_at.get(pair, -1) for pair in zip(ends.dp, other, strict=True)]
    found = found[~is_message | found.index.isin(messages.index)]
    found = _matched(pd.concat([found, *_unrecorded(rows)], ignore_index=True))
    return found if has_waits else _with_enters(found, rows)


def _unrecorded(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the waits between the last backward pass and what follows it, where all of a replica or stage wait there.

    The file has gaps in that place. That nobody goes on before the last one's work has ended, and all go on together,
    step after step, shows a synchronisation that was not recorded. The wait in a stage ends for all when the first one
    goes on; whoever is held by its replica, too, waits there from then on.
    """
    worked = rows[rows.optype.isin([*_COMPUTE, *_MESSAGES])].groupby(["worker", "step"], as_index=False).end_ns.max()
    worked = worked.set_axis(["worker", "step", "begin_ns"], axis=1)
    after = rows[rows.optype.isin(_AFTER_WORK)].merge(worked, on=["worker", "step"], suffixes=("_after", ""))
    after = after[after.begin_ns_after >= after.begin_ns - _GRAIN_NS]
    each = after.groupby(["worker", "dp", "stage", "step"], as_index=False).agg(
        begin_ns=("begin_ns", "first"), goes_on_ns=("begin_ns_after", "min")
    )
    replicas = _held_together(each, "dp", each.goes_on_ns)
    stages = _held_together(each, "stage", each.goes_on_ns.where(~each.dp.isin(replicas.dp.unique())))
    released_ns = stages.set_index(["worker", "step"]).end_ns
    since_ns = released_ns.reindex(pd.MultiIndex.from_frame(replicas[["worker", "step"]])).to_numpy()
    replicas["begin_ns"] = np.clip(np.nan_to_num(since_ns), replicas.begin_ns, replicas.end_ns).astype(np.int64)
    return [
        found.assign(group=f"{name} " + found[members].astype(str) + ", inferred", optype=optype, op=int(_OPS[optype]))
        for name, members, found, optype in (
            ("replica", "dp", replicas, "wait-replica"),
            ("stage", "stage", stages, "wait-stage"),
        )
        if len(found)
    ]


def _held_together(each: pd.DataFrame, members: str, goes_on_ns: pd.Series) -> pd.DataFrame:
    """Return the waits of those sets of workers that go on together once the last one's work has ended.

    Args:
        each: worker, step, end of its work and when it goes on.
        members: the column by which workers are of one set.
        goes_on_ns: when they go on, NaN for workers that are held by something else.
    """
    each = each.assign(known_ns=goes_on_ns)
    of_set = each.groupby([members, "step"])
    last_ns, first_ns = of_set.begin_ns.transform("max"), of_set.goes_on_ns.transform("min")
    spread_ns = of_set.known_ns.transform("max") - of_set.known_ns.transform("min")
    longest_ns = (each.goes_on_ns - each.begin_ns).groupby([each[members], each.step]).transform("max")
    each["is_held"] = (first_ns >= last_ns - _GRAIN_NS) & (spread_ns <= np.maximum(longest_ns * _TOGETHER, _GRAIN_NS))
    each["end_ns"] = np.maximum(first_ns, each.begin_ns).astype(np.int64)
    is_always = each.groupby(members).is_held.transform("mean") >= _ALWAYS
    num_members = each.groupby(members).worker.transform("nunique")
    held = each[each.is_held & is_always & (num_members > 1)]
    return held[["worker", "dp", "stage", "step", "begin_ns", "end_ns"]].assign(peer=-1, seq=0)


def _matched(found: pd.DataFrame) -> pd.DataFrame:
    """Return operations with three more columns.

    `number` is the same for the same operation of a group, `channel` is the sender of a message, and `is_batch` says
    whether a send was issued together with a receive.
    """
    keys = ["group", "step", "optype", "worker"]
    found = found.sort_values([*keys, "seq"], kind="stable", ignore_index=True)
    found["place"] = found.groupby(keys).cumcount()
    is_send, is_recv = found.op == Op.SEND, found.op == Op.RECV
    found["channel"] = found.peer.where(is_recv, found.worker.where(is_send, -1))
    # A number of its own for each step and kind of operation: members that lack one still agree on the others.
    kind = found.optype.map({name: place for place, name in enumerate(_OPS)}).where(~is_send & ~is_recv, 0)
    most = int(found.place.max()) + 1 if len(found) else 1
    found["number"] = (found.step * len(_OPS) + kind.astype(np.int64)) * most + found.place
    times = ["worker", "begin_ns", "end_ns"]
    received = pd.MultiIndex.from_frame(found.loc[is_recv, times])
    found["is_batch"] = is_send & pd.MultiIndex.from_frame(found[times]).isin(received)
    return found


def _with_enters(found: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return operations that begin when the worker's last work before them ended."""
    work = rows[rows.optype.isin(_PHASES) & (rows.end_ns > rows.begin_ns)]
    found = found.copy()
    for worker, own in found.groupby("worker"):
        ends = np.sort(work.end_ns[work.worker == worker])
        at = np.searchsorted(ends, own.begin_ns, side="right")
        before = np.where(at > 0, np.append(0, ends)[at], own.begin_ns)
        begins = rows[rows.worker == worker].groupby("step").begin_ns.min()
        found.loc[own.index, "begin_ns"] = np.maximum(before, own.step.map(begins).to_numpy())
    return found


def _halfwidth_ns(operations: pd.DataFrame) -> int:
    """Return by how much the two ends of a message differ at most, at least a microsecond."""
    messages = operations[operations.op.isin([Op.SEND, Op.RECV])]
    key = ["group", "step", "channel", "place"]
    both = messages[messages.op == Op.SEND].merge(messages[messages.op == Op.RECV], on=key, suffixes=("", "_of_recv"))
    return max(int((both.end_ns - both.end_ns_of_recv).abs().max()) if len(both) else 0, 1000)


def _step_rows(own: pd.DataFrame, begin_ns: pd.Series) -> Rows:
    end_ns = own.groupby("step").end_ns.max()
    index = end_ns.index
    return rows_of("steps", step=index.to_numpy(), begin_ns=begin_ns[index].to_numpy(), end_ns=end_ns.to_numpy())


def _phase_rows(own: pd.DataFrame) -> Rows:
    work = own[own.optype.isin(_PHASES) & (own.end_ns > own.begin_ns)]
    return rows_of(
        "phases",
        step=work.step.to_numpy(),
        phase=work.optype.map(_PHASES).to_numpy(np.uint8),
        begin_ns=work.begin_ns.to_numpy(),
        end_ns=work.end_ns.to_numpy(),
        microbatch=np.clip(work.microbatch.to_numpy(), -1, 32_767),
    )


def _operation_rows(found: pd.DataFrame, own: pd.DataFrame, members: dict[str, Int64Array]) -> dict[str, Rows]:
    """Return the tables `collectives` and `groups` of a worker."""
    names = sorted(name for name in found.group.unique().tolist() if name != _NO_GROUP)
    number = {_NO_GROUP: UNKNOWN_GROUP, **{name: place for place, name in enumerate(names)}}
    found = found.sort_values(["begin_ns", "end_ns"], kind="stable")
    return {
        "collectives": rows_of(
            "collectives",
            step=found.step.to_numpy(),
            group=found.group.map(number).to_numpy(np.int64),
            seq=found.number.to_numpy(),
            op=found.op.to_numpy(),
            peer=found.peer.to_numpy(),
            enter_ns=found.begin_ns.to_numpy(),
            exit_ns=found.end_ns.to_numpy(),
            blocked_ns=_blocked_ns(found, own),
        ),
        "groups": group_rows([(name, members[name]) for name in names], "unknown"),
    }


def _blocked_ns(found: pd.DataFrame, own: pd.DataFrame) -> Int64Array:
    """Return for how long a worker did nothing before each operation ended; 0 where it worked at that time.

    Of a batch of a send and a receive the receive has it.
    """
    work = own[own.optype.isin(_PHASES) & (own.end_ns > own.begin_ns)].sort_values("begin_ns")
    begins, ends = work.begin_ns.to_numpy(), np.maximum.accumulate(work.end_ns.to_numpy())
    exit_ns, enter_ns = found.end_ns.to_numpy(), found.begin_ns.to_numpy()
    worked_until = np.append(0, ends)[np.searchsorted(begins, exit_ns - _GRAIN_NS, side="left")]
    blocked_ns: Int64Array = np.maximum(exit_ns - np.maximum(enter_ns, worked_until), 0)
    blocked_ns[found.is_batch.to_numpy()] = 0
    return blocked_ns


def _clock_rows(own: pd.DataFrame, halfwidth_ns: int) -> Rows:
    local_ns = np.array([own.begin_ns.min(), own.end_ns.max()])
    return rows_of("clock", ref_rank=0, local_ns=local_ns, halfwidth_ns=halfwidth_ns, count=1)
