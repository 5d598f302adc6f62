"""Damage to journals of killed ranks, and runs among whose files are those of other runs and starts.

Journals are torn, flipped, of another run, or sound with impossible content.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.damage.chance import Random
from experiments.damage.content import CHANGES, NO_FILES, Change, change_bytes, exchange_files, flips, instead
from experiments.damage.specimen import Damage, Damaged, Kind, RunCopy, kinds_of, of_rank, of_ranks, some_rank
from experiments.damage.tables import absurd, columns, opened
from hpcpace.trace.encoding import row_dtypes
from hpcpace.trace.journal import RecordKind, _checks, decode, encode_header, encode_records, record_dtype

_KILLED = ("killed", "hang")
_PREAMBLE = struct.Struct("<8sII")
_DTYPES = row_dtypes()


def journalled(run: RunCopy, random: Random) -> int:
    """Return a rank that has a journal."""
    return int(random.of(_with_journals(run)))


def _with_journals(run: RunCopy) -> list[int]:
    return [rank for rank in sorted(run.ranks) if run.journal(rank).exists()]


def _changed(change: Change, *, of_file: bool = False) -> Damage:
    """Return the damage to the bytes of a journal, or of both files of its rank."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        rank = journalled(run, random)
        for path in (run.journal(rank), *([run.file(rank)] if of_file else [])):
            change_bytes(path, random, change)
        return of_rank(run, rank)

    return damage


def _torn(content: bytearray, random: Random) -> None:
    """Cut the last records off, as a kill inside of a write does."""
    del content[-random.count(1, min(200, len(content))) :]


def _of_another_run(run: RunCopy, random: Random) -> Damaged:
    rank = journalled(run, random)
    rewrite_header(run, rank, random.one({"run_id": "other"}, {"attempt": 7}, {"rank": (rank + 1) % run.num_ranks}))
    return of_rank(run, rank, run.journal(rank).name)


def rewrite_header(run: RunCopy, rank: int, changes: Mapping[str, Any], tables: Any = None) -> None:
    """Write the header of a journal anew, with a sound checksum."""
    content = run.journal(rank).read_bytes()
    magic, size, _ = _PREAMBLE.unpack_from(content)
    description = json.loads(content[_PREAMBLE.size : _PREAMBLE.size + size])
    description["header"] |= changes
    if tables is not None:
        description["tables"] = tables
    text = json.dumps(description).encode()
    text += b" " * (-len(text) % 8)
    start = _PREAMBLE.pack(magic, len(text), zlib.crc32(text)) + text
    run.journal(rank).write_bytes(start + content[_PREAMBLE.size + size :])


_ODD = (None, [], {}, 1.5, float("nan"), -1, 2**70, "", "x" * 10_000, "\x1b[2J", True)
_NAMES = ("run_id", "rank", "world_size", "host", "attempt", "node", "pp", "interfaces", "format", "format_version")
_ODD_COLUMNS: tuple[Any, ...] = (
    [],
    [["step", "|O"]],
    [["step", "<i4"], ["step", "<i4"]],
    [["enter_ns", "<u8"]],
    [[1, "<i4"]],
    {"a": "<i4"},
)
_ODD_TABLES: tuple[Any, ...] = (
    *(None, [], "steps", [{"name": "steps"}], [{"name": ["a"], "columns": {"a": "<i4"}}]),
    [{"name": "steps", "columns": [["step", "|S9999"] * 1]}] * 300,
    *([{"name": "steps", "columns": odd}] for odd in _ODD_COLUMNS),
)


