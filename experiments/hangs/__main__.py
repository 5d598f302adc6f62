"""Hangs of known kind on real ranks: is the verdict from their traces right, and in time? See docs/results/hang-matrix.md.

Results are added to a file, so that a run that was interrupted goes on where it stopped, and several can share one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from experiments.hangs.cells import CELLS
from experiments.hangs.document import write_document
from experiments.hangs.healthy import HEALTHY
from experiments.hangs.judge import Outcome, judge_cell, judge_healthy, outcomes_in

DOCUMENT = Path(__file__).parents[2] / "docs" / "hang-matrix.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3, help="how often to run each cell")
    parser.add_argument("--healthy", type=int, default=0, help="how many healthy jobs to run")
    parser.add_argument("--cells", nargs="+", choices=[cell.key for cell in CELLS], help="run only these")
    parser.add_argument("--results", type=Path, default=Path("hangs.jsonl"), help="add outcomes to this file")
    parser.add_argument("--write", type=Path, nargs="?", const=DOCUMENT, help="write the document from the results")
    args = parser.parse_args()
    cells = [cell for cell in CELLS if not args.cells or cell.key in args.cells]
    for turn in range(args.times):
        for cell in cells:
            if _num_done(args.results)[cell.key] <= turn:
                _tell(args.results, judge_cell(cell))
    for number in range(args.healthy):
        job = HEALTHY[number % len(HEALTHY)]
        if _num_done(args.results)[job.name] <= number // len(HEALTHY):
            _tell(args.results, judge_healthy(job))
    if args.write is not None:
        write_document(args.write, outcomes_in(args.results))
        print(f"written: {args.write}")


def _num_done(results: Path) -> Counter[str]:
    return Counter(outcome.cell for outcome in outcomes_in(results))


def _tell(results: Path, outcome: Outcome) -> None:
    with results.open("a") as file:
        file.write(outcome.line() + "\n")
    is_right = outcome.is_kind_right and outcome.are_ranks_right
    print("right" if is_right else "WRONG", outcome, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
