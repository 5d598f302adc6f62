"""Runs all benchmarks one after the other: `make bench`; each in a small size: `make bench-quick`.

Each is a module with its own main and prints its figures. Those of `--quick` mean nothing: it shows that the benchmarks
still run. `--gpu` runs those that measure on a GPU, on one GPU; no GPU has been at hand to run it yet.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from experiments.cases import read_toml

_LISTS = read_toml(__file__, "benches")
FULL, QUICK, GPU = (
    tuple(tuple(line.split()) for line in _LISTS[name].strip().splitlines()) for name in ("full", "quick", "gpu")
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="run each benchmark once in a small size")
    which.add_argument("--gpu", action="store_true", help="run the benchmarks for one GPU, on it")
    parser.add_argument(
        "--nanogpt", metavar="PATH", help="with --gpu: compare tokens/s with a checkout of nanoGPT, too"
    )
    args = parser.parse_args()
    if args.nanogpt and not args.gpu:
        parser.error("--nanogpt goes with --gpu")
    if args.gpu:
        from experiments.bench.models import require_gpus  # loads torch

        require_gpus(1)
    failed = []
    for row in QUICK if args.quick else GPU if args.gpu else FULL:
        words = [*row, *(["--nanogpt", args.nanogpt] if args.nanogpt and "tokens" in row else [])]
        print(f"== python -m experiments.bench.{' '.join(words)}", flush=True)
        begin_s = time.perf_counter()
        name, *options = words
        if subprocess.run([sys.executable, "-m", f"experiments.bench.{name}", *options], check=False).returncode:
            failed.append(" ".join(row[:2]))
        print(f"   {time.perf_counter() - begin_s:.0f} s", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