def _header(changes: Callable[[Random], tuple[Mapping[str, Any], Any]]) -> Damage:
    """Return the damage to the header of a journal, whose checksum stays sound."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        rank = journalled(run, random)
        rewrite_header(run, rank, *changes(random))
        return of_rank(run, rank)

    return damage


def _odd_rows(run: RunCopy, random: Random) -> Damaged:
    """Write a journal with sound checksums whose rows are absurd, or numbered as no rows are."""
    rank = journalled(run, random)
    path = run.journal(rank)
    content = decode(path.read_bytes(), str(path))
    made = [encode_header(content.header, _DTYPES)]
    for name, (_, rows) in content.rows.items():
        rows = rows.copy()
        if len(rows) and random.maybe(0.4):
            column = random.of(rows.dtype.names)
            rows[column] = absurd(rows.dtype[column], len(rows), random)
        records = encode_records(tuple(_DTYPES).index(name), RecordKind.ROW, 0, rows)
        found = np.frombuffer(records, record_dtype(rows.dtype)).copy()
        first = random.one(0, 0, 5, 2**31, 2**62, 2**64 - len(rows) - 1)
        found["row"] = np.uint64(first) + np.arange(len(found), dtype=np.uint64)
        found["check"] = _checks(found)
        made.append(found.tobytes())
    path.write_bytes(b"".join(made))
    return of_rank(run, rank)


def _exchanged(run: RunCopy, random: Random) -> Damaged:
    one, other = random.permutation(_with_journals(run))[:2].tolist()
    exchange_files(run.journal(one), run.journal(other))
    return of_ranks(run, {one, other}, run.journal(one).name, run.journal(other).name)


def _removed(run: RunCopy, random: Random) -> Damaged:
    rank = journalled(run, random)
    run.journal(rank).unlink()
    return of_rank(run, rank, run.file(rank).name)


def _left_alone(run: RunCopy, random: Random) -> Damaged:
    """Remove the HDF5 file: the journal has all rows of these short runs."""
    rank = journalled(run, random)
    run.file(rank).unlink()
    return of_rank(run, rank, run.file(rank).name, hurt=frozenset())


def _beside_closed(run: RunCopy, random: Random) -> Damaged:
    """Put a journal of another rank, or a file that is not a journal, next to a file that was closed."""
    rank = some_rank(run, random)
    run.journal(rank).write_bytes(random.bytes(random.count(0, 5000)))
    return of_rank(run, rank, run.journal(rank).name)


# Files of other runs and starts

_HOUR_NS = 3_600_000_000_000
_SPECIMENS = ("plain", "hosts")
_TIMES = (
    *("steps/begin_ns", "steps/end_ns", "phases/begin_ns", "phases/end_ns"),
    *("collectives/enter_ns", "collectives/exit_ns", "clock/local_ns"),
)


def _put_foreign(run: RunCopy, rank: int, target: Path, run_id: str = "synthetic", attempt: int = 0) -> None:
    """Copy a rank's file of another job to a path, with the names of its run and start."""
    target.unlink(missing_ok=True)
    shutil.copyfile(run.shelf.kept("pipeline") / "attempt-0" / "trace" / f"rank-{rank:05d}.h5", target)
    with opened(target) as file:
        file.attrs["run_id"], file.attrs["attempt"] = run_id, attempt


def _some_names(random: Random) -> tuple[str, int]:
    """Return run id and attempt of a foreign start: another run, another attempt of this one, or both."""
    found: tuple[str, int] = random.one(("other", 0), ("synthetic", 3), ("other", 3), ("", 0), ("SYNTHETIC", 0))
    return found


def _some(run: RunCopy, random: Random, count: int) -> list[int]:
    return sorted(random.permutation(run.num_ranks)[:count].tolist())


def _left_out(run: RunCopy, ranks: list[int]) -> Damaged:
    return of_ranks(run, ranks, *(run.file(rank).name for rank in ranks), "left out", blamed=frozenset())


