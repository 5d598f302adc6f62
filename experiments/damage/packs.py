"""Damage to packed runs: to the bytes of a pack, to which packs are there, and to the files that are to be packed.

Half of the runs get packs of small chunks, so that a run of a few ranks has as many places to hurt as one of hundreds.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import h5py
import numpy as np

from experiments.damage import content, specimen
from experiments.damage.chance import Random
from experiments.damage.tables import opened, resize
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


def _pack(run: specimen.RunCopy, attempt: Attempt, random: Random, *, keep: bool = False) -> PackResult:
    """Pack an attempt into two packs, a run of one rank into one, with small chunks in half of the cases."""
    chunk_rows = random.one(PACK_CHUNK_ROWS, _SMALL_CHUNK)
    plan = PackPlan(has_ended=True, most_ranks=max(run.num_ranks // 2, 1), keep=keep)
    with ExitStack() as patched:
        for module in ("pack_index", "pack_writer"):
            patched.enter_context(mock.patch(f"hpcpace.trace.{module}.PACK_CHUNK_ROWS", chunk_rows))
        return pack_attempt(attempt, plan, begin_stage=lambda _: lambda done, total: None)


def _packs_of(attempt: Attempt) -> list[Pack]:
    found = []
    for path in attempt.packs():
        with h5py.File(path) as file:
            found.append(Pack(path=path, ranks=frozenset(file["ranks/rank"][()].tolist())))
    return found


def _packed(run: specimen.RunCopy, random: Random, *, keep: bool = False) -> list[Pack]:
    _pack(run, run.attempt, random, keep=keep)
    return _packs_of(run.attempt)


def _seen_after(damage: specimen.Damage) -> specimen.Damage:
    """Let other programs read the damage, too: `pack` once more among them, and a report on what it leaves."""

    def seen(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
        found = specimen.seen_by_all(run, random, damage(run, random))
        again = (("pack", str(run.path), "--ended"), ("report", str(run.path), "--json"))
        return replace(found, views=(*found.views, *again)) if random.maybe() else found

    return seen


def _to_one(
    damage: Callable[[specimen.RunCopy, Pack, Random], specimen.Damaged], *, keep: bool = False
) -> specimen.Damage:
    """Return the damage to one of the packs of a run."""
    return lambda run, random: damage(run, random.of(_packed(run, random, keep=keep)), random)


def _of_pack(run: specimen.RunCopy, pack: Pack, *says: str) -> specimen.Damaged:
    """Return the expectation where one pack is damaged."""
    said = specimen.of_ranks(run, pack.ranks, *says)
    return replace(said, places=(*said.places, pack.path.name))


def _changed(make: specimen.Make, *says: str) -> specimen.Damage:
    """Return the damage that changes one pack, or puts something in its place."""

    def damage(run: specimen.RunCopy, pack: Pack, random: Random) -> specimen.Damaged:
        make(pack.path, random)
        return _of_pack(run, pack, *(text.format(path=pack.path) for text in says))

    return _to_one(damage)


def _beside(make: specimen.Make) -> specimen.Damage:
    """Return the damage that puts something that is no pack beside the packs of a run."""

    def damage(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
        _packed(run, random)
        path = run.attempt.trace_dir / random.of(_OTHER_NAMES)
        make(path, random)
        return specimen.Damaged(places=(path.name,), says=(path.name,))

    return damage


def _missing(run: specimen.RunCopy, pack: Pack, random: Random) -> specimen.Damaged:
    pack.path.unlink()
    return specimen.of_ranks(run, pack.ranks, f"{len(pack.ranks)} of {run.num_ranks} ranks")


def _all_missing(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    for pack in _packed(run, random):
        pack.path.unlink()
    return specimen.of_ranks(run, run.ranks)


def _twice(run: specimen.RunCopy, pack: Pack, random: Random) -> specimen.Damaged:
    """Copy a pack: its ranks are in two, both sound."""
    shutil.copyfile(pack.path, pack.path.with_name(random.of(_OTHER_NAMES)))
    return specimen.Damaged(says=("in another pack, too",), blamed=frozenset())


def _twice_one_damaged(run: specimen.RunCopy, pack: Pack, random: Random) -> specimen.Damaged:
    """Copy a pack and damage one of the two: the other one has all of its ranks."""
    copy = shutil.copyfile(pack.path, pack.path.with_name(random.of(_OTHER_NAMES)))
    content.change_bytes(
        random.one(pack.path, copy),
        random,
        content.flips(8, _STRUCTURE_BYTES),
        content.flips(64),
        content.truncate,
        content.zero,
        content.overwrite,
    )
    return specimen.Damaged()


def _foreign(run_id: str, attempt_number: int) -> specimen.Damage:
    """Return the damage that adds a pack of another job, whose slow rank must not be blamed."""

    def damage(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
        other = shutil.copytree(run.shelf.kept("pipeline"), run.path.with_name("other"))
        attempt = Attempt(other / "attempt-0")
        for rank, path in attempt.trace_files().items():
            if rank >= run.num_ranks:
                path.unlink()
                continue
            with opened(path) as file:
                file.attrs["run_id"], file.attrs["attempt"] = run_id, attempt_number
        # Fewer than the run has, which decides.
        _pack(run, attempt, random)
        if random.maybe(0.7):
            _packed(run, random)
        target = run.attempt.trace_dir / random.of(_OTHER_NAMES)
        shutil.copyfile(random.of(_packs_of(attempt)).path, target)
        shutil.rmtree(other)
        return specimen.Damaged(places=(target.name,), says=(target.name,), blamed=frozenset())

    return damage


def _with_originals(run: specimen.RunCopy, pack: Pack, random: Random) -> specimen.Damaged:
    """Keep the files of the ranks beside a pack, and damage the pack, some of the files, or nothing."""
    hurt = random.one("pack", "file", "")
    if hurt == "file":
        rank = specimen.some_rank(run, random)
        content.change_bytes(run.file(rank), random, content.truncate, content.append, content.insert)
        return specimen.of_rank(run, rank)
    if hurt:
        content.change_bytes(pack.path, random, content.flips(64), content.truncate, content.zero, content.overwrite)
    return specimen.Damaged(blamed=frozenset())


def _chunk_of_ranks(run: specimen.RunCopy, pack: Pack, random: Random) -> specimen.Damaged:
    """Damage one chunk of a table in which each rank has rows of its own: only ranks with rows in it may lose any."""
    with h5py.File(pack.path) as file:
        name = random.of([name for name in _RANK_TABLES if len(next(iter(file[name].values())))][:2])
        column = random.of([*file[name].values()])
        chunk = column.id.get_chunk_info(random.count(0, column.id.get_num_chunks()))
        first, stop = chunk.chunk_offset[0], chunk.chunk_offset[0] + column.chunks[0]
        ends = np.cumsum(file[f"ranks/num_{name}"][()])
        begins = ends - file[f"ranks/num_{name}"][()]
        hurt = file["ranks/rank"][()][(begins < stop) & (ends > first)].tolist()
    data = bytearray(pack.path.read_bytes())
    begin = chunk.byte_offset + int(random.integers(max(chunk.size - 8, 1)))
    data[begin : begin + 8] = random.bytes(8)
    pack.path.write_bytes(data)
    return specimen.of_ranks(run, hurt, pack.path.name, f"table {name}", "is damaged and left out")


def _emptied(run: specimen.RunCopy, pack: Pack, random: Random) -> specimen.Damaged:
    """Leave a pack as HDF5 that has no ranks, no rows, or no tables."""
    without = random.one("tables", "rows", "ranks")
    with opened(pack.path) as file:
        for name in list(file):
            if without == "tables":
                del file[name]
            elif without == "rows" or name == "ranks":
                resize(file[name], 0)
    return _of_pack(run, pack, pack.path.name)


def _original_changed(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Damage the file of a rank and pack the run: the others are packed, and this one is read as it is."""
    rank = specimen.some_rank(run, random)
    has_journal = run.journal(rank).exists() and random.maybe()
    content.change_bytes(run.journal(rank) if has_journal else run.file(rank), random)
    _packed(run, random)
    return specimen.of_rank(run, rank)


