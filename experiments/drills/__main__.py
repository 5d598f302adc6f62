"""All drills, several times each: `make drills`. It needs root and Slurm, takes a while, and writes the document."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.drills.campaign import run_drill
from experiments.drills.document import write_document
from experiments.drills.kinds import DRILLS, Drill, Outcome

DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=[drill.name for drill in DRILLS], help="no document is written")
    parser.add_argument("--labs", type=int, default=2, help="drills at one time, each in a lab of its own")
    args = parser.parse_args()
    begin_s = time.monotonic()

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - begin_s:5.0f} s] {line}", flush=True)

    def run(drill: Drill) -> list[Outcome]:
        return run_drill(drill, repetitions=args.repetitions, tell=tell)

    drills = [drill for drill in DRILLS if not args.only or drill.name in args.only]
    with ThreadPoolExecutor(args.labs) as pool:
        outcomes = dict(zip(drills, pool.map(run, drills), strict=True))
    if not args.only:
        write_document(DOCUMENT, outcomes, duration_s=time.monotonic() - begin_s)
        print(f"written: {DOCUMENT}")
    failed = [drill.name for drill, done in outcomes.items() if not all(outcome.passed for outcome in done)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
