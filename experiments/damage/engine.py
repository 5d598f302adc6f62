"""One engine for all inputs: a kind makes one by chance, commands look at it one after the other, and each is judged.

A kind says what must hold of its own inputs; what must hold of every command, whatever it reads, is here. An input that
failed can be kept, and its kind and number make it again.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from experiments.damage.child import TIME_LIMIT_S, Child, Result, each_outcome, memory_limit_bytes, preload
from experiments.damage.specimen import Shelf
from hpcpace.core.rundir import HISTORY_INDEX


@dataclass(frozen=True, kw_only=True)
class Made:
    """An input that was made.

    Attributes:
        commands: that look at it, each as arguments of `hpcpace`, or a script and its own.
        problems: returns what does not hold of how one of them ended.
        watched: folders of which the commands may only change what they are for.
        working: the folder in which they run; that of this process if it is None.
        without_rights: whether they give up root's rights to read and write what modes forbid.
        num_bytes: what a command has to read at most, where that bounds its processor time.
        start_s: processor time of the same command on empty files.
    """

    commands: Sequence[Sequence[str]]
    problems: Callable[[Sequence[str], Result], Iterable[str]]
    watched: tuple[Path, ...]
    working: Path | None = None
    without_rights: bool = False
    num_bytes: int = 0
    start_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Kind(ABC):
    """A kind of input.

    Attributes:
        name: of the kind, unique.
        group: the row of the table in the document.
        weight: how many inputs it gets relative to others.
    """

    name: str
    group: str
    weight: float = 1.0

    @abstractmethod
    def made(self, number: int, place: Path, shelf: Shelf) -> Made:
        """Make the input of a number, always the same, in an empty folder."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input; kind and number make it again."""

    kind: Kind
    number: int

    @property
    def name(self) -> str:
        """What to call it."""
        return f"{self.kind.name}#{self.number}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the commands on one input ended, the first one first, and what did not hold of any."""

    input: Input
    made: Made
    results: tuple[Result, ...]
    problems: tuple[str, ...]

    @property
    def result(self) -> Result:
        """How the first command ended."""
        return self.results[0]

    @property
    def memory_bytes(self) -> int:
        """The most that any of the commands took."""
        return max(result.memory_bytes for result in self.results)

    def line(self) -> str:
        """Return how it ended, with a line for each problem."""
        result = self.result
        head = (
            f"{self.input.name}: exit {result.code}, {result.cpu_s:.2f} s ({self.made.start_s:.2f} s to start), "
            f"{self.made.num_bytes / 1e6:.2f} MB, {self.memory_bytes >> 20} MiB"
        )
        return "\n  ".join([head, *(" ".join(problem.split()) for problem in self.problems)])


def spread(kinds: Sequence[Kind], num_inputs: int) -> list[Input]:
    """Return at least as many inputs, spread over kinds by their weights, one of each at least."""
    total = sum(kind.weight for kind in kinds)
    return [
        Input(kind=kind, number=number)
        for kind in kinds
        for number in range(math.ceil(num_inputs * kind.weight / total))
    ]


