"""Runs damaged runs and hostile files by the thousand, each in a process, races, and bombs with their memory measured.

`--write` writes the document of all four. `--races N`, `--hostile N` and `--memory` alone do only that; of these,
`--hostile N --write` writes its section of the document.

Options:
  --inputs N     make at least this many inputs [3200]
  --only KIND...  run only these kinds, inputs KIND#NUMBER, or formats
  --at-once N    run this many processes at a time [2]
  --fresh        start a fresh interpreter for each input
  --keep PATH    keep failed inputs in this folder
  --races N      run each race so often; 200 with --write
  --hostile N    make this many hostile files of each kind
  --memory       measure the memory that bombs take
  --write        write the page reliability-input, or its section on hostile files
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.damage.bombs import Measured, measure
from experiments.damage.child import preload
from experiments.damage.engine import Input, Kind, Outcome, run_inputs, spread
from experiments.damage.hostile_files import cpu_s_per_mb
from experiments.damage.kinds import DAMAGED, HOSTILE
from experiments.damage.races import RaceOutcome, all_races
from experiments.options import command_line
from experiments.pages import failures, minutes, page, write_page, write_section

_FRESH_EVERY, _ROUNDS, _HOSTILE_INPUTS, _MAX_PROBLEMS = 100, 200, 20, 5


def main() -> None:
    args = command_line(__doc__)
    begin_s = time.monotonic()
    is_hostile_alone = args.hostile is not None and args.races is None and not args.memory
    writes_all = args.write and not is_hostile_alone
    is_alone = is_hostile_alone or ((args.races is not None or args.memory) and not args.write)
    hostile = _hostile(args) if args.hostile is not None or args.write else []
    if is_hostile_alone and args.write:
        write_section("reliability-input", _hostile_section(hostile))
    races = _races(args.races or _ROUNDS) if args.races is not None or writes_all else []
    measured = _measured() if args.memory or writes_all else []
    outcomes = [] if is_alone else _outcomes(args)
    if writes_all:
        _write(outcomes, races, measured, hostile, args=args, duration_s=time.monotonic() - begin_s)
    lost = [race for race in races if race.problems and not race.is_naive]
    failed = [one for one in (*outcomes, *hostile) if one.problems]
    sys.exit(1 if failed or lost or not all(one.is_kept for one in measured) else 0)


def _kept(found: Iterable[Any], line: Callable[[Any], str]) -> list[Any]:
    """Return all of some results, and print a line on each as it comes unless the line is empty."""
    kept = []
    for one in found:
        kept.append(one)
        if text := line(one):
            print(text, flush=True)
    return kept


def _run(inputs: Sequence[Input], args: argparse.Namespace, *, is_told: bool) -> list[Outcome]:
    outcomes: list[Outcome] = _kept(
        run_inputs(inputs, at_once=args.at_once, fresh=args.fresh, keep=args.keep),
        lambda one: one.line() if one.problems or is_told else "",
    )
    longest = max(outcomes, key=lambda outcome: outcome.result.wall_s)
    largest = max(outcomes, key=lambda outcome: outcome.memory_bytes)
    print(
        f"{len(outcomes)} inputs, {sum(bool(outcome.problems) for outcome in outcomes)} failed; longest "
        f"{longest.result.wall_s:.1f} s ({longest.input.name}), largest {largest.memory_bytes >> 20} MiB "
        f"({largest.input.name})",
        flush=True,
    )
    return outcomes


def _outcomes(args: argparse.Namespace) -> list[Outcome]:
    return _run(_chosen(DAMAGED, args.only) if args.only else spread(DAMAGED, args.inputs), args, is_told=False)


def _hostile(args: argparse.Namespace) -> list[Outcome]:
    chosen = [kind for kind in HOSTILE if not args.only or {kind.name, kind.group} & {*args.only}]
    numbers = range(args.hostile or _HOSTILE_INPUTS)
    return _run([Input(kind=kind, number=n) for kind in chosen for n in numbers], args, is_told=bool(args.only))


def _chosen(all_kinds: Sequence[Kind], only: Sequence[str]) -> list[Input]:
    kinds, found = {kind.name: kind for kind in all_kinds}, []
    for name in only:
        kind, _, number = name.partition("#")
        if kind not in kinds:
            sys.exit(f"no kind {kind!r}: {', '.join(kinds)}")
        found += [Input(kind=kinds[kind], number=n) for n in ([int(number)] if number else range(20))]
    return found


def _num_compared(outcomes: Sequence[Outcome], at_once: int) -> int:
    """Report some inputs once more in fresh interpreters, of which exit code and problems must be the same."""
    again = list(run_inputs([outcome.input for outcome in outcomes], at_once=at_once, fresh=True))
    found = {outcome.input.name: outcome for outcome in outcomes}
    for other in again:
        one = found[other.input.name]
        if (one.result.code, one.problems) != (other.result.code, other.problems):
            sys.exit(f"{one.input.name} differs in a fresh interpreter: {other.result.code}, {other.problems}")
    return len(again)


def _races(num_rounds: int) -> list[RaceOutcome]:
    def line(race: RaceOutcome) -> str:
        head = (
            f"{race.program}, {race.swapper} exchanged: {race.num_rounds} rounds, {race.num_hit} hit, "
            f"{race.num_exchanged} exchanges, exit codes {dict(race.codes)}, {len(race.problems)} problems"
        )
        return "\n  ".join([head, *race.problems[:_MAX_PROBLEMS]])

    preload()
    with tempfile.TemporaryDirectory(prefix="hpcpace-races-") as name:
        return _kept(all_races(num_rounds, Path(name)), line)


def _measured() -> list[Measured]:
    def line(one: Measured) -> str:
        peak = f"{one.most_bytes >> 20} MiB of {one.limit_bytes >> 20}"
        failed = "" if one.is_kept else ": FAILED"
        return f"{one.command} --memory {one.memory} of {one.what}: {peak}, exit {one.code}{failed}"

    with tempfile.TemporaryDirectory(prefix="hpcpace-memory-") as name:
        return _kept(measure(Path(name)), line)


def _write(
    outcomes: Sequence[Outcome],
    races: Sequence[RaceOutcome],
    measured: Sequence[Measured],
    hostile: Sequence[Outcome],
    *,
    args: argparse.Namespace,
    duration_s: float,
) -> None:
    lost = [f"{race.program}, {race.swapper}: {text}" for race in races if not race.is_naive for text in race.problems]
    write_page(
        "reliability-input",
        outcomes=outcomes,
        groups=by_group(outcomes),
        duration=minutes(duration_s),
        num_fresh=0 if args.fresh or args.only else _num_compared(outcomes[::_FRESH_EVERY], args.at_once),
        failed=_failures(outcomes),
        hostile=_hostile_section(hostile),
        races=races,
        lost_races=failures(lost),
        measured=measured,
    )


def _failures(outcomes: Sequence[Outcome]) -> str:
    return failures(f"`{one.input.name}`: {problem}" for one in outcomes for problem in one.problems)


def _hostile_section(outcomes: Sequence[Outcome]) -> str:
    values = {"outcomes": outcomes, "groups": by_group(outcomes), "failed": _failures(outcomes)}
    return page("reliability-input-hostile", num_each=max(one.input.number for one in outcomes) + 1, **values)


@dataclass(frozen=True, kw_only=True)
class Group:
    """A row of a table: the outcomes of some kinds, or of all."""

    name: str
    kinds: Sequence[Kind]
    outcomes: Sequence[Outcome]

    @property
    def num_passed(self) -> int:
        """Inputs without a problem."""
        return sum(not outcome.problems for outcome in self.outcomes)

    @property
    def times_s(self) -> tuple[float, float]:
        """Seconds that an input takes: the median, and the longest."""
        times_s = [outcome.result.wall_s for outcome in self.outcomes]
        return statistics.median(times_s), max(times_s)

    @property
    def cpu_s_per_mb(self) -> float:
        """The worst processor time of a hostile file for each megabyte."""
        return max(map(cpu_s_per_mb, self.outcomes))

    def num_codes(self, stop: int) -> list[int]:
        """Return how many ended with each exit code."""
        codes = [outcome.result.code for outcome in self.outcomes]
        return [*map(codes.count, range(stop))]


def by_group(outcomes: Sequence[Outcome]) -> list[Group]:
    """Return the rows of a table: one for each group of kinds, and one for all."""
    named: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        named.setdefault(outcome.input.kind.group, []).append(outcome)
    found = [*named.items(), ("all", outcomes)] if outcomes else []
    return [
        Group(name=name, kinds=list({one.input.kind.name: one.input.kind for one in some}.values()), outcomes=some)
        for name, some in found
    ]


if __name__ == "__main__":
    main()
