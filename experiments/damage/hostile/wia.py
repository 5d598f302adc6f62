"""Traces of the what-if analysis: parquet files and timelines for Chrome."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from experiments.damage.hostile.engine import SECRET, Call, Random, kinds_of, one_of
from hpcpace.runs.imports.wia import COLUMNS

_FORMAT = "traces of the what-if analysis"
_ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"
_OPERATIONS = (
    *("forward-compute", "backward-compute", "forward-send", "forward-recv", "backward-send", "backward-recv"),
    *("optimizer", "params-all-gather", "grads-reduce-scatter", "optimizer-clip-main-grad"),
    *("embedding-grads-all-reduce", "layernorm-grads-all-reduce"),
)
# A row takes 5 bytes in a file at least, and 5 us and 700 bytes of memory in the import: 1 s a MB. A worker takes
# 20 ms, most of them for its file of the run, and counts as 20 kB.
_BOUNDS: dict[str, Any] = {"most_cpu_s": 4.0, "most_cpu_s_per_mb": 1.5}
_ROW_BYTES = 5


def _call(path: Path, num_rows: int, *, num_workers: int = 8, **expected: Any) -> Call:
    size = path.stat().st_size if path.is_file() else 0
    num_bytes = size + _ROW_BYTES * num_rows + 20_000 * num_workers
    arguments = ("import", "wia", str(path), "--run-dir", str(path.parent.parent / "run"))
    return Call(arguments=arguments, num_bytes=num_bytes, never=("owned\x07",), **expected)


def _columns(random: Random, num_rows: int, num_workers: int = 8, num_steps: int = 10) -> dict[str, Any]:
    """Return columns of a trace whose operations come in any order."""
    worker = random.integers(0, num_workers, num_rows)
    num_stages = max(int(np.sqrt(num_workers)), 1)
    whole = {
        **{"dp_rank": worker // num_stages, "stage": worker % num_stages, "rank": worker},
        **{"step": random.integers(0, num_steps, num_rows), "seq_id": np.arange(num_rows)},
        **{"mc": np.zeros(num_rows, np.int64), "gmc": np.zeros(num_rows, np.int64)},
        "mb_id": random.integers(0, 8, num_rows),
    }
    codes = random.integers(0, len(_OPERATIONS), num_rows).astype(np.int32)
    names = pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(_OPERATIONS))
    begins = random.uniform(0, 1, num_rows).astype(np.float32)
    return {**whole, "start_ts": begins, "duration": begins / 100, "optype": names}


def _write(folder: Path, columns: dict[str, Any], **how: Any) -> Path:
    path = folder / "trace-X.parquet"
    parquet.write_table(pa.table({name: columns[name] for name in COLUMNS if name in columns}), path, **how)
    return path


def _rows(random: Random) -> int:
    return int(random.integers(1000, 200_000))


def _sound(folder: Path, random: Random) -> Call:
    num_rows = _rows(random)
    return _call(_write(folder, _columns(random, num_rows)), num_rows, codes=frozenset({0}))


def _long_texts(folder: Path, random: Random) -> Call:
    """Write one long text for all rows, in a dictionary."""
    num_rows = _rows(random)
    text = one_of(["x", _ESCAPE, "forward-compute"], random) * int(random.integers(1000, 50_000))
    names = pa.DictionaryArray.from_arrays(
        pa.array(np.arange(num_rows, dtype=np.int32) % 2), pa.array([text, "optimizer"])
    )
    return _call(_write(folder, {**_columns(random, num_rows), "optype": names}), num_rows)


def _plain_texts(folder: Path, random: Random) -> Call:
    """Write long texts that shrink to nothing, one in each row and group of rows."""
    num_letters, num_rows = int(random.integers(1 << 20, 1 << 24)), int(random.integers(1, 200))
    numbers = {name: values for name, values in _columns(random, 1).items() if name != "optype"}
    codec = one_of(["zstd", "gzip", "snappy", "brotli"], random)
    path = folder / "trace-X.parquet"
    schema = pa.table({**numbers, "optype": [""]}).schema
    with parquet.ParquetWriter(path, schema, compression=codec, use_dictionary=False) as writer:
        for row in range(num_rows):
            writer.write_table(pa.table({**numbers, "optype": [f"{row}" + "x" * num_letters]}))
    # 10 MB are decoded in the time of one of other files, up to the limit of memory.
    return _call(path, num_rows + min(num_letters * num_rows, 700_000_000) // 10 // _ROW_BYTES)


def _many_rows(folder: Path, random: Random) -> Call:
    """Write rows that take no space in the file: all the same."""
    num_rows = int(random.integers(500_000, 6_000_000))
    columns = {name: np.zeros(num_rows, np.int8) for name in COLUMNS}
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int8)), pa.array(["forward-compute"]))
    path = _write(folder, {**columns, "optype": names}, compression="zstd")
    return _call(path, min(num_rows, 1_200_000))


def _many_workers(folder: Path, random: Random) -> Call:
    num_workers = int(random.integers(20, 80)) if random.random() < 0.7 else int(random.integers(2_000, 50_000))
    columns = _columns(random, max(4 * num_workers, 1000), num_workers)
    return _call(_write(folder, columns), 4 * num_workers, num_workers=min(num_workers, 2_048))


def _many_steps(folder: Path, random: Random) -> Call:
    num_rows = _rows(random)
    columns = _columns(random, num_rows, num_steps=num_rows)
    columns["duration"] *= float(random.choice([1, 1e3, 1e6]))
    return _call(_write(folder, columns), num_rows)


def _many_kinds(folder: Path, random: Random) -> Call:
    num_rows = _rows(random)
    kinds = int(random.integers(10, 2000))
    codes = pa.array(random.integers(0, kinds, num_rows).astype(np.int32))
    names = pa.DictionaryArray.from_arrays(codes, pa.array([f"kind {number}{_ESCAPE}" for number in range(kinds)]))
    return _call(_write(folder, {**_columns(random, num_rows), "optype": names}), num_rows)


def _one_message(folder: Path, random: Random) -> Call:
    """Write messages alone, all between the same stages, with chunks that do not exist."""
    num_rows = _rows(random)
    names = pa.DictionaryArray.from_arrays(
        pa.array(random.integers(2, 6, num_rows).astype(np.int32)), pa.array(_OPERATIONS)
    )
    columns = {**_columns(random, num_rows), "optype": names}
    columns["mc"] = random.integers(0, one_of([2, 1000, 1 << 30], random), num_rows)
    return _call(_write(folder, columns), num_rows)


def _other_types(folder: Path, random: Random) -> Call:
    num_rows = 1000
    columns = _columns(random, num_rows)
    values = [
        pa.array([[1]] * num_rows),
        pa.array([{"a": 1}] * num_rows),
        pa.array(["1" * 100] * num_rows),
        pa.array([b"\xff"] * num_rows),
        pa.array([None] * num_rows, pa.int64()),
        pa.array([None] * num_rows, pa.null()),
        pa.array([True] * num_rows),
        pa.array([0] * num_rows, pa.timestamp("ns")),
        np.full(num_rows, np.nan),
        np.full(num_rows, np.inf),
        np.full(num_rows, -1e300),
        np.full(num_rows, (1 << 64) - 1, np.uint64),
        np.full(num_rows, -(1 << 63), np.int64),
    ]
    for name in COLUMNS:
        if random.random() < 0.2:
            columns[name] = one_of(values, random)
    return _call(_write(folder, columns), num_rows)


def _missing(folder: Path, random: Random) -> Call:
    columns = _columns(random, 100)
    for name in COLUMNS:
        if random.random() < 0.2:
            del columns[name]
    return _call(_write(folder, columns), 100)


def _damaged(folder: Path, random: Random) -> Call:
    """Change bytes of the pages or of the metadata at the end."""
    num_rows = _rows(random)
    path = _write(folder, _columns(random, num_rows))
    data = bytearray(path.read_bytes())
    first = len(data) - 3000 if random.random() < 0.6 else 0
    for _ in range(int(random.integers(1, 20))):
        data[int(random.integers(first, len(data)))] = int(random.integers(256))
    if random.random() < 0.2:
        del data[int(random.integers(len(data))) :]
    path.write_bytes(data)
    return _call(path, num_rows + 200_000)


def _false_sizes(folder: Path, random: Random) -> Call:
    """Change the lengths in the headers of pages, which begin each column."""
    path = _write(folder, _columns(random, 10_000), compression="none")
    with parquet.ParquetFile(path) as file:
        groups = file.metadata.row_group(0)
        places = [groups.column(number) for number in range(groups.num_columns)]
        begins = [place.dictionary_page_offset or place.data_page_offset for place in places]
    data = bytearray(path.read_bytes())
    for begin in begins:
        if random.random() < 0.3:
            for at in range(begin, begin + 20):
                if random.random() < 0.3:
                    data[at] = int(random.choice([0xFF, 0x7F, 0x80, 0x00]))
    path.write_bytes(data)
    return _call(path, 400_000)


def _timeline_events(random: Random, num_events: int) -> list[dict[str, Any]]:
    tracks = [
        {"ph": "M", "name": "thread_name", "pid": n, "tid": 0, "args": {"name": f"PP rank {n % 2}, TP rank 0"}}
        for n in range(4)
    ]
    events = []
    for number in range(num_events):
        pid = int(random.integers(4))
        args = {"step": number // 1000, "mb_id": number % 8, "seq_id": number, "model_chunk": 0}
        name = one_of(_OPERATIONS, random)
        events.append({"ph": "X", "name": name, "pid": pid, "tid": 0, "ts": 10.0 * number, "dur": 5.0, "args": args})
    return [*tracks, *events]


def _timeline(folder: Path, random: Random) -> Call:
    """Write a timeline with values of other types in some events."""
    values = (True, None, -1, 0.5, 1e300, 1 << 64, 10**300, "9" * 40, _ESCAPE, "\ud800", [], {"a": [1]}, "x" * 100_000)
    events = _timeline_events(random, int(random.integers(100, 15_000)))
    share = float(random.choice([0.0, 1e-4, 1e-2]))
    for event in events:
        if random.random() < share:
            part = event if random.random() < 0.5 else event["args"]
            part[list(part)[random.integers(len(part))]] = one_of(values, random)
    path = folder / "timeline.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return _call(path, len(events))


def _many_tracks(folder: Path, random: Random) -> Call:
    num_tracks = int(random.integers(100, 10_000))
    events = _timeline_events(random, 1000)
    for number in range(num_tracks):
        events.append({**events[0], "pid": number, "args": {"name": f"PP rank {number}, TP rank 0"}})
        events.append(
            {
                **events[-2 if number else 5],
                "ph": "X",
                "name": "optimizer",
                "pid": number,
                "args": {"step": 0, "seq_id": 0},
            }
        )
    path = folder / "timeline.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return _call(path, len(events), num_workers=min(num_tracks, 2_048))


def _places(folder: Path, random: Random) -> Call:
    """Put links and FIFOs where a trace and its facts are looked for."""
    secret = folder.parent / "secret"
    secret.write_text(f"world_size: 77\n{SECRET}\n" * 10)
    what = random.integers(4)
    if what == 0:
        (folder / "trace-X.parquet").symlink_to(secret)
    elif what == 1:
        os.mkfifo(folder / "trace-X.parquet")
    else:
        _write(folder, _columns(random, 1000))
        if what == 2:
            (folder / "meta-X.yaml").symlink_to(secret)
        else:
            os.mkfifo(folder / "meta-X.yaml")
    arguments = ("import", "wia", str(folder), "--run-dir", str(folder.parent / "run"))
    return Call(arguments=arguments, num_bytes=300_000, never=("77 GPUs",))


_MAKERS = (
    *(_sound, _long_texts, _plain_texts, _many_rows, _many_workers, _many_steps, _many_kinds, _one_message),
    *(_other_types, _missing, _damaged, _false_sizes, _timeline, _many_tracks, _places),
)
KINDS = kinds_of("wia", _FORMAT, _MAKERS, **_BOUNDS)
