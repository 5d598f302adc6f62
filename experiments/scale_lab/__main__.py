"""Predicts sizes that were not seen, and names what stops a job: `python -m experiments.scale_lab`.

Each set-up has one thing injected, at 1 to 32 hosts. The law of 1 to 8 hosts is held against 16 and 32: the measured
mean step time has to be in the printed interval, and the part that stops the job has to be the injected one. On
simulated jobs (--simulated, a few minutes), and on real ones in a lab (--lab: root and Slurm). Both are resumable.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.scale_lab.document import document, line
from experiments.scale_lab.in_lab import run_open
from experiments.scale_lab.judge import Judged, judge
from experiments.scale_lab.published import families
from experiments.scale_lab.setups import HELD_OUT, SETUPS, SIZES, Setup
from experiments.scale_lab.simulated import write_run

DOCUMENT = Path(__file__).parents[2] / "docs" / "scale-proof.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.scale_lab", description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="use simulated jobs")
    parser.add_argument("--lab", action="store_true", help="use real jobs in a lab of 32 hosts")
    parser.add_argument("--published", action="store_true", help="use published MLPerf results")
    parser.add_argument("--only", nargs="+", choices=[setup.name for setup in SETUPS], help="do only these set-ups")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder and resume there, not below /tmp")
    parser.add_argument("--timeout", type=float, default=3600.0, help="run jobs in the lab for this many seconds")
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name}")
    args = parser.parse_args()
    setups = [setup for setup in SETUPS if not args.only or setup.name in args.only]
    with tempfile.TemporaryDirectory(prefix="hpcpace-scale-", dir="/var/tmp") as temporary:
        folder = args.keep.resolve() if args.keep else Path(temporary)
        found: dict[str, list[Judged]] = {}
        if args.simulated:
            found["simulated"] = _simulated(folder / "simulated", setups)
        if args.lab:
            (folder / "lab").mkdir(parents=True, exist_ok=True)
            run_open(folder / "lab", setups, timeout_s=args.timeout)
            found["lab"] = _judged(folder / "lab", setups)
    if args.write:
        DOCUMENT.write_text(document(found, families() if args.published else []))
        print(f"written: {DOCUMENT}")


def _simulated(folder: Path, setups: Sequence[Setup]) -> list[Judged]:
    for number, setup in enumerate(setups):
        for size in (*SIZES, *HELD_OUT):
            path = folder / f"{setup.name}-{size}"
            if not path.exists():
                write_run(path, setup, size, seed=number)
    return _judged(folder, setups)


def _judged(folder: Path, setups: Sequence[Setup]) -> list[Judged]:
    found = []
    for setup in setups:
        if sum((folder / f"{setup.name}-{size}").exists() for size in SIZES) == len(SIZES):
            found.append(judge(folder, setup))
            print(line(found[-1]), flush=True)
    num_points = sum(len(one.points) for one in found)
    inside = sum(point.is_inside for one in found for point in one.points)
    named = sum(one.is_named for one in found)
    print(f"{inside} of {num_points} held-out sizes inside; {named} of {len(found)} parts named")
    return found


if __name__ == "__main__":
    main()
