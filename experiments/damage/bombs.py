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

from experiments.damage import specimen
from experiments.damage.chance import Random, random_of
from experiments.damage.child import memory_limit_bytes
from experiments.damage.journals import to_journal
from experiments.damage.links import RECORDS
from experiments.damage.reports import kinds_of
from experiments.damage.tables import TABLES, Attack, hdf5, opened, resize
from experiments.synthetic_run import SyntheticRun
from hpcpace.trace.journal import MAGIC, RecordKind, decode, encode_header, encode_records
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import TraceHeader, header_values, row_dtypes

MEMORY = "256MiB"
_MAX_CHUNK_ROWS = 1 << 20
_JOURNAL_BYTES = 120 << 20
_JSON_BYTES = 15 << 20
_RESULT_BYTES = 60 << 20


def _bounded(damage: specimen.Damage) -> specimen.Damage:
    """Return the same damage, on which every program has to keep to a small memory."""
    return lambda run, random: specimen.seen_by_all(run, random, replace(damage(run, random), memory=MEMORY))


def _gzipped(table: h5py.Group, column: str, shape: int, chunk_rows: int) -> h5py.Dataset:
    """Make a column anew, as deflated chunks that are to be written, and return it."""
    dtype = table[column].dtype
    del table[column]
    made = {"shape": (shape,), "maxshape": (None,), "chunks": (chunk_rows,), "dtype": dtype}
    return table.create_dataset(column, compression="gzip", shuffle=True, **made)


