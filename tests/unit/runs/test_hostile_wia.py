"""Traces of the what-if analysis that were made to take memory or time, or to be what no trace is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from cases import each_case
from pyarrow import parquet

from hpcpace.core.errors import TraceError
from hpcpace.runs.imports import wia
from hpcpace.runs.imports.imported_run import write_run
from hpcpace.runs.imports.wia import COLUMNS, import_wia

DATA = Path(__file__).parents[2] / "data" / "imports"
WHOLE = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "gmc", "mb_id")


def _columns(num_rows: int, **changed: Any) -> dict[str, Any]:
    """Return the columns of a trace of one worker."""
    times = np.arange(num_rows) * 1e-3
    columns = {name: np.zeros(num_rows, np.int64) for name in WHOLE}
    return {
        **columns,
        "start_ts": times,
        "duration": times * 0 + 1e-3,
        "optype": ["forward-compute"] * num_rows,
        **changed,
    }


def _write(path: Path, columns: dict[str, Any], **how: Any) -> Path:
    parquet.write_table(pa.table({name: columns[name] for name in COLUMNS if name in columns}), path, **how)
    return path


def _long_texts(num_rows: int) -> Any:
    """Return one text of a megabyte for all rows, as a dictionary has it."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), pa.array(["x" * 1_000_000]))


def test_a_long_text_in_every_row_is_kept_once_and_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wia, "_MAX_BYTES", 128 << 20)
    texts = pa.chunked_array([_long_texts(60_000), pa.array(["forward-compute"]).dictionary_encode()])
    path = _write(tmp_path / "trace.parquet", _columns(60_001, optype=texts))
    assert path.stat().st_size < 500_000
    found = import_wia(path)
    assert len(found.ranks[0].tables["phases"]) == 1
    assert sum(map(len, found.source.notes)) < 2_000


def test_what_takes_more_memory_to_decode_than_a_trace_is_refused_with_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wia, "_MAX_BYTES", 64 << 20)
    texts = pa.array(["x" * (80 << 20)])
    path = _write(tmp_path / "trace.parquet", _columns(1, optype=texts), compression="zstd", use_dictionary=False)
    with pytest.raises(TraceError, match=f"has {path.stat().st_size} bytes and takes more than 64 MiB to decode"):
        import_wia(path)


def _nested(num_rows: int) -> dict[str, Any]:
    return _columns(num_rows, seq_id=pa.array([[[1]]] * num_rows))


def _dates(num_rows: int) -> dict[str, Any]:
    return _columns(num_rows, step=pa.array([0] * num_rows, pa.timestamp("ns")))


def _bytes(num_rows: int) -> dict[str, Any]:
    return _columns(num_rows, optype=pa.array([b"\xff\xfe"] * num_rows))


def _texts(num_rows: int) -> dict[str, Any]:
    return _columns(num_rows, duration=["1" * 1000] * num_rows)


def _kinds(num_rows: int) -> dict[str, Any]:
    return _columns(num_rows, optype=[f"kind {number}" for number in range(num_rows)])


def _workers(num_rows: int) -> dict[str, Any]:
    return _columns(num_rows, dp_rank=np.arange(num_rows), rank=np.arange(num_rows))


def _long_steps(num_rows: int) -> dict[str, Any]:
    return _columns(num_rows, step=np.arange(num_rows), duration=np.full(num_rows, 9e5))


def _huge(num_rows: int) -> dict[str, Any]:
    return _columns(num_rows, mc=np.full(num_rows, 1 << 62))


def _without_texts(num_rows: int) -> dict[str, Any]:
    return {name: values for name, values in _columns(num_rows).items() if name != "optype"}