def run_inputs(
    inputs: Iterable[Input],
    *,
    at_once: int = 2,
    fresh: bool = False,
    keep: Path | None = None,
    shelf: Shelf | None = None,
) -> Iterator[Outcome]:
    """Yield the outcome of each input, in the order in which they end.

    Args:
        inputs: what to do.
        at_once: processes at one time.
        fresh: whether the first command of each input runs in a fresh interpreter, and the others not at all.
        keep: a folder that takes the inputs that failed.
        shelf: where the specimens are; one for this call otherwise.
    """
    preload()
    with tempfile.TemporaryDirectory(prefix="hpcpace-damage-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        shelf = shelf or Shelf(folder / "specimens")
        jobs = (_Running(one, shelf, folder / f"{index}", keep, fresh=fresh) for index, one in enumerate(inputs))
        yield from each_outcome(jobs, at_once)


class _Running:
    """One input and the command that looks at it now."""

    def __init__(self, one: Input, shelf: Shelf, place: Path, keep: Path | None, *, fresh: bool) -> None:
        self._input, self._place, self._keep, self._fresh = one, place, keep, fresh
        place.mkdir()
        self._made = one.kind.made(one.number, place, shelf)
        # A fresh interpreter is to end as a fork does, which the first command shows.
        self._left = list(self._made.commands)[: 1 if fresh else None]
        self._results: list[Result] = []
        self._problems: list[str] = []
        self.child = self._started()

    def _started(self) -> Child:
        self._arguments, made = self._left.pop(0), self._made
        self._before = state_of(*made.watched)
        with chdir(made.working or "."):  # what is written into the working folder is found there
            rights = made.without_rights
            return Child(self._arguments, self._place / "output", without_rights=rights, fresh=self._fresh)

    def ended(self, result: Result) -> Outcome | None:
        """Judge the command that ended, and start the next one, or remove the input if there is none."""
        found = [*self._made.problems(self._arguments, result)]
        found += wrongly_written(self._arguments, self._before, state_of(*self._made.watched), self._place)
        command = f"{Path(self._arguments[0]).name}{' --json' if '--json' in self._arguments else ''}"
        self._problems += [f"{command}: {problem}" for problem in found]
        self._results.append(result)
        if self._left:
            self.child = self._started()
            return None
        if self._problems and self._keep is not None:
            shutil.copytree(self._place, self._keep / self._input.name, symlinks=True, ignore=_no_plain_file)
        _remove(self._place)
        ended = {"results": tuple(self._results), "problems": tuple(self._problems)}
        return Outcome(input=self._input, made=self._made, **ended)


def _no_plain_file(folder: str, names: list[str]) -> list[str]:
    def is_copied(path: Path) -> bool:
        return path.is_symlink() or path.is_dir() or (path.is_file() and path.stat().st_size < 1 << 30)

    return [name for name in names if not is_copied(Path(folder, name))]


def _remove(path: Path) -> None:
    for folder, _, _ in os.walk(path):  # which follows no links
        os.chmod(folder, 0o755)
    shutil.rmtree(path)


# What must hold of every command

CODES = frozenset(range(5))
_WARNING = re.compile(r"^.*\b\w*Warning: .*$|^HDF5-DIAG.*$|^.*Exception ignored.*$", re.MULTILINE)
_MAX_PRINTED_BYTES, _COLUMNS = 200_000, 120


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a command may take and print.

    Attributes:
        codes: exit codes that are right.
        memory_bytes: resident set of the largest of its processes.
        cpu_s: processor time; without a bound, it has to end soon instead.
        lines, error_lines: of a terminal, on stdout and stderr, but for JSON.
    """

    codes: Collection[int] = CODES
    memory_bytes: int = memory_limit_bytes("")
    cpu_s: float = math.inf
    lines: float = math.inf
    error_lines: float = math.inf


def texts_of(result: Result) -> tuple[str, str]:
    """Return stdout and stderr."""
    stdout, stderr = (text.decode("utf-8", "surrogateescape") for text in (result.stdout, result.stderr))
    return stdout, stderr


def broken(arguments: Sequence[str], result: Result, bounds: Bounds) -> list[str]:
    """Return what does not hold of how a command ended, whatever it read."""
    stdout, stderr = texts_of(result)
    both, is_json = stdout + stderr, "--json" in arguments
    is_killed = result.is_late and (bounds.cpu_s == math.inf or result.code < 0)
    steering = {character for character in (stderr if is_json else both) if _steers(character)}
    checks = {
        f"takes {result.wall_s:.1f} s ({result.cpu_s:.1f} s of a core), more than {TIME_LIMIT_S:g} s": is_killed,
        f"is killed by signal {result.signal}": result.signal,
        f"ends with {result.code}": not is_killed and not result.signal and result.code not in bounds.codes,
        f"takes {result.cpu_s:.2f} s of a core, more than {bounds.cpu_s:.2f} s": result.cpu_s > bounds.cpu_s,
        f"takes {result.memory_bytes >> 20} MiB of memory, more than {bounds.memory_bytes >> 20} MiB": (
            result.memory_bytes > bounds.memory_bytes
        ),
        f"prints {sorted(steering)!r}": steering,
        f"prints {len(both)} bytes": not is_json and len(both) > _MAX_PRINTED_BYTES,
        f"prints {_num_lines(stdout)} lines": not is_json and _num_lines(stdout) > bounds.lines,
        f"prints {_num_lines(stderr)} lines to stderr": _num_lines(stderr) > bounds.error_lines,
        # An audit that ends with 4 gives its reason among its findings.
        "gives no reason": result.code not in (-1, 0, 1, 3) and not (stdout if result.code == 4 else stderr).strip(),
    }
    problems = [problem for problem, is_wrong in checks.items() if is_wrong]
    if "Traceback (most recent call last)" in both:
        last = [line for line in both.splitlines() if line.strip()][-1]
        places = re.findall(r'File ".*?((?:hpcpace/|site-packages/)\S+)", line (\d+)', both)
        problems.append(f"traceback: {last} ({' < '.join(f'{file}:{line}' for file, line in reversed(places[-6:]))})")
    return [*problems, *(f"warns: {found}" for found in _WARNING.findall(both)[:3])]


def _steers(character: str) -> bool:
    return character not in "\n\t" and not character.isprintable()


def _num_lines(text: str) -> int:
    """Return how many lines of a terminal a text takes."""
    return sum(max(-(-len(line) // _COLUMNS), 1) for line in text.splitlines())


def unsaid(texts: Iterable[str], said: str) -> list[str]:
    """Return which of some texts are not among what was said, wherever a terminal has wrapped it.

    Several ranks' files may be said as one, as `rank-*.h5`.
    """
    said = without_space(said)
    wanted = {text: without_space(escaped(text)) for text in texts}
    return [
        f"does not say {text!r}"
        for text, words in wanted.items()
        if words not in said and re.sub(r"rank-\d+", "rank-*", words) not in said
    ]


def escaped(text: str) -> str:
    """Return a text as a terminal shows it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def without_space(text: str) -> str:
    """Return a text without its spaces and line breaks."""
    return re.sub(r"\s+", "", text)


_TRACES = r"(.*/)?attempt-\d+/trace(/.*)?"
_NAMES = {
    "report": r"(.*/)?(summary\.json|report\.html)",
    "timeline": r"(.*/)?timeline\.pftrace",
    "history": rf"(.*/)?{re.escape(HISTORY_INDEX)}",
    **{"pack": _TRACES, "collect": _TRACES, "switch": r"(.*/)?switch"},
}
"""By command: names in the folder that was given to it. `SECURITY.md` lists them in words."""
_OPTIONS = frozenset({"--run-dir", "--timeline", "--html", "--csv", "--out", "--output", "-o", "--save", "--show"})
"""What follows them is written; the commands that are run here give `--json` no file."""

State = Mapping[Path, tuple[int, ...]]


def state_of(*folders: Path) -> State:
    """Return what files and folders are: mode, owner and group, and of files inode, size and times too."""
    found: dict[Path, tuple[int, ...]] = {}
    for folder in folders:
        for where, _, names in os.walk(folder):
            for path in (Path(where), *(Path(where, name) for name in names)):
                one = path.lstat()
                of_file = () if path == Path(where) else (one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns)
                found[path] = (one.st_mode, one.st_uid, one.st_gid, *of_file)
    return found


def wrongly_written(arguments: Sequence[str], before: State, after: State, place: Path) -> list[str]:
    """Return what a command has made, changed or removed and may not have.

    Args:
        arguments: of `hpcpace`, or a script and its own.
        before, after: as of `state_of`.
        place: the folder that names are shown relative to.
    """
    named = [Path(path) for option, path in pairwise(arguments) if option in _OPTIONS]
    pattern = re.compile(_NAMES.get(arguments[0], r"\0"), re.DOTALL)
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    did = {path: "makes" if path not in before else "removes" if path not in after else "changes" for path in changed}
    return [
        f"{did[path]} {os.path.relpath(path, place)!r}"
        for path in changed
        if not pattern.fullmatch(os.path.relpath(path, place)) and not any(path.is_relative_to(one) for one in named)
    ][:5]
