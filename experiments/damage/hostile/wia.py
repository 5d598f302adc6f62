"""Traces of the what-if analysis: parquet files and timelines for Chrome."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from experiments.damage.chance import Random
from experiments.damage.hostile.engine import Call, kinds_of
from experiments.damage.hostile.json_files import kinds
from hpcpace.runs.imports.wia import COLUMNS

_FORMAT = "traces of the what-if analysis"
_OPERATIONS = (
    *("forward-compute", "backward-compute", "forward-send", "forward-recv", "backward-send", "backward-recv"),
    *("optimizer", "params-all-gather", "grads-reduce-scatter", "optimizer-clip-main-grad"),
    *("embedding-grads-all-reduce", "layernorm-grads-all-reduce"),
)
# A row takes 5 bytes in a file at least, and 5 us and 700 bytes of memory in the import: 1 s a MB. A worker takes
# 20 ms, most of them for its file of the run, and counts as 20 kB.
_BOUNDS: dict[str, Any] = {"most_cpu_s": 4.0, "most_cpu_s_per_mb": 1.5}
_ROW_BYTES = 5
_MAX_WORKERS = 2_048
"""Of an import."""


def _call(path: Path, num_rows: int, *, num_workers: int = 8, **expected: Any) -> Call:
    size = path.stat().st_size if path.is_file() else 0
    num_bytes = size + _ROW_BYTES * num_rows + 20_000 * min(num_workers, _MAX_WORKERS)
    arguments = ("import", "wia", str(path), "--run-dir", str(path.parent.parent / "run"))
    return Call(arguments=arguments, num_bytes=num_bytes, never=("owned\x07",), **expected)


def _texts(codes: Any, texts: Any) -> Any:
    """Return a column of texts that a file has once each."""
    return pa.DictionaryArray.from_arrays(pa.array(np.asarray(codes, np.int32)), pa.array(texts))


def _columns(random: Random, num_rows: int, num_workers: int = 8, num_steps: int = 10) -> dict[str, Any]:
    """Return columns of a trace whose operations come in any order."""
    worker = random.integers(0, num_workers, num_rows)
    num_stages = max(int(np.sqrt(num_workers)), 1)
    begins = random.uniform(0, 1, num_rows).astype(np.float32)
    return {
        **{"dp_rank": worker // num_stages, "stage": worker % num_stages, "rank": worker},
        **{"step": random.integers(0, num_steps, num_rows), "seq_id": np.arange(num_rows)},
        **{"mc": np.zeros(num_rows, np.int64), "gmc": np.zeros(num_rows, np.int64)},
        **{"mb_id": random.integers(0, 8, num_rows), "start_ts": begins, "duration": begins / 100},
        "optype": _texts(random.integers(0, len(_OPERATIONS), num_rows), _OPERATIONS),
    }


def _write(folder: Path, columns: dict[str, Any], **how: Any) -> Path:
    path = folder / "trace-X.parquet"
    parquet.write_table(pa.table({name: columns[name] for name in COLUMNS if name in columns}), path, **how)
    return path


def _sound(folder: Path, random: Random) -> Call:
    path = _write(folder, _columns(random, 100_000))
    return _call(path, 100_000, codes=frozenset({0}))


def _many_steps(folder: Path, random: Random) -> Call:
    num_rows = random.count(1000, 200_000)
    columns = _columns(random, num_rows, num_steps=num_rows)
    columns["duration"] *= random.one(1.0, 1e3, 1e6)
    return _call(_write(folder, columns), num_rows)


def _one_message(folder: Path, random: Random) -> Call:
    """Write messages alone, all between the same stages, with chunks that do not exist."""
    columns = _columns(random, 100_000)
    columns["optype"] = _texts(random.integers(2, 6, 100_000), _OPERATIONS)
    columns["mc"] = random.integers(0, random.one(2, 1000, 1 << 30), 100_000)
    return _call(_write(folder, columns), 100_000)


def _damaged(folder: Path, random: Random) -> Call:
    """Change bytes of the pages or of the metadata at the end."""
    num_rows = random.count(1000, 200_000)
    path = _write(folder, _columns(random, num_rows))
    data = path.read_bytes()
    first = len(data) - 3000 if random.maybe(0.6) else 0
    data = data[:first] + random.changed(data[first:], 20)
    path.write_bytes(data[: random.count(0, len(data))] if random.maybe(0.2) else data)
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
        for at in range(begin, begin + 20):
            if random.maybe(0.1):
                data[at] = random.one(0xFF, 0x7F, 0x80, 0x00)
    path.write_bytes(data)
    return _call(path, 400_000)


def _timeline_events(num_events: int) -> list[dict[str, Any]]:
    return [
        {"ph": "X", "name": _OPERATIONS[n % 7], "pid": n % 4, "tid": 0, "ts": 10.0 * n, "dur": 5.0,
         "args": {"step": n // 1000, "mb_id": n % 8, "seq_id": n, "model_chunk": 0}}
        for n in range(num_events)
    ]  # fmt: skip


def _written_timeline(folder: Path, content: bytes, random: Random | None = None, num_workers: int = 4) -> Call:
    path = folder / "timeline.json"
    path.write_bytes(content)
    return _call(path, len(content) // 100, num_workers=num_workers)


def _traced(num_tracks: int, events: list[dict[str, Any]]) -> Any:
    named = {"ph": "M", "name": "thread_name", "tid": 0}
    tracks = [{**named, "pid": n, "args": {"name": f"PP rank {n // 2}, TP rank 0"}} for n in range(num_tracks)]
    return {"traceEvents": [*tracks, *events]}


def _many_tracks(folder: Path, random: Random) -> Call:
    num_tracks = random.count(100, 10_000)
    more = {"ph": "X", "name": "optimizer", "tid": 0, "ts": 0.0, "dur": 5.0, "args": {"step": 0, "seq_id": 0}}
    events = [*_timeline_events(1000), *({**more, "pid": number} for number in range(num_tracks))]
    return _written_timeline(folder, json.dumps(_traced(num_tracks, events)).encode(), num_workers=num_tracks)


_MAKERS = (_sound, _many_steps, _one_message, _damaged, _false_sizes, _many_tracks)
KINDS = (
    *kinds_of("wia", _FORMAT, _MAKERS, **_BOUNDS),
    *kinds("wia-timeline", _FORMAT, lambda _: _traced(4, _timeline_events(200)), _written_timeline, **_BOUNDS),
)
