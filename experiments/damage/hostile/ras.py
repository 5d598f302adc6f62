"""Reports of NCCL's RAS that somebody made up, beside the dumps of a small job."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.damage.hostile.flight_recorder import dump, entry, write
from experiments.damage.hostile.kind import SECRET, Call, Hostile, Random

_FORMAT = "reports of NCCL RAS"
_WORLD = 4
Table = dict[str, Any]


def _rank(rank: int, **changes: Any) -> Table:
    return {
        "rank": rank,
        "host": "10.0.0.1",
        "pid": 100 + rank,
        "cuda_dev": rank,
        "nvml_dev": rank,
        "status": {"unresponsive": False, "considered_dead": False},
        "collective_counts": {"Broadcast": 0, "AllReduce": 6},
        **changes,
    }


def _communicator(ranks: list[Any], missing: list[Any] | None = None, **changes: Any) -> Table:
    return {"hash": "0x1", "size": _WORLD, "ranks": ranks, "missing_ranks": missing or [], **changes}


def _report(*communicators: Any, **changes: Any) -> Table:
    return {
        "nccl_version": "2.28.9",
        "timestamp": "2026-11-24 09:00:00",
        "communicators": [_communicator([_rank(rank) for rank in range(_WORLD)]), *communicators],
        **changes,
    }


def _call(folder: Path, content: Any, **expected: Any) -> Call:
    dumps, path = folder / "dumps", folder / "ras.json"
    dumps.mkdir()
    num_bytes = write(dumps, {f"rank_{rank}": dump([entry(0)] if rank != 2 else [], world=_WORLD) for rank in range(4)})
    if content is not None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        path.write_bytes(data)
        num_bytes += len(data)
    return Call(arguments=("hang", str(dumps), "--ras", str(path)), num_bytes=num_bytes, **expected)


def _deep(folder: Path, random: Random) -> Call:
    sign = ("[", '{"a":', "[[],", '{"":0,"a":')[int(random.integers(4))]
    return _call(folder, ('{"communicators": ' + sign * int(random.integers(100_000, 400_000))).encode())


def _long_number(folder: Path, random: Random) -> Call:
    text = json.dumps(_report()).replace('"pid": 102', f'"pid": {"9" * int(random.integers(30, 2_000_000))}')
    return _call(folder, text.encode(), codes=frozenset({2}))


def _long_text(folder: Path, random: Random) -> Call:
    text = ("x", "\x1b[2J", "\U0001f600", "\u202e", "\ud800")[int(random.integers(5))]
    text *= int(random.integers(100, 500_000))
    changes: list[Table] = [{"host": text}, {"collective_counts": {text: 1}}, {"pid": text}, {"status": text}]
    ranks = [_rank(rank, **changes[int(random.integers(4))]) for rank in range(_WORLD)]
    return _call(folder, _report(_communicator(ranks), nccl_version=text[: int(random.integers(300))]))


def _many_communicators(folder: Path, random: Random) -> Call:
    count = int(random.integers(10_000, 50_000))
    return _call(folder, _report(*[_communicator([], size=1)] * count, *[_communicator([_rank(1)])] * 3000))


def _many_ops(folder: Path, random: Random) -> Call:
    count = int(random.integers(1000, 10_000))
    ranks = [_rank(rank % _WORLD, collective_counts={f"op{rank}": rank}) for rank in range(count)]
    return _call(folder, _report(_communicator(ranks)))


def _many_ranks(folder: Path, random: Random) -> Call:
    count = int(random.integers(5000, 15_000))
    ranks = [_rank(rank, collective_counts={f"op{op}": rank % 2 for op in range(8)}) for rank in range(count)]
    return _call(folder, _report(_communicator(ranks, [_rank(n % 4, pid=n) for n in range(count)], size=count)))


def _twice(folder: Path, random: Random) -> Call:
    keys = ",".join([f'"rank": {int(random.integers(10))}, "AllReduce": 1'] * int(random.integers(10_000, 60_000)))
    text = json.dumps(_report()).replace('"rank": 2', keys)
    return _call(folder, text.encode())


def _commas(folder: Path, random: Random) -> Call:
    text = '"nvml_dev": ' + "1" * int(random.integers(10, 100_000)) + " " * int(random.integers(10, 100_000))
    return _call(folder, ('{"a": [' + f"{{{text}}}," * int(random.integers(2, 20))).encode(), codes=frozenset({2}))


def _wrong_values(folder: Path, random: Random) -> Call:
    values = (None, True, -1, 1 << 64, 1e308, float("nan"), float("inf"), [], {}, "", [[[[0]]]], {"a": 1}, 10**4000)
    value = values[int(random.integers(len(values)))]
    rank = _rank(2)
    rank[(*rank,)[int(random.integers(len(rank)))]] = value
    report = _report(_communicator([rank], [rank]))
    if random.integers(2):
        report[(*report,)[int(random.integers(len(report)))]] = value
    return _call(folder, report)


def _bytes(folder: Path, random: Random) -> Call:
    data = bytearray(json.dumps(_report(*[_communicator([_rank(1)])] * 500)).encode())
    for _ in range(int(random.integers(1, 30))):
        data[int(random.integers(len(data)))] = int(random.integers(256))
    return _call(folder, bytes(data))


def _no_file(folder: Path, random: Random) -> Call:
    path, secret = folder / "ras.json", folder / "secret"
    if random.integers(2):
        os.mkfifo(path)
    else:
        secret.write_text(json.dumps({"nccl_version": SECRET}))
        path.symlink_to(secret)
    return _call(folder, None, codes=frozenset({2}))


_MAKERS: dict[str, Callable[[Path, Random], Call]] = {
    "deep": _deep,
    "long-number": _long_number,
    "long-text": _long_text,
    "many-communicators": _many_communicators,
    "many-ops": _many_ops,
    "many-ranks": _many_ranks,
    "twice": _twice,
    "commas": _commas,
    "wrong-values": _wrong_values,
    "bytes": _bytes,
    "no-file": _no_file,
}
KINDS = tuple(Hostile(name=f"ras-{name}", format=_FORMAT, make=make) for name, make in _MAKERS.items())
