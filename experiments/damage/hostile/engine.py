"""What a kind of hostile input is, which bounds a command has to keep on it, and how each is run and judged.

A kind makes files of some size by chance and says how `hpcpace` is called on them. The command must end by itself with
an exit code of its own, within processor time that is linear in what it reads, within memory, with little to read, and
without anything that could steer a terminal or comes from elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from experiments.damage.chance import Random, random_of
from experiments.damage.child import Child, Result, each_outcome, preload, wait_for_one
from experiments.damage.judge import state_of, without_space, wrongly_written
from experiments.synthetic_run import SyntheticRun

MIN_BYTES = 100_000
"""Of smaller inputs the start is most of what the command takes."""
SECRET = "root-only-5e1f"
"""Stands in files that no output may show: what planted links lead to."""
CONTROL = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m\r\n<script>alert(1)</script>=cmd|' /C calc'!A1"
_EXIT_CODES = frozenset({0, 1, 2, 3, 4})
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_MAX_EMPTY = 50


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
    codes: frozenset[int] = _EXIT_CODES


Make = Callable[[Path, Random], Call]
"""Writes the files into an empty folder, by chance, and returns the call on them."""


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """A kind of hostile input.

    Attributes:
        name: of the kind, unique.
        format: what is read, a row of the table in docs/results/reliability-input.md.
        make: makes an input.
        most_cpu_s: processor time of a call on less than `MIN_BYTES`, with its start.
        most_cpu_s_per_mb: processor time for each megabyte that is read of larger inputs, without the start; below a
            megabyte, what one may take, because some work does not depend on the size.
        most_memory_bytes: resident set of the largest process.
        most_lines: of stdout, but for JSON; stderr has 20 lines at most.
    """

    name: str
    format: str
    make: Make
    most_cpu_s: float = 4.0
    most_cpu_s_per_mb: float = 2.0
    most_memory_bytes: int = 1 << 30
    most_lines: int = 60

    def input(self, folder: Path, number: int) -> Call:
        """Write the input of a number, always the same, into an empty folder."""
        return self.make(folder, random_of(self.name, number))


def kinds_of(prefix: str, format_: str, makers: Mapping[str, Make] | Sequence[Make], **bounds: Any) -> list[Hostile]:
    """Return the kinds of one format, by their names, or by the names of the functions that make them."""
    if not isinstance(makers, Mapping):
        makers = {make.__name__.strip("_").replace("_", "-"): make for make in makers}
    return [Hostile(name=f"{prefix}-{name}", format=format_, make=make, **bounds) for name, make in makers.items()]


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


def secret_file() -> Path:
    """Return a file that no output may show."""
    return _runs() / "secret"


def put_no_file(path: Path, random: Random, *more: Callable[[Path], object]) -> None:
    """Put something that is no file at a path: a link to the secret or to a device, a FIFO, a folder, or more."""
    links = [partial(_link, target) for target in (secret_file(), "/dev/zero", path.name)]
    random.one(os.mkfifo, os.mkdir, *links, *more)(path)


def _link(target: Path | str, path: Path) -> None:
    path.symlink_to(target)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the call on one input ended, and what was wrong with that.

    Attributes:
        start_s: processor time of the same call on empty files.
    """

    kind: Hostile
    number: int
    call: Call
    result: Result
    start_s: float
    problems: tuple[str, ...]

    @property
    def cpu_s_per_mb(self) -> float:
        """Processor seconds for each megabyte, of a smaller input in all, without the start; 0 for tiny ones."""
        if self.call.num_bytes < MIN_BYTES:
            return 0.0
        return max(self.result.cpu_s - self.start_s, 0.0) / max(self.call.num_bytes / 1e6, 1.0)

    def line(self) -> str:
        """Return how it ended, with a line for each problem."""
        head = (
            f"{self.kind.name}#{self.number}: exit {self.result.code}, {self.result.cpu_s:.2f} s ({self.start_s:.2f} s "
            f"to start), {self.call.num_bytes / 1e6:.2f} MB, {self.result.memory_bytes >> 20} MiB"
        )
        return "\n  ".join([head, *self.problems])


