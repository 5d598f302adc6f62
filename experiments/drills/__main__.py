"""Runs all drills several times: `make drills`. Needs root and Slurm, takes about 25 minutes, writes the document.

Options:
  --repetitions N  [5]
  --only DRILL...  run only these drills and write no document
  --labs N         run this many drills at a time, each in its own lab [2]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from experiments.drills.kinds import DRILLS, Drill, Outcome, run_drill
from experiments.jobs import teller
from experiments.options import command_line
from experiments.pages import counted, failures, minutes, table, write_page


def main() -> None:
    args = command_line(__doc__, only=[drill.name for drill in DRILLS])
    begin_s = time.monotonic()
    tell = teller(begin_s)

    def run(drill: Drill) -> list[Outcome]:
        return run_drill(drill, repetitions=args.repetitions, tell=tell)

    drills = [drill for drill in DRILLS if not args.only or drill.name in args.only]
    with ThreadPoolExecutor(args.labs) as pool:
        outcomes = dict(zip(drills, pool.map(run, drills), strict=True))
    if not args.only:
        _write(outcomes, time.monotonic() - begin_s)
    failed = [drill.name for drill, done in outcomes.items() if not all(outcome.passed for outcome in done)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _write(outcomes: Mapping[Drill, Sequence[Outcome]], duration_s: float) -> None:
    head = ("drill", "passed", "what is timed", "median", "worst", "limit", "lost records, median", "worst")
    write_page(
        "reliability",
        duration=minutes(duration_s),
        overview=table(head, [_row(drill, done) for drill, done in outcomes.items()]),
        num_misread=sum(outcome.num_misread for done in outcomes.values() for outcome in done),
        num_started=sum(len(done) + 1 for done in outcomes.values()),
        results={drill.name: _result(drill, done) for drill, done in outcomes.items()},
    )


def _row(drill: Drill, done: Sequence[Outcome]) -> list[str]:
    times_s = [outcome.time_s for outcome in done if outcome.time_s is not None]
    lost = [outcome.num_lost for outcome in done if outcome.num_lost is not None]
    return [
        drill.title,
        counted(outcome.passed for outcome in done),
        drill.timed,
        *((f"{statistics.median(times_s):.1f} s", f"{max(times_s):.1f} s") if times_s else ("unknown",) * 2),
        f"{drill.limit_s:g} s",
        *((f"{statistics.median(lost):g}", f"{max(lost)}") if lost else ("unknown",) * 2),
    ]


def _result(drill: Drill, done: Sequence[Outcome]) -> str:
    said = next((outcome.said for outcome in done if outcome.said), "nothing")
    failed = failures(problem for outcome in done for problem in outcome.problems)
    return f"Limit: {drill.limit}. From a log:\n\n```\n{said}\n```\n\n{failed}"


if __name__ == "__main__":
    main()
