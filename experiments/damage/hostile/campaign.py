"""Makes hostile inputs, runs the command on each in a process of its own, and judges how it ended.

`python -m experiments.damage.hostile.campaign [--only NAME|FORMAT ...] [--inputs 20] [--keep FOLDER]`
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.damage.child import Child, Result, preload, wait_for_one
from experiments.damage.hostile.kind import Call, Hostile, problems_of
from experiments.damage.hostile.kinds import KINDS


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the call on one input ended, and what was wrong with that."""

    kind: Hostile
    number: int
    call: Call
    result: Result
    problems: tuple[str, ...]


def run_hostile(kinds: Sequence[Hostile], num_inputs: int, *, keep: Path | None = None) -> Iterator[Outcome]:
    """Yield the outcome of each input of each kind.

    Args:
        kinds: what to make.
        num_inputs: of each kind.
        keep: a folder that takes the inputs; None for a temporary one, which is removed.
    """
    preload()
    for kind in kinds:
        for number in range(num_inputs):
            with tempfile.TemporaryDirectory(prefix="hpcpace-hostile-") as name:
                place = (keep or Path(name)) / f"{kind.name}-{number}"
                folder = place / "input"
                folder.mkdir(parents=True)
                call = kind.input(folder, number)
                child = Child(call.arguments, place / "output")
                _, result = wait_for_one([child])
                yield Outcome(
                    kind=kind, number=number, call=call, result=result, problems=tuple(problems_of(kind, call, result))
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="kinds or formats to make; all without it")
    parser.add_argument("--inputs", type=int, default=20, help="inputs of each kind")
    parser.add_argument("--keep", type=Path, help="keep all inputs in this folder")
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if not args.only or kind.name in args.only or kind.format in args.only]
    num_failed = 0
    for outcome in run_hostile(kinds, args.inputs, keep=args.keep):
        result = outcome.result
        mb = max(outcome.call.num_bytes / 1e6, 1e-6)
        print(
            f"{outcome.kind.name}#{outcome.number}: exit {result.code}, {result.cpu_s:.2f} s, {mb:.2f} MB, "
            f"{result.memory_bytes >> 20} MiB",
            *(f"\n  {problem}" for problem in outcome.problems),
            flush=True,
        )
        num_failed += bool(outcome.problems)
    sys.exit(1 if num_failed or not kinds else 0)


if __name__ == "__main__":
    main()