def run_hostile(
    kinds: Sequence[Hostile], num_inputs: int, *, at_once: int = 1, keep: Path | None = None
) -> Iterator[Outcome]:
    """Yield the outcome of each input of each kind, in the order in which they end.

    Args:
        kinds: what to make.
        num_inputs: of each kind.
        at_once: processes at one time.
        keep: a folder that takes the inputs that failed.
    """
    preload()
    starts: dict[str, float] = {}
    jobs = (_Running(kind, number, keep, starts) for kind in kinds for number in range(num_inputs))
    yield from each_outcome(jobs, at_once)


class _Running:
    """A call on one input."""

    def __init__(self, kind: Hostile, number: int, keep: Path | None, starts: dict[str, float]) -> None:
        self._kind, self._number, self._keep = kind, number, keep
        self._temporary = tempfile.TemporaryDirectory(prefix="hpcpace-hostile-")
        self._place = Path(self._temporary.name) / f"{kind.name}-{number}"
        self._folders = (self._place / "input", self._place / "working")
        for folder in self._folders:
            folder.mkdir(parents=True)
        self._call = kind.input(self._folders[0], number)
        if kind.name not in starts:
            starts[kind.name] = _start_s(self._call, self._folders[0], self._place)
        self._start_s = starts[kind.name]
        self._before = state_of(*self._folders)
        with chdir(self._folders[1]):  # what is written into the working folder is found there
            self.child = Child(self._call.arguments, self._place / "output")

    def ended(self, result: Result) -> Outcome:
        """Judge how it ended, and remove the input unless it is to be kept."""
        call = self._call
        wrong = wrongly_written(call.arguments, self._before, state_of(*self._folders), self._place)
        problems = (*problems_of(self._kind, call, result, self._start_s), *wrong)
        if problems and self._keep is not None:
            shutil.copytree(self._place, self._keep / self._place.name, symlinks=True, dirs_exist_ok=True)
        self._temporary.cleanup()
        found = {"call": call, "result": result, "start_s": self._start_s, "problems": problems}
        return Outcome(kind=self._kind, number=self._number, **found)


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


def problems_of(kind: Hostile, call: Call, result: Result, start_s: float = 0.0) -> list[str]:
    """Return what does not hold of how a call ended.

    Args:
        kind: of the input.
        call: on it.
        result: how it ended.
        start_s: processor time of the same call on empty files.
    """
    stdout, stderr = result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")
    both = stdout + stderr
    most_s = kind.most_cpu_s_per_mb * max(call.num_bytes / 1e6, 1.0) + start_s
    most_s = kind.most_cpu_s if call.num_bytes < MIN_BYTES else most_s
    took = f"{result.cpu_s:.2f} s of processor time for {call.num_bytes} bytes, {start_s:.2f} s without"
    is_text = "--json" not in call.arguments
    checks = {
        f"signal {result.signal}": result.signal,
        f"killed after {result.wall_s:.0f} s": result.code < 0 and not result.signal,
        f"exit code {result.code}": result.code >= 0 and result.code not in call.codes,
        took: result.cpu_s > most_s,
        f"{result.memory_bytes >> 20} MiB": result.memory_bytes > kind.most_memory_bytes,
        "a traceback": "Traceback (most recent call last)" in both,
        "control characters": _STEERING.search(both),
        "what only root may read": SECRET in both,
        # An audit that ends with 4 gives its reason among its findings.
        "no reason": result.code not in (0, 1, 3) and not (stdout if result.code == 4 else stderr).strip(),
        f"{len(stderr.splitlines())} lines on stderr": _lines(stderr) > 20,
        f"{len(stdout.splitlines())} lines on stdout": _lines(stdout) > kind.most_lines and is_text,
        **{f"does not say {text!r}": without_space(text) not in without_space(both) for text in call.says},
        **{f"says {text!r}": text in both for text in call.never},
    }
    shown = " ".join(both.split())[:300]
    return [f"{problem} ({shown})" for problem, is_wrong in checks.items() if is_wrong]


def _lines(text: str, columns: int = 120) -> int:
    """Return how many lines of a terminal a text takes."""
    return sum(max(-(-len(line) // columns), 1) for line in text.splitlines())