def _original_instead(make: specimen.Make) -> specimen.Damage:
    """Return the damage that puts something else in the place of a rank's file, and packs the run."""

    def damage(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
        rank = specimen.some_rank(run, random)
        run.file(rank).unlink()
        make(run.file(rank), random)
        result = _pack(run, run.attempt, random)
        if not [sentence for sentence in result.kept if run.file(rank).name in sentence]:
            raise AssertionError(f"pack does not say that {run.file(rank)} stays: {result.kept}")
        return specimen.of_rank(run, rank, run.file(rank).name)

    return damage


def _some_packed(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Leave some ranks with files of their own, some in a sound pack, and some in a damaged one."""
    first, second = _packed(run, random)
    for rank in first.ranks:
        shutil.copyfile(run.shelf.kept("plain") / "attempt-0" / "trace" / run.file(rank).name, run.file(rank))
    first.path.unlink()
    content.change_bytes(second.path, random, content.flips(64), content.truncate, content.overwrite)
    return _of_pack(run, second)


_CHANGES = {
    **content.CHANGES,
    "flip-8-superblock": content.flips(8, content.SUPERBLOCK_BYTES),
    "flip-8-structure": content.flips(8, _STRUCTURE_BYTES),
}
_BYTES, _OTHERS, _BEFORE = (
    *("packs: bytes changed", "packs: missing, doubled, foreign, no files", "packs: of damaged files"),
)
_ANY, _SOME = "plain hosts pipeline single killed hang", "plain hosts pipeline"


def _kinds(
    group: str, damages: dict[str, specimen.Damage], prefix: str = "pack-", **more: object
) -> list[specimen.Kind]:
    return specimen.kinds_of(group, {name: _seen_after(one) for name, one in damages.items()}, prefix, **more)


def _no_files(damage: Callable[[specimen.Make], specimen.Damage]) -> dict[str, specimen.Damage]:
    return {name: damage(make) for name, make in content.NO_FILES.items()}


_TO_OTHERS = {
    "missing": _to_one(_missing),
    "twice-one-damaged": _to_one(_twice_one_damaged),
    "all-missing": _all_missing,
}
_DOUBLED = {
    **{"twice": _to_one(_twice), "with-originals": _to_one(_with_originals, keep=True)},
    **{"of-another-run": _foreign("other", 0), "of-another-start": _foreign("synthetic", 3)},
}
_REPLACED = _no_files(lambda make: _changed(content.instead(make), "{path.name}"))
KINDS: tuple[specimen.Kind, ...] = (
    *_kinds(_BYTES, {name: _changed(content.edited(one)) for name, one in _CHANGES.items()}, on=_ANY, weight=2),
    *_kinds(_BYTES, {"chunk-of-ranks": _to_one(_chunk_of_ranks)}, on=_SOME, weight=3),
    *_kinds(_BYTES, {"emptied": _to_one(_emptied)}, on=_ANY, weight=0.5),
    *_kinds(_OTHERS, _TO_OTHERS, on=_SOME, weight=1.5),
    *_kinds(_OTHERS, _DOUBLED, on="plain hosts"),
    *_kinds(_OTHERS, {"of-some": _some_packed}, on="plain"),
    *_kinds(_OTHERS, _REPLACED, "pack-is-", on="plain single", weight=0.3),
    *_kinds(_OTHERS, _no_files(_beside), "pack-beside-", on="plain", weight=0.2),
    *_kinds(_BEFORE, {"packed-damaged-original": _original_changed}, "", on=_ANY, weight=4),
    *_kinds(_BEFORE, _no_files(_original_instead), "packed-", on="plain hosts", weight=0.3),
)
