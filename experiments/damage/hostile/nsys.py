"""Exports of Nsight Systems that somebody made up, as SQLite writes them and with pages changed by hand."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from experiments.damage.chance import Random
from experiments.damage.hostile.engine import Call, kinds_of

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


def _bits(folder: Path, random: Random) -> Call:
    path = _export(folder, num_kernels=5000, StringIds=[(1, "k")])
    path.write_bytes(random.changed(path.read_bytes(), 200))
    return _call(path)


def _processes(folder: Path, random: Random) -> Call:
    """Steps of processes without a GPU, and of names without end."""
    ranges = [_range(n, f"level {n} step {n}", None, _PID * (n + 1)) for n in range(random.count(1000, 20_000))]
    kernels = [(*_kernel(number)[:4], None, 1) for number in range(100)]
    return _call(_export(folder, **{_KERNELS: kernels}, NVTX_EVENTS=ranges))


_MAKERS = (_all_gpus, _numbers, _generated, _statement, _bits, _processes)
KINDS = kinds_of("nsys", _FORMAT, _MAKERS)
