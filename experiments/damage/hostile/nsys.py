"""Exports of Nsight Systems that somebody made up, as SQLite writes them and with pages changed by hand."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from experiments.damage.hostile.engine import SECRET, Call, Random, kinds_of, one_of, with_changed_bytes

_FORMAT = "exports of Nsight Systems"
_PAGE = 4096
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_TABLES = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    _KERNELS: "start, end, deviceId, correlationId, globalPid, shortName",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, correlationId, globalTid",
    "NVTX_EVENTS": "start, end, eventType, text TEXT, textId, globalTid",
}
_PID = 1 << 24
Rows = Iterable[Sequence[Any]]


def _export(folder: Path, *statements: str, **tables: Rows) -> Path:
    """Write an export with rows of tables, after statements that replace tables or add to them."""
    path = folder / "export.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA page_size = {_PAGE}")
        for name, columns in _TABLES.items():
            connection.execute(f"CREATE TABLE {name} ({columns})")
        for statement in statements:
            connection.execute(statement)
        for name, rows in tables.items():
            rows = list(rows)
            connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        connection.commit()
    return path


def _call(folder: Path, path: Path, **expected: Any) -> Call:
    size = path.lstat().st_size
    return Call(arguments=("import", "nsys", str(path), "--run-dir", str(folder / "run")), num_bytes=size, **expected)


def _kernels(count: int, name: int = 1) -> list[tuple[Any, ...]]:
    return [(10 * number, 10 * number + 5, 0, number + 1, _PID, name) for number in range(count)]


def _one_name(folder: Path, random: Random) -> Call:
    letters = one_of(("step 1", "step ", "x", "nccl_", "_"), random)
    text = letters * int(random.integers(100_000, 2_000_000) // len(letters))
    rows = [(number, number + 1, 59, None, 1, _PID) for number in range(4000)]
    return _call(folder, _export(folder, StringIds=[(1, text)], **{_KERNELS: _kernels(4000)}, NVTX_EVENTS=rows))


def _names(folder: Path, random: Random) -> Call:
    size = int(random.integers(1000, 60_000))
    names = [(number, f"nccl{'iter' * (size // 4)} {number}") for number in range(1, 30)]
    rows = [(number, number + 1, 59, "iter " * (size // 100), None, _PID) for number in range(1000)]
    return _call(folder, _export(folder, StringIds=names, **{_KERNELS: _kernels(30)}, NVTX_EVENTS=rows))


def _default_text(folder: Path, random: Random) -> Call:
    """Rows that are older than a column have its default, which the file has once."""
    text = "step " * int(random.integers(10_000, 150_000))
    rows = [(number, number + 1, 59, None, _PID) for number in range(20_000)]
    path = _export(
        folder,
        "DROP TABLE NVTX_EVENTS",
        "CREATE TABLE NVTX_EVENTS (start, end, eventType, textId, globalTid)",
        **{_KERNELS: _kernels(10)},
        NVTX_EVENTS=rows,
    )
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"ALTER TABLE NVTX_EVENTS ADD COLUMN text TEXT DEFAULT '{text}'")
        connection.commit()
    return _call(folder, path)


def _many_gpus(folder: Path, random: Random) -> Call:
    is_one_process = bool(random.integers(2))
    count = int(random.integers(50, 30_000))
    rows = [
        (number, number + 1, number if is_one_process else 0, number, _PID * (1 if is_one_process else number), 1)
        for number in range(count)
    ]
    launches = [(number, number + 1, number, _PID) for number in range(count)]
    return _call(folder, _export(folder, **{_KERNELS: rows}, CUPTI_ACTIVITY_KIND_RUNTIME=launches))


def _all_gpus(folder: Path, random: Random) -> Call:
    """As many GPUs as a process may have, all of which get its many launches and ranges."""
    kernels = [(number, number + 1, number % 16, number + 1, _PID, 1) for number in range(64)]
    count = int(random.integers(5000, 20_000))
    launches = [(number, number + 1, number + 1, _PID) for number in range(count)]
    texts = ("step 1", "forward", "optimizer", "data")
    ranges = [(number, number + 2, 59, texts[number % 4], None, _PID) for number in range(count)]
    tables = {_KERNELS: kernels, "CUPTI_ACTIVITY_KIND_RUNTIME": launches, "NVTX_EVENTS": ranges}
    return _call(folder, _export(folder, **tables))


def _numbers(folder: Path, random: Random) -> Call:
    values = (None, "soon", b"\xff" * 9, 1e308, -1e308, float("inf"), (1 << 63) - 1, -(1 << 63), "9" * 5000, -1, 2.5)
    kernels = [list(row) for row in _kernels(2000)]
    ranges = [[number, number + 1, 59, "step 1", None, _PID] for number in range(2000)]
    rows = one_of((kernels, ranges), random)
    row = one_of(rows, random)
    row[int(random.integers(len(row)))] = one_of(values, random)
    return _call(folder, _export(folder, StringIds=[(1, "k")], **{_KERNELS: kernels}, NVTX_EVENTS=ranges))


def _view(folder: Path, random: Random) -> Call:
    table = (*_TABLES,)[int(random.integers(len(_TABLES)))]
    numbers = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT x AS start, x AS end, x AS id"
    view = f"CREATE VIEW {table} AS {numbers}, x AS value, x AS deviceId, x AS correlationId, x AS globalTid FROM n"
    tables = {_KERNELS: _kernels(10)} if table != _KERNELS else {}
    return _call(folder, _export(folder, f"DROP TABLE {table}", view, **tables))


def _virtual(folder: Path, random: Random) -> Call:
    del random
    statements = (f"DROP TABLE {_KERNELS}", f"CREATE VIRTUAL TABLE {_KERNELS} USING fts4(start, end, deviceId)")
    return _call(folder, _export(folder, *statements), codes=frozenset({2}))


def _generated(folder: Path, random: Random) -> Call:
    size = int(random.integers(1 << 20, 1 << 28))
    statements = (
        "DROP TABLE NVTX_EVENTS",
        f"CREATE TABLE NVTX_EVENTS (start, end, globalTid, textId, text TEXT AS (hex(zeroblob({size} * (start > 9)))))",
    )
    rows = [(number % 9, number + 1, _PID) for number in range(1000)]
    path = _export(folder, *statements, **{_KERNELS: _kernels(10)})
    with closing(sqlite3.connect(path)) as connection:
        connection.executemany("INSERT INTO NVTX_EVENTS (start, end, globalTid) VALUES (?, ?, ?)", rows)
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = replace(sql, '(start > 9)', '1') WHERE name = 'NVTX_EVENTS'")
        connection.commit()
    return _call(folder, path)


def _statement(folder: Path, random: Random) -> Call:
    columns = ", ".join(f"c{number} {'x' * int(random.integers(1000, 5000))}" for number in range(400))
    return _call(folder, _export(folder, f"CREATE TABLE other ({columns})", **{_KERNELS: _kernels(10)}))


def _same_pages(folder: Path, random: Random) -> Call:
    """Inner pages of a table whose children are all one page, level by level: rows without end."""
    path = _export(folder, **{_KERNELS: _kernels(int(random.integers(20_000, 60_000)))})
    pages = bytearray(path.read_bytes())
    inner = [at for at in range(_PAGE, len(pages), _PAGE) if pages[at] == 5]
    leaf = next(at for at in range(_PAGE, len(pages), _PAGE) if pages[at] == 13)
    for level in range(int(random.integers(2, 12))):
        page = bytearray(pages[inner[0] : inner[0] + _PAGE])
        child = (leaf if not level else len(pages) - _PAGE) // _PAGE + 1
        num_cells = int.from_bytes(page[3:5], "big")
        page[8:12] = child.to_bytes(4, "big")
        for cell in range(num_cells):
            at = int.from_bytes(page[12 + 2 * cell : 14 + 2 * cell], "big")
            page[at : at + 4] = child.to_bytes(4, "big")
        pages += page
    pages[inner[0] : inner[0] + _PAGE] = pages[-_PAGE:]
    pages[28:32] = (len(pages) // _PAGE).to_bytes(4, "big")
    path.write_bytes(bytes(pages))
    return _call(folder, path)


def _circle(folder: Path, random: Random) -> Call:
    """An inner page that is its own child."""
    path = _export(folder, **{_KERNELS: _kernels(int(random.integers(20_000, 60_000)))})
    pages = bytearray(path.read_bytes())
    at = next(at for at in range(_PAGE, len(pages), _PAGE) if pages[at] == 5)
    pages[at + 8 : at + 12] = (at // _PAGE + 1).to_bytes(4, "big")
    path.write_bytes(bytes(pages))
    return _call(folder, path)


def _bits(folder: Path, random: Random) -> Call:
    path = _export(folder, StringIds=[(1, "k")], **{_KERNELS: _kernels(5000)})
    path.write_bytes(with_changed_bytes(path.read_bytes(), 200, random))
    return _call(folder, path)


def _beside(folder: Path, random: Random) -> Call:
    """Journals beside the export that belong to others, or lead elsewhere."""
    path = _export(folder, **{_KERNELS: _kernels(100)})
    secret = folder / "secret"
    secret.write_text(SECRET)
    for end in ("-wal", "-journal", "-shm"):
        place = Path(f"{path}{end}")
        if random.integers(2):
            place.symlink_to(secret)
        else:
            os.mkfifo(place)
    return _call(folder, path, codes=frozenset({0}))


def _no_file(folder: Path, random: Random) -> Call:
    path = folder / "export.sqlite"
    if random.integers(2):
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return _call(folder, path, codes=frozenset({2}))


def _processes(folder: Path, random: Random) -> Call:
    """Steps of processes without a GPU, and of names without end."""
    count = int(random.integers(1000, 20_000))
    rows = [(n, n + 5, 59, f"level {n} step {n}", None, _PID * (n + 1)) for n in range(count)]
    kernels = [(*row[:4], None, 1) for row in _kernels(100)]
    return _call(folder, _export(folder, **{_KERNELS: kernels}, NVTX_EVENTS=rows))


_MAKERS = (
    *(_one_name, _names, _default_text, _many_gpus, _all_gpus, _numbers, _view, _virtual),
    *(_generated, _statement, _same_pages, _circle, _bits, _beside, _no_file, _processes),
)
KINDS = kinds_of("nsys", _FORMAT, _MAKERS)
