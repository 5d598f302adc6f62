"""Makes hostile inputs, runs the command on each in a process of its own, and judges how it ended.

`python -m experiments.damage.hostile [--only NAME|FORMAT ...] [--inputs 20] [--keep FOLDER]`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments.damage.hostile import dumps, json_files, junk, kineto, nsys, texts, wia
from experiments.damage.hostile.engine import run_hostile

KINDS = (*texts.KINDS, *dumps.KINDS, *json_files.KINDS, *junk.KINDS, *kineto.KINDS, *nsys.KINDS, *wia.KINDS)
"""All kinds."""


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
        print(outcome.line(), flush=True)
    sys.exit(1 if not outcomes or any(outcome.problems for outcome in outcomes) else 0)


if __name__ == "__main__":
    main()
