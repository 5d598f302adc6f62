"""Traces of ByteDance's what-if analysis ("Understanding Stragglers in Large Model Training", 2025) as a table.

One row an operation of a worker, which is a data-parallel rank and a pipeline stage: a parquet file with the columns of
`COLUMNS`, or the timeline that the tool writes for Chrome. The timeline has operations without their waits, so there an
operation begins once the worker's previous one has ended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hpcpace.core.errors import TraceError
from hpcpace.core.files import read_file
from hpcpace.core.text import NS_PER_S, format_duration, printable
from hpcpace.runs.imports.chrome_events import ChromeEvents, need_msgspec
from hpcpace.runs.imports.opened import InputFile, json_bytes
from hpcpace.runs.imports.wia_parquet import MAX_KINDS, MAX_NAME_LETTERS, MAX_ROWS, parquet_table
from hpcpace.trace.schema import MAX_RANKS

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
    file = _one_file(path)
    path = file.path
    is_parquet = path.suffix == ".parquet"
    table = parquet_table(file, COLUMNS) if is_parquet else _timeline(file, told)
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


def _timeline(file: InputFile, told: Callable[[int, int], None]) -> pd.DataFrame:
    """Return the operations of a timeline for Chrome."""
    need_msgspec()
    from hpcpace.runs.imports.wia_event import WiaEvent

    path = file.path
    stages: dict[tuple[float, float], int] = {}
    names: dict[str, str] = {}
    rows: list[tuple[Any, ...]] = []
    events = ChromeEvents(json_bytes(file, told), path, WiaEvent)
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
    is_none = table.dur.between(-_MOST_NEGATIVE_US, 0)
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
    whole = table[["dp_rank", "stage", "rank", "step", "seq_id", "mc", "mb_id"]]
    times = table[["start_ts", "duration"]].astype(np.float64)
    wrong = whole[["dp_rank", "stage", "rank", "step", "seq_id"]]
    is_wrong = wrong.isna().any(axis=1) | (wrong < 0).any(axis=1) | (whole.abs() > _MAX_NUMBER).any(axis=1)
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
    if len(workers) > MAX_WORKERS:
        raise TraceError(f"{path} has {len(workers)} workers (dp_rank and stage), more than {MAX_WORKERS}")
    source, worker = np.unique(whole["rank"].to_numpy(), return_inverse=True)
    steps, step = np.unique(whole.step.to_numpy(), return_inverse=True)
    begin_ns = (times.start_ts.to_numpy() * NS_PER_S).round().astype(np.int64)
    end_ns = begin_ns + (times.duration.to_numpy() * NS_PER_S).round().astype(np.int64)
    first_ns, last_ns = np.zeros((2, len(steps)), np.int64)
    np.minimum.at(first_ns, step, begin_ns)
    np.maximum.at(last_ns, step, end_ns)
    length_ns = np.maximum(last_ns - first_ns, _LEAST_STEP_NS)
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
