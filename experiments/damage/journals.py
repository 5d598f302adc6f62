"""Damage to journals of killed ranks: torn, flipped, of another run, and sound ones with impossible content."""

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

from experiments.damage.content import (
    append,
    change_bytes,
    exchange,
    fifo,
    flips,
    folder,
    insert,
    instead,
    link,
    overwrite,
    sparse,
    truncate,
    write,
    zero,
)
from experiments.damage.specimen import Damaged, Kind, Random, RunCopy, of_rank, of_ranks
from experiments.damage.tables import absurd, opened
from hpcpace.trace.encoding import row_dtypes
from hpcpace.trace.journal import RecordKind, decode, encode_header, encode_records

_KILLED = ("killed", "hang")
_PREAMBLE = struct.Struct("<8sII")
_DTYPES = row_dtypes()


def _journalled(run: RunCopy, random: Random) -> int:
    ranks = [rank for rank in sorted(run.ranks) if run.journal(rank).exists()]
    return int(random.choice(ranks))


def _changed(change: Callable[[bytearray, Random], None]) -> Callable[[RunCopy, Random], Damaged]:
    def damage(run: RunCopy, random: Random) -> Damaged:
        rank = _journalled(run, random)
        change_bytes(run.journal(rank), change, random)
        return of_rank(run, rank)

    return damage


def _torn(content: bytearray, random: Random) -> None:
    """Cut the last records off, as a kill inside of a write does."""
    del content[-int(random.integers(1, min(200, len(content)))) :]


def _of_another_run(run: RunCopy, random: Random) -> Damaged:
    rank = _journalled(run, random)
    path = run.journal(rank)
    values = ("run_id", "other"), ("attempt", 7), ("rank", (rank + 1) % run.num_ranks)
    rewrite_header(run, rank, dict([values[int(random.integers(3))]]))
    return of_rank(run, rank, path.name)


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


def _odd_header(run: RunCopy, random: Random) -> Damaged:
    odd = (None, [], {}, 1.5, float("nan"), -1, 2**70, "", "x" * 10_000, "\x1b[2J", True)
    rank = _journalled(run, random)
    names = ("run_id", "rank", "world_size", "host", "attempt", "node", "pp", "interfaces", "format", "format_version")
    name = names[int(random.integers(len(names)))]
    rewrite_header(run, rank, {name: odd[int(random.integers(len(odd)))]})
    return of_rank(run, rank)


def _odd_tables(run: RunCopy, random: Random) -> Damaged:
    odd: tuple[Any, ...] = (
        None,
        [],
        "steps",
        [{"name": "steps"}],
        [{"name": "steps", "columns": []}],
        [{"name": "steps", "columns": [["step", "|O"]]}],
        [{"name": "steps", "columns": [["step", "<i4"], ["step", "<i4"]]}],
        [{"name": "steps", "columns": [["step", "|S9999"]] * 1}] * 300,
        [{"name": "collectives", "columns": [["enter_ns", "<u8"]]}],
        [{"name": "steps", "columns": [[1, "<i4"]]}],
        [{"name": ["a"], "columns": {"a": "<i4"}}],
    )
    rank = _journalled(run, random)
    rewrite_header(run, rank, {}, odd[int(random.integers(len(odd)))])
    return of_rank(run, rank)


def _odd_rows(run: RunCopy, random: Random) -> Damaged:
    """Write a journal with sound checksums whose rows are absurd, or numbered as no rows are."""
    rank = _journalled(run, random)
    path = run.journal(rank)
    content = decode(path.read_bytes(), str(path))
    numbers = tuple(_DTYPES)
    made = [encode_header(content.header, _DTYPES)]
    for name, (_, rows) in content.rows.items():
        rows = rows.copy()
        if random.random() < 0.4 and len(rows):
            column = rows.dtype.names[int(random.integers(len(rows.dtype.names)))]
            rows[column] = absurd(rows.dtype[column], len(rows), random)
        first = int((0, 0, 5, 2**31, 2**62, 2**64 - len(rows) - 1)[int(random.integers(6))])
        made.append(encode_records(numbers.index(name), RecordKind.ROW, 0, rows))
        if first:
            made[-1] = _renumbered(made[-1], first, rows.dtype)
    path.write_bytes(b"".join(made))
    return of_rank(run, rank)


