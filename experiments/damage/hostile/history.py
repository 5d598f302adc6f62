"""The index beside a folder of runs, as `hpcpace history` reads it, and folders of runs that are none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.damage.hostile.kind import SECRET, Call, Hostile, Random
from experiments.synthetic_run import SyntheticRun
from hpcpace.core.rundir import HISTORY_INDEX
from hpcpace.runs.history_index import indexed_runs, sealed

_FORMAT = "history index"
_Change = Callable[[dict[str, Any], Random], None]


def _size(random: Random, least: int, most: int) -> int:
    """Return a size by chance, as often below as above the geometric mean of its bounds."""
    return int(least * (most / least) ** random.random())


def _runs(folder: Path) -> None:
    """Write two runs, and the index of them."""
    for name in ("a", "b"):
        SyntheticRun(hosts=("n1", "n2"), num_ranks=2, num_steps=24).write(folder / name)
    indexed_runs(folder)


def _call(folder: Path, random: Random, *, says: tuple[str, ...] = ()) -> Call:
    command = ("history", "list")[int(random.integers(2))]
    size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink())
    return Call(
        arguments=(command, str(folder)), num_bytes=min(size, 1 << 27), says=says if command == "history" else ()
    )


def _text(random: Random) -> str:
    number = _size(random, 100_000, 4_000_000)
    begin = ("[", '{"runs":', '{"a":', "9", '"x', "[{},", '"\\u001b]0;a\\u0007')[int(random.integers(7))]
    return begin * (number // len(begin))


def _raw(folder: Path, random: Random) -> Call:
    """Return a call on an index of any text."""
    _runs(folder)
    (folder / HISTORY_INDEX).write_text(_text(random))
    return _call(folder, random, says=("2 runs",))


def _bits(folder: Path, random: Random) -> Call:
    """Return a call on an index of which some bytes were changed."""
    _runs(folder)
    content = bytearray((folder / HISTORY_INDEX).read_bytes())
    for place in random.integers(0, len(content), int(random.integers(1, 20))):
        content[place] = int(random.integers(256))
    (folder / HISTORY_INDEX).write_bytes(content)
    return _call(folder, random, says=("2 runs",))


def _planted(change: _Change) -> Callable[[Path, Random], Call]:
    """Return what makes a call on an index whose entries were changed, and that is sealed as if hpcpace wrote it."""

    def make(folder: Path, random: Random) -> Call:
        _runs(folder)
        runs = json.loads((folder / HISTORY_INDEX).read_bytes())["runs"]
        change(runs, random)
        (folder / HISTORY_INDEX).write_bytes(sealed(runs))
        return _call(folder, random, says=("2 runs",))

    return make


def _values(runs: dict[str, Any], random: Random) -> None:
    values: tuple[Any, ...] = (
        10**400,
        -1,
        float("nan"),
        float("inf"),
        None,
        [],
        {},
        "",
        "\x1b]0;a\x07",
        True,
        "x" * 99_999,
    )
    for entry in runs.values():
        for name in entry["row"]:
            if random.random() < 0.3:
                entry["row"][name] = values[int(random.integers(len(values)))]


def _entries(runs: dict[str, Any], random: Random) -> None:
    """Add entries of runs that are not there."""
    row = runs["a"]["row"]
    for number in range(_size(random, 100, 5_000)):
        runs[f"x{number}"] = {"stamp": runs["a"]["stamp"], "row": {**row, "run": f"x{number}"}, "problem": ""}


def _hosts(runs: dict[str, Any], random: Random) -> None:
    names = [f"n{number}" for number in range(_size(random, 1_000, 60_000))]
    for entry in runs.values():
        entry["row"] |= {"run": "c", "hosts": names, "slowness": dict.fromkeys(names, 1.0)}


def _nested(runs: dict[str, Any], random: Random) -> None:
    value: Any = 1
    for _ in range(_size(random, 100, 900)):
        value = [value] if random.integers(2) else {"a": value}
    runs["a"]["row"]["work"] = runs["b"]["stamp"] = value


def _others(runs: dict[str, Any], random: Random) -> None:
    """Let entries name the runs of others, or places outside."""
    for entry in runs.values():
        entry["row"]["run"] = ("b", "../..", "/etc", "")[int(random.integers(4))]


def _no_file(folder: Path, random: Random) -> Call:
    """Return a call where something that is no file has the name of the index, or of a record."""
    _runs(folder)
    (folder.parent / "secret").write_text(SECRET)
    places = (HISTORY_INDEX, "a/summary.json", "a/attempt-0/run.json", "b/attempt-0/result.json")
    path = folder / places[int(random.integers(len(places)))]
    path.unlink(missing_ok=True)
    (os.mkfifo, os.mkdir, lambda p: p.symlink_to("/dev/zero"), lambda p: p.symlink_to(folder.parent / "secret"))[
        int(random.integers(4))
    ](path)
    return _call(folder, random)


def _records(folder: Path, random: Random) -> Call:
    """Return a call on runs whose records are of any text."""
    _runs(folder)
    for name in ("summary.json", "attempt-0/run.json", "attempt-0/result.json"):
        (folder / "a" / name).write_text(_text(random))
    return _call(folder, random)


def _wrong_records(folder: Path, random: Random) -> Call:
    """Return a call on runs whose records have values of any kind."""
    _runs(folder)
    values = (10**400, 1e300, -1, None, [], {}, "x", "\x1b]0;a\x07" * 100, [[]] * 1000, True)

    def value() -> Any:
        return values[int(random.integers(len(values)))]

    world = {"world_size": value(), "samples_unit": value()}
    report = {"attempt": 0, "verdict": {"mode": value(), "headline": value()}, "world": world}
    report |= {"throughput": {"samples_per_s": value(), "mean_ns": value()}, "cut_off": {"not_closed": value()}}
    start = {"created_unix_ns": value(), "ranks": value(), "config": value(), "name": value(), "launch": value()}
    result = {"outcome": value(), "samples_per_s": value(), "samples_unit": value()}
    for name, content in (("summary", report), ("attempt-0/run", start), ("attempt-0/result", result)):
        (folder / "a" / f"{name}.json").write_text(json.dumps(content))
    return _call(folder, random)


def _many_runs(folder: Path, random: Random) -> Call:
    """Return a call on a folder with very many folders, links and files."""
    for number in range(_size(random, 500, 5_000)):
        path = folder / f"run-{number}"
        match int(random.integers(5)):
            case 0:
                path.symlink_to("/")
            case 1:
                path.write_text("x")
            case 2:
                (path / "attempt-0").mkdir(parents=True)
            case 3:
                (path / f"attempt-{'9' * int(random.integers(1, 200))}").mkdir(parents=True)
            case _:
                (path / "a" / "b" / "c" / "d").mkdir(parents=True)
    call = _call(folder, random)
    return Call(arguments=call.arguments, num_bytes=4_000_000)


def _kind(name: str, make: Callable[[Path, Random], Call], most_lines: int = 80) -> Hostile:
    return Hostile(
        name=f"history-{name}",
        format=_FORMAT,
        make=make,
        most_cpu_s=1.0,
        most_memory_bytes=256 << 20,
        most_lines=most_lines,
    )


KINDS = (
    _kind("raw", _raw),
    _kind("bits", _bits),
    _kind("values", _planted(_values)),
    _kind("entries", _planted(_entries)),
    _kind("hosts", _planted(_hosts)),
    _kind("nested", _planted(_nested)),
    _kind("others", _planted(_others)),
    _kind("no-file", _no_file),
    _kind("records", _records),
    _kind("wrong-records", _wrong_records),
    # `list` has a row for each run.
    _kind("many-runs", _many_runs, most_lines=12_000),
)
