"""Folders of dumps, and runs, as `hpcpace hang` finds them: many files, foreign ones, and links."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

from experiments.damage.hostile.flight_recorder import dump, entry, hang, write
from experiments.damage.hostile.kind import SECRET, Call, Hostile, Random

_FORMAT = "folders of hpcpace hang"
_CPU_S_PER_FILE = 0.004
"""To open one file, and to start processes that read them."""


def _same_fault(folder: Path, random: Random) -> Call:
    data = pickle.dumps(dump([entry(0)]), 2)[: int(random.integers(20, 200))]
    return hang(folder, write(folder, {f"rank_{rank}": data for rank in range(1000)}))


def _other_faults(folder: Path, random: Random) -> Call:
    contents = {}
    for rank in range(1000):
        contents[f"{'x' * int(random.integers(200))}\x1b[3{rank % 8}mrank_{rank}"] = dump(
            [entry(0, **{(*entry(0),)[rank % 8]: f"\u202e{rank}" * 40})],
            version=f"2.{rank}",
            comm_lib_version=f"v{rank}",
        )
    return hang(folder, write(folder, contents))


def _other_jobs(folder: Path, random: Random) -> Call:
    contents = {f"rank_{rank}": dump([entry(0)], pg_config={"0": {"ranks": [0, rank]}}) for rank in range(1, 500)}
    contents |= {f"x{rank}": dump([entry(int(random.integers(1 << 30)))]) for rank in range(500)}
    return hang(folder, write(folder, contents))


def _versions(folder: Path, random: Random) -> Call:
    """A job whose ranks each hold up another operation, of names and versions of their own."""
    contents = {}
    for pair in range(0, 600, 2):
        name = f"tp{pair}" + "y" * int(random.integers(150))
        groups = {
            "0": {"name": "0", "desc": "default_pg", "ranks": str([*range(600)])},
            name: {"name": name, "desc": name, "ranks": [pair, pair + 1]},
        }
        call = entry(1, process_group=(name, name), collective_seq_id=1, profiling_name="nccl:" + "z" * 150)
        done = entry(0, state="completed", time_discovered_completed_ns=entry(0)["time_created_ns"] + 1)
        for rank, entries in ((pair, [done, call]), (pair + 1, [done])):
            software = {"version": f"2.{rank}" + "0" * 30, "comm_lib_version": f"{rank}" + "9" * 30}
            contents[f"rank_{rank}"] = dump(entries, pg_config=groups, **software)
    return hang(folder, write(folder, contents))


def _foreign(folder: Path, random: Random) -> Call:
    for number in range(10_000):
        (folder / f"core.{number}").write_bytes(b"\x7fELF" * int(random.integers(1, 8)))
    num_bytes = write(folder, {f"rank_{rank}": dump([entry(0)]) for rank in range(2)})
    return hang(folder, num_bytes + 160_000)


def _links(folder: Path, random: Random) -> Call:
    secret = folder / "secret.txt"
    secret.write_text(f'{{"version": "{SECRET}", "pg_config": {{}}}}')
    num_bytes = write(folder, {"rank_0": dump([entry(0)])})
    for rank in range(1, 200):
        kind, place = int(random.integers(5)), folder / f"rank_{rank}"
        if kind == 0:
            place.symlink_to(secret)
        elif kind == 1:
            os.mkfifo(place)
        elif kind == 2:
            place.symlink_to("/dev/zero")
        elif kind == 3:
            place.symlink_to(folder)
        else:
            place.mkdir()
    return hang(folder, num_bytes)


def _half(folder: Path, random: Random) -> Call:
    """Half of the ranks of a large job, and operations that all of them are in."""
    world = int(random.integers(500, 1500))
    count = int(random.integers(1, 40))
    data = pickle.dumps(dump([entry(number) for number in range(count)], world=world), 2)
    return hang(folder, write(folder, {f"rank_{rank}": data for rank in range(0, world, 2)}))


_MAKERS: dict[str, Callable[[Path, Random], Call]] = {
    "same-fault": _same_fault,
    "other-faults": _other_faults,
    "other-jobs": _other_jobs,
    "versions": _versions,
    "foreign": _foreign,
    "links": _links,
    "half": _half,
}
KINDS = tuple(
    Hostile(name=f"hang-{name}", format=_FORMAT, make=make, most_cpu_s=4.0 + _CPU_S_PER_FILE * 1000)
    for name, make in _MAKERS.items()
)
