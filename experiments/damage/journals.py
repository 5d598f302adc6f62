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

from experiments.damage import specimen
from experiments.damage.chance import Random
from experiments.damage.content import CHANGES, NO_FILES, Change, change_bytes, edited, exchange_files, flips, instead
from experiments.damage.reports import kinds_of
from experiments.damage.tables import absurd, columns, opened
from hpcpace.trace.journal import RecordKind, _checks, decode, encode_header, encode_records, record_dtype
from hpcpace.trace.schema import row_dtypes

_PREAMBLE = struct.Struct("<8sII")
_DTYPES = row_dtypes()


def journalled(run: specimen.RunCopy, random: Random) -> int:
    """Return a rank that has a journal."""
    return int(random.of(_with_journals(run)))


def _with_journals(run: specimen.RunCopy) -> list[int]:
    return [rank for rank in sorted(run.ranks) if run.journal(rank).exists()]


def to_journal(make: specimen.Make, *says: str) -> specimen.Damage:
    """Return the damage to the journal of one rank."""
    return specimen.to_file(make, *says, suffix=".journal", pick=journalled)


def _both(path: Path, random: Random) -> None:
    """Flip bits in the journal and in the file of its rank."""
    for one in (path, path.with_suffix(".h5")):
        change_bytes(one, random, flips(8))


def _torn(content: bytearray, random: Random) -> None:
    """Cut the last records off, as a kill inside of a write does."""
    del content[-random.count(1, min(200, len(content))) :]


