"""Traces of ByteDance's what-if analysis ("Understanding Stragglers in Large Model Training", 2025) as a table.

One row an operation of a worker, which is a data-parallel rank and a pipeline stage: a parquet file with the columns of
`COLUMNS`, or the timeline that the tool writes for Chrome. The timeline has operations without their waits, so there an
operation begins once the worker's previous one has ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hpcpace.errors import TraceError, UsageError
from hpcpace.quoting import printable
from hpcpace.runs.imports.chrome_events import ChromeEvents, need_msgspec
from hpcpace.runs.imports.opened import json_bytes, size_of
from hpcpace.trace.header import MOST_RANKS
from hpcpace.units import NS_PER_S

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc", "mb_id")
"""Columns of the parquet file; times are float seconds from the begin of each step."""

MOST_ROWS = 50_000_000
_MOST_PARQUET = 4 << 30
_MOST_META = 1 << 16
_WORLD_SIZE = re.compile(r"^world_size:\s*(\d{1,7})\s*$", re.MULTILINE)
_TRACK = re.compile(r"PP rank (\d{1,6}), TP rank (\d{1,6})\b")
_LEAST_STEP_NS = 1
_MOST_NEGATIVE_US = 200.0


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


def read_wia(path: Path, *, told: Callable[[int, int], None] = lambda *_: None) -> WiaTrace:
    """Read a trace, a folder with one, or a timeline for Chrome.

    Args:
        path: a file, or a folder with one `trace-NAME.parquet`.
        told: takes how many bytes are read, of how many.

    Raises:
        TraceError: it cannot be read, or is no such trace.
    """
    path = _one_file(path)
    is_parquet = path.suffix == ".parquet"
    table = _parquet(path) if is_parquet else _timeline(path, told)
    meta = path.with_name(f"meta-{path.stem.removeprefix('trace-')}.yaml") if is_parquet else None
    num_gpus, files = None, [(path.name, size_of(path))]
    if meta is not None and meta.is_file():
        num_gpus = _num_gpus(meta)
        files.append((meta.name, size_of(meta)))
    return _checked(table, path, num_gpus=num_gpus, has_waits=is_parquet, files=tuple(files))


def _one_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.parquet"))
    if len(found) == 1:
        return found[0]
    names = ", ".join(printable(one.name) for one in found[:8])
    raise TraceError(
        f"{path} holds {len(found)} parquet files{f' ({names})' if names else ''}, and one is a run: name the file"
    )


def _parquet(path: Path) -> pd.DataFrame:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UsageError("parquet files need pyarrow: pip install 'hpcpace[import]'") from error
    if size_of(path) > _MOST_PARQUET:
        raise TraceError(f"{path} has {size_of(path) >> 20} MiB, more than {_MOST_PARQUET >> 20}: split it by steps")
    try:
        with parquet.ParquetFile(path) as file:
            if file.metadata.num_rows > MOST_ROWS:
                raise TraceError(
                    f"{path} says that it has {file.metadata.num_rows} rows, more than {MOST_ROWS}: split it by steps"
                )
            missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
            if missing:
                raise TraceError(
                    f"{path} lacks the columns {', '.join(missing)}: it is no trace of the what-if analysis"
                )
            table: pd.DataFrame = file.read(columns=list(COLUMNS)).to_pandas()
            return table
    except (ArrowException, OSError) as error:
        raise TraceError(f"cannot read {path}: {printable(str(error))[:200]}") from error


def _timeline(path: Path, told: Callable[[int, int], None]) -> pd.DataFrame:
    """Return the operations of a timeline for Chrome."""
    need_msgspec()
    from hpcpace.runs.imports.wia_event import WiaEvent

    stages: dict[tuple[int, int], int] = {}
    rows: list[tuple[Any, ...]] = []
    events = ChromeEvents(json_bytes(path, told), path, WiaEvent)
    for batch in events:
        for event in batch:
            args = event.args
            if event.ph == "X":
                numbers = (args.step, args.microbatch, args.seq, args.chunk)
                rows.append((event.pid, event.tid, event.name, event.ts, event.dur, *numbers))
            elif event.name == "thread_name" and (found := _TRACK.match(str(args.name))):
                stages[event.pid, event.tid] = int(found.group(1))
        if len(rows) > MOST_ROWS:
            raise TraceError(f"{path} has more than {MOST_ROWS} operations: split it by steps")
    if events.problem:
        raise TraceError(f"{events.problem}; a trace in part shows waits that are none, so it is refused")
    if not stages or not rows:
        raise TraceError(f"{path} names no pipeline stages in its tracks: it is no timeline of the what-if analysis")
    names = ["dp_rank", "tid", "optype", "ts", "dur", "step", "mb_id", "seq_id", "mc"]
    table = pd.DataFrame(rows, columns=names)
    table["stage"] = [stages.get(place, -1) for place in zip(table.dp_rank, table.tid, strict=True)]
    table["rank"] = table.stage * (pd.to_numeric(table.dp_rank, errors="coerce").max() + 1) + table.dp_rank
    table["gmc"] = -1
    # A transfer is what the tool computes of 32-bit times: down to some negative microseconds, it is none.
    is_none = table.dur.between(-_MOST_NEGATIVE_US, 0)
    table["start_ts"] = (table.ts + table.dur.where(is_none, 0)) / 1e6
    table["duration"] = table.dur.mask(is_none, 0) / 1e6
    table["start_ts"] -= table.groupby("step").start_ts.transform("min")
    return table[list(COLUMNS)]


def _num_gpus(path: Path) -> int | None:
    if size_of(path) > _MOST_META:
        return None
    try:
        found = _WORLD_SIZE.search(path.read_text())
    except (OSError, ValueError):
        return None
    return int(found.group(1)) if found else None


def _checked(table: pd.DataFrame, path: Path, **facts: Any) -> WiaTrace:
    """Return a table as a trace, its steps one after the other.

    Raises:
        TraceError: it has no rows, or values that no trace has.
    """
    if not len(table):
        raise TraceError(f"{path} has no rows: there is nothing to import")
    whole = table[["dp_rank", "stage", "rank", "step", "seq_id", "mc", "mb_id"]].apply(pd.to_numeric, errors="coerce")
    times = table[["start_ts", "duration"]].apply(pd.to_numeric, errors="coerce").astype(np.float64)
    wrong = whole[["dp_rank", "stage", "rank", "step", "seq_id"]]
    is_wrong = wrong.isna().any(axis=1) | (wrong < 0).any(axis=1) | (wrong > MOST_RANKS * 1024).any(axis=1)
    is_wrong |= table.optype.isna()
    is_wrong |= ~np.isfinite(times).all(axis=1) | (times.duration < 0) | (times.abs() > 1e6).any(axis=1)
    if is_wrong.any():
        raise TraceError(
            f"{path}: row {int(is_wrong.to_numpy().argmax())} has values that no trace has; is it damaged?"
        )
    whole = whole.fillna(-1).astype(np.int64)
    workers = whole[["dp_rank", "stage", "rank"]].drop_duplicates().sort_values("rank")
    if workers.duplicated(["dp_rank", "stage"]).any() or workers.duplicated("rank").any():
        raise TraceError(f"{path}: a worker (dp_rank and stage) has several ranks, or a rank several workers")
    source, worker = np.unique(whole["rank"].to_numpy(), return_inverse=True)
    steps, step = np.unique(whole.step.to_numpy(), return_inverse=True)
    begin_ns = (times.start_ts.to_numpy() * NS_PER_S).round().astype(np.int64)
    end_ns = begin_ns + (times.duration.to_numpy() * NS_PER_S).round().astype(np.int64)
    first_ns, last_ns = np.zeros((2, len(steps)), np.int64)
    np.minimum.at(first_ns, step, begin_ns)
    np.maximum.at(last_ns, step, end_ns)
    length_ns = np.maximum(last_ns - first_ns, _LEAST_STEP_NS)
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
