"""Damaged inputs, numbered: each is made, reported in a process of its own, judged and removed."""

from __future__ import annotations

import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.damage.child import Child, Result, preload, wait_for_one
from tests.damage.judge import problems_of
from tests.damage.kind import Damaged, Kind
from tests.damage.names import run_folder
from tests.damage.specimen import RunCopy, Shelf

_JSON_EVERY = 5


@dataclass(frozen=True, kw_only=True)
class Input:
    """One damaged input; kind and number make it again."""

    kind: Kind
    number: int

    @property
    def name(self) -> str:
        """What to call it."""
        return f"{self.kind.name}#{self.number}"

    @property
    def specimen(self) -> str:
        """The run that is damaged."""
        return self.kind.specimens[self.number % len(self.kind.specimens)]

    @property
    def as_json(self) -> bool:
        """Whether the report is asked for as JSON."""
        return self.number % _JSON_EVERY == _JSON_EVERY - 1

    def make(self, shelf: Shelf, path: Path) -> tuple[RunCopy, Damaged]:
        """Copy the specimen to a path and damage it."""
        random = np.random.default_rng([zlib.crc32(self.kind.name.encode()), self.number])
        run = shelf.copy(self.specimen, path)
        return run, self.kind.damage(run, random)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one input."""

    input: Input
    result: Result
    problems: tuple[str, ...]


def spread(kinds: Sequence[Kind], num_inputs: int) -> list[Input]:
    """Return at least as many inputs, spread over kinds by their weights, one of each at least."""
    total = sum(kind.weight for kind in kinds)
    return [
        Input(kind=kind, number=number)
        for kind in kinds
        for number in range(int(np.ceil(num_inputs * kind.weight / total)))
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
        fresh: whether each report is an interpreter of its own.
        keep: a folder that takes the inputs that failed.
        shelf: where the specimens are; one for this call otherwise.
    """
    preload()
    with tempfile.TemporaryDirectory(prefix="hpcpace-damage-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        shelf = shelf or Shelf(folder / "specimens")
        running: list[_Running] = []
        for index, one in enumerate(inputs):
            running.append(_Running(one, shelf, folder / f"{index}", fresh=fresh))
            if len(running) >= at_once:
                yield _first_ended(running, keep)
        while running:
            yield _first_ended(running, keep)


class _Running:
    def __init__(self, one: Input, shelf: Shelf, place: Path, *, fresh: bool) -> None:
        self._input, self._place = one, place
        place.mkdir()
        self._run, self._damaged = one.make(shelf, place / "run")
        self._folder = run_folder(self._run) if self._run.path.is_dir() else self._run.path
        arguments = ["report", str(self._folder), *(["--json"] if one.as_json else [])]
        rights = self._damaged.without_rights
        self.child = Child(arguments, place / "output", without_rights=rights, fresh=fresh)

    def judged(self, result: Result, keep: Path | None) -> Outcome:
        """Return what became of the input, and remove it."""
        problems = problems_of(result, self._damaged, self._run, self._folder, as_json=self._input.as_json)
        if problems and keep is not None:
            shutil.copytree(self._place, keep / self._input.name, symlinks=True, ignore=_no_plain_file)
        _remove(self._place)
        return Outcome(input=self._input, result=result, problems=tuple(problems))


def _first_ended(running: list[_Running], keep: Path | None) -> Outcome:
    index, result = wait_for_one([one.child for one in running])
    return running.pop(index).judged(result, keep)


def _no_plain_file(folder: str, names: list[str]) -> list[str]:
    def is_copied(path: Path) -> bool:
        return path.is_symlink() or path.is_dir() or (path.is_file() and path.stat().st_size < 1 << 30)

    return [name for name in names if not is_copied(Path(folder, name))]


def _remove(path: Path) -> None:
    for folder in [path, *(entry for entry in path.rglob("*") if entry.is_dir() and not entry.is_symlink())]:
        folder.chmod(0o755)
    shutil.rmtree(path)
