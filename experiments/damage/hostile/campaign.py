"""Makes hostile inputs, runs the command on each in a process of its own, and judges how it ended.

`python -m experiments.damage.hostile.campaign [--only NAME|FORMAT ...] [--inputs 20] [--keep FOLDER]`
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from experiments.damage.child import Child, Result, preload, wait_for_one
from experiments.damage.hostile.kind import Call, Hostile, cpu_s_per_mb, problems_of
from experiments.damage.hostile.kinds import KINDS
from experiments.damage.judge import state_of, wrongly_written

_MOST_EMPTY = 50


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
        """Processor seconds for each megabyte, without the start; of small inputs 0."""
        return cpu_s_per_mb(self.call, self.result, self.start_s)


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
    running: list[_Running] = []
    for kind in kinds:
        for number in range(num_inputs):
            running.append(_Running(kind, number, keep, starts))
            if len(running) >= at_once:
                yield _first_ended(running)
    while running:
        yield _first_ended(running)


class _Running:
    """A call on one input."""

    def __init__(self, kind: Hostile, number: int, keep: Path | None, starts: dict[str, float]) -> None:
        self._kind, self._number = kind, number
        self._temporary = tempfile.TemporaryDirectory(prefix="hpcpace-hostile-")
        self._keep, self._place = keep, Path(self._temporary.name) / f"{kind.name}-{number}"
        folder, working = self._place / "input", self._place / "working"
        folder.mkdir(parents=True)
        working.mkdir()
        self._call = kind.input(folder, number)
        if kind.name not in starts:
            starts[kind.name] = _start_s(self._call, folder, self._place)
        self._start_s = starts[kind.name]
        self._before = state_of(folder, working)
        with chdir(working):  # what is written into the working folder is found there
            self.child = Child(self._call.arguments, self._place / "output")

    def outcome(self, result: Result) -> Outcome:
        """Judge how it ended, and remove the input unless it is to be kept."""
        call, after = self._call, state_of(self._place / "input", self._place / "working")
        wrong = wrongly_written(call.arguments, self._before, after, self._place)
        problems = (*problems_of(self._kind, call, result, self._start_s), *wrong)
        if problems and self._keep is not None:
            shutil.copytree(self._place, self._keep / self._place.name, symlinks=True, dirs_exist_ok=True)
        self._temporary.cleanup()
        return Outcome(
            kind=self._kind, number=self._number, call=call, result=result, start_s=self._start_s, problems=problems
        )


def _first_ended(running: list[_Running]) -> Outcome:
    index, result = wait_for_one([one.child for one in running])
    return running.pop(index).outcome(result)


def _start_s(call: Call, folder: Path, place: Path) -> float:
    """Return the processor time of a call on files of the same names that are empty: what is not for their content."""
    empty = place / "empty"
    empty.mkdir()
    for path in sorted(folder.rglob("*"))[:_MOST_EMPTY]:
        copy = empty / path.relative_to(folder)
        if path.is_dir() and not path.is_symlink():
            copy.mkdir(parents=True)
        elif path.is_file() and not path.is_symlink():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.touch()
    arguments = [word.replace(str(folder), str(empty)) for word in call.arguments]
    _, result = wait_for_one([Child(arguments, place / "start")])
    return result.cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="kinds or formats to make; all without it")
    parser.add_argument("--inputs", type=int, default=20, help="inputs of each kind")
    parser.add_argument("--keep", type=Path, help="keep failed inputs in this folder")
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if not args.only or kind.name in args.only or kind.format in args.only]
    outcomes = []
    for outcome in run_hostile(kinds, args.inputs, keep=args.keep):
        outcomes.append(outcome)
        print(line_of(outcome), flush=True)
    sys.exit(1 if not outcomes or any(outcome.problems for outcome in outcomes) else 0)


def line_of(outcome: Outcome) -> str:
    """Return how one input ended, with a line for each problem."""
    result = outcome.result
    head = (
        f"{outcome.kind.name}#{outcome.number}: exit {result.code}, {result.cpu_s:.2f} s ({outcome.start_s:.2f} s to "
        f"start), {outcome.call.num_bytes / 1e6:.2f} MB, {result.memory_bytes >> 20} MiB"
    )
    return "\n  ".join([head, *outcome.problems])


if __name__ == "__main__":
    main()
