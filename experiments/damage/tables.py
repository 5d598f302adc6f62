"""Damage to table content in files that HDF5 finds sound: impossible values, and tables of another shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from experiments.damage import specimen
from experiments.damage.chance import Random
from experiments.damage.reports import kinds_of

TABLES = ("steps", "phases", "collectives", "groups", "clock", "account")
_STEPPED = ("steps", "phases", "collectives")
_OF_STEP = tuple(f"{table}/step" for table in _STEPPED)
_HOUR_NS = 3_600_000_000_000
Attack = Callable[[h5py.File, Random], object]
"""Changes one rank's file through HDF5."""
Value = Callable[[NDArray[Any], Random], Any]
"""Returns new values of a column, or one for all rows, from the old ones."""


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """Open a closed trace file to change it."""
    with h5py.File(path, "r+", libver=("v110", "v110"), locking=False) as file:
        yield file


def hdf5(attack: Attack) -> specimen.Make:
    """Return what changes a closed trace file through HDF5."""

    def change(path: Path, random: Random) -> None:
        with opened(path) as file:
            attack(file, random)

    return change


def columns(value: Value | int, *names: str) -> Attack:
    """Return the attack that writes values into some columns, each as `table/column`."""

    def attack(file: h5py.File, random: Random) -> None:
        for name in names:
            file[name][...] = value if isinstance(value, int) else value(file[name][()], random)

    return attack


def sizes(num_rows: int, *names: str) -> Attack:
    """Return the attack that gives tables so many rows."""

    def attack(file: h5py.File, random: Random) -> None:
        for name in names:
            resize(file[name], num_rows)

    return attack


def resize(table: h5py.Group, num_rows: int) -> None:
    """Give all columns of a table so many rows."""
    for column in table.values():
        column.resize((num_rows,))


def some_column(file: h5py.File, random: Random, tables: Sequence[str] = TABLES) -> tuple[h5py.Group, str]:
    """Return one of some tables, and the name of one of its columns."""
    table = file[random.of(tables)]
    return table, random.of([*table])


