"""Small files that claim, or grow to, far more than any memory holds, and files on which a reader would work for hours.

Each command is told how much memory the tables may take, and may not take more than four times that and what it
always needs.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from experiments.damage.child import memory_limit_bytes
from experiments.damage.links import RECORDS
from experiments.damage.specimen import Damaged, Kind, Random, RunCopy, Shelf, of_rank, of_ranks, seen_by_all, some_rank
from experiments.damage.tables import opened
from experiments.synthetic_run import SyntheticRun
from hpcpace.audit.snapshot import take_host
from hpcpace.audit.snapshot_files import snapshot_text
from hpcpace.audit.tree import Tree
from hpcpace.trace.encoding import row_dtypes
from hpcpace.trace.journal import MAGIC, RecordKind, decode, encode_header, encode_records
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import header_values

MEMORY = "256MiB"
_READ = ("steps", "phases", "collectives", "groups", "clock", "account")
_SPECIMENS = ("plain", "hosts", "single")
_MAX_CHUNK_ROWS = 1 << 20
_JOURNAL_BYTES = 120 << 20
_JSON_BYTES = 15 << 20
_RESULT_BYTES = 60 << 20
Attack = Callable[[h5py.File, Random], None]


def in_one_rank(attack: Attack) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that makes a bomb of one rank's file."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        rank = some_rank(run, random)
        with opened(run.file(rank)) as file:
            attack(file, random)
        return _within_memory(run, random, of_rank(run, rank))

    return damage


def in_all_ranks(attack: Attack) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that makes a bomb of each rank's file: what one may take, all together may not."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        for rank in sorted(run.ranks):
            with opened(run.file(rank)) as file:
                attack(file, random)
        return _within_memory(run, random, of_ranks(run, run.ranks))

    return damage


def _within_memory(run: RunCopy, random: Random, damaged: Damaged) -> Damaged:
    return seen_by_all(run, random, replace(damaged, memory=MEMORY))


def rows_of_zeros(num_rows: int, tables: tuple[str, ...] = _READ) -> Attack:
    """Return the attack by a table of so many rows, which compress to a thousandth: all chunks are there and sound."""

    def attack(file: h5py.File, random: Random) -> None:
        name = tables[int(random.integers(len(tables)))]
        for column in file[name]:
            _replace_by_zeros(file[name], column, num_rows)

    return attack


def _replace_by_zeros(table: h5py.Group, column: str, num_rows: int) -> None:
    dtype = table[column].dtype
    # Several chunks: of one that ranks have alike, all would have the same memory.
    chunk_rows = min(num_rows // 4 + 1, _MAX_CHUNK_ROWS)
    chunk = zlib.compress(bytes(chunk_rows * dtype.itemsize), 9)
    del table[column]
    made = {"shape": (num_rows,), "maxshape": (None,), "chunks": (chunk_rows,), "dtype": dtype}
    stored = table.create_dataset(column, compression="gzip", shuffle=True, **made)
    for start in range(0, num_rows, chunk_rows):
        stored.id.write_direct_chunk((start,), chunk)


def _claimed_rows(file: h5py.File, random: Random) -> None:
    """Claim rows whose chunks were never written, within what deflate could make of the file, or far beyond."""
    table = file[_READ[int(random.integers(len(_READ)))]]
    num_rows = int((10**6, 10**7, 2**31, 2**62)[int(random.integers(4))])
    for column in table.values():
        column.resize((num_rows,))


def _deflate_bomb(file: h5py.File, random: Random) -> None:
    """Let a chunk inflate to more than its rows, or never come to its end."""
    table = file[_READ[int(random.integers(len(_READ)))]]
    name = list(table)[int(random.integers(len(table)))]
    dtype, num_rows = table[name].dtype, len(table[name]) or 40
    bomb = zlib.compress(bytes(int((1 << 20, 1 << 25, 1 << 27)[int(random.integers(3))])), 1)
    content = (bomb, bomb[:-10], bomb + bomb, zlib.compress(bomb))[int(random.integers(4))]
    del table[name]
    chunk_rows = int((8192, 65536, 1 << 20)[int(random.integers(3))])
    made = {"shape": (num_rows,), "maxshape": (None,), "chunks": (chunk_rows,), "dtype": dtype}
    table.create_dataset(name, compression="gzip", shuffle=True, **made).id.write_direct_chunk((0,), content)


def _odd_chunks(file: h5py.File, random: Random) -> None:
    """Make chunks of one row each, of gigabytes, or of several dimensions."""
    table = file[_READ[int(random.integers(len(_READ)))]]
    name = list(table)[int(random.integers(len(table)))]
    dtype = table[name].dtype
    del table[name]
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    shape, chunk, is_early = (
        ((200_000,), (1,), True),
        ((50,), (1 << 27,), False),
        ((50, 50), (50, 50), False),
        ((1 << 40,), (1 << 26,), False),
    )[int(random.integers(4))]
    properties.set_chunk(chunk)
    if is_early:
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple(shape, (h5py.h5s.UNLIMITED,) * len(shape))
    h5py.h5d.create(table.id, name.encode(), h5py.h5t.py_create(dtype), space, properties)


def _large_attribute(file: h5py.File, random: Random) -> None:
    size = int((1 << 17, 1 << 20, 1 << 24)[int(random.integers(3))])
    values: tuple[Any, ...] = ("x" * size, np.bytes_(b"x" * size), np.zeros(size // 8), ["eth0"] * (size // 64))
    place = (file, file["steps"], file["network"], file["steps/begin_ns"])[int(random.integers(4))]
    name = ("host", "mesh", "samples_unit", "interfaces", "world_size", "unknown")[int(random.integers(6))]
    if name in place.attrs:
        del place.attrs[name]
    place.attrs[name] = values[int(random.integers(len(values)))]


def _many_attributes(file: h5py.File, random: Random) -> None:
    place = (file, file["steps"], file["steps/begin_ns"])[int(random.integers(3))]
    for number in range(2000):
        place.attrs[f"attribute-{number}"] = np.zeros(64)


def _nested_groups(file: h5py.File, random: Random) -> None:
    """Nest groups thousands deep, in a group that is read or beside it."""
    place = file[("/", "steps", "groups")[int(random.integers(3))]]
    for _ in range(int(random.integers(1000, 5000))):
        place = place.create_group("g")


def _many_links(file: h5py.File, random: Random) -> None:
    place = file[("/", "steps")[int(random.integers(2))]]
    for number in range(15_000):
        place[f"a-link-to-the-same-group-{number:08d}"] = h5py.SoftLink("/steps")


def in_bytes(change: Callable[[Path, Random], None]) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that changes one rank's file without HDF5."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        rank = some_rank(run, random)
        change(run.file(rank), random)
        return _within_memory(run, random, of_rank(run, rank))

    return damage


def _many_heaps(path: Path, random: Random) -> None:
    """Append what looks like a million global heaps, each of a megabyte and within the other."""
    heap = b"GCOL\x01\0\0\0" + struct.pack("<Q", 1 << 20) + struct.pack("<HHIQ", 0, 0, 0, 1 << 20)
    with open(path, "ab") as file:
        file.write(heap * (1 << 20))


def _small_objects_of_heaps(path: Path, random: Random) -> None:
    """Append heaps of the largest size that hold nothing but the smallest objects."""
    objects = struct.pack("<HHIQ", 1, 0, 0, 0) * ((1 << 16) - 1)
    with open(path, "ab") as file:
        file.write((b"GCOL\x01\0\0\0" + struct.pack("<Q", 1 << 20) + objects) * 64)


def _holes(path: Path, random: Random) -> None:
    """Append a page at each second place of half a gigabyte, so that the file is holes and data by turns."""
    with open(path, "ab") as file:
        size = file.tell()
        for number in range(4096):
            file.seek(size + number * (1 << 17))
            file.write(b"GCOL" * 1024)


def _journalled(make: Callable[[RunCopy, int, Random], bytes]) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that writes one rank's journal."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        rank = min(rank for rank in run.ranks if run.journal(rank).exists())
        run.journal(rank).write_bytes(make(run, rank, random))
        return _within_memory(run, random, of_rank(run, rank))

    return damage


def _long_journal(run: RunCopy, rank: int, random: Random) -> bytes:
    """Return as many rows as fit into the largest journal, of one table, with sound checksums."""
    content, dtypes = _content(run, rank), row_dtypes()
    name = ("steps", "phases", "collectives", "groups")[int(random.integers(4))]
    rows = np.zeros(100_000, dtypes[name])
    records = encode_records(tuple(dtypes).index(name), RecordKind.ROW, 0, rows)
    repeated = records * (_JOURNAL_BYTES // len(records))
    return encode_header(content.header, dtypes) + repeated


def _alternating_journal(run: RunCopy, rank: int, random: Random) -> bytes:
    """Return rows of two tables by turns: each is a run of records of its own."""
    content, dtypes = _content(run, rank), row_dtypes()
    pair = b"".join(
        encode_records(tuple(dtypes).index(name), RecordKind.ROW, 0, np.zeros(1, dtypes[name]))
        for name in ("steps", "phases")
    )
    return encode_header(content.header, dtypes) + pair * (_JOURNAL_BYTES // len(pair))


def _wide_journal(run: RunCopy, rank: int, random: Random) -> bytes:
    """Return a journal whose tables have the widest rows that it can describe, or thousands of columns, or tables."""
    header = header_values(_content(run, rank).header)
    tables = (
        [{"name": "steps", "columns": [[f"c{number}", "|S9999"] for number in range(6)]}],
        [{"name": "steps", "columns": [[f"c{number}", "<i8"] for number in range(40_000)]}],
        [{"name": f"t{number}", "columns": [["a", "<i8"]]} for number in range(20_000)],
        [{"name": "steps", "columns": [["a", "|S9999"] * 1]}] * 20_000,
    )[int(random.integers(4))]
    return _with_header({"header": header, "tables": tables}) + random.bytes(1 << 16) * 512


def _claiming_journal(run: RunCopy, rank: int, random: Random) -> bytes:
    """Return a journal whose header claims gigabytes, or is one of the largest that are read."""
    texts = (b"[" * 900_000, b'{"header":' * 90_000, b"9" * 900_000, b'{"header": {"rank": ' + b"9" * 900_000 + b"}}")
    text = texts[int(random.integers(len(texts)))]
    size = (len(text), len(text), 1 << 31, (1 << 32) - 1)[int(random.integers(4))]
    return MAGIC + struct.pack("<II", size, zlib.crc32(text)) + text


def _with_header(description: Mapping[str, Any]) -> bytes:
    text = json.dumps(description).encode()[: (1 << 20) - 8]
    text += b" " * (-len(text) % 8)
    return MAGIC + struct.pack("<II", len(text), zlib.crc32(text)) + text


def _content(run: RunCopy, rank: int) -> Any:
    return decode(run.journal(rank).read_bytes(), str(run.journal(rank)))


def _largest_journals(run: RunCopy, random: Random) -> Damaged:
    """Give each rank one of the largest journals: alone it may pass, all together they take a gigabyte."""
    content = None
    for rank in sorted(run.ranks):
        header = read_trace(run.file(rank)).header
        if content is None:
            rows = np.zeros(100_000, row_dtypes()["steps"])
            content = encode_records(0, RecordKind.ROW, 0, rows)
        run.journal(rank).write_bytes(encode_header(header, row_dtypes()) + content * 10)
    return _within_memory(run, random, of_ranks(run, run.ranks))


def _record(make: Callable[[Random, int], bytes]) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that writes one of the JSON files; it has to be left out, or what of it is bounded shown."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        name = RECORDS[int(random.integers(len(RECORDS)))]
        path = run.attempt.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(make(random, _RESULT_BYTES if name == "result.json" else _JSON_BYTES))
        return _within_memory(run, random, Damaged(places=(str(run.path),)))

    return damage


def _nested_json(random: Random, size: int) -> bytes:
    return (
        b"[" * 200_000,
        b'{"ranks":' * 100_000,
        b"[" * 900 + b"]" * 900,
        b'{"ranks": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"environment": ' + b'{"HPCPACE_LAB_EMULATION":' * 800 + b"1" + b"}" * 801,
        b'{"peak_memory": ' + b"[" * 900 + b"]" * 900 + b"}",
    )[int(random.integers(6))]


def _numbers_of_json(random: Random, size: int) -> bytes:
    number = (b"9" * 100_000, b"1e999", b"-Infinity", b"NaN", b"1" + b"0" * 4000, b"1e-999999999")[
        int(random.integers(6))
    ]
    return (
        b"[" + number + b"]",
        number,
        b'{"ranks": [{"rank": ' + number + b', "host": "n"}]}',
        b'{"outcome": "finished", "cause": "", "peak_memory": [{"rank": 0, "rss_bytes": ' + number + b"}]}",
        b'{"policy": "p", "tried": "", "is_on": true, "sentence": "", "mechanisms": [], "points": [], "trial": '
        b'{"outcome": "", "num_pairs": ' + number + b', "step_off_ns": ' + number + b"}}",
    )[int(random.integers(5))]


def _many_values_of_json(random: Random, size: int) -> bytes:
    """Return as many of the smallest values as the largest file holds, or one text of that size."""
    value = (b"[],", b"{},", b"1,", b'"a",', b'{"a":1},', b"[[[]]],")[int(random.integers(6))]
    values = value * (size // len(value))
    return (
        b"[" + values[:-1] + b"]",
        b'{"ranks": [' + values[:-1] + b"]}",
        b'{"versions": {"a": [' + values[:-1] + b"]}}",
        b'{"cause": "' + b"x" * size + b'"}',
    )[int(random.integers(4))]


def _many_names_of_json(random: Random, size: int) -> bytes:
    """Return an object of as many names as fit, where a reader would show each."""
    num_names = size // 24
    names = b",".join(b'"n%08d": "v"' % number for number in range(num_names))
    ranks = b",".join(b'{"rank": %d, "host": "h%d"}' % (number, number) for number in range(size // 40))
    return (
        b'{"versions": {' + names + b"}}",
        b'{"ranks": [' + ranks + b"]}",
        b'{"environment": {' + names + b"}}",
        b"{" + names + b"}",
    )[int(random.integers(4))]


def _large_snapshots(run: RunCopy, random: Random) -> Damaged:
    """Leave many snapshots, and some that are as large as any."""
    folder = run.attempt.path / "snapshot"
    folder.mkdir()
    sound = snapshot_text(take_host(Tree(), host="n0"))
    for number in range(int(random.integers(100, 400))):
        (folder / f"h{number}.json").write_text(sound)
    for number in range(4):
        (folder / f"large-{number}.json").write_bytes(_many_values_of_json(random, _JSON_BYTES))
    return _within_memory(run, random, Damaged(places=(str(run.path),)))


_HDF5, _JOURNALS, _JSON = "HDF5 bombs", "journal bombs", "JSON bombs"
_BILLION = 1 << 30
KINDS = (
    *(
        Kind(name=f"bomb-{name}", group=_HDF5, damage=in_one_rank(attack), specimens=_SPECIMENS, weight=weight)
        for name, attack, weight in (
            ("billion-rows", rows_of_zeros(_BILLION), 0.7),
            ("million-rows", rows_of_zeros(4_000_000), 0.7),
            ("claimed-rows", _claimed_rows, 0.7),
            ("deflate", _deflate_bomb, 1.5),
            ("odd-chunks", _odd_chunks, 1),
            ("large-attribute", _large_attribute, 1.5),
            ("many-attributes", _many_attributes, 0.4),
            ("nested-groups", _nested_groups, 0.5),
            ("many-links", _many_links, 0.3),
        )
    ),
    *(
        Kind(name=f"bomb-{name}-all", group=_HDF5, damage=in_all_ranks(attack), specimens=("plain",), weight=0.5)
        for name, attack in (
            ("million-rows", rows_of_zeros(2_000_000)),
            ("rows-that-fit", rows_of_zeros(500_000)),
            ("deflate", _deflate_bomb),
        )
    ),
    *(
        Kind(name=f"bomb-{name}", group=_HDF5, damage=in_bytes(change), specimens=_SPECIMENS, weight=0.3)
        for name, change in (
            ("many-heaps", _many_heaps),
            ("small-objects-of-heaps", _small_objects_of_heaps),
            ("holes", _holes),
        )
    ),
    *(
        Kind(name=f"bomb-journal-{name}", group=_JOURNALS, damage=_journalled(make), specimens=("killed",), weight=0.6)
        for name, make in (
            ("long", _long_journal),
            ("alternating", _alternating_journal),
            ("wide", _wide_journal),
            ("claiming", _claiming_journal),
        )
    ),
    Kind(name="bomb-journals", group=_JOURNALS, damage=_largest_journals, specimens=("plain",), weight=0.3),
    *(
        Kind(name=f"bomb-json-{name}", group=_JSON, damage=_record(make), specimens=("plain",), weight=weight)
        for name, make, weight in (
            ("nested", _nested_json, 1.5),
            ("numbers", _numbers_of_json, 1.5),
            ("values", _many_values_of_json, 1.2),
            ("names", _many_names_of_json, 0.8),
        )
    ),
    Kind(name="bomb-snapshots", group=_JSON, damage=_large_snapshots, specimens=("plain",), weight=0.3),
)


_NUM_BOMBS = 64
_LAUNCHER = """
import os, sys
null = os.open(os.devnull, os.O_RDWR)
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, null, 1)])
_, status, usage = os.wait4(pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss)
"""
"""A process has what the one that started it had at that time (getrusage(2)), so a small one starts each command."""
_MEMORY = ("256MiB", "1GiB")
_ROWS = {
    "a billion rows": 1 << 30,
    "40 million rows": 40_000_000,
    "10 million rows": 10_000_000,
    "300,000 rows": 300_000,
    # Of 64 ranks as many operations as are read into memory.
    "60,000 rows": 60_000,
}
_MIXED, _NUM_MIXED_ROWS = ("steps", "phases", "collectives", "groups"), 2_000_000
_TABLES = ("phases", "collectives")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The most that a command took.

    Attributes:
        what: was measured.
        command: that ran: report or dump.
        memory: what `--memory` allowed.
        most_bytes: peak of the resident set, of the largest of its processes.
        limit_bytes: what is promised.
        code: exit code; negative for a signal.
    """

    what: str
    command: str
    memory: str
    most_bytes: int
    limit_bytes: int
    code: int

    @property
    def is_kept(self) -> bool:
        """Whether it ended as it should, below the limit."""
        return self.most_bytes <= self.limit_bytes and 0 <= self.code <= 3


