"""What commands take at most in memory, measured with bombs, each command in an interpreter of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.damage.bombs import rows_of_zeros
from experiments.damage.child import memory_limit_bytes
from experiments.damage.kind import Random
from experiments.damage.specimen import RunCopy, Shelf
from experiments.damage.tables import opened
from experiments.synthetic_run import SyntheticRun

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
