"""Runs damaged runs and hostile files by the thousand, each in a process, races, and bombs with their memory measured.

`--write` writes the document of all four. `--races N`, `--hostile N` and `--memory` alone do only that; of these,
`--hostile N --write` writes its section of the document.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from experiments.damage.bombs import Measured, measure
from experiments.damage.campaign import Input, Outcome, run_inputs, spread
from experiments.damage.child import preload
from experiments.damage.document import write_document, write_hostile
from experiments.damage.hostile.campaign import Outcome as HostileOutcome
from experiments.damage.hostile.campaign import line_of, run_hostile
from experiments.damage.hostile.kinds import KINDS as HOSTILE_KINDS
from experiments.damage.kinds import KINDS
from experiments.damage.races import RaceOutcome, all_races

DOCUMENT = Path(__file__).parents[2] / "docs" / "results" / "reliability-input.md"
_FRESH_EVERY = 100
_ROUNDS = 200
_HOSTILE_INPUTS = 20
_MOST_PROBLEMS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=3200, help="make at least this many inputs")
    parser.add_argument("--only", nargs="+", metavar="KIND", help="run only these kinds, or one input as KIND#NUMBER")
    parser.add_argument("--at-once", type=int, default=2, help="run this many processes at a time")
    parser.add_argument("--fresh", action="store_true", help="start a fresh interpreter for each input")
    parser.add_argument("--keep", type=Path, help="keep failed inputs in this folder")
    parser.add_argument(
        "--races", type=int, metavar="ROUNDS", help="run this many rounds of each race; 200 with --write"
    )
    parser.add_argument(
        "--hostile",
        type=int,
        metavar="INPUTS",
        help="only make this many hostile files of each kind, and with --write their section",
    )
    parser.add_argument("--memory", action="store_true", help="measure the memory that bombs take")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    args = parser.parse_args()
    begin_s = time.monotonic()
    is_hostile_alone = args.hostile is not None and args.races is None and not args.memory
    is_alone = is_hostile_alone or ((args.races is not None or args.memory) and not args.write)
    has_hostile = args.hostile is not None or args.write
    hostile = _hostile(args.hostile or _HOSTILE_INPUTS, args.at_once, args.keep) if has_hostile else []
    if is_hostile_alone and args.write:
        write_hostile(DOCUMENT, hostile)
        print(f"written: {DOCUMENT}")
    writes_all = args.write and not is_hostile_alone
    races = _races(args.races or _ROUNDS) if args.races is not None or writes_all else []
    measured = _measured() if args.memory or writes_all else []
    if is_alone:
        failed_races = [race for race in races if race.problems and not race.is_naive]
        failed_hostile = [outcome for outcome in hostile if outcome.problems]
        sys.exit(1 if failed_races or failed_hostile or not all(one.is_kept for one in measured) else 0)
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
    largest = max(outcomes, key=lambda outcome: outcome.memory_bytes)
    print(
        f"{len(outcomes)} inputs in {duration_s:.0f} s, {len(failed)} failed; longest {longest.result.wall_s:.1f} s "
        f"({longest.input.name}), largest {largest.memory_bytes >> 20} MiB ({largest.input.name})"
    )
    if args.write:
        write_document(
            DOCUMENT,
            outcomes,
            races=races,
            measured=measured,
            hostile=hostile,
            num_fresh=num_fresh,
            duration_s=duration_s,
        )
        print(f"written: {DOCUMENT}")
    failed_hostile = [outcome for outcome in hostile if outcome.problems]
    if (
        failed
        or failed_hostile
        or any(race.problems and not race.is_naive for race in races)
        or not all(m.is_kept for m in measured)
    ):
        sys.exit(1)


def _hostile(num_inputs: int, at_once: int, keep: Path | None) -> list[HostileOutcome]:
    found = []
    for outcome in run_hostile(HOSTILE_KINDS, num_inputs, at_once=at_once, keep=keep):
        found.append(outcome)
        if outcome.problems:
            print(line_of(outcome), flush=True)
    num_failed = sum(bool(outcome.problems) for outcome in found)
    print(f"{len(found)} hostile inputs of {len(HOSTILE_KINDS)} kinds, {num_failed} failed", flush=True)
    return found


def _races(num_rounds: int) -> list[RaceOutcome]:
    preload()
    found = []
    with tempfile.TemporaryDirectory(prefix="hpcpace-races-") as name:
        for race in all_races(num_rounds, Path(name)):
            found.append(race)
            print(
                f"{race.program}, {race.swapper} exchanged: {race.num_rounds} rounds, {race.num_hit} hit, "
                f"{race.num_exchanged} exchanges, exit codes {dict(race.codes)}, {len(race.problems)} problems",
                flush=True,
            )
            for problem in race.problems[:_MOST_PROBLEMS]:
                print(f"  {problem}", flush=True)
    return found


def _measured() -> list[Measured]:
    found = []
    with tempfile.TemporaryDirectory(prefix="hpcpace-memory-") as name:
        for one in measure(Path(name)):
            found.append(one)
            print(
                f"{one.command} --memory {one.memory} of {one.what}: {one.most_bytes >> 20} MiB of "
                f"{one.limit_bytes >> 20}, exit {one.code}{'' if one.is_kept else ': FAILED'}",
                flush=True,
            )
    return found


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