def _renumbered(records: bytes, first: int, dtype: np.dtype) -> bytes:
    """Return records with other row numbers, each with its checksum."""
    from hpcpace.trace.journal import _checks, record_dtype

    found = np.frombuffer(records, record_dtype(dtype)).copy()
    found["row"] = np.uint64(first) + np.arange(len(found), dtype=np.uint64)
    found["check"] = _checks(found)
    return found.tobytes()


def _exchanged(run: RunCopy, random: Random) -> Damaged:
    ranks = [rank for rank in sorted(run.ranks) if run.journal(rank).exists()]
    one, other = random.permutation(ranks)[:2].tolist()
    kept = run.journal(one).read_bytes()
    run.journal(one).write_bytes(run.journal(other).read_bytes())
    run.journal(other).write_bytes(kept)
    return of_ranks(run, frozenset({one, other}), run.journal(one).name, run.journal(other).name)


def _removed(run: RunCopy, random: Random) -> Damaged:
    rank = _journalled(run, random)
    run.journal(rank).unlink()
    return of_rank(run, rank, run.file(rank).name)


def _left_alone(run: RunCopy, random: Random) -> Damaged:
    """Remove the HDF5 file: the journal has all rows of these short runs."""
    rank = _journalled(run, random)
    run.file(rank).unlink()
    damaged = of_rank(run, rank, run.file(rank).name)
    return Damaged(places=damaged.places, says=damaged.says)


def _container_flipped(run: RunCopy, random: Random) -> Damaged:
    """Damage both files of a rank."""
    rank = _journalled(run, random)
    for path in (run.file(rank), run.journal(rank)):
        change_bytes(path, flips(8), random)
    return of_rank(run, rank)


def _beside_closed(run: RunCopy, random: Random) -> Damaged:
    """Put a journal of another rank, or a file that is not a journal, next to a file that was closed."""
    rank = int(random.integers(run.num_ranks))
    run.journal(rank).write_bytes(random.bytes(int(random.integers(0, 5000))))
    return of_rank(run, rank, run.journal(rank).name)


_GROUP = "journals"
KINDS = (
    Kind(name="journal-truncate", group=_GROUP, damage=_changed(truncate), specimens=_KILLED, weight=4),
    Kind(name="journal-torn", group=_GROUP, damage=_changed(_torn), specimens=_KILLED, weight=2),
    *(
        Kind(name=f"journal-{name}", group=_GROUP, damage=_changed(change), specimens=_KILLED, weight=2)
        for name, change in (
            ("flip-1", flips(1)),
            ("flip-64", flips(64)),
            ("flip-header", flips(4, 1024)),
            ("zero", zero),
            ("overwrite", overwrite),
            ("append", append),
            ("insert", insert),
            ("exchange", exchange),
        )
    ),
    *(
        Kind(name=f"journal-{name}", group=_GROUP, damage=instead(make, ".journal"), specimens=("hang",), weight=0.4)
        for name, make in (
            ("empty", write(b"")),
            ("text", write(b"no journal\n" * 100)),
            ("folder", folder),
            ("fifo", fifo),
            ("sparse", sparse),
            ("dangling-link", link("nowhere")),
            ("link-to-zero", link("/dev/zero")),
        )
    ),
    Kind(name="journal-of-another-run", group=_GROUP, damage=_of_another_run, specimens=_KILLED),
    Kind(name="journal-odd-header", group=_GROUP, damage=_odd_header, specimens=_KILLED, weight=2),
    Kind(name="journal-odd-tables", group=_GROUP, damage=_odd_tables, specimens=_KILLED, weight=2),
    Kind(name="journal-odd-rows", group=_GROUP, damage=_odd_rows, specimens=_KILLED, weight=4),
    Kind(name="journals-exchanged", group=_GROUP, damage=_exchanged, specimens=_KILLED),
    Kind(name="journal-removed", group=_GROUP, damage=_removed, specimens=_KILLED),
    Kind(name="journal-alone", group=_GROUP, damage=_left_alone, specimens=_KILLED),
    Kind(name="journal-and-file", group=_GROUP, damage=_container_flipped, specimens=_KILLED, weight=2),
    Kind(name="journal-beside-closed", group=_GROUP, damage=_beside_closed, specimens=("plain", "single")),
)


