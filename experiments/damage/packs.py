"""Damage to packed runs: to the bytes of a pack, to which packs are there, and to the files that are to be packed.

Half of the runs get packs of small chunks, so that a run of a few ranks has as many places to hurt as one of hundreds.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import h5py
import numpy as np

from experiments.damage.content import (
    SUPERBLOCK_BYTES,
    Change,
    append,
    bound_socket,
    change_bytes,
    exchange,
    fifo,
    flips,
    folder,
    insert,
    link,
    overwrite,
    sparse,
    truncate,
    write,
    zero,
)
from experiments.damage.specimen import Damaged, Kind, Random, RunCopy, of_rank, of_ranks, seen_by_all, some_rank
from hpcpace.core.rundir import Attempt
from hpcpace.trace.pack_index import OF_RANKS, OPEN, PACK_CHUNK_ROWS
from hpcpace.trace.packing import PackPlan, PackResult, pack_attempt

_STRUCTURE_BYTES = 60_000
"""About as much of a pack is the structure of HDF5; the rest is chunks."""
_SMALL_CHUNK = 50
_RANK_TABLES = (*OF_RANKS, OPEN)
_OTHER_NAMES = ("pack-00000-00000000.h5", "pack-00009-ffffffff.h5", "pack-99999-00000000.h5")
"""Names before, between and behind those of the run's own packs."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A pack of a run.

    Attributes:
        path: the file.
        ranks: in it.
    """

    path: Path
    ranks: frozenset[int]


def pack_run(attempt: Attempt, random: Random, *, most_ranks: int, keep: bool = False) -> PackResult:
    """Pack an attempt into packs of some ranks, with small chunks in half of the cases."""
    chunk_rows = (PACK_CHUNK_ROWS, _SMALL_CHUNK)[int(random.integers(2))]
    plan = PackPlan(has_ended=True, most_ranks=most_ranks, keep=keep)
    with (
        mock.patch("hpcpace.trace.pack_index.PACK_CHUNK_ROWS", chunk_rows),
        mock.patch("hpcpace.trace.pack_writer.PACK_CHUNK_ROWS", chunk_rows),
    ):
        return pack_attempt(attempt, plan, begin_stage=lambda _: lambda done, total: None)


def packs_of(attempt: Attempt) -> list[Pack]:
    """Return the packs of an attempt."""
    found = []
    for path in attempt.packs():
        with h5py.File(path) as file:
            found.append(Pack(path=path, ranks=frozenset(file["ranks/rank"][()].tolist())))
    return found


def _packed(run: RunCopy, random: Random, *, keep: bool = False) -> list[Pack]:
    """Pack a run into two packs, a run of one rank into one."""
    pack_run(run.attempt, random, most_ranks=max(run.num_ranks // 2, 1), keep=keep)
    return packs_of(run.attempt)


def _one(packs: Sequence[Pack], random: Random) -> Pack:
    return packs[int(random.integers(len(packs)))]


def _of_pack(run: RunCopy, pack: Pack, *says: str) -> Damaged:
    """Return the expectation where one pack is damaged."""
    said = of_ranks(run, pack.ranks, *says)
    return replace(said, places=(*said.places, pack.path.name))


def _seen(run: RunCopy, random: Random, damaged: Damaged) -> Damaged:
    """Let other programs read the damage, too: `pack` once more among them, and a report on what it leaves."""
    seen = seen_by_all(run, random, damaged)
    again = (("pack", str(run.path), "--ended"), ("report", str(run.path), "--json"))
    return replace(seen, views=(*seen.views, *again)) if random.random() < 0.5 else seen


def _changed(change: Change) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that changes the bytes of one pack."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        pack = _one(_packed(run, random), random)
        change_bytes(pack.path, change, random)
        return _seen(run, random, _of_pack(run, pack))

    return damage


def _instead(make: Callable[[Path, Random], None]) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that puts something else in the place of a pack."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        pack = _one(_packed(run, random), random)
        pack.path.unlink()
        make(pack.path, random)
        return _seen(run, random, _of_pack(run, pack, pack.path.name))

    return damage


def _beside(make: Callable[[Path, Random], None]) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that puts something that is no pack beside the packs of a run."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        _packed(run, random)
        path = run.attempt.trace_dir / _other_name(random)
        make(path, random)
        return _seen(run, random, Damaged(places=(path.name,), says=(path.name,)))

    return damage


def _other_name(random: Random) -> str:
    return _OTHER_NAMES[int(random.integers(len(_OTHER_NAMES)))]


def _missing(run: RunCopy, random: Random) -> Damaged:
    pack = _one(_packed(run, random), random)
    pack.path.unlink()
    return _seen(run, random, of_ranks(run, pack.ranks, f"{len(pack.ranks)} of {run.num_ranks} ranks"))


def _all_missing(run: RunCopy, random: Random) -> Damaged:
    for pack in _packed(run, random):
        pack.path.unlink()
    return _seen(run, random, of_ranks(run, run.ranks))


def _twice(run: RunCopy, random: Random) -> Damaged:
    """Copy a pack: its ranks are in two, both sound."""
    pack = _one(_packed(run, random), random)
    shutil.copyfile(pack.path, pack.path.with_name(_other_name(random)))
    return _seen(run, random, Damaged(says=("in another pack, too",), blamed=frozenset()))


def _twice_one_damaged(run: RunCopy, random: Random) -> Damaged:
    """Copy a pack and damage one of the two: the other one has all of its ranks."""
    pack = _one(_packed(run, random), random)
    copy = pack.path.with_name(_other_name(random))
    shutil.copyfile(pack.path, copy)
    hurt = (pack.path, copy)[int(random.integers(2))]
    changes = (flips(8, _STRUCTURE_BYTES), flips(64), truncate, zero, overwrite)
    change_bytes(hurt, changes[int(random.integers(len(changes)))], random)
    return _seen(run, random, Damaged())


def _foreign(*, is_other_start: bool) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that adds a pack of another job, whose slow rank must not be blamed."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        other = run.path.with_name("other")
        shutil.copytree(run.shelf.kept("pipeline"), other)
        attempt = Attempt(other / "attempt-0")
        for rank, path in attempt.trace_files().items():
            if rank >= run.num_ranks:
                path.unlink()
                continue
            with h5py.File(path, "r+", libver=("v110", "v110")) as file:
                file.attrs["run_id"], file.attrs["attempt"] = ("synthetic", 3) if is_other_start else ("other", 0)
        # Fewer than the run has, which decides.
        pack_run(attempt, random, most_ranks=max(run.num_ranks // 2, 1))
        has_packs = random.random() < 0.7
        if has_packs:
            _packed(run, random)
        target = run.attempt.trace_dir / _other_name(random)
        shutil.copyfile(_one(packs_of(attempt), random).path, target)
        shutil.rmtree(other)
        return _seen(run, random, Damaged(places=(target.name,), says=(target.name,), blamed=frozenset()))

    return damage


def _with_originals(run: RunCopy, random: Random) -> Damaged:
    """Keep the files of the ranks beside a pack, and damage the pack, some of the files, or nothing."""
    pack = _one(_packed(run, random, keep=True), random)
    kind = int(random.integers(3))
    if kind == 0:
        change_bytes(pack.path, (flips(64), truncate, zero, overwrite)[int(random.integers(4))], random)
        return _seen(run, random, Damaged(blamed=frozenset()))
    rank = some_rank(run, random)
    if kind == 1:
        change_bytes(run.file(rank), (truncate, append, insert)[int(random.integers(3))], random)
        return _seen(run, random, of_rank(run, rank))
    return _seen(run, random, Damaged(blamed=frozenset()))


def _chunk_of_ranks(run: RunCopy, random: Random) -> Damaged:
    """Damage one chunk of a table in which each rank has rows of its own: only ranks with rows in it may lose any."""
    pack = _one(_packed(run, random), random)
    with h5py.File(pack.path) as file:
        name = [name for name in _RANK_TABLES if len(next(iter(file[name].values())))][int(random.integers(2))]
        column = list(file[name].values())[int(random.integers(len(file[name])))]
        index = int(random.integers(column.id.get_num_chunks()))
        chunk = column.id.get_chunk_info(index)
        first, stop = chunk.chunk_offset[0], chunk.chunk_offset[0] + column.chunks[0]
        ends = np.cumsum(file[f"ranks/num_{name}"][()])
        begins = ends - file[f"ranks/num_{name}"][()]
        numbers = file["ranks/rank"][()]
    hurt = frozenset(numbers[(begins < stop) & (ends > first)].tolist())
    content = bytearray(pack.path.read_bytes())
    begin = chunk.byte_offset + int(random.integers(max(chunk.size - 8, 1)))
    content[begin : begin + 8] = random.bytes(8)
    pack.path.write_bytes(content)
    said = of_ranks(run, hurt, pack.path.name, f"table {name}", "is damaged and left out")
    return _seen(run, random, said)


def _emptied(run: RunCopy, random: Random) -> Damaged:
    """Leave a pack as HDF5 that has no ranks, no rows, or no tables."""
    pack = _one(_packed(run, random), random)
    kind = int(random.integers(3))
    with h5py.File(pack.path, "r+", libver=("v110", "v110")) as file:
        for name in list(file):
            if kind == 0:
                del file[name]
                continue
            for column in file[name].values():
                if kind == 1 or name == "ranks":
                    column.resize((0,))
    return _seen(run, random, _of_pack(run, pack, pack.path.name))


def _original_changed(run: RunCopy, random: Random) -> Damaged:
    """Damage the file of a rank and pack the run: the others are packed, and this one is read as it is."""
    rank = some_rank(run, random)
    changes = (flips(1), flips(64), truncate, zero, overwrite, append, insert, exchange)
    path = run.file(rank)
    if run.journal(rank).exists() and random.random() < 0.5:
        path = run.journal(rank)
    change_bytes(path, changes[int(random.integers(len(changes)))], random)
    _packed(run, random)
    return _seen(run, random, of_rank(run, rank))


def _original_instead(make: Callable[[Path, Random], None]) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that puts something else in the place of a rank's file, and packs the run."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        rank = some_rank(run, random)
        run.file(rank).unlink()
        make(run.file(rank), random)
        result = _packed_with_result(run, random)
        if not [sentence for sentence in result.kept if run.file(rank).name in sentence]:
            raise AssertionError(f"pack does not say that {run.file(rank)} stays: {result.kept}")
        return _seen(run, random, of_rank(run, rank, run.file(rank).name))

    return damage


def _packed_with_result(run: RunCopy, random: Random) -> PackResult:
    return pack_run(run.attempt, random, most_ranks=max(run.num_ranks // 2, 1))


def _some_packed(run: RunCopy, random: Random) -> Damaged:
    """Leave some ranks with files of their own, some in a sound pack, and some in a damaged one."""
    packs = _packed(run, random)
    kept = run.shelf.kept("plain") / "attempt-0" / "trace"
    first, second = packs
    for rank in sorted(first.ranks):
        shutil.copyfile(kept / run.file(rank).name, run.file(rank))
    first.path.unlink()
    change_bytes(second.path, (flips(64), truncate, overwrite)[int(random.integers(3))], random)
    return _seen(run, random, _of_pack(run, second))


_BYTES, _OTHERS = "packs: bytes changed", "packs: missing, doubled, foreign, no files"
_BEFORE = "packs: of damaged files"
_ANY = ("plain", "hosts", "pipeline", "single", "killed", "hang")
_SOME = ("plain", "hosts", "pipeline")
_FILES = (
    ("empty", write(b"")),
    ("text", write(b"slurmstepd: error: *** JOB 42 CANCELLED ***\n" * 50)),
    ("folder", folder),
    ("fifo", fifo),
    ("socket", bound_socket),
    ("sparse", sparse),
    ("dangling-link", link("nowhere")),
    ("link-to-zero", link("/dev/zero")),
)
KINDS = (
    *(
        Kind(name=f"pack-{name}", group=_BYTES, damage=_changed(change), specimens=_ANY, weight=weight)
        for name, change, weight in (
            ("truncate", truncate, 3),
            ("flip-8-superblock", flips(8, SUPERBLOCK_BYTES), 1),
            ("flip-8-structure", flips(8, _STRUCTURE_BYTES), 2),
            ("flip-1", flips(1), 2),
            ("flip-64", flips(64), 2),
            ("zero", zero, 3),
            ("overwrite", overwrite, 2),
            ("append", append, 0.5),
            ("insert", insert, 1),
            ("exchange", exchange, 2),
        )
    ),
    Kind(name="pack-chunk-of-ranks", group=_BYTES, damage=_chunk_of_ranks, specimens=_SOME, weight=3),
    Kind(name="pack-emptied", group=_BYTES, damage=_emptied, specimens=_ANY, weight=0.5),
    Kind(name="pack-missing", group=_OTHERS, damage=_missing, specimens=_SOME),
    Kind(name="pack-all-missing", group=_OTHERS, damage=_all_missing, specimens=_SOME, weight=0.3),
    Kind(name="pack-twice", group=_OTHERS, damage=_twice, specimens=("plain", "hosts")),
    Kind(name="pack-twice-one-damaged", group=_OTHERS, damage=_twice_one_damaged, specimens=_SOME, weight=3),
    *(
        Kind(
            name=f"pack-of-{name}",
            group=_OTHERS,
            damage=_foreign(is_other_start=is_start),
            specimens=("plain", "hosts"),
        )
        for name, is_start in (("another-run", False), ("another-start", True))
    ),
    Kind(
        name="pack-with-originals",
        group=_OTHERS,
        damage=_with_originals,
        specimens=("plain", "hosts", "killed"),
        weight=2,
    ),
    Kind(name="pack-of-some", group=_OTHERS, damage=_some_packed, specimens=("plain",)),
    *(
        Kind(name=f"pack-is-{name}", group=_OTHERS, damage=_instead(make), specimens=("plain", "single"), weight=0.3)
        for name, make in _FILES
    ),
    *(
        Kind(name=f"pack-beside-{name}", group=_OTHERS, damage=_beside(make), specimens=("plain",), weight=0.2)
        for name, make in _FILES
    ),
    Kind(name="packed-damaged-original", group=_BEFORE, damage=_original_changed, specimens=_ANY, weight=4),
    *(
        Kind(
            name=f"packed-{name}",
            group=_BEFORE,
            damage=_original_instead(make),
            specimens=("plain", "hosts"),
            weight=0.3,
        )
        for name, make in _FILES
    ),
)
