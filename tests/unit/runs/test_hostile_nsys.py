"""Exports of Nsight Systems that somebody made up: what is read of one is linear in its bytes."""

from __future__ import annotations

import os
import sqlite3
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from hpcpace.core.errors import TraceError
from hpcpace.runs.imports import nsys
from hpcpace.runs.imports.nsys import import_nsys

KERNELS, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
TABLES = {
    "StringIds": "id INTEGER PRIMARY KEY, value",
    KERNELS: "start, end, deviceId, correlationId, globalPid, shortName",
    RUNTIME: "start, correlationId, globalTid",
    "NVTX_EVENTS": "start, end, text, textId, globalTid",
}
PID = 1 << 24


def export(tmp_path: Path, *statements: str, **tables: Sequence[Sequence[Any]]) -> Path:
    """Return an export with one kernel, and rows of tables."""
    path = tmp_path / "export.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        for name, columns in TABLES.items():
            connection.execute(f"CREATE TABLE {name} ({columns})")
        for name, rows in {KERNELS: [(1, 2, 0, 1, PID, 1)], **tables}.items():
            connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return path


def ranges(count: int, text: Any = None, text_id: Any = None) -> list[tuple[Any, ...]]:
    return [(number, number + 1, text, text_id, PID) for number in range(count)]


def test_a_name_to_which_many_rows_refer_is_read_once(tmp_path: Path) -> None:
    path = export(tmp_path, StringIds=[(1, "step " * 100_000)], NVTX_EVENTS=ranges(4000, text_id=1))
    begin_s = time.process_time()
    tracemalloc.start()
    try:
        found = import_nsys(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert not len(found.ranks[0].tables["steps"])
    assert time.process_time() - begin_s < 2


@pytest.mark.parametrize("text", ["x" * 300 + " step 7", "step " + "1" * 300], ids=["step at the end", "cut number"])
def test_a_name_that_is_too_long_is_no_step(tmp_path: Path, text: str) -> None:
    found = import_nsys(export(tmp_path, NVTX_EVENTS=ranges(3, text)))
    assert not len(found.ranks[0].tables["steps"])


def test_a_text_of_megabytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="string or blob too big"):
        import_nsys(export(tmp_path, StringIds=[(1, "x" * (2 << 20))]))


def test_a_default_that_many_rows_have_is_no_text_of_each(tmp_path: Path) -> None:
    default = f"ALTER TABLE NVTX_EVENTS ADD COLUMN other TEXT DEFAULT '{'x' * 50_000}'"
    path = export(tmp_path, "ALTER TABLE NVTX_EVENTS DROP COLUMN text", default, NVTX_EVENTS=ranges(5000, text_id=1))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE NVTX_EVENTS RENAME COLUMN other TO text")
        connection.commit()
    with pytest.raises(TraceError, match="NVTX_EVENTS has more text than the file has bytes"):
        import_nsys(path)


@each_case(
    "row",
    [
        ("soon", 2, 0, 1, PID, 1),
        (1, None, 0, 1, PID, 1),
        (1, 1e300, 0, 1, PID, 1),
        (1, (1 << 63) - 1, 0, 1, PID, 1),
        (-(1 << 63), 2, 0, 1, PID, 1),
        (1, 2, b"0", 1, PID, 1),
        (1, 2, 0, 1.5, PID, 1),
        (1, 2, 0, 1, "9" * 100_000, 1),
    ],
    ids=lambda _: "",
)
def test_a_value_of_another_kind_is_refused_and_shown(tmp_path: Path, row: tuple[Any, ...]) -> None:
    for name in ("", "ncclDevKernel_AllReduce_Sum"):
        path = export(tmp_path, StringIds=[(1, name)], **{KERNELS: [row]})
        with pytest.raises(TraceError, match="is no time or number") as refused:
            import_nsys(path)
        assert len(str(refused.value)) < 250 + len(str(path))
        path.unlink()


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 2, number, 1, PID, 1) for number in range(17)],
        [(1, 2, 0, 1, PID * number, 1) for number in range(1, 130)],
    ],
    ids=["of a process", "of all"],
)
def test_more_gpus_than_a_host_has_are_refused(tmp_path: Path, rows: Any) -> None:
    with pytest.raises(TraceError, match="more than 128 GPUs and processes, or 16 GPUs of a process"):
        import_nsys(export(tmp_path, **{KERNELS: rows}))


def test_pages_that_lead_back_to_themselves_end(tmp_path: Path) -> None:
    """An inner page of the table is its own last child, again and again."""
    path = export(tmp_path, **{KERNELS: [(n, n + 1, 0, n, PID, 1) for n in range(3000)]})
    pages, size = bytearray(path.read_bytes()), 4096
    at = next(at for at in range(size, len(pages), size) if pages[at] == 5)
    pages[at + 8 : at + 12] = (at // size + 1).to_bytes(4, "big")
    path.write_bytes(bytes(pages))
    with pytest.raises(TraceError, match=r"more rows than its bytes can hold|malformed"):
        import_nsys(path)


def test_a_query_that_never_yields_a_row_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys, "_STEPS_PER_BYTE", 0)
    monkeypatch.setattr(nsys, "_FREE_STEPS", 1)
    monkeypatch.setattr(nsys, "_LOOK_EVERY", 1)
    with pytest.raises(TraceError, match="interrupted"):
        import_nsys(export(tmp_path))


def test_a_virtual_table_is_not_read_however_it_is_written_down(tmp_path: Path) -> None:
    path = export(tmp_path, "DROP TABLE NVTX_EVENTS", "CREATE VIRTUAL TABLE NVTX_EVENTS USING fts4(start, end, text)")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = replace(sql, 'E V', 'E /**/ V') WHERE name = 'NVTX_EVENTS'")
        connection.commit()
    with nsys.open_export(path) as found:
        assert found.has(KERNELS, "start") and not found.has("NVTX_EVENTS", "start")


def test_files_beside_an_export_are_not_opened(tmp_path: Path) -> None:
    path = export(tmp_path)
    for end in ("-wal", "-shm", "-journal"):
        os.mkfifo(f"{path}{end}")
    assert len(import_nsys(path).ranks) == 1


@each_case("kind", ["link", "fifo", "folder"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "given.sqlite"
    if kind == "link":
        path.symlink_to(export(tmp_path))
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(TraceError, match=r"no regular file|symbolic link"):
        import_nsys(path)
