"""Files of another run, or of another start, among those of a run: they are left out and named, and nobody is blamed.

The foreign files are those of a job with a slow rank, which would be the culprit if it passed for one of this run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from experiments.damage.journals import rewrite_header
from experiments.damage.kind import Damaged, Kind, Random, of_ranks
from experiments.damage.specimen import RunCopy
from experiments.damage.tables import opened

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
    """Let each foreign file be of a run of its own."""
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
    """Put a file of another run beside those of all ranks, under a name that no rank has."""
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


_GROUP = "files of other runs"
KINDS = (
    Kind(name="mixed-runs", group=_GROUP, damage=_runs, specimens=_SPECIMENS, weight=3),
    Kind(name="mixed-several", group=_GROUP, damage=_several_runs, specimens=_SPECIMENS),
    Kind(name="mixed-half", group=_GROUP, damage=_half, specimens=_SPECIMENS),
    Kind(name="mixed-misnamed", group=_GROUP, damage=_misnamed, specimens=_SPECIMENS, weight=2),
    Kind(name="mixed-beside", group=_GROUP, damage=_beside, specimens=_SPECIMENS),
    Kind(name="mixed-starts", group=_GROUP, damage=_start, specimens=_SPECIMENS, weight=2),
    Kind(name="mixed-journals", group=_GROUP, damage=_journals, specimens=("killed",)),
    *(
        Kind(name=f"twice-by-{name}", group=_GROUP, damage=_twice(make), specimens=_SPECIMENS)
        for name, make in (("copy", shutil.copyfile), ("hard-link", os.link))
    ),
)