def absurd(dtype: np.dtype, size: int, random: Random) -> NDArray[np.generic]:
    """Return values of a column's type that no sound file has, or that are at its limits."""
    if dtype.kind == "S":
        texts = (b"", b"\xff" * dtype.itemsize, b"<script>", b"\x1b[2J", b"default", b"a\nb", b"[red]", b"\xe2\x80\xae")
        return np.array([texts[index] for index in random.integers(len(texts), size=size)], dtype)
    limits = np.iinfo(dtype)
    near = [limits.max - 1, limits.min + 1, limits.max // 2, limits.min // 2, 2**31 - 1, -(2**31), 2**62, 10**18]
    chosen = [value for value in (limits.min, limits.max, 0, -1, 1, 255, *near) if limits.min <= value <= limits.max]
    if random.random() < 0.3:
        return np.full(size, random.of(chosen), dtype)
    return np.array([chosen[index] for index in random.integers(len(chosen), size=size)], dtype)


def _absurd(table: str, *names: str) -> Attack:
    """Return the attack that puts absurd values into a few or all rows of columns of a table."""

    def attack(file: h5py.File, random: Random) -> None:
        of = names or tuple(file[table])
        for index in random.permutation(len(of))[: random.count(1, len(of) + 1)].tolist():
            column = file[table][of[index]]
            if not len(column):
                column.resize((20,))
            values = column[()]
            rows = _rows(len(values), random)
            values[rows] = absurd(column.dtype, len(rows), random)
            column[...] = values
        resize(file[table], max(len(column) for column in file[table].values()))

    return attack


def _rows(num_rows: int, random: Random) -> NDArray[np.int64]:
    count = min(max(int(num_rows * random.one(1, 0.1, 0)), 1), num_rows)
    return np.sort(random.permutation(num_rows)[:count])


def _odd_groups(file: h5py.File, random: Random) -> None:
    """Name members beyond the world, twice, negative, in many groups."""
    groups = file["groups"]
    resize(groups, 2000)
    groups["id"][...] = random.integers(0, 2**16, size=2000)
    groups["rank"][...] = random.integers(-5, 2**31 - 1, size=2000)
    groups["name"][...] = np.array([random.bytes(int(size)) for size in random.integers(0, 64, size=2000)], "S64")


def _operations(file: h5py.File, random: Random) -> None:
    for column, least, stop in (("op", 0, random.one(12, 256)), ("peer", -3, 12), ("exit_kind", 0, 5)):
        columns(lambda old, r, a=least, b=stop: r.integers(a, b, size=len(old)), f"collectives/{column}")(file, random)


def _shuffled(file: h5py.File, random: Random) -> None:
    for name in _STEPPED:
        order = random.permutation(len(file[name]["step"]))
        for column in file[name].values():
            column[...] = column[()][order]


def _twice(file: h5py.File, random: Random) -> None:
    for name in ("steps", "collectives", "groups", "clock"):
        for column in file[name].values():
            values = column[()]
            column.resize((2 * len(values),))
            column[len(values) :] = values


def _backwards(file: h5py.File, random: Random) -> None:
    steps = file["steps"]
    begin, end = steps["begin_ns"][()], steps["end_ns"][()]
    steps["begin_ns"][...], steps["end_ns"][...] = end, begin


def _moved(file: h5py.File, random: Random) -> None:
    """Move all times but those of the clock samples by hours: what the clock says of them is wrong."""
    shift_ns = random.count(-5, 6) * _HOUR_NS
    columns(lambda old, _: old + shift_ns, *_BEGINS_AND_ENDS)(file, random)


def _no_duration(file: h5py.File, random: Random) -> None:
    for table, first, last in (("steps", "begin_ns", "end_ns"), ("collectives", "enter_ns", "exit_ns")):
        file[table][last][...] = file[table][first][()]


def _ragged(file: h5py.File, random: Random) -> None:
    table, name = some_column(file, random)
    table[name].resize((int(random.integers(2 * len(table[name]) + 5)),))


def _many_rows(file: h5py.File, random: Random) -> None:
    """Make a table of a million equal rows, which compress to nearly nothing."""
    for column in file[random.of(TABLES)].values():
        column.resize((10**6,))
        column[...] = np.zeros(10**6, column.dtype)


def _no_column(file: h5py.File, random: Random) -> None:
    table, name = some_column(file, random)
    del table[name]


def _other_type(file: h5py.File, random: Random) -> None:
    """Give a column another type: float with NaN, text, two dimensions, none at all, a compound, another size."""
    table, name = some_column(file, random)
    count = len(table[name])
    del table[name]
    texts, pairs = np.array(["x"] * count, h5py.string_dtype()), np.zeros(count, [("a", "i4"), ("b", "f8")])
    numbers = (np.full(count, np.nan), np.full(count, 2**64 - 1, np.uint64), np.full(count, -1, np.int8), np.int64(3))
    values = (*numbers, texts, pairs, np.zeros((count, 2), np.int64), h5py.Empty("i8"))
    table.create_dataset(name, data=random.of(values))


def _table_is_column(file: h5py.File, random: Random) -> None:
    name = random.of(TABLES)
    del file[name]
    file[name] = np.arange(5)


def _table_is_another(file: h5py.File, random: Random) -> None:
    """Let a table be the root, which holds it, or another table."""
    one, other = random.permutation(TABLES)[:2]
    del file[one]
    file[one] = random.one(file["/"], file[other])


def _newer_minor(file: h5py.File, random: Random) -> None:
    """Write what a later minor version may: columns, tables, attributes and enum values that are not known yet."""
    file.attrs["format_version"], file.attrs["colour"] = "1.999", "blue"
    num_rows = len(file["collectives"]["step"])
    file["collectives"].create_dataset("algorithm", data=np.zeros(num_rows, np.uint8))
    file.create_group("power").create_dataset("watts", data=np.ones(5))
    file["phases"]["phase"][0] = 77
    file["collectives"]["op"][num_rows // 2 :] = 99


# Clocks


def _fill(file: h5py.File) -> h5py.Group:
    """Spread the two samples that a specimen has over twenty of them, and return the table."""
    clock = file["clock"]
    local = clock["local_ns"][()]
    for column in clock.values():
        column.resize((20,))
        column[...] = column[0]
    clock["local_ns"][...] = np.linspace(local[0], local[-1], 20).astype(np.int64)
    return clock


def _filled(name: str, value: Value) -> Attack:
    """Return the attack that exchanges values of a column of the clock that has twenty samples."""

    def attack(file: h5py.File, random: Random) -> None:
        column = _fill(file)[name]
        column[...] = value(column[()], random)

    return attack


def _jumped(old: NDArray[Any], random: Random) -> NDArray[Any]:
    """Let values jump by hours from one of them on."""
    return old + random.count(-20, 21) * _HOUR_NS * (np.arange(len(old)) >= random.count(0, 20))


def _equal_times(file: h5py.File, random: Random) -> None:
    clock = _fill(file)
    clock["local_ns"][...] = clock["local_ns"][0]
    clock["offset_ns"][...] = random.integers(-(2**62), 2**62, size=20)


def _near_times(file: h5py.File, random: Random) -> None:
    """Make two samples a nanosecond apart whose offsets differ by hours: a rate beyond all sense."""
    clock = file["clock"]
    clock["local_ns"][1] = clock["local_ns"][0] + 1
    clock["offset_ns"][1] = clock["offset_ns"][0] + _HOUR_NS


def _limits(file: h5py.File, random: Random) -> None:
    limits = np.iinfo(np.int64)
    for name in random.one(("offset_ns",), ("offset_ns", "local_ns")):
        file["clock"][name][...] = (limits.min, limits.max)


def _wrong(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Make one host's clock wrong by 50 ms, which no half-width explains: it has to be named."""
    rank = specimen.some_rank(run, random)
    with opened(run.file(rank)) as file:
        host = str(file.attrs["host"])
    for path in map(run.file, sorted(run.ranks)):
        with opened(path) as file:
            if str(file.attrs["host"]) == host:
                file["clock"]["offset_ns"][...] = file["clock"]["offset_ns"][()] + 50_000_000
    return specimen.of_rank(run, rank, "the clock of", host, "wrong by at least", hurt=frozenset())


_BEGINS_AND_ENDS = ("steps/begin_ns", "steps/end_ns", "collectives/enter_ns", "collectives/exit_ns")
_PHASES = ("phases/begin_ns", "phases/end_ns")
_SEQUENCE = columns(
    lambda old, r: r.one(np.zeros(len(old), np.int64), -old, old + 2**62, old // 2, r.permutation(old)),
    "collectives/seq",
)
_IN_ONE: Mapping[str, Mapping[str, Attack]] = {
    "values that cannot be": {
        **{f"absurd-{table}": _absurd(table) for table in TABLES if table != "clock"},
        **{f"absurd-{table}": _absurd(table) for table in ("pacing", "network", "host")},
        "absurd-times": _absurd("collectives", "enter_ns", "exit_ns", "blocked_ns"),
        **{"odd-groups": _odd_groups, "odd-operations": _operations},
    },
    "steps": {
        "fewer-steps": lambda file, random: resize(file["steps"], random.count(1, 20)),
        "zero-steps": sizes(0, *_STEPPED),
        **{"shuffled": _shuffled, "twice": _twice},
        "negative-steps": columns(lambda old, _: old - 50, *_OF_STEP),
        "shifted-steps": columns(lambda old, _: old + 20, *_OF_STEP),
        "largest-steps": columns(lambda old, _: old + (2**31 - 41), *_OF_STEP),
        "same-step": columns(7, *_OF_STEP),
        **{"backwards": _backwards, "moved": _moved, "no-duration": _no_duration},
        "one-time": columns(5_000_000_000, *_BEGINS_AND_ENDS[:2], *_PHASES),
        "no-operations": sizes(0, "collectives"),
        "no-groups": sizes(0, "groups"),
    },
    "tables of another shape": {
        **{"ragged": _ragged, "many-rows": _many_rows, "no-column": _no_column, "other-type": _other_type},
        "endless": lambda file, random: resize(file[random.of(TABLES)], random.one(10**6, 2**31, 2**40, 2**62)),
        "no-table": lambda file, random: file.pop(random.of(TABLES)),
        **{"table-is-column": _table_is_column, "table-is-another": _table_is_another},
    },
    "versions": {"newer-minor": _newer_minor},
    "clocks": {
        "absurd-clock": _absurd("clock"),
        "clock-empty": sizes(0, "clock"),
        "clock-one-sample": sizes(1, "clock"),
        "clock-jump": _filled("offset_ns", _jumped),
        "clock-local-jump": _filled("local_ns", _jumped),
        "clock-references": _filled("ref_rank", lambda old, r: r.integers(-1, 6, size=20)),
        "clock-negative-width": columns(-1000, "clock/halfwidth_ns"),
        "clock-endless-width": columns(2**62, "clock/halfwidth_ns"),
        "clock-not-ascending": _filled("local_ns", lambda old, r: r.permutation(old)),
        "clock-noise": _filled("offset_ns", lambda old, r: old + r.integers(-(10**9), 10**9, size=20)),
        **{"clock-equal-times": _equal_times, "clock-near-times": _near_times, "clock-limits": _limits},
    },
}
_IN_ALL = (
    *("odd-groups", "odd-operations", "zero-steps", "largest-steps", "backwards", "one-time", "no-duration"),
    *("clock-empty", "clock-jump", "clock-references", "clock-negative-width", "clock-endless-width"),
    *("clock-near-times", "clock-limits"),
)
"""Kinds that are done to all ranks, too."""
_VERSIONS = ("2.0", "999999.0", "0.9", "1", "one", "", "9" * 5000, "-1.0")
_WEIGHTS = {"values that cannot be": 2.0, "clocks": 1.5, "tables of another shape": 1.5}


def _version(text: str) -> specimen.Damage:
    set_version = hdf5(lambda file, _: file.attrs.__setitem__("format_version", text))
    return specimen.to_file(set_version, text[:20])


def _kinds() -> Iterator[specimen.Kind]:
    for group, attacks in _IN_ONE.items():
        in_one = {name: specimen.to_file(hdf5(attack)) for name, attack in attacks.items()}
        in_all = {name: specimen.to_all(hdf5(attack)) for name, attack in attacks.items() if name in _IN_ALL}
        on = "hosts pipeline" if group == "clocks" else ""
        yield from kinds_of(group, in_one, weight=_WEIGHTS.get(group, 1.0))
        yield from kinds_of(group, in_all, end="-all", on=on, weight=0.5)


_VALUES, _ODD_SEQUENCE = "values that cannot be", "odd-sequence"
KINDS = (
    *_kinds(),
    *kinds_of(_VALUES, {_ODD_SEQUENCE: specimen.to_file(hdf5(_SEQUENCE))}, on="plain hosts pipeline"),
    *kinds_of(_VALUES, {f"{_ODD_SEQUENCE}-all": specimen.to_all(hdf5(_SEQUENCE))}),
    *kinds_of("versions", {text or "empty": _version(text) for text in _VERSIONS}, "version-", weight=0.4),
    *kinds_of("clocks", {"clock-wrong": _wrong}, on="hosts"),
)
