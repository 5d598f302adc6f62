"""Makes each numbered damaged input, reports it in a separate process, judges the report and removes the input."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import Any

import numpy as np

from experiments.damage import bombs, content, journals, links, names, tables
from experiments.damage.chance import random_of
from experiments.damage.child import Child, Result, each_outcome, preload
from experiments.damage.judge import problems_of, problems_of_view, state_of, wrongly_written
from experiments.damage.names import run_folder
from experiments.damage.specimen import Damaged, Kind, RunCopy, Shelf, further_views

_MODULES = (content, journals, tables, names, links, bombs)
KINDS = tuple(kind for module in _MODULES for kind in module.KINDS)
"""All kinds of damage."""
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
        random = random_of(self.kind.name, self.number)
        run = shelf.copy(self.specimen, path)
        return run, further_views(run, random, self.kind.damage(run, random))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one input.

    Attributes:
        input: what was damaged, and how.
        result: how the report ended.
        views: how the further commands ended.
        problems: what did not hold of any.
    """

    input: Input
    result: Result
    views: tuple[Result, ...] = ()
    problems: tuple[str, ...]

    @property
    def memory_bytes(self) -> int:
        """The most that any of the commands took."""
        return max(result.memory_bytes for result in (self.result, *self.views))


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
        fresh: whether each report runs in a fresh interpreter.
        keep: a folder that takes the inputs that failed.
        shelf: where the specimens are; one for this call otherwise.
    """
    preload()
    with tempfile.TemporaryDirectory(prefix="hpcpace-damage-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        shelf = shelf or Shelf(folder / "specimens")
        numbered = enumerate(inputs)
        jobs = (_Running(one, shelf, folder / f"{index}", keep, fresh=fresh) for index, one in numbered)
        yield from each_outcome(jobs, at_once)


class _Running:
    """One input and the command that looks at it now: the report first, then the further views."""

    def __init__(self, one: Input, shelf: Shelf, place: Path, keep: Path | None, *, fresh: bool) -> None:
        self._input, self._place, self._keep, self._fresh = one, place, keep, fresh
        (place / "runs").mkdir(parents=True)
        self._run, self._damaged = _forked(one.make, shelf, place / "runs" / "run")
        self._folder = run_folder(self._run) if self._run.path.is_dir() else self._run.path
        arguments = ["report", str(self._folder), *(["--json"] if one.as_json else [])]
        if self._damaged.memory:
            arguments += ["--memory", self._damaged.memory]
        # A fresh interpreter is to end as a fork does, which the report shows.
        self._left = [] if fresh else list(self._damaged.views)
        self._results: list[Result] = []
        self._problems: list[str] = []
        self.child = self._started(arguments)

    def ended(self, result: Result) -> Outcome | None:
        """Judge the command that ended, and start the next one, or remove the input if there is none."""
        secret = self._run.shelf.secret
        if not self._results:
            as_json = self._input.as_json
            self._problems += problems_of(result, self._damaged, self._run, self._folder, as_json=as_json)
        else:
            self._problems += problems_of_view(self._arguments, result, self._damaged, secret, self._folder)
        name = Path(self._arguments[0]).name
        written = wrongly_written(self._arguments, self._before, state_of(*self._watched), self._place)
        self._problems += [f"{name}: {problem}" for problem in written]
        self._results.append(result)
        if self._left:
            self.child = self._started(self._left.pop(0))
            return None
        if self._problems and self._keep is not None:
            shutil.copytree(self._place, self._keep / self._input.name, symlinks=True, ignore=_no_plain_file)
        _remove(self._place)
        report, *views = self._results
        return Outcome(input=self._input, result=report, views=tuple(views), problems=tuple(self._problems))

    def _started(self, arguments: Sequence[str]) -> Child:
        secret = self._run.shelf.secret.path
        self._arguments = arguments
        self._watched = (self._place / "runs", *([secret] if secret.exists() else []))
        self._before = state_of(*self._watched)
        rights = self._damaged.without_rights
        return Child(arguments, self._place / "output", without_rights=rights, fresh=self._fresh)


def _forked(make: Callable[[Shelf, Path], tuple[RunCopy, Damaged]], shelf: Shelf, path: Path) -> Any:
    """Return what a function returns in a separate process.

    What a damage leaves in HDF5 and in memory would otherwise be in all reports that are forked later.
    """
    reader, writer = Pipe(duplex=False)
    process = get_context("fork").Process(target=lambda: writer.send(make(shelf, path)))
    process.start()
    writer.close()
    try:
        return reader.recv()
    except EOFError:
        raise RuntimeError(f"the damage could not be done to {path}") from None
    finally:
        process.join()


def _no_plain_file(folder: str, names: list[str]) -> list[str]:
    def is_copied(path: Path) -> bool:
        return path.is_symlink() or path.is_dir() or (path.is_file() and path.stat().st_size < 1 << 30)

    return [name for name in names if not is_copied(Path(folder, name))]


def _remove(path: Path) -> None:
    for folder, _, _ in os.walk(path):  # which follows no links
        os.chmod(folder, 0o755)
    shutil.rmtree(path)