def _runs(run: RunCopy, random: Random) -> Damaged:
    """Let fewer than half of the files be of another run."""
    ranks, names = _some(run, random, random.count(1, (run.num_ranks + 1) // 2)), _some_names(random)
    for rank in ranks:
        _put_foreign(run, rank, run.file(rank), *names)
    return _left_out(run, ranks)


def _several_runs(run: RunCopy, random: Random) -> Damaged:
    """Take each foreign file from a different run."""
    ranks = _some(run, random, run.num_ranks // 2)
    for number, rank in enumerate(ranks):
        _put_foreign(run, rank, run.file(rank), f"other-{number}")
    return _left_out(run, ranks)


def _half(run: RunCopy, random: Random) -> Damaged:
    """Let half of the files be of another run, which only the name of the attempt's folder can decide, or nothing."""
    ranks, attempt = _some(run, random, run.num_ranks // 2), random.one(0, 5)
    for rank in ranks:
        _put_foreign(run, rank, run.file(rank), "other", attempt)
    return _left_out(run, ranks) if attempt else of_ranks(run, run.ranks, "as many traces are of", blamed=frozenset())


def _misnamed(run: RunCopy, random: Random) -> Damaged:
    """Give the files of two ranks each other's name, one or both of them of another run."""
    one, other = random.permutation(run.num_ranks)[:2].tolist()
    kept = run.file(other).read_bytes()
    _put_foreign(run, one, run.file(other), *_some_names(random))
    run.file(one).unlink()
    says = [run.file(other).name]
    if random.maybe():
        run.file(one).write_bytes(kept)
        says.append(run.file(one).name)
    return of_ranks(run, {one, other}, *says, blamed=frozenset())


def _beside(run: RunCopy, random: Random) -> Damaged:
    """Add a file of another run under a name that no rank has."""
    path = run.file(run.num_ranks + random.count(0, 200))
    _put_foreign(run, some_rank(run, random), path, *_some_names(random))
    return Damaged(places=(path.name,), says=(path.name, "left out"), blamed=frozenset())


def _start(run: RunCopy, random: Random) -> Damaged:
    """Leave the file of an earlier start that has the same names: only its times tell."""
    rank = some_rank(run, random)
    shift_ns = random.count(1, 48) * _HOUR_NS * random.one(1, -1)
    _put_foreign(run, rank, run.file(rank))
    with opened(run.file(rank)) as file:
        file.attrs["world_size"] = run.num_ranks
        columns(lambda old, _: old + shift_ns, *_TIMES)(file, random)
    return of_rank(run, rank, run.file(rank).name, "nothing of it is believed", blamed=frozenset())


def _twice(make: Callable[[Path, Path], object]) -> Damage:
    """Return the damage that lets several names be one rank's file."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        source, *targets = random.permutation(run.num_ranks)[: random.count(2, run.num_ranks)].tolist()
        for target in targets:
            run.file(target).unlink()
            make(run.file(source), run.file(target))
        return of_ranks(run, targets, *(run.file(target).name for target in targets), blamed=frozenset())

    return damage


def _journals(run: RunCopy, random: Random) -> Damaged:
    """Put both files of a killed rank of another run in the place of a rank's."""
    rank = random.of([*run.ranks - {*_with_journals(run)}])
    killed = run.shelf.kept("hang") / "attempt-0" / "trace"
    # A file that was left open cannot be changed through HDF5; texts are without checksum.
    foreign = (killed / run.file(rank).name).read_bytes().replace(b"synthetic", b"different")
    run.file(rank).write_bytes(foreign)
    shutil.copyfile(killed / run.journal(rank).name, run.journal(rank))
    rewrite_header(run, rank, {"run_id": "different"})
    return _left_out(run, [rank])


_GROUP, _FOREIGN_RUNS = "journals", "files of other runs"
_DAMAGES: Mapping[str, Damage] = {
    **{name: _changed(change) for name, change in CHANGES.items()},
    **{"torn": _changed(_torn), "flip-header": _changed(flips(4, 1024)), "and-file": _changed(flips(8), of_file=True)},
    "odd-header": _header(lambda random: ({random.of(_NAMES): random.of(_ODD)}, None)),
    "odd-tables": _header(lambda random: ({}, random.of(_ODD_TABLES))),
    **{"odd-rows": _odd_rows, "of-another-run": _of_another_run, "removed": _removed, "alone": _left_alone},
}
KINDS: tuple[Kind, ...] = (
    *kinds_of(_GROUP, _DAMAGES, prefix="journal-", specimens=_KILLED, weight=2),
    *kinds_of(_GROUP, {"journals-exchanged": _exchanged}, specimens=_KILLED),
    *kinds_of(_GROUP, {"journal-beside-closed": _beside_closed}, specimens=("plain", "single")),
    *kinds_of(
        _GROUP,
        {name: instead(make, ".journal") for name, make in NO_FILES.items() if name != "socket"},
        prefix="journal-",
        specimens=("hang",),
        weight=0.4,
    ),
    *kinds_of(
        _FOREIGN_RUNS,
        {"runs": _runs, "several": _several_runs, "half": _half, "misnamed": _misnamed, "starts": _start},
        prefix="mixed-",
        specimens=_SPECIMENS,
        weight=2,
    ),
    *kinds_of(_FOREIGN_RUNS, {"mixed-beside": _beside}, specimens=_SPECIMENS),
    *kinds_of(_FOREIGN_RUNS, {"mixed-journals": _journals}, specimens=("killed",)),
    *kinds_of(
        _FOREIGN_RUNS,
        {"copy": _twice(shutil.copyfile), "hard-link": _twice(os.link)},
        prefix="twice-by-",
        specimens=_SPECIMENS,
    ),
)
