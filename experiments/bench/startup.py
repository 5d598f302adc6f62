"""Compares the start of the command line with that of Python alone: `python -m experiments.bench.startup`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from experiments.bench.pairs import alternate


def _run_s(*arguments: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    args = parser.parse_args()
    pairs = alternate(lambda: _run_s("-m", "hpcpace", "--help"), lambda: _run_s("-c", "pass"), num_pairs=args.pairs)
    ratio, low, high = pairs.ratio()
    print(
        f"hpcpace --help: median {sorted(pairs.a)[len(pairs.a) // 2]:.3f} s, {ratio:.1f} times [{low:.1f}, {high:.1f}] "
        f"the start of Python alone ({args.pairs} pairs)"
    )


if __name__ == "__main__":
    main()