@each_case(
    ("make", "message"),
    [
        (_without_texts, "lacks the columns optype"),
        (_nested, "has a column seq_id of 'list<"),
        (_dates, r"has a column step of 'timestamp\[ns\]', not of numbers"),
        (_bytes, "has a column optype of 'binary', not of texts"),
        (_texts, "has a column duration of 'string', not of numbers"),
        (_kinds, "has 3000 kinds of operations, more than 1024"),
        (_workers, "has 3000 workers"),
        (_long_steps, "its steps take .* in all; is it damaged"),
        (_huge, "row 0 has values that no trace has"),
    ],
)
def test_columns_that_no_trace_has_are_refused(
    tmp_path: Path, make: Callable[[int], dict[str, Any]], message: str
) -> None:
    path = _write(tmp_path / "trace.parquet", make(3000))
    with pytest.raises(TraceError, match=message):
        import_wia(path)


def test_rows_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "trace.parquet", _columns(1_200_001))
    assert path.stat().st_size < 20_000_000
    with pytest.raises(TraceError, match="has 1200001 rows, more than 1200000: split it by steps"):
        import_wia(path)


def test_members_of_groups_over_all_ranks_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace file of each rank lists the members of all groups of the rank."""
    monkeypatch.setattr(wia, "_MAX_GROUP_ROWS", 100)
    path = _write(tmp_path / "trace.parquet", _workers(11) | {"optype": ["optimizer-clip-main-grad"] * 11})
    with pytest.raises(TraceError, match="121 members of groups over all ranks, more than 100"):
        import_wia(path)


# -- timelines


def _timeline(**changed: Any) -> list[dict[str, Any]]:
    names = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "PP rank 0, TP rank 0"}}
    numbers = {"step": 0, "mb_id": 0, "seq_id": 0, "model_chunk": 0}
    work = {"ph": "X", "name": "forward-compute", "pid": 0, "tid": 0, "ts": 1.0, "dur": 2.0}
    args = {**numbers, **{name: value for name, value in changed.items() if name in numbers}}
    return [names, {**work, **{name: value for name, value in changed.items() if name in work}, "args": args}]


@each_case("value", [True, None, -1, 0.5, 1e300, 1 << 62, 10**300, "9" * 20, "\ud800\x1b[1m", [], {"a": [1]}])
@each_case("field", ["step", "mb_id", "seq_id", "model_chunk", "pid", "tid", "ts", "dur", "name"])
def test_values_of_any_kind_in_an_event_make_a_run_or_an_error(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps([*_timeline(), *_timeline(**{field: value})]))
    try:
        import_wia(path)
    except TraceError as error:
        assert str(path) in str(error) and "\x1b" not in str(error)


def test_names_of_events_are_kept_once_and_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps([*_timeline(), *(one for _ in range(3) for one in _timeline(name="x" * 100_000))]))
    rows = wia.read_wia(path).rows
    assert rows.optype.str.len().max() <= wia.MAX_NAME_LETTERS
    path.write_text(json.dumps([one for number in range(1_100) for one in _timeline(name=f"kind {number}")]))
    with pytest.raises(TraceError, match="more than 1024 kinds of operations"):
        import_wia(path)


# -- places


def test_links_in_a_folder_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    folder.mkdir()
    (folder / "trace-ST.parquet").symlink_to(DATA / "trace-ST.parquet")
    with pytest.raises(TraceError, match=r"trace-ST.parquet: it is a symbolic link, which is not followed"):
        import_wia(folder)


def test_a_link_to_facts_beside_a_trace_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "trace-ST.parquet").write_bytes((DATA / "trace-ST.parquet").read_bytes())
    (tmp_path / "meta-ST.yaml").symlink_to(DATA / "meta-ST.yaml")
    found = import_wia(tmp_path / "trace-ST.parquet")
    assert "GPUs" not in found.source.notes[0] and len(found.source.files) == 1
    write_run(tmp_path / "run", found)


def test_a_link_that_the_user_names_is_followed(tmp_path: Path) -> None:
    (tmp_path / "mine.parquet").symlink_to(DATA / "trace-ST.parquet")
    assert len(import_wia(tmp_path / "mine.parquet").ranks) == 8


def test_a_table_of_one_worker_and_step_is_read(tmp_path: Path) -> None:
    path = _write(tmp_path / "trace.parquet", _columns(3))
    assert pd.DataFrame(import_wia(path).ranks[0].tables["phases"]).shape[0] == 3
