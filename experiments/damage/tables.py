"""Damage to table content in files that HDF5 finds sound: impossible values, and tables of another shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from experiments.damage.specimen import Damaged, Kind, Random, RunCopy, of_rank, of_ranks, some_rank

_HOUR_NS = 3_600_000_000_000
_SEVERAL = ("plain", "hosts", "pipeline")


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """Open a closed trace file to change it."""
    with h5py.File(path, "r+", libver=("v110", "v110"), locking=False) as file:
        yield file


def absurd(dtype: np.dtype, size: int, random: Random) -> NDArray[np.generic]:
    """Return values of a column's type that no sound file has, or that are at its limits."""
    if dtype.kind == "S":
        texts = (b"", b"\xff" * dtype.itemsize, b"<script>", b"\x1b[2J", b"default", b"a\nb", b"[red]", b"\xe2\x80\xae")
        return np.array([texts[index] for index in random.integers(len(texts), size=size)], dtype)
    limits = np.iinfo(dtype)
    near = [limits.max - 1, limits.min + 1, limits.max // 2, limits.min // 2, 2**31 - 1, -(2**31), 2**62, 10**18]
    chosen = [value for value in (limits.min, limits.max, 0, -1, 1, 255, *near) if limits.min <= value <= limits.max]
    if random.random() < 0.3:
        return np.full(size, chosen[int(random.integers(len(chosen)))], dtype)
    return np.array([chosen[index] for index in random.integers(len(chosen), size=size)], dtype)


def absurd_values(table: str, columns: Sequence[str] = ()) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that puts absurd values into a few or all rows of columns of one rank's table."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        rank = some_rank(run, random)
        with opened(run.file(rank)) as file:
            names = columns or tuple(file[table])
            chosen = random.permutation(len(names))[: int(random.integers(1, len(names) + 1))].tolist()
            for name in (names[index] for index in chosen):
                column = file[table][name]
                values = column[()]
                if not len(values):
                    column.resize((20,))
                    values = column[()]
                rows = _rows(len(values), random)
                values[rows] = absurd(column.dtype, len(rows), random)
                column[...] = values
            longest = max(len(column) for column in file[table].values())
            for column in file[table].values():
                column.resize((longest,))
        return of_rank(run, rank)

    return damage


def _rows(num_rows: int, random: Random) -> NDArray[np.int64]:
    share = (1, 0.1, 0)[int(random.integers(3))]
    count = min(max(int(num_rows * share), 1), num_rows)
    return np.sort(random.permutation(num_rows)[:count])


def changed(change: Callable[[h5py.File, Random], None], *says: str) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that changes one rank's file through HDF5."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        rank = some_rank(run, random)
        with opened(run.file(rank)) as file:
            change(file, random)
        return of_rank(run, rank, *says)

    return damage


def changed_all(change: Callable[[h5py.File, Random], None]) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that changes the files of all ranks alike through HDF5."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        for rank in sorted(run.ranks):
            with opened(run.file(rank)) as file:
                change(file, random)
        return of_ranks(run, run.ranks)

    return damage


def _resize(table: h5py.Group, num_rows: int) -> None:
    for column in table.values():
        column.resize((num_rows,))


def _fewer_steps(file: h5py.File, random: Random) -> None:
    _resize(file["steps"], int(random.integers(1, 20)))


def _zero_steps(file: h5py.File, random: Random) -> None:
    for name in ("steps", "phases", "collectives"):
        _resize(file[name], 0)


def _no_operations(file: h5py.File, random: Random) -> None:
    _resize(file["collectives"], 0)


def _no_groups(file: h5py.File, random: Random) -> None:
    _resize(file["groups"], 0)


def _shuffled(file: h5py.File, random: Random) -> None:
    for name in ("steps", "phases", "collectives"):
        order = random.permutation(len(file[name]["step"]))
        for column in file[name].values():
            column[...] = column[()][order]


def _twice(file: h5py.File, random: Random) -> None:
    for name in ("steps", "collectives", "groups", "clock"):
        for column in file[name].values():
            values = column[()]
            column.resize((2 * len(values),))
            column[len(values) :] = values


def _numbered(first: int) -> Callable[[h5py.File, Random], None]:
    def change(file: h5py.File, random: Random) -> None:
        for name in ("steps", "phases", "collectives"):
            column = file[name]["step"]
            column[...] = first + column[()]

    return change


def _same_number(file: h5py.File, random: Random) -> None:
    for name in ("steps", "phases", "collectives"):
        file[name]["step"][...] = 7


def _backwards(file: h5py.File, random: Random) -> None:
    steps = file["steps"]
    begin, end = steps["begin_ns"][()], steps["end_ns"][()]
    steps["begin_ns"][...], steps["end_ns"][...] = end, begin


def _moved(file: h5py.File, random: Random) -> None:
    """Move all times but those of the clock samples by hours: what the clock says of them is wrong."""
    shift_ns = int(random.integers(-5, 6)) * _HOUR_NS
    for table, columns in (("steps", ("begin_ns", "end_ns")), ("collectives", ("enter_ns", "exit_ns"))):
        for name in columns:
            file[table][name][...] = file[table][name][()] + shift_ns


def _one_time(file: h5py.File, random: Random) -> None:
    for table, columns in (("steps", ("begin_ns", "end_ns")), ("phases", ("begin_ns", "end_ns"))):
        for name in columns:
            file[table][name][...] = 5_000_000_000


def _no_duration(file: h5py.File, random: Random) -> None:
    for table, first, last in (("steps", "begin_ns", "end_ns"), ("collectives", "enter_ns", "exit_ns")):
        file[table][last][...] = file[table][first][()]


def _ragged(file: h5py.File, random: Random) -> None:
    table = file[_TABLES[int(random.integers(len(_TABLES)))]]
    column = table[list(table)[int(random.integers(len(table)))]]
    column.resize((int(random.integers(2 * len(column) + 5)),))


def _endless(file: h5py.File, random: Random) -> None:
    table = file[_TABLES[int(random.integers(len(_TABLES)))]]
    _resize(table, int((10**6, 2**31, 2**40, 2**62)[int(random.integers(4))]))


def _many_rows(file: h5py.File, random: Random) -> None:
    """Make a table of a million equal rows, which compress to nearly nothing."""
    table = file[_TABLES[int(random.integers(len(_TABLES)))]]
    for column in table.values():
        column.resize((10**6,))
        column[...] = np.zeros(10**6, column.dtype)


def _no_table(file: h5py.File, random: Random) -> None:
    del file[_TABLES[int(random.integers(len(_TABLES)))]]


def _no_column(file: h5py.File, random: Random) -> None:
    table = file[_TABLES[int(random.integers(len(_TABLES)))]]
    del table[list(table)[int(random.integers(len(table)))]]


def _other_type(file: h5py.File, random: Random) -> None:
    """Give a column another type: float with NaN, text, two dimensions, none at all, a compound, another size."""
    table = file[_TABLES[int(random.integers(len(_TABLES)))]]
    name = list(table)[int(random.integers(len(table)))]
    num_rows = len(table[name])
    del table[name]
    made = (
        np.full(num_rows, np.nan),
        np.array(["x"] * num_rows, h5py.string_dtype()),
        np.zeros((num_rows, 2), np.int64),
        np.int64(3),
        np.zeros(num_rows, [("a", "i4"), ("b", "f8")]),
        np.full(num_rows, 2**64 - 1, np.uint64),
        np.full(num_rows, -1, np.int8),
        h5py.Empty("i8"),
    )[int(random.integers(8))]
    table.create_dataset(name, data=made)


def _table_is_column(file: h5py.File, random: Random) -> None:
    name = _TABLES[int(random.integers(len(_TABLES)))]
    del file[name]
    file[name] = np.arange(5)


def _newer_minor(file: h5py.File, random: Random) -> None:
    """Write what a later minor version may: columns, tables, attributes and enum values that are not known yet."""
    file.attrs["format_version"] = "1.999"
    file.attrs["colour"] = "blue"
    num_rows = len(file["collectives"]["step"])
    file["collectives"].create_dataset("algorithm", data=np.zeros(num_rows, np.uint8))
    file.create_group("power").create_dataset("watts", data=np.ones(5))
    file["phases"]["phase"][0] = 77
    file["collectives"]["op"][num_rows // 2 :] = 99


def _version(text: str) -> Callable[[h5py.File, Random], None]:
    def change(file: h5py.File, random: Random) -> None:
        file.attrs["format_version"] = text

    return change


def _odd_groups(file: h5py.File, random: Random) -> None:
    """Name members beyond the world, twice, negative, in many groups."""
    groups = file["groups"]
    _resize(groups, 2000)
    groups["id"][...] = random.integers(0, 2**16, size=2000)
    groups["rank"][...] = random.integers(-5, 2**31 - 1, size=2000)
    groups["name"][...] = np.array([random.bytes(int(size)) for size in random.integers(0, 64, size=2000)], "S64")


def _sequence(file: h5py.File, random: Random) -> None:
    seq = file["collectives"]["seq"]
    seq[...] = (
        np.zeros(len(seq), np.int64),
        -seq[()],
        seq[()] + 2**62,
        seq[()] // 2,
        random.permutation(seq[()]),
    )[int(random.integers(5))]


def _operations(file: h5py.File, random: Random) -> None:
    table = file["collectives"]
    size = len(table["op"])
    table["op"][...] = random.integers(0, 256 if random.random() < 0.5 else 12, size=size)
    table["peer"][...] = random.integers(-3, 12, size=size)
    table["exit_kind"][...] = random.integers(0, 5, size=size)


_TABLES = ("steps", "phases", "collectives", "groups", "clock", "account")
_STEPS, _VALUES, _SHAPES, _VERSIONS = "steps", "values that cannot be", "tables of another shape", "versions"

KINDS = (
    *(
        Kind(name=f"absurd-{table}", group=_VALUES, damage=absurd_values(table), weight=weight)
        for table, weight in (("steps", 4), ("phases", 4), ("collectives", 6), ("groups", 3), ("account", 2))
    ),
    *(
        Kind(name=f"absurd-{table}", group=_VALUES, damage=absurd_values(table), weight=0.5)
        for table in ("pacing", "network", "host")
    ),
    Kind(
        name="absurd-times",
        group=_VALUES,
        damage=absurd_values("collectives", ("enter_ns", "exit_ns", "blocked_ns")),
        weight=3,
    ),
    Kind(name="odd-groups", group=_VALUES, damage=changed(_odd_groups)),
    Kind(name="odd-groups-all", group=_VALUES, damage=changed_all(_odd_groups)),
    Kind(name="odd-sequence", group=_VALUES, damage=changed(_sequence), specimens=_SEVERAL),
    Kind(name="odd-sequence-all", group=_VALUES, damage=changed_all(_sequence)),
    Kind(name="odd-operations", group=_VALUES, damage=changed(_operations)),
    Kind(name="odd-operations-all", group=_VALUES, damage=changed_all(_operations)),
    Kind(name="fewer-steps", group=_STEPS, damage=changed(_fewer_steps)),
    Kind(name="zero-steps", group=_STEPS, damage=changed(_zero_steps)),
    Kind(name="zero-steps-all", group=_STEPS, damage=changed_all(_zero_steps), weight=0.4),
    Kind(name="shuffled", group=_STEPS, damage=changed(_shuffled)),
    Kind(name="twice", group=_STEPS, damage=changed(_twice)),
    Kind(name="negative-steps", group=_STEPS, damage=changed(_numbered(-50))),
    Kind(name="shifted-steps", group=_STEPS, damage=changed(_numbered(20))),
    Kind(name="largest-steps", group=_STEPS, damage=changed(_numbered(2**31 - 41))),
    Kind(name="largest-steps-all", group=_STEPS, damage=changed_all(_numbered(2**31 - 41)), weight=0.4),
    Kind(name="same-step", group=_STEPS, damage=changed(_same_number)),
    Kind(name="backwards", group=_STEPS, damage=changed(_backwards)),
    Kind(name="backwards-all", group=_STEPS, damage=changed_all(_backwards), weight=0.4),
    Kind(name="moved", group=_STEPS, damage=changed(_moved)),
    Kind(name="one-time", group=_STEPS, damage=changed(_one_time)),
    Kind(name="one-time-all", group=_STEPS, damage=changed_all(_one_time), weight=0.4),
    Kind(name="no-duration", group=_STEPS, damage=changed(_no_duration)),
    Kind(name="no-duration-all", group=_STEPS, damage=changed_all(_no_duration), weight=0.4),
    Kind(name="no-operations", group=_STEPS, damage=changed(_no_operations)),
    Kind(name="no-groups", group=_STEPS, damage=changed(_no_groups)),
    Kind(name="ragged", group=_SHAPES, damage=changed(_ragged), weight=2),
    Kind(name="endless", group=_SHAPES, damage=changed(_endless), weight=2),
    Kind(name="many-rows", group=_SHAPES, damage=changed(_many_rows)),
    Kind(name="no-table", group=_SHAPES, damage=changed(_no_table)),
    Kind(name="no-column", group=_SHAPES, damage=changed(_no_column)),
    Kind(name="other-type", group=_SHAPES, damage=changed(_other_type), weight=2),
    Kind(name="table-is-column", group=_SHAPES, damage=changed(_table_is_column)),
    Kind(name="newer-minor", group=_VERSIONS, damage=changed(_newer_minor)),
    *(
        Kind(name=f"version-{text or 'empty'}", group=_VERSIONS, damage=changed(_version(text), text), weight=0.4)
        for text in ("2.0", "999999.0", "0.9", "1", "one", "", "9" * 5000, "-1.0")
    ),
)


_CLOCKS = "clocks"


def _fill(file: h5py.File, num_samples: int) -> None:
    """Spread the two samples that a specimen has over more of them."""
    clock = file["clock"]
    local, columns = clock["local_ns"][()], {name: column[()] for name, column in clock.items()}
    for name, column in clock.items():
        column.resize((num_samples,))
        column[...] = columns[name][0]
    clock["local_ns"][...] = np.linspace(local[0], local[-1], num_samples).astype(np.int64)


def _empty(file: h5py.File, random: Random) -> None:
    for column in file["clock"].values():
        column.resize((0,))


def _jump(file: h5py.File, random: Random) -> None:
    _fill(file, 20)
    offset = file["clock"]["offset_ns"]
    offset[int(random.integers(20)) :] = offset[0] + int(random.integers(-20, 21)) * _HOUR_NS


def _local_jump(file: h5py.File, random: Random) -> None:
    _fill(file, 20)
    local = file["clock"]["local_ns"]
    at = int(random.integers(20))
    local[at:] = local[at:] + int(random.integers(-20, 21)) * _HOUR_NS


def _references(file: h5py.File, random: Random) -> None:
    _fill(file, 20)
    file["clock"]["ref_rank"][...] = random.integers(-1, 6, size=20)


def _width(value: int) -> Callable[[h5py.File, Random], None]:
    def change(file: h5py.File, random: Random) -> None:
        file["clock"]["halfwidth_ns"][...] = value

    return change


def _not_ascending(file: h5py.File, random: Random) -> None:
    _fill(file, 20)
    local = file["clock"]["local_ns"]
    local[...] = random.permutation(local[()])


def _equal_times(file: h5py.File, random: Random) -> None:
    _fill(file, 20)
    file["clock"]["local_ns"][...] = file["clock"]["local_ns"][0]
    file["clock"]["offset_ns"][...] = random.integers(-(2**62), 2**62, size=20)


def _near_times(file: h5py.File, random: Random) -> None:
    """Make two samples a nanosecond apart whose offsets differ by hours: a rate beyond all sense."""
    clock = file["clock"]
    clock["local_ns"][1] = clock["local_ns"][0] + 1
    clock["offset_ns"][1] = clock["offset_ns"][0] + _HOUR_NS


def _limits(file: h5py.File, random: Random) -> None:
    clock = file["clock"]
    clock["offset_ns"][...] = (np.iinfo(np.int64).min, np.iinfo(np.int64).max)
    if random.random() < 0.5:
        clock["local_ns"][...] = (np.iinfo(np.int64).min, np.iinfo(np.int64).max)


def _noise(file: h5py.File, random: Random) -> None:
    _fill(file, 20)
    offset = file["clock"]["offset_ns"]
    offset[...] = offset[()] + random.integers(-(10**9), 10**9, size=20)


def _one_sample(file: h5py.File, random: Random) -> None:
    for column in file["clock"].values():
        column.resize((1,))


def _wrong(run: RunCopy, random: Random) -> Damaged:
    """Make one host's clock wrong by 50 ms, which no half-width explains: it has to be named."""
    rank = int(random.integers(run.num_ranks))
    with opened(run.file(rank)) as file:
        host = str(file.attrs["host"])
    for other in sorted(run.ranks):
        with opened(run.file(other)) as file:
            if str(file.attrs["host"]) == host:
                file["clock"]["offset_ns"][...] = file["clock"]["offset_ns"][()] + 50_000_000
    damaged = of_rank(run, rank)
    return Damaged(places=damaged.places, says=("the clock of", host, "wrong by at least"))


CLOCKS = (
    Kind(name="absurd-clock", group=_CLOCKS, damage=absurd_values("clock"), weight=6),
    *(
        Kind(
            name=f"clock-{name}",
            group=_CLOCKS,
            damage=changed(change),
            specimens=("plain", "hosts", "pipeline", "single"),
        )
        for name, change in (
            ("empty", _empty),
            ("jump", _jump),
            ("local-jump", _local_jump),
            ("references", _references),
            ("negative-width", _width(-1000)),
            ("endless-width", _width(2**62)),
            ("not-ascending", _not_ascending),
            ("equal-times", _equal_times),
            ("near-times", _near_times),
            ("limits", _limits),
            ("noise", _noise),
            ("one-sample", _one_sample),
        )
    ),
    *(
        Kind(
            name=f"clock-{name}-all",
            group=_CLOCKS,
            damage=changed_all(change),
            specimens=("hosts", "pipeline"),
            weight=0.6,
        )
        for name, change in (
            ("empty", _empty),
            ("jump", _jump),
            ("references", _references),
            ("negative-width", _width(-1000)),
            ("endless-width", _width(2**62)),
            ("near-times", _near_times),
            ("limits", _limits),
        )
    ),
    Kind(name="clock-wrong", group=_CLOCKS, damage=_wrong, specimens=("hosts",)),
)