def measure(folder: Path) -> Iterator[Measured]:
    """Yield what reports and dumps take: of a sound run, of one bomb, and of 64 of them in one run."""
    folder.mkdir(parents=True, exist_ok=True)
    shelf = Shelf(folder / "specimens")
    random = np.random.default_rng(1)
    sound = shelf.copy("plain", folder / "sound")
    large = RunCopy(SyntheticRun(num_ranks=_NUM_BOMBS, noise=0.02).write(folder / "large").path, _NUM_BOMBS, shelf)
    for memory in _MEMORY:
        yield from _of("a sound run of 4 ranks", sound, memory, ("report", "dump"))
        yield from _of(f"a sound run of {_NUM_BOMBS} ranks", large, memory, ("report",))
    mixed = shelf.copy("plain", folder / "mixed")
    for rank, table in enumerate(_MIXED):
        _bomb(mixed, [rank], rows_of_zeros(_NUM_MIXED_ROWS, (table,)), random)
    for memory in _MEMORY:
        what = f"{_NUM_MIXED_ROWS:,} rows each of {', '.join(_MIXED)}, each in one rank"
        yield from _of(what, mixed, memory, ("report",))
    for table in _TABLES:
        for name, num_rows in _ROWS.items():
            one = shelf.copy("plain", folder / "one")
            _bomb(one, [1], rows_of_zeros(num_rows, (table,)), random)
            all_of_it = RunCopy(shutil.copytree(large.path, folder / "all"), _NUM_BOMBS, shelf)
            _bomb(all_of_it, range(_NUM_BOMBS), rows_of_zeros(num_rows, (table,)), random)
            for memory in _MEMORY:
                yield from _of(f"{table} of {name} in one rank", one, memory, ("report", "dump"))
                yield from _of(f"{table} of {name} in {_NUM_BOMBS} ranks", all_of_it, memory, ("report",))
            shutil.rmtree(one.path)
            shutil.rmtree(all_of_it.path)


def _bomb(run: RunCopy, ranks: range | list[int], attack: Callable[..., None], random: Random) -> None:
    first, *others = ranks
    with opened(run.file(first)) as file:
        attack(file, random)
    for rank in others:
        shutil.copyfile(run.file(first), run.file(rank))
        with opened(run.file(rank)) as file:
            file.attrs["rank"] = rank


def _of(what: str, run: RunCopy, memory: str, commands: tuple[str, ...]) -> Iterator[Measured]:
    for command in commands:
        named = str(run.path) if command == "report" else str(run.file(1))
        arguments = [sys.executable, "-m", "hpcpace", command, named, "--memory", memory]
        launched = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        code, most_kib = map(int, launched.stdout.split())
        yield Measured(
            what=what,
            command=command,
            memory=memory,
            most_bytes=most_kib << 10,
            limit_bytes=memory_limit_bytes(memory),
            code=code,
        )
