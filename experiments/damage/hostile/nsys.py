"""Exports of Nsight Systems that somebody made up, as SQLite writes them and with pages changed by hand."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from experiments.damage.chance import Random
from experiments.damage.hostile.engine import Call, kinds_of, secret_file

_FORMAT = "exports of Nsight Systems"
_PAGE = 4096
_KERNELS, _LAUNCHES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
_TABLES = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    _KERNELS: "start, end, deviceId, correlationId, globalPid, shortName",
    _LAUNCHES: "start, end, correlationId, globalTid",
    "NVTX_EVENTS": "start, end, eventType, text TEXT, textId, globalTid",
}
_PID = 1 << 24
Rows = Iterable[Sequence[Any]]


def _statements(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def _kernel(number: int) -> tuple[Any, ...]:
    return 10 * number, 10 * number + 5, 0, number + 1, _PID, 1


def _range(number: int, text: Any = "step 1", text_id: Any = None, pid: int = _PID) -> tuple[Any, ...]:
    return number, number + 1, 59, text, text_id, pid


def _export(folder: Path, *statements: str, num_kernels: int = 10, **tables: Rows) -> Path:
    """Write an export with rows of tables, after statements that replace tables or add to them."""
    path = folder / "export.sqlite"
    created = [f"CREATE TABLE {name} ({columns})" for name, columns in _TABLES.items()]
    _statements(path, f"PRAGMA page_size = {_PAGE}", *created, *statements)
    if num_kernels:
        tables = {_KERNELS: map(_kernel, range(num_kernels)), **tables}
    with closing(sqlite3.connect(path)) as connection:
        for name, rows in tables.items():
            rows = list(rows)
            connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        connection.commit()
    return path


def _call(path: Path, **expected: Any) -> Call:
    arguments = ("import", "nsys", str(path), "--run-dir", str(path.with_name("run")))
    return Call(arguments=arguments, num_bytes=path.lstat().st_size, **expected)


def _one_name(folder: Path, random: Random) -> Call:
    letters = random.one("step 1", "step ", "x", "nccl_", "_")
    names = [(1, letters * (random.count(100_000, 2_000_000) // len(letters)))]
    ranges = (_range(number, None, 1) for number in range(4000))
    return _call(_export(folder, num_kernels=4000, StringIds=names, NVTX_EVENTS=ranges))


def _names(folder: Path, random: Random) -> Call:
    size = random.count(1000, 60_000)
    names = [(number, f"nccl{'iter' * (size // 4)} {number}") for number in range(1, 30)]
    ranges = (_range(number, "iter " * (size // 100)) for number in range(1000))
    return _call(_export(folder, num_kernels=30, StringIds=names, NVTX_EVENTS=ranges))


def _default_text(folder: Path, random: Random) -> Call:
    """Rows that are older than a column have its default, which the file has once."""
    text = "step " * random.count(10_000, 150_000)
    statements = ("DROP TABLE NVTX_EVENTS", "CREATE TABLE NVTX_EVENTS (start, end, eventType, textId, globalTid)")
    path = _export(folder, *statements, NVTX_EVENTS=[(number, number + 1, 59, None, _PID) for number in range(20_000)])
    _statements(path, f"ALTER TABLE NVTX_EVENTS ADD COLUMN text TEXT DEFAULT '{text}'")
    return _call(path)


def _many_gpus(folder: Path, random: Random) -> Call:
    is_one_process = random.maybe()
    count = random.count(50, 30_000)
    kernels = [(n, n + 1, n if is_one_process else 0, n, _PID * (1 if is_one_process else n), 1) for n in range(count)]
    launches = [(number, number + 1, number, _PID) for number in range(count)]
    return _call(_export(folder, **{_KERNELS: kernels, _LAUNCHES: launches}))


def _all_gpus(folder: Path, random: Random) -> Call:
    """As many GPUs as a process may have, all of which get its many launches and ranges."""
    count, texts = random.count(5000, 20_000), ("step 1", "forward", "optimizer", "data")
    kernels = [(number, number + 1, number % 16, number + 1, _PID, 1) for number in range(64)]
    launches = [(number, number + 1, number + 1, _PID) for number in range(count)]
    ranges = [_range(number, texts[number % 4]) for number in range(count)]
    return _call(_export(folder, **{_KERNELS: kernels, _LAUNCHES: launches, "NVTX_EVENTS": ranges}))


def _numbers(folder: Path, random: Random) -> Call:
    values = (None, "soon", b"\xff" * 9, 1e308, -1e308, float("inf"), (1 << 63) - 1, -(1 << 63), "9" * 5000, -1, 2.5)
    tables = {_KERNELS: [[*_kernel(n)] for n in range(2000)], "NVTX_EVENTS": [[*_range(n)] for n in range(2000)]}
    row = random.of(random.of([*tables.values()]))
    row[random.count(0, len(row))] = random.of(values)
    return _call(_export(folder, StringIds=[(1, "k")], **tables))


def _view(folder: Path, random: Random) -> Call:
    table = random.of([*_TABLES])
    numbers = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT x AS start, x AS end, x AS id"
    view = f"CREATE VIEW {table} AS {numbers}, x AS value, x AS deviceId, x AS correlationId, x AS globalTid FROM n"
    return _call(_export(folder, f"DROP TABLE {table}", view, num_kernels=0 if table == _KERNELS else 10))


def _virtual(folder: Path, random: Random) -> Call:
    statements = (f"DROP TABLE {_KERNELS}", f"CREATE VIRTUAL TABLE {_KERNELS} USING fts4(start, end, deviceId)")
    return _call(_export(folder, *statements, num_kernels=0), codes=frozenset({2}))


def _generated(folder: Path, random: Random) -> Call:
    text = f"hex(zeroblob({random.count(1 << 20, 1 << 28)} * (start > 9)))"
    path = _export(
        folder,
        "DROP TABLE NVTX_EVENTS",
        f"CREATE TABLE NVTX_EVENTS (start, end, globalTid, textId, text TEXT AS ({text}))",
        *(f"INSERT INTO NVTX_EVENTS (start, end, globalTid) VALUES ({n % 9}, {n + 1}, {_PID})" for n in range(1000)),
    )
    _statements(
        path,
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET sql = replace(sql, '(start > 9)', '1') WHERE name = 'NVTX_EVENTS'",
    )
    return _call(path)


def _statement(folder: Path, random: Random) -> Call:
    columns = ", ".join(f"c{number} {'x' * random.count(1000, 5000)}" for number in range(400))
    return _call(_export(folder, f"CREATE TABLE other ({columns})"))


def _pages(folder: Path, random: Random) -> tuple[Path, bytearray, list[int], list[int]]:
    """Return an export, its bytes, and where its inner pages and leaves of tables begin."""
    path = _export(folder, num_kernels=random.count(20_000, 60_000))
    pages = bytearray(path.read_bytes())
    inner, leaves = ([at for at in range(_PAGE, len(pages), _PAGE) if pages[at] == kind] for kind in (5, 13))
    return path, pages, inner, leaves


def _same_pages(folder: Path, random: Random) -> Call:
    """Inner pages of a table whose children are all one page, level by level: rows without end."""
    path, pages, inner, leaves = _pages(folder, random)
    for level in range(random.count(2, 12)):
        page = bytearray(pages[inner[0] : inner[0] + _PAGE])
        child = (leaves[0] if not level else len(pages) - _PAGE) // _PAGE + 1
        page[8:12] = child.to_bytes(4, "big")
        for cell in range(int.from_bytes(page[3:5], "big")):
            at = int.from_bytes(page[12 + 2 * cell : 14 + 2 * cell], "big")
            page[at : at + 4] = child.to_bytes(4, "big")
        pages += page
    pages[inner[0] : inner[0] + _PAGE] = pages[-_PAGE:]
    pages[28:32] = (len(pages) // _PAGE).to_bytes(4, "big")
    path.write_bytes(bytes(pages))
    return _call(path)


def _circle(folder: Path, random: Random) -> Call:
    """An inner page that is its own child."""
    path, pages, inner, _ = _pages(folder, random)
    pages[inner[0] + 8 : inner[0] + 12] = (inner[0] // _PAGE + 1).to_bytes(4, "big")
    path.write_bytes(bytes(pages))
    return _call(path)


def _bits(folder: Path, random: Random) -> Call:
    path = _export(folder, num_kernels=5000, StringIds=[(1, "k")])
    path.write_bytes(random.changed(path.read_bytes(), 200))
    return _call(path)


def _beside(folder: Path, random: Random) -> Call:
    """Journals beside the export that belong to others, or lead elsewhere."""
    path = _export(folder, num_kernels=100)
    for end in ("-wal", "-journal", "-shm"):
        random.one(lambda place: place.symlink_to(secret_file()), os.mkfifo)(Path(f"{path}{end}"))
    return _call(path, codes=frozenset({0}))


def _no_file(folder: Path, random: Random) -> Call:
    path = folder / "export.sqlite"
    random.one(lambda path: path.symlink_to("/dev/zero"), os.mkfifo)(path)
    return _call(path, codes=frozenset({2}))


def _processes(folder: Path, random: Random) -> Call:
    """Steps of processes without a GPU, and of names without end."""
    ranges = [_range(n, f"level {n} step {n}", None, _PID * (n + 1)) for n in range(random.count(1000, 20_000))]
    kernels = [(*_kernel(number)[:4], None, 1) for number in range(100)]
    return _call(_export(folder, **{_KERNELS: kernels}, NVTX_EVENTS=ranges))


_MAKERS = (
    *(_one_name, _names, _default_text, _many_gpus, _all_gpus, _numbers, _view, _virtual),
    *(_generated, _statement, _same_pages, _circle, _bits, _beside, _no_file, _processes),
)
KINDS = kinds_of("nsys", _FORMAT, _MAKERS)