def rows_of_zeros(num_rows: int, tables: tuple[str, ...] = TABLES) -> Attack:
    """Return the attack by a table of so many rows, which compress to a thousandth: all chunks are there and sound."""
    # Several chunks: of one that ranks have alike, all would have the same memory.
    chunk_rows = min(num_rows // 4 + 1, _MAX_CHUNK_ROWS)

    def attack(file: h5py.File, random: Random) -> None:
        table = file[random.of(tables)]
        for name in table:
            stored = _gzipped(table, name, num_rows, chunk_rows)
            chunk = zlib.compress(bytes(chunk_rows * stored.dtype.itemsize), 9)
            for start in range(0, num_rows, chunk_rows):
                stored.id.write_direct_chunk((start,), chunk)

    return attack


def _nested_groups(file: h5py.File, random: Random) -> None:
    """Nest groups thousands deep, in a group that is read or beside it."""
    place = file[random.one("/", "steps", "groups")]
    for _ in range(random.count(1000, 5000)):
        place = place.create_group("g")


_HEAP = b"GCOL\x01\0\0\0" + struct.pack("<Q", 1 << 20)


def _many_heaps(path: Path, random: Random) -> None:
    """Append what looks like a million global heaps, each of a megabyte and within the other."""
    with open(path, "ab") as file:
        file.write((_HEAP + struct.pack("<HHIQ", 0, 0, 0, 1 << 20)) * (1 << 20))


def _journal(content: Callable[[TraceHeader, Random], bytes]) -> specimen.Make:
    """Return what writes a journal with the header of the one that is there."""
    return lambda path, random: path.write_bytes(content(decode(path.read_bytes(), str(path)).header, random))


def _rows(num_rows: int, *tables: str) -> bytes:
    """Return records of tables, all zeros, with sound checksums."""
    dtypes = row_dtypes()
    return b"".join(
        encode_records(tuple(dtypes).index(name), RecordKind.ROW, 0, np.zeros(num_rows, dtypes[name]))
        for name in tables
    )


def _long_journal(header: TraceHeader, random: Random) -> bytes:
    """Return as many rows as fit into the largest journal: of one table, or of two by turns, each a run of records."""
    records = random.one(_rows(100_000, random.of(TABLES[:4])), _rows(1, "steps", "phases"))
    return encode_header(header, row_dtypes()) + bytes(records) * (_JOURNAL_BYTES // len(records))


def _wide_journal(header: TraceHeader, random: Random) -> bytes:
    """Return a journal whose tables have the widest rows that it can describe, or thousands of columns, or tables."""
    tables = random.one(
        [{"name": "steps", "columns": [[f"c{number}", "|S9999"] for number in range(6)]}],
        [{"name": "steps", "columns": [[f"c{number}", "<i8"] for number in range(40_000)]}],
        [{"name": f"t{number}", "columns": [["a", "<i8"]]} for number in range(20_000)],
        [{"name": "steps", "columns": [["a", "|S9999"]]}] * 20_000,
    )
    text = json.dumps({"header": header_values(header), "tables": tables}).encode()[: (1 << 20) - 8]
    text += b" " * (-len(text) % 8)
    return _preamble(text) + text + random.bytes(1 << 16) * 512


def _preamble(text: bytes, size: int | None = None) -> bytes:
    return MAGIC + struct.pack("<II", len(text) if size is None else size, zlib.crc32(text))


def _claiming_journal(header: TraceHeader, random: Random) -> bytes:
    """Return a journal whose header claims gigabytes, or is one of the largest that are read."""
    text = random.one(b"[" * 900_000, b'{"header":' * 90_000, b"9" * 900_000, b'{"header": {"rank": ' + b"9" * 900_000)
    return _preamble(text, random.one(len(text), len(text), 1 << 31, (1 << 32) - 1)) + bytes(text)


def _largest_journals(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Give each rank one of the largest journals: alone it may pass, all together they take a gigabyte."""
    content = _rows(100_000, "steps") * 10
    for rank in run.ranks:
        header = read_trace(run.file(rank)).header
        run.journal(rank).write_bytes(encode_header(header, row_dtypes()) + content)
    return specimen.of_ranks(run, run.ranks)


def _record(make: Callable[[Random, int], bytes]) -> specimen.Damage:
    """Return the damage that writes one of the JSON files; it has to be left out, or what of it is bounded shown."""

    def damage(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
        name = random.of(RECORDS)
        path = run.attempt.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(make(random, _RESULT_BYTES if name == "result.json" else _JSON_BYTES))
        return specimen.of_run(run)

    return damage


_NESTED = (
    *(b"[" * 200_000, b'{"ranks":' * 100_000, b"[" * 900 + b"]" * 900, b'{"ranks": ' + b"[" * 500 + b"]" * 500 + b"}"),
    b'{"environment": ' + b'{"HPCPACE_LAB_EMULATION":' * 800 + b"1" + b"}" * 801,
    b'{"peak_memory": ' + b"[" * 900 + b"]" * 900 + b"}",
)
_NUMBERS = (b"9" * 100_000, b"1e999", b"-Infinity", b"NaN", b"1" + b"0" * 4000, b"1e-999999999")
_OF_NUMBERS = (
    *(b"[%b]", b"%b", b'{"ranks": [{"rank": %b, "host": "n"}]}'),
    b'{"outcome": "finished", "cause": "", "peak_memory": [{"rank": 0, "rss_bytes": %b}]}',
    b'{"policy": "p", "tried": "", "is_on": true, "sentence": "", "mechanisms": [], "points": [], "trial": '
    b'{"outcome": "", "num_pairs": %b}}',
)
_SMALL = (b"[],", b"{},", b"1,", b'"a",', b'{"a":1},', b"[[[]]],")
_OF_VALUES = (b"[%b]", b'{"ranks": [%b]}', b'{"versions": {"a": [%b]}}')
_OF_NAMES = (b'{"versions": {%b}}', b'{"environment": {%b}}', b"{%b}")


def _many_values(random: Random, size: int) -> bytes:
    """Return as many of the smallest values as the largest file holds, or one text of that size."""
    value = random.of(_SMALL)
    values = random.of(_OF_VALUES) % (value * (size // len(value)))[:-1]
    return bytes(random.one(values, values, values, b'{"cause": "' + b"x" * size + b'"}'))


def _many_names(random: Random, size: int) -> bytes:
    """Return an object of as many names as fit, where a reader would show each."""
    names = b",".join(b'"n%08d": "v"' % number for number in range(size // 24))
    ranks = b",".join(b'{"rank": %d, "host": "h%d"}' % (number, number) for number in range(size // 40))
    return bytes(random.one(*(place % names for place in _OF_NAMES), b'{"ranks": [%b]}' % ranks))


def _large_snapshots(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Leave many snapshots, and some that are as large as any."""
    folder = run.attempt.path / "snapshot"
    folder.mkdir()
    sound = specimen.snapshot_of("n0")
    for number in range(random.count(100, 400)):
        (folder / f"h{number}.json").write_text(sound)
    for number in range(4):
        (folder / f"large-{number}.json").write_bytes(_many_values(random, _JSON_BYTES))
    return specimen.of_run(run)


_HDF5, _JOURNALS, _JSON = "HDF5 bombs", "journal bombs", "JSON bombs"
_BILLION = 1 << 30
_IN_ONE: Mapping[str, Attack] = {
    **{"billion-rows": rows_of_zeros(_BILLION), "million-rows": rows_of_zeros(4_000_000)},
    # Rows whose chunks were never written, within what deflate could make of the file, or far beyond.
    "claimed-rows": lambda file, random: resize(file[random.of(TABLES)], random.one(10**6, 10**7, 2**31, 2**62)),
    "nested-groups": _nested_groups,
}
_IN_ALL: Mapping[str, Attack] = {**{"million-rows": rows_of_zeros(2_000_000), "rows-that-fit": rows_of_zeros(500_000)}}
_OF_JOURNALS = {"long": _long_journal, "wide": _wide_journal, "claiming": _claiming_journal}
_OF_JSON: Mapping[str, Callable[[Random, int], bytes]] = {
    "nested": lambda random, _: random.of(_NESTED),
    "numbers": lambda random, _: random.of(_OF_NUMBERS) % random.of(_NUMBERS),
    **{"values": _many_values, "names": _many_names},
}


def _kinds(group: str, damages: Mapping[str, specimen.Damage], **more: Any) -> list[specimen.Kind]:
    return kinds_of(group, {name: _bounded(one) for name, one in damages.items()}, "bomb-", **more)


_HDF5_IN_ONE = {name: specimen.to_file(hdf5(attack)) for name, attack in _IN_ONE.items()}
_HDF5_IN_ALL = {f"{name}-all": specimen.to_all(hdf5(attack)) for name, attack in _IN_ALL.items()}
_IN_JOURNALS = {f"journal-{name}": to_journal(_journal(content)) for name, content in _OF_JOURNALS.items()}
_IN_JSON = {f"json-{name}": _record(make) for name, make in _OF_JSON.items()}
_SPECIMENS = "plain hosts single"
KINDS = (
    *_kinds(_HDF5, _HDF5_IN_ONE, on=_SPECIMENS, weight=0.8),
    *_kinds(_HDF5, _HDF5_IN_ALL, on="plain", weight=0.5),
    *_kinds(_HDF5, {"many-heaps": specimen.to_file(_many_heaps)}, on=_SPECIMENS, weight=0.3),
    *_kinds(_JOURNALS, _IN_JOURNALS, on="killed", weight=0.8),
    *_kinds(_JOURNALS, {"journals": _largest_journals}, on="plain", weight=0.3),
    *_kinds(_JSON, _IN_JSON, on="plain", weight=1.2),
    *_kinds(_JSON, {"snapshots": _large_snapshots}, on="plain", weight=0.3),
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
    shelf = specimen.Shelf(folder / "specimens")
    random = random_of("memory", 1)
    sound = shelf.copy("plain", folder / "sound")
    large = specimen.RunCopy(
        SyntheticRun(num_ranks=_NUM_BOMBS, noise=0.02).write(folder / "large").path, _NUM_BOMBS, shelf
    )
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
            all_of_it = specimen.RunCopy(shutil.copytree(large.path, folder / "all"), _NUM_BOMBS, shelf)
            _bomb(all_of_it, range(_NUM_BOMBS), rows_of_zeros(num_rows, (table,)), random)
            for memory in _MEMORY:
                yield from _of(f"{table} of {name} in one rank", one, memory, ("report", "dump"))
                yield from _of(f"{table} of {name} in {_NUM_BOMBS} ranks", all_of_it, memory, ("report",))
            shutil.rmtree(one.path)
            shutil.rmtree(all_of_it.path)


def _bomb(run: specimen.RunCopy, ranks: range | list[int], attack: Callable[..., None], random: Random) -> None:
    first, *others = ranks
    with opened(run.file(first)) as file:
        attack(file, random)
    for rank in others:
        shutil.copyfile(run.file(first), run.file(rank))
        with opened(run.file(rank)) as file:
            file.attrs["rank"] = rank


def _of(what: str, run: specimen.RunCopy, memory: str, commands: tuple[str, ...]) -> Iterator[Measured]:
    for command in commands:
        named = str(run.path) if command == "report" else str(run.file(1))
        arguments = [sys.executable, "-m", "hpcpace", command, named, "--memory", memory]
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, *arguments]
        launched = subprocess.run(launcher, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        code, most_kib = map(int, launched.stdout.split())
        bytes_ = {"most_bytes": most_kib << 10, "limit_bytes": memory_limit_bytes(memory)}
        yield Measured(what=what, command=command, memory=memory, code=code, **bytes_)
