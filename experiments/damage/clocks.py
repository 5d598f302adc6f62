"""Damage to the table of clock samples: none, jumps, references that contradict each other, widths that cannot be."""

from __future__ import annotations

from collections.abc import Callable

import h5py
import numpy as np

from experiments.damage.kind import Damaged, Kind, Random, of_rank
from experiments.damage.specimen import RunCopy
from experiments.damage.tables import absurd_values, changed, changed_all, opened

_GROUP = "clocks"
_HOUR_NS = 3_600_000_000_000


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


KINDS = (
    Kind(name="absurd-clock", group=_GROUP, damage=absurd_values("clock"), weight=6),
    *(
        Kind(
            name=f"clock-{name}",
            group=_GROUP,
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
            group=_GROUP,
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
    Kind(name="clock-wrong", group=_GROUP, damage=_wrong, specimens=("hosts",)),
)
