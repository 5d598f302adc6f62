"""Thousands of damaged inputs, each reported in a process of its own; `--write` writes the document."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.damage.campaign import Input, Outcome, run_inputs, spread
from tests.damage.document import write_document
from tests.damage.kinds import KINDS

DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability-input.md"
_FRESH_EVERY = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=2400, help="how many, at least")
    parser.add_argument("--only", nargs="+", metavar="KIND", help="kinds, or KIND#NUMBER for one input")
    parser.add_argument("--at-once", type=int, default=2, help="processes at one time")
    parser.add_argument("--fresh", action="store_true", help="start an interpreter for each")
    parser.add_argument("--keep", type=Path, help="folder for inputs that failed")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    args = parser.parse_args()
    begin_s = time.monotonic()
    inputs = _inputs(args.only, args.inputs)
    outcomes: list[Outcome] = []
    for outcome in run_inputs(inputs, at_once=args.at_once, fresh=args.fresh, keep=args.keep):
        outcomes.append(outcome)
        for problem in outcome.problems:
            print(f"{outcome.input.name} ({outcome.input.specimen}): {' '.join(problem.split())}", flush=True)
        if len(outcomes) % 200 == 0:
            print(f"[{time.monotonic() - begin_s:5.0f} s] {len(outcomes)} of {len(inputs)}", flush=True)
    num_fresh = 0
    if not args.fresh and not args.only:
        num_fresh = len(_compare(outcomes[::_FRESH_EVERY], args.at_once))
    failed = [outcome for outcome in outcomes if outcome.problems]
    duration_s = time.monotonic() - begin_s
    longest = max(outcomes, key=lambda outcome: outcome.result.wall_s)
    largest = max(outcomes, key=lambda outcome: outcome.result.memory_bytes)
    print(
        f"{len(outcomes)} inputs in {duration_s:.0f} s, {len(failed)} failed; longest {longest.result.wall_s:.1f} s "
        f"({longest.input.name}), largest {largest.result.memory_bytes >> 20} MiB ({largest.input.name})"
    )
    if args.write:
        write_document(DOCUMENT, outcomes, num_fresh=num_fresh, duration_s=duration_s)
        print(f"written: {DOCUMENT}")
    if failed:
        sys.exit(1)


def _inputs(only: list[str] | None, num_inputs: int) -> list[Input]:
    if not only:
        return spread(KINDS, num_inputs)
    kinds = {kind.name: kind for kind in KINDS}
    found = []
    for name in only:
        kind, _, number = name.partition("#")
        if kind not in kinds:
            sys.exit(f"no kind {kind!r}: {', '.join(kinds)}")
        found += [Input(kind=kinds[kind], number=n) for n in ([int(number)] if number else range(20))]
    return found


def _compare(outcomes: list[Outcome], at_once: int) -> list[Outcome]:
    """Report some inputs once more in fresh interpreters: exit code and problems must be the same."""
    again = list(run_inputs([outcome.input for outcome in outcomes], at_once=at_once, fresh=True))
    found = {outcome.input.name: outcome for outcome in outcomes}
    for other in again:
        one = found[other.input.name]
        if (one.result.code, one.problems) != (other.result.code, other.problems):
            sys.exit(f"{one.input.name} differs in a fresh interpreter: {other.result.code}, {other.problems}")
    return again


if __name__ == "__main__":
    main()
