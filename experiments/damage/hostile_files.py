"""Hostile files of other formats than traces: a kind writes some by chance and says how `hpcpace` is called on them.

The command must keep to processor time that is linear in what it reads and to memory, print little, and show nothing
that comes from elsewhere.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from experiments.damage.chance import Random, random_of
from experiments.damage.child import Child, Result, wait_for_one
from experiments.damage.engine import CODES, Bounds, Kind, Made, Outcome, broken, texts_of, unsaid
from experiments.damage.specimen import Shelf
from experiments.synthetic_run import SyntheticRun

MIN_BYTES = 100_000
"""Of smaller inputs the start is most of what the command takes."""
SECRET = "root-only-5e1f"
"""Stands in files that no output may show: what planted links lead to."""
CONTROL = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m\r\n<script>alert(1)</script>=cmd|' /C calc'!A1"
_MAX_EMPTY, _MAX_ERROR_LINES = 50, 20


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call on hostile files.

    Attributes:
        arguments: of `hpcpace`, without its name.
        num_bytes: what the command has to read at most.
        says: what stdout and stderr together have to contain, each of them.
        never: what neither may contain, besides `SECRET`.
        codes: exit codes that are right for this input.
    """

    arguments: tuple[str, ...]
    num_bytes: int
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    codes: frozenset[int] = CODES


Make = Callable[[Path, Random], Call]
"""Writes the files into an empty folder, by chance, and returns the call on them."""


@dataclass(frozen=True, kw_only=True)
class Hostile(Kind):
    """A kind of hostile input; its group is the format that is read.

    Attributes:
        make: makes an input.
        most_cpu_s: processor time of a call on less than `MIN_BYTES`, with its start.
        most_cpu_s_per_mb: processor time for each megabyte that is read of larger inputs, without the start; below a
            megabyte, what one may take, because some work does not depend on the size.
        most_memory_bytes: resident set of the largest process.
        most_lines: of stdout, but for JSON; stderr has 20 lines at most.
    """

    make: Make
    most_cpu_s: float = 4.0
    most_cpu_s_per_mb: float = 2.0
    most_memory_bytes: int = 1 << 30
    most_lines: int = 60

    def made(self, number: int, place: Path, shelf: Shelf) -> Made:
        """Write the files of a number, and measure the call on files of the same names that are empty."""
        folder, working = place / "input", place / "working"
        for made in (folder, working):
            made.mkdir()
        call = self.make(folder, random_of(self.name, number))
        if self.name not in _STARTS:
            _STARTS[self.name] = _start_s(call, folder, place)
        start_s = _STARTS[self.name]
        return Made(
            commands=(call.arguments,),
            problems=partial(self._problems, call, start_s),
            watched=(folder, working),
            working=working,
            num_bytes=call.num_bytes,
            start_s=start_s,
        )

    def _problems(self, call: Call, start_s: float, arguments: Sequence[str], result: Result) -> Iterator[str]:
        cpu_s = self.most_cpu_s_per_mb * max(call.num_bytes / 1e6, 1.0) + start_s
        bounds = Bounds(
            codes=call.codes,
            memory_bytes=self.most_memory_bytes,
            cpu_s=self.most_cpu_s if call.num_bytes < MIN_BYTES else cpu_s,
            lines=self.most_lines,
            error_lines=_MAX_ERROR_LINES,
        )
        said = "".join(texts_of(result))
        found = [*broken(arguments, result, bounds), *unsaid(call.says, said)]
        found += [f"says {text!r}" for text in (*call.never, SECRET) if text in said]
        yield from (f"{problem} ({' '.join(said.split())[:300]})" for problem in found)


def cpu_s_per_mb(outcome: Outcome) -> float:
    """Return processor seconds for each megabyte, of a smaller input in all, without the start; 0 for tiny ones."""
    made = outcome.made
    taken_s = max(outcome.result.cpu_s - made.start_s, 0.0)
    return taken_s / max(made.num_bytes / 1e6, 1.0) if made.num_bytes >= MIN_BYTES else 0.0


def kinds_of(prefix: str, group: str, makers: Mapping[str, Make], **bounds: Any) -> list[Hostile]:
    """Return the kinds of one format."""
    return [Hostile(name=f"{prefix}-{name}", group=group, make=make, **bounds) for name, make in makers.items()]


def size_bytes(folder: Path) -> int:
    """Return what is in all regular files of a folder, without the holes of sparse ones."""
    found = [path.stat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(min(one.st_size, 512 * one.st_blocks) for one in found)


@cache
def sound_text(name: str) -> str:
    """Return one of the sound files beside this module, which are to be changed."""
    return (Path(__file__).with_name("sound") / name).read_text(encoding="utf-8")


@cache
def _runs() -> Path:
    """Return a folder of sound runs, which goes with this process."""
    holder = tempfile.TemporaryDirectory(prefix="hpcpace-sound-")
    _HOLDERS.append(holder)
    folder = Path(holder.name)
    for nodes in (1, 2, 4):
        hosts = tuple(f"n{node}" for node in range(nodes))
        run = SyntheticRun(num_ranks=nodes, num_steps=20, hosts=hosts, noise=0.02, samples_per_step=8)
        run.write(folder / f"run{nodes}")
    (folder / "secret").write_text(SECRET)
    return folder


_HOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def sound_run(path: Path, *, nodes: int = 2) -> Path:
    """Copy a sound run of so many nodes, 1, 2 or 4, to a path."""
    shutil.copytree(_runs() / f"run{nodes}", path)
    return path


def put_no_file(path: Path, random: Random, *more: Callable[[Path], object]) -> None:
    """Put something that is no file at a path: a link to a secret or to a device, a FIFO, a folder, or more."""
    links = [lambda path, to=to: path.symlink_to(to) for to in (_runs() / "secret", "/dev/zero", path.name)]
    random.one(os.mkfifo, os.mkdir, *links, *more)(path)


_STARTS: dict[str, float] = {}
"""By kind, measured once: starting takes as long for all of its inputs."""


def _start_s(call: Call, folder: Path, place: Path) -> float:
    """Return the processor time of a call on files of the same names that are empty: what is not for their content."""
    empty = place / "empty"
    empty.mkdir()
    for path in sorted(folder.rglob("*"))[:_MAX_EMPTY]:
        copy = empty / path.relative_to(folder)
        if path.is_dir() and not path.is_symlink():
            copy.mkdir(parents=True)
        elif path.is_file() and not path.is_symlink():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.touch()
    arguments = [word.replace(str(folder), str(empty)) for word in call.arguments]
    return wait_for_one([Child(arguments, place / "start")])[1].cpu_s