_HOUR_NS = 3_600_000_000_000
_SPECIMENS = ("plain", "hosts")
_FOREIGN = "pipeline"
_TIMES = {
    "steps": ("begin_ns", "end_ns"),
    "phases": ("begin_ns", "end_ns"),
    "collectives": ("enter_ns", "exit_ns"),
    "clock": ("local_ns",),
}


def _foreign_file(run: RunCopy, rank: int, target: Path, *, run_id: str = "synthetic", attempt: int = 0) -> None:
    """Copy a rank's file of the other job to a path, with the names of its run and start."""
    source = run.shelf.kept(_FOREIGN) / "attempt-0" / "trace" / f"rank-{rank:05d}.h5"
    target.unlink(missing_ok=True)
    shutil.copyfile(source, target)
    with opened(target) as file:
        file.attrs["run_id"], file.attrs["attempt"] = run_id, attempt


def _minority(run: RunCopy, random: Random) -> list[int]:
    """Return ranks that are fewer than half."""
    num_foreign = int(random.integers(1, (run.num_ranks + 1) // 2))
    return sorted(random.permutation(run.num_ranks)[:num_foreign].tolist())


def _names(random: Random) -> tuple[str, int]:
    """Return run id and attempt of a foreign start: another run, another attempt of this one, or both."""
    return (("other", 0), ("synthetic", 3), ("other", 3), ("", 0), ("SYNTHETIC", 0))[int(random.integers(5))]


def _left_out(run: RunCopy, ranks: list[int]) -> Damaged:
    said = of_ranks(run, frozenset(ranks), *(run.file(rank).name for rank in ranks), "left out")
    return Damaged(hurt=said.hurt, places=said.places, says=said.says, blamed=frozenset())


def _runs(run: RunCopy, random: Random) -> Damaged:
    ranks, (run_id, attempt) = _minority(run, random), _names(random)
    for rank in ranks:
        _foreign_file(run, rank, run.file(rank), run_id=run_id, attempt=attempt)
    return _left_out(run, ranks)


def _several_runs(run: RunCopy, random: Random) -> Damaged:
    """Take each foreign file from a different run."""
    ranks = sorted(random.permutation(run.num_ranks)[: run.num_ranks // 2].tolist())
    for number, rank in enumerate(ranks):
        _foreign_file(run, rank, run.file(rank), run_id=f"other-{number}")
    return _left_out(run, ranks)


def _half(run: RunCopy, random: Random) -> Damaged:
    """Let half of the files be of another run, which only the name of the attempt's folder can decide, or nothing."""
    ranks = sorted(random.permutation(run.num_ranks)[: run.num_ranks // 2].tolist())
    attempt = (0, 5)[int(random.integers(2))]
    for rank in ranks:
        _foreign_file(run, rank, run.file(rank), run_id="other", attempt=attempt)
    if attempt:
        return _left_out(run, ranks)
    said = of_ranks(run, run.ranks, "as many traces are of")
    return Damaged(hurt=said.hurt, places=said.places, says=said.says, blamed=frozenset())


def _misnamed(run: RunCopy, random: Random) -> Damaged:
    """Give the files of two ranks each other's name, one or both of them of another run."""
    one, other = random.permutation(run.num_ranks)[:2].tolist()
    run_id, attempt = _names(random)
    kept = run.file(other).read_bytes()
    _foreign_file(run, one, run.file(other), run_id=run_id, attempt=attempt)
    if is_sound := random.random() < 0.5:
        run.file(one).write_bytes(kept)
    else:
        run.file(one).unlink()
    said = of_ranks(run, frozenset({one, other}), run.file(other).name, *([run.file(one).name] if is_sound else []))
    return Damaged(hurt=said.hurt, places=said.places, says=said.says, blamed=frozenset())


def _beside(run: RunCopy, random: Random) -> Damaged:
    """Add a file of another run under a name that no rank has."""
    rank = int(random.integers(run.num_ranks))
    path = run.file(run.num_ranks + int(random.integers(200)))
    run_id, attempt = _names(random)
    _foreign_file(run, rank, path, run_id=run_id, attempt=attempt)
    return Damaged(places=(path.name,), says=(path.name, "left out"), blamed=frozenset())


def _start(run: RunCopy, random: Random) -> Damaged:
    """Leave the file of an earlier start that has the same names: only its times tell."""
    (rank,) = random.permutation(run.num_ranks)[:1].tolist()
    shift_ns = int(random.integers(1, 48)) * _HOUR_NS * (1 if random.random() < 0.5 else -1)
    _foreign_file(run, rank, run.file(rank))
    with opened(run.file(rank)) as file:
        file.attrs["world_size"] = run.num_ranks
        for table, columns in _TIMES.items():
            for name in columns:
                file[table][name][...] = file[table][name][()] + shift_ns
    said = of_ranks(run, frozenset({rank}), run.file(rank).name, "nothing of it is believed")
    return Damaged(hurt=said.hurt, places=said.places, says=said.says, blamed=frozenset())


def _twice(make: Callable[[Path, Path], object]) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that lets several names be one rank's file."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        source, *targets = random.permutation(run.num_ranks)[: int(random.integers(2, run.num_ranks))].tolist()
        for target in targets:
            run.file(target).unlink()
            make(run.file(source), run.file(target))
        said = of_ranks(run, frozenset(targets), *(run.file(target).name for target in targets))
        return Damaged(hurt=said.hurt, places=said.places, says=said.says, blamed=frozenset())

    return damage


def _journals(run: RunCopy, random: Random) -> Damaged:
    """Put both files of a killed rank of another run in the place of a rank's."""
    rank = next(rank for rank in random.permutation(run.num_ranks).tolist() if not run.journal(rank).exists())
    killed = run.shelf.kept("hang") / "attempt-0" / "trace"
    # A file that was left open cannot be changed through HDF5; texts are without checksum.
    foreign = (killed / run.file(rank).name).read_bytes().replace(b"synthetic", b"different")
    run.file(rank).write_bytes(foreign)
    shutil.copyfile(killed / run.journal(rank).name, run.journal(rank))
    rewrite_header(run, rank, {"run_id": "different"})
    return _left_out(run, [rank])


_FOREIGN_RUNS = "files of other runs"
MIXED = (
    Kind(name="mixed-runs", group=_FOREIGN_RUNS, damage=_runs, specimens=_SPECIMENS, weight=3),
    Kind(name="mixed-several", group=_FOREIGN_RUNS, damage=_several_runs, specimens=_SPECIMENS),
    Kind(name="mixed-half", group=_FOREIGN_RUNS, damage=_half, specimens=_SPECIMENS),
    Kind(name="mixed-misnamed", group=_FOREIGN_RUNS, damage=_misnamed, specimens=_SPECIMENS, weight=2),
    Kind(name="mixed-beside", group=_FOREIGN_RUNS, damage=_beside, specimens=_SPECIMENS),
    Kind(name="mixed-starts", group=_FOREIGN_RUNS, damage=_start, specimens=_SPECIMENS, weight=2),
    Kind(name="mixed-journals", group=_FOREIGN_RUNS, damage=_journals, specimens=("killed",)),
    *(
        Kind(name=f"twice-by-{name}", group=_FOREIGN_RUNS, damage=_twice(make), specimens=_SPECIMENS)
        for name, make in (("copy", shutil.copyfile), ("hard-link", os.link))
    ),
)