def _of_another_run(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    rank = journalled(run, random)
    changes = random.one({"run_id": "other"}, {"attempt": 7}, {"rank": (rank + 1) % run.num_ranks})
    rewrite_header(run.journal(rank), changes)
    return specimen.of_rank(run, rank, run.journal(rank).name)


def rewrite_header(path: Path, changes: Mapping[str, Any], tables: Any = None) -> None:
    """Write the header of a journal anew, with a sound checksum."""
    content = path.read_bytes()
    magic, size, _ = _PREAMBLE.unpack_from(content)
    description = json.loads(content[_PREAMBLE.size : _PREAMBLE.size + size])
    description["header"] |= changes
    if tables is not None:
        description["tables"] = tables
    text = json.dumps(description).encode()
    text += b" " * (-len(text) % 8)
    start = _PREAMBLE.pack(magic, len(text), zlib.crc32(text)) + text
    path.write_bytes(start + content[_PREAMBLE.size + size :])


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


def _odd_rows(path: Path, random: Random) -> None:
    """Write a journal with sound checksums whose rows are absurd, or numbered as no rows are."""
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


def _exchanged(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    one, other = random.permutation(_with_journals(run))[:2].tolist()
    exchange_files(run.journal(one), run.journal(other))
    return specimen.of_ranks(run, {one, other}, run.journal(one).name, run.journal(other).name)


def _left_alone(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Remove the HDF5 file: the journal has all rows of these short runs."""
    rank = journalled(run, random)
    run.file(rank).unlink()
    return specimen.of_rank(run, rank, run.file(rank).name, hurt=frozenset())


def _noise(path: Path, random: Random) -> None:
    """Write what is no journal."""
    path.write_bytes(random.bytes(random.count(0, 5000)))


# Files of other runs and starts

_HOUR_NS = 3_600_000_000_000
_TIMES = (
    *("steps/begin_ns", "steps/end_ns", "phases/begin_ns", "phases/end_ns"),
    *("collectives/enter_ns", "collectives/exit_ns", "clock/local_ns"),
)


def _put_foreign(run: specimen.RunCopy, rank: int, target: Path, run_id: str = "synthetic", attempt: int = 0) -> None:
    """Copy a rank's file of another job to a path, with the names of its run and start."""
    target.unlink(missing_ok=True)
    shutil.copyfile(run.shelf.kept("pipeline") / "attempt-0" / "trace" / f"rank-{rank:05d}.h5", target)
    with opened(target) as file:
        file.attrs["run_id"], file.attrs["attempt"] = run_id, attempt


def _some_names(random: Random) -> tuple[str, int]:
    """Return run id and attempt of a foreign start: another run, another attempt of this one, or both."""
    found: tuple[str, int] = random.one(("other", 0), ("synthetic", 3), ("other", 3), ("", 0), ("SYNTHETIC", 0))
    return found


def _left_out(run: specimen.RunCopy, ranks: list[int]) -> specimen.Damaged:
    return specimen.of_ranks(run, ranks, *(run.file(rank).name for rank in ranks), "left out", blamed=frozenset())


def _runs(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Let fewer than half of the files be of another run."""
    ranks = sorted(specimen.some_ranks(run, random, random.count(1, (run.num_ranks + 1) // 2)))
    names = _some_names(random)
    for rank in ranks:
        _put_foreign(run, rank, run.file(rank), *names)
    return _left_out(run, ranks)


def _several_runs(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Take each foreign file from a different run."""
    ranks = sorted(specimen.some_ranks(run, random, run.num_ranks // 2))
    for number, rank in enumerate(ranks):
        _put_foreign(run, rank, run.file(rank), f"other-{number}")
    return _left_out(run, ranks)


def _half(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Let half of the files be of another run, which only the name of the attempt's folder can decide, or nothing."""
    ranks, attempt = sorted(specimen.some_ranks(run, random, run.num_ranks // 2)), random.one(0, 5)
    for rank in ranks:
        _put_foreign(run, rank, run.file(rank), "other", attempt)
    return (
        _left_out(run, ranks)
        if attempt
        else specimen.of_ranks(run, run.ranks, "as many traces are of", blamed=frozenset())
    )


def _misnamed(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Give the files of two ranks each other's name, one or both of them of another run."""
    one, other = specimen.some_ranks(run, random, 2)
    kept = run.file(other).read_bytes()
    _put_foreign(run, one, run.file(other), *_some_names(random))
    run.file(one).unlink()
    says = [run.file(other).name]
    if random.maybe():
        run.file(one).write_bytes(kept)
        says.append(run.file(one).name)
    return specimen.of_ranks(run, {one, other}, *says, blamed=frozenset())


def _beside(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Add a file of another run under a name that no rank has."""
    path = run.file(run.num_ranks + random.count(0, 200))
    _put_foreign(run, specimen.some_rank(run, random), path, *_some_names(random))
    return specimen.Damaged(places=(path.name,), says=(path.name, "left out"), blamed=frozenset())


def _start(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Leave the file of an earlier start that has the same names: only its times tell."""
    rank = specimen.some_rank(run, random)
    shift_ns = random.count(1, 48) * _HOUR_NS * random.one(1, -1)
    _put_foreign(run, rank, run.file(rank))
    with opened(run.file(rank)) as file:
        file.attrs["world_size"] = run.num_ranks
        columns(lambda old, _: old + shift_ns, *_TIMES)(file, random)
    return specimen.of_rank(run, rank, run.file(rank).name, "nothing of it is believed", blamed=frozenset())


def _twice(make: Callable[[Path, Path], object]) -> specimen.Damage:
    """Return the damage that lets several names be one rank's file."""

    def damage(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
        source, *targets = random.permutation(run.num_ranks)[: random.count(2, run.num_ranks)].tolist()
        for target in targets:
            run.file(target).unlink()
            make(run.file(source), run.file(target))
        return specimen.of_ranks(run, targets, *(run.file(target).name for target in targets), blamed=frozenset())

    return damage


def _journals(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Put both files of a killed rank of another run in the place of a rank's."""
    rank = random.of([*run.ranks - {*_with_journals(run)}])
    killed = run.shelf.kept("hang") / "attempt-0" / "trace"
    # A file that was left open cannot be changed through HDF5; texts are without checksum.
    foreign = (killed / run.file(rank).name).read_bytes().replace(b"synthetic", b"different")
    run.file(rank).write_bytes(foreign)
    shutil.copyfile(killed / run.journal(rank).name, run.journal(rank))
    rewrite_header(run.journal(rank), {"run_id": "different"})
    return _left_out(run, [rank])


_OF_BYTES: Mapping[str, Change] = {**CHANGES, "torn": _torn, "flip-header": flips(4, 1024)}
_DAMAGES: Mapping[str, specimen.Damage] = {
    **{name: to_journal(edited(change)) for name, change in _OF_BYTES.items()},
    "and-file": to_journal(_both),
    "odd-header": to_journal(lambda path, random: rewrite_header(path, {random.of(_NAMES): random.of(_ODD)})),
    "odd-tables": to_journal(lambda path, random: rewrite_header(path, {}, random.of(_ODD_TABLES))),
    **{"odd-rows": to_journal(_odd_rows), "of-another-run": _of_another_run},
    "removed": to_journal(lambda path, _: path.unlink(), "{path.stem}.h5"),
    "alone": _left_alone,
}
_NO_JOURNALS = {
    name: specimen.to_file(instead(make), "{path.stem}", suffix=".journal")
    for name, make in NO_FILES.items()
    if name != "socket"
}
_MIXED = {"runs": _runs, "several": _several_runs, "half": _half, "misnamed": _misnamed, "starts": _start}
_BY_TWO_NAMES = {"copy": _twice(shutil.copyfile), "hard-link": _twice(os.link)}
_CLOSED = {"journal-beside-closed": specimen.to_file(_noise, "{path.name}", suffix=".journal")}
_GROUP, _FOREIGN_RUNS, _KILLED, _SPECIMENS = "journals", "files of other runs", "killed hang", "plain hosts"
KINDS = (
    *kinds_of(_GROUP, _DAMAGES, "journal-", on=_KILLED, weight=2),
    *kinds_of(_GROUP, {"journals-exchanged": _exchanged}, on=_KILLED),
    *kinds_of(_GROUP, _CLOSED, on="plain single"),
    *kinds_of(_GROUP, _NO_JOURNALS, "journal-", on="hang", weight=0.4),
    *kinds_of(_FOREIGN_RUNS, _MIXED, "mixed-", on=_SPECIMENS, weight=2),
    *kinds_of(_FOREIGN_RUNS, {"mixed-beside": _beside}, on=_SPECIMENS),
    *kinds_of(_FOREIGN_RUNS, {"mixed-journals": _journals}, on="killed"),
    *kinds_of(_FOREIGN_RUNS, _BY_TWO_NAMES, "twice-by-", on=_SPECIMENS),
)
